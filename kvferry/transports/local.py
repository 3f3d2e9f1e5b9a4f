"""What the transports of one host share: our own threads read the peer's memory, without a wire.

A long read is copied by movers that take turns. A short one is copied by the thread that calls
``read``: handing it over would take longer.
"""

import hashlib
import threading
import time
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

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
"""Up to so many bytes a read is copied by the thread that asks for it: at most about 300 µs. Waking
a mover takes a third of that on an idle machine, and some 10 ms while other threads run Python."""
TURN_BYTES = 32 << 20
"""Bytes that a mover copies before it looks at what else waits: some 5 ms. It does not ask for the
interpreter lock meanwhile, and a read can be cancelled between two chunks."""
_DEAD_PEERS_S = 1.0
"""Seconds between two looks for peers that have died."""

VERSION = 1
"""Of the endpoint; both sides run on one host, so a range is not needed."""


class LocalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that the transports of one host share."""

    chunk_bytes: int = CHUNK_BYTES
    """Bytes a mover copies at a time; between two of them a read can be cancelled."""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 4096:
            raise ValueError(f"chunk_bytes: {self.chunk_bytes} is less than 4096")


class LocalEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to reach the memory of a rank on its host."""

    transport: str
    version: int = VERSION
    host: str
    """Boot id of the host: names and handles mean nothing on another."""


HereT = TypeVar("HereT", bound=LocalEndpoint)


class LocalPeer(Peer):
    """The memory of one rank, and the reads from it. What it holds outlives the last of them."""

    def __init__(self, region_bytes: tuple[int, ...]) -> None:
        self.region_bytes = np.array(region_bytes, dtype=np.int64)
        """By region id; 0 where nothing is served."""
        self.addresses = np.zeros(len(region_bytes), dtype=np.int64)
        """By region id, for the copier."""
        self.closed = False
        self._reads: set[LocalTransfer] = set()
        self._lock = threading.Lock()

    @abstractmethod
    def lost(self) -> KVFerryError | None:
        """Why nothing can be read although the connection is open, or ``None``. Never waits."""

    @abstractmethod
    def release(self) -> None:
        """Lets go of what the connection holds. Called once it is closed and nobody reads;
        idempotent.
        """

    def error(self) -> KVFerryError | None:
        """Why nothing can be read from it, or ``None``."""
        with self._lock:  # what it looks at is not let go meanwhile
            return PeerLostError("the connection was closed") if self.closed else self.lost()

    def begin(self, read: "LocalTransfer") -> bool:
        """Takes a read in; false, and the read has failed, if the connection was closed."""
        with self._lock:
            closed = self.closed
            if not closed:
                self._reads.add(read)
        if closed:
            read.fail(PeerLostError("the connection was closed"))
        return not closed

    def forget(self, read: "LocalTransfer") -> None:
        """A read has ended."""
        with self._lock:
            self._reads.discard(read)
            self._release_if_idle()

    def close(self) -> None:
        """Running reads fail with ``PeerLostError``; then what the connection holds is let go."""
        with self._lock:
            self.closed = True
            reads = list(self._reads)
        for read in reads:
            read.fail(PeerLostError("the connection was closed"))
        with self._lock:
            self._release_if_idle()

    def _release_if_idle(self) -> None:
        # A thread may still be inside a chunk: what it reads through must outlive it.
        if self.closed and not self._reads:
            self.release()


