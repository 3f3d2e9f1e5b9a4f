"""How a request is run over a prefill and a decode engine.

Either way the prefill engine computes the prompt and keeps its KV, and the decode engine loads it.

:class:`PrefillDecode` runs requests that the router understands. The prefill engine draws the first
token, which is passed on at once. The decode engine gets the prompt plus that token and draws the
rest. Where the first token is the last one, no decode engine is asked, and the prefill engine is
not asked to keep anything. Where engines tell what they have, they are chosen by cost
(:mod:`kvferry.cluster.choice`), a decode engine that has most of the prompt may compute the rest
itself, and whoever computes may first load what a third engine lends of its cache::

    router ── prompt, only_cached ──▶ lender
       │◀────── kv_transfer_params ─────┘
       └─────── prompt, kv_transfer_params (and do_remote_decode) ──▶ prefill engine

With ``at_once`` both engines get the prompt at the same time, with a transfer that the router has
signed, for which the decode engine asks the prefill engine. Both draw the first token; the one that
comes first is passed on, and where the decode engine then draws another the router goes on from
there in turn. Where each would draw what it likes (a temperature without a seed), and where the
prefill engine is a foreign one, the decode engine's tokens alone count.

:class:`PassThrough` runs all others in the client's own words. Servers such as vLLM's understand
more than this router does: tools, structured output, log probabilities. Such a body is not taken
apart. The decode engine gets it as it came plus the transfer parameters, draws every token, the
first one included, and its answer is relayed byte for byte::

    client ── body ──▶ router ── body, 1 token, do_remote_decode ──▶ prefill engine
                         │◀───────────── kv_transfer_params ──────────────┘
                         └───── body, kv_transfer_params ───────────▶ decode engine ──▶ client
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry import errors
from kvferry.cluster import web
from kvferry.cluster.choice import Chooser, Route
from kvferry.cluster.engines import (
    Engine,
    EngineDownError,
    Forwarded,
    Reply,
)
from kvferry.cluster.members import EnginePool, NoEngineError
from kvferry.cluster.openai import ApiError, Generation
from kvferry.control.tickets import Transfer
from kvferry.control.tracing import RequestSpan
from kvferry.engine.messages import SamplingParams
from kvferry.errors import LeaseError, TicketError, TransferError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Told: TypeAlias = "asyncio.Queue[Reply | Exception | None]"
"""What two engines that work at the same time say; ``None`` at the end of the answer."""

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "keep_first_token": True,
}
"""What asks a prefill engine to keep the prompt's KV for another engine. ``keep_first_token`` tells
it that its token counts: where that one ends the answer, nothing has to be kept."""


class _StartAgainError(Exception):
    """What the prefill engine lent is of no use any more: prefill anew."""


ONLY_CACHED: dict[str, Any] = {"do_remote_decode": True, "only_cached": True}
"""What asks an engine to lend what it has of a prompt in its cache, and to compute nothing."""


MOST_FAILED_LOADS = 2
"""How often a prompt is computed again because its KV could not be loaded; then the client is
told."""


@dataclass(slots=True, kw_only=True)
class _Tries:
    """What has been tried for a request, and must not be tried again."""

    request_id: str
    died: set[Engine]
    """Engines that went away while the client's request was in their hands, any choice of it."""
    span: RequestSpan
    """What is told of the client's request; what each engine does is a part of it."""
    unreached: set[Engine] = field(default_factory=set)
    lender: Engine | None = None
    """The prefill engine that computed the prompt last."""
    attempt: int = 1

    @property
    def tried(self) -> set[Engine]:
        """Engines that are not to be asked again."""
        return self.died | self.unreached

    def failed(self, engine: Engine, error: EngineDownError) -> None:
        """Takes note of an engine that did not serve it.

        Raises:
            EngineDownError: it is the second one that may have died of the request: a third one is
                not risked.
        """
        if not error.reached:
            self.unreached.add(engine)
            return
        self.died.add(engine)
        if len(self.died) > 1:
            raise error

    def give_back(
        self, kv_transfer_params: Mapping[str, Any] | None, lender: Engine | None = None
    ) -> None:
        """What the lender lent, the last one unless given, may not have been fetched, and will not
        be.
        """
        lender = lender or self.lender
        if kv_transfer_params and lender is not None:
            lender.take_back(kv_transfer_params, f"{self.engine_request_id}-back")

    def lending(self, kv_transfer_params: Mapping[str, Any] | None) -> ExitStack:
        """Until it is closed, the lender must not end: what it lent is not fetched yet."""
        lent = ExitStack()
        if kv_transfer_params and self.lender is not None:
            lent.enter_context(self.lender.lending())
        return lent

    @property
    def engine_request_id(self) -> str:
        """The id for engines, new for each attempt: the old one may still hold blocks."""
        return self.request_id if self.attempt == 1 else f"{self.request_id}-try{self.attempt}"


