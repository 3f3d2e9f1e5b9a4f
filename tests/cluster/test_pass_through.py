"""The router in front of foreign servers: what passes through, and whom it asks."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.control.leases import LeaseTable
from kvferry.control.server import ControlServer
from kvferry.control.tickets import read_transfer
from kvferry.observe.spans import RequestSpan
from kvferry.router.engine_client import EngineClient, HttpAnswer
from kvferry.router.engines import Engine
from kvferry.router.hand_over import HandOver
from kvferry.router.health import Status, Told
from kvferry.router.members import EnginePool
from kvferry.router.pass_through import PassThrough
from kvferry.router.replies import VLLM_LOAD_FAILED
from kvferry.router.router import Router
from kvferry.serving import web
from kvferry.serving.messages import EngineAddress, Role, RouterSettings
from kvferry.serving.web import ClientGoneError
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import leave

ANSWER = {"choices": [{"text": "in the server's own words", "logprobs": {"tokens": ["in"]}}]}
EVENTS = [
    b'data: {"choices": [{"text": "?", "token_ids": [63], "finish_reason": "length"}]}\n\n',
    b"data: [DONE]\n\n",
]
EVENT_STREAM = {"content-type": "text/event-stream"}


@dataclass
class Server:
    """Serves anything, as vLLM would."""

    name: str
    model: str = "big"
    status: int = 200
    lends: bool | dict[str, Any] = True
    """Whether it returns transfer parameters, or which."""
    usage: dict[str, Any] | None = None
    """What it says of a prompt that it computes for another server."""
    prompt_ids: list[int] | None = None
    """What it says the tokens of a prompt are."""
    dies: bool = False
    """Whether it is not well any more once it was asked."""
    drop: bool = False
    """Send the headers of a stream, and then go away."""
    hang: bool = False
    tells: dict[str, Any] | bytes = field(default_factory=dict)
    """What its health check says; an engine of ours tells its role."""
    checks: int = 0
    """How often its health was checked."""
    health_s: float = 0.0
    """Seconds that its health check takes."""
    at_once: Callable[[], Response] | None = None
    """What it answers to a body with a transfer."""
    in_turn: Callable[[], Response] | None = None
    """What it answers to a body with what was lent."""
    computes: Callable[[], Response] | None = None
    """What it answers to a body for which it computes the prompt in turn."""
    after: "Server | None" = None
    """Who must have been asked before it answers."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    taken_back: list[Any] = field(default_factory=list)
    """Bodies, or words at its control channel."""
    aborted: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/kvferry/take_back", self._take_back, methods=["POST"]),
                Route("/{path:path}", self._complete, methods=["POST"]),
            ]
        )

    async def _health(self, _: Request) -> Response:
        await asyncio.sleep(self.health_s)
        self.checks += 1
        if isinstance(self.tells, bytes):
            return Response(self.tells)
        return JSONResponse(self.tells, 503 if self.dies and self.bodies else 200)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": self.model, "max_model_len": 512}]})

    async def _take_back(self, request: Request) -> Response:
        self.taken_back.append(await request.json())
        return JSONResponse({})

    def _told(self, params: dict[str, Any]) -> Callable[[], Response] | None:
        """What a test told it to answer to a body with such parameters."""
        if self.at_once and "transfer" in params:
            return self.at_once
        return self.computes if "do_remote_decode" in params else self.in_turn

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        (body.get("kv_transfer_params") or {}).pop("router_s", None)
        self.bodies.append(body)
        self.paths.append(request.scope["path"])
        self.headers.append(dict(request.headers))
        while self.after is not None and not self.after.bodies:
            await asyncio.sleep(0.01)
        if (answer := self._told(body.get("kv_transfer_params") or {})) is not None:
            return answer()
        if self.status != 200:
            return JSONResponse({"error": {"message": "as told"}}, self.status)
        while self.hang:
            if await request.is_disconnected():
                self.aborted.set()
                return Response(status_code=499)
            await asyncio.sleep(0.01)
        if body.get("stream"):
            return StreamingResponse(self._events(), media_type="text/event-stream")
        params = body.get("kv_transfer_params") or {}
        ids = {"token_ids": [33], "finish_reason": "length"}
        if params.get("do_remote_decode"):
            reply: dict[str, Any] = {"choices": [ids], "usage": self.usage}
            if self.lends:
                ticket = {"ticket": f"from {self.name}"}
                reply["kv_transfer_params"] = ticket if self.lends is True else self.lends
            told = {"prompt_token_ids": self.prompt_ids} if body.get("return_token_ids") else {}
            return JSONResponse(reply | told)
        return JSONResponse(ANSWER)

    async def _events(self):
        if self.drop:
            raise ConnectionResetError("as told by the test")
        for event in EVENTS:
            yield event


@dataclass
class Setup:
    prefill: list[Server]
    decode: list[Server]
    client: httpx.Client

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        return self.client.post(path, json={"messages": [{"role": "user", "content": "?"}], **body})


