"""Finds copies that leave their memory, as a Numba kernel; see :mod:`kvferry.layouts.bounds`."""

from typing import Any

import numpy as np

from kvferry.layouts.kernels import kernel
from kvferry.layouts.tiles import ADDRESS_LIMIT

#: What :func:`find_problem` finds.
FINE, BAD_RUN, BAD_EXTENT, TOO_FAR, NO_REGION, OUTSIDE = range(6)


@kernel
def find_problem(
    tiles: Any, runs: Any, region_bytes: Any, source: bool, has_sizes: bool
) -> tuple[int, int, int, int]:
    """The first row that must be refused, in about a microsecond where there is none.

    Args:
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        region_bytes: int64, of each region of one side.
        source: which side.
        has_sizes: whether addresses are checked, and not the extents alone.

    Returns:
        What is wrong, in which row, and for :data:`OUTSIDE` the first byte and the one after the
        last.
    """
    last_block, last_token = 0.0, 0.0  # in floats, which cannot wrap
    for r in range(len(runs)):
        block, token, step = _run_side(runs[r], source)
        if runs[r].tokens < 1 or step < 1 or (has_sizes and (block < 0 or token < 0)):
            return BAD_RUN, r, 0, 0
        last_block = max(last_block, float(block))
        last_token = max(last_token, float(token) + (runs[r].tokens - 1.0) * step)
    for t in range(len(tiles)):
        if tiles[t].heads < 1 or tiles[t].elements < 1 or tiles[t].itemsize < 1:
            return BAD_EXTENT, t, 0, 0
    if len(runs) == 0 or not has_sizes:
        return FINE, 0, 0, 0
    return _find_outside(tiles, runs, region_bytes, source, last_block, last_token)


@kernel
def _find_outside(
    tiles: Any, runs: Any, region_bytes: Any, source: bool, last_block: float, last_token: float
) -> tuple[int, int, int, int]:
    """The same for addresses; blocks and tokens of runs reach to ``last_block``, ``last_token``."""
    # Tiles share one or two pairs of strides, for keys and for values; the runs are looked at once
    # per pair: rows of (block stride, token stride, lowest, highest).
    spans, known = np.zeros((2, 4), dtype=np.int64), 0
    for t in range(len(tiles)):
        tile = tiles[t]
        region, offset, block_stride, token_stride, head_stride, element_stride = _tile_side(
            tile, source
        )
        reach = abs(float(offset)) + abs(float(block_stride)) * last_block
        reach += abs(float(token_stride)) * last_token + float(tile.itemsize)
        reach += abs(float(head_stride)) * (tile.heads - 1.0)
        reach += abs(float(element_stride)) * (tile.elements - 1.0)
        if reach >= ADDRESS_LIMIT:
            return TOO_FAR, t, 0, 0
        if region < 0 or region >= len(region_bytes):
            return NO_REGION, t, 0, 0
        row = 0
        while row < known and (spans[row, 0] != block_stride or spans[row, 1] != token_stride):
            row += 1
        if row == known:
            known = min(known + 1, 2)
            row = min(row, 1)
            low, high = _span(runs, block_stride, token_stride, source)
            spans[row, 0], spans[row, 1] = block_stride, token_stride
            spans[row, 2], spans[row, 3] = low, high
        heads, elements = head_stride * (tile.heads - 1), element_stride * (tile.elements - 1)
        low = offset + spans[row, 2] + min(heads, 0) + min(elements, 0)
        high = offset + spans[row, 3] + max(heads, 0) + max(elements, 0) + tile.itemsize
        if low < 0 or high > region_bytes[region]:
            return OUTSIDE, t, low, high
    return FINE, 0, 0, 0


@kernel
def _span(runs: Any, block_stride: int, token_stride: int, source: bool) -> tuple[int, int]:
    """Lowest and highest first-element offset over all runs."""
    low, high = 0, 0
    for r in range(len(runs)):
        block, token, step = _run_side(runs[r], source)
        first = block * block_stride + token * token_stride
        last = first + (runs[r].tokens - 1) * step * token_stride
        low = min(first, last) if r == 0 else min(low, first, last)
        high = max(first, last) if r == 0 else max(high, first, last)
    return low, high


@kernel
def _tile_side(tile: Any, source: bool) -> tuple[int, int, int, int, int, int]:
    if source:
        return (
            tile.source_region,
            tile.source_offset,
            tile.source_block_stride,
            tile.source_token_stride,
            tile.source_head_stride,
            tile.source_element_stride,
        )
    return (
        tile.target_region,
        tile.target_offset,
        tile.target_block_stride,
        tile.target_token_stride,
        tile.target_head_stride,
        tile.target_element_stride,
    )


@kernel
def _run_side(run: Any, source: bool) -> tuple[int, int, int]:
    if source:
        return run.source_block, run.source_token, run.source_step
    return run.target_block, run.target_token, run.target_step
