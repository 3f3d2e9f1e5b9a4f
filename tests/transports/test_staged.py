"""A read through staging memory, chunk by chunk, over a transport whose reads the test ends."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.errors import TransferError
from kvferry.layouts.arrays import HOST, ByteArray, MemorySpan
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.tiles import TILE_DTYPE, Runs, Tiles, blank_runs
from kvferry.testing import TransportConformance
from kvferry.testing.host_device import HostCopyStream
from kvferry.testing.waiting import until
from kvferry.testing.wrapped import WrappedTransport
from kvferry.transports import regions
from kvferry.transports.base import (
    Addressing,
    Peer,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
    Waitable,
)
from kvferry.transports.shm import ShmPeer, ShmTransport
from kvferry.transports.staged import StagedTransport, Staging

CHUNKS = 3
NBYTES = 64
"""Bytes of a chunk."""


class _Connection(Peer):
    def close(self) -> None:
        pass


class _Wire(Transport):
    """Moves nothing: reads stay as they are until the test says what became of them."""

    name = "wire"
    addressing = Addressing.SEGMENTS
    fences = False

    def __init__(self) -> None:
        self.reads: list[Transfer] = []
        self.cancelled: list[Transfer] = []

    @classmethod
    def open(cls, options: TransportOptions) -> "_Wire":
        return cls()

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        raise NotImplementedError

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        memory[:] = 7  # what all reads bring
        return 0

    def endpoint(self) -> bytes:
        return b""

    def connect(self, endpoint: bytes) -> Peer:
        return _Connection()

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        self.reads.append(Transfer(nbytes=NBYTES))
        return self.reads[-1]

    def poll(self) -> list[Transfer]:
        return []

    def cancel(self, transfer: Transfer) -> None:
        self.cancelled.append(transfer)

    def close(self) -> None:
        pass


class Scene:
    """A read of three chunks, all under way."""

    def __init__(self, streams: Sequence[HostCopyStream] = ()) -> None:
        self.cache = np.zeros(CHUNKS * NBYTES, dtype=np.uint8)
        span = MemorySpan(self.cache.ctypes.data, self.cache.nbytes, HOST)
        self.staging = Staging([span], nbytes=4096, stall_timeout_s=120.0, streams=streams)
        self.wire = _Wire()
        self.staged = StagedTransport(self.wire, self.staging)
        self.transfer = self.read()
        until(lambda: len(self.wire.reads) == CHUNKS)

    def read(self) -> Transfer:
        # Runs of unlike lengths make a chunk each.
        row = (0, 0, NBYTES, 1, 1, 1) * 2 + (1, 1, 1)
        runs = blank_runs(CHUNKS)
        runs["source_block"] = runs["target_block"] = np.arange(CHUNKS)
        runs["tokens"] = NBYTES - np.arange(CHUNKS)
        tiles = np.array([row], dtype=TILE_DTYPE)
        return self.staged.read(self.wire.connect(b""), tiles, runs)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.staged.close()
    scene.staging.close()


@pytest.fixture
def on_device() -> Iterator[tuple[Scene, list[HostCopyStream]]]:
    """The same with a cache on a device, and the streams that unpack there."""
    with HostCopyStream() as one, HostCopyStream() as other:
        scene = Scene([one, other])
        yield scene, [one, other]
        scene.staged.close()
        scene.staging.close()


def end(transfer: Transfer, error: TransferError | None = None) -> None:
    transfer.stop(TransferState.DONE if error is None else TransferState.FAILED, error)


def test_chunks_that_land_are_unpacked_and_their_slots_come_back(scene: Scene) -> None:
    for transfer in reversed(scene.wire.reads):
        assert not scene.transfer.is_terminal
        end(transfer)
    until(lambda: scene.transfer.is_terminal)
    assert scene.staged.poll() == [scene.transfer]
    assert (scene.transfer.state, scene.transfer.error) == (TransferState.DONE, None)
    assert scene.transfer.bytes_done == scene.transfer.nbytes
    assert np.count_nonzero(scene.cache == 7) == scene.transfer.nbytes
    until(lambda: scene.staging.numbers.used_bytes == 0)


def test_once_a_chunk_failed_those_that_land_beside_it_never_reach_the_target(
    scene: Scene,
) -> None:
    """The read is over at once, so that its blocks may be somebody else's by then."""
    first, second, third = scene.wire.reads
    end(first, TransferError("torn"))
    assert scene.transfer.state is TransferState.FAILED
    assert isinstance(scene.transfer.error, TransferError)
    assert scene.wire.cancelled == [second, third]
    end(second)
    assert scene.staging.numbers.quarantined_bytes == NBYTES
    end(third)
    assert scene.staging.numbers.quarantined_bytes == 0
    scene.staging.close()  # waits for whatever is being unpacked
    assert not scene.cache.any()


@pytest.mark.parametrize("torn", [False, True], ids=["cancelled", "torn"])
def test_a_read_is_over_when_the_device_has_unpacked_what_it_was_asked_to(
    on_device: tuple[Scene, list[HostCopyStream]], torn: bool
) -> None:
    scene, streams = on_device
    for stream in streams:
        stream.pause()
    for transfer in scene.wire.reads[:2]:
        end(transfer)
    asked = threading.Event()
    scene.staging.movers.submit(asked.set)  # behind the two chunks
    assert asked.wait(60)
    if torn:
        end(scene.wire.reads[2], TransferError("torn"))
    else:
        scene.staged.cancel(scene.transfer)
    streams[0].resume()
    time.sleep(0.05)
    assert not scene.transfer.is_terminal, "a chunk of the other stream may still land"
    assert scene.staging.numbers.used_bytes > 0
    streams[1].resume()
    until(lambda: scene.transfer.is_terminal)
    wanted = TransferState.FAILED if torn else TransferState.CANCELLED
    assert scene.transfer.state is wanted
    landed = np.count_nonzero(scene.cache)
    assert landed == scene.transfer.bytes_done > NBYTES
    end(scene.wire.reads[2])
    until(lambda: scene.staging.numbers.used_bytes == 0)
    assert np.count_nonzero(scene.cache) == landed