@pytest.fixture
def make(servers, codec) -> Iterator[Callable[..., Setup]]:
    clients = []

    def build(
        prefill=1,
        decode=1,
        *,
        tokenizer=False,
        headers=None,
        control="",
        wait=True,
        are_ours=False,
        **settings,
    ) -> Setup:
        fakes = [Server(f"p{i}") for i in range(prefill)], [Server(f"d{i}") for i in range(decode)]
        for fake in () if wait else fakes[0] + fakes[1]:
            fake.health_s = 0.2
        addresses = []
        roles: tuple[Role, Role] = ("prefill", "decode")
        for role, group in zip(roles, fakes, strict=True):
            for fake in group:
                fake.tells = {"kv_role": "kv_both"} if are_ours else {}
                fake.url = servers.start(fake.app())
                address = EngineAddress(name=fake.name, role=role, url=fake.url, control=control)
                addresses.append(address)
        config = RouterSettings(engines=tuple(addresses), foreign=True, **settings)
        url = servers.start(Router(config, codec if tokenizer else None).app())
        client = httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False, headers=headers)
        clients.append(client)
        if wait:
            _until_healthy(client)
        return Setup(*fakes, client)

    yield build
    for client in clients:
        client.close()


def _until_healthy(client: httpx.Client) -> None:
    def is_healthy() -> bool:
        with contextlib.suppress(httpx.ConnectError):
            return all(engine["healthy"] for engine in client.get("/health").json()["engines"])
        return False

    until(is_healthy)


def test_a_body_the_router_does_not_understand_reaches_the_decode_server_as_it_is(make):
    setup = make(tokenizer=True)

    response = setup.post(tools=[{"type": "function"}], logprobs=True, top_logprobs=3, seed=1)

    assert response.json() == ANSWER
    (asked_p,), (asked_d,) = setup.prefill[0].bodies, setup.decode[0].bodies
    assert asked_p["max_tokens"] == 1
    assert asked_p["stream"] is False
    assert asked_p["tools"] == [{"type": "function"}]  # they are part of the prompt
    assert (asked_p["logprobs"], asked_p["top_logprobs"]) == (True, 3)
    assert asked_p["kv_transfer_params"]["do_remote_decode"] is True
    assert "keep_first_token" not in asked_p["kv_transfer_params"]
    assert asked_d == {
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function"}],
        "logprobs": True,
        "top_logprobs": 3,
        "seed": 1,
        "kv_transfer_params": {"ticket": "from p0"},
    }
    assert setup.prefill[0].paths == setup.decode[0].paths == ["/v1/chat/completions"]
    ids = {server.headers[0]["x-request-id"] for server in (*setup.prefill, *setup.decode)}
    assert ids == {response.headers["x-request-id"]}


@pytest.fixture
def tokenizing(make) -> Setup:
    """A pair whose prefill server says which tokens it computed."""
    setup: Setup = make()
    setup.prefill[0].prompt_ids = [1, 2, 3]
    setup.prefill[0].usage = {"prompt_tokens": 3}
    return setup


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]}
TEXTS = [
    {"messages": [{"role": "user", "content": "?"}], "return_token_ids": False},
    {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 509, "stream": True},
    {"messages": [{"role": "user", "content": "?"}, CALLS, {"role": "tool", "content": "42"}]},
    {"max_tokens": 510, "max_completion_tokens": 9, "echo": False, "return_prompt_text": None},
]


@pytest.mark.parametrize("body", TEXTS)
def test_a_chat_of_text_is_tokenized_by_the_prefill_server_alone(tokenizing, body):
    assert tokenizing.post(**body).status_code == 200

    (asked_p,), (asked_d,) = tokenizing.prefill[0].bodies, tokenizing.decode[0].bodies
    assert asked_p["return_token_ids"] is True
    assert asked_d.pop("kv_transfer_params") == {"ticket": "from p0", "prompt_token_ids": [1, 2, 3]}
    assert asked_d == {"messages": [{"role": "user", "content": "?"}], **body}


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
NO_TEXTS = [
    {"messages": [{"role": "user", "content": [*PARTS, IMAGE]}]},
    {"messages": [{"role": "user", "content": [{**PARTS[0], "image_url": "data:,"}]}]},
    {"messages": [{"role": "user", "content": [{"image_url": "data:,"}]}]},
    {"messages": [{"role": "user", "content": ["a"]}]},
    {"messages": [{"role": "user", "content": {"type": "text", "text": "a"}}]},
    {"messages": {"role": "user"}},
    {"echo": True},
    {"return_prompt_text": True},
    {"return_token_offsets": True},
    {"truncate_prompt_tokens": 2},
    {"chat_template": "{{ 1 }}"},
]


@pytest.mark.parametrize("body", NO_TEXTS)
def test_a_chat_for_which_the_decode_server_needs_its_text_is_rendered_there(tokenizing, body):
    assert tokenizing.post(**body).status_code == 200

    (asked_p,), (asked_d,) = tokenizing.prefill[0].bodies, tokenizing.decode[0].bodies
    assert "return_token_ids" not in asked_p
    assert asked_d["kv_transfer_params"] == {"ticket": "from p0"}


