"""The APIs besides OpenAI's older two: how a prefill and a decode server serve them together."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.router.router import Router
from kvferry.serving import web
from kvferry.serving.messages import EngineAddress, Role, RouterSettings
from kvferry.serving.openai import ApiError
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import leave_path

CONTROL, KEY = "127.0.0.1:1", b"the key of the whole cluster"
CACHED, LOADED = 16, 39
"""Tokens of the prompt in the prefill server's cache, and those that the decode server loads."""


@dataclass(frozen=True)
class Form:
    """Requests and answers of one API."""

    path: str
    body: dict[str, Any]
    """The client's body."""
    copy: dict[str, Any]
    """The fields of the prefill server's copy that are not those of the body."""
    answer: Callable[[int], dict[str, Any]]
    """The decode server's answer, of which so many tokens were cached."""
    events: Callable[[int], list[dict[str, Any]]]
    """Its events, if it is a stream."""
    silent: int
    """Number of events without a part of the answer."""
    error: dict[str, Any] | None
    """The event of an error; ``None`` if servers break their streams off."""
    left_out: frozenset[str] = frozenset()
    """Fields of the body that the copy does not have."""
    is_named: bool = True
    """Whether events have names."""
    last: bytes = b""
    """What follows the last event."""

    def stream(self, cached: int) -> list[bytes]:
        return [*map(self.event, self.events(cached)), *([self.last] if self.last else [])]

    def event(self, told: dict[str, Any]) -> bytes:
        name = f"event: {told['type']}\n" if self.is_named else ""
        return f"{name}data: {json.dumps(told, separators=(',', ':'))}\n\n".encode()


