"""The benchmark of CUDA IPC, with host memory in the place of a GPU's."""

import msgspec
import pytest

from benchmarks import cuda_ipc, device_wires, host_part, nixl_side
from benchmarks.cases import CacheShape
from benchmarks.cuda_ipc import NIXL, IpcCase, IpcReader, IpcResults, IpcRow, IpcSource
from benchmarks.remote import WrongDataError
from benchmarks.report import Run, describe_machine
from kvferry.testing.host_device import HostCopyStream, HostIpcTransport

CASE = IpcCase(model="small", shape=CacheShape(2, 2, 8, block_size=4, tokens=30))


def results_of(rows):
    return IpcResults(
        command="python -m benchmarks.gpu",
        rounds=2,
        machine=describe_machine(),
        device_name="a GPU",
        rows=rows,
    )


def row(copy, same, mismatched):
    seconds: dict[str, tuple[float, ...]] = {
        "copy": (copy,),
        "same layout": (same,),
        "mismatched": (mismatched,),
        "three passes": (copy,),
    }
    return IpcRow(case=CASE, seconds=seconds, nbytes=CASE.shape.transfer_bytes)


def assert_all_are_measured(missing):
    (measured,) = cuda_ipc.measure(HostIpcTransport, [CASE], 2, print)
    assert {name: len(each) for name, each in measured.seconds.items()} == {
        name: 2 for name in cuda_ipc.CONTENDERS if name not in missing
    }


@pytest.mark.slow
@pytest.mark.skipif(bool(nixl_side.why_missing()), reason="the package nixl is not installed")
def test_nixl_is_measured_and_checked_in_processes_of_its_own():
    assert_all_are_measured(())


@pytest.mark.processes
def test_two_processes_are_measured_and_what_arrived_is_checked(monkeypatch):
    monkeypatch.setattr(nixl_side, "why_missing", lambda: "not here")
    assert_all_are_measured(NIXL)


def test_wrong_bytes_are_found(monkeypatch):
    source = IpcSource(HostIpcTransport, *[CASE.shape.region_bytes] * 2)
    reader = IpcReader(HostIpcTransport, source.endpoint(), CASE.shape.region_bytes)
    try:
        reader.check(CASE, "mismatched")
        monkeypatch.setattr(reader, "_read", lambda tiles, runs: 0.0)
        with pytest.raises(WrongDataError, match=r"small.*mismatched"):
            reader.check(CASE, "mismatched")
    finally:
        reader.close()
        source.close()


def test_the_page_and_the_figures_are_written(tmp_path):
    results = results_of((row(0.8, 1.0, 1.01),))
    Run("benchmarks.gpu", tmp_path).publish("cuda_ipc", results, cuda_ipc.page)
    page = (tmp_path / "CUDA_IPC.md").read_text()
    assert "small, 30 tokens, block 4" in page
    assert "| 0.80 (0.80–0.80) ≥ 0.8 | **0.79 (0.79–0.79) ≥ 0.8** |" in page
    assert "| – | – |" in page  # NIXL was not measured
    read = msgspec.json.decode((tmp_path / "cuda_ipc.json").read_bytes(), type=IpcResults)
    assert read == results


def test_cases_that_do_not_fit_in_the_gpu_are_left_out():
    assert cuda_ipc.gpu_cases(0, quick=False) == []
    some, all_ = (cuda_ipc.gpu_cases(free, quick=False) for free in (4 << 30, 1 << 40))
    assert 0 < len(some) < len(all_)
    assert len(cuda_ipc.gpu_cases(1 << 40, quick=True)) == 3


@pytest.mark.slow
def test_the_host_part_is_timed_without_a_gpu():
    pytest.importorskip("triton")
    header, *rows = host_part.measure(rounds=1)
    assert header[:2] == ("layouts", "tokens")
    assert len(rows) == len(host_part.PAIRS)
    tables, launches = header.index("tables"), header.index("number")
    for row in rows:
        assert float(row[tables]) == 0  # they lie on the device since the engines met
        assert row[launches] == ("2" if row[1] == "32,768" else "1")
        assert all(float(each) > 0 for each in row[2:] if each != row[tables])


@pytest.mark.slow
def test_the_host_part_of_postprocessors_is_timed_without_a_gpu():
    pytest.importorskip("triton")
    header, *rows = host_part.measure_postprocess(rounds=1)
    assert [row[1] for row in rows] == ["32", "256", "2,048"]
    assert all(len(row) == len(header) and float(min(row[2:], key=float)) > 0 for row in rows)


@pytest.mark.slow
def test_the_host_part_of_chunks_and_pieces_is_timed_without_a_gpu():
    pytest.importorskip("triton")
    header, *rows = host_part.measure_wires(rounds=1)
    assert header[2:] == ("chunk placed", "piece packed")
    assert [row[:2] for row in rows] == [("NHD to NHD", "4,096"), ("HND to NHD", "4,096")]
    assert all(float(each) > 0 for row in rows for each in row[2:])


def test_chunks_and_pieces_of_a_device_stand_beside_an_upload(tmp_path):
    rows = device_wires.measure(HostCopyStream, CASE, rounds=2)
    assert [row.label for row in rows] == [
        f"{CASE.label}, {name}" for name in ("same layout", "mismatched")
    ]
    assert all(
        len(values) == 2 and min(values) > 0 for row in rows for values in row.seconds.values()
    )
    run = Run("benchmarks.gpu", tmp_path, rounds=2)
    text = device_wires.page(run.results(device_wires.WireResults, rows=rows))
    assert "| read | upload | placed | packed |" in text
    assert text.count("(1.00)") >= len(rows)