@pytest.mark.parametrize("body", NO_TEXTS)
def test_token_ids_for_the_client_do_not_stand_for_such_a_chat(tokenizing, body):
    """Else the decode server would answer as if the chat had no image."""
    assert tokenizing.post(**body, return_token_ids=True).status_code == 200

    assert tokenizing.prefill[0].bodies[0]["return_token_ids"] is True
    assert tokenizing.decode[0].bodies[0]["kv_transfer_params"] == {"ticket": "from p0"}


def test_a_chat_that_is_too_long_with_its_answer_is_judged_by_the_decode_server(tokenizing):
    """vLLM 0.28 refuses a text that leaves no room for the answer, but not its tokens."""
    tokenizing.post(max_tokens=510)

    assert "prompt_token_ids" not in tokenizing.decode[0].bodies[0]["kv_transfer_params"]


@pytest.mark.parametrize("told", [{"prompt_ids": None}, {"usage": None}, {"usage": {}}])
def test_a_prefill_server_that_does_not_say_the_tokens_is_no_harm(tokenizing, told):
    for name, value in told.items():
        setattr(tokenizing.prefill[0], name, value)

    assert tokenizing.post().json() == ANSWER
    assert tokenizing.decode[0].bodies[0]["kv_transfer_params"] == {"ticket": "from p0"}


def test_only_chats_are_tokenized_once(tokenizing):
    tokenizing.client.post("/v1/completions", json={"prompt": "Hi", "messages": [], "logprobs": 1})

    assert "return_token_ids" not in tokenizing.prefill[0].bodies[0]


def test_a_body_it_understands_gets_its_first_token_from_the_prefill_server(make):
    setup = make(tokenizer=True)

    body = setup.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).json()

    assert body["choices"][0]["text"] == "!?"
    assert body["model"] == "big"
    assert setup.decode[0].bodies[0]["prompt"] == [*b"Hi!"]


@pytest.mark.parametrize(
    "field",
    [{"repetition_penalty": 1}, {"min_p": 0}, {"presence_penalty": 0}, {"max_tokens": None}],
)
def test_a_value_against_a_default_of_the_server_reaches_the_server(make, field):
    """As vLLM takes its defaults from the model's generation_config.json."""
    setup = make(tokenizer=True)

    answer = setup.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2, **field})

    assert answer.json() == ANSWER
    (name,) = field
    assert setup.decode[0].bodies[0][name] == field[name]


def test_a_request_before_the_first_health_check_is_answered_as_one_after_it(make):
    setup = make(tokenizer=True, wait=False)
    body = {"prompt": "Hi", "max_tokens": 2}

    answers = [setup.client.post("/v1/completions", json=body) for _ in range(2)]

    while answers[0].status_code == 503:  # the health check took longer than the router waits
        answers = [answers[1], setup.client.post("/v1/completions", json=body)]
    first, second = (answer.json() | {"id": "", "created": 0} for answer in answers)
    assert first == second
    assert first["model"] == "big"


def test_a_chat_goes_in_the_clients_own_words_also_with_a_tokenizer(make):
    """Only the server has its chat template, its reasoning parser and its tool parser."""
    setup = make(tokenizer=True)

    assert setup.post(temperature=0).json() == ANSWER
    assert setup.post(stream=True).content == b"".join(EVENTS)
    asked = [body["messages"][0]["content"] for body in setup.decode[0].bodies]
    assert asked == ["?", "?"]
    assert len(setup.prefill[0].bodies) == 2


@pytest.mark.parametrize("is_known", [True, False])
def test_a_chat_of_engines_of_ours_is_made_of_tokens_here(make, is_known):
    setup = make(tokenizer=True, are_ours=True, wait=is_known)

    while (answer := setup.post(max_tokens=2, seed=3)).status_code == 503:
        assert not is_known  # the health check took longer than the router waits

    (choice,) = answer.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "!?"}
    assert setup.decode[0].bodies[0]["prompt"] == [*b"user:?\nassistant:!"]


@pytest.mark.parametrize("written", [{}, {"temperature": 0, "top_p": 0.5}])
def test_foreign_servers_are_told_only_what_the_client_wrote(make, written):
    setup = make(tokenizer=True)
    body = {"prompt": "Hi", "max_tokens": 2, "model": "lora", **written}
    setup.client.post("/v1/completions", json=body)

    for server in (*setup.prefill, *setup.decode):
        (asked,) = server.bodies
        ours = {"prompt", "return_token_ids", "stream", "stream_options", "kv_transfer_params"}
        sampling = asked.keys() - ours
        assert sampling - {"ignore_eos"} == {"max_tokens", "model", *written}
        assert {name: asked[name] for name in written} == written


def test_a_seeded_draw_is_left_to_one_server(make):
    setup = make(tokenizer=True)

    setup.client.post("/v1/completions", json={"prompt": "Hi", "seed": 7})

    assert setup.decode[0].bodies[0]["prompt"] == "Hi"


