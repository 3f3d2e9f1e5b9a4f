"""Engines as operators see and change them.

::

    GET    /health                             whether requests can be served, and all engines
    GET    /kvferry/engines                    all engines, each with its state
    PUT    /kvferry/engines/ROLE/NAME          adds an engine: {"url": "http://host:port"};
                                               optionally also its control channel,
                                               {"control": "host:port"}, the address of its
                                               KV cache events,
                                               {"kv_events": {"endpoint": "tcp://host:port"}},
                                               and its role, {"kv_role": "kv_both"}
    POST   /kvferry/engines/ROLE/NAME/drain    sends no new requests to the engine; see its state
    DELETE /kvferry/engines/ROLE/NAME/drain    sends requests to the engine again
    DELETE /kvferry/engines/ROLE/NAME          forgets the engine; its current requests go on

``ROLE`` is ``prefill`` or ``decode``. An engine whose ``kv_role`` is ``kv_both`` may have both
roles. To change the role of such an engine, add it in the new role and forget it in the old role.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.config import shown
from kvferry.router.draining import Drain
from kvferry.router.engines import Engine
from kvferry.router.headers import Keys
from kvferry.router.lists import EnginePlace
from kvferry.router.members import Members
from kvferry.serving import web
from kvferry.serving.messages import Role
from kvferry.serving.openai import ApiError, parse_body

_ENGINE = "/kvferry/engines/{role}/{name:path}"  # a name may have a slash
PLACE_BYTES = 4096
"""Maximum number of bytes in a body that adds an engine."""


@dataclass(frozen=True, slots=True)
class Operators:
    """The endpoints about engines."""

    members: Members
    keys: Keys
    drain: Drain
    """The end of this router."""
    has_changed: Callable[[], Awaitable[None]]
    """Called and awaited after each change, before the answer."""

    def routes(self) -> list[Route]:
        """All routes about engines."""

        def route(path: str, change: Callable[[Request], Awaitable[Engine]], method: str) -> Route:
            async def endpoint(request: Request) -> Response:
                self.keys.check_operator(request)
                engine = await change(request)
                await self.has_changed()
                return web.json_response(told(engine))

            return Route(path, endpoint, methods=[method])

        return [
            Route("/health", self._health),
            Route("/kvferry/engines", self._list, methods=["GET"]),
            route(_ENGINE, self._put, "PUT"),
            route(f"{_ENGINE}/drain", self._drain, "POST"),
            route(f"{_ENGINE}/drain", self._resume, "DELETE"),
            route(_ENGINE, self._delete, "DELETE"),
        ]

    async def _health(self, _: Request) -> Response:
        prefill, decode = self.members.prefill, self.members.decode
        prefills, decodes = (bool(pool.fit() or pool.slow()) for pool in (prefill, decode))
        able = decodes and (prefills or prefill.dispensable)
        status = "unavailable" if not able else "ok" if prefills else "decode_only"
        if self.drain.begun.is_set():
            able, status = False, "draining"
        return web.json_response({"status": status, **self._engines()}, 200 if able else 503)

    async def _list(self, request: Request) -> Response:
        self.keys.check_reader(request)
        return web.json_response(self._engines())

    def _engines(self) -> dict[str, Any]:
        return {"engines": [told(engine) for engine in self.members]}

    async def _put(self, request: Request) -> Engine:
        role, name = _named(request)
        place = parse_body(EnginePlace, await web.BodyReader(PLACE_BYTES).json(request))
        try:
            address = place.address(role, name)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return self.members.add(address)

    async def _drain(self, request: Request) -> Engine:
        engine = self._known(request)
        await engine.health.leave()
        return engine

    async def _resume(self, request: Request) -> Engine:
        engine = self._known(request)
        await engine.health.resume()
        return engine

    async def _delete(self, request: Request) -> Engine:
        engine = self._known(request)
        self.members.remove(engine)
        return engine

    def _known(self, request: Request) -> Engine:
        role, name = _named(request)
        engine = self.members.find(role, name)
        if engine is None:
            known = self.members.pool(role).engines
            names = ", ".join(repr(engine.name) for engine in known) or "none"
            raise ApiError(404, f"{role} engine {shown(name)} is not known here; there are {names}")
        return engine


def _named(request: Request) -> tuple[Role, str]:
    """The role and the name in a request's path."""
    try:
        role: Role = msgspec.convert(request.path_params["role"], Role)
    except msgspec.ValidationError as error:
        raise ApiError(404, f"role: {error}") from error
    return role, request.path_params["name"]


def told(engine: Engine) -> dict[str, Any]:
    """The router's description of an engine, for JSON."""
    return {
        "name": engine.name,
        "role": engine.role,
        "kind": engine.told.kind,
        "url": engine.health.shown_url,
        "healthy": engine.status.healthy,
        "state": engine.state,
        "outstanding": engine.outstanding,
        "lent": engine.lent,
        "drain": engine.told.drain,
        "last_error": engine.status.last_error,
        "silent_peers": engine.told.silent_peers,
        "sglang": engine.told.sglang,
    }
