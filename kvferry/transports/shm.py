"""The transport on one host: sources keep memory in POSIX shared memory, and readers map it.

A read is a single strided pass from the source's memory to its final place, on the reader's mover
threads; the source's process takes no part in the read. So a stopped source stalls nothing. Readers
notice a dead source by its lock, which the kernel has dropped
(:mod:`kvferry.transports.shm_segment`).
"""

import logging

import msgspec

from kvferry.config import parse_struct
from kvferry.errors import KVFerryError, PeerLostError, TransferError
from kvferry.layouts.arrays import ByteArray
from kvferry.layouts.copier import CopyJob, warm
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import TransportOptions
from kvferry.transports.local import (
    LocalConfig,
    LocalEndpoint,
    LocalPeer,
    LocalTransfer,
    LocalTransport,
    boot_id,
    decode_here,
)
from kvferry.transports.shm_segment import OwnedSegment, PeerSegment, sweep_dead_segments

logger = logging.getLogger(__name__)

_PREFAULT_BYTES = 8 << 20
"""Number of bytes of a peer's segment whose page tables are filled at a time: about 0.5 ms."""


class SharedRegion(msgspec.Struct, frozen=True, array_like=True):
    """A region as peers see the region."""

    segment: str
    """Name in ``/dev/shm``; empty for a region that is not served."""
    nbytes: int


class ShmEndpoint(LocalEndpoint, frozen=True, kw_only=True):
    """Endpoint with which a reader maps a rank's memory."""

    transport: str = "shm"
    regions: tuple[SharedRegion, ...]


class ShmExtraConfig(LocalConfig, frozen=True, kw_only=True):
    """Keys of the ``shm`` transport."""


class ShmPeer(LocalPeer):
    """The mapped memory of one rank."""

    def __init__(self, segments: dict[int, PeerSegment], region_bytes: tuple[int, ...]) -> None:
        super().__init__(region_bytes)
        self.segments = segments
        for region, segment in segments.items():
            self.addresses[region] = segment.array.ctypes.data

    def lost(self) -> KVFerryError | None:
        """See :meth:`LocalPeer.lost`."""
        if not all(segment.owner_is_alive() for segment in self.segments.values()):
            return PeerLostError("the process that owns the memory has ended or closed it")
        return None

    def release(self) -> None:
        """Drops the mappings."""
        for segment in self.segments.values():
            segment.close()


class ShmTransport(LocalTransport[ShmPeer]):
    """Shared memory between the processes of one host."""

    name = "shm"
    may_sleep = True
    peer_class = ShmPeer
    ExtraConfig = ShmExtraConfig

    def __init__(self, options: TransportOptions, extra: ShmExtraConfig) -> None:
        super().__init__(options.threads, extra.chunk_bytes)
        self._segments: dict[int, OwnedSegment] = {}
        """Region id → segment in which the region is served."""

    @classmethod
    def open(cls, options: TransportOptions) -> "ShmTransport":
        """Sweeps the segments of dead owners, loads the copier and starts the movers.

        Raises:
            ConfigError: unknown or wrong keys in ``options.extra``.
        """
        extra = parse_struct(ShmExtraConfig, options.extra, "shm")
        swept = sweep_dead_segments()
        if swept:
            logger.info("removed %d shared memory segments of dead processes", len(swept))
        warm()
        return cls(options, extra)

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """See :meth:`Transport.allocate`."""
        segment = OwnedSegment.create(nbytes)
        with self._lock:
            region = self._regions.add(segment.array, serve=True)
            self._segments[region] = segment
        return region, segment.array

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`; only ``serve=False`` is possible here."""
        if serve:
            raise TransferError(
                "shm cannot serve memory that exists; take the memory from allocate(), or use "
                "register(..., serve=False) for memory that is only read into"
            )
        return self._regions.add(memory, serve=False)

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`."""
        with self._lock:
            regions = tuple(
                SharedRegion(self._segments[region].name if nbytes else "", nbytes)
                for region, nbytes in enumerate(self._regions.served_nbytes)
            )
        return msgspec.msgpack.encode(ShmEndpoint(host=boot_id(), regions=regions))

    def connect(self, endpoint: bytes) -> ShmPeer:
        """Maps the peer's regions, once; page tables are filled in the background.

        Raises:
            DecodeError: the endpoint does not decode.
            BoundsError: a segment is smaller than the endpoint says.
            PeerLostError: the peer is gone, or on another host.
            SharedMemoryError: a segment cannot be mapped.
        """
        described = decode_here(ShmEndpoint, endpoint, "shm")
        segments: dict[int, PeerSegment] = {}
        try:
            for region, shared in enumerate(described.regions):
                if shared.segment:
                    segments[region] = PeerSegment.attach(shared.segment, shared.nbytes)
        except KVFerryError:
            for segment in segments.values():
                segment.close()
            raise
        sizes = tuple(shared.nbytes if shared.segment else 0 for shared in described.regions)
        peer = self._add_peer(ShmPeer(segments, sizes))
        self._prefault(peer)
        return peer

    def _read(self, peer: ShmPeer, tiles: Tiles, runs: Runs) -> LocalTransfer:
        addresses = peer.addresses, self._regions.addresses
        copy = CopyJob(*addresses, tiles, runs, self._chunk_bytes)
        return LocalTransfer(copy, self._transfers, self._movers, peer)

    def close(self) -> None:
        """See :meth:`Transport.close`. Memory is unmapped when its last array is deleted."""
        super().close()
        with self._lock:
            for segment in self._segments.values():
                segment.close()

    def _prefault(self, peer: ShmPeer) -> None:
        """Fills the page tables of a peer's memory, slice by slice, between reads.

        Otherwise the first read of each page causes a fault, and takes twice as long.
        """
        slices = (
            (segment, first)
            for segment in peer.segments.values()
            for first in range(0, segment.array.nbytes, _PREFAULT_BYTES)
        )

        def step() -> None:
            following = next(slices, None)
            if following is None or self._transfers.closed or peer.closed:
                return
            segment, first = following
            if segment.populate(first, _PREFAULT_BYTES):
                self._movers.submit(step)

        self._movers.submit(step)
