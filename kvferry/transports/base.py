"""The contract of a transport: a transport moves bytes between registered regions.

A transport knows regions, tiles and runs (:mod:`kvferry.layouts.tiles`). A transport knows nothing
of layers, heads, requests or leases. Each rank opens one transport of each kind in use. The engine
with the source memory serves; the reader calls :meth:`Transport.connect` and
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

from kvferry.errors import CancelledError, KVFerryError, TransferError
from kvferry.layouts.arrays import ByteArray, MemorySpan
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.lifetimes import Closing

logger = logging.getLogger(__name__)

PeerT = TypeVar("PeerT", bound="Peer")


class Addressing(enum.StrEnum):
    """How a transport carries out tiles × runs."""

    MOVERS = "movers"
    """Threads of the transport read source memory and write target memory, in one pass."""
    PACKED = "packed"
    """The source packs chunks and the reader unpacks them; the bytes on the wire are dense."""
    SEGMENTS = "segments"
    """The wire carries one operation per contiguous segment."""


class Waitable(Protocol):
    """An event that a mover waits for before touching memory, for example a device event."""

    def wait(self) -> object:
        """Returns when the memory may be read and written."""


class TransferState(enum.Enum):
    """The state of a transfer; the last three are terminal."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Transfer:
    """A read: its progress, and the fence around the memory that the read writes.

    Every thread may look at a transfer. The threads of the transport write target memory only
    between :meth:`enter` and :meth:`leave`. After a stop, no thread may enter. The transfer becomes
    terminal when the last thread has left: **a terminal state proves that no byte of the transfer
    lands afterwards**. The first reason to stop stands.

    A transport derives a subclass to keep the state of one read, and to override :meth:`verify` and
    :meth:`ended`, which are called when a transfer ends.
    """

    def __init__(self, nbytes: int, transfers: "Transfers | None" = None) -> None:
        """A read of ``nbytes``; counted as running only after :meth:`Transfers.add`."""
        now = time.monotonic()
        self.nbytes = nbytes
        """Number of bytes to move."""
        self.state = TransferState.RUNNING
        self.bytes_done = 0
        """Number of bytes already in place; this progress tells a slow transfer from a stall."""
        self.segments = 0
        """Number of contiguous copies after merging, if the mover counts copies."""
        self.error: KVFerryError | None = None
        """Error of a failed transfer; set before ``state`` becomes ``FAILED``."""
        self.started = now
        """``time.monotonic()`` at the call of ``read``."""
        self.progressed = now
        """``time.monotonic()`` of the last progress."""
        self.finished: float | None = None
        """``time.monotonic()`` at which the transfer became terminal; ``None`` before."""
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
        """Whether no byte of this transfer can land any more."""
        return self.state is not TransferState.RUNNING

    def on_end(self, callback: Callable[["Transfer"], object]) -> None:
        """Registers ``callback``, called once with this transfer when terminal; replaces polling.

        The thread that ends the transfer calls ``callback``; if the transfer has already ended, the
        calling thread does so at once. ``callback`` must not block.
        """
        with self._lock:
            if not self.is_terminal:
                self._callbacks.append(callback)
                return
        callback(self)

    # Methods for the transport.

    @property
    def stopped(self) -> bool:
        """Whether threads may no longer enter."""
        return self._verdict is not None

    def enter(self) -> bool:
        """Whether the calling thread may write now; if so, the thread must call :meth:`leave`."""
        with self._lock:
            if self._verdict is not None:
                return False
            self._writers += 1
            return True

    def leave(self, nbytes: int, segments: int) -> None:
        """Records ``nbytes`` written in ``segments`` copies by the calling thread, now finished.

        When all bytes are in place the transfer is done, unless :meth:`verify` returns an error.
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
            # This thread still counts as a writer, so no state shows before verify() returns.
            if (error := self.verify()) is not None:
                self._verdict = (TransferState.FAILED, error)
            with self._lock:
                self._writers -= 1
                over = self._claim_end()
        if over:
            self._end()

    def stop(self, state: TransferState, error: KVFerryError | None = None) -> None:
        """Keeps further threads out. The first verdict stands. Idempotent; never waits."""
        with self._lock:
            if self._verdict is None:
                self._verdict = (state, error)
            over = self._claim_end()
        if over:
            self._end()

    def fail(self, error: KVFerryError) -> None:
        """Stops the transfer as ``FAILED``."""
        self.stop(TransferState.FAILED, error)

    def verify(self) -> KVFerryError | None:
        """Called once all bytes are in place; the error if bytes may be wrong, else ``None``."""
        return None

    def ended(self, state: TransferState) -> None:
        """Called once, by any thread, just before the terminal state shows. Must not raise."""

    def _claim_end(self) -> bool:
        """Whether the caller, who must hold the lock, must end the transfer: true only once."""
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
            except Exception:  # the thread that ended the transfer has other transfers
                logger.exception("who waited for a transfer failed")


def as_transfer_error(error: Exception, what: str) -> KVFerryError:
    """The error of a transfer; a defect of kvferry is logged and becomes a ``TransferError``."""
    if isinstance(error, KVFerryError):
        return error
    logger.error("%s", what, exc_info=error)
    return TransferError(f"{what}: {error!r}")


class Transfers:
    """The transfers of one transport: running transfers, and ended transfers not yet polled.

    Thread-safe.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Guards this object and the counts of each transfer; held for a few lines at a time."""
        self._idle = threading.Condition(self.lock)
        self._running: set[Transfer] = set()
        self._ended: list[Transfer] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def add(self, transfer: Transfer) -> bool:
        """Adds a transfer. If the transport is closed, fails the transfer and returns false."""
        with self.lock:
            closed = self._closed
            if not closed and not transfer.is_terminal:
                self._running.add(transfer)
        if closed:
            transfer.fail(TransferError("the transport is closed"))
        return not closed

    def finish(self, transfer: Transfer, state: TransferState, error: KVFerryError | None) -> None:
        """Makes a transfer terminal. Only :class:`Transfer` calls this method, and only once."""
        with self.lock:
            self._running.discard(transfer)
            transfer.error = error
            transfer.finished = time.monotonic()
            transfer.state = state  # last: a reader of the state sees the rest too
            self._ended.append(transfer)
            if self._closed:
                self._idle.notify_all()

    def cancel(self, transfer: Transfer) -> None:
        """Stops a running transfer, which becomes terminal once its writers have left."""
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
        """Fails all running transfers and refuses new ones; false if closed before."""
        with self.lock:
            if self._closed:
                return False
            self._closed = True
            running = list(self._running)
        for transfer in running:
            transfer.fail(TransferError("the transport was closed"))
        return True

    def drain(self) -> None:
        """Waits, after :meth:`close`, until no transfer is running; for transports that fence."""
        with self._idle:
            self._idle.wait_for(lambda: not self._running)


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Options with which a transport is opened."""

    host: str = "127.0.0.1"
    """Address to listen on; peers get the same address, unless ``advertise_host`` is set."""
    advertise_host: str = ""
    """Host given to peers instead of ``host``; if empty, peers get ``host``."""
    rank: int = 0
    """Number of the rank in its engine. A configured port is the port of rank 0; rank ``n`` uses
    the port plus ``n``."""
    threads: int = 1
    """Number of mover threads."""
    stall_timeout_s: float = 120.0
    """Seconds without progress after which a transfer fails as stalled. A slow peer may not get to
    run for a minute; the loss of a peer shows in the connection."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the transport's ``ExtraConfig``."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads: {self.threads} is less than 1")


class Peer(Closing):
    """A connection to one rank that serves memory."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connection; transfers still running on it fail with ``PeerLostError``."""


