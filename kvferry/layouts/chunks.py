"""Copies in chunks: cut once, then taken by several threads in native code.

A chunk is some neighbouring tiles times some neighbouring runs. Threads take chunks from a shared
counter with a single atomic instruction, inside a kernel that holds no interpreter lock. So a
thread asks for the lock once per turn and not once per chunk. All threads share a single row of
:data:`PROGRESS_DTYPE`, which may be read at any time. A kernel that moves chunks in another way
uses the same loop as :func:`copy_chunks`::

    enter(progress)
    copied = 0
    while copied < nbytes and (number := take(progress, len(chunks))) >= 0:
        ...  # move chunks[number]
        copied += end(progress, chunks[number], segments)
    return leave(progress, len(chunks))
"""

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layouts.compiled import kernel
from kvferry.layouts.intrinsics import atomic_add, atomic_load
from kvferry.layouts.kernels import DIM_DTYPE, copy_table, count_tokens, token_bytes
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows

CHUNK_DTYPE = np.dtype(
    [
        ("first_tile", np.int64),
        ("end_tile", np.int64),
        ("first_run", np.int64),
        ("end_run", np.int64),
        ("nbytes", np.int64),
    ]
)
"""A chunk: its tiles and its runs, each from the first to before the end, and its number of
bytes."""

PROGRESS_DTYPE = np.dtype(
    [
        ("next_chunk", np.int64),
        ("active", np.int64),
        ("cancelled", np.int64),
        ("bytes_done", np.int64),
        ("segments", np.int64),
    ]
)
"""State that the threads of a copy share: number of the next chunk to take; number of threads
inside a kernel of the copy; whether no more chunks may be taken; bytes and segments of complete
chunks."""

Chunks: TypeAlias = npt.NDArray[np.void]
"""A 1-d array of :data:`CHUNK_DTYPE`."""


class ChunkedCopy(ABC):
    """Tiles × runs and their chunks, which several threads may copy together.

    Exactly one call of :meth:`step` takes each chunk. After :meth:`cancel` no chunk is taken. Once
    the copy is terminal, no byte of the copy can land any more.
    """

    def __init__(self, tiles: Tiles, runs: Runs, chunk_bytes: int) -> None:
        """Args:
        tiles: a 1-d array of ``TILE_DTYPE``.
        runs: a 1-d array of ``RUN_DTYPE``.
        chunk_bytes: approximate number of bytes copied between two checks for :meth:`cancel`.

        Raises:
            ValueError: ``chunk_bytes`` is less than 1, or rows of another dtype.
        """
        self._tiles = as_rows(tiles, TILE_DTYPE)
        self._runs = as_rows(runs, RUN_DTYPE)
        self._chunks = cut_chunks(self._tiles, self._runs, chunk_bytes)
        self._progress = np.zeros(1, dtype=PROGRESS_DTYPE)
        self.nbytes = sum(self._chunks["nbytes"].tolist())
        """Number of bytes to copy."""

    @abstractmethod
    def step(self, nbytes: int) -> bool:
        """Copies chunks until this call has copied about ``nbytes`` bytes, at least one chunk.

        Returns early if no chunk is left or the copy is cancelled.

        Returns:
            Whether chunks are left to take.

        Raises:
            KVFerryError: a chunk cannot be copied; some of its bytes may be in place.
        """

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 0 if there is nothing to copy."""
        return len(self._chunks)

    @property
    def bytes_done(self) -> int:
        """Number of bytes of the complete chunks."""
        return int(self._progress["bytes_done"][0])

    @property
    def segments(self) -> int:
        """Number of contiguous copies that the complete chunks made."""
        return int(self._progress["segments"][0])

    def cancel(self) -> None:
        """Lets no further chunk begin. Idempotent."""
        cancel(self._progress)

    @property
    def is_terminal(self) -> bool:
        """Whether no chunk is being copied and no chunk will be."""
        over: bool = is_over(self._progress, len(self._chunks))
        return over


def cut_chunks(tiles: Tiles, runs: Runs, chunk_bytes: int) -> Chunks:
    """Cuts tiles × runs into chunks of about ``chunk_bytes``, tile after tile.

    Together the chunks cover every tile and run exactly once. A single run of a single tile is
    never cut, so a larger run makes a larger chunk.

    Raises:
        ValueError: ``chunk_bytes`` is less than 1, or rows of another dtype.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes: {chunk_bytes} is less than 1")
    tiles, runs = as_rows(tiles, TILE_DTYPE), as_rows(runs, RUN_DTYPE)
    out = np.empty(1, dtype=CHUNK_DTYPE)
    count = list_chunks(tiles, runs, chunk_bytes, out)
    if count > len(out):
        out = np.empty(count, dtype=CHUNK_DTYPE)
        list_chunks(tiles, runs, chunk_bytes, out)
    return out[:count]


