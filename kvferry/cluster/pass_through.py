"""How a request that the router does not take apart is run over a prefill and a decode engine.

Servers such as vLLM's understand more than this router does: tools, structured output, log
probabilities. The decode engine gets the client's own words plus the transfer parameters, draws
every token, the first one included, and its answer is relayed byte for byte::

    client ── body ──▶ router ── body, 1 token, do_remote_decode ──▶ prefill engine
                         │◀───────────── kv_transfer_params ──────────────┘
                         └───── body, kv_transfer_params ───────────▶ decode engine ──▶ client

With ``at_once`` both engines get the body at the same time, with a transfer that the router has
signed, for which the decode engine asks the prefill engine. Where one of them fails before the
answer has begun, the request is run again, in turn.

The decode engine takes all that it has loaded for cached. What was cached of a prompt, and what the
cache gained by it, is the prefill engine's to say: its numbers take the place of the other's.

Requests of other paths go to a decode server alone, or to all servers
(:mod:`kvferry.cluster.paths`). Requests that it understands: :mod:`kvferry.cluster.prefill_decode`.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry.cluster import web
from kvferry.cluster.engine_client import NO_HEAD
from kvferry.cluster.engines import (
    EVENT_END,
    Engine,
    EngineDownError,
    Forwarded,
    Reply,
)
from kvferry.cluster.headers import Head, put_on
from kvferry.cluster.members import EnginePool
from kvferry.cluster.openai import ApiError
from kvferry.cluster.tries import (
    LEAST_AT_ONCE,
    REMOTE_DECODE,
    StartAgainError,
    Tries,
    begin_transfer,
    by_prefill,
    is_lost,
    pick_pair,
)
from kvferry.config import AtOnce
from kvferry.control.tracing import RequestSpan

_ONLY_DECODE = ("n", "best_of", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs")
"""Fields that shape an answer of which the prefill engine's part is thrown away."""
_BYTES_PER_TOKEN = 4
"""Of a body, about: nobody has made tokens of it."""
_DETAILS = re.compile(rb'"prompt_tokens_details":\s*\{[^{}]*\}')
"""In an answer's usage. In a text of its own the quotation marks would have backslashes."""
_COUNTS = ("cached_tokens", "created_cache_tokens")
"""Of these details, those that are about a cache."""


@dataclass(slots=True, kw_only=True)
class _BodyRequest(Tries):
    """A request in the client's own words."""

    path: str
    body: Mapping[str, Any]
    deadline: float
    """On the event loop's clock."""
    own: bytes | None = None
    """The body as it is to be sent, of a request for which no prompt is computed elsewhere."""
    method: str = "POST"
    forwarded: Forwarded | None = None
    """The decode engine's answer, once it has begun."""
    computing: "asyncio.Future[Reply] | None" = None
    """The prefill engine's work for an answer; it ends soon after the answer has begun."""

    async def counted(self, content: bytes) -> bytes:
        """A part of the answer; with what the prefill engine says of its cache."""
        if self.computing is None or not _DETAILS.search(content):
            return content
        await asyncio.wait((self.computing,))
        if self.computing.cancelled() or self.computing.exception() is not None:
            return content  # then the decode engine has computed the prompt
        reply = self.computing.result()
        told = (reply.usage or {}).get("prompt_tokens_details") or {}
        told = {**told, "cached_tokens": reply.cached_tokens}
        return _DETAILS.sub(lambda details: _put(details[0], told), content)


