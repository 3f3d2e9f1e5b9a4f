"""The conformance suite of transports: subclass it, name your transport, run pytest.

.. code-block:: python

    from kvferry.testing import TransportConformance
    from pigeons.transport import PigeonTransport

    class TestPigeonTransport(TransportConformance):
        transport = PigeonTransport
        extra = {"coop": "north"}  # keys of its ExtraConfig, if it needs any

Every test reads from a peer in another process and compares the whole memory around the target with
a slow oracle. For transports with ``fences = False``, use
:class:`~kvferry.testing.unfenced_conformance.UnfencedTransportConformance`.
"""

import contextlib
import threading
import time
from typing import ClassVar

import numpy as np
import pytest

from kvferry.errors import (
    BoundsError,
    CancelledError,
    ConfigError,
    DecodeError,
    KVFerryError,
    PeerLostError,
    StalledError,
)
from kvferry.layouts.tiles import RUN_DTYPE, num_bytes
from kvferry.testing.transport_cases import Case, copy_slowly, large_case, random_case, violations
from kvferry.testing.transport_peer import PeerProcess, allocate, contents, fill, pattern
from kvferry.testing.transport_scene import LARGE, SMALL, Scene, TransportScenes
from kvferry.transports.base import Transfer, TransferState, Transport, TransportOptions


