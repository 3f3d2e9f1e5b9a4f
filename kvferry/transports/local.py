"""Connections on one host, where our own movers read the peer's memory and no wire takes part."""

import threading
import time
from abc import abstractmethod
from typing import Generic, TypeVar

import numpy as np

from kvferry.errors import KVFerryError, PeerLostError
from kvferry.transports.base import Peer, Transfer, Waitable
from kvferry.transports.movers import (
    ChunkedRead,
    Chunks,
    Landing,
    Ledger,
    MoverPool,
    start_after,
)

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
        self._reads: dict[Transfer, Landing] = {}
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

    def start(
        self,
        copy: Chunks,
        transfer: Transfer,
        ledger: Ledger,
        pool: MoverPool,
        after: Waitable | None,
    ) -> None:
        """Lets the movers work on ``copy`` once ``after`` has happened.

        The transfer fails if the peer is lost now, or is when the last byte has landed.
        """
        landing = Landing(
            transfer,
            ledger,
            verify=self.error,
            on_end=lambda _: self._forget(transfer),
        )
        with self._lock:
            error = self.error()
            self._reads[transfer] = landing
        if not ledger.enter(landing):
            return
        if error is not None:
            landing.fail(error)
            return
        start_after(after, landing, ChunkedRead(copy, landing, pool).start)

    def close(self) -> None:
        """Running reads fail with ``PeerLostError``; then what the connection holds is let go."""
        with self._lock:
            self.closed = True
            reads = list(self._reads.values())
        for landing in reads:
            landing.fail(PeerLostError("the connection was closed"))
        with self._lock:
            self._release_if_idle()

    def _forget(self, transfer: Transfer) -> None:
        """A read has ended."""
        with self._lock:
            self._reads.pop(transfer, None)
            self._release_if_idle()

    def _release_if_idle(self) -> None:
        # A mover may still be inside a chunk: what it reads through must outlive it.
        if self.closed and not self._reads:
            self.release()


PeerT = TypeVar("PeerT", bound=LocalPeer)


class LocalReads(Generic[PeerT]):
    """The connections of one transport, and the reads over them. Thread-safe."""

    def __init__(self, name: str, threads: int) -> None:
        """``threads`` movers are started; ``name`` is theirs."""
        self.movers = MoverPool(name, threads)
        self._ledger = Ledger()
        self._peers: list[PeerT] = []
        self._lock = threading.Lock()
        self._next_look = 0.0

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._ledger.closed

    def add(self, peer: PeerT) -> PeerT:
        """Takes a connection in, and lets go of dead ones first."""
        self._drop_dead_peers()
        with self._lock:
            self._peers.append(peer)
        return peer

    def start(self, peer: PeerT, copy: Chunks, nbytes: int, after: Waitable | None) -> Transfer:
        """See :meth:`LocalPeer.start`; ``copy`` is of ``nbytes``."""
        transfer = Transfer(nbytes=nbytes)
        peer.start(copy, transfer, self._ledger, self.movers, after)
        return transfer

    def poll(self) -> list[Transfer]:
        """See :meth:`Ledger.poll`. Now and then it lets go of what dead peers have left."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _DEAD_PEERS_S
            self._drop_dead_peers()
        return self._ledger.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Ledger.cancel`."""
        self._ledger.cancel(transfer)

    def close(self) -> bool:
        """Fails reads, then ends movers and connections; false if that was done before."""
        if not self._ledger.close():
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
