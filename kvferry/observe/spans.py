"""Spans of OpenTelemetry: a trace over a router, its engines and their ranks.

The header ``traceparent`` of W3C trace context (https://www.w3.org/TR/trace-context/) joins the
processes. The router passes the header on to both engines, even if the router makes no spans. Spans
are made if the standard environment variables name a collector and the extra ``otel`` is installed.
No request waits for spans: a separate thread makes an engine's spans after the request is over, and
the SDK's batch processor sends them.
"""

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from kvferry import __version__
from kvferry.control.messages import RequestTrace, TracePart
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox

logger = logging.getLogger(__name__)

OtelSpan: TypeAlias = Any
"""A span of OpenTelemetry."""

MAX_WAITING = 4096
"""Largest number of requests whose spans are still to be made; further requests get no spans."""
CLOSE_S = 3.0
"""Seconds for which the last spans are sent at the end; the collector may be gone."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def checked_traceparent(text: object) -> str:
    """Returns ``text`` if it is a ``traceparent``; an empty string for any other input of a client.

    >>> checked_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'
    >>> checked_traceparent("00-0af7")
    ''
    """
    return text if isinstance(text, str) and _TRACEPARENT.fullmatch(text) else ""


def new_traceparent() -> str:
    """A ``traceparent`` that begins a new, recorded trace."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


class Spans(Closing):
    """Makes the spans of a process. Any thread may call any method."""

    def __init__(self, provider: Any) -> None:
        """Takes ownership of a ``TracerProvider``; see :meth:`from_environment`."""
        self._provider = provider
        self._tracer = provider.get_tracer("kvferry", __version__)
        self._mailbox = Mailbox("spans").start()
        self._num_waiting = 0
        self._closed = False

    @classmethod
    def from_environment(cls, service: str, instance: str) -> "Spans | None":
        """Makes spans from the environment; ``None`` if it names no collector or disables spans.

        Args:
            service: name of the service, unless ``OTEL_SERVICE_NAME`` gives another name.
            instance: name of the instance of the service, for example an engine's id.
        """
        off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        exporters = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
        if off or exporters != "otlp" or not any(os.environ.get(name) for name in _ENDPOINTS):
            return None
        try:
            provider = _provider(service, instance)
        except ImportError as error:
            logger.warning(
                "the environment names a collector of OpenTelemetry, and no spans are sent to it: "
                "%s; pip install 'kvferry[otel]'",
                error,
            )
            return None
        logger.info("spans are sent as OTEL_EXPORTER_OTLP_* says")
        return cls(provider)

    def tell(self, trace: Callable[[], RequestTrace]) -> None:
        """Makes spans of a finished request; does not wait, and calls ``trace`` elsewhere."""
        if self._closed or self._num_waiting >= MAX_WAITING:
            return
        self._num_waiting += 1
        self._mailbox.post(lambda: self._make(trace))

    def _make(self, trace: Callable[[], RequestTrace]) -> None:
        self._num_waiting -= 1
        told = trace()
        lends = any(part.name in ("untaken", "held") for part in told.parts)
        attributes = {
            "request_id": told.request_id,
            "peer": told.peer,
            "peer_request_id": told.peer_request_id,
            "outcome": told.outcome,
        }
        name = "lend" if lends else "load" if told.peer_request_id else "request"
        whole = load = self.begin(name, told.traceparent, attributes, told.started)
        for part in sorted(told.parts, key=lambda part: part.rank is not None):
            # The ranks' reads lie within the load of the scheduler half.
            parent = whole if part.rank is None else load
            span = self.begin(part.name, parent, _attributes(part), part.started)
            if part.name == "load":
                load = span
            _end(span, part.error, part.started + part.seconds)
        _end(whole, told.error, told.started + told.seconds)

    def begin(
        self,
        name: str,
        parent: str | OtelSpan,
        attributes: Mapping[str, Any],
        started: float | None = None,
    ) -> OtelSpan:
        """Begins a span below another span or below a ``traceparent``.

        Args:
            name: name of the span.
            parent: the span or ``traceparent`` above the new span; empty for none.
            attributes: further attributes, named without ``kvferry.``; empty values are left out.
            started: start in Unix seconds; now by default.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if isinstance(parent, str):
            carrier = {"traceparent": parent}
            context = TraceContextTextMapPropagator().extract(carrier, Context())
        else:
            context = set_span_in_context(parent, Context())
        given = {
            f"kvferry.{name}": value
            for name, value in attributes.items()
            if value not in ("", (), None)
        }
        return self._tracer.start_span(
            name,
            context,
            attributes=given,
            start_time=None if started is None else _nanoseconds(started),
        )

    def close(self) -> None:
        """Sends the remaining spans, for at most :data:`CLOSE_S`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._mailbox.close()
        # The SDK would wait for a collector that is gone.
        sender = threading.Thread(
            target=self._provider.shutdown, name="kvferry-last-spans", daemon=True
        )
        sender.start()
        sender.join(CLOSE_S)


