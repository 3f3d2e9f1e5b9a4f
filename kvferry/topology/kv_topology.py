"""The relation of a rank to the ranks of another engine, in the usual terms of the field.

A thin view of the geometry. Pairs without a whole ratio are served by
:meth:`KVTopology.get_target_remote_ranks` and by plans. If the answer must be one number, such a
pair raises an error that names the alternative.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from kvferry.layouts.layout import Layout
from kvferry.topology.sharding import check_count, default_split, heads_of, replicas_of


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTopology:
    """A rank of an engine, seen as a peer of engines with other shapes.

    >>> topology = KVTopology(tp_rank=1, tp_size=2, num_kv_heads=3, block_size=16)
    >>> topology.get_target_remote_ranks(remote_tp_size=3, remote_pp_size=2)
    [(1, 0, 1), (2, 0, 2), (4, 1, 1), (5, 1, 2)]

    Raises:
        ValueError: a rank is outside its size, a size is below 1, or the layout is unknown.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    pp_size: int = 1
    num_kv_heads: int
    """Number of KV heads of the model; not used with ``is_mla``."""
    block_size: int
    """Number of tokens per block."""
    is_mla: bool = False
    """Whether the cache holds one latent, which every TP rank holds."""
    layout: Layout | str | None = None
    """Layout of the cache; NHD by default."""
    num_layers: int | None = None
    """Number of layers of the model. Without this number, stages count as equally long, which is
    exact if the stages of both engines divide the layers."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp"):
            size = check_count(f"{name}_size", getattr(self, f"{name}_size"))
            rank = getattr(self, f"{name}_rank")
            if not 0 <= rank < size:
                raise ValueError(f"{name}_rank: {rank} is not one of 0 to {size - 1}")
        check_count("num_kv_heads", self.num_kv_heads)
        check_count("block_size", self.block_size)
        self._order()  # raises if the layout is unknown

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Local TP ranks per remote TP rank; the negative inverse if the remote engine has more.

        Raises:
            ValueError: there is no whole ratio; :meth:`get_target_remote_ranks` serves any pair.
        """
        return _ratio("tp", self.tp_size, check_count("remote_tp_size", remote_tp_size))

    def pp_ratio(self, remote_pp_size: int) -> int:
        """Local stages per remote stage; the negative inverse if the remote engine has more.

        Raises:
            ValueError: there is no whole ratio; :meth:`get_target_remote_ranks` serves any pair.
        """
        return _ratio("pp", self.pp_size, check_count("remote_pp_size", remote_pp_size))

    def block_size_ratio(self, remote_block_size: int) -> int | Fraction:
        """Local tokens per block divided by remote tokens per block: whole, or an exact fraction.

        >>> KVTopology(tp_rank=0, tp_size=1, num_kv_heads=1, block_size=16).block_size_ratio(64)
        Fraction(1, 4)
        """
        ratio = Fraction(self.block_size, check_count("remote_block_size", remote_block_size))
        return int(ratio) if ratio.denominator == 1 else ratio

    def get_target_remote_ranks(
        self, remote_tp_size: int, remote_pp_size: int = 1
    ) -> list[tuple[int, int, int]]:
        """The ranks from which this rank reads, ascending: ``(rank, pp_rank, tp_rank)``.

        There is a rank for each remote stage that holds some local layers and each local head. If
        a head has remote replicas, the local replicas are spread evenly over them.
        """
        check_count("remote_tp_size", remote_tp_size)
        num_heads = 1 if self.is_mla else self.num_kv_heads
        tp_ranks = set()
        for head in heads_of(self.tp_rank, self.tp_size, num_heads):
            here = replicas_of(head, self.tp_size, num_heads)
            there = replicas_of(head, remote_tp_size, num_heads)
            tp_ranks.add(there[here.index(self.tp_rank) * len(there) // len(here)])
        return [
            (stage * remote_tp_size + tp_rank, stage, tp_rank)
            for stage in self._remote_stages(check_count("remote_pp_size", remote_pp_size))
            for tp_rank in sorted(tp_ranks)
        ]

    def is_kv_replicated(self, remote_tp_size: int | None = None) -> bool:
        """Whether several TP ranks hold the same head: remote ranks, or local ranks if no size."""
        return (remote_tp_size or self.tp_size) > self.num_kv_heads

    def replicates_kv_cache(self, remote_tp_size: int | None = None) -> bool:
        """Whether several TP ranks hold the same cells; a latent cannot be divided."""
        return self.is_mla or self.is_kv_replicated(remote_tp_size)

    @property
    def split_k_and_v(self) -> bool:
        """Whether K and V of a layer lie apart, each with its own sequence of blocks."""
        order = self._order()
        return not self.is_mla and "L" not in order and "K" in order.split("B")[0]

    def _order(self) -> str:
        layout = self.layout or "NHD"
        return (layout if isinstance(layout, Layout) else Layout.parse(layout)).order

    def _remote_stages(self, remote_pp_size: int) -> list[int]:
        first, last = self._stages(self.pp_size)[self.pp_rank]
        return [
            stage
            for stage, (start, stop) in enumerate(self._stages(remote_pp_size))
            if max(first, start) < min(last, stop)
        ]

    def _stages(self, pp_size: int) -> list[tuple[Fraction, Fraction]]:
        """First and last layer of each stage; fractions of 1 if the number of layers is unknown."""
        if self.num_layers is None:
            lengths = [Fraction(1, pp_size)] * pp_size
        else:
            lengths = [Fraction(count) for count in default_split(self.num_layers, pp_size)]
        return list(pairwise(accumulate(lengths, initial=Fraction(0))))


def _ratio(axis: str, ours: int, theirs: int) -> int:
    larger, smaller = max(ours, theirs), min(ours, theirs)
    if larger % smaller:
        raise ValueError(
            f"{axis}_ratio: {ours} here and {theirs} there have no whole ratio; ask "
            "get_target_remote_ranks, which serves any two sizes"
        )
    return larger // smaller if ours >= theirs else -(larger // smaller)
