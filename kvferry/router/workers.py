"""Several processes that serve the requests of one router.

The first process is the *leader*. Only the leader watches the engines, follows lists, answers
operators and asks engines for the page. The workers serve the clients, all from one listener::

    clients ──▶ worker 1 ──┐
    clients ──▶ worker 2 ──┼──▶ engines      requests, each from the worker that took it
                           │
                leader ────┘                 health checks; operators' changes; page

    leader ──▶ worker   Tell: the engines, after each change of an engine
    worker ──▶ leader   Heard: answer to each Tell, with the worker's last requests
    worker ──▶ leader   over HTTP: clients' requests that only the leader can answer
    all processes       each engine's current work (kvferry.router.counts), and the counters
                        for /metrics, in files of prometheus_client

The leader restarts a dead worker. If the leader dies, its workers see the end of their stdin, and
end too.
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
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
import yarl
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvferry.errors import WorkerDiedError
from kvferry.router.counts import CountTable
from kvferry.router.draining import Drain
from kvferry.router.headers import end_to_end
from kvferry.router.health import EngineState
from kvferry.router.members import Members
from kvferry.router.metrics import WORKERS_FOLDER
from kvferry.router.operators import PLACE_BYTES
from kvferry.router.snapshot import ShownRequest
from kvferry.serving import web
from kvferry.serving.messages import RouterSettings
from kvferry.serving.openai import ApiError
from kvferry.serving.process import TERM_GRACE_S, describe_exit

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1
"""Seconds between two checks for changes of the engines."""
HEAR_S = 2.0
"""Maximum number of seconds that an operator waits until all workers know a change."""
REQUESTS_S = 0.5
"""Maximum number of seconds that a page waits for the workers' last requests."""
LONGEST_PAUSE_S = 30.0
"""Maximum number of seconds before the restart of a worker that has died repeatedly."""
WELL_S = 60.0
"""Lifetime in seconds after which a worker's death no longer counts as repeated."""
_LINE_BYTES = 64 << 20


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker."""

    router: RouterSettings
    number: int
    """Number of the worker, from 1; the leader is 0."""
    listener: int
    """File descriptor of the socket for clients."""
    channel: int
    """File descriptor of the connection to the leader."""
    table: int
    """File descriptor of the table with the engines' counts."""
    folder: str
    """Folder with the leader's socket and the counters."""
    leader: int
    """Process id of the leader."""


