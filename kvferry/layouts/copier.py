"""The copier: moves tiles × runs between memories of this process, at memory speed.

:func:`copy_tiles` does it in one call; a :class:`CopyJob` does it in chunks, so that several
threads can share it, its progress can be read and it can be cancelled. Kernels release the
interpreter lock.
"""

import statistics
import time
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layouts import chunks, kernels
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.chunks import ChunkedCopy
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows

Int64s: TypeAlias = npt.NDArray[np.int64]

STREAM_BYTES = 4 << 20
"""From this many bytes on, stores may go around the cache: less would have stayed in it."""
_PLAIN_WINS = 0.9
"""Plain stores are taken where they need less than so much of the time. Where both are about as
fast, those around the cache leave more of the memory's rate to other threads."""
_PART_BYTES, _PARTS = 512 << 10, 32

CHUNK_BYTES = 2 << 20
"""Bytes per chunk of a job: some 0.2 ms, short enough to cancel and long enough to be cheap."""

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
    """From how many bytes on stores go around the cache: ``STREAM_BYTES``, or a number that no copy
    reaches where plain stores are faster. Measured once per process, in some 10 ms.
    """
    plain, around = measure_stores()
    return STREAM_BYTES if plain >= _PLAIN_WINS * around else 1 << 62


def measure_stores() -> tuple[float, float]:
    """Seconds for a copy of half a MiB, with plain stores and with those around the cache: medians
    of seven and eight, which take turns. Neither source nor target is in the cache, as KV caches
    are not: all of the memory was written around it just before, and each part is used once.
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

    Nothing is checked: see :func:`~kvferry.layouts.bounds.check_bounds`. Source and target bytes
    must not overlap.

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
    """A copy between memories of this process, in chunks that any number of threads may share."""

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
    """Contiguous copies that ``tiles`` × ``runs`` make after merging."""
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
    """Compiles the kernels, or loads them from disk, and compares the two kinds of stores, so that
    the first transfer does not wait.

    Seconds at the very first call on a machine, milliseconds later.
    """
    source, target = np.arange(4, dtype=np.uint8), np.zeros(4, dtype=np.uint8)
    tiles = np.array([(0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 4, 1)], dtype=TILE_DTYPE)
    runs = np.array([(0, 0, 0, 0, 1, 1, 1)], dtype=RUN_DTYPE)
    addresses = [source.ctypes.data], [target.ctypes.data]
    check_bounds(tiles, runs, [4], [4])
    copy_tiles(*addresses, tiles, runs)
    assert bytes(source) == bytes(target)
    assert len(expand(tiles, runs)) == 1
    job = CopyJob(*addresses, tiles, runs)
    job.step(CHUNK_BYTES)
    job.cancel()
    assert job.is_terminal


def _addresses(addresses: Sequence[int] | Int64s) -> Int64s:
    return np.array(addresses, dtype=np.int64)
