"""The router's HTTP client of its engines.

Connections are kept for later requests. A server may close a connection that was idle for too long
at the very moment at which a request is on its way. It has not seen the request and is well; from
here it looks like a server that died. So

- a connection is kept for less time than servers keep it,
- a request that fails on a kept connection before its answer began is sent once more, over a new
  connection to the same server, and only if that fails too the server is to blame,
- a request that must not come twice never goes over a kept connection.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from kvferry.zeromq import KEEPALIVE

CONNECT_TIMEOUT_S = 5.0
"""Seconds for an engine to accept a connection, and to answer a health check."""
KEPT_S = 2.0
"""Seconds for which an idle connection is kept; uvicorn's servers, vLLM's too, close it after 5."""
KEPT_CONNECTIONS = 64

UNSENT = (httpx.ConnectError, httpx.ConnectTimeout)
"""Errors that prove that a request was never sent."""


class EngineClient:
    """The router's client of all engines. Errors are httpx's."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """Connects with the first request; ``headers`` go with every one."""
        self._kept = _client(headers, KEPT_CONNECTIONS)
        self._new = _client(headers, 0)

    async def ask(self, method: str, url: str) -> httpx.Response:
        """The whole answer; it must come within :data:`CONNECT_TIMEOUT_S`."""
        request = self._kept.build_request(method, url, timeout=CONNECT_TIMEOUT_S)
        response = await self._send(request)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return response

    async def fetch(self, url: str, *, most_bytes: int, timeout_s: float) -> bytes:
        """The body of a whole answer with status 200.

        Raises:
            ValueError: it has another status, or more bytes.
            TimeoutError: it is not here in time.
        """
        async with asyncio.timeout(timeout_s):
            response = await self._send(self._kept.build_request("GET", url))
            try:
                if response.status_code != 200:
                    raise ValueError(f"it answers {response.status_code}")
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > most_bytes:
                        raise ValueError(f"its answer has more than {most_bytes} bytes")
                return bytes(body)
            finally:
                await response.aclose()

    async def post(
        self,
        url: str,
        body: Mapping[str, Any],
        request_id: str,
        *,
        once: bool,
        traceparent: str = "",
    ) -> httpx.Response:
        """An answer of which nothing but the head was read; the caller closes it.

        Args:
            url: where to.
            body: sent as JSON.
            request_id: in the header ``x-request-id``; a second try has one of its own.
            once: whether the server must not see the request twice.
            traceparent: in the header of that name, if there is one.
        """
        headers = {"content-type": "application/json", "x-request-id": request_id}
        if traceparent:
            headers["traceparent"] = traceparent
        content = msgspec.json.encode(body)
        request = self._kept.build_request("POST", url, content=content, headers=headers)
        if once:
            return await self._new.send(request, stream=True)
        return await self._send(request)

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._kept.aclose()
        await self._new.aclose()

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """Sends a request that may come twice."""
        connected = False

        async def trace(event: str, _: Mapping[str, Any]) -> None:
            nonlocal connected
            connected = connected or event.startswith("connection.connect")

        request.extensions["trace"] = trace
        try:
            return await self._kept.send(request, stream=True)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            if connected:
                raise
            first = error
        # The id is another one: should the first have arrived, it may still be known by it.
        if "x-request-id" in request.headers:
            request.headers["x-request-id"] += "-again"
        try:
            return await self._new.send(request, stream=True)
        except UNSENT:
            raise first from None  # this one was not sent, but the server may have died of that one


def _client(headers: Mapping[str, str], kept: int) -> httpx.AsyncClient:
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=kept, keepalive_expiry=KEPT_S
    )
    return httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        # A host that has died says nothing: without the kernel's own questions an answer that had
        # begun would be waited for until the request's time is up.
        transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEPALIVE),
        trust_env=False,  # a proxy of the environment must not get between us and the engines
    )
