"""Running bound copies between tensors of this process."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvferry.layouts.arrays import view_of
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.convert import convert
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.topology.memory import Regions, memory_of
from kvferry.topology.plan import BoundCopies, TransferPlan, check_block_ids
from kvferry.topology.tensors import RankMemory


def run_copies(
    copies: BoundCopies,
    sources: Mapping[int, Mapping[str, Any]],
    target: Mapping[str, Any],
) -> int:
    """Copies a request's cells between tensors in host memory; changes nothing else.

    In one pass, or through staging memory where the dtype is converted.

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
        The number of contiguous copies after merging; of those into staging, where there is some.

    Raises:
        ValueError: a rank or tensor is missing, or has another shape or dtype than its geometry
            says, or a target tensor is read-only.
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
        rank: _Memory(*memory_of(plan.source, rank, sources[rank], partial=True))
        for rank in plan.source_ranks
    }
    taken = _Memory(*memory_of(plan.target, plan.target_rank, target, partial=True))
    memories = {rank: memory.described for rank, memory in given.items()}
    check_block_ids(
        copies,
        {rank: memory.num_blocks for rank, memory in memories.items()},
        taken.described.num_blocks,
    )
    segments = 0
    for rank, tiles in plan.lower(memories, taken.described).items():
        runs = copies.runs_of(rank)
        if plan.conversion is None:
            segments += _copy(given[rank], taken, tiles, runs)
        else:
            segments += _convert(given[rank], taken, tiles, runs, plan)
    return segments


class _Memory(NamedTuple):
    """Where the cells of a rank lie."""

    described: RankMemory
    regions: Regions


def _copy(source: _Memory, target: _Memory, tiles: Tiles, runs: Runs) -> int:
    """Copies in one pass; returns the number of contiguous copies.

    Raises:
        BoundsError: tiles × runs leave a memory.
    """
    from kvferry.layouts.copier import copy_tiles

    check_bounds(tiles, runs, source.described.region_bytes, target.described.region_bytes)
    return copy_tiles(addresses_of(source.regions), addresses_of(target.regions), tiles, runs)


def _convert(source: _Memory, target: _Memory, tiles: Tiles, runs: Runs, plan: TransferPlan) -> int:
    """The same by way of dense chunks, whose dtype is converted.

    Raises:
        BoundsError: tiles × runs leave a memory.
    """
    from kvferry.layouts.copier import copy_tiles
    from kvferry.layouts.staging import stage

    assert plan.conversion is not None
    source_dtype, target_dtype = plan.conversion
    from_, to = addresses_of(source.regions), addresses_of(target.regions)
    segments = 0
    for chunk in stage(tiles, runs, target_itemsize=plan.target.itemsize):
        pack, unpack = (chunk.pack_tiles, chunk.pack_runs), (chunk.unpack_tiles, chunk.unpack_runs)
        packed = np.empty(chunk.nbytes, dtype=np.uint8)
        converted = np.empty(chunk.unpack_nbytes, dtype=np.uint8)
        check_bounds(*pack, source.described.region_bytes, (chunk.nbytes,))
        check_bounds(*unpack, (chunk.unpack_nbytes,), target.described.region_bytes)
        segments += copy_tiles(from_, addresses_of((packed,)), *pack)
        convert(packed, source_dtype, converted, target_dtype)
        copy_tiles(addresses_of((converted,)), to, *unpack)
    return segments


def addresses_of(regions: Regions) -> list[int]:
    """The address of each region in this process."""
    return [int(region.ctypes.data) for region in regions]
