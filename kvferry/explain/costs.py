"""What a transfer between two engines costs, in plain numbers, before anything moves."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.layouts.tiles import Tiles
from kvferry.topology.group import GroupGeometry
from kvferry.topology.pairing import pair_groups
from kvferry.topology.plan import BoundCopies, TransferPlan, plan_transfer
from kvferry.topology.tensors import RankMemory
from kvferry.topology.typical import (
    count_copies,
    dense_memory_of,
    mean_segment_bytes,
    mean_source_bytes,
    typical_copies,
)

Groups: TypeAlias = GroupGeometry | Sequence[GroupGeometry]
"""An engine's one group, or its groups."""

Memories: TypeAlias = Sequence[Sequence[RankMemory]]
"""Rank → group → the rank's memory of that group."""


@dataclass(frozen=True, slots=True)
class PairCost:
    """What one target rank reads from one source rank for one request, in all groups."""

    target_rank: int
    source_rank: int
    layers: tuple[int, ...]
    """The model's layers, ascending."""
    heads: tuple[int, ...]
    """The model's KV heads, ascending; with replicas not each of them in each layer. None for
    recurrent states, which have channels."""
    nbytes: int
    """Bytes of the whole request."""
    rows: int
    """Copies if nothing were merged: one per layer, part, token and head, or channel of a state."""
    segments_ordered: int
    """Contiguous copies after merging, if both block tables are in order."""
    segments_shuffled: int
    """The same if both block tables are shuffled."""

    def __add__(self, other: "PairCost") -> "PairCost":
        """Both groups' costs of the same two ranks."""
        return PairCost(
            self.target_rank,
            self.source_rank,
            tuple(sorted({*self.layers, *other.layers})),
            tuple(sorted({*self.heads, *other.heads})),
            self.nbytes + other.nbytes,
            self.rows + other.rows,
            self.segments_ordered + other.segments_ordered,
            self.segments_shuffled + other.segments_shuffled,
        )


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly the bytes of a request are spread over some ranks, or over some links."""

    nbytes: tuple[int, ...]
    """Bytes of each, 0 for those that move nothing."""

    @property
    def peak(self) -> float:
        """The busiest one's bytes in multiples of the mean; 1 is perfect, 0 if nothing moves.

        >>> Balance((30, 10, 0, 0)).peak
        3.0
        """
        total = sum(self.nbytes)
        return max(self.nbytes) * len(self.nbytes) / total if total else 0.0

    @property
    def idle(self) -> tuple[int, ...]:
        """Indices of those that move nothing."""
        return tuple(index for index, nbytes in enumerate(self.nbytes) if not nbytes)


def balance_over(shares: Iterable[tuple[int, int]], world_size: int) -> Balance:
    """What each of an engine's ranks moves, given ranks and bytes of each share."""
    nbytes = [0] * world_size
    for rank, share in shares:
        nbytes[rank] += share
    return Balance(tuple(nbytes))


def explain_transfer(
    *,
    source: Groups,
    target: Groups,
    num_tokens: int,
    target_engine_id: str = "",
    seed: int = 0,
    source_memory: Memories | None = None,
    target_memory: Memories | None = None,
) -> tuple[PairCost, ...]:
    """Who reads what from whom for a request of ``num_tokens``.

    >>> from kvferry.topology import EngineGeometry, ParallelShape
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
        source_memory: where the source's cells lie; in dense tensors if left out.
        target_memory: the same of the target.

    Returns:
        One entry per pair of ranks that move anything, by target rank, then by source rank.

    Raises:
        ValueError: the geometries can never match, or ``num_tokens`` is less than 1.
        ProtocolError, BoundsError: a memory does not fit its geometry.
    """
    costs: dict[tuple[int, int], PairCost] = {}
    for part in read_parts(source, target, num_tokens, target_engine_id):
        for cost in part.costs(source_memory, target_memory, seed):
            ranks = cost.target_rank, cost.source_rank
            costs[ranks] = costs[ranks] + cost if ranks in costs else cost
    return tuple(cost for _, cost in sorted(costs.items()))


@dataclass(frozen=True, slots=True)
class SegmentLength:
    """How long the segments of one pair of groups are."""

    layers: tuple[int, ...]
    """The model's layers, ascending."""
    mean_bytes: float
    """Bytes of a contiguous copy on average, after merging, if both block tables are shuffled: of
    the target rank that has the shortest."""
    source_bytes: float
    """The same of what is contiguous at the source."""
    conversion: tuple[str, str] | None
    """Source dtype and target dtype, where they differ."""