class LocalTransfer(Transfer):
    """A read from a peer of this host. It fails if that is lost when the last byte has landed."""

    def __init__(
        self, copy: ChunkedCopy, transfers: Transfers, movers: MoverPool, peer: LocalPeer
    ) -> None:
        self._copy = copy
        self._movers = movers
        self._peer = peer
        super().__init__(copy.nbytes, transfers)

    @property
    def bytes_done(self) -> int:
        """See :class:`Transfer`."""
        return self._copy.bytes_done

    @bytes_done.setter
    def bytes_done(self, _: int) -> None:
        pass

    def start(self) -> None:
        """Puts as many movers on it as are of use."""
        error = self._peer.error()
        if error is not None:
            self.fail(error)
            return
        for _ in range(max(1, min(self._movers.size, self._copy.num_chunks))):
            self._movers.submit(self.turn)

    def turn(self) -> None:
        """The calling thread copies for a while; if something is left, a mover goes on."""
        if not self.enter():
            return
        more = False
        try:
            more = self._copy.step(TURN_BYTES)
        except Exception as error:  # of the copy, or a bug of ours: the thread goes on
            self.fail(as_transfer_error(error, "the copy failed"))
        finally:
            self.leave(0, 0)
        if more:
            self._movers.submit(self.turn)

    def stop(self, state: TransferState, error: KVFerryError | None = None) -> None:
        """See :meth:`Transfer.stop`; those who copy end with their chunks."""
        self._copy.cancel()
        super().stop(state, error)

    def verify(self) -> KVFerryError | None:
        """See :meth:`Transfer.verify`."""
        return self._peer.error()

    def ended(self, state: TransferState) -> None:
        """See :meth:`Transfer.ended`."""
        self.segments = self._copy.segments
        self._peer.forget(self)


PeerT = TypeVar("PeerT", bound=LocalPeer)


class LocalTransport(Transport, Generic[PeerT]):
    """A transport between the processes of one host. Thread-safe."""

    addressing = Addressing.MOVERS
    fences = True
    same_host = True
    peer_class: type[PeerT]
    """What :meth:`connect` returns."""
    short_bytes: ClassVar[int] = SHORT_BYTES
    """Longest read that the caller of :meth:`read` copies itself."""

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
    def _copy(self, peer: PeerT, tiles: Tiles, runs: Runs) -> ChunkedCopy:
        """What copies tiles × runs, which are inside both sides' regions."""

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """See :meth:`Transport.read`. A short one is over when this returns."""
        ours = own_peer(peer, self.peer_class)
        check_bounds(tiles, runs, ours.region_bytes, self._regions.nbytes)
        read = LocalTransfer(self._copy(ours, tiles, runs), self._transfers, self._movers, ours)
        if not ours.begin(read) or not self._transfers.add(read):
            return read
        if after is None and read.nbytes <= self.short_bytes:
            read.turn()
        else:
            start_after(after, read, read.start)
        return read

    def poll(self) -> list[Transfer]:
        """See :meth:`Transport.poll`. Now and then it lets go of what dead peers have left."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _DEAD_PEERS_S
            self._drop_dead_peers()
        return self._transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transport.cancel`; terminal once the chunks under way have been copied."""
        self._transfers.cancel(transfer)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if not self._transfers.close():
            return
        self._movers.close()
        self._transfers.drain()
        with self._lock:
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()

    def _add_peer(self, peer: PeerT) -> PeerT:
        """Takes a connection in, and lets go of dead ones first."""
        self._drop_dead_peers()
        with self._lock:
            self._peers.append(peer)
        return peer

    def _drop_dead_peers(self) -> None:
        """What a connection holds keeps a dead owner's memory in use, which its next start may
        need.
        """
        with self._lock:
            self._peers = [peer for peer in self._peers if not peer.closed]
            peers = list(self._peers)
        for peer in peers:
            if peer.error() is not None:
                peer.close()


def decode_here(kind: type[HereT], endpoint: bytes, transport: str) -> HereT:
    """An endpoint of this host.

    Raises:
        DecodeError: see :func:`~kvferry.decoding.decode_as`.
        PeerLostError: it is of another host.
    """
    described = decode_as(kind, endpoint, transport, VERSION)
    if described.host != boot_id():
        raise PeerLostError(
            f"the peer runs on another host, where {transport} does not reach; use tcp"
        )
    return described


def host_digest() -> str:
    """Equal for processes on one host, and of no use to who is on another; empty if unknown."""
    try:
        return hashlib.sha256(b"kvferry host " + boot_id().encode()).hexdigest()[:16]
    except OSError:  # a system without the file
        return ""


def boot_id() -> str:
    """Tells one host from another: random per start of it; containers have their host's."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