def test_transfer_parameters_of_a_client_are_dropped(make):
    setup = make()
    setup.prefill[0].lends = False

    setup.post(kv_transfer_params={"remote_host": "evil"})

    assert "evil" not in str(setup.prefill[0].bodies + setup.decode[0].bodies)
    assert "kv_transfer_params" not in setup.decode[0].bodies[0]


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"best_of": 2},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": None, "prompt_embeds": ["YQ==", "Yg=="]},
        {"prompt_embeds": "YQ=="},  # beside the prompt "a"
        {"prompt_embeds": ["YQ=="]},
    ],
)
def test_several_sequences_are_computed_by_the_decode_server_alone(make, body):
    setup = make()

    assert setup.client.post("/v1/completions", json={"prompt": "a", **body}).json() == ANSWER
    assert setup.prefill[0].bodies == []


@pytest.mark.parametrize(
    "body",
    [{"prompt": [1, 2, 3]}, {"prompt_embeds": "YQ=="}, {"prompt": [], "prompt_embeds": ["YQ=="]}],
)
def test_token_ids_or_embeddings_of_one_prompt_are_one_sequence(make, body):
    setup = make()

    setup.client.post("/v1/completions", json=body)

    assert setup.decode[0].bodies[0]["kv_transfer_params"] == {"ticket": "from p0"}


def test_a_stream_is_relayed_byte_for_byte(make):
    setup = make()

    with setup.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as r:
        assert r.headers["content-type"].startswith("text/event-stream")
        assert r.read() == b"".join(EVENTS)


def test_a_refusal_of_a_prefill_server_is_the_answer(make):
    setup = make()
    setup.prefill[0].status = 400

    response = setup.post()

    assert (response.status_code, response.json()) == (400, {"error": {"message": "as told"}})
    assert setup.decode[0].bodies == []


def test_a_refusal_of_a_decode_server_is_the_answer(make):
    setup = make()
    setup.decode[0].status = 422

    response = setup.post()

    assert (response.status_code, response.json()) == (422, {"error": {"message": "as told"}})


def test_a_prefill_server_that_is_down_is_replaced(make):
    setup = make(prefill=2)
    setup.prefill[0].status, setup.prefill[0].dies = 503, True

    for _ in range(3):
        assert setup.post().json() == ANSWER
    assert all(
        body["kv_transfer_params"] == {"ticket": "from p1"} for body in setup.decode[0].bodies
    )


@pytest.mark.parametrize("failure", ["ends", "gone"])
@pytest.mark.parametrize("lent", [{"ticket": "t"}, {"remote_block_ids": [[1]]}])
def test_a_decode_server_that_fails_before_its_first_byte_is_replaced(make, failure, lent):
    """A lease of ours passes on to the next one; what others lent may be gone by now."""
    setup = make(decode=2)
    setup.prefill[0].lends = lent
    setup.decode[0].status, setup.decode[0].dies = (
        (503, True) if failure == "ends" else (200, False)
    )
    setup.decode[0].drop = failure == "gone"

    with setup.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as r:
        assert r.read() == b"".join(EVENTS)

    passes_on = "ticket" in lent
    assert len(setup.decode[0].bodies) == 1  # it was picked first
    assert len(setup.prefill[0].bodies) == (1 if passes_on else 2)
    again = setup.decode[1].headers[0]["x-request-id"].endswith("-try2")
    assert again is not passes_on
    told = lent | ({"passed_on": True} if passes_on else {})
    assert setup.decode[1].bodies[0]["kv_transfer_params"] == told


@pytest.mark.parametrize("lent", [{"ticket": "t"}, {"remote_block_ids": [[1]]}])
def test_a_decode_server_that_refuses_one_request_serves_others(make, lent):
    """It may have given back what the request was to load, so the prompt is computed anew."""
    setup = make(decode=2)
    setup.prefill[0].lends = lent
    setup.decode[0].status = 503

    for _ in range(3):
        assert setup.post().json() == ANSWER
        states = [each["state"] for each in setup.client.get("/health").json()["engines"]]
        assert states == ["ready"] * 3
    assert lent.items() <= setup.decode[1].bodies[0]["kv_transfer_params"].items()
    assert len(setup.prefill[0].bodies) > 3
    again = setup.decode[1].headers[0]["x-request-id"]
    assert again.endswith("-try2")


def test_the_refusal_of_the_only_decode_server_is_the_answer(make):
    setup = make()
    setup.decode[0].status = 503

    response = setup.post()

    assert (response.status_code, response.json()) == (503, {"error": {"message": "as told"}})
    assert len(setup.prefill[0].bodies) == 1
    assert setup.client.get("/health").json()["status"] == "ok"


def test_a_client_that_goes_away_ends_the_work_of_the_server(make):
    setup = make()
    setup.decode[0].hang = True

    leave(setup.client, lambda: setup.decode[0].bodies, prompt="a")

    assert setup.decode[0].aborted.wait(WAIT_S)
    _until_idle(setup.client)


