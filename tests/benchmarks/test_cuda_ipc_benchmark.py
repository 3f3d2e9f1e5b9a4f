"""The benchmark of CUDA IPC, with host memory in the place of a GPU's."""

import msgspec
import pytest

from benchmarks import cuda_ipc
from benchmarks.cuda_ipc import CONTENDERS, IpcCase, IpcReader, IpcResults, IpcRow, IpcSource
from benchmarks.machine import describe_machine
from kvferry.testing.host_device import HostIpcTransport

CASE = IpcCase(model="small", layers=2, heads=2, head_size=8, block_size=4, tokens=30, requests=2)


def results_of(rows, quick=False):
    return IpcResults(
        command="python -m benchmarks.gpu",
        rounds=2,
        machine=describe_machine(),
        device_name="a GPU",
        quick=quick,
        rows=rows,
    )


def row(copy, same, mismatched):
    seconds = dict(zip(CONTENDERS, ((copy,), (same,), (mismatched,)), strict=True))
    return IpcRow(case=CASE, seconds=seconds)


@pytest.mark.processes
def test_two_processes_are_measured_and_what_arrived_is_checked():
    (measured,) = cuda_ipc.measure(HostIpcTransport, [CASE], 2, print)
    assert {name: len(each) for name, each in measured.seconds.items()} == dict.fromkeys(
        CONTENDERS, 2
    )
    assert CASE.nbytes == 2 * 8 * 4 * 2 * 2 * 2 * 8 * 2


def test_wrong_bytes_are_found(monkeypatch):
    source = IpcSource(HostIpcTransport, CASE.region_bytes)
    reader = IpcReader(HostIpcTransport, source.endpoint(), CASE.region_bytes)
    try:
        reader.check(CASE, "mismatched")
        monkeypatch.setattr(reader, "_read", lambda tiles, runs: 0.0)
        with pytest.raises(cuda_ipc.WrongDataError, match=r"small.*mismatched"):
            reader.check(CASE, "mismatched")
    finally:
        reader.close()
        source.close()


def test_goals_are_judged_per_layout_and_not_after_a_quick_run():
    rows = (row(0.8, 1.0, 1.01),)
    (line,) = cuda_ipc.missed(results_of(rows))
    assert "mismatched: 0.79 of the copy's rate, the goal is 0.8" in line
    assert cuda_ipc.missed(results_of(rows, quick=True)) == []


def test_the_page_and_the_figures_are_written(tmp_path):
    results = results_of((row(1.0, 1.0, 1.0),))
    cuda_ipc.write(results, tmp_path)
    page = (tmp_path / "CUDA_IPC.md").read_text()
    assert "small, 30 tokens, block 4" in page
    assert "All are met." in page
    read = msgspec.json.decode((tmp_path / "cuda_ipc.json").read_bytes(), type=IpcResults)
    assert read == results


def test_cases_that_do_not_fit_in_the_gpu_are_left_out():
    assert cuda_ipc.gpu_cases(0, quick=False) == []
    some, all_ = (cuda_ipc.gpu_cases(free, quick=False) for free in (4 << 30, 1 << 40))
    assert 0 < len(some) < len(all_)
    assert len(cuda_ipc.gpu_cases(1 << 40, quick=True)) == 3
