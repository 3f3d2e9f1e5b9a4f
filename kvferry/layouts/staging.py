"""Dense staging for wires: pack on the source, unpack on the target, both with the same copier.

A wire needs long dense messages, not strided boxes. :func:`stage` cuts tiles × runs into chunks.
Each chunk has two halves that meet in a dense linear buffer of ``nbytes`` bytes::

    source regions ── pack_tiles × pack_runs ──▶ buffer ── unpack_tiles × unpack_runs ──▶ target

On the pack side the buffer is target region 0, on the unpack side source region 0. If both sides of
a wire call :func:`stage` with the same arguments, both get the same chunks; nothing is random.

If the target's elements have another size, the unpack half uses the target's sizes. Between the two
halves, the buffer is then converted, element by element, into a buffer of ``unpack_nbytes`` bytes,
see :func:`kvferry.layouts.convert.convert`.

Region map of a buffer, outermost first: tile, run of the chunk, then the three dims of a box in the
order of the dims in the *source*. So a whole HND block stays a single segment when packed, and a
layout change costs only the unpacking side. Runs of different lengths never share a chunk, because
a dense box has one token count.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.layouts.chunks import chunk_slices, cut_chunks
from kvferry.layouts.compiled import kernel
from kvferry.layouts.tiles import Runs, Tiles, copy_rows

WIRE_CHUNK_BYTES = 4 << 20
"""Default number of bytes per chunk: one wire message."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """A chunk of a staged transfer; see the picture above."""

    nbytes: int
    """Number of bytes of the dense buffer; packing writes every byte."""
    unpack_nbytes: int
    """Number of bytes of the buffer to unpack; other than ``nbytes`` only if elements are
    converted."""
    pack_tiles: Tiles
    pack_runs: Runs
    unpack_tiles: Tiles
    unpack_runs: Runs


def stage(
    tiles: Tiles,
    runs: Runs,
    chunk_bytes: int = WIRE_CHUNK_BYTES,
    *,
    target_itemsize: int | None = None,
) -> tuple[StagedChunk, ...]:
    """Cuts a transfer into chunks that go through a dense buffer.

    Args:
        tiles: a 1-d array of ``TILE_DTYPE``, source and target side as for a direct copy; with a
            ``target_itemsize``, ``itemsize`` belongs to the source, and target strides belong to
            the target.
        runs: a 1-d array of ``RUN_DTYPE``.
        chunk_bytes: approximate number of bytes of a buffer; one run of one tile is never cut, so a
            larger run makes a larger chunk.
        target_itemsize: bytes per element in the target, if elements are converted on the way.

    Raises:
        ValueError: ``chunk_bytes`` is less than 1.
    """
    chunks: list[StagedChunk] = []
    # The most common length first, usually the whole block: large messages lead.
    lengths, counts = np.unique(runs["tokens"], return_counts=True)
    for tokens in lengths[np.argsort(-counts, kind="stable")]:
        same = runs[runs["tokens"] == tokens]
        pack = _Half(tiles, same, "target", None)
        unpack = _Half(tiles, same, "source", target_itemsize)
        for cut in chunk_slices(cut_chunks(tiles, same, chunk_bytes)):
            sizes = pack.nbytes(*cut), unpack.nbytes(*cut)
            chunks.append(StagedChunk(*sizes, *pack.tables(*cut), *unpack.tables(*cut)))
    return tuple(chunks)


class _Half:
    """One half of all chunks of runs of the same length: strides and places computed once."""

    def __init__(self, tiles: Tiles, runs: Runs, dense: str, itemsize: int | None) -> None:
        """Args:
        tiles: as of :func:`stage`.
        runs: runs of the same length, at least one.
        dense: side of the buffer, ``source`` or ``target``.
        itemsize: bytes per element in the buffer, if not the tiles' own.
        """
        self._dense = dense
        self._tiles = dense_tiles(tiles, int(runs["tokens"][0]), dense, itemsize)
        self._runs = dense_runs(runs, dense)
        box_bytes = self._tiles[f"{dense}_block_stride"]
        self._starts: list[int] = [0, *np.cumsum(box_bytes).tolist()]
        """Place of each tile, and the end of the last tile, in a buffer of one run of all tiles."""

    def nbytes(self, tiles: slice, runs: slice) -> int:
        """Number of bytes of the buffer of some tiles times some runs."""
        of_a_run = self._starts[tiles.stop] - self._starts[tiles.start]
        nbytes: int = of_a_run * (runs.stop - runs.start)
        return nbytes

    def tables(self, tiles: slice, runs: slice) -> tuple[Tiles, Runs]:
        """Tables of some tiles times some runs, with a buffer of their own."""
        part, part_runs = copy_rows(self._tiles[tiles]), copy_rows(self._runs[runs])
        offsets = part[f"{self._dense}_offset"]
        offsets -= self._starts[tiles.start]
        offsets *= runs.stop - runs.start
        part_runs[f"{self._dense}_block"] -= runs.start
        return part, part_runs


def dense_tiles(tiles: Tiles, tokens: int, dense: str, itemsize: int | None = None) -> Tiles:
    """The tiles, with a buffer of one run of ``tokens`` tokens in the place of one side's regions.

    Args:
        tiles: a 1-d array of ``TILE_DTYPE``.
        tokens: number of tokens of the run.
        dense: side of the buffer, ``source`` or ``target``.
        itemsize: bytes per element in the buffer, if not the tiles' own.
    """
    table = copy_rows(tiles)
    if itemsize is not None:
        table["itemsize"] = itemsize
    strides = np.empty((4, len(tiles)), dtype=np.int64)
    _dense_strides(table, tokens, strides)
    box_bytes = strides[3]
    table[f"{dense}_region"] = 0
    table[f"{dense}_offset"] = np.cumsum(box_bytes) - box_bytes
    table[f"{dense}_block_stride"] = box_bytes
    for dim, name in enumerate(("element_stride", "head_stride", "token_stride")):
        table[f"{dense}_{name}"] = strides[dim]
    return table


def dense_runs(runs: Runs, dense: str) -> Runs:
    """The runs, with a buffer in the place of one side's blocks: a block per run, in order."""
    table = copy_rows(runs)
    table[f"{dense}_block"] = np.arange(len(runs))
    table[f"{dense}_token"] = 0
    table[f"{dense}_step"] = 1
    return table


@kernel
def _dense_strides(tiles: Any, tokens: int, out: Any) -> None:
    """Writes a column per tile: strides of element, head and token in a dense box, and box bytes.

    The dims of a box are in the source's order, innermost first.
    """
    for t in range(len(tiles)):
        tile = tiles[t]
        extents = tile.elements, tile.heads, tokens
        reach = (
            abs(tile.source_element_stride),
            abs(tile.source_head_stride),
            abs(tile.source_token_stride),
        )
        out[:, t] = tile.itemsize
        for dim in range(3):
            out[3, t] *= extents[dim]
            for inner in range(3):
                if (reach[inner], inner) < (reach[dim], dim):
                    out[dim, t] *= extents[inner]
