"""A transport that cannot fence, with bytes that land when the test lets them.

.. code-block:: python

    read_gate = ReadGate()
    with temporary_plugin(TRANSPORTS, "shm", unfenced_transport(ShmTransport, read_gate)):
        ...
        read_gate.hold()      # reads from now on land nothing
        ...              # cancel them, let them stall, close their connections
        read_gate.release()   # and now they land

As with a library whose requests cannot be recalled: neither a cancel nor a closed connection keeps
the bytes from landing, and only when they have landed is the transfer terminal.
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
"""Stall timeout of the inner transport: nobody but the other side ends a read."""


class ReadGate:
    """When the bytes of reads land. Thread-safe; shared by all ranks of a test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._gates: list[threading.Event] = []

    def hold(self) -> None:
        """Reads that start from now on land nothing until :meth:`release`."""
        with self._lock:
            self._open = False

    def release(self) -> None:
        """What was held lands, and so does what comes."""
        with self._lock:
            self._open = True
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.set()

    def let_new_pass(self) -> None:
        """Reads that start from now on land; what is held waits, as if its source had stopped."""
        with self._lock:
            self._open = True

    def release_one(self) -> None:
        """The read that was held longest lands; the others go on waiting."""
        with self._lock:
            gate = self._gates.pop(0)
        gate.set()

    @property
    def held(self) -> int:
        """Reads that wait."""
        with self._lock:
            return len(self._gates)

    def gate(self) -> threading.Event:
        """What a new read waits for."""
        gate = threading.Event()
        with self._lock:
            if self._open:
                gate.set()
            else:
                self._gates.append(gate)
        return gate


class _Start:
    """What a read waits for: its event, then the gate."""

    def __init__(self, after: Waitable | None, gate: threading.Event) -> None:
        self._after = after
        self._gate = gate
        self.begun = after is None
        """Whether it is the library's by now, which does not give it back."""

    def wait(self) -> None:
        if self._after is not None:
            self._after.wait()
        self.begun = True
        self._gate.wait()


class _UnfencedPeer(Peer):
    """A connection that is only closed once nothing lands over it any more."""

    def __init__(self, inner: Peer) -> None:
        self.inner = inner
        self.closed = False

    def close(self) -> None:
        """No read starts any more; those under way go on."""
        self.closed = True


class UnfencedTransport(WrappedTransport):
    """A transport around one that fences. Made by :func:`unfenced_transport`, never directly.

    Closing it closes the inner transport, which does fence: the memory of a test ends with it.
    """

    read_gate: ClassVar[ReadGate]
    fences = False

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        # Who is told of an end, by the inner poll() for example, may cancel other reads.
        self._lock = threading.RLock()
        self._starts: dict[Transfer, _Start] = {}
        """What each read under way waits for."""
        self._lost = Transfers()
        """Reads over closed connections, which never begin."""

    @classmethod
    def open(cls, options: TransportOptions) -> "UnfencedTransport":
        """Opens the inner transport; raises what that raises."""
        return cls(cls.inner_class.open(replace(options, stall_timeout_s=NEVER_S)))

    def connect(self, endpoint: bytes) -> Peer:
        """As the inner transport."""
        return _UnfencedPeer(self._inner.connect(endpoint))

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """As the inner transport, once the gate is open."""
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
        """Terminal are the reads of which everything has landed, or nothing ever will."""
        with self._lock:
            ended = self._inner.poll() + self._lost.poll()
            for transfer in ended:
                self._starts.pop(transfer, None)
            return ended

    def cancel(self, transfer: Transfer) -> None:
        """Nothing but a wish, once the read has begun."""
        with self._lock:
            start = self._starts.get(transfer)
        if start is not None and not start.begun:
            self._inner.cancel(transfer)


def unfenced_transport(transport: type[Transport], read_gate: ReadGate) -> type[UnfencedTransport]:
    """A transport class that is ``transport`` but cannot fence; it keeps the name.

    Args:
        transport: one that fences.
        read_gate: says when reads land.
    """
    return UnfencedTransport.around(transport, "Unfenced", fences=False, read_gate=read_gate)
