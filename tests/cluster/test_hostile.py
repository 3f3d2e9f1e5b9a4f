"""Clients that mean harm: one request harms itself only, at the router and at an engine."""

import contextlib
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from kvferry.engine import request as requests
from kvferry.engine.messages import SchedulerOutput
from kvferry.serving import web
from kvferry.testing.waiting import WAIT_S, until

# Body, the field as the refusal names it, and the bound.
OUT_OF_BOUNDS = [
    ({"seed": 2**64}, "seed is 18446744073709551616", "<= 9223372036854775807"),
    ({"seed": -1}, "seed is -1", ">= 0"),
    ({"seed": 10**300}, "seed is 1000", "<= 9223372036854775807"),
    ({"stop_token_ids": [1, 2**64]}, "stop_token_ids[1] is 184467440737", "<= 4294967295"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] is -1", ">= 0"),
    ({"stop_token_ids": [7] * 1000}, "stop_token_ids is [7, 7, ", "length <= 256"),
    ({"max_tokens": 2**64}, "max_tokens is 18446744073709551616", "<= 2147483647"),
    ({"max_tokens": 10**300}, "max_tokens is 1000", "<= 2147483647"),
    ({"top_k": 2**64}, "top_k is 18446744073709551616", "<= 2147483647"),
    ({"prompt": [1, 2**64]}, "prompt[1] is 18446744073709551616", "<= 4294967295"),
    ({"prompt": [1, -(2**70)]}, "prompt[1] is -1180591620717411303424", ">= 0"),
    ({"temperature": 3e300}, "temperature is 3e+300", "<= 2.0"),
    ({"x" * 100_000: 1}, "unknown key 'xxxx", "known keys"),
]
NOT_JSON = [b'{"prompt":[1],"temperature":1e999}', b'{"prompt":[1],"temperature":NaN}']
NESTED = [b"[" * 100_000, b'{"prompt":' * 100_000, b'{"kv_transfer_params":' * 50_000 + b"1"]


def refusal(response):
    assert response.status_code == 400, response.text
    assert len(response.content) < 1000, "a refusal repeats what was sent"
    return response.json()["error"]["message"]


@pytest.mark.parametrize(("body", "named", "bound"), OUT_OF_BOUNDS)
def test_the_router_refuses_what_is_out_of_bounds(setup, body, named, bound):
    message = refusal(setup.complete(**body))

    assert named in message
    assert bound in message
    assert setup.prefill[0].bodies == []


@pytest.mark.parametrize(("body", "named", "bound"), OUT_OF_BOUNDS)
def test_an_engine_refuses_the_same(served, body, named, bound):
    message = refusal(served.complete(**body))

    assert named in message
    assert bound in message
    assert served.complete("next").status_code == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"stop": ["x"] * 17}, "stop is ['x', "),
        ({"stop": "x" * 2000}, "stop is 'xxx"),
        ({"model": "m" * 2000}, "model is 'mmm"),
        ({"n": 2**64}, "n is 18446744073709551616"),
        ({"prompt": [[1], [2, 2**64]]}, "prompt[1][1] is 18446744073709551616"),
        ({"prompt": [1, [2]]}, "prompt: token ids among whole prompts"),
    ],
)
def test_the_router_bounds_what_it_keeps_for_itself(setup, body, named):
    assert named in refusal(setup.complete(**body))


def test_an_unknown_path_and_a_wrong_method_get_errors_of_the_api(setup, served):
    for client in (setup.client, served.client):
        unknown = client.get("/v1/" + "x" * 5000)
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"].startswith("Not Found: GET /v1/xxx")
        assert len(unknown.content) < 1000
        wrong = client.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["message"] == "Method Not Allowed: GET /v1/completions"
    messages = setup.client.get("/v1/messages/unknown").json()
    assert messages["error"]["type"] == "not_found_error"


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(setup, codec, monkeypatch):
    tokenized = []
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda text: tokenized.append(len(text)) or encode(text))

    assert setup.complete(max_tokens=5).status_code == 200
    message = refusal(setup.complete(prompt="x" * 4_000_000))

    assert "longest sequence" in message
    assert tokenized == [len("Hi")]


