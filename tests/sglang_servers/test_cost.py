"""Both adapters are measured in one run, each in the environment of its engine."""

import pytest

from tests.integrations.adapter_step import NUMBERS, SIDES, measure, rows


@pytest.mark.slow
def test_every_cost_of_both_adapters_is_measured():
    header, *lines = rows(measure(rounds=1))
    assert len(lines) == 3 * len(NUMBERS) * len(SIDES)
    for line in lines:
        figures = [float(cell.removesuffix(" µs")) for cell in line[3:7]]
        assert min(figures) > 0, dict(zip(header, line, strict=True))
