"""Whether copies stay inside the memory they speak of, whoever wrote their numbers.

A kernel says yes in about a microsecond. Where it does not, NumPy looks again, for the row and the
numbers that the error names.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import BoundsError
from kvferry.layouts.tiles import ADDRESS_LIMIT, RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows

Int64s = npt.NDArray[np.int64]


def check_bounds(
    tiles: Tiles,
    runs: Runs,
    source_region_bytes: Sequence[int] | Int64s | None,
    target_region_bytes: Sequence[int] | Int64s | None,
) -> None:
    """Checks every byte that ``tiles`` × ``runs`` read and write. Changes nothing.

    Args:
        tiles: a 1-d array of ``TILE_DTYPE``.
        runs: a 1-d array of ``RUN_DTYPE``.
        source_region_bytes: size of each source region in bytes; ``None`` leaves the source
            side unchecked (its owner checks it).
        target_region_bytes: the same for the target side.

    Raises:
        BoundsError: an extent below 1, an unknown region, or an address outside its region; the
            message names the row, the region and both values.
    """
    if tiles.dtype != TILE_DTYPE or runs.dtype != RUN_DTYPE or tiles.ndim != 1 or runs.ndim != 1:
        raise BoundsError(
            f"tiles and runs are tables of TILE_DTYPE and RUN_DTYPE, got {tiles.dtype} with "
            f"{tiles.ndim} dims and {runs.dtype} with {runs.ndim} dims"
        )
    from kvferry.layouts.bounds_kernels import is_inside  # compiles; planning alone need not

    sides = ((True, source_region_bytes), (False, target_region_bytes))
    sizes = [(source, np.array(s, dtype=np.int64)) for source, s in sides if s is not None]
    rows = as_rows(tiles, TILE_DTYPE), as_rows(runs, RUN_DTYPE)
    if sizes and all(is_inside(*rows, region_bytes, source) for source, region_bytes in sizes):
        return
    for table, name, fields in (
        (tiles, "tile", ("heads", "elements", "itemsize")),
        (runs, "run", ("tokens", "source_step", "target_step")),
    ):
        for field in fields:
            _refuse(table[field] < 1, f"{name} {{row}}: {field} is {{value}}", table[field])
    if not (len(tiles) and len(runs)):
        return
    for source, region_bytes in sizes:
        _check_side("source" if source else "target", tiles, runs, region_bytes)


def _check_side(side: str, tiles: Tiles, runs: Runs, sizes: Int64s) -> None:
    region = tiles[f"{side}_region"]
    _refuse(
        (region < 0) | (region >= len(sizes)),
        f"tile {{row}}: {side} region {{value}} is not one of the {len(sizes)} regions",
        region,
    )
    for field in ("block", "token"):
        values = runs[f"{side}_{field}"]
        _refuse(values < 0, f"run {{row}}: {side}_{field} is {{value}}", values)
    _check_magnitudes(side, tiles, runs)
    low, high = _run_spans(side, tiles, runs)
    low = low + tiles[f"{side}_offset"]
    high = high + tiles[f"{side}_offset"] + tiles["itemsize"]
    for stride, extent in (("head_stride", "heads"), ("element_stride", "elements")):
        reach = tiles[f"{side}_{stride}"] * (tiles[extent] - 1)
        low = low + np.minimum(reach, 0)
        high = high + np.maximum(reach, 0)
    bad = (low < 0) | (high > sizes[region])
    if bad.any():
        row = int(np.argmax(bad))
        raise BoundsError(
            f"tile {row}: bytes {int(low[row])} to {int(high[row])} of {side} region "
            f"{int(region[row])}, which has {int(sizes[region[row]])} bytes"
        )


def _check_magnitudes(side: str, tiles: Tiles, runs: Runs) -> None:
    """Refuses numbers whose int64 sums could wrap; in floats, which cannot."""

    def largest(values: Any) -> Any:
        return np.abs(values.astype(np.float64))

    tokens = (runs["tokens"] - 1.0) * runs[f"{side}_step"]
    tokens += runs[f"{side}_token"].astype(np.float64)
    reach = (
        largest(tiles[f"{side}_offset"])
        + largest(tiles[f"{side}_block_stride"]) * largest(runs[f"{side}_block"]).max()
        + largest(tiles[f"{side}_token_stride"]) * tokens.max()
        + largest(tiles[f"{side}_head_stride"]) * (tiles["heads"] - 1.0)
        + largest(tiles[f"{side}_element_stride"]) * (tiles["elements"] - 1.0)
        + largest(tiles["itemsize"])
    )
    _refuse(
        reach >= ADDRESS_LIMIT, f"tile {{row}}: {side} addresses reach {{value:.3g}} bytes", reach
    )


def _run_spans(side: str, tiles: Tiles, runs: Runs) -> tuple[Int64s, Int64s]:
    """Lowest and highest first-element offset over all runs, for each tile."""
    block, first = runs[f"{side}_block"], runs[f"{side}_token"]
    last = first + (runs["tokens"] - 1) * runs[f"{side}_step"]
    low = np.empty(len(tiles), dtype=np.int64)
    high = np.empty(len(tiles), dtype=np.int64)
    # Tiles share a handful of strides, so the runs are looked at once per pair of them.
    pairs = np.stack([tiles[f"{side}_block_stride"], tiles[f"{side}_token_stride"]], axis=1)
    different, which = np.unique(pairs, axis=0, return_inverse=True)
    for index, (block_stride, token_stride) in enumerate(different):
        at = np.stack([first, last]) * token_stride + block * block_stride
        low[which.ravel() == index] = at.min()
        high[which.ravel() == index] = at.max()
    return low, high


def _refuse(bad: npt.NDArray[np.bool_], message: str, values: Any) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise BoundsError(message.format(row=row, value=values[row]))
