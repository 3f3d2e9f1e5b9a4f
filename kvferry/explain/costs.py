"""The cost of a transfer between two engines, in plain numbers, before any transfer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.control.tickets import MAX_TICKET_BLOCKS
from kvferry.layouts.tiles import Tiles
from kvferry.topology.group import GroupGeometry
from kvferry.topology.pairing import GroupPair, pair_groups
from kvferry.topology.plan import BoundCopies, TransferPlan, plan_transfer
from kvferry.topology.tensors import RankMemory
from kvferry.topology.typical import (
    count_copies,
    dense_memory_of,
    mean_segment_bytes,
    mean_source_bytes,
    table_blocks,
    typical_copies,
)

Groups: TypeAlias = GroupGeometry | Sequence[GroupGeometry]
"""The single group of an engine, or all groups of an engine."""

Memories: TypeAlias = Sequence[Sequence[RankMemory]]
"""Rank → group → memory of the rank for the group."""


@dataclass(frozen=True, slots=True)
class PairCost:
    """The cost of a request's reads by a target rank from a source rank, over all groups.

    If the dtype changes, contiguous copies are those of
    :func:`~kvferry.topology.typical.count_copies`.
    """

    target_rank: int
    source_rank: int
    layers: tuple[int, ...]
    """Layers of the model, ascending."""
    heads: tuple[int, ...]
    """KV heads of the model, ascending. With replicas, not every head is read in every layer. Empty
    for recurrent states, which have channels instead."""
    nbytes: int
    """Number of bytes for the whole request."""
    rows: int
    """Number of copies without merging: a copy per layer, part, token and head, or channel of a
    state."""
    segments_ordered: int
    """Number of contiguous copies after merging, if both block tables are in order."""
    segments_shuffled: int
    """Number of contiguous copies after merging, if both block tables are shuffled."""

    def __add__(self, other: "PairCost") -> "PairCost":
        """Adds the costs of another group for the same two ranks."""
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
    """Distribution of a request's bytes over ranks or over links."""

    nbytes: tuple[int, ...]
    """Number of bytes of each rank or link; 0 for ranks that move no bytes."""

    @property
    def peak(self) -> float:
        """Bytes of the busiest rank or link, as a multiple of the mean; 0 if no bytes move.

        1 is a perfect balance.

        >>> Balance((30, 10, 0, 0)).peak
        3.0
        """
        total = sum(self.nbytes)
        return max(self.nbytes) * len(self.nbytes) / total if total else 0.0

    @property
    def idle(self) -> tuple[int, ...]:
        """Indices of the ranks or links that move no bytes."""
        return tuple(index for index, nbytes in enumerate(self.nbytes) if not nbytes)


def balance_over(shares: Iterable[tuple[int, int]], world_size: int) -> Balance:
    """The balance over an engine's ranks, from pairs (rank, bytes)."""
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
    source_memory: Memories | None = None,
    target_memory: Memories | None = None,
    convert: bool = False,
) -> tuple[PairCost, ...]:
    """The cost of a request of ``num_tokens`` tokens, for each pair of ranks.

    >>> from kvferry.topology import EngineGeometry, ParallelShape
    >>> one = EngineGeometry(num_layers=2, num_kv_heads=2, head_size=4, dtype="float32",
    ...                      block_size=16, layout="NHD", parallel=ParallelShape())
    >>> [cost] = explain_transfer(source=one, target=one, num_tokens=64)
    >>> cost.nbytes, cost.rows, cost.segments_ordered, cost.segments_shuffled
    (8192, 512, 4, 16)

    Args:
        source: the source engine: a single group or all groups.
        target: the target engine, which reads from the source.
        num_tokens: number of tokens of the request.
        target_engine_id: engine id that determines the choice among replicas.
        source_memory: the source's memory; by default, dense tensors.
        target_memory: the target's memory; by default, dense tensors.
        convert: see :func:`~kvferry.topology.plan.plan_transfer`.

    Returns:
        An entry per pair of ranks with any transfer, by target rank, then by source rank.

    Raises:
        ValueError: the geometries can never match, or ``num_tokens`` is less than 1, or needs more
            blocks than a ticket names.
        ProtocolError, BoundsError: a memory does not fit its geometry.
    """
    costs: dict[tuple[int, int], PairCost] = {}
    for part in read_parts(source, target, num_tokens, target_engine_id, convert=convert):
        for cost in part.costs(source_memory, target_memory):
            ranks = cost.target_rank, cost.source_rank
            costs[ranks] = costs[ranks] + cost if ranks in costs else cost
    return tuple(cost for _, cost in sorted(costs.items()))


