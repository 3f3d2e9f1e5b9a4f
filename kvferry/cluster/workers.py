"""Several processes that serve the requests of one router.

The process that was started is the *leader*. It alone watches the engines, follows lists, hears
operators and asks engines for the page. The workers serve the clients, all from one listener::

    clients ──▶ worker 1 ──┐
    clients ──▶ worker 2 ──┼──▶ engines      requests, each from the worker that took it
                           │
                leader ────┘                 health checks, and what operators and pages want

    leader ──▶ worker   Tell: the engines, whenever something of them has changed
    worker ──▶ leader   Heard: answers each Tell, with the worker's last requests
    worker ──▶ leader   over HTTP: what clients ask that is the leader's to answer
    all of them         what each engine has under way (kvferry.cluster.counts), and the counters
                        that /metrics shows, in files of prometheus_client

A worker that dies is started again. When the leader dies its workers see the end of their stdin,
and end too.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
import yarl
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvferry.cluster import web
from kvferry.cluster.counts import CountTable
from kvferry.cluster.engines import EngineState
from kvferry.cluster.members import PLACE_BYTES, Members
from kvferry.cluster.messages import RouterSettings
from kvferry.cluster.metrics import WORKERS_FOLDER
from kvferry.cluster.openai import ApiError
from kvferry.cluster.process import TERM_GRACE_S, describe_exit
from kvferry.cluster.snapshot import RequestView
from kvferry.errors import WorkerDiedError

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1
"""Seconds between two looks at whether something of the engines has changed."""
HEAR_S = 2.0
"""Seconds for which an operator waits until all workers know of a change."""
REQUESTS_S = 0.5
"""Seconds for which a page waits for the workers' last requests."""
LONGEST_PAUSE_S = 30.0
"""Seconds before a worker is started again that has died again and again."""
WELL_S = 60.0
"""Seconds after which a worker that dies has not died again and again."""
_LINE_BYTES = 64 << 20


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """For a worker."""

    router: RouterSettings
    number: int
    """Beginning with 1; the leader is 0."""
    listener: int
    """File descriptor of the socket that clients connect to."""
    channel: int
    """Likewise of the connection to the leader."""
    table: int
    """Likewise of the engines' counts."""
    folder: str
    """Where the leader serves, and where counters are."""
    leader: int
    """Process id of the leader."""


