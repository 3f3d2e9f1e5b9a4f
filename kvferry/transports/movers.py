"""What transports share: the ledger of transfers, the fence around landing, the mover threads."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvferry.errors import CancelledError, KVFerryError, TransferError
from kvferry.transports.base import Transfer, TransferState, Waitable

logger = logging.getLogger(__name__)


class Ledger:
    """The transfers of one transport: those under way, and those that ended and were not polled.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Transfer, Landing] = {}
        self._ended: list[Transfer] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def enter(self, landing: "Landing") -> bool:
        """Takes a transfer in; false, and the transfer has failed, if the transport is closed."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._running[landing.transfer] = landing
        if closed:
            landing.fail(TransferError("the transport is closed"))
        return not closed

    def finish(self, transfer: Transfer, state: TransferState, error: KVFerryError | None) -> bool:
        """Makes ``transfer`` terminal; false if it was already."""
        if not transfer.end(state, error):
            return False
        with self._lock:
            self._running.pop(transfer, None)
            self._ended.append(transfer)
        return True

    def cancel(self, transfer: Transfer) -> None:
        """Stops a transfer if it is under way; terminal once the chunks under way have landed."""
        with self._lock:
            landing = self._running.get(transfer)
        if landing is not None:
            landing.stop(TransferState.CANCELLED, CancelledError("the read was cancelled"))

    def poll(self) -> list[Transfer]:
        """Transfers that ended since the last call, each once."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def close(self) -> bool:
        """Fails what is under way and lets nothing in any more; false if that was done before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            landings = list(self._running.values())
        for landing in landings:
            landing.fail(TransferError("the transport was closed"))
        return True


class Landing:
    """The fence of one transfer: counts the threads that write its target memory.

    A thread writes between :meth:`enter` and :meth:`leave` only. Once :meth:`stop` was called no
    thread is let in, and the transfer becomes terminal when the last one has left: a terminal
    state proves that nothing lands any more.
    """

    def __init__(
        self,
        transfer: Transfer,
        ledger: Ledger,
        *,
        verify: Callable[[], KVFerryError | None] = lambda: None,
        on_end: Callable[[TransferState], object] = lambda _: None,
    ) -> None:
        """``verify`` is asked before the transfer is ``DONE``; an error fails it instead.

        ``on_end`` is called once with the terminal state, just before that shows.
        """
        self.transfer = transfer
        self._ledger = ledger
        self._verify = verify
        self._on_end = on_end
        self._lock = threading.Lock()
        self._writers = 0
        self._verdict: tuple[TransferState, KVFerryError | None] | None = None
        self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether nobody may enter any more."""
        return self._verdict is not None

    def enter(self) -> bool:
        """Whether the calling thread may write now; if so it must call :meth:`leave`."""
        with self._lock:
            if self._verdict is not None:
                return False
            self._writers += 1
            return True

    def leave(self, nbytes: int, segments: int) -> None:
        """The calling thread has written ``nbytes`` in ``segments`` copies and writes no more.

        When all bytes are there the transfer is done.
        """
        transfer = self.transfer
        with self._lock:
            self._writers -= 1
            transfer.bytes_done += nbytes
            transfer.segments += segments
            transfer.progressed = time.monotonic()
            if self._verdict is None and transfer.bytes_done == transfer.nbytes:
                error = self._verify()
                state = TransferState.DONE if error is None else TransferState.FAILED
                self._verdict = (state, error)
        self._settle()

    def stop(self, state: TransferState, error: KVFerryError | None = None) -> None:
        """Lets nobody in any more; the first verdict stands. Idempotent, never waits."""
        with self._lock:
            if self._verdict is None:
                self._verdict = (state, error)
        self._settle()

    def fail(self, error: KVFerryError) -> None:
        """Stops as ``FAILED``."""
        self.stop(TransferState.FAILED, error)

    def _settle(self) -> None:
        with self._lock:
            if self._verdict is None or self._writers or self._ended:
                return
            self._ended = True
            state, error = self._verdict
        self._on_end(state)
        self._ledger.finish(self.transfer, state, error)


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


class ChunkedRead:
    """One read: a copy that the movers step through in turns, and its fence."""

    def __init__(self, copy: Chunks, landing: Landing, pool: MoverPool) -> None:
        self._copy = copy
        self._landing = landing
        self._pool = pool
        self._lock = threading.Lock()
        self._bytes_seen = 0
        self._segments_seen = 0

    def start(self) -> None:
        """Puts as many movers on it as are of use; each takes the next chunk when it has turn."""
        for _ in range(max(1, min(self._pool.size, self._copy.num_chunks))):
            self._pool.submit(self._step)

    def _step(self) -> None:
        if not self._landing.enter():
            return
        more, nbytes, segments = False, 0, 0
        try:
            more = self._copy.step(1)
            nbytes, segments = self._progress()
        except KVFerryError as error:
            self._landing.fail(error)
        except Exception as error:  # a bug of ours: this read fails, the mover goes on
            logger.exception("a copy failed")
            self._landing.fail(TransferError(f"the copy failed: {error!r}"))
        finally:
            self._landing.leave(nbytes, segments)
        if more:
            self._pool.submit(self._step)

    def _progress(self) -> tuple[int, int]:
        """Bytes and segments since the last call, by whichever mover."""
        with self._lock:
            nbytes = self._copy.bytes_done - self._bytes_seen
            segments = self._copy.segments - self._segments_seen
            self._bytes_seen += nbytes
            self._segments_seen += segments
        return nbytes, segments


def start_after(after: Waitable | None, landing: Landing, start: Callable[[], object]) -> None:
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
            landing.fail(TransferError(f"the event to wait for failed: {error!r}"))
            return
        if not landing.stopped:
            landing.transfer.progressed = time.monotonic()
            start()

    threading.Thread(target=wait, name="kvferry-after", daemon=True).start()