class _RefusedError(Exception):
    """An engine refused the request: its words are the answer."""

    def __init__(self, status: int, content: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.content = content
        self.headers = headers
        super().__init__(f"status {status}")


@dataclass(frozen=True, slots=True)
class PassThrough:
    """Relays requests over the two pools."""

    prefill: EnginePool
    decode: EnginePool
    timeout_s: float
    """For a whole answer."""
    at_once: AtOnce = "never"
    """See :class:`~kvferry.config.RouterConfig`."""
    key: bytes | None = None
    """The engines' cluster key, if they have one."""

    async def answer(
        self,
        request: Request,
        path: str,
        body: Mapping[str, Any] | bytes,
        span: RequestSpan,
        head: Head = NO_HEAD,
    ) -> Response:
        """The response for a client; an engine that goes away before its first byte is replaced.

        A body of bytes is a decode server's alone. ``span`` has the request's id, and ends with the
        answer.

        Raises:
            ApiError: no engine is left, or time is up.
            ClientGoneError: the client went before the first byte.
        """
        asked = _BodyRequest(
            request_id=span.request_id,
            path=path,
            died=set(),
            body={} if isinstance(body, bytes) else body,
            own=body if isinstance(body, bytes) else None,
            method=request.scope.get("method", "POST"),
            deadline=asyncio.get_running_loop().time() + self.timeout_s,
            span=span,
            head=head,
        )
        try:
            return await web.until_disconnect(request.receive, self._answer(asked))
        except _RefusedError as refused:
            span.end(str(refused))
            return _relayed(Response(refused.content, refused.status), refused.headers, asked)
        except ApiError as error:
            span.end(str(error))
            error.headers = [*error.headers, _id_of(asked)]
            raise
        except web.ClientGoneError as error:
            span.end(str(error))
            if asked.forwarded is not None:  # it began just as the client went away
                asked.forwarded.close()
            raise

    async def _answer(self, request: _BodyRequest) -> Response:
        async with web.deadline(request.deadline, self.timeout_s):
            request.forwarded = forwarded = await self._open(request)
            if not forwarded.is_stream:
                content = await request.counted(await forwarded.read())
        if forwarded.is_stream:
            chunks = _chunks(forwarded, request, self.timeout_s)
            stream = web.EventStream(chunks, on_end=lambda: _end(forwarded, request))
            stream.status_code = forwarded.status
            return _relayed(stream, forwarded.headers, request)
        request.span.end()
        return _relayed(Response(content, forwarded.status), forwarded.headers, request)

    async def to_all(
        self, method: str, path: str, body: bytes, span: RequestSpan, head: Head
    ) -> Response:
        """What each server answers, under the greatest status of all of them."""
        engines = {engine.url: engine for engine in (*self.prefill.engines, *self.decode.engines)}
        if not engines:
            raise self.decode.nobody()

        async def ask(engine: Engine) -> dict[str, Any]:
            try:
                one = await engine.forward(
                    path, body, span.request_id, span, head, method, once=True
                )
                status, content = one.status, await one.read()
            except ApiError as error:
                status, content = error.status, error.content or msgspec.json.encode(error.body())
            told = {"name": engine.name, "role": engine.role, "status": status}
            return {**told, "body": _decoded(content)}

        loop = asyncio.get_running_loop()
        async with web.deadline(loop.time() + self.timeout_s, self.timeout_s):
            servers = await asyncio.gather(*map(ask, engines.values()))
        return web.json_response({"servers": servers}, max(each["status"] for each in servers))

    async def _open(self, request: _BodyRequest) -> Forwarded:
        """The decode engine's answer."""
        if request.own is not None:
            return await self._forward(request, None)
        pair = await self._pair(request)
        if pair is not None:
            try:
                return await self._both(request, *pair)
            except StartAgainError:
                await request.begin_again(self.decode)
        params = await self._prefill(request)
        while True:
            try:
                with request.lending(params):
                    return await self._forward(request, params)
            except StartAgainError:
                request.give_back(params)
                await request.begin_again(self.decode)
                params = await self._prefill(request)
            except BaseException:  # the client went away, time is up, or no engine is left
                request.give_back(params)
                raise

    async def _forward(self, request: _BodyRequest, params: dict[str, Any] | None) -> Forwarded:
        """The answer of the first decode engine that gives one.

        Raises:
            StartAgainError: an engine went away with what was lent, and no other may load it.
        """
        while True:
            engine = await request.pick(self.decode)
            body: Mapping[str, Any] | bytes = request.body
            if request.own is not None:
                body = request.own
            elif params is not None:
                body = {**request.body, "kv_transfer_params": request.handed_on(params)}
            try:
                return await _forward(engine, request, body)
            except EngineDownError as error:
                request.failed(engine, error)
                if is_lost(error, params):
                    raise StartAgainError from error

    async def _pair(self, request: _BodyRequest) -> tuple[Engine, Engine] | None:
        """The two engines that get a request at once; ``None`` if one follows the other."""
        if self.at_once == "never" or not _has_one_answer(request.body):
            return None
        return await pick_pair(
            self.prefill,
            self.decode,
            request.tried,
            lambda *_: self.at_once == "always" or _is_long(request.body),
        )

    async def _both(self, request: _BodyRequest, prefill: Engine, decode: Engine) -> Forwarded:
        """The decode engine's answer, where both work at the same time.

        Raises:
            StartAgainError: one of them went away, or failed.
            _RefusedError: one of them refused the request.
        """
        lends, params = begin_transfer(prefill, self.key)
        request.lender = prefill
        body = {**request.body, "kv_transfer_params": params}
        computing = asyncio.create_task(_computed(request, prefill, lends))
        drawing = asyncio.create_task(_forward(decode, request, body))
        # A chat's first event says nothing but whose turn it is.
        events = 2 if request.path.endswith("/chat/completions") else 1
        asked = prefill
        try:
            with request.lending(params):
                await asyncio.wait((computing, drawing), return_when=asyncio.FIRST_COMPLETED)
                if not drawing.done():
                    await computing
                asked = decode
                forwarded = await drawing
                if await forwarded.has_failed(events):
                    raise StartAgainError
                if forwarded.status != 200:
                    content = await forwarded.read()
                    raise _RefusedError(forwarded.status, content, forwarded.headers)
        except BaseException as error:
            request.give_back(params, prefill)
            for task in (computing, drawing):
                task.cancel()
            drawing.add_done_callback(_close)  # also where the client goes away just now as well
            await asyncio.gather(computing, drawing, return_exceptions=True)
            if isinstance(error, EngineDownError):
                request.failed(asked, error)
            elif not (isinstance(error, _RefusedError) and error.status >= 500):
                raise
            raise StartAgainError from error
        request.computing = computing
        prefill.let_end(computing)
        return forwarded

    async def _prefill(self, request: _BodyRequest) -> dict[str, Any] | None:
        """The transfer parameters of the computed prompt; none where nothing is to be handed on."""
        if not _has_one_answer(request.body):
            return None
        request.computing = None
        reply = await by_prefill(self.prefill, request, lambda engine: _computed(request, engine))
        if reply is None or not reply.kv_transfer_params:
            return None  # the decode engine computes the prompt, or has it
        request.computing = asyncio.get_running_loop().create_future()
        request.computing.set_result(reply)
        return reply.kv_transfer_params


async def _forward(
    engine: Engine, request: _BodyRequest, body: Mapping[str, Any] | bytes
) -> Forwarded:
    """The engine's answer to this attempt; see :meth:`Engine.forward`."""
    request_id = request.engine_request_id
    return await engine.forward(
        request.path, body, request_id, request.span, request.head, request.method
    )


async def _computed(
    request: _BodyRequest, engine: Engine, lends: Mapping[str, Any] = REMOTE_DECODE
) -> Reply:
    """The reply of this engine, which computes the prompt; its token does not count, and may not
    end the answer. ``lends`` are the parameters that it gets.

    Raises:
        _RefusedError: it does not.
        EngineDownError: it cannot be reached, went away or says 503.
        ApiError: 502, it answers with something else.
    """
    body = {name: value for name, value in request.body.items() if name not in _ONLY_DECODE}
    body |= {"max_tokens": 1, "stream": False}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    if "min_tokens" in body:
        body["min_tokens"] = 0
    body["kv_transfer_params"] = lends
    forwarded = await _forward(engine, request, body)
    content = await forwarded.read()
    if forwarded.status != 200:
        raise _RefusedError(forwarded.status, content, forwarded.headers)
    try:
        return msgspec.json.decode(content, type=Reply)
    except msgspec.DecodeError as error:
        raise ApiError(
            502, f"prefill engine {engine.name!r}: its answer does not decode: {error}"
        ) from error


def _put(details: bytes, told: Mapping[str, Any]) -> bytes:
    """The details of a prompt's tokens, with the numbers that are told."""
    for name in _COUNTS:
        if isinstance(told.get(name), int):
            number = rb'"%b":%d' % (name.encode(), told[name])
            details = re.sub(rb'"%b":\s*\d+' % name.encode(), number, details)
    return details


def _close(drawn: asyncio.Task[Forwarded]) -> None:
    """Closes an answer that nobody wants any more, if there is one."""
    if not drawn.cancelled() and drawn.exception() is None:
        drawn.result().close()


def _is_long(body: Mapping[str, Any]) -> bool:
    """Whether its prompt may have as many tokens as pay."""
    return len(msgspec.json.encode(body)) >= _BYTES_PER_TOKEN * LEAST_AT_ONCE


def _has_one_answer(body: Mapping[str, Any]) -> bool:
    """Whether the request is one sequence: transfer parameters stand for one prompt, used once."""
    prompts = _length(body.get("prompt")) + _length(body.get("prompt_embeds"))
    return prompts <= 1 and body.get("n") in (None, 1) and body.get("best_of") in (None, 1)


def _length(prompts: object) -> int:
    """Number of prompts in a field that may hold one or a list of them; token ids are one."""
    if not isinstance(prompts, list) or (prompts and all(isinstance(t, int) for t in prompts)):
        return 0 if prompts is None else 1
    return len(prompts)


async def _chunks(
    forwarded: Forwarded, request: _BodyRequest, timeout_s: float
) -> AsyncGenerator[bytes, None]:
    """The engine's bytes as they come; whole events, where one may tell what was cached."""
    begun = b""
    async with aclosing(forwarded.chunks()) as chunks:
        while True:
            async with web.deadline(request.deadline, timeout_s):
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            if request.computing is not None:
                events, end, begun = (begun + chunk).rpartition(EVENT_END)
                chunk = await request.counted(events + end)
            yield chunk
    if begun:
        yield begun


def _relayed(
    response: Response, headers: list[tuple[bytes, bytes]], request: _BodyRequest
) -> Response:
    """A response with what of the server's head is for the client, and the client's own id."""
    put_on(response, [*headers, _id_of(request)])
    return response


def _id_of(request: _BodyRequest) -> tuple[bytes, bytes]:
    """The header that tells the client its request's id."""
    request_id = request.head.request_id or request.request_id
    return b"x-request-id", request_id.encode("latin-1")


def _decoded(content: bytes) -> Any:
    """JSON, or what else it is, as text."""
    try:
        return msgspec.json.decode(content) if content else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return content.decode(errors="replace")


def _end(forwarded: Forwarded, request: _BodyRequest) -> None:
    forwarded.close()
    request.span.end()
