"""The parallel shape of an engine, and where each rank stands in it."""

from dataclasses import dataclass

from kvferry.topology.token_shard import TokenShard

_MAX_COUNT = 1 << 20
"""Most layers, heads, elements, tokens per block or ranks per axis."""


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """A rank's place on each axis of its engine."""

    pp: int
    pcp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ParallelShape:
    """Ranks per axis of one engine; ``rank = (pp_rank * pcp + pcp_rank) * tp + tp_rank``.

    >>> ParallelShape(tp=4, pp=2).coordinates(6)
    RankCoordinates(pp=1, pcp=0, tp=2)

    Raises:
        ValueError: an axis is shorter than 1.
    """

    tp: int = 1
    """Tensor-parallel ranks: they share the heads."""
    pp: int = 1
    """Pipeline stages: they share the layers."""
    dcp: int = 1
    """Decode-context-parallel ranks; they lie inside TP."""
    pcp: int = 1
    """Prefill-context-parallel ranks."""
    interleave_size: int = 1
    """Consecutive tokens on one context rank (vLLM: ``cp_kv_cache_interleave_size``); without
    context parallelism it says nothing."""

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dcp", "pcp", "interleave_size"):
            check_count(axis, getattr(self, axis))

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.pp * self.pcp * self.tp

    @property
    def num_context_ranks(self) -> int:
        """Ranks over which the tokens of a request are spread."""
        return self.dcp * self.pcp

    def context_rank(self, rank: int) -> int:
        """A rank's number among them: ``pcp_rank * dcp + dcp_rank``.

        The ranks that hold one head are neighbours in TP, and take turns in DCP.

        >>> [ParallelShape(tp=4, pcp=2, dcp=2).context_rank(rank) for rank in range(8)]
        [0, 1, 0, 1, 2, 3, 2, 3]

        Raises:
            ValueError: there is no such rank.
        """
        at = self.coordinates(rank)
        return at.pcp * self.dcp + at.tp % self.dcp

    def token_shard(self, rank: int) -> TokenShard:
        """Which tokens of a request a rank holds.

        Raises:
            ValueError: there is no such rank.
        """
        return self.shard_of_context(self.context_rank(rank))

    def shard_of_context(self, context: int) -> TokenShard:
        """Which tokens the ranks with this context rank hold."""
        count = self.num_context_ranks
        return TokenShard(count, context, self.interleave_size if count > 1 else 1)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Where a rank stands on each axis.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: {rank} is not one of 0 to {self.world_size - 1}")
        stage, tp_rank = divmod(rank, self.tp)
        pp_rank, pcp_rank = divmod(stage, self.pcp)
        return RankCoordinates(pp=pp_rank, pcp=pcp_rank, tp=tp_rank)


def check_count(name: str, value: int, *, most: int = _MAX_COUNT) -> int:
    """A whole number from 1 to ``most``; by default what no engine has more of.

    Raises:
        ValueError: it is not; the message names it.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: {value!r} is not a whole number")
    if value < 1:
        raise ValueError(f"{name}: {value} is less than 1")
    # A peer's description is turned into a geometry too; absurd counts must not cost time.
    if value > most:
        raise ValueError(f"{name}: {value} is more than {most}")
    return value
