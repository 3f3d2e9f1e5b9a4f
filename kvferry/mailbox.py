"""How state that several threads want has one owner: a thread with a mailbox, or a series of tasks.

A :class:`Mailbox` is a thread. Others post tasks to it, and nobody else touches what it owns.
Between tasks it takes its *turn*, which does what is due and says when it wants the next one. It
sleeps until then, until something is posted, or until a socket that it watches has something to
say::

    post(task) ──┐
    socket ──────┼──▶ sleep ──▶ tasks, handlers ──▶ turn() ──▶ seconds until the next turn ─┐
    time is up ──┘      ▲                                                                   │
                        └───────────────────────────────────────────────────────────────────┘

A :class:`Serial` has no thread: its tasks run one after the other on the threads that post them.
"""

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, Self, TypeVar

from kvferry.errors import EngineError
from kvferry.lifetimes import Closing

logger = logging.getLogger(__name__)

T = TypeVar("T")

AFTER_FAILURE_S = 1.0
"""Seconds until a turn is taken again that failed, and so did not say when it wants to be."""
LATE_S = 2.0
"""Seconds by which a turn comes later than asked for, from which on the thread did not run."""

Task = Callable[[], object]


class Poller(Protocol):
    """What waits for several descriptors or sockets: ``zmq.Poller``, ``select.poll``."""

    def register(self, watched: Any, flags: int, /) -> object:
        """Begins to wait for it."""

    def unregister(self, watched: Any, /) -> object:
        """No longer waits for it."""

    def poll(self, milliseconds: int | None, /) -> list[tuple[Any, int]]:
        """What is ready; waits so long at most, for ever with ``None``."""


