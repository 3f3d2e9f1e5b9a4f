"""Runs bound copies between tensors of this process."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.layouts.arrays import view_of
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.convert import convert
from kvferry.topology.memory import Regions, memory_of
from kvferry.topology.plan import BoundCopies, check_block_ids

if TYPE_CHECKING:
    from kvferry.layouts.staging import StagedChunk


def run_copies(
    copies: BoundCopies,
    sources: Mapping[int, Mapping[str, Any]],
    target: Mapping[str, Any],
) -> int:
    """Copies a request's cells between tensors in host memory; changes nothing else.

    The copy takes one pass, or goes through staging memory if the dtype is converted.

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
        sources: source rank → tensors of the rank by name; at least the ranks and layers of the
            plan.
        target: tensors of the target rank by name; at least the layers of the plan.

    Returns:
        The number of contiguous copies after merging; if there is staging, of copies into staging.

    Raises:
        ValueError: a rank or tensor is missing, a tensor has another shape or dtype than its
            geometry, or a target tensor is read-only.
        BlockIdError: a block id lies outside a tensor.
    """
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
    given = {
        rank: memory_of(plan.source, rank, sources[rank], partial=True)
        for rank in plan.source_ranks
    }
    memories = {rank: memory for rank, (memory, _) in given.items()}
    taken, taken_regions = memory_of(plan.target, plan.target_rank, target, partial=True)
    check_block_ids(
        copies, {rank: memory.num_blocks for rank, memory in memories.items()}, taken.num_blocks
    )
    from kvferry.layouts.copier import copy_tiles  # compiles; planning alone need not
    from kvferry.layouts.staging import stage

    to = addresses_of(taken_regions)
    segments = 0
    for rank, tiles in plan.lower(memories, taken).items():
        from_, runs = addresses_of(given[rank][1]), copies.runs_of(rank)
        if plan.conversion is None:
            check_bounds(tiles, runs, memories[rank].region_bytes, taken.region_bytes)
            segments += copy_tiles(from_, to, tiles, runs)
            continue
        for chunk in stage(tiles, runs, target_itemsize=plan.target.itemsize):
            check_bounds(
                chunk.pack_tiles, chunk.pack_runs, memories[rank].region_bytes, (chunk.nbytes,)
            )
            check_bounds(
                chunk.unpack_tiles, chunk.unpack_runs, (chunk.unpack_nbytes,), taken.region_bytes
            )
            segments += _convert(from_, to, chunk, *plan.conversion)
    return segments


def _convert(
    source: list[int], target: list[int], chunk: "StagedChunk", source_dtype: str, target_dtype: str
) -> int:
    """Copies a chunk and converts its elements; returns the number of contiguous copies."""
    from kvferry.layouts.copier import copy_tiles

    packed = np.empty(chunk.nbytes, dtype=np.uint8)
    converted = np.empty(chunk.unpack_nbytes, dtype=np.uint8)
    segments = copy_tiles(source, [packed.ctypes.data], chunk.pack_tiles, chunk.pack_runs)
    convert(packed, source_dtype, converted, target_dtype)
    copy_tiles([converted.ctypes.data], target, chunk.unpack_tiles, chunk.unpack_runs)
    return segments


def addresses_of(regions: Regions) -> list[int]:
    """The address of each region in this process."""
    return [int(region.ctypes.data) for region in regions]
