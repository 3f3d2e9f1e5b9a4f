"""Shared code of a cluster's HTTP servers: JSON, event streams, disconnects, and the server."""

import asyncio
import contextlib
import gc
import re
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.serving.openai import MESSAGES, RESPONSES, ApiError, try_again

if TYPE_CHECKING:
    import uvicorn


T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""Status in proxy logs for a client that left before its answer; no client receives this status."""


OWN_PATHS = ("/health", "/metrics", "/kvferry")
"""Beginnings of the paths of requests for the server itself, which are always answered."""


class ClientGoneError(Exception):
    """The client closed the connection before the end of its answer."""


BODY_TIMEOUT_S = 60.0
"""Seconds within which the body of a request must arrive."""
MAX_REQUEST_BYTES = 16 << 20
"""Default maximum length of a body in bytes."""


_REFUSAL = "kvferry.refusal"
"""Key in the scope of a request: the error that its body's reader raises at the end of the body."""


class BodyReader:
    """Reads request bodies of a server, with limits for each body and for all bodies together."""

    def __init__(self, most_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._most = most_bytes
        self.held = 0
        """Number of bytes in bodies that are still arriving."""

    async def json(self, request: Request) -> dict[str, Any]:
        """Reads the body, which must be a JSON object.

        Raises:
            ApiError: 400, the body is not a JSON object; other errors as in :meth:`read`.
        """
        return json_object(await self.read(request))

    async def read(self, request: Request) -> bytes:
        """Reads the body.

        Raises:
            ApiError: 408, too slow; 413, too long; 503, too many bytes of all requests, or too many
                requests that became complete before this one.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    self.held += len(chunk)
                    body += chunk
                    self._check(len(body))
            if (refusal := request.scope.get(_REFUSAL)) is not None:
                raise refusal
            return bytes(body)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise ApiError(408, message, code="timeout") from None
        finally:
            self.held -= len(body)

    def _check(self, nbytes: int) -> None:
        if nbytes > self._most:
            message = (
                f"the body is longer than --max-request-bytes (max_request_bytes, {self._most})"
            )
            raise ApiError(413, message, code="too_long")
        if self.held > _BODIES_AT_A_TIME * self._most:
            raise try_again("too many bytes of requests are arriving", "busy")


def json_object(content: bytes) -> dict[str, Any]:
    """Decodes a body, which must be a JSON object.

    Raises:
        ApiError: 400, the body is not a JSON object.
    """
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON object: {error}") from error


_BODIES_AT_A_TIME = 8
"""Number of bodies with the maximum length that may arrive at the same time."""


def bearer(token: str | None) -> dict[str, str]:
    """The headers with a token for :func:`check_bearer`; empty if there is no token."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def check_bearer(request: Request, token: str, whose: str) -> None:
    """Checks that the client sends the bearer token.

    Raises:
        ApiError: 401, the client sends another token or none.
    """
    shown = request.headers.get("authorization", "")
    if not secrets.compare_digest(shown.encode(), f"Bearer {token}".encode()):
        raise ApiError(401, f"authorization: not the bearer token of {whose}")


def put_on(response: Response, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Sets headers of a response; existing headers with the same names are removed."""
    added = list(headers)
    names = {name for name, _ in added}
    response.raw_headers = [each for each in response.raw_headers if each[0] not in names] + added


def json_response(payload: Any, status: int = 200) -> Response:
    """A response with ``payload`` as JSON."""
    return Response(msgspec.json.encode(payload), status, media_type="application/json")


def models_response(name: str, max_model_len: int | None) -> Response:
    """The answer to ``GET /v1/models`` where one model is served."""
    model = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "kvferry",
        "max_model_len": max_model_len,
    }
    return json_response({"object": "list", "data": [model]})


def told_of(error: Exception) -> ApiError:
    """The error that a client gets for an exception."""
    match error:
        case ApiError():
            return error
        case RecursionError():  # only the body of a request can nest so deeply
            return ApiError(400, "the body is nested too deeply")
        case _:
            return ApiError(500, f"internal error: {error!r}", code="internal_error")


async def answer_error(request: Request, error: Exception) -> Response:
    """The answer to a request that raised an exception; unknown exceptions get status 500."""
    if isinstance(error, ClientGoneError | ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    told = told_of(error)
    response = json_response(told.body(request.scope.get("path", "")), told.status)
    if told.content is not None:
        response = Response(told.content, told.status)
    put_on(response, told.headers)
    return response


_PATH_CHARACTERS = 200
"""Number of characters of a path that an error repeats."""


async def _answer_unrouted(request: Request, error: HTTPException) -> Response:
    """The answer to a request with an unknown path, or a method that its path does not have."""
    path = request.url.path[:_PATH_CHARACTERS]
    told = ApiError(error.status_code, f"{error.detail}: {request.method} {path}")
    told.headers = [
        (name.encode(), value.encode()) for name, value in (error.headers or {}).items()
    ]
    return await answer_error(request, told)


EXCEPTION_HANDLERS: dict[Any, Callable[[Request, Any], Any]] = dict.fromkeys(
    (Exception, ApiError, RecursionError, ClientDisconnect, ClientGoneError), answer_error
) | {HTTPException: _answer_unrouted}
"""Argument for ``Starlette(exception_handlers=...)``."""


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with an error, and ends the connection. The body is read and dropped first:
    a client that still sends its body might not see the answer.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while (await receive()).get("more_body"):
                pass
    response = await answer_error(Request(scope), error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


@contextlib.contextmanager
def told_why() -> Iterator[None]:
    """In a task that was cancelled with an :class:`ApiError`, raises this error in place of the
    cancellation.
    """
    try:
        yield
    except asyncio.CancelledError as cancelled:
        error, task = next(iter(cancelled.args), None), asyncio.current_task()
        if task is None or not isinstance(error, ApiError):
            raise
        task.uncancel()
        raise error from None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work``, and cancels it if the client disconnects. The body must have been read before.

    A client that has disconnected when the result is ready counts as gone: it cannot read the
    result.

    Raises:
        ApiError: the caller's task was cancelled with this error.
        ClientGoneError: the client disconnected before the result.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        with told_why():
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not watcher.done():
            return task.result()
        raise ClientGoneError
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            # The clean-up of the task (an abort, a closed connection) is part of the request.
            await asyncio.gather(task, return_exceptions=True)
        elif not task.cancelled():
            task.exception()  # marks the exception as retrieved, in case result() is not called


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(slots=True)
class Patience:
    """The time limits of one answer: of the whole, or of a stream until its first content; then of
    each silence between two events of the stream.
    """

    begin_s: float
    """Seconds until the first event with content, or until the end of another answer."""
    idle_s: float
    """Seconds between two events of a stream with content."""
    when: float = 0.0
    """Time at which the current wait ends, on the clock of the event loop."""
    has_begun: bool = False
    """Whether a stream has had an event with content."""

    def __post_init__(self) -> None:
        self.when = asyncio.get_running_loop().time() + self.begin_s

    def heard(self) -> float:
        """Notes an event of a stream with content; returns the end of the wait for the next one."""
        self.has_begun = True
        self.when = asyncio.get_running_loop().time() + self.idle_s
        return self.when

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[asyncio.Timeout, None]:
        """Ends its body when the current wait is over.

        Raises:
            ApiError: 504, the body was not complete in time.
        """
        try:
            async with asyncio.timeout_at(self.when) as timeout:
                yield timeout
        except TimeoutError:
            message = (
                f"no event for {self.idle_s:g} s: --idle-timeout (idle_timeout_s) limits the "
                "silence between two events of a stream"
                if self.has_begun
                else f"no answer within {self.begin_s:g} s: --timeout (request_timeout_s) limits a "
                "stream until its first event with content, and any other answer as a whole"
            )
            raise ApiError(504, message, code="timeout") from None


class EventStream(Response):
    """Streams events until their end or until the client disconnects; then closes the generator.

    An :class:`ApiError` after the first byte becomes the last event, in the form of the stream's
    API.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        on_end: Callable[[], None] = lambda: None,
        failed: Callable[[ApiError], None] = lambda _: None,
    ) -> None:
        """Makes the response.

        Args:
            events: yields the bytes of events.
            headers: further headers.
            on_end: is called at the end of the stream, even if it was never started.
            failed: is called before, if the stream ends with an error.
        """
        super().__init__(headers={"cache-control": "no-cache", **(headers or {})})
        # The base class sets the length of its empty body.
        del self.headers["content-length"]
        self._events = events
        # Not a part of the generator: a generator that was never started runs no clean-up.
        self._on_end, self._failed = on_end, failed
        self._has_begun = False
        """Whether the head was sent."""
        self._last = bytearray()
        """The last bytes of the events that were sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs as an ASGI application."""
        end = b""
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGoneError:
            return
        except ApiError as error:
            self._failed(error)
            if not self._has_begun:
                await self._send_head(send)
            end = _error_event(error, scope.get("path", ""), self._last)
        finally:
            self._on_end()
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_head(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        self._has_begun = True

    async def _send_all(self, send: Send) -> None:
        await self._send_head(send)
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._last += event
                if len(self._last) > 2 * _LEAST_LAST:  # cut seldom: each cut copies
                    del self._last[:-_LEAST_LAST]


_LEAST_LAST = 16 << 10
"""Number of last bytes of a stream that are kept at least. A stream that fails may end with no
bytes of an event, or with a part of an event."""
_SEQUENCE = re.compile(rb'"sequence_number":\s*(\d+)')
"""Pattern of an event's number in a stream of a response."""


def _error_event(error: ApiError, path: str, last: bytearray) -> bytes:
    """The end of a stream that fails after ``last``, in the form of the API of ``path``."""
    # Bytes that pass through may end in the middle of an event.
    begin = b"" if last.endswith((b"\n\n", b"\r\n\r\n")) or not last else b"\n\n"
    if path.startswith(MESSAGES):
        return begin + b"event: error\n" + sse_event(error.body(path))
    if path.startswith(RESPONSES):
        told = {**error.body()["error"], "type": "error"}
        number = _SEQUENCE.findall(last)
        told["sequence_number"] = int(number[-1]) + 1 if number else 0
        return begin + b"event: error\n" + sse_event(told)
    return begin + sse_event(error.body()) + SSE_DONE


SSE_DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def sse_event(payload: object) -> bytes:
    """An event with a JSON payload."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def sse_payloads(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The payloads in the lines of an event stream, in order, including ``[DONE]``."""
    async for line in lines:
        if line.startswith(b"data:"):
            yield line[5:].strip()


SHUTDOWN_GRACE_S = 3
"""Seconds for open requests to end at shutdown."""


MAX_CONNECTIONS = 1000
"""Default maximum number of connections of a server that have a request."""


async def serve(
    app: Any,
    listener: socket.socket,
    until: "asyncio.Event | None" = None,
    max_connections: int = MAX_CONNECTIONS,
    *,
    takes_at_a_time: int | None = None,
    ends_on_sigterm: bool = True,
    refused: Callable[[ApiError], None] = lambda _: None,
) -> None:
    """Serves the ASGI application ``app`` until SIGTERM, or until the event ``until`` is set.

    All objects that exist at the call are excluded from later garbage collections.

    Args:
        app: the application.
        listener: the listening socket, which several processes may share.
        until: event that ends the server.
        max_connections: maximum number of connections that have a request.
        takes_at_a_time: for a shared listener, number of connections that this process accepts
            before other processes can accept; by default, the size of the backlog.
        ends_on_sigterm: whether SIGTERM ends the server.
        refused: is told of each request that the application does not get to see.
    """
    import uvicorn

    from kvferry.serving.connections import Connections

    def busy() -> ApiError:
        message = (
            f"{connections.most} requests are being answered, as many as --max-connections "
            "(max_connections) and the limit of open files allow; send the request again"
        )
        return try_again(message, "busy")

    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(OWN_PATHS):  # a server that has much to do is well
            await app(scope, receive, send)
            return
        error = busy()
        refused(error)
        await refuse(error, scope, receive, send)

    def too_late(scope: Scope) -> None:
        if not scope["path"].startswith(OWN_PATHS):
            scope[_REFUSAL] = busy()

    connections = Connections(max_connections, refusing, too_late)
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
    # uvicorn would handle the signals itself and raise them again after its end.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    if ends_on_sigterm:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _stop, server)
    watcher = asyncio.create_task(_stop_when(server, until)) if until is not None else None
    # A collection of all imported objects would delay every request by 30 ms, again and again.
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
