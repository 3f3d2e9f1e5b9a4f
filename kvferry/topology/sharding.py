"""The layers, heads and tokens of each rank of an engine: arithmetic on ranges.

Pipeline stages divide the layers of a model, TP ranks divide its KV heads, and context ranks divide
the tokens of a request. No axis needs to divide evenly.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

_MAX_COUNT = 1 << 20
"""Largest number of layers, heads, elements, tokens per block or ranks per axis."""


def check_count(name: str, value: int, *, most: int = _MAX_COUNT) -> int:
    """Checks that ``value`` is a whole number from 1 to ``most``; no engine exceeds the default.

    Raises:
        ValueError: ``value`` is not such a number; the message contains ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: {value!r} is not a whole number")
    if value < 1:
        raise ValueError(f"{name}: {value} is less than 1")
    # Geometries are also made from a peer's description; absurd counts must not cost time.
    if value > most:
        raise ValueError(f"{name}: {value} is more than {most}")
    return value


# ---- tokens --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens of a context rank.

    The tokens of a request are dealt to the engine's context ranks in turn, ``interleave_size``
    tokens at a time::

        token         0 1 2 3 | 4 5 6 7 | 8 9 ...      2 ranks, interleave_size 2
        context rank  0 0 1 1 | 0 0 1 1 | 0 0 ...
        slot          0 1 0 1 | 2 3 2 3 | 4 5 ...      the token's number among its rank's own

    The blocks of a rank hold the rank's own tokens, slot after slot.

    >>> shard = TokenShard(num_ranks=2, rank=1, interleave_size=2)
    >>> shard.slots(np.array([2, 3, 6]))  # the tokens of the picture above
    array([0, 1, 2])
    >>> shard.tokens(np.arange(4))
    array([2, 3, 6, 7])
    >>> shard.holds(np.array([1, 2]))
    array([False,  True])
    """

    num_ranks: int = 1
    """Number of context ranks of the engine."""
    rank: int = 0
    """Number of this rank among the context ranks."""
    interleave_size: int = 1
    """Number of consecutive tokens on one rank; 1 if there is only one rank."""

    @property
    def period(self) -> int:
        """Number of tokens after which every rank has had its turn."""
        return self.num_ranks * self.interleave_size

    def slots(self, tokens: Int64s) -> Int64s:
        """Number of the shard's tokens before each given token."""
        if self.num_ranks == 1:
            return tokens
        rounds, rest = np.divmod(tokens, self.period)
        size = self.interleave_size
        found: Int64s = rounds * size + np.clip(rest - self.rank * size, 0, size)
        return found

    def tokens(self, slots: Int64s) -> Int64s:
        """The shard's tokens in the given slots."""
        if self.num_ranks == 1:
            return slots
        rounds, rest = np.divmod(slots, self.interleave_size)
        return rounds * self.period + self.rank * self.interleave_size + rest

    def holds(self, tokens: Int64s) -> npt.NDArray[np.bool_]:
        """For each given token, whether the rank holds this token."""
        found: npt.NDArray[np.bool_] = tokens // self.interleave_size % self.num_ranks == self.rank
        return found

    def meets(self, other: "TokenShard") -> bool:
        """Whether the two shards have a token in common.

        >>> one = TokenShard(num_ranks=4, rank=1, interleave_size=2)  # 2, 3, 10, 11, ...
        >>> [one.meets(TokenShard(num_ranks=2, rank=rank)) for rank in (0, 1)]
        [True, True]
        >>> one.meets(TokenShard(num_ranks=2, rank=0, interleave_size=2))  # 0, 1, 4, 5, 8, 9, ...
        False
        """
        # One shard holds [a, a + m) every S tokens, the other shard holds [b, b + n) every T
        # tokens. The difference a - b takes every value that is equal modulo gcd(S, T), and two
        # such intervals meet if -m < a - b < n.
        common = math.gcd(self.period, other.period)
        apart = self.rank * self.interleave_size - other.rank * other.interleave_size
        apart %= common
        return apart < other.interleave_size or common - apart < self.interleave_size


