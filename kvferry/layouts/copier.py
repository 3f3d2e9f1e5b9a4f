"""The copier: moves tiles × runs between memories of this process, at memory speed.

:func:`copy_tiles` does it in one call; a :class:`CopyJob` does it in chunks, so that several
threads can share it, its progress can be read and it can be cancelled. Kernels release the
interpreter lock.
"""

import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layouts import kernels
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, num_bytes

Int64s: TypeAlias = npt.NDArray[np.int64]

STREAM_BYTES = 4 << 20
"""From this many bytes on, stores go around the cache: less would have stayed in it."""

CHUNK_BYTES = 2 << 20
"""Bytes per chunk of a job: some 0.2 ms, short enough to cancel and long enough to be cheap."""

PIECE_DTYPE = np.dtype(
    [
        ("source_region", np.int64),
        ("source_offset", np.int64),
        ("target_region", np.int64),
        ("target_offset", np.int64),
        ("nbytes", np.int64),
    ]
)
"""One contiguous copy: a row of :func:`expand`."""


def copy_tiles(
    source_addresses: Sequence[int] | Int64s,
    target_addresses: Sequence[int] | Int64s,
    tiles: Tiles,
    runs: Runs,
) -> int:
    """Copies ``tiles`` × ``runs``; returns the number of contiguous pieces after merging.

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
    return kernels.copy_table(
        _addresses(source_addresses),
        _addresses(target_addresses),
        as_table(tiles, TILE_DTYPE),
        as_table(runs, RUN_DTYPE),
        np.empty((3, 3), dtype=np.int64),
        num_bytes(tiles, runs) >= STREAM_BYTES,
        0,
    )


class CopyJob:
    """A copy in chunks, which any number of threads may work on together.

    Every chunk is taken by exactly one caller of :meth:`step`. After ``cancel()`` no new chunk is
    taken; the job is terminal once the steps under way have returned, and then nothing of it can
    land any more.
    """

    def __init__(
        self,
        source_addresses: Sequence[int] | Int64s,
        target_addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        runs: Runs,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.nbytes = num_bytes(tiles, runs)
        """Bytes to copy."""
        self.bytes_done = 0
        """Bytes of the chunks that are complete."""
        self.segments = 0
        """Contiguous pieces of the chunks that are complete."""
        self._source = _addresses(source_addresses)
        self._target = _addresses(target_addresses)
        self._tiles = as_table(tiles, TILE_DTYPE)
        self._runs = as_table(runs, RUN_DTYPE)
        self._chunks = chunks(tiles, runs, chunk_bytes)
        self._stream = self.nbytes >= STREAM_BYTES
        self._lock = threading.Lock()
        self._next = 0
        self._active = 0
        self._cancelled = False

    @property
    def num_chunks(self) -> int:
        """Chunks in all; 0 if there is nothing to copy."""
        return len(self._chunks)

    def step(self) -> bool:
        """Copies one chunk; returns whether it found one to copy."""
        with self._lock:
            if self._cancelled or self._next == len(self._chunks):
                return False
            tile_range, run_range = self._chunks[self._next]
            self._next += 1
            self._active += 1
        tiles, runs = self._tiles[tile_range], self._runs[run_range]
        segments, done = 0, 0
        try:
            scratch = np.empty((3, 3), dtype=np.int64)
            segments = kernels.copy_table(
                self._source, self._target, tiles, runs, scratch, self._stream, 0
            )
            done = int(tiles[:, kernels.HEADS :].prod(axis=1).sum()) * int(
                runs[:, kernels.R_TOKENS].sum()
            )
        finally:
            with self._lock:
                self._active -= 1
                self.bytes_done += done
                self.segments += segments
        return True

    def run(self) -> None:
        """Copies chunks until none is left."""
        while self.step():
            pass

    def cancel(self) -> None:
        """Lets no further chunk begin. Idempotent."""
        with self._lock:
            self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled before all chunks were taken."""
        return self._cancelled and self._next < len(self._chunks)

    @property
    def is_terminal(self) -> bool:
        """Whether no chunk is being copied and none will be."""
        with self._lock:
            return self._active == 0 and (self._cancelled or self._next == len(self._chunks))


