"""The engines that a router knows. They come and go while it runs.

Three doors lead in, all to :meth:`Members.add`: the addresses that the router is started with, the
HTTP API below, and lists that are looked at again and again (:mod:`kvferry.cluster.lists`)::

    GET    /kvferry/engines                    all of them, each with its state
    PUT    /kvferry/engines/ROLE/NAME          enters it: {"url": "http://host:port"}, and where
                                               people ask it, {"control": "host:port"}, and where
                                               it publishes its KV cache events,
                                               {"kv_events": {"endpoint": "tcp://host:port"}},
                                               and whether it lends, {"kv_role": "kv_both"}
    POST   /kvferry/engines/ROLE/NAME/drain    gives it nothing new; see the state
    DELETE /kvferry/engines/ROLE/NAME/drain    gives it requests again
    DELETE /kvferry/engines/ROLE/NAME          forgets it; what it works on goes on

``ROLE`` is ``prefill`` or ``decode``; an engine whose ``kv_role`` is ``kv_both`` may have both, and
changes its role by being entered in the new one and forgotten in the old one.

An engine leaves by draining. The router gives it nothing new, and an engine of ours takes nothing
new from anybody either. It is drained once nobody waits for it: it has no requests, and no KV of
it is still to be fetched.
"""

import asyncio
import contextlib
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.cluster import engines, web
from kvferry.cluster.counts import CountTable
from kvferry.cluster.engine_client import EngineClient
from kvferry.cluster.engines import Engine, EngineState
from kvferry.cluster.lists import EngineList
from kvferry.cluster.messages import EngineAddress, KVEventsPlace, Role, RouterSettings
from kvferry.cluster.openai import ApiError, parse_body
from kvferry.cluster.pace import Pace
from kvferry.cluster.prefixes import PrefixIndex
from kvferry.config import KVRole, shown
from kvferry.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0
"""Seconds between two looks at a list."""
RECOVERY_WAIT_S = 0.5
"""Seconds in which an engine that has come back is found when no other can serve a request."""
MOST_ENGINES = 1000
"""Engines of a router."""


class NoEngineError(ApiError):
    """Every engine of a role is down or leaving, or had its try."""


@dataclass(slots=True, eq=False)
class EnginePool:
    """The engines of one role."""

    role: Role
    outstanding_timeout_s: float
    """See :class:`~kvferry.config.RouterConfig`."""
    dispensable: bool = False
    """Whether requests can be served without any of them."""
    engines: list[Engine] = field(default_factory=list)
    _next: int = 0
    """Index at which the next choice among equals starts."""

    async def pick(self, tried: Collection[Engine] = (), chosen: Engine | None = None) -> Engine:
        """The one that was chosen, if it is fit; else the fit engine with the fewest outstanding
        requests, in turn among equals; one that is slow where there is no other.

        Raises:
            NoEngineError: 503; every engine is down or leaving, or was tried.
        """
        if not self.fit(tried):
            # One that has just been entered is not known yet, nor one that has just come back;
            # for the latter nobody waits where it can be done without.
            asked = [each for each in self.engines if each.is_new or not self.dispensable]
            if asked:
                probes = [engine.probing() for engine in asked]
                await asyncio.wait(probes, timeout=RECOVERY_WAIT_S)
        best = self.first(tried, chosen)
        if best is None:
            raise self.nobody()
        self._next = self.engines.index(best) + 1
        return best

    def first(self, tried: Collection[Engine], chosen: Engine | None) -> Engine | None:
        """Whom :meth:`pick` would find at once; ``None`` where there is nobody."""
        fit = self.fit(tried) or self.slow(tried)
        return min(fit, key=lambda engine: (engine is not chosen, engine.outstanding), default=None)

    def fit(self, tried: Collection[Engine] = ()) -> list[Engine]:
        """Those that may be given a request, beginning with whose turn it is."""
        return [engine for engine in self._in_turn(tried) if engine.healthy]

    def slow(self, tried: Collection[Engine] = ()) -> list[Engine]:
        """Those that may be given a request where nobody is fit: slow is not dead, unless it lasts.

        None of a role without which requests can be served.
        """
        if self.dispensable:
            return []
        slow = [engine for engine in self._in_turn(tried) if engine.is_slow]
        return [engine for engine in slow if engine.down_s < self.outstanding_timeout_s]

    def _in_turn(self, tried: Collection[Engine]) -> list[Engine]:
        turn = self.engines[self._next :] + self.engines[: self._next]
        return [engine for engine in turn if engine.is_staying and engine not in tried]

    def nobody(self) -> NoEngineError:
        """The error that tells of each engine why it cannot serve a request."""
        states = "; ".join(
            f"{engine.name!r} ({engine.shown_url}): {_why_not(engine)}" for engine in self.engines
        )
        message = f"no {self.role} engine can serve this: {states or 'there is none'}"
        return NoEngineError(503, message, code="engine_unavailable")


def _why_not(engine: Engine) -> str:
    if engine.healthy and not engine.is_staying:
        return f"it is {engine.state}"
    return engine.last_error or "failed this request"