@dataclass(slots=True, kw_only=True)
class TokenRequest(_Tries):
    """A request of token ids, and the tokens that were drawn for it so far."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    generation: Generation
    """What it is a choice of."""
    drawn: list[int] = field(default_factory=list)
    failed_loads: int = 0
    route: Route | None = None
    """The way that was chosen for this attempt, where engines tell what they have."""
    is_usage_told: bool = False
    """Whether it was passed on how much of the prompt was cached."""

    def body(self, max_tokens: int, kv_transfer_params: dict[str, Any] | None) -> dict[str, Any]:
        """An engine's request for the next ``max_tokens`` tokens."""
        sampling = msgspec.structs.replace(
            self.sampling, max_tokens=max_tokens, seed_offset=len(self.drawn)
        )
        fields = {
            name: value
            for name, value in msgspec.to_builtins(sampling).items()
            if value not in (None, (), []) and name in self.generation.named | {"max_tokens"}
        }
        body = {"prompt": [*self.prompt, *self.drawn], "return_token_ids": True, **fields}
        if self.generation.model is not None:
            body["model"] = self.generation.model
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        return body

    def tell_usage(self, reply: Reply) -> None:
        """Takes the usage out of a reply that is not the first one to tell it."""
        if self.is_usage_told:
            reply.usage = None
        self.is_usage_told = self.is_usage_told or reply.usage is not None

    @property
    def tokens(self) -> int:
        """Of the prompt and of what was drawn."""
        return len(self.prompt) + len(self.drawn)

    @property
    def is_determined(self) -> bool:
        """Whether two engines draw the same tokens, but for rounding."""
        return self.sampling.temperature == 0 or self.sampling.seed is not None

    def is_chosen(self, engine: Engine) -> bool:
        """Whether the way that was chosen has this engine compute the prompt."""
        return self.route is not None and engine is self.route.prefill

    @property
    def tokens_left(self) -> int:
        """How many may still be drawn."""
        return self.sampling.max_tokens - len(self.drawn)


