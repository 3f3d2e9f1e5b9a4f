"""The router in front of SGLang servers, and of pairs of an SGLang server and another engine."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.control.tickets import TransferId
from kvferry.router import engine_client, members
from kvferry.router.members import EnginePool, Members
from kvferry.router.router import Router
from kvferry.serving.messages import EngineAddress, Role, RouterSettings
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import leave

CONTROL = "10.0.0.1:7000"
KEY = b"k" * 32
ANSWER = {"choices": [{"text": "of the decode server"}]}
EVENTS = [b'data: {"choices": [{"text": "?"}]}\n\n', b"data: [DONE]\n\n"]
ASKED = {"prompt": [1, 2, 3], "max_tokens": 8}


@dataclass
class Server:
    """Answers as an SGLang server, or as another server if it has no ``mode``."""

    name: str
    mode: str = ""
    backend: str = "kvferry"
    dp_size: int = 1
    control: str = CONTROL
    """Control channel that its bootstrap server tells."""
    given: str = ""
    """Control channel in the operator's list."""
    tells: dict[str, Any] = field(default_factory=dict)
    """Answer to a health check."""
    failures: int = 0
    """Number of requests that it answers with 500 before it answers well."""
    hang: bool = False
    refuses: "Server | None" = None
    """Who must have begun its answer before this server refuses a request."""
    begins: bool = False
    """Begins its answer, and then hangs."""
    is_well: bool = True
    models: tuple[int, dict[str, Any]] | None = None
    """What it answers when it is asked for its models, if not as usual."""
    info_status: int = 200
    info_s: float = 0.0
    """Seconds that it takes to tell of itself."""
    is_shy: bool = False
    """Whether it does not tell of itself before it is allowed to."""
    answer: Any = field(default_factory=lambda: ANSWER)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    @property
    def port(self) -> int | None:
        return URL(self.url).port

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/server_info", self._info),
                Route("/kvferry", self._channels),
                Route("/v1/models", self._models),
                Route("/{path:path}", self._complete, methods=["POST"]),
            ]
        )

    async def _health(self, _: Request) -> Response:
        if not self.is_well:
            return Response(status_code=503)
        return JSONResponse(self.tells) if self.tells else Response()

    async def _models(self, _: Request) -> Response:
        if self.models is not None:
            return JSONResponse(self.models[1], self.models[0])
        owner = "sglang" if self.mode else "vllm"
        return JSONResponse({"data": [{"id": "m", "max_model_len": 512, "owned_by": owner}]})

    async def _info(self, _: Request) -> Response:
        while self.is_shy:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.info_s)
        if self.info_status != 200:
            return JSONResponse({"error": {"message": "as told"}}, self.info_status)
        if not self.mode:
            return JSONResponse({"vllm_config": "as a vLLM server tells it"})
        told = {
            "version": "0.5.23",
            "disaggregation_mode": self.mode,
            "disaggregation_transfer_backend": self.backend,
            "disaggregation_bootstrap_port": self.port,
            "dp_size": self.dp_size,
        }
        return JSONResponse(told)

    async def _channels(self, _: Request) -> Response:
        return JSONResponse({"0": self.control}, 200 if self.control else 503)

    async def _complete(self, request: Request) -> Response:
        body = await request.json() if await request.body() else {}
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.scope["path"])
        while self.refuses is not None:
            await asyncio.sleep(0.01)
            if self.refuses.has_begun.is_set():
                return JSONResponse({"error": {"message": "as told"}}, 400)
        if self.begins:
            return StreamingResponse(self._begun(), media_type="text/event-stream")
        while self.hang:
            if await request.is_disconnected():
                self.aborted.set()
                return Response(status_code=499)
            await asyncio.sleep(0.01)
        if self.failures:
            self.failures -= 1
            return JSONResponse({"error": {"message": "as told"}}, 500)
        if body.get("stream"):
            return StreamingResponse(iter(EVENTS), media_type="text/event-stream")
        return JSONResponse(self.answer)

    async def _begun(self) -> AsyncIterator[bytes]:
        try:
            yield EVENTS[0]
            self.has_begun.set()
            await asyncio.sleep(2 * WAIT_S)
        finally:
            self.aborted.set()


