"""Prometheus metrics of the router."""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvferry.router.engines import Engine
from kvferry.router.prefixes import PrefixIndex
from kvferry.router.queue import RequestQueue
from kvferry.serving import web
from kvferry.serving.metrics import LATENCY_BUCKETS_S
from kvferry.serving.openai import ApiError

Endpoint = Callable[[Request], Awaitable[Response]]

WORKERS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder for the counters of a router's workers. The variable must be
set before ``prometheus_client`` is imported."""


def count_as_worker(number: int) -> None:
    """Makes this process count as worker ``number``, and continue the counters of an earlier, dead
    worker with this number. There must be one process per number at a time.
    """
    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]


class RouterMetrics:
    """Counters of one router, in a registry of their own."""

    def __init__(
        self,
        engines: Iterable[Engine],
        index: PrefixIndex | None = None,
        workers: Path | None = None,
        queue: RequestQueue | None = None,
    ) -> None:
        """Makes the metrics.

        Args:
            engines: the router's engines.
            index: contents of the engines' prefix caches.
            queue: requests that wait for room at the engines.
            workers: folder with the workers' counters; if given, the metrics are sums over the
                workers.
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
        self.loans_lapsed = counter(
            "kvferry_router_loans_lapsed",
            "Loans that no engine fetched and no engine took back: they end with their leases",
        )
        self.queue_s = histogram(
            "kvferry_router_queue_seconds", "From the request to room at the servers that it needs"
        )
        if workers is not None:
            self.registry = CollectorRegistry()
            MultiProcessCollector(self.registry, str(workers))  # type: ignore[no-untyped-call]
        self.registry.register(_EngineGauges(engines, index, queue))

    def failed(self, error: ApiError) -> None:
        """Counts a failed request."""
        self.errors.labels(error.code or str(error.status)).inc()

    def answered_with(self, error: ApiError) -> None:
        """Counts a request that was answered with an error."""
        self.requests.labels(str(error.status)).inc()
        self.failed(error)

    def counted(self, answer: Endpoint) -> Endpoint:
        """An endpoint that counts its requests."""

        async def endpoint(request: Request) -> Response:
            try:
                with web.told_why():
                    response = await answer(request)
            except (web.ClientGoneError, ClientDisconnect):
                raise
            except Exception as error:
                self.answered_with(web.told_of(error))
                raise
            self.requests.labels(str(response.status_code)).inc()
            return response

        return endpoint

    async def show(self, _: Request) -> Response:
        """The endpoint that returns the metrics in Prometheus' text form."""
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")


class _EngineGauges(Collector):
    """Gauges read from the engines at each scrape."""

    def __init__(
        self, engines: Iterable[Engine], index: PrefixIndex | None, queue: RequestQueue | None
    ) -> None:
        self._engines = engines
        self._index = index
        self._queue = queue

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
        kinds = [*labels, "kind"]
        info = GaugeMetricFamily("kvferry_router_engine_info", "Its kind; always 1", labels=kinds)
        for engine in self._engines:
            info.add_metric([engine.name, engine.role, engine.told.kind], 1.0)
            up.add_metric([engine.name, engine.role], float(engine.status.healthy))
            outstanding.add_metric([engine.name, engine.role], engine.outstanding)
            silent.add_metric([engine.name, engine.role], len(engine.told.silent_peers))
        yield from (info, up, outstanding, silent)
        if self._queue is not None:
            yield GaugeMetricFamily(
                "kvferry_router_queue_waiting",
                "Requests that wait for room at the servers",
                value=self._queue.view().waiting,
            )
        if self._index is None:
            return
        blocks = GaugeMetricFamily(
            "kvferry_router_prefix_blocks",
            "Cached blocks that are known of it, where it publishes its KV cache events",
            labels=labels,
        )
        for engine in self._engines:
            known = self._index.blocks(engine.told.kv_events)
            if known is not None:
                blocks.add_metric([engine.name, engine.role], len(known))
        yield blocks
        yield CounterMetricFamily(
            "kvferry_router_prefix_forgotten",
            "How often all that was known of an engine's cache was forgotten",
            value=self._index.forgotten,
        )
