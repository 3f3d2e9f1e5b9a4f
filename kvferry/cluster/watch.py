"""Who looks at a cluster: the page, and the snapshots and timelines that it shows.

::

    GET /kvferry                     the page; nothing of the cluster is in it
    GET /kvferry/watch               snapshots as server-sent events, about one per second
    GET /kvferry/requests/ID         one request's timeline, from all engines that tell of it

Engines are asked only while somebody watches, all watchers share what they say, and an engine is
not asked again before it has answered or its time is up. So a hung one holds nobody.
"""

import asyncio
import base64
import hashlib
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import cache
from importlib import resources
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.cluster import web
from kvferry.cluster.engine_client import ClientError, EngineClient
from kvferry.cluster.engines import Engine
from kvferry.cluster.members import Members
from kvferry.cluster.openai import ApiError
from kvferry.cluster.snapshot import (
    Figures,
    Rates,
    RequestView,
    Seen,
    figures_in,
    request_view,
    snapshot_of,
)
from kvferry.control.client import ControlClient
from kvferry.control.messages import MAX_ID_CHARS, StatusReport
from kvferry.control.options import ControlOptions, CurveKeys
from kvferry.control.timeline import EngineAnswer, Row, gather, rows_of
from kvferry.control.tracing import RequestSpan
from kvferry.errors import KVFerryError

T = TypeVar("T")

POLL_S = 1.0
"""Seconds between two snapshots."""
REST = 9
"""How many times as long as it takes to make a snapshot the next one is waited for, at least: the
router has requests to serve."""
WAIT_S = 0.5
"""Seconds for which a snapshot waits for engines; what comes later is in the next one."""
ASK_S = 3.0
"""Seconds that an engine has to tell of itself."""
TIMELINE_S = 5.0
"""Seconds that engines have to tell of a request."""
MOST_ASKED = 32
"""Engines that are asked at a time."""
MOST_WATCHERS = 32
MOST_TIMELINES = 4
"""Timelines that are gathered at a time."""
MOST_METRICS_BYTES = 8 << 20
"""Of an engine's ``/metrics``."""
REMEMBERED_REQUESTS = 100
"""Requests of the router that are shown."""


class Timeline(msgspec.Struct, kw_only=True):
    """One request's life."""

    request_id: str
    engines: list[EngineAnswer]
    rows: list[Row]


class ClusterWatch:
    """Asks the engines while somebody watches, and tells all watchers the same."""

    def __init__(
        self,
        members: Members,
        client: EngineClient,
        curve: CurveKeys | None,
        elsewhere: Callable[[], Awaitable[list[RequestView]]] | None = None,
    ) -> None:
        """``curve`` are the keys of the engines' control channels, where they have some.
        ``elsewhere`` tells the last requests of a router whose workers have them.
        """
        self.requests: deque[RequestSpan] = deque(maxlen=REMEMBERED_REQUESTS)
        """The last ones of this process."""
        self._elsewhere = elsewhere
        self._members = members
        self._client = client
        self._curve = curve
        self._watchers = 0
        self._gathering = 0
        self._polling: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None
        """The next snapshot, as an event."""

    def routes(self, may_read: Callable[[Request], None]) -> list[Route]:
        """The API. ``may_read`` raises an ``ApiError`` for who may not look at the engines."""

        async def watch(request: Request) -> Response:
            may_read(request)
            if self._watchers >= MOST_WATCHERS:
                raise ApiError(503, f"{MOST_WATCHERS} watch already; no more can", code="busy")
            self._begin()
            return web.EventStream(self._events(), on_end=self._end)

        async def timeline(request: Request) -> Response:
            may_read(request)
            return web.json_response(await self._timeline(request.path_params["request_id"]))

        return [
            Route("/kvferry", show_page),
            Route("/kvferry/watch", watch),
            Route("/kvferry/requests/{request_id:path}", timeline),
        ]

    def last_requests(self) -> list[RequestView]:
        """Those of this process, newest first."""
        return [request_view(span) for span in reversed(self.requests)]

    async def aclose(self) -> None:
        """Asks no engine any more."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)

    # ---- snapshots --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Somebody watches."""
        self._watchers += 1
        if self._watchers == 1:
            self._next = asyncio.get_running_loop().create_future()
            self._polling = asyncio.create_task(self._poll(self._next))

    def _end(self) -> None:
        """Somebody watches no longer; the last one ends the poll."""
        self._watchers -= 1
        if self._watchers == 0 and self._polling is not None:
            self._polling.cancel()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        while self._next is not None:
            # Each watcher gets the newest one: who takes long leaves some out.
            yield await asyncio.shield(self._next)

    async def _poll(self, told: asyncio.Future[bytes]) -> None:
        loop = asyncio.get_running_loop()
        options = ControlOptions(request_timeout_s=ASK_S, curve=self._curve)
        control = ControlClient(engine_id="watch", incarnation="watch", options=options)
        asked: dict[Engine, _Question] = {}
        slots = asyncio.Semaphore(MOST_ASKED)
        rates = Rates()
        try:
            while True:
                began = loop.time()
                for gone in asked.keys() - set(self._members):
                    asked.pop(gone).cancel()
                asked = {
                    engine: asked.get(engine) or _Question(engine, self._client, control, slots)
                    for engine in self._members
                }
                questions = [question.asking() for question in asked.values()]
                if questions:
                    await asyncio.wait(questions, timeout=WAIT_S)
                told_elsewhere = [] if self._elsewhere is None else await self._elsewhere()
                making = loop.time()
                seen = [question.seen for question in asked.values()]
                requests = told_elsewhere or self.last_requests()
                snapshot = snapshot_of(seen, requests, rates, time.time())
                event = web.sse_event(snapshot)
                made_s = loop.time() - making
                self._next = loop.create_future()
                told.set_result(event)
                told = self._next
                await asyncio.sleep(max(REST * made_s, began + POLL_S - loop.time()))
        except Exception as error:
            # A bug of ours: those who watch are told, and the next one begins anew.
            told.set_exception(ApiError(500, f"internal error: {error!r}", code="internal_error"))
            raise
        finally:
            for question in asked.values():
                question.cancel()
            await asyncio.to_thread(control.close)

    # ---- one request ------------------------------------------------------------------------

    async def _timeline(self, request_id: str) -> Timeline:
        """What the engines know of a request.

        Raises:
            ApiError: 400, the id is none; 503, too many ask.
        """
        if not 0 < len(request_id) <= MAX_ID_CHARS:
            raise ApiError(400, f"request_id: an id has 1 to {MAX_ID_CHARS} characters")
        if self._gathering >= MOST_TIMELINES:
            raise ApiError(503, "too many ask for timelines; ask again", code="busy")
        addresses = sorted({engine.control for engine in self._members if engine.control})
        self._gathering += 1
        try:
            answers = await asyncio.to_thread(self._gather, addresses, request_id)
        finally:
            self._gathering -= 1
        return Timeline(request_id=request_id, engines=answers, rows=rows_of(answers))

    def _gather(self, addresses: list[str], request_id: str) -> list[EngineAnswer]:
        options = ControlOptions(request_timeout_s=TIMELINE_S, curve=self._curve)
        with ControlClient(engine_id="trace", incarnation="trace", options=options) as client:
            return gather(client, addresses, request_id)


