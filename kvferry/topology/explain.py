"""What a transfer between two engines costs, in plain numbers, before anything moves."""

from dataclasses import dataclass

import numpy as np

from kvferry.layouts.tiles import Tiles
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.plan import TransferPlan, plan_transfer


@dataclass(frozen=True, slots=True)
class PairCost:
    """What one target rank reads from one source rank for one request."""

    target_rank: int
    source_rank: int
    layers: tuple[int, ...]
    """The model's layers, ascending."""
    heads: tuple[int, ...]
    """The model's KV heads, ascending; with replicas not each of them in each layer."""
    nbytes: int
    """Bytes of the whole request."""
    rows: int
    """Copies if nothing were merged: one per layer, part, token and head."""
    segments_ordered: int
    """Contiguous copies after merging, if both block tables are in order."""
    segments_shuffled: int
    """The same if both block tables are shuffled."""


def explain_transfer(
    *,
    source: EngineGeometry,
    target: EngineGeometry,
    num_tokens: int,
    target_engine_id: str = "",
    seed: int = 0,
) -> tuple[PairCost, ...]:
    """Who reads what from whom for a request of ``num_tokens``, in dense memory.

    >>> from kvferry.topology import ParallelShape
    >>> one = EngineGeometry(num_layers=2, num_kv_heads=2, head_size=4, dtype="float32",
    ...                      block_size=16, layout="NHD", parallel=ParallelShape())
    >>> [cost] = explain_transfer(source=one, target=one, num_tokens=64)
    >>> cost.nbytes, cost.rows, cost.segments_ordered, cost.segments_shuffled
    (8192, 512, 4, 16)

    Args:
        source: the engine that is read from.
        target: the engine that reads.
        num_tokens: tokens of the request.
        target_engine_id: decides the choice among replicas.
        seed: of the shuffled block tables.

    Returns:
        One entry per pair of ranks that move anything, by target rank, then by source rank.

    Raises:
        ValueError: the geometries can never match, or ``num_tokens`` is less than 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens: {num_tokens} is less than 1")
    costs: list[PairCost] = []
    for target_rank in range(target.world_size):
        plan = plan_transfer(
            source=source,
            target=target,
            target_rank=target_rank,
            target_engine_id=target_engine_id,
        )
        costs += _costs(plan, num_tokens, seed)
    return tuple(costs)


def _costs(plan: TransferPlan, num_tokens: int, seed: int) -> list[PairCost]:
    source_blocks = -(-num_tokens // plan.source.block_size)
    target_blocks = -(-num_tokens // plan.target.block_size)
    tiles = plan.lower(
        {rank: plan.source.memory(rank, source_blocks + 1) for rank in plan.source_ranks},
        plan.target.memory(plan.target_rank, target_blocks + 1),
    )
    costs = []
    for rank in plan.source_ranks:
        part = plan.for_source(rank)
        heads = sum(len(piece.heads) for piece in part.pieces)
        costs.append(
            PairCost(
                target_rank=plan.target_rank,
                source_rank=rank,
                layers=tuple(sorted({piece.layer for piece in part.pieces})),
                heads=tuple(sorted({head for piece in part.pieces for head in piece.heads})),
                nbytes=part.bytes_per_token * num_tokens,
                rows=heads * len(plan.target.parts) * num_tokens,
                segments_ordered=_segments(part, tiles[rank], num_tokens, None),
                segments_shuffled=_segments(
                    part, tiles[rank], num_tokens, np.random.default_rng(seed)
                ),
            )
        )
    return costs


def _segments(
    plan: TransferPlan, tiles: Tiles, num_tokens: int, shuffle: np.random.Generator | None
) -> int:
    from kvferry.layouts.copier import count_pieces

    tables = [
        np.arange(1, -(-num_tokens // geometry.block_size) + 1)
        for geometry in (plan.source, plan.target)
    ]
    if shuffle is not None:
        tables = [shuffle.permutation(table) for table in tables]
    return count_pieces(tiles, plan.bind(tables[0], tables[1], num_tokens).runs)