def test_what_a_client_that_goes_away_leaves_behind_is_given_back(make):
    setup = make()
    setup.decode[0].hang = True

    leave(setup.client, lambda: setup.decode[0].bodies, prompt="a")

    until(lambda: setup.prefill[0].taken_back)


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
def test_what_no_decode_server_will_fetch_is_given_back(make, status):
    setup = make()
    setup.decode[0].status = status

    assert setup.post().status_code == status

    until(lambda: setup.prefill[0].taken_back)
    asked = setup.prefill[0].headers[0]["x-request-id"]
    assert setup.prefill[0].taken_back[0] == {
        "kv_transfer_params": {"ticket": "from p0"},
        "request_ids": [asked, f"{asked}-again"],
    }


def test_what_is_lent_by_an_answer_that_its_client_leaves_is_given_back(make):
    setup = make()
    setup.prefill[0].hang = True

    leave(setup.client, lambda: setup.prefill[0].bodies, prompt="a")

    until(lambda: setup.prefill[0].taken_back)
    (back,) = setup.prefill[0].taken_back
    assert back["kv_transfer_params"] == {}
    assert back["request_ids"][0] == setup.prefill[0].headers[0]["x-request-id"]


def test_what_a_decode_server_has_fetched_is_not_given_back(make):
    setup = make()
    assert setup.post().status_code == 200
    _until_idle(setup.client)
    assert not setup.prefill[0].taken_back


class PlayedClient:
    """Of an engine that begins a stream at once; also its answer."""

    status = 200
    headers = ()
    content_type = "text/event-stream"

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_closed = False

    async def send(self, *_, **__):
        self.asked.set()
        return self

    async def ask(self, method, url):
        return HttpAnswer(200, b'{"data": [{"id": "big", "max_model_len": 512}]}')

    async def some(self) -> bytes:
        return EVENTS[0]

    async def read(self) -> bytes:
        return b""

    def close(self) -> None:
        self.is_closed = True


def _lone_engine(client):
    """An engine and a router without a prefill engine before it."""
    engine = Engine("d0", "http://d0", "decode", client)
    engine.health.up()
    pools = EnginePool("prefill", 1.0, dispensable=True), EnginePool("decode", 1.0)
    pools[1].engines.append(engine)
    passing = PassThrough(HandOver(*pools), lambda: web.Patience(5.0, 5.0))
    return engine, passing


def test_an_answer_that_begins_as_its_client_goes_away_leaves_nothing_behind():
    async def run():
        client = PlayedClient()
        engine, passing = _lone_engine(client)
        span = RequestSpan(None, "/v1/completions", "")

        async def receive():
            await client.asked.wait()
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGoneError):
            await passing.answer(Request({"type": "http"}, receive), "/v1/completions", {}, span)
        return engine.outstanding, client.is_closed

    assert asyncio.run(run()) == (0, True)


def test_a_stream_whose_client_goes_away_before_it_takes_the_head_leaves_nothing_behind():
    async def run():
        client = PlayedClient()
        engine, passing = _lone_engine(client)
        span = RequestSpan(None, "/v1/completions", "")
        gone = asyncio.Event()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_):
            gone.set()  # what an earlier answer left has filled the connection
            await asyncio.Event().wait()

        request = Request({"type": "http"}, receive)
        response = await passing.answer(request, "/v1/completions", {}, span)
        assert engine.outstanding == 1
        await response(request.scope, receive, send)
        return engine.outstanding, client.is_closed

    assert asyncio.run(run()) == (0, True)


def _until_idle(client: httpx.Client) -> None:
    def outstanding() -> list[int]:
        return [one["outstanding"] for one in client.get("/health").json()["engines"]]

    until(lambda: not any(outstanding()))


@pytest.mark.parametrize("host", ["x/kvferry/take_back?", "x/v1/models#", "[::1"])
def test_no_client_chooses_the_path_by_its_host(make, monkeypatch, host):
    """Older releases of Starlette put the URL together from the header and the path."""
    setup = make()

    def url_of(request):
        return URL(f"http://{request.headers['host']}{request.scope['path']}")

    monkeypatch.setattr(HTTPConnection, "url", property(url_of))
    response = setup.client.post("/v1/completions", json={"prompt": "?"}, headers={"host": host})
    assert response.status_code == 200
    assert setup.prefill[0].paths == setup.decode[0].paths == ["/v1/completions"]


def test_events_whose_lines_end_with_two_characters_come_one_by_one(make):
    setup, goes_on = make(), threading.Event()
    setup.prefill[0].usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 1}}

    async def events():
        yield b'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}\r\n\r\n'
        yield b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\r\n\r'
        yield b"\n"
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        usage = b'{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}'
        yield b'data: {"choices": [], "usage": %b}\r\n\r\ndata: [DONE]\r\n\r\n' % usage

    setup.decode[0].in_turn = lambda: StreamingResponse(events(), headers=EVENT_STREAM)
    body = {"messages": [], "stream": True, "stream_options": {"include_usage": True}}
    with setup.client.stream("POST", "/v1/chat/completions", json=body) as response:
        came = response.iter_raw()
        first = next(came)
        goes_on.set()
        rest = b"".join(came)
    assert first.endswith(b'{"content": "a"}}]}\r\n\r\n')
    assert b'"cached_tokens":1}' in rest
    assert rest.endswith(b"data: [DONE]\r\n\r\n")


