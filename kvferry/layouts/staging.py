"""Dense staging for wires: pack on the source, unpack on the target, both with the one copier.

A wire wants long dense messages, not strided boxes. :func:`stage` cuts tiles × runs into chunks;
each chunk has two halves that meet in a dense linear buffer of ``nbytes`` bytes::

    source regions ── pack_tiles × pack_runs ──▶ buffer ── unpack_tiles × unpack_runs ──▶ target

On the pack side the buffer is target region 0, on the unpack side source region 0. Both sides of a
wire may call :func:`stage` with the same arguments and get the same chunks; nothing is random.

Where the target's elements have another size, the unpack half is in the target's bytes: between the
two, the buffer is converted element by element into one of ``unpack_nbytes`` bytes, see
:func:`kvferry.layouts.convert.convert`.

Region map of a buffer, outermost first: tile, run of the chunk, then the three dims of a box in
the order in which they lie in the *source*. So a whole HND block stays one segment when it is
packed, and a layout change costs only the side that unpacks. Runs of different lengths never share
a chunk, because a dense box has one token count.
"""

from dataclasses import dataclass

import numpy as np

from kvferry.layouts.chunks import chunk_slices, cut_chunks
from kvferry.layouts.copier import Int64s
from kvferry.layouts.tiles import Runs, Tiles

WIRE_CHUNK_BYTES = 4 << 20
"""Bytes per chunk unless the caller says otherwise: one wire message."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """One chunk of a staged transfer; see the picture above."""

    nbytes: int
    """Bytes of the dense buffer, every one of which is written by packing."""
    unpack_nbytes: int
    """Bytes of the dense buffer that is unpacked: others only if elements are converted between."""
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
            ``target_itemsize``, ``itemsize`` is the source's and target strides are the target's.
        runs: a 1-d array of ``RUN_DTYPE``.
        chunk_bytes: about how many bytes a buffer holds; one run of one tile is never cut, so a
            larger one makes a larger chunk.
        target_itemsize: bytes per element in the target, if elements are converted on the way.

    Raises:
        ValueError: ``chunk_bytes`` is less than 1.
    """
    chunks = []
    # The commonest length first, which is the whole block: large messages lead.
    lengths, counts = np.unique(runs["tokens"], return_counts=True)
    for tokens in lengths[np.argsort(-counts, kind="stable")]:
        same = runs[runs["tokens"] == tokens]
        for tile_range, run_range in chunk_slices(cut_chunks(tiles, same, chunk_bytes)):
            chunks.append(_chunk(tiles[tile_range], same[run_range], int(tokens), target_itemsize))
    return tuple(chunks)


def _chunk(tiles: Tiles, runs: Runs, tokens: int, target_itemsize: int | None) -> StagedChunk:
    pack_tiles, unpack_tiles = tiles.copy(), tiles.copy()
    if target_itemsize is not None:
        unpack_tiles["itemsize"] = target_itemsize
    sizes = []
    for table, side in ((pack_tiles, "target"), (unpack_tiles, "source")):
        strides, box_bytes = _dense_strides(tiles, table["itemsize"], tokens)
        section = box_bytes * len(runs)
        offsets = np.cumsum(section) - section
        sizes.append(int(section.sum()))
        table[f"{side}_region"] = 0
        table[f"{side}_offset"] = offsets
        table[f"{side}_block_stride"] = box_bytes
        for dim, name in enumerate(("element_stride", "head_stride", "token_stride")):
            table[f"{side}_{name}"] = strides[:, dim]
    pack_runs, unpack_runs = runs.copy(), runs.copy()
    for table, side in ((pack_runs, "target"), (unpack_runs, "source")):
        table[f"{side}_block"] = np.arange(len(runs))
        table[f"{side}_token"] = 0
        table[f"{side}_step"] = 1
    return StagedChunk(sizes[0], sizes[1], pack_tiles, pack_runs, unpack_tiles, unpack_runs)


def _dense_strides(tiles: Tiles, itemsizes: Int64s, tokens: int) -> tuple[Int64s, Int64s]:
    """Strides of (element, head, token) of dense boxes in the source's order, and box bytes."""
    extents = np.stack(
        [tiles["elements"], tiles["heads"], np.full(len(tiles), tokens, dtype=np.int64)], axis=1
    )
    source = np.stack(
        [tiles[f"source_{dim}_stride"] for dim in ("element", "head", "token")], axis=1
    )
    order = np.argsort(np.abs(source), axis=1, kind="stable")  # innermost first
    ordered = np.take_along_axis(extents, order, axis=1)
    ends = np.cumprod(ordered, axis=1) * itemsizes[:, None]
    strides = np.empty_like(extents)
    np.put_along_axis(strides, order, ends // ordered, axis=1)
    return strides, ends[:, -1]
