"""Transfer plans: the cells that each source rank gives to a target rank.

A plan is the intersection of the target's shard with every source shard. A plan contains no block
ids and no bytes, so an engine computes the plan once per peer. Lowering a plan onto the memory of
both sides gives tiles. Binding a plan to the block tables of a request gives runs. Tiles times runs
are the copies.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockIdError
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.topology.binding import (
    BlockIds,
    bind_shards,
    block_table,
    check_repeats,
    check_span,
)
from kvferry.topology.group import GroupGeometry, Share
from kvferry.topology.lowering import Piece, Places, lower_pieces
from kvferry.topology.pairing import cell_differences
from kvferry.topology.sharding import Int64s, ranges_text
from kvferry.topology.tensors import RankMemory

_REMEDIES = {"dtype": "they must be equal, or without scales and convert=True given"}


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The cells that each source rank gives to a target rank. Equal plans are interchangeable."""

    source: GroupGeometry
    target: GroupGeometry
    target_rank: int
    pieces: tuple[Piece, ...]
    """The pieces, ascending by layer, source context rank, section and head. Together they cover
    the target's cells exactly once."""

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The source ranks that give any cell, ascending."""
        return tuple(sorted({piece.source_rank for piece in self.pieces}))

    @property
    def source_contexts(self) -> tuple[int, ...]:
        """The context ranks of the source that hold tokens of the plan, ascending."""
        if self.source.parallel.num_context_ranks == 1:
            return (0,)
        return tuple(sorted({self.source.parallel.context_rank(r) for r in self.source_ranks}))

    @property
    def conversion(self) -> tuple[str, str] | None:
        """Source dtype and target dtype if they differ; such a plan is staged and converted."""
        for ours, theirs in zip(self.source.parts, self.target.parts, strict=True):
            if ours.dtype != theirs.dtype:
                return ours.dtype, theirs.dtype
        return None

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes that leave the source per token; the token lies in one of
        ``source_contexts``.

        For a state, the token is the last token, to which the state is bound.
        """
        nbytes = sum(
            len(piece.heads) * part.head_size * part.itemsize
            for part in self.source.parts
            for piece in self.pieces
            if piece.has(part)
        )
        return nbytes // max(len(self.source_contexts), 1)

    def for_layers(self, layers: Iterable[int]) -> "TransferPlan":
        """The part of the plan for the given layers of the model."""
        wanted = frozenset(layers)
        return replace(self, pieces=tuple(p for p in self.pieces if p.layer in wanted))

    def for_source(self, rank: int) -> "TransferPlan":
        """The part of the plan for a source rank."""
        return replace(self, pieces=tuple(p for p in self.pieces if p.source_rank == rank))

    def bind(
        self,
        source_blocks: BlockIds,
        target_blocks: BlockIds,
        num_tokens: int,
        first_token: int = 0,
    ) -> "BoundCopies":
        """The copies for the tokens ``[first_token, num_tokens)`` of a request.

        >>> from kvferry.topology import EngineGeometry, ParallelShape
        >>> source = EngineGeometry(num_layers=1, num_kv_heads=1, head_size=4, dtype="float32",
        ...                         block_size=4, layout="NHD", parallel=ParallelShape())
        >>> plan = plan_transfer(source=source, target=source)
        >>> plan.bind([5, 2, 8], [1, 2, 3], num_tokens=10, first_token=4).runs_of(0).tolist()
        [(2, 0, 2, 0, 4, 1, 1), (8, 0, 3, 0, 2, 1, 1)]

        Args:
            source_blocks: the source's whole block table for this group.
            target_blocks: the target's whole block table; null blocks (id 0) are skipped.
            num_tokens: end of the span, in tokens from the start of the request.
            first_token: start of the span. For a state, only the state after the last token moves.
                Opaque blocks move whole.

        Raises:
            ValueError: the span is not valid.
            BlockTableError: a table is too short, or contains a target block twice within the span.
            NullBlockError: the source's table contains the null block within the span at a place
                where the target's table does not.
            BlockIdError: an id is negative or not a whole number.
        """
        check_span(first_token, num_tokens)
        tables = (
            block_table("source", source_blocks, self.source, num_tokens),
            block_table("target", target_blocks, self.target, num_tokens),
        )
        span = self.target.bound_span(first_token, num_tokens)
        block_sizes = self.source.block_size, self.target.block_size
        ours = self.target.token_shard(self.target_rank)
        context_runs = {}
        for context in self.source_contexts:
            theirs = self.source.parallel.shard_of_context(context)
            context_runs[context] = bind_shards((theirs, ours), tables, block_sizes, span)
        check_repeats(tables[1], self.target, *span)
        return BoundCopies(self, context_runs, *tables, span)

    def lower(
        self, source_memory: Mapping[int, RankMemory], target_memory: RankMemory
    ) -> dict[int, Tiles]:
        """Strided tiles per source rank; compute the tiles once per peer.

        If the plan has a :attr:`conversion`, ``itemsize`` is the source's item size, and the
        target's strides are in the target's bytes. Only :func:`kvferry.layouts.staging.stage` takes
        such tiles.

        Args:
            source_memory: source rank → memory of this rank, from the description of the peer.
            target_memory: the memory of ``target_rank``.

        Raises:
            ValueError: a source rank of the plan is missing.
            ProtocolError: a memory lacks a tensor or a part that the plan needs.
            BoundsError: a number does not fit 64 bits.
        """
        missing = [rank for rank in self.source_ranks if rank not in source_memory]
        if missing:
            raise ValueError(
                f"source_memory: ranks {missing} are missing; the plan reads from ranks "
                f"{list(self.source_ranks)}"
            )
        target = Places(self.target, self.target_rank, target_memory)
        return {
            rank: lower_pieces(
                self.for_source(rank).pieces,
                self.target.parts,
                Places(self.source, rank, memory),
                target,
            )
            for rank, memory in source_memory.items()
            if rank in self.source_ranks
        }


