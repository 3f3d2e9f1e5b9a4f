"""A digest over logical cells, independent of where the cells lie.

Each row of cells (one layer, part, token and head) is hashed with its logical position and the bits
of its elements in element order; the hashes are added modulo 2**64. So sums over ranks, block sizes
and layouts agree if the cells agree, and the order of visiting does not matter.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import Int64s
from kvferry.layouts.compiled import kernel
from kvferry.layouts.intrinsics import load_1, load_2, load_4, load_8
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
SHIFT = np.uint64(29)
LAST_SHIFT = np.uint64(32)


def digest_rows(
    addresses: Int64s,
    tiles: Tiles,
    runs: Runs,
    positions: Int64s,
    keys: Int64s,
) -> npt.NDArray[np.uint64]:
    """Sum modulo 2**64 of the hashes of each token's rows of cells. The caller checks bounds.

    Args:
        addresses: address of each region in this process.
        tiles: rows of ``TILE_DTYPE`` with elements of 1, 2, 4 or 8 bytes; only their source side is
            read.
        runs: rows of ``RUN_DTYPE``; only their source side is read.
        positions: int64[tokens]: position in the request of each token, in the order of the runs.
        keys: int64[tiles, 3]: layer, number of the part, first head; all logical.

    Returns:
        uint64[tokens]: the sum of each token, in the order of the runs.

    Raises:
        ValueError: elements of another size.
    """
    check_widths(tiles)
    sums = np.zeros(int(runs["tokens"].sum()), dtype=np.uint64)
    _digest_table(
        np.array(addresses, dtype=np.int64),
        as_rows(tiles, TILE_DTYPE),
        as_rows(runs, RUN_DTYPE),
        np.array(positions, dtype=np.int64),
        np.array(keys, dtype=np.int64).reshape(len(tiles), 3),
        sums,
    )
    return sums


def check_widths(tiles: Tiles) -> None:
    """Checks that elements have a size that can be hashed.

    Raises:
        ValueError: some elements have another size.
    """
    if not np.isin(tiles["itemsize"], (1, 2, 4, 8)).all():
        raise ValueError(f"itemsize: {set(tiles['itemsize'].tolist())}, not all of 1, 2, 4 and 8")


def warm() -> None:
    """Compiles the kernels, or loads them from disk, so that the first digest does not wait."""
    cell = np.zeros(1, dtype=np.uint8)
    tiles = np.array([(0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1)], dtype=TILE_DTYPE)
    runs = np.array([(0, 0, 0, 0, 1, 1, 1)], dtype=RUN_DTYPE)
    address = np.array([cell.ctypes.data], dtype=np.int64)
    digest_rows(address, tiles, runs, np.zeros(1, dtype=np.int64), np.zeros((1, 3), np.int64))


@kernel
def _mixed(state: Any, value: Any) -> Any:
    state = (state ^ value) * MULTIPLIER
    return state ^ (state >> SHIFT)


@kernel
def _row_hash(seed: Any, address: int, count: int, step: int, width: int) -> Any:
    state = seed
    if width == 1:
        for i in range(count):
            state = _mixed(state, load_1(address + i * step))
    elif width == 2:
        for i in range(count):
            state = _mixed(state, load_2(address + i * step))
    elif width == 4:
        for i in range(count):
            state = _mixed(state, load_4(address + i * step))
    else:
        for i in range(count):
            state = _mixed(state, load_8(address + i * step))
    state = state * MULTIPLIER
    return state ^ (state >> LAST_SHIFT)


@kernel
def _digest_table(
    addresses: Any, tiles: Any, runs: Any, positions: Any, keys: Any, sums: Any
) -> None:
    for t in range(len(tiles)):
        tile = tiles[t]
        base = addresses[tile.source_region] + tile.source_offset
        seed_tile = _mixed(_mixed(np.uint64(1), np.uint64(keys[t, 0])), np.uint64(keys[t, 1]))
        row = 0
        for r in range(len(runs)):
            block = base + runs[r].source_block * tile.source_block_stride
            for i in range(runs[r].tokens):
                token = (
                    block
                    + (runs[r].source_token + i * runs[r].source_step) * tile.source_token_stride
                )
                seed_token = _mixed(seed_tile, np.uint64(positions[row]))
                for h in range(tile.heads):
                    seed = _mixed(seed_token, np.uint64(keys[t, 2] + h))
                    sums[row] += _row_hash(
                        seed,
                        token + h * tile.source_head_stride,
                        tile.elements,
                        tile.source_element_stride,
                        tile.itemsize,
                    )
                row += 1
