"""The transport for GPUs with host memory in the place of a GPU's.

:class:`HostIpcTransport` is all of :class:`~kvferry.transports.cuda_ipc.CudaIpcTransport` but the
device: its stream is a thread, and its memory is mapped by other processes through ``/dev/shm``. So
bookkeeping, bounds, closing and lost peers are tested without a GPU.
"""

from kvferry.errors import PeerLostError, SharedMemoryError, TransferError
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.device import CopyStream
from kvferry.testing.host_stream import HostCopyStream
from kvferry.transports.cuda_ipc import CudaIpcExtraConfig, CudaIpcTransport
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES, IpcMemory
from kvferry.transports.shm_segment import SHM_DIR, OwnedSegment, PeerSegment


class HostIpcStream(HostCopyStream):
    """A stream whose memory other processes can map."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[OwnedSegment] = []

    def allocate(self, nbytes: int) -> MemorySpan:
        """See :meth:`CopyStream.allocate`."""
        segment = OwnedSegment.create(nbytes)
        self.segments.append(segment)
        return MemorySpan(segment.array.ctypes.data, nbytes, self.device)

    def close(self) -> None:
        """See :meth:`CopyStream.close`."""
        super().close()
        for segment in self.segments:
            segment.close()


class HostIpcMemory(IpcMemory):
    """Handles are names of segments."""

    def __init__(self, stream: HostIpcStream) -> None:
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
        stream = HostIpcStream()
        return stream, HostIpcMemory(stream)
