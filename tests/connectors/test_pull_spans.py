"""An engine's records become spans of the request's trace; without a collector nothing does."""

import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.control.messages import RequestTrace
from kvferry.observe.spans import MAX_WAITING, RequestSpan, Spans
from kvferry.testing.connector_conformance import Pair
from kvferry.testing.fake_rank import Stage
from kvferry.testing.waiting import WAIT_S
from tests.connectors.engines import SOURCE, TARGET, params_of

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Keeps the spans of all processes of a test, as a collector would."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self._opened: list[Spans] = []

    def open(self, *_: Any) -> Spans:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self._opened.append(Spans(provider))
        return self._opened[-1]

    def spans(self) -> list[Any]:
        """All spans, once those that were begun have been made."""
        for spans in self._opened:
            spans._mailbox.call(lambda: None)
        return list(self.exporter.get_finished_spans())

    def close(self) -> None:
        for spans in self._opened:
            spans.close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    monkeypatch.setattr(Spans, "from_environment", collector.open)
    yield collector
    collector.close()


@pytest.fixture
def pair(collector: Collector, open_engine: Any) -> Pair:
    return Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S)


def traced(pair: Pair, parent: str, request_id: str = "r") -> None:
    """A request that is prefilled and decoded, with the header for both engines."""
    for engine in (pair.producer, pair.consumer):

        def with_header(request: Any, add: Any = engine.scheduler.on_new_request) -> None:
            request.traceparent = parent
            add(request)

        engine.scheduler.on_new_request = with_header  # type: ignore[method-assign]
    pair.finish(pair.decode(pair.prefill(request_id, 21)))
    pair.settle()


def tree(spans: list[Any]) -> dict[str, list[str]]:
    """Name of a span → names of those below it, sorted; ``""`` for those that are not there."""
    names = {span.context.span_id: span.name for span in spans}
    below: dict[str, list[str]] = {}
    for span in spans:
        parent = "" if span.parent is None else names.get(span.parent.span_id, "")
        below.setdefault(parent, []).append(span.name)
    return {name: sorted(found) for name, found in below.items()}


def test_router_engines_and_ranks_are_one_trace(pair: Pair, collector: Collector) -> None:
    request = RequestSpan(collector.open(), "request", CLIENT)
    with request.part("decode", "d") as parent:
        traced(pair, parent)
    request.end()

    spans = collector.spans()

    assert {f"{span.context.trace_id:032x}" for span in spans} == {CLIENT.split("-")[1]}
    assert tree(spans) == {
        "": ["request"],
        "request": ["decode"],
        "decode": ["lend", "load"],
        "lend": ["held", "prefill", "queue", "untaken"],
        "load": sorted(["answer", "first token", "handshake", "lease", "load", "wait"]
                       + 2 * ["confirm", "read"]),
    }  # fmt: skip
    (root,) = [span for span in spans if span.name == "request"]
    assert f"{root.parent.span_id:016x}" == CLIENT.split("-")[2]


def test_reads_have_transport_bytes_and_rank_and_lie_within_the_load(
    pair: Pair, collector: Collector
) -> None:
    traced(pair, CLIENT)
    spans = collector.spans()
    reads = [span for span in spans if span.name == "read"]
    (load,) = [s for s in spans if s.name == "load" and s.parent.span_id in ids(spans)]

    for read in reads:
        assert read.parent.span_id == load.context.span_id
        assert read.attributes["kvferry.transport"]
        assert read.attributes["kvferry.bytes"] > 0
        assert read.attributes["kvferry.gigabytes_per_second"] > 0
        assert read.attributes["kvferry.source_ranks"] == (0, 1)
        assert read.start_time < read.end_time
    assert {read.attributes["kvferry.rank"] for read in reads} == {0, 1}


def ids(spans: list[Any]) -> set[int]:
    return {span.context.span_id for span in spans}


def test_a_failed_load_is_a_span_with_its_cause(pair: Pair, collector: Collector) -> None:
    source = pair.prefill("r", 21)
    pair.producer.scheduler.take_back(params_of(source))
    pair.finish(pair.decode(source))

    failed = {span.name: span for span in collector.spans() if not span.status.is_ok}

    assert set(failed) == {"load", "lease"}
    assert failed["lease"].status.description.startswith("LeaseRevokedError: ")


def test_an_aborted_load_is_told_once(pair: Pair, collector: Collector) -> None:
    request = pair.decode(pair.prefill("r", 21))
    pair.abort_within_a_step(request, Stage.LOADING)
    pair.settle()

    whole = [
        span
        for span in collector.spans()
        if span.name == "load" and "kvferry.outcome" in span.attributes
    ]

    assert [span.attributes["kvferry.outcome"] for span in whole] == ["aborted"]


def test_a_step_waits_for_no_span(collector: Collector) -> None:
    spans, blocked = collector.open(), threading.Event()
    spans._mailbox.post(lambda: blocked.wait(WAIT_S))
    asked = []
    trace = RequestTrace(request_id="r", started=1.0, seconds=1.0, outcome="stop", parts=())

    for _ in range(MAX_WAITING + 5):
        spans.tell(lambda: asked.append(1) or trace)

    assert asked == []
    assert spans._num_waiting == MAX_WAITING  # what is beyond is left out
    blocked.set()


# ---- on or off ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_made_unless_the_environment_says_so(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert Spans.from_environment("engine", "p") is None


def test_without_the_extra_there_is_one_warning_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with caplog.at_level(logging.WARNING):
        assert Spans.from_environment("engine", "p") is None

    spoken = [text for text in caplog.messages if "otel" in text]
    assert len(spoken) == 1
    assert "pip install 'kvferry[otel]'" in spoken[0]
