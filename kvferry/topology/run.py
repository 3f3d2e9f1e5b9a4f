"""Running bound copies between tensors of this process."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.layouts.arrays import view_of
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.convert import convert
from kvferry.layouts.postprocess import run_repack
from kvferry.layouts.repack import check_ids
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.topology.binding import BoundCopies, check_block_ids
from kvferry.topology.description import RankMemory
from kvferry.topology.in_place import plan_repack
from kvferry.topology.memory import Regions, memory_of
from kvferry.topology.plan import TransferPlan
from kvferry.topology.strategies import Strategy
from kvferry.topology.whole_blocks import whole_block_copies


def run_copies(
    copies: BoundCopies,
    sources: Mapping[int, Mapping[str, Any]],
    target: Mapping[str, Any],
    *,
    strategy: Strategy | None = None,
) -> int:
    """Copies a request's cells between tensors in host memory; changes nothing else.

    In place, what no token of the request covers in the last frame of blocks changes as well.

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
        strategy: how; by default in one pass, or through staging where the dtype is converted.

    Returns:
        The number of contiguous copies after merging; of the first pass, where there are two.

    Raises:
        ValueError: a rank or tensor is missing, or has another shape or dtype than its geometry
            says, or a target tensor is read-only; or the strategy cannot serve the request.
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
    memories, regions = {}, {}
    for rank in plan.source_ranks:
        memories[rank], regions[rank] = memory_of(plan.source, rank, sources[rank], partial=True)
    target_memory, target_regions = memory_of(plan.target, plan.target_rank, target, partial=True)
    check_block_ids(
        copies,
        {rank: memory.num_blocks for rank, memory in memories.items()},
        target_memory.num_blocks,
    )
    job = _Job(copies, memories, regions, target_memory, target_regions)
    if strategy is None:
        strategy = Strategy.STRIDED if plan.conversion is None else Strategy.STAGED
    if strategy is Strategy.STAGED:
        return _through_staging(job)
    if plan.conversion is not None:
        one, two = plan.conversion
        raise ValueError(
            f"strategy: {strategy} cannot make {two} of {one}; write {Strategy.STAGED} instead"
        )
    if strategy is Strategy.IN_PLACE:
        return _in_place(job)
    return _in_pieces(job) if strategy is Strategy.DIRECT else _in_one_pass(job)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Bound copies and where everything lies."""

    copies: BoundCopies
    memories: Mapping[int, RankMemory]
    regions: Mapping[int, Regions]
    target_memory: RankMemory
    target_regions: Regions

    @property
    def plan(self) -> TransferPlan:
        return self.copies.plan

    def tiles(self) -> Iterator[tuple[int, Tiles, Runs]]:
        """Source rank, and what it gives, checked."""
        for rank, tiles in self.plan.lower(self.memories, self.target_memory).items():
            runs = self.copies.runs_of(rank)
            self.check(rank, tiles, runs)
            yield rank, tiles, runs

    def check(self, rank: int, tiles: Tiles, runs: Runs) -> None:
        """Raises ``BoundsError`` where tiles × runs leave the memory."""
        check_bounds(tiles, runs, self.memories[rank].region_bytes, self.target_memory.region_bytes)

    def copy(self, rank: int, tiles: Tiles, runs: Runs) -> int:
        """From a source rank into the target, in one pass."""
        from kvferry.layouts.copier import copy_tiles

        return copy_tiles(
            addresses_of(self.regions[rank]), addresses_of(self.target_regions), tiles, runs
        )


def _in_one_pass(job: _Job) -> int:
    return sum(job.copy(*given) for given in job.tiles())


def _in_pieces(job: _Job) -> int:
    from kvferry.layouts.copier import expand

    segments = 0
    for rank, tiles, runs in job.tiles():
        for row in expand(tiles, runs).tolist():
            source_region, source, target_region, target, nbytes = row
            job.target_regions[target_region][target : target + nbytes] = job.regions[rank][
                source_region
            ][source : source + nbytes]
            segments += 1
    return segments


def _through_staging(job: _Job) -> int:
    from kvferry.layouts.copier import copy_tiles
    from kvferry.layouts.staging import stage

    plan, segments = job.plan, 0
    itemsize = plan.target.itemsize if plan.conversion is not None else None
    for rank, tiles in plan.lower(job.memories, job.target_memory).items():
        for chunk in stage(tiles, job.copies.runs_of(rank), target_itemsize=itemsize):
            pack, unpack = (
                (chunk.pack_tiles, chunk.pack_runs),
                (chunk.unpack_tiles, chunk.unpack_runs),
            )
            packed = unpacked = np.empty(chunk.nbytes, dtype=np.uint8)
            check_bounds(*pack, job.memories[rank].region_bytes, (chunk.nbytes,))
            check_bounds(*unpack, (chunk.unpack_nbytes,), job.target_memory.region_bytes)
            segments += copy_tiles(addresses_of(job.regions[rank]), addresses_of((packed,)), *pack)
            if plan.conversion is not None:
                source_dtype, target_dtype = plan.conversion
                unpacked = np.empty(chunk.unpack_nbytes, dtype=np.uint8)
                convert(packed, source_dtype, unpacked, target_dtype)
            copy_tiles(addresses_of((unpacked,)), addresses_of(job.target_regions), *unpack)
    return segments


def _in_place(job: _Job) -> int:
    whole = whole_block_copies(job.plan, job.memories, job.target_memory)
    blocks = whole.bind(job.copies)
    repack = plan_repack(job.plan, job.target_memory)
    num_blocks = job.target_memory.num_blocks
    check_ids(repack, blocks.target_blocks, num_blocks)  # the last frame ends beyond the request
    segments = 0
    for rank, tiles in whole.tiles.items():
        job.check(rank, tiles, blocks.runs[rank])
        segments += job.copy(rank, tiles, blocks.runs[rank])
    run_repack(repack, job.target_regions, blocks.target_blocks, num_blocks)
    return segments


def addresses_of(regions: Regions) -> list[int]:
    """The address of each region in this process."""
    return [int(region.ctypes.data) for region in regions]