@dataclass(frozen=True, slots=True)
class SegmentLength:
    """Mean lengths of the segments between a pair of groups."""

    layers: tuple[int, ...]
    """Layers of the model, ascending."""
    mean_bytes: float
    """Mean number of bytes of a contiguous copy after merging, if both block tables are shuffled.
    The value is of the target rank with the shortest copies."""
    source_bytes: float
    """Mean number of bytes of a contiguous range at the source, in the same case."""
    conversion: tuple[str, str] | None
    """Source dtype and target dtype, if they differ; else ``None``."""


def segment_lengths(
    parts: Iterable["ReadPart"],
    source_memory: Memories | None = None,
    target_memory: Memories | None = None,
) -> tuple[SegmentLength, ...]:
    """The mean segment lengths by which the way of cells is chosen, per pair of groups.

    Args:
        parts: the reads, see :func:`read_parts`.
        source_memory: see :func:`explain_transfer`.
        target_memory: see :func:`explain_transfer`.

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


def count_segments(parts: Iterable["ReadPart"]) -> tuple[int, int]:
    """The sums of :func:`explain_transfer` over dense tensors, with less work.

    Args:
        parts: the reads, see :func:`read_parts`.

    Returns:
        Bytes, and contiguous copies after merging if both block tables are shuffled.

    Raises:
        ValueError: see :func:`explain_transfer`.
    """
    nbytes = segments = 0
    for part in parts:
        copies = part.copies(seed=0)
        nbytes += copies.nbytes
        for rank, tiles in part.tiles(None, None).items():
            segments += count_copies(tiles, copies.runs_of(rank), part.plan.conversion)
    return nbytes, segments


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The reads of a target rank for a pair of groups: the tokens from ``first_token`` on."""

    plan: TransferPlan
    source_group: int
    target_group: int
    first_token: int
    num_tokens: int

    def tiles(self, source: Memories | None, target: Memories | None) -> dict[int, Tiles]:
        """The tiles per source rank, in the given memories or in dense tensors."""
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

    def costs(self, source: Memories | None, target: Memories | None) -> Iterator[PairCost]:
        """The cost of the target rank's reads from each source rank."""
        copies, others = self.copies(seed=None), self.copies(seed=0)
        conversion = self.plan.conversion
        for rank, tiles in self.tiles(source, target).items():
            ordered, shuffled = copies.runs_of(rank), others.runs_of(rank)
            if not len(ordered):
                continue  # with so few tokens, the two ranks have no token in common
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
                segments_ordered=count_copies(tiles, ordered, conversion),
                segments_shuffled=count_copies(tiles, shuffled, conversion),
            )


def first_moved_token(pair: GroupPair, targets: Sequence[GroupGeometry], num_tokens: int) -> int:
    """The first of a request's ``num_tokens`` tokens that a load moves for a pair of groups.

    A block that may become a prefix hit is filled from its first token on, even if that lies below
    the window. A source that no longer has these tokens moves fewer.
    """
    first_token = pair.first_kept_token(num_tokens)
    if pair.is_partial or first_token == num_tokens:
        return first_token
    return first_token - first_token % targets[pair.target_group].virtual_block_size


def read_parts(
    source: Groups,
    target: Groups,
    num_tokens: int,
    target_engine_id: str = "",
    target_ranks: Sequence[int] | None = None,
    convert: bool = False,
) -> Iterator[ReadPart]:
    """The reads of every pair of groups and target rank; none if a window or chunk keeps no tokens.

    Args:
        source: see :func:`explain_transfer`.
        target: see :func:`explain_transfer`.
        num_tokens: see :func:`explain_transfer`.
        target_engine_id: see :func:`explain_transfer`.
        target_ranks: target ranks to include; by default, all ranks.
        convert: see :func:`explain_transfer`.

    Raises:
        ValueError: see :func:`explain_transfer`.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens: {num_tokens} is less than 1")
    sources = (source,) if isinstance(source, GroupGeometry) else source
    targets = (target,) if isinstance(target, GroupGeometry) else target
    for group in (*sources, *targets):
        if (blocks := table_blocks(group, num_tokens)) > MAX_TICKET_BLOCKS:
            raise ValueError(
                f"num_tokens: {num_tokens} tokens need {blocks} blocks of "
                f"{group.virtual_block_size}, and a request has {MAX_TICKET_BLOCKS} at most; plan "
                "fewer tokens, or larger blocks"
            )
    if target_ranks is None:
        target_ranks = range(targets[0].world_size)
    for pair in pair_groups(sources, targets, convert=convert):
        first_token = first_moved_token(pair, targets, num_tokens)
        if first_token == num_tokens:
            continue
        for target_rank in target_ranks:
            plan = plan_transfer(
                source=sources[pair.source_group],
                target=targets[pair.target_group],
                target_rank=target_rank,
                target_engine_id=target_engine_id,
                layers=pair.layers,
                convert=convert,
            )
            yield ReadPart(plan, pair.source_group, pair.target_group, first_token, num_tokens)