NO_TEXT = b'{"choices": [{"finish_reason": "\xff"}], "kv_transfer_params": {"ticket": "t"}}'


def test_an_answer_that_is_no_text_is_a_502_that_is_counted(make):
    setup = make()
    setup.prefill[0].computes = lambda: Response(NO_TEXT)
    answer = setup.post()
    assert answer.status_code == 502
    assert "prefill engine 'p0': its answer does not decode" in answer.json()["error"]["message"]
    assert 'kvferry_router_requests_total{status="502"} 1.0' in setup.client.get("/metrics").text


def test_numbers_of_another_form_change_nothing(make):
    setup = make()
    setup.prefill[0].usage = {"prompt_tokens": 9, "prompt_tokens_details": 5}
    own = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 8}}}
    setup.decode[0].in_turn = lambda: JSONResponse(own)
    assert setup.post().json() == own


def test_pieces_of_another_form_reach_the_client(make):
    setup = make()
    events = b'data: {"choices": [{"delta": "x"}]}\n\ndata: {"choices": [{"delta": "y"}]}\n\n'
    setup.decode[0].in_turn = lambda: Response(events, headers=EVENT_STREAM)
    assert setup.post(stream=True).content == events


def test_a_defect_of_the_router_is_counted(make, monkeypatch):
    setup = make()

    def fail(*_):
        raise ValueError("as told by the test")

    monkeypatch.setattr(HandOver, "run", fail)
    with contextlib.suppress(httpx.RemoteProtocolError):
        assert setup.post().status_code == 500
    told = setup.client.get("/metrics").text
    assert 'kvferry_router_requests_total{status="500"} 1.0' in told
    assert 'kvferry_router_errors_total{code="internal_error"} 1.0' in told


def test_a_stream_that_breaks_off_is_counted(make):
    setup = make()

    async def events():
        for text in "ab":
            yield b'data: {"choices": [{"delta": {"content": "%b"}}]}\n\n' % text.encode()
        raise ConnectionResetError("as told by the test")

    setup.decode[0].in_turn = lambda: StreamingResponse(events(), headers=EVENT_STREAM)
    assert b'"code":"engine_unavailable"' in setup.post(stream=True).content
    told = setup.client.get("/metrics").text
    assert 'kvferry_router_errors_total{code="engine_unavailable"} 1.0' in told


def test_a_health_check_that_is_no_text_is_not_the_last(make):
    setup = make(decode=1)
    server = setup.decode[0]
    server.tells = b'{"kv_role": "\xff"}'
    before = server.checks
    until(lambda: server.checks > before + 3)


def test_an_answer_that_takes_too_long_is_a_504(make):
    setup = make(request_timeout_s=0.3)
    setup.decode[0].hang = True

    assert setup.post().status_code == 504
    while not setup.decode[0].bodies:  # the time was up before it was asked
        assert setup.post().status_code == 504
    assert setup.decode[0].aborted.wait(WAIT_S)


def test_with_an_api_key_clients_must_show_it_and_servers_are_shown_it(make):
    setup = make(api_key="s3cret", headers={"authorization": "Bearer s3cret"})

    assert setup.post().json() == ANSWER
    assert setup.decode[0].headers[0]["authorization"] == "Bearer s3cret"
    refused = setup.client.get("/v1/models", headers={"authorization": "Bearer guess"})
    assert refused.status_code == 401


def test_a_body_that_is_no_object_is_refused(make):
    assert make().client.post("/v1/completions", json=[1]).status_code == 400


# ---- at once -------------------------------------------------------------------------------------

KEY = b"k" * 32
CONTROL = "127.0.0.1:14579"


@pytest.fixture
def channel():
    """A control channel, as vLLM servers with kvferry have."""
    leases = LeaseTable(max_blocks=1)
    with ControlServer(engine_id="p", incarnation="p1", role="kv_both", leases=leases) as server:
        yield server


@pytest.fixture
def at_once(make, channel):
    def build(prefill=1, decode=1, **settings) -> Setup:
        control = f"127.0.0.1:{channel.port}"
        settings = {"at_once": "always", "cluster_key": KEY, "control": control} | settings
        setup = make(prefill, decode, **settings)
        for server in setup.prefill:
            channel.give_backs.take_back = lambda word, to=server.taken_back: not to.append(word)
        return setup

    return build


@pytest.fixture
def clients():
    with ThreadPoolExecutor(1) as clients:
        yield clients


def is_in_turn(setup: Setup) -> bool:
    """Whether the last request that the decode servers got came with what the prefill one lent."""
    (params,) = (server.bodies[-1]["kv_transfer_params"] for server in setup.decode)
    return "ticket" in params