@dataclass(frozen=True, slots=True)
class PrefillDecode:
    """Runs requests of token ids over the two pools."""

    prefill: EnginePool
    decode: EnginePool
    chooser: Chooser | None = None
    """Chooses by cost; without one by the requests under way."""
    at_once: bool = False
    """See :class:`~kvferry.config.RouterConfig`."""
    key: bytes | None = None
    """The engines' cluster key, if they have one."""

    async def run(self, request: TokenRequest, timeout_s: float) -> AsyncGenerator[Reply, None]:
        """Yields the answer's tokens as they are drawn; must be consumed within one task.

        Only the first reply, a prefill engine's unless there is none, tells how many tokens of the
        prompt were cached; only the last one has a finish reason. An engine that cannot be reached
        is replaced by another, and so is the first one that dies, in the middle of its answer too:
        the tokens that were drawn become part of the prompt. A prompt whose KV could not be loaded
        is computed again.

        Raises:
            ApiError: the request is refused or failed, no engine is left, or time is up.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        steps = self._steps(request)
        async with aclosing(steps):
            while True:
                async with web.deadline(deadline, timeout_s):
                    reply = await anext(steps, None)
                if reply is None:
                    return
                yield reply

    async def _steps(self, request: TokenRequest) -> AsyncGenerator[Reply, None]:
        while request.tokens_left:
            if self.chooser is not None:
                request.route = self.chooser.choose(
                    request.engine_request_id,
                    (*request.prompt, *request.drawn) if request.drawn else request.prompt,
                    request.tried,
                    borrow=not request.failed_loads,
                )
            loan = await self._borrow(request)
            pair = await self._pair(request)
            way = self._both(request, *pair, loan) if pair else self._in_turn(request, loan)
            try:
                async with aclosing(way) as replies:
                    async for reply in replies:
                        yield reply
                return
            except _StartAgainError:
                request.attempt += 1
        # All tokens were drawn by an engine that died before it said so.
        yield Reply.ended("length")

    async def _in_turn(
        self, request: TokenRequest, loan: dict[str, Any] | None
    ) -> AsyncGenerator[Reply, None]:
        """Has one engine work after the other.

        Raises:
            _StartAgainError: what was lent is of no use.
        """
        first = await self._prefill(request, loan)
        params = first.kv_transfer_params if first is not None else loan
        fetched = False
        with request.lending(params) as lent:
            try:
                if first is not None:
                    ended = _take_first(first, request)
                    yield first
                    if ended:
                        request.give_back(params)
                        return
                async with aclosing(self._decode(request, params)) as replies:
                    async for reply in replies:
                        fetched = True
                        lent.close()
                        yield reply
            except BaseException:
                # The client went away, time is up, or no decode engine is left or able.
                if not fetched:
                    request.give_back(params)
                raise

    async def _borrow(self, request: TokenRequest) -> dict[str, Any] | None:
        """What the engine that computes the prompt is to load; ``None`` where nobody is to lend, or
        has anything.
        """
        begin = None if request.route is None else request.route.begin
        if self.chooser is None or begin is None or begin.lender is None:
            return None
        lender, began = begin.lender, time.monotonic()
        body = request.body(1, ONLY_CACHED)
        try:
            reply = await lender.complete(body, f"{request.engine_request_id}-lend", request.span)
        except EngineDownError as error:
            request.failed(lender, error)
            return None
        except ApiError as error:
            logger.warning("%r lends nothing: %s", lender.name, error)
            return None
        lender.pace.asking.note(1, time.monotonic() - began)
        loan = reply.kv_transfer_params or {}
        lent = _count(loan.get("remote_num_tokens")) if loan.get("do_remote_prefill") else 0
        self.chooser.borrowed(max(0, lent - begin.cached), begin.borrowed)
        request.lender = lender
        return loan if lent else None

    async def _prefill(self, request: TokenRequest, loan: dict[str, Any] | None) -> Reply | None:
        """The prefill engine's reply; ``None`` where the decode engine computes all.

        Raises:
            _StartAgainError: it could not load what it was lent.
        """
        route = request.route
        if route is not None and route.prefill is None:
            return None
        # With one token left nothing follows, so nothing has to be kept.
        asks = REMOTE_DECODE if request.tokens_left > 1 else {}
        is_used = False

        async def work(engine: Engine) -> Reply:
            nonlocal is_used
            is_used = loan is not None and request.is_chosen(engine)
            return await self._computed(request, engine, asks, loan if is_used else None)

        chosen, lender = None if route is None else route.prefill, request.lender
        with request.lending(loan):
            try:
                reply = await _by_prefill(self.prefill, request, work, chosen)
            except BaseException as error:
                request.give_back(loan, lender)
                if not isinstance(error, ApiError) or not _tells_of_a_failed_load(error, loan):
                    raise
                request.failed_loads += 1
                raise _StartAgainError from error
        if not is_used:  # the one for which it was is down
            request.give_back(loan, lender)
        return reply

    async def _pair(self, request: TokenRequest) -> tuple[Engine, Engine] | None:
        """The two engines that get a request at once; ``None`` if one follows the other."""
        route = request.route
        if not self.at_once or request.tokens_left < 2 or request.failed_loads or request.drawn:
            return None
        if route is not None and route.prefill is None:
            return None
        try:
            prefill = await self.prefill.pick(request.tried, route.prefill if route else None)
            decode = await self.decode.pick(request.tried, route.decode if route else None)
        except NoEngineError:
            return None
        knows = prefill.at_once and prefill.control and decode.at_once
        return (prefill, decode) if knows and prefill.url != decode.url else None

    async def _computed(
        self,
        request: TokenRequest,
        engine: Engine,
        asks: Mapping[str, Any],
        loan: Mapping[str, Any] | None,
    ) -> Reply:
        """The reply of an engine that computes the prompt, but for what it loads of a loan."""
        begin = request.route.begin if request.route and request.is_chosen(engine) else None
        params = dict(asks)
        if loan is not None:
            params = {**loan, **{name: value for name, value in asks.items() if value}}
        tokens = request.tokens
        cached, computed = (begin.cached, begin.computed) if begin else (0, tokens)
        with engine.pace.computing.doing(computed) as done:
            body = request.body(1, params or None)
            reply = await engine.complete(body, request.engine_request_id, request.span)
            had = reply.cached_or(cached)
            done(None if loan is not None else max(0, tokens - had))
        if self.chooser is not None:
            self.chooser.missed(engine, cached - had)
            self.chooser.computed(engine, request.prompt, request.drawn)
        return reply

    async def _both(
        self,
        request: TokenRequest,
        prefill: Engine,
        decode: Engine,
        loan: dict[str, Any] | None,
    ) -> AsyncGenerator[Reply, None]:
        """Has both engines work at the same time.

        Raises:
            _StartAgainError: the prefill engine went away, what it computed is of no use, or what
                it was lent.
        """
        if loan is not None and not request.is_chosen(prefill):
            request.give_back(loan)  # the one for which it was is down
            loan = None
        lender = request.lender
        transfer = Transfer.begin(prefill.control, self.key).text
        params = {"do_remote_prefill": True, "transfer": transfer}
        told: asyncio.Queue[Reply | Exception | None] = asyncio.Queue()
        request.lender = prefill
        fetched = asyncio.Event()
        with request.lending(params) as lent:
            lent.callback(fetched.set)
            works = (
                self._compute(request, prefill, transfer, told, loan, lender),
                _draw(self._decode(request, params, decode), told, lent),
            )
            tasks = [asyncio.create_task(_telling(work, told)) for work in works]
            error: Exception | None = None
            try:
                while error is None and (news := await told.get()) is not None:
                    if isinstance(news, Exception):
                        error = news
                    else:
                        yield news
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if not fetched.is_set():
                    request.give_back(params, prefill)
        if error is None:
            return
        while not told.empty():  # drawn beside the error: whoever goes on goes on from there
            news = told.get_nowait()
            if news is None:
                return
            if not isinstance(news, Exception):
                yield news
        raise error

    async def _compute(
        self,
        request: TokenRequest,
        prefill: Engine,
        transfer: str,
        told: _Told,
        loan: dict[str, Any] | None,
        lender: Engine | None,
    ) -> None:
        """The prompt is computed, and the first token is told unless the decode engine has drawn
        it, or may draw another. A foreign engine's never is: vLLM may leave the prompt's last token
        to the decode engine.
        """
        asks = {**REMOTE_DECODE, "keep_first_token": False, "transfer": transfer}
        with ExitStack() as borrowed:
            if loan is not None and lender is not None:
                borrowed.enter_context(lender.lending())
            try:
                reply = await self._computed(request, prefill, asks, loan)
            except BaseException as error:
                request.give_back(loan, lender)
                if not isinstance(error, ApiError):
                    raise
                if request.drawn:
                    return  # the decode engine does without
                if isinstance(error, EngineDownError):
                    request.failed(prefill, error)
                elif _tells_of_a_failed_load(error, loan):
                    request.failed_loads += 1
                else:
                    raise
                raise _StartAgainError from error
        if prefill.is_ours and request.is_determined and not request.drawn:
            ended = _take_first(reply, request)
            told.put_nowait(reply)
            if ended:
                told.put_nowait(None)

    async def _able(self, request: TokenRequest, chosen: Engine | None, *, asks: bool) -> Engine:
        """A decode engine, the chosen one if it can.

        Raises:
            _StartAgainError: it would have to ask for a ticket, and does not know how.
        """
        engine = await self.decode.pick(request.tried, chosen)
        if asks and not engine.at_once:
            raise _StartAgainError
        return engine

    async def _decode(
        self,
        request: TokenRequest,
        kv_transfer_params: dict[str, Any] | None,
        first: Engine | None = None,
    ) -> AsyncGenerator[Reply, None]:
        """The decode engine's replies, of ``first`` if it can; without the tokens that somebody
        else has drawn meanwhile.
        """
        is_asked_for = "transfer" in (kv_transfer_params or {})
        while True:
            chosen = first or (None if request.route is None else request.route.decode)
            engine = await self._able(request, chosen, asks=is_asked_for)
            at = len(request.drawn)  # what is drawn elsewhere meanwhile it draws too
            body = request.body(request.tokens_left, kv_transfer_params)
            began, ended = False, False
            try:
                stream = engine.stream(body, request.engine_request_id, request.span)
                is_loaded = kv_transfer_params is not None
                timed = self._timed(
                    engine, stream, request, is_loaded=is_loaded, is_alone=not is_asked_for
                )
                async with aclosing(timed) as replies:
                    async for reply in replies:
                        began, ended = True, reply.finish_reason is not None
                        at += len(reply.token_ids)
                        _take_new(reply, request, at)
                        yield reply
                return
            except EngineDownError as error:
                if ended:
                    return  # nothing of the answer was lost
                request.failed(engine, error)
                is_direct = request.route is not None and request.route.prefill is None
                # Another engine that has none of the prompt would compute all of it.
                is_lost = is_direct or (error.reached and not _passes_on(kv_transfer_params))
                if began or is_lost:
                    raise _StartAgainError from error
            except ApiError as error:
                if began or not _tells_of_a_failed_load(error, kv_transfer_params):
                    raise
                request.failed_loads += 1
                if request.failed_loads > MOST_FAILED_LOADS:
                    raise
                raise _StartAgainError from error

    async def _timed(
        self,
        engine: Engine,
        replies: AsyncGenerator[Reply, None],
        request: TokenRequest,
        *,
        is_loaded: bool,
        is_alone: bool = True,
    ) -> AsyncGenerator[Reply, None]:
        """The replies with a choice; the engine's pace is taken from when they come, unless it had
        to wait for another one that computed.
        """
        route, outstanding, first_at = request.route, engine.outstanding, 0.0
        held = route.held if route is not None and engine is route.decode else 0
        tokens = request.tokens
        is_direct = route is not None and route.prefill is None
        work = engine.pace.moving if is_loaded and not is_direct else engine.pace.computing
        with work.doing(max(0, tokens - held)) as done:
            async with aclosing(replies):
                async for reply in replies:
                    if not reply.choices:
                        continue
                    if not first_at:
                        first_at = time.monotonic()
                        cached = reply.cached_or(held)
                        is_clear = is_alone and not (is_loaded and is_direct)
                        done(max(0, tokens - cached) if is_clear else None)
                        if self.chooser is not None:
                            self.chooser.missed(engine, held - cached)
                            self.chooser.computed(engine, request.prompt, request.drawn)
                    request.tell_usage(reply)
                    if reply.finish_reason is not None:  # nobody may want to hear more
                        engine.pace.drew(outstanding, time.monotonic() - first_at)
                        if self.chooser is not None:
                            drawn = [*request.drawn, *reply.token_ids]
                            self.chooser.computed(engine, request.prompt, drawn[:-1])
                    yield reply


async def _draw(replies: AsyncGenerator[Reply, None], told: _Told, lent: ExitStack) -> None:
    """The decode engine's replies are told."""
    async with aclosing(replies):
        async for reply in replies:
            lent.close()
            told.put_nowait(reply)
    told.put_nowait(None)


