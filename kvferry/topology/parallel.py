"""The parallel shape of an engine, and where each rank stands in it."""

from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dcp", "pcp"):
            check_count(axis, getattr(self, axis))

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.pp * self.pcp * self.tp

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