@dataclass
class Setup:
    prefill: Server
    decode: Server
    client: httpx.Client

    def post(self, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        return self.client.post(path, json={**ASKED, **more})

    @property
    def last(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The last bodies of the two servers."""
        return self.prefill.bodies[-1], self.decode.bodies[-1]


@pytest.fixture
def make(servers, codec):
    clients = []

    def build(
        prefill: Server,
        *decode: Server,
        up: bool | None = True,
        tokenizer: bool = False,
        **settings: Any,
    ) -> Setup:
        addresses = []
        for server in (prefill, *decode):
            server.url = servers.start(server.app())
            role: Role = "prefill" if server is prefill else "decode"
            addresses.append(
                EngineAddress(name=server.name, role=role, url=server.url, control=server.given)
            )
        config = RouterSettings(engines=tuple(addresses), foreign=True, **settings)
        url = servers.start(Router(config, codec if tokenizer else None).app())
        clients.append(httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False))
        if up is not None:
            until(lambda: _are_known(clients[-1], up))
        return Setup(prefill, decode[0], clients[-1])

    yield build
    for each in clients:
        each.close()


def _are_known(client: httpx.Client, up: bool) -> bool:
    engines = client.get("/health").json()["engines"]
    return all(each["healthy"] or not up for each in engines) and not any(
        each["last_error"] == "not reached yet" for each in engines
    )


def _are_slow(client: httpx.Client) -> bool:
    engines = client.get("/health").json()["engines"]
    return all(each["state"] == "slow" for each in engines)


def sglang_pair(**more: Any) -> tuple[Server, Server]:
    return Server("p", "prefill", **more), Server("d", "decode", **more)


def room_of(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name.startswith("bootstrap_")}


@pytest.mark.parametrize("backend", ["kvferry", "nixl"])
def test_two_sglang_servers_get_one_room_at_once(make, backend):
    setup = make(*sglang_pair(backend=backend), tokenizer=True)
    assert setup.post().json() == ANSWER
    first, second = setup.last
    assert first == {**ASKED, **room_of(second), "stream": False}
    assert second == {**ASKED, **room_of(second)}
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": setup.prefill.port}
    assert room_of(second) == {**place, "bootstrap_room": second["bootstrap_room"]}
    assert 0 < second["bootstrap_room"] < 1 << 63


def test_no_two_requests_have_one_room(make):
    setup = make(*sglang_pair())
    for _ in range(5):
        setup.post()
    assert len({body["bootstrap_room"] for body in setup.decode.bodies}) == 5


def test_a_stream_is_the_decode_servers_alone(make):
    setup = make(*sglang_pair())
    options = {"include_usage": True}
    answer = setup.post("/v1/chat/completions", stream=True, stream_options=options)
    assert answer.content == b"".join(EVENTS)
    first, second = setup.last
    assert (first["stream"], "stream_options" in first) == (False, False)
    assert (second["stream"], second["stream_options"]) == (True, options)


def test_the_row_of_the_first_token_needs_the_clients_own_fields(make):
    setup = make(*sglang_pair())
    setup.post(logprobs=3, min_tokens=2)
    assert all(body["logprobs"] == 3 and body["min_tokens"] == 2 for body in setup.last)


def test_sglangs_own_path_passes_too(make):
    setup = make(*sglang_pair())
    body = {"input_ids": [1, 2], "sampling_params": {"temperature": 0, "n": 1}}
    assert setup.client.post("/generate", json=body).json() == ANSWER
    assert setup.prefill.paths == setup.decode.paths == ["/generate"]
    assert room_of(setup.prefill.bodies[0]) == room_of(setup.decode.bodies[0]) != {}


def test_without_an_sglang_server_there_is_no_such_path(make):
    setup = make(Server("p"), Server("d"))
    answer = setup.client.post("/generate", json={"input_ids": [1]})
    assert answer.status_code == 404
    assert "/generate: no engine is an SGLang server" in answer.json()["error"]["message"]


def test_sglangs_own_path_is_there_once_a_server_has_told_of_itself(make, monkeypatch):
    decode = Server("d", "decode", is_shy=True)
    setup = make(Server("p"), decode, up=None)
    until(lambda: setup.client.get("/health").json()["engines"][0]["healthy"])
    monkeypatch.setattr(members, "MEETING_WAIT_S", 0.1)
    answer = setup.client.post("/generate", json={"input_ids": [1]})
    assert answer.status_code == 503
    assert "not known yet to be SGLang servers: decode engine 'd'" in answer.text
    decode.is_shy = False


@pytest.mark.parametrize("key", [None, KEY])
def test_another_decode_engine_gets_the_transfer_of_the_room(make, key):
    setup = make(Server("p", "prefill"), Server("d"), cluster_key=key)
    assert setup.post().json() == ANSWER
    first, second = setup.last
    room = first["bootstrap_room"]
    assert second["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "transfer": TransferId.of_room(CONTROL, room, key).text,
    }
    assert room_of(second) == {}


@pytest.mark.parametrize(
    ("control", "host"), [(CONTROL, "10.0.0.1"), ("[fd00::1]:7000", "[fd00::1]")]
)
def test_another_prefill_engine_lends_with_its_first_token(make, control, host):
    setup = make(Server("p", given=control), Server("d", "decode"), cluster_key=KEY)
    assert setup.post().json() == ANSWER
    first, second = setup.last
    room = second["bootstrap_room"]
    assert room_of(second) == {
        "bootstrap_host": f"kvferry://{host}",
        "bootstrap_port": 7000,
        "bootstrap_room": room,
    }
    params = first["kv_transfer_params"]
    assert (params["do_remote_decode"], params["note_first_token"]) == (True, True)
    assert params["transfer"] == TransferId.of_room(control, room, KEY).text
    assert (first["max_tokens"], room_of(first)) == (1, {})


@pytest.mark.parametrize(("asked", "told"), [(0, 0), (1, 1), (7, 1)])
def test_the_first_token_is_no_end_where_the_client_forbids_that(make, asked, told):
    setup = make(Server("p", given=CONTROL), Server("d", "decode"))
    setup.post(min_tokens=asked)
    first, second = setup.last
    assert (first["min_tokens"], second["min_tokens"]) == (told, asked)


# ---- what is refused -----------------------------------------------------------------------------


def no_channel(**more: Any) -> Server:
    return Server("p", "prefill", control="", **more)


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (
            lambda: Server("p", "prefill", backend="nixl"),
            lambda: Server("d"),
            "nixl and kvferry; .* kvferry to an SGLang server",
        ),
        (
            lambda: Server("p", given=CONTROL),
            lambda: Server("d", "decode", backend="mooncake"),
            "kvferry and mooncake; .* kvferry to an SGLang server",
        ),
        (
            lambda: Server("p", "prefill", backend="nixl"),
            lambda: Server("d", "decode"),
            "nixl and kvferry; give both the same",
        ),
        (lambda: Server("p", "prefill", dp_size=2), lambda: Server("d"), "--dp-size: 2"),
        (no_channel, lambda: Server("d"), "control channel of the prefill engine is not known"),
        (lambda: Server("p"), lambda: Server("d", "decode"), "control channel .* is not known"),
        (
            lambda: Server("p", tells={"kv_role": "kv_producer", "control": CONTROL}),
            lambda: Server("d", "decode"),
            "a reference engine does not tell its first token",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_by_name(make, prefill, decode, message):
    setup = make(prefill(), decode())
    answer = setup.post()
    assert answer.status_code == 503
    with pytest.raises(ValueError, match=message):
        raise ValueError(answer.json()["error"]["message"])
    assert not setup.prefill.bodies + setup.decode.bodies


def test_a_server_of_another_mode_is_down(make):
    setup = make(Server("p", "decode"), Server("d", "null"), up=False)
    told = setup.client.get("/health").json()["engines"]
    assert [each["last_error"] for each in told] == [
        "its --disaggregation-mode is 'decode'; a prefill engine needs prefill",
        "its --disaggregation-mode is 'null'; a decode engine needs decode",
    ]


def test_a_server_of_another_mode_stays_down_whatever_it_answers(make):
    setup = make(Server("p", "decode"), Server("d", "decode"), up=False, operator_key="operator")

    def state() -> str:
        return setup.client.get("/health").json()["engines"][0]["state"]

    operator = {"authorization": "Bearer operator"}
    told = setup.client.post("/pause", headers=operator).json()["servers"]
    assert [each["status"] for each in told] == [200, 200]
    assert state() == "down"
    setup.prefill.mode = "prefill"
    until(lambda: state() == "ready")


def test_a_server_that_does_not_show_its_models_is_down_and_says_why(make):
    """As a server with another key than the router's: its health check asks for no key."""
    refused = {"error": "Unauthorized"}
    setup = make(Server("p", models=(401, refused)), Server("d"), up=False)
    told = setup.client.get("/health").json()["engines"][0]["last_error"]
    assert told.startswith("its /v1/models answers 401")
    assert "Unauthorized" in told


def test_a_router_that_knows_no_model_names_none(make):
    setup = make(Server("p", is_well=False), Server("d", is_well=False), up=False)
    answer = setup.client.get("/v1/models")
    assert answer.status_code == 503
    assert "no decode engine can serve this: 'd'" in answer.json()["error"]["message"]


def test_an_sglang_server_that_fails_to_tell_of_itself_is_taken_for_no_other_server(make):
    setup = make(*sglang_pair(info_status=500), up=False)
    told = setup.client.get("/health").json()["engines"][0]["last_error"]
    assert told == "its /server_info does not tell the facts of an SGLang server"
    setup.prefill.info_status = setup.decode.info_status = 200
    until(lambda: _are_known(setup.client, up=True))
    assert setup.post().json() == ANSWER
    assert all(room_of(body) for body in setup.last)


@pytest.mark.parametrize(
    ("path", "more", "field_name"),
    [
        ("/v1/completions", {"prompt": [1], "n": 2}, "n"),
        ("/v1/completions", {"prompt": [[1], [2]], "best_of": 3}, "prompt, best_of"),
        ("/generate", {"input_ids": [1], "sampling_params": {"n": 2}}, "sampling_params"),
        ("/generate", {"text": ["a"], "sampling_params": [{"n": 2}]}, "sampling_params"),
    ],
)
def test_several_sequences_of_a_prompt_are_refused_by_name(make, path, more, field_name):
    setup = make(*sglang_pair())
    answer = setup.client.post(path, json=more)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field_name}: an SGLang decode server")
    assert not setup.prefill.bodies + setup.decode.bodies


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": [[1], [2]]}),
        ("/generate", {"input_ids": [[1], [2]]}),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {}]}),
    ],
)
def test_several_prompts_have_the_rooms_from_one_room_on(make, path, more):
    """SGLang counts them: its servers give prompt ``i`` of a request the room of the request plus
    ``i``.
    """
    setup = make(*sglang_pair())
    setup.prefill.answer = [{"text": "?"}, {"text": "?"}]
    assert setup.client.post(path, json=more).json() == ANSWER
    first, second = setup.last
    assert first == {**more, **room_of(second), "stream": False}
    assert second == {**more, **room_of(second)}
    assert 0 < second["bootstrap_room"] < 1 << 62


