"""Figures of loads: how they add up, and what becomes of them in vLLM's log and in Prometheus."""

import json
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.integrations.vllm import KVFerryConnector
from kvferry.integrations.vllm.stats import LoadMetrics, LoadStats, PendingStats
from kvferry.observe.records import TransferRecord

NO_LOADS = dict.fromkeys(
    ["Num loads", "Num failed loads", "Num refused loads", "Num plain requests"], 0
)
LABELS = {"model_name": "m", "engine": "0"}
OTHER_ENGINE = {"model_name": "m", "engine": "1"}


def load(seconds=0.5, nbytes=1 << 20, copies=3, error=""):
    return TransferRecord(
        request_id="r",
        lease_id="l",
        rank=0,
        peer="p",
        direction="recv",
        first_token=0,
        tokens=10,
        nbytes=nbytes,
        copies=copies,
        started=100.0,
        finished=100.0 + seconds,
        ok=not error,
        error=error,
    )


def stats_of(*loads, refused=()):
    stats = LoadStats()
    for record in loads:
        stats.note_load(record)
    for reason in refused:
        stats.note_refusal(reason)
    return stats


@pytest.fixture
def registry():
    """A registry of its own: vLLM's holds the metrics of the last engine that was started."""
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    """Metrics of two engines, made as vLLM makes them."""
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    engines: dict[int, list[object]] = {0: list(LABELS.values()), 1: list(OTHER_ENGINE.values())}
    config = SimpleNamespace(kv_transfer_config=None)
    return KVFerryConnector.build_prom_metrics(config, types, list(LABELS), engines)


@pytest.fixture
def sample(registry):
    """The value of one of our samples."""

    def value_of(name, labels=LABELS, **more):
        return registry.get_sample_value(f"vllm:kvferry_{name}", {**labels, **more})

    return value_of


def test_new_figures_are_empty_and_reset_ones_too():
    stats = LoadStats()
    assert stats.is_empty()
    assert stats.reduce() == NO_LOADS
    stats.note_load(load())
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


@pytest.mark.parametrize(
    "stats",
    [stats_of(load()), stats_of(load(error="the wire broke")), stats_of(refused=["TicketError"])],
)
def test_one_thing_of_any_kind_is_not_empty(stats):
    assert not stats.is_empty()


def test_a_failed_load_counts_as_failed_only():
    stats = stats_of(load(error="the wire broke"))
    assert stats.reduce() == NO_LOADS | {"Num failed loads": 1}
    assert stats.data["failed"] == ["the wire broke"]


def test_the_log_line_has_means_percentiles_and_throughput():
    loads = [load(seconds=0.1 * number, nbytes=number << 20) for number in range(1, 11)]
    reduced = stats_of(*loads, refused=["TicketError"]).reduce()
    assert reduced == {
        "Num loads": 10,
        "Num failed loads": 0,
        "Num refused loads": 1,
        "Num plain requests": 0,
        "Avg load time (ms)": pytest.approx(550),
        "P90 load time (ms)": pytest.approx(910),  # between the 9th and the 10th
        "Total MB": 55,
        "Throughput (MB/s)": pytest.approx(10),
    }


def test_a_load_that_took_no_time_has_a_throughput():
    assert stats_of(load(seconds=0)).reduce()["Throughput (MB/s)"] > 0


def test_ranks_and_steps_add_up_and_the_other_stays_as_it_was():
    one = stats_of(load(copies=1), refused=["TicketError"])
    other = stats_of(load(copies=2), load(error="the wire broke"))
    joined = one.aggregate(other)
    assert joined is one
    assert joined.data["copies"] == [1, 2]
    assert (joined.data["failed"], joined.data["refused"]) == (["the wire broke"], ["TicketError"])
    assert other.data["copies"] == [2]
    joined.note_load(load(copies=3))
    assert other.data["copies"] == [2]


def test_figures_travel_as_plain_data_and_come_back_through_the_connector():
    stats = stats_of(load(), load(error="the wire broke"), refused=["TicketError"])
    back = KVFerryConnector.build_kv_connector_stats(json.loads(json.dumps(stats.data)))
    assert isinstance(back, LoadStats)
    assert back.data == stats.data
    assert back.reduce() == stats.reduce()
    empty = KVFerryConnector.build_kv_connector_stats()
    assert empty is not None
    assert empty.is_empty()


def test_loads_become_samples_of_their_engine(metrics, sample):
    assert isinstance(metrics, LoadMetrics)
    loads = load(0.004, nbytes=5000, copies=7), load(0.3, nbytes=1 << 20, copies=200)
    metrics.observe(stats_of(*loads).data)
    assert sample("load_seconds_count") == 2
    assert sample("load_seconds_sum") == pytest.approx(0.304)
    assert sample("load_seconds_bucket", le="0.002") == 0
    assert sample("load_seconds_bucket", le="0.005") == 1
    assert sample("load_seconds_bucket", le="0.5") == 2
    assert sample("load_bytes_sum") == 5000 + (1 << 20)
    assert sample("load_bytes_bucket", le="4096.0") == 0
    assert sample("load_bytes_bucket", le="16384.0") == 1
    assert sample("load_copies_sum") == 207
    assert sample("load_copies_bucket", le="10.0") == 1
    assert sample("load_seconds_count", OTHER_ENGINE) == 0
    assert sample("failed_loads_total") == sample("refused_loads_total") == 0


def test_failures_and_refusals_are_counted_from_report_to_report(metrics, sample):
    report = stats_of(load(error="a"), load(error="b"), refused=["TicketError"]).data
    metrics.observe(report, engine_idx=1)
    metrics.observe(report, engine_idx=1)
    assert sample("failed_loads_total", OTHER_ENGINE) == 4
    assert sample("refused_loads_total", OTHER_ENGINE) == 2
    assert sample("load_seconds_count", OTHER_ENGINE) == 0
    assert sample("failed_loads_total") == 0


def test_the_last_number_of_open_requests_of_an_engine_counts(metrics, sample):
    report = LoadStats()
    report.note_open(2)
    report.note_open(1)
    metrics.observe(report.data, engine_idx=1)
    metrics.observe(LoadStats().data, engine_idx=1)
    assert sample("open_requests", OTHER_ENGINE) == 1
    assert sample("open_requests") == 0


def test_an_empty_report_changes_nothing(metrics, sample):
    metrics.observe(LoadStats().data)
    assert sample("load_seconds_count") == sample("failed_loads_total") == 0


def test_leases_that_were_lost_are_counted_once(metrics, registry):
    pending = PendingStats()
    for counters in (
        {"leases_expired": 2, "leases_done": 9},
        {"leases_expired": 2, "leases_done": 9},
        {"leases_expired": 3, "leases_revoked": 1},
    ):
        if (stats := pending.take(0, counters)) is not None:
            metrics.observe(stats.data)
    assert registry.get_sample_value("vllm:kvferry_expired_leases_total", LABELS) == 3
    assert registry.get_sample_value("vllm:kvferry_revoked_leases_total", LABELS) == 1
    assert pending.take(0, {"leases_expired": 3, "leases_revoked": 1}) is None
