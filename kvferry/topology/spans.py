"""The tokens that a source rank and a target rank both hold, cut where a block begins.

With tokens that are interleaved, what two ranks share is a pattern that repeats. It is written down
in whichever of two ways makes fewer spans:

- **turns**: neighbouring tokens, as long as neither side's turn ends; long where turns are long;
- **progressions**: every ``p``-th token, ``p`` being the tokens after which the pattern repeats;
  long where turns are short. Turns of one token on 4 ranks against one rank make one progression
  per block, and not one span per token.
"""

import math
from typing import NamedTuple

import numpy as np

from kvferry.topology.token_shard import Int64s, TokenShard


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