def test_several_prompts_need_two_sglang_servers(make):
    setup = make(Server("p", given=CONTROL), Server("d", "decode"))
    answer = setup.post(prompt=[[1], [2]])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt: an SGLang decode server")
    assert not setup.prefill.bodies + setup.decode.bodies


def test_several_prompts_go_to_another_decode_engine_alone(make):
    setup = make(Server("p", "prefill"), Server("d"))
    assert setup.post(prompt=[[1], [2]]).json() == ANSWER
    assert not setup.prefill.bodies
    assert room_of(setup.decode.bodies[0]) == {}


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        ("/v1/completions", {"prompt": [1], "echo": True, "logprobs": 1}, "echo: the log-prob"),
        (
            "/generate",
            {"input_ids": [1], "return_logprob": True, "logprob_start_len": 0},
            "logprob_start_len: the log-prob",
        ),
    ],
)
def test_what_only_the_prefill_server_knows_is_refused_by_name(make, path, more, message):
    setup = make(*sglang_pair())
    answer = setup.client.post(path, json=more)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert not setup.prefill.bodies + setup.decode.bodies


def test_sglangs_own_path_needs_two_sglang_servers(make):
    setup = make(Server("p", "prefill"), Server("d"))
    answer = setup.client.post("/generate", json={"input_ids": [1]})
    assert answer.status_code == 400
    assert "is no SGLang server; ask /v1/completions" in answer.json()["error"]["message"]
    assert not setup.prefill.bodies + setup.decode.bodies


