"""The pages of docs/operate and docs/reference know every error, metric and command."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvferry import errors
from kvferry.cache.cache_shape import LayerHeads
from kvferry.cli.app import COMMANDS, app
from kvferry.cli.specs import SPEC_KEYS, parse_spec
from kvferry.engine.engine import EngineStats
from kvferry.engine.scheduler import SchedulerStats
from kvferry.explain.families import FAMILIES
from kvferry.explain.models import KNOWN_MODELS, parse_model
from kvferry.router.headers import HOP_BY_HOP, WRITTEN_TO_CLIENTS, WRITTEN_TO_SERVERS
from kvferry.router.metrics import RouterMetrics
from kvferry.router.paths import PATHS
from kvferry.router.prefixes import PrefixIndex
from kvferry.router.queue import RequestQueue
from kvferry.serving.metrics import EngineMetrics
from tests.pages import text_of

PAGE = text_of("operate")
REFERENCE = text_of("reference")
ALL_PAGES = [
    path.read_text(encoding="utf-8")
    for path in [
        Path(__file__).parents[1] / "README.md",
        *(Path(__file__).parents[1] / "docs").rglob("*.md"),
    ]
]


def first_cells(heading: str) -> list[str]:
    """What stands between backticks in the first column of the tables with this heading."""
    head = rf"^\| {re.escape(heading)} .*\n\|[-|]+\n((?:\|.*\n)+)"
    tables = re.findall(head, PAGE + REFERENCE, re.MULTILINE)
    assert tables, f"the pages have no table {heading!r}"
    return re.findall(r"^\| `([\w:]+)` ", "".join(tables), re.MULTILINE)


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
    assert set(first_cells("metric of the router")) == names_of(
        RouterMetrics([], PrefixIndex(), queue=RequestQueue({}, 1)).registry
    )


def test_every_metric_of_an_engine_has_a_row():
    metrics = EngineMetrics()
    scheduler = SchedulerStats(**dict.fromkeys(SchedulerStats.__struct_fields__, 0))
    others: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0)
    metrics.render(
        EngineStats(
            **others
            | {"scheduler": scheduler}
            | {key: {} for key in ("connector", "connector_gauges", "transfer_progress")}
        )
    )
    assert set(first_cells("metric of an engine")) == names_of(metrics.registry)


def test_the_pages_speak_of_commands_that_exist():
    known = COMMANDS.keys()
    shown = {name for page in ALL_PAGES for name in re.findall(r"kvferry ([a-z]+)(?= |`)", page)}
    spoken = {name for page in ALL_PAGES for name in re.findall(r"^\$ kvferry (\w+)", page, re.M)}
    assert spoken <= known
    assert known <= shown | spoken


def rows_after(text: str) -> list[list[str]]:
    """The cells of the first table behind ``text`` on the page, its heading left out."""
    table = re.search(r"(?:^\|.*\n)+", PAGE.partition(text)[2], re.MULTILINE)
    assert table is not None
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]
    ]


def test_every_key_of_a_spec_has_a_row_with_its_default():
    shown = {key.strip("`"): default.strip("`") for key, default, _ in rows_after("A spec is")}
    assert list(shown) == list(SPEC_KEYS)
    plain = parse_spec("tp=1", "--prefill")
    axes = ("tp", "pp", "dcp", "pcp")
    assert shown == {
        **{axis: str(getattr(plain.parallel, axis)) for axis in axes},
        "interleave": str(plain.parallel.interleave_size),
        "block": str(plain.block_size),
        "layout": plain.layout,
        "dtype": "the model's",
        "layers": "divided evenly",
        "hybrid": str(plain.hybrid).lower(),
    }


def test_every_path_of_the_router_has_its_place_in_the_table():
    told = {who: re.findall(r"`([^`]+)`", paths) for who, _, paths in rows_after("### Paths")}
    assert told == {way.value: list(paths) for way, paths in PATHS.items()}


def test_every_header_that_does_not_pass_is_named():
    told = [set(re.findall(r"`([^`]+)`", names)) for _, _, names in rows_after("### Headers")]
    assert told == [HOP_BY_HOP, WRITTEN_TO_SERVERS, WRITTEN_TO_CLIENTS]


def test_every_known_model_is_named():
    (names,) = re.findall(r"^Known models: ((?:.|\n)*?);", PAGE, re.MULTILINE)
    assert re.findall(r"`([^`]+)`", names) == list(KNOWN_MODELS)


def test_every_family_of_models_is_named():
    (names,) = re.findall(r"`model_type` that `plan` knows:\n\n((?:.|\n)*?)\.\n", PAGE)
    assert re.findall(r"`([^`]+)`", names) == sorted(kind for kind in FAMILIES if kind)


def test_a_file_of_the_users_own_says_what_each_layer_keeps():
    (own,) = re.findall(r"```json\n(\{\"num_hidden_layers\"(?:.|\n)*?)```", PAGE)
    windowed = LayerHeads(16, 256, sliding_window=1024)
    assert parse_model(json.loads(own), "here").shape.layers == (
        windowed, windowed, None, LayerHeads(4, 512),
    )  # fmt: skip


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path, monkeypatch):
    root = Path(__file__).parents[1]
    readme = (root / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ (kvferry plan .*--picture .*)$", readme, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", command.split())
    with pytest.raises(SystemExit, match="0"):
        app()
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8") == (
        root / "docs" / "plan.svg"
    ).read_text(encoding="utf-8")
