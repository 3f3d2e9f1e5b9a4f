"""Fake engines behind real HTTP, a byte-level tokenizer, and servers in a thread."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.cluster.engine_server import EngineServer
from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig
from kvferry.engine.loop import EngineLoop
from kvferry.engine.request import SchedulerOptions
from kvferry.engine.weights_sources import write_tiny_tokenizer
from kvferry.observe.spans import Spans
from kvferry.router import engine_client, health, members
from kvferry.router.answer import TextCodec
from kvferry.router.router import Router
from kvferry.serving import web
from kvferry.serving.connections import Connections
from kvferry.serving.messages import EngineAddress, Role, RouterSettings
from kvferry.testing.waiting import WAIT_S, until
from tests.engine.simulated import open_simulated

EOS = 256
"""Id after the 256 bytes."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, an engine that is well may take seconds to answer a health check. The
    checks come often, so that no test waits long for the next one.
    """
    monkeypatch.setattr(health, "PROBE_INTERVAL_S", 0.1)
    monkeypatch.setattr(engine_client, "CONNECT_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(health, "CHANNEL_S", WAIT_S)
    monkeypatch.setattr(members, "MEETING_WAIT_S", WAIT_S)


@contextlib.contextmanager
def running_cluster(config: ClusterConfig, folder: Path) -> Iterator[Cluster]:
    """The cluster of this configuration, with its logs and its cache under the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE", str(folder / "cache"))
        with Cluster.open(config, logs=folder / "logs", timeout_s=WAIT_S) as cluster:
            yield cluster


@contextlib.contextmanager
def running_router(prefill: Sequence[str], decode: Sequence[str], *options: str) -> Iterator[str]:
    """The command ``kvferry router`` before these servers, all of them well; yields its address."""
    with router_process(prefill, decode, *options) as (_, url):
        yield url


