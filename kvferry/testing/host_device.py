"""Host memory and a thread in the place of a device, for tests without a GPU.

:class:`HostCopyStream` copies in order and asynchronously, as a device's stream does.
:class:`HostIpcTransport` is :class:`~kvferry.transports.cuda_ipc.CudaIpcTransport` without the
device: other processes map the memory through ``/dev/shm``. This tests bookkeeping, bounds, closing
and lost peers. :class:`HostPackedTcpTransport` and :class:`HostPackedUcxTransport` serve the bytes
that such a device packs.

:class:`HostDevice` is a whole device for the caches of fake engines. The device's addresses are
invalid on the host, so a path that touches a cache from the host ends the test run.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import PeerLostError, SharedMemoryError, TransferError
from kvferry.layouts.arrays import HOST, ArrayView, ByteArray, MemorySpan, bytes_at
from kvferry.layouts.copier import copy_tiles, warm
from kvferry.layouts.device import CopyEvent, CopyStream, PreparedCopy
from kvferry.layouts.digest import digest_rows
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.lifetimes import Closing
from kvferry.testing.known_cache import CacheDevice, UintArray
from kvferry.transports.cuda_ipc import CudaIpcExtraConfig, CudaIpcTransport
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES, IpcMemory
from kvferry.transports.packing import Packer
from kvferry.transports.shm_segment import SHM_DIR, OwnedSegment, PeerSegment
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.ucx import UcxTransport
from kvferry.transports.wire import WireTransport

AWAY = 1 << 48
"""Offset of every address of a :class:`HostDevice`, larger than any address of the host."""

Addresses: TypeAlias = Sequence[int] | npt.NDArray[np.int64]


def _on_host(addresses: Addresses) -> npt.NDArray[np.int64]:
    """Host addresses of the device memory at the given addresses."""
    return np.array(addresses, dtype=np.int64) % AWAY


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
    """A stream of a device that is host memory, which other processes can map."""

    device = HOST
    first_address = 0
    """Offset of the addresses of allocated memory."""

    def __init__(self) -> None:
        warm()
        self.pinned: list[int] = []
        """Addresses of the pinned memory."""
        self.engine = HostCopyEvent()
        """Work of the engine, running until its ``reached`` is set; the engine starts idle."""
        self.engine.reached.set()
        self.segments: list[OwnedSegment] = []
        """Allocated memory, until the stream is closed."""
        self._work: queue.SimpleQueue[Callable[[], object] | HostCopyEvent | None]
        self._work = queue.SimpleQueue()
        self._going = threading.Event()
        self._going.set()
        self._error: TransferError | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-host-stream", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stops all work until :meth:`resume`, like a device busy with other work."""
        self._going.clear()

    def resume(self) -> None:
        """Continues the work."""
        self._going.set()

    def fail(self) -> None:
        """Fails as a device does: permanently, for every later call."""
        self._error = TransferError("the device failed: an illegal memory access was encountered")

    def allocate(self, nbytes: int) -> MemorySpan:
        """See :meth:`CopyStream.allocate`."""
        segment = OwnedSegment.create(nbytes)
        self.segments.append(segment)
        return MemorySpan(segment.array.ctypes.data + self.first_address, nbytes, self.device)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.pin`."""
        self.pinned.append(memory.ctypes.data)

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.unpin`."""
        self.pinned.remove(memory.ctypes.data)

    def upload(self, source: npt.NDArray[np.uint8], target: int) -> None:
        """See :meth:`CopyStream.upload`."""
        self._enqueue(partial(np.copyto, bytes_at(target % AWAY, source.nbytes), source))

    def download(self, source: int, target: npt.NDArray[np.uint8]) -> CopyEvent:
        """See :meth:`CopyStream.download`."""
        self._enqueue(partial(np.copyto, target, bytes_at(source % AWAY, target.nbytes)))
        return self.record()

    def prepare(
        self,
        source_addresses: Addresses,
        target_addresses: Addresses,
        tiles: Tiles,
        most_tokens: int = 0,
    ) -> PreparedCopy:
        """See :meth:`CopyStream.prepare`."""
        ends = _on_host(source_addresses), _on_host(target_addresses)
        prepared = partial(copy_tiles, *ends, np.copy(tiles))

        def copy(runs: Runs) -> CopyEvent:
            self._enqueue(partial(prepared, np.copy(runs)))
            return self.record()

        return copy

    def digest(
        self,
        addresses: Addresses,
        tiles: Tiles,
        runs: Runs,
        positions: npt.NDArray[np.int64],
        keys: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.uint64]:
        """See :meth:`CopyStream.digest`."""
        found: npt.NDArray[np.uint64] = self.call(
            partial(digest_rows, _on_host(addresses), tiles, runs, positions, keys)
        )
        return found

    def call(self, work: Callable[[], Any]) -> Any:
        """The result of ``work``, which the thread runs after all earlier work."""
        found: list[Any] = []
        self._enqueue(lambda: found.append(work()))
        self.record().wait()
        return found[0]

    def follow(self, event: CopyEvent) -> None:
        """See :meth:`CopyStream.follow`."""
        assert isinstance(event, HostCopyEvent)
        self._enqueue(event.reached.wait)

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
    """IPC memory whose handles are names of shared memory segments."""

    def __init__(self, stream: HostCopyStream) -> None:
        self._stream = stream
        self._mapped: dict[int, PeerSegment] = {}

    @property
    def num_mapped(self) -> int:
        """Number of mapped allocations of peers."""
        return len(self._mapped)

    def export(self, memory: MemorySpan) -> tuple[bytes, int]:
        """See :meth:`IpcMemory.export`."""
        for segment in self._stream.segments:
            offset = memory.address % AWAY - segment.array.ctypes.data
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
        address = segment.array.ctypes.data + self._stream.first_address
        self._mapped[address] = segment
        return MemorySpan(address, nbytes, self._stream.device)

    def release(self, memory: MemorySpan) -> None:
        """See :meth:`IpcMemory.release`."""
        self._mapped.pop(memory.address).close()


class HostIpcTransport(CudaIpcTransport):
    """The transport for GPUs, without a GPU."""

    @classmethod
    def open_device(cls, _: CudaIpcExtraConfig) -> tuple[CopyStream, IpcMemory]:
        """See :meth:`CudaIpcTransport.open_device`."""
        stream = HostCopyStream()
        return stream, HostIpcMemory(stream)


class _HostPacking(WireTransport):
    """Puts the memory of a wire transport on a host device, which packs the bytes for reads."""

    @cached_property
    def device(self) -> HostCopyStream:
        """The stream of the device."""
        return HostCopyStream()

    @cached_property
    def packer(self) -> Packer:
        """Packs the bytes for reads."""
        return Packer([self.device], 16 << 20)

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """See :meth:`Transport.allocate`."""
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} is not positive")
        memory = self.device.allocate(nbytes)
        return self.register_packed(memory, self.packer), memory.as_array()

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        super().close()  # type: ignore[safe-super]  # of the wire transport
        if not self.packer.is_closed:
            self.packer.close()
            self.device.close()


class HostPackedTcpTransport(_HostPacking, TcpTransport):
    """``tcp`` that serves the bytes packed by a host device."""


class HostPackedUcxTransport(_HostPacking, UcxTransport):
    """``ucx`` that serves the bytes packed by a host device."""


class HostDeviceStream(HostCopyStream):
    """A stream of a :class:`HostDevice`."""

    device = "cuda:0"
    first_address = AWAY


class HostDevice(CacheDevice, Closing):
    """A device whose memory is out of the host's reach."""

    def __init__(self) -> None:
        self.engine = HostDeviceStream()
        """Stream for the engines' work on the device."""
        self.streams: list[HostDeviceStream] = []
        """Streams opened by connectors."""

    def open_stream(self) -> HostDeviceStream:
        """Opens a stream for a connector."""
        self.streams.append(HostDeviceStream())
        return self.streams[-1]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Within the block, the device does not carry out the engines' work."""
        for stream in self.streams:
            stream.engine = HostCopyEvent()
        try:
            yield
        finally:
            for stream in self.streams:
                stream.engine.reached.set()

    def ipc_transport(self) -> type[CudaIpcTransport]:
        """A ``cuda_ipc`` transport class for this device."""
        engine = self.engine

        class Transport(CudaIpcTransport):
            @classmethod
            def open_device(cls, _: CudaIpcExtraConfig) -> tuple[CopyStream, IpcMemory]:
                return HostDeviceStream(), HostIpcMemory(engine)

        return Transport

    def allocate(self, nbytes: int) -> MemorySpan:
        """See :meth:`CacheDevice.allocate`."""
        return self.engine.allocate(nbytes)

    def cells(self, view: ArrayView) -> "_HostCells":
        """See :meth:`CacheDevice.cells`."""
        address, nbytes = view.storage
        array: UintArray = np.ndarray(
            view.shape,
            dtype=f"u{view.itemsize}",
            buffer=bytes_at(address % AWAY, nbytes).data,
            offset=view.address - address,
            strides=view.strides,
        )
        return _HostCells(array, self.engine)

    def tensor(self, view: ArrayView) -> ArrayView:
        """See :meth:`CacheDevice.tensor`."""
        return view

    def close(self) -> None:
        """Frees all allocated memory."""
        self.engine.close()


class _HostCells:
    """An array of a :class:`HostDevice`."""

    def __init__(self, array: UintArray, stream: HostCopyStream) -> None:
        self._array = array
        self._stream = stream
        self.dtype = array.dtype

    def __getitem__(self, index: Any) -> Any:
        return self._stream.call(partial(self._array.__getitem__, index))

    def __setitem__(self, index: Any, values: Any) -> None:
        self._stream.call(partial(self._array.__setitem__, index, values))