def segment_lengths(
    parts: Iterable["ReadPart"],
    source_memory: Memories | None = None,
    target_memory: Memories | None = None,
) -> tuple[SegmentLength, ...]:
    """The lengths by which the ways of cells are chosen, one entry per pair of groups.

    Args:
        parts: what is read, see :func:`read_parts`.
        source_memory: see :func:`explain_transfer`.
        target_memory: see there.

    Raises:
        ValueError, ProtocolError, BoundsError: see :func:`explain_transfer`.
    """
    found: dict[tuple[int, int], SegmentLength] = {}
    for part in parts:
        if not part.plan.pieces:
            continue
        groups = part.source_group, part.target_group
        layers = {piece.layer for piece in part.plan.pieces}
        tiles, copies = part.tiles(source_memory, target_memory), part.copies(seed=0)
        means = mean_segment_bytes(tiles, copies), mean_source_bytes(tiles, copies)
        if (other := found.get(groups)) is not None:
            layers = layers.union(other.layers)
            means = min(means, (other.mean_bytes, other.source_bytes))
        found[groups] = SegmentLength(tuple(sorted(layers)), *means, part.plan.conversion)
    return tuple(found.values())


def count_segments(parts: Iterable["ReadPart"], seed: int = 0) -> tuple[int, int]:
    """The sums of :func:`explain_transfer` over dense tensors, for less work.

    Args:
        parts: what is read, see :func:`read_parts`.
        seed: of the shuffled block tables.

    Returns:
        Bytes, and contiguous copies after merging if both block tables are shuffled.

    Raises:
        ValueError: see :func:`explain_transfer`.
    """
    nbytes = segments = 0
    for part in parts:
        copies = part.copies(seed)
        nbytes += copies.nbytes
        for rank, tiles in part.tiles(None, None).items():
            segments += count_copies(tiles, copies.runs_of(rank))
    return nbytes, segments


@dataclass(frozen=True, slots=True)
class ReadPart:
    """What one target rank reads for one pair of groups: the tokens from ``first_token`` on."""

    plan: TransferPlan
    source_group: int
    target_group: int
    first_token: int
    num_tokens: int

    def tiles(self, source: Memories | None, target: Memories | None) -> dict[int, Tiles]:
        """The tiles per source rank, in these memories or in dense tensors."""
        plan = self.plan
        givers = {
            rank: dense_memory_of(plan.source, rank, self.num_tokens)
            if source is None
            else source[rank][self.source_group]
            for rank in plan.source_ranks
        }
        taker = (
            dense_memory_of(plan.target, plan.target_rank, self.num_tokens)
            if target is None
            else target[plan.target_rank][self.target_group]
        )
        return plan.lower(givers, taker)

    def copies(self, seed: int | None) -> BoundCopies:
        """See :func:`typical_copies`."""
        return typical_copies(self.plan, self.num_tokens, self.first_token, seed)

    def costs(
        self, source: Memories | None, target: Memories | None, seed: int
    ) -> Iterator[PairCost]:
        """What the target rank reads from each source rank."""
        copies, others = self.copies(None), self.copies(seed)
        for rank, tiles in self.tiles(source, target).items():
            ordered, shuffled = copies.runs_of(rank), others.runs_of(rank)
            if not len(ordered):
                continue  # the two hold other tokens of so short a span
            num_tokens = int(ordered["tokens"].sum())
            given = self.plan.for_source(rank)
            parts = self.plan.target.parts
            rows = sum(len(piece.heads) for piece in given.pieces for p in parts if piece.has(p))
            heads = {h for piece in given.pieces if piece.part is None for h in piece.heads}
            yield PairCost(
                target_rank=self.plan.target_rank,
                source_rank=rank,
                layers=tuple(sorted({piece.layer for piece in given.pieces})),
                heads=tuple(sorted(heads)),
                nbytes=given.bytes_per_token * num_tokens,
                rows=rows * num_tokens,
                segments_ordered=count_copies(tiles, ordered),
                segments_shuffled=count_copies(tiles, shuffled),
            )


def read_parts(
    source: Groups,
    target: Groups,
    num_tokens: int,
    target_engine_id: str = "",
    target_ranks: Sequence[int] | None = None,
) -> Iterator[ReadPart]:
    """Every pair of groups and target rank; none where a window or a chunk keeps no tokens.

    Args:
        source: see :func:`explain_transfer`, like what follows.
        target: see there.
        num_tokens: see there.
        target_engine_id: see there.
        target_ranks: only what these read; all of them if left out.

    Raises:
        ValueError: see :func:`explain_transfer`.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens: {num_tokens} is less than 1")
    sources = (source,) if isinstance(source, GroupGeometry) else source
    targets = (target,) if isinstance(target, GroupGeometry) else target
    if target_ranks is None:
        target_ranks = range(targets[0].world_size)
    for pair in pair_groups(sources, targets):
        first_token = pair.first_kept_token(num_tokens)
        if first_token == num_tokens:
            continue
        for target_rank in target_ranks:
            plan = plan_transfer(
                source=sources[pair.source_group],
                target=targets[pair.target_group],
                target_rank=target_rank,
                target_engine_id=target_engine_id,
                layers=pair.layers,
            )
            yield ReadPart(plan, pair.source_group, pair.target_group, first_token, num_tokens)
