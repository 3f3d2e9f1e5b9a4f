"""A transport without fence whose bytes land when the test allows them to.

.. code-block:: python

    read_gate = ReadGate()
    with temporary_plugin(TRANSPORTS, "shm", unfenced_transport(ShmTransport, read_gate)):
        ...
        read_gate.hold()      # reads from now on land nothing
        ...              # cancel them, let them stall, close their connections
        read_gate.release()   # and now they land

The transport behaves like a library whose requests cannot be recalled. Neither a cancel nor a
closed connection stops the bytes, and the transfer is terminal only when the bytes have landed.
"""

import threading
from dataclasses import replace
from typing import ClassVar

from kvferry.errors import PeerLostError
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.testing.wrapped import WrappedTransport
from kvferry.transports.base import (
    Peer,
    Transfer,
    Transfers,
    Transport,
    TransportOptions,
    Waitable,
)

NEVER_S = 1e9
"""Stall timeout of the inner transport in seconds: only the other side ends a read."""


class ReadGate:
    """Decides when the bytes of reads land. Thread-safe; shared by all ranks of a test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._gates: list[threading.Event] = []

    def hold(self) -> None:
        """Holds reads that start from now on: their bytes land after :meth:`release`."""
        with self._lock:
            self._open = False

    def release(self) -> None:
        """Lets all held reads and all later reads land."""
        with self._lock:
            self._open = True
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.set()

    def let_new_pass(self) -> None:
        """Lets new reads land; held reads wait on, as if their source had stopped."""
        with self._lock:
            self._open = True

    @property
    def held(self) -> int:
        """Number of held reads."""
        with self._lock:
            return len(self._gates)

    def gate(self) -> threading.Event:
        """The event that a new read must wait for."""
        gate = threading.Event()
        with self._lock:
            if self._open:
                gate.set()
            else:
                self._gates.append(gate)
        return gate


class _Start:
    """The start condition of a read: the read's event, then the gate."""

    def __init__(self, after: Waitable | None, gate: threading.Event) -> None:
        self._after = after
        self._gate = gate
        self.begun = after is None
        """Whether the read has been given to the library, which does not give reads back."""

    def wait(self) -> None:
        if self._after is not None:
            self._after.wait()
        self.begun = True
        self._gate.wait()


class _UnfencedPeer(Peer):
    """A connection that closes only when no more bytes can land over it."""

    def __init__(self, inner: Peer) -> None:
        self.inner = inner
        self.closed = False

    def close(self) -> None:
        """Refuses later reads; reads under way go on."""
        self.closed = True


class UnfencedTransport(WrappedTransport):
    """A transport around a transport with fence. Call :func:`unfenced_transport` to make a
    subclass.

    Closing this transport closes the inner transport, which does fence: a test's memory ends with
    the transport.
    """

    read_gate: ClassVar[ReadGate]
    fences = False

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        # The receiver of an end, called for example by the inner poll(), may cancel other reads.
        self._lock = threading.RLock()
        self._starts: dict[Transfer, _Start] = {}
        """Start condition of each read under way."""
        self._lost = Transfers()
        """Reads over closed connections, which never begin."""

    @classmethod
    def open(cls, options: TransportOptions) -> "UnfencedTransport":
        """Opens the inner transport; raises the errors of the inner ``open``."""
        kind = cls.with_keys(options.extra)
        return kind(kind.inner_class.open(replace(options, stall_timeout_s=NEVER_S)))

    def connect(self, endpoint: bytes) -> Peer:
        """Connects like the inner transport."""
        return _UnfencedPeer(self._inner.connect(endpoint))

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """Reads like the inner transport, once the gate is open."""
        assert isinstance(peer, _UnfencedPeer)  # connect() returned it
        if peer.closed:
            return self._lose()
        start = _Start(after, self.read_gate.gate())
        with self._lock:
            transfer = self._inner.read(peer.inner, tiles, runs, after=start)
            self._starts[transfer] = start
        return transfer

    def _lose(self) -> Transfer:
        lost = Transfer(0, self._lost)
        self._lost.add(lost)
        lost.fail(PeerLostError("the connection was closed"))
        return lost

    def poll(self) -> list[Transfer]:
        """Reports reads whose bytes have all landed, or will never land."""
        with self._lock:
            ended = self._inner.poll() + self._lost.poll()
            for transfer in ended:
                self._starts.pop(transfer, None)
            return ended

    def cancel(self, transfer: Transfer) -> None:
        """Cancels a read that has not begun; ignored for a read that has begun."""
        with self._lock:
            start = self._starts.get(transfer)
        if start is not None and not start.begun:
            self._inner.cancel(transfer)


def unfenced_transport(transport: type[Transport], read_gate: ReadGate) -> type[UnfencedTransport]:
    """Makes a subclass of ``transport`` without fence, under the same name.

    Args:
        transport: a transport with fence.
        read_gate: decides when reads land.
    """
    return UnfencedTransport.around(transport, "Unfenced", fences=False, read_gate=read_gate)
