"""What follows a server's 500: its core is dead, the load has failed, or the request is at fault.

A vLLM server whose engine core is dead answers 500 to requests and 503 to health checks.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.testing.waiting import WAIT_S
from tests.cluster.conftest import running_router, wait_until_healthy

pytestmark = pytest.mark.processes

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ERROR: dict[str, Any] = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
ROLE: dict[str, Any] = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
TOKEN = {"choices": [{"index": 0, "delta": {"content": "!"}}]}
ALWAYS = 1_000_000


@dataclass
class Server:
    """Answers as a vLLM server does."""

    dies: bool = False
    """Whether its core dies of the next request."""
    fails: int = 0
    """Number of requests that fail, without harm to the core."""
    event: int | None = None
    """Place of the error in a stream; ``None`` if the server answers 500."""
    gone: bool = False
    """Whether a dead server breaks off its health checks instead of answering 503."""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def app(self):
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/kvferry/take_back", lambda _: Response(), methods=["POST"]),
                Route("/{path:path}", self._answer, methods=["POST"]),
            ]
        )

    async def _health(self, _):
        if not (self.dies and self.bodies):
            return Response()
        return StreamingResponse(_broken()) if self.gone else Response(status_code=503)

    async def _models(self, _):
        return JSONResponse({"data": [{"id": "served", "max_model_len": 512}]})

    async def _answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        is_failing, self.fails = self.dies or self.fails > 0, max(0, self.fails - 1)
        if body.get("stream"):
            events = [ROLE, TOKEN, TOKEN]
            if is_failing and self.event is not None:
                events = [*events[: self.event], ERROR]
            if not is_failing or self.event is not None:
                content = b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in events)
                return StreamingResponse(_each(content), media_type="text/event-stream")
        if is_failing:
            return JSONResponse(ERROR, 500)
        lends = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        return JSONResponse({"kv_transfer_params": {"ticket": "t"}} if lends else TOKEN)


async def _each(content):
    for event in content.split(b"\n\n")[:-1]:
        yield event + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _broken():
    raise ConnectionResetError("as told by the test")
    yield


@dataclass
class Setup:
    prefill: list[Server]
    """In the order in which the router asks them."""
    decode: list[Server]
    client: httpx.Client

    def post(self, path=CHAT, **body):
        return self.client.post(path, json={"messages": [], **body})


@pytest.fixture(scope="module", params=["fallback"])
def router(request):
    """The command ``kvferry router``, to which each test adds its servers."""
    options = ("--operator-key", "operator", "--decode-only", request.param)
    with (
        running_router([], [], *options) as url,
        httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client,
    ):
        client.headers["authorization"] = "Bearer operator"
        yield client


@pytest.fixture
def make(servers, router):
    added = []

    def build(prefill=1, decode=1) -> Setup:
        groups = {"prefill": prefill, "decode": decode}
        made = {role: [Server() for _ in range(count)] for role, count in groups.items()}
        for role, group in made.items():
            for place, server in enumerate(group):
                url = servers.start(server.app())
                added.append(f"/kvferry/engines/{role}/{place}")
                assert router.put(added[-1], json={"url": url}).status_code == 200
        wait_until_healthy(router)
        setup = Setup(made["prefill"], made["decode"], router)
        assert setup.post().status_code == 200
        for group in made.values():
            (asked,) = (place for place, server in enumerate(group) if server.bodies)
            group[asked].bodies.clear()
            group[:] = group[asked + 1 :] + group[: asked + 1]
        return setup

    yield build
    for path in added:
        router.delete(path)


def dead(servers):
    """Those that were asked and died of it."""
    return [server for server in servers if server.dies and server.bodies]


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("role", "prefill", "decode"), [("prefill", 2, 1), ("prefill", 1, 1), ("decode", 1, 2)]
)
def test_of_six_requests_none_fails_of_a_dead_core_while_others_can_serve(
    make, role, prefill, decode, stream, is_gone
):
    setup = make(prefill, decode)
    one = (setup.prefill if role == "prefill" else setup.decode)[0]
    one.dies, one.gone = True, is_gone

    statuses = [setup.post(stream=stream).status_code for _ in range(6)]

    assert statuses == [200] * 6
    assert len(one.bodies) == 1
    if prefill == 1 and role == "prefill":
        assert not any("kv_transfer_params" in body for body in setup.decode[0].bodies)


def test_a_request_under_which_two_cores_died_is_risked_at_no_third_server(make):
    setup = make(1, 3)
    for server in setup.decode:
        server.dies = True

    response = setup.post()

    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert len(dead(setup.decode)) == 2


def test_where_a_well_prefill_server_fails_the_decode_server_computes_alone(make):
    setup = make()
    setup.prefill[0].fails = ALWAYS

    assert [setup.post().status_code for _ in range(6)] == [200] * 6
    assert len(setup.prefill[0].bodies) == len(setup.decode[0].bodies) == 6
    assert not any("kv_transfer_params" in body for body in setup.decode[0].bodies)


@pytest.mark.parametrize("router", ["never"], indirect=True)
def test_a_well_prefill_servers_failure_is_the_answer_where_decode_never_computes_alone(make):
    setup = make()
    setup.prefill[0].fails = ALWAYS

    response = setup.post()

    assert (response.status_code, response.json()) == (500, ERROR)
    assert (len(setup.prefill[0].bodies), setup.decode[0].bodies) == (1, [])


@pytest.mark.parametrize("event", [None, 0, 1])
@pytest.mark.parametrize(("fails", "status"), [(1, 200), (2, 200), (3, 500)])
def test_a_prompt_whose_decode_server_is_well_and_fails_is_computed_again_twice(
    make, fails, status, event
):
    """The loan may be the reason."""
    setup = make()
    setup.decode[0].fails, setup.decode[0].event = fails, event

    response = setup.post(stream=event is not None)

    asked = min(fails + 1, 3)
    assert response.status_code == status
    assert (len(setup.prefill[0].bodies), len(setup.decode[0].bodies)) == (asked, asked)
    if status == 500:
        assert response.json() == ERROR
    assert setup.post().status_code == 200


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"n": 2}), (RESPONSES, {"background": True})])
def test_a_failure_of_a_well_server_without_a_loan_is_the_answer(make, path, body):
    setup = make(1, 2)
    setup.decode[0].fails = setup.decode[1].fails = ALWAYS

    response = setup.post(path, **body)

    assert (response.status_code, response.json()) == (500, ERROR)
    assert sum(len(server.bodies) for server in setup.decode) == 1


@pytest.mark.parametrize("event", [0, 1])
def test_a_stream_that_begins_with_a_dead_core_comes_from_another_server(make, event):
    """The first event of a chat has only the speaker's role."""
    setup = make(1, 2)
    setup.decode[0].dies, setup.decode[0].event = True, event

    answers = [setup.post(stream=True) for _ in range(6)]

    assert [answer.status_code for answer in answers] == [200] * 6
    assert not any(b"error" in answer.content for answer in answers)
    assert len(setup.decode[0].bodies) == 1


def test_nothing_is_asked_again_after_the_first_event(make):
    setup = make(1, 2)
    for server in setup.decode:
        server.dies, server.event = True, 2

    answer = setup.post(stream=True)

    events = [event.removeprefix(b"data: ") for event in answer.content.split(b"\n\n")]
    assert [json.loads(event) for event in events[:3]] == [ROLE, TOKEN, ERROR]
    assert len(dead(setup.decode)) == 1


@pytest.mark.parametrize(
    ("tools", "is_repeated"),
    [
        ([{"type": "mcp", "server_label": "files"}], False),
        ([{"type": "function", "name": "f"}, {"type": "code_interpreter"}], False),
        ([{"type": "function", "name": "f"}], True),
        ([{"type": ["mcp"]}], False),
        (None, True),
        (5, False),
    ],
)
def test_only_a_request_whose_tools_the_client_runs_goes_to_another_server(
    make, tools, is_repeated
):
    setup = make(1, 2)
    setup.decode[0].dies = True

    assert setup.post(RESPONSES, input="a", tools=tools).status_code == (
        200 if is_repeated else 503
    )
    assert [len(server.bodies) for server in setup.decode] == [1, int(is_repeated)]
    assert setup.post(RESPONSES, input="a", tools=tools).status_code == 200
