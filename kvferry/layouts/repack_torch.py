"""Repacks with torch's own operations: on any device, in three passes, unit by unit.

The plain form, for devices without Triton and for tests of the faster ones.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.layouts.repack import Repack

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bits are moved, so that a dtype that an operation lacks is no matter."""


def repack_with_torch(
    repack: Repack,
    regions: Sequence[torch.Tensor],
    block_ids: npt.NDArray[np.int64],
    num_blocks: int,
) -> None:
    """Repacks blocks in place; on a device, on the current stream.

    Args:
        repack: what to do.
        regions: tensors that begin where the regions begin, all on one device.
        block_ids: as :func:`~kvferry.layouts.repack.check_ids` gives them.
        num_blocks: blocks of the cache.
    """
    if not (len(block_ids) and repack.units):
        return
    device = regions[0].device
    ids = torch.from_numpy(block_ids).to(device)
    frames = len(block_ids) // repack.frame_blocks
    held = repack.frame_tokens // repack.held_block_size
    _, runs = repack.bind(np.arange(repack.frame_blocks))
    for unit in range(repack.units):
        gather, scatter = repack.unit_tiles(unit)
        dense = torch.empty(
            int(gather["target_block_stride"][0]) * len(ids), dtype=torch.uint8, device=device
        )
        for tile in gather:
            count, extents = len(ids), (repack.block_size, *_extents(tile))
            cache = _box(regions[tile["source_region"]], tile, "source", (num_blocks, *extents))
            _box(dense, tile, "target", (count, *extents)).copy_(cache.index_select(0, ids))
        for tile in scatter:
            for run in runs:
                extents = (int(run["tokens"]), *_extents(tile))
                filled = _box(dense, tile, "source", (frames * held, *extents), run)
                cache = _box(
                    regions[tile["target_region"]], tile, "target", (num_blocks, *extents), run
                )
                into = ids[int(run["target_block"]) :: repack.frame_blocks]
                cache.index_copy_(0, into, filled[int(run["source_block"]) :: held])


def _extents(tile: np.void) -> tuple[int, int]:
    return int(tile["heads"]), int(tile["elements"])


def _box(
    region: torch.Tensor,
    tile: np.void,
    side: str,
    shape: tuple[int, ...],
    run: np.void | None = None,
) -> torch.Tensor:
    """One side of a tile as a strided view ``[blocks, tokens, heads, elements]`` of words."""
    itemsize = int(tile["itemsize"])
    words = torch.empty(0, dtype=WORDS[itemsize], device=region.device)
    storage = region.untyped_storage()
    strides = {
        dim: int(tile[f"{side}_{dim}_stride"]) for dim in ("block", "token", "head", "element")
    }
    offset = region.data_ptr() - storage.data_ptr() + int(tile[f"{side}_offset"])
    if run is not None:
        offset += int(run[f"{side}_token"]) * strides["token"]
    return words.set_(
        storage, offset // itemsize, shape, [stride // itemsize for stride in strides.values()]
    )
