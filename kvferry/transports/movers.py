"""The threads that copy, and the wait for an event before a read begins."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from kvferry.errors import TransferError
from kvferry.transports.base import Transfer, Waitable

logger = logging.getLogger(__name__)


class MoverPool:
    """Threads that copy, started with the first task. Tasks run in the order in which they were
    submitted; one that has more to do submits itself again, so that transfers share the threads in
    turns.
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
        """Queues a task. It must not block on anything but memory, and must not raise."""
        self._tasks.put(task)
        if not self._threads:
            self._start()

    def close(self) -> None:
        """Waits for the tasks that run now, then ends the threads. Idempotent."""
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
            except Exception:  # a bug in one task must not end the thread that others need
                logger.exception("a mover task failed")


def start_after(after: Waitable | None, transfer: Transfer, start: Callable[[], object]) -> None:
    """Calls ``start`` once ``after`` has happened: at once for ``None``, else from a thread.

    A transfer of no bytes is done now, without a start. The wait has a thread of its own: on a
    mover it would hold up transfers that are ready. If it fails, so does the transfer; if the
    transfer was stopped meanwhile, ``start`` is not called.
    """
    if not transfer.nbytes:
        if transfer.enter():
            transfer.leave(0, 0)
        return
    if after is None:
        start()
        return

    def wait() -> None:
        try:
            after.wait()
        except Exception as error:  # events are the engine's; they may raise anything
            transfer.fail(TransferError(f"the event to wait for failed: {error!r}"))
            return
        if not transfer.stopped:
            transfer.progressed = time.monotonic()
            start()

    threading.Thread(target=wait, name="kvferry-after", daemon=True).start()
