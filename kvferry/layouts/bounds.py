"""Checks that copies stay inside their memory, even if a peer wrote the numbers."""

from collections.abc import Sequence

import numpy as np

from kvferry.errors import BoundsError
from kvferry.layouts.arrays import Int64s
from kvferry.layouts.tiles import ADDRESS_LIMIT, RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows


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
        source_region_bytes: size of each source region in bytes; ``None`` leaves the source side
            unchecked (its owner checks).
        target_region_bytes: size of each target region in bytes; ``None`` leaves the target side
            unchecked.

    Raises:
        BoundsError: an extent below 1, an unknown region, or an address outside its region; the
            message names the row, the region and both values.
    """
    if tiles.dtype != TILE_DTYPE or runs.dtype != RUN_DTYPE or tiles.ndim != 1 or runs.ndim != 1:
        raise BoundsError(
            f"tiles and runs are tables of TILE_DTYPE and RUN_DTYPE, got {tiles.dtype} with "
            f"{tiles.ndim} dims and {runs.dtype} with {runs.ndim} dims"
        )
    problem = _problem(
        as_rows(tiles, TILE_DTYPE), as_rows(runs, RUN_DTYPE),
        source_region_bytes, target_region_bytes,
    )  # fmt: skip
    if problem:
        raise BoundsError(problem)


def warm_bounds() -> None:
    """Compiles the kernel, or loads it from disk, so that the first copy does not wait."""
    check_bounds(np.empty(0, dtype=TILE_DTYPE), np.empty(0, dtype=RUN_DTYPE), (), ())


def _problem(
    tiles: Tiles,
    runs: Runs,
    source_region_bytes: Sequence[int] | Int64s | None,
    target_region_bytes: Sequence[int] | Int64s | None,
) -> str:
    """The error in the tables; empty if there is none."""
    from kvferry.layouts import bounds_kernels as found  # compiles; planning alone need not

    source_bytes, target_bytes = (
        np.array(() if each is None else each, dtype=np.int64)
        for each in (source_region_bytes, target_region_bytes)
    )
    on_source, kind, row, low, high = found.find_problem(
        tiles, runs, source_bytes, target_bytes,
        source_region_bytes is not None, target_region_bytes is not None,
    )  # fmt: skip
    if kind == found.FINE:
        return ""
    side, region_bytes = ("source", source_bytes) if on_source else ("target", target_bytes)
    if kind == found.BAD_RUN:
        values = _values(runs[row], "tokens", f"{side}_step", f"{side}_block", f"{side}_token")
        return f"run {row}: {values}; tokens and steps are 1 or more, places 0 or more"
    tile = tiles[row]
    if kind == found.BAD_EXTENT:
        values = _values(tile, "heads", "elements", "itemsize")
        return f"tile {row}: {values}; each is 1 or more"
    if kind == found.TOO_FAR:
        return f"tile {row}: {side} addresses reach {ADDRESS_LIMIT:.3g} bytes or more"
    if kind == found.TOO_MANY:
        return (
            f"tile {row}: the highest block and token of the {side} lie outside of its region, and "
            f"so do those of {found.MOST_LOOKS} other tiles; copy fewer of them at a time"
        )
    region = tile[f"{side}_region"]
    if kind == found.NO_REGION:
        return f"tile {row}: {side} region {region} is not one of the {len(region_bytes)} regions"
    return (
        f"tile {row}: bytes {low} to {high} of {side} region {region}, which has "
        f"{region_bytes[region]} bytes"
    )


def _values(row: np.void, *fields: str) -> str:
    return ", ".join(f"{field} is {row[field]}" for field in fields)
