"""The common part of transports on one host: local threads read the peer's memory, without a wire.

Movers take turns to copy a long read. The thread that calls ``read`` copies a short read itself,
because a handover would take longer. The same thread also starts the copy engines of a device.
"""

import hashlib
import threading
import time
from abc import abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np

from kvferry.decoding import decode_as
from kvferry.errors import KVFerryError, PeerLostError
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.chunks import ChunkedCopy
from kvferry.layouts.copier import CHUNK_BYTES
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import (
    Addressing,
    Peer,
    Transfer,
    Transfers,
    TransferState,
    Transport,
    Waitable,
    as_transfer_error,
    own_peer,
)
from kvferry.transports.movers import MoverPool, start_after
from kvferry.transports.regions import Regions

SHORT_BYTES = 2 << 20
"""Number of bytes up to which the calling thread copies a read: at most about 300 µs. Waking a
mover takes a third of 300 µs on an idle machine, and some 10 ms while other threads run Python."""
TURN_BYTES = 32 << 20
"""Number of bytes that a mover copies before looking for other waiting reads: some 5 ms. The mover
does not need the interpreter lock meanwhile, and a read can be cancelled between two chunks."""
_DEAD_PEERS_S = 1.0
"""Seconds between two checks for dead peers."""

VERSION = 1
"""Version of the endpoint; both sides run on one host, so a range of versions is not needed."""


class LocalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration keys that the transports of one host share."""

    chunk_bytes: int = CHUNK_BYTES
    """Number of bytes that a mover copies at a time; a read can be cancelled between two chunks."""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 4096:
            raise ValueError(f"chunk_bytes: {self.chunk_bytes} is less than 4096")


class LocalEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoint of a rank for readers on the same host."""

    transport: str
    version: int = VERSION
    host: str
    """Boot id of the host: names and handles mean nothing on another host."""


HereT = TypeVar("HereT", bound=LocalEndpoint)


class LocalPeer(Peer):
    """The memory of one rank, and the reads from the rank. Held resources outlive the last read."""

    def __init__(self, region_bytes: tuple[int, ...]) -> None:
        self.region_bytes = np.array(region_bytes, dtype=np.int64)
        """Number of bytes of each region, by region id; 0 for a region that is not served."""
        self.addresses = np.zeros(len(region_bytes), dtype=np.int64)
        """Address of each region for the copier, by region id."""
        self.closed = False
        self._reads: set[LocalRead] = set()
        self._lock = threading.Lock()

    @abstractmethod
    def lost(self) -> KVFerryError | None:
        """Error that prevents reads over an open connection, or ``None``. Never waits."""

    @abstractmethod
    def release(self) -> None:
        """Releases the connection's resources. Called once closed and without reads; idempotent."""

    def error(self) -> KVFerryError | None:
        """Error that prevents reads from this peer, or ``None``."""
        with self._lock:  # keeps lost() from using released resources
            return PeerLostError("the connection was closed") if self.closed else self.lost()

    def begin(self, read: "LocalRead") -> bool:
        """Adds a read. If the connection is closed, fails the read and returns false."""
        with self._lock:
            closed = self.closed
            if not closed:
                self._reads.add(read)
        if closed:
            read.fail(PeerLostError("the connection was closed"))
        return not closed

    def forget(self, read: "LocalRead") -> None:
        """Removes a read that has ended."""
        with self._lock:
            self._reads.discard(read)
            self._release_if_idle()

    def close(self) -> None:
        """Fails running reads with ``PeerLostError``, then releases the connection's resources."""
        with self._lock:
            self.closed = True
            reads = list(self._reads)
        for read in reads:
            read.fail(PeerLostError("the connection was closed"))
        with self._lock:
            self._release_if_idle()

    def _release_if_idle(self) -> None:
        # A thread may still be inside a chunk: the memory that the thread reads must outlive the
        # chunk.
        if self.closed and not self._reads:
            self.release()


class LocalRead(Transfer):
    """A read from a peer of this host. The read fails if the peer is lost at the last byte."""

    def __init__(
        self, nbytes: int, transfers: Transfers, movers: MoverPool, peer: LocalPeer
    ) -> None:
        self._movers = movers
        self._peer = peer
        super().__init__(nbytes, transfers)

    def start(self) -> None:
        """Starts the copy, unless the peer is lost. Never waits for the bytes."""
        error = self._peer.error()
        if error is None:
            self._begin()
        else:
            self.fail(error)

    @abstractmethod
    def _begin(self) -> None:
        """Starts the copy from a peer that is not lost."""

    def verify(self) -> KVFerryError | None:
        """See :meth:`Transfer.verify`."""
        return self._peer.error()

    def ended(self, state: TransferState) -> None:
        """See :meth:`Transfer.ended`."""
        self._peer.forget(self)


