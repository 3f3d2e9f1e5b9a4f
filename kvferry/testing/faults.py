"""Transports that lose, delay and stall reads on purpose, for the tests of connectors.

.. code-block:: python

    Lossy = lossy_transport(ShmTransport, loss=0.2, seed=7)
    with temporary_plugin(TRANSPORTS, "shm", Lossy):
        ...  # every fifth read of this process or so fails with PeerLostError, half landed

The fate of the n-th read of a transport depends only on the seed and n.
"""

import functools
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvferry.errors import (
    CancelledError,
    KVFerryError,
    PeerLostError,
    StalledError,
    TransferError,
)
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.testing.wrapped import WrappedTransport
from kvferry.transports.base import (
    Peer,
    Transfer,
    Transfers,
    TransferState,
    Transport,
    TransportOptions,
    Waitable,
)


@dataclass(frozen=True, slots=True)
class Faults:
    """Shares of reads that fail, and a delay of every read."""

    loss: float = 0.0
    """Share of the reads that lose their peer, 0 to 1."""
    stall: float = 0.0
    """Share of the reads that stall, 0 to 1."""
    delay_s: tuple[float, float] = (0.0, 0.0)
    """Bounds of the random delay of every read's start, in seconds."""
    seed: int = 0

    def draw(self, number: int) -> tuple[type[KVFerryError] | None, float]:
        """The fate of read ``number``: the error at the end, if any, and the delay in seconds.

        With ``PeerLostError``, half of the read lands. With ``StalledError``, half of the read
        lands, and the read ends ``stall_timeout_s`` later.
        """
        rng = np.random.default_rng((self.seed, number))
        chance, delay = float(rng.random()), float(rng.uniform(*self.delay_s))
        if chance < self.loss:
            return PeerLostError, delay
        if chance < self.loss + self.stall:
            return StalledError, delay
        return None, delay


class _Later:
    """Waits for ``after``, and then for a delay."""

    def __init__(self, after: Waitable | None, delay_s: float) -> None:
        self._after = after
        self._delay_s = delay_s

    def wait(self) -> None:
        if self._after is not None:
            self._after.wait()
        time.sleep(self._delay_s)


@dataclass(slots=True, eq=False)
class _Faulted:
    """A failing read: the first half is real, the second half never starts."""

    outer: Transfer
    fault: type[KVFerryError]
    half: Transfer
    rest: Transfer
    gate: threading.Event
    """Event that the second half waits for; set at the end, so that no thread waits for ever."""
    running: set[Transfer]
    cancelled: bool = False
    timed: bool = False
    """Whether a timer will end the read."""

    def verdict(self) -> tuple[TransferState, KVFerryError]:
        if self.cancelled:
            return TransferState.CANCELLED, CancelledError("the read was cancelled")
        if self.half.error is not None:
            return TransferState.FAILED, self.half.error
        return TransferState.FAILED, self.fault("a fault on purpose")


