"""The dashboard and the rules ask for metrics and labels that exist."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvferry.engine.engine import EngineStats
from kvferry.engine.scheduler import SchedulerStats
from kvferry.integrations.load_metrics import COUNTERS, GAUGES, HISTOGRAMS
from kvferry.observe.records import TransferRecord
from kvferry.router.engine_client import EngineClient
from kvferry.router.engines import Engine
from kvferry.router.health import Told
from kvferry.router.metrics import RouterMetrics
from kvferry.router.prefixes import PrefixIndex
from kvferry.router.queue import RequestQueue
from kvferry.serving.messages import KVEventsPlace
from kvferry.serving.metrics import EngineMetrics, RequestSummary

HERE = Path(__file__).parent
DASHBOARD = json.loads((HERE / "dashboard.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(rule["expr"] for rule in RULES),
]

#: Metrics of vLLM itself, with their labels.
OF_VLLM: dict[str, set[str]] = {
    "vllm:kv_cache_usage_perc": set(),
    "vllm:prompt_tokens_by_source_total": {"source"},
    "vllm:request_success_total": {"finished_reason"},
}
#: Labels that Prometheus adds to all series, and labels of vLLM's own metrics that are not asked
#: for.
ADDED = {"instance", "job"}

REQUEST = RequestSummary(
    request_id="r",
    prompt_tokens=16,
    token_ids=[1],
    gaps=[0.5],
    finish_reason="stop",
    error="",
    num_cached_tokens=0,
    num_external_tokens=15,
    timings=None,
)
LOAD = TransferRecord(
    request_id="r",
    lease_id="l",
    rank=0,
    peer="p",
    direction="recv",
    first_token=0,
    tokens=15,
    nbytes=15 << 10,
    started=1.0,
    finished=2.0,
    ok=True,
)


def labels_of(*registries: CollectorRegistry) -> dict[str, set[str]]:
    """Name of each time series → labels; a series without a value has no labels."""
    found: dict[str, set[str]] = {}
    for registry in registries:
        for family in registry.collect():
            ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
            for end in ends.get(family.type, [""]):
                found.setdefault(family.name + end, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """All time series of a router and of an engine with values, and the series of vLLM."""
    engine_of_router = Engine("p", "http://p", "prefill", EngineClient({}))
    place = KVEventsPlace(endpoint="tcp://127.0.0.1:9")
    engine_of_router.health.told = Told(kv_events=place)
    index = PrefixIndex()
    index.follow([place])
    router = RouterMetrics([engine_of_router], index, queue=RequestQueue({}, 1))
    router.prefix_tokens.labels("prefill")
    router.requests.labels("200").inc()
    router.errors.labels("aborted").inc()
    engine = EngineMetrics()
    engine.count(REQUEST)
    engine.count_transfer(LOAD)
    scheduler = SchedulerStats(**dict.fromkeys(SchedulerStats.__struct_fields__, 0))
    numbers = dict.fromkeys(("steps", "computed_tokens", "output_tokens"), 0)
    stats = EngineStats(
        scheduler=scheduler,
        connector={"staging_refused": 1.0},
        connector_gauges={"staging_waiting": 1.0},
        transfer_progress={},
        **numbers,
    )
    engine.render(stats, silent_peers=["p"])
    told = labels_of(router.registry, engine.registry)
    index.close()
    # vLLM is not installed here; its counters are built from these names.
    metrics = (*HISTOGRAMS.values(), *COUNTERS.values(), *GAUGES.values())
    for name in (f"vllm:{name}" for name, *_ in metrics):
        for end in ("", "_total", "_bucket", "_sum", "_count"):
            told[name + end] = {"le"}
    return told | OF_VLLM


def asked(expression: str) -> list[tuple[str, set[str]]]:
    """The time series in an expression, each with the labels that select from the series."""
    found = re.findall(r"\b(vllm:\w+|kvferry_\w+)(?:\{([^}]*)\})?", expression)
    return [(name, set(re.findall(r"(\w+)\s*(?:=~|=|!=|!~)", chosen))) for name, chosen in found]


def grouped(expression: str) -> set[str]:
    """The labels by which an expression sums, or which the expression ignores."""
    lists = re.findall(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)", expression)
    return {label.strip() for one in lists for label in one.split(",")}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_name_and_label_exists(expression: str, series: dict[str, set[str]]) -> None:
    named = asked(expression)
    assert named
    for name, chosen in named:
        assert name in series
        assert chosen <= series[name] | ADDED
    known = set().union(*(series[name] for name, _ in named))
    assert grouped(expression) <= known | ADDED


@pytest.mark.parametrize(
    "expression",
    ["rate(kvferry_router_requests[5m])", 'kvferry_engine_kv_blocks{status="free"}'],
)
def test_a_wrong_name_or_label_is_noticed(expression: str, series: dict[str, set[str]]) -> None:
    with pytest.raises(AssertionError):
        test_every_name_and_label_exists(expression, series)


def test_the_dashboard_shows_every_metric_of_router_and_engine(
    series: dict[str, set[str]],
) -> None:
    shown = {re.sub(r"_(bucket|sum|count|total)$", "", n) for e in EXPRESSIONS for n, _ in asked(e)}
    there = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in series}

    assert there - shown == {
        "kvferry_engine_connector_state",
        "kvferry_engine_output_tokens",
        "kvferry_engine_preemptions",
        "kvferry_engine_time_to_first_token_seconds",
        "kvferry_router_completion_tokens",
        "kvferry_router_prompt_tokens",
        "vllm:kvferry_load_copies",
    }


def test_legends_and_messages_use_labels_that_exist(series: dict[str, set[str]]) -> None:
    labels = set().union(*series.values()) | ADDED
    texts = [target["legendFormat"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    used = {label for text in texts for label in re.findall(r"\{\{(\w+)\}\}", text)}
    for rule in RULES:
        words = " ".join(rule["annotations"].values())
        used |= set(re.findall(r"\$labels\.(\w+)", words))
        assert rule["labels"]["severity"] in ("warning", "critical")
    assert used <= labels
