"""The contract of a transport: it moves bytes between registered regions.

A transport knows regions, tiles and runs (:mod:`kvferry.layouts.tiles`); it knows nothing of
layers, heads, requests or leases. Each rank opens one transport per kind it uses. The engine that
owns the source memory serves; the reader calls :meth:`Transport.connect` and
:meth:`Transport.read`.
"""

import enum
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import KVFerryError
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.lifetimes import Closing
from kvferry.topology.strategies import Addressing

logger = logging.getLogger(__name__)

ByteArray = npt.NDArray[np.uint8]


class Waitable(Protocol):
    """An event that a mover waits for before it touches memory (a device event, for example)."""

    def wait(self) -> object:
        """Returns when the memory may be read and written."""


class TransferState(enum.Enum):
    """The state of a transfer; the last three are terminal."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Transfer:
    """One read under way. Written by the transport's threads, read by anyone."""

    nbytes: int
    """Bytes to move."""
    state: TransferState = TransferState.RUNNING
    bytes_done: int = 0
    """Bytes already in place: the progress that tells slow from stalled."""
    segments: int = 0
    """Contiguous copies after merging, where the mover counts them."""
    error: KVFerryError | None = None
    """Why it failed; set before ``state`` becomes ``FAILED``."""
    started: float = field(default_factory=time.monotonic)
    """``time.monotonic()`` at the call of ``read``."""
    progressed: float = field(default_factory=time.monotonic)
    """``time.monotonic()`` of the last progress."""
    finished: float | None = None
    """``time.monotonic()`` when it became terminal."""
    _callbacks: list[Callable[["Transfer"], object]] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def is_terminal(self) -> bool:
        """Whether nothing of this transfer can land any more."""
        return self.state is not TransferState.RUNNING

    def on_end(self, callback: Callable[["Transfer"], object]) -> None:
        """Has ``callback`` called with this transfer once it is terminal, so that nobody polls.

        By the thread that ends it, or at once by this one if it has ended. It must not block.
        """
        with self._lock:
            if not self.is_terminal:
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, state: TransferState, error: KVFerryError | None = None) -> bool:
        """Makes it terminal, for its transport; false if it was already."""
        with self._lock:
            if self.is_terminal:
                return False
            self.error = error
            self.finished = time.monotonic()
            self.state = state  # last: whoever sees it sees the rest
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the thread that ended it has other transfers
                logger.exception("who waited for a transfer failed")
        return True


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What a transport is opened with."""

    host: str = "127.0.0.1"
    """Address on which to listen, and which peers are told."""
    threads: int = 1
    """Mover threads."""
    stall_timeout_s: float = 10.0
    """Seconds without progress after which a transfer fails as stalled."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the transport's ``ExtraConfig``."""


class Peer(Closing):
    """A connection to one rank that serves memory."""

    @abstractmethod
    def close(self) -> None:
        """Drops the connection; transfers still running on it fail with ``PeerLostError``."""


class Transport(Closing):
    """Moves bytes between regions. Thread-safe; every method but ``close`` is non-blocking."""

    name: ClassVar[str]
    """Name under which it is registered, for example ``"shm"``."""
    addressing: ClassVar[Addressing]
    """What it does with tiles × runs."""
    fences: ClassVar[bool]
    """Whether every read becomes terminal, which proves that nothing of it can land any more, soon
    after it was cancelled, stalled or lost its peer. One that does not fence may leave such a read
    ``RUNNING`` for as long as nobody knows; it is given staging memory only."""
    least_segment_bytes: ClassVar[int] = 0
    """Mean bytes of a segment from which on it is faster to place them than to stage; measured for
    a transport of segments, 0 for one whose movers cost nothing per segment."""
    ExtraConfig: ClassVar[type[msgspec.Struct]]
    """Struct of the keys this transport takes; checked before it is opened."""

    @classmethod
    @abstractmethod
    def open(cls, options: TransportOptions) -> "Transport":
        """Returns a transport that is ready to serve and to read.

        Raises:
            ConfigError: unknown or wrong keys in ``options.extra``.
            PortInUseError: a configured port is taken.
        """

    @abstractmethod
    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """Allocates zeroed memory that peers may read; returns its region id and its bytes.

        Region ids count up from 0 over ``allocate`` and ``register`` together.

        Raises:
            SharedMemoryError: there is no room for ``nbytes``.
        """

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """Makes memory that exists a region; returns its id. The caller keeps it alive.

        With ``serve=False`` it is only a place for this side's own reads to land.

        Raises:
            TransferError: this transport cannot serve memory it did not allocate.
        """
        raise NotImplementedError

    @abstractmethod
    def endpoint(self) -> bytes:
        """What a peer needs for :meth:`connect`, covering every region known so far."""

    @abstractmethod
    def connect(self, endpoint: bytes) -> Peer:
        """Connects to a serving rank. Idempotence is the caller's: one call, one peer.

        It never waits for the other side, so where nobody is there this may show only in the
        reads: they fail with ``PeerLostError``. A lost peer stays lost; connect again.

        Raises:
            DecodeError: the endpoint does not decode.
            PeerLostError: nobody is there, where that can be told at once.
        """

    @abstractmethod
    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """Starts to copy ``tiles`` × ``runs`` from the peer's regions into ours; returns at once.

        Everything is bounds-checked against both sides' regions before a byte moves. The tables
        must not change until the transfer is terminal. From a lost peer the transfer fails with
        ``PeerLostError``.

        Raises:
            BoundsError: a tile and a run leave a region.
        """

    @abstractmethod
    def poll(self) -> list[Transfer]:
        """Transfers that became terminal since the last call, each exactly once."""

    @abstractmethod
    def cancel(self, transfer: Transfer) -> None:
        """Asks for the transfer to stop; idempotent.

        It becomes terminal later, in ``poll``, and nothing lands after that. If the transport does
        not fence, that may be never.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends threads, connections and memory. Idempotent.

        Running transfers fail first, those apart of which a transport that does not fence cannot
        know the end.
        """
