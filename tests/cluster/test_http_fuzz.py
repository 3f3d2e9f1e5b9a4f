"""Nearly right HTTP at the router and at engines that lend and load: one request harms itself only.

A prefill engine and a decode engine over the toy model, with the connector that ships, and a router
in front. After each batch they serve a request rightly, nothing of the batch is left, and no thread
has died.
"""

import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import logging
import queue
import random
import re
import socket
import threading
import time
from collections import Counter
from operator import methodcaller
from typing import Any, cast

import aiohttp
import httpx
import psutil
import pytest
import uvicorn

from kvferry.cluster import engine_server
from kvferry.cluster.engine_server import EngineServer
from kvferry.config import KVTransferConfig
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.engine.loop import EngineLoop
from kvferry.engine.messages import SamplingParams
from kvferry.router.rooms import REMOTE_DECODE
from kvferry.router.router import Router
from kvferry.serving import connections, web
from kvferry.serving.connections import Connections
from kvferry.serving.messages import EngineAddress, RouterSettings
from kvferry.testing.waiting import WAIT_S, NotInTimeError
from tests.cluster.fuzzing import HttpRequest, Line, nearly_http
from tests.engine.simulated import open_connected
from tests.engine.toy_cache import reference_tokens

BATCH = 1000
VOCAB = 257
"""The bytes, and the end of a text."""
LONGEST = 40
"""Tokens of a sequence."""
PROMPT = list(b"an honest prompt")
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak
COUNTED = pytest.mark.timed("Objects, threads and log records of the whole process are counted.")
SOON = pytest.mark.timed("Heads and bodies of 64 clients must come within 0.5 s.")
COUNTS = [
    pytest.param(1000, 0, id="short", marks=COUNTED),
    pytest.param(5_000, 1, id="long", marks=(COUNTED, SLOW)),
    # A million, in parts that a slow machine ends in time.
    *(pytest.param(10_000, seed, id=f"soak-{seed}", marks=SOAK) for seed in range(2, 102)),
]


class Member:
    """One engine of the pair, and its HTTP application."""

    def __init__(self, name, role):
        config = KVTransferConfig(
            kv_connector="PullConnector",
            kv_role=role,
            engine_id=name,
            kv_port=0,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "cluster_key": "k" * 32,
                "transport": "tcp",
                "lease_duration_s": 10 * WAIT_S,  # nothing is waited for so long
            },
        )
        self.engine, self._executor = open_connected(
            config,
            num_blocks=200,
            block_size=4,
            world_size=1,
            vocab_size=VOCAB,
            max_model_len=LONGEST,
        )
        self.loop = EngineLoop.open(self.engine)
        server = EngineServer(
            self.loop, name=name, kv_role=role, model_name="toy", max_model_len=LONGEST
        )
        self.app = server.app()

    @property
    def leases(self):
        connector = self.engine.connector
        assert isinstance(connector, PullScheduler)
        return connector.lender.leases

    def is_settled(self):
        """Whether it holds nothing for anybody."""
        self._executor.steps.clear()  # the test's own memory
        stats = self.loop.call(lambda engine: engine.stats()).result(60).scheduler
        busy = stats.running + stats.waiting + stats.loading + stats.lent + self.leases.num_open
        return not busy and stats.free_blocks == stats.usable_blocks


class Inside:
    """Takes the router's requests to the engines without a socket, as a client's session would."""

    def __init__(self, apps):
        self._apps = apps
        self.unread = []
        """Answers that were on their way when the router gave their request up."""

    async def request(self, method, url, *, headers, data, **_):
        gone = asyncio.Event()
        answer = asyncio.create_task(self._ask(method, url, headers, data or b"", gone))
        try:
            status, headers, body = await asyncio.shield(answer)
        except asyncio.CancelledError:
            gone.set()
            answer.add_done_callback(lambda task: self.unread.append(task.result()[2]))
            raise
        return WholeAnswer(status, headers, body)

    async def close(self):
        pass

    async def _ask(self, method, url, headers, content, gone):
        url = httpx.URL(url)
        scope = {
            "type": "http",
            "method": method,
            "path": url.path,
            "raw_path": url.raw_path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "root_path": "",
        }
        asked = [{"type": "http.request", "body": content, "more_body": False}]
        sent = []

        async def receive():
            if not asked:
                await gone.wait()
            return asked.pop() if asked else {"type": "http.disconnect"}

        async def send(message):
            if not gone.is_set():
                sent.append(message)

        await self._apps[url.host](scope, receive, send)
        body = b"".join(part.get("body", b"") for part in sent)
        return (sent[0]["status"], sent[0]["headers"], body) if sent else (499, [], b"")


class WholeAnswer:
    """What a session gives, as far as the router looks at it."""

    connection = None
    """It has nothing more to bring."""

    def __init__(self, status, headers, body):
        self.status, self._body = status, body
        self.raw_headers = headers
        self.headers = {name.decode(): value.decode() for name, value in headers}
        self.content = self

    async def read(self):
        return self._body

    async def readany(self):
        body, self._body = self._body, b""
        return body

    async def iter_any(self):
        if self._body:
            yield self._body

    def close(self):
        pass


