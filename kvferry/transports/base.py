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
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import CancelledError, KVFerryError, TransferError
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.lifetimes import Closing

logger = logging.getLogger(__name__)

ByteArray = npt.NDArray[np.uint8]
PeerT = TypeVar("PeerT", bound="Peer")


class Addressing(enum.StrEnum):
    """What a transport does with tiles × runs."""

    MOVERS = "movers"
    """Its own threads read source memory and write target memory, in one pass."""
    PACKED = "packed"
    """The source packs chunks and the reader unpacks them; the wire between is dense."""
    SEGMENTS = "segments"
    """One operation of the wire per contiguous segment."""


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


class Transfer:
    """One read: how far it is, and the fence around the memory that it writes.

    Everybody may look at it. The transport's threads write target memory between :meth:`enter`
    and :meth:`leave` only. Once the transfer was stopped no thread is let in, and it becomes
    terminal when the last one has left: **a terminal state proves that nothing of it lands any
    more**. The first reason to stop stands.

    A transport derives its own from it, to keep what belongs to one read, and for the two methods
    that are called on the way to the end: :meth:`verify` and :meth:`ended`.
    """

    def __init__(self, nbytes: int, transfers: "Transfers | None" = None) -> None:
        """A read of ``nbytes``; it counts from :meth:`Transfers.add` on."""
        now = time.monotonic()
        self.nbytes = nbytes
        """Bytes to move."""
        self.state = TransferState.RUNNING
        self.bytes_done = 0
        """Bytes already in place: the progress that tells slow from stalled."""
        self.segments = 0
        """Contiguous copies after merging, where the mover counts them."""
        self.error: KVFerryError | None = None
        """Why it failed; set before ``state`` becomes ``FAILED``."""
        self.started = now
        """``time.monotonic()`` at the call of ``read``."""
        self.progressed = now
        """``time.monotonic()`` of the last progress."""
        self.finished: float | None = None
        """``time.monotonic()`` when it became terminal."""
        self._transfers = Transfers() if transfers is None else transfers
        self._lock = self._transfers.lock
        self._writers = 0
        self._verdict: tuple[TransferState, KVFerryError | None] | None = None
        self._ended = False
        self._callbacks: list[Callable[[Transfer], object]] = []

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.state.value}, {self.bytes_done} of {self.nbytes} bytes, "
            f"error={self.error!r})"
        )

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

    # For the transport.

    @property
    def stopped(self) -> bool:
        """Whether nobody may enter any more."""
        return self._verdict is not None

    def enter(self) -> bool:
        """Whether the calling thread may write now; if so it must call :meth:`leave`."""
        with self._lock:
            if self._verdict is not None:
                return False
            self._writers += 1
            return True

    def leave(self, nbytes: int, segments: int) -> None:
        """The calling thread has written ``nbytes`` in ``segments`` copies and writes no more.

        When all bytes are there the transfer is done, unless :meth:`verify` objects.
        """
        with self._lock:
            self.bytes_done += nbytes
            self.segments += segments
            self.progressed = time.monotonic()
            complete = self._verdict is None and self.bytes_done == self.nbytes
            if complete:
                self._verdict = (TransferState.DONE, None)
            else:
                self._writers -= 1
                over = self._claim_end()
        if complete:
            # It still counts as a writer, so nothing shows before this is answered.
            if (error := self.verify()) is not None:
                self._verdict = (TransferState.FAILED, error)
            with self._lock:
                self._writers -= 1
                over = self._claim_end()
        if over:
            self._end()

    def stop(self, state: TransferState, error: KVFerryError | None = None) -> None:
        """Lets nobody in any more; the first verdict stands. Idempotent, never waits."""
        with self._lock:
            if self._verdict is None:
                self._verdict = (state, error)
            over = self._claim_end()
        if over:
            self._end()

    def fail(self, error: KVFerryError) -> None:
        """Stops as ``FAILED``."""
        self.stop(TransferState.FAILED, error)

    def verify(self) -> KVFerryError | None:
        """Asked once all bytes are there: why they may be wrong all the same, or ``None``."""
        return None

    def ended(self, state: TransferState) -> None:
        """Called once, by any thread, just before the terminal state shows. Must not raise."""

    def _claim_end(self) -> bool:
        """Whether the calling thread must make it terminal: said once. Under the lock."""
        over = self._verdict is not None and not self._writers and not self._ended
        self._ended = self._ended or over
        return over

    def _end(self) -> None:
        assert self._verdict is not None
        state, error = self._verdict
        self.ended(state)
        self._transfers.finish(self, state, error)
        for callback in self._callbacks:
            try:
                callback(self)
            except Exception:  # the thread that ended it has other transfers
                logger.exception("who waited for a transfer failed")


def as_transfer_error(error: Exception, what: str) -> KVFerryError:
    """The error of a transfer; for a defect of ours, which is logged, one that says so."""
    if isinstance(error, KVFerryError):
        return error
    logger.error("%s", what, exc_info=error)
    return TransferError(f"{what}: {error!r}")