def test_sglangs_own_path_finds_the_sglang_servers_among_others(make):
    setup = make(Server("p", "prefill"), Server("d", "decode"), Server("e"))
    for _ in range(4):
        assert setup.client.post("/generate", json={"input_ids": [1]}).json() == ANSWER
    assert len(setup.decode.bodies) == 4


def test_several_sequences_go_to_a_decode_engine_that_computes_prompts(make):
    sglang, other = Server("d", "decode"), Server("e")
    setup = make(Server("p", "prefill"), sglang, other)
    for _ in range(4):
        assert setup.post(n=2).json() == ANSWER
    assert len(other.bodies) == 4
    assert not setup.prefill.bodies + sglang.bodies


def test_an_sglang_decode_server_needs_a_prefill_engine(make):
    setup = make(Server("p", "decode"), Server("d", "decode"), up=False, decode_only="fallback")
    answer = setup.post()
    assert answer.status_code == 503
    assert "no prefill engine can serve this" in answer.json()["error"]["message"]
    assert not setup.decode.bodies


def test_another_decode_engine_needs_none_where_that_is_allowed(make):
    sglang, other = Server("d", "decode"), Server("e")
    setup = make(Server("p", "decode"), sglang, other, up=False, decode_only="fallback")
    until(lambda: setup.client.get("/health").json()["engines"][2]["healthy"])
    for _ in range(3):
        assert setup.post().json() == ANSWER
    assert (len(sglang.bodies), len(other.bodies)) == (0, 3)


