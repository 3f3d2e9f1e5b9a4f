"""Prometheus metrics of an engine, and records of its requests."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.config import printable
from kvferry.engine.engine import EngineStats
from kvferry.engine.messages import RequestTimings
from kvferry.observe.records import TransferRecord

PEER_KEPT_S = 3600.0
"""Seconds for which the metrics of a peer are kept after the last load from the peer."""


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an ended request in ``/kvferry/records``."""

    request_id: str
    prompt_tokens: int
    token_ids: list[int]
    gaps: list[float]
    """Difference between the two highest logits, for each token."""
    finish_reason: str
    error: str
    num_cached_tokens: int
    num_external_tokens: int
    timings: RequestTimings | None


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/kvferry/records``."""

    engine: str
    transfers: list[TransferRecord]
    requests: list[RequestSummary]


LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
TRANSFER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10)


class EngineMetrics:
    """The metrics of an engine, in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._gauges = _StatsGauges()
        registry.register(self._gauges)
        self._step_age_s = Gauge(
            "kvferry_engine_step_age_seconds",
            "For how long the step under way has run; 0 between steps",
            registry=registry,
        )
        self._silent_peers = Gauge(
            "kvferry_engine_silent_peer",
            "1 for each engine that does not answer: nothing is loaded from it until it does",
            ["peer"],
            registry=registry,
        )
        self._requests = counter("kvferry_engine_requests", "Ended requests", ["finish_reason"])
        self._prompt_tokens = counter(
            "kvferry_engine_prompt_tokens", "Prompt tokens by where their KV came from", ["source"]
        )
        self._output_tokens = counter("kvferry_engine_output_tokens", "Tokens drawn")
        self._first_token_s = histogram(
            "kvferry_engine_time_to_first_token_seconds",
            "From a request's arrival to its first token here",
            buckets=LATENCY_BUCKETS_S,
        )
        self._transfer_s = histogram(
            "kvferry_engine_transfer_seconds",
            "Seconds in which a load of one rank moved",
            ["peer", "ok"],
            buckets=TRANSFER_BUCKETS_S,
        )
        self._transfer_bytes = counter(
            "kvferry_engine_transfer_bytes", "KV bytes that ranks have loaded", ["peer"]
        )
        self._loaded_from: OrderedDict[str, float] = OrderedDict()
        """Peer → time of the last load from the peer (monotonic clock, s); oldest load first."""

    def count(self, request: RequestSummary) -> None:
        """Counts an ended request."""
        self._requests.labels(request.finish_reason).inc()
        self._output_tokens.inc(len(request.token_ids))
        timings = request.timings
        local = request.prompt_tokens - request.num_cached_tokens - request.num_external_tokens
        if not request.token_ids:
            local = 0  # the request was refused, or ended before its prompt was computed
        for source, tokens in (
            ("cache", request.num_cached_tokens),
            ("peer", request.num_external_tokens),
            ("computed", max(0, local)),
        ):
            self._prompt_tokens.labels(source).inc(tokens)
        if timings is not None and timings.first_token is not None:
            self._first_token_s.observe(timings.first_token - timings.arrival)

    def count_transfer(self, record: TransferRecord) -> None:
        """Counts a load of a rank."""
        if record.direction != "recv":
            return
        peer = printable(record.peer)
        self._note_peer(peer)
        self._transfer_s.labels(peer, str(record.ok).lower()).observe(record.moved_s)
        if record.ok:
            self._transfer_bytes.labels(peer).inc(record.nbytes)

    def _note_peer(self, peer: str) -> None:
        """Notes a load from a peer, and drops the labels of peers without loads for long. Otherwise
        the number of labels would grow with every engine that comes and goes.
        """
        now = time.monotonic()
        self._loaded_from[peer] = now
        self._loaded_from.move_to_end(peer)
        while (last := next(iter(self._loaded_from.items())))[1] < now - PEER_KEPT_S:
            gone = last[0]
            del self._loaded_from[gone]
            for ok in ("true", "false"):
                with contextlib.suppress(KeyError):  # no transfer had this result
                    self._transfer_s.remove(gone, ok)
            with contextlib.suppress(KeyError):
                self._transfer_bytes.remove(gone)

    def render(
        self,
        stats: EngineStats | None,
        step_age_s: float = 0.0,
        silent_peers: Sequence[str] = (),
    ) -> bytes:
        """The metrics in Prometheus' text format.

        Args:
            stats: the latest snapshot of the engine; ``None`` before the first snapshot.
            step_age_s: seconds since the start of the current step; 0 between steps.
            silent_peers: engines from which nothing is loaded until they answer.
        """
        self._gauges.stats = stats
        self._silent_peers.clear()
        for peer in silent_peers:
            self._silent_peers.labels(printable(peer)).set(1)
        self._step_age_s.set(step_age_s)
        return generate_latest(self.registry)


class _StatsGauges(Collector):
    """Gauges and counters from the engine's latest snapshot."""

    stats: EngineStats | None = None

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        if stats is None:
            return
        scheduler = stats.scheduler
        states = ("running", "waiting", "loading", "lent")
        yield _family(
            GaugeMetricFamily("kvferry_engine_live_requests", "Live requests", labels=["state"]),
            {state: getattr(scheduler, state) for state in states},
        )
        free = scheduler.free_blocks
        yield _family(
            GaugeMetricFamily(
                "kvferry_engine_kv_blocks", "KV blocks of the pool", labels=["state"]
            ),
            {"free": free, "used": scheduler.usable_blocks - free},
        )
        yield CounterMetricFamily(
            "kvferry_engine_preemptions",
            "Requests that gave their blocks up",
            value=scheduler.preemptions,
        )
        yield CounterMetricFamily(
            "kvferry_engine_failed_loads",
            "Requests whose KV did not come from outside",
            value=scheduler.failed_loads,
        )
        about = "of the connector"
        yield _family(
            CounterMetricFamily("kvferry_engine_connector", f"Counters {about}", labels=["name"]),
            stats.connector,
        )
        yield _family(
            GaugeMetricFamily("kvferry_engine_connector_state", f"Gauges {about}", labels=["name"]),
            stats.connector_gauges,
        )


def _family(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family