@dataclass(frozen=True, slots=True, eq=False)
class BoundCopies:
    """The copies of a request on a target rank: each source rank's tiles times its runs."""

    plan: TransferPlan
    context_runs: Mapping[int, Runs]
    """Context rank of the source → rows of ``RUN_DTYPE``, ascending by first token; for every
    context rank from which the plan reads."""
    source_blocks: Int64s
    """Whole block table of the source."""
    target_blocks: Int64s
    """Whole block table of the target."""
    span: tuple[int, int]
    """First token, and the token after the last token."""

    def runs_of(self, source_rank: int) -> Runs:
        """The runs to which the tiles of a source rank apply."""
        return self.context_runs[self.plan.source.parallel.context_rank(source_rank)]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that move; tokens of null target blocks do not move."""
        return sum(int(runs["tokens"].sum()) for runs in self.context_runs.values())

    @property
    def nbytes(self) -> int:
        """Number of bytes that leave the sources."""
        return sum(
            int(self.runs_of(rank)["tokens"].sum()) * self.plan.for_source(rank).bytes_per_token
            for rank in self.plan.source_ranks
        )

    def segments(
        self, source_memory: Mapping[int, RankMemory], target_memory: RankMemory
    ) -> dict[int, npt.NDArray[np.void]]:
        """The single contiguous copies per source rank, merged, for code that needs each copy.

        Returns:
            Source rank → rows of ``SEGMENT_DTYPE``: regions, byte offsets in the regions, bytes.

        Raises:
            ValueError: the plan converts the dtype, which copies of bytes cannot do.
            ValueError, ProtocolError: see :meth:`TransferPlan.lower`.
        """
        from kvferry.layouts.copier import expand

        if self.plan.conversion is not None:
            one, two = self.plan.conversion
            raise ValueError(
                f"segments: {one} becomes {two} on the way, so there are none; stage the tiles"
            )

        tiles = self.plan.lower(source_memory, target_memory)
        return {rank: expand(table, self.runs_of(rank)) for rank, table in tiles.items()}


def check_block_ids(
    copies: BoundCopies, source_num_blocks: Mapping[int, int] | int, target_num_blocks: int
) -> None:
    """Checks that every block of the copies exists on both sides.

    Args:
        copies: bound copies.
        source_num_blocks: number of blocks of each source rank, or one number for all source ranks.
        target_num_blocks: number of blocks of the target rank.

    Raises:
        BlockIdError: a block id is not below the number of blocks; the message names both values.
    """
    if not copies.plan.pieces:
        return  # nothing moves; a rank without layers of the group also has no blocks
    if isinstance(source_num_blocks, Mapping):
        source_num_blocks = min(source_num_blocks[rank] for rank in copies.plan.source_ranks)
    for runs in copies.context_runs.values():
        if not len(runs):
            continue
        for side, limit in (("source", source_num_blocks), ("target", target_num_blocks)):
            largest = int(runs[f"{side}_block"].max())
            if largest >= limit:
                raise BlockIdError(
                    f"{side} block {largest} does not exist; there are {limit} blocks"
                )


def plan_transfer(
    *,
    source: GroupGeometry,
    target: GroupGeometry,
    target_rank: int = 0,
    target_engine_id: str = "",
    layers: Iterable[int] | None = None,
    convert: bool = False,
) -> TransferPlan:
    """Plans the cells that a target rank reads from each source rank.

    >>> from kvferry.layouts import Layout
    >>> from kvferry.topology import EngineGeometry, ParallelShape
    >>> source = EngineGeometry(num_layers=2, num_kv_heads=3, head_size=4, dtype="float32",
    ...                         block_size=16, layout="HND", parallel=ParallelShape(tp=3))
    >>> target = replace(source, block_size=24, layout=Layout.named("NHD"),
    ...                  parallel=ParallelShape(tp=2))
    >>> plan_transfer(source=source, target=target, target_rank=1).source_ranks
    (1, 2)

    If several source ranks hold replicas of a head's cells, the plan takes the replicas in turn, by
    layer and target rank, with an offset from the target's engine id. Both sides compute the same
    choice, and all replicas share the work.

    Args:
        source: a group of the source engine.
        target: a group of the target engine.
        target_rank: the target rank.
        target_engine_id: engine id for the choice among replicas.
        layers: the layers of the model to plan, which both groups must have; all layers of the
            target by default. :func:`~kvferry.topology.pairing.pair_groups` finds the shared
            layers.
        convert: whether a dtype conversion that rounds is allowed; lossless conversions always are.

    Raises:
        ValueError: there is no such target rank, or the geometries can never match; the message
            lists every mismatch.
    """
    wanted = frozenset(target.model_layers if layers is None else layers)
    mismatches = [
        f"{field}: source has {one}, target has {two}; {_REMEDIES.get(field, 'they must be equal')}"
        for field, one, two in cell_differences(source, target, convert=convert)
    ]
    for side, geometry in (("source", source), ("target", target)):
        if lacking := sorted(wanted.difference(geometry.model_layers)):
            mismatches.append(
                f"layers: {ranges_text(lacking)} not in the {side}, which has "
                f"{ranges_text(geometry.model_layers)}; name layers that both groups have"
            )
    if mismatches:
        raise ValueError("these geometries cannot exchange KV: " + "; ".join(mismatches))
    start = zlib.crc32(target_engine_id.encode()) + target_rank
    shares = target.shares(target_rank)
    contexts = _giving_contexts(source, target, target_rank)
    pieces = tuple(
        piece
        for layer in target.layers(target_rank)
        if layer in wanted
        for context in contexts
        for share in shares
        for piece in _layer_pieces(source, layer, share, context, start + layer)
    )
    return TransferPlan(source, target, target_rank, pieces)


def _giving_contexts(
    source: GroupGeometry, target: GroupGeometry, target_rank: int
) -> tuple[int, ...]:
    """The source's context ranks that hold any token of the target rank, ascending."""
    ours = target.token_shard(target_rank)
    return tuple(
        context
        for context in range(source.parallel.num_context_ranks)
        if source.parallel.shard_of_context(context).meets(ours)
    )


def _layer_pieces(
    source: GroupGeometry, layer: int, share: Share, context: int, choice: int
) -> Iterator[Piece]:
    """Splits a rank's share of a layer at the borders between source ranks."""
    for heads, replicas in source.owners(layer, share, context):
        yield Piece(replicas[choice % len(replicas)], layer, heads, share.part)
