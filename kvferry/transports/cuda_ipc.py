"""The transport of GPUs of one host: readers map the memory of sources and copy on their own GPU.

A read is one strided pass of a kernel from the peer's memory to its final place, layout change
included. The source's process takes no part in it, so a stopped source stalls nothing; a dead one
is noticed by the lock that it no longer holds on a small segment of shared memory
(:mod:`kvferry.transports.shm_segment`).

**When a source's memory may be read.** No event travels with a handle. A lease is granted when its
request has finished, and a request finishes when its last token was sampled and read by the host:
the step that wrote its blocks has then retired on the producer's stream. **When our own may be
written** is said by ``after``: a :class:`~kvferry.layouts.cuda_stream.CudaEvent` of the engine's
stream, recorded on the step thread.

A launch cannot be called back. So a read is cut into launches of ``chunk_bytes``, of which two are
enqueued at a time, and becomes terminal when those are done. A device that hangs holds its reads
for ever: nothing less would prove that they do not land.

All that is CUDA lies behind :class:`~kvferry.layouts.device.CopyStream` and
:class:`~kvferry.transports.cuda_ipc_memory.IpcMemory`.
"""

import threading

import msgspec
import numpy as np

from kvferry.config import parse_struct
from kvferry.errors import (
    BoundsError,
    DecodeError,
    KVFerryError,
    PeerLostError,
    TransferError,
)
from kvferry.layouts.arrays import HOST, MemorySpan
from kvferry.layouts.chunks import (
    CHUNK_DTYPE,
    PROGRESS_DTYPE,
    ChunkedCopy,
    cancel,
    end,
    enter,
    leave,
    take,
)
from kvferry.layouts.copier import Int64s
from kvferry.layouts.device import CopyStream
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import ByteArray, DeviceTransport, TransportOptions
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES, CudaIpcMemory, IpcMemory
from kvferry.transports.local import (
    LocalConfig,
    LocalEndpoint,
    LocalPeer,
    LocalTransport,
    boot_id,
    decode_here,
)
from kvferry.transports.regions import check_flat
from kvferry.transports.shm_segment import OwnedSegment, PeerSegment, sweep_dead_segments

CHUNK_BYTES = 1 << 30
"""Bytes of a launch: some 0.5 ms on a large GPU, beside which the part of the host is little."""

_OWNER_BYTES = 64
_LAUNCHES = 2
"""Threads that launch and wait, so that the device never waits for the host."""


class IpcRegion(msgspec.Struct, frozen=True, array_like=True):
    """One region as peers see it."""

    handle: bytes
    """Of its allocation; empty for a region that is not served."""
    offset: int
    """Bytes from the start of the allocation."""
    nbytes: int


_NOT_SERVED = IpcRegion(b"", 0, 0)


class CudaIpcEndpoint(LocalEndpoint, frozen=True, kw_only=True):
    """What a reader needs to map a rank's memory."""

    transport: str = "cuda_ipc"
    owner: str
    """Name of the segment that the rank holds a lock on as long as it lives."""
    regions: tuple[IpcRegion, ...]


class CudaIpcExtraConfig(LocalConfig, frozen=True, kw_only=True):
    """Keys of the ``cuda_ipc`` transport."""

    device: int | None = None
    """Number of the GPU, as torch counts; the current one unless given."""
    chunk_bytes: int = CHUNK_BYTES
    """Bytes per launch; between two of them a read can be cancelled."""


class CudaIpcPeer(LocalPeer):
    """The mapped memory of one rank."""

    def __init__(
        self,
        owner: PeerSegment,
        allocations: tuple[MemorySpan, ...],
        regions: tuple[MemorySpan, ...],
        memory: IpcMemory,
    ) -> None:
        super().__init__(tuple(region.nbytes for region in regions))
        self.addresses[:] = [region.address for region in regions]
        self._owner = owner
        self._allocations = allocations
        self._memory = memory

    def lost(self) -> KVFerryError | None:
        """See :meth:`LocalPeer.lost`."""
        if not self._owner.owner_is_alive():
            return PeerLostError("the process that owns the memory has ended or closed it")
        return None

    def release(self) -> None:
        """Drops the mappings."""
        allocations, self._allocations = self._allocations, ()
        for allocation in allocations:
            self._memory.release(allocation)
        self._owner.close()


