"""Requests of token ids: the bodies for the engines, and the tokens in their replies.

The prefill engine computes the prompt, keeps the KV for the decode engine, and samples the first
token. The client gets this token at once. The decode engine gets the prompt plus the first token,
loads the KV and samples the other tokens. If the first token is the last token, the router uses no
decode engine, and the prefill engine keeps no KV.

If engines report the contents of their caches, the router chooses engines by cost
(:mod:`kvferry.router.choice`). Then a decode engine with most of the prompt may compute the rest
itself. The computing engine may first load KV from the cache of a third engine::

    router ── prompt, only_cached ──▶ lender
       │◀────── kv_transfer_params ─────┘
       └─────── prompt, kv_transfer_params (and do_remote_decode) ──▶ prefill engine

With ``at_once`` both engines get the prompt at the same time, with a transfer signed by the router.
The decode engine requests the ticket of this transfer from the prefill engine. Both engines sample
the first token, and the client gets the earlier sample. If the decode engine then samples another
first token, the router continues in turn after the token known to the client. Sampling with a
temperature and without a seed would differ between the engines, so both engines get a seed. Of
foreign engines, only the decode engine's tokens count.

The sequence of the engines: :mod:`kvferry.router.hand_over`. All other requests:
:mod:`kvferry.router.pass_through`.
"""

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.engine.messages import SamplingParams
from kvferry.router.choice import Chooser
from kvferry.router.engines import Engine
from kvferry.router.replies import EngineDownError, Reply
from kvferry.router.rooms import REMOTE_DECODE, Joined, by_transfer
from kvferry.router.routed_request import (
    LEAST_AT_ONCE,
    Loan,
    RoutedRequest,
    StartAgainError,
    unless_read,
)
from kvferry.router.words import Words
from kvferry.serving.openai import ApiError, Generation

logger = logging.getLogger(__name__)

ONLY_CACHED: dict[str, Any] = {"do_remote_decode": True, "only_cached": True}
"""Transfer parameters with which an engine lends the cached part of a prompt and computes
nothing."""
_LENDS_IN_TURN = {**REMOTE_DECODE, "keep_first_token": True}
"""Transfer parameters of a prefill engine whose token counts. If its token ends the answer, the
engine keeps no KV."""

LEAST_SAVED_S = 0.01
"""Smallest number of seconds, both of transfer and of concurrent computation, for which two
requests at the same time pay off. To send and watch both requests costs the router one or two
milliseconds."""