# ---- ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """The coordinates of a rank on each axis of its engine."""

    pp: int
    pcp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ParallelShape:
    """Number of ranks per axis of an engine; ``rank = (pp_rank * pcp + pcp_rank) * tp + tp_rank``.

    >>> ParallelShape(tp=4, pp=2).coordinates(6)
    RankCoordinates(pp=1, pcp=0, tp=2)

    Raises:
        ValueError: an axis is shorter than 1.
    """

    tp: int = 1
    """Number of tensor-parallel ranks, which divide the heads."""
    pp: int = 1
    """Number of pipeline stages, which divide the layers."""
    dcp: int = 1
    """Number of decode-context-parallel ranks; they lie inside TP."""
    pcp: int = 1
    """Number of prefill-context-parallel ranks."""
    interleave_size: int = 1
    """Number of consecutive tokens on one context rank (vLLM: ``cp_kv_cache_interleave_size``);
    ignored without context parallelism."""

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dcp", "pcp", "interleave_size"):
            check_count(axis, getattr(self, axis))

    @property
    def world_size(self) -> int:
        """Number of ranks of the engine."""
        return self.pp * self.pcp * self.tp

    @property
    def num_context_ranks(self) -> int:
        """Number of ranks over which the tokens of a request are spread."""
        return self.dcp * self.pcp

    def context_rank(self, rank: int) -> int:
        """The number of a rank among the context ranks: ``pcp_rank * dcp + dcp_rank``.

        The ranks that hold one head are neighbours in TP, and DCP deals them out in turn.

        >>> [ParallelShape(tp=4, pcp=2, dcp=2).context_rank(rank) for rank in range(8)]
        [0, 1, 0, 1, 2, 3, 2, 3]

        Raises:
            ValueError: there is no such rank.
        """
        at = self.coordinates(rank)
        return at.pcp * self.dcp + at.tp % self.dcp

    @lru_cache(maxsize=1024)  # noqa: B019 - a value of a few numbers; each load asks for the same
    def token_shard(self, rank: int) -> TokenShard:
        """A rank's tokens of a request.

        Raises:
            ValueError: there is no such rank.
        """
        return self.shard_of_context(self.context_rank(rank))

    def shard_of_context(self, context: int) -> TokenShard:
        """The tokens of the ranks with this context rank."""
        count = self.num_context_ranks
        return TokenShard(count, context, self.interleave_size if count > 1 else 1)

    def coordinates(self, rank: int) -> RankCoordinates:
        """The coordinates of a rank on each axis.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: {rank} is not one of 0 to {self.world_size - 1}")
        stage, tp_rank = divmod(rank, self.tp)
        pp_rank, pcp_rank = divmod(stage, self.pcp)
        return RankCoordinates(pp=pp_rank, pcp=pcp_rank, tp=tp_rank)


# ---- heads ---------------------------------------------------------------------------------------
#
# If there are more heads than ranks, neighbouring heads share a rank. If there are more ranks than
# heads, neighbouring ranks hold replicas of one head, and context parallelism spreads the tokens of
# this head over the replicas.


def heads_of(tp_rank: int, tp: int, num_kv_heads: int) -> range:
    """The heads of a TP rank; never empty.

    >>> [heads_of(rank, 2, 3) for rank in range(2)]
    [range(0, 1), range(1, 3)]
    """
    first = tp_rank * num_kv_heads // tp
    return range(first, max(first + 1, (tp_rank + 1) * num_kv_heads // tp))


def replicas_of(head: int, tp: int, num_kv_heads: int) -> range:
    """The TP ranks with a head.

    >>> [replicas_of(head, 5, 2) for head in range(2)]
    [range(0, 3), range(3, 5)]
    """
    if tp <= num_kv_heads:
        first = ((head + 1) * tp - 1) // num_kv_heads
        return range(first, first + 1)
    return range(-(-head * tp // num_kv_heads), -(-(head + 1) * tp // num_kv_heads))


def split_heads(heads: range, tp: int, num_kv_heads: int) -> Iterator[tuple[range, range]]:
    """Splits heads at the borders between TP ranks; yields some heads and the ranks that hold them.

    >>> list(split_heads(range(1, 4), 2, 4))
    [(range(1, 2), range(0, 1)), (range(2, 4), range(1, 2))]
    >>> list(split_heads(range(0, 2), 5, 2))
    [(range(0, 1), range(0, 3)), (range(1, 2), range(3, 5))]
    """
    first = heads.start
    while first < heads.stop:
        replicas = replicas_of(first, tp, num_kv_heads)
        stop = min(heads.stop, heads_of(replicas.start, tp, num_kv_heads).stop)
        yield range(first, stop), replicas
        first = stop


def query_heads_of(tp_rank: int, tp: int, num_kv_heads: int, num_query_heads: int) -> range:
    """The query heads that a TP rank computes; may be empty.

    Query heads follow their KV head. If a KV head is replicated, its group of query heads is
    divided contiguously over the replicas.

    >>> [query_heads_of(rank, 3, 1, 4) for rank in range(3)]
    [range(0, 1), range(1, 2), range(2, 4)]

    Raises:
        ValueError: ``num_query_heads`` is not a multiple of the KV heads.
    """
    group, remainder = divmod(num_query_heads, num_kv_heads)
    if remainder or group < 1:
        raise ValueError(
            f"num_query_heads: {num_query_heads} is not a multiple of the {num_kv_heads} KV heads"
        )
    heads = heads_of(tp_rank, tp, num_kv_heads)
    if tp <= num_kv_heads:
        return range(heads.start * group, heads.stop * group)
    replicas = replicas_of(heads.start, tp, num_kv_heads)
    index, count, first = tp_rank - replicas.start, len(replicas), heads.start * group
    return range(first + index * group // count, first + (index + 1) * group // count)


def check_dcp(dcp: int, tp: int, num_kv_heads: int) -> None:
    """Checks that decode context parallelism divides the replicas of every head.

    Raises:
        ValueError: dcp does not divide them; the message contains the number of replicas.
    """
    most, remainder = divmod(tp, num_kv_heads) if tp > num_kv_heads else (1, 0)
    if dcp > 1 and (remainder or most % dcp):
        counts = f"{most} or {most + 1}" if remainder else f"{most}"
        raise ValueError(
            f"parallel: dcp={dcp} does not divide the {counts} TP ranks that hold each of the "
            f"{num_kv_heads} KV heads with tp={tp}; its ranks are replicas of one head"
        )


# ---- layers --------------------------------------------------------------------------------------


@lru_cache(maxsize=256)  # plans ask for every layer
def default_split(num_layers: int, pp: int) -> tuple[int, ...]:
    """The default number of layers per stage.

    >>> default_split(10, pp=4)
    (2, 3, 3, 2)

    Raises:
        ValueError: there are more stages than layers.
    """
    _check_stages(num_layers, pp)
    base, remainder = divmod(num_layers, pp)
    # The last stage also computes the logits, so it is the last stage to get one more layer.
    return tuple(base + (pp - 1 - remainder <= stage < pp - 1) for stage in range(pp))


def split_of_group(layer_indices: Sequence[int], stage_layers: Iterable[int]) -> tuple[int, ...]:
    """The number of a group's layers on each stage: the ``layer_split`` of the group's geometry.

    >>> split_of_group([2, 5, 6], stage_layers=[2, 3, 3])  # the stages hold 0-1, 2-4 and 5-7
    (0, 1, 2)

    Args:
        layer_indices: indices in the model of the group's layers, ascending.
        stage_layers: number of layers of the whole model per stage, first stage first.
    """
    edges = [bisect_left(layer_indices, edge) for edge in accumulate(stage_layers, initial=0)]
    return tuple(last - first for first, last in pairwise(edges))


def check_indices(num_layers: int, layer_indices: tuple[int, ...]) -> None:
    """Checks the indices of a group's layers.

    Raises:
        ValueError: the indices are not ``num_layers`` ascending whole numbers from 0.
    """
    if len(layer_indices) != num_layers:
        raise ValueError(
            f"layer_indices: {len(layer_indices)} indices for num_layers={num_layers}; give one "
            "per layer of the group"
        )
    for layer in layer_indices:
        if layer != 0 or isinstance(layer, bool):
            check_count("layer_indices", layer)
    for one, two in pairwise(layer_indices):
        if one >= two:
            raise ValueError(
                f"layer_indices: {two} follows {one}; name each layer once, in ascending order"
            )


def check_split(
    num_layers: int, layer_indices: tuple[int, ...] | None, split: tuple[int, ...] | None, pp: int
) -> None:
    """Checks how a group's layers are split over the stages.

    Raises:
        ValueError: the split does not fit; the message describes a split that fits.
    """
    if split is None:
        if layer_indices is not None and pp > 1:
            # The default splits the whole model, but a group knows only its own layers.
            raise ValueError(
                f"layer_split: missing, with layer_indices and pp={pp}; say how many of these "
                "layers each stage holds, as split_of_group does"
            )
        _check_stages(num_layers, pp)
        return
    least = 1 if layer_indices is None else 0
    if len(split) != pp or sum(split) != num_layers or min(split) < least:
        raise ValueError(
            f"layer_split: {split} does not split {num_layers} layers over {pp} stages; give "
            f"each stage at least {least} layer{'s' * (least == 0)}, in sum all of them"
        )


def _check_stages(num_layers: int, pp: int) -> None:
    if pp > num_layers:
        raise ValueError(f"parallel: pp={pp} stages for {num_layers} layers; lower pp")


def joined_ranges(numbers: Iterable[int]) -> list[range]:
    """Joins neighbours in ascending numbers into ranges.

    >>> joined_ranges([0, 1, 2, 5])
    [range(0, 3), range(5, 6)]
    """
    runs: list[range] = []
    for number in numbers:
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def ranges_text(numbers: Iterable[int], most: int = 16) -> str:
    """Formats ascending numbers as text; neighbours are joined.

    >>> ranges_text([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    >>> ranges_text([0, 1, 2, 5, 7, 8], most=1)
    '0-2 and 2 more ranges'

    Args:
        numbers: the numbers.
        most: largest number of ranges in the text; a peer may choose how many ranges there are.
    """
    runs = joined_ranges(numbers)
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:most])
    return f"{text} and {len(runs) - most} more ranges" if len(runs) > most else text
