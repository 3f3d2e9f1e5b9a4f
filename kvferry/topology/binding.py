"""Binding: which of a request's tokens move from which block to which, as runs.

A rank's blocks hold its own tokens of a request, slot after slot. What a source rank and a target
rank both hold is cut into spans that lie in one block on either side; the block tables of the
request turn spans into runs. With tokens that are interleaved over ranks, what two ranks share is a
pattern that repeats, and is written down in whichever of two ways makes fewer spans:

- **turns**: neighbouring tokens, as long as neither side's turn ends; long where turns are long;
- **progressions**: every ``p``-th token, ``p`` being the tokens after which the pattern repeats;
  long where turns are short. Turns of one token on 4 ranks against one rank make one progression
  per block, and not one span per token.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockIdError, BlockTableError, NullBlockError
from kvferry.layouts.tiles import RUN_DTYPE, Runs
from kvferry.topology.group import GroupGeometry
from kvferry.topology.sharding import Int64s, TokenShard

BlockIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Block ids of one request and one group, token 0 first."""


# ---- spans -------------------------------------------------------------------------------------


class Spans(NamedTuple):
    """Tokens in one block on either side, and at equal distances there; one element per span."""

    tokens: Int64s
    """Position in the request of the first token; ascending."""
    source: Int64s
    """The source's slot of the first token."""
    target: Int64s
    """The target's slot of the first token."""
    counts: Int64s
    """Tokens of the span; never 0."""
    steps: tuple[int, int]
    """Slots from one token to the next, on the source and on the target."""


