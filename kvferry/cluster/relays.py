"""The endpoints of a router that servers answer themselves; see :mod:`kvferry.cluster.paths`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.cluster import web
from kvferry.cluster.headers import Head
from kvferry.cluster.openai import ApiError
from kvferry.cluster.pass_through import PassThrough
from kvferry.cluster.paths import FORMS, PATHS, Way, without_transfer
from kvferry.control.tracing import RequestSpan, checked_traceparent

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Relays:
    """Hands requests to servers as they are, and their answers back."""

    passing: PassThrough
    bodies: web.BodyReader
    head: Callable[[Request], Head]
    authorize: Callable[[Request], None]
    """Raises an ``ApiError`` for who may not ask."""
    authorize_operator: Callable[[Request], None]
    """Likewise, for who may not change servers."""

    def routes(self, counted: Callable[[Endpoint], Endpoint]) -> list[Route]:
        """All of them; ``counted`` wraps each endpoint."""
        answers = {
            Way.DECODE: counted(self._relay),
            Way.ONE: counted(self._relay),
            Way.ALL: counted(self._relay_to_all),
            Way.NOBODY: counted(self._refuse),
        }
        routes = [
            Route(path, answer, methods=[method])
            for way, answer in answers.items()
            for method, _, path in (each.partition(" ") for each in PATHS[way])
        ]
        asked = {each.partition(" ")[2] for each in PATHS[Way.BOTH]} | {one.path for one in routes}
        preflight = counted(self._preflight)
        return routes + [Route(path, preflight, methods=["OPTIONS"]) for path in sorted(asked)]

    async def ask_one(self, request: Request, body: bytes = b"") -> Response:
        """A decode server's answer."""
        head = self.head(request)
        span = _unshown_span(request, head)
        return await self.passing.answer(request, _path(request), body, span, head)

    async def _relay(self, request: Request) -> Response:
        self.authorize(request)
        return await self.ask_one(request, await self._words(request))

    async def _preflight(self, request: Request) -> Response:
        """A browser shows no key with the question whether it may ask."""
        return await self.ask_one(request)

    async def _relay_to_all(self, request: Request) -> Response:
        self.authorize_operator(request)
        body, head = await self._words(request), self.head(request)
        span = _unshown_span(request, head)
        return await self.passing.to_all(request.method, _path(request), body, span, head)

    async def _refuse(self, request: Request) -> Response:
        message = f"{request.method} {_path(request)} is for one server: ask that server itself"
        raise ApiError(403, message)

    async def _words(self, request: Request) -> bytes:
        """The client's own words, without its transfer parameters."""
        body = await self.bodies.read(request)
        if not body or _path(request) in FORMS:
            return body
        words = web.json_object(body)
        kept = without_transfer(words)
        return body if kept == words else msgspec.json.encode(kept)


def _path(request: Request) -> str:
    """The path that was routed.

    Raises:
        ApiError: 404, a server would take it for another path.
    """
    path: str = request.scope["path"]
    if {".", ".."} & set(path.split("/")):
        raise ApiError(404, f"{path}: no path here has '.' or '..'")
    return path


def _unshown_span(request: Request, head: Head) -> RequestSpan:
    """Of a request that neither the router's page nor a collector is told of."""
    parent = checked_traceparent(request.headers.get("traceparent"))
    return RequestSpan(None, _path(request), parent, request_id=head.new_id("kvferry"))
