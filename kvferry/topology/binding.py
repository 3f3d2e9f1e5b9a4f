"""Binding: a plan and the block tables of one request give its copies, in factored form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockIdError, BlockTableError, NullBlockError
from kvferry.layouts.tiles import RUN_DTYPE, Runs
from kvferry.topology.description import RankMemory
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.plan import TransferPlan
from kvferry.topology.spans import Spans, shared_spans
from kvferry.topology.token_shard import Int64s

BlockIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Block ids of one request and one group, token 0 first."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundCopies:
    """The copies of one request on one target rank: each source rank's tiles times its runs."""

    plan: TransferPlan
    context_runs: Mapping[int, Runs]
    """Context rank of the source → rows of ``RUN_DTYPE``, ascending by their first token; for
    every one that the plan reads from."""
    source_blocks: Int64s
    """The source's whole block table."""
    target_blocks: Int64s
    """The target's."""
    span: tuple[int, int]
    """The first token, and the one after the last."""

    def runs_of(self, source_rank: int) -> Runs:
        """What the tiles of a source rank of the plan are applied to."""
        return self.context_runs[self.plan.source.parallel.context_rank(source_rank)]

    @property
    def num_tokens(self) -> int:
        """Tokens that move; those of null target blocks do not."""
        return sum(int(runs["tokens"].sum()) for runs in self.context_runs.values())

    @property
    def nbytes(self) -> int:
        """Bytes that leave the sources."""
        return sum(
            int(self.runs_of(rank)["tokens"].sum()) * self.plan.for_source(rank).bytes_per_token
            for rank in self.plan.source_ranks
        )

    def segments(
        self, source_memory: Mapping[int, RankMemory], target_memory: RankMemory
    ) -> dict[int, npt.NDArray[np.void]]:
        """The single contiguous copies per source rank, merged, for whoever must see them.

        Returns:
            Source rank → rows of ``SEGMENT_DTYPE``: regions, byte offsets into them, bytes.

        Raises:
            ValueError: the plan converts the dtype, which no copies of bytes can do.
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


def bind(
    plan: TransferPlan,
    source_blocks: BlockIds,
    target_blocks: BlockIds,
    num_tokens: int,
    first_token: int = 0,
) -> BoundCopies:
    """Binds block tables to a plan: the copies of the tokens ``[first_token, num_tokens)``.

    >>> from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer
    >>> source = EngineGeometry(num_layers=1, num_kv_heads=1, head_size=4, dtype="float32",
    ...                         block_size=4, layout="NHD", parallel=ParallelShape())
    >>> plan = plan_transfer(source=source, target=source)
    >>> bind(plan, [5, 2, 8], [1, 2, 3], num_tokens=10, first_token=4).runs_of(0).tolist()
    [(2, 0, 2, 0, 4, 1, 1), (8, 0, 3, 0, 2, 1, 1)]

    Args:
        plan: what to move.
        source_blocks: the source's whole block table for this group.
        target_blocks: the target's; its null blocks (id 0) are skipped.
        num_tokens: end of the span, in tokens from the start of the request.
        first_token: start of the span. Of a state, that after the last token moves; of opaque
            blocks, all of each.

    Raises:
        ValueError: the span is no span.
        BlockTableError: a table is too short, or names a target block twice within the span.
        NullBlockError: the null block stands in the source within the span, where the target's
            is not null.
        BlockIdError: an id is negative or no whole number.
    """
    _check_span(first_token, num_tokens)
    tables = (
        _table("source", source_blocks, plan.source, num_tokens),
        _table("target", target_blocks, plan.target, num_tokens),
    )
    first_token, num_tokens = plan.target.bound_span(first_token, num_tokens)
    block_sizes = plan.source.block_size, plan.target.block_size
    ours = plan.target.token_shard(plan.target_rank)
    context_runs = {}
    for context in plan.source_contexts:
        theirs = plan.source.parallel.shard_of_context(context)
        spans = shared_spans(theirs, ours, block_sizes, (first_token, num_tokens))
        runs = _runs(spans, tables, block_sizes)
        kept = runs["target_block"] != 0
        context_runs[context] = runs if kept.all() else runs[kept]
    _check_repeats(tables[1], plan.target, first_token, num_tokens)
    return BoundCopies(plan, context_runs, *tables, (first_token, num_tokens))


def bind_own(
    geometry: EngineGeometry, rank: int, block_ids: BlockIds, num_tokens: int, first_token: int = 0
) -> tuple[Runs, Int64s]:
    """Runs over what a rank holds of the tokens ``[first_token, num_tokens)``.

    Returns:
        Rows of ``RUN_DTYPE``, both sides alike, and the position in the request of each of their
        tokens: int64[tokens], ascending.

    Raises:
        ValueError: the span is no span.
        BlockTableError: the table is too short, or names a block twice within the span.
        NullBlockError: the null block stands where the rank holds tokens of the span.
        BlockIdError: an id is negative or no whole number.
    """
    _check_span(first_token, num_tokens)
    table = _table("own", block_ids, geometry, num_tokens)
    first_token = geometry.first_bound_token(first_token, num_tokens)
    shard = geometry.token_shard(rank)
    block_sizes = geometry.block_size, geometry.block_size
    spans = shared_spans(shard, shard, block_sizes, (first_token, num_tokens))
    runs = _runs(spans, (table, table), block_sizes)
    null = runs["target_block"] == 0
    if null.any():
        raise NullBlockError(
            f"block table: the null block stands where token {spans.tokens[np.argmax(null)]} "
            f"belongs, within the tokens [{first_token}, {num_tokens})"
        )
    _check_repeats(table, geometry, first_token, num_tokens)
    first_slot, last_slot = shard.slots(np.array([first_token, num_tokens]))
    return runs, shard.tokens(np.arange(first_slot, last_slot))


def check_block_ids(
    copies: BoundCopies, source_num_blocks: Mapping[int, int] | int, target_num_blocks: int
) -> None:
    """Checks that every block of the copies exists on both sides.

    Args:
        copies: bound copies.
        source_num_blocks: blocks of each source rank, or of all of them.
        target_num_blocks: blocks of the target rank.

    Raises:
        BlockIdError: a block id is not below the number of blocks; the message names both.
    """
    if not copies.plan.pieces:
        return  # nothing moves; a rank without layers of the group has no blocks of it either
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


def _check_span(first_token: int, num_tokens: int) -> None:
    if not 0 <= first_token <= num_tokens:
        raise ValueError(
            f"first_token: [{first_token}, {num_tokens}) is no span of tokens; "
            "write 0 <= first_token <= num_tokens"
        )


def _table(side: str, blocks: BlockIds, geometry: EngineGeometry, num_tokens: int) -> Int64s:
    table = np.asarray(blocks)
    if table.ndim != 1:
        raise BlockTableError(f"{side} block table: {table.ndim} dims; give one flat list of ids")
    entry = geometry.virtual_block_size
    if len(table) * entry < num_tokens:
        raise BlockTableError(
            f"{side} block table: {len(table)} blocks of {entry} tokens hold "
            f"{len(table) * entry}, not {num_tokens}"
        )
    if len(table) and not np.can_cast(table.dtype, np.int64):
        raise BlockIdError(f"{side} block table: ids are {table.dtype}, not 64-bit whole numbers")
    return table.astype(np.int64, copy=False)


def _runs(spans: Spans, tables: tuple[Int64s, Int64s], block_sizes: tuple[int, int]) -> Runs:
    """The spans with the ids of their blocks, checked."""
    runs = np.empty(len(spans.tokens), dtype=RUN_DTYPE)
    for side, slots, table, size in zip(
        ("source", "target"), (spans.source, spans.target), tables, block_sizes, strict=True
    ):
        runs[f"{side}_block"] = table[slots // size]
        runs[f"{side}_token"] = slots % size
    runs["tokens"] = spans.counts
    runs["source_step"], runs["target_step"] = spans.steps
    if len(runs):
        _check_ids(runs, spans.tokens)
    return runs


def _check_ids(runs: Runs, tokens: Int64s) -> None:
    for side in ("source", "target"):
        ids = runs[f"{side}_block"]
        if ids.min() < 0:
            row = int(np.argmax(ids < 0))
            raise BlockIdError(f"{side} block of token {tokens[row]} is {ids[row]}, below 0")
    null = (runs["source_block"] == 0) & (runs["target_block"] != 0)
    if null.any():
        row = int(np.argmax(null))
        raise NullBlockError(
            f"source block of token {tokens[row]} is the null block, but the target expects it in "
            f"block {runs['target_block'][row]}"
        )


def _check_repeats(
    table: Int64s, geometry: EngineGeometry, first_token: int, num_tokens: int
) -> None:
    if first_token == num_tokens:
        return
    entry = geometry.virtual_block_size
    ids = table[first_token // entry : -(-num_tokens // entry)]
    ordered = np.sort(ids[ids != 0])
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise BlockTableError(
            f"target block {twice[0]} stands more than once in the span; its tokens would "
            "overwrite each other"
        )