def test_a_client_names_no_room(make):
    setup = make(*sglang_pair())
    headers = {"x-override-bootstrap-host": "evil", "x-override-bootstrap-room": "1"}
    said = {"bootstrap_host": "evil", "bootstrap_room": 1, "disagg_prefill_dp_rank": 3}
    setup.client.post("/v1/completions", json={**ASKED, **said}, headers=headers)
    for server in (setup.prefill, setup.decode):
        assert server.bodies[0]["bootstrap_host"] == "127.0.0.1"
        assert "disagg_prefill_dp_rank" not in server.bodies[0]
        assert not headers.keys() & server.headers[0].keys()


@pytest.fixture
def tell_when(monkeypatch):
    """``tell_when(owner, name, server, ...)``: shy servers tell of themselves once a method of the
    router is called, for example because a request waits for what they tell.
    """

    def begin(owner: type, name: str, *servers: Server) -> None:
        method = getattr(owner, name)

        async def called(*args: Any, **more: Any) -> Any:
            for server in servers:
                server.is_shy = False
            return await method(*args, **more)

        monkeypatch.setattr(owner, name, called)

    return begin


LATE: dict[str, Any] = {"is_shy": True, "info_s": 0.7}
"""Of a server that tells of itself later than a request waits where it could do without."""


def test_servers_whose_facts_come_late_get_a_room_by_their_own_path(make, tell_when):
    pair = sglang_pair(**LATE)
    tell_when(Members, "meet", *pair)
    setup = make(*pair, up=None)
    body = {"input_ids": [1, 2], "sampling_params": {"temperature": 0, "n": 1}}
    assert setup.client.post("/generate", json=body).json() == ANSWER


