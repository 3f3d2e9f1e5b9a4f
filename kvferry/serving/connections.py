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
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 10.0
"""Seconds within which a client must send the head of a request, counted from the connection or
the last answer. uvicorn closes idle connections after five seconds."""
TAKE_TIMEOUT_S = 60.0
"""Seconds within which a client must read some bytes of an answer that waits in the send buffer."""


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


class _Connection(H11Protocol):
    def __init__(self, all_of_them: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._all = all_of_them
        self._timer: asyncio.TimerHandle | None = None
        self._own_app = self.app
        self._is_refused = False
        self._untaken = 0
        """Number of bytes that waited for the client when it was last looked at."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._all.most + self._all.spare:
            oldest = next(iter(self._all.waiting), self)
            oldest.drop()
        if not transport.is_closing():
            self._note()

    def data_received(self, data: bytes) -> None:
        if not (bool(self.cycle) and not self.cycle.response_complete):  # a new request
            self._is_refused = self._is_full()
            self.app = self._all.refusing if self._is_refused else self._own_app
        super().data_received(data)
        self._note()

    def send_400_response(self, msg: str) -> None:
        """Answers data that is not HTTP; an earlier request in progress counts as disconnected."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer has begun, or must have no body (HEAD)
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
        asked = bool(self.cycle) and not self.cycle.response_complete
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


def _raise_file_limit() -> int:
    """Raises the limit of open files as far as permitted (at most 65,536); returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
