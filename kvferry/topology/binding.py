"""Binding: a plan and the block tables of one request give its copies, in factored form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockIdError, BlockTableError, NullBlockError
from kvferry.layouts.tiles import RUN_DTYPE, Runs
from kvferry.topology.description import RankMemory
from kvferry.topology.plan import TransferPlan

BlockIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Block ids of one request and one group, token 0 first."""

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BoundCopies:
    """The copies of one request on one target rank: the plan's tiles times these runs."""

    plan: TransferPlan
    runs: Runs
    """Rows of ``RUN_DTYPE``, ascending by token position."""

    @property
    def num_tokens(self) -> int:
        """Tokens that move; those of null target blocks do not."""
        return int(self.runs["tokens"].sum())

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.num_tokens * self.plan.bytes_per_token

    def segments(
        self, source_memory: Mapping[int, RankMemory], target_memory: RankMemory
    ) -> dict[int, npt.NDArray[np.void]]:
        """The single contiguous copies per source rank, merged, for whoever must see them.

        Returns:
            Source rank → rows of ``PIECE_DTYPE``: regions, byte offsets into them, bytes.

        Raises:
            ValueError, ProtocolError: see :meth:`TransferPlan.lower`.
        """
        from kvferry.layouts.copier import expand

        tiles = self.plan.lower(source_memory, target_memory)
        return {rank: expand(table, self.runs) for rank, table in tiles.items()}


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
    >>> bind(plan, [5, 2, 8], [1, 2, 3], num_tokens=10, first_token=4).runs.tolist()
    [(2, 0, 2, 0, 4), (8, 0, 3, 0, 2)]

    Args:
        plan: what to move.
        source_blocks: the source's whole block table for this group.
        target_blocks: the target's; its null blocks (id 0) are skipped.
        num_tokens: end of the span, in tokens from the start of the request.
        first_token: start of the span.

    Raises:
        ValueError: the span is no span.
        BlockTableError: a table is too short, or names a target block twice within the span.
        NullBlockError: the null block stands in the source within the span, where the target's
            is not null.
        BlockIdError: an id is negative or no whole number.
    """
    if not 0 <= first_token <= num_tokens:
        raise ValueError(
            f"first_token: [{first_token}, {num_tokens}) is no span of tokens; "
            "write 0 <= first_token <= num_tokens"
        )
    source_size, target_size = plan.source.block_size, plan.target.block_size
    source_table = _table("source", source_blocks, source_size, num_tokens)
    target_table = _table("target", target_blocks, target_size, num_tokens)
    if first_token == num_tokens:
        return BoundCopies(plan, np.empty(0, dtype=RUN_DTYPE))
    starts = _starts(first_token, num_tokens, source_size, target_size)
    runs = np.empty(len(starts), dtype=RUN_DTYPE)
    runs["source_block"] = source_table[starts // source_size]
    runs["source_token"] = starts % source_size
    runs["target_block"] = target_table[starts // target_size]
    runs["target_token"] = starts % target_size
    runs["tokens"] = np.diff(starts, append=num_tokens)
    _check_ids(runs, starts)
    _check_repeats(target_table[first_token // target_size : -(-num_tokens // target_size)])
    kept = runs["target_block"] != 0
    return BoundCopies(plan, runs if kept.all() else runs[kept])


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
    if not len(copies.runs) or not copies.plan.pieces:
        return  # nothing moves; a rank without layers of the group has no blocks of it either
    if isinstance(source_num_blocks, Mapping):
        source_num_blocks = min(source_num_blocks[rank] for rank in copies.plan.source_ranks)
    for side, limit in (("source", source_num_blocks), ("target", target_num_blocks)):
        largest = int(copies.runs[f"{side}_block"].max())
        if largest >= limit:
            raise BlockIdError(f"{side} block {largest} does not exist; there are {limit} blocks")


def _table(side: str, blocks: BlockIds, block_size: int, num_tokens: int) -> Int64s:
    table = np.asarray(blocks)
    if table.ndim != 1:
        raise BlockTableError(f"{side} block table: {table.ndim} dims; give one flat list of ids")
    if len(table) * block_size < num_tokens:
        raise BlockTableError(
            f"{side} block table: {len(table)} blocks of {block_size} tokens hold "
            f"{len(table) * block_size}, not {num_tokens}"
        )
    if len(table) and not np.can_cast(table.dtype, np.int64):
        raise BlockIdError(f"{side} block table: ids are {table.dtype}, not 64-bit whole numbers")
    return table.astype(np.int64, copy=False)


def _starts(first: int, last: int, source_size: int, target_size: int) -> Int64s:
    """First token of each run: the span is cut where either side begins a new block."""
    cuts = [np.array([first]), np.arange(_next_block(first, source_size), last, source_size)]
    if target_size != source_size:
        cuts.append(np.arange(_next_block(first, target_size), last, target_size))
        return np.unique(np.concatenate(cuts))
    return np.concatenate(cuts)


def _next_block(token: int, block_size: int) -> int:
    return (token // block_size + 1) * block_size


def _check_ids(runs: Runs, starts: Int64s) -> None:
    for side in ("source", "target"):
        ids = runs[f"{side}_block"]
        if ids.min() < 0:
            row = int(np.argmax(ids < 0))
            raise BlockIdError(f"{side} block of token {starts[row]} is {ids[row]}, below 0")
    null = (runs["source_block"] == 0) & (runs["target_block"] != 0)
    if null.any():
        row = int(np.argmax(null))
        raise NullBlockError(
            f"source block of token {starts[row]} is the null block, but the target expects it in "
            f"block {runs['target_block'][row]}"
        )


def _check_repeats(target_ids: Int64s) -> None:
    ordered = np.sort(target_ids[target_ids != 0])
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise BlockTableError(
            f"target block {twice[0]} stands more than once in the span; its tokens would "
            "overwrite each other"
        )
