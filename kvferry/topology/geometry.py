"""The geometry of attention: the KV heads, parts and tokens that each rank of an engine holds.

No axis needs to divide evenly: 9 layers over 2 stages, 3 KV heads over 2 ranks, or 6 heads over 4
ranks are all valid. :mod:`kvferry.topology.group` contains the properties of all groups. Recurrent
layers have other cells, see :mod:`kvferry.topology.states`.
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
from kvferry.topology.tensors import TensorKind, TensorPart, dtype_name

_MAX_WINDOW = 1 << 40
"""Number of tokens of the longest window or chunk. No request is longer, and sums stay below 64
bits."""


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class EngineGeometry(GroupGeometry):
    """A KV cache group of attention layers of an engine.

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
        ValueError: a value is out of range, or the layout cannot hold the cells; the message names
            the argument, the value and a working value.
    """

    num_kv_heads: int
    """Number of KV heads of the model; 1 with ``use_mla``."""
    head_size: int
    """Number of elements of a head of k (or of the latent)."""
    dtype: str
    """Dtype of the cells, given as a torch dtype or a name; stored as the bare name."""
    head_size_v: int | None = None
    """Number of elements of a head of v if it differs from ``head_size``."""
    use_mla: bool = False
    """Whether a cell has one latent part with one head, which every TP rank holds."""
    sliding_window: int | None = None
    """Number of tokens that the group keeps of a request, see :func:`first_kept_token`."""
    attention_chunk_size: int | None = None
    """Number of tokens per chunk if the group keeps only the chunk of the next token."""
    scale_dtype: str | None = None
    """Dtype of the scales of a quantised cache; there is a scale per part, token and head."""
    packing: str = ""
    """Name of the order of cells in opaque blocks, which no layout describes. Opaque blocks move
    whole, and only to blocks with the same packing and size."""
    separate_parts: bool = False
    """Whether k and v lie in tensors of their own, ``layer.0.k`` and ``layer.0.v``. The order of
    the dims is then that of the layout without K."""

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
        separate_parts: bool = False,
    ) -> None:
        # Written out because of the types: torch dtypes, names of layouts, lists of layers.
        given = dict(locals())
        del given["self"]
        self._set(**given)
        self.__post_init__()

    def __post_init__(self) -> None:
        # Called by class name: a class with slots is replaced by a new class, so super() would
        # fail.
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
        self._check_separate()
        self._check_tokens()
        self._check_page()

    def _check_separate(self) -> None:
        joined = self.use_mla or self.packing or self.layout.inner_orders or self.page_size_padded
        if self.separate_parts and joined:
            raise ValueError(
                f"separate_parts: k and v have tensors of their own, but use_mla={self.use_mla}, "
                f"packing={self.packing!r}, page_size_padded={self.page_size_padded} and layout "
                f"{self.layout} join the parts of a page; leave one of the two out"
            )

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
        self.first_kept_token(0)  # raises if both are given

    def _check_page(self) -> None:
        kind = self.kinds(self.parallel.tp - 1)[0]  # no rank has more heads than the last rank
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
        """The properties of a cell; see :attr:`GroupGeometry.cells`."""
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
        """The content of the layers' own tensors, then of the tensors of each kind of scale."""
        sizes = {"latent": self.head_size}
        if not self.use_mla:
            sizes = {"k": self.head_size, "v": self.head_size_v or self.head_size}
        own = TensorKind(
            suffix="",
            layout=self.layout,
            parts=tuple(TensorPart(name, size, self.dtype) for name, size in sizes.items()),
            tokens=self.block_size,
            heads=len(self.heads(rank)),
            page_size_padded=self.page_size_padded,
        )
        kinds = self._separated(own) if self.separate_parts else (own,)
        if self.scale_dtype is None:
            return kinds
        return (*kinds, *(self._scale_kind(own, name, self.scale_dtype) for name in sizes))

    def _separated(self, own: TensorKind) -> tuple[TensorKind, ...]:
        """The kinds of the tensors of k and of v, from the kind of a tensor with both parts."""
        order = self.layout.order.replace("K", "").replace("C", "D")
        return tuple(
            replace(own, suffix=f".{part.name}", layout=Layout(order), parts=(part,))
            for part in own.parts
        )

    def _scale_kind(self, own: TensorKind, part: str, dtype: str) -> TensorKind:
        """The kind of the scales of a part: same order of dims, an element per head."""
        order = self.layout.order.replace("K", "").replace("C", "D")
        order += self.layout.inner_orders.get(part, "").replace("C", "D")
        scale = TensorPart(f"{part}_scale", 1, dtype)
        return replace(
            own,
            suffix=f".{scale.name}",
            layout=Layout(order),
            parts=(scale,),
            page_size_padded=None,
        )

    def bound_span(self, first_token: int, num_tokens: int) -> tuple[int, int]:
        """The span of tokens that a copy of ``[first_token, num_tokens)`` moves.

        For opaque blocks, this is the span of all touched blocks; no token uses the rest of the
        last block yet.
        """
        if not self.packing or first_token == num_tokens:
            return first_token, num_tokens
        size = self.block_size
        return first_token // size * size, -(-num_tokens // size) * size

    # ---- heads -----------------------------------------------------------------------------

    def shares(self, rank: int) -> tuple[Share, ...]:
        """The heads of a rank, in each of its layers."""
        tp_rank = self.rank_coordinates(rank).tp
        return (Share(None, heads_of(tp_rank, self.parallel.tp, self.num_kv_heads)),)

    def split_share(self, share: Share) -> Iterator[tuple[range, range]]:
        """Splits heads at the borders between TP ranks; yields some heads and their ranks."""
        return split_heads(share.heads, self.parallel.tp, self.num_kv_heads)

    def head_replicas(self, head: int) -> range:
        """The TP ranks with a KV head."""
        return replicas_of(head, self.parallel.tp, self.num_kv_heads)

    def ranks_with(self, layer: int, head: int, context: int) -> range:
        """The ranks that hold a layer's cells of a head for the tokens of a context rank.

        Raises:
            ValueError: the layer does not belong to the group.
        """
        return next(self.owners(layer, Share(None, range(head, head + 1)), context))[1]

    def query_heads(self, rank: int, num_query_heads: int) -> range:
        """The model's query heads that a rank computes; may be empty.

        Raises:
            ValueError: ``num_query_heads`` is not a multiple of the KV heads.
        """
        at = self.rank_coordinates(rank)
        return query_heads_of(at.tp, self.parallel.tp, self.num_kv_heads, num_query_heads)
