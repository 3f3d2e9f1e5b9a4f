"""The benchmark of the postprocessor compares the same work, and says what was missed."""

import msgspec
import pytest

from benchmarks import gpu, postprocess
from benchmarks.machine import describe_machine


def results(seconds, *, quick=False):
    case = postprocess.cpu_cases(quick=False)[0]
    row = postprocess.PostprocessRow(case=case, seconds=seconds)
    return postprocess.PostprocessResults(
        command="test",
        rounds=3,
        machine=describe_machine(),
        device="cpu",
        device_name="host memory",
        quick=quick,
        rows=(row,),
    )


FAST = {
    "three passes": (6.0, 5.0, 7.0),
    "copy": (2.0, 2.0, 2.0),
    "streamed copy": (1.0, 1.0, 1.0),
    "one pass": (0.9, 0.9, 1.0),
    "kvferry": (1.0, 1.0, 1.0),
}


def test_ratios_are_medians_over_rounds_and_the_share_of_the_ceiling_is_judged():
    met = results(FAST)
    assert postprocess.missed(met) == []
    page = postprocess.markdown(met)
    assert "0.90 (0.90–1.00) ≥ 0.85 | 6.00 | 6.67" in page
    assert "in 0 of 1 rows" in page
    slow = results(FAST | {"kvferry": (2.0, 2.0, 2.0), "one pass": (1.5, 1.5, 1.5)})
    assert [line.split(": ")[1] for line in postprocess.missed(slow)] == [
        "0.75 of one pass, the goal is 0.85"
    ]
    assert "in 1 of 1 rows" in postprocess.markdown(slow)
    assert postprocess.missed(results(FAST | {"kvferry": (2.0,) * 3}, quick=True)) == []


@pytest.mark.slow
def test_a_quick_run_measures_every_case_and_writes_it(tmp_path):
    cases = postprocess.cpu_cases(quick=True)[:3]
    found = postprocess.measure("test", describe_machine(), 2, True, lambda text: None, cases=cases)
    assert [len(row.seconds["kvferry"]) for row in found.rows] == [2, 2, 2]
    postprocess.write(found, tmp_path)
    written = msgspec.json.decode(
        (tmp_path / "postprocess.json").read_bytes(), type=postprocess.PostprocessResults
    )
    assert written == found
    assert "A quick run" in (tmp_path / "POSTPROCESS.md").read_text()


def test_wrong_results_end_the_benchmark(monkeypatch):
    monkeypatch.setattr(postprocess, "ours", lambda case, caches, block_ids: None)
    with pytest.raises(AssertionError, match="PostprocessCase"):
        postprocess.measure(
            "test",
            describe_machine(),
            1,
            True,
            lambda text: None,
            cases=postprocess.cpu_cases(quick=True)[:1],
        )


def test_gpu_cases_are_those_that_fit_in_memory():
    everything = gpu.gpu_cases(1 << 40, quick=False)
    assert {case.requests for case in everything} == {1, 8, 64}
    assert {case.model.split(",")[0] for case in everything} == {"Llama-3-70B", "DeepSeek-V3"}
    few = gpu.gpu_cases(8 << 30, quick=False)
    assert few
    assert all(4 * case.nbytes < 8 << 30 for case in few)


def test_without_a_gpu_only_the_interpreter_runs_and_it_is_said(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        gpu, "_run_tests", lambda selection, interpret: asked.append((selection, interpret)) or 0
    )
    with pytest.raises(gpu.typer.Exit) as end:
        gpu.main(rounds=1, out=None, quick=True)
    assert end.value.exit_code == 0
    assert asked == [(gpu._KERNEL_TESTS, True)]
    assert "no GPU here" in capsys.readouterr().out
