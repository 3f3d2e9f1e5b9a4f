"""Host memory and a thread in the place of a device, for tests without a GPU.

:class:`HostCopyStream` copies in order, behind the caller's back, as a device's stream does.
:class:`HostIpcTransport` is all of :class:`~kvferry.transports.cuda_ipc.CudaIpcTransport` but the
device: its memory is mapped by other processes through ``/dev/shm``. So bookkeeping, bounds,
closing and lost peers are tested.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvferry.errors import PeerLostError, SharedMemoryError, TransferError
from kvferry.layouts.arrays import HOST, MemorySpan, bytes_at
from kvferry.layouts.copier import copy_tiles, warm
from kvferry.layouts.device import CopyEvent, CopyStream
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.cuda_ipc import CudaIpcExtraConfig, CudaIpcTransport
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES, IpcMemory
from kvferry.transports.shm_segment import SHM_DIR, OwnedSegment, PeerSegment


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
    """Takes the place of a device's stream. Its memory is the host's, and can be mapped."""

    device = HOST

    def __init__(self) -> None:
        warm()
        self.pinned: list[int] = []
        """Addresses of what is pinned."""
        self.engine = HostCopyEvent()
        """What the engine is doing, until its ``reached`` is set; there is nothing at first."""
        self.engine.reached.set()
        self.segments: list[OwnedSegment] = []
        """What was allocated, until the stream is closed."""
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
        segment = OwnedSegment.create(nbytes)
        self.segments.append(segment)
        return MemorySpan(segment.array.ctypes.data, nbytes, self.device)

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

    def follow_engine(self) -> None:
        """See :meth:`CopyStream.follow_engine`."""
        self._enqueue(self.engine.reached.wait)

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
        for segment in self.segments:
            segment.close()

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


class HostIpcMemory(IpcMemory):
    """Handles are names of segments."""

    def __init__(self, stream: HostCopyStream) -> None:
        self._stream = stream
        self._mapped: dict[int, PeerSegment] = {}

    @property
    def num_mapped(self) -> int:
        """Allocations of peers that are mapped."""
        return len(self._mapped)

    def export(self, memory: MemorySpan) -> tuple[bytes, int]:
        """See :meth:`IpcMemory.export`."""
        for segment in self._stream.segments:
            offset = memory.address - segment.array.ctypes.data
            if 0 <= offset <= segment.array.nbytes - memory.nbytes:
                return segment.name.encode().ljust(HANDLE_BYTES, b"\0"), offset
        raise TransferError(f"{memory.nbytes} bytes that allocate() has not given out")

    def open(self, handle: bytes) -> MemorySpan:
        """See :meth:`IpcMemory.open`."""
        name = handle.rstrip(b"\0").decode(errors="replace")
        try:
            nbytes = (SHM_DIR / name).stat().st_size
            segment = PeerSegment.attach(name, nbytes)
        except (OSError, ValueError, SharedMemoryError) as error:
            raise PeerLostError(f"the memory of a peer cannot be mapped: {error}") from error
        address = segment.array.ctypes.data
        self._mapped[address] = segment
        return MemorySpan(address, nbytes, self._stream.device)

    def release(self, memory: MemorySpan) -> None:
        """See :meth:`IpcMemory.release`."""
        self._mapped.pop(memory.address).close()


class HostIpcTransport(CudaIpcTransport):
    """The transport for GPUs, without one."""

    @classmethod
    def open_device(cls, _: CudaIpcExtraConfig) -> tuple[CopyStream, IpcMemory]:
        """See :meth:`CudaIpcTransport.open_device`."""
        stream = HostCopyStream()
        return stream, HostIpcMemory(stream)
