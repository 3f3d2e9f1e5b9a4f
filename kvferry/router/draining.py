"""The end of a router: it drains, and then cuts the requests that still run.

::

    serving ── begin ──▶ draining ── no request runs ──▶ over
                             └────── time is up: cut ────▶ over

A draining router goes on listening. ``/health`` and new requests get a 503, so that clients and
load balancers turn to another router. Requests that run go on to their end. A request that is cut
gets an error; in a stream, the error is the last event.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.serving import web
from kvferry.serving.openai import ApiError, try_again


class Drain:
    """The state of a router's end, in one process."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """Set as soon as the router drains."""
        self.cuts = asyncio.Event()
        """Set as soon as requests that still run are cut."""
        self.over = asyncio.Event()
        """Set as soon as the process may end: no request runs, or all are cut."""
        self._running: set[asyncio.Task[Any]] = set()
        """Tasks of the clients' requests that this process answers."""

    def begin(self, within_s: float) -> None:
        """Drains, and cuts the requests that still run after this number of seconds. The earliest
        end counts.
        """
        self.begun.set()
        asyncio.get_running_loop().call_later(within_s, self.cut)
        self._look()

    def signalled(self, within_s: float) -> None:
        """Drains after the first signal, and ends at once after the second."""
        if self.begun.is_set():
            self.cut()
        else:
            self.begin(within_s)

    def cut(self) -> None:
        """Cuts all requests that run, each with an error for its client. Idempotent."""
        for event in (self.begun, self.cuts, self.over):
            event.set()
        message = (
            "this router has ended before the answer: the time of --drain-timeout "
            "(drain_timeout_s) is over, or the router was told to end at once; send the request "
            "again"
        )
        for task in self._running:
            task.cancel(msg=try_again(message, "draining"))
        self._running.clear()

    def around(self, app: ASGIApp, refused: Callable[[ApiError], None]) -> ASGIApp:
        """The application, with new requests refused while the router drains; each refusal is told
        to ``refused``. Requests for the router itself are answered, and never delay its end.
        """

        async def drained(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"].startswith(web.OWN_PATHS):
                await app(scope, receive, send)
            elif self.begun.is_set():
                message = "this router is draining; send the request again, to another router"
                error = try_again(message, "draining")
                refused(error)
                await web.refuse(error, scope, receive, send)
            else:
                task = asyncio.current_task()
                assert task is not None
                self._running.add(task)
                try:
                    await app(scope, receive, send)
                finally:
                    self._running.discard(task)
                    self._look()

        return drained

    def _look(self) -> None:
        if self.begun.is_set() and not self._running:
            self.over.set()
