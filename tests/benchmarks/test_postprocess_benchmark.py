"""The benchmark of the postprocessor compares the same work, and says what was missed."""

import msgspec
import pytest
import typer

from benchmarks import gpu, postprocess
from benchmarks.report import Run, describe_machine


def results(seconds):
    case = postprocess.cpu_cases(quick=False)[0]
    row = postprocess.PostprocessRow(case=case, seconds=seconds, nbytes=case.nbytes)
    return postprocess.PostprocessResults(
        command="test",
        rounds=3,
        machine=describe_machine(),
        device="cpu",
        device_name="host memory",
        rows=(row,),
    )


FAST = {
    "three passes": (6.0, 5.0, 7.0),
    "copy": (2.0, 2.0, 2.0),
    "one pass": (0.9, 0.9, 1.0),
    "kvferry": (1.0, 1.0, 1.0),
}


def test_ratios_are_medians_over_rounds_and_the_share_of_the_ceiling_is_judged():
    page = postprocess.page(results(FAST))
    assert "0.90 (0.90–1.00) ≥ 0.85 | 6.00 | 6.67" in page
    slow = results(FAST | {"kvferry": (2.0, 2.0, 2.0), "one pass": (1.5, 1.5, 1.5)})
    assert "**0.75 (0.75–0.75) ≥ 0.85**" in postprocess.page(slow)


@pytest.mark.slow
def test_a_quick_run_measures_every_case_and_writes_it(tmp_path):
    cases = postprocess.cpu_cases(quick=True)[:3]
    run = Run("benchmarks", tmp_path, rounds=2, quick=True)
    found = postprocess.measure(run, cases)
    assert [len(row.seconds["kvferry"]) for row in found.rows] == [2, 2, 2]
    run.publish("postprocess", found, postprocess.page)
    written = msgspec.json.decode(
        (tmp_path / "postprocess.json").read_bytes(), type=postprocess.PostprocessResults
    )
    assert written == found
    assert "A quick run" in (tmp_path / "POSTPROCESS.md").read_text()


def test_wrong_results_end_the_benchmark(monkeypatch, tmp_path):
    monkeypatch.setattr(postprocess, "ours", lambda case, caches, block_ids: None)
    with pytest.raises(AssertionError, match="PostprocessCase"):
        postprocess.measure(Run("x", tmp_path, quick=True), postprocess.cpu_cases(quick=True)[:1])


def test_gpu_cases_are_those_that_fit_in_memory():
    everything = gpu.gpu_cases(1 << 40, quick=False)
    assert {case.requests for case in everything} == {1, 8, 64}
    assert {case.model.split(",")[0] for case in everything} == {"Llama-3-70B", "DeepSeek-V3"}
    few = gpu.gpu_cases(8 << 30, quick=False)
    assert few
    assert all(4 * case.nbytes < 8 << 30 for case in few)


def test_parts_can_be_chosen_and_those_with_results_are_left_out(tmp_path):
    assert gpu.chosen_parts(None, None) == [
        "postprocess",
        "reads",
        "wires",
        "kernels",
        "tests",
        "vllm",
    ]
    assert gpu.chosen_parts(["tests", "reads"], None) == ["reads", "tests"]
    (tmp_path / "postprocess_gpu.json").touch()
    assert gpu.chosen_parts(None, tmp_path) == ["reads", "wires", "kernels", "tests", "vllm"]
    with pytest.raises(typer.BadParameter, match="'read' is not one of postprocess, reads"):
        gpu.chosen_parts(["read"], None)


def test_without_a_gpu_only_the_interpreter_runs_and_it_is_said(monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        gpu, "_run_tests", lambda selection, interpret: asked.append((selection, interpret)) or 0
    )
    with pytest.raises(typer.Exit) as end:
        gpu.main(rounds=1, out=tmp_path, quick=True, only=None, go_on=False)
    assert end.value.exit_code == 0
    assert asked == [(gpu.KERNEL_TESTS, True)]
    assert "no GPU here" in capsys.readouterr().out
