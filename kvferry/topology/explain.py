"""What a transfer between two engines costs, in plain numbers, before anything moves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.layouts.tiles import Tiles
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.groups import pair_groups
from kvferry.topology.plan import TransferPlan, plan_transfer


@dataclass(frozen=True, slots=True)
class PairCost:
    """What one target rank reads from one source rank for one request, in all groups."""

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
    source: EngineGeometry | Sequence[EngineGeometry],
    target: EngineGeometry | Sequence[EngineGeometry],
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
        source: the engine that is read from: its one group or its groups.
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
    sources = (source,) if isinstance(source, EngineGeometry) else source
    targets = (target,) if isinstance(target, EngineGeometry) else target
    costs: dict[tuple[int, int], PairCost] = {}
    for pair in pair_groups(sources, targets):
        for target_rank in range(targets[pair.target_group].world_size):
            plan = plan_transfer(
                source=sources[pair.source_group],
                target=targets[pair.target_group],
                target_rank=target_rank,
                target_engine_id=target_engine_id,
                layers=pair.layers,
            )
            for cost in _costs(plan, pair.first_kept_token(num_tokens), num_tokens, seed):
                ranks = cost.target_rank, cost.source_rank
                costs[ranks] = _sum(costs[ranks], cost) if ranks in costs else cost
    return tuple(cost for _, cost in sorted(costs.items()))


def _costs(plan: TransferPlan, first_token: int, num_tokens: int, seed: int) -> Iterator[PairCost]:
    """The costs of one pair of groups; none where it keeps no tokens."""
    if first_token == num_tokens:
        return
    source_blocks = -(-num_tokens // plan.source.block_size)
    target_blocks = -(-num_tokens // plan.target.block_size)
    tiles = plan.lower(
        {rank: plan.source.memory(rank, source_blocks + 1) for rank in plan.source_ranks},
        plan.target.memory(plan.target_rank, target_blocks + 1),
    )
    span = first_token, num_tokens
    for rank in plan.source_ranks:
        part = plan.for_source(rank)
        heads = sum(len(piece.heads) for piece in part.pieces)
        yield PairCost(
            target_rank=plan.target_rank,
            source_rank=rank,
            layers=tuple(sorted({piece.layer for piece in part.pieces})),
            heads=tuple(sorted({head for piece in part.pieces for head in piece.heads})),
            nbytes=part.bytes_per_token * (num_tokens - first_token),
            rows=heads * len(plan.target.parts) * (num_tokens - first_token),
            segments_ordered=_segments(part, tiles[rank], span, None),
            segments_shuffled=_segments(part, tiles[rank], span, np.random.default_rng(seed)),
        )


def _sum(one: PairCost, two: PairCost) -> PairCost:
    return PairCost(
        target_rank=one.target_rank,
        source_rank=one.source_rank,
        layers=tuple(sorted({*one.layers, *two.layers})),
        heads=tuple(sorted({*one.heads, *two.heads})),
        nbytes=one.nbytes + two.nbytes,
        rows=one.rows + two.rows,
        segments_ordered=one.segments_ordered + two.segments_ordered,
        segments_shuffled=one.segments_shuffled + two.segments_shuffled,
    )


def _segments(
    plan: TransferPlan,
    tiles: Tiles,
    span: tuple[int, int],
    shuffle: np.random.Generator | None,
) -> int:
    from kvferry.layouts.copier import count_pieces

    first_token, num_tokens = span
    tables = [
        np.arange(1, -(-num_tokens // geometry.block_size) + 1)
        for geometry in (plan.source, plan.target)
    ]
    if shuffle is not None:
        tables = [shuffle.permutation(table) for table in tables]
    return count_pieces(tiles, plan.bind(tables[0], tables[1], num_tokens, first_token).runs)