class Pair:
    """Both engines and the router."""

    def __init__(self, codec, byte_model):
        self.prefill, self.decode = Member("p", "kv_producer"), Member("d", "kv_consumer")
        settings = RouterSettings(
            engines=(
                EngineAddress(name="p", role="prefill", url="http://p"),
                EngineAddress(name="d", role="decode", url="http://d"),
            ),
            model_folder=str(byte_model),
            model_name="toy",
            max_request_bytes=1 << 20,
        )
        self.router = Router(settings, codec)
        self.inside = Inside({"p": self.prefill.app, "d": self.decode.app})
        session = cast(aiohttp.ClientSession, self.inside)
        self.router.client.kept = self.router.client.new = session

    @property
    def members(self):
        return self.prefill, self.decode

    def tickets(self):
        """What P lends for some requests."""
        ended: queue.Queue[Any] = queue.Queue()
        sampling = SamplingParams(max_tokens=1)
        for number in range(8):
            self.prefill.loop.submit(
                f"lend-{number}", PROMPT, sampling, ended.put, kv_transfer_params=REMOTE_DECODE
            )
        return [ended.get(timeout=60).kv_transfer_params for _ in range(8)]

    async def take_back(self, lent):
        """What somebody was lent, and will not use."""
        for params in lent:
            taken = self.prefill.loop.call(methodcaller("take_back", params))
            await asyncio.wrap_future(taken)

    def close(self):
        for member in self.members:
            member.loop.close()


@pytest.fixture
def pair(codec, byte_model, monkeypatch):
    monkeypatch.setattr(engine_server, "REMEMBERED_REQUESTS", 100)
    monkeypatch.setattr(engine_server, "REMEMBERED_RECORDS", 100)
    pair = Pair(codec, byte_model)
    yield pair
    pair.close()


ASKED = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0.0, "return_token_ids": True}
DRAWN = {"top_k": 5, "top_p": 0.5, "seed": 7, "stop_token_ids": [1, 2], "ignore_eos": True}
KV = "kv_transfer_params"
LEND = {**ASKED, "max_tokens": 1, KV: REMOTE_DECODE}
COMMON = [HttpRequest("/health"), HttpRequest("/metrics"), HttpRequest("/v1/models")]


