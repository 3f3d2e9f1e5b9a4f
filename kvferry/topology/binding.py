"""Binding: the runs that say which tokens of a request move from which block to which block.

The blocks of a rank hold the rank's own tokens of a request, slot after slot. The tokens that a
source rank and a target rank both hold are cut into spans; a span lies in one block on each side.
The block tables of the request turn spans into runs. If tokens are interleaved over ranks, the
common tokens of two ranks form a repeating pattern. The pattern is described in either of two ways,
whichever gives fewer spans:

- **turns**: a span of neighbouring tokens, until the turn of either side ends; these spans are long
  if turns are long;
- **progressions**: a span of every ``p``-th token, where the pattern repeats after ``p`` tokens;
  these spans are long if turns are short. With turns of one token on 4 ranks against one rank,
  there is one progression per block instead of one span per token.
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
"""Block ids of a request and a group, token 0 first."""

_SORTED = 512
"""Largest number of blocks in a table that is sorted to find repeated blocks. A longer table is
checked with a flag for each block, in a fifth of the time, if all ids are below ``_MOST_FLAGS``."""
_MOST_FLAGS = 1 << 20


# ---- spans -------------------------------------------------------------------------------------


class TokenSpans(NamedTuple):
    """Tokens in one block on each side, at equal distances on each side; an element per span."""

    tokens: Int64s
    """Position in the request of the first token of each span; ascending."""
    source: Int64s
    """Slot of the first token on the source."""
    target: Int64s
    """Slot of the first token on the target."""
    counts: Int64s
    """Number of tokens of each span; never 0."""
    steps: tuple[int, int]
    """Number of slots from each token to the next, on the source and on the target."""


def shared_spans(
    source: TokenShard, target: TokenShard, block_sizes: tuple[int, int], span: tuple[int, int]
) -> TokenSpans:
    """The tokens in ``[span[0], span[1])`` that two shards share; each token exactly once.

    >>> every, one = TokenShard(), TokenShard(num_ranks=4, rank=1)
    >>> spans = shared_spans(every, one, (16, 4), (0, 30))
    >>> [array.tolist() for array in spans[:4]], spans.steps
    ([[1, 17], [1, 17], [0, 4], [4, 4]], (4, 1))

    Args:
        source: the tokens of the source rank.
        target: the tokens of the target rank.
        block_sizes: slots per block of the source and of the target; multiples of a whole turn.
        span: first token, and the token after the last token.
    """
    if source == target:
        return _equal(source, block_sizes, span)
    period = math.lcm(source.period, target.period)
    steps = period // source.num_ranks, period // target.num_ranks
    turns = _turns(source, block_sizes[0]), _turns(target, block_sizes[1])
    # Number of tokens of a progression in one block; no span of a progression is longer.
    longest = min(size // step for size, step in zip(block_sizes, steps, strict=True))
    if longest > min(turns):
        return _by_progressions(source, target, block_sizes, steps, span)
    return _by_turns(source, target, turns, span)


def _turns(shard: TokenShard, block_size: int) -> int:
    """Number of tokens after which a run of neighbouring tokens may end."""
    return block_size if shard.num_ranks == 1 else shard.interleave_size


def _equal(shard: TokenShard, block_sizes: tuple[int, int], span: tuple[int, int]) -> TokenSpans:
    """All tokens of a shard, which have the same slots on both sides."""
    first, last = span
    if shard.num_ranks > 1:
        first, last = (int(slot) for slot in shard.slots(np.array(span)))
    slots = _cuts(first, last, *block_sizes)
    return TokenSpans(shard.tokens(slots), slots, slots, np.diff(slots, append=last), (1, 1))


def _by_turns(
    source: TokenShard, target: TokenShard, turns: tuple[int, int], span: tuple[int, int]
) -> TokenSpans:
    cuts = _cuts(*span, *turns)
    counts = np.diff(cuts, append=span[1])
    held = source.holds(cuts) & target.holds(cuts)
    tokens = cuts[held]
    return TokenSpans(tokens, source.slots(tokens), target.slots(tokens), counts[held], (1, 1))


def _by_progressions(
    source: TokenShard,
    target: TokenShard,
    block_sizes: tuple[int, int],
    steps: tuple[int, int],
    span: tuple[int, int],
) -> TokenSpans:
    """One progression per token of the pattern, cut where a new block starts on either side."""
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
    return TokenSpans(
        tokens, source.slots(tokens), target.slots(tokens), counts[counts > 0][order], steps
    )


def _cuts(first: int, last: int, one: int, two: int) -> Int64s:
    """``first`` and the multiples of both numbers in ``(first, last)``; empty for an empty span."""
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
        ValueError: the span is not valid.
    """
    if not 0 <= first_token <= num_tokens:
        raise ValueError(
            f"first_token: [{first_token}, {num_tokens}) is no span of tokens; "
            "write 0 <= first_token <= num_tokens"
        )


