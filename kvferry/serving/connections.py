"""Limits for the connections of kvferry's HTTP servers: time per client, and number.

uvicorn waits without limit for a request that never becomes complete, and accepts connections until
the process has no file descriptors left. Here, a connection without a request to answer is closed
after a time limit. If too many connections have a complete request, a further request gets a 503,
at its head or, if other requests became complete before its body, at the end of its body. Further
connections are taken for such answers. If there are too many of these too, the longest-waiting
connection is closed.
"""

import asyncio
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvferry.serving.openai import ApiError

HEAD_TIMEOUT_S = 10.0
"""Seconds within which a client must send the head of a request, counted from the connection or
the last answer. uvicorn closes idle connections after five seconds."""
TAKE_TIMEOUT_S = 60.0
"""Seconds within which a client must read some bytes of an answer that waits in the send buffer."""
MOST_HEAD_BYTES = 64 << 10
"""Maximum number of bytes of a request that are not its body: its head, or what stands between two
parts of its body."""

_REASON_CHARACTERS = 200
"""Maximum number of characters of the error for data that is not HTTP."""
_REFUSAL = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b"
)
"""Answer to such data."""


class Connections:
    """Makes the connections of a server; pass an instance as uvicorn's ``Config(http=...)``."""

    def __init__(self, most: int, refusing: ASGIApp, too_late: Callable[[Any], None]) -> None:
        """Makes a server's connections.

        Args:
            most: maximum number of connections that have a complete request.
            refusing: answers a request whose head comes beyond this number.
            too_late: marks the scope of a request whose application runs already, but whose body
                ends beyond this number.
        """
        self.refusing = refusing
        self.too_late = too_late
        files = _raise_file_limit()
        self.most = max(8, min(most, files // 4))
        """Maximum number of connections that have a request; engines and the process itself need
        files too."""
        self.spare = max(8, files // 8)
        """Maximum number of connections beyond that number, whose clients may be refused."""
        self.backlog = max(8, min(1024, files // 4))
        """Maximum number of connections that are accepted in a row, before the first is read."""
        self.waiting: dict[_Connection, None] = {}
        """Connections without a complete request; the longest-waiting connection is the first."""

    def __call__(self, **of_uvicorn: Any) -> asyncio.Protocol:
        """Makes a new connection."""
        return _Connection(self, **of_uvicorn)


class _Connection(HttpToolsProtocol):
    """A connection, with a request at a time: a client that sends a request before it has the last
    answer gets the last answer, and must send the request again over another connection.
    """

    def __init__(self, all_of_them: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._all = all_of_them
        self._timer: asyncio.TimerHandle | None = None
        self._own_app = self.app
        self._is_refused = False
        self._is_ahead = False
        """Whether the client has sent a request before it had the last answer."""
        self._untaken = 0
        """Number of bytes that waited for the client when it was last looked at."""
        self._head_bytes = 0
        """Number of bytes since the last part of a body, or the last complete head or request."""

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._all.most + self._all.spare:
            oldest = next(iter(self._all.waiting), self)
            oldest.drop()
        if not transport.is_closing():
            self._note()

    def data_received(self, data: bytes) -> None:
        if self._is_ahead:
            return
        if not self._is_answering:  # a new request
            self._is_refused = self._is_full()
            self.app = self._all.refusing if self._is_refused else self._own_app
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            reason = error.__context__ or error  # an error of a method below, or the parser's own
            self.send_400_response(f"the request is not HTTP 1: {reason}"[:_REASON_CHARACTERS])
        if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"a head is longer than {MOST_HEAD_BYTES} bytes")
        self._note()

    def _parse(self, data: bytes) -> None:
        """Parses data of the client.

        A request to change the protocol is answered as it is (RFC 9110, 7.8); some clients ask for
        HTTP 2 with their first request. To its parser all bytes behind its head are of the other
        protocol, so another parser gets its body, as the body of a request of the same length.

        Raises:
            httptools.HttpParserError: the data is not HTTP 1.
        """
        try:
            self.parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        self.cycle.keep_alive = False
        self.parser = httptools.HttpRequestParser(_BodyOf(self))
        lengths = (b"content-length", b"transfer-encoding")
        head = [b"%b: %b\r\n" % header for header in self.headers if header[0] in lengths]
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n%b" % (b"".join(head), rest))

    def on_message_begin(self) -> None:
        """Begins a request.

        Raises:
            ValueError: the last request has not been answered.
        """
        if self._is_answering:
            self._is_ahead, self.cycle.keep_alive = True, False
            raise ValueError("a request before the answer to the last one")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_answering:  # otherwise a trailer of the body, which nobody reads
            super().on_header(name, value.strip())

    def on_headers_complete(self) -> None:
        """Begins the answer.

        Raises:
            ValueError: the head is not HTTP 1 (RFC 9112, 2.3 and 3.2).
        """
        self._head_bytes = 0
        version = self.parser.get_http_version()
        hosts = [name for name, _ in self.headers].count(b"host")
        if (version, hosts) not in (("1.1", 1), ("1.0", 0), ("1.0", 1)):
            raise ValueError(f"HTTP {version} with {hosts} headers `host`")
        super().on_headers_complete()
        if version == "1.0":
            # The application gets this method when its task begins.
            self.cycle.send = partial(_send_unchunked, self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers data that is not HTTP; a request in progress counts as disconnected. The answer
        to a request that was complete before is not disturbed.
        """
        if self._is_ahead:
            return
        self.logger.warning("client %s: %s", self.client, msg)
        has_begun = False
        if self._is_answering:
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not has_begun:
            body = msgspec.json.encode(ApiError(400, msg).body())
            self.transport.write(_REFUSAL % (len(body), body))
        self.transport.close()

    def on_response_complete(self) -> None:
        self._is_refused = False
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_taker()

    def _wait_for_taker(self) -> None:
        """Looks again later whether the client has read bytes of the answer."""
        self._untaken = self.transport.get_write_buffer_size()
        self._wait(TAKE_TIMEOUT_S, self._look_at_taker)

    def _look_at_taker(self) -> None:
        if self.transport.get_write_buffer_size() < self._untaken:
            self._wait_for_taker()
        else:
            self.drop()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait(None)
        self._note()

    def _note(self) -> None:
        """Starts or ends the wait for the client; further bytes do not prolong a wait."""
        asked = self._is_answering
        if asked and not self.flow.write_paused:
            self._wait(None)  # the reader of the body has a time limit of its own
        if asked and not self.cycle.more_body and not self._is_refused:
            if self in self._all.waiting and self._is_full():
                self._is_refused = True
                self._all.too_late(self.scope)
            else:
                self._all.waiting.pop(self, None)
        elif not self.transport.is_closing():
            self._all.waiting.setdefault(self)
            if self._timer is None and not asked:
                self._wait(HEAD_TIMEOUT_S)

    def _is_full(self) -> bool:
        """Whether as many other connections as possible have a complete request."""
        return len(self.connections) - len(self._all.waiting) >= self._all.most

    def _wait(self, timeout_s: float | None, then: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if timeout_s is not None:
            self._timer = self.loop.call_later(timeout_s, then or self.drop)

    def drop(self) -> None:
        """Closes the connection at once."""
        self._forget()
        self.connections.discard(self)
        self.transport.abort()

    def _forget(self) -> None:
        self._all.waiting.pop(self, None)
        self._wait(None)


class _BodyOf:
    """What a parser calls for the body of a connection's request alone."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete

    def on_message_begin(self) -> None:
        """Begins the body, or refuses what follows it."""
        if not self._connection.cycle.more_body:
            self._connection.on_message_begin()


async def _send_unchunked(cycle: RequestResponseCycle, message: Message) -> None:
    """Sends a part of an answer to a client of HTTP 1.0, which knows no chunks: the end of the
    connection ends the answer.
    """
    if message["type"] == "http.response.start":
        cycle.chunked_encoding = False
    else:
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)  # type: ignore[arg-type]


def _raise_file_limit() -> int:
    """Raises the limit of open files as far as permitted (at most 65,536); returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
