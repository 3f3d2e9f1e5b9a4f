"""Which server answers a path, and what of a request's and an answer's head goes through."""

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.router.apis import APIS
from kvferry.router.paths import PATHS, Answerer, without_transfer
from kvferry.router.router import Router
from kvferry.serving.messages import EngineAddress, Role, RouterSettings
from kvferry.testing.waiting import WAIT_S, until

METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
HERE = {"authorization": "Bearer operator"}


@dataclass
class Asked:
    """One request, as the server got it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    """Answers everything, and says who it is."""

    name: str
    role: Role
    status: int = 200
    own_headers: dict[str, str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    def app(self):
        routes = [
            Route("/health", lambda _: Response()),
            Route("/server_info", self._tell_server, methods=METHODS),
            Route("/{path:path}", self._answer, methods=METHODS),
        ]
        return Starlette(routes=routes)

    async def _tell_server(self, request):
        if "x-request-id" not in request.headers:  # a health check
            return Response(status_code=404)
        return await self._answer(request)

    async def _answer(self, request):
        path, query = request.scope["raw_path"].decode(), request.url.query
        if path == "/v1/models" and "kvferry" not in request.headers.get("x-request-id", ""):
            return JSONResponse({"data": [{"id": "big", "max_model_len": 512}]})  # a health check
        body = await request.body()
        self.asked.append(Asked(request.method, path, query, dict(request.headers), body))
        if b'"stream":true' in body.replace(b" ", b""):
            events = (event for event in (b"event: a\ndata: {}\n\n", b"data: 1\n\n"))
            kind = {"content-type": "text/event-stream; charset=utf-8"}
            return StreamingResponse(events, self.status, self.own_headers | kind)
        return JSONResponse({"from": self.name}, self.status, self.own_headers)


@dataclass
class Setup:
    prefill: Server
    decode: Server
    client: httpx.Client

    @property
    def asked(self):
        """What the decode server was asked; the prefill server was asked nothing."""
        assert not self.prefill.asked
        return self.decode.asked


@pytest.fixture
def make(servers):
    with contextlib.ExitStack() as stack:

        def build(**settings):
            pair = Server("p0", "prefill"), Server("d0", "decode")
            for each in pair:
                each.url = servers.start(each.app())
            engines = tuple(
                EngineAddress(name=each.name, role=each.role, url=each.url) for each in pair
            )
            settings = {"operator_key": "operator"} | settings
            router = Router(RouterSettings(engines=engines, foreign=True, **settings), None)
            url = servers.start(router.app())
            client = stack.enter_context(
                httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False)
            )
            until(lambda: all(e["healthy"] for e in client.get("/health").json()["engines"]))
            return Setup(*pair, client)

        yield build


@pytest.fixture
def setup(make):
    return make()


def ways(*wanted):
    """Method and path of each entry of these ways, with names filled in."""
    for way in wanted:
        for entry in PATHS[way]:
            method, path = entry.split()
            for name in ("{model:path}", "{response_id}", "{adapter_name}"):
                path = path.replace(name, "x")
            yield method, path


def test_what_generates_computes_or_reads_is_a_decode_servers_to_answer(setup):
    for method, path in ways(Answerer.DECODE, Answerer.ONE):
        body = None if method == "GET" else {"input": "?"}
        answer = setup.client.request(method, path, json=body)
        assert (answer.status_code, answer.json()) == (200, {"from": "d0"}), path
        asked = setup.asked[-1]
        assert (asked.method, asked.path) == (method, path)
        assert json.loads(asked.body or "null") == body


def test_what_changes_servers_is_all_of_theirs_to_answer_and_the_operators_to_ask(make):
    setup = make(api_key="clients")
    for method, path in ways(Answerer.ALL):
        refused = setup.client.request(method, path, headers={"authorization": "Bearer clients"})
        assert refused.status_code == 401, path
    assert not setup.prefill.asked + setup.decode.asked

    setup.decode.status = 503
    answer = setup.client.post("/pause", headers=HERE)
    assert answer.json()["servers"][1]["body"] == {"from": "d0"}, "a refusal's own words"
    setup.decode.status = 409
    for method, path in ways(Answerer.ALL):
        answer = setup.client.request(method, path, params={"level": 2}, headers=HERE)
        assert answer.status_code == 409, path
        assert answer.json()["servers"] == [
            {"name": "p0", "role": "prefill", "status": 200, "body": {"from": "p0"}},
            {"name": "d0", "role": "decode", "status": 409, "body": {"from": "d0"}},
        ]
        for server in (setup.prefill, setup.decode):
            asked = server.asked[-1]
            assert (asked.method, asked.path, asked.query) == (method, path, "level=2")
            assert asked.headers["authorization"] == "Bearer clients", "servers are shown that key"


@pytest.mark.parametrize("key", [None, "operator"])
def test_without_an_operators_key_nobody_changes_a_server(make, key):
    setup = make(operator_key=key)
    status = setup.client.post("/pause").status_code
    assert status == (403 if key is None else 401)
    assert not setup.prefill.asked + setup.decode.asked


def test_what_changes_one_server_is_refused_by_name(setup):
    for method, path in ways(Answerer.NOBODY):
        answer = setup.client.request(method, path, headers=HERE)
        assert answer.status_code == 403
        assert f"{method} {path} is for one server" in answer.json()["error"]["message"]
    assert not setup.asked


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v9/new",
        "/v1/responses/x/y",
        "/v1/models/%2e%2e/%2e%2e/pause",
        "/v1/models/a%2f..%2fb",
    ],
)
def test_a_path_on_no_list_is_not_found(setup, path):
    base = str(setup.client.base_url).rstrip("/")
    with httpx.Client(trust_env=False, timeout=WAIT_S) as client:
        request = client.build_request("GET", base)
        request.url = request.url.copy_with(raw_path=path.encode())
        assert client.send(request).status_code == 404
    assert not setup.asked


def test_a_models_name_keeps_its_slash_and_its_spaces(setup):
    assert setup.client.get("/v1/models/org/a%20b%3F").json() == {"from": "d0"}
    assert setup.asked[0].path == "/v1/models/org/a%20b%3F"


def test_the_list_of_models_is_a_servers_own(setup):
    assert setup.client.get("/v1/models").json() == {"from": "d0"}


def test_a_browser_may_ask_whether_it_may_ask(make):
    setup = make(api_key="clients")
    setup.decode.own_headers = {"access-control-allow-origin": "https://a"}
    for path in ("/v1/chat/completions", "/v1/responses"):
        asked = {"origin": "https://a", "access-control-request-method": "POST"}
        answer = setup.client.options(path, headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a"
        assert setup.asked[-1].method == "OPTIONS"
        assert asked.items() <= setup.asked[-1].headers.items()


EVIL = {"kv_transfer_params": {"remote_host": "evil"}}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/systemone", *APIS])
@pytest.mark.parametrize("nested", [None, "sampling_params", "vllm_xargs"])
def test_a_client_says_nowhere_where_kv_lies(setup, path, nested):
    body = {"input": "kv_transfer_params", **(EVIL if nested is None else {nested: EVIL})}
    setup.client.post(path, json=body)
    kept: dict[str, Any] = {"input": "kv_transfer_params"}
    if nested is not None:
        kept[nested] = {}
    assert json.loads(setup.decode.asked[0].body) == kept
    assert not any(b"evil" in asked.body for asked in setup.prefill.asked)


def test_transfer_parameters_within_extra_arguments_are_dropped_too():
    body = {"sampling_params": {"n": 1, "extra_args": EVIL}, "messages": [EVIL]}
    assert without_transfer(body) == {
        "sampling_params": {"n": 1, "extra_args": {}},
        "messages": [EVIL],  # a client's text
    }


def test_a_body_that_a_server_would_read_otherwise_is_refused(setup):
    """Python's decoder takes UTF-16 too; so a server's would find what the router's has not."""
    content = json.dumps({"input": "?", **EVIL}).encode("utf-16")
    kind = {"content-type": "application/json"}
    answer = setup.client.post("/v1/responses", content=content, headers=kind)
    assert answer.status_code == 400
    assert not setup.asked


