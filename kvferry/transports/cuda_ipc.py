"""The transport between GPUs of one host: readers map sources' memory and copy on their own GPU.

A read is a single strided pass of a kernel from the peer's memory to its final place, including a
change of layout. The source's process takes no part in the read, so a stopped source stalls
nothing. Readers notice a dead source by its lock on a small segment of shared memory, which the
kernel has dropped (:mod:`kvferry.transports.shm_segment`).

**When a source's memory may be read.** No event travels with a handle. A lease is granted when its
request has finished. A request finishes after its last token was sampled and read by the host; by
then, the step that wrote the request's blocks has completed on the producer's stream. **When the
local memory may be written** is given by ``after``: a
:class:`~kvferry.layouts.cuda_stream.CudaEvent` of the engine's stream, recorded on the step thread.

**Division of work.** The tables that all reads from a rank share are on the device since the
engines met (:meth:`~CudaIpcTransport.prepare`). The thread that calls ``read`` uploads the runs and
launches the copy. The device waits for an event of the engine. A mover waits for the end of the
copy.

A launch cannot be cancelled. So a read is cut into launches of ``chunk_bytes``. Only a few launches
are enqueued at a time, and the read becomes terminal when these launches are done. A device that
hangs holds its reads for ever: no weaker condition would prove that no byte lands.

All use of CUDA is behind :class:`~kvferry.layouts.device.CopyStream` and
:class:`~kvferry.transports.cuda_ipc_memory.IpcMemory`.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

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
from kvferry.layouts.arrays import HOST, ByteArray, MemorySpan
from kvferry.layouts.bounds import warm_bounds
from kvferry.layouts.device import CopyEvent, CopyStream, PreparedCopy
from kvferry.layouts.tiles import Runs, Tiles, token_bytes
from kvferry.transports.base import (
    DeviceTransport,
    Peer,
    TransportOptions,
    Waitable,
    as_transfer_error,
    own_peer,
)
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES, CudaIpcMemory, IpcMemory
from kvferry.transports.local import (
    LocalConfig,
    LocalEndpoint,
    LocalPeer,
    LocalRead,
    LocalTransport,
    boot_id,
    decode_here,
)
from kvferry.transports.regions import check_flat
from kvferry.transports.shm_segment import OwnedSegment, PeerSegment, sweep_dead_segments

CHUNK_BYTES = 2 << 30
"""Number of bytes of a launch: some 1 ms on a large GPU, much longer than the host's part. A launch
begins when the launch before has ended, which takes 20 µs."""

LAUNCHES = 2
"""Number of launches of a read enqueued at a time, so that the device never waits for the host."""

SHORT_BYTES = 64 << 20
"""Number of bytes of a short read: a large GPU copies these in 40 µs, and a mover takes 50 µs to
wake up. So the thread that starts a short read looks for the read's end, if all is launched."""
SHORT_LOOK_S = 5e-5
"""Seconds for which that thread looks; afterwards, a mover waits."""

_OWNER_BYTES = 64


class IpcRegion(msgspec.Struct, frozen=True, array_like=True):
    """A region as peers see the region."""

    handle: bytes
    """Handle of the region's allocation; empty for a region that is not served."""
    offset: int
    """Number of bytes from the start of the allocation to the region."""
    nbytes: int


_NOT_SERVED = IpcRegion(b"", 0, 0)


class CudaIpcEndpoint(LocalEndpoint, frozen=True, kw_only=True):
    """Endpoint with which a reader maps a rank's memory."""

    transport: str = "cuda_ipc"
    owner: str
    """Name of the segment on which the rank holds a lock as long as the rank lives."""
    regions: tuple[IpcRegion, ...]


class CudaIpcExtraConfig(LocalConfig, frozen=True, kw_only=True):
    """Keys of the ``cuda_ipc`` transport."""

    device: int | None = None
    """Number of the GPU, as torch counts; ``None`` stands for the current GPU."""
    chunk_bytes: int = CHUNK_BYTES
    """Number of bytes per launch; a read can be cancelled between two launches."""


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """Tables that all reads of some tiles share."""

    tiles: Tiles
    token_bytes: int
    """Number of bytes per token in all tiles."""
    copy: PreparedCopy