async def _telling(work: Coroutine[Any, Any, None], told: _Told) -> None:
    """Does a part of the work, and tells what goes wrong."""
    try:
        await work
    except Exception as error:
        told.put_nowait(error)


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _passes_on(kv_transfer_params: Mapping[str, Any] | None) -> bool:
    """Whether another decode engine may load what one may have loaded that has gone.

    A lease of ours passes on as soon as its holder's connection has gone; where it does not, the
    load fails. What others lend may be freed by now, and nobody would notice.
    """
    return kv_transfer_params is None or not {"ticket", "transfer"}.isdisjoint(kv_transfer_params)


def _tells_of_a_failed_load(error: ApiError, kv_transfer_params: Mapping[str, Any] | None) -> bool:
    """Whether a decode engine could not load the KV: the prompt itself may be well."""
    if kv_transfer_params is None:
        return False
    kind = getattr(errors, error.code or "", None)
    return isinstance(kind, type) and issubclass(kind, TransferError | LeaseError | TicketError)


async def _by_prefill(
    pool: EnginePool,
    request: _Tries,
    work: Callable[[Engine], Awaitable[T]],
    chosen: Engine | None = None,
) -> T | None:
    """What a prefill engine makes of the request, the chosen one if it can; ``None`` where the
    decode engine computes all.
    """
    while True:
        try:
            engine = await pool.pick(request.tried, chosen)
        except NoEngineError:
            if pool.dispensable:
                return None
            raise
        request.lender = engine
        try:
            return await work(engine)
        except EngineDownError as error:
            request.failed(engine, error)


