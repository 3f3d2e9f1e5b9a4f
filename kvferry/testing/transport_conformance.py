"""The conformance class of transports: subclass it, name your transport, run pytest.

.. code-block:: python

    from kvferry.testing import TransportConformance
    from pigeons.transport import PigeonTransport

    class TestPigeonTransport(TransportConformance):
        transport = PigeonTransport
        extra = {"coop": "north"}  # keys of its ExtraConfig, if it needs any

Every test reads from a peer in a process of its own and compares the whole memory around the
target with a slow oracle. For a transport with ``fences = False`` there is
:class:`~kvferry.testing.unfenced_conformance.UnfencedTransportConformance`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from kvferry.errors import (
    BoundsError,
    ConfigError,
    DecodeError,
    KVFerryError,
    PeerLostError,
    StalledError,
)
from kvferry.layouts.tiles import RUN_DTYPE, Runs, Tiles, num_bytes
from kvferry.testing.oracle import copy_slowly
from kvferry.testing.transport_cases import Case, large_case, random_case, violations
from kvferry.testing.transport_peer import PeerProcess, allocate, contents, fill, pattern
from kvferry.transports.base import (
    ByteArray,
    Peer,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
    Waitable,
)

GUARD_BYTES = 4096
"""Bytes before and behind every target region that no transport may change."""
SMALL, LARGE = 1 << 20, 48 << 20
"""Bytes of a read that is over soon, and of one that can be interrupted."""


@dataclass(slots=True, eq=False)
class Scene:
    """A case laid out: sources at the peer, guarded targets here, a connection between them."""

    local: Transport
    peer: Peer
    tiles: Tiles
    runs: Runs
    sources: list[ByteArray]
    """What the peer's regions hold, by region id."""
    around: list[ByteArray]
    """Each target region with its guards."""
    targets: list[ByteArray]
    before: list[ByteArray]
    """Copy of ``around`` as it was."""
    first_target: int
    """Region id of the first target."""

    def read(self, after: Waitable | None = None) -> Transfer:
        """Starts the read."""
        return self.local.read(self.peer, self.tiles, self.runs, after=after)

    def assert_exact(self) -> None:
        """The target holds what the oracle puts there, and nothing else has changed."""
        expected = [memory.copy() for memory in self.before]
        regions: list[ByteArray] = [np.empty(0, dtype=np.uint8)] * self.first_target
        regions += [memory[GUARD_BYTES:-GUARD_BYTES] for memory in expected]
        copy_slowly(self.tiles, self.runs, self.sources, regions)
        self._assert_around(expected, "differs from the oracle")

    def assert_untouched(self) -> None:
        """The memory is what it was when the scene was laid out, or refilled."""
        self._assert_around(self.before, "was changed")

    def refill(self) -> None:
        """Gives the target to somebody else: overwrites it, at once and all of it."""
        for memory in self.around:
            memory[:] = 0xA5
        # Not copied from the memory: what lands between the two lines is to be found.
        self.before = [np.full_like(memory, 0xA5) for memory in self.around]

    def _assert_around(self, expected: list[ByteArray], what: str) -> None:
        for number, (memory, wanted) in enumerate(zip(self.around, expected, strict=True)):
            wrong = np.flatnonzero(memory != wanted)
            assert not len(wrong), (
                f"target region {number}: {len(wrong)} bytes, the first at "
                f"{int(wrong[0]) - GUARD_BYTES} of {memory.nbytes - 2 * GUARD_BYTES}: {what}"
            )


