"""docs/operations.md knows every error, every metric and every command."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvferry import errors
from kvferry.cli.app import app
from kvferry.cluster.engine_metrics import EngineMetrics
from kvferry.cluster.metrics import RouterMetrics
from kvferry.engine.engine import EngineStats
from kvferry.engine.scheduler import SchedulerStats

PAGE = (Path(__file__).parents[1] / "docs" / "operations.md").read_text(encoding="utf-8")
ALL_PAGES = [
    path.read_text(encoding="utf-8")
    for path in [
        Path(__file__).parents[1] / "README.md",
        *(Path(__file__).parents[1] / "docs").glob("*.md"),
    ]
]


def first_cells(heading: str) -> list[str]:
    """What stands between backticks in the first column of the tables with this heading."""
    tables = re.findall(rf"^\| {re.escape(heading)} .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert tables, f"the page has no table {heading!r}"
    return re.findall(r"^\| `(\w+)` ", "".join(tables), re.MULTILINE)


def names_of(registry: CollectorRegistry) -> set[str]:
    """Metric names as Prometheus shows them."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in registry.collect()
    }


def test_every_error_has_a_row_and_a_remedy_in_the_order_of_the_tree():
    drawn = re.findall(r"^    [│├└─ ]*(\w+Error)\b", errors.__doc__, re.MULTILINE)
    defined = {name for name in vars(errors) if name.endswith("Error")}
    assert set(drawn) == defined
    assert first_cells("error") == drawn


def test_every_metric_of_the_router_has_a_row():
    assert set(first_cells("metric of the router")) == names_of(RouterMetrics([]).registry)


def test_every_metric_of_an_engine_has_a_row():
    metrics = EngineMetrics()
    scheduler = SchedulerStats(**dict.fromkeys(SchedulerStats.__struct_fields__, 0))
    others = dict.fromkeys(EngineStats.__struct_fields__, 0)
    metrics.render(
        EngineStats(**others | {"scheduler": scheduler, "connector": {}, "transfer_progress": {}})
    )
    assert set(first_cells("metric of an engine")) == names_of(metrics.registry)


def test_the_pages_speak_of_commands_that_exist():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    shown = {name for page in ALL_PAGES for name in re.findall(r"kvferry ([a-z]+)(?= |`)", page)}
    spoken = {name for page in ALL_PAGES for name in re.findall(r"^\$ kvferry (\w+)", page, re.M)}
    assert spoken <= known
    assert known <= shown | spoken
