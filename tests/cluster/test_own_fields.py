"""An answer that the router makes of two servers' tokens has the fields of a server's own."""

import contextlib
import json
from dataclasses import dataclass

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.router.router import Router
from kvferry.serving.messages import EngineAddress, RouterSettings
from kvferry.testing.waiting import WAIT_S, until

TOKENS = [*b"!?."]
HEAD = {"object": "text_completion", "created": 1, "model": "served"}
LAST = {"system_fingerprint": "release-of-theirs", "new_in_a_release": 5}
DETAILS = {"prompt_tokens_details": {"cached_tokens": 1, "multimodal_tokens": None}}


@dataclass
class Server:
    """Draws three tokens, in the form of vLLM's servers, with a field that nobody knows yet."""

    refuses: bool = False

    def app(self):
        return Starlette(
            routes=[
                Route("/health", lambda _: Response()),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    def _models(self, _):
        return JSONResponse({"data": [{"id": "served", "max_model_len": 512}]})

    async def _complete(self, request):
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = [*prompt.encode()]
        if self.refuses or len(prompt) + body["max_tokens"] > 512:
            error = {"message": "theirs", "type": "TheirError", "param": "prompt", "code": 400}
            return JSONResponse({"error": error}, 400, {"x-theirs": "1"})
        drawn = prompt.count(TOKENS[0])
        tokens = TOKENS[drawn : drawn + body["max_tokens"]]
        asked = bool(body.get("return_token_ids"))
        if body["stream"]:
            events = self._events(prompt, tokens, asked, body.get("stream_options"))
            return StreamingResponse(
                events, headers={"content-type": "text/event-stream", "x-theirs": "1"}
            )
        choice = self._choice(tokens, "length") | {"prompt_logprobs": None}
        choice |= {"token_ids": tokens, "prompt_token_ids": prompt} if asked else {}
        usage = self._usage(prompt, tokens)
        told = {**HEAD, "choices": [choice], "service_tier": None, **LAST, "usage": usage}
        params = body.get("kv_transfer_params") or {}
        told["kv_transfer_params"] = {"ticket": "t"} if params.get("do_remote_decode") else None
        return JSONResponse({"id": "theirs", **told}, headers={"x-theirs": "1"})

    def _choice(self, tokens, reason):
        text = bytes(tokens).decode()
        told = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {**told, "stop_reason": None, "token_ids": None, "prompt_token_ids": None}

    def _usage(self, prompt, tokens):
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        return {**counts, "total_tokens": len(prompt) + len(tokens), **DETAILS, "theirs": None}

    async def _events(self, prompt, tokens, asked, options):
        tells = bool((options or {}).get("include_usage"))
        for place, token in enumerate(tokens):
            is_last = place == len(tokens) - 1
            choice = self._choice([token], "length" if is_last else None)
            if asked:
                ids = prompt if place == 0 else None
                choice |= {"token_ids": [token], "prompt_token_ids": ids}
            last = LAST if is_last and not tells else {}
            yield self._event({**HEAD, "choices": [choice], **last})
        if tells:
            counts = {n: v for n, v in self._usage(prompt, tokens).items() if v is not None}
            counts |= {"prompt_tokens_details": {"cached_tokens": 1}}
            yield self._event({**HEAD, "choices": [], "usage": counts, **LAST})
        yield b"data: [DONE]\n\n"

    def _event(self, told):
        return b"data: " + json.dumps({"id": "theirs", **told}).encode() + b"\n\n"


@pytest.fixture
def make(servers, codec):
    with contextlib.ExitStack() as stack:

        def build(prefill=1):
            pair = [Server() for _ in range(prefill)], [Server()]
            lone = servers.start(pair[1][0].app())
            engines = [EngineAddress(name="d0", role="decode", url=lone)]
            for place, each in enumerate(pair[0]):
                url = servers.start(each.app())
                engines.append(EngineAddress(name=f"p{place}", role="prefill", url=url))
            router = Router(RouterSettings(engines=tuple(engines), foreign=True), codec)
            url = servers.start(router.app())
            client = stack.enter_context(httpx.Client(timeout=WAIT_S, trust_env=False))
            until(lambda: client.get(f"{url}/health").json()["engines"])
            until(lambda: all(e["healthy"] for e in client.get(f"{url}/health").json()["engines"]))

            def ask(**body):
                """What a lone server answers, and what the router does."""
                body = {"prompt": "Hi", "max_tokens": 3, "temperature": 0, "stream": False, **body}
                return [client.post(f"{base}/v1/completions", json=body) for base in (lone, url)]

            return ask, pair

        yield build


def plain(told):
    """What two answers may differ in is taken out."""
    return {**told, "id": "", "created": 0}


def events(answer):
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [plain(json.loads(line)) for line in lines]


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("ids", [False, True])
def test_a_whole_answer_has_the_fields_and_values_of_a_lone_servers(make, ids, max_tokens):
    ask, _ = make()
    lone, ours = ask(return_token_ids=ids, max_tokens=max_tokens)
    assert plain(ours.json()) == plain(lone.json())
    assert ours.headers["x-theirs"] == "1"


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_has_the_events_of_a_lone_servers(make, prefill, ids, usage, max_tokens):
    ask, _ = make(prefill)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    lone, ours = ask(return_token_ids=ids, max_tokens=max_tokens, stream=True, **options)
    assert events(ours) == events(lone)
    assert ours.headers["x-theirs"] == "1"
    assert ours.headers["content-type"].startswith("text/event-stream")


def test_without_a_prefill_server_usage_and_fingerprint_are_the_decode_servers(make):
    ask, _ = make(prefill=0)
    lone, ours = (plain(each.json()) for each in ask())
    assert ours["system_fingerprint"] == lone["system_fingerprint"]
    counts = {name: value for name, value in lone["usage"].items() if value is not None}
    counts["prompt_tokens_details"] = {"cached_tokens": 1}
    assert ours["usage"] == counts


def test_a_stop_string_is_the_reason_that_is_told(make):
    ask, _ = make()
    for answer in ask(stop=["?"])[1:]:
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("!", "stop")
        assert choice["stop_reason"] == "?"


@pytest.mark.parametrize(
    "body", [{"prompt": "x" * 600}, {"max_tokens": 600}, {"prompt": "x" * 511, "max_tokens": 2}]
)
def test_what_does_not_fit_is_refused_in_a_servers_own_words(make, body):
    ask, _ = make()
    lone, ours = ask(**body)
    assert lone.status_code == ours.status_code == 400
    assert ours.content == lone.content


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_server_refuses_is_refused_in_its_own_words(make, role, stream):
    ask, pair = make()
    pair[role][0].refuses = True
    _, ours = ask(stream=stream)
    if not stream or role == 0:  # else the prefill server's token was out before
        assert ours.status_code == 400
        assert ours.json()["error"]["type"] == "TheirError"
        assert ours.headers["x-theirs"] == "1"
    else:
        assert "theirs" in ours.text