class Tell(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The leader's word."""

    engines: tuple[EngineState, ...]
    """All that there are."""
    asks: bool
    """Whether it wants to know the worker's last requests."""


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker's answer: it goes by what it was told."""

    requests: list[RequestView]
    """Newest first; none unless it was asked for them."""


_tell = msgspec.json.Decoder(Tell)
_heard = msgspec.json.Decoder(Heard)


def door(folder: str | Path) -> str:
    """The Unix socket at which a leader serves its workers."""
    return str(Path(folder, "leader"))


# ---- the leader ----------------------------------------------------------------------------------


class _Worker:
    """A worker that runs, as the leader sees it."""

    def __init__(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self._wake = asyncio.Event()
        self._asked: asyncio.Future[list[RequestView]] | None = None
        """What it says to the next word, for those who wait for that."""

    def wake(self) -> None:
        """There is something to tell."""
        self._wake.set()

    def ask(self) -> "asyncio.Future[list[RequestView]]":
        """Its last requests, once it has heard all that there is to tell now."""
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
        self.wake()
        return self._asked

    async def talk(self, engines: Callable[[], tuple[EngineState, ...]]) -> None:
        """Tells it of the engines, one word after the other, until it is gone."""
        told = None
        with contextlib.suppress(OSError, msgspec.DecodeError):  # it is about to end, or has
            while True:
                asked, self._asked = self._asked, None
                now = engines()
                if asked is None and now is told:
                    await self._wake.wait()
                    self._wake.clear()
                    continue
                tell = Tell(engines=now, asks=asked is not None)
                self._writer.write(msgspec.json.encode(tell) + b"\n")
                await self._writer.drain()
                heard = _heard.decode(await self._reader.readline())
                told = now
                if asked is not None and not asked.done():
                    asked.set_result(heard.requests)

    async def aclose(self) -> None:
        """Closes the connection to it."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def end(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Workers:
    """The workers of a router, as its leader sees them."""

    def __init__(self, settings: RouterSettings, listener: socket.socket, folder: Path) -> None:
        """``listener`` is what clients connect to; ``folder`` is nobody else's."""
        self.folder = folder
        self._settings = msgspec.structs.replace(settings, engines=())
        self._listener = listener
        self._processes = settings.workers + 1
        self._table_fd = CountTable.make(self._processes)
        self.table = CountTable(self._table_fd, self._processes, 0)
        self._running: dict[int, _Worker] = {}
        self._have_served = False
        """Whether one of them was ready."""
        self._engines: tuple[EngineState, ...] = ()
        self._stop = asyncio.Event()

    async def run(self, members: Members, stop: asyncio.Event) -> None:
        """Keeps all workers running until the event is set, and then ends them.

        Raises:
            WorkerDiedError: one ended before any has served.
        """
        self._look(members)
        looking = asyncio.create_task(self._look_always(members))
        keepers = [asyncio.create_task(self._keep(each)) for each in range(1, self._processes)]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((stopped, *keepers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            self._listener.close()  # who has come since is refused, and does not wait
            for worker in tuple(self._running.values()):
                worker.end(signal.SIGTERM)
            await asyncio.wait(keepers, timeout=TERM_GRACE_S)
            for worker in tuple(self._running.values()):
                worker.end(signal.SIGKILL)
            ended = await asyncio.gather(*keepers, return_exceptions=True)
            for task in (looking, stopped):
                task.cancel()
            os.close(self._table_fd)
        for error in ended:
            if error is not None:
                raise error

    async def tell(self, members: Members) -> None:
        """Waits until all workers know what there is to know of the engines, if they answer."""
        self._look(members)
        await self._ask(HEAR_S)

    async def requests(self) -> list[RequestView]:
        """The last requests of all workers that answer, newest first."""
        found = [view for views in await self._ask(REQUESTS_S) for view in views]
        return sorted(found, key=lambda view: view.started, reverse=True)

    async def _ask(self, timeout_s: float) -> list[list[RequestView]]:
        asked = [worker.ask() for worker in self._running.values()]
        if asked:
            await asyncio.wait(asked, timeout=timeout_s)
        return [each.result() for each in asked if each.done() and not each.cancelled()]

    async def _look_always(self, members: Members) -> None:
        while True:
            self._look(members)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _look(self, members: Members) -> None:
        engines = members.states()
        if engines != self._engines:
            self._engines = engines
            for worker in self._running.values():
                worker.wake()

    async def _keep(self, number: int) -> None:
        """Runs one worker, and starts it again when it has ended, until all are to end."""
        pause_s = 0.0
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                ended = describe_exit(await self._run_once(number))
            except OSError as error:
                ended = f"an error before it began: {error.strerror}"
            if self._stop.is_set():
                return
            ended = f"worker {number} of the router ended with {ended}"
            if not self._have_served:
                raise WorkerDiedError(f"{ended} before any had served; its log says why")
            lived_s = time.monotonic() - began
            pause_s = min(max(0.5, 2 * pause_s), LONGEST_PAUSE_S) if lived_s < WELL_S else 0.5
            logger.warning("%s; it is started again in %g s", ended, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)

    async def _run_once(self, number: int) -> int:
        """From a worker's start to its exit code."""
        worker = self._running[number] = await self._start(number)
        if self._stop.is_set():
            worker.end(signal.SIGTERM)
        ready = worker.ask()
        ready.add_done_callback(self._note_ready)
        talking = asyncio.create_task(worker.talk(lambda: self._engines))
        talking.add_done_callback(lambda _: self._let_go(worker))
        try:
            return await worker.process.wait()
        finally:
            del self._running[number]
            self.table.clear(number)
            ready.cancel()
            talking.cancel()
            await worker.aclose()

    def _let_go(self, worker: _Worker) -> None:
        """Ends a worker that can be told nothing any more, unless all end by themselves."""
        if not self._stop.is_set():
            worker.end(signal.SIGTERM)

    def _note_ready(self, ready: "asyncio.Future[list[RequestView]]") -> None:
        self._have_served = self._have_served or not ready.cancelled()

    async def _start(self, number: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - it reports by its channel
            files = (self._listener.fileno(), theirs.fileno(), self._table_fd, nowhere.fileno())
            listener, channel, table, reports = files
            settings = WorkerSettings(
                router=self._settings,
                number=number,
                listener=listener,
                channel=channel,
                table=table,
                folder=str(self.folder),
                leader=os.getpid(),
            )
            command = ("-m", "kvferry.cluster.main", "worker", str(reports), f"worker-{number}")
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=PIPE,
                pass_fds=files,
                start_new_session=True,  # a Ctrl-C is the leader's to handle
                env={**os.environ, WORKERS_FOLDER: str(self.folder)},
            )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        with contextlib.suppress(ConnectionError):  # it is dead already
            await process.stdin.drain()
        return _Worker(process, *await asyncio.open_connection(sock=ours, limit=_LINE_BYTES))


# ---- a worker ------------------------------------------------------------------------------------


class SharedListener(socket.socket):
    """A listener of several processes."""

    def listen(self, backlog: int = 0, /) -> None:
        """It does, with the leader's backlog: asyncio would shorten that."""


class Leader:
    """The leader, as a worker sees it."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        processes = settings.router.workers + 1
        self.table = CountTable(settings.table, processes, settings.number)

    @contextlib.asynccontextmanager
    async def followed(
        self, members: Members, last_requests: Callable[[], list[RequestView]]
    ) -> AsyncIterator[None]:
        """Has the members follow the leader's while this is open, and from its start on."""
        channel = socket.socket(fileno=self._settings.channel)
        reader, writer = await asyncio.open_connection(sock=channel, limit=_LINE_BYTES)

        async def hear() -> None:
            tell = _tell.decode(await reader.readline())
            members.follow(tell.engines)
            heard = Heard(requests=last_requests() if tell.asks else [])
            writer.write(msgspec.json.encode(heard) + b"\n")
            await writer.drain()

        async def hear_always() -> None:
            try:
                while True:
                    await hear()
            except Exception as error:
                logger.warning("the router's leader is heard no longer: %r", error)
            # Who knows nothing of the engines any more is to be started again.
            os.kill(os.getpid(), signal.SIGTERM)

        await hear()
        hearing = asyncio.create_task(hear_always())
        try:
            yield
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            writer.close()

    def sweep(self) -> None:
        """Removes what a leader that was killed could not."""
        if os.getppid() != self._settings.leader:
            shutil.rmtree(self._settings.folder, ignore_errors=True)

    def routes(self) -> list[Route]:
        """What the leader answers."""
        paths = ("/health", "/metrics", "/kvferry", "/kvferry/{rest:path}")
        return [Route(path, _PassOn(door(self._settings.folder))) for path in paths]


class _PassOn:
    """An ASGI application that asks the leader; who may ask is the leader's to judge."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        request = Request(scope, receive)
        connector = aiohttp.UnixConnector(self._path, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)  # whoever watches does so for ever
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            # The path that was routed: what the client wrote may name another host.
            url = yarl.URL(f"http://leader{quote(scope['path'])}", encoded=True)
            headers = {
                name: value
                for name in ("authorization", "content-type", "accept")
                if (value := request.headers.get(name)) is not None
            }
            body = None
            if request.method == "PUT":
                body = msgspec.json.encode(await web.BodyReader(PLACE_BYTES).json(request))
            try:
                asked = await session.request(request.method, url, headers=headers, data=body)
            except aiohttp.ClientError as error:
                message = f"the router's leader does not answer: {error}"
                raise ApiError(503, message, code="leader_unavailable") from error
            with contextlib.suppress(web.ClientGoneError, aiohttp.ClientError):
                await web.until_disconnect(receive, _pass_back(asked, send))


_HOP_BY_HOP = ("connection", "date", "keep-alive", "server", "transfer-encoding")


async def _pass_back(asked: aiohttp.ClientResponse, send: Send) -> None:
    headers = [
        (name.lower(), value)
        for name, value in asked.raw_headers
        if name.decode("latin-1").lower() not in _HOP_BY_HOP
    ]
    await send({"type": "http.response.start", "status": asked.status, "headers": headers})
    async for chunk in asked.content.iter_any():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
