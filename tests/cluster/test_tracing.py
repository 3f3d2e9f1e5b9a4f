"""The router joins what engines do for one request; the whole cluster's spans reach a collector."""

import contextlib
import gzip
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig
from kvferry.observe.spans import checked_traceparent
from kvferry.testing.waiting import WAIT_S, until

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def trace_id(traceparent):
    return traceparent.split("-")[1]


def test_both_engines_are_handed_the_clients_trace(setup):
    setup.client.headers["traceparent"] = CLIENT

    assert setup.complete(max_tokens=5).status_code == 200

    assert [engine.traceparents for engine in setup.engines] == [[CLIENT], [CLIENT]]


@pytest.mark.parametrize("said", ["", "00-zz", f"{CLIENT}-more"])
def test_without_a_good_header_the_router_begins_a_trace(setup, said):
    setup.client.headers["traceparent"] = said

    setup.complete(max_tokens=5)
    setup.complete(max_tokens=5)

    told = [setup.prefill[0].traceparents, setup.decode[0].traceparents]
    assert told[0] == told[1]
    assert len(set(told[0])) == 2
    assert all(checked_traceparent(one) for one in told[0])


# ---- a whole cluster ----------------------------------------------------------------------------


class Collector:
    """Takes spans in by OTLP over HTTP, as a collector does."""

    def __init__(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        self.spans = {}
        """Service and name → spans."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, request):
        for group in request.resource_spans:
            of = {a.key: a.value.string_value for a in group.resource.attributes}
            for scope in group.scope_spans:
                for span in scope.spans:
                    key = of["service.instance.id"], span.name
                    self.spans.setdefault(key, []).append(span)

    def until(self, *keys):
        until(
            lambda: all(key in self.spans for key in keys),
            what=lambda: f"{keys} beside {sorted(self.spans)}",
        )

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def rotel(url):
    """A collector of others that hands spans on; yields its address."""
    agent = Path(pytest.importorskip("rotel").__file__).with_name("rotel-agent")
    anywhere = ("127.0.0.1", 0)
    with socket.create_server(anywhere) as one, socket.create_server(anywhere) as other:
        http, grpc = (f"127.0.0.1:{free.getsockname()[1]}" for free in (one, other))
    command = [str(agent), "start", "--otlp-http-endpoint", http, "--otlp-grpc-endpoint", grpc]
    onward = ["--exporter", "otlp", "--otlp-exporter-protocol", "http"]
    with subprocess.Popen([*command, *onward, "--otlp-exporter-endpoint", url]) as process:
        try:
            until(lambda: process.poll() is not None or listens(http))
            assert process.poll() is None
            yield f"http://{http}"
        finally:
            process.terminate()


def listens(address):
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture(params=["told by the engines", "told by rotel"])
def collector(request):
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    collector = Collector()
    with contextlib.closing(collector), contextlib.ExitStack() as stack:
        if request.param == "told by rotel":
            collector.url = stack.enter_context(rotel(collector.url))
        yield collector


def engine(role, **shape):
    kind = "kv_producer" if role == "prefill" else "kv_consumer"
    transfer = {"kv_connector": "PullConnector", "kv_role": kind, "kv_port": 0}
    return {"name": role, "num_blocks": 64, "kv_transfer_config": transfer, **shape}


@pytest.mark.timed("The collector may hold a span back, and its ports may be taken.")
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_trace_over_router_engines_and_ranks_reaches_a_collector(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    config = ClusterConfig.from_mapping(
        {
            "model": {"source": "tiny", "dtype": "float64"},
            "prefill": [engine("prefill", tp=2)],
            "decode": [engine("decode", pp=2)],
            "router": {"port": 0},
        }
    )
    body = {"prompt": list(range(3, 60)), "max_tokens": 5, "temperature": 0.0}
    with (
        Cluster.open(config) as cluster,
        httpx.Client(base_url=cluster.url, timeout=WAIT_S, trust_env=False) as client,
    ):
        answer = client.post("/v1/completions", json=body, headers={"traceparent": CLIENT})
        assert answer.status_code == 200, answer.text
        router = cluster.url.removeprefix("http://")
        collector.until(
            (router, "/v1/completions"),
            *((router, role) for role in ("prefill", "decode")),
            *(("prefill", name) for name in ("lend", "queue", "prefill", "untaken", "held")),
            *(("decode", name) for name in ("load", "lease", "wait", "read", "confirm", "answer")),
        )

    spans = [span for found in collector.spans.values() for span in found]
    assert {span.trace_id.hex() for span in spans} == {trace_id(CLIENT)}
    assert len(collector.spans["decode", "read"]) == 2  # one per rank
    known = {span.span_id for span in spans}
    (root,) = collector.spans[router, "/v1/completions"]
    assert {span.span_id for span in spans if span.parent_span_id not in known} == {root.span_id}