def _usage(cached: int) -> dict[str, Any]:
    details = {"cached_tokens": cached, "created_cache_tokens": 40 - cached}
    return {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": details}


SAMPLING = {"max_tokens": 9, "min_tokens": 3, "temperature": 0, "stop_token_ids": [7]}
GENERATE = Form(
    path="/inference/v1/generate",
    body={"token_ids": [*range(40)], "sampling_params": SAMPLING, "return_token_ids": True},
    copy={"sampling_params": {**SAMPLING, "max_tokens": 1, "min_tokens": 1}, "stream": False},
    answer=lambda cached: {"choices": [{"token_ids": [1, 2]}], "usage": _usage(cached)},
    events=lambda cached: [
        {"choices": [{"token_ids": [1]}], "prompt_token_ids": [*range(40)]},
        {"choices": [{"token_ids": [2]}]},
        {"choices": [], "usage": _usage(cached)},
    ],
    silent=0,
    error={"error": {"message": "as told", "type": "InternalServerError", "code": 500}},
    is_named=False,
    last=b"data: [DONE]\n\n",
)


def _said(cached: int | None) -> dict[str, Any]:
    """Anthropic's usage; ``None`` before the number of cached tokens is known."""
    if cached is None:
        return {"input_tokens": 40, "output_tokens": 0}
    # A decode server has written the tokens that it loaded into its cache, too.
    created = 24 if cached == CACHED else LOADED
    cache = {"cache_creation_input_tokens": created, "cache_read_input_tokens": cached}
    return {"input_tokens": max(0, 40 - cached - created), "output_tokens": 2, **cache}


MODELS_JSON = {"usage": {"input_tokens": 1, "cache_read_input_tokens": 1}}
MESSAGES = Form(
    path="/v1/messages",
    body={
        "model": "big",
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": 2048,
        "system": "Be brief.",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
    },
    copy={"max_tokens": 1, "stream": False},
    answer=lambda cached: {
        "type": "message",
        "content": [{"type": "tool_use", "name": "look", "input": MODELS_JSON}],
        "usage": _said(cached),
    },
    events=lambda cached: [
        {"type": "message_start", "message": {"role": "assistant", "usage": _said(None)}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": _said(cached)},
        {"type": "message_stop"},
    ],
    silent=1,
    error={"type": "error", "error": {"type": "internal_error", "message": "as told"}},
)


def _response(cached: int | None) -> dict[str, Any]:
    """A response; ``None`` before it has a usage."""
    tools = [{"type": "function", "name": "look", "parameters": COUNTED}]
    told: dict[str, Any] = {"object": "response", "tools": tools, "usage": None}
    if cached is not None:
        per_turn = {"input_tokens_per_turn": [40], "cached_tokens_per_turn": [cached]}
        details = {"cached_tokens": cached, "cache_write_tokens": 40 - cached, **per_turn}
        told["usage"] = {"input_tokens": 40, "input_tokens_details": details, "output_tokens": 2}
    return told


COUNTED = {"example": {"input_tokens_details": {"cached_tokens": 1}}}
TOOLS = [
    {"type": "function", "name": "look", "parameters": COUNTED},
    {"type": "custom", "name": "say"},
]
RESPONSES = Form(
    path="/v1/responses",
    body={"input": "?", "max_output_tokens": 9, "store": True, "tools": TOOLS, "request_id": "a"},
    copy={"max_output_tokens": 1, "store": False, "background": False, "stream": False},
    left_out=frozenset({"request_id"}),
    answer=_response,
    events=lambda cached: [
        {"type": "response.created", "response": _response(None)},
        {"type": "response.in_progress", "response": _response(None)},
        {"type": "response.output_item.added", "item": {"type": "message"}},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.completed", "response": _response(cached)},
    ],
    silent=2,
    error=None,
)
FORMS = {form.path: form for form in (GENERATE, MESSAGES, RESPONSES)}


@dataclass
class Server:
    """Serves one API as vLLM does."""

    form: Form
    fails: int = 0
    """Number of requests that fail."""
    breaks_at: int | None = None
    """Place of the event instead of which its connection breaks."""
    hangs_at: int | None = None
    """Place of the event before which it waits for the client to leave; -1 for the whole answer."""
    mode: str = ""
    """The mode of an SGLang server; empty for another server."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    working: int = 0
    url: str = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", lambda _: Response()),
                Route("/server_info", self._info),
                Route("/v1/models", self._models),
                Route("/kvferry/take_back", lambda _: Response(), methods=["POST"]),
                Route(self.form.path, self._answer, methods=["POST"]),
            ]
        )

    async def _info(self, _: Request) -> Response:
        told = {
            "version": "0.5.23",
            "disaggregation_mode": self.mode,
            "disaggregation_transfer_backend": "kvferry",
            "disaggregation_bootstrap_port": 1,
            "dp_size": 1,
        }
        return JSONResponse(told if self.mode else {}, 200 if self.mode else 404)

    async def _models(self, _: Request) -> Response:
        owner = "sglang" if self.mode else "vllm"
        return JSONResponse({"data": [{"id": "m", "max_model_len": 512, "owned_by": owner}]})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        is_failing, self.fails = self.fails > 0, max(0, self.fails - 1)
        lends = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        if body.get("stream"):
            events = self._events(request, is_failing=is_failing)
            return StreamingResponse(events, media_type="text/event-stream")
        if self.hangs_at is not None and self.hangs_at < 0:
            await self._until_left(request)
        if is_failing:
            return JSONResponse(self.form.error or {"error": {"message": "as told"}}, 500)
        answer = self.form.answer(CACHED if lends else LOADED)
        return JSONResponse(answer | ({"kv_transfer_params": {"ticket": "t"}} if lends else {}))

    async def _events(self, request: Request, *, is_failing: bool):
        for place, event in enumerate(self.form.stream(LOADED)):
            if place == self.hangs_at:
                await self._until_left(request)
            if place == self.breaks_at or (is_failing and place == self.form.silent):
                if self.form.error is None or not is_failing:
                    raise ConnectionResetError("as told by the test")
                yield self.form.event(self.form.error)
                return
            yield event
            await asyncio.sleep(0)

    async def _until_left(self, request: Request) -> None:
        self.working += 1
        try:
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
        finally:
            self.working -= 1


@dataclass
class Setup:
    prefill: Server
    decode: Server
    client: httpx.Client
    form: Form

    def post(self, *, stream: bool = False, **more: Any) -> httpx.Response:
        body = self.form.body | ({"stream": True} if stream else {}) | more
        return self.client.post(self.form.path, json=body)


@pytest.fixture
def make(servers) -> Iterator[Callable[..., Setup]]:
    with contextlib.ExitStack() as stack:

        def build(form: Form, at_once="never", decode_mode="", **settings) -> Setup:
            pair = Server(form), Server(form, mode=decode_mode)
            roles: tuple[Role, Role] = ("prefill", "decode")
            addresses = []
            for role, server in zip(roles, pair, strict=True):
                server.url = servers.start(server.app())
                control = "" if at_once == "never" else CONTROL
                place = EngineAddress(name=role, role=role, url=server.url, control=control)
                addresses.append(place)
            config = RouterSettings(
                engines=tuple(addresses),
                foreign=True,
                at_once=at_once,
                cluster_key=KEY,
                **settings,
            )
            url = servers.start(Router(config, None).app())
            client = stack.enter_context(
                httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False)
            )
            until(lambda: all(one["healthy"] for one in _engines(client)))
            return Setup(*pair, client, form)

        yield build


def _engines(client: httpx.Client) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = client.get("/health").json()["engines"]
    return engines


every_form = pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
either_way = pytest.mark.parametrize("way", ["never", "always"])
whole_or_not = pytest.mark.parametrize("stream", [False, True])


@every_form
@either_way
@whole_or_not
def test_a_prefill_server_computes_the_prompt_and_says_what_was_cached(make, form, way, stream):
    setup = make(form, way)
    answer = setup.post(stream=stream)

    if stream:
        assert answer.content == b"".join(form.stream(CACHED))
    else:
        assert answer.json() == form.answer(CACHED)
    (copy,), (drawn,) = setup.prefill.bodies, setup.decode.bodies
    lends, loads = copy.pop("kv_transfer_params"), drawn.pop("kv_transfer_params")
    kept = {name: value for name, value in form.body.items() if name not in form.left_out}
    assert copy == kept | form.copy
    assert drawn == form.body | ({"stream": True} if stream else {})
    assert lends["do_remote_decode"] is True
    if way == "never":
        assert loads.pop("router_s") >= 0
        assert loads == {"ticket": "t"}
    else:
        assert loads == {"do_remote_prefill": True, "transfer": lends["transfer"]}


ALONE = {
    GENERATE.path: [
        {"sampling_params": {"n": 2}},
        {"sampling_params": {"max_tokens": 3, "min_tokens": 4}},
        {"sampling_params": {"prompt_logprobs": 0}},
        {"sampling_params": {"prompt_logprob_token_ids": [1]}},
        {"sampling_params": "greedy"},
        {"features": {"mm_hashes": {}, "mm_placeholders": {}}},
        {"stream": "perhaps"},
    ],
    MESSAGES.path: [
        {"tool_choice": {"type": "tool", "name": "look"}},
        {"thinking": {"type": "enabled", "budget_tokens": 2048}},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"max_tokens": "5"},
        {"stream": 1},
    ],
    RESPONSES.path: [
        {"background": True},
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "mcp", "server_label": "a"}]},
        {"tools": [*TOOLS, {"type": "web_search"}]},
        {"tools": "look"},
        {"truncation": "auto"},
        {"max_output_tokens": 0},
        {"store": "perhaps"},
        {"stream": "perhaps"},
    ],
}


@pytest.mark.parametrize(
    ("path", "more"), [(path, more) for path, listed in ALONE.items() for more in listed], ids=str
)
@either_way
def test_a_body_that_only_its_own_server_can_serve_is_a_decode_servers_alone(make, path, more, way):
    setup, body = make(FORMS[path], way), FORMS[path].body | more
    assert setup.client.post(path, json=body).status_code == 200

    assert setup.prefill.bodies == []
    assert setup.decode.bodies == [body]


@every_form
def test_beside_an_sglang_server_a_decode_server_is_asked_alone(make, form):
    setup = make(form, decode_mode="decode")
    assert setup.post().status_code == 200

    assert setup.prefill.bodies == []
    assert setup.decode.bodies == [form.body]


@every_form
@either_way
@whole_or_not
def test_an_error_before_the_answer_has_the_prompt_computed_again(make, form, way, stream):
    setup = make(form, way)
    setup.decode.fails = 1
    answer = setup.post(stream=stream)

    assert answer.status_code == 200
    assert len(setup.prefill.bodies) == len(setup.decode.bodies) == 2
    if stream:
        assert answer.content == b"".join(form.stream(CACHED))


@pytest.mark.parametrize(
    "error",
    [
        {"type": "error", "message": "as told", "code": "server_error"},
        {"type": "response.failed", "response": {"error": {"message": "as told"}}},
    ],
)
def test_an_error_event_of_a_response_counts_as_a_stream_that_breaks_off(make, error):
    """As OpenAI's own servers say it; vLLM's up to 0.32 break the stream off."""
    setup = make(replace(RESPONSES, error=error))
    setup.decode.fails = 1
    assert setup.post(stream=True).content == b"".join(RESPONSES.stream(CACHED))
    assert len(setup.prefill.bodies) == len(setup.decode.bodies) == 2


def test_a_long_request_that_its_first_events_repeat_has_not_begun_with_them(make):
    def events(cached: int) -> list[dict[str, Any]]:
        created, going_on, *rest = RESPONSES.events(cached)
        return [created | {"tools": "x" * 200_000}, going_on | {"tools": "x" * 200_000}, *rest]

    setup = make(form := replace(RESPONSES, events=events))
    setup.decode.fails = 1
    assert setup.post(stream=True).content == b"".join(form.stream(CACHED))
    assert len(setup.prefill.bodies) == 2


@every_form
@whole_or_not
def test_an_error_that_stays_is_the_answer_in_the_apis_own_form(make, form, stream):
    setup = make(form)
    setup.decode.fails = 9
    answer = setup.post(stream=stream)

    assert answer.status_code == 500
    assert answer.headers["content-type"].startswith("application/json")
    assert (answer.json().get("type") == "error") is ("messages" in form.path)
    assert isinstance(answer.json()["error"]["message"], str)
    assert len(setup.decode.bodies) == 3


@every_form
@pytest.mark.parametrize(
    ("body", "status", "kind"), [("{", 400, "invalid_request_error"), ("{}", 503, "overloaded")]
)
def test_an_error_of_the_routers_own_has_the_form_of_the_api(make, form, body, status, kind):
    setup = make(form, operator_key="operator")
    operator = {"authorization": "Bearer operator"}
    for role in ("prefill", "decode"):
        setup.client.delete(f"/kvferry/engines/{role}/{role}", headers=operator)
    answer = setup.client.post(form.path, content=body)

    assert answer.status_code == status
    told = answer.json()
    if form is MESSAGES:
        assert told["type"] == "error"
        assert told["error"].keys() == {"type", "message"}
        assert kind in told["error"]["type"]
    else:
        assert told.keys() == {"error"}
        assert told["error"]["code"] in (status, "engine_unavailable")


@every_form
def test_a_stream_that_breaks_off_within_the_answer_ends_with_an_error_of_its_form(make, form):
    setup = make(form)
    setup.decode.breaks_at = place = form.silent + 1
    content = setup.post(stream=True).content
    begun = b"".join(form.stream(CACHED)[:place])

    assert content.startswith(begun)
    error = content.removeprefix(begun)
    name, _, data = error.partition(b"data: ")
    told = json.loads(data.partition(b"\n\n")[0])
    assert name == (b"event: error\n" if form.is_named else b"")
    assert "decode" in (told.get("error") or told)["message"]
    assert told.get("type") == ("error" if form.is_named else None)
    assert error.endswith(form.last)


@pytest.mark.parametrize("rest", [b"", b'event: response.completed\ndata: {"typ'])
def test_the_number_of_an_error_event_follows_that_of_the_last_event_with_a_number(rest):
    """The bytes that were sent last may be none, or the beginning of an event."""

    async def events():
        yield b'data: {"type":"response.output_text.delta","sequence_number":7}\n\n'
        yield rest
        raise ApiError(503, "as told by the test")

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()  # the client stays

    async def send(message):
        sent.append(message)

    async def run():
        await web.EventStream(events())({"path": "/v1/responses"}, receive, send)

    sent: list[Any] = []
    asyncio.run(run())
    told = sent[-1]["body"].strip().partition(b"data: ")[2]
    assert json.loads(told)["sequence_number"] == 8


@every_form
@either_way
def test_a_client_that_leaves_at_any_stage_leaves_everything_idle(make, form, way):
    setup = make(form, way)
    places = range(len(form.events(0)))
    stages = [(setup.prefill, -1), (setup.decode, -1), *((setup.decode, at) for at in places)]
    for server, place in stages:
        server.hangs_at = place
        body = form.body | ({"stream": True} if place >= 0 else {})
        leave_path(setup.client, form.path, partial(getattr, server, "working"), body)
        until(lambda: not any(one["outstanding"] for one in _engines(setup.client)))
        until(lambda: not (setup.prefill.working or setup.decode.working))
        server.hangs_at = None
    assert setup.post().status_code == 200
