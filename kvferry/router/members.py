"""The engines known to a router. Engines come and go while the router runs.

Three sources add engines, all through :meth:`Members.add`: the addresses at the router's start, the
requests of operators (:mod:`kvferry.router.operators`), and lists (:mod:`kvferry.router.lists`),
which the router reads again and again.

An engine leaves by draining. The router gives a draining engine no new requests, and a kvferry
engine takes no new requests from other clients either. The engine is drained when it has no
requests, and all KV lent by the engine is fetched.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import msgspec

from kvferry.errors import ConfigError
from kvferry.router import health
from kvferry.router.counts import CountTable
from kvferry.router.engine_client import EngineClient
from kvferry.router.engines import Engine
from kvferry.router.health import EngineState
from kvferry.router.lists import EngineList
from kvferry.router.pace import Pace
from kvferry.router.prefixes import PrefixIndex
from kvferry.router.queue import RequestQueue
from kvferry.serving.messages import EngineAddress, Role, RouterSettings
from kvferry.serving.openai import ApiError

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0
"""Seconds between two reads of a list."""
RECOVERY_WAIT_S = 0.5
"""Maximum number of seconds to find a recovered engine when no other engine can serve a request."""
MEETING_WAIT_S = 5.0
"""Maximum number of seconds for the first health checks when no engine can serve a request."""
MOST_ENGINES = 1000
"""Maximum number of engines of a router."""


class NoEngineError(ApiError):
    """Every engine of a role is down, is leaving, or has been tried already."""


@dataclass(slots=True, eq=False)
class EnginePool:
    """The engines of one role."""

    role: Role
    outstanding_timeout_s: float
    """See :class:`~kvferry.config.RouterConfig`."""
    dispensable: bool = False
    """Whether the router can serve requests without an engine of this role."""
    most_requests: int | None = None
    """Maximum number of requests at an engine, if requests wait for room; otherwise ``None``."""
    engines: list[Engine] = field(default_factory=list)
    _next: int = 0
    """Index at which the next choice among equal engines starts."""

    async def pick(
        self,
        tried: Collection[Engine] = (),
        chosen: Engine | None = None,
        *,
        is_alone: bool = False,
    ) -> Engine:
        """Picks an engine for a request.

        The ``chosen`` engine comes first, if it is fit; then the fit engine with the fewest
        outstanding requests, in turn among equals. A slow engine is picked only if no engine is
        fit. For a request without a room (``is_alone``), an engine that needs a room comes last.

        Raises:
            NoEngineError: 503; every engine is down, is leaving, or was tried.
        """
        best = self.first(tried, chosen, is_alone=is_alone)
        if best is None or not best.status.healthy:
            # The health of an added or a recovered engine may not be known yet. A dispensable pool
            # does not wait for recovery.
            asked = [each for each in self.engines if each.status.is_new or not self.dispensable]
            if asked:
                is_met = best is not None or not any(each.status.is_new for each in asked)
                probes = [engine.health.probing() for engine in asked]
                await asyncio.wait(probes, timeout=RECOVERY_WAIT_S if is_met else MEETING_WAIT_S)
            best = self.first(tried, chosen, is_alone=is_alone)
        if best is None:
            raise self.nobody()
        self._next = self.engines.index(best) + 1
        return best

    def first(
        self, tried: Collection[Engine], chosen: Engine | None, *, is_alone: bool = False
    ) -> Engine | None:
        """The engine that :meth:`pick` would find without waiting; ``None`` if there is no such
        engine.
        """

        def order(engine: Engine) -> tuple[bool, bool, int]:
            return is_alone and engine.needs_room, engine is not chosen, engine.outstanding

        return min(self.fit(tried) or self.slow(tried), key=order, default=None)

    def fit(self, tried: Collection[Engine] = ()) -> list[Engine]:
        """Engines in good health that may get a request, beginning with the next engine in turn.
        Engines without room are among them only if no engine has room.
        """
        fit = [engine for engine in self._in_turn(tried) if engine.status.healthy]
        return [engine for engine in fit if self._room_at(engine)] or fit

    def slow(self, tried: Collection[Engine] = ()) -> list[Engine]:
        """Slow engines that may get a request if no engine is fit. A slow engine is not dead,
        unless it stays slow for ``outstanding_timeout_s``. An engine that has not told of its kind
        yet gets no request.

        Empty if the router can serve requests without this role.
        """
        if self.dispensable:
            return []
        slow = [each for each in self._in_turn(tried) if each.status.is_slow and each.told.is_known]
        return [engine for engine in slow if engine.status.down_s < self.outstanding_timeout_s]

    def room(self) -> int | None:
        """Number of requests that the engines would still take; ``None`` without a limit, or if no
        engine may get a request: then waiting would not help.
        """
        engines = self.fit() or self.slow()
        if self.most_requests is None or not engines:
            return None
        return sum(map(self._room_at, engines))

    def _room_at(self, engine: Engine) -> int:
        most = self.most_requests
        return 1 if most is None else max(0, most - engine.outstanding)

    def _in_turn(self, tried: Collection[Engine]) -> list[Engine]:
        turn = self.engines[self._next :] + self.engines[: self._next]
        return [engine for engine in turn if engine.health.is_staying and engine not in tried]

    @property
    def may_have_sglang(self) -> bool:
        """Whether an engine is an SGLang server, or is not known yet."""
        return any(each.needs_room or not each.told.is_known for each in self.engines)

    def nobody(self) -> NoEngineError:
        """The error with the reason for each engine why it cannot serve a request."""
        states = "; ".join(map(_why_not, self.engines)) or "there is none"
        message = f"no {self.role} engine can serve this: {states}"
        return NoEngineError(503, message, code="engine_unavailable")


def _why_not(engine: Engine) -> str:
    why = engine.status.last_error or "failed this request"
    if engine.status.healthy and not engine.health.is_staying:
        why = f"it is {engine.state}"
    return f"{engine.name!r} ({engine.health.shown_url}): {why}"


class Members:
    """The engines of a router, by role; watches their health while the router runs."""

    def __init__(
        self,
        settings: RouterSettings,
        client: EngineClient,
        lists: Sequence[EngineList] = (),
        table: CountTable | None = None,
        *,
        follows: bool = False,
    ) -> None:
        """Adds the engines of the settings; ``lists`` are read while :meth:`watching` is open.

        ``table`` has the counts of a router with several processes. With ``follows``, the members
        of a worker follow the leader's members: they check an engine's health only if a request
        needs the result.
        """
        self._client = client
        self._table = table
        self._follows = follows
        self._lists = lists
        self._tasks: set[asyncio.Task[None]] = set()
        """Background tasks while :meth:`watching` is open."""
        self._is_watching = False
        self._pace = Pace()
        """Pace of all engines together."""
        self.index = PrefixIndex()
        """Contents of the prefix caches of engines that publish KV cache events."""
        self._is_listening = settings.route_by == "cost"
        outstanding_s = settings.outstanding_timeout_s
        self.decode = EnginePool("decode", outstanding_s)
        self.prefill = EnginePool("prefill", outstanding_s, settings.decode_only == "fallback")
        for pool in (self.decode, self.prefill):
            pool.most_requests = settings.max_requests_per_server
        self.queue: RequestQueue | None = None
        """Requests that wait for room; ``None`` if servers have no limit."""
        if settings.max_requests_per_server is not None:
            room: dict[Role, Callable[[], int | None]]
            room = {"prefill": self.prefill.room, "decode": self.decode.room}
            self.queue = RequestQueue(room, settings.max_queued_requests, table)
        for address in settings.engines:
            self.add(address)

    def __iter__(self) -> Iterator[Engine]:
        yield from self.prefill.engines
        yield from self.decode.engines

    async def meet(self) -> None:
        """Waits for the first health checks of all engines: for at most :data:`RECOVERY_WAIT_S` if
        an engine of every role is in good health, else for at most :data:`MEETING_WAIT_S`.

        The set of requests that the router can serve depends on the engines' reports about
        themselves.
        """
        checks = [engine.health.probing() for engine in self if engine.status.is_new]
        if checks:
            can_serve = all(pool.fit() for pool in (self.prefill, self.decode) if pool.engines)
            await asyncio.wait(checks, timeout=RECOVERY_WAIT_S if can_serve else MEETING_WAIT_S)

    @property
    def max_model_len(self) -> int | None:
        """Number of tokens of the longest sequence accepted by every engine; ``None`` before the
        first report.
        """
        return min(filter(None, (each.told.max_model_len for each in self)), default=None)

    @property
    def model(self) -> str | None:
        """Model name of the first engine that has reported a model; ``None`` before the first
        report.
        """
        return next((engine.told.model for engine in self if engine.told.model), None)

    @property
    def are_ours(self) -> bool:
        """Whether an engine has reported its limit, and all engines with a reported limit are
        kvferry engines.
        """
        known = [engine for engine in self if engine.told.is_known]
        return bool(known) and all(engine.told.is_ours for engine in known)

    @property
    def have_sglang(self) -> bool:
        """Whether an engine is an SGLang server, which has no answer for token ids alone."""
        return any(engine.needs_room for engine in self)

    def no_sglang(self) -> ApiError:
        """The error for a request that only SGLang servers serve: 503 if an engine may yet prove to
        be such a server, else 404.
        """
        unknown = [engine.health.title for engine in self if not engine.told.is_known]
        if unknown:
            message = f"/generate: not known yet to be SGLang servers: {', '.join(unknown)}"
            return ApiError(503, message, code="engine_unavailable")
        return ApiError(404, "/generate: no engine is an SGLang server; ask /v1/completions")

    def find(self, role: Role, name: str) -> Engine | None:
        """The engine with this role and name; ``None`` if there is no such engine."""
        engines = self.pool(role).engines
        return next((engine for engine in engines if engine.name == name), None)

    def add(self, address: EngineAddress) -> Engine:
        """Adds an engine, or takes a leaving engine back if the engine reports nothing about
        draining.

        An engine that reports its draining may be added again and again. Only
        :meth:`EngineHealth.resume` or the engine's next start brings such an engine back.

        An engine of the same name with another address is replaced: its current requests go on, and
        it gets no new requests.

        Raises:
            ApiError: 409, there are too many engines.
        """
        known = self.find(address.role, address.name)
        if known is not None and known.url == address.url:
            known.health.enter(address)
            return known
        if known is None and sum(1 for _ in self) >= MOST_ENGINES:
            raise ApiError(
                409, f"engines: there are {MOST_ENGINES}, no more are taken; remove some first"
            )
        if known is not None:
            self.remove(known)
        slot = 0 if self._table is None else self._table.free({engine.slot for engine in self})
        engine = self._made(address.name, address.url, address.role, slot)
        engine.health.enter(address)
        self.pool(engine.role).engines.append(engine)
        return engine

    def _made(self, name: str, url: str, role: Role, slot: int) -> Engine:
        counts = None if self._table is None else self._table.counts(slot)
        engine = Engine(name, url, role, self._client, pace=Pace(self._pace, counts), slot=slot)
        if self._is_watching:
            self._start(self._check(engine))
        return engine

    def states(self) -> tuple[EngineState, ...]:
        """The state of each engine, for the workers of a router."""
        return tuple(msgspec.convert(each, EngineState, from_attributes=True) for each in self)

    def follow(self, states: Sequence[EngineState]) -> None:
        """Makes the leader's engines the only engines of this router."""
        left = {(each.slot, each.role, each.name, each.url): each for each in self}
        pools: dict[Role, list[Engine]] = {"prefill": [], "decode": []}
        for told in states:
            engine = left.pop((told.slot, told.role, told.name, told.url), None)
            if engine is None:
                engine = self._made(told.name, told.url, told.role, told.slot)
            engine.health.follow(told)
            pools[told.role].append(engine)
        for engine in left.values():
            engine.health.is_leaving = True
        for role, engines_now in pools.items():
            self.pool(role).engines = engines_now

    def remove(self, engine: Engine) -> None:
        """Forgets an engine. Its current requests go on, and their health checks too.

        Idempotent: a task that waits for an engine to drain may find the engine removed already.
        """
        engine.health.is_leaving = True
        with contextlib.suppress(ValueError):
            self.pool(engine.role).engines.remove(engine)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Checks the health of all engines and reads the lists while the context is open."""
        self._is_watching = True
        for look in self._lists:
            self._start(self._follow(look))
        for engine in self:
            self._start(self._check(engine))
        if self._is_listening:
            self._start(self._listen())
        try:
            yield
        finally:
            self._is_watching = False
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for engine in self:
                await engine.aclose()
            await asyncio.to_thread(self.index.close)

    def pool(self, role: Role) -> EnginePool:
        """The pool of engines of a role."""
        return self.prefill if role == "prefill" else self.decode

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(self, engine: Engine) -> None:
        pool = self.pool(engine.role)
        while engine in pool.engines or engine.outstanding:
            # The leader sends no more states of a removed engine.
            if not self._follows or engine not in pool.engines:
                await engine.health.probing()
            # Slow is not dead: requests wait for a slow engine if no other engine can serve them.
            others = pool.dispensable or pool.fit((engine,))
            if engine.status.down_s >= pool.outstanding_timeout_s and others:
                engine.give_up()
            is_here = engine in pool.engines and not self._follows
            if is_here and engine.told.tells_of_draining and engine.status.lives:
                await engine.health.remind()
            await asyncio.sleep(health.PROBE_INTERVAL_S)

    async def _listen(self) -> None:
        """Listens to the events of all live engines: an engine that went away has lost its
        cache.
        """
        while True:
            living = (engine.told for engine in self if engine.status.lives)
            self.index.follow({told.kv_events for told in living if told.kv_events})
            await asyncio.sleep(health.PROBE_INTERVAL_S)

    async def _follow(self, look: EngineList) -> None:
        """Adds the engines of a list, and drains the engines missing from the list, forever.

        An engine missing from two reads in a row is drained, and then forgotten: a file is empty
        for a moment while a program writes it. If the list names the engine again, the engine
        serves again. A list that cannot be read changes nothing.
        """
        named: dict[tuple[Role, str], EngineAddress] = {}
        missing: set[tuple[Role, str]] = set()
        leaving: set[tuple[Role, str]] = set()
        let_go: set[tuple[Role, str]] = set()
        problem = ""
        while True:
            try:
                found = {(address.role, address.name): address for address in await look()}
                for key, address in found.items():
                    if named.get(key) != address:
                        leaving.discard(key)
                        engine = self.add(address)
                        if key in let_go:
                            let_go.discard(key)
                            self._start(engine.health.resume())
                problem = ""
            except (ConfigError, ApiError) as error:
                if str(error) != problem:
                    problem = str(error)
                    logger.warning(
                        "a list of engines cannot be used; the last one stands: %s", error
                    )
            else:
                absent = named.keys() - found.keys()
                gone = absent & missing
                missing = absent - gone
                leaving |= gone
                # Only an operator takes back an engine drained by an operator.
                left = {key: self.find(*key) for key in gone}
                let_go |= {key for key, one in left.items() if one and one.health.is_staying}
                named = found | {key: named[key] for key in missing}
            asked = tuple(leaving)  # at once: a dead engine takes seconds
            have_left = await asyncio.gather(*(self._has_left(*key) for key in asked))
            leaving.difference_update(compress(asked, have_left))
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _has_left(self, role: Role, name: str) -> bool:
        """Drains an engine and forgets a drained or dead engine; returns whether the engine is
        gone.
        """
        engine = self.find(role, name)
        if engine is None:
            return True
        if not engine.health.is_leaving:
            await engine.health.leave()
        if engine.state == "draining" and engine.status.lives:
            return False
        self.remove(engine)
        return True