def own_peer(peer: Peer, kind: type[PeerT]) -> PeerT:
    """The peer, as an instance of the class that the transport's own ``connect`` makes.

    Raises:
        TypeError: the peer belongs to another transport.
    """
    if not isinstance(peer, kind):
        raise TypeError(f"peer: expected what connect() returned, got {peer!r}")
    return peer


class Transport(Closing):
    """Moves bytes between regions. Thread-safe; only ``close`` may block."""

    name: ClassVar[str]
    """Registered name of the transport, for example ``"shm"``."""
    addressing: ClassVar[Addressing]
    """How the transport carries out tiles × runs."""
    fences: bool
    """Whether every read becomes terminal soon after a cancellation, a stall or the loss of the
    peer. A terminal state proves that no byte lands afterwards. A transport that does not fence may
    leave such a read ``RUNNING`` as long as the outcome is unknown; such a transport gets staging
    memory only."""
    least_segment_bytes: ClassVar[int] = 0
    """Mean number of bytes per segment from which placing segments is faster than staging. Measured
    for a transport with ``SEGMENTS``; 0 if the movers have no cost per segment."""
    may_sleep: ClassVar[bool] = False
    """Whether the owner of registered memory may let the memory go once the transport is closed.
    That is so if no device and no network card of a peer can still read the memory then."""
    same_host: ClassVar[bool] = False
    """Whether the transport reaches ranks on its own host only."""
    ExtraConfig: ClassVar[type[msgspec.Struct]]
    """Struct of the keys in ``extra``, which is checked before the transport is opened."""

    @classmethod
    def with_keys(cls, extra: Mapping[str, Any]) -> type["Transport"]:  # noqa: ARG003
        """The class of the transport that :meth:`open` returns for keys in ``options.extra``."""
        return cls

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
        """Allocates zeroed memory that peers may read; returns the region id and the bytes.

        ``allocate`` and ``register`` share one count of region ids, from 0 up.

        Raises:
            SharedMemoryError: there is no room for ``nbytes``.
        """

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """Makes existing memory a region; returns the region id. The caller keeps the memory alive.

        With ``serve=False`` the region is only a target of local reads; peers cannot read from the
        region.

        Raises:
            TransferError: this transport cannot serve memory allocated elsewhere; so does this
                default.
        """
        raise TransferError(
            f"{type(self).__name__} serves only memory that it has allocated itself; let the "
            "connector allocate the KV cache, or use another transport"
        )

    @abstractmethod
    def endpoint(self) -> bytes:
        """The bytes that a peer passes to :meth:`connect`; covers every region known so far."""

    @abstractmethod
    def connect(self, endpoint: bytes) -> Peer:
        """Connects to a serving rank. Not idempotent: each call makes one peer.

        The call never waits for the remote side. If no rank serves there, the error may show only
        in the reads, which fail with ``PeerLostError``. A lost peer stays lost; the caller must
        connect again.

        Raises:
            DecodeError: the endpoint does not decode.
            PeerLostError: no rank serves there, if the transport can tell at once.
        """

    def prepare(self, peer: Peer, tiles: Tiles, most_tokens: int) -> None:
        """Prepares the state shared by all reads of ``tiles`` from a peer; called when engines
        meet.

        Reads of other tiles are just as correct; only the first such read is slower. The prepared
        state lasts as long as the connection. The tiles must stay alive and unchanged for as long.
        The default does nothing.

        Args:
            peer: a peer from :meth:`connect`.
            tiles: a 1-d array of ``TILE_DTYPE``, the same object that is later passed to reads.
            most_tokens: tokens of the longest run.
        """

    @abstractmethod
    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """Starts to copy ``tiles`` × ``runs`` from the peer's regions into local regions.

        The call returns at once. Every address is checked against the bounds of both sides' regions
        before a byte moves. The tables must not change until the transfer is terminal. If the peer
        is lost, the transfer fails with ``PeerLostError``.

        Raises:
            BoundsError: a tile and a run leave a region.
        """

    @abstractmethod
    def poll(self) -> list[Transfer]:
        """Transfers that became terminal since the last call, each exactly once.

        Polling on a timer is not needed: :meth:`Transfer.on_end` reports the end.
        """

    @abstractmethod
    def cancel(self, transfer: Transfer) -> None:
        """Asks a transfer to stop. Idempotent.

        The transfer becomes terminal later, when its last writer has left, and no byte lands
        afterwards. If the transport does not fence, the transfer may never become terminal.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends threads, connections and memory. Idempotent.

        Running transfers fail first. A transport that does not fence leaves out the transfers whose
        end is unknown.
        """


