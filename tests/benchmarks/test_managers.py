"""The cache managers' benchmark times what it says, and judges its goals row by row."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.machine import describe_machine
from benchmarks.managers import (
    CASES,
    QUICK_LOAD,
    ManagerResults,
    ManagerRow,
    markdown,
    missed,
)
from benchmarks.peers.kvferry_peer import KvferryPeer
from benchmarks.peers.process import PYTHONS, PeerError, PeerProcess
from benchmarks.peers.speed import OPERATIONS, Busy, bytes_per_block, make_setup

ROOT = Path(__file__).parents[2]


def row(operation: str, ours: tuple[float, ...], theirs: tuple[float, ...]) -> ManagerRow:
    return ManagerRow(case="one group", operation=operation, ours=ours, theirs=theirs)


def results_of(*rows: ManagerRow, quick: bool = False) -> ManagerResults:
    return ManagerResults(
        command="python -m benchmarks --only managers",
        rounds=3,
        machine=describe_machine(),
        load=QUICK_LOAD,
        quick=quick,
        rows=rows,
        our_bytes={"unused": 1.0, "cached": 2.0},
        their_bytes={"unused": 1.0, "cached": 2.0},
    )


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    assert row("free", (1.0, 2.0, 4.0), (3.0, 2.0, 8.0)).ratio == 2.0


def test_a_row_and_the_mean_are_judged_apart():
    fast, slow = row("lookup", (1.0,), (9.0,)), row("free", (1.0,), (1.1,))
    (sentence,) = missed(results_of(fast, slow))
    assert "free: 1.10 times vLLM" in sentence
    assert sentence in markdown(results_of(fast, slow))
    assert len(missed(results_of(slow))) == 2
    assert missed(results_of(fast)) == missed(results_of(slow, quick=True)) == []


@pytest.mark.parametrize("case", CASES)
def test_a_round_leaves_what_is_live_and_takes_new_blocks_from_the_prefix_cache(case):
    setup = make_setup(CASES[case], QUICK_LOAD, rounds=2)
    peer = KvferryPeer(setup)
    busy = Busy(peer, QUICK_LOAD)
    pool = peer.manager.block_pool
    never_used = [block for block in pool.blocks if not block.block_hash and not block.ref_cnt]
    assert len(never_used) < 0.1 * setup.num_blocks
    before = pool.get_num_free_blocks()
    seconds = busy.round()
    assert set(seconds) == set(OPERATIONS)
    assert all(each > 0 for each in seconds.values())
    grown = len(setup.groups) * QUICK_LOAD.live
    assert before - grown <= pool.get_num_free_blocks() <= before + grown


def test_memory_per_block_counts_more_once_blocks_are_cached():
    counted = bytes_per_block(KvferryPeer)
    assert 50 < counted["unused"] < counted["cached"] < 500


def test_a_missing_environment_is_an_error_that_says_how_to_make_it(monkeypatch):
    monkeypatch.setitem(PYTHONS, "vllm", ROOT / ".venv-nowhere" / "bin" / "python")
    with pytest.raises(PeerError, match="make test-rest"):
        PeerProcess("vllm")


@pytest.mark.processes
@pytest.mark.slow
def test_a_quick_run_compares_the_managers_and_writes_its_results(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only=managers", f"--out={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = msgspec.json.decode((tmp_path / "managers.json").read_bytes(), type=ManagerResults)
    assert [(each.case, each.operation) for each in results.rows] == [
        (case, operation) for case in CASES for operation in OPERATIONS
    ]
    assert {len(each.ours) for each in results.rows} == {2}
    assert "A quick run" in (tmp_path / "MANAGERS.md").read_text()
    assert not (tmp_path / "transport.json").exists()
