"""Requests that go to the engines in the client's own words.

Servers such as vLLM's understand more than this router does: tools, structured output, log
probabilities. Such a body is not taken apart. A prefill engine computes its prompt and keeps it, a
decode engine gets the body as it came plus the transfer parameters, draws every token, the first
one included, and its answer is relayed byte for byte::

    client ── body ──▶ router ── body, 1 token, do_remote_decode ──▶ prefill engine
                         │◀───────────── kv_transfer_params ──────────────┘
                         └───── body, kv_transfer_params ───────────▶ decode engine ──▶ client
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry.cluster import web
from kvferry.cluster.engines import Engine, EngineDownError, EnginePool, Forwarded, Reply
from kvferry.cluster.life import REMOTE_DECODE
from kvferry.cluster.openai import ApiError

_ONLY_DECODE = ("n", "best_of", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs")
"""Fields that shape an answer of which the prefill engine's part is thrown away."""


@dataclass(slots=True)
class _Passage:
    """One request on its way."""

    path: str
    body: Mapping[str, Any]
    request_id: str
    deadline: float
    """On the event loop's clock."""
    prefill_tried: set[Engine] = field(default_factory=set)
    decode_tried: set[Engine] = field(default_factory=set)
    attempt: int = 1

    @property
    def engine_request_id(self) -> str:
        """New for each attempt: the old one may still hold blocks."""
        return self.request_id if self.attempt == 1 else f"{self.request_id}-try{self.attempt}"


class _RefusedError(Exception):
    """A prefill engine refused the request: its words are the answer."""

    def __init__(self, status: int, content: bytes) -> None:
        self.status = status
        self.content = content
        super().__init__(f"status {status}")


@dataclass(frozen=True, slots=True)
class PassThrough:
    """Relays requests over the two pools."""

    prefill: EnginePool
    decode: EnginePool
    timeout_s: float
    """For a whole answer."""

    async def answer(self, request: Request, path: str, body: Any) -> Response:
        """The response for a client; an engine that goes away before its first byte is replaced.

        Raises:
            ApiError: the body is no JSON object, no engine is left, or time is up.
            ClientGoneError: the client went before the first byte.
        """
        if not isinstance(body, Mapping):
            raise ApiError(400, f"the body must be a JSON object, not {type(body).__name__}")
        passage = _Passage(
            path,
            {name: value for name, value in body.items() if name != "kv_transfer_params"},
            f"kvferry-{uuid.uuid4().hex}",
            asyncio.get_running_loop().time() + self.timeout_s,
        )
        try:
            return await web.until_disconnect(request.receive, self._answer(passage))
        except _RefusedError as refused:
            return Response(refused.content, refused.status, media_type="application/json")

    async def _answer(self, passage: _Passage) -> Response:
        headers = {"x-request-id": passage.request_id}
        async with web.deadline(passage.deadline, self.timeout_s):
            forwarded, first = await self._open(passage)
        chunks = _chunks(forwarded, first, passage, self.timeout_s)
        if forwarded.is_stream:
            return web.EventStream(chunks, headers)
        async with aclosing(chunks):
            content = b"".join([chunk async for chunk in chunks])
        return Response(content, forwarded.status, headers, media_type="application/json")

    async def _open(self, passage: _Passage) -> tuple[Forwarded, bytes]:
        """The decode engine's answer and its first bytes."""
        params = await self._prefill(passage)
        while True:
            engine = self.decode.pick(passage.decode_tried)
            body = dict(passage.body)
            if params is not None:
                body["kv_transfer_params"] = params
            try:
                forwarded = await engine.forward(passage.path, body, passage.engine_request_id)
                return forwarded, await forwarded.first_bytes()
            except EngineDownError as error:
                passage.decode_tried.add(engine)
                if error.reached:  # the lease may be in its hands: prefill anew
                    passage.attempt += 1
                    params = await self._prefill(passage)

    async def _prefill(self, passage: _Passage) -> dict[str, Any] | None:
        """The transfer parameters of the computed prompt; none where nothing is to be handed on."""
        if not _has_one_answer(passage.body):
            return None
        body = {name: value for name, value in passage.body.items() if name not in _ONLY_DECODE}
        body |= {"max_tokens": 1, "stream": False}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        if "min_tokens" in body:
            body["min_tokens"] = 0
        # The prefill engine's token does not count: it may not end the answer.
        body["kv_transfer_params"] = {
            name: value for name, value in REMOTE_DECODE.items() if name != "keep_first_token"
        }
        while True:
            engine = self.prefill.pick(passage.prefill_tried)
            try:
                forwarded = await engine.forward(passage.path, body, passage.engine_request_id)
                content = await forwarded.read()
            except EngineDownError:
                passage.prefill_tried.add(engine)
                continue
            if forwarded.status != 200:
                raise _RefusedError(forwarded.status, content)
            try:
                return msgspec.json.decode(content, type=Reply).kv_transfer_params
            except msgspec.DecodeError as error:
                raise ApiError(
                    502, f"prefill engine {engine.name!r}: its answer does not decode: {error}"
                ) from error


def _has_one_answer(body: Mapping[str, Any]) -> bool:
    """Whether the request is one sequence: transfer parameters stand for one prompt, used once."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and (
        len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)
    )
    return not several and body.get("n") in (None, 1) and body.get("best_of") in (None, 1)


async def _chunks(
    forwarded: Forwarded, first: bytes, passage: _Passage, timeout_s: float
) -> AsyncGenerator[bytes, None]:
    """The engine's bytes as they come."""
    try:
        yield first
        while True:
            async with web.deadline(passage.deadline, timeout_s):
                chunk = await forwarded.next_bytes()
            if not chunk:
                return
            yield chunk
    finally:
        await forwarded.aclose()
