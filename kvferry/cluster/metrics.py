"""Prometheus metrics of the router."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.cluster.engines import Engine

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)


class RouterMetrics:
    """Counters of one router, in a registry of their own."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_router_requests",
            "Requests by HTTP status (200 also for a stream that broke off, see errors)",
            ["status"],
            registry=self.registry,
        )
        self.errors = Counter(
            "kvferry_router_errors",
            "Requests that failed, by error code",
            ["code"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "kvferry_router_prompt_tokens", "Prompt tokens taken", registry=self.registry
        )
        self.completion_tokens = Counter(
            "kvferry_router_completion_tokens", "Tokens answered", registry=self.registry
        )
        self.first_token_s = Histogram(
            "kvferry_router_time_to_first_token_seconds",
            "From the request to its first token",
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.total_s = Histogram(
            "kvferry_router_request_seconds",
            "From the request to its last token",
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(_EngineGauges(engines))

    def render(self) -> bytes:
        """Prometheus' text form."""
        return generate_latest(self.registry)


class _EngineGauges(Collector):
    """Read from the engines when somebody asks."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        labels = ["engine", "role"]
        up = GaugeMetricFamily("kvferry_router_engine_up", "Whether it answers", labels=labels)
        outstanding = GaugeMetricFamily(
            "kvferry_router_engine_outstanding", "Requests it works on", labels=labels
        )
        for engine in self._engines:
            up.add_metric([engine.name, engine.role], float(engine.healthy))
            outstanding.add_metric([engine.name, engine.role], engine.outstanding)
        return (up, outstanding)
