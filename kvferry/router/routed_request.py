"""A request that the router runs over its engines, and the KV that engines lend to it.

:class:`~kvferry.router.hand_over.HandOver` knows the order of the engines. A :class:`RoutedRequest`
keeps the state of its attempts, and knows how to ask an engine: it makes the body and reads the
reply. There are two kinds, each in a module of its own: requests of token ids
(:mod:`kvferry.router.token_request`), and bodies in the client's own words
(:mod:`kvferry.router.pass_through`).
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypeAlias, TypeVar

from kvferry import errors
from kvferry.errors import LeaseError, TicketError, TransferError
from kvferry.observe.spans import RequestSpan
from kvferry.router.choice import Route
from kvferry.router.engine_client import NO_HEAD
from kvferry.router.engines import Engine
from kvferry.router.headers import Head
from kvferry.router.members import EnginePool, NoEngineError
from kvferry.router.queue import QueuePlace
from kvferry.router.replies import (
    EngineDownError,
    EngineFailedError,
    EngineRefusedError,
    Reply,
)
from kvferry.router.rooms import Joined
from kvferry.serving.openai import ApiError

Told = TypeVar("Told")
"""Answer of a decode engine, or one piece of a streamed answer."""

GiveBack: TypeAlias = Callable[[Mapping[str, Any], str], Coroutine[Any, Any, None]]
"""Gives back the KV with these transfer parameters, lent for the request with this id."""

TICKETS = frozenset({"ticket", "transfer"})
"""Transfer parameters with which kvferry lends: an end of the lease never harms a reader."""

LEAST_AT_ONCE = 512
"""Smallest number of prompt tokens for which both engines get a request at the same time, unless
``at_once`` is ``always``. A shorter prompt is computed in one step: no part of its KV can be read
before the whole prompt is computed."""

MOST_FAILED_LOADS = 2
"""Maximum number of times a prompt is computed again after a failed load of its KV; then the client
gets the error."""


class StartAgainError(Exception):
    """The KV from the prefill engine has become useless: the prompt must be computed again."""


class Loan:
    """KV that an engine lends to a request: a computed prompt, or the cached beginning of a prompt.

    The lender must not end before another engine has fetched the KV, so the loan counts as lent
    until then. If no engine has fetched the KV when the context ends, the lender gets the KV back:
    no request will fetch it later. Without parameters nothing is lent.
    """

    def __init__(
        self,
        lender: Engine | None = None,
        params: Mapping[str, Any] | None = None,
        request_id: str = "",
        *,
        computed_at: float | None = None,
        otherwise: GiveBack | None = None,
    ) -> None:
        """Counts the KV as lent.

        Args:
            lender: the engine that lends the KV.
            params: the transfer parameters with which another engine fetches the KV.
            request_id: the id of the lender's request.
            computed_at: time of the prefill engine's answer, in seconds on the monotonic clock;
                ``None`` if no prefill engine has computed the prompt.
            otherwise: gives the KV back if the lender itself does not take it back.
        """
        self.otherwise = otherwise
        self.params: dict[str, Any] | None = dict(params) if params else None
        self._request_id = request_id
        self._computed_at = computed_at
        self._is_passed_on = False
        self._lender = lender if self.params else None
        """``None`` as soon as no KV is lent any more."""
        if self._lender is not None:
            self._lender.pace.lent.add(1)

    def passed_on(self) -> dict[str, Any] | None:
        """The transfer parameters for a decode engine.

        With a ticket, the parameters of a computed prompt also have the seconds since the prefill
        engine's answer (``router_s``), for ``kvferry trace``. If another decode engine got the
        ticket before, ``passed_on`` says that this engine may still hold the lease.
        """
        if self.params is None or "ticket" not in self.params:
            return self.params
        told: dict[str, Any] = {"passed_on": True} if self._is_passed_on else {}
        self._is_passed_on = True
        if self._computed_at is not None:
            told["router_s"] = time.monotonic() - self._computed_at
        return self.params | told

    def fetched(self) -> None:
        """Notes that an engine has fetched the KV. Idempotent."""
        lender, self._lender = self._lender, None
        if lender is not None:
            lender.pace.lent.add(-1)

    def give_back(self) -> None:
        """Gives the KV back to its lender, unless an engine has fetched the KV. Idempotent."""
        if self._lender is not None:
            params, otherwise = self.params or {}, self.otherwise
            other = None if otherwise is None else partial(otherwise, params, self._request_id)
            self._lender.take_back(params, self._request_id, other)
        self.fetched()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


@contextmanager
def unless_read(lender: Engine, request_id: str) -> Iterator[None]:
    """Gives back what an engine lends to a request, if the engine's answer is not read: the client
    may leave, or the connection may break, while the answer is on its way.
    """
    try:
        yield
    except (asyncio.CancelledError, EngineDownError) as error:
        if not isinstance(error, EngineDownError) or error.reached:
            lender.take_back({}, request_id)
        raise


@dataclass(slots=True, kw_only=True)
class RoutedRequest(ABC, Generic[Told]):
    """A request that the router runs over its engines, and the state of its attempts."""

    request_id: str
    died: set[Engine]
    """Engines lost while they worked on the client's request, in any of its choices."""
    span: RequestSpan
    """Trace span of the client's request; the work of each engine is a part of this span."""
    head: Head = NO_HEAD
    """Headers, query and id of the client's request, for the engines."""
    unreached: set[Engine] = field(default_factory=set)
    """Engines that refused the request or never received it. Neither side can have harmed the
    other."""
    refusal: tuple[Engine, EngineRefusedError] | None = None
    """The last healthy engine that refused the request, and the error of this engine."""
    attempt: int = 1
    failed_loads: int = 0
    route: Route | None = None
    """Route chosen for this attempt; ``None`` if the chooser knows no engine's cache or finds no
    engine."""
    joined: Joined | None = None
    """The fields that join the two engines of this attempt; ``None`` if the engines work in
    turn."""
    computing: asyncio.Task[Reply] | None = None
    """The prefill engine's work beside the decode engine; ``None`` if the engines work in turn."""
    place: QueuePlace = field(default_factory=QueuePlace)
    """The request's place in the queue."""

    # ---- differences between the kinds of requests ------------------------------------------

    async def choose(self) -> Loan:
        """Chooses the engines of this attempt. Returns the KV that the computing engine loads
        first.
        """
        return Loan()

    @abstractmethod
    async def compute(self, engine: Engine, loan: Mapping[str, Any] | None) -> Reply:
        """Has an engine compute and keep the prompt, except for the KV that the engine loads with
        the transfer parameters ``loan``.

        Raises:
            EngineDownError: the engine cannot be reached, went away or answers 503.
            ApiError: the engine refused or failed the request.
        """

    @abstractmethod
    def take_first(self, reply: Reply, prefill: Engine) -> Sequence[Told]:
        """Returns the client's part of the prefill engine's reply."""

    @abstractmethod
    def draw(self, engine: Engine, lent: Mapping[str, Any] | None) -> AsyncGenerator[Told, None]:
        """Yields the answer of a decode engine, which loads KV with the transfer parameters
        ``lent``.

        Raises:
            EngineDownError: the engine cannot be reached, went away or answers 503.
            ApiError: the engine refused or failed the request.
        """

    @abstractmethod
    def pays_at_once(self, prefill: Engine, decode: Engine) -> bool:
        """Whether much of the KV can be transferred during the prompt computation."""

    @abstractmethod
    def join(self, prefill: Engine, decode: Engine, key: bytes | None) -> Joined:
        """Makes the fields that join two engines, and prepares the request for both."""

    @property
    @abstractmethod
    def wants_prefill(self) -> bool:
        """Whether a prefill engine should compute the prompt."""

    @property
    @abstractmethod
    def may_be_at_once(self) -> bool:
        """Whether a prefill engine and a decode engine may get this attempt at the same time."""

    def has_fetched(self, told: Told) -> bool:
        """Whether a reply of the decode engine shows that this engine has fetched the lent KV."""
        return True

    @property
    def may_be_joined(self) -> bool:
        """Whether SGLang servers may serve the request, joined with another engine by a room."""
        return False

    @property
    def is_list(self) -> bool:
        """Whether the request has several prompts, which only two SGLang servers compute so."""
        return False

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete."""
        return False

    @property
    def may_be_repeated(self) -> bool:
        """Whether another engine may get the request after an engine has worked on it."""
        return True

    # ---- the state of the attempts ----------------------------------------------------------

    @property
    def chosen(self) -> tuple[Engine | None, Engine | None]:
        """Prefill engine and decode engine of the chosen route; ``None`` for an engine that was not
        chosen.
        """
        return (None, None) if self.route is None else (self.route.prefill, self.route.decode)

    @property
    def is_direct(self) -> bool:
        """Whether the decode engine computes the prompt, according to the chosen route."""
        return self.route is not None and self.route.prefill is None

    @property
    def tried(self) -> set[Engine]:
        """Engines to avoid in the next attempt."""
        return self.died | self.unreached

    @property
    def engine_request_id(self) -> str:
        """Request id for the engines, new for each attempt: the previous id may still hold
        blocks.
        """
        return self.request_id if self.attempt == 1 else f"{self.request_id}-try{self.attempt}"

    async def pick(self, pool: EnginePool, chosen: Engine | None = None) -> Engine:
        """Picks an engine outside of :attr:`tried`: the ``chosen`` engine if possible. Without a
        room, an SGLang server comes last.

        Raises:
            EngineRefusedError: no engine is left, and the last refusal came from an engine of this
                role.
            NoEngineError: no engine is left.
            ApiError: 503, an SGLang server has just come, and the request cannot be joined.
            StartAgainError: an SGLang server has just come, and the request may be joined.
        """
        try:
            engine = await pool.pick(self.tried, chosen, is_alone=self.joined is None)
        except NoEngineError:
            if self.refusal is not None and self.refusal[0].role == pool.role:
                raise self.refusal[1] from None
            raise
        if self.joined is None and engine.needs_room:
            if self.may_be_joined and self.wants_prefill:
                raise StartAgainError
            if not self.may_be_joined:
                message = f"{engine.health.title} has just come, an SGLang server; ask again"
                raise ApiError(503, message, code="engine_unavailable")
        return engine

    def failed(
        self,
        engine: Engine,
        error: ApiError,
        loaned: Loan | None = None,
        *,
        may_skip: bool = False,
    ) -> bool:
        """Notes an engine that did not serve the request, and decides what follows: the only place
        that knows the classes of failures.

        ``loaned`` is the KV that the engine was to load, or to lend while it computes; ``None`` if
        the engine has begun its answer. If a load failed, the prompt itself may be valid.

        Returns:
            Whether the step is left out, which ``may_skip`` allows; otherwise another engine may
            serve the step.

        Raises:
            ApiError: ``error`` itself. It is no fault of the engine; or nothing else could help; or
                a second engine may have died of the request, and the router risks no third engine.
            StartAgainError: a loan may be the reason of the failure; or the engine is healthy, and
                may have used the lent KV.
        """
        if isinstance(error, EngineDownError):
            self._replace(engine, error)
            return False
        has_loan = loaned is not None and loaned.params is not None
        is_failure = isinstance(error, EngineFailedError)
        if is_failure and may_skip and not has_loan:
            return True
        if not has_loan or not (is_failure or _is_failed_load(error)):
            raise error
        self.failed_loads += 1
        if self.failed_loads > MOST_FAILED_LOADS:
            raise error
        raise StartAgainError from error

    def _replace(self, engine: Engine, error: EngineDownError) -> None:
        """Notes an engine that another engine may replace; see :meth:`failed`."""
        if isinstance(error, EngineRefusedError):
            self.unreached.add(engine)
            self.refusal = engine, error
            return
        if error.reached and not self.may_be_repeated:
            raise error
        if error.is_well:
            raise StartAgainError from error
        if not error.reached:
            self.unreached.add(engine)
            return
        self.died.add(engine)
        if len(self.died) > 1:
            raise error

    def is_lost(self, error: ApiError, lent: Loan) -> bool:
        """Whether lent KV is useless for another decode engine after ``error`` of a decode engine.

        A kvferry lease passes to the next engine as soon as its holder's connection is gone;
        otherwise the load fails with an error. A foreign lender may have freed the blocks by now,
        without any error. And another engine without this prompt in its cache would compute the
        whole prompt of a direct route.
        """
        if self.is_direct:
            return True
        if lent.params is None or not (isinstance(error, EngineDownError) and error.reached):
            return False
        passes_on = not TICKETS.isdisjoint(lent.params)
        return isinstance(error, EngineRefusedError) or not passes_on

    async def begin_again(self, decode: EnginePool) -> None:
        """Counts a new attempt, unless a refusal was the reason why no decode engine is left.

        Raises:
            EngineRefusedError: no decode engine is left, and the last refusal came from a decode
                engine.
            NoEngineError: no decode engine is left.
        """
        self.attempt += 1
        self.joined = self.computing = None
        if self.refusal is not None and decode.first(self.tried, None) is None:
            with suppress(StartAgainError):
                await self.pick(decode)


def _is_failed_load(error: ApiError) -> bool:
    """Whether ``error`` says that an engine could not load KV."""
    kind = getattr(errors, error.code or "", None)
    return isinstance(kind, type) and issubclass(kind, TransferError | LeaseError | TicketError)
