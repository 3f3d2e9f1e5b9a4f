"""The threads that copy, and the reads that they share in turns."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvferry.errors import KVFerryError, TransferError
from kvferry.transports.base import Transfer, Transfers, Waitable

logger = logging.getLogger(__name__)


class MoverPool:
    """Threads that copy. Tasks run in the order they were submitted; one that has more to do
    submits itself again, so that transfers share the threads in turns.
    """

    def __init__(self, name: str, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads: {threads} is less than 1")
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvferry-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def size(self) -> int:
        """Number of threads."""
        return len(self._threads)

    def submit(self, task: Callable[[], object]) -> None:
        """Queues a task. It must not block on anything but memory, and must not raise."""
        self._tasks.put(task)

    def close(self) -> None:
        """Waits for the tasks that run now, then ends the threads. Idempotent."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # a bug in one task must not end the thread that others need
                logger.exception("a mover task failed")


class Chunks(Protocol):
    """A copy in chunks that any number of threads may work on together."""

    @property
    def bytes_done(self) -> int:
        """Bytes of the chunks that are complete."""

    @property
    def segments(self) -> int:
        """Contiguous copies that the complete chunks made."""

    @property
    def num_chunks(self) -> int:
        """Chunks in all."""

    def step(self, nbytes: int) -> bool:
        """Copies chunks until about ``nbytes`` are copied; returns whether any are left.

        Raises:
            KVFerryError: the chunk cannot be copied; some of its bytes may be there.
        """


class CopyTransfer(Transfer):
    """A read that movers copy: each takes the next chunk when it has its turn."""

    def __init__(self, nbytes: int, transfers: Transfers, copy: Chunks, pool: MoverPool) -> None:
        """``copy`` is of ``nbytes``."""
        super().__init__(nbytes, transfers)
        self._copy = copy
        self._pool = pool
        self._bytes_seen = 0
        self._segments_seen = 0

    def start(self) -> None:
        """Puts as many movers on it as are of use."""
        for _ in range(max(1, min(self._pool.size, self._copy.num_chunks))):
            self._pool.submit(self._turn)

    def _turn(self) -> None:
        if not self.enter():
            return
        more, nbytes, segments = False, 0, 0
        try:
            more = self._copy.step(1)
            nbytes, segments = self._progress()
        except KVFerryError as error:
            self.fail(error)
        except Exception as error:  # a bug of ours: this read fails, the mover goes on
            logger.exception("a copy failed")
            self.fail(TransferError(f"the copy failed: {error!r}"))
        finally:
            self.leave(nbytes, segments)
        if more:
            self._pool.submit(self._turn)

    def _progress(self) -> tuple[int, int]:
        """Bytes and segments since the last call, by whichever mover."""
        with self._lock:
            nbytes = self._copy.bytes_done - self._bytes_seen
            segments = self._copy.segments - self._segments_seen
            self._bytes_seen += nbytes
            self._segments_seen += segments
        return nbytes, segments


def start_after(after: Waitable | None, transfer: Transfer, start: Callable[[], object]) -> None:
    """Calls ``start`` once ``after`` has happened: at once for ``None``, else from a thread.

    The wait has a thread of its own: on a mover it would hold up transfers that are ready. If it
    fails, so does the transfer; if the transfer was stopped meanwhile, ``start`` is not called.
    """
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
