"""What the conformance tests of transports stand on: a case laid out, and how to wait for reads."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from kvferry.layouts.tiles import Runs, Tiles
from kvferry.testing.transport_cases import Case, copy_slowly
from kvferry.testing.transport_peer import PeerProcess, pattern
from kvferry.testing.waiting import NotInTimeError
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


class TransportScenes:
    """Scaffolding of the suites: all of it may be overridden."""

    transport: ClassVar[type[Transport]]
    """The class under test."""
    serving: ClassVar[type[Transport] | None] = None
    """The class that the peer opens in its own process, if not the one under test."""
    extra: ClassVar[Mapping[str, Any]] = {}
    """Keys of its ``ExtraConfig``, on both sides."""
    threads: ClassVar[int] = 2
    stall_timeout_s: ClassVar[float] = 10.0
    """Longer than a healthy peer may have to wait for a processor."""
    short_stall_timeout_s: ClassVar[float] = 1.0
    """The same for ``local`` where a test waits for a stall."""
    settle_s: ClassVar[float] = 0.4
    """How long to look for bytes that land late."""
    patience_s: ClassVar[float] = 30.0
    """How long a transfer may take to become terminal."""

    @classmethod
    def options(cls) -> TransportOptions:
        """What both sides are opened with."""
        return TransportOptions(
            threads=cls.threads,
            stall_timeout_s=cls.stall_timeout_s,
            extra=cls.extra,
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
    def stalls_soon(self) -> None:
        """For tests that wait for a stall: ``local`` takes ``short_stall_timeout_s`` for one."""

    @pytest.fixture
    def local(self, request: pytest.FixtureRequest) -> Iterator[Transport]:
        """The transport under test, open."""
        options = self.options()
        if "stalls_soon" in request.fixturenames:
            options = replace(options, stall_timeout_s=self.short_stall_timeout_s)
        transport = self.transport.open(options)
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
        """Polls whenever it is told of an end, until all are reported; returns all that was."""
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
        """Reads, and holds the target against the oracle."""
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

    def assert_nothing_lands(self, scene: Scene) -> None:
        """After a terminal state the memory is somebody else's: nothing may change it."""
        scene.refill()
        time.sleep(self.settle_s)
        scene.assert_untouched()
