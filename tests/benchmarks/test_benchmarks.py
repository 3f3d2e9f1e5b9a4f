"""The benchmark measures what it says, finds wrong bytes, and still runs."""

import doctest
import importlib
import importlib.util
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.cases import (
    CacheShape,
    Case,
    all_cases,
    check_target,
    merged_blocks,
)
from benchmarks.kvferry_side import KvferrySource
from benchmarks.nixl_side import why_missing
from benchmarks.prefixes import PrefixResults
from benchmarks.remote import Remote, RemoteError, WrongDataError
from benchmarks.report import command_of, describe_machine, take_turns
from benchmarks.transport_page import TransportResults, TransportRow, page
from kvferry.layouts.copier import expand
from kvferry.topology import plan_transfer

ROOT = Path(__file__).parents[2]
SHAPE = CacheShape(layers=2, kv_heads=2, head_size=8, block_size=4, tokens=24)


def test_the_command_of_results_names_no_path_of_a_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--rounds", "2", "--before", "/home/me/older one"])
    assert command_of("benchmarks") == "python -m benchmarks --rounds 2 --before 'older one'"


def row(case: Case, **seconds: tuple[float, ...]) -> TransportRow:
    named = {name.replace("_", " "): each for name, each in seconds.items()}
    return TransportRow(case=case, seconds=named, nbytes=SHAPE.transfer_bytes)


def results_of(*rows: TransportRow) -> TransportResults:
    return TransportResults(
        command="python -m benchmarks",
        rounds=3,
        machine=describe_machine(),
        shape=SHAPE,
        nixl_skipped=None,
        load_after=1.0,
        stores=(1e-4, 2e-4),
        rows=tuple(rows),
    )


@pytest.mark.parametrize("module", ["cases", "transport_page", "report"])
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
    found = row(case, shm=(1.0, 2.0, 10.0), nixl_shm=(4.0, 9.0, 60.0))
    found.seconds["nixl shm, num_threads=2"] = (3.0, 8.0, 50.0)
    text = page(results_of(found))
    assert "| 4.00 (3.00–5.00) ≥ 3 |" in text
    assert "nixl shm, num_threads=2." in text  # what won


def test_a_missed_goal_is_bold():
    case = Case("NHD", "HND", shuffled=False, threads=1)
    assert "| **0.45 (0.45–0.45) ≥ 0.85** |" in page(
        results_of(row(case, shm=(2.0,), memmove=(0.9,)))
    )
    assert "| 0.90 (0.90–0.90) ≥ 0.85 |" in page(results_of(row(case, shm=(1.0,), memmove=(0.9,))))


def test_another_contender_begins_each_round_and_the_first_round_does_not_count():
    asked = []

    def measure(name):
        asked.append(name)
        return float(len(asked))

    found = take_turns({name: partial(measure, name) for name in "ab"}, 2)
    assert asked == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": (4.0, 5.0), "b": (3.0, 6.0)}


def test_a_call_that_fails_in_its_process_says_where():
    with Remote("source", KvferrySource, SHAPE, (1,), env={}) as remote:
        with pytest.raises(RemoteError, match=r"(?s)source: .*no_such_method"):
            remote.call("no_such_method")
        assert "socket" in remote.call("offer").bare  # the process goes on


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
    names = ("transports", "prefixes")
    parts = [f"--only={name}" for name in names]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path), *parts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = msgspec.json.decode(
        (tmp_path / "transports.json").read_bytes(), type=TransportResults
    )
    assert [row.case for row in results.rows] == all_cases()
    expected = {"memmove", "torch copy", "socket", "shm", "vm", "tcp"}
    expected |= {"process_vm_readv", "process_vm_readv, shared out"}
    if importlib.util.find_spec("cryptography") is not None:
        expected |= {"tls", "tcp encrypted"}
    if why_missing() is None:
        expected |= {"nixl shm", "nixl tcp"}
        assert results.nixl_skipped is None
    else:
        assert str(results.nixl_skipped) in ran.stdout
    for found in results.rows:
        assert expected <= found.seconds.keys()
        assert {len(each) for each in found.seconds.values()} == {2}
        assert all(min(each) > 0 for each in found.seconds.values())
    assert (tmp_path / "transports.png").stat().st_size > 10_000
    known = msgspec.json.decode((tmp_path / "prefixes.json").read_bytes(), type=PrefixResults)
    assert known.blocks > 0
    assert known.evictions.requests > 0
    assert known.evictions.differing == 0
    text = (tmp_path / "TRANSPORTS.md").read_text()
    assert all(str(case) in text for case in all_cases())
    assert "A quick run" in text
    assert "stores around the cache" in text


def test_a_run_without_nixl_says_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "make bench" in str(why_missing())
