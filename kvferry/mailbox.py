"""State that several threads need has a single owner: a thread with a mailbox, or a series of
tasks.

A :class:`Mailbox` is a thread. Other threads post tasks to the mailbox, and only its thread touches
the state that it owns. Between tasks the thread takes its *turn*: it does the work that is due and
says when the next turn is due. The thread sleeps until this time, until a task is posted, or until
a watched socket is ready::

    post(task) ──┐
    socket ──────┼──▶ sleep ──▶ tasks, handlers ──▶ turn() ──▶ seconds until the next turn ─┐
    time is up ──┘      ▲                                                                   │
                        └───────────────────────────────────────────────────────────────────┘

A :class:`Serial` has no thread: its tasks run one after another on the threads that post them.
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
"""Seconds until the next turn after a turn that failed, and so did not return a time."""
LATE_S = 2.0
"""Seconds of delay of a turn from which on the thread counts as not running."""

Task = Callable[[], object]


class Poller(Protocol):
    """An object that waits for several descriptors or sockets: ``zmq.Poller``, ``select.poll``."""

    def register(self, watched: Any, flags: int, /) -> object:
        """Begins to wait for ``watched``."""

    def unregister(self, watched: Any, /) -> object:
        """No longer waits for ``watched``."""

    def poll(self, milliseconds: int | None, /) -> list[tuple[Any, int]]:
        """Descriptors and sockets that are ready; waits at most ``milliseconds``, for ever if
        ``None``.
        """


class Owner:
    """The runner of tasks, with the error by which a task may have broken the owned state."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.defect: BaseException | None = None
        """Error that the tasks did not survive; ``None`` if no such error is known."""

    def check(self) -> None:
        """Raises such an error again.

        Raises:
            EngineError: a task failed, so the state that the tasks own is unreliable.
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
        """Nothing runs before :meth:`start`, so that the owner can finish its own constructor.

        Args:
            name: name of the thread, after ``kvferry-``.
            turn: does the work that is due and returns the seconds until its next call. 0 or less
                means at once; ``None`` means after the next posted task or ready socket.
            poller: waits for the sockets of :meth:`watch`. Without a poller nothing can be watched,
                and a task begins a little sooner.
            survives: whether the thread continues after an error of a task or a turn, which is
                always logged. Otherwise the thread ends, and :meth:`check` raises the error.
            clock: monotonic clock, in seconds.
        """
        super().__init__(f"kvferry-{name}")
        self._turn = turn
        self._survives = survives
        self._tasks: deque[Task | None] = deque()
        """Tasks to run; ``None`` ends the thread."""
        self._posted = threading.Lock()
        """Lock that, without a poller, is held if nothing was posted since the thread last woke. It
        replaces ``queue.SimpleQueue``, whose ``get`` with a short timeout may wait for ever: Python
        3.11 continues with the rest of the timeout, which may be negative by then."""
        self._posted.acquire()
        self._poller = poller
        self._handlers: dict[object, Task] = {}
        self.num_ready = 0
        """Number of descriptors that were ready when the thread last woke; posted tasks count as
        one."""
        self._lock = threading.Lock()
        self._event_fd = -1
        self._closed = False
        self._clock = clock
        self._awake_since = clock()
        self._due = math.inf
        """Clock reading at which the next turn is due."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        if poller is not None:
            self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.watch(self._event_fd, self._quiet)

    def start(self) -> Self:
        """Starts the thread; ``with`` also starts it."""
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    # ---- any thread ---------------------------------------------------------------------------

    @property
    def awake_since(self) -> float:
        """Clock reading since which every turn has come in time; now, if a turn is late. A judge of
        other processes' silence must count from here: while this thread did not run, it received no
        message.
        """
        now = self._clock()
        return now if now > self._due + LATE_S else self._awake_since

    @property
    def awake_s(self) -> float:
        """Number of seconds for which every turn has come in time."""
        return self._clock() - self.awake_since

    def post(self, task: Task) -> None:
        """Makes the thread call ``task`` after all tasks posted before. A thread that has ended
        calls no more tasks.
        """
        self._tasks.append(task)
        self._wake()

    def call(self, task: Callable[[], T]) -> T:
        """Makes the thread call ``task``, and waits for the result or the exception.

        Raises:
            EngineError: the thread has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except Exception as error:  # any error of the caller's task
                future.set_exception(error)

        self.post(run)
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=1.0)
            if not self._thread.is_alive() and not future.done():
                raise EngineError(f"{self._name} has ended") from self.defect

    def close(self) -> None:
        """Runs the tasks posted before, then ends the thread. Idempotent."""
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
            with contextlib.suppress(RuntimeError):  # another thread has just woken it
                self._posted.release()
        else:
            with self._lock:  # after closing, the descriptor may have a new owner
                if self._event_fd >= 0:
                    os.eventfd_write(self._event_fd, 1)

    # ---- the thread, or its owner before start() ----------------------------------------------

    def watch(self, socket: Any, handler: Task, flags: int = select.POLLIN) -> None:
        """Calls ``handler`` if a descriptor or socket is readable, or ready according to ``flags``.

        Replaces an earlier handler for the same socket.
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
        """Turn, sleep, tasks and handlers; returns false at the end of the thread."""
        pause_s = self._take_turn()
        if self._poller is None:
            self._posted.acquire(timeout=-1 if pause_s is None else pause_s)
        else:
            milliseconds = None if pause_s is None else math.ceil(pause_s * 1000)
            ready = self._poller.poll(milliseconds)
            self.num_ready = len(ready)
            for socket, _ in ready:
                handler = self._handlers.get(socket)
                if handler is not None:  # an earlier handler may have unwatched it
                    self._guarded(handler)
        return self._run_tasks()

    def _take_turn(self) -> float | None:
        """Seconds until the next turn, never below 0: a poller would wait for ever."""
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
        """Runs the tasks posted so far; returns false at the end of the thread.

        Tasks that these tasks post come after the descriptors and the turn, so that tasks cannot
        block them for ever.
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
        """Resets the descriptor; posted tasks run after the handlers."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)


class Serial(Owner):
    """Runs tasks in order, never two at a time, on the threads that post them; has no own thread.

    State that only such tasks touch needs no lock. No thread waits: a thread that runs tasks also
    runs the tasks that other threads post. If no other thread runs tasks, a task costs no change of
    threads.

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
        """Runs ``task`` after all tasks posted before, on this thread or on the thread that runs
        them.
        """
        self._tasks.append(task)
        # Checked again after each release: another thread may have failed to acquire in between.
        while self._tasks and self._running.acquire(blocking=False):
            try:
                while self._tasks:
                    self._run(self._tasks.popleft())
            finally:
                self._running.release()

    def _run(self, task: Task) -> None:
        try:
            task()
        except Exception as defect:  # the thread belongs to the caller
            logger.exception("%s failed", self._name)
            self.defect = defect