class DeviceTransport(Transport):
    """A transport that also serves, and reads into, memory that the host cannot touch.

    Methods for device memory and for host memory share one count of region ids.
    """

    @abstractmethod
    def allocate_device(self, nbytes: int) -> tuple[int, MemorySpan]:
        """Allocates zeroed device memory that peers may read; returns the region id and the memory.

        The memory lives until ``close``.

        Raises:
            HostError: there is no room for ``nbytes``.
        """

    @abstractmethod
    def register_device(self, memory: MemorySpan, *, serve: bool = True) -> int:
        """Makes device memory a region; returns the region id. The caller keeps the memory alive.

        With ``serve=False`` the region is only a target of local reads; peers cannot read from the
        region.

        Raises:
            TransferError: the transport cannot serve this memory, or the memory is on another
                device.
        """


class TransportAround(Transport):
    """A transport around another: forwards to the inner transport, except in overridden methods."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """See :meth:`Transport.allocate`."""
        return self._inner.allocate(nbytes)

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`."""
        return self._inner.register(memory, serve=serve)

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`."""
        return self._inner.endpoint()

    def connect(self, endpoint: bytes) -> Peer:
        """See :meth:`Transport.connect`."""
        return self._inner.connect(endpoint)

    def prepare(self, peer: Peer, tiles: Tiles, most_tokens: int) -> None:
        """See :meth:`Transport.prepare`."""
        self._inner.prepare(peer, tiles, most_tokens)
