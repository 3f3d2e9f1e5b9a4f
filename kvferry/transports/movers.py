"""The copy threads, and the wait for an event before a read begins."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from kvferry.errors import TransferError
from kvferry.transports.base import Transfer, Waitable

logger = logging.getLogger(__name__)


class MoverPool:
    """Copy threads, which start with the first task.

    Tasks run in the order of submission. A task with more work submits itself again, so that
    transfers take turns on the threads.
    """

    def __init__(self, name: str, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads: {threads} is less than 1")
        self.size = threads
        """Number of threads."""
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, task: Callable[[], object]) -> None:
        """Queues a task, which may wait only for memory or a device, and must not raise."""
        self._tasks.put(task)
        if not self._threads:
            self._start()

    def wait(
        self, event: Waitable, then: Callable[[Exception | None], object], keeps: object = None
    ) -> None:
        """Queues the wait for an event; ``then`` is called with the event's error, or ``None``.

        ``keeps`` stays alive until ``then`` is called.
        """
        self.submit(partial(_wait, event, then, keeps))

    def close(self) -> None:
        """Waits for the running tasks, then ends the threads. Idempotent."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._threads or self._closed:
                return
            self._threads = [
                threading.Thread(
                    target=self._run, name=f"kvferry-{self._name}-{number}", daemon=True
                )
                for number in range(self.size)
            ]
            for thread in self._threads:
                thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # a bug in one task must not end a thread that other tasks need
                logger.exception("a mover task failed")
            del task  # the task may hold large objects, and the next may come in days


def _wait(
    event: Waitable, then: Callable[[Exception | None], object], _keeps: object = None
) -> None:
    error = None
    try:
        event.wait()
    except Exception as caught:  # events come from the engine and may raise anything
        error = caught
    then(error)


def start_after(after: Waitable | None, transfer: Transfer, start: Callable[[], object]) -> None:
    """Calls ``start`` once ``after`` has happened: at once for ``None``, else from a thread.

    A transfer of zero bytes is done at once, without ``start``. Each wait has its own thread,
    because a wait on a mover would delay transfers that are ready. If the wait fails, the transfer
    fails. If the transfer was stopped during the wait, ``start`` is not called.
    """
    if not transfer.nbytes:
        if transfer.enter():
            transfer.leave(0, 0)
        return
    if after is None:
        start()
        return

    def then(error: Exception | None) -> None:
        if error is not None:
            transfer.fail(TransferError(f"the event to wait for failed: {error!r}"))
        elif not transfer.stopped:
            transfer.progressed = time.monotonic()
            start()

    threading.Thread(target=_wait, args=(after, then), name="kvferry-after", daemon=True).start()