class _Launches(ChunkedCopy):
    """A copy whose chunks are launches. A device copies units: segments are not counted."""

    def __init__(
        self,
        stream: CopyStream,
        sources: Int64s,
        targets: Int64s,
        tiles: Tiles,
        runs: Runs,
        chunk_bytes: int,
    ) -> None:
        super().__init__(tiles, runs, chunk_bytes)
        self._stream = stream
        self._addresses = sources, targets
        self._lock = threading.Lock()

    def step(self, nbytes: int) -> bool:
        """See :meth:`ChunkedCopy.step`: makes launches, and waits for each to be carried out.

        Raises:
            TransferError: the device failed; it carries nothing out any more.
        """
        copied = 0
        enter(self._progress)
        try:
            while copied < nbytes:
                with self._lock:  # launch and event are not to be parted by another's launch
                    number = take(self._progress, self.num_chunks)
                    if number < 0:
                        break
                    chunk = self._chunks[number]
                    self._stream.copy(
                        *self._addresses,
                        self._tiles[chunk["first_tile"] : chunk["end_tile"]],
                        self._runs[chunk["first_run"] : chunk["end_run"]],
                    )
                    event = self._stream.record()
                event.wait()
                copied += end(self._progress, chunk, 0)
        finally:
            left = leave(self._progress, self.num_chunks)
        return left