class Owner:
    """Whoever runs tasks, and what one of them may have broken."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.defect: BaseException | None = None
        """What it did not survive; ``None`` while nothing has shown that."""

    def check(self) -> None:
        """Raises such a defect.

        Raises:
            EngineError: there was one; what the tasks own cannot be relied on.
        """
        if self.defect is not None:
            raise EngineError(f"{self._name} died: {self.defect!r}") from self.defect


class Mailbox(Owner, Closing):
    """A thread with a queue of tasks.

    >>> with Mailbox("example") as mailbox:
    ...     mailbox.call(lambda: 6 * 7)
    42
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None] = lambda: None,
        *,
        poller: Poller | None = None,
        survives: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs before :meth:`start`, so that its owner can finish its own constructor.

        Args:
            name: of the thread, after ``kvferry-``.
            turn: does what is due; returns the seconds after which it wants to be called again, 0
                or less for at once, ``None`` for not before something was posted or a socket is
                ready.
            poller: waits for what :meth:`watch` names; without one nothing can be watched, and a
                task begins a little sooner.
            survives: whether the thread goes on after a task or a turn has raised, which is logged
                either way. Otherwise it ends, and :meth:`check` tells its owner why.
            clock: seconds that never run backwards.
        """
        super().__init__(f"kvferry-{name}")
        self._turn = turn
        self._survives = survives
        self._tasks: deque[Task | None] = deque()
        """``None`` ends the thread."""
        self._posted = threading.Lock()
        """Where there is no poller: held while nothing was posted since the thread last woke. Not
        ``queue.SimpleQueue``, whose ``get`` with a short timeout may wait for ever: Python 3.11
        goes on with what is left of the timeout, which may be less than nothing by then."""
        self._posted.acquire()
        self._poller = poller
        self._handlers: dict[object, Task] = {}
        self.num_ready = 0
        """What had something to say when the thread last woke, the posting of tasks included."""
        self._lock = threading.Lock()
        self._event_fd = -1
        self._closed = False
        self._clock = clock
        self._awake_since = clock()
        self._due = math.inf
        """Clock reading by which the next turn is to come."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        if poller is not None:
            self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.watch(self._event_fd, self._quiet)

    def start(self) -> Self:
        """Starts the thread; ``with`` does it too."""
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    # ---- any thread ---------------------------------------------------------------------------

    @property
    def awake_since(self) -> float:
        """Clock reading since when every turn has come in time; now, while one is late. Whoever
        judges the silence of others counts from here: while this thread did not run, it heard
        nobody.
        """
        now = self._clock()
        return now if now > self._due + LATE_S else self._awake_since

    @property
    def awake_s(self) -> float:
        """For how many seconds every turn has come in time."""
        return self._clock() - self.awake_since

    def post(self, task: Task) -> None:
        """Has the thread call ``task``, after what was posted before. Once it has ended, nobody
        does.
        """
        self._tasks.append(task)
        self._wake()

    def call(self, task: Callable[[], T]) -> T:
        """Has the thread call ``task`` and waits for what it returns, or raises.

        Raises:
            EngineError: the thread has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except Exception as error:  # the caller's, whatever it is
                future.set_exception(error)

        self.post(run)
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=1.0)
            if not self._thread.is_alive() and not future.done():
                raise EngineError(f"{self._name} has ended") from self.defect

    def close(self) -> None:
        """Runs what was posted before, then ends the thread. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._tasks.append(None)
            self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            if self._event_fd >= 0:
                os.close(self._event_fd)
                self._event_fd = -1

    def _wake(self) -> None:
        if self._poller is None:
            with contextlib.suppress(RuntimeError):  # somebody has woken it just now
                self._posted.release()
        else:
            with self._lock:  # once closed, the descriptor may be somebody else's
                if self._event_fd >= 0:
                    os.eventfd_write(self._event_fd, 1)

    # ---- the thread, or its owner before start() ----------------------------------------------

    def watch(self, socket: Any, handler: Task, flags: int = select.POLLIN) -> None:
        """Calls ``handler`` whenever a descriptor or socket can be read, or as ``flags`` say.

        In place of what was said of it before.
        """
        assert self._poller is not None  # its owner gave one
        self._handlers[socket] = handler
        self._poller.register(socket, flags)  # zmq.POLLIN has the same value

    def unwatch(self, socket: Any) -> None:
        """Undoes :meth:`watch`."""
        assert self._poller is not None  # as above
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as defect:
            logger.exception("%s died", self._name)
            self.defect = defect

    def _round(self) -> bool:
        """Turn, sleep, tasks and handlers; false once it is to end."""
        pause_s = self._take_turn()
        if self._poller is None:
            self._posted.acquire(timeout=-1 if pause_s is None else pause_s)
        else:
            milliseconds = None if pause_s is None else math.ceil(pause_s * 1000)
            ready = self._poller.poll(milliseconds)
            self.num_ready = len(ready)
            for socket, _ in ready:
                handler = self._handlers.get(socket)
                if handler is not None:  # not unwatched by the one before
                    self._guarded(handler)
        return self._run_tasks()

    def _take_turn(self) -> float | None:
        """Seconds until the next turn, never less than 0: to a poller that would mean for ever."""
        pause_s: float | None = AFTER_FAILURE_S

        def turn() -> None:
            nonlocal pause_s
            pause_s = self._turn()

        began = self._clock()
        if began > self._due + LATE_S:
            self._awake_since = began
        self._guarded(turn)
        if pause_s is None:
            self._due = math.inf
            return None
        pause_s = max(pause_s, 0.0)
        self._due = began + pause_s
        return pause_s

    def _run_tasks(self) -> bool:
        """Runs what was posted so far; false once it is to end.

        What these post comes after the descriptors and the turn: nobody keeps them off for ever.
        """
        for _ in range(len(self._tasks)):
            task = self._tasks.popleft()
            if task is None:
                return False
            self._guarded(task)
        return True

    def _guarded(self, task: Task) -> None:
        try:
            task()
        except Exception:
            if not self._survives:
                raise
            logger.exception("%s failed at something; it goes on", self._name)

    def _quiet(self) -> None:
        """What was posted runs after the handlers."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)


class Serial(Owner):
    """Runs tasks one at a time, in order, on whichever thread posts them: no thread of its own.

    What only such tasks touch needs no lock. Nobody waits: while one thread runs tasks, it runs
    those that others post too. So where nobody is in it, a task costs no change of threads.

    >>> serial, seen = Serial("example"), []
    >>> serial.post(lambda: (serial.post(lambda: seen.append("second")), seen.append("first")))
    >>> seen
    ['first', 'second']
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._tasks: deque[Task] = deque()
        self._running = threading.Lock()

    def post(self, task: Task) -> None:
        """Runs ``task`` after those posted before: now, or by whoever is running them."""
        self._tasks.append(task)
        # Looked at again after each release: somebody may have come in vain in between.
        while self._tasks and self._running.acquire(blocking=False):
            try:
                while self._tasks:
                    self._run(self._tasks.popleft())
            finally:
                self._running.release()

    def _run(self, task: Task) -> None:
        try:
            task()
        except Exception as defect:  # the thread is somebody else's
            logger.exception("%s failed", self._name)
            self.defect = defect