def test_words_that_need_no_change_go_byte_for_byte(setup):
    content = b'{ "input" : "\\u00e9",\n "n": 1.0 }'
    kind = {"content-type": "application/json; charset=utf-8"}
    setup.client.post("/v1/embeddings", content=content, headers=kind)
    assert setup.asked[0].body == content
    assert setup.asked[0].headers["content-type"] == kind["content-type"]


def test_a_form_with_a_file_goes_as_it_is(setup):
    files = {"file": ("a.wav", b"\xff\x00RIFF")}
    assert setup.client.post("/v1/audio/transcriptions", files=files).status_code == 200
    assert b"\xff\x00RIFF" in setup.asked[0].body
    assert setup.asked[0].headers["content-type"].startswith("multipart/form-data")


def test_a_stream_of_another_path_is_relayed_byte_for_byte(setup):
    answer = setup.client.post("/invocations", json={"stream": True})
    assert answer.content == b"event: a\ndata: {}\n\ndata: 1\n\n"
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


# ---- heads ---------------------------------------------------------------------------------------

END_TO_END = {
    "x-data-parallel-rank": "1",
    "x-session-id": "s",
    "tracestate": "a=b",
    "baggage": "k=v",
    "authorization": "Bearer the-servers-own",
    "user-agent": "client/1",
    "cookie": "a=1; b=2",
    "x-anything": "é",
}
PATHS_ASKED = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"]


