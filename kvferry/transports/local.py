"""Connections on one host, where our own movers read the peer's memory and no wire takes part."""

import threading
import time
from abc import abstractmethod
from typing import Generic, TypeVar

import numpy as np

from kvferry.errors import KVFerryError, PeerLostError
from kvferry.transports.base import Peer, Transfer, Transfers, TransferState, Waitable
from kvferry.transports.movers import Chunks, CopyTransfer, MoverPool, start_after

_DEAD_PEERS_S = 1.0
"""Seconds between two looks for peers that have died."""


class LocalPeer(Peer):
    """The memory of one rank, and the reads from it. What it holds outlives the last of them."""

    def __init__(self, region_bytes: tuple[int, ...]) -> None:
        self.region_bytes = region_bytes
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
        if self.closed:
            return PeerLostError("the connection was closed")
        return self.lost()

    def begin(self, read: "LocalTransfer") -> KVFerryError | None:
        """Takes a read in; why it cannot be carried out, or ``None``."""
        with self._lock:
            self._reads.add(read)
            return self.error()

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
        # A mover may still be inside a chunk: what it reads through must outlive it.
        if self.closed and not self._reads:
            self.release()


class LocalTransfer(CopyTransfer):
    """A read from a peer of this host. It fails if that is lost when the last byte has landed."""

    def __init__(
        self, nbytes: int, transfers: Transfers, copy: Chunks, pool: MoverPool, peer: LocalPeer
    ) -> None:
        super().__init__(nbytes, transfers, copy, pool)
        self._peer = peer

    def verify(self) -> KVFerryError | None:
        """See :meth:`Transfer.verify`."""
        return self._peer.error()

    def ended(self, state: TransferState) -> None:
        """See :meth:`Transfer.ended`."""
        self._peer.forget(self)


PeerT = TypeVar("PeerT", bound=LocalPeer)


class LocalReads(Generic[PeerT]):
    """The connections of one transport, and the reads over them. Thread-safe."""

    def __init__(self, name: str, threads: int) -> None:
        """``threads`` movers are started; ``name`` is theirs."""
        self.movers = MoverPool(name, threads)
        self._transfers = Transfers()
        self._peers: list[PeerT] = []
        self._lock = threading.Lock()
        self._next_look = 0.0

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._transfers.closed

    def add(self, peer: PeerT) -> PeerT:
        """Takes a connection in, and lets go of dead ones first."""
        self._drop_dead_peers()
        with self._lock:
            self._peers.append(peer)
        return peer

    def start(self, peer: PeerT, copy: Chunks, nbytes: int, after: Waitable | None) -> Transfer:
        """Lets the movers work on ``copy``, of ``nbytes``, once ``after`` has happened."""
        read = LocalTransfer(nbytes, self._transfers, copy, self.movers, peer)
        error = peer.begin(read)
        if not self._transfers.add(read):
            return read
        if error is not None:
            read.fail(error)
        else:
            start_after(after, read, read.start)
        return read

    def poll(self) -> list[Transfer]:
        """See :meth:`Transfers.poll`. Now and then it lets go of what dead peers have left."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _DEAD_PEERS_S
            self._drop_dead_peers()
        return self._transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transfers.cancel`."""
        self._transfers.cancel(transfer)

    def close(self) -> bool:
        """Fails reads, then ends movers and connections; false if that was done before."""
        if not self._transfers.close():
            return False
        self.movers.close()
        with self._lock:
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        return True

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
