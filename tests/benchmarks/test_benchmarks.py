"""The benchmark measures what it says, finds wrong bytes, and still runs."""

import doctest
import importlib
import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.cases import (
    CacheShape,
    Case,
    WrongDataError,
    all_cases,
    check_target,
    merged_blocks,
)
from benchmarks.figures import Row, compare
from benchmarks.kvferry_side import KvferrySource
from benchmarks.machine import command_of, describe_machine
from benchmarks.nixl_side import why_missing
from benchmarks.paged import PagedResults, all_bursts
from benchmarks.planning import PlanningResults
from benchmarks.prefixes import PrefixResults
from benchmarks.remote import Remote, RemoteError
from benchmarks.report import Results, markdown, missed
from benchmarks.samples import Sample
from kvferry.layouts.copier import expand
from kvferry.topology import plan_transfer

ROOT = Path(__file__).parents[2]
SHAPE = CacheShape(layers=2, kv_heads=2, head_size=8, block_size=4, tokens=24)


def row(contender: str, family: str, *seconds: float) -> Row:
    samples = tuple(Sample(each) for each in seconds)
    return Row(
        contender=contender,
        family=family,
        samples=samples,
        source_cpu=(0.0, 0.0),
        reader_cpu=(0.0, 0.0),
    )


def test_the_command_of_results_names_no_path_of_a_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--rounds", "2", "--before", "/home/me/older one"])
    assert command_of("benchmarks") == "python -m benchmarks --rounds 2 --before 'older one'"


def results_of(*cases, quick: bool = False) -> Results:
    return Results(
        command="python -m benchmarks",
        rounds=3,
        machine=describe_machine(),
        shape=SHAPE,
        nixl_skipped=None,
        load_after=1.0,
        quick=quick,
        transports=tuple(cases),
    )


@pytest.mark.parametrize("module", ["cases", "figures"])
def test_doctests_of_the_benchmarks_hold(module):
    tested = doctest.testmod(importlib.import_module(f"benchmarks.{module}"))
    assert tested.attempted > 0
    assert tested.failed == 0


@pytest.mark.parametrize("case", all_cases(threads=(1,)), ids=str)
def test_the_check_accepts_a_right_transfer_and_finds_one_wrong_cell(case):
    known = SHAPE.known_cells()
    source, target = (np.zeros(SHAPE.region_bytes, dtype=np.uint8) for _ in range(2))
    SHAPE.cells(source, case.source_layout)[:] = known
    source_table, target_table = case.block_tables(SHAPE)
    SHAPE.cells(target, case.target_layout)[:, :, target_table] = known[:, :, source_table]
    check_target(SHAPE, case, target, known)

    one = target.copy()
    SHAPE.cells(one, case.target_layout)[1, 0, 3, 2, 1, 5] ^= 1
    with pytest.raises(WrongDataError, match=r"1 of .* layer 1 .* k, block 3, token 2, head 1"):
        check_target(SHAPE, case, one, known)

    null = target.copy()
    SHAPE.cells(null, case.target_layout)[0, 1, 0, 0, 0, 0] = 1
    with pytest.raises(WrongDataError, match="null block"):
        check_target(SHAPE, case, null, known)


@pytest.mark.parametrize("shuffled", [False, True])
def test_nixl_gets_the_descriptors_that_our_copier_would_copy(shuffled):
    case = Case("NHD", "NHD", shuffled, 1)
    geometry = SHAPE.geometry("NHD")
    plan = plan_transfer(source=geometry, target=geometry)
    memory = geometry.memory(0, SHAPE.blocks)
    copies = plan.bind(*case.block_tables(SHAPE), SHAPE.tokens)
    ours = expand(plan.lower({0: memory}, memory)[0], copies.runs_of(0))
    columns = (ours[name].tolist() for name in ("source_offset", "target_offset", "nbytes"))
    theirs = (column.tolist() for column in merged_blocks(SHAPE, case))
    assert sorted(zip(*columns, strict=True)) == sorted(zip(*theirs, strict=True))


@pytest.mark.parametrize(("x", "y"), [(2, 3), (4, 1)])
def test_the_three_pass_permute_turns_blocks_in_place_and_leaves_others(x, y):
    torch = pytest.importorskip("torch")
    from benchmarks.nixl_side import permute

    cache = torch.arange(5 * x * y * 2).reshape(5, x, y, 2)
    before = cache.clone()
    permute(cache, torch.tensor([3, 1]))
    for block in (1, 3):
        assert torch.equal(cache[block], before[block].reshape(y, x, 2).transpose(0, 1))
    assert torch.equal(cache[[0, 2, 4]], before[[0, 2, 4]])


def test_the_fastest_of_a_family_counts_and_ratios_are_taken_round_by_round():
    case = Case("NHD", "NHD", shuffled=True, threads=2)
    result = compare(
        case,
        [
            row("shm", "shm", 1.0, 2.0, 10.0),
            row("nixl shm", "nixl shm", 4.0, 9.0, 60.0),
            row("nixl shm, num_threads=2", "nixl shm", 3.0, 8.0, 50.0),
        ],
    )
    (ratio,) = result.ratios
    assert (ratio.ours, ratio.theirs, ratio.goal) == ("shm", "nixl shm", 3.0)
    assert (ratio.median, ratio.low, ratio.high) == (4.0, 3.0, 5.0)
    assert ratio.met