@pytest.mark.parametrize("path", PATHS_ASKED)
def test_end_to_end_headers_and_the_query_reach_every_server_that_is_asked(setup, path):
    headers = [(name, value.encode()) for name, value in END_TO_END.items()]
    setup.client.post(f"{path}?a=1&b=%20", json={"prompt": "?"}, headers=headers)
    servers = [setup.decode] if path in PATHS_ASKED[2:] else [setup.prefill, setup.decode]
    for server in servers:
        (asked,) = server.asked
        got = {name: asked.headers.get(name, "") for name in END_TO_END}
        got["x-anything"] = got["x-anything"].encode("latin-1").decode()
        assert got == END_TO_END
        assert asked.query == "a=1&b=%20"


def test_headers_about_one_connection_and_the_routers_own_do_not_pass(setup):
    left_out = {
        "connection": "x-mine, close",
        "x-mine": "1",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "proxy-authorization": "Basic eA==",
        "accept-encoding": "br",
        "traceparent": "nonsense",
    }
    setup.client.post("/v1/embeddings", json={}, headers=left_out)
    got = setup.asked[0].headers
    assert not {"x-mine", "keep-alive", "te", "proxy-authorization"} & got.keys()
    assert got["accept-encoding"] == "identity"
    assert got["host"] == setup.decode.url.removeprefix("http://")
    assert got["traceparent"].startswith("00-")


@pytest.mark.parametrize(
    ("settings", "shown", "passed"),
    [
        ({"api_key": "clients"}, "clients", "Bearer clients"),  # its own, which servers share
        ({}, "operator", None),
        ({}, "the-servers-own", "Bearer the-servers-own"),
    ],
)
def test_a_key_that_the_router_judges_is_not_passed_on(make, settings, shown, passed):
    setup = make(**settings)
    headers = {"authorization": f"Bearer {shown}"}
    setup.client.post("/v1/embeddings", json={}, headers=headers)
    assert setup.asked[0].headers.get("authorization") == passed


def test_a_key_that_the_router_judges_is_not_passed_on_beside_another(setup):
    headers = [("authorization", f"Bearer {key}") for key in ("operator", "of-a-proxy")]
    setup.client.headers.pop("authorization", None)
    setup.client.post("/v1/embeddings", json={}, headers=headers)
    assert setup.asked[0].headers["authorization"] == "Bearer of-a-proxy"


@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
@pytest.mark.parametrize("value", [b"a\x01b", b"\x7f", b"x\x1f"])
def test_a_header_that_no_server_can_be_sent_harms_its_own_request_only(setup, method, value):
    refused = setup.client.request(method, "/v1/completions", json={}, headers={"x-mine": value})
    assert refused.status_code == 400
    assert "Invalid header value char" in refused.json()["error"]["message"]
    assert setup.asked == []
    engines = setup.client.get("/health").json()["engines"]
    assert all(engine["healthy"] for engine in engines)


def test_a_clients_request_id_reaches_servers_with_a_suffix_and_comes_back_as_sent(setup):
    sent = {"x-request-id": "job 7[b]"}
    answers = [setup.client.post("/v1/completions", json={}, headers=sent) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["job 7[b]"] * 2
    first, second = (asked.headers["x-request-id"] for asked in setup.decode.asked)
    assert [asked.headers["x-request-id"] for asked in setup.prefill.asked] == [first, second]
    assert first.startswith("job_7_b_-")
    assert first != second


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [200, 404, 429, 503])
@pytest.mark.parametrize("path", PATHS_ASKED[1:])
def test_a_servers_headers_reach_the_client(setup, path, status, stream):
    setup.decode.status = status
    setup.decode.own_headers = {
        "retry-after": "7",
        "x-anything": "1",
        "set-cookie": "a=1",
        "connection": "x-mine",
        "x-mine": "1",
        "x-request-id": "theirs",
        "server": "theirs",
    }
    answer = setup.client.post(path, json={"prompt": "?", "stream": stream})
    assert answer.status_code == status
    got = answer.headers
    assert (got["retry-after"], got["x-anything"], got["set-cookie"]) == ("7", "1", "a=1")
    assert "x-mine" not in got
    assert got["x-request-id"].startswith("kvferry-")
    assert "theirs" not in got["server"]
