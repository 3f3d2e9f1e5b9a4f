"""The router's HTTP client for its engines.

The client is aiohttp's, because a request takes about a ninth of httpx's time, and the router sends
two requests for each client's request (:mod:`benchmarks.router_cost`).

Connections are kept for later requests. A server may close an idle connection at the very moment at
which a request is on its way. The server has not seen the request and is healthy, but to the router
it looks like a dead server. Three rules follow:

- A connection is kept for less time than servers keep it, and checked right before use: a
  connection known to be closed by the server carries no request.
- If a request fails on a kept connection before its answer began, the client sends the request once
  more, over a new connection to the same server. The server is at fault only if the second attempt
  fails too.
- A request that must not arrive twice is not sent again. :class:`KeptConnectionError` says that the
  request may have arrived and that the server may be healthy; the caller must find out.
"""

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvferry.control.client import ControlClient, asking_client
from kvferry.control.options import CurveKeys
from kvferry.router.headers import Head, end_to_end
from kvferry.serving.messages import Tls, without_credentials
from kvferry.zeromq import KEEPALIVE

CONNECT_TIMEOUT_S = 5.0
"""Maximum number of seconds for an engine to accept a connection, and to answer a health check."""
MOST_ANSWER_BYTES = 4 << 20
"""Maximum number of bytes in an answer to a health check or another question of the router
itself."""
KEPT_S = 2.0
"""Seconds for which an idle connection is kept; servers with uvicorn, such as vLLM's, close an idle
connection after 5 s."""

AGAIN = "-again"
"""End of the id of a request that is sent a second time."""
NO_HEAD = Head()
"""Head of the router's own requests."""
ClientError = aiohttp.ClientError
"""Error of every method if an engine does not answer as it should."""
SilentError = aiohttp.SocketTimeoutError
"""The engine accepts connections, but does not answer in time."""
UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)
"""Errors which prove that a request was never sent."""


class KeptConnectionError(Exception):
    """A kept connection broke under a request before the answer began.

    The server may be healthy and may have closed the connection as idle just then. Or the server
    may have died, possibly because of this request.
    """


class HttpAnswer(NamedTuple):
    """A whole answer."""

    status: int
    content: bytes


class Response:
    """An answer whose head was read. The owner must close the answer."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status: int = response.status
        self.content_type = response.headers.get("content-type", "")
        self.headers = end_to_end(response.raw_headers)
        """Headers of the answer for the client."""
        self._ended: asyncio.Future[None] | None = None
        """End of the answer's connection; ``None`` if the whole answer has arrived."""
        connection = response.connection
        if connection is not None and connection.protocol is not None:
            self._ended = connection.protocol.closed
            if self._ended is not None:
                self._ended.add_done_callback(self._end)

    async def read(self) -> bytes:
        """Reads the rest of the answer.

        Raises:
            ClientError: the answer broke off.
        """
        return await self._response.read()

    async def at_most(self, most_bytes: int) -> bytes:
        """Reads the rest of the answer, up to ``most_bytes`` bytes.

        Raises:
            ClientError: the answer broke off.
            ValueError: the answer has more bytes.
        """
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > most_bytes:
                raise ValueError(f"its answer has more than {most_bytes} bytes")
        return bytes(body)

    async def some(self) -> bytes:
        """Waits for the next byte and returns all bytes received so far; empty at the answer's end.

        Raises:
            ClientError: the answer broke off.
        """
        return await self._response.content.readany()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the rest of the answer as it comes.

        Raises:
            ClientError: the answer broke off.
        """
        async for chunk in self._response.content.iter_any():
            yield chunk

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields the rest of the answer by lines of any length.

        Raises:
            ClientError: the answer broke off.
        """
        begun = b""
        async for chunk in self.chunks():
            *lines, begun = (begun + chunk).split(b"\n")
            for line in lines:
                yield line
        if begun:
            yield begun

    def close(self) -> None:
        """Drops the connection, unless the whole answer was read; the engine then ends the
        request.
        """
        if self._ended is not None:
            self._ended.remove_done_callback(self._end)
        self._response.close()

    def _end(self, _: object) -> None:
        """Handles the end of the connection.

        If the bytes are no longer HTTP, aiohttp drops the connection without an error for the
        reader; this method sets the error.
        """
        content = self._response.content
        if not content.is_eof() and content.exception() is None:
            broken = "the connection ended in the middle of its answer, which ceased to be HTTP"
            content.set_exception(aiohttp.ClientPayloadError(broken))


