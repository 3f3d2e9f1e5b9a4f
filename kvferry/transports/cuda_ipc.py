"""The transport of GPUs of one host: readers map the memory of sources and copy on their own GPU.

A read is one strided pass of a kernel from the peer's memory to its final place, layout change
included. The source's process takes no part in it, so a stopped source stalls nothing; a dead one
is noticed by the lock that it no longer holds on its life token, a small segment of shared memory
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
from kvferry.layouts.chunks import chunk_slices, cut_chunks
from kvferry.layouts.copier import Int64s
from kvferry.layouts.device import CopyStream
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.transports.base import ByteArray, TransportOptions
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES, CudaIpcMemory, IpcMemory
from kvferry.transports.decoding import decode_as
from kvferry.transports.device import DeviceTransport
from kvferry.transports.local import VERSION, LocalConfig, LocalPeer, LocalTransport, boot_id
from kvferry.transports.regions import check_flat
from kvferry.transports.shm_segment import OwnedSegment, PeerSegment, sweep_dead_segments

CHUNK_BYTES = 256 << 20
"""Bytes of a launch: some 0.1 ms on a large GPU."""

_LIFE_BYTES = 64
_LAUNCHES = 2
"""Threads that launch and wait, so that the device never waits for the host."""


class IpcRegion(msgspec.Struct, frozen=True, array_like=True):
    """One region as peers see it."""

    handle: bytes
    """Of its allocation; empty for a region that is not served."""
    offset: int
    """Bytes from the start of the allocation."""
    nbytes: int


class CudaIpcEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to map a rank's memory."""

    transport: str = "cuda_ipc"
    version: int = VERSION
    host: str
    """Boot id of the host: handles mean nothing on another."""
    life: str
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
        life: PeerSegment,
        allocations: tuple[MemorySpan, ...],
        regions: tuple[MemorySpan, ...],
        memory: IpcMemory,
    ) -> None:
        super().__init__(tuple(region.nbytes for region in regions))
        self.addresses[:] = [region.address for region in regions]
        self._life = life
        self._allocations = allocations
        self._memory = memory

    def lost(self) -> KVFerryError | None:
        """See :meth:`LocalPeer.lost`."""
        if not self._life.owner_is_alive():
            return PeerLostError("the process that owns the memory has ended or closed it")
        return None

    def release(self) -> None:
        """Drops the mappings."""
        allocations, self._allocations = self._allocations, ()
        for allocation in allocations:
            self._memory.release(allocation)
        self._life.close()


