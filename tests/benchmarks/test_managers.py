"""The cache managers' benchmark times what it says, and judges its goals row by row."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.managers import (
    CASES,
    QUICK_LOAD,
    ManagerResults,
    ManagerRow,
    page,
)
from benchmarks.peers.kvferry_peer import KvferryPeer
from benchmarks.peers.process import PYTHONS, start_peer
from benchmarks.peers.speed import OPERATIONS, Busy, bytes_per_block, make_setup
from benchmarks.remote import RemoteError
from benchmarks.report import describe_machine

ROOT = Path(__file__).parents[2]


def row(operation: str, ours: tuple[float, ...], theirs: tuple[float, ...]) -> ManagerRow:
    seconds = {"kvferry": ours, "vllm": theirs}
    return ManagerRow(case="one group", operation=operation, seconds=seconds)


def results_of(*rows: ManagerRow) -> ManagerResults:
    return ManagerResults(
        command="python -m benchmarks --only managers",
        rounds=3,
        machine=describe_machine(),
        load=QUICK_LOAD,
        rows=rows,
        memory={name: {"unused": 1.0, "cached": 2.0} for name in ("kvferry", "vllm")},
    )


def test_a_ratio_is_of_one_round_and_the_mean_is_of_all_rows():
    fast, slow = row("lookup", (1.0,), (9.9,)), row("free", (1.0, 2.0, 4.0), (3.0, 2.2, 1.0))
    text = page(results_of(fast, slow))
    assert "| 9.90 (9.90–9.90) ≥ 2 |" in text
    assert "| **1.10 (0.25–3.00) ≥ 2** |" in text
    assert "geometric mean of the ratios: 3.30 (goal 2)" in text


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
    with pytest.raises(RemoteError, match="make test-rest"):
        start_peer("vllm")


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
    assert {len(each.seconds["kvferry"]) for each in results.rows} == {2}
    assert "A quick run" in (tmp_path / "MANAGERS.md").read_text()
    assert not (tmp_path / "transports.json").exists()
