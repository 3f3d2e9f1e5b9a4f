"""Runs a request in the client's own words over a prefill engine and a decode engine.

Servers such as vLLM's support more features than this router: tools, structured output, log
probabilities. The decode engine gets the client's own body plus the transfer parameters and samples
every token, including the first token. The router relays the decode engine's answer byte for byte::

    client ── body ──▶ router ── body, 1 token, do_remote_decode ──▶ prefill engine
                         │◀───────────── kv_transfer_params ──────────────┘
                         └───── body, kv_transfer_params ───────────▶ decode engine ──▶ client

Of a chat that has only text, the prefill engine also returns the token ids, and the decode engine
gets them. So one template is rendered, and one tokenizer runs.

With ``at_once`` both engines get the body at the same time, with a transfer signed by the router.
The decode engine requests the ticket of this transfer from the prefill engine. If an engine fails
before the answer has begun, the router runs the request again, in turn. A pair with an SGLang
server always works at the same time, joined by a room (:mod:`kvferry.router.rooms`).

The decode engine counts all loaded tokens as cached. Only the prefill engine knows how much of the
prompt was in its cache and how much its cache gained. Therefore its numbers replace the numbers in
the decode engine's answer.

Requests of other paths go to a decode server alone, or to all servers
(:mod:`kvferry.router.paths`). The sequence of the engines: :mod:`kvferry.router.hand_over`.
Requests of token ids: :mod:`kvferry.router.token_request`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry.decoding import UNDECODED
from kvferry.observe.spans import RequestSpan
from kvferry.router.apis import APIS, OTHER, Api
from kvferry.router.copies import most_new_tokens, runs_tools
from kvferry.router.engine_client import NO_HEAD
from kvferry.router.engines import Engine
from kvferry.router.hand_over import HandOver
from kvferry.router.headers import Head
from kvferry.router.members import EnginePool
from kvferry.router.paths import QUEUED, SGLANGS
from kvferry.router.queue import QueuePlace, priority_of
from kvferry.router.replies import (
    Computed,
    EngineFailedError,
    Forwarded,
    Reply,
    has_content,
    whole_events,
)
from kvferry.router.rooms import (
    REMOTE_DECODE,
    Joined,
    by_room,
    by_transfer,
    why_unserved,
)
from kvferry.router.routed_request import LEAST_AT_ONCE, Loan, RoutedRequest
from kvferry.serving import web
from kvferry.serving.openai import RESPONSES, ApiError

_PROMPTS = ("prompt", "prompt_embeds", "text", "input_ids")
"""Fields of a prompt, or of several prompts."""
_BYTES_PER_TOKEN = 4
"""Estimated number of bytes of a body per token; the router has no tokens of this body."""
_ONE_TOKEN = {"stream": False, "max_tokens": 1}
"""Fields of a body in a room for which there is no copy: the prefill engine judges all others."""
_LENDS = {"kv_transfer_params": REMOTE_DECODE}
"""Fields with which a prefill engine lends a prompt for an engine that works later."""


class _RefusedError(Exception):
    """An engine refused the request; the client gets the engine's answer."""

    def __init__(self, status: int, content: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.content = content
        self.headers = headers
        super().__init__(f"status {status}")


@dataclass(slots=True, kw_only=True)
class BodyRequest(RoutedRequest[Forwarded]):
    """A request in the client's own words."""

    path: str
    body: Mapping[str, Any]
    patience: web.Patience
    """The time limits of the answer."""
    own: bytes | None = None
    """Bytes of the body, if no prefill engine is used for this request."""
    method: str = "POST"
    several: str = ""
    """The field by which the request has several sequences; empty for a single sequence."""
    computed: Computed | None = None
    """The prefill engine's reply; ``None`` if it does not count for this answer, or not yet."""
    forwarded: Forwarded | None = None
    """The decode engine's answer; ``None`` before its beginning."""

    @property
    def api(self) -> Api:
        """The API of the path."""
        return APIS.get(self.path, OTHER)

    @property
    def may_be_joined(self) -> bool:
        """Whether SGLang servers may serve the request, in a room or as they are."""
        return self.own is not None or self.api.in_rooms

    @property
    def wants_prefill(self) -> bool:
        """Whether the request has a single sequence: transfer parameters stand for one prompt, used
        once.
        """
        return self.own is None and not self.several

    @property
    def is_list(self) -> bool:
        """Whether the request has several prompts, with a single sequence each."""
        return bool(self.several) and set(self.several.split(", ")).issubset(_PROMPTS)

    def has_fetched(self, told: Forwarded) -> bool:
        """Whether the answer is not a refusal: a server may refuse a body before it looks at the
        transfer parameters.
        """
        return told.status == 200

    @property
    def may_be_at_once(self) -> bool:
        """Whether both engines may get this attempt at the same time."""
        if self.attempt > 1 or not self.wants_prefill:
            return False
        return self.api.copy(self.body) is not None

    @property
    def may_be_repeated(self) -> bool:
        """Whether no tool of the request runs in the server: such a tool may have done its work."""
        return self.path != RESPONSES or self.own is None or not runs_tools(self.own)

    def pays_at_once(self, prefill: Engine, decode: Engine) -> bool:
        """Whether the prompt is probably long enough for two requests at the same time."""
        return len(msgspec.json.encode(self.body)) >= _BYTES_PER_TOKEN * LEAST_AT_ONCE

    def join(self, prefill: Engine, decode: Engine, key: bytes | None) -> Joined:
        """Joins two engines by a room, if one of them is an SGLang server; otherwise by a transfer.

        Raises:
            ApiError: 400, the two engines in a room cannot serve the body.
        """
        if not (prefill.needs_room or decode.needs_room):
            return by_transfer(prefill, key)
        if reason := why_unserved(self.path, self.body, prefill, decode):
            raise ApiError(400, reason)
        return by_room(prefill, decode, key)

    async def compute(self, engine: Engine, loan: Mapping[str, Any] | None) -> Reply:
        """Has an engine compute the prompt. The sampled token does not count and may not end the
        answer. An SGLang server gets the whole body, as its row of metadata serves the decode
        server, and samples a single token. In turn, a body without a copy
        (:mod:`kvferry.router.copies`) is left to the decode engine.

        Raises:
            _RefusedError: the engine refuses the request.
            EngineDownError: the engine cannot be reached, went away, answers 503 or is not well.
            EngineFailedError: the engine failed the request and is well.
            ApiError: 502, the engine's answer does not decode.
        """
        wants_ids = False
        if engine.needs_room:
            body = {**self.body, "stream": False}
            if self.body.get("stream"):
                body.pop("stream_options", None)
        else:
            copy = self.api.copy(self.body)
            if copy is None and self.joined is None:
                return Reply()  # nothing is lent, so the decode engine gets the client's own body
            body = copy or {**self.body, **_ONE_TOKEN}
            wants_ids = self.joined is None and _is_vllm(engine) and self.api.by_tokens(self.body)
            if wants_ids:
                body["return_token_ids"] = True
        body.update(_LENDS if self.joined is None else self.joined.lends)
        forwarded = await self._forward(engine, body)
        content = await forwarded.read()
        if forwarded.status != 200:
            raise _RefusedError(forwarded.status, content, forwarded.headers)
        try:
            # SGLang answers several prompts on a path of its own with a list.
            told = msgspec.json.decode(content, type=Computed | list[Any])
            reply = told if isinstance(told, Computed) else Computed()
        except UNDECODED as error:
            raise ApiError(
                502, f"prefill engine {engine.name!r}: its answer does not decode: {error}"
            ) from error
        if not wants_ids:
            reply.prompt_token_ids = msgspec.Raw()  # the client has asked for them
        # An engine that works in turn and lends nothing leaves the prompt to the decode engine.
        self.computed = reply if self.joined is not None or reply.kv_transfer_params else None
        return reply

    def take_first(self, reply: Reply, prefill: Engine) -> Sequence[Forwarded]:
        """Returns nothing for the client."""
        return ()

    async def draw(
        self, engine: Engine, lent: Mapping[str, Any] | None
    ) -> AsyncGenerator[Forwarded, None]:
        """Yields the decode engine's answer as soon as it begins.

        Raises:
            ApiError: 400, an SGLang server would have to compute several sequences.
            EngineFailedError: the engine failed the request and is well.
            _RefusedError: the engine refuses the request beside the prefill engine.
        """
        body: Mapping[str, Any] | bytes = self.body if self.own is None else self.own
        if self.joined is not None:
            body = {**self.body, **self.joined.loads}
        elif self.own is None and engine.needs_room:
            raise ApiError(
                400,
                f"{self.several}: an SGLang decode server computes no prompts, and gets one "
                "sequence per request from a prefill server; send each sequence by itself",
            )
        elif lent is not None:
            body = {**self.body, "kv_transfer_params": {**lent, **self._tokens_for(engine)}}
        self.forwarded = forwarded = await self._forward(engine, body)
        if self.joined is not None and forwarded.status != 200:
            raise _RefusedError(forwarded.status, await forwarded.read(), forwarded.headers)
        yield forwarded

    def _tokens_for(self, engine: Engine) -> Mapping[str, Any]:
        """The prompt's token ids from the prefill server, as a transfer parameter; empty if the
        decode server must render the chat itself, to refuse a sequence that is too long for it.
        """
        computed, longest = self.computed, engine.told.max_model_len
        if computed is None or computed.prompt_tokens is None or longest is None:
            return {}
        fits = computed.prompt_tokens + (most_new_tokens(self.body) or 0) <= longest
        is_list = bytes(computed.prompt_token_ids).startswith(b"[")
        is_fit = fits and is_list and _is_vllm(engine)
        return {"prompt_token_ids": computed.prompt_token_ids} if is_fit else {}

    def is_lost(self, error: ApiError, lent: Loan) -> bool:
        """Whether lent KV is useless for another decode engine after ``error`` of a decode engine.
        Only one pair of engines gets a body at the same time.
        """
        return self.joined is not None or RoutedRequest.is_lost(self, error, lent)

    async def begin_again(self, decode: EnginePool) -> None:
        """Counts a new attempt, without the earlier engines' work; see :class:`RoutedRequest`."""
        self.close()
        self.computed = self.forwarded = None
        await RoutedRequest.begin_again(self, decode)

    def close(self) -> None:
        """Ends the decode engine's answer, if it has begun."""
        if self.forwarded is not None:
            self.forwarded.close()

    async def _forward(self, engine: Engine, body: Mapping[str, Any] | bytes) -> Forwarded:
        """Sends this attempt to the engine and returns the engine's answer; see
        :meth:`Engine.forward`.
        """
        return await engine.forward(
            self.path,
            body,
            self.engine_request_id,
            self.span,
            self.head,
            self.method,
            once=not self.may_be_repeated,
            api=self.api,
        )

    @property
    def is_counted_elsewhere(self) -> bool:
        """Whether the prefill engine's cache numbers replace the numbers in the answer."""
        return self.computing is not None or self.computed is not None

    async def counted(self, content: bytes) -> bytes:
        """Puts the prefill engine's cache numbers into a part of the answer."""
        if not (self.is_counted_elsewhere and self.api.counts.are_in(content)):
            return content
        if self.computing is not None:
            await asyncio.wait((self.computing,))
        if self.computed is None:
            return content  # the decode engine has computed the prompt
        return self.api.counts.put(content, self.computed)


@dataclass(frozen=True, slots=True)
class PassThrough:
    """Relays the answers to clients' own bodies."""

    hand_over: HandOver
    patience: Callable[[], web.Patience]
    """Makes the time limits of an answer."""
    failed: Callable[[ApiError], None] = lambda _: None
    """Called with the error that ends a stream."""

    async def answer(
        self,
        request: Request,
        path: str,
        body: Mapping[str, Any] | bytes,
        span: RequestSpan,
        head: Head = NO_HEAD,
    ) -> Response:
        """Answers a client's request; an engine that goes away before its first byte is replaced.

        A body of bytes goes to a decode server alone, and so does a body that SGLang servers do not
        understand and that has no copy. ``span`` has the request's id, and ends with the answer.

        Raises:
            ApiError: no engine is left, or time is up.
            ClientGoneError: the client disconnected before the first byte.
        """
        pools, api = (self.hand_over.prefill, self.hand_over.decode), APIS.get(path, OTHER)
        if not (isinstance(body, bytes) or api.in_rooms):
            has_room = any(engine.needs_room for pool in pools for engine in pool.engines)
            if has_room or api.copy(body) is None:
                body = msgspec.json.encode(body)
        # Engines beside SGLang servers do not know SGLang's own path.
        asked_pools = pools if path == SGLANGS else ()
        mixed = [pool for pool in asked_pools if any(each.needs_room for each in pool.fit())]
        fields: Mapping[str, Any] = {} if isinstance(body, bytes) else body
        method = request.scope.get("method", "POST")
        computes = method == "POST" and path in QUEUED
        unreached = {other for pool in mixed for other in pool.engines if not other.needs_room}
        asked = BodyRequest(
            request_id=span.request_id,
            unreached=unreached,
            path=path,
            died=set(),
            body=fields,
            own=body if isinstance(body, bytes) else None,
            several=_several(fields),
            method=method,
            place=QueuePlace(priority_of(head.headers, fields) if computes else None),
            patience=self.patience(),
            span=span,
            head=head,
        )
        try:
            return await web.until_disconnect(request.receive, self._answer(asked))
        except Exception as error:
            span.end(str(error))
            asked.close()  # the answer may have begun just as the client left, or as it is refused
            if isinstance(error, _RefusedError):
                return _relayed(Response(error.content, error.status), error.headers, asked)
            if isinstance(error, EngineFailedError):
                error.content, error.headers = error.own
            if isinstance(error, ApiError):
                error.headers = [*error.headers, _id_of(asked)]
            raise

    async def _answer(self, request: BodyRequest) -> Response:
        async with request.patience.waiting():
            async with aclosing(self.hand_over.run(request)) as answers:
                forwarded = await anext(answers)
            if not forwarded.is_stream:
                content = await request.counted(await forwarded.read())
        if forwarded.is_stream:
            chunks = _chunks(forwarded, request)

            def failed(error: ApiError) -> None:
                request.span.end(str(error))
                self.failed(error)

            stream = web.EventStream(chunks, on_end=lambda: _end(forwarded, request), failed=failed)
            stream.status_code = forwarded.status
            return _relayed(stream, forwarded.headers, request)
        request.span.end()
        return _relayed(Response(content, forwarded.status), forwarded.headers, request)

    async def to_all(
        self, method: str, path: str, body: bytes, span: RequestSpan, head: Head
    ) -> Response:
        """Asks every server; the answer has each server's reply and the highest status of all
        replies.
        """
        prefill, decode = self.hand_over.prefill, self.hand_over.decode
        engines = {engine.url: engine for engine in (*prefill.engines, *decode.engines)}
        if not engines:
            raise decode.nobody()

        async def ask(engine: Engine) -> dict[str, Any]:
            try:
                one = await engine.forward(
                    path, body, span.request_id, span, head, method, once=True
                )
                status, content = one.status, await one.read()
            except ApiError as error:
                own = error.own[0] if isinstance(error, EngineFailedError) else error.content
                status, content = error.status, own or msgspec.json.encode(error.body())
            told = {"name": engine.name, "role": engine.role, "status": status}
            return {**told, "body": _decoded(content)}

        async with self.patience().waiting():
            servers = await asyncio.gather(*map(ask, engines.values()))
        return web.json_response({"servers": servers}, max(each["status"] for each in servers))


def _is_vllm(engine: Engine) -> bool:
    """Whether an engine may be a server of vLLM: no other known engine."""
    return not (engine.told.is_ours or engine.needs_room)


def _several(body: Mapping[str, Any]) -> str:
    """The field by which a body has several sequences; empty for a single sequence."""
    sampling = body.get("sampling_params")
    lengths = {name: _length(body.get(name)) for name in _PROMPTS}
    found = [name for name, n in lengths.items() if n] if sum(lengths.values()) > 1 else []
    found += [name for name in ("n", "best_of") if body.get(name) not in (None, 1)]
    params = sampling if isinstance(sampling, list) else [sampling]
    if any(isinstance(each, dict) and each.get("n") not in (None, 1) for each in params):
        found.append("sampling_params")
    return ", ".join(found)


def _length(prompts: object) -> int:
    """Number of prompts in a field that holds a prompt or a list of prompts. A list of token ids is
    one prompt.
    """
    if not isinstance(prompts, list) or (prompts and all(isinstance(t, int) for t in prompts)):
        return 0 if prompts is None else 1
    return len(prompts)


async def _chunks(forwarded: Forwarded, request: BodyRequest) -> AsyncGenerator[bytes, None]:
    """Yields the engine's bytes as they come; only whole events if an event may have cache
    numbers.
    """
    begun = frame = b""
    patience = request.patience
    async with aclosing(forwarded.chunks()) as chunks, patience.waiting() as timeout:
        async for chunk in chunks:
            if not patience.has_begun:
                frame += chunk
            if patience.has_begun or has_content(frame):
                patience.heard()
            if request.is_counted_elsewhere:
                events, begun = whole_events(begun + chunk)
                chunk = await request.counted(events)
            timeout.reschedule(None)  # the time of the client has another limit
            yield chunk
            timeout.reschedule(patience.when)
    if begun:
        yield begun


def _relayed(
    response: Response, headers: list[tuple[bytes, bytes]], request: BodyRequest
) -> Response:
    """Adds the server's headers for the client, and the client's own request id, to a response."""
    web.put_on(response, [*headers, _id_of(request)])
    return response


def _id_of(request: BodyRequest) -> tuple[bytes, bytes]:
    """The ``x-request-id`` header for the client."""
    request_id = request.head.request_id or request.request_id
    return b"x-request-id", request_id.encode("latin-1")


def _decoded(content: bytes) -> Any:
    """Decodes JSON; other content is returned as text."""
    try:
        return msgspec.json.decode(content) if content else None
    except UNDECODED:
        return content.decode(errors="replace")


def _end(forwarded: Forwarded, request: BodyRequest) -> None:
    forwarded.close()
    request.span.end()
