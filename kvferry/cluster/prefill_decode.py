"""How a request that the router understands is run over a prefill and a decode engine.

The prefill engine computes the prompt and keeps its KV, which the decode engine loads. The prefill
engine draws the first token, which is passed on at once; the decode engine gets the prompt plus
that token and draws the rest. Where the first token is the last one, no decode engine is asked, and
the prefill engine is not asked to keep anything. Where engines tell what they have, they are chosen
by cost (:mod:`kvferry.cluster.choice`), a decode engine that has most of the prompt may compute the
rest itself, and whoever computes may first load what a third engine lends of its cache::

    router ── prompt, only_cached ──▶ lender
       │◀────── kv_transfer_params ─────┘
       └─────── prompt, kv_transfer_params (and do_remote_decode) ──▶ prefill engine

With ``at_once`` both engines get the prompt at the same time, with a transfer that the router has
signed, for which the decode engine asks the prefill engine. Both draw the first token; the one that
comes first is passed on, and where the decode engine then draws another the router goes on from
there in turn. Where each would draw what it likes (a temperature without a seed) both are given a
seed. Of foreign engines the decode engine's tokens alone count.

All other requests: :mod:`kvferry.cluster.pass_through`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from kvferry import errors
from kvferry.cluster import web
from kvferry.cluster.choice import Chooser, Route
from kvferry.cluster.engines import Engine, EngineDownError, Reply
from kvferry.cluster.members import EnginePool
from kvferry.cluster.openai import ApiError, Generation
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
from kvferry.cluster.words import Words
from kvferry.config import AtOnce
from kvferry.engine.messages import SamplingParams
from kvferry.errors import LeaseError, TicketError, TransferError

logger = logging.getLogger(__name__)

_Told: TypeAlias = "asyncio.Queue[Reply | Exception | None]"
"""What two engines that work at the same time say; ``None`` at the end of the answer."""

ONLY_CACHED: dict[str, Any] = {"do_remote_decode": True, "only_cached": True}
"""What asks an engine to lend what it has of a prompt in its cache, and to compute nothing."""
_ASKS_IN_TURN = {**REMOTE_DECODE, "keep_first_token": True}
"""Tells the prefill engine that its token counts: where that one ends the answer, nothing has to be
kept."""

LEAST_SAVED_S = 0.01
"""Seconds of moving, and of computing meanwhile, from which on two requests at the same time pay:
to send and to watch both takes the router a millisecond or two."""
MOST_FAILED_LOADS = 2
"""How often a prompt is computed again because its KV could not be loaded; then the client is
told."""


@dataclass(slots=True, kw_only=True)
class TokenRequest(Tries):
    """A request of token ids, and the tokens that were drawn for it so far."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    generation: Generation
    """What it is a choice of."""
    drawn: list[int] = field(default_factory=list)
    failed_loads: int = 0
    route: Route | None = None
    """The way that was chosen for this attempt, where engines tell what they have."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were cached where it was computed, as far as anybody has told."""
    words: Words = field(default_factory=Words)
    """What else foreign engines say."""
    is_counted: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether the engine that computed the prompt has told, or will tell nothing."""

    def body(self, max_tokens: int, kv_transfer_params: dict[str, Any] | None) -> dict[str, Any]:
        """An engine's request for the next ``max_tokens`` tokens."""
        sampling = msgspec.structs.replace(
            self.sampling, max_tokens=max_tokens, seed_offset=len(self.drawn)
        )
        fields = {
            name: value
            for name, value in msgspec.to_builtins(sampling).items()
            if value not in (None, (), [])
            if name in self.generation.named | {"max_tokens", "seed"}
        }
        body = {"prompt": [*self.prompt, *self.drawn], "return_token_ids": True, **fields}
        if self.generation.model is not None:
            body["model"] = self.generation.model
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        return body

    def count(self, reply: Reply, *, has_computed: bool) -> None:
        """Takes note of what a reply says beside its tokens, and of what was cached. There the
        engine that computed the prompt counts: one that has loaded its KV takes all of that for
        cached.
        """
        if reply.own is not None and not self.generation.are_ours:
            self.words.take(reply.own, reply.headers)
        is_new, is_known = not self.is_counted.is_set(), self.cached_tokens is not None
        if (is_new and has_computed) or (not is_known and (is_new or has_computed)):
            self.cached_tokens = reply.cached_tokens
        if has_computed:
            self.is_counted.set()

    def continued(
        self, kv_transfer_params: dict[str, Any] | None, engine: Engine
    ) -> dict[str, Any]:
        """A decode engine's request for all tokens that are left."""
        body = self.body(self.tokens_left, kv_transfer_params)
        tells = self.generation.include_usage or not self.generation.stream
        if tells and not engine.is_ours:  # an engine of ours tells unasked
            body["stream_options"] = {"include_usage": True}
        return body

    @property
    def tokens(self) -> int:
        """Of the prompt and of what was drawn."""
        return len(self.prompt) + len(self.drawn)

    @property
    def is_determined(self) -> bool:
        """Whether two engines draw the same tokens, but for rounding."""
        return self.sampling.temperature == 0 or self.sampling.seed is not None

    def determine(self) -> None:
        """Has engines draw the same tokens, by a seed where it needs one and has none."""
        if not self.is_determined:
            self.sampling = msgspec.structs.replace(self.sampling, seed=secrets.randbits(63))

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
    at_once: AtOnce = "never"
    """See :class:`~kvferry.config.RouterConfig`."""
    key: bytes | None = None
    """The engines' cluster key, if they have one."""

    async def run(self, request: TokenRequest, timeout_s: float) -> AsyncGenerator[Reply, None]:
        """Yields the answer's tokens as they are drawn; must be consumed within one task.

        Only the last reply has a finish reason. The request tells how many tokens of the prompt
        were cached: where both engines work at once, perhaps a moment after the last reply. An
        engine that cannot be reached is replaced by another, and so is the first one that dies, in
        the middle of its answer too: the tokens that were drawn become part of the prompt. A prompt
        whose KV could not be loaded is computed again.

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
            try:
                loan = await self._borrow(request)
                try:
                    pair = await self._pair(request)
                except BaseException:
                    request.give_back(loan)
                    raise
                way = self._both(request, *pair, loan) if pair else self._in_turn(request, loan)
                async with aclosing(way) as replies:
                    async for reply in replies:
                        yield reply
                return
            except StartAgainError:
                await request.begin_again(self.decode)
        # All tokens were drawn by an engine that died before it said so.
        yield Reply.ended("length")

    async def _in_turn(
        self, request: TokenRequest, loan: dict[str, Any] | None
    ) -> AsyncGenerator[Reply, None]:
        """Has one engine work after the other.

        Raises:
            StartAgainError: what was lent is of no use.
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
            lend_id = f"{request.engine_request_id}-lend"
            reply = await lender.complete(body, lend_id, request.span, request.head)
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
            StartAgainError: it could not load what it was lent.
        """
        route = request.route
        if route is not None and route.prefill is None:
            return None
        # With one token left nothing follows, so nothing has to be kept.
        asks = _ASKS_IN_TURN if request.tokens_left > 1 else {}
        is_used = False

        async def work(engine: Engine) -> Reply:
            nonlocal is_used
            is_used = loan is not None and request.is_chosen(engine)
            return await self._computed(request, engine, asks, loan if is_used else None)

        chosen, lender = None if route is None else route.prefill, request.lender
        with request.lending(loan):
            try:
                reply = await by_prefill(self.prefill, request, work, chosen)
            except BaseException as error:
                request.give_back(loan, lender)
                if not isinstance(error, ApiError) or not _tells_of_a_failed_load(error, loan):
                    raise
                request.failed_loads += 1
                raise StartAgainError from error
        if reply is None:
            request.lender = lender  # whose loan is the decode engine's now
        elif not is_used:  # the one for which it was is down
            request.give_back(loan, lender)
        return reply

    async def _pair(self, request: TokenRequest) -> tuple[Engine, Engine] | None:
        """The two engines that get a request at once; ``None`` if one follows the other."""
        route = request.route
        if self.at_once == "never" or request.tokens_left < 2:
            return None
        if request.failed_loads or request.drawn:
            return None
        if route is not None and route.prefill is None:
            return None
        pair = await pick_pair(
            self.prefill,
            self.decode,
            request.tried,
            lambda *pair: self.at_once == "always" or _pays_at_once(request, *pair),
            (route.prefill, route.decode) if route is not None else (None, None),
        )
        if pair is not None and all(engine.is_ours for engine in pair):
            request.determine()
        return pair

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
            request_id = request.engine_request_id
            reply = await engine.complete(body, request_id, request.span, request.head)
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
            StartAgainError: the prefill engine went away, what it computed is of no use, or what
                it was lent.
        """
        if loan is not None and not request.is_chosen(prefill):
            request.give_back(loan)  # the one for which it was is down
            loan = None
        lender = request.lender
        lends, params = begin_transfer(prefill, self.key)
        told: asyncio.Queue[Reply | Exception | None] = asyncio.Queue()
        request.lender = prefill
        fetched = asyncio.Event()
        with request.lending(params) as lent:
            lent.callback(fetched.set)
            works = (
                self._compute(request, prefill, lends, told, loan, lender),
                _draw(request, self._decode(request, params, decode), told, lent),
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
                try:
                    await asyncio.gather(*tasks, return_exceptions=True)
                finally:  # where the client goes away just now as well
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
        lends: Mapping[str, Any],
        told: _Told,
        loan: dict[str, Any] | None,
        lender: Engine | None,
    ) -> None:
        """The prompt is computed, and the first token is told unless the decode engine has drawn
        it, or may draw another. A foreign engine's never is: vLLM may leave the prompt's last token
        to the decode engine.
        """
        with ExitStack() as borrowed:
            if loan is not None and lender is not None:
                borrowed.enter_context(lender.lending())
            try:
                reply = await self._computed(request, prefill, lends, loan)
            except BaseException as error:
                request.give_back(loan, lender)
                if not isinstance(error, ApiError):
                    raise
                if request.drawn:
                    request.is_counted.set()  # as the decode engine has told, which computed it
                    return  # the decode engine does without
                if isinstance(error, EngineDownError):
                    request.failed(prefill, error)
                elif _tells_of_a_failed_load(error, loan):
                    request.failed_loads += 1
                else:
                    raise
                raise StartAgainError from error
        request.count(reply, has_computed=True)
        if prefill.is_ours and request.is_determined and not request.drawn:
            ended = _take_first(reply, request)
            told.put_nowait(reply)
            if ended:
                told.put_nowait(None)

    async def _able(self, request: TokenRequest, chosen: Engine | None, *, asks: bool) -> Engine:
        """A decode engine, the chosen one if it can.

        Raises:
            StartAgainError: it would have to ask for a ticket, and does not know how.
        """
        engine = await request.pick(self.decode, chosen)
        if asks and not engine.at_once:
            raise StartAgainError
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
            body = request.continued(request.handed_on(kv_transfer_params), engine)
            began, ended = False, False
            try:
                request_id = request.engine_request_id
                stream = engine.stream(body, request_id, request.span, request.head)
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
                if began or is_direct or is_lost(error, kv_transfer_params):
                    raise StartAgainError from error
            except ApiError as error:
                if began or not _tells_of_a_failed_load(error, kv_transfer_params):
                    raise
                request.failed_loads += 1
                if request.failed_loads > MOST_FAILED_LOADS:
                    raise
                raise StartAgainError from error

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
                    request.count(reply, has_computed=is_direct or not is_loaded)
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
                    if reply.finish_reason is not None:  # nobody may want to hear more
                        engine.pace.drew(outstanding, time.monotonic() - first_at)
                        if self.chooser is not None:
                            drawn = [*request.drawn, *reply.token_ids]
                            self.chooser.computed(engine, request.prompt, drawn[:-1])
                    yield reply


