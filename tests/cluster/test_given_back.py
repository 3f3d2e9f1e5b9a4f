"""KV that no engine will fetch goes back to its lender at once: leases last for 600 s here."""

import asyncio
import contextlib
import http.client
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvferry.config import ClusterConfig
from kvferry.control.give_backs import word_in
from kvferry.control.leases import Lease, LeaseTable
from kvferry.control.server import ControlServer
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import leave, running_cluster, running_router, wait_until_healthy

pytestmark = pytest.mark.processes

LEASE_S = 600.0
CLIENTS = 120
LIVE = "kvferry_engine_live_requests"
USED = 'kvferry_engine_kv_blocks{state="used"}'
LONGEST_S = 0.8
"""Seconds after which the last of the clients has left."""


def engine(name, role):
    return {
        "name": name,
        "num_blocks": 256,
        "max_model_len": 512,
        "kv_transfer_config": {
            "kv_connector": "PullConnector",
            "kv_role": role,
            "kv_port": 0,
            "kv_connector_extra_config": {"transport": "tcp", "lease_duration_s": LEASE_S},
        },
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    config = ClusterConfig.from_mapping(
        {
            "model": {"source": "tiny", "dtype": "float64"},
            "prefill": [engine("p0", "kv_producer"), engine("p1", "kv_producer")],
            "decode": [engine("d0", "kv_consumer")],
            "router": {"port": 0},
        }
    )
    with running_cluster(config, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def leave_early(url, seed):
    """Asks for the answer to some 300 tokens, and leaves within :data:`LONGEST_S` seconds."""
    draw = random.Random(seed)
    prompt = [draw.randrange(256) for _ in range(draw.randint(280, 320))]
    body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "stream": True}
    client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
    try:
        client.request("POST", "/v1/completions", msgspec.json.encode(body))
        time.sleep(draw.uniform(0.0, LONGEST_S))
    finally:
        client.close()


def is_idle(one):
    """Whether an engine has no request and no loan, and all its blocks are free."""
    told = httpx.get(f"{one.url}/metrics", timeout=WAIT_S, trust_env=False).text
    figures = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    live = [value for name, value in figures.items() if name.startswith(LIVE)]
    return len(live) == 4 and not any(map(float, (*live, figures[USED])))


@pytest.mark.parametrize(
    "rounds", [pytest.param(1, id="once"), pytest.param(10, marks=pytest.mark.slow, id="ten times")]
)
def test_clients_that_leave_before_their_answer_leave_no_kv_behind(cluster, rounds):
    for number in range(rounds):
        with ThreadPoolExecutor(CLIENTS) as clients:
            seeds = [f"{number}-{client}-{rounds}" for client in range(CLIENTS)]
            list(clients.map(lambda seed: leave_early(cluster.url, seed), seeds))
        for one in cluster.engines:
            until(partial(is_idle, one), what=f"{one.name} without lent KV")


# ---- servers such as vLLM's, through the command `kvferry router` --------------------------------

GIVEN_BACK = "kvferry-no-such-model"
"""The model of a request that is to be refused."""
LAPSED = "kvferry_router_loans_lapsed_total"


@dataclass
class Server:
    """Lends and loads as a vLLM server with kvferry does."""

    status: int = 200
    """Status of its answer to what it is to decode."""
    hangs: bool = False
    """Whether it gives no answer; a prefill server has lent by then."""
    is_locked: bool = False
    """Whether it refuses all requests before its handler sees them."""
    lends: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """The transfer parameters that it lends, from those of a request; a decode server has none."""
    returned: list[dict[str, Any]] = field(default_factory=list)
    """Transfer parameters of the requests that it refused in its handler."""
    asked: list[str] = field(default_factory=list)
    """Paths of all requests."""

    def app(self):
        paths = ("/v1/completions", "/v1/chat/completions")
        return Starlette(
            routes=[
                Route("/health", lambda _: Response()),
                Route("/v1/models", self._models),
                *(Route(path, self._answer, methods=["POST"]) for path in paths),
            ]
        )

    async def _models(self, _):
        return JSONResponse({"data": [{"id": "m", "max_model_len": 512, "owned_by": "vllm"}]})

    async def _answer(self, request):
        body = await request.json()
        params = body.get("kv_transfer_params") or {}
        if self.is_locked:
            return JSONResponse({"error": {"message": "no key", "code": 401}}, 401)
        if body["model"] == GIVEN_BACK:
            self.returned.append(params)
            return JSONResponse({"error": {"message": "no such model", "code": 404}}, 404)
        lent = self.lends(params) if self.lends is not None else None
        self.asked.append(request.scope["path"])
        while self.hangs and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        if lent is not None:
            choice = {"token_ids": [1], "finish_reason": "length"}
            return JSONResponse({"choices": [choice], "kv_transfer_params": lent})
        if self.status != 200:
            return JSONResponse({"error": {"message": "as told", "code": self.status}}, self.status)
        return JSONResponse({"choices": [{"index": 0, "text": "!", "finish_reason": "stop"}]})


@dataclass
class Pair:
    prefill: Server
    decode: Server
    client: httpx.Client
    channel: ControlServer
    """The control channel of the prefill server."""

    @property
    def open_leases(self):
        return [each.lease_id for each in self.channel.leases.snapshot()]

    def post(self):
        return self.client.post("/v1/completions", json={"model": "m", "prompt": "a"})

    def leave(self, server):
        """Asks, and leaves when a server has been asked."""
        server.hangs = True
        leave(self.client, lambda: server.asked, model="m", prompt="a")

    def lapsed(self):
        lines = self.client.get("/metrics").text.splitlines()
        (value,) = (line.split()[-1] for line in lines if line.startswith(LAPSED))
        return float(value)

    def is_given_back(self, *, by_word):
        """Whether no lease is open; or a decode server was asked to have the only one released."""
        if by_word:
            return not self.open_leases
        return [each["ticket"] for each in self.decode.returned] == self.open_leases


@pytest.fixture(scope="module")
def router():
    """The command ``kvferry router``, to which each test adds its servers."""
    with (
        running_router([], [], "--operator-key", "operator") as url,
        httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client,
    ):
        client.headers["authorization"] = "Bearer operator"
        yield client


@pytest.fixture
def start(servers, router):
    """Adds two servers to the router. Their leases are behind a real control channel, whose address
    the router gets or not."""
    with contextlib.ExitStack() as stack:

        def build(*, is_known):
            leases = LeaseTable(max_blocks=100, duration_s=LEASE_S)
            channel = stack.enter_context(
                ControlServer(engine_id="p", incarnation="p1", role="kv_producer", leases=leases)
            )

            def lend(params):
                lease = leases.grant("r", 1)
                assert isinstance(lease, Lease)
                if (word := word_in(params)) is not None:
                    channel.give_backs.granted(word, lease.lease_id)
                return {"do_remote_prefill": True, "ticket": lease.lease_id}

            pair = Pair(Server(lends=lend), Server(), router, channel)
            for role, server in (("prefill", pair.prefill), ("decode", pair.decode)):
                place = {"url": servers.start(server.app())}
                if is_known and role == "prefill":
                    place["control"] = f"127.0.0.1:{channel.port}"
                path = f"/kvferry/engines/{role}/0"
                assert router.put(path, json=place).status_code == 200
                stack.callback(router.delete, path)
            wait_until_healthy(router)
            return pair

        yield build


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("status", [400, 401, 429, 500])
def test_what_a_decode_server_refuses_goes_back_at_once(start, status, is_known):
    pair = start(is_known=is_known)
    before = pair.lapsed()
    pair.decode.status = status
    assert pair.post().status_code == status
    until(lambda: pair.is_given_back(by_word=is_known))
    assert pair.lapsed() == before


@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_client_that_leaves_has_had_computed_goes_back_at_once(start, is_known):
    pair = start(is_known=is_known)
    pair.leave(pair.decode)
    until(lambda: pair.is_given_back(by_word=is_known))


def test_a_loan_goes_back_though_its_answer_was_not_read(start):
    pair = start(is_known=True)
    pair.leave(pair.prefill)
    until(lambda: pair.is_given_back(by_word=True))


def test_where_the_channel_does_not_answer_a_decode_server_gives_the_loan_back(start):
    pair = start(is_known=True)
    pair.channel.close()
    pair.decode.status = 400
    assert pair.post().status_code == 400
    until(lambda: pair.is_given_back(by_word=False))


def test_where_the_channel_does_not_know_the_loan_a_decode_server_gives_it_back(start):
    """It is the channel of another data-parallel engine of the prefill server."""
    pair = start(is_known=True)
    lend = pair.prefill.lends
    pair.prefill.lends = lambda _: lend({})
    pair.decode.status = 400
    assert pair.post().status_code == 400
    until(lambda: pair.is_given_back(by_word=False))


def test_a_loan_that_no_server_gives_back_is_counted(start):
    pair = start(is_known=False)
    before = pair.lapsed()
    pair.decode.is_locked = True
    assert pair.post().status_code == 401
    until(lambda: pair.lapsed() == before + 1)
    assert len(pair.open_leases) == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_what_was_fetched_is_left_to_who_fetches_it(start, is_known):
    pair = start(is_known=is_known)
    assert pair.post().status_code == 200
    assert len(pair.open_leases) == 1
    assert not pair.decode.returned
