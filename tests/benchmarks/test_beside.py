"""How one commit's benchmarks are set beside another's."""

import json
from pathlib import Path

from benchmarks.beside import Results, Row, _seconds, _text
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_file_of_results_gives_rows_with_names_of_their_own():
    families = set()
    for name in ("transport", "postprocess", "planning"):
        found = list(_seconds(json.loads((RESULTS / f"{name}.json").read_bytes())))
        assert len({(family, case) for family, case, _ in found}) == len(found) > 0
        assert all(seconds > 0 for _, _, seconds in found)
        families |= {family for family, _, _ in found}
    assert {"transport shm", "transport tcp", "postprocess", "planning"} <= families


def test_rows_that_have_become_slower_are_named():
    results = Results(
        command="c",
        machine=describe_machine(),
        base="964d806",
        rounds=3,
        loads=(0.1, 0.2, 0.3),
        rows=(
            Row(family="bind", case="4096 tokens", ratios=(1.0, 1.2, 1.1)),
            Row(family="bind", case="32768 tokens", ratios=(0.8, 0.9, 1.3)),
        ),
    )
    text = _text(results)
    assert "| bind | 2 | 0.99 | 0.90 |" in text
    assert "Rows below 0.95: 1." in text
    assert "| bind | 32768 tokens | 0.90 | 0.80, 1.30 |" in text
    assert "4096" not in text