class CudaIpcTransport(LocalTransport[CudaIpcPeer], DeviceTransport):
    """CUDA IPC between the processes of one host, with NVLink or PCIe between its GPUs."""

    name = "cuda_ipc"
    peer_class = CudaIpcPeer
    short_bytes = -1  # whoever calls read() must not wait for the device
    ExtraConfig = CudaIpcExtraConfig

    def __init__(
        self,
        extra: CudaIpcExtraConfig,
        stream: CopyStream,
        memory: IpcMemory,
    ) -> None:
        """Takes ownership of the stream; use :meth:`open`."""
        super().__init__(_LAUNCHES, extra.chunk_bytes)
        self._stream = stream
        self._memory = memory
        self._owner = OwnedSegment.create(_OWNER_BYTES)
        self._served: dict[int, IpcRegion] = {}
        """By region id."""

    @classmethod
    def open(cls, options: TransportOptions) -> "CudaIpcTransport":
        """Opens a stream of the GPU.

        Raises:
            ConfigError: unknown or wrong keys in ``options.extra``.
            HostError: there is no such GPU, no driver, or no room in ``/dev/shm``.
        """
        extra = parse_struct(CudaIpcExtraConfig, options.extra, "cuda_ipc")
        sweep_dead_segments()
        _warm()
        return cls(extra, *cls.open_device(extra))

    @classmethod
    def open_device(cls, extra: CudaIpcExtraConfig, /) -> tuple[CopyStream, IpcMemory]:
        """All that is CUDA; tests give something else.

        Raises:
            HostError: there is no such GPU, or no driver.
        """
        from kvferry.layouts.cuda_stream import CudaCopyStream

        stream = CudaCopyStream.open(extra.device)
        return stream, CudaIpcMemory(int(stream.device.removeprefix("cuda:")))

    def allocate_device(self, nbytes: int) -> tuple[int, MemorySpan]:
        """See :meth:`DeviceTransport.allocate_device`."""
        memory = self._stream.allocate(nbytes)
        return self.register_device(memory), memory

    def register_device(self, memory: MemorySpan, *, serve: bool = True) -> int:
        """See :meth:`DeviceTransport.register_device`."""
        if memory.device != self._stream.device:
            raise TransferError(
                f"memory: is on {memory.device}, and this transport copies on "
                f"{self._stream.device}; open one for that device"
            )
        shared = IpcRegion(*self._memory.export(memory), memory.nbytes) if serve else _NOT_SERVED
        with self._lock:
            region = self._regions.add_device(memory, serve=serve)
            self._served[region] = shared
        return region

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """Never possible: what the host can touch cannot be served here.

        Raises:
            TransferError: always.
        """
        raise TransferError(
            "cuda_ipc serves memory of a GPU; take it from allocate_device(), or name a transport "
            "for host memory first (shm, tcp)"
        )

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`: pins host memory for reads; it cannot be served.

        Raises:
            HostError: it cannot be pinned.
        """
        if serve:
            raise TransferError(
                "cuda_ipc cannot serve host memory; use register_device() for memory of a GPU, or "
                "register(..., serve=False) for memory that is only read into"
            )
        check_flat(memory)
        self._stream.pin(memory)
        return self._regions.add(memory, serve=False)

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`."""
        with self._lock:
            known = range(len(self._regions.spans))
            regions = tuple(self._served.get(region, _NOT_SERVED) for region in known)
        return msgspec.msgpack.encode(
            CudaIpcEndpoint(host=boot_id(), owner=self._owner.name, regions=regions)
        )

    def connect(self, endpoint: bytes) -> CudaIpcPeer:
        """Maps the peer's allocations, each once.

        Raises:
            DecodeError: the endpoint does not decode.
            BoundsError: a region is larger than its allocation.
            PeerLostError: the peer is gone, on another host, or its GPU out of reach.
        """
        described = _decode(endpoint)
        owner = PeerSegment.attach(described.owner, _OWNER_BYTES)
        opened: dict[bytes, MemorySpan] = {}
        try:
            for handle in {region.handle for region in described.regions if region.handle}:
                opened[handle] = self._memory.open(handle)
            regions = tuple(_placed(region, opened) for region in described.regions)
        except BaseException:
            for allocation in opened.values():
                self._memory.release(allocation)
            owner.close()
            raise
        return self._add_peer(CudaIpcPeer(owner, tuple(opened.values()), regions, self._memory))

    def _copy(self, peer: CudaIpcPeer, tiles: Tiles, runs: Runs) -> _Launches:
        return _Launches(
            self._stream, peer.addresses, self._regions.addresses, tiles, runs, self._chunk_bytes
        )

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if self._transfers.closed:
            return
        super().close()
        self._owner.close()
        for memory in self._regions.arrays:
            if memory.nbytes:  # the others are the device's
                self._stream.unpin(memory)
        self._stream.close()


def _warm() -> None:
    """Compiles what counts launches, or loads it from disk: the first read does not wait for it."""
    progress, chunk = np.zeros(1, dtype=PROGRESS_DTYPE), np.zeros(1, dtype=CHUNK_DTYPE)[0]
    enter(progress)
    take(progress, 1)
    end(progress, chunk, 0)
    cancel(progress)
    leave(progress, 1)


def _placed(region: IpcRegion, allocations: dict[bytes, MemorySpan]) -> MemorySpan:
    """Where a peer's region lies in this process."""
    if not region.handle:
        return MemorySpan(0, 0, HOST)
    allocation = allocations[region.handle]
    if region.offset < 0 or region.nbytes < 0 or region.offset + region.nbytes > allocation.nbytes:
        raise BoundsError(
            f"region: {region.nbytes} bytes at {region.offset} of an allocation that has "
            f"{allocation.nbytes}"
        )
    return MemorySpan(allocation.address + region.offset, region.nbytes, allocation.device)


def _decode(endpoint: bytes) -> CudaIpcEndpoint:
    described = decode_here(CudaIpcEndpoint, endpoint, "cuda_ipc")
    for region in described.regions:
        if region.handle and len(region.handle) != HANDLE_BYTES:
            raise DecodeError(
                f"endpoint: a handle has {len(region.handle)} bytes, expected {HANDLE_BYTES}"
            )
    return described
