"""The benchmark of the control plane at scale."""

import msgspec
import pytest

from benchmarks import scale
from benchmarks.report import describe_machine
from benchmarks.scale import Figure, ScaleResults, page


def figure(engines, *values, name="CPU per lease"):
    return Figure(side="one P", name=name, unit="µs", engines=engines, values=[*values])


def test_the_page_has_medians_and_the_exponent_of_growth():
    results = ScaleResults(
        command="python -m benchmarks.scale",
        machine=describe_machine(),
        load_after=1.0,
        rounds=3,
        quick=False,
        figures=[
            figure(10, 2.0, 3.0, 9.0),
            figure(1000, 3.0, 3.0, 3.0),
            figure(10, 20.0, name="look"),
            figure(1000, 2000.0, name="look"),
        ],
    )
    text = page(results)
    assert "| CPU per lease | µs | 3 | 3 | 0.00 |" in text
    assert "| look | µs | 20 | 2,000 | 1.00 |" in text


@pytest.mark.processes
@pytest.mark.slow
def test_a_quick_run_measures_both_sides_by_real_connections(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "REST_S", 0.2)
    scale.main(rounds=1, out=tmp_path, quick=True)
    results = msgspec.json.decode((tmp_path / "scale.json").read_bytes(), type=ScaleResults)
    assert {one.side for one in results.figures} == {"one P", "one D"}
    assert {one.engines for one in results.figures} == set(scale.QUICK_SIZES)
    assert (tmp_path / "SCALE.md").read_text().count("| exponent |") == 2
    assert (tmp_path / "scale.png").stat().st_size > 10_000