class TransportConformance:
    """What every transport must do. See the module's docstring for how to use it."""

    transport: ClassVar[type[Transport]]
    """The class under test."""
    serving: ClassVar[type[Transport] | None] = None
    """The class that the peer opens in its own process, if not the one under test."""
    extra: ClassVar[Mapping[str, Any]] = {}
    """Keys of its ``ExtraConfig``, on both sides."""
    threads: ClassVar[int] = 2
    stall_timeout_s: ClassVar[float] = 1.0
    settle_s: ClassVar[float] = 0.4
    """How long to look for bytes that land late."""
    patience_s: ClassVar[float] = 30.0
    """How long a transfer may take to become terminal."""

    # Scaffolding: all of it may be overridden.

    @classmethod
    def options(cls) -> TransportOptions:
        """What both sides are opened with."""
        return TransportOptions(
            threads=cls.threads, stall_timeout_s=cls.stall_timeout_s, extra=cls.extra
        )

    @pytest.fixture(scope="class")
    @classmethod
    def healthy_peer(cls) -> Iterator[PeerProcess]:
        """A peer that all tests share; none may harm it."""
        with PeerProcess(cls.serving or cls.transport, cls.options()) as peer:
            yield peer

    @pytest.fixture
    def fresh_peer(self) -> Iterator[PeerProcess]:
        """A peer for one test, which may stop or kill it."""
        with PeerProcess(self.serving or self.transport, self.options()) as peer:
            yield peer

    @pytest.fixture
    def local(self) -> Iterator[Transport]:
        """The transport under test, open."""
        transport = self.transport.open(self.options())
        yield transport
        transport.close()

    def scene(self, local: Transport, process: PeerProcess, case: Case) -> Scene:
        """Lays a case out."""
        seeds = range(len(case.source_region_bytes))
        ids = [
            process.allocate(size, seed)
            for seed, size in zip(seeds, case.source_region_bytes, strict=True)
        ]
        sources: list[ByteArray] = [np.empty(0, dtype=np.uint8)] * ids[0]
        sources += [pattern(size, seed) for seed, size in enumerate(case.source_region_bytes)]
        around = [
            pattern(size + 2 * GUARD_BYTES, 50 + number)
            for number, size in enumerate(case.target_region_bytes)
        ]
        targets = [memory[GUARD_BYTES:-GUARD_BYTES] for memory in around]
        regions = [local.register(memory, serve=False) for memory in targets]
        tiles = case.tiles.copy()
        tiles["source_region"] += ids[0]
        tiles["target_region"] += regions[0]
        peer = local.connect(process.endpoint())
        before = [memory.copy() for memory in around]
        return Scene(local, peer, tiles, case.runs, sources, around, targets, before, regions[0])

    def wait(self, local: Transport, *transfers: Transfer) -> list[Transfer]:
        """Polls until all of them are reported; returns everything that was."""
        reported: list[Transfer] = []
        deadline = time.monotonic() + self.patience_s
        while not all(transfer in reported for transfer in transfers):
            assert time.monotonic() < deadline, (
                f"not reported after {self.patience_s} s: "
                f"{[transfer for transfer in transfers if transfer not in reported]}"
            )
            reported += local.poll()
            time.sleep(0.0005)
        return reported

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Spins until ``condition`` holds; it may hold for a very short time only."""
        deadline = time.monotonic() + self.patience_s
        while not condition():
            assert time.monotonic() < deadline, f"did not come about in {self.patience_s} s"
            time.sleep(0)

    def assert_nothing_lands(self, scene: Scene) -> None:
        """After a terminal state the memory is somebody else's: nothing may change it."""
        scene.refill()
        time.sleep(self.settle_s)
        scene.assert_untouched()

    # Reading.

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
        assert not transfer.is_terminal
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
        assert len(reported) == len(set(map(id, reported))) == len(transfers)
        for number, (scene, transfer) in enumerate(zip(scenes, transfers, strict=True)):
            if number % 4:
                assert transfer.state is TransferState.DONE, transfer.error
            if transfer.state is TransferState.DONE:
                scene.assert_exact()

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
        assert local.poll() == []
        scene.assert_untouched()

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
        assert transfer.state is TransferState.FAILED
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
        self.wait_for(lambda: transfer.bytes_done > 0)
        fresh_peer.kill()
        self.wait(local, transfer)
        if transfer.state is TransferState.DONE:
            scene.assert_exact()
        else:
            assert transfer.state is TransferState.FAILED
            assert isinstance(transfer.error, PeerLostError)
        self.assert_nothing_lands(scene)

    @pytest.mark.parametrize("when", ["before", "during"])
    def test_a_peer_that_stops_and_resumes_lands_nothing_late(
        self, local: Transport, fresh_peer: PeerProcess, when: str
    ) -> None:
        """The read fails as stalled (or is done, where the source takes no part in it)."""
        scene = self.scene(local, fresh_peer, large_case(LARGE))
        self.wait(local, scene.read())
        scene.refill()
        if when == "before":
            fresh_peer.suspend()
        transfer = scene.read()
        if when == "during":
            self.wait_for(lambda: transfer.bytes_done > 0)
            fresh_peer.suspend()
        self.wait(local, transfer)
        if transfer.state is TransferState.DONE:
            scene.assert_exact()
        else:
            assert transfer.state is TransferState.FAILED
            assert isinstance(transfer.error, StalledError), repr(transfer.error)
        scene.refill()
        fresh_peer.resume()
        time.sleep(self.settle_s)
        scene.assert_untouched()
        scene.peer = local.connect(fresh_peer.endpoint())
        transfer = scene.read()
        self.wait(local, transfer)
        assert transfer.state is TransferState.DONE, transfer.error
        scene.assert_exact()

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
            self.wait_for(lambda read=transfer: read.is_terminal)  # type: ignore[misc]
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
        assert all(transfer.is_terminal for transfer in transfers)
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
