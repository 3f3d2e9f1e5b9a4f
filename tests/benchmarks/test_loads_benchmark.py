"""The benchmark of short loads compares equal work, finds wrong bytes, and says what was missed."""

import random
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.loads.measure import LoadsResults, LoadsRow, measure, timing
from benchmarks.loads.nixl_pair import descriptors
from benchmarks.loads.process import ROOT, LoadsError, Side, install
from benchmarks.loads.report import markdown, missed, write
from benchmarks.loads.shared import NUM_BLOCKS, Cache, KnownBlocks, WrongBytesError, draw_table
from benchmarks.machine import describe_machine
from benchmarks.nixl_side import why_missing

CACHE = Cache(layers=2, heads=1, head_size=8)


def row(transport: str, tokens: int, **contenders: tuple[float, ...]) -> LoadsRow:
    """One load a round, of so many seconds."""
    return LoadsRow(
        transport=transport,
        cache="2 × 1 × 8",
        tokens=tokens,
        nbytes=1,
        busy=True,
        timings={
            name: timing([[(each, 0.0, 0.0)] for each in seconds])
            for name, seconds in contenders.items()
        },
    )


def results_of(*rows: LoadsRow, quick: bool = False) -> LoadsResults:
    return LoadsResults(
        command="python -m benchmarks --only loads",
        rounds=3,
        machine=describe_machine(),
        load_after=1.0,
        base="abc",
        quick=quick,
        rows=rows,
    )


def test_ratios_are_taken_by_round_and_nixls_faster_way_counts():
    found = row("tcp", 256, kvferry=(1.0, 2.0, 4.0), before=(3.0, 8.0, 8.0), slow=(9.0,) * 3)
    assert found.before is not None
    assert found.ratio(found.before) == 3.0
    both = row("tcp", 256, kvferry=(1.0,), slow=(9.0,), fast=(5.0,))
    assert both.nixl == both.timings["fast"]
    assert both.before is None


def test_each_goal_that_is_missed_gets_a_sentence():
    rows = (
        row("shm", 16, kvferry=(2.0,), before=(2.0,), NIXL=(3.0,)),
        row("shm", 256, kvferry=(2.0,), before=(4.0,), NIXL=(3.0,)),
        row("tcp", 16, kvferry=(2.0,), before=(4.0,), NIXL=(1.0,)),
    )
    assert missed(results_of(*rows)) == [
        "shm, 2 × 1 × 8, 16 tokens, busy: 1.00 times the commit before, the goal is 1.5",
        "shm, 2 × 1 × 8, 16 tokens, busy: 1.50 times NIXL's READ, the goal is 2",
        "tcp, 2 × 1 × 8, 16 tokens, busy: 0.50 times NIXL's READ, the goal is 1",
    ]
    assert missed(results_of(*rows))[1] in markdown(results_of(*rows))
    assert missed(results_of(*rows, quick=True)) == []


@pytest.mark.parametrize("tokens", [16, 40])
def test_nixls_descriptors_are_the_bytes_of_a_load(tokens):
    memory = [np.zeros(CACHE.nbytes, dtype=np.uint8) for _ in range(2)]
    KnownBlocks(CACHE, memory[0]).fill()
    tables = [draw_table(random.Random(seed), tokens) for seed in range(2)]
    source, target = (descriptors(CACHE, 0, table, tokens).tolist() for table in tables)
    assert sum(nbytes for _, nbytes, _ in source) == CACHE.load_bytes(tokens)
    for (there, nbytes, _), (here, same, _) in zip(source, target, strict=True):
        assert nbytes == same
        memory[1][here : here + nbytes] = memory[0][there : there + nbytes]
    KnownBlocks(CACHE, memory[1]).check(*tables, tokens)
    assert not memory[1].any()  # the next load begins with nothing


def test_one_wrong_byte_is_found():
    memory = np.zeros(CACHE.nbytes, dtype=np.uint8)
    blocks = KnownBlocks(CACHE, memory)
    blocks.fill()
    blocks_of_v = memory.reshape(CACHE.layers * 2, NUM_BLOCKS, -1)[3]
    blocks_of_v[5, CACHE.token_bytes - 1] ^= 1
    with pytest.raises(WrongBytesError, match="V of layer 1, block 1 of 17 tokens"):
        blocks.check([4, 5], [4, 5], 17)


@pytest.mark.processes
def test_wrong_bytes_and_errors_of_a_process_end_the_benchmark(tmp_path):
    installed = install(ROOT, tmp_path / "now")
    sides = [Side(installed, "shm", name, "shm", CACHE) for name in ("Prefill", "Decode")]
    prefill, decode = sides
    try:
        for side in sides:
            side.wait_until_open()
        ((request_id, params, table),) = prefill.call("lend", 16, 1)
        claimed = [table[0] % (NUM_BLOCKS - 1) + 1]
        with pytest.raises(LoadsError, match="Decode: wrong bytes: K of layer 0"):
            decode.call("load", [(request_id, params, claimed)], 16, 0)
        with pytest.raises(LoadsError, match=r"(?s)Prefill: error: .*no_such_method"):
            prefill.call("no_such_method")
    finally:
        for side in sides:
            side.close()


@pytest.mark.processes
def test_a_quick_run_measures_this_and_another_checkout_and_writes_it(tmp_path):
    found = measure(
        "test",
        describe_machine(),
        2,
        True,
        lambda text: None,
        base=ROOT,
        nixl=False,
        transports=["shm"],
    )
    assert [(each.tokens, each.busy) for each in found.rows] == [
        (16, False),
        (16, True),
        (256, False),
        (256, True),
    ]
    for each in found.rows:
        assert each.timings.keys() == {"kvferry", "before"}
        for timed in each.timings.values():
            assert (len(timed.rounds), timed.loads) == (2, 4)
            assert 0 < timed.called <= timed.median <= timed.p99
    write(found, tmp_path)
    written = msgspec.json.decode((tmp_path / "loads.json").read_bytes(), type=LoadsResults)
    assert written == found
    assert "A quick run" in (tmp_path / "LOADS.md").read_text()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)  # two dozen processes are started
def test_a_quick_run_of_the_command_takes_nixl_in(tmp_path):
    options = ["--quick", "--only=loads", f"--out={tmp_path}"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = msgspec.json.decode((tmp_path / "loads.json").read_bytes(), type=LoadsResults)
    transports = {each.transport for each in found.rows}
    if why_missing() is None:
        assert transports == {"shm", "vm", "tcp", "nixl", "nixl over TCP"}
        assert all(each.nixl for each in found.rows)
    else:
        assert transports == {"shm", "vm", "tcp"}
    assert "NIXL" in (tmp_path / "LOADS.md").read_text()