@dataclass(slots=True, kw_only=True)
class TokenRequest(RoutedRequest[Reply]):
    """A request of token ids, and the tokens sampled for this request so far.

    If a decode engine dies in the middle of its answer, the sampled tokens become part of the
    prompt for the next engine. Only the last reply has a finish reason.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    generation: Generation
    """The client's request; this request is for one of its choices."""
    chooser: Chooser
    """Chooser by cost, for engines whose caches are known; otherwise the pools choose by the number
    of current requests."""
    drawn: list[int] = field(default_factory=list)
    is_ended: bool = False
    """Whether an engine has reported the finish reason of the answer."""
    cached_tokens: int | None = None
    """Number of cached prompt tokens at the engine that computed the prompt; ``None`` if unknown.
    If both engines work at once, the number may come a moment after the last reply."""
    is_counted: bool = False
    """Whether the computing engine has reported its cached tokens."""
    words: Words = field(default_factory=Words)
    """Further fields of the foreign engines' replies."""

    # ---- the state of the answer ------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Number of tokens in the prompt and in the answer so far."""
        return len(self.prompt) + len(self.drawn)

    @property
    def tokens_left(self) -> int:
        """Maximum number of tokens still to be sampled."""
        return self.sampling.max_tokens - len(self.drawn)

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete."""
        return self.is_ended or not self.tokens_left

    @property
    def is_determined(self) -> bool:
        """Whether two engines sample the same tokens, except for rounding."""
        return self.sampling.temperature == 0 or self.sampling.seed is not None

    # ---- choose -----------------------------------------------------------------------------

    async def choose(self) -> Loan:
        """Chooses the engines of this attempt, and has the lender of the chosen route lend its
        cached KV, for the engine that computes the prompt.
        """
        self.route = self.chooser.choose(
            self.engine_request_id,
            (*self.prompt, *self.drawn) if self.drawn else self.prompt,
            self.tried,
            borrow=not self.failed_loads,
        )
        begin = None if self.route is None else self.route.begin
        if begin is None or begin.lender is None:
            return Loan()
        lender, began = begin.lender, time.monotonic()
        body, request_id = self._body(1, ONLY_CACHED), f"{self.engine_request_id}-lend"
        try:
            with unless_read(lender, request_id):
                reply = await lender.complete(body, request_id, self.span, self.head)
        except EngineDownError as error:
            self.failed(lender, error)
            return Loan()
        except ApiError as error:
            logger.warning("%r lends nothing: %s", lender.name, error)
            return Loan()
        lender.pace.asking.note(1, time.monotonic() - began)
        params = reply.kv_transfer_params or {}
        lent = _count(params.get("remote_num_tokens")) if params.get("do_remote_prefill") else 0
        self.chooser.borrowed(max(0, lent - begin.cached), begin.borrowed)
        return Loan(lender, params if lent else None, request_id)

    @property
    def wants_prefill(self) -> bool:
        """Whether a prefill engine should compute the prompt."""
        return not self.is_direct

    @property
    def may_be_at_once(self) -> bool:
        """Whether both engines may get this attempt at the same time."""
        return self.tokens_left > 1 and not (self.failed_loads or self.drawn or self.is_direct)

    def pays_at_once(self, prefill: Engine, decode: Engine) -> bool:
        """Whether much of the KV can be transferred during the prompt computation."""
        (_, computed), moved = self._shares(prefill), self.tokens - self._held_at(decode)
        if min(computed, moved) < LEAST_AT_ONCE:
            return False
        computing, moving = prefill.pace.computing.line, decode.pace.moving.line
        return min(computing.both[1] * computed, moving.both[1] * moved) >= LEAST_SAVED_S

    def join(self, prefill: Engine, decode: Engine, key: bytes | None) -> Joined:
        """Joins two engines by a transfer. Makes kvferry engines sample the same tokens: adds a
        seed if the sampling needs a seed and has none.
        """
        if prefill.told.is_ours and decode.told.is_ours and not self.is_determined:
            self.sampling = msgspec.structs.replace(self.sampling, seed=secrets.randbits(63))
        return by_transfer(prefill, key)

    def _shares(self, engine: Engine) -> tuple[int, int]:
        """Expected number of cached tokens, and number of tokens to compute, at a prefill
        engine.
        """
        if self.route is None or engine is not self.route.prefill:
            return 0, self.tokens
        return self.route.begin.cached, self.route.begin.computed

    def _held_at(self, engine: Engine) -> int:
        """Expected number of cached tokens at a decode engine."""
        return self.route.held if self.route is not None and engine is self.route.decode else 0

    # ---- prefill ----------------------------------------------------------------------------

    async def compute(self, engine: Engine, loan: Mapping[str, Any] | None) -> Reply:
        """Has an engine compute the prompt, except for the KV that the engine loads with the
        transfer parameters ``loan``.
        """
        asks: Mapping[str, Any] = {}
        if self.joined is not None:
            asks = self.joined.lends["kv_transfer_params"]
        elif self.tokens_left > 1:  # otherwise no decode engine follows
            asks = _LENDS_IN_TURN
        if loan is not None:
            asks = {**loan, **{name: value for name, value in asks.items() if value}}
        body = self._body(1, asks or None)
        cached, computed = self._shares(engine)
        with engine.pace.computing.doing(computed) as done:
            reply = await engine.complete(body, self.engine_request_id, self.span, self.head)
            self._note(reply, has_computed=True)
            had = reply.cached_or(cached)
            done(None if loan is not None else max(0, self.tokens - had))
        self.chooser.computed(engine, self.prompt, self.drawn, missed=cached - had)
        return reply

    def take_first(self, reply: Reply, prefill: Engine) -> Sequence[Reply]:
        """Takes the single token sampled by a prefill engine.

        Beside a decode engine, the token counts only if the decode engine will sample the same
        token. The first token of a foreign engine never counts then: vLLM may leave the prompt's
        last token to the decode engine.
        """
        if self.joined is not None and not (prefill.told.is_ours and self.is_determined):
            return ()
        if (count := len(reply.token_ids)) != 1:
            message = f"a prefill engine returned {count} tokens where one was asked for"
            raise ApiError(502, message)
        self.drawn += reply.token_ids
        choice = reply.choices[0]
        if self.tokens_left and choice.finish_reason != "stop":
            choice.finish_reason = None  # the router asked for one token only
        else:
            choice.finish_reason, self.is_ended = choice.finish_reason or "length", True
        return (reply,)

    # ---- decode -----------------------------------------------------------------------------

    async def draw(
        self, engine: Engine, lent: Mapping[str, Any] | None
    ) -> AsyncGenerator[Reply, None]:
        """Yields the decode engine's replies, without tokens that another engine has sampled
        meanwhile.

        The times of the replies are a sample of the engine's pace, unless the engine had to wait
        for the computation of another engine.
        """
        computes = lent is None or self.is_direct
        is_mixed = lent is not None and (self.is_direct or self.joined is not None)
        tokens, held, outstanding = self.tokens, self._held_at(engine), engine.outstanding
        at, first_at = len(self.drawn), 0.0
        body = self._body(self.tokens_left, lent)
        if self.generation.include_usage or not self.generation.stream:
            body["stream_options"] = {"include_usage": True}
        stream = engine.stream(body, self.engine_request_id, self.span, self.head)
        work = engine.pace.computing if computes else engine.pace.moving
        try:
            with work.doing(max(0, tokens - held)) as done:
                async with aclosing(stream) as replies:
                    async for reply in replies:
                        self._note(reply, has_computed=computes)
                        if not reply.choices:
                            continue
                        if not first_at:
                            first_at = time.monotonic()
                            cached = reply.cached_or(held)
                            done(None if is_mixed else max(0, tokens - cached))
                            self.chooser.computed(
                                engine, self.prompt, self.drawn, missed=held - cached
                            )
                        at += len(reply.token_ids)
                        self._take_new(reply, at)
                        if reply.finish_reason is not None:  # the caller may stop here
                            self.is_ended = True
                            engine.pace.drew(outstanding, time.monotonic() - first_at)
                            self.chooser.computed(engine, self.prompt, self.drawn[:-1])
                        yield reply
        except EngineDownError:
            if not self.is_over:
                raise  # otherwise no part of the answer was lost
        if not self.is_ended and not self.tokens_left:
            # The engine sampled all tokens, but died before it reported the finish reason.
            yield Reply.ended("length")

    def _take_new(self, reply: Reply, end: int) -> None:
        """Takes the new tokens of a reply; ``end`` is the position after the reply's last token.

        Raises:
            StartAgainError: the engine has sampled other tokens than the engine before it.
        """
        known = self.drawn[end - len(reply.token_ids) : end]
        if reply.token_ids[: len(known)] != known:
            # Two logits were nearly equal on engines of unequal shapes. The tokens known to the
            # client count.
            raise StartAgainError
        if known:
            reply.choices[0].token_ids = reply.token_ids[len(known) :]
        self.drawn.extend(reply.token_ids)

    # ---- prefill and decode -----------------------------------------------------------------

    def _body(
        self, max_tokens: int, kv_transfer_params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Body of a request to an engine for the next ``max_tokens`` tokens."""
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

    def _note(self, reply: Reply, *, has_computed: bool) -> None:
        """Notes the further fields of a reply and the number of cached tokens.

        The computing engine's number of cached tokens takes precedence, because an engine that has
        loaded KV counts all loaded tokens as cached.
        """
        if reply.own is not None and not self.generation.are_ours:
            self.words.take(reply.own, reply.headers)
        is_new, is_known = not self.is_counted, self.cached_tokens is not None
        if (is_new and has_computed) or (not is_known and (is_new or has_computed)):
            self.cached_tokens = reply.cached_tokens
        self.is_counted |= has_computed


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