class RequestSpan:
    """A span of a request at the router. It also exists if no spans are made, because the router's
    page shows requests too.
    """

    def __init__(self, spans: Spans | None, name: str, parent: str, **attributes: str) -> None:
        """Begins the span.

        Args:
            spans: maker of spans; ``None`` if no spans are made.
            name: name of the span.
            parent: the ``traceparent`` above the span; empty to begin a trace.
            attributes: further attributes; ``request_id`` is the engines' id of the request.
        """
        self.name = name
        self.request_id = attributes.get("request_id", "")
        self.started = time.time()
        """Start in Unix seconds."""
        self.engines: list[str] = []
        """Names of the asked engines, in order."""
        self.error = ""
        """Reason of the failure; empty if the request did not fail."""
        self._began = time.monotonic()
        self._ended: float | None = None
        self._waits: list[RequestSpan] = []
        """Waits in the router's queue, one for each sequence of the request."""
        self._spans = spans
        self._span: OtelSpan | None = None
        self.traceparent = parent or new_traceparent()
        """The ``traceparent`` for spans below this span."""
        if spans is not None:
            self._span = spans.begin(name, parent, attributes)
            of = self._span.get_span_context()
            self.traceparent = f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags:02x}"

    @property
    def is_open(self) -> bool:
        """Whether the span has not ended yet."""
        return self._ended is None

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the end of the span, or to now."""
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    @property
    def waited_s(self) -> float:
        """Seconds in the router's queue, so far; of several sequences, the longest wait."""
        return max((wait.seconds for wait in self._waits), default=0.0)

    @contextmanager
    def waiting(self) -> Iterator["RequestSpan"]:
        """A span for a sequence's time in the router's queue, until the block ends; yields it."""
        wait = RequestSpan(self._spans, "queue", self.traceparent)
        self._waits.append(wait)
        try:
            yield wait
        finally:
            wait.end()

    @contextmanager
    def part(self, name: str, engine: str) -> Iterator[str]:
        """A span for an engine's share of the request, until the block ends; yields its
        ``traceparent``.
        """
        self.engines.append(engine)
        part = RequestSpan(self._spans, name, self.traceparent, engine=engine)
        error = ""
        try:
            yield part.traceparent
        except GeneratorExit:  # the client left, or has received everything it wanted
            raise
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            part.end(error)

    def end(self, error: str = "") -> None:
        """Ends the span; ``error`` is the reason of a failure. Idempotent."""
        if self._ended is None:
            self._ended, self.error = time.monotonic(), error
        span, self._span = self._span, None
        if span is not None:
            _end(span, error, None)


def _provider(service: str, instance: str) -> Any:
    """A provider that sends spans in batches, by OTLP, as the environment configures.

    Raises:
        ImportError: a required package is not installed.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    name = os.environ.get("OTEL_SERVICE_NAME", service)
    resource = Resource.create({"service.name": name, "service.instance.id": instance})
    # Not set for the whole process: an engine that embeds kvferry may have its own provider.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _attributes(part: TracePart) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "rank": part.rank,
        "source_ranks": part.source_ranks,
        "transport": part.transport,
        "note": part.note,
    }
    if part.nbytes:
        attributes["bytes"] = part.nbytes
        attributes["gigabytes_per_second"] = part.nbytes / max(part.seconds, 1e-9) / 1e9
    return attributes


def _end(span: OtelSpan, error: str, at: float | None) -> None:
    if error:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, error))
    span.end(None if at is None else _nanoseconds(at))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