def router_requests():
    chat = [{"role": "user", "content": "Hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    more = {**ASKED, **DRAWN, "stream": True, "stream_options": {"include_usage": True}}
    for body in (
        ASKED,
        more,
        {"prompt": "some text", "max_tokens": 2, "stop": ["x", "yz"], "model": "toy"},
        {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 2},
        {"prompt": ["a", "b"], "user": "u", "logit_bias": {}, "echo": False, "max_tokens": 1},
    ):
        yield HttpRequest("/v1/completions", body)
    for messages in (chat, parts, [*chat, {"role": "assistant", "content": None}]):
        yield HttpRequest("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    yield from COMMON


def engine_requests(tickets):
    yield HttpRequest("/v1/completions", ASKED, {"x-request-id": "r"})
    yield HttpRequest("/v1/completions", {**ASKED, **DRAWN, "seed_offset": 3, "stream": True})
    yield HttpRequest("/v1/completions", LEND)
    yield HttpRequest("/v1/completions", {**LEND, "stream": True})
    for params in tickets:
        yield HttpRequest("/v1/completions", {**ASKED, KV: params})
        yield HttpRequest("/kvferry/take_back", {KV: params, "request_ids": ["r", "s"]})
    yield from (*COMMON, HttpRequest("/kvferry/records"))


class Hostile:
    """What speaks to the servers of one application, and looks at what it is told."""

    clients = 16
    """That speak at once."""

    def __init__(self, app, seed):
        self._connections = Connections(1000, app, lambda _: None)
        self._config = uvicorn.Config(
            app,
            http=self._connections,  # type: ignore[arg-type] # it is called like the class
            ws="none",
            access_log=False,
            log_config=None,
        )
        self._config.load()
        self._rng = random.Random(seed)
        self.statuses: Counter[int] = Counter()

    async def batch(self, requests, count):
        """Says ``count`` nearly right things; returns what was lent in the answers."""
        said = nearly_http(requests, count, self._rng)
        lent = []

        async def client():
            for pieces in said:
                answer = await self.say(pieces, leave=self._rng.random() < 0.05)
                self._look(answer, pieces)
                lent.extend(lent_in(answer))

        await asyncio.gather(*(client() for _ in range(self.clients)))
        return lent

    async def say(self, pieces, *, leave):
        return await Line(self._config, self._connections).say(pieces, leave=leave)

    def _look(self, answer, pieces):
        status = int(answer[9:12] or 0)
        self.statuses[status] += 1
        assert status in KNOWN, (answer[:1000], pieces)
        assert b"internal_error" not in answer, (answer[:1000], pieces)
        if status == 400 and answer.count(b"HTTP/1.1 ") == 1:
            assert len(answer) < 3000, (answer[:1000], pieces)  # it repeats nothing long


KNOWN = {0, 100, 200, 307, 400, 404, 405, 408, 413, 500}
"""What may be answered: nothing to who leaves, 500 for a ticket that is refused."""


def lent_in(answer):
    """The transfer parameters in an answer."""
    for found in re.finditer(rb'"kv_transfer_params":(?={)', answer):
        text = answer[found.end() :].decode("utf-8", "replace")
        yield json.JSONDecoder().raw_decode(text)[0]


async def settled(pair):
    """Waits until nothing of the batch is left, which takes no lease's time-out."""
    deadline = time.monotonic() + WAIT_S
    for member in pair.members:
        while not await asyncio.to_thread(member.is_settled):
            unread, pair.inside.unread = pair.inside.unread, []
            await pair.take_back(itertools.chain(*map(lent_in, unread)))
            if time.monotonic() > deadline:
                raise NotInTimeError(f"leases: {member.leases.snapshot()}")
            await asyncio.sleep(0.01)
    for engine in pair.router.members:
        assert (engine.outstanding, engine.lent, engine._waits) == (0, 0, set())
    assert not pair.router.bodies.held
    for member in pair.members:
        assert member.loop.failure is None
        assert not member.engine.connector.borrower.loads
        assert not member.engine.connector.sources.agenda.pursuits


async def honest(pair):
    """A request through the router: P's token, D's from P's cells."""
    transport = httpx.ASGITransport(pair.router.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://r") as client:
        await asyncio.gather(*(engine.health.probing() for engine in pair.router.members))
        response = await client.post("/v1/completions", json={**ASKED, "max_tokens": 8})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["token_ids"] == reference_tokens(PROMPT, 8, VOCAB)


def threads():
    return {thread.name for thread in threading.enumerate()}


async def attack(pair, hostile, requests_of, count, batch=BATCH):
    """Batch after batch, with a look at the pair after each; what was answered stands in
    ``hostile.statuses``."""
    await honest(pair)
    alive, before = threads(), (0, 0)
    for first in range(0, count, batch):
        requests = await asyncio.to_thread(lambda: list(requests_of()))
        lent = await hostile.batch(requests, min(batch, count - first))
        lent += [params for one in requests if (params := (one.body or {}).get(KV))]
        await pair.take_back(lent)
        await settled(pair)
        await honest(pair)
        await settled(pair)
        assert alive <= threads()
        assert len(asyncio.all_tasks()) < 20, asyncio.all_tasks()
        if not first:
            before = held()
    objects, resident = (now - then for now, then in zip(held(), before, strict=True))
    # One in ten requests may not leave one object; the allocator keeps some memory for itself.
    assert objects < count // 10 + 10_000, objects
    assert resident < 256 << 20, resident
    assert min(hostile.statuses[200], hostile.statuses[400]) > count // 20, hostile.statuses


def held():
    """Objects and bytes that this process has."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps on a busy machine is no leak
    return len(gc.get_objects()), psutil.Process().memory_info().rss


@pytest.fixture
def no_errors(caplog):
    """Nothing is logged as an error: no request is a bug."""
    caplog.set_level(logging.ERROR)
    yield
    assert not caplog.records


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_nearly_right_requests_at_the_router_harm_nobody(pair, count, seed):
    hostile = Hostile(pair.router.app(), seed)
    asyncio.run(attack(pair, hostile, router_requests, count))


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_nearly_right_requests_at_engines_harm_nobody(pair, count, seed):
    for member in pair.members:
        hostile = Hostile(member.app, seed)
        requests = lambda: engine_requests(pair.tickets())  # noqa: E731
        asyncio.run(attack(pair, hostile, requests, count // 2))


class HostileBySocket(Hostile):
    """The same over TCP, to the server as it runs."""

    clients = 64

    address: tuple[str, int]
    """Of the server, once it listens."""

    async def say(self, pieces, *, leave):
        reader, writer = await asyncio.open_connection(*self.address)
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        answer = b""
        if not leave:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):  # to the server's time-out, if need be
                    answer += data
        writer.transport.abort()
        return answer


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize(
    ("count", "seed"),
    [
        pytest.param(500, 0, id="long", marks=(SOON, SLOW)),
        *(pytest.param(5000, seed, id=f"soak-{seed}", marks=SOAK) for seed in range(1, 5)),
    ],
)
@pytest.mark.parametrize("which", ["router", "engine"])
def test_nearly_right_requests_over_tcp_harm_nobody(pair, monkeypatch, which, count, seed):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr(web, "BODY_TIMEOUT_S", 0.5)
    app = pair.router.app() if which == "router" else pair.prefill.app
    requests = router_requests if which == "router" else lambda: engine_requests(pair.tickets())

    async def run():
        hostile, end = HostileBySocket(app, seed), asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            hostile.address = listener.getsockname()
            serving = asyncio.create_task(web.serve(app, listener, end))
            await attack(pair, hostile, requests, count, batch=250)
            end.set()
            await serving

    asyncio.run(run())