class LocalTransfer(LocalRead):
    """A read that is copied chunk by chunk."""

    def __init__(
        self, copy: ChunkedCopy, transfers: Transfers, movers: MoverPool, peer: LocalPeer
    ) -> None:
        self._copy = copy
        super().__init__(copy.nbytes, transfers, movers, peer)

    @property
    def bytes_done(self) -> int:
        """See :class:`Transfer`."""
        return self._copy.bytes_done

    @bytes_done.setter
    def bytes_done(self, _: int) -> None:
        pass

    def _begin(self) -> None:
        """Submits the copy to as many movers as are useful; the caller copies a short read."""
        if self.nbytes <= SHORT_BYTES:
            self.turn()
            return
        for _ in range(max(1, min(self._movers.size, self._copy.num_chunks))):
            self._movers.submit(self.turn)

    def turn(self) -> None:
        """Copies for a while in the calling thread; if bytes are left, a mover goes on."""
        if not self.enter():
            return
        more = False
        try:
            more = self._copy.step(TURN_BYTES)
        except Exception as error:  # of the copy, or a kvferry bug: the thread goes on
            self.fail(as_transfer_error(error, "the copy failed"))
        finally:
            self.leave(0, 0)
        if more:
            self._movers.submit(self.turn)

    def stop(self, state: TransferState, error: KVFerryError | None = None) -> None:
        """See :meth:`Transfer.stop`; threads inside a chunk end with that chunk."""
        self._copy.cancel()
        super().stop(state, error)

    def ended(self, state: TransferState) -> None:
        """See :meth:`Transfer.ended`."""
        self.segments = self._copy.segments
        super().ended(state)


PeerT = TypeVar("PeerT", bound=LocalPeer)


class LocalTransport(Transport, Generic[PeerT]):
    """A transport between the processes of one host. Thread-safe."""

    addressing = Addressing.MOVERS
    fences = True
    same_host = True
    peer_class: type[PeerT]
    """Class of the peers that :meth:`connect` returns."""

    def __init__(self, threads: int, chunk_bytes: int) -> None:
        """Args:
        threads: movers.
        chunk_bytes: see :class:`LocalConfig`.
        """
        self._chunk_bytes = chunk_bytes
        self._regions = Regions()
        self._movers = MoverPool(self.name, threads)
        self._transfers = Transfers()
        self._peers: list[PeerT] = []
        self._lock = threading.Lock()
        self._next_look = 0.0

    @abstractmethod
    def _read(self, peer: PeerT, tiles: Tiles, runs: Runs) -> LocalRead:
        """A transfer for tiles × runs; both are already inside the regions of both sides."""

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """See :meth:`Transport.read`."""
        ours = own_peer(peer, self.peer_class)
        check_bounds(tiles, runs, ours.region_bytes, self._regions.nbytes)
        read = self._read(ours, tiles, runs)
        if ours.begin(read) and self._transfers.add(read):
            self._start(read, after)
        return read

    def _start(self, read: LocalRead, after: Waitable | None) -> None:
        """Starts a read once ``after`` has happened."""
        start_after(after, read, read.start)

    def poll(self) -> list[Transfer]:
        """See :meth:`Transport.poll`. Now and then also releases the resources of dead peers."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _DEAD_PEERS_S
            self._drop_dead_peers()
        return self._transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transport.cancel`; terminal once the chunks in progress have been copied."""
        self._transfers.cancel(transfer)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if not self._transfers.close():
            return
        self._transfers.drain()  # movers wait for their launches in progress
        self._movers.close()
        with self._lock:
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()

    def _add_peer(self, peer: PeerT) -> PeerT:
        """Adds a connection, after releasing dead connections."""
        self._drop_dead_peers()
        with self._lock:
            self._peers.append(peer)
        return peer

    def _drop_dead_peers(self) -> None:
        """Closes connections to dead owners.

        An open connection keeps a dead owner's memory in use; the owner's restart may need that
        memory.
        """
        with self._lock:
            self._peers = [peer for peer in self._peers if not peer.closed]
            peers = list(self._peers)
        for peer in peers:
            if peer.error() is not None:
                peer.close()


def decode_here(kind: type[HereT], endpoint: bytes, transport: str) -> HereT:
    """Decodes an endpoint of this host.

    Raises:
        DecodeError: see :func:`~kvferry.decoding.decode_as`.
        PeerLostError: the endpoint is of another host.
    """
    described = decode_as(kind, endpoint, transport, VERSION)
    if described.host != boot_id():
        raise PeerLostError(
            f"the peer runs on another host, where {transport} does not reach; use tcp"
        )
    return described


def host_digest() -> str:
    """Digest equal for all processes on one host, useless to other hosts; empty if unknown."""
    try:
        return hashlib.sha256(b"kvferry host " + boot_id().encode()).hexdigest()[:16]
    except OSError:  # a system without the file
        return ""


def boot_id() -> str:
    """Id of a host, random per boot; containers have the id of their host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