class CudaIpcPeer(LocalPeer):
    """The mapped memory of one rank, and the tables for reads from the rank on the local device."""

    def __init__(
        self,
        owner: PeerSegment,
        allocations: tuple[MemorySpan, ...],
        regions: tuple[MemorySpan, ...],
        memory: IpcMemory,
    ) -> None:
        super().__init__(tuple(region.nbytes for region in regions))
        self.addresses[:] = [region.address for region in regions]
        self.prepared: list[_Prepared] = []
        """Copies prepared when the engines met, one for each pair of groups."""
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


class _DeviceRead(LocalRead):
    """A read by launches, which counts as writing from the first launch until the last is done.

    A device copies units: segments are not counted.
    """

    def __init__(self, copy: PreparedCopy, pieces: deque[tuple[Runs, int]], *local: Any) -> None:
        """Args:
        copy: prepared copy for the read's tiles.
        pieces: runs and bytes of each launch.
        local: see :class:`LocalRead`.
        """
        self.follows = False
        """Whether the device waits for work of the engine before it copies."""
        self._copy = copy
        self._pieces = pieces
        self._under_way: deque[tuple[CopyEvent, int]] = deque()
        super().__init__(sum(nbytes for _, nbytes in pieces), *local)

    def _begin(self) -> None:
        if self.enter():
            self._launch()
            is_short = self.nbytes <= SHORT_BYTES and not self._pieces
            if is_short and not self.follows and self._ends_soon():
                self._wait()
            else:
                self._movers.submit(self._wait)

    def _ends_soon(self) -> bool:
        """Whether the device has carried out all launches within ``SHORT_LOOK_S``."""
        deadline = time.monotonic() + SHORT_LOOK_S
        try:
            while not all(event.done() for event, _ in self._under_way):
                if time.monotonic() >= deadline:
                    return False
        except TransferError:
            pass  # _wait() raises the error again
        return True

    def _launch(self) -> None:
        """Enqueues launches up to the limit."""
        try:
            while self._pieces and len(self._under_way) < LAUNCHES and not self.stopped:
                runs, nbytes = self._pieces.popleft()
                self._under_way.append((self._copy(runs), nbytes))
        except Exception as error:  # launches in progress are still waited for
            self.fail(as_transfer_error(error, "the copy failed"))

    def _wait(self) -> None:
        """Waits for launches and makes the remaining launches, on a mover."""
        while self._under_way:
            event, nbytes = self._under_way.popleft()
            try:
                event.wait()
            except Exception as error:  # the failed device carries out no more launches
                self.fail(as_transfer_error(error, "the copy failed"))
                continue
            self._launch()
            with self._lock:
                self.bytes_done += nbytes
                self.progressed = time.monotonic()
        self.leave(0, 0)