class Transfers:
    """The transfers of one transport: those under way, and those that ended and were not polled.

    Thread-safe.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Guards all of this and the counts of each transfer; held for a few lines at a time."""
        self._idle = threading.Condition(self.lock)
        self._running: set[Transfer] = set()
        self._ended: list[Transfer] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def add(self, transfer: Transfer) -> bool:
        """Takes a transfer in; false, and the transfer has failed, if the transport is closed."""
        with self.lock:
            closed = self._closed
            if not closed and not transfer.is_terminal:
                self._running.add(transfer)
        if closed:
            transfer.fail(TransferError("the transport is closed"))
        return not closed

    def finish(self, transfer: Transfer, state: TransferState, error: KVFerryError | None) -> None:
        """Makes a transfer terminal. For :class:`Transfer`, which calls it once."""
        with self.lock:
            self._running.discard(transfer)
            transfer.error = error
            transfer.finished = time.monotonic()
            transfer.state = state  # last: whoever sees it sees the rest
            self._ended.append(transfer)
            if self._closed:
                self._idle.notify_all()

    def cancel(self, transfer: Transfer) -> None:
        """Stops a transfer if it is under way; terminal once those who write have left."""
        with self.lock:
            running = transfer in self._running
        if running:
            transfer.stop(TransferState.CANCELLED, CancelledError("the read was cancelled"))

    def poll(self) -> list[Transfer]:
        """Transfers that ended since the last call, each once."""
        with self.lock:
            ended, self._ended = self._ended, []
            return ended

    def close(self) -> bool:
        """Fails what is under way and lets nothing in any more; false if that was done before."""
        with self.lock:
            if self._closed:
                return False
            self._closed = True
            running = list(self._running)
        for transfer in running:
            transfer.fail(TransferError("the transport was closed"))
        return True

    def drain(self) -> None:
        """Waits, after :meth:`close`, until nothing is under way; for transports that fence."""
        with self._idle:
            self._idle.wait_for(lambda: not self._running)


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What a transport is opened with."""

    host: str = "127.0.0.1"
    """Address on which to listen, and which peers are told."""
    advertise_host: str = ""
    """Host that peers are told in place of ``host``; empty: ``host``."""
    rank: int = 0
    """Number of the rank in its engine; a port that is given is rank 0's, others take the next."""
    threads: int = 1
    """Mover threads."""
    stall_timeout_s: float = 120.0
    """Seconds without progress after which a transfer fails as stalled. A peer that is only slow
    may not get to run for a minute; one that is gone shows in the connection."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the transport's ``ExtraConfig``."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads: {self.threads} is less than 1")


class Peer(Closing):
    """A connection to one rank that serves memory."""

    @abstractmethod
    def close(self) -> None:
        """Drops the connection; transfers still running on it fail with ``PeerLostError``."""


def own_peer(peer: Peer, kind: type[PeerT]) -> PeerT:
    """A peer as the transport that made it knows it.

    Raises:
        TypeError: it is another transport's.
    """
    if not isinstance(peer, kind):
        raise TypeError(f"peer: expected what connect() returned, got {peer!r}")
    return peer


class Transport(Closing):
    """Moves bytes between regions. Thread-safe; every method but ``close`` is non-blocking."""

    name: ClassVar[str]
    """Name under which it is registered, for example ``"shm"``."""
    addressing: ClassVar[Addressing]
    """What it does with tiles × runs."""
    fences: bool
    """Whether every read becomes terminal, which proves that nothing of it can land any more, soon
    after it was cancelled, stalled or lost its peer. One that does not fence may leave such a read
    ``RUNNING`` for as long as nobody knows; it is given staging memory only."""
    least_segment_bytes: ClassVar[int] = 0
    """Mean bytes of a segment from which on it is faster to place them than to stage; measured for
    a transport of segments, 0 for one whose movers cost nothing per segment."""
    same_host: ClassVar[bool] = False
    """Whether it reaches ranks on its own host only."""
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
        """Transfers that became terminal since the last call, each exactly once.

        Nobody needs to call it on a timer: :meth:`Transfer.on_end` says when.
        """

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


class DeviceTransport(Transport):
    """A transport that also serves, and reads into, memory that the host cannot touch.

    Region ids count up over the methods here and those for host memory together.
    """

    @abstractmethod
    def allocate_device(self, nbytes: int) -> tuple[int, MemorySpan]:
        """Allocates zeroed memory of the device that peers may read; returns its region id.

        It lives until ``close``.

        Raises:
            HostError: there is no room for ``nbytes``.
        """

    @abstractmethod
    def register_device(self, memory: MemorySpan, *, serve: bool = True) -> int:
        """Makes memory of the device a region; returns its id. The caller keeps it alive.

        With ``serve=False`` it is only a place for this side's own reads to land.

        Raises:
            TransferError: this memory cannot be served, or is that of another device.
        """


class TransportAround(Transport):
    """Does what the inner transport does, except what a subclass does otherwise."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """As the inner transport."""
        return self._inner.allocate(nbytes)

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """As the inner transport."""
        return self._inner.register(memory, serve=serve)

    def endpoint(self) -> bytes:
        """As the inner transport."""
        return self._inner.endpoint()

    def connect(self, endpoint: bytes) -> Peer:
        """As the inner transport."""
        return self._inner.connect(endpoint)
