"""Cluster page of the router, with its snapshots and timelines.

::

    GET /kvferry                     the page; contains no data of the cluster
    GET /kvferry/watch               snapshots as server-sent events, about one per second
    GET /kvferry/requests/ID         timeline of a request, from all engines that report it

The router asks the engines only while a viewer watches, and all viewers share the answers. The
router does not ask an engine again before the engine has answered or its time is up. So a hung
engine blocks no viewer.
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

from kvferry.control.client import ControlClient, asking_client
from kvferry.control.messages import MAX_ID_CHARS, StatusReport
from kvferry.control.options import CurveKeys
from kvferry.errors import KVFerryError
from kvferry.observe.spans import RequestSpan, Spans, checked_traceparent
from kvferry.observe.timeline import EngineAnswer, Row, gather, rows_of
from kvferry.router.engine_client import ClientError, EngineClient
from kvferry.router.engines import Engine
from kvferry.router.headers import Keys
from kvferry.router.members import Members
from kvferry.router.snapshot import (
    ClusterFigures,
    Rates,
    Seen,
    ShownRequest,
    figures_in,
    request_view,
    snapshot_of,
)
from kvferry.serving import web
from kvferry.serving.openai import ApiError

T = TypeVar("T")

POLL_S = 1.0
"""Seconds between two snapshots."""
REST = 9
"""Smallest ratio of the pause before the next snapshot to the time that a snapshot takes: the
router also has requests to serve."""
WAIT_S = 0.5
"""Maximum number of seconds that a snapshot waits for engines; later answers go into the next
snapshot."""
ASK_S = 3.0
"""Maximum number of seconds for an engine's answer."""
TIMELINE_S = 5.0
"""Maximum number of seconds for the engines' answers about a request."""
MOST_ASKED = 32
"""Maximum number of engines asked at the same time."""
MOST_WATCHERS = 32
MOST_TIMELINES = 4
"""Maximum number of timelines gathered at the same time."""
MOST_METRICS_BYTES = 8 << 20
"""Maximum number of bytes in an engine's ``/metrics``."""
REMEMBERED_REQUESTS = 100
"""Number of the router's last requests in a snapshot."""


class Timeline(msgspec.Struct, kw_only=True):
    """Timeline of one request."""

    request_id: str
    engines: list[EngineAnswer]
    rows: list[Row]