def test_much_text_in_many_prompts_is_tokenized_beside_the_event_loop(setup, codec, monkeypatch):
    threads = []
    encode = codec.encode
    monkeypatch.setattr(
        codec, "encode", lambda text: threads.append(threading.current_thread()) or encode(text)
    )
    assert setup.complete(max_tokens=5).status_code == 200
    assert setup.complete(prompt=["x" * 1000] * 128).status_code == 400  # too long for the model

    loop, *others = threads
    assert len(others) == 128
    assert loop not in others


@pytest.mark.parametrize("content", NOT_JSON + NESTED)
def test_what_does_not_decode_is_a_400(setup, served, content):
    refusal(setup.client.post("/v1/completions", content=content))
    refusal(served.client.post("/v1/completions", content=content))
    assert served.complete("next").status_code == 200


@pytest.mark.parametrize("field", ["tool_calls", "name"])
def test_a_conversation_that_the_template_stumbles_over_is_a_400(setup, field, monkeypatch):
    def stumble(*_args, **_kwargs):
        raise TypeError("an int has no len()")

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", stumble)
    body = {"messages": [{"role": "user", "content": "?", field: 5}]}
    assert "an int has no len()" in refusal(setup.client.post("/v1/chat/completions", json=body))


def test_seeds_of_several_choices_stay_in_bounds(setup):
    assert setup.complete(n=2, seed=2**63 - 1, max_tokens=2).status_code == 200

    assert sorted(body["seed"] for body in setup.prefill[0].bodies) == [0, 2**63 - 1]


@pytest.mark.parametrize("request_id", ["x" * 1000, "a\tb"])
def test_an_id_that_cannot_be_shown_is_refused(served, request_id):
    assert "x-request-id" in refusal(served.complete(request_id))


def test_what_cannot_be_sent_to_the_ranks_ends_that_request_alone(served, monkeypatch):
    """Were the bounds to miss something, the step would still not end the engine."""
    monkeypatch.setattr(requests, "check_request", lambda *_: None)
    monkeypatch.setattr("kvferry.engine.scheduler.check_request", lambda *_: None)
    execute = served.executor.execute

    def send(step: SchedulerOutput):
        msgspec.msgpack.encode(step)
        return execute(step)

    monkeypatch.setattr(served.executor, "execute", send)
    monkeypatch.setattr(
        "kvferry.cluster.engine_server.parse_body",
        lambda kind, body: kind(**body),
    )
    response = served.complete(seed=2**64)

    assert response.status_code == 400
    assert "cannot be sent to the ranks" in response.json()["error"]["message"]
    assert served.loop.failure is None
    assert served.complete("next").status_code == 200
    assert served.complete("r").status_code == 200, "its id and its blocks are free again"


def test_a_body_that_is_too_long_or_too_slow_is_refused(make_setup, monkeypatch):
    setup = make_setup(max_request_bytes=1000)

    assert setup.complete(prompt="x" * 500).status_code == 400  # longer than the model, only
    response = setup.complete(prompt="x" * 1000)
    assert response.status_code == 413
    assert "max_request_bytes, 1000" in response.json()["error"]["message"]

    monkeypatch.setattr(web, "BODY_TIMEOUT_S", 0.3)
    host, port = setup.client.base_url.host, setup.client.base_url.port
    with socket.create_connection((host, port), timeout=WAIT_S) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_bug(setup, caplog):
    host, port = setup.client.base_url.host, setup.client.base_url.port
    with socket.create_connection((host, port), timeout=WAIT_S) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{")
        time.sleep(0.1)
    time.sleep(0.2)

    assert setup.client.get("/health").status_code == 200
    assert "ClientDisconnect" not in caplog.text


SERVER = """
import asyncio, socket, sys
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from kvferry.serving import web
async def health(_): return Response("well")
async def post(request: Request):
    await request.body()
    return Response("done")
async def endless(_):
    async def pieces():
        while True:
            yield b"x" * 65536
    return StreamingResponse(pieces())
async def large(_): return Response(b"x" * (16 << 20))
app = Starlette(routes=[
    Route("/health", health), Route("/post", post, methods=["POST"]), Route("/endless", endless),
    Route("/large", large)
])
try:
    from kvferry.serving import connections
    connections.HEAD_TIMEOUT_S = 3.0
    connections.TAKE_TIMEOUT_S = 1.0
except ImportError:
    pass
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listener.getsockname()[1], flush=True)
asyncio.run(web.serve(app, listener))
"""


@pytest.fixture
def starved_server():
    """A server that may open 256 files; yields its port and its process id."""

    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=limit,
        text=True,
    )
    assert process.stdout is not None
    yield int(process.stdout.readline()), process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def cpu_s(pid):
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_well(port):
    """Whether a server answers over a new connection."""
    with httpx.Client(trust_env=False) as fresh:
        return fresh.get(f"http://127.0.0.1:{port}/health", timeout=WAIT_S).text == "well"