def shared_spans(
    source: TokenShard, target: TokenShard, block_sizes: tuple[int, int], span: tuple[int, int]
) -> Spans:
    """What two shards share of the tokens ``[span[0], span[1])``; exactly once each.

    >>> every, one = TokenShard(), TokenShard(num_ranks=4, rank=1)
    >>> spans = shared_spans(every, one, (16, 4), (0, 30))
    >>> [array.tolist() for array in spans[:4]], spans.steps
    ([[1, 17], [1, 17], [0, 4], [4, 4]], (4, 1))

    Args:
        source: the tokens of the source rank.
        target: the tokens of the target rank.
        block_sizes: slots per block of the source and of the target; whole turns.
        span: first token, and the one after the last.
    """
    if source == target:
        return _equal(source, block_sizes, span)
    period = math.lcm(source.period, target.period)
    steps = period // source.num_ranks, period // target.num_ranks
    turns = _turns(source, block_sizes[0]), _turns(target, block_sizes[1])
    # Tokens of a progression in one block; so it is also the longest that a span can be.
    longest = min(size // step for size, step in zip(block_sizes, steps, strict=True))
    if longest > min(turns):
        return _by_progressions(source, target, block_sizes, steps, span)
    return _by_turns(source, target, turns, span)


def _turns(shard: TokenShard, block_size: int) -> int:
    """Tokens after which a run of neighbouring tokens may end."""
    return block_size if shard.num_ranks == 1 else shard.interleave_size


def _equal(shard: TokenShard, block_sizes: tuple[int, int], span: tuple[int, int]) -> Spans:
    """All tokens of one shard, which have the same slots on both sides."""
    first, last = span
    if shard.num_ranks > 1:
        first, last = (int(slot) for slot in shard.slots(np.array(span)))
    slots = _cuts(first, last, *block_sizes)
    return Spans(shard.tokens(slots), slots, slots, np.diff(slots, append=last), (1, 1))


def _by_turns(
    source: TokenShard, target: TokenShard, turns: tuple[int, int], span: tuple[int, int]
) -> Spans:
    cuts = _cuts(*span, *turns)
    counts = np.diff(cuts, append=span[1])
    held = source.holds(cuts) & target.holds(cuts)
    tokens = cuts[held]
    return Spans(tokens, source.slots(tokens), target.slots(tokens), counts[held], (1, 1))


def _by_progressions(
    source: TokenShard,
    target: TokenShard,
    block_sizes: tuple[int, int],
    steps: tuple[int, int],
    span: tuple[int, int],
) -> Spans:
    """One progression per token of the pattern, cut where either side begins a new block."""
    first, last = span
    period = steps[0] * source.num_ranks
    origin = first // period * period
    pattern = np.arange(origin, min(origin + period, last))
    pattern = pattern[source.holds(pattern) & target.holds(pattern)]
    # rounds[C, :]: numbers of repetitions at which the spans of each progression begin.
    begin, end = (-((pattern - edge) // period)[:, None] for edge in span)
    rounds = [begin]
    for shard, size, step in zip((source, target), block_sizes, steps, strict=True):
        low, high = (int(slot) for slot in shard.slots(np.array([first, last])))
        edges = np.arange((low // size + 1) * size, high, size)
        rounds.append(-((shard.slots(pattern)[:, None] - edges) // step))
    cuts = np.sort(np.clip(np.concatenate(rounds, axis=1), begin, end), axis=1)
    counts = np.diff(cuts, axis=1, append=end)
    tokens = (pattern[:, None] + cuts * period)[counts > 0]
    order = np.argsort(tokens)
    tokens = tokens[order]
    return Spans(
        tokens, source.slots(tokens), target.slots(tokens), counts[counts > 0][order], steps
    )


def _cuts(first: int, last: int, one: int, two: int) -> Int64s:
    """``first`` and the multiples of either number in ``(first, last)``; none of an empty span."""
    if first >= last:
        return np.empty(0, dtype=np.int64)
    cuts = [np.array([first]), np.arange((first // one + 1) * one, last, one)]
    if two == one:
        return np.concatenate(cuts)
    cuts.append(np.arange((first // two + 1) * two, last, two))
    # The parts are sorted, so a stable sort only merges them; np.unique takes ten times as long.
    found = np.sort(np.concatenate(cuts), kind="stable")
    return found[np.diff(found, prepend=first - 1) > 0]


# ---- runs --------------------------------------------------------------------------------------


def check_span(first_token: int, num_tokens: int) -> None:
    """Checks the bounds of a span of tokens.

    Raises:
        ValueError: the span is no span.
    """
    if not 0 <= first_token <= num_tokens:
        raise ValueError(
            f"first_token: [{first_token}, {num_tokens}) is no span of tokens; "
            "write 0 <= first_token <= num_tokens"
        )


def block_table(side: str, blocks: BlockIds, geometry: GroupGeometry, num_tokens: int) -> Int64s:
    """A whole block table as an array, int64[blocks].

    Raises:
        BlockTableError: it is not flat, or too short for so many tokens.
        BlockIdError: an id is no whole number.
    """
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


def bind_shards(
    shards: tuple[TokenShard, TokenShard],
    tables: tuple[Int64s, Int64s],
    block_sizes: tuple[int, int],
    span: tuple[int, int],
) -> Runs:
    """Runs over the tokens of a span that a source rank and a target rank both hold.

    Args:
        shards: the tokens of the source rank and of the target rank.
        tables: the whole block tables of both sides; null blocks (id 0) of the target are skipped.
        block_sizes: tokens per block and rank of both sides.
        span: first token, and the one after the last.

    Returns:
        Rows of ``RUN_DTYPE``, ascending by their first token.

    Raises:
        NullBlockError: the null block stands in the source within the span, where the target's
            is not null.
        BlockIdError: an id is negative.
    """
    runs = _runs(shared_spans(*shards, block_sizes, span), tables, block_sizes)
    kept = runs["target_block"] != 0
    return runs if kept.all() else runs[kept]


def bind_own(
    geometry: GroupGeometry, rank: int, block_ids: BlockIds, num_tokens: int, first_token: int = 0
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
    check_span(first_token, num_tokens)
    table = block_table("own", block_ids, geometry, num_tokens)
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
    check_repeats(table, geometry, first_token, num_tokens)
    first_slot, last_slot = shard.slots(np.array([first_token, num_tokens]))
    return runs, shard.tokens(np.arange(first_slot, last_slot))


def check_repeats(
    table: Int64s, geometry: GroupGeometry, first_token: int, num_tokens: int
) -> None:
    """Checks that a target's table names no block twice within a span.

    Raises:
        BlockTableError: it does.
    """
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
