"""The geometry of attention: which KV heads, parts and tokens each rank of an engine holds.

No divisibility is assumed anywhere: 9 layers over 2 stages, 3 KV heads over 2 ranks and 6 heads
over 4 ranks are ordinary. What all groups have in common is :mod:`kvferry.topology.group`;
recurrent layers have other cells, see :mod:`kvferry.topology.states`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.layouts.layout import Layout
from kvferry.topology.group import GroupGeometry, Share
from kvferry.topology.sharding import (
    ParallelShape,
    check_count,
    check_dcp,
    heads_of,
    query_heads_of,
    replicas_of,
    split_heads,
)
from kvferry.topology.tensors import Part, TensorKind, dtype_name

_MAX_WINDOW = 1 << 40
"""Tokens of the longest window or chunk: no request is longer, and sums stay inside 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class EngineGeometry(GroupGeometry):
    """One KV cache group of attention layers of one engine.

    >>> geometry = EngineGeometry(num_layers=9, num_kv_heads=3, head_size=64, dtype="float32",
    ...                           block_size=16, layout="NHD", parallel=ParallelShape(tp=2, pp=2))
    >>> geometry.layers(0), geometry.layers(2)
    (range(0, 5), range(5, 9))
    >>> geometry.heads(0), geometry.heads(1)
    (range(0, 1), range(1, 3))
    >>> geometry.tensor_names(2)
    ('layer.5', 'layer.6', 'layer.7', 'layer.8')
    >>> geometry.cache_shape(1, num_blocks=100)
    (2, 100, 16, 2, 64)

    Raises:
        ValueError: a value is out of its range, or the layout cannot hold the cells; the message
            names the argument, its value and what would work.
    """

    num_kv_heads: int
    """KV heads of the model; 1 with ``use_mla``."""
    head_size: int
    """Elements of a head of k (or of the latent)."""
    dtype: str
    """Given as a torch dtype or a name; kept as the bare name."""
    head_size_v: int | None = None
    """Elements of a head of v where they differ from ``head_size``."""
    use_mla: bool = False
    """One latent part with one head, which every TP rank holds."""
    sliding_window: int | None = None
    """Tokens that the group keeps of a request, as :func:`first_kept_token` counts them."""
    attention_chunk_size: int | None = None
    """The same for a group that keeps the chunk of the next token, in tokens per chunk."""
    scale_dtype: str | None = None
    """Of a quantised cache: the dtype of its scales, one per part, token and head."""
    packing: str = ""
    """Of opaque blocks, whose heads hold their cells in an order that no layout says: the name of
    that order. They move whole, and only to blocks of the same packing and size."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: Any,
        block_size: int,
        layout: Layout | str,
        parallel: ParallelShape,
        head_size_v: int | None = None,
        use_mla: bool = False,
        layer_split: Sequence[int] | None = None,
        layer_names: Sequence[str] | None = None,
        layer_indices: Sequence[int] | None = None,
        sliding_window: int | None = None,
        attention_chunk_size: int | None = None,
        scale_dtype: Any = None,
        page_size_padded: int | None = None,
        packing: str = "",
    ) -> None:
        # Written out for its types: dtypes of torch, names of layouts, lists of layers.
        given = dict(locals())
        del given["self"]
        self._set(**given)
        self.__post_init__()

    def __post_init__(self) -> None:
        # By the class's name: one with slots is another than the one that super() would look for.
        GroupGeometry.__post_init__(self)
        check_count("num_kv_heads", self.num_kv_heads)
        check_count("head_size", self.head_size)
        self._set(dtype=dtype_name(self.dtype), use_mla=bool(self.use_mla))
        if self.scale_dtype is not None:
            self._set(scale_dtype=dtype_name(self.scale_dtype))
        if self.head_size_v == self.head_size:
            self._set(head_size_v=None)
        if self.head_size_v is not None:
            check_count("head_size_v", self.head_size_v)
        if self.use_mla and (self.num_kv_heads != 1 or self.head_size_v is not None):
            raise ValueError(
                f"use_mla: the latent has 1 head and no v, got num_kv_heads={self.num_kv_heads}, "
                f"head_size_v={self.head_size_v}; write num_kv_heads=1 and leave head_size_v out"
            )
        self._check_tokens()
        self._check_page()

    def _check_tokens(self) -> None:
        check_dcp(self.parallel.dcp, self.parallel.tp, self.num_kv_heads)
        turn = self.parallel.interleave_size
        if self.parallel.num_context_ranks > 1 and self.block_size % turn:
            raise ValueError(
                f"parallel: interleave_size={turn} does not divide block_size={self.block_size}; "
                "the tokens of one turn lie in one block"
            )
        if self.packing and self.parallel.num_context_ranks > 1:
            raise ValueError(
                f"packing: {self.packing!r} says that blocks move whole, but {self.parallel} "
                "spreads the tokens of a block over ranks; take dcp=1 and pcp=1"
            )
        for field in ("sliding_window", "attention_chunk_size"):
            if getattr(self, field) is not None:
                check_count(field, getattr(self, field), most=_MAX_WINDOW)
        self.first_kept_token(0)  # raises where both are given

    def _check_page(self) -> None:
        kind = self.kinds(self.parallel.tp - 1)[0]  # no rank has more heads than the last one
        page = math.prod(self.layout.shape(kind.box(1, 1))) * kind.itemsize  # raises: lacks a dim
        padded = self.page_size_padded
        if padded is not None and (padded < page or padded % kind.itemsize):
            raise ValueError(
                f"page_size_padded: {padded} bytes; a page of {self.block_size} tokens and "
                f"{kind.heads} heads needs {page}, and a whole number of elements of "
                f"{kind.itemsize}"
            )

    # ---- cells -----------------------------------------------------------------------------

    @property
    def cells(self) -> Mapping[str, object]:
        """What a cell is; see :attr:`GroupGeometry.cells`."""
        return {
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size if self.head_size_v is None else self.head_size_v,
            "dtype": self.dtype,
            "use_mla": self.use_mla,
            "scale_dtype": self.scale_dtype,
            "recurrent_state": None,
            "opaque_blocks": (
                f"{self.packing} in blocks of {self.block_size} tokens" if self.packing else "none"
            ),
        }

    def kinds(self, rank: int) -> tuple[TensorKind, ...]:
        """What lies in the layers' own tensors, then in those of each kind of scale."""
        sizes = {"latent": self.head_size}
        if not self.use_mla:
            sizes = {"k": self.head_size, "v": self.head_size_v or self.head_size}
        own = TensorKind(
            suffix="",
            layout=self.layout,
            parts=tuple(Part(name, size, self.dtype) for name, size in sizes.items()),
            tokens=self.block_size,
            heads=len(self.heads(rank)),
            page_size_padded=self.page_size_padded,
        )
        if self.scale_dtype is None:
            return (own,)
        return (own, *(self._scale_kind(own, name, self.scale_dtype) for name in sizes))

    def _scale_kind(self, own: TensorKind, part: str, dtype: str) -> TensorKind:
        """The kind of the scales of one part: its order of dims, one element per head."""
        order = self.layout.order.replace("K", "").replace("C", "D")
        order += self.layout.inner_orders.get(part, "").replace("C", "D")
        scale = Part(f"{part}_scale", 1, dtype)
        return replace(
            own,
            suffix=f".{scale.name}",
            layout=Layout(order),
            parts=(scale,),
            page_size_padded=None,
        )

    def bound_span(self, first_token: int, num_tokens: int) -> tuple[int, int]:
        """The tokens that a copy of ``[first_token, num_tokens)`` moves.

        Of opaque blocks all that they touch: the rest of the last one is nobody's yet.
        """
        if not self.packing or first_token == num_tokens:
            return first_token, num_tokens
        size = self.block_size
        return first_token // size * size, -(-num_tokens // size) * size

    # ---- heads -----------------------------------------------------------------------------

    def shares(self, rank: int) -> tuple[Share, ...]:
        """What a rank holds of each of its layers: its heads."""
        tp_rank = self.rank_coordinates(rank).tp
        return (Share(None, heads_of(tp_rank, self.parallel.tp, self.num_kv_heads)),)

    def split_share(self, share: Share) -> Iterator[tuple[range, range]]:
        """Splits heads at the borders between TP ranks: some heads, and the ranks with them."""
        return split_heads(share.heads, self.parallel.tp, self.num_kv_heads)

    def head_replicas(self, head: int) -> range:
        """The TP ranks that hold a KV head."""
        return replicas_of(head, self.parallel.tp, self.num_kv_heads)

    def ranks_with(self, layer: int, head: int, context: int) -> range:
        """The ranks that hold a layer's cells of one head for the tokens of a context rank.

        Raises:
            ValueError: the layer is not one of the group's.
        """
        return next(self.owners(layer, Share(None, range(head, head + 1)), context))[1]

    def query_heads(self, rank: int, num_query_heads: int) -> range:
        """The model's query heads that a rank computes; may be empty.

        Raises:
            ValueError: ``num_query_heads`` is not a multiple of the KV heads.
        """
        at = self.rank_coordinates(rank)
        return query_heads_of(at.tp, self.parallel.tp, self.num_kv_heads, num_query_heads)