@pytest.mark.timed("The server's CPU time is measured against the clock.")
@pytest.mark.processes
@pytest.mark.parametrize(
    "half",
    [
        b"GET /health HTTP/1.1\r\nx:",
        b"POST /post HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
    ],
    ids=["head", "body"],
)
def test_300_half_sent_requests_neither_stop_nor_busy_a_server(starved_server, half):
    port, pid = starved_server
    with contextlib.ExitStack() as stack, httpx.Client(trust_env=False) as client:
        client.get(f"http://127.0.0.1:{port}/health", timeout=WAIT_S)
        for _ in range(300):
            slow = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
            )
            with contextlib.suppress(ConnectionError):
                slow.sendall(half)
        assert is_well(port)  # and all of them have been accepted
        before, began = cpu_s(pid), time.monotonic()
        for _ in range(10):
            assert is_well(port)
            time.sleep(0.1)
        # One that is busy takes all the time there is.
        assert cpu_s(pid) - before < 0.5 * (time.monotonic() - began)


def send_slowly(connection):
    """Sends a head that has no end, byte by byte."""
    deadline = time.monotonic() + WAIT_S
    for byte in itertools.chain(b"GET /health HTTP/1.1\r\n", itertools.cycle(b"x: y\r\n")):
        connection.sendall(bytes([byte]))
        time.sleep(0.2)
        if time.monotonic() > deadline:
            return


@pytest.mark.processes
def test_a_head_that_comes_byte_by_byte_is_cut_off(starved_server):
    port, _ = starved_server
    with (
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as slow,
        pytest.raises(ConnectionError),
    ):
        send_slowly(slow)


@pytest.mark.processes
def test_a_client_that_reads_slowly_but_steadily_gets_the_whole_answer(starved_server):
    port, _ = starved_server

    def takes_all():
        """Whether all came, after longer than a client may read nothing."""
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            slow.settimeout(WAIT_S)
            slow.connect(("127.0.0.1", port))
            slow.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            taken, began = 0, time.monotonic()
            with contextlib.suppress(ConnectionError):
                while piece := slow.recv(1 << 17):
                    taken += len(piece)
                    time.sleep(0.02)
            return taken > 16 << 20 and time.monotonic() - began > 1.5

    assert any(takes_all() for _ in range(5))  # a busy machine may keep a client waiting


@pytest.mark.timed("A connection that is cut off after 1 s must be seen open first.")
@pytest.mark.processes
def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(starved_server):
    port, pid = starved_server

    def is_open(peer):
        connections = psutil.net_connections("tcp")
        return any(one.pid == pid and one.raddr == peer for one in connections)

    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as deaf:
        deaf.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        assert deaf.recv(1, socket.MSG_PEEK)  # the answer has begun, and nothing of it is taken
        until(lambda: not is_open(deaf.getsockname()))
        taken, longest = 0, 64 << 20  # more than the buffers between the two hold
        with contextlib.suppress(ConnectionError):
            while piece := deaf.recv(1 << 20):
                taken += len(piece)
                assert taken < longest, "the answer goes on for ever"
