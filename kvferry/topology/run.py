"""Running bound copies between tensors of this process."""

from collections.abc import Mapping
from typing import Any

from kvferry.layouts.arrays import view_of
from kvferry.layouts.bounds import check_bounds
from kvferry.topology.binding import BoundCopies, check_block_ids
from kvferry.topology.memory import Regions, memory_of


def run_copies(
    copies: BoundCopies,
    sources: Mapping[int, Mapping[str, Any]],
    target: Mapping[str, Any],
) -> int:
    """Copies a request's cells between tensors in host memory; changes nothing else.

    >>> import numpy as np
    >>> from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer
    >>> one = EngineGeometry(num_layers=1, num_kv_heads=1, head_size=1, dtype="int32",
    ...                      block_size=2, layout="NHD", parallel=ParallelShape())
    >>> source = np.arange(12, dtype=np.int32).reshape(one.cache_shape(0, num_blocks=3))
    >>> target = np.zeros_like(source)
    >>> copies = plan_transfer(source=one, target=one).bind([2, 1], [1, 2], num_tokens=3)
    >>> run_copies(copies, sources={0: {"layer.0": source}}, target={"layer.0": target})
    4
    >>> target[0].ravel()
    array([0, 0, 4, 5, 2, 0], dtype=int32)

    Args:
        copies: bound copies.
        sources: source rank → its tensors by name; at least the ranks and layers of the plan.
        target: the target rank's tensors by name; at least the layers of the plan.

    Returns:
        The number of contiguous copies after merging.

    Raises:
        ValueError: a rank or tensor is missing, or has another shape or dtype than its geometry
            says, or a target tensor is read-only.
        BlockIdError: a block id lies outside a tensor.
    """
    from kvferry.layouts.copier import copy_tiles

    plan = copies.plan
    missing = [rank for rank in plan.source_ranks if rank not in sources]
    if missing:
        raise ValueError(
            f"sources: ranks {missing} are missing; the plan reads from {list(plan.source_ranks)}"
        )
    for name, tensor in target.items():
        if not view_of(tensor).writable:
            raise ValueError(f"target: tensor {name!r} is read-only; give a writable one")
    if not plan.pieces:
        return 0
    memories, regions = {}, {}
    for rank in plan.source_ranks:
        memories[rank], regions[rank] = memory_of(plan.source, rank, sources[rank], partial=True)
    target_memory, target_regions = memory_of(plan.target, plan.target_rank, target, partial=True)
    check_block_ids(
        copies,
        {rank: memory.num_blocks for rank, memory in memories.items()},
        target_memory.num_blocks,
    )
    segments = 0
    for rank, tiles in plan.lower(memories, target_memory).items():
        runs = copies.runs_of(rank)
        check_bounds(tiles, runs, memories[rank].region_bytes, target_memory.region_bytes)
        segments += copy_tiles(
            addresses_of(regions[rank]), addresses_of(target_regions), tiles, runs
        )
    return segments


def addresses_of(regions: Regions) -> list[int]:
    """The address of each region in this process."""
    return [int(region.ctypes.data) for region in regions]