class _Launches:
    """A copy in launches; a step makes one and waits for the device to carry it out."""

    def __init__(
        self,
        stream: CopyStream,
        sources: Int64s,
        targets: Int64s,
        tiles: Tiles,
        runs: Runs,
        chunk_bytes: int,
    ) -> None:
        self.nbytes = num_bytes(tiles, runs)
        """Bytes to copy."""
        self.bytes_done = 0
        """Bytes of the launches that are done."""
        self.segments = 0
        """Not counted: a device copies units, not segments."""
        self._stream = stream
        self._addresses = sources, targets
        self._tiles = tiles
        self._runs = runs
        self._chunks = chunk_slices(cut_chunks(tiles, runs, chunk_bytes))
        self._next = 0
        self._cancelled = False
        self._lock = threading.Lock()

    @property
    def num_chunks(self) -> int:
        """Launches in all."""
        return len(self._chunks)

    def step(self, nbytes: int) -> bool:
        """Makes launches until about ``nbytes`` are copied; returns whether any are left.

        Raises:
            TransferError: the device failed; it carries nothing out any more.
        """
        copied = 0
        while copied < nbytes:
            with self._lock:  # launch and event are not to be parted by another thread's launch
                if self._cancelled or self._next == len(self._chunks):
                    return False
                tile_range, run_range = self._chunks[self._next]
                self._next += 1
                tiles, runs = self._tiles[tile_range], self._runs[run_range]
                self._stream.copy(*self._addresses, tiles, runs)
                event = self._stream.record()
            event.wait()
            copied += num_bytes(tiles, runs)
            with self._lock:
                self.bytes_done += num_bytes(tiles, runs)
        return self._next < len(self._chunks)

    def cancel(self) -> None:
        """Lets no further launch begin. Idempotent."""
        self._cancelled = True


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
        super().__init__(_LAUNCHES)
        self._extra = extra
        self._stream = stream
        self._memory = memory
        self._life = OwnedSegment.create(_LIFE_BYTES)
        self._regions: list[MemorySpan] = []
        self._shared: list[IpcRegion] = []
        self._pinned: list[ByteArray] = []

    @classmethod
    def open(cls, options: TransportOptions) -> "CudaIpcTransport":
        """Opens a stream of the GPU.

        Raises:
            ConfigError: unknown or wrong keys in ``options.extra``.
            HostError: there is no such GPU, no driver, or no room in ``/dev/shm``.
        """
        extra = parse_struct(CudaIpcExtraConfig, options.extra, "cuda_ipc")
        sweep_dead_segments()
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
        shared = IpcRegion(b"", 0, 0)
        if serve:
            handle, offset = self._memory.export(memory)
            shared = IpcRegion(handle, offset, memory.nbytes)
        return self._add(memory, shared)

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
        with self._lock:
            self._pinned.append(memory)
        return self._add(MemorySpan(memory.ctypes.data, memory.nbytes, HOST), IpcRegion(b"", 0, 0))

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`."""
        with self._lock:
            regions = tuple(self._shared)
        return msgspec.msgpack.encode(
            CudaIpcEndpoint(host=boot_id(), life=self._life.name, regions=regions)
        )

    def connect(self, endpoint: bytes) -> CudaIpcPeer:
        """Maps the peer's allocations, each once.

        Raises:
            DecodeError: the endpoint does not decode.
            BoundsError: a region is larger than its allocation.
            PeerLostError: the peer is gone, on another host, or its GPU out of reach.
        """
        described = _decode(endpoint)
        life = PeerSegment.attach(described.life, _LIFE_BYTES)
        opened: dict[bytes, MemorySpan] = {}
        try:
            for handle in {region.handle for region in described.regions if region.handle}:
                opened[handle] = self._memory.open(handle)
            regions = tuple(_placed(region, opened) for region in described.regions)
        except BaseException:
            for allocation in opened.values():
                self._memory.release(allocation)
            life.close()
            raise
        return self._add_peer(CudaIpcPeer(life, tuple(opened.values()), regions, self._memory))

    @property
    def _target_bytes(self) -> Int64s:
        with self._lock:
            return np.array([region.nbytes for region in self._regions], dtype=np.int64)

    def _copy(self, peer: CudaIpcPeer, tiles: Tiles, runs: Runs) -> _Launches:
        with self._lock:
            targets = np.array([region.address for region in self._regions], dtype=np.int64)
        return _Launches(
            self._stream, peer.addresses, targets, tiles, runs, self._extra.chunk_bytes
        )

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if self._transfers.closed:
            return
        super().close()
        with self._lock:
            pinned, self._pinned = self._pinned, []
        self._life.close()
        for memory in pinned:
            self._stream.unpin(memory)
        self._stream.close()

    def _add(self, memory: MemorySpan, shared: IpcRegion) -> int:
        with self._lock:
            self._regions.append(memory)
            self._shared.append(shared)
            return len(self._regions) - 1


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
    described = decode_as(CudaIpcEndpoint, endpoint, "cuda_ipc", VERSION)
    if described.host != boot_id():
        raise PeerLostError("the peer runs on another host, where CUDA IPC does not reach; use tcp")
    for region in described.regions:
        if region.handle and len(region.handle) != HANDLE_BYTES:
            raise DecodeError(
                f"endpoint: a handle has {len(region.handle)} bytes, expected {HANDLE_BYTES}"
            )
    return described