class _Question:
    """What one engine is asked, again and again, and what it said last."""

    def __init__(
        self, engine: Engine, client: EngineClient, control: ControlClient, slots: asyncio.Semaphore
    ) -> None:
        self.seen = Seen(engine)
        self._engine = engine
        self._client = client
        self._control = control
        self._slots = slots
        self._task: asyncio.Task[None] | None = None

    def asking(self) -> asyncio.Task[None]:
        """The question under way, or a new one."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._ask())
        return self._task

    def cancel(self) -> None:
        """Waits for no answer."""
        if self._task is not None:
            self._task.cancel()

    async def _ask(self) -> None:
        if not self._engine.lives:
            self.seen = Seen(self._engine)  # the router says why
            return
        untold: list[str] = [] if self._engine.control else [_NO_CHANNEL]
        async with self._slots:
            figures, report = await asyncio.gather(
                _told("/metrics", self._metrics(), untold),
                _told("its control channel", self._status(), untold),
            )
        at = asyncio.get_running_loop().time()
        self.seen = Seen(self._engine, figures, report, untold, at)

    async def _metrics(self) -> Figures:
        body = await self._client.fetch(
            f"{self._engine.url}/metrics", most_bytes=MOST_METRICS_BYTES, timeout_s=ASK_S
        )
        return figures_in(body.decode(errors="replace"))

    async def _status(self) -> StatusReport | None:
        if not self._engine.control:
            return None
        return await asyncio.wrap_future(self._control.status(self._engine.control))


_NO_CHANNEL = "its control channel is not known: leases, loads and failures are not told"


async def _told(what: str, answer: Awaitable[T], untold: list[str]) -> T | None:
    """An answer; or nothing, and why is added to ``untold``."""
    try:
        return await answer
    except (ClientError, ValueError, KVFerryError) as error:
        untold.append(f"{what}: {str(error) or type(error).__name__}")
    except TimeoutError:
        untold.append(f"{what}: no answer within {ASK_S:g} s")
    return None


# ---- the page -----------------------------------------------------------------------------------


async def show_page(_: Request) -> Response:
    """The page. It asks for the key and shows that to the other addresses, so that it needs none
    itself: nothing of the cluster is in it.
    """
    page, policy = _page()
    return Response(
        page,
        media_type="text/html",
        headers={
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "cross-origin-opener-policy": "same-origin",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
        },
    )


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy under which a browser shows it: its own script and style, requests
    to its own router, and text that becomes nothing else.
    """
    page = resources.files("kvferry.cluster").joinpath("page.html").read_bytes()
    sources = {
        element: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(found).digest()).decode()}'"
            for found in re.findall(rb"<%s>(.*?)</%s>" % (element, element), page, re.DOTALL)
        ).encode()
        for element in (b"script", b"style")
    }
    policy = (
        b"default-src 'none'; script-src %s; style-src %s; connect-src 'self'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        b"require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return page, (policy % (sources[b"script"], sources[b"style"])).decode()
