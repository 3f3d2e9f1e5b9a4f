"""The HTTP endpoints of an engine for its operator and for a trainer.

    POST   /kvferry/drain     refuse new requests; the answer has the remaining work
    DELETE /kvferry/drain     take new requests again
    POST   /pause?mode=wait   let new requests wait; the answer comes when no work is left
    POST   /resume            let the requests go on that wait
    POST   /kvferry/weights   compute with other weights; the engine must be paused

``/pause`` and ``/resume`` are vLLM's, so that a trainer treats both kinds of servers alike.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry.config import shown
from kvferry.engine.loop import EngineLoop
from kvferry.engine.weights import prepare_model
from kvferry.errors import EngineError, HostError, KVFerryError, ModelError, WorkerDiedError
from kvferry.serving import web
from kvferry.serving.openai import ApiError, parse_body

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


def unavailable(error: KVFerryError) -> ApiError:
    """The answer of an engine that cannot serve: 503, with the name of the error."""
    return ApiError(503, str(error), code=type(error).__name__)


async def answered(ask: Callable[[], Future[T]]) -> T:
    """Waits for an answer of the engine's thread, which answers between two steps.

    Raises:
        ApiError: 503, the engine has ended.
    """
    try:
        future = ask()
    except KVFerryError as error:
        raise unavailable(error) from error
    return await asyncio.wrap_future(future)


class WeightsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``/kvferry/weights``."""

    source: str
    """The model, as ``source`` of a cluster file; the shape must be that of the engine's model."""


class EngineOperations:
    """The endpoints, without checks of keys."""

    def __init__(self, engine: EngineLoop, bodies: web.BodyReader) -> None:
        self._engine = engine
        self._bodies = bodies

    def routes(self) -> Iterator[tuple[str, str, Endpoint]]:
        """Path, method and endpoint of each route."""
        yield "/kvferry/drain", "POST", self._drain
        yield "/kvferry/drain", "DELETE", self._resume
        yield "/pause", "POST", self._pause
        yield "/resume", "POST", self._resume
        yield "/kvferry/weights", "POST", self._load_weights

    async def _drain(self, _: Request) -> Response:
        """Stops the acceptance of new requests; ``/health`` reports the remaining work."""
        return web.json_response(await answered(self._engine.drain))

    async def _pause(self, request: Request) -> Response:
        """Lets new requests wait, and answers when no work is left."""
        mode = request.query_params.get("mode", "abort")  # vLLM's default
        if mode != "wait":
            raise ApiError(400, f"mode: this engine cannot {shown(mode)}; give mode=wait")
        await self._bodies.read(request)
        waiting = answered(self._engine.pause)
        return web.json_response(await web.until_disconnect(request.receive, waiting))

    async def _resume(self, _: Request) -> Response:
        """Ends a drain and a pause."""
        await answered(self._engine.resume)
        return web.json_response({})

    async def _load_weights(self, request: Request) -> Response:
        """Changes the weights of an engine without work."""
        body = parse_body(WeightsBody, await self._bodies.json(request))
        try:
            folder: Path = await asyncio.to_thread(prepare_model, body.source)
            digest = await answered(
                lambda: self._engine.call(lambda engine: engine.load_weights(folder))
            )
        except ModelError as error:
            raise ApiError(400, str(error), code=type(error).__name__) from error
        except (WorkerDiedError, HostError) as error:
            raise unavailable(error) from error
        except EngineError as error:
            raise ApiError(409, str(error), code=type(error).__name__) from error
        return web.json_response({"weights": digest})