async def _draw(
    request: TokenRequest, replies: AsyncGenerator[Reply, None], told: _Told, lent: ExitStack
) -> None:
    """The decode engine's replies are told, and then what the prefill engine counts is awaited."""
    async with aclosing(replies):
        async for reply in replies:
            lent.close()
            told.put_nowait(reply)
    await request.is_counted.wait()
    told.put_nowait(None)


async def _telling(work: Coroutine[Any, Any, None], told: _Told) -> None:
    """Does a part of the work, and tells what goes wrong."""
    try:
        await work
    except Exception as error:
        told.put_nowait(error)


def _pays_at_once(request: TokenRequest, prefill: Engine, decode: Engine) -> bool:
    """Whether much of the KV can be moved while the prompt is computed."""
    route, tokens = request.route, request.tokens
    computed = route.begin.computed if route is not None and request.is_chosen(prefill) else tokens
    held = route.held if route is not None and decode is route.decode else 0
    if min(computed, tokens - held) < LEAST_AT_ONCE:
        return False
    computing, moving = prefill.pace.computing.line, decode.pace.moving.line
    return min(computing.both[1] * computed, moving.both[1] * (tokens - held)) >= LEAST_SAVED_S


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _tells_of_a_failed_load(error: ApiError, kv_transfer_params: Mapping[str, Any] | None) -> bool:
    """Whether a decode engine could not load the KV: the prompt itself may be well."""
    if kv_transfer_params is None:
        return False
    kind = getattr(errors, error.code or "", None)
    return isinstance(kind, type) and issubclass(kind, TransferError | LeaseError | TicketError)


def _take_new(reply: Reply, request: TokenRequest, end: int) -> None:
    """Takes the tokens of a reply that nobody has drawn before; ``end`` is where they end.

    Raises:
        StartAgainError: the engine has drawn others than the one before it.
    """
    known = request.drawn[end - len(reply.token_ids) : end]
    if reply.token_ids[: len(known)] != known:
        # Two of nearly equal logits, on engines of unequal shapes: what the client has counts.
        raise StartAgainError
    if known:
        reply.choices[0].token_ids = reply.token_ids[len(known) :]
    request.drawn.extend(reply.token_ids)


def _take_first(reply: Reply, request: TokenRequest) -> bool:
    """Takes the one token that a prefill engine drew; returns whether it ends the answer."""
    if len(reply.token_ids) != 1:
        raise ApiError(
            502, f"a prefill engine returned {len(reply.token_ids)} tokens where one was asked for"
        )
    request.count(reply, has_computed=True)
    request.drawn += reply.token_ids
    ended = reply.finish_reason == "stop" or request.tokens_left == 0
    if not ended:
        reply.choices[0].finish_reason = None  # it tells of the one token that was asked for
    return ended