def test_a_relayed_path_waits_for_servers_whose_facts_come_late(make, tell_when):
    pair = sglang_pair(**LATE)
    tell_when(EnginePool, "pick", *pair)
    setup = make(*pair, up=None)
    assert setup.client.post("/tokenize", json={"prompt": "Hi"}).json() == ANSWER


async def _at_once(_: Members) -> None:
    """Waits for no health check, as if all of them took too long."""


def test_a_tokenizer_serves_no_server_whose_facts_come_late(make, tell_when):
    pair = sglang_pair(**LATE)
    tell_when(Members, "meet", *pair)
    setup = make(*pair, up=None, tokenizer=True)
    assert setup.post().json() == ANSWER
    assert all(room_of(body) for body in setup.last)


def test_a_tokenizer_serves_no_server_whose_facts_come_as_its_model_is_asked_for(
    make, monkeypatch, tell_when
):
    monkeypatch.setattr(Members, "meet", _at_once)
    pair = sglang_pair(**LATE)
    tell_when(EnginePool, "pick", *pair)
    setup = make(*pair, up=None, tokenizer=True)
    assert setup.post(prompt="Hi").json() == ANSWER
    assert all(room_of(body) for body in setup.last)


def test_token_ids_alone_reach_no_server_that_proves_to_be_sglangs(make, monkeypatch, tell_when):
    monkeypatch.setattr(Members, "meet", _at_once)
    prefill = Server("p", "prefill", **LATE)
    setup = make(prefill, Server("d"), up=None, tokenizer=True)
    until(lambda: setup.client.get("/health").json()["engines"][1]["healthy"])
    tell_when(EnginePool, "pick", prefill)
    answer = setup.post(prompt="Hi")
    assert answer.status_code == 503
    assert "prefill engine 'p' has just come, an SGLang server; ask again" in answer.text
    assert not setup.prefill.bodies
    assert setup.post(prompt="Hi").json() == ANSWER


def test_a_server_whose_facts_come_late_is_waited_for(make, tell_when):
    decode = Server("d", "decode", **LATE)
    tell_when(Members, "meet", decode)
    setup = make(Server("p", given=CONTROL), decode, up=None)
    assert setup.post().json() == ANSWER
    assert [room_of(body) != {} for body in decode.bodies] == [True]
    assert len(setup.prefill.bodies) == 1


def test_a_prefill_server_whose_facts_come_late_gets_a_room_too(make, tell_when):
    prefill = Server("p", "prefill", **LATE)
    tell_when(Members, "meet", prefill)
    setup = make(prefill, Server("d"), up=None)
    assert setup.post().json() == ANSWER
    assert [room_of(body) != {} for body in prefill.bodies] == [True]
    assert len(setup.decode.bodies) == 1


def test_a_control_channel_that_comes_late_is_asked_for_again(make):
    prefill = Server("p", "prefill", control="")
    setup = make(prefill, Server("d"))
    assert "control channel of the prefill engine is not known" in setup.post().text
    prefill.control = CONTROL
    until(lambda: setup.post().status_code == 200)
    room = setup.prefill.bodies[-1]["bootstrap_room"]
    params = setup.decode.bodies[-1]["kv_transfer_params"]
    assert params["transfer"] == TransferId.of_room(CONTROL, room, None).text


def test_a_server_that_has_been_slow_from_its_start_gets_no_request(make, monkeypatch):
    """It may be an SGLang server, to which a request without a room is a fault of the client."""
    with monkeypatch.context() as patch:
        patch.setattr(engine_client, "CONNECT_TIMEOUT_S", 0.2)
        setup = make(*sglang_pair(is_shy=True), up=None)
        until(lambda: _are_slow(setup.client))
    answer = setup.post()
    assert answer.status_code == 503
    assert "it has not answered for " in answer.text
    assert not setup.prefill.bodies + setup.decode.bodies
    setup.prefill.is_shy = setup.decode.is_shy = False
    until(lambda: _are_known(setup.client, up=True))
    assert setup.post().json() == ANSWER


# ---- failures ------------------------------------------------------------------------------------


