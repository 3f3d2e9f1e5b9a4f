"""The slow truth about tiles × runs: NumPy index arrays, no line shared with the copier."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.layouts.tiles import Runs, Tiles

ByteArray = npt.NDArray[np.uint8]


def copy_slowly(
    tiles: Tiles, runs: Runs, sources: Sequence[ByteArray], targets: Sequence[ByteArray]
) -> None:
    """Copies ``tiles`` × ``runs`` byte by byte, as :mod:`kvferry.layouts.tiles` defines them.

    Args:
        tiles: array of ``TILE_DTYPE``.
        runs: array of ``RUN_DTYPE``.
        sources: ``uint8`` regions of the source, 1-d.
        targets: ``uint8`` regions of the reader, 1-d; changed in place.

    Raises:
        IndexError: an address lies outside its region.
    """
    for tile in tiles:
        for run in runs:
            source = _byte_addresses(tile, run, "source")
            target = _byte_addresses(tile, run, "target")
            targets[tile["target_region"]][target] = sources[tile["source_region"]][source]


def _byte_addresses(tile: np.void, run: np.void, side: str) -> npt.NDArray[np.int64]:
    """Address of every byte, in the order token, head, element, byte."""
    first = (
        int(tile[f"{side}_offset"])
        + int(run[f"{side}_block"]) * int(tile[f"{side}_block_stride"])
        + int(run[f"{side}_token"]) * int(tile[f"{side}_token_stride"])
    )
    step = int(run[f"{side}_step"]) * int(tile[f"{side}_token_stride"])
    token = np.arange(int(run["tokens"])) * step
    head = np.arange(int(tile["heads"])) * int(tile[f"{side}_head_stride"])
    element = np.arange(int(tile["elements"])) * int(tile[f"{side}_element_stride"])
    byte = np.arange(int(tile["itemsize"]))
    addresses = (
        first
        + token[:, None, None, None]
        + head[None, :, None, None]
        + element[None, None, :, None]
        + byte
    ).ravel()
    if addresses.size and addresses.min() < 0:
        raise IndexError(f"{side}: address {addresses.min()} lies before its region")
    return addresses
