"""Scaffolding of the transport conformance tests: a case in memory, and ways to wait for reads."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from kvferry.layouts.arrays import ByteArray
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.testing.transport_cases import Case, copy_slowly
from kvferry.testing.transport_peer import PeerProcess, pattern
from kvferry.testing.waiting import NotInTimeError
from kvferry.transports.base import (
    Peer,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
    Waitable,
)

GUARD_BYTES = 4096
"""Number of bytes before and behind every target region that no transport may change."""
SMALL, LARGE = 1 << 20, 48 << 20
"""Number of bytes in a short read, and in a read that is long enough to be interrupted."""


@dataclass(slots=True, eq=False)
class Scene:
    """A case in memory: sources at the peer, guarded local targets, a connection between them."""

    local: Transport
    peer: Peer
    tiles: Tiles
    runs: Runs
    sources: list[ByteArray]
    """Content of the peer's regions, by region id."""
    around: list[ByteArray]
    """Each target region with guard bytes on both sides."""
    targets: list[ByteArray]
    before: list[ByteArray]
    """Copy of ``around`` from before the read."""
    first_target: int
    """Region id of the first target."""

    def read(self, after: Waitable | None = None) -> Transfer:
        """Starts the read."""
        return self.local.read(self.peer, self.tiles, self.runs, after=after)

    def assert_exact(self) -> None:
        """Asserts that the target equals the oracle's result, and that nothing else has changed."""
        expected = [memory.copy() for memory in self.before]
        regions: list[ByteArray] = [np.empty(0, dtype=np.uint8)] * self.first_target
        regions += [memory[GUARD_BYTES:-GUARD_BYTES] for memory in expected]
        copy_slowly(self.tiles, self.runs, self.sources, regions)
        self._assert_around(expected, "differs from the oracle")

    def assert_untouched(self) -> None:
        """Asserts that the memory has not changed since the scene was laid out, or refilled."""
        self._assert_around(self.before, "was changed")

    def refill(self) -> None:
        """Overwrites the whole target at once, as a new owner of the memory would."""
        for memory in self.around:
            memory[:] = 0xA5
        # Not copied from the memory: bytes that land between the two lines must be found.
        self.before = [np.full_like(memory, 0xA5) for memory in self.around]

    def _assert_around(self, expected: list[ByteArray], what: str) -> None:
        for number, (memory, wanted) in enumerate(zip(self.around, expected, strict=True)):
            wrong = np.flatnonzero(memory != wanted)
            assert not len(wrong), (
                f"target region {number}: {len(wrong)} bytes, the first at "
                f"{int(wrong[0]) - GUARD_BYTES} of {memory.nbytes - 2 * GUARD_BYTES}: {what}"
            )


class TransportScenes:
    """Scaffolding of the suites; every member may be overridden."""

    transport: ClassVar[type[Transport]]
    """Transport class under test."""
    serving: ClassVar[type[Transport] | None] = None
    """Transport class that the peer opens in the other process, if not the class under test."""
    extra: ClassVar[Mapping[str, Any]] = {}
    """Keys of the transport's ``ExtraConfig``, on both sides."""
    threads: ClassVar[int] = 2
    stall_timeout_s: ClassVar[float] = 3.0
    """The option of :meth:`impatient`, whose peers are stopped. Others have half of
    ``patience_s``, because a healthy peer may be slow to answer on a busy machine.
    """
    settle_s: ClassVar[float] = 0.4
    """Seconds to look for late bytes."""
    patience_s: ClassVar[float] = 30.0
    """Seconds within which a transfer must become terminal."""

    @classmethod
    def options(cls) -> TransportOptions:
        """The options of both sides."""
        stall = cls.patience_s / 2
        return TransportOptions(threads=cls.threads, stall_timeout_s=stall, extra=cls.extra)

    @pytest.fixture(scope="class")
    @classmethod
    def healthy_peer(cls) -> Iterator[PeerProcess]:
        """A peer that all tests share; no test may harm the peer."""
        with PeerProcess(cls.serving or cls.transport, cls.options()) as peer:
            yield peer

    @pytest.fixture
    def fresh_peer(self) -> Iterator[PeerProcess]:
        """A peer for one test, which may stop or kill the peer."""
        with PeerProcess(self.serving or self.transport, self.options()) as peer:
            yield peer

    @pytest.fixture
    def local(self) -> Iterator[Transport]:
        """The transport under test, open."""
        with contextlib.closing(self.transport.open(self.options())) as transport:
            yield transport

    @pytest.fixture
    def impatient(self) -> Iterator[Transport]:
        """The transport under test, open, for reads from a peer that stops."""
        options = replace(self.options(), stall_timeout_s=self.stall_timeout_s)
        with contextlib.closing(self.transport.open(options)) as transport:
            yield transport

    def scene(self, local: Transport, process: PeerProcess, case: Case) -> Scene:
        """Lays out a case in memory."""
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
        """Polls after each end callback, until all transfers are reported; returns all reported
        ones.
        """
        reported: list[Transfer] = []
        told = threading.Semaphore(0)
        for transfer in transfers:
            transfer.on_end(lambda _: told.release())
        for _ in transfers:
            assert told.acquire(timeout=self.patience_s), (
                f"no end was told for {self.patience_s} s; not reported: "
                f"{[transfer for transfer in transfers if transfer not in reported]}"
            )
            reported += local.poll()
        missing = [transfer for transfer in transfers if transfer not in reported]
        assert not missing, f"the end was told, and poll() says nothing of {missing}"
        return reported

    def read_exactly(self, scene: Scene) -> Transfer:
        """Reads, and compares the target with the oracle."""
        transfer = scene.read()
        assert self.wait(scene.local, transfer).count(transfer) == 1, "reported twice"
        assert transfer.state is TransferState.DONE, transfer.error
        scene.assert_exact()
        return transfer

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Spins until ``condition`` holds; it may hold for a very short time only."""
        deadline = time.monotonic() + self.patience_s
        while not condition():
            if time.monotonic() > deadline:
                raise NotInTimeError(f"it did not come about in {self.patience_s} s")
            time.sleep(0)

    def settle(self, local: Transport) -> None:
        """Waits until late bytes of ``local`` would have landed."""
        time.sleep(self.settle_s)

    def assert_nothing_lands(self, scene: Scene) -> None:
        """Asserts that nothing changes the memory after a terminal state."""
        scene.refill()
        self.settle(scene.local)
        scene.assert_untouched()
