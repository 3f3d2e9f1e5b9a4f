"""A cache on a device behind a wire: chunks that are placed and pieces that are packed.

Both stand beside a plain upload of as many bytes from pinned memory, which is the limit of the bus.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks import report
from benchmarks.cuda_ipc import READS, IpcCase
from kvferry.cli.bench import seconds_of
from kvferry.layouts.arrays import whole_pages
from kvferry.layouts.device import CopyEvent, CopyStream, Placer
from kvferry.layouts.staging import WIRE_CHUNK_BYTES, stage
from kvferry.layouts.tiles import num_bytes
from kvferry.lifetimes import Closing
from kvferry.transports.packing import PackedPiece, Packer
from kvferry.transports.wire_chunks import plan_chunks

CONTENDERS = ("upload", "placed", "packed")
_AHEAD = 4
"""Pieces that are packed at a time: as two readers have."""


class WireRow(report.TimedRow, frozen=True, kw_only=True):
    """One case."""

    label: str


class DeviceWire(Closing):
    """A cache on a device, and what moves its blocks from and to host memory."""

    def __init__(self, streams: Sequence[CopyStream], case: IpcCase, layouts: str) -> None:
        """Two streams, which stay the caller's."""
        tiles, runs = case.tables(layouts)
        self.nbytes = num_bytes(tiles, runs)
        """That each way moves."""
        self._chunks = stage(tiles, runs)
        self.num_chunks = len(self._chunks)
        """Number of chunks that are placed; as many pieces are packed."""
        self._plan = plan_chunks(tiles, runs, WIRE_CHUNK_BYTES)
        self._stream = streams[0]
        staging = whole_pages(4 * WIRE_CHUNK_BYTES)
        self._slots = staging.reshape(4, WIRE_CHUNK_BYTES)
        cache = streams[0].allocate(case.shape.region_bytes)
        self._bounce = streams[0].allocate(WIRE_CHUNK_BYTES)
        self._addresses = np.array([cache.address], dtype=np.int64)
        self._placer = Placer(self._addresses, streams)
        self._placer.adopt(staging)
        self._packer = Packer(streams, 16 * WIRE_CHUNK_BYTES)

    def upload(self) -> None:
        """As many bytes from pinned memory to the device, as they come."""
        for number, chunk in enumerate(self._chunks):
            self._stream.upload(self._slots[number % 4][: chunk.nbytes], self._bounce.address)
        self._stream.record().wait()

    def place(self) -> None:
        """Chunks that have landed, into the cache."""
        under_way: deque[CopyEvent | None] = deque()
        for number, chunk in enumerate(self._chunks):
            if len(under_way) == len(self._slots):
                _wait(under_way.popleft())
            landed = self._slots[number % 4][: chunk.nbytes]
            placed = self._placer.place(landed, chunk.unpack_tiles, chunk.unpack_runs)
            under_way.append(placed)
        for event in under_way:
            _wait(event)

    def pack(self) -> None:
        """Pieces out of the cache, each given back when it is there."""
        room = threading.Semaphore(_AHEAD)
        pieces: deque[PackedPiece] = deque()
        for index in range(len(self._plan.chunks)):
            for tiles, runs in self._packer.pieces(*self._plan.pack(index)):
                room.acquire()
                while pieces and pieces[0].address:
                    self._packer.release(pieces.popleft())
                pieces.append(PackedPiece(tiles, runs, room.release))
                self._packer.pack(pieces[-1], self._addresses, "reader")
        for _ in range(_AHEAD):
            room.acquire()
        for piece in pieces:
            self._packer.release(piece)

    def close(self) -> None:
        """Gives up the pinned memory."""
        self._placer.close()
        self._packer.close()


def measure(
    open_stream: Callable[[], CopyStream], case: IpcCase, rounds: int
) -> tuple[WireRow, ...]:
    """Both layouts, all contenders in turns, after a round that does not count.

    Args:
        open_stream: opens a stream of the device.
        case: what is moved.
        rounds: rounds that count.
    """
    rows = []
    for layouts in READS:
        with (
            open_stream() as one,
            open_stream() as two,
            DeviceWire((one, two), case, layouts) as wire,
        ):
            moves = zip(CONTENDERS, (wire.upload, wire.place, wire.pack), strict=True)
            timed = {way: partial(seconds_of, move) for way, move in moves}
            seconds = report.take_turns(timed, rounds)
            label = f"{case.label}, {layouts}"
            rows.append(WireRow(label=label, seconds=seconds, nbytes=wire.nbytes))
    return tuple(rows)


def _wait(event: CopyEvent | None) -> None:
    if event is not None:
        event.wait()


class WireResults(report.Results, frozen=True, kw_only=True):
    """All that one run measured."""

    rows: tuple[WireRow, ...]


def page(results: WireResults) -> str:
    """The page for people: GB/s, and the share of the upload."""
    cells: list[tuple[str, ...]] = [("read", *CONTENDERS)]
    for row in results.rows:
        rates = [row.gbps(way) for way in CONTENDERS]
        cells.append((row.label, *(f"{each:.1f} ({each / rates[0]:.2f})" for each in rates)))
    about = "GB/s, and beside the upload from pinned memory."
    return report.page("A device's cache behind a wire", results, about, report.table(cells))
