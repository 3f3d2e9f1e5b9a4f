"""Strided tiles times runs: the form in which copies reach a mover.

A transfer is factored into two tables that multiply. A **tile** says how one box of cells lies in
a source region and in a target region: byte offsets and byte strides, no block ids. A **run** says
which tokens go where: a source block and a first token in it, a target block and a first token in
it, how many tokens it has, and the step from one to the next on either side (1 unless tokens are
interleaved over ranks). Every tile is applied to every run, so a request of 4,096 tokens
over 80 layers is a few hundred rows, not a million segments.

Byte address of token ``i`` of a run, head ``h``, element ``e``, on either side::

    region address + tile.offset
      + run.block * tile.block_stride + (run.token + i * run.step) * tile.token_stride
      + h * tile.head_stride + e * tile.element_stride

Movers know nothing beyond these numbers.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_SIDE_FIELDS = ("region", "offset", "block_stride", "token_stride", "head_stride", "element_stride")

#: One row per tile, all int64. ``source_region`` indexes the regions of one source rank,
#: ``target_region`` the regions of the reader; offsets and strides are bytes; ``heads`` and
#: ``elements`` are extents; ``itemsize`` is bytes per element and is never split.
TILE_DTYPE = np.dtype(
    [(f"source_{field}", np.int64) for field in _SIDE_FIELDS]
    + [(f"target_{field}", np.int64) for field in _SIDE_FIELDS]
    + [("heads", np.int64), ("elements", np.int64), ("itemsize", np.int64)]
)

#: One row per run, all int64: block ids, first token inside each block, number of tokens, and how
#: far apart they lie, in tokens, 1 or more. A run stays inside one block on either side.
RUN_DTYPE = np.dtype(
    [
        ("source_block", np.int64),
        ("source_token", np.int64),
        ("target_block", np.int64),
        ("target_token", np.int64),
        ("tokens", np.int64),
        ("source_step", np.int64),
        ("target_step", np.int64),
    ]
)

ADDRESS_LIMIT = float(1 << 62)
"""Sums that make an address are less than it in magnitude, so that int64 cannot wrap."""

Tiles: TypeAlias = npt.NDArray[np.void]
"""A 1-d array of :data:`TILE_DTYPE`."""

Runs: TypeAlias = npt.NDArray[np.void]
"""A 1-d array of :data:`RUN_DTYPE`."""


def blank_runs(count: int) -> Runs:
    """Rows to be filled in: all zeros, with steps of 1."""
    runs = np.zeros(count, dtype=RUN_DTYPE)
    runs["source_step"] = runs["target_step"] = 1
    return runs


def as_rows(rows: npt.NDArray[np.void], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The same rows, contiguous and writable: the one form for which the kernels are compiled.

    Raises:
        ValueError: rows of another dtype.
    """
    if rows.dtype != dtype:
        raise ValueError(f"expected rows of {dtype}, got {rows.dtype}")
    return rows if rows.flags.carray else rows.copy()


def num_bytes(tiles: Tiles, runs: Runs) -> int:
    """Bytes that ``tiles`` times ``runs`` move."""
    per_token = int((tiles["heads"] * tiles["elements"] * tiles["itemsize"]).sum())
    return per_token * int(runs["tokens"].sum())