class _Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body that enters an engine."""

    url: str
    control: str = ""
    kv_events: KVEventsPlace | None = None
    kv_role: KVRole | None = None


class Members:
    """The engines of a router, by role; watches their health while it runs."""

    def __init__(
        self,
        settings: RouterSettings,
        client: EngineClient,
        lists: Sequence[EngineList] = (),
        table: CountTable | None = None,
        *,
        follows: bool = False,
    ) -> None:
        """Begins with the engines of the settings; ``lists`` are looked at while it watches.

        ``table`` has the counts of a router of several processes. A worker's members follow those
        of its leader: they check no engine's health unless a request needs to know it.
        """
        self._client = client
        self._table = table
        self._follows = follows
        self._lists = lists
        self._tasks: set[asyncio.Task[None]] = set()
        """Of all that goes on while it watches."""
        self._is_watching = False
        self._pace = Pace()
        """Of all engines."""
        self.index = PrefixIndex()
        """What they have in their prefix caches, where they tell."""
        self._is_listening = settings.route_by == "cost"
        outstanding_s = settings.outstanding_timeout_s
        self.decode = EnginePool("decode", outstanding_s)
        self.prefill = EnginePool(
            "prefill", outstanding_s, dispensable=settings.decode_only == "fallback"
        )
        for address in settings.engines:
            self.add(address)

    def __iter__(self) -> Iterator[Engine]:
        yield from self.prefill.engines
        yield from self.decode.engines

    async def meet(self) -> None:
        """Waits for the first health checks of all engines, for :data:`RECOVERY_WAIT_S` at most:
        what the router may promise follows from what each engine tells of itself.
        """
        checks = [engine.probing() for engine in self if engine.is_new]
        if checks:
            await asyncio.wait(checks, timeout=RECOVERY_WAIT_S)

    @property
    def are_ours(self) -> bool:
        """Whether all of them that have told of themselves are engines of ours."""
        known = [engine for engine in self if engine.max_model_len is not None]
        return bool(known) and all(engine.is_ours for engine in known)

    def find(self, role: Role, name: str) -> Engine | None:
        """The engine of that name in that role."""
        pool = self._pool(role)
        return next((engine for engine in pool.engines if engine.name == name), None)

    def add(self, address: EngineAddress) -> Engine:
        """Enters an engine, or takes one back that was about to leave and knows nothing of that.

        Whoever tells of its draining enters itself again and again, and only :meth:`Engine.resume`
        or its next start brings it back.

        One that is known by this name with another address gives way: what it works on goes on,
        and it gets nothing new.

        Raises:
            ApiError: 409, there are too many.
        """
        known = self.find(address.role, address.name)
        if known is not None and known.url == address.url:
            known.is_leaving = known.is_leaving and known.tells_of_draining
            known.control = address.control or known.control
            known.kv_events = address.kv_events or known.kv_events
            known.kv_role = address.kv_role or known.kv_role
            return known
        if known is None and sum(1 for _ in self) >= MOST_ENGINES:
            raise ApiError(
                409, f"engines: there are {MOST_ENGINES}, no more are taken; remove some first"
            )
        if known is not None:
            self.remove(known)
        slot = 0 if self._table is None else self._table.free({engine.slot for engine in self})
        engine = self._made(address.name, address.url, address.role, slot)
        engine.control = address.control
        engine.kv_events, engine.kv_role = address.kv_events, address.kv_role
        self._pool(engine.role).engines.append(engine)
        return engine

    def _made(self, name: str, url: str, role: Role, slot: int) -> Engine:
        counts = None if self._table is None else self._table.counts(slot)
        engine = Engine(name, url, role, self._client, pace=Pace(self._pace, counts), slot=slot)
        if self._is_watching:
            self._start(self._check(engine))
        return engine

    def states(self) -> tuple[EngineState, ...]:
        """What there is to tell the workers of a router."""
        return tuple(msgspec.convert(each, EngineState, from_attributes=True) for each in self)

    def follow(self, states: Sequence[EngineState]) -> None:
        """Has the engines that the leader tells of, and no others."""
        left = {(each.slot, each.role, each.name, each.url): each for each in self}
        pools: dict[Role, list[Engine]] = {"prefill": [], "decode": []}
        for told in states:
            engine = left.pop((told.slot, told.role, told.name, told.url), None)
            if engine is None:
                engine = self._made(told.name, told.url, told.role, told.slot)
            engine.follow(told)
            pools[told.role].append(engine)
        for engine in left.values():
            engine.is_leaving = True
        for role, engines_now in pools.items():
            self._pool(role).engines = engines_now

    def remove(self, engine: Engine) -> None:
        """Gives it nothing new and forgets it; what it works on goes on, and is watched.

        Idempotent: whoever waits for an engine to drain may find that somebody else has removed it.
        """
        engine.is_leaving = True
        with contextlib.suppress(ValueError):
            self._pool(engine.role).engines.remove(engine)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Checks the health of all of them, and looks at the lists, for as long as this is open."""
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

    def _pool(self, role: Role) -> EnginePool:
        return self.prefill if role == "prefill" else self.decode

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(self, engine: Engine) -> None:
        pool = self._pool(engine.role)
        while engine in pool.engines or engine.outstanding:
            # The leader tells nothing more of an engine that was removed.
            if not self._follows or engine not in pool.engines:
                await engine.probing()
            # Slow is not dead: where nobody else can serve them, its requests wait for it.
            others = pool.dispensable or pool.fit((engine,))
            if engine.down_s >= pool.outstanding_timeout_s and others:
                engine.give_up()
            if engine.tells_of_draining and engine.lives and not self._follows:
                await engine.remind()
            await asyncio.sleep(engines.PROBE_INTERVAL_S)

    async def _listen(self) -> None:
        """Listens to the engines that live: one that has gone has lost its cache."""
        while True:
            self.index.follow(
                {engine.kv_events for engine in self if engine.kv_events and engine.lives}
            )
            await asyncio.sleep(engines.PROBE_INTERVAL_S)

    async def _follow(self, look: EngineList) -> None:
        """Enters what a list names, and lets go of what it names no longer; for ever.

        What two looks in a row do not name drains, and is forgotten when it has: a file that is
        being written is empty for a moment. Who is named again after that serves again. A list
        that cannot be read changes nothing.
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
                            self._start(engine.resume())
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
                # Whom an operator has drained, none but an operator takes back.
                let_go |= {key for key in gone if (left := self.find(*key)) and left.is_staying}
                named = found | {key: named[key] for key in missing}
            for key in tuple(leaving):
                if await self._has_left(*key):
                    leaving.discard(key)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _has_left(self, role: Role, name: str) -> bool:
        """Has an engine drain; forgets it once it has, or is gone."""
        engine = self.find(role, name)
        if engine is None:
            return True
        if not engine.is_leaving:
            await engine.leave()
        if engine.state == "draining" and engine.lives:
            return False
        self.remove(engine)
        return True

    # ---- HTTP -----------------------------------------------------------------------------

    def routes(
        self,
        may_read: Callable[[Request], None],
        may_change: Callable[[Request], None],
        has_changed: Callable[[], Awaitable[None]],
    ) -> list[Route]:
        """The API. The first two raise an ``ApiError`` for who may not look at the engines, or
        change them. ``has_changed`` is waited for after each change, before it is answered.
        """

        def route(path: str, change: Callable[[Request], Awaitable[Engine]], method: str) -> Route:
            async def endpoint(request: Request) -> Response:
                may_change(request)
                engine = await change(request)
                await has_changed()
                return web.json_response(told(engine))

            return Route(path, endpoint, methods=[method])

        async def list_them(request: Request) -> Response:
            may_read(request)
            return web.json_response({"engines": [told(engine) for engine in self]})

        return [
            Route("/kvferry/engines", list_them, methods=["GET"]),
            route(_ENGINE, self._put, "PUT"),
            route(f"{_ENGINE}/drain", self._drain, "POST"),
            route(f"{_ENGINE}/drain", self._resume, "DELETE"),
            route(_ENGINE, self._delete, "DELETE"),
        ]

    async def _put(self, request: Request) -> Engine:
        role, name = _role(request), request.path_params["name"]
        place = parse_body(_Place, await web.BodyReader(PLACE_BYTES).json(request))
        try:
            address = EngineAddress.of(
                role, place.url, name, place.control, place.kv_events, place.kv_role
            )
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return self.add(address)

    async def _drain(self, request: Request) -> Engine:
        engine = self._named(request)
        await engine.leave()
        return engine

    async def _resume(self, request: Request) -> Engine:
        engine = self._named(request)
        await engine.resume()
        return engine

    async def _delete(self, request: Request) -> Engine:
        engine = self._named(request)
        self.remove(engine)
        return engine

    def _named(self, request: Request) -> Engine:
        role, name = _role(request), request.path_params["name"]
        engine = self.find(role, name)
        if engine is None:
            names = ", ".join(repr(engine.name) for engine in self._pool(role).engines) or "none"
            raise ApiError(404, f"{role} engine {shown(name)} is not known here; there are {names}")
        return engine


def _role(request: Request) -> Role:
    try:
        role: Role = msgspec.convert(request.path_params["role"], Role)
        return role
    except msgspec.ValidationError as error:
        raise ApiError(404, f"role: {error}") from error


_ENGINE = "/kvferry/engines/{role}/{name:path}"  # a name may have a slash
PLACE_BYTES = 4096
"""Of the body that enters an engine."""


def told(engine: Engine) -> dict[str, Any]:
    """What the router tells of an engine."""
    return {
        "name": engine.name,
        "role": engine.role,
        "url": engine.shown_url,
        "healthy": engine.healthy,
        "state": engine.state,
        "outstanding": engine.outstanding,
        "lent": engine.lent,
        "drain": engine.drain,
        "last_error": engine.last_error,
        "silent_peers": engine.silent_peers,
    }