def test_staging_memory_is_pinned_when_engines_meet() -> None:
    cache = np.zeros(NBYTES, dtype=np.uint8)
    span = MemorySpan(cache.ctypes.data, cache.nbytes, HOST)
    with HostCopyStream() as stream:
        staging = Staging([span], nbytes=4096, stall_timeout_s=120.0, streams=[stream])
        staged = StagedTransport(_Wire(), staging)
        assert not stream.pinned
        staged.prepare(_Connection(), np.empty(0, dtype=TILE_DTYPE), 16)
        until(lambda: stream.pinned, what="pinned memory")
        staged.close()
        staging.close()
        assert not stream.pinned


def test_movers_wait_for_no_device(on_device: tuple[Scene, list[HostCopyStream]]) -> None:
    """One mover has all chunks unpacked while the device carries nothing out."""
    scene, streams = on_device
    for stream in streams:
        stream.pause()
    for transfer in scene.wire.reads:
        end(transfer)
    asked = threading.Event()
    scene.staging.movers.submit(asked.set)
    assert asked.wait(60), "the mover waits"
    for stream in streams:
        stream.resume()
    until(lambda: scene.transfer.is_terminal)
    assert scene.transfer.state is TransferState.DONE
    assert np.count_nonzero(scene.cache == 7) == scene.transfer.nbytes


def test_a_chunk_that_is_being_unpacked_keeps_a_failed_read_from_its_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), threading.Event()
    unpack = Staging.unpack

    def slow(*args: Any) -> None:
        begun.set()
        assert gate.wait(60)
        unpack(*args)

    monkeypatch.setattr(Staging, "unpack", slow)
    end(scene.wire.reads[0])
    assert begun.wait(60)  # it may write from now on
    end(scene.wire.reads[1], TransferError("torn"))
    scene.staged.cancel(scene.transfer)
    assert not scene.transfer.is_terminal
    gate.set()
    until(lambda: scene.transfer.is_terminal)
    assert scene.transfer.state is TransferState.FAILED
    # The shortest run is the first chunk and goes into the last block.
    shortest = NBYTES - CHUNKS + 1
    assert (scene.cache[-NBYTES:][:shortest] == 7).all()
    assert np.count_nonzero(scene.cache) == shortest


def test_memory_into_which_something_may_land_outlives_its_staging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[ByteArray] = []
    monkeypatch.setattr(regions, "_kept", kept)
    scene = Scene()
    scene.staged.close()
    scene.staging.close()
    assert len(kept) == 1


def test_a_read_that_is_stopped_before_it_began_is_not_kept(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for transfer in scene.wire.reads:
        end(transfer)
    until(lambda: scene.transfer.is_terminal)
    post = scene.staging.serial.post

    def close_first(task: Callable[[], object]) -> None:
        monkeypatch.undo()
        scene.staged.close()
        post(task)

    monkeypatch.setattr(scene.staging.serial, "post", close_first)
    late = scene.read()
    until(lambda: late.state is TransferState.FAILED)
    assert not scene.staged._reads
    assert len(scene.wire.reads) == CHUNKS


class StagedShm(WrappedTransport):
    """``shm`` with staging around it; the target is what was allocated and registered."""

    inner_class = ShmTransport
    name, addressing, fences = "shm", ShmTransport.addressing, True
    ExtraConfig = ShmTransport.ExtraConfig

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._spans: list[MemorySpan] = []
        self._made: list[tuple[StagedTransport, Staging]] = []

    @classmethod
    def open(cls, options: TransportOptions) -> "StagedShm":
        return cls(ShmTransport.open(options))

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        region, memory = self._inner.allocate(nbytes)
        self._spans.append(MemorySpan(memory.ctypes.data, nbytes, HOST))
        return region, memory

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        self._spans.append(MemorySpan(memory.ctypes.data, memory.nbytes, HOST))
        return self._inner.register(memory, serve=serve)

    @property
    def staged(self) -> StagedTransport:
        """Made when the regions are known."""
        if not self._made or len(self._made[-1][1].region_bytes) < len(self._spans):
            staging = Staging(self._spans, nbytes=8 << 20, stall_timeout_s=2.0)
            self._made.append((StagedTransport(self._inner, staging), staging))
            self._spans.append(MemorySpan(staging.memory.ctypes.data, 0, HOST))  # no target
        return self._made[-1][0]

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        assert isinstance(peer, ShmPeer)
        check_bounds(tiles, runs, peer.region_bytes, None)  # else the inner one finds it later
        return self.staged.read(peer, tiles, runs, after=after)

    def poll(self) -> list[Transfer]:
        return [transfer for staged, _ in self._made for transfer in staged.poll()]

    def cancel(self, transfer: Transfer) -> None:
        for staged, _ in self._made:
            staged.cancel(transfer)

    def close(self) -> None:
        for staged, _ in self._made:
            staged.close()
        super().close()
        for _, staging in self._made:
            staging.close()


class TestStagedShm(TransportConformance):
    """Staging is a transport like any other."""

    transport = StagedShm
    serving = ShmTransport
