"""The router's HTTP client of its engines.

It is aiohttp's, as that takes about a ninth of the time of httpx per request, of which the router
sends two for each of its own (:mod:`benchmarks.router_cost`).

Connections are kept for later requests. A server may close a connection that was idle for too long
at the very moment at which a request is on its way. It has not seen the request and is well; from
here it looks like a server that died. So

- a connection is kept for less time than servers keep it, and looked at right before it is used:
  one that the server is known to have closed carries no request,
- a request that fails on a kept connection before its answer began is sent once more, over a new
  connection to the same server, and only if that fails too the server is to blame,
- a request that must not come twice is not sent again. :class:`KeptConnectionError` says that
  nobody knows whether it came, and whether the server is well; whoever sent it finds out.
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

from kvferry.cluster.headers import Head, end_to_end
from kvferry.cluster.messages import without_credentials
from kvferry.zeromq import KEEPALIVE

CONNECT_TIMEOUT_S = 5.0
"""Seconds for an engine to accept a connection, and to answer a health check."""
MOST_ANSWER_BYTES = 4 << 20
"""Bytes of an answer to a health check, and to what else is asked beside requests."""
KEPT_S = 2.0
"""Seconds for which an idle connection is kept; uvicorn's servers, vLLM's too, close it after 5."""

NO_HEAD = Head()
"""Of what the router asks by itself."""
ClientError = aiohttp.ClientError
"""What every method raises where an engine does not answer as it should."""
SilentError = aiohttp.SocketTimeoutError
"""It takes connections, and answers nothing in time."""
UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)
"""Errors that prove that a request was never sent."""


class KeptConnectionError(Exception):
    """A kept connection broke under a request before its answer began: the server may have closed
    it as idle just then, and be well, or it may have died, of that request too.
    """


class Answer(NamedTuple):
    """A whole one."""

    status: int
    content: bytes


class Response:
    """An answer of which the head was read. Whoever has it closes it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status: int = response.status
        self.content_type = response.headers.get("content-type", "")
        self.headers = end_to_end(response.raw_headers)
        """What of its head is for the client."""
        self._ended: asyncio.Future[None] | None = None
        """The end of its connection, unless all of it is here."""
        connection = response.connection
        if connection is not None and connection.protocol is not None:
            self._ended = connection.protocol.closed
            if self._ended is not None:
                self._ended.add_done_callback(self._end)

    async def read(self) -> bytes:
        """The rest of it.

        Raises:
            ClientError: it broke off.
        """
        return await self._response.read()

    async def at_most(self, most_bytes: int) -> bytes:
        """The same.

        Raises:
            ClientError: it broke off.
            ValueError: it has more bytes.
        """
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > most_bytes:
                raise ValueError(f"its answer has more than {most_bytes} bytes")
        return bytes(body)

    async def some(self) -> bytes:
        """What has come of it, as soon as anything has; empty at its end.

        Raises:
            ClientError: it broke off.
        """
        return await self._response.content.readany()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The rest of it, as it comes.

        Raises:
            ClientError: it broke off.
        """
        async for chunk in self._response.content.iter_any():
            yield chunk

    async def lines(self) -> AsyncIterator[bytes]:
        """The rest of it, line by line, however long one is.

        Raises:
            ClientError: it broke off.
        """
        begun = b""
        async for chunk in self.chunks():
            *lines, begun = (begun + chunk).split(b"\n")
            for line in lines:
                yield line
        if begun:
            yield begun

    def close(self) -> None:
        """Drops the connection, unless all was read; the engine then ends the request."""
        if self._ended is not None:
            self._ended.remove_done_callback(self._end)
        self._response.close()

    def _end(self, _: object) -> None:
        """The connection has ended. Where the bytes ceased to be HTTP, aiohttp drops it and tells
        nobody who reads.
        """
        content = self._response.content
        if not content.is_eof() and content.exception() is None:
            broken = "the connection ended in the middle of its answer, which ceased to be HTTP"
            content.set_exception(aiohttp.ClientPayloadError(broken))


class EngineClient:
    """The router's client of all engines."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """Connects with the first request; ``headers`` go with every one, unless its URL has
        credentials of its own.
        """
        self._headers = headers

    # Sessions belong to the event loop in which they are made.

    @cached_property
    def _kept(self) -> aiohttp.ClientSession:
        return self._session(keepalive_timeout=KEPT_S)

    @cached_property
    def _new(self) -> aiohttp.ClientSession:
        return self._session(force_close=True)

    async def ask(self, method: str, url: str) -> Answer:
        """The whole answer: its first byte must come within :data:`CONNECT_TIMEOUT_S` of being
        connected, all of it within twice that, and it must have at most :data:`MOST_ANSWER_BYTES`.
        """
        try:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                response = await self._send(method, url, {}, None, _patience(CONNECT_TIMEOUT_S))
                try:
                    return Answer(response.status, await response.at_most(MOST_ANSWER_BYTES))
                except ValueError as error:
                    raise aiohttp.ClientPayloadError(str(error)) from error
                finally:
                    response.close()
        except TimeoutError as error:
            if isinstance(error, ClientError):  # it says what it waited for
                raise
            raise SilentError(f"no whole answer in {2 * CONNECT_TIMEOUT_S:g} s") from error

    async def fetch(self, url: str, *, most_bytes: int, timeout_s: float) -> bytes:
        """The body of a whole answer with status 200.

        Raises:
            ValueError: it has another status, or more bytes.
            TimeoutError: it is not here in time.
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
        anew: bool = False,
        traceparent: str = "",
        method: str = "POST",
        head: Head = NO_HEAD,
    ) -> Response:
        """An answer of which nothing but the head was read; the caller closes it.

        Args:
            url: where to; its path is encoded.
            body: sent as JSON, or as the client has written it.
            request_id: in the header ``x-request-id``; a second try has one of its own.
            once: whether the server must not see the request twice.
            anew: whether it goes over a new connection.
            traceparent: in the header of that name, if there is one.
            method: of HTTP.
            head: what else goes with it.

        Raises:
            KeptConnectionError: it may have come once, and is not sent again.
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
        if anew:
            return await self._request(self._new, method, url, headers, content, _patience())
        return await self._send(method, url, headers, content, _patience(), once=once)

    async def aclose(self) -> None:
        """Closes all connections."""
        for name in ("_kept", "_new"):
            if name in self.__dict__:
                await self.__dict__[name].close()

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
            return await self._request(self._kept, method, url, headers, content, timeout, sending)
        except (aiohttp.ClientConnectionError, aiohttp.ClientResponseError) as error:
            if sending.connects or isinstance(error, (SilentError, *UNSENT)):
                raise
            first = error
        if once and sending.begun:
            raise KeptConnectionError(str(first) or type(first).__name__) from first
        # The id is another one: should the first have arrived, it may still be known by it.
        if "x-request-id" in headers:
            headers = {**headers, "x-request-id": headers["x-request-id"] + "-again"}
        try:
            return await self._request(self._new, method, url, headers, content, timeout)
        except UNSENT:
            raise first from None  # this one was not sent, but the server may have died of that one

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
        if "@" in urlsplit(url).netloc:  # it has credentials of its own
            headers.pop("authorization", None)
        try:
            response = await session.request(
                method,
                url,
                headers=headers,
                data=content or None,
                timeout=timeout,
                allow_redirects=False,
            )
        except ValueError as error:  # of a name that no resolver takes, say
            shown = without_credentials(url)
            raise aiohttp.InvalidURL(shown, str(error).replace(url, shown)) from error
        return Response(response)

    def _session(self, **connections: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, use_dns_cache=False, socket_factory=_socket, **connections
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            request_class=_Request,
        )


@dataclass(slots=True)
class _Sending:
    """How far a request has come."""

    connects: bool = False
    """Whether it goes over a new connection."""
    begun: bool = False
    """Whether the server may have seen any of it."""


_sending: ContextVar[_Sending] = ContextVar("sending")
"""The request that this task sends; tasks that look for a connection for it have it too."""


class _Request(aiohttp.ClientRequest):
    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        """Sends it, unless the server has closed the connection meanwhile, or says what nobody
        asked for.
        """
        sending = _sending.get()
        if not sending.connects:
            # The event loop may not have come to look at it since.
            look = select.poll()
            look.register(conn.transport.get_extra_info("socket"), select.POLLIN)
            if look.poll(0):
                raise aiohttp.ServerDisconnectedError("the server closed it while it was idle")
        sending.begun = True
        return await super().send(conn)


def _patience(sock_read: float | None = None) -> aiohttp.ClientTimeout:
    """For a connection, with the look-up of its name; and, if given, for each next byte."""
    return aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=sock_read)


def _socket(address: Any) -> socket.socket:
    """A socket for an address of ``getaddrinfo``.

    A host that has died says nothing: without the kernel's own questions an answer that had begun
    would be waited for until the request's time is up.
    """
    _sending.get().connects = True
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    for option in KEEPALIVE:
        made.setsockopt(*option)
    return made
