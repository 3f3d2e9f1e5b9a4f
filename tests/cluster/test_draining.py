"""A router that is told to end: it drains, and at last cuts what still runs, with a word."""

import contextlib
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import router_process
from tests.cluster.streams import CHAT, COMPLETIONS, CONTENT, END, MESSAGES, RESPONSES, Server

pytestmark = pytest.mark.processes

NEVER = ("--drain-timeout", str(WAIT_S * 10))
"""No test waits for so long: a router that ends has ended before."""
BY_TOKENS = {"prompt": "Hi", "temperature": 0, "max_tokens": 9}
BODIES: list[Any] = [
    (COMPLETIONS, BY_TOKENS),
    pytest.param(COMPLETIONS, {"prompt": "Hi"}, marks=pytest.mark.slow),  # passes through
    (CHAT, {"messages": []}),
    pytest.param(MESSAGES, {"messages": []}, marks=pytest.mark.slow),
    pytest.param(RESPONSES, {"input": "Hi"}, marks=pytest.mark.slow),
]


def knows(body, byte_model):
    """The options with which a router knows the tokens of the body."""
    return ("--tokenizer", str(byte_model)) if body == BY_TOKENS else ()


IDS = ["tokens", "completions", "chat", "messages", "responses"]


@dataclass
class Asked:
    """A request in a thread of its own, so that its answer is read as it comes."""

    url: str
    path: str
    body: dict
    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    content: bytes = b""

    def __post_init__(self):
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self):
        with (
            httpx.Client(timeout=WAIT_S, trust_env=False) as client,
            client.stream("POST", self.url + self.path, json=self.body) as response,
        ):
            self.status, self.headers = response.status_code, response.headers
            for chunk in response.iter_raw():
                self.content += chunk

    def whole(self) -> bytes:
        """The answer at its end; a connection that is cut is an error of the thread."""
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.content


@dataclass
class Running:
    """A router before a server of each role."""

    process: subprocess.Popen[str]
    url: str
    servers: list[Server]

    def ask(self, path=CHAT, stream=True, **body) -> Asked:
        *_, decode = self.servers
        before = len(decode.bodies)
        asked = Asked(self.url, path, {**body, "stream": stream})
        until(lambda: asked.content if stream else len(decode.bodies) > before)
        return asked

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def answer(self, method, path, **body) -> httpx.Response:
        """The answer of a worker that has something to do; one that has nothing may end just as it
        takes a connection.
        """

        def answer():
            with contextlib.suppress(httpx.TransportError):
                return httpx.request(
                    method, self.url + path, json=body, timeout=WAIT_S, trust_env=False
                )

        return until(answer)

    def health(self):
        return self.answer("GET", "/health")

    def drains(self):
        return self.health().json()["status"] == "draining"


@contextlib.contextmanager
def started(servers, *options) -> Iterator[Running]:
    both = [Server(), Server()]
    p, d = (servers.start(each.app()) for each in both)
    with router_process([p], [d], *options) as (process, url):
        try:
            yield Running(process, url, both)
        finally:
            for each in both:
                each.goes_on.set()


@pytest.fixture(params=["1", "2"])
def workers(request):
    return ("--workers", request.param)


@pytest.mark.parametrize(("path", "body"), BODIES, ids=IDS)
def test_a_router_that_drains_refuses_new_requests_and_ends_with_its_last_stream(
    servers, byte_model, workers, path, body
):
    with started(servers, *workers, *NEVER, *knows(body, byte_model)) as running:
        asked = running.ask(path, **body)

        running.signal()
        until(running.drains)
        assert running.health().status_code == 503
        refused = running.answer("POST", path, **body, stream=True)
        told = refused.json()
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert int(refused.headers["retry-after"]) > 0
        assert "this router is draining; send the request again" in told["error"]["message"]
        if path == MESSAGES:
            assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
        counted = 'kvferry_router_errors_total{code="draining"}'
        until(lambda: counted in running.answer("GET", "/metrics").text)
        running.servers[1].goes_on.set()

        assert running.process.wait(WAIT_S) == 0
        if body == BY_TOKENS:
            assert asked.whole().endswith(b"data: [DONE]\n\n")
            assert b'"finish_reason":"length"' in asked.content
        else:
            assert asked.whole().endswith(CONTENT[path] + END[path])


def check_error(path, content):
    """The end of a stream that was cut, in the form of its API."""
    *_, end = content.removesuffix(b"data: [DONE]\n\n").rstrip().split(b"\n\n")
    told = json.loads(end.partition(b"data: ")[2])
    if path == RESPONSES:
        assert end.startswith(b"event: error\n")
        assert (told["type"], told["code"], told["sequence_number"]) == ("error", "draining", 3)
        assert "--drain-timeout" in told["message"]
        return
    assert "--drain-timeout" in told["error"]["message"]
    if path == MESSAGES:
        assert end.startswith(b"event: error\n")
        assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
    else:
        assert content.endswith(b"data: [DONE]\n\n")
        assert told["error"]["code"] == "draining"


@pytest.mark.parametrize(("path", "body"), BODIES, ids=IDS)
def test_a_stream_that_still_runs_at_the_end_of_the_time_gets_an_error_event(
    servers, byte_model, workers, path, body
):
    options = ("--drain-timeout", "0.1", *knows(body, byte_model))
    with started(servers, *workers, *options) as running:
        asked = running.ask(path, **body)
        running.signal()

        assert running.process.wait(WAIT_S) == 0
        check_error(path, asked.whole())
        assert asked.status == 200


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_router_at_once(servers, workers, second):
    with started(servers, *workers, *NEVER) as running:
        asked, whole = running.ask(), running.ask(stream=False)
        running.signal()
        until(running.drains)
        running.signal(second)

        assert running.process.wait(WAIT_S) == 0
        check_error(CHAT, asked.whole())
        assert json.loads(whole.whole())["error"]["code"] == "draining"
        assert (whole.status, whole.headers["retry-after"]) == (503, "1")


def test_ctrl_c_gives_streams_a_moment_and_then_the_same_error(servers, workers):
    with started(servers, *workers, *NEVER) as running:
        asked, began = running.ask(), time.monotonic()
        running.signal(signal.SIGINT)

        assert running.process.wait(WAIT_S) == 0
        assert time.monotonic() - began > 2.9
        check_error(CHAT, asked.whole())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_without_requests_ends_at_once(servers, workers, number):
    with (
        started(servers, *workers, *NEVER) as running,
        httpx.stream("GET", f"{running.url}/kvferry/watch", timeout=WAIT_S) as page,
    ):
        assert next(page.iter_raw())
        running.signal(number)
        assert running.process.wait(WAIT_S) == 0


def test_the_error_of_a_cut_stream_stands_apart_from_half_an_event(servers):
    with started(servers, "--drain-timeout", "0") as running:
        running.servers[1].torn = b'data: {"typ'
        asked = running.ask(MESSAGES)
        until(lambda: asked.content.endswith(b'{"typ'))
        running.signal()

        assert running.process.wait(WAIT_S) == 0
        check_error(MESSAGES, asked.whole())


def test_a_body_that_is_still_on_its_way_gets_the_error_too(servers):
    with started(servers, "--drain-timeout", "0") as running:
        url = httpx.URL(running.url)
        with socket.create_connection((url.host, url.port), timeout=WAIT_S) as slow:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            slow.sendall(head + b"content-length: 900\r\n\r\n")
            assert slow.recv(99).startswith(b"HTTP/1.1 100")  # the router waits for the body
            running.signal()

            assert running.process.wait(WAIT_S) == 0
            assert slow.recv(9999).startswith(b"HTTP/1.1 503")