class CudaIpcTransport(LocalTransport[CudaIpcPeer], DeviceTransport):
    """CUDA IPC between the processes of one host, with NVLink or PCIe between its GPUs."""

    name = "cuda_ipc"
    peer_class = CudaIpcPeer
    ExtraConfig = CudaIpcExtraConfig

    def __init__(
        self,
        extra: CudaIpcExtraConfig,
        stream: CopyStream,
        memory: IpcMemory,
    ) -> None:
        """Takes ownership of the stream; callers use :meth:`open`."""
        super().__init__(1, extra.chunk_bytes)  # the device runs launches in order
        self._stream = stream
        self._memory = memory
        self._owner = OwnedSegment.create(_OWNER_BYTES)
        self._served: dict[int, IpcRegion] = {}
        """Served regions, by region id."""

    @classmethod
    def open(cls, options: TransportOptions) -> "CudaIpcTransport":
        """Opens a stream of the GPU.

        Raises:
            ConfigError: unknown or wrong keys in ``options.extra``.
            HostError: there is no such GPU, no driver, or no room in ``/dev/shm``.
        """
        extra = parse_struct(CudaIpcExtraConfig, options.extra, "cuda_ipc")
        sweep_dead_segments()
        warm_bounds()
        stream, memory = cls.open_device(extra)
        try:
            return cls(extra, stream, memory)
        except BaseException:
            stream.close()
            raise

    @classmethod
    def open_device(cls, extra: CudaIpcExtraConfig, /) -> tuple[CopyStream, IpcMemory]:
        """Opens the stream and memory of CUDA; tests override this method.

        Raises:
            HostError: there is no such GPU, or no driver.
        """
        from kvferry.layouts.cuda_stream import CudaCopyStream

        stream = CudaCopyStream.open(extra.device)
        return stream, CudaIpcMemory(stream.driver)

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
        """Always fails: this transport cannot serve host memory.

        Raises:
            TransferError: always.
        """
        raise TransferError(
            "cuda_ipc serves memory of a GPU; take it from allocate_device(), or name a transport "
            "for host memory first (shm, tcp)"
        )

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`: pins host memory for reads; ``serve`` must be false.

        Raises:
            HostError: the memory cannot be pinned.
            TransferError: ``serve`` is true, or the transport is closed.
        """
        if serve:
            raise TransferError(
                "cuda_ipc cannot serve host memory; use register_device() for memory of a GPU, or "
                "register(..., serve=False) for memory that is only read into"
            )
        check_flat(memory)
        with self._lock:
            if self._transfers.closed:  # no later call would unpin the memory
                raise TransferError("the transport is closed")
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
            PeerLostError: the peer is gone or on another host, or its GPU is out of reach.
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

    def prepare(self, peer: Peer, tiles: Tiles, most_tokens: int) -> None:
        """See :meth:`Transport.prepare`: puts the tiles on the device.

        Raises:
            HostError: the device has no room for the tiles.
            TransferError: the device failed.
        """
        ours = own_peer(peer, CudaIpcPeer)
        ours.prepared.append(self._prepare(ours, tiles, most_tokens))

    def _prepare(self, peer: CudaIpcPeer, tiles: Tiles, most_tokens: int = 0) -> _Prepared:
        addresses = peer.addresses, self._regions.addresses
        copy = self._stream.prepare(*addresses, tiles, most_tokens)
        return _Prepared(tiles, token_bytes(tiles), copy)

    def _read(self, peer: CudaIpcPeer, tiles: Tiles, runs: Runs) -> _DeviceRead:
        known = (each for each in peer.prepared if each.tiles is tiles)
        prepared = next(known, None) or self._prepare(peer, tiles)
        pieces = _pieces(runs, prepared.token_bytes, self._chunk_bytes)
        return _DeviceRead(prepared.copy, pieces, self._transfers, self._movers, peer)

    def _start(self, read: LocalRead, after: Waitable | None) -> None:
        """Starts a read. The device, not a thread, waits for an event of the device."""
        assert isinstance(read, _DeviceRead)
        if isinstance(after, CopyEvent):
            try:
                read.follows = not after.done()
                if read.follows:
                    self._stream.follow(after)
            except TransferError as error:
                read.fail(error)
            after = None
        super()._start(read, after)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if self._transfers.closed:
            return
        super().close()
        self._owner.close()
        with self._lock:  # see register()
            for memory in self._regions.arrays:
                if memory.nbytes:  # empty arrays stand for device memory
                    self._stream.unpin(memory)
        self._stream.close()


def _pieces(runs: Runs, token_bytes: int, most: int) -> deque[tuple[Runs, int]]:
    """Runs and bytes of launches of about ``most`` bytes; a launch has all tiles of its runs."""
    nbytes = token_bytes * int(runs["tokens"].sum())
    if nbytes <= most:
        return deque([(runs, nbytes)])
    ends = np.cumsum(runs["tokens"]) * token_bytes
    pieces: deque[tuple[Runs, int]] = deque()
    first, done = 0, 0
    while first < len(runs):
        end = max(int(np.searchsorted(ends, done + most, side="right")), first + 1)
        pieces.append((runs[first:end], int(ends[end - 1]) - done))
        first, done = end, int(ends[end - 1])
    return pieces


def _placed(region: IpcRegion, allocations: dict[bytes, MemorySpan]) -> MemorySpan:
    """Address, size and device of a peer's region in this process."""
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