def test_a_failure_is_tried_again_in_another_room(make):
    setup = make(*sglang_pair())
    setup.decode.failures = 2
    assert setup.post().json() == ANSWER
    assert len({body["bootstrap_room"] for body in setup.decode.bodies}) == 3


def test_a_failure_that_stays_reaches_the_client(make):
    setup = make(*sglang_pair())
    setup.decode.failures = 100
    answer = setup.post()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "as told")
    assert len(setup.decode.bodies) == 3


@pytest.mark.parametrize(("failing", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_failure_of_one_server_ends_the_request_of_the_other(make, failing, other):
    setup = make(*sglang_pair())
    getattr(setup, failing).failures = 100
    waiting: Server = getattr(setup, other)
    waiting.hang = True
    assert setup.post().status_code == 500
    assert waiting.aborted.wait(WAIT_S)


def test_a_client_that_leaves_ends_both_requests(make):
    setup = make(*sglang_pair())
    setup.prefill.hang = setup.decode.hang = True
    leave(setup.client, lambda: setup.prefill.bodies and setup.decode.bodies, **ASKED)
    assert all(server.aborted.wait(WAIT_S) for server in (setup.prefill, setup.decode))


def test_a_refusal_ends_the_answer_that_the_other_server_has_begun(make):
    setup = make(*sglang_pair())
    setup.prefill.refuses, setup.decode.begins = setup.decode, True
    answer = setup.client.post("/v1/chat/completions", json={**ASKED, "stream": True})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "as told")
    assert setup.decode.aborted.wait(WAIT_S)
    engines = setup.client.get("/health").json()["engines"]
    assert [each["outstanding"] for each in engines] == [0, 0]


def test_an_operator_sees_of_which_kind_an_engine_is(make):
    setup = make(Server("p", "prefill"), Server("d"))
    engines = setup.client.get("/health").json()["engines"]
    assert {each["name"]: each["kind"] for each in engines} == {"p": "sglang 0.5.23", "d": "vllm"}
    metrics = setup.client.get("/metrics").text
    for name, role, kind in (("p", "prefill", "sglang 0.5.23"), ("d", "decode", "vllm")):
        labels = f'engine="{name}",kind="{kind}",role="{role}"'
        assert f"kvferry_router_engine_info{{{labels}}} 1.0" in metrics
    with setup.client.stream("GET", "/kvferry/watch") as events:
        line = next(line for line in events.iter_lines() if line.startswith("data: "))
    snapshot = json.loads(line.removeprefix("data: "))
    assert [each["kind"] for each in snapshot["engines"]] == ["sglang 0.5.23", "vllm"]


@pytest.mark.parametrize(("mode", "other"), [("prefill", ""), ("", "decode")])
def test_a_server_that_comes_back_has_not_the_control_channel_of_before(make, mode, other):
    prefill = Server("p", "prefill")
    setup = make(prefill, Server("d", other), operator_key="operator")
    assert setup.post().json() == ANSWER

    def state() -> str:
        return setup.client.get("/health").json()["engines"][0]["state"]

    prefill.is_well = False
    until(lambda: state() == "down")
    prefill.mode, prefill.control, prefill.is_well = mode, "", True
    until(lambda: state() == "ready")
    assert "control channel of the prefill engine is not known" in setup.post().text
    assert setup.client.put(
        "/kvferry/engines/prefill/p",
        json={"url": prefill.url, "control": "10.0.0.2:7000"},
        headers={"authorization": "Bearer operator"},
    ).is_success
    assert setup.post().json() == ANSWER


def test_a_server_that_comes_back_is_asked_anew(make):
    setup = make(Server("p", "prefill"), Server("d"))

    def told() -> dict[str, Any]:
        (engine, _) = setup.client.get("/health").json()["engines"]
        return engine

    assert told()["sglang"]["disaggregation_mode"] == "prefill"
    setup.prefill.is_well = False
    until(lambda: told()["state"] == "down")
    setup.prefill.mode, setup.prefill.is_well = "", True
    until(lambda: told()["state"] == "ready")
    assert told()["sglang"] is None