class Tell(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Message of the leader to a worker."""

    engines: tuple[EngineState, ...]
    """States of all engines."""
    asks: bool
    """Whether the leader asks for the worker's last requests."""


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer of a worker, sent after the worker has applied the leader's message."""

    requests: list[ShownRequest]
    """The worker's last requests, newest first; empty if the leader did not ask for them."""


_tell = msgspec.json.Decoder(Tell)
_heard = msgspec.json.Decoder(Heard)


def door(folder: str | Path) -> str:
    """Path of the Unix socket at which a leader serves its workers."""
    return str(Path(folder, "leader"))


# ---- the leader ----------------------------------------------------------------------------------


class _Worker:
    """A live worker, as the leader sees it."""

    def __init__(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self._wake = asyncio.Event()
        self._asked: asyncio.Future[list[ShownRequest]] | None = None
        """The worker's answer to the next message, for tasks that wait for this answer."""

    def wake(self) -> None:
        """Notes that there is news for the worker."""
        self._wake.set()

    def ask(self) -> "asyncio.Future[list[ShownRequest]]":
        """The worker's last requests, after the worker has applied the current news."""
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
        self.wake()
        return self._asked

    async def talk(self, engines: Callable[[], tuple[EngineState, ...]]) -> None:
        """Sends the worker the engines' states, one message after the other, until the worker is
        gone.
        """
        told = None
        with contextlib.suppress(OSError, msgspec.DecodeError):  # the worker ends, or has ended
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
        """Closes the connection to the worker."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def end(self, number: signal.Signals) -> None:
        """Sends the worker a signal, unless the worker has ended."""
        # Not by asyncio's process: it would reap a child that has just ended, and asyncio's own
        # wait for the child would then report exit code 255 instead of the child's exit code.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


class Workers:
    """The workers of a router, as the leader sees them."""

    def __init__(self, settings: RouterSettings, listener: socket.socket, folder: Path) -> None:
        """Makes the shared table of counts.

        Args:
            settings: settings of the router.
            listener: socket for clients.
            folder: private folder of this router.
        """
        self.folder = folder
        self._settings = msgspec.structs.replace(settings, engines=())
        self._listener = listener
        self._processes = settings.workers + 1
        self._table_fd = CountTable.make(self._processes)
        self.table = CountTable(self._table_fd, self._processes, 0)
        self._running: dict[int, _Worker] = {}
        self._have_served = False
        """Whether at least one worker was ready."""
        self._engines: tuple[EngineState, ...] = ()
        self._stop = asyncio.Event()

    async def run(self, members: Members, drain: Drain) -> None:
        """Keeps all workers running until the router drains; then drains them too.

        Raises:
            WorkerDiedError: a worker ended before any worker has served.
        """
        self._look(members)
        looking = asyncio.create_task(self._look_always(members))
        keepers = [asyncio.create_task(self._keep(each)) for each in range(1, self._processes)]
        begun = asyncio.create_task(drain.begun.wait())
        cut = asyncio.create_task(drain.cuts.wait())
        all_ended = asyncio.gather(*keepers, return_exceptions=True)
        try:
            await asyncio.wait((begun, *keepers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not drain.begun.is_set():
                drain.cut()  # no worker can serve
            self._stop.set()
            self._listener.close()  # the workers still listen, each until its own end
            self._end_all(signal.SIGTERM)
            await asyncio.wait((all_ended, cut), return_when=asyncio.FIRST_COMPLETED)
            self._end_all(signal.SIGINT)
            await asyncio.wait((all_ended,), timeout=TERM_GRACE_S)
            self._end_all(signal.SIGKILL)
            ended = await all_ended
            for task in (looking, begun, cut):
                task.cancel()
            os.close(self._table_fd)
        for error in ended:
            if error is not None:
                raise error

    def _end_all(self, number: signal.Signals) -> None:
        for worker in tuple(self._running.values()):
            worker.end(number)

    async def tell(self, members: Members) -> None:
        """Waits until all workers that answer know the engines' current states, for at most
        :data:`HEAR_S`.
        """
        self._look(members)
        await self._ask(HEAR_S)

    async def requests(self) -> list[ShownRequest]:
        """The last requests of all workers that answer, newest first."""
        found = [view for views in await self._ask(REQUESTS_S) for view in views]
        return sorted(found, key=lambda view: view.started, reverse=True)

    async def _ask(self, timeout_s: float) -> list[list[ShownRequest]]:
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
        """Runs one worker, and restarts the worker after its end, until all workers should end."""
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
        """Runs one worker from its start to its end; returns the exit code."""
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
        """Ends a worker whose connection is lost, unless all workers are ending."""
        if not self._stop.is_set():
            worker.end(signal.SIGTERM)

    def _note_ready(self, ready: "asyncio.Future[list[ShownRequest]]") -> None:
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
                start_new_session=True,  # only the leader handles a Ctrl-C
                env={**os.environ, WORKERS_FOLDER: str(self.folder)},
            )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        with contextlib.suppress(ConnectionError):  # the worker is dead already
            await process.stdin.drain()
        return _Worker(process, *await asyncio.open_connection(sock=ours, limit=_LINE_BYTES))


# ---- a worker ------------------------------------------------------------------------------------


class SharedListener(socket.socket):
    """A listener shared by several processes."""

    def listen(self, backlog: int = 0, /) -> None:
        """Does nothing: the socket already listens with the leader's backlog, and asyncio would
        shorten it.
        """


class Leader:
    """The leader, as a worker sees it."""

    def __init__(self, settings: WorkerSettings, drain: Drain) -> None:
        self._settings, self._drain = settings, drain
        processes = settings.router.workers + 1
        self.table = CountTable(settings.table, processes, settings.number)

    @contextlib.asynccontextmanager
    async def followed(
        self, members: Members, last_requests: Callable[[], list[ShownRequest]]
    ) -> AsyncIterator[None]:
        """Makes ``members`` follow the leader's members while the context is open. The first states
        are applied before the context opens.
        """
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
            # A worker without news of the engines must be restarted.
            self._drain.begin(web.SHUTDOWN_GRACE_S)

        await hear()
        hearing = asyncio.create_task(hear_always())
        try:
            yield
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            writer.close()

    def sweep(self) -> None:
        """Removes the router's folder if the leader was killed and could not remove it."""
        if os.getppid() != self._settings.leader:
            shutil.rmtree(self._settings.folder, ignore_errors=True)

    def routes(self) -> list[Route]:
        """Routes that the leader answers."""
        paths = ("/health", "/metrics", "/kvferry", "/kvferry/{rest:path}")
        return [Route(path, _PassOn(door(self._settings.folder))) for path in paths]


class _PassOn:
    """An ASGI application that passes requests to the leader; the leader checks the keys."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        request = Request(scope, receive)
        connector = aiohttp.UnixConnector(self._path, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)  # a stream of snapshots has no end
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            # The routed path: the client's own URL may name another host.
            url = yarl.URL(f"http://leader{quote(scope['path'])}", encoded=True)
            headers = {
                name: value
                for name in ("authorization", "content-type", "accept")
                if (value := request.headers.get(name)) is not None
            }
            body = None
            if request.method == "PUT":
                body = msgspec.json.encode(await web.BodyReader(PLACE_BYTES).json(request))
            ask = partial(session.request, request.method, url, headers=headers, data=body)
            with contextlib.suppress(web.ClientGoneError, aiohttp.ClientError):
                await web.until_disconnect(receive, _pass_back(ask, send))


async def _pass_back(ask: Callable[[], Awaitable[aiohttp.ClientResponse]], send: Send) -> None:
    try:
        asked = await ask()
    except aiohttp.ClientError as error:
        message = f"the router's leader does not answer: {error}"
        raise ApiError(503, message, code="leader_unavailable") from error
    headers = end_to_end(asked.raw_headers)
    await send({"type": "http.response.start", "status": asked.status, "headers": headers})
    async for chunk in asked.content.iter_any():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
