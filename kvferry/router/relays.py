"""The endpoints of a router that servers answer themselves; see :mod:`kvferry.router.paths`."""

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.observe.spans import RequestSpan, checked_traceparent
from kvferry.router.headers import Head, Keys
from kvferry.router.metrics import RouterMetrics
from kvferry.router.pass_through import PassThrough
from kvferry.router.paths import FORMS, PATHS, Answerer, without_transfer
from kvferry.serving import web
from kvferry.serving.openai import ApiError


@dataclass(frozen=True, slots=True)
class Relays:
    """Sends requests to servers unchanged, and returns the servers' answers."""

    passing: PassThrough
    bodies: web.BodyReader
    keys: Keys
    metrics: RouterMetrics

    def routes(self) -> list[Route]:
        """All relayed routes."""
        counted = self.metrics.counted
        answers = {
            Answerer.DECODE: counted(self._relay),
            Answerer.ONE: counted(self._relay),
            Answerer.ALL: counted(self._relay_to_all),
            Answerer.NOBODY: counted(self._refuse),
        }
        routes = [
            Route(path, answer, methods=[method])
            for way, answer in answers.items()
            for method, _, path in (each.partition(" ") for each in PATHS[way])
        ]
        asked = {each.partition(" ")[2] for each in PATHS[Answerer.BOTH]} | {
            one.path for one in routes
        }
        preflight = counted(self._preflight)
        return routes + [Route(path, preflight, methods=["OPTIONS"]) for path in sorted(asked)]

    async def ask_one(self, request: Request, body: bytes = b"") -> Response:
        """Answers a request with a decode server's answer."""
        head = self.keys.head(request)
        span = _unshown_span(request, head)
        return await self.passing.answer(request, _path(request), body, span, head)

    async def _relay(self, request: Request) -> Response:
        self.keys.check(request)
        return await self.ask_one(request, await self._words(request))

    async def _preflight(self, request: Request) -> Response:
        """Relays a browser's preflight question, which shows no key."""
        return await self.ask_one(request)

    async def _relay_to_all(self, request: Request) -> Response:
        self.keys.check_operator(request)
        body, head = await self._words(request), self.keys.head(request)
        span = _unshown_span(request, head)
        return await self.passing.to_all(request.method, _path(request), body, span, head)

    async def _refuse(self, request: Request) -> Response:
        message = f"{request.method} {_path(request)} is for one server: ask that server itself"
        raise ApiError(403, message)

    async def _words(self, request: Request) -> bytes:
        """The client's own body, without transfer parameters."""
        body = await self.bodies.read(request)
        if not body or _path(request) in FORMS:
            return body
        words = web.json_object(body)
        kept = without_transfer(words)
        return body if kept == words else msgspec.json.encode(kept)


def _path(request: Request) -> str:
    """The routed path.

    Raises:
        ApiError: 404, a server would take this path for another path.
    """
    path: str = request.scope["path"]
    if {".", ".."} & set(path.split("/")):
        raise ApiError(404, f"{path}: no path here has '.' or '..'")
    return path


def _unshown_span(request: Request, head: Head) -> RequestSpan:
    """The span of a request hidden from the router's page and from the collector."""
    parent = checked_traceparent(request.headers.get("traceparent"))
    return RequestSpan(None, _path(request), parent, request_id=head.new_id("kvferry"))
