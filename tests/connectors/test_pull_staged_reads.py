"""A read through staging memory, chunk by chunk, over a transport whose reads the test ends."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.connectors.pull.reads import TargetMemory
from kvferry.connectors.pull.staged_reads import StagedRead
from kvferry.errors import TransferError
from kvferry.layouts.arrays import HOST, MemorySpan
from kvferry.layouts.host_staging import HostPlacer
from kvferry.layouts.staging import stage
from kvferry.layouts.tiles import TILE_DTYPE, Runs, Tiles, blank_runs
from kvferry.topology.strategies import Addressing
from kvferry.transports.base import (
    ByteArray,
    Peer,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
    Waitable,
)

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


@pytest.fixture
def memory() -> Iterator[TargetMemory]:
    cache = np.zeros(CHUNKS * NBYTES, dtype=np.uint8)
    address = cache.ctypes.data
    memory = TargetMemory(
        [MemorySpan(address, cache.nbytes, HOST)],
        HostPlacer([address]),
        staging_bytes=4096,
        stall_timeout_s=10.0,
        threads=1,
    )
    yield memory
    memory.stop()


@pytest.fixture
def wire() -> _Wire:
    return _Wire()


@pytest.fixture
def read(memory: TargetMemory, wire: _Wire) -> StagedRead:
    """Three chunks, all under way."""
    row = (0, 0, NBYTES, 1, 1, 1) * 2 + (1, 1, 1)
    runs = blank_runs(CHUNKS)
    runs["source_block"] = runs["target_block"] = np.arange(CHUNKS)
    runs["tokens"] = NBYTES
    chunks = stage(np.array([row], dtype=TILE_DTYPE), runs, NBYTES)
    assert len(chunks) == CHUNKS
    read = StagedRead(wire, wire.connect(b""), "source", memory, chunks, CHUNKS * NBYTES)
    read.advance(time.monotonic())
    assert len(wire.reads) == CHUNKS
    return read


def end(transfer: Transfer, error: TransferError | None = None) -> None:
    transfer.stop(TransferState.DONE if error is None else TransferState.FAILED, error)


def finish(read: StagedRead) -> None:
    deadline = time.monotonic() + 10.0
    while not read.is_settled:
        read.advance(time.monotonic())
        assert time.monotonic() < deadline, "the read does not settle"


def test_chunks_that_land_are_unpacked_and_their_slots_come_back(
    read: StagedRead, memory: TargetMemory, wire: _Wire
) -> None:
    for transfer in reversed(wire.reads):
        end(transfer)
    finish(read)
    assert read.error is None
    assert read.bytes_done == read.nbytes
    assert (memory.arrays()[0] == 7).all()
    assert memory.staging.numbers.used_bytes == 0


def test_once_a_chunk_failed_those_that_land_beside_it_never_reach_the_cache(
    read: StagedRead, memory: TargetMemory, wire: _Wire
) -> None:
    """The read is settled at once, so that its blocks may be somebody else's by then."""
    end(wire.reads[0], TransferError("torn"))
    end(wire.reads[1])
    read.advance(time.monotonic())
    assert read.is_settled
    read.advance(time.monotonic())
    memory.stop()  # waits for whatever is being unpacked
    assert isinstance(read.error, TransferError)
    assert not memory.arrays()[0].any()
    assert wire.cancelled == [wire.reads[2]]
    numbers = memory.staging.numbers
    assert (numbers.used_bytes, numbers.quarantined_bytes) == (0, NBYTES)
    end(wire.reads[2])
    memory.staging.sweep()
    assert memory.staging.numbers.quarantined_bytes == 0


def test_a_chunk_that_is_being_unpacked_keeps_a_failed_read_from_settling(
    read: StagedRead, memory: TargetMemory, wire: _Wire
) -> None:
    end(wire.reads[0])
    read.advance(time.monotonic())  # submitted: it may write from now on
    end(wire.reads[1], TransferError("torn"))
    unpacking = [staged.unpacking for staged in read._staged if staged.unpacking]
    read.give_up(TransferError("not wanted"))
    assert not read.is_settled
    finish(read)
    assert [work.done for work in unpacking] == [True]
    assert (memory.arrays()[0][:NBYTES] == 7).all()
    assert not memory.arrays()[0][NBYTES:].any()