def _take_new(reply: Reply, request: TokenRequest, end: int) -> None:
    """Takes the tokens of a reply that nobody has drawn before; ``end`` is where they end.

    Raises:
        _StartAgainError: the engine has drawn others than the one before it.
    """
    known = request.drawn[end - len(reply.token_ids) : end]
    if reply.token_ids[: len(known)] != known:
        # Two of nearly equal logits, on engines of unequal shapes: what the client has counts.
        raise _StartAgainError
    if known:
        reply.choices[0].token_ids = reply.token_ids[len(known) :]
    request.drawn.extend(reply.token_ids)


def _take_first(reply: Reply, request: TokenRequest) -> bool:
    """Takes the one token that a prefill engine drew; returns whether it ends the answer."""
    if len(reply.token_ids) != 1:
        raise ApiError(
            502, f"a prefill engine returned {len(reply.token_ids)} tokens where one was asked for"
        )
    request.tell_usage(reply)
    request.drawn += reply.token_ids
    ended = reply.finish_reason == "stop" or request.tokens_left == 0
    if not ended:
        reply.choices[0].finish_reason = None  # it tells of the one token that was asked for
    return ended


_ONLY_DECODE = ("n", "best_of", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs")
"""Fields that shape an answer of which the prefill engine's part is thrown away."""


@dataclass(slots=True, kw_only=True)
class _BodyRequest(_Tries):
    """A request in the client's own words."""

    path: str
    body: Mapping[str, Any]
    deadline: float
    """On the event loop's clock."""
    forwarded: Forwarded | None = None
    """The decode engine's answer, once it has begun."""


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

    async def answer(
        self, request: Request, path: str, body: Mapping[str, Any], span: RequestSpan
    ) -> Response:
        """The response for a client; an engine that goes away before its first byte is replaced.

        ``span`` has the request's id, and ends with the answer.

        Raises:
            ApiError: no engine is left, or time is up.
            ClientGoneError: the client went before the first byte.
        """
        asked = _BodyRequest(
            request_id=span.request_id,
            path=path,
            died=set(),
            body={name: value for name, value in body.items() if name != "kv_transfer_params"},
            deadline=asyncio.get_running_loop().time() + self.timeout_s,
            span=span,
        )
        try:
            return await web.until_disconnect(request.receive, self._answer(asked))
        except _RefusedError as refused:
            span.end(str(refused))
            return Response(refused.content, refused.status, media_type="application/json")
        except ApiError as error:
            span.end(str(error))
            raise
        except web.ClientGoneError as error:
            span.end(str(error))
            if asked.forwarded is not None:  # it began just as the client went away
                await asked.forwarded.aclose()
            raise

    async def _answer(self, request: _BodyRequest) -> Response:
        headers = {"x-request-id": request.request_id}
        async with web.deadline(request.deadline, self.timeout_s):
            request.forwarded = forwarded = await self._open(request)
        chunks = _chunks(forwarded, request, self.timeout_s)
        if forwarded.is_stream:
            return web.EventStream(chunks, headers)
        async with aclosing(chunks):
            content = b"".join([chunk async for chunk in chunks])
        return Response(content, forwarded.status, headers, media_type="application/json")

    async def _open(self, request: _BodyRequest) -> Forwarded:
        """The decode engine's answer."""
        params = await self._prefill(request)
        while True:
            try:
                with request.lending(params):
                    return await self._forward(request, params)
            except _StartAgainError:
                request.give_back(params)
                request.attempt += 1
                params = await self._prefill(request)
            except BaseException:  # the client went away, time is up, or no engine is left
                request.give_back(params)
                raise

    async def _forward(self, request: _BodyRequest, params: dict[str, Any] | None) -> Forwarded:
        """The answer of the first decode engine that gives one.

        Raises:
            _StartAgainError: an engine went away with what was lent, and no other may load it.
        """
        body = dict(request.body)
        if params is not None:
            body["kv_transfer_params"] = params
        while True:
            engine = await self.decode.pick(request.tried)
            try:
                return await engine.forward(
                    request.path, body, request.engine_request_id, request.span
                )
            except EngineDownError as error:
                request.failed(engine, error)
                if error.reached and not _passes_on(params):
                    raise _StartAgainError from error

    async def _prefill(self, request: _BodyRequest) -> dict[str, Any] | None:
        """The transfer parameters of the computed prompt; none where nothing is to be handed on."""
        if not _has_one_answer(request.body):
            return None
        body = {name: value for name, value in request.body.items() if name not in _ONLY_DECODE}
        body |= {"max_tokens": 1, "stream": False}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        if "min_tokens" in body:
            body["min_tokens"] = 0
        # The prefill engine's token does not count: it may not end the answer.
        body["kv_transfer_params"] = {
            name: value for name, value in REMOTE_DECODE.items() if name != "keep_first_token"
        }

        async def work(engine: Engine) -> dict[str, Any] | None:
            forwarded = await engine.forward(
                request.path, body, request.engine_request_id, request.span
            )
            content = await forwarded.read()
            if forwarded.status != 200:
                raise _RefusedError(forwarded.status, content)
            try:
                return msgspec.json.decode(content, type=Reply).kv_transfer_params
            except msgspec.DecodeError as error:
                raise ApiError(
                    502, f"prefill engine {engine.name!r}: its answer does not decode: {error}"
                ) from error

        return await _by_prefill(self.prefill, request, work)


def _has_one_answer(body: Mapping[str, Any]) -> bool:
    """Whether the request is one sequence: transfer parameters stand for one prompt, used once."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and (
        len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)
    )
    return not several and body.get("n") in (None, 1) and body.get("best_of") in (None, 1)


async def _chunks(
    forwarded: Forwarded, request: _BodyRequest, timeout_s: float
) -> AsyncGenerator[bytes, None]:
    """The engine's bytes as they come."""
    chunks = forwarded.chunks()
    try:
        while True:
            async with web.deadline(request.deadline, timeout_s):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk
    finally:
        await chunks.aclose()
        await forwarded.aclose()
        request.span.end()
