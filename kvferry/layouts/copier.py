"""The copier: moves tiles × runs between memories of this process, at memory speed.

:func:`copy_tiles` copies in one call. A :class:`CopyJob` copies in chunks, so several threads can
share the copy, progress can be read, and the copy can be cancelled. Kernels release the interpreter
lock.
"""

import statistics
import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from kvferry.layouts import chunks, kernels
from kvferry.layouts.arrays import Int64s
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.chunks import ChunkedCopy
from kvferry.layouts.staging import dense_tiles
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows

STREAM_BYTES = 4 << 20
"""Least bytes of a copy that may use stores around the cache; less would fit in the cache."""
_PLAIN_WINS = 0.9
"""Share of the time of stores around the cache below which plain stores are used. If both take
about as long, stores around the cache leave more memory bandwidth to other threads."""
_PART_BYTES, _PARTS = 512 << 10, 32

CHUNK_BYTES = 2 << 20
"""Number of bytes per chunk of a job: some 0.2 ms, short enough to cancel and cheap enough."""

SEGMENT_DTYPE = np.dtype(
    [
        ("source_region", np.int64),
        ("source_offset", np.int64),
        ("target_region", np.int64),
        ("target_offset", np.int64),
        ("nbytes", np.int64),
    ]
)
"""One contiguous copy: a row of :func:`expand`."""


@cache
def stream_bytes() -> int:
    """Number of bytes from which copies use stores around the cache.

    The result is ``STREAM_BYTES``, or a number that no copy reaches if plain stores are faster.
    Measured once per process, in some 10 ms.
    """
    plain, around = measure_stores()
    return STREAM_BYTES if plain >= _PLAIN_WINS * around else 1 << 62


def measure_stores() -> tuple[float, float]:
    """Seconds for a copy of half a MiB, with plain stores and with stores around the cache.

    Both are medians, of seven and of eight copies; the two kinds of stores take turns. Neither
    source nor target is in the CPU cache, as is normal for KV caches: stores around the cache wrote
    all of the memory just before, and each part of the memory is used once.
    """
    memory = np.empty(_PARTS * _PART_BYTES, dtype=np.uint8)
    part = (0, 0, _PART_BYTES, 0, 0, 1, 0, 0, _PART_BYTES, 0, 0, 1, 1, _PART_BYTES, 1)
    tiles, runs = np.array([part], dtype=TILE_DTYPE), np.zeros(1, dtype=RUN_DTYPE)
    runs["tokens"] = runs["source_step"] = runs["target_step"] = 1
    address = _addresses([memory.ctypes.data])

    def copy(source: int, target: int, *, around: bool) -> float:
        runs["source_block"], runs["target_block"] = source, target
        began = time.perf_counter()
        kernels.copy_now(address, address, tiles, runs, 0 if around else 1 << 62)
        return time.perf_counter() - began

    for number in range(1, _PARTS):
        copy(0, number, around=True)
    half = _PARTS // 2
    seconds = [copy(number, half + number, around=number % 2 == 1) for number in range(1, half)]
    return statistics.median(seconds[1::2]), statistics.median(seconds[0::2])


def copy_tiles(
    source_addresses: Sequence[int] | Int64s,
    target_addresses: Sequence[int] | Int64s,
    tiles: Tiles,
    runs: Runs,
) -> int:
    """Copies ``tiles`` × ``runs``; returns the number of contiguous segments after merging.

    >>> source, target = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    >>> tile = (0, 0, 4, 1, 1, 1, 0, 0, 4, 1, 1, 1, 1, 1, 1)
    >>> tiles = np.array([tile], dtype=TILE_DTYPE)  # blocks of 4 one-byte tokens on both sides
    >>> runs = np.array([(1, 0, 0, 2, 2, 1, 1)], dtype=RUN_DTYPE)  # block 1 → 0 from 2
    >>> copy_tiles([source.ctypes.data], [target.ctypes.data], tiles, runs)
    1
    >>> target
    array([0, 0, 4, 5, 0, 0, 0, 0], dtype=uint8)

    The function checks nothing: see :func:`~kvferry.layouts.bounds.check_bounds`. Source and target
    bytes must not overlap.

    Args:
        source_addresses: address of each source region in this process.
        target_addresses: address of each target region in this process.
        tiles: a 1-d array of ``TILE_DTYPE``.
        runs: a 1-d array of ``RUN_DTYPE``.
    """
    return kernels.copy_now(
        _addresses(source_addresses),
        _addresses(target_addresses),
        as_rows(tiles, TILE_DTYPE),
        as_rows(runs, RUN_DTYPE),
        stream_bytes(),
    )


class CopyJob(ChunkedCopy):
    """A copy between memories of this process, in chunks that several threads may share."""

    def __init__(
        self,
        source_addresses: Sequence[int] | Int64s,
        target_addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        runs: Runs,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """See :func:`copy_tiles` and :class:`~kvferry.layouts.chunks.ChunkedCopy`."""
        super().__init__(tiles, runs, chunk_bytes)
        self._source = _addresses(source_addresses)
        self._target = _addresses(target_addresses)
        self._stream = self.nbytes >= stream_bytes()

    def step(self, nbytes: int) -> bool:
        """See :meth:`ChunkedCopy.step`; never raises. Releases the interpreter lock."""
        left: bool = chunks.copy_chunks(
            self._source,
            self._target,
            self._tiles,
            self._runs,
            self._chunks,
            self._progress,
            nbytes,
            self._stream,
        )
        return left


def count_segments(tiles: Tiles, runs: Runs) -> int:
    """Number of contiguous copies in ``tiles`` × ``runs`` after merging."""
    nothing = np.empty(0, dtype=SEGMENT_DTYPE)
    return kernels.list_segments(as_rows(tiles, TILE_DTYPE), as_rows(runs, RUN_DTYPE), nothing)


def expand(tiles: Tiles, runs: Runs) -> npt.NDArray[np.void]:
    """The single contiguous copies, after merging, as rows of :data:`SEGMENT_DTYPE`.

    Offsets are bytes from the start of the region.
    """
    tiles, runs = as_rows(tiles, TILE_DTYPE), as_rows(runs, RUN_DTYPE)
    out = np.empty(count_segments(tiles, runs), dtype=SEGMENT_DTYPE)
    kernels.list_segments(tiles, runs, out)
    return out


def warm() -> None:
    """Compiles the kernels or loads them from disk, and measures stores; spares the first transfer.

    The very first call on a machine takes seconds; later calls take milliseconds.
    """
    source, target = np.arange(4, dtype=np.uint8), np.zeros(4, dtype=np.uint8)
    tiles = np.array([(0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 4, 1)], dtype=TILE_DTYPE)
    runs = np.array([(0, 0, 0, 0, 1, 1, 1)], dtype=RUN_DTYPE)
    addresses = [source.ctypes.data], [target.ctypes.data]
    check_bounds(tiles, runs, [4], [4])
    copy_tiles(*addresses, tiles, runs)
    assert bytes(source) == bytes(target)
    assert dense_tiles(tiles, 1, "target")["target_block_stride"] == 4
    assert len(expand(tiles, runs)) == 1
    job = CopyJob(*addresses, tiles, runs)
    job.step(CHUNK_BYTES)
    job.cancel()
    assert job.is_terminal


def _addresses(addresses: Sequence[int] | Int64s) -> Int64s:
    return np.array(addresses, dtype=np.int64)
