"""Finds copies that leave their memory, as a Numba kernel; see :mod:`kvferry.layouts.bounds`."""

from typing import Any

from kvferry.layouts.compiled import kernel
from kvferry.layouts.tiles import ADDRESS_LIMIT

#: Kinds of problems that :func:`find_problem` finds.
FINE, BAD_RUN, BAD_EXTENT, TOO_FAR, NO_REGION, OUTSIDE, TOO_MANY = range(7)

MOST_LOOKS = 64
"""Number of tiles for which every run is checked separately. Such a tile has a combination of its
highest block and highest token that lies outside, although perhaps no run has this combination."""


@kernel
def find_problem(
    tiles: Any,
    runs: Any,
    source_bytes: Any,
    target_bytes: Any,
    has_source: bool,
    has_target: bool,
) -> tuple[bool, int, int, int, int]:
    """The first row that must be refused; takes about a microsecond if there is none.

    Args:
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        source_bytes: int64, number of bytes of each region of the source.
        target_bytes: int64, number of bytes of each region of the target.
        has_source: whether to check addresses of the source; otherwise only extents.
        has_target: whether to check addresses of the target; otherwise only extents.

    Returns:
        Whether the problem is on the source's side; kind of the problem and number of its row; for
            :data:`OUTSIDE` and :data:`TOO_MANY`, the first byte and the byte after the last.
    """
    kind, row, low, high = _find_on_side(tiles, runs, source_bytes, True, has_source)
    if kind != FINE:
        return True, kind, row, low, high
    kind, row, low, high = _find_on_side(tiles, runs, target_bytes, False, has_target)
    return False, kind, row, low, high


@kernel
def _find_on_side(
    tiles: Any, runs: Any, region_bytes: Any, source: bool, has_sizes: bool
) -> tuple[int, int, int, int]:
    """The first problem on one side, as :func:`find_problem` returns it, without the side."""
    for r in range(len(runs)):
        block, token, step = _run_side(runs[r], source)
        if runs[r].tokens < 1 or step < 1 or (has_sizes and (block < 0 or token < 0)):
            return BAD_RUN, r, 0, 0
    for t in range(len(tiles)):
        if tiles[t].heads < 1 or tiles[t].elements < 1 or tiles[t].itemsize < 1:
            return BAD_EXTENT, t, 0, 0
    if len(runs) == 0 or not has_sizes:
        return FINE, 0, 0, 0
    return _find_outside(tiles, runs, region_bytes, source)


@kernel
def _find_outside(
    tiles: Any, runs: Any, region_bytes: Any, source: bool
) -> tuple[int, int, int, int]:
    """The first problem with an address on one side.

    The time is linear in tiles plus runs, whatever a peer wrote. If all blocks and tokens between
    the lowest and the highest lie inside, then all runs lie inside. Only otherwise is each run
    checked by itself, for at most :data:`MOST_LOOKS` tiles.
    """
    first_block, last_block, first_token, last_token = _reach(runs, source)
    looks = 0
    for t in range(len(tiles)):
        tile = tiles[t]
        region, offset, block_stride, token_stride, head_stride, element_stride = _tile_side(
            tile, source
        )
        reach = abs(float(offset)) + abs(float(block_stride)) * float(last_block)
        reach += abs(float(token_stride)) * float(last_token) + float(tile.itemsize)
        reach += abs(float(head_stride)) * (tile.heads - 1.0)
        reach += abs(float(element_stride)) * (tile.elements - 1.0)
        if reach >= ADDRESS_LIMIT:
            return TOO_FAR, t, 0, 0
        if region < 0 or region >= len(region_bytes):
            return NO_REGION, t, 0, 0
        heads, elements = head_stride * (tile.heads - 1), element_stride * (tile.elements - 1)
        before = offset + min(heads, 0) + min(elements, 0)
        behind = offset + max(heads, 0) + max(elements, 0) + tile.itemsize
        blocks = block_stride * first_block, block_stride * last_block
        tokens = token_stride * first_token, token_stride * last_token
        low = before + min(blocks[0], blocks[1]) + min(tokens[0], tokens[1])
        high = behind + max(blocks[0], blocks[1]) + max(tokens[0], tokens[1])
        if low >= 0 and high <= region_bytes[region]:
            continue
        if looks == MOST_LOOKS:
            return TOO_MANY, t, low, high
        looks += 1
        nearest, farthest = _span(runs, block_stride, token_stride, source)
        if before + nearest < 0 or behind + farthest > region_bytes[region]:
            return OUTSIDE, t, before + nearest, behind + farthest
    return FINE, 0, 0, 0


@kernel
def _reach(runs: Any, source: bool) -> tuple[int, int, int, int]:
    """Lowest and highest block and token of all runs, exact below :data:`ADDRESS_LIMIT`; a higher
    token counts as that limit.
    """
    first_block, first_token, _ = _run_side(runs[0], source)
    last_block, last_token = first_block, first_token
    for r in range(len(runs)):
        block, token, step = _run_side(runs[r], source)
        first_block, last_block = min(first_block, block), max(last_block, block)
        end = int(ADDRESS_LIMIT)
        if float(token) + (runs[r].tokens - 1.0) * step < ADDRESS_LIMIT:  # so integers do not wrap
            end = token + (runs[r].tokens - 1) * step
        first_token, last_token = min(first_token, token), max(last_token, end)
    return first_block, last_block, first_token, last_token


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