def block_table(side: str, blocks: BlockIds, geometry: GroupGeometry, num_tokens: int) -> Int64s:
    """A whole block table as an array, int64[blocks].

    Raises:
        BlockTableError: the table is not flat, or is too short for ``num_tokens``.
        BlockIdError: an id is not a whole number.
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
    if table.dtype == np.int64:
        return table
    if len(table) and not np.can_cast(table.dtype, np.int64):
        raise BlockIdError(f"{side} block table: ids are {table.dtype}, not 64-bit whole numbers")
    return table.astype(np.int64)


def bind_shards(
    shards: tuple[TokenShard, TokenShard],
    tables: tuple[Int64s, Int64s],
    block_sizes: tuple[int, int],
    span: tuple[int, int],
) -> Runs:
    """The runs over the tokens of a span that a source rank and a target rank both hold.

    Args:
        shards: the tokens of the source rank and of the target rank.
        tables: the whole block tables of both sides; null blocks (id 0) of the target are skipped.
        block_sizes: tokens per block and rank of both sides.
        span: first token, and the token after the last token.

    Returns:
        Rows of ``RUN_DTYPE``, ascending by first token.

    Raises:
        NullBlockError: the source's table contains the null block within the span at a place where
            the target's table does not.
        BlockIdError: an id is negative.
    """
    if shards[0] == shards[1] and block_sizes[0] == block_sizes[1]:
        runs = _block_by_block(shards[0], tables, block_sizes[0], span)
    else:
        runs = _runs(shared_spans(*shards, block_sizes, span), tables, block_sizes)
    ids = runs["target_block"]
    return runs if ids.all() else runs[ids != 0]


def bind_own(
    geometry: GroupGeometry, rank: int, block_ids: BlockIds, num_tokens: int, first_token: int = 0
) -> tuple[Runs, Int64s]:
    """The runs over a rank's own tokens in ``[first_token, num_tokens)``.

    Returns:
        Rows of ``RUN_DTYPE``, equal on both sides, and the position in the request of each token:
        int64[tokens], ascending.

    Raises:
        ValueError: the span is not valid.
        BlockTableError: the table is too short, or contains a block twice within the span.
        NullBlockError: the null block stands at a place where the rank holds tokens of the span.
        BlockIdError: an id is negative or not a whole number.
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
    """Checks that a target's table contains no block twice within a span.

    Raises:
        BlockTableError: the table contains a block twice.
    """
    if first_token == num_tokens:
        return
    entry = geometry.virtual_block_size
    ids = table[first_token // entry : -(-num_tokens // entry)]
    if len(ids) > _SORTED and ids.min() >= 0 and ids.max() < _MOST_FLAGS:
        named = np.zeros(ids.max() + 1, dtype=np.bool_)
        named[ids] = True
        if np.count_nonzero(named[1:]) == np.count_nonzero(ids):
            return
    ordered = ids.copy()
    ordered.sort()
    twice = ordered[1:] == ordered[:-1]
    if twice.any() and (found := ordered[1:][twice & (ordered[1:] != 0)]).size:
        raise BlockTableError(
            f"target block {found[0]} stands more than once in the span; its tokens would "
            "overwrite each other"
        )


def _block_by_block(
    shard: TokenShard, tables: tuple[Int64s, Int64s], block_size: int, span: tuple[int, int]
) -> Runs:
    """The result of :func:`_runs` for equal shards in equal blocks, in half the time."""
    first, last = span
    if shard.num_ranks > 1:
        first, last = (int(slot) for slot in shard.slots(np.array(span)))
    if first >= last:
        return np.empty(0, dtype=RUN_DTYPE)
    begin, end = first // block_size, -(-last // block_size)
    fields = np.empty((end - begin, 7), dtype=np.int64)  # in the order of RUN_DTYPE
    fields[:] = 0, 0, 0, 0, block_size, 1, 1
    fields[:, 0] = source = tables[0][begin:end]
    fields[:, 2] = target = tables[1][begin:end]
    before, behind = first - begin * block_size, end * block_size - last
    fields[0, 1] = fields[0, 3] = before
    fields[0, 4] -= before
    fields[-1, 4] -= behind
    runs = fields.view(RUN_DTYPE)[:, 0]
    if source.min() < 1 or target.min() < 1:
        slots = np.arange(begin, end) * block_size
        slots[0] = first
        _check_ids(runs, shard.tokens(slots))
    return runs


def _runs(spans: TokenSpans, tables: tuple[Int64s, Int64s], block_sizes: tuple[int, int]) -> Runs:
    """The spans with the ids of their blocks, after checking the ids."""
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
