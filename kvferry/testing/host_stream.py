"""A thread that takes the place of a device: copies in order, behind the caller's back."""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransferError
from kvferry.layouts.arrays import HOST, MemorySpan, bytes_at
from kvferry.layouts.copier import copy_tiles, warm
from kvferry.layouts.device import CopyEvent, CopyStream
from kvferry.layouts.tiles import Runs, Tiles


class HostCopyEvent(CopyEvent):
    """A point of a :class:`HostCopyStream`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: TransferError | None = None

    def done(self) -> bool:
        """See :meth:`CopyEvent.done`."""
        if self.error is not None:
            raise self.error
        return self.reached.is_set()

    def wait(self) -> None:
        """See :meth:`CopyEvent.wait`."""
        self.reached.wait()
        if self.error is not None:
            raise self.error


class HostCopyStream(CopyStream):
    """Takes the place of a device's stream. Its memory is the host's."""

    device = HOST

    def __init__(self) -> None:
        warm()
        self.pinned: list[int] = []
        """Addresses of what is pinned."""
        self.engine = HostCopyEvent()
        """What the engine is doing, until its ``reached`` is set; there is nothing at first."""
        self.engine.reached.set()
        self._allocated: list[npt.NDArray[np.uint8]] = []
        self._work: queue.SimpleQueue[Callable[[], object] | HostCopyEvent | None]
        self._work = queue.SimpleQueue()
        self._going = threading.Event()
        self._going.set()
        self._error: TransferError | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-host-stream", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Carries nothing out until :meth:`resume`, as a device that has other work to do."""
        self._going.clear()

    def resume(self) -> None:
        """Goes on."""
        self._going.set()

    def fail(self) -> None:
        """Fails as a device does: for good, whatever is asked of it."""
        self._error = TransferError("the device failed: an illegal memory access was encountered")

    def allocate(self, nbytes: int) -> MemorySpan:
        """See :meth:`CopyStream.allocate`."""
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} is not positive")
        array = np.zeros(nbytes, dtype=np.uint8)
        self._allocated.append(array)
        return MemorySpan(array.ctypes.data, nbytes, self.device)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.pin`."""
        self.pinned.append(memory.ctypes.data)

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.unpin`."""
        self.pinned.remove(memory.ctypes.data)

    def upload(self, source: npt.NDArray[np.uint8], target: int) -> None:
        """See :meth:`CopyStream.upload`."""
        self._enqueue(partial(np.copyto, bytes_at(target, source.nbytes), source))

    def download(self, source: int, target: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.download`."""
        self._enqueue(partial(np.copyto, target, bytes_at(source, target.nbytes)))

    def copy(
        self,
        source_addresses: Sequence[int] | npt.NDArray[np.int64],
        target_addresses: Sequence[int] | npt.NDArray[np.int64],
        tiles: Tiles,
        runs: Runs,
    ) -> None:
        """See :meth:`CopyStream.copy`."""
        tables = np.copy(tiles), np.copy(runs)
        self._enqueue(partial(copy_tiles, source_addresses, target_addresses, *tables))

    def record(self) -> CopyEvent:
        """See :meth:`CopyStream.record`."""
        event = HostCopyEvent()
        self._enqueue(event)
        return event

    def engine_event(self) -> CopyEvent:
        """See :meth:`CopyStream.engine_event`."""
        return self.engine

    def close(self) -> None:
        """See :meth:`CopyStream.close`."""
        self.resume()
        self._work.put(None)
        self._thread.join()

    def _enqueue(self, work: Callable[[], object] | HostCopyEvent) -> None:
        if self._error is not None:
            raise self._error
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._going.wait()
            if isinstance(work, HostCopyEvent):
                work.error = self._error
                work.reached.set()
            elif self._error is None:
                work()