@contextlib.contextmanager
def router_process(
    prefill: Sequence[str], decode: Sequence[str], *options: str, waits: bool = True
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The same; yields the process too. Unless it waits, the servers may be down."""
    command = [sys.executable, "-m", "kvferry.cli", "router", "--port", "0", *options]
    for role, urls in (("--prefill", prefill), ("--decode", decode)):
        command += [word for url in urls for word in (role, url)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = (re.search(r"http://127\.0\.0\.1:\d+(?=/v1 )", line) for line in process.stdout)
            url = next(filter(None, found)).group()
            with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
                if waits:
                    wait_until_healthy(client)
            yield process, url
        finally:
            process.send_signal(signal.SIGINT)


def leave(client: httpx.Client, when: Callable[[], Any], **body: Any) -> None:
    """Asks for a completion, and goes away without the answer as soon as ``when`` is true."""
    leave_path(client, "/v1/completions", when, body)


def leave_path(
    client: httpx.Client, path: str, when: Callable[[], Any], body: dict[str, Any]
) -> None:
    """Posts a body, and goes away without the answer as soon as ``when`` is true."""
    request = client.build_request("POST", path, json=body)
    head = b"".join(b"%b: %b\r\n" % line for line in request.headers.raw)
    asked = b"POST %b HTTP/1.1\r\n%b\r\n%b" % (request.url.raw_path, head, request.content)
    with socket.create_connection((request.url.host, request.url.port)) as connection:
        connection.sendall(asked)
        until(when)


@dataclass
class FakeEngine:
    """Answers like an engine: the tokens that follow the prompt in its script."""

    name: str
    role: Role
    script: list[int] = field(default_factory=list)
    """Tokens of the answer; drawn by how many of them the prompt already ends with."""
    prompt: list[int] = field(default_factory=list)
    """The prompt the script belongs to."""
    max_model_len: int = 512
    refuse: tuple[int, str] | None = None
    """Answer every completion with this status and message."""
    refuse_code: str | None = None
    """The code of that error."""
    dies: bool = False
    """Whether it is not well any more when it refuses."""
    refusals: int | None = None
    """How often it does so; always unless given."""
    says_how_it_ends: bool = True
    """Whether its last token comes with the reason why it is the last one."""
    break_after: int | None = None
    """Drop the stream after so many tokens."""
    error_after: int | None = None
    """Send an error event after so many tokens."""
    stall_after: int | None = None
    """Send nothing more after so many tokens, until the client goes away."""
    hang: bool = False
    """Take requests and never answer, unless released."""
    cached_tokens: int | None = 3
    """Tokens of a prompt that it says it had; it says nothing of them without."""
    tells_in_streams: bool = False
    """Whether it says so in streams too, as an engine of ours does."""
    lends: int = 0
    """Tokens that it lends of its cache to who asks for nothing else."""
    params: dict[str, Any] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    routed: list[Any] = field(default_factory=list)
    """How long the router says that a ticket lay with it; taken out of the bodies."""
    ids: list[str] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    taken_back: list[dict[str, Any]] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    healthy: bool = True
    unwell: str = ""
    """Why its health check says 503, in its own words."""
    tells: dict[str, Any] = field(default_factory=dict)
    """What its health check says while all is well; with ``drain`` it is one of ours, and hears
    when it is to drain."""
    is_slow: bool = False
    """Whether it takes connections and answers nothing but completions."""
    probes: Counter[Any] = field(default_factory=Counter)
    """Health checks by the connection that they came on; a slow engine has not answered the last
    one."""
    metrics: str = ""
    """What its ``/metrics`` says."""
    hangs_at_metrics: bool = False
    metrics_asked: int = 0
    url: str = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._tell_metrics),
                Route("/kvferry/take_back", self._take_back, methods=["POST"]),
                Route("/kvferry/drain", self._drain, methods=["POST", "DELETE"]),
            ]
        )

    async def _drain(self, request: Request) -> Response:
        await self._until_quick()
        if "drain" not in self.tells:
            return JSONResponse({}, 404)
        left = {"requests": 0, "loads": 0, "leases": 0, "is_over": True}
        self.tells = {**self.tells, "drain": left if request.method == "POST" else None}
        return JSONResponse({})

    async def _until_quick(self) -> None:
        while self.is_slow:
            await asyncio.sleep(0.01)

    async def _take_back(self, request: Request) -> Response:
        self.taken_back.append((await request.json())["kv_transfer_params"])
        return JSONResponse({})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake", "max_model_len": self.max_model_len}]})

    async def _tell_metrics(self, request: Request) -> Response:
        self.metrics_asked += 1
        while self.hangs_at_metrics and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        return Response(self.metrics, media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        self.probes[request.client] += 1
        await self._until_quick()
        if self.unwell:
            return JSONResponse({"error": {"message": self.unwell, "code": "StuckStepError"}}, 503)
        return JSONResponse(self.tells, 200 if self.healthy else 503)

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.routed.append((body.get("kv_transfer_params") or {}).pop("router_s", None))
        self.bodies.append(body)
        self.ids.append(request.headers["x-request-id"])
        self.traceparents.append(request.headers.get("traceparent", ""))
        if self.hang:
            while not self.release.is_set():
                if await request.is_disconnected():
                    self.aborted.set()
                    return Response(status_code=499)
                await asyncio.sleep(0.01)
        if self.refuse and self.refusals != 0:
            self.refusals = None if self.refusals is None else self.refusals - 1
            self.healthy = not self.dies
            status, message = self.refuse
            error = {"message": message, "code": self.refuse_code}
            return JSONResponse({"error": error}, status)
        if (body.get("kv_transfer_params") or {}).get("only_cached"):
            return JSONResponse(self._lend())
        tokens, reason = self.draw(body)
        if body["stream"]:
            return StreamingResponse(self._events(tokens, reason), media_type="text/event-stream")
        choice = {"index": 0, "token_ids": tokens, "finish_reason": reason}
        reply = {"choices": [choice], "usage": self._usage()}
        if body.get("kv_transfer_params", {}).get("do_remote_decode") and reason == "length":
            reply["kv_transfer_params"] = {"ticket": f"from {self.name}"}
        return JSONResponse(reply)

    def _usage(self) -> dict[str, Any]:
        if self.cached_tokens is None:
            return {}
        return {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}

    def _lend(self) -> dict[str, Any]:
        lent: dict[str, Any] = {"do_remote_prefill": bool(self.lends)}
        lent["remote_num_tokens"] = self.lends
        if self.lends:
            lent["ticket"] = f"lent by {self.name}"
        choice = {"index": 0, "token_ids": [], "finish_reason": "length"}
        return {"choices": [choice], "kv_transfer_params": lent}

    def draw(self, body: dict[str, Any]) -> tuple[list[int], str]:
        assert body["prompt"][: len(self.prompt)] == self.prompt
        drawn = len(body["prompt"]) - len(self.prompt)
        assert body["prompt"][len(self.prompt) :] == self.script[:drawn]
        assert body.get("seed_offset", 0) == drawn
        tokens = self.script[drawn : drawn + body["max_tokens"]]
        if EOS in tokens:
            return tokens[: tokens.index(EOS) + 1], "stop"
        return tokens, "length"

    async def _events(self, tokens: list[int], reason: str):
        try:
            for count, token in enumerate(tokens):
                if count == self.break_after:
                    raise ConnectionResetError("as told by the test")
                if count == self.error_after:
                    yield web.sse_event({"error": {"message": "the load failed", "code": 500}})
                    return
                if count == self.stall_after:
                    await asyncio.Event().wait()
                last = count == len(tokens) - 1
                told = reason if last and self.says_how_it_ends else None
                choice = {"token_ids": [token], "finish_reason": told}
                usage = self._usage() if self.tells_in_streams and count == 0 else None
                yield web.sse_event({"choices": [choice], "usage": usage})
                await asyncio.sleep(0)
            if self.break_after == len(tokens):
                raise ConnectionResetError("as told by the test")
            yield web.sse_event({"choices": [], "usage": {}})
            yield web.SSE_DONE
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.set()
            raise


class Servers:
    """uvicorn servers on free ports, all in the event loop of one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._running: list[tuple[uvicorn.Server, Any, socket.socket]] = []
        self._ending: list[tuple[uvicorn.Server, Any, socket.socket]] = []

    def start(self, app: Any, **tls: Any) -> str:
        """Starts a server, with uvicorn's options of TLS; returns its address."""
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            app,
            http=Connections(web.MAX_CONNECTIONS, app, lambda _: None),  # type: ignore[arg-type]
            log_level="critical",
            timeout_graceful_shutdown=1,
            ws="none",
            access_log=False,
            **tls,
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        future = asyncio.run_coroutine_threadsafe(server.serve([listener]), self._loop)
        self._running.append((server, future, listener))
        scheme = "https" if tls else "http"
        return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"

    def stop(self, url: str) -> None:
        """Ends one server at once, connections included."""
        for entry in list(self._running):
            server, future, listener = entry
            if not url.endswith(f":{listener.getsockname()[1]}"):
                continue
            asyncio.run_coroutine_threadsafe(_abort_connections(server), self._loop).result(WAIT_S)
            server.should_exit = True
            future.result(WAIT_S)
            # Those too that were made meanwhile.
            asyncio.run_coroutine_threadsafe(_abort_connections(server), self._loop).result(WAIT_S)
            listener.close()
            self._running.remove(entry)

    def end_all(self) -> None:
        """Tells every server to end; `close` waits for them."""
        for server, _, _ in self._running:
            server.should_exit = True
        self._ending += self._running
        self._running = []

    def close(self) -> None:
        self.end_all()
        for _, future, listener in self._ending:
            future.result(WAIT_S)
            listener.close()
        asyncio.run_coroutine_threadsafe(_cancel_the_rest(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


async def _abort_connections(server: uvicorn.Server) -> None:
    for connection in server.server_state.connections:
        connection.transport.abort()


async def _cancel_the_rest() -> None:
    """Ends what servers have left: a loop that is closed complains of it."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


@pytest.fixture(scope="session")
def server_thread() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()


@pytest.fixture
def servers(server_thread: Servers) -> Iterator[Servers]:
    yield server_thread
    server_thread.end_all()


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer whose ids 0 to 255 are bytes and 256 ends a text."""
    folder = tmp_path_factory.mktemp("byte_model")
    write_tiny_tokenizer(folder, 257)
    config = folder / "tokenizer_config.json"
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    )
    values = {**msgspec.json.decode(config.read_bytes()), "chat_template": template}
    config.write_bytes(msgspec.json.encode(values))
    return folder


@pytest.fixture(scope="session")
def codec(byte_model: Path) -> TextCodec:
    return TextCodec.open(byte_model)


@dataclass
class Setup:
    """A router with its fake engines."""

    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    client: httpx.Client
    servers: Servers

    @property
    def engines(self) -> list[FakeEngine]:
        return self.prefill + self.decode

    def says(self, text: str | bytes, prompt: str = "Hi", *, eos: bool = False) -> None:
        """From now on every engine answers ``prompt`` with ``text``."""
        data = text.encode() if isinstance(text, str) else text
        for engine in self.engines:
            engine.prompt = list(prompt.encode())
            engine.script = list(data) + ([EOS] if eos else [])

    def complete(self, **body: Any) -> httpx.Response:
        body = {"prompt": "Hi", "temperature": 0, "max_tokens": 100, **body}
        return self.client.post("/v1/completions", json=body)

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """The decoded events of a stream; ``"[DONE]"`` as it is."""
        if path.endswith("/completions") and "messages" not in body:
            body = {"prompt": "Hi", "temperature": 0, "max_tokens": 100, **body}
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else msgspec.json.decode(line) for line in lines]

    def stop(self, engine: FakeEngine) -> None:
        self.servers.stop(engine.url)


@pytest.fixture
def make_setup(
    servers: Servers, codec: TextCodec, byte_model: Path
) -> Iterator[Callable[..., Setup]]:
    clients: list[httpx.Client] = []

    def make(
        prefill: int = 1,
        decode: int = 1,
        *,
        wait: bool = True,
        slow: bool = False,
        spans: Spans | None = None,
        **settings: Any,
    ) -> Setup:
        fakes = [FakeEngine(f"p{i}", "prefill") for i in range(prefill)]
        fakes += [FakeEngine(f"d{i}", "decode") for i in range(decode)]
        for fake in fakes:
            fake.is_slow = slow
            fake.url = servers.start(fake.app())
        addresses = tuple(
            EngineAddress(name=fake.name, role=fake.role, url=fake.url) for fake in fakes
        )
        settings.setdefault("operator_key", "operator")
        router = Router(
            RouterSettings(
                engines=addresses, model_folder=str(byte_model), model_name="fake", **settings
            ),
            codec,
            spans=spans,
        )
        client = httpx.Client(
            base_url=servers.start(router.app()),
            timeout=WAIT_S,
            trust_env=False,
            headers={"authorization": "Bearer operator"},
        )
        clients.append(client)
        setup = Setup(fakes[:prefill], fakes[prefill:], client, servers)
        setup.says("Hello")
        if wait:
            wait_until_healthy(client)
        return setup

    yield make
    for client in clients:
        client.close()


def wait_until_healthy(client: httpx.Client) -> None:
    """Waits for the first health checks of a router's engines."""

    def is_ready() -> bool:
        with contextlib.suppress(httpx.ConnectError):
            engines = client.get("/health").json()["engines"]
            return all(engine["healthy"] for engine in engines)
        return False

    until(is_ready)


@pytest.fixture
def setup(make_setup: Callable[..., Setup]) -> Setup:
    """One prefill engine, one decode engine."""
    return make_setup()


PROMPT = [1, 2, 3, 4, 5]


class Served:
    """An engine behind HTTP."""

    def __init__(self, servers, **options):
        scheduler = SchedulerOptions(vocab_size=64, **{"max_model_len": 128, **options})
        engine, self.executor, self.connector = open_simulated(scheduler, scripted=True)
        self.failed = threading.Event()
        self.loop = EngineLoop.open(engine, lambda _error: self.failed.set())
        server = EngineServer(
            self.loop, name="e0", kv_role="kv_both", model_name="toy", max_model_len=128
        )
        self.client = httpx.Client(
            base_url=servers.start(server.app()), timeout=WAIT_S, trust_env=False
        )

    def complete(self, request_id="r", **body):
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, **body}
        headers = {"x-request-id": request_id}
        return self.client.post("/v1/completions", json=body, headers=headers)

    def stream(self, **body):
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, "stream": True, **body}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def wait_idle(self):
        """Waits until no request runs; returns the metrics."""
        until(lambda: 'live_requests{state="running"} 0.0' in self.client.get("/metrics").text)
        return self.client.get("/metrics").text

    def close(self):
        self.client.close()
        self.loop.close()


@pytest.fixture
def make_served(servers):
    made = []

    def make(**options):
        made.append(Served(servers, **options))
        return made[-1]

    yield make
    for served in made:
        served.close()


@pytest.fixture
def served(make_served):
    return make_served()