def chunks(tiles: Tiles, runs: Runs, chunk_bytes: int) -> list[tuple[slice, slice]]:
    """Cuts tiles × runs into rectangles of about ``chunk_bytes``, tile after tile.

    Together the rectangles cover every tile and run exactly once. A single run of a single tile
    is never cut, so one that is larger makes a larger chunk.

    Raises:
        ValueError: ``chunk_bytes`` is less than 1.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes: {chunk_bytes} is less than 1")
    if not (len(tiles) and len(runs)):
        return []
    per_token = tiles["heads"] * tiles["elements"] * tiles["itemsize"]
    tokens = np.cumsum(runs["tokens"])
    per_tile = (per_token * tokens[-1]).tolist()
    result: list[tuple[slice, slice]] = []
    first, held = 0, 0
    for tile, nbytes in enumerate(per_tile):
        if held and held + nbytes > chunk_bytes:
            result.append((slice(first, tile), slice(0, len(runs))))
            first, held = tile, 0
        if nbytes > chunk_bytes:
            result += [
                (slice(tile, tile + 1), cut)
                for cut in _cut_runs(tokens, chunk_bytes // int(per_token[tile]))
            ]
            first, held = tile + 1, 0
        else:
            held += nbytes
    if held:
        result.append((slice(first, len(tiles)), slice(0, len(runs))))
    return result


def _cut_runs(tokens: npt.NDArray[np.int64], each: int) -> list[slice]:
    """Slices of runs with ``each`` tokens or a little less, and at least one run."""
    cuts, first, before = [], 0, 0
    while first < len(tokens):
        last = int(np.searchsorted(tokens, before + each, side="right"))
        last = max(last, first + 1)
        cuts.append(slice(first, last))
        first, before = last, int(tokens[last - 1])
    return cuts


def count_pieces(tiles: Tiles, runs: Runs) -> int:
    """Contiguous copies that ``tiles`` × ``runs`` make after merging."""
    nothing = np.empty((0, 5), dtype=np.int64)
    return kernels.list_pieces(
        as_table(tiles, TILE_DTYPE),
        as_table(runs, RUN_DTYPE),
        np.empty((3, 3), dtype=np.int64),
        nothing,
    )


def expand(tiles: Tiles, runs: Runs) -> npt.NDArray[np.void]:
    """The single contiguous copies, after merging, as rows of :data:`PIECE_DTYPE`.

    Offsets are bytes from the start of the region.
    """
    out = np.empty((count_pieces(tiles, runs), 5), dtype=np.int64)
    kernels.list_pieces(
        as_table(tiles, TILE_DTYPE),
        as_table(runs, RUN_DTYPE),
        np.empty((3, 3), dtype=np.int64),
        out,
    )
    return out.view(PIECE_DTYPE).reshape(-1)


def warm() -> None:
    """Compiles the kernels, or loads them from disk, so that the first transfer does not wait.

    Seconds at the very first call on a machine, milliseconds later.
    """
    source, target = np.arange(4, dtype=np.uint8), np.zeros(4, dtype=np.uint8)
    tiles = np.array([(0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 4, 1)], dtype=TILE_DTYPE)
    runs = np.array([(0, 0, 0, 0, 1, 1, 1)], dtype=RUN_DTYPE)
    copy_tiles([source.ctypes.data], [target.ctypes.data], tiles, runs)
    expand(tiles, runs)
    assert bytes(source) == bytes(target)


def as_table(rows: npt.NDArray[np.void], dtype: np.dtype[np.void]) -> Int64s:
    """Structured rows as a writable int64 table: the one form the kernels are compiled for."""
    if rows.dtype != dtype:
        raise ValueError(f"expected rows of {dtype}, got {rows.dtype}")
    rows = np.require(rows, requirements=["C", "W"])
    table: Int64s = rows.view(np.int64).reshape(len(rows), len(dtype.names or ()))
    return table


def _addresses(addresses: Sequence[int] | Int64s) -> Int64s:
    return np.array(addresses, dtype=np.int64)