def test_a_missed_goal_gets_a_sentence_that_says_by_how_much():
    case = Case("NHD", "HND", shuffled=False, threads=1)
    slow = compare(case, [row("shm", "shm", 2.0), row("memmove", "memcpy", 0.9)])
    (sentence,) = missed(results_of(slow))
    assert "shm / memcpy, NHD→HND, in order, 1 thread: 0.45 of 0.85, short by 47%" in sentence
    assert sentence in markdown(results_of(slow))

    fast = compare(case, [row("shm", "shm", 1.0), row("memmove", "memcpy", 0.9)])
    assert missed(results_of(fast)) == []
    assert "All that were measured are met." in markdown(results_of(fast))
    assert missed(results_of(slow, quick=True)) == []


def test_a_call_that_fails_in_its_process_says_where():
    with Remote("source", KvferrySource, SHAPE, (1,), env={}) as remote:
        with pytest.raises(RemoteError, match=r"(?s)source: .*no_such_method"):
            remote.call("no_such_method")
        assert len(remote.call("offer").tcp) == 1  # the process goes on


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.processes
def test_suspended_processes_end_with_a_parent_that_is_killed():
    script = (
        "import time\n"
        "from benchmarks.kvferry_side import KvferrySource\n"
        "from benchmarks.cases import CacheShape\n"
        "from benchmarks.remote import Remote\n"
        "if __name__ == '__main__':\n"
        "    remote = Remote('source', KvferrySource, CacheShape(2, 2, 8, 4, 24), (1,), env={})\n"
        "    remote.suspend()\n"
        "    print(remote.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        child = int(parent.stdout.readline())
        assert _is_running(child)
        parent.send_signal(signal.SIGKILL)
    for _ in range(1200):
        if not _is_running(child):
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} outlived its parent")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen processes are started, which a busy machine takes a while to do
def test_a_quick_run_measures_everything_and_writes_its_results(tmp_path):
    for package in ("matplotlib", "torch"):
        pytest.importorskip(package)
    # The managers are in test_managers.py.
    names = ("transports", "bind", "confirm", "planning", "prefixes", "paged")
    parts = [f"--only={name}" for name in names]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path), *parts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = msgspec.json.decode((tmp_path / "transport.json").read_bytes(), type=Results)
    assert [case.case for case in results.transports] == all_cases()
    expected = {"memmove", "torch copy", "socket", "shm", "vm", "tcp"}
    expected |= {"process_vm_readv", "process_vm_readv, shared out"}
    if importlib.util.find_spec("cryptography") is not None:
        expected |= {"tls", "tcp encrypted"}
    if why_missing() is None:
        expected |= {"nixl shm", "nixl tcp", "nixl (staged) shm", "nixl (staged) tcp"}
        assert results.nixl_skipped is None
    else:
        assert results.nixl_skipped in ran.stdout
    for case in results.transports:
        placed = {f"nixl (placed) {path}" for path in ("shm", "tcp")}
        with_placed = why_missing() is None and not case.case.mismatched
        wanted = expected | (placed if with_placed else set())
        wanted |= {"process_vm_readv, blocks"} if case.case.shuffled else set()
        assert wanted <= {row.contender for row in case.rows}
        assert {len(row.samples) for row in case.rows} == {2}
        assert all(sample.seconds > 0 for row in case.rows for sample in row.samples)
    assert {bind.tokens for bind in results.bind} == {4096, 32768}
    assert {confirm.case for confirm in results.confirm} == {"one by one", "all at once"}
    assert (tmp_path / "transport.png").stat().st_size > 10_000
    planned = msgspec.json.decode((tmp_path / "planning.json").read_bytes(), type=PlanningResults)
    assert {plan.ranks for plan in planned.plans} == {64, 128}
    assert all(plan.pieces >= plan.pairs >= plan.ranks for plan in planned.plans)
    assert {bind.tokens for bind in planned.binds} == {1024, 4096}
    assert (tmp_path / "planning.png").stat().st_size > 10_000
    known = msgspec.json.decode((tmp_path / "prefixes.json").read_bytes(), type=PrefixResults)
    assert known.blocks > 0
    assert {choice.tokens for choice in known.choices} == {1024, 4096, 16_384, 32_768}
    assert len(known.delays) == 3
    assert known.evictions.requests > 0
    assert known.evictions.differing == 0
    paged = msgspec.json.decode((tmp_path / "paged.json").read_bytes(), type=PagedResults)
    assert [row.burst for row in paged.rows] == all_bursts(8192, 64)
    taking_part = {"memcpy", "shm", "process_vm_readv", "vm", "sockets", "tcp"}
    for row in paged.rows:
        fits = row.burst.requests * row.burst.tokens <= row.burst.pool
        assert row.seconds.keys() >= taking_part if fits else not row.seconds
        assert {len(each) for each in row.seconds.values()} <= {2}
    assert (tmp_path / "paged.png").stat().st_size > 10_000
    page = (tmp_path / "RESULTS.md").read_text()
    assert all(str(case) in page for case in all_cases())
    assert "A quick run" in page
    assert "stores around the cache" in page


def test_a_run_without_nixl_says_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "make bench" in why_missing()