def chunk_slices(chunks: Chunks) -> list[tuple[slice, slice]]:
    """The tiles and the runs of each chunk as slices."""
    return [
        (slice(first_tile, end_tile), slice(first_run, end_run))
        for first_tile, end_tile, first_run, end_run, _ in chunks.tolist()
    ]


@kernel
def list_chunks(tiles: Any, runs: Any, chunk_bytes: int, out: Any) -> int:
    """Writes the chunks into ``out``, as many as fit; returns the number of all chunks."""
    count, first, held = 0, 0, 0
    tokens = count_tokens(runs)
    if tokens == 0:
        return 0
    for t in range(len(tiles)):
        per_token = token_bytes(tiles[t : t + 1])
        nbytes = per_token * tokens
        if held and held + nbytes > chunk_bytes:
            count = _put(out, count, first, t, 0, len(runs), held)
            first, held = t, 0
        if nbytes > chunk_bytes:
            count = _cut_runs(runs, t, per_token, chunk_bytes, out, count)
            first = t + 1
        else:
            held += nbytes
    if held:
        count = _put(out, count, first, len(tiles), 0, len(runs), held)
    return count


@kernel
def _cut_runs(runs: Any, t: int, per_token: int, chunk_bytes: int, out: Any, count: int) -> int:
    first, held = 0, 0
    for r in range(len(runs)):
        nbytes = per_token * runs[r].tokens
        if held and held + nbytes > chunk_bytes:
            count = _put(out, count, t, t + 1, first, r, held)
            first, held = r, 0
        held += nbytes
    return _put(out, count, t, t + 1, first, len(runs), held)


@kernel
def _put(
    out: Any, count: int, first_tile: int, end_tile: int, first_run: int, end_run: int, nbytes: int
) -> int:
    if count < len(out):
        row = out[count]
        row.first_tile, row.end_tile = first_tile, end_tile
        row.first_run, row.end_run = first_run, end_run
        row.nbytes = nbytes
    return count + 1


@kernel
def enter(progress: Any) -> None:
    """Counts the calling thread as copying; the thread must call :func:`leave`."""
    atomic_add(progress.active, 1)


@kernel
def take(progress: Any, count: int) -> int:
    """Number of the chunk for the calling thread to copy; -1 if the thread must take no chunk."""
    if atomic_load(progress.cancelled) != 0:
        return -1
    number: int = atomic_add(progress.next_chunk, 1)
    return number if number < count else -1


@kernel
def end(progress: Any, chunk: Any, segments: int) -> int:
    """Counts a copied chunk of the calling thread as complete; returns its number of bytes."""
    atomic_add(progress.segments, segments)
    atomic_add(progress.bytes_done, chunk.nbytes)
    nbytes: int = chunk.nbytes
    return nbytes


@kernel
def leave(progress: Any, count: int) -> bool:
    """Counts the calling thread as no longer copying; returns whether chunks are left to take."""
    atomic_add(progress.active, -1)
    left: bool = atomic_load(progress.cancelled) == 0 and atomic_load(progress.next_chunk) < count
    return left


@kernel
def cancel(progress: Any) -> None:
    """Keeps threads from taking more chunks."""
    atomic_add(progress.cancelled, 1)


@kernel
def is_over(progress: Any, count: int) -> bool:
    """Whether no chunk can be taken and no thread copies a chunk."""
    # In this order: a thread that enters later finds no chunk.
    none_left: bool = (
        atomic_load(progress.cancelled) != 0 or atomic_load(progress.next_chunk) >= count
    )
    return none_left and atomic_load(progress.active) == 0


@kernel
def copy_chunks(
    source_addresses: Any,
    target_addresses: Any,
    tiles: Any,
    runs: Any,
    chunks: Any,
    progress: Any,
    nbytes: int,
    stream: bool,
) -> bool:
    """Copies chunks until about ``nbytes`` bytes are copied; returns whether any chunks are left.

    Args:
        source_addresses: int64, address of each source region.
        target_addresses: int64, address of each target region.
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        chunks: rows of ``CHUNK_DTYPE``.
        progress: the single row of ``PROGRESS_DTYPE`` of this copy.
        nbytes: number of bytes after which no new chunk begins.
        stream: whether stores go around the cache.
    """
    dims = np.empty(3, DIM_DTYPE)
    copied = 0
    enter(progress)
    while copied < nbytes:
        number = take(progress, len(chunks))
        if number < 0:
            break
        chunk = chunks[number]
        segments = copy_table(
            source_addresses,
            target_addresses,
            tiles[chunk.first_tile : chunk.end_tile],
            runs[chunk.first_run : chunk.end_run],
            dims,
            stream,
            0,
        )
        copied += end(progress, chunk, segments)
    return leave(progress, len(chunks))
