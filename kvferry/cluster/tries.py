"""What has been tried for a request that runs over a prefill and a decode engine."""

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.cluster.engine_client import NO_HEAD
from kvferry.cluster.engines import Engine, EngineDownError, EngineRefusedError
from kvferry.cluster.headers import Head
from kvferry.cluster.members import EnginePool, NoEngineError
from kvferry.control.tickets import Transfer
from kvferry.control.tracing import RequestSpan

T = TypeVar("T")

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What asks a prefill engine to keep the prompt's KV for another engine."""

LEAST_AT_ONCE = 512
"""Tokens of the shortest prompt that both engines get at the same time, unless it is always so: of
less, computed in one step, no part can be read before it is whole."""


class StartAgainError(Exception):
    """What the prefill engine lent is of no use any more: prefill anew."""


@dataclass(slots=True, kw_only=True)
class Tries:
    """What has been tried for a request, and must not be tried again."""

    request_id: str
    died: set[Engine]
    """Engines that went away while the client's request was in their hands, any choice of it."""
    span: RequestSpan
    """What is told of the client's request; what each engine does is a part of it."""
    head: Head = NO_HEAD
    """What of the client's request goes on to engines beside its body."""
    unreached: set[Engine] = field(default_factory=set)
    """Engines that cannot have harmed it, nor it them."""
    refusal: tuple[Engine, EngineRefusedError] | None = None
    """The last engine that is well and did not take it, and what that one said."""
    lender: Engine | None = None
    """The prefill engine that computed the prompt last."""
    prefilled: float | None = None
    """When it had answered, on the monotonic clock."""
    given: dict[str, Any] | None = None
    """What a decode engine was given to load with last."""
    attempt: int = 1

    @property
    def tried(self) -> set[Engine]:
        """Engines that are not to be asked again."""
        return self.died | self.unreached

    def failed(self, engine: Engine, error: EngineDownError) -> None:
        """Takes note of an engine that did not serve it.

        ``error.reached`` is about what was lent, too: see :func:`is_lost`.

        Raises:
            EngineDownError: it is the second one that may have died of the request: a third one is
                not risked.
            StartAgainError: the engine is well, and may have used what was lent.
        """
        if isinstance(error, EngineRefusedError):
            self.unreached.add(engine)
            self.refusal = engine, error
            return
        if error.is_well:
            raise StartAgainError from error
        if not error.reached:
            self.unreached.add(engine)
            return
        self.died.add(engine)
        if len(self.died) > 1:
            raise error

    async def pick(self, pool: EnginePool, chosen: Engine | None = None) -> Engine:
        """An engine that was not tried yet, the chosen one if it can.

        Raises:
            EngineRefusedError: none is left, and the last one of them refused the request.
            NoEngineError: none is left.
        """
        try:
            return await pool.pick(self.tried, chosen)
        except NoEngineError:
            if self.refusal is not None and self.refusal[0].role == pool.role:
                raise self.refusal[1] from None
            raise

    async def begin_again(self, decode: EnginePool) -> None:
        """Counts a new attempt, unless no decode engine is left for it since one has refused.

        Raises:
            EngineRefusedError: the last one of them refused the request.
            NoEngineError: none is left.
        """
        self.attempt += 1
        if self.refusal is not None and decode.first(self.tried, None) is None:
            await self.pick(decode)

    def give_back(
        self, kv_transfer_params: Mapping[str, Any] | None, lender: Engine | None = None
    ) -> None:
        """What the lender lent, the last one unless given, may not have been fetched, and will not
        be.
        """
        lender = lender or self.lender
        if kv_transfer_params and lender is not None:
            lender.take_back(kv_transfer_params, f"{self.engine_request_id}-back")

    def handed_on(self, kv_transfer_params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The same for a decode engine of ours. With a ticket goes how long it lay here, so that
        ``kvferry trace`` can tell, and whether one that was given it before may hold its lease.
        """
        if kv_transfer_params is None or "ticket" not in kv_transfer_params:
            return kv_transfer_params
        told: dict[str, Any] = {"passed_on": True} if self.given == kv_transfer_params else {}
        self.given = kv_transfer_params
        if self.prefilled is not None:
            told["router_s"] = time.monotonic() - self.prefilled
        return kv_transfer_params | told

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


async def by_prefill(
    pool: EnginePool,
    request: Tries,
    work: Callable[[Engine], Awaitable[T]],
    chosen: Engine | None = None,
) -> T | None:
    """What a prefill engine makes of the request, the chosen one if it can; ``None`` where the
    decode engine computes all.
    """
    while True:
        try:
            engine = await request.pick(pool, chosen)
        except (NoEngineError, EngineRefusedError):
            if pool.dispensable:
                return None
            raise
        request.lender = engine
        try:
            done = await work(engine)
        except EngineDownError as error:
            request.failed(engine, error)
        else:
            request.prefilled = time.monotonic()
            return done


async def pick_pair(
    prefill: EnginePool,
    decode: EnginePool,
    tried: Collection[Engine],
    pays: Callable[[Engine, Engine], bool],
    chosen: tuple[Engine | None, Engine | None] = (None, None),
) -> tuple[Engine, Engine] | None:
    """The two engines that get a request at once, the chosen ones if they can; ``None`` if one
    follows the other: they do not know how, are one and the same, or it does not pay; or there is
    nobody of a role now.

    Raises:
        NoEngineError: 503; nobody of a role is left.
    """
    source, target = prefill.first(tried, chosen[0]), decode.first(tried, chosen[1])
    if source is None or target is None or source.url == target.url:
        return None
    knows = source.at_once and source.control and target.at_once
    if not knows or not pays(source, target):
        return None
    picked = await prefill.pick(tried, source), await decode.pick(tried, target)
    # Where all were slow another one may have come back meanwhile, which need not know how.
    return picked if picked == (source, target) else None


def begin_transfer(prefill: Engine, key: bytes | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Has the decode engine ask the prefill engine for what it is to load: the parameters of the
    one that lends, and of the one that loads. ``key`` is the cluster's, which signs them.
    """
    transfer = Transfer.begin(prefill.control, key).text
    lends = {**REMOTE_DECODE, "transfer": transfer}
    return lends, {"do_remote_prefill": True, "transfer": transfer}


def is_lost(error: EngineDownError, kv_transfer_params: Mapping[str, Any] | None) -> bool:
    """Whether what was lent is of no use to another decode engine than the one that failed."""
    if kv_transfer_params is None or not error.reached:
        return False
    return isinstance(error, EngineRefusedError) or not passes_on(kv_transfer_params)


def passes_on(kv_transfer_params: Mapping[str, Any] | None) -> bool:
    """Whether another decode engine may load what one may have loaded that has gone.

    A lease of ours passes on as soon as its holder's connection has gone; where it does not, the
    load fails. What others lend may be freed by now, and nobody would notice.
    """
    return kv_transfer_params is None or not {"ticket", "transfer"}.isdisjoint(kv_transfer_params)