class EngineClient:
    """The router's client for all engines."""

    def __init__(
        self,
        headers: Mapping[str, str],
        curve: CurveKeys | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Connects with the first request. ``headers`` go with every request, but ``authorization``
        is left out if the URL has its own credentials. ``curve`` are the keys of the engines'
        control channels; ``None`` for channels without keys. ``tls`` holds for URLs with ``https``.
        """
        self._headers = headers
        self._curve = curve
        self._tls = tls or Tls()

    # A session belongs to the event loop in which it is made.

    @cached_property
    def kept(self) -> aiohttp.ClientSession:
        """The session whose connections are kept for later requests."""
        return self._session(keepalive_timeout=KEPT_S)

    @cached_property
    def new(self) -> aiohttp.ClientSession:
        """The session that opens a connection for each request."""
        return self._session(force_close=True)

    @cached_property
    def control(self) -> ControlClient:
        """The client for the engines' control channels."""
        return asking_client("router", CONNECT_TIMEOUT_S, self._curve)

    async def ask(self, method: str, url: str) -> HttpAnswer:
        """Sends a question of the router itself and returns the whole answer.

        The first byte must come within :data:`CONNECT_TIMEOUT_S` after the connection, the whole
        answer within twice this time. The answer may have at most :data:`MOST_ANSWER_BYTES`.
        """
        try:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                response = await self._send(method, url, {}, None, _patience(CONNECT_TIMEOUT_S))
                try:
                    return HttpAnswer(response.status, await response.at_most(MOST_ANSWER_BYTES))
                except ValueError as error:
                    raise aiohttp.ClientPayloadError(str(error)) from error
                finally:
                    response.close()
        except TimeoutError as error:
            if isinstance(error, ClientError):  # the error names the missing event
                raise
            raise SilentError(f"no whole answer in {2 * CONNECT_TIMEOUT_S:g} s") from error

    async def fetch(self, url: str, *, most_bytes: int, timeout_s: float) -> bytes:
        """The body of a whole answer with status 200.

        Raises:
            ValueError: the answer has another status, or more bytes.
            TimeoutError: the answer does not arrive in time.
        """
        async with asyncio.timeout(timeout_s):
            response = await self._send("GET", url, {}, None, _patience())
            try:
                if response.status != 200:
                    raise ValueError(f"it answers {response.status}")
                return await response.at_most(most_bytes)
            finally:
                response.close()

    async def send(
        self,
        url: str,
        body: Mapping[str, Any] | bytes,
        request_id: str,
        *,
        once: bool,
        new_connection: bool = False,
        traceparent: str = "",
        method: str = "POST",
        head: Head = NO_HEAD,
    ) -> Response:
        """Sends a request and reads only the head of the answer; the caller must close the answer.

        Args:
            url: address; its path is encoded.
            body: sent as JSON, or unchanged as the client's bytes.
            request_id: value of the header ``x-request-id``; a second attempt has its own id.
            once: whether the server must not see the request twice.
            new_connection: whether the request uses a new connection.
            traceparent: value of the header ``traceparent``, if not empty.
            method: HTTP method.
            head: further headers, and the query.

        Raises:
            KeptConnectionError: the request may have arrived once, and is not sent again.
        """
        headers = {**head.headers, "x-request-id": request_id, "accept-encoding": "identity"}
        content = body
        if not isinstance(content, bytes):
            content = msgspec.json.encode(content)
            headers["content-type"] = "application/json"
        if traceparent:
            headers["traceparent"] = traceparent
        if head.query:
            url += f"?{head.query}"
        if new_connection:
            return await self._request(self.new, method, url, headers, content, _patience())
        return await self._send(method, url, headers, content, _patience(), once=once)

    async def aclose(self) -> None:
        """Closes all connections."""
        for name in ("kept", "new"):
            if name in self.__dict__:
                await self.__dict__[name].close()
        if "control" in self.__dict__:
            await asyncio.to_thread(self.control.close)

    async def _send(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        content: bytes | None,
        timeout: aiohttp.ClientTimeout,
        *,
        once: bool = False,
    ) -> Response:
        """Sends a request over a kept connection, if there is one."""
        sending = _Sending()
        try:
            return await self._request(self.kept, method, url, headers, content, timeout, sending)
        except (aiohttp.ClientConnectionError, aiohttp.ClientResponseError) as error:
            if sending.connects or isinstance(error, (SilentError, *UNSENT)):
                raise
            first = error
        if once and sending.begun:
            raise KeptConnectionError(str(first) or type(first).__name__) from first
        # A new id: if the first request arrived, its server may still know its id.
        if "x-request-id" in headers:
            headers = {**headers, "x-request-id": headers["x-request-id"] + AGAIN}
        try:
            return await self._request(self.new, method, url, headers, content, timeout)
        except UNSENT:
            raise first from None  # not sent, but the server may have died of the first

    async def _request(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes | None,
        timeout: aiohttp.ClientTimeout,
        sending: "_Sending | None" = None,
    ) -> Response:
        _sending.set(sending or _Sending())
        headers = {**headers, **self._headers}
        if "@" in urlsplit(url).netloc:  # the URL has its own credentials
            headers.pop("authorization", None)
        try:
            response = await session.request(
                method,
                url,
                headers=headers,
                data=content or None,
                timeout=timeout,
                allow_redirects=False,
                server_hostname=self._tls.server_name or None,
            )
        except ValueError as error:  # for example, no resolver takes the host name
            shown = without_credentials(url)
            raise aiohttp.InvalidURL(shown, str(error).replace(url, shown)) from error
        return Response(response)

    def _session(self, **connections: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                use_dns_cache=False,
                socket_factory=_socket,
                ssl=self._tls.context(),
                **connections,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            request_class=_Request,
        )


@dataclass(slots=True)
class _Sending:
    """Progress of a request."""

    connects: bool = False
    """Whether the request uses a new connection."""
    begun: bool = False
    """Whether the server may have seen a part of the request."""


_sending: ContextVar[_Sending] = ContextVar("sending")
"""The request of the current task; tasks that open a connection for the request see it too."""


class _Request(aiohttp.ClientRequest):
    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        """Sends the request.

        Raises:
            ServerDisconnectedError: the server has closed the idle connection, or has sent
                unexpected bytes.
        """
        sending = _sending.get()
        if not sending.connects:
            # The event loop may not have seen the end of the connection yet.
            look = select.poll()
            look.register(conn.transport.get_extra_info("socket"), select.POLLIN)
            if look.poll(0):
                raise aiohttp.ServerDisconnectedError("the server closed it while it was idle")
        sending.begun = True
        return await super().send(conn)


def _patience(sock_read: float | None = None) -> aiohttp.ClientTimeout:
    """Timeouts for a connection, including the look-up of the name; and, if given, for each next
    byte.
    """
    return aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=sock_read)


def _socket(address: Any) -> socket.socket:
    """A socket for an address from ``getaddrinfo``.

    A dead host sends nothing. Without TCP keepalive, the router would wait for the rest of an
    answer until the request's time is up.
    """
    _sending.get().connects = True
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    for option in KEEPALIVE:
        made.setsockopt(*option)
    return made
