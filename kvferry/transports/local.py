"""Connections on one host, where our own movers read the peer's memory and no wire takes part."""

import threading
from abc import abstractmethod

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
