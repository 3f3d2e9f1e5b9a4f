"""The conformance suite of transports without fence: subclass it instead of the other suite.

.. code-block:: python

    from kvferry.testing import UnfencedTransportConformance

    class TestPigeonTransport(UnfencedTransportConformance):
        transport = PigeonTransport

Successful reads are tested as in :class:`TransportConformance`. A read that is cancelled, or whose
peer stops or dies, may run on while its fate is unknown. A terminal state proves the same as for
other transports: no byte lands afterwards, and no byte ever lands beside the target.
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
    """The tests of transports with ``fences = False``."""

    stopped_errors = (TransferError,)
    doubt_s: ClassVar[float] = 3.0
    """Seconds for which the tests watch a read that need not end."""

    def watch(self, local: Transport, transfer: Transfer) -> bool:
        """Polls until the read is reported, for ``doubt_s`` at most; returns whether a report
        came.
        """
        deadline = time.monotonic() + self.doubt_s
        while time.monotonic() < deadline:
            if transfer in local.poll():
                return True
            time.sleep(0.0005)
        assert not transfer.is_terminal, "terminal, and not reported"
        return False

    def wait_for_bytes(self, transfer: Transfer) -> None:
        """Does not wait, because such transports may count bytes only at the end."""

    def judge(
        self, scene: Scene, transfer: Transfer, over: bool, *errors: type[KVFerryError]
    ) -> None:
        """Allows a read that still runs to land in the target, but nowhere else."""
        if over:
            super().judge(scene, transfer, over, *errors)
        else:
            self.assert_guards_untouched(scene)

    def assert_guards_untouched(self, scene: Scene) -> None:
        """Asserts that no bytes landed beside the target."""
        for around, target, before in zip(scene.around, scene.targets, scene.before, strict=True):
            wanted = before.copy()
            first = target.ctypes.data - around.ctypes.data
            wanted[first : first + target.nbytes] = target
            assert (around == wanted).all(), "bytes landed beside the target"

    # Differences from transports with fence.

    def test_the_transport_says_that_it_does_not_fence(self) -> None:
        """Ensures that this is the right conformance suite."""
        assert not self.transport.fences

    def test_a_read_cancelled_while_it_runs_lands_nothing_afterwards(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Nothing lands after the terminal state, which may come as late as without the cancel."""
        scene = self.scene(local, healthy_peer, large_case(LARGE))
        transfer = scene.read()
        local.cancel(transfer)
        local.cancel(transfer)
        self.wait(local, transfer)
        self.judge(scene, transfer, True, CancelledError)

    def test_reading_from_a_dead_peer_fails_as_lost(
        self, local: Transport, fresh_peer: PeerProcess
    ) -> None:
        """The read fails or never ends; a new connection behaves in the same way."""
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
        """Later reads fail at once; reads under way fail when no more bytes can land."""
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
