"""The conformance class of transports that cannot fence: subclass it instead of the other.

.. code-block:: python

    from kvferry.testing import UnfencedTransportConformance

    class TestPigeonTransport(UnfencedTransportConformance):
        transport = PigeonTransport

Reads that go well are those of :class:`TransportConformance`. One that is cancelled, or whose peer
stops or dies, may run on for as long as nobody knows what becomes of it. A terminal state proves
the same as everywhere: nothing lands after it, and never anything beside the target.
"""

import contextlib
import time
from typing import ClassVar

from kvferry.errors import CancelledError, KVFerryError, PeerLostError, TransferError
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.testing.transport_peer import PeerProcess
from kvferry.testing.transport_scene import LARGE, SMALL, Scene
from kvferry.transports.base import Transfer, TransferState, Transport


class UnfencedTransportConformance(TransportConformance):
    """What a transport with ``fences = False`` must do."""

    stopped_errors = (TransferError,)
    doubt_s: ClassVar[float] = 3.0
    """How long a read may be looked at that need not end."""

    def watch(self, local: Transport, transfer: Transfer) -> bool:
        """Polls until the read is reported, for ``doubt_s`` at most; returns whether it was."""
        deadline = time.monotonic() + self.doubt_s
        while time.monotonic() < deadline:
            if transfer in local.poll():
                return True
            time.sleep(0.0005)
        assert not transfer.is_terminal, "terminal, and not reported"
        return False

    def wait_for_bytes(self, transfer: Transfer) -> None:
        """Not at all: they may be counted only when all are there."""

    def judge(
        self, scene: Scene, transfer: Transfer, over: bool, *errors: type[KVFerryError]
    ) -> None:
        """One that is not over may land in the target still, and nowhere else."""
        if over:
            super().judge(scene, transfer, over, *errors)
        else:
            self.assert_guards_untouched(scene)

    def assert_guards_untouched(self, scene: Scene) -> None:
        """What may still land lands in the target and nowhere else."""
        for around, target, before in zip(scene.around, scene.targets, scene.before, strict=True):
            wanted = before.copy()
            first = target.ctypes.data - around.ctypes.data
            wanted[first : first + target.nbytes] = target
            assert (around == wanted).all(), "bytes landed beside the target"

    # What differs from transports that fence.

    def test_the_transport_says_that_it_does_not_fence(self) -> None:
        """Else the other conformance class is the right one."""
        assert not self.transport.fences

    def test_a_read_cancelled_while_it_runs_lands_nothing_afterwards(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Once it is terminal. That may be as late as without the cancel."""
        scene = self.scene(local, healthy_peer, large_case(LARGE))
        transfer = scene.read()
        local.cancel(transfer)
        local.cancel(transfer)
        self.wait(local, transfer)
        self.judge(scene, transfer, True, CancelledError)

    def test_reading_from_a_dead_peer_fails_as_lost(
        self, local: Transport, fresh_peer: PeerProcess
    ) -> None:
        """Or is never over; a new connection is refused, or its reads are the same."""
        scene = self.scene(local, fresh_peer, large_case(SMALL))
        endpoint = fresh_peer.endpoint()
        fresh_peer.kill()
        transfer = scene.read()
        self.judge(scene, transfer, self.watch(local, transfer), PeerLostError)
        with contextlib.suppress(PeerLostError):
            scene.peer = local.connect(endpoint)
            transfer = scene.read()
            self.judge(scene, transfer, self.watch(local, transfer), PeerLostError)

    def test_closing_a_connection_fails_its_reads_as_lost(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Those that start later at once, those under way when nothing of them lands any more."""
        scene = self.scene(local, healthy_peer, large_case(LARGE))
        other = local.connect(healthy_peer.endpoint())
        transfer = scene.read()
        scene.peer.close()
        scene.peer.close()
        self.judge(scene, transfer, self.watch(local, transfer), PeerLostError)
        later = scene.read()
        self.wait(local, later)
        assert isinstance(later.error, PeerLostError)
        if transfer.is_terminal:
            scene.peer = other
            again = scene.read()
            self.wait(local, again)
            assert again.state is TransferState.DONE, again.error