@pytest.mark.parametrize("stream", [False, True])
def test_both_servers_get_a_body_with_one_signed_transfer(at_once, clients, channel, stream):
    setup = at_once()
    (prefill,), (decode,) = setup.prefill, setup.decode
    prefill.hang = decode.hang = True
    answer = clients.submit(setup.post, stream=stream, logprobs=True)
    until(lambda: prefill.bodies and decode.bodies)
    decode.hang = False  # the other one is about to be done
    content = answer.result(WAIT_S).content
    prefill.hang = False

    assert content == (b"".join(EVENTS) if stream else JSONResponse(ANSWER).body)
    (asked,), (drawn,) = prefill.bodies, decode.bodies
    assert (asked["max_tokens"], asked["stream"]) == (1, False)
    lent, loaded = asked["kv_transfer_params"], drawn.pop("kv_transfer_params")
    assert lent["do_remote_decode"]
    assert loaded == {"do_remote_prefill": True, "transfer": lent["transfer"]}
    assert read_transfer(lent["transfer"], KEY).address == f"127.0.0.1:{channel.port}"
    message = {"role": "user", "content": "?"}
    assert drawn == {"messages": [message], "stream": stream, "logprobs": True}
    _until_idle(setup.client)
    assert not prefill.taken_back
    assert not prefill.aborted.is_set()


@pytest.mark.parametrize(
    "settings", [{"at_once": "never", "cluster_key": None}, {"control": ""}, {"at_once": "auto"}]
)
def test_without_the_setting_or_a_channel_and_where_it_is_short_it_goes_in_turn(at_once, settings):
    setup = at_once(**settings)
    assert setup.post().json() == ANSWER
    assert is_in_turn(setup)


def test_a_long_body_goes_at_once_with_auto(at_once):
    setup = at_once(at_once="auto")
    assert setup.post(messages=[{"role": "user", "content": "long " * 410}]).json() == ANSWER
    assert not is_in_turn(setup)


def test_a_prefill_server_that_is_not_needed_is_ended_and_the_answer_does_not_wait(at_once):
    setup = at_once()
    setup.prefill[0].hang = True
    assert setup.post().json() == ANSWER
    assert setup.prefill[0].aborted.wait(WAIT_S)


@pytest.mark.parametrize(("refusing", "status"), [("prefill", 400), ("decode", 422)])
def test_a_refusal_of_one_server_is_the_answer_and_ends_the_others_work(at_once, refusing, status):
    """That of the decode server may be of a length that the prefill server is not told."""
    setup = at_once()
    servers = setup.prefill + setup.decode
    one, other = servers if refusing == "prefill" else servers[::-1]
    one.status, one.after, other.hang = status, other, True

    response = setup.post()

    assert (response.status_code, response.json()) == (status, {"error": {"message": "as told"}})
    assert other.aborted.wait(WAIT_S)
    until(lambda: setup.prefill[0].taken_back)
    _until_idle(setup.client)


@pytest.mark.parametrize("status", [500, 503])
def test_a_prefill_server_that_fails_is_asked_again_or_replaced_in_turn(at_once, clients, status):
    setup = at_once(prefill=2)
    first, other = setup.prefill
    first.at_once, first.after = lambda: Response(status_code=status), setup.decode[0]
    setup.decode[0].hang = True
    answer = clients.submit(setup.post)
    assert setup.decode[0].aborted.wait(WAIT_S)
    setup.decode[0].hang = False
    assert answer.result(WAIT_S).json() == ANSWER
    assert (len(first.bodies), len(other.bodies)) == (1, 1)
    assert is_in_turn(setup)
    ids = [headers["x-request-id"] for headers in setup.decode[0].headers]
    assert ids[1] == f"{ids[0]}-try2"


