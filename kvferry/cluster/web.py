"""What both HTTP servers of a cluster share: JSON, event streams, disconnects, and the server."""

import asyncio
import contextlib
import gc
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.cluster.headers import put_on
from kvferry.cluster.openai import ApiError

if TYPE_CHECKING:
    import uvicorn


T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status that proxies log for a client that went away; nobody receives it."""


class ClientGoneError(Exception):
    """The client closed the connection before it had its answer."""


BODY_TIMEOUT_S = 60.0
"""Seconds in which the body of a request must arrive."""
MAX_REQUEST_BYTES = 16 << 20
"""Longest body, unless told otherwise."""


class BodyReader:
    """Reads the bodies of a server's requests: each within bounds, and so all together."""

    def __init__(self, most_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._most = most_bytes
        self._held = 0
        """Bytes of bodies that are arriving."""

    async def json(self, request: Request) -> dict[str, Any]:
        """The body, a JSON object.

        Raises:
            ApiError: 400, none; and see :meth:`read`.
        """
        return json_object(await self.read(request))

    async def read(self, request: Request) -> bytes:
        """The body.

        Raises:
            ApiError: 408, too slow; 413, too long; 503, too much at a time.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    self._held += len(chunk)
                    body += chunk
                    self._check(len(body))
            return bytes(body)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise ApiError(408, message, code="timeout") from None
        finally:
            self._held -= len(body)

    def _check(self, nbytes: int) -> None:
        if nbytes > self._most:
            message = f"the body is longer than max_request_bytes, {self._most}"
            raise ApiError(413, message, code="too_long")
        if self._held > _BODIES_AT_A_TIME * self._most:
            raise ApiError(503, "too many bytes of requests are arriving", code="busy")


def json_object(content: bytes) -> dict[str, Any]:
    """A body that is a JSON object.

    Raises:
        ApiError: 400, it is none.
    """
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON object: {error}") from error


_BODIES_AT_A_TIME = 8
"""Bodies of the greatest length for which there is memory while they arrive."""


def bearer(token: str | None) -> dict[str, str]:
    """The headers that show a token, which :func:`check_bearer` looks at; none without one."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def check_bearer(request: Request, token: str, whose: str) -> None:
    """Makes sure that the client shows a token.

    Raises:
        ApiError: 401, it shows another one or none.
    """
    shown = request.headers.get("authorization", "")
    if not secrets.compare_digest(shown.encode(), f"Bearer {token}".encode()):
        raise ApiError(401, f"authorization: not the bearer token of {whose}")


def json_response(
    payload: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """``payload`` as JSON."""
    return Response(
        msgspec.json.encode(payload), status, headers=headers, media_type="application/json"
    )


async def answer_error(_: Request, error: Exception) -> Response:
    """The answer to a request that was broken off; the server logs what is a bug."""
    match error:
        case ClientGoneError() | ClientDisconnect():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        case ApiError():
            told = error
        case RecursionError():  # only a request's body nests so deeply
            told = ApiError(400, "the body is nested too deeply")
        case _:
            told = ApiError(500, f"internal error: {error!r}", code="internal_error")
    response = json_response(told.body(), told.status)
    if told.content is not None:
        response = Response(told.content, told.status)
    put_on(response, told.headers)
    return response


EXCEPTION_HANDLERS: dict[Any, Callable[[Request, Exception], Any]] = dict.fromkeys(
    (Exception, ApiError, RecursionError, ClientDisconnect, ClientGoneError), answer_error
)
"""For ``Starlette(exception_handlers=...)``."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work``, and cancels it when the client goes away. The body must have been read.

    A client that has gone by the time at which the result is there is gone: nobody would read it.

    Raises:
        ClientGoneError: the client went first.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not watcher.done():
            return task.result()
        raise ClientGoneError
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            # Its clean-up (an abort, a closed connection) is part of the request.
            await asyncio.gather(task, return_exceptions=True)
        elif not task.cancelled():
            task.exception()  # has been looked at, should nobody have asked for the result


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def deadline(when: float, timeout_s: float) -> AsyncGenerator[None, None]:
    """Ends what runs inside it at a time of the event loop's clock.

    Raises:
        ApiError: 504; ``timeout_s``, the whole of the time, is in the message.
    """
    try:
        async with asyncio.timeout_at(when):
            yield
    except TimeoutError:
        message = f"no complete answer within {timeout_s:g} s"
        raise ApiError(504, message, code="timeout") from None


class EventStream(Response):
    """Streams events until they end or the client goes away; closes the generator either way.

    An :class:`ApiError` that comes after the first byte becomes an error event, then ``[DONE]``.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **(headers or {})})
        # The base class announces the length of its empty body.
        del self.headers["content-length"]
        self._events = events
        # Not left to the generator: one that was never started has no clean-up either.
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                body = sse_event(error.body()) + SSE_DONE
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


SSE_DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def sse_event(payload: object) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def sse_payloads(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The payloads of a stream's lines, in order, ``[DONE]`` included."""
    async for line in lines:
        if line.startswith(b"data:"):
            yield line[5:].strip()


SHUTDOWN_GRACE_S = 3
"""Seconds that open requests have at the end."""


MAX_CONNECTIONS = 1000
"""Connections of a server at a time, unless told otherwise."""


async def serve(
    app: Any,
    listener: socket.socket,
    until: "asyncio.Event | None" = None,
    max_connections: int = MAX_CONNECTIONS,
    *,
    takes_at_a_time: int | None = None,
    ends_on_sigterm: bool = True,
) -> None:
    """Serves the ASGI application ``app`` until SIGTERM, or until the event is set.

    Where several processes serve one listener, ``takes_at_a_time`` are the connections that this
    one takes before others may; their number when the backlog is full unless given. What the
    process has by now, it is taken to keep: garbage is not looked for among it any more.
    """
    import uvicorn

    from kvferry.cluster.connections import Connections

    connections = Connections(max_connections)
    config = uvicorn.Config(
        app,
        http=connections,  # type: ignore[arg-type] # it is called like the class
        log_level="warning",
        access_log=False,
        ws="none",
        backlog=takes_at_a_time or connections.backlog,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    server = uvicorn.Server(config)
    # uvicorn would take the signals for itself and raise them again when it has ended.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    if ends_on_sigterm:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _stop, server)
    watcher = asyncio.create_task(_stop_when(server, until)) if until is not None else None
    # To look through all that was imported would hold every request up for 30 ms, time and again.
    gc.collect()
    gc.freeze()
    await server.serve(sockets=[listener])
    if watcher is not None:
        watcher.cancel()


def _stop(server: "uvicorn.Server") -> None:
    server.should_exit = True


async def _stop_when(server: "uvicorn.Server", event: asyncio.Event) -> None:
    await event.wait()
    _stop(server)
