"""Reads that go well, and what is refused before a byte moves."""

import contextlib
import threading
import time

import numpy as np
import pytest

from kvferry.errors import BoundsError, ConfigError, DecodeError
from kvferry.layouts.tiles import RUN_DTYPE, num_bytes
from kvferry.testing.oracle import copy_slowly
from kvferry.testing.transport_cases import Case, large_case, random_case, violations
from kvferry.testing.transport_peer import PeerProcess, allocate, contents, fill, pattern
from kvferry.testing.transport_scene import LARGE, SMALL, TransportScenes
from kvferry.transports.base import TransferState, Transport, TransportOptions


class ReadingConformance(TransportScenes):
    """What a read moves, and what it may not."""

    @pytest.mark.parametrize("seed", range(12))
    def test_reads_equal_the_oracle_and_touch_nothing_else(
        self, local: Transport, healthy_peer: PeerProcess, seed: int
    ) -> None:
        """Any strides, several regions, partial blocks."""
        scene = self.scene(local, healthy_peer, random_case(seed))
        transfer = scene.read()
        assert self.wait(local, transfer) == [transfer]
        assert transfer.state is TransferState.DONE, transfer.error
        assert transfer.bytes_done == transfer.nbytes == num_bytes(scene.tiles, scene.runs)
        assert transfer.error is None
        assert transfer.finished is not None
        assert transfer.started <= transfer.finished
        scene.assert_exact()

    def test_a_large_read_equals_the_oracle(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Megabytes, in more than one step; progress grows until all bytes are there."""
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
        """The memory that ``allocate`` returns is a region like any other."""
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
        """The same read again, after the source has changed."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        self.wait(local, scene.read())
        scene.assert_exact()
        healthy_peer.refill(len(scene.sources) - 1, seed=99)
        scene.sources[-1] = pattern(scene.sources[-1].nbytes, 99)
        self.wait(local, scene.read())
        scene.assert_exact()

    def test_an_empty_read_is_done(self, local: Transport, healthy_peer: PeerProcess) -> None:
        """No runs, or no tiles: nothing to move."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        no_runs = local.read(scene.peer, scene.tiles, np.empty(0, dtype=RUN_DTYPE))
        no_tiles = local.read(scene.peer, scene.tiles[:0], scene.runs)
        self.wait(local, no_runs, no_tiles)
        assert no_runs.state is no_tiles.state is TransferState.DONE
        scene.assert_untouched()

    def test_a_read_returns_before_it_is_done(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """``read`` never waits for the bytes: the step thread calls it."""
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
        """Nothing lands before ``after``; ``read`` itself does not wait for it."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        event = threading.Event()
        transfer = scene.read(after=event)
        time.sleep(self.settle_s)
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
        transfer = scene.read()
        assert self.wait(local, transfer) == [transfer]
        assert transfer.state is TransferState.DONE, transfer.error
        event.set()
        self.wait(local, *waiting)

    def test_many_reads_at_once_are_each_reported_once(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """Also those that were cancelled, and those cancelled after they were done."""
        scenes = [self.scene(local, healthy_peer, random_case(seed)) for seed in range(100, 140)]
        transfers = [scene.read() for scene in scenes]
        for transfer in transfers[::4]:
            local.cancel(transfer)
        reported = self.wait(local, *transfers)
        for transfer in transfers:
            local.cancel(transfer)
        time.sleep(self.settle_s)
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
        """What is left of those that are over holds up nobody, however many they were."""
        scene = self.scene(local, healthy_peer, random_case(140))
        self.wait(local, *[scene.read() for _ in range(40)])
        transfer = scene.read()
        self.wait(local, transfer)
        assert transfer.state is TransferState.DONE, transfer.error
        scene.assert_exact()

    def test_two_transports_of_one_process_can_read_from_each_other(self) -> None:
        """As the ranks of an in-process engine do."""
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

    # What is refused.

    def test_copies_that_leave_a_region_are_refused_before_a_byte_moves(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """On either side, by numbers of any size."""
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
        """An endpoint covers the regions known when it was made."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        healthy_peer.allocate(scene.sources[-1].nbytes, 5)
        scene.tiles["source_region"] += 1
        with pytest.raises(BoundsError):
            scene.read()

    def test_memory_registered_without_serving_cannot_be_read(
        self, local: Transport, healthy_peer: PeerProcess
    ) -> None:
        """``serve=False`` is a place for our own reads only."""
        scene = self.scene(local, healthy_peer, large_case(SMALL))
        with contextlib.closing(self.transport.open(self.options())) as other:
            region = other.register(scene.targets[0].copy(), serve=False)
            scene.peer = local.connect(other.endpoint())
            scene.tiles["source_region"] = region
            with pytest.raises(BoundsError):
                scene.read()

    @pytest.mark.parametrize("seed", range(8))
    def test_a_garbage_endpoint_is_refused(self, local: Transport, seed: int) -> None:
        """Random bytes, and a real endpoint cut short."""
        rng = np.random.default_rng(seed)
        for endpoint in (
            rng.bytes(int(rng.integers(0, 200))),
            local.endpoint()[: int(rng.integers(0, 20))],
        ):
            with pytest.raises(DecodeError):
                local.connect(endpoint)

    def test_an_unknown_extra_key_is_refused(self) -> None:
        """With its name, before anything is opened."""
        with pytest.raises(ConfigError, match="no_such_key"):
            self.transport.open(TransportOptions(extra={"no_such_key": 1}))
