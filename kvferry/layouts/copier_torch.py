"""The copier in torch's own operations: tiles × runs between tensors on one device of any kind.

This is the plain form, for devices without Triton and for tests of the faster copiers. The copier
makes an index of every moved word, on either side.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch

from kvferry.layouts.arrays import Int64s
from kvferry.layouts.tiles import Runs, Tiles

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for each word size in bytes: bits are moved, so missing dtypes are no problem."""


def copy_tiles_torch(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], tiles: Tiles, runs: Runs
) -> None:
    """Copies ``tiles`` × ``runs``; on a device, on the current stream. Checks nothing.

    Args:
        sources: tensors that begin where the source regions begin; views of any strides.
        targets: tensors that begin where the target regions begin; views of any strides.
        tiles: a 1-d array of ``TILE_DTYPE``.
        runs: a 1-d array of ``RUN_DTYPE``.
    """
    shapes = runs[["tokens", "source_step", "target_step"]]
    for shape in np.unique(shapes):
        alike = runs[shapes == shape]
        for tile in tiles:
            source, target = sources[tile["source_region"]], targets[tile["target_region"]]
            offsets = _offsets(tile, alike, "source"), _offsets(tile, alike, "target")
            width = gcd(8, int(tile["itemsize"]), _lead(source), _lead(target))
            width = gcd(width, *(int(np.gcd.reduce(each, axis=None)) for each in offsets))
            from_, to = (
                torch.from_numpy(_words(each, int(tile["itemsize"]), width)).to(source.device)
                for each in offsets
            )
            _flat(target, width)[to] = _flat(source, width)[from_]


def _offsets(tile: np.void, runs: Runs, side: str) -> Int64s:
    """``[runs, tokens, heads, elements]``: bytes from the region's start, for runs of one shape."""
    steps = runs[f"{side}_step"][0] * np.arange(runs["tokens"][0])
    first = tile[f"{side}_offset"] + runs[f"{side}_block"] * tile[f"{side}_block_stride"]
    tokens = (runs[f"{side}_token"][:, None] + steps) * tile[f"{side}_token_stride"]
    heads = np.arange(tile["heads"])[:, None] * tile[f"{side}_head_stride"]
    elements = np.arange(tile["elements"]) * tile[f"{side}_element_stride"]
    found: Int64s = first[:, None, None, None] + tokens[:, :, None, None] + heads + elements
    return found


def _words(offsets: Int64s, itemsize: int, width: int) -> Int64s:
    """Indexes of all words of ``width`` bytes in the elements at these offsets."""
    return (offsets[..., None] // width + np.arange(itemsize // width)).ravel()


def _lead(tensor: torch.Tensor) -> int:
    """Number of bytes of a tensor's storage before the tensor."""
    return tensor.data_ptr() - tensor.untyped_storage().data_ptr()


def _flat(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The memory from a tensor's first element to the end of its storage, as words."""
    storage = tensor.untyped_storage()
    words = torch.empty(0, dtype=WORDS[width], device=tensor.device)
    count = (storage.nbytes() - _lead(tensor)) // width
    return words.set_(storage, _lead(tensor) // width, (count,), (1,))