ERROR = b'data: {"error": {"message": "as told"}}\n\n'
FAILURES: dict[str, Callable[[], Response]] = {
    "the load": lambda: JSONResponse({"error": {"message": VLLM_LOAD_FAILED, "code": 500}}, 500),
    "the load, of a stream": lambda: StreamingResponse(iter([ERROR]), headers=EVENT_STREAM),
    "the load, of a chat": lambda: StreamingResponse(
        _slowly(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n', ERROR),
        headers=EVENT_STREAM,
    ),
    "the server, busy": lambda: Response(status_code=503),
    "the server, gone": lambda: StreamingResponse(_breaking_off(), headers=EVENT_STREAM),
}


async def _slowly(*events):
    for event in events:
        yield event[:9]
        await asyncio.sleep(0.05)
        yield event[9:]


async def _breaking_off():
    raise ConnectionResetError("as told by the test")
    yield


@pytest.mark.parametrize("failure", FAILURES)
def test_where_the_decode_server_fails_before_its_answer_all_begins_again_in_turn(at_once, failure):
    """Its load, say, where the prefill server has gone and the router has not seen it yet."""
    setup = at_once(decode=2 if "server" in failure else 1)
    first, last = setup.decode[0], setup.decode[-1]
    first.at_once, first.after = FAILURES[failure], setup.prefill[0]
    path = "/v1/completions" if failure == "the load, of a stream" else "/v1/chat/completions"

    answer = setup.post(path, stream=True)

    assert (answer.status_code, answer.content) == (200, b"".join(EVENTS))
    assert len(setup.prefill[0].bodies) == 2
    assert "transfer" in first.bodies[0]["kv_transfer_params"]
    assert last.bodies[-1]["kv_transfer_params"] == {"ticket": "from p0"}
    until(lambda: setup.prefill[0].taken_back)
    _until_idle(setup.client)


def test_a_chat_is_relayed_as_it_comes(at_once):
    """Of other streams the first event alone is looked at before it is passed on."""
    setup = at_once()
    with setup.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as r:
        assert r.read() == b"".join(EVENTS)
    setup.decode[0].at_once = lambda: StreamingResponse(
        _slowly(*EVENTS, *EVENTS), headers=EVENT_STREAM
    )
    assert setup.post(stream=True).content == b"".join(EVENTS * 2)


def _usage(cached):
    details = {"cached_tokens": cached, "multimodal_tokens": None}
    return {"prompt_tokens": 40, "prompt_tokens_details": details}


@pytest.mark.parametrize("prefill_tells", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["always", "never"])
def test_what_was_cached_is_the_prefill_servers_to_say(at_once, stream, prefill_tells, when):
    """The decode server has loaded 39 of 40 tokens, and takes all of these for cached."""
    setup = at_once(at_once=when)
    (prefill,), (decode,) = setup.prefill, setup.decode
    prefill.lends = {"remote_prefill_cached_tokens": 16} if prefill_tells else {"other": 1}
    choice = {"text": 'says "cached_tokens": 39'}
    answer = {"choices": [choice], "usage": _usage(39)}
    decode.after = prefill

    def answers():
        if not stream:
            return JSONResponse(answer)
        usage = b"data: " + JSONResponse({"choices": [], "usage": _usage(39)}).body + b"\n\n"
        return StreamingResponse(_slowly(*EVENTS[:1], usage, *EVENTS[1:]), headers=EVENT_STREAM)

    decode.at_once = decode.in_turn = answers
    options = {"stream_options": {"include_usage": True}} if stream else {}
    told = setup.client.post(
        "/v1/completions", json={"prompt": "a", "stream": stream, **options}
    ).content

    if stream:
        first, usage, *rest = (part + b"\n\n" for part in told.split(b"\n\n"))
        assert (first, rest) == (EVENTS[0], [EVENTS[1], b"\n\n"])
        answer = json.loads(usage[5:])
    else:
        answer = json.loads(told)
        assert answer["choices"] == [choice]
    assert answer["usage"] == _usage(16 if prefill_tells else 39)


@pytest.mark.parametrize("lends", [True, False])
def test_where_nothing_is_lent_the_decode_server_says_what_was_cached(make, lends):
    setup = make()
    (prefill,), (decode,) = setup.prefill, setup.decode
    prefill.lends, prefill.usage = lends, {"prompt_tokens_details": {"cached_tokens": 16}}
    decode.in_turn = lambda: JSONResponse({"choices": [], "usage": _usage(39)})

    assert setup.post().json()["usage"] == _usage(16 if lends else 39)


def test_a_client_that_goes_away_while_both_are_told_to_end_leaves_nothing_behind(monkeypatch):
    """The decode server has failed; the prefill server's work takes its time to end."""

    async def run():
        failed = PlayedClient()
        failed.status, failed.content_type = 500, "application/json"
        pools = EnginePool("prefill", 1.0), EnginePool("decode", 1.0)
        passing = PassThrough(HandOver(*pools, at_once="always"), lambda: web.Patience(5.0, 5.0))
        slow, told, gone = PlayedClient(), asyncio.Event(), asyncio.Event()

        async def until_told(*_, **__):
            try:
                await asyncio.Event().wait()
            finally:
                told.set()
                await gone.wait()

        monkeypatch.setattr(slow, "send", until_told)
        engines = [
            Engine("p0", "http://p0", "prefill", cast(EngineClient, slow)),
            Engine("d0", "http://d0", "decode", cast(EngineClient, failed)),
        ]
        for engine in engines:
            engine.health.told = Told(control=CONTROL, at_once=True)
            engine.health.status = Status(healthy=True)
        pools[0].engines.append(engines[0])
        pools[1].engines.append(engines[1])

        async def receive():
            await told.wait()
            asyncio.get_running_loop().call_later(0.05, gone.set)
            return {"type": "http.disconnect"}

        request = Request({"type": "http"}, receive)
        span = RequestSpan(None, "/v1/completions", "")
        with pytest.raises(ClientGoneError):
            await passing.answer(request, "/v1/completions", {}, span)
        async with asyncio.timeout(WAIT_S):
            while any(engine.outstanding for engine in engines):
                await asyncio.sleep(0.01)
        return failed.is_closed

    assert asyncio.run(run())


def test_a_client_that_goes_away_ends_the_work_of_both_servers(at_once):
    setup = at_once()
    (prefill,), (decode,) = setup.prefill, setup.decode
    prefill.hang = decode.hang = True

    leave(setup.client, lambda: prefill.bodies and decode.bodies, prompt="a")

    assert prefill.aborted.wait(WAIT_S)
    assert decode.aborted.wait(WAIT_S)
    until(lambda: prefill.taken_back)
    _until_idle(setup.client)