class TransportConformance(TransportScenes):
    """The tests of every transport. The module's docstring shows the use."""

    stopped_errors: ClassVar[tuple[type[KVFerryError], ...]] = (StalledError,)
    """Allowed errors of a read from a stopped peer."""

    # Hooks that the suite for transports without fence overrides.

    def wait_for_bytes(self, transfer: Transfer) -> None:
        """Waits until some bytes of the read have arrived."""
        self.wait_for(lambda: transfer.bytes_done > 0)

    def watch(self, local: Transport, transfer: Transfer) -> bool:
        """Polls until a disturbed read is reported; returns whether a report came."""
        self.wait(local, transfer)
        return True

    def judge(
        self, scene: Scene, transfer: Transfer, over: bool, *errors: type[KVFerryError]
    ) -> None:
        """Checks that the state of a disturbed read is true, however the read ended.

        Args:
            scene: the target of the read.
            transfer: the read.
            over: whether the read was reported as terminal.
            errors: the allowed errors of the read.
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

    # Reads that succeed.

    @pytest.mark.parametrize("seed", range(12))
    def test_reads_equal_the_oracle_and_touch_nothing_else(
        self, local: Transport, healthy_peer: PeerProcess, seed: int
    ) -> None:
        """Reads with any strides, several regions and partial blocks."""
        scene = self.scene(local, healthy_peer, random_case(seed))
        transfer = scene.read()
        assert self.wait(local, transfer) == [transfer]
        assert transfer.state is TransferState.DONE, transfer.error
        scene.assert_exact()
        assert transfer.bytes_done == transfer.nbytes == num_bytes(scene.tiles, scene.runs)
        assert transfer.error is None
        assert transfer.finished is not None
        assert transfer.started <= transfer.finished

    def test_a_large_read_equals_the_oracle(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Reads megabytes in more than one step; progress grows until all bytes have arrived."""
        scene = self.scene(local, healthy_peer, large_case(16 << 20))
        transfer = scene.read()
        seen = [0]

        def ended() -> bool:
            seen.append(transfer.bytes_done)
            return transfer.is_terminal

        self.wait_for(ended)
        self.wait(local, transfer)
        assert transfer.state is TransferState.DONE, transfer.error
        assert seen == sorted(seen)
        assert seen[-1] <= transfer.nbytes == transfer.bytes_done
        scene.assert_exact()

    def test_allocated_memory_is_zeroed_and_can_be_read_into(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """The memory from ``allocate`` is a region like any other."""
        case = large_case(SMALL)
        scene = self.scene(local, healthy_peer, case)
        region, memory = allocate(local, case.target_region_bytes[0])
        assert memory.nbytes == case.target_region_bytes[0]
        assert contents(memory).dtype == np.uint8
        assert not contents(memory).any()
        assert region == scene.first_target + 1
        scene.tiles["target_region"] = region
        transfer = scene.read()
        self.wait(local, transfer)
        assert transfer.state is TransferState.DONE, transfer.error
        expected = np.zeros(memory.nbytes, dtype=np.uint8)
        empty = np.empty(0, dtype=np.uint8)
        copy_slowly(scene.tiles, scene.runs, scene.sources, [empty] * region + [expected])
        assert np.array_equal(contents(memory), expected)
        scene.assert_untouched()

    def test_a_read_sees_what_the_source_holds_now(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Repeats a read after the source has changed."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        self.read_exactly(scene)
        healthy_peer.refill(len(scene.sources) - 1, seed=99)
        scene.sources[-1] = pattern(scene.sources[-1].nbytes, 99)
        self.read_exactly(scene)

    def test_an_empty_read_is_done(self, local: Transport, healthy_peer: PeerProcess) -> None:
        """Reads no runs, or no tiles: there is nothing to move."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        no_runs = local.read(scene.peer, scene.tiles, np.empty(0, dtype=RUN_DTYPE))
        no_tiles = local.read(scene.peer, scene.tiles[:0], scene.runs)
        self.wait(local, no_runs, no_tiles)
        assert no_runs.state is no_tiles.state is TransferState.DONE
        scene.assert_untouched()

    def test_a_read_returns_before_it_is_done(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """``read`` never waits for the bytes, because the step thread calls ``read``."""
        scene = self.scene(local, healthy_peer, large_case(LARGE))
        calls, totals = [], []
        for _ in range(5):
            began = time.monotonic()
            transfer = scene.read()
            calls.append(time.monotonic() - began)
            self.wait(local, transfer)
            assert transfer.finished is not None
            totals.append(transfer.finished - began)
        assert min(calls) < 0.5 * min(totals), f"calls {calls} s of {totals} s"

    def test_a_read_waits_for_its_event(self, local: Transport, healthy_peer: PeerProcess) -> None:
        """Nothing lands before ``after``; ``read`` itself does not wait for ``after``."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        event = threading.Event()
        transfer = scene.read(after=event)
        self.settle(local)
        assert not transfer.is_terminal, "over before its event"
        scene.assert_untouched()
        event.set()
        self.wait(local, transfer)
        assert transfer.state is TransferState.DONE, transfer.error
        scene.assert_exact()

    def test_waiting_for_an_event_holds_up_no_other_read(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """More reads wait for events than there are threads."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        event = threading.Event()
        waiting = [scene.read(after=event) for _ in range(4)]
        self.read_exactly(scene)
        event.set()
        self.wait(local, *waiting)

    def test_many_reads_at_once_are_each_reported_once(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Includes reads cancelled before or after their end."""
        scenes = [self.scene(local, healthy_peer, random_case(seed)) for seed in range(100, 140)]
        transfers = [scene.read() for scene in scenes]
        for transfer in transfers[::4]:
            local.cancel(transfer)
        reported = self.wait(local, *transfers)
        for transfer in transfers:
            local.cancel(transfer)
        self.settle(local)
        reported += local.poll()
        assert len(reported) == len(set(map(id, reported))), "an end is reported twice"
        assert len(reported) == len(transfers), "an end of no read is reported"
        for number, (scene, transfer) in enumerate(zip(scenes, transfers, strict=True)):
            if number % 4:
                assert transfer.state is TransferState.DONE, transfer.error
            if transfer.state is TransferState.DONE:
                scene.assert_exact()

    def test_a_read_after_many_others_is_done(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Leftovers of many finished reads delay no later read."""
        scene = self.scene(local, healthy_peer, random_case(140))
        self.wait(local, *[scene.read() for _ in range(40)])
        self.read_exactly(scene)

    def test_two_transports_of_one_process_can_read_from_each_other(self) -> None:
        """Reads within a process, as the ranks of an in-process engine do."""
        case = large_case(SMALL)
        with (
            contextlib.closing(self.transport.open(self.options())) as source,
            contextlib.closing(self.transport.open(self.options())) as target,
        ):
            _, held = allocate(source, case.source_region_bytes[0])
            fill(held, pattern(held.nbytes, 3))
            _, memory = allocate(target, case.target_region_bytes[0])
            transfer = target.read(target.connect(source.endpoint()), case.tiles, case.runs)
            self.wait(target, transfer)
            assert transfer.state is TransferState.DONE, transfer.error
            expected = np.zeros(memory.nbytes, dtype=np.uint8)
            copy_slowly(case.tiles, case.runs, [contents(held)], [expected])
            assert np.array_equal(contents(memory), expected)

    # Requests that must be refused.

    def test_copies_that_leave_a_region_are_refused_before_a_byte_moves(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Leaves a region on either side, by numbers of any size."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        case = Case(
            scene.tiles,
            scene.runs,
            tuple(memory.nbytes for memory in scene.sources),
            tuple([1] * scene.first_target + [memory.nbytes for memory in scene.targets]),
        )
        for name, tiles, runs in violations(case):
            try:
                local.read(scene.peer, tiles, runs)
            except BoundsError:
                continue
            pytest.fail(f"{name} was not refused")
        time.sleep(self.settle_s / 4)
        scene.assert_untouched()
        assert local.poll() == [], "a refused read is reported"

    def test_a_region_newer_than_the_endpoint_is_refused(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """An endpoint covers only the regions known at its creation."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        healthy_peer.allocate(scene.sources[-1].nbytes, 5)
        scene.tiles["source_region"] += 1
        with pytest.raises(BoundsError):
            scene.read()

    def test_memory_registered_without_serving_cannot_be_read(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """``serve=False`` gives a target for local reads only."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        with contextlib.closing(self.transport.open(self.options())) as other:
            region = other.register(scene.targets[0].copy(), serve=False)
            scene.peer = local.connect(other.endpoint())
            scene.tiles["source_region"] = region
            with pytest.raises(BoundsError):
                scene.read()

    @pytest.mark.parametrize("seed", range(8))
    def test_a_garbage_endpoint_is_refused(self, local: Transport, seed: int) -> None:
        """Tries random bytes, and a real endpoint cut short."""
        rng, whole = np.random.default_rng(seed), local.endpoint()
        for endpoint in (
            rng.bytes(int(rng.integers(0, 200))),
            whole[: int(rng.integers(0, len(whole)))],
        ):
            with pytest.raises(DecodeError):
                local.connect(endpoint)

    def test_an_unknown_extra_key_is_refused(self) -> None:
        """The error names the key and comes before anything is opened."""
        with pytest.raises(ConfigError, match="no_such_key"):
            self.transport.open(TransportOptions(extra={"no_such_key": 1}))

    # Cancellation.

    def test_a_read_cancelled_while_it_runs_lands_nothing_afterwards(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Matters because the memory gets a new owner as soon as the state is terminal."""
        scene = self.scene(local, healthy_peer, large_case(LARGE))
        for _ in range(20):
            transfer = scene.read()
            self.wait_for_bytes(transfer)
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
        """The read ends before its event, and nothing lands after the event."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        event = threading.Event()
        transfer = scene.read(after=event)
        local.cancel(transfer)
        assert self.wait(local, transfer) == [transfer]
        assert transfer.state is TransferState.CANCELLED
        event.set()
        self.settle(local)
        scene.assert_untouched()

    def test_cancelling_changes_nothing_once_a_read_is_done(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """The state stays, and no second report comes."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        transfer = self.read_exactly(scene)
        local.cancel(transfer)
        time.sleep(self.settle_s / 4)
        assert transfer.state is TransferState.DONE
        assert local.poll() == []
        scene.assert_exact()

    @pytest.mark.parametrize("end", ["done", "cancelled", "closed", "lost"])
    def test_the_end_of_a_read_is_told(
        self, local: Transport, fresh_peer: PeerProcess, end: str
    ) -> None:
        """Every end gives one callback when poll() reports it; later callbacks run at once."""
        if end in ("closed", "lost") and not self.transport.fences:
            return  # the read need not end
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

    # Peers that die, stop, and return.

    def test_reading_from_a_dead_peer_fails_as_lost(
        self, local: Transport, fresh_peer: PeerProcess
    ) -> None:
        """Accepts both a failing connection and a failing read."""
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
        """Nothing lands afterwards. A read that was faster than the kill is exact."""
        scene = self.scene(local, fresh_peer, large_case(LARGE))
        transfer = scene.read()
        self.wait_for_bytes(transfer)
        fresh_peer.kill()
        self.judge(scene, transfer, self.watch(local, transfer), PeerLostError)

    @pytest.mark.parametrize("when", ["before", "during"])
    def test_a_peer_that_stops_and_resumes_lands_nothing_late(
        self, impatient: Transport, fresh_peer: PeerProcess, when: str
    ) -> None:
        """The read fails as stalled, or succeeds if the source takes no part.

        A read that need not end is cancelled while the peer is stopped. When the peer resumes, such
        a read may do anything until the read is terminal. The peer then serves new reads.
        """
        scene = self.scene(impatient, fresh_peer, large_case(LARGE))
        self.wait(impatient, scene.read())
        scene.refill()
        if when == "before":
            fresh_peer.suspend()
        transfer = scene.read()
        if when == "during":
            self.wait_for_bytes(transfer)
            fresh_peer.suspend()
        over = self.watch(impatient, transfer)
        if not over:
            impatient.cancel(transfer)
            over = self.watch(impatient, transfer)
        if over:
            self.judge(scene, transfer, over, *self.stopped_errors)
        fresh_peer.resume()
        if over:
            self.settle(impatient)
            scene.assert_untouched()
        else:
            self.judge(scene, transfer, self.watch(impatient, transfer), *self.stopped_errors)
        again = self.scene(impatient, fresh_peer, large_case(SMALL))
        self.read_exactly(again)

    def test_a_stopped_peer_holds_up_no_other(
        self, impatient: Transport, healthy_peer: PeerProcess, fresh_peer: PeerProcess
    ) -> None:
        """Reads from a healthy peer go on meanwhile."""
        stopped = self.scene(impatient, fresh_peer, large_case(SMALL))
        healthy = self.scene(impatient, healthy_peer, large_case(SMALL))
        fresh_peer.suspend()
        stuck = [stopped.read() for _ in range(4)]
        for _ in range(5):
            self.read_exactly(healthy)
        for transfer in stuck:
            if self.transport.fences:  # otherwise the read need not end
                self.wait_for(lambda read=transfer: read.is_terminal)  # type: ignore[misc]
            impatient.cancel(transfer)
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
        self.wait_for_bytes(transfer)
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
        """After ``close``, every read is terminal and nothing lands. Closing twice is harmless.

        A transport without fence ends only the reads known to be over.
        """
        local = self.transport.open(self.options())
        scene = self.scene(local, healthy_peer, large_case(LARGE))
        never_begun = scene.read(after=threading.Event())
        transfers = [scene.read(), scene.read(), never_begun]
        local.close()
        ended = [transfer for transfer in transfers if transfer.is_terminal]
        wanted = transfers if self.transport.fences else [never_begun]
        assert all(transfer in ended for transfer in wanted), "closed with reads running"
        for transfer in ended:
            is_done = transfer.state is TransferState.DONE
            assert is_done or isinstance(transfer.error, KVFerryError), repr(transfer.error)
        if ended == transfers:
            self.assert_nothing_lands(scene)
        local.close()

    def test_a_peer_outlives_its_readers(self, healthy_peer: PeerProcess) -> None:
        """Opens and closes readers, also in the middle of a read; the next reader is served."""
        for _ in range(2):
            with contextlib.closing(self.transport.open(self.options())) as local:
                self.scene(local, healthy_peer, large_case(4 * SMALL)).read()
        with contextlib.closing(self.transport.open(self.options())) as local:
            self.read_exactly(self.scene(local, healthy_peer, large_case(4 * SMALL)))
