"""Reads that are cancelled or lose their peer: how they end, and that nothing lands afterwards."""

import threading
import time
from typing import ClassVar

import pytest

from kvferry.errors import CancelledError, KVFerryError, PeerLostError, StalledError
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_peer import PeerProcess
from kvferry.testing.transport_scene import LARGE, SMALL, Scene, TransportScenes
from kvferry.transports.base import Transfer, TransferState, Transport


class EndingConformance(TransportScenes):
    """What ends a read, and what that proves."""

    stopped_errors: ClassVar[tuple[type[KVFerryError], ...]] = (StalledError,)
    """What a read from a stopped peer may fail with."""

    # What a transport that cannot fence does otherwise.

    def wait_for_bytes(self, transfer: Transfer) -> None:
        """Waits until some bytes of the read are there."""
        self.wait_for(lambda: transfer.bytes_done > 0)

    def watch(self, local: Transport, transfer: Transfer) -> bool:
        """Polls until a disturbed read is reported; returns whether it was."""
        self.wait(local, transfer)
        return True

    def judge(
        self, scene: Scene, transfer: Transfer, over: bool, *errors: type[KVFerryError]
    ) -> None:
        """Whatever became of a disturbed read, its state tells no lie.

        Args:
            scene: where it reads to.
            transfer: the read.
            over: whether it was reported as terminal.
            errors: what it may have failed with.
        """
        assert over
        if transfer.state is TransferState.DONE:
            scene.assert_exact()
        else:
            assert isinstance(transfer.error, errors), repr(transfer.error)
            cancelled = isinstance(transfer.error, CancelledError)
            wanted = TransferState.CANCELLED if cancelled else TransferState.FAILED
            assert transfer.state is wanted
        self.assert_nothing_lands(scene)

    # Cancelling.

    def test_a_read_cancelled_while_it_runs_lands_nothing_afterwards(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """The memory is given to somebody else as soon as the state is terminal."""
        scene = self.scene(local, healthy_peer, large_case(LARGE))
        for _ in range(20):
            transfer = scene.read()
            self.wait_for(lambda read=transfer: read.bytes_done > 0)  # type: ignore[misc]
            local.cancel(transfer)
            local.cancel(transfer)
            assert self.wait(local, transfer) == [transfer]
            self.assert_nothing_lands(scene)
            if transfer.state is TransferState.CANCELLED:
                return
            assert transfer.state is TransferState.DONE, transfer.error
        pytest.fail("20 reads were all done before cancel() took effect")

    def test_a_read_cancelled_before_it_starts_lands_nothing(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """It is terminal although its event never happened; nor does anything land when it does."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        event = threading.Event()
        transfer = scene.read(after=event)
        local.cancel(transfer)
        assert self.wait(local, transfer) == [transfer]
        assert transfer.state is TransferState.CANCELLED
        event.set()
        time.sleep(self.settle_s)
        scene.assert_untouched()

    def test_cancelling_changes_nothing_once_a_read_is_done(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """The state stays, and is not reported again."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        transfer = scene.read()
        self.wait(local, transfer)
        local.cancel(transfer)
        time.sleep(self.settle_s / 4)
        assert transfer.state is TransferState.DONE
        assert local.poll() == []
        scene.assert_exact()

    @pytest.mark.parametrize("end", ["done", "cancelled", "closed", "lost"])
    def test_the_end_of_a_read_is_told(
        self, local: Transport, fresh_peer: PeerProcess, end: str
    ) -> None:
        """However it ended: once, when poll() reports it; at once to those who ask later."""
        if end in ("closed", "lost") and not self.transport.fences:
            return  # it need not end
        scene = self.scene(local, fresh_peer, large_case(SMALL))
        event, told = threading.Event(), threading.Semaphore(0)
        if end == "lost":
            self.wait(local, scene.read())
            fresh_peer.kill()
        transfer = scene.read(after=event)
        transfer.on_end(lambda _: told.release())
        if end in ("cancelled", "closed"):
            assert not told.acquire(timeout=self.settle_s / 4), "told before the end"
        if end == "cancelled":
            local.cancel(transfer)
        elif end == "closed":
            scene.peer.close()
        event.set()
        assert told.acquire(timeout=self.patience_s), "the end was not told"
        assert transfer in local.poll()
        assert (transfer.error is None) == (end == "done"), transfer.error
        transfer.on_end(lambda _: told.release())
        assert told.acquire(timeout=0)
        assert not told.acquire(timeout=self.settle_s / 4), "told twice"

    # Peers that die, stop, and come back.

    def test_reading_from_a_dead_peer_fails_as_lost(
        self, local: Transport, fresh_peer: PeerProcess
    ) -> None:
        """Whether it is the connection that fails, or the read."""
        scene = self.scene(local, fresh_peer, large_case(SMALL))
        endpoint = fresh_peer.endpoint()
        fresh_peer.kill()
        transfer = scene.read()
        self.wait(local, transfer)
        assert transfer.state is TransferState.FAILED, "a read from a dead peer has not failed"
        assert isinstance(transfer.error, PeerLostError)
        try:
            scene.peer = local.connect(endpoint)
        except PeerLostError:
            return
        transfer = scene.read()
        self.wait(local, transfer)
        assert isinstance(transfer.error, PeerLostError)

    def test_a_peer_killed_during_a_read_fails_it_as_lost(
        self, local: Transport, fresh_peer: PeerProcess
    ) -> None:
        """And nothing lands afterwards. A read that was quicker than the kill is exact."""
        scene = self.scene(local, fresh_peer, large_case(LARGE))
        transfer = scene.read()
        self.wait_for_bytes(transfer)
        fresh_peer.kill()
        self.judge(scene, transfer, self.watch(local, transfer), PeerLostError)

    @pytest.mark.parametrize("when", ["before", "during"])
    def test_a_peer_that_stops_and_resumes_lands_nothing_late(
        self, local: Transport, fresh_peer: PeerProcess, when: str
    ) -> None:
        """The read fails as stalled (or is done, where the source takes no part in it).

        One that need not end is given up while the peer is stopped; what it does when the peer
        goes on is its own matter until it is terminal. The peer serves new reads then.
        """
        scene = self.scene(local, fresh_peer, large_case(LARGE))
        self.wait(local, scene.read())
        scene.refill()
        if when == "before":
            fresh_peer.suspend()
        transfer = scene.read()
        if when == "during":
            self.wait_for_bytes(transfer)
            fresh_peer.suspend()
        over = self.watch(local, transfer)
        if not over:
            local.cancel(transfer)
            over = self.watch(local, transfer)
        if over:
            self.judge(scene, transfer, over, *self.stopped_errors)
        fresh_peer.resume()
        if over:
            time.sleep(self.settle_s)
            scene.assert_untouched()
        else:
            self.judge(scene, transfer, self.watch(local, transfer), *self.stopped_errors)
        again = self.scene(local, fresh_peer, large_case(SMALL))
        transfer = again.read()
        self.wait(local, transfer)
        assert transfer.state is TransferState.DONE, transfer.error
        again.assert_exact()

    def test_a_stopped_peer_holds_up_no_other(
        self, local: Transport, healthy_peer: PeerProcess, fresh_peer: PeerProcess
    ) -> None:
        """Reads from a healthy peer go on meanwhile."""
        stopped = self.scene(local, fresh_peer, large_case(SMALL))
        healthy = self.scene(local, healthy_peer, large_case(SMALL))
        fresh_peer.suspend()
        stuck = [stopped.read() for _ in range(4)]
        for _ in range(5):
            transfer = healthy.read()
            self.wait(local, transfer)
            assert transfer.state is TransferState.DONE, transfer.error
            healthy.assert_exact()
        for transfer in stuck:
            if self.transport.fences:  # else it need not end
                self.wait_for(lambda read=transfer: read.is_terminal)  # type: ignore[misc]
            local.cancel(transfer)
        fresh_peer.resume()

    # Closing.

    def test_closing_a_connection_fails_its_reads_as_lost(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Other connections to the same peer go on."""
        scene = self.scene(local, healthy_peer, large_case(LARGE))
        other = local.connect(healthy_peer.endpoint())
        blocked = scene.read(after=threading.Event())
        transfer = scene.read()
        self.wait_for(lambda: transfer.bytes_done > 0)
        scene.peer.close()
        scene.peer.close()
        self.wait(local, transfer)
        if transfer.state is not TransferState.DONE:
            assert isinstance(transfer.error, PeerLostError)
        self.assert_nothing_lands(scene)
        later = scene.read()
        self.wait(local, later)
        assert isinstance(later.error, PeerLostError)
        scene.peer = other
        again = scene.read()
        self.wait(local, again)
        assert again.state is TransferState.DONE, again.error
        local.cancel(blocked)

    def test_closing_the_transport_ends_its_reads_first(self, healthy_peer: PeerProcess) -> None:
        """After ``close`` every read is terminal and nothing lands. Closing twice is harmless."""
        local = self.transport.open(self.options())
        scene = self.scene(local, healthy_peer, large_case(LARGE))
        transfers = [scene.read(), scene.read(), scene.read(after=threading.Event())]
        local.close()
        assert all(transfer.is_terminal for transfer in transfers), "closed with reads running"
        assert all(
            isinstance(transfer.error, KVFerryError)
            for transfer in transfers
            if transfer.state is not TransferState.DONE
        )
        self.assert_nothing_lands(scene)
        local.close()

    def test_a_peer_outlives_its_readers(self, healthy_peer: PeerProcess) -> None:
        """Readers come and go, also in the middle of a read; the next one is served."""
        for number in range(3):
            local = self.transport.open(self.options())
            scene = self.scene(local, healthy_peer, large_case(4 * SMALL))
            transfer = scene.read()
            if number == 2:
                self.wait(local, transfer)
                assert transfer.state is TransferState.DONE, transfer.error
                scene.assert_exact()
            local.close()
