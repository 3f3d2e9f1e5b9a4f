"""Strided tiles times runs: the form in which copies reach a mover.

A transfer is factored into two tables that multiply. A **tile** says how one box of cells lies in a
source region and in a target region: byte offsets and byte strides, no block ids. A **run** says
which tokens go where. A run has a source block and the first token in that block, a target block
and the first token in that block, the number of tokens, and the step between two tokens on each
side. The step is 1 unless tokens are interleaved over ranks. Every tile is applied to every run, so
a request of 4,096 tokens over 80 layers is a few hundred rows, not a million segments.

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

TILE_DTYPE = np.dtype(
    [(f"source_{field}", np.int64) for field in _SIDE_FIELDS]
    + [(f"target_{field}", np.int64) for field in _SIDE_FIELDS]
    + [("heads", np.int64), ("elements", np.int64), ("itemsize", np.int64)]
)
"""A row per tile, all int64. ``source_region`` indexes the regions of the source rank,
``target_region`` the regions of the reader; offsets and strides are bytes; ``heads`` and
``elements`` are extents; ``itemsize`` is bytes per element and is never split.
"""

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
"""A row per run, all int64: block ids, first token inside each block, number of tokens, and the
steps between two tokens, in tokens, 1 or more. A run stays inside one block on either side.
"""

ADDRESS_LIMIT = float(1 << 62)
"""Bound on the magnitude of the sums that make an address, so that int64 cannot wrap."""

Tiles: TypeAlias = npt.NDArray[np.void]
"""A 1-d array of :data:`TILE_DTYPE`."""

Runs: TypeAlias = npt.NDArray[np.void]
"""A 1-d array of :data:`RUN_DTYPE`."""


def blank_runs(count: int) -> Runs:
    """The given number of blank rows: all zeros, with steps of 1."""
    runs = np.zeros(count, dtype=RUN_DTYPE)
    runs["source_step"] = runs["target_step"] = 1
    return runs


def as_rows(rows: npt.NDArray[np.void], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The given rows, contiguous and writable: the only form for which the kernels are compiled.

    Raises:
        ValueError: rows of another dtype.
    """
    if rows.dtype != dtype:
        raise ValueError(f"expected rows of {dtype}, got {rows.dtype}")
    return rows if rows.flags.carray else rows.copy()


def copy_rows(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """A copy of the given rows. NumPy's own copy goes field by field and takes far longer.

    >>> copy_rows(blank_runs(2))["target_step"]
    array([1, 1])
    """
    copied: npt.NDArray[np.void] = np.ascontiguousarray(rows).view(np.int64).copy().view(rows.dtype)
    return copied


def token_bytes(tiles: Tiles) -> int:
    """Number of bytes of one token in all of ``tiles``."""
    return int((tiles["heads"] * tiles["elements"] * tiles["itemsize"]).sum())


def box_bytes(tiles: Tiles) -> int:
    """Number of bytes of one token in the largest of ``tiles``; 0 without tiles."""
    return int((tiles["heads"] * tiles["elements"] * tiles["itemsize"]).max(initial=0))


def num_bytes(tiles: Tiles, runs: Runs) -> int:
    """Number of bytes that ``tiles`` times ``runs`` move."""
    return token_bytes(tiles) * int(runs["tokens"].sum())
