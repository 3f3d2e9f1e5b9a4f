"""Whether copies stay inside the memory they speak of, whoever wrote their numbers."""

from collections.abc import Sequence

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
    from kvferry.layouts import bounds_kernels  # compiles; planning alone need not

    sizes = [
        np.array(() if side is None else side, dtype=np.int64)
        for side in (source_region_bytes, target_region_bytes)
    ]
    kind, row, source, low, high = bounds_kernels.find_problem(
        as_rows(tiles, TILE_DTYPE),
        as_rows(runs, RUN_DTYPE),
        *sizes,
        source_region_bytes is not None,
        target_region_bytes is not None,
    )
    if kind == bounds_kernels.FINE:
        return
    side, region_bytes = ("source", sizes[0]) if source else ("target", sizes[1])
    if kind == bounds_kernels.BAD_RUN:
        text = f"run {row}: {_bad_value(runs[row], side, _RUN_FIELDS)}"
    elif kind == bounds_kernels.BAD_EXTENT:
        text = f"tile {row}: {_bad_value(tiles[row], side, _TILE_FIELDS)}"
    elif kind == bounds_kernels.TOO_FAR:
        text = f"tile {row}: {side} addresses reach {ADDRESS_LIMIT:.3g} bytes or more"
    elif kind == bounds_kernels.NO_REGION:
        text = (
            f"tile {row}: {side} region {tiles[row][f'{side}_region']} is not one of the "
            f"{len(region_bytes)} regions"
        )
    else:
        region = tiles[row][f"{side}_region"]
        text = (
            f"tile {row}: bytes {low} to {high} of {side} region {region}, which has "
            f"{region_bytes[region]} bytes"
        )
    raise BoundsError(text)


#: Fields that are checked in a table by themselves, and the least that each may be.
_TILE_FIELDS = {"heads": 1, "elements": 1, "itemsize": 1}
_RUN_FIELDS = {
    "tokens": 1,
    "source_step": 1,
    "target_step": 1,
    "{side}_block": 0,
    "{side}_token": 0,
}


def _bad_value(row: np.void, side: str, least: dict[str, int]) -> str:
    """The first field of a row that is too small, and its value."""
    for name, value in least.items():
        field = name.format(side=side)
        if row[field] < value:
            return f"{field} is {row[field]}"
    raise AssertionError("the kernel refuses only what is too small")