class FaultyTransport(WrappedTransport):
    """A transport around another transport. Call :func:`faulty_transport` to make a subclass."""

    faults: ClassVar[Faults]

    def __init__(self, inner: Transport, stall_timeout_s: float) -> None:
        super().__init__(inner)
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.RLock()
        self._reads = 0
        self._faulted: dict[Transfer, _Faulted] = {}
        self._transfers = Transfers()
        """Reads with a fault."""
        self._parts: set[Transfer] = set()
        """Halves of reads with a fault; never reported to the caller."""

    @classmethod
    def open(cls, options: TransportOptions) -> "FaultyTransport":
        """Opens the inner transport; raises the errors of the inner ``open``."""
        kind = cls.with_keys(options.extra)
        return kind(kind.inner_class.open(options), options.stall_timeout_s)

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """Reads like the inner transport, unless a fault was drawn for the read."""
        with self._lock:
            fault, delay_s = self.faults.draw(self._reads)
            self._reads += 1
            if delay_s:
                after = _Later(after, delay_s)
            if fault is None:
                return self._inner.read(peer, tiles, runs, after=after)
            middle = len(runs) // 2
            # The second half comes first: if its check fails, nothing has begun.
            gate = threading.Event()
            rest = self._inner.read(peer, tiles, runs[middle:], after=gate)
            try:
                half = self._inner.read(peer, tiles, runs[:middle], after=after)
            except KVFerryError:
                self._inner.cancel(rest)
                raise
            outer = Transfer(half.nbytes + rest.nbytes, self._transfers)
            self._transfers.add(outer)
            faulted = _Faulted(outer, fault, half, rest, gate, {half, rest})
            self._faulted[outer] = faulted
            for part in (half, rest):
                self._parts.add(part)
                part.on_end(functools.partial(self._part_ended, faulted))
            return outer

    def poll(self) -> list[Transfer]:
        """Polls like the inner transport."""
        with self._lock:
            for faulted in list(self._faulted.values()):
                self._advance(faulted)
            polled = self._inner.poll()
            ended = [transfer for transfer in polled if transfer not in self._parts]
            self._parts.difference_update(polled)
            return ended + self._transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """Cancels like the inner transport."""
        with self._lock:
            faulted = self._faulted.get(transfer)
            if faulted is None:
                self._inner.cancel(transfer)
                return
            faulted.cancelled = True
            for part in list(faulted.running):
                self._inner.cancel(part)

    def _part_ended(self, faulted: _Faulted, part: Transfer) -> None:
        with self._lock:
            faulted.running.discard(part)
            self._advance(faulted)

    def _advance(self, faulted: _Faulted) -> None:
        outer, half = faulted.outer, faulted.half
        if outer not in self._faulted:
            return
        if half.bytes_done > outer.bytes_done:
            outer.bytes_done, outer.segments = half.bytes_done, half.segments
            outer.progressed = half.progressed
        if faulted.running:
            stalls = faulted.fault is StalledError and half.error is None
            if half.is_terminal and not (stalls and self._has_time_left(faulted)):
                self._inner.cancel(faulted.rest)
            return
        del self._faulted[outer]
        faulted.gate.set()
        state, error = faulted.verdict()
        if isinstance(faulted.rest.error, TransferError) and not isinstance(
            faulted.rest.error, CancelledError
        ):
            error = faulted.rest.error  # the connection or the transport was closed
        outer.stop(state, error)

    def _has_time_left(self, faulted: _Faulted) -> bool:
        """Whether a stalled read still runs. A timer ends the rest of the read when the time is
        over.
        """
        since = max(faulted.outer.progressed, faulted.half.finished or 0.0)
        left_s = since + self._stall_timeout_s - time.monotonic()
        if left_s > 0 and not faulted.timed:
            faulted.timed = True
            timer = threading.Timer(left_s, self._inner.cancel, (faulted.rest,))
            timer.daemon = True
            timer.start()
        return left_s > 0


def faulty_transport(transport: type[Transport], faults: Faults) -> type[FaultyTransport]:
    """Makes a subclass of ``transport`` with ``faults``, under the same name."""
    return FaultyTransport.around(transport, "Faulty", faults=faults)


def lossy_transport(
    transport: type[Transport], *, loss: float, seed: int = 0
) -> type[FaultyTransport]:
    """Loses the peer in a share ``loss`` of the reads, when half of the runs have landed."""
    return faulty_transport(transport, Faults(loss=loss, seed=seed))


def slow_transport(
    transport: type[Transport], *, delay_s: tuple[float, float], seed: int = 0
) -> type[FaultyTransport]:
    """Starts every read between ``delay_s[0]`` and ``delay_s[1]`` seconds late."""
    return faulty_transport(transport, Faults(delay_s=delay_s, seed=seed))


def stalling_transport(
    transport: type[Transport], *, stall: float, seed: int = 0
) -> type[FaultyTransport]:
    """Stalls a share ``stall`` of the reads, when half of the runs have landed."""
    return faulty_transport(transport, Faults(stall=stall, seed=seed))
