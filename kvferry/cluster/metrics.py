"""What engines and router tell of themselves: Prometheus metrics, and an engine's records."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from kvferry.cluster.engines import Engine
from kvferry.cluster.prefixes import PrefixIndex
from kvferry.config import printable
from kvferry.connectors.base import TransferRecord
from kvferry.engine.engine import EngineStats
from kvferry.engine.messages import RequestTimings

PEER_KEPT_S = 3600.0
"""Seconds after the last load from an engine for which its metrics are shown."""


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One ended request, as ``/kvferry/records`` tells it."""

    request_id: str
    prompt_tokens: int
    token_ids: list[int]
    gaps: list[float]
    """For each token, the difference of the two best logits."""
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
    """Counters of one engine, in a registry of their own."""

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
        """Peer → clock reading of the last load from it; the last one is the last."""

    def count(self, request: RequestSummary) -> None:
        """Takes in an ended request."""
        self._requests.labels(request.finish_reason).inc()
        self._output_tokens.inc(len(request.token_ids))
        timings = request.timings
        local = request.prompt_tokens - request.num_cached_tokens - request.num_external_tokens
        if timings is not None and timings.prefill_started is None:
            local = 0  # it ended before, or wanted nothing computed
        for source, tokens in (
            ("cache", request.num_cached_tokens),
            ("peer", request.num_external_tokens),
            ("computed", max(0, local)),
        ):
            self._prompt_tokens.labels(source).inc(tokens)
        if timings is not None and timings.first_token is not None:
            self._first_token_s.observe(timings.first_token - timings.arrival)

    def count_transfer(self, record: TransferRecord) -> None:
        """Takes in what one rank has loaded."""
        if record.direction != "recv":
            return
        peer = printable(record.peer)
        self._note_peer(peer)
        self._transfer_s.labels(peer, str(record.ok).lower()).observe(record.moved_s)
        if record.ok:
            self._transfer_bytes.labels(peer).inc(record.nbytes)

    def _note_peer(self, peer: str) -> None:
        """Labels of peers that nothing was loaded from for long are dropped: engines come and go,
        and there would be more and more.
        """
        now = time.monotonic()
        self._loaded_from[peer] = now
        self._loaded_from.move_to_end(peer)
        while (last := next(iter(self._loaded_from.items())))[1] < now - PEER_KEPT_S:
            gone = last[0]
            del self._loaded_from[gone]
            for ok in ("true", "false"):
                with contextlib.suppress(KeyError):  # nothing of it went that way
                    self._transfer_s.remove(gone, ok)
            with contextlib.suppress(KeyError):
                self._transfer_bytes.remove(gone)

    def render(
        self,
        stats: EngineStats | None,
        step_age_s: float = 0.0,
        silent_peers: Sequence[str] = (),
    ) -> bytes:
        """Prometheus' text form.

        Args:
            stats: the latest snapshot of the engine; ``None`` before the first.
            step_age_s: for how long the step under way has run; 0 between steps.
            silent_peers: engines that nothing is loaded from until they answer.
        """
        self._gauges.stats = stats
        self._silent_peers.clear()
        for peer in silent_peers:
            self._silent_peers.labels(printable(peer)).set(1)
        self._step_age_s.set(step_age_s)
        return generate_latest(self.registry)


class _StatsGauges(Collector):
    """Made from the engine's latest snapshot."""

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


WORKERS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of the folder in which a worker of a router counts; it must be set before
``prometheus_client`` is imported."""


def count_as_worker(number: int) -> None:
    """From now on this process's counters are those of a worker, and go on where an earlier process
    of that number has died. There must be one at a time.
    """
    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]


class RouterMetrics:
    """Counters of one router, in a registry of their own."""

    def __init__(
        self,
        engines: Iterable[Engine],
        index: PrefixIndex | None = None,
        workers: Path | None = None,
    ) -> None:
        """``index`` knows what the engines have in their prefix caches. Where ``workers`` count in
        a folder, their sums are told.
        """
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=LATENCY_BUCKETS_S, registry=registry)
        self.requests = counter(
            "kvferry_router_requests",
            "Requests by HTTP status (200 also for a stream that broke off, see errors)",
            ["status"],
        )
        self.errors = counter(
            "kvferry_router_errors", "Requests that failed, by error code", ["code"]
        )
        self.prompt_tokens = counter("kvferry_router_prompt_tokens", "Prompt tokens taken")
        self.completion_tokens = counter("kvferry_router_completion_tokens", "Tokens answered")
        self.first_token_s = histogram(
            "kvferry_router_time_to_first_token_seconds", "From the request to its first token"
        )
        self.total_s = histogram(
            "kvferry_router_request_seconds", "From the request to its last token"
        )
        self.prefix_tokens = counter(
            "kvferry_router_prefix_tokens",
            "Prompt tokens of requests that were routed by cost, by who was expected to have them",
            ["source"],
        )
        self.prefix_missed = counter(
            "kvferry_router_prefix_missed_tokens",
            "Prompt tokens that an engine was expected to have, and had not",
        )
        self.borrowed_tokens = counter(
            "kvferry_router_borrowed_tokens",
            "Prompt tokens that engines lent of their caches to whoever computed the rest",
        )
        if workers is not None:
            self.registry = CollectorRegistry()
            MultiProcessCollector(self.registry, str(workers))  # type: ignore[no-untyped-call]
        self.registry.register(_EngineGauges(engines, index))

    def render(self) -> bytes:
        """Prometheus' text form."""
        return generate_latest(self.registry)


class _EngineGauges(Collector):
    """Read from the engines when somebody asks."""

    def __init__(self, engines: Iterable[Engine], index: PrefixIndex | None) -> None:
        self._engines = engines
        self._index = index

    def collect(self) -> Iterable[Metric]:
        labels = ["engine", "role"]
        up = GaugeMetricFamily("kvferry_router_engine_up", "Whether it answers", labels=labels)
        outstanding = GaugeMetricFamily(
            "kvferry_router_engine_outstanding", "Requests it works on", labels=labels
        )
        silent = GaugeMetricFamily(
            "kvferry_router_engine_silent_peers",
            "Engines that do not answer it: it loads nothing from them",
            labels=labels,
        )
        for engine in self._engines:
            up.add_metric([engine.name, engine.role], float(engine.healthy))
            outstanding.add_metric([engine.name, engine.role], engine.outstanding)
            silent.add_metric([engine.name, engine.role], len(engine.silent_peers))
        yield from (up, outstanding, silent)
        if self._index is None:
            return
        blocks = GaugeMetricFamily(
            "kvferry_router_prefix_blocks",
            "Cached blocks that are known of it, where it publishes its KV cache events",
            labels=labels,
        )
        for engine in self._engines:
            known = self._index.blocks(engine.kv_events)
            if known is not None:
                blocks.add_metric([engine.name, engine.role], len(known))
        yield blocks
        yield CounterMetricFamily(
            "kvferry_router_prefix_forgotten",
            "How often all that was known of an engine's cache was forgotten",
            value=self._index.forgotten,
        )