class ClusterWatch:
    """Asks the engines while a viewer watches, and sends all viewers the same snapshots."""

    def __init__(
        self,
        members: Members,
        client: EngineClient,
        curve: CurveKeys | None,
        spans: Spans | None,
        elsewhere: Callable[[], Awaitable[list[ShownRequest]]] | None = None,
    ) -> None:
        """Makes the watch.

        Args:
            members: the router's engines.
            client: HTTP client for the engines' metrics.
            curve: keys of the engines' control channels; ``None`` for channels without keys.
            spans: collector of the trace spans of all requests.
            elsewhere: returns the last requests of the workers, for a router with workers.
        """
        self._requests: deque[RequestSpan] = deque(maxlen=REMEMBERED_REQUESTS)
        """The last requests of this process."""
        self._spans = spans
        self._elsewhere = elsewhere
        self._members = members
        self._client = client
        self._curve = curve
        self._watchers = 0
        self._gathering = 0
        self._polling: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None
        """The next snapshot, as an event."""

    def routes(self, keys: Keys) -> list[Route]:
        """Routes of the page, the snapshots and the timelines."""

        async def watch(request: Request) -> Response:
            keys.check_reader(request)
            if self._watchers >= MOST_WATCHERS:
                raise ApiError(503, f"{MOST_WATCHERS} watch already; no more can", code="busy")
            self._begin()
            return web.EventStream(self._events(), on_end=self._end)

        async def timeline(request: Request) -> Response:
            keys.check_reader(request)
            return web.json_response(await self._timeline(request.path_params["request_id"]))

        return [
            Route("/kvferry", show_page),
            Route("/kvferry/watch", watch),
            Route("/kvferry/requests/{request_id:path}", timeline),
        ]

    def span(self, request: Request, request_id: str) -> RequestSpan:
        """Makes the span of a client's request: a part of the client's trace, if the client has a
        trace.
        """
        parent = checked_traceparent(request.headers.get("traceparent"))
        # The routed path: the URL is built with a header that the client chooses.
        span = RequestSpan(self._spans, request.scope["path"], parent, request_id=request_id)
        self._requests.append(span)
        return span

    def last_requests(self) -> list[ShownRequest]:
        """The last requests of this process, newest first."""
        return [request_view(span) for span in reversed(self._requests)]

    async def aclose(self) -> None:
        """Stops all questions to engines, and closes the collector of spans."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    # ---- snapshots --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Counts a new viewer; the first viewer starts the poll."""
        self._watchers += 1
        if self._watchers == 1:
            self._next = asyncio.get_running_loop().create_future()
            self._polling = asyncio.create_task(self._poll(self._next))

    def _end(self) -> None:
        """Removes a viewer; the last viewer ends the poll."""
        self._watchers -= 1
        if self._watchers == 0 and self._polling is not None:
            self._polling.cancel()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        while self._next is not None:
            # Each viewer gets the newest snapshot: a slow viewer misses some snapshots.
            yield await asyncio.shield(self._next)

    async def _poll(self, told: asyncio.Future[bytes]) -> None:
        loop = asyncio.get_running_loop()
        control = asking_client("watch", ASK_S, self._curve)
        asked: dict[Engine, Question] = {}
        slots = asyncio.Semaphore(MOST_ASKED)
        rates = Rates()
        try:
            while True:
                began = loop.time()
                for gone in asked.keys() - set(self._members):
                    asked.pop(gone).cancel()
                asked = {
                    engine: asked.get(engine) or Question(engine, self._client, control, slots)
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
                queue = self._members.queue
                snapshot.queue = None if queue is None else queue.view()
                event = web.sse_event(snapshot)
                made_s = loop.time() - making
                self._next = loop.create_future()
                told.set_result(event)
                told = self._next
                await asyncio.sleep(max(REST * made_s, began + POLL_S - loop.time()))
        except Exception as error:
            # A bug in kvferry: the viewers get the error, and the next viewer starts the poll
            # again.
            told.set_exception(ApiError(500, f"internal error: {error!r}", code="internal_error"))
            raise
        finally:
            for question in asked.values():
                question.cancel()
            await asyncio.to_thread(control.close)

    # ---- one request ------------------------------------------------------------------------

    async def _timeline(self, request_id: str) -> Timeline:
        """Gathers the engines' reports about a request.

        Raises:
            ApiError: 400, the id is not valid; 503, too many timelines are under way.
        """
        if not 0 < len(request_id) <= MAX_ID_CHARS:
            raise ApiError(400, f"request_id: an id has 1 to {MAX_ID_CHARS} characters")
        if self._gathering >= MOST_TIMELINES:
            raise ApiError(503, "too many ask for timelines; ask again", code="busy")
        addresses = sorted({engine.told.control for engine in self._members if engine.told.control})
        self._gathering += 1
        try:
            answers = await asyncio.to_thread(self._gather, addresses, request_id)
        finally:
            self._gathering -= 1
        return Timeline(request_id=request_id, engines=answers, rows=rows_of(answers))

    def _gather(self, addresses: list[str], request_id: str) -> list[EngineAnswer]:
        with asking_client("trace", TIMELINE_S, self._curve) as client:
            return gather(client, addresses, request_id)


class Question:
    """Repeated questions to one engine, and the engine's last answers."""

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
        """The current question, or a new question."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._ask())
        return self._task

    def cancel(self) -> None:
        """Cancels the current question."""
        if self._task is not None:
            self._task.cancel()

    async def _ask(self) -> None:
        if not self._engine.status.lives:
            self.seen = Seen(self._engine)  # the engine's status has the reason
            return
        untold: list[str] = [] if self._engine.told.control else [_NO_CHANNEL]
        async with self._slots:
            figures, report = await asyncio.gather(
                _told("/metrics", self._metrics, untold),
                _told("its control channel", self._status, untold),
            )
        at = asyncio.get_running_loop().time()
        self.seen = Seen(self._engine, figures, report, untold, at)

    async def _metrics(self) -> ClusterFigures:
        body = await self._client.fetch(
            f"{self._engine.url}/metrics", most_bytes=MOST_METRICS_BYTES, timeout_s=ASK_S
        )
        return figures_in(body.decode(errors="replace"))

    async def _status(self) -> StatusReport | None:
        if not self._engine.told.control:
            return None
        return await asyncio.wrap_future(self._control.status(self._engine.told.control))


_NO_CHANNEL = "its control channel is not known: leases, loads and failures are not told"


async def _told(what: str, ask: Callable[[], Awaitable[T]], untold: list[str]) -> T | None:
    """Asks and waits for the answer; ``None`` after an error, whose text is added to ``untold``."""
    try:
        return await ask()
    except (ClientError, ValueError, KVFerryError) as error:
        untold.append(f"{what}: {str(error) or type(error).__name__}")
    except TimeoutError:
        untold.append(f"{what}: no answer within {ASK_S:g} s")
    return None


# ---- the page -----------------------------------------------------------------------------------


async def show_page(_: Request) -> Response:
    """The page, which needs no key: it contains no data of the cluster. The page asks the viewer
    for the key and shows the key to the other paths.
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
    """The page, and its policy for browsers: only the page's own script and style, requests only to
    its own router, and texts that never become HTML or script.
    """
    page = resources.files("kvferry.router").joinpath("page.html").read_bytes()
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
