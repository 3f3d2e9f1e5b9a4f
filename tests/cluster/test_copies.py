"""Prefill servers compute nothing for bodies that servers refuse, and refuse no others.

The servers are stand-ins with vLLM's own rules. Its request classes themselves judge the copies in
``tests/integrations/vllm/test_copies.py``.
"""

import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.testing.waiting import WAIT_S
from tests.cluster.conftest import running_router

pytestmark = pytest.mark.processes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EVENTS = b'data: {"choices": [{"index": 0, "text": "!"}]}\n\ndata: [DONE]\n\n'


def broken_rule(path, body):
    """The rule of vLLM that a body breaks; empty if it breaks none."""
    stream, logprobs = body.get("stream"), body.get("logprobs")
    most = body.get("max_tokens", 16 if path == COMPLETIONS else None)
    if path == CHAT:
        most = body.get("max_completion_tokens", most)
    rules = {
        "stream_options without stream": body.get("stream_options") and not stream,
        "top_logprobs without logprobs": body.get("top_logprobs") and not logprobs,
        "logprob_token_ids without logprobs": body.get("logprob_token_ids") and logprobs is None,
        "prompt_logprobs of a stream": body.get("prompt_logprobs") and stream,
        "max_tokens below 1": most is not None and most < 1,
        "min_tokens above max_tokens": most is not None and body.get("min_tokens", 0) > most,
        "stream is no boolean": not isinstance(stream, bool | None),
    }
    return next((rule for rule, is_broken in rules.items() if is_broken), "")


class Server:
    """Judges bodies as vLLM does, and computes one token."""

    def __init__(self):
        self.bodies = []

    @property
    def computed(self):
        """The bodies that it did not refuse."""
        return [body for path, body in self.bodies if not broken_rule(path, body)]

    def app(self):
        return Starlette(
            routes=[
                Route("/health", lambda _: Response()),
                Route("/v1/models", self._models),
                Route("/{path:path}", self._answer, methods=["POST"]),
            ]
        )

    async def _models(self, _):
        return JSONResponse({"data": [{"id": "served", "max_model_len": 512}]})

    async def _answer(self, request):
        body, path = await request.json(), request.scope["path"]
        self.bodies.append((path, body))
        if rule := broken_rule(path, body):
            return JSONResponse({"error": {"message": rule, "code": 400}}, 400)
        if body.get("stream"):
            return StreamingResponse(iter([EVENTS]), headers={"content-type": "text/event-stream"})
        answer: dict[str, Any] = {"choices": [{"index": 0, "logprobs": body.get("logprobs")}]}
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = {"ticket": "t"}
        return JSONResponse(answer)


@pytest.fixture(scope="module")
def router(server_thread):
    """The command ``kvferry router`` before two servers."""
    prefill, decode = Server(), Server()
    p, d = (server_thread.start(each.app()) for each in (prefill, decode))
    with running_router([p], [d]) as url, httpx.Client(timeout=WAIT_S, trust_env=False) as client:
        yield client, url, d, prefill, decode


@pytest.fixture
def ask(router):
    client, url, lone, prefill, decode = router

    def ask(path, body):
        """A lone server's answer and the router's, and the bodies that each server computed."""
        body = {"prompt": "a"} | body if path == COMPLETIONS else {"messages": []} | body
        content = json.dumps(body)
        answers = [client.post(f"{base}{path}", content=content) for base in (lone, url)]
        told = [(answer.status_code, answer.content) for answer in answers]
        return told, prefill.computed, decode.computed[1:]

    prefill.bodies.clear()
    decode.bodies.clear()
    return ask


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"logprobs": True, "logprob_token_ids": [3, 7]}),
        (CHAT, {"logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": [3, 7]}),
        (CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {"stream_options": {}}),
        (CHAT, {"prompt_logprobs": 2}),
        (CHAT, {"min_tokens": 100}),
        (CHAT, {"min_tokens": 4, "max_tokens": 1, "max_completion_tokens": 5}),
        (COMPLETIONS, {"min_tokens": 5, "max_tokens": 5}),
        (COMPLETIONS, {"min_tokens": 16}),
    ],
)
def test_a_body_that_a_server_takes_is_answered_with_the_prefill_servers_work(ask, path, body):
    (lone, ours), by_prefill, by_decode = ask(path, body)

    assert lone[0] == 200
    assert ours == lone
    (copy,) = by_prefill
    (drawn,) = by_decode
    assert (copy["max_tokens"], copy["stream"], copy.get("min_tokens", 0) < 2) == (1, False, True)
    assert drawn["kv_transfer_params"].items() >= {"ticket": "t"}.items()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"stream_options": {"include_usage": True}}),
        (CHAT, {"stream": False, "stream_options": {"include_usage": True}}),
        (CHAT, {"top_logprobs": 2}),
        (CHAT, {"logprob_token_ids": [3, 7]}),
        (CHAT, {"stream": True, "prompt_logprobs": 2}),
        (CHAT, {"min_tokens": 6, "max_tokens": 5}),
        (CHAT, {"min_tokens": 6, "max_tokens": 7, "max_completion_tokens": 5}),
        (CHAT, {"max_tokens": 0}),
        (CHAT, {"stream": "perhaps"}),
        (COMPLETIONS, {"min_tokens": 17}),
    ],
)
def test_a_body_that_every_server_refuses_is_refused_in_their_words_and_never_computed(
    ask, path, body
):
    (lone, ours), by_prefill, by_decode = ask(path, body)

    assert lone[0] == 400
    assert ours == lone
    assert (by_prefill, by_decode) == ([], [])
