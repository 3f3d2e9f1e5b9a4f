"""Which cells a rank holds: ranges of layers and heads, and the shape of its tensors.

A cell is ``(layer, part, token, head, element)`` with the model's own layer and head indices. No
divisibility is assumed anywhere: 9 layers over 2 stages, 3 KV heads over 2 ranks and 6 heads over
4 ranks are ordinary. Recurrent layers have other cells: see :mod:`kvferry.topology.states`.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from kvferry.layouts.layout import Box, Layout
from kvferry.topology.description import GroupDescription, PartStrides, RankMemory, StatePart
from kvferry.topology.head_ranges import (
    check_dcp,
    heads_of,
    query_heads_of,
    replicas_of,
    split_heads,
)
from kvferry.topology.layer_ranges import (
    check_indices,
    check_split,
    default_split,
    ranges_text,
)
from kvferry.topology.parallel import ParallelShape, RankCoordinates, check_count
from kvferry.topology.parts import ITEMSIZES, Part, dtype_name
from kvferry.topology.states import (
    Share,
    channels_of,
    check_state_group,
    split_channels,
    state_kinds,
    state_text,
)
from kvferry.topology.tensors import TensorKind, dense_memory
from kvferry.topology.token_shard import TokenShard
from kvferry.topology.windows import first_kept_token

__all__ = ["EngineGeometry", "ParallelShape", "RankCoordinates"]

_SHAPE_FIELDS = ("tp", "pp", "dcp", "pcp", "interleave_size")

_PLAIN_FIELDS = tuple(
    field for field in GroupDescription.__struct_fields__ if field not in ("layout", *_SHAPE_FIELDS)
)
"""Fields that a geometry and its description have alike."""

_MAX_PAGE = 1 << 40
"""Bytes of the largest padded page."""

_MAX_WINDOW = 1 << 40
"""Tokens of the longest window or chunk: no request is longer, and sums stay inside 64 bits."""

CROSS_LAYER_NAME = "layers"
"""Name of the tensor that holds every layer of a rank."""


@dataclass(frozen=True, slots=True, init=False)
class EngineGeometry:
    """One KV cache group of one engine: which cells each rank holds, and in what layout.

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

    num_layers: int
    """Layers of the group."""
    num_kv_heads: int
    """KV heads of the model; 1 with ``use_mla``."""
    head_size: int
    """Elements of a head of k (or of the latent)."""
    dtype: str
    """Given as a torch dtype or a name; kept as the bare name."""
    block_size: int
    """Tokens per block and rank; one table entry has ``virtual_block_size``."""
    layout: Layout
    """Given as a :class:`Layout`, a name or an order."""
    parallel: ParallelShape
    head_size_v: int | None = None
    """Elements of a head of v where they differ from ``head_size``."""
    use_mla: bool = False
    """One latent part with one head, which every TP rank holds."""
    layer_split: tuple[int, ...] | None = None
    """The group's layers per stage, first stage first; zeros are fine with ``layer_indices``."""
    layer_names: tuple[str, ...] | None = None
    """Tensor name of each of the group's layers, first layer first."""
    layer_indices: tuple[int, ...] | None = None
    """The model's index of each of the group's layers, ascending; the first ones if left out."""
    sliding_window: int | None = None
    """Tokens that the group keeps of a request, as :func:`first_kept_token` counts them."""
    attention_chunk_size: int | None = None
    """The same for a group that keeps the chunk of the next token, in tokens per chunk."""
    scale_dtype: str | None = None
    """Of a quantised cache: the dtype of its scales, one per part, token and head."""
    page_size_padded: int | None = None
    """Bytes to which a page, one block of one layer on a rank, is padded. The cells of such a page
    lie together, in the layout's order of the other dims; pages follow each other."""
    states: tuple[StatePart, ...] = ()
    """Of a group of recurrent layers: what each keeps, see :func:`recurrent_group`, which gives
    the fields above that speak of heads values that mean nothing."""
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
        states: Sequence[StatePart] = (),
        packing: str = "",
    ) -> None:
        values = {
            "num_layers": check_count("num_layers", num_layers),
            "num_kv_heads": check_count("num_kv_heads", num_kv_heads),
            "head_size": check_count("head_size", head_size),
            "dtype": dtype_name(dtype),
            "block_size": check_count("block_size", block_size),
            "layout": layout if isinstance(layout, Layout) else Layout.parse(layout),
            "parallel": parallel,
            "head_size_v": None if head_size_v == head_size else head_size_v,
            "use_mla": bool(use_mla),
            "layer_split": None if layer_split is None else tuple(layer_split),
            "layer_names": None if layer_names is None else tuple(layer_names),
            "layer_indices": None if layer_indices is None else tuple(layer_indices),
            "sliding_window": sliding_window,
            "attention_chunk_size": attention_chunk_size,
            "scale_dtype": None if scale_dtype is None else dtype_name(scale_dtype),
            "page_size_padded": page_size_padded,
            "states": tuple(states),
            "packing": packing,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if self.head_size_v is not None:
            check_count("head_size_v", self.head_size_v)
        if self.use_mla and (self.num_kv_heads != 1 or self.head_size_v is not None):
            raise ValueError(
                f"use_mla: the latent has 1 head and no v, got num_kv_heads={self.num_kv_heads}, "
                f"head_size_v={self.head_size_v}; write num_kv_heads=1 and leave head_size_v out"
            )
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
        self._check_layers()
        self._check_windows()
        padded = self.page_size_padded
        if padded is not None:
            check_count("page_size_padded", padded, most=_MAX_PAGE)
        if self.states:
            check_state_group(self)
            return
        heads = -(-self.num_kv_heads // self.parallel.tp)  # most heads of any rank
        box = Box(1, 1, self.block_size, heads, self.part_sizes)
        page = math.prod(self.layout.shape(box)) * self.itemsize  # raises where it lacks a dim
        if padded is not None and (padded < page or padded % self.itemsize):
            raise ValueError(
                f"page_size_padded: {padded} bytes; a page of {self.block_size} tokens and {heads} "
                f"heads needs {page}, and a whole number of elements of {self.itemsize}"
            )

    def _check_layers(self) -> None:
        if self.layer_indices is not None:
            check_indices(self.num_layers, self.layer_indices)
        check_split(self.num_layers, self.layer_indices, self.layer_split, self.parallel.pp)
        names = self.layer_names
        if names is not None and not len(set(names)) == len(names) == self.num_layers:
            raise ValueError(
                f"layer_names: {len(names)} names, {len(set(names))} of them different, for "
                f"{self.num_layers} layers; give each layer its own"
            )

    def _check_windows(self) -> None:
        for field in ("sliding_window", "attention_chunk_size"):
            if getattr(self, field) is not None:
                check_count(field, getattr(self, field), most=_MAX_WINDOW)
        self.first_kept_token(0)  # raises where both are given

    # ---- who holds what --------------------------------------------------------------------

    @property
    def tensor_kinds(self) -> tuple[TensorKind, ...]:
        """What lies in the layers' own tensors, then in those of each kind of scale.

        Of recurrent layers: what lies in those of each state, on rank 0.
        """
        return self._kinds(0)

    def _kinds(self, rank: int) -> tuple[TensorKind, ...]:
        if self.states:
            tp_rank, tp = self.rank_coordinates(rank).tp, self.parallel.tp
            return state_kinds(self.states, self.layout, self.page_size_padded, tp_rank, tp)
        itemsize = ITEMSIZES[self.dtype]
        head_size_v = self.head_size if self.head_size_v is None else self.head_size_v
        sizes = (
            {"latent": self.head_size} if self.use_mla else {"k": self.head_size, "v": head_size_v}
        )
        parts = tuple(Part(name, size, self.dtype, itemsize) for name, size in sizes.items())
        own = TensorKind("", self.layout, parts, self.page_size_padded)
        if self.scale_dtype is None:
            return (own,)
        scale = Part("", 1, self.scale_dtype, ITEMSIZES[self.scale_dtype])
        return (own, *(own.scale(replace(scale, name=f"{name}_scale"), name) for name in sizes))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a cell: those of the layers' own tensors as they lie there, then scales."""
        return tuple(part for kind in self.tensor_kinds for part in kind.parts)

    @property
    def part_sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and elements per head of each part in the layers' own tensors."""
        return self.tensor_kinds[0].part_sizes

    @property
    def recurrent_state(self) -> str | None:
        """What the cells of recurrent layers are; ``None`` for attention."""
        return state_text(self.states) if self.states else None

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.parallel.world_size

    def rank_coordinates(self, rank: int) -> RankCoordinates:
        """Where a rank stands on each axis.

        Raises:
            ValueError: there is no such rank.
        """
        return self.parallel.coordinates(rank)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """The group's layers per stage."""
        if self.layer_split is not None:
            return self.layer_split
        return default_split(self.num_layers, self.parallel.pp)

    @property
    def model_layers(self) -> Sequence[int]:
        """The group's layers by their indices in the model, ascending."""
        return range(self.num_layers) if self.layer_indices is None else self.layer_indices

    def layers(self, rank: int) -> Sequence[int]:
        """The model's layers that a rank holds: a range without ``layer_indices``; may be empty."""
        stage = self.rank_coordinates(rank).pp
        first = sum(self.stage_layers[:stage])
        return self.model_layers[first : first + self.stage_layers[stage]]

    def layer_position(self, layer: int) -> int:
        """How many of the group's layers come before one of them.

        Raises:
            ValueError: the layer is not one of the group's.
        """
        layers = self.model_layers
        position = bisect_left(layers, layer)
        if position == len(layers) or layers[position] != layer:
            raise ValueError(f"layer: {layer} is not one of the group's {ranges_text(layers)}")
        return position

    def stage_of(self, layer: int) -> int:
        """The pipeline stage that holds one of the group's layers.

        Raises:
            ValueError: the layer is not one of the group's.
        """
        return bisect_right(list(accumulate(self.stage_layers)), self.layer_position(layer))

    def first_kept_token(self, num_computed: int) -> int:
        """The first token that the group still keeps once ``num_computed`` are computed."""
        return first_kept_token(
            num_computed,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )

    def first_bound_token(self, first_token: int, num_tokens: int) -> int:
        """The first token of a span that has cells of its own: of states only the last one."""
        return max(first_token, num_tokens - 1) if self.states else first_token

    def bound_span(self, first_token: int, num_tokens: int) -> tuple[int, int]:
        """The tokens that a copy of ``[first_token, num_tokens)`` moves.

        Of opaque blocks all that they touch: the rest of the last one is nobody's yet.
        """
        first_token = self.first_bound_token(first_token, num_tokens)
        if not self.packing or first_token == num_tokens:
            return first_token, num_tokens
        size = self.block_size
        return first_token // size * size, -(-num_tokens // size) * size

    @property
    def opaque_blocks(self) -> str:
        """What opaque blocks must have alike; ``none`` where a layout says all."""
        if not self.packing:
            return "none"
        return f"{self.packing} in blocks of {self.block_size} tokens"

    def heads(self, rank: int, part: str | None = None) -> range:
        """The model's KV heads that a rank holds; ranks beyond the heads hold replicas.

        Args:
            rank: whose.
            part: of a group of states: the section, of which the rank holds these channels.
        """
        if part is not None and self.states:
            return dict(self.shares(rank))[part]
        return heads_of(self.rank_coordinates(rank).tp, self.parallel.tp, self.num_kv_heads)

    def shares(self, rank: int) -> tuple[Share, ...]:
        """What a rank holds of each of its layers: its heads, or its channels of each section."""
        tp_rank = self.rank_coordinates(rank).tp
        if self.states:
            return channels_of(self.states, tp_rank, self.parallel.tp)
        return (Share(None, self.heads(rank)),)

    def owners(self, layer: int, share: Share, context: int) -> Iterator[tuple[range, range]]:
        """Splits heads or channels at the borders between ranks: some, and the ranks with them.

        Args:
            layer: one of the group's.
            share: what is split.
            context: only ranks that hold the tokens of this context rank.

        Raises:
            ValueError: the layer is not one of the group's.
        """
        tp, dcp = self.parallel.tp, self.parallel.dcp
        pcp_rank, dcp_rank = divmod(context, dcp)
        first = (self.stage_of(layer) * self.parallel.pcp + pcp_rank) * tp
        split = (
            split_channels(self.states, share, tp)
            if self.states
            else split_heads(share.heads, tp, self.num_kv_heads)
        )
        for some, replicas in split:
            # Their number is a multiple of dcp, and so is the first of them.
            turn = replicas[dcp_rank::dcp]
            yield some, range(first + turn.start, first + turn.stop, turn.step)

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

    @property
    def virtual_block_size(self) -> int:
        """Tokens that one entry of a block table spans, over all context ranks."""
        return self.block_size * self.parallel.num_context_ranks

    def token_shard(self, rank: int) -> TokenShard:
        """Which tokens of a request a rank holds.

        Raises:
            ValueError: there is no such rank.
        """
        return self.parallel.token_shard(rank)

    # ---- tensors ---------------------------------------------------------------------------

    def layer_name(self, layer: int) -> str:
        """The name of the tensor of one layer, given by its index in the model.

        Raises:
            ValueError: the layer is not one of the group's.
        """
        position = self.layer_position(layer)
        return f"layer.{layer}" if self.layer_names is None else self.layer_names[position]

    def tensors(self, rank: int) -> dict[str, TensorKind]:
        """A rank's tensors: name → what lies in it, as :meth:`tensor_names` orders them."""
        layers = self.layers(rank)
        names = [self.layer_name(layer) for layer in layers]
        if self.layout.is_cross_layer:
            names = [CROSS_LAYER_NAME] if layers else []
        kinds = self._kinds(rank)
        if self.states:  # a layer's states share its pages
            return {name + kind.suffix: kind for name in names for kind in kinds}
        return {name + kind.suffix: kind for kind in kinds for name in names}

    def tensor_names(self, rank: int) -> tuple[str, ...]:
        """Names of a rank's tensors: one per layer ascending, or ``("layers",)`` cross-layer.

        With scales, each of these names again with ``.k_scale``, then with ``.v_scale`` (or
        ``.latent_scale``). Of recurrent layers one per state, ``layer.0.conv``. Empty where the
        rank's stage holds none of the group's layers.
        """
        return tuple(self.tensors(rank))

    def box(self, rank: int, num_blocks: int, kind: TensorKind | None = None) -> Box:
        """What one tensor of a rank holds: one of a layer's own, unless a kind is given."""
        kind = self._kinds(rank)[0] if kind is None else kind
        layers = len(self.layers(rank)) if self.layout.is_cross_layer else 1
        return kind.box(layers, num_blocks, self.block_size, len(self.heads(rank)))

    def cache_shape(self, rank: int, num_blocks: int, scale: str | None = None) -> tuple[int, ...]:
        """The shape of each of a rank's tensors.

        Args:
            rank: whose tensors.
            num_blocks: blocks of each, the null block included.
            scale: a part of scales, for example ``"k_scale"``: the shape of its tensors, which
                have one element per head, and no dim K. Of recurrent layers the name of a state,
                the first one if left out; dims of a channel's elements are one.

        Raises:
            ValueError: there is no such rank, scale or state, or ``num_blocks`` is less than 1.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is less than 1")
        kinds = {kind.suffix: kind for kind in self._kinds(rank)}
        suffix = next(iter(kinds)) if scale is None else f".{scale}"
        if suffix not in kinds:
            names = ", ".join(known[1:] for known in kinds if known) or "none"
            raise ValueError(f"scale: {scale!r} is not one of the group's scales, {names}")
        return kinds[suffix].layout.shape(self.box(rank, num_blocks, kinds[suffix]))

    def part_strides(
        self, rank: int, num_blocks: int, strides: Sequence[int] | None = None
    ) -> dict[str, PartStrides]:
        """Where the cells of each part lie in one of a layer's own tensors, in bytes.

        Args:
            rank: whose tensor.
            num_blocks: blocks of the tensor, the null block included.
            strides: bytes per dim of :meth:`cache_shape`; if left out, dense or as
                ``page_size_padded`` says.
        """
        return self._kinds(rank)[0].part_strides(self.box(rank, num_blocks), strides)

    def nbytes(self, rank: int, num_blocks: int) -> int:
        """Bytes of all tensors of a rank, lying dense one after the other; padding included."""
        return sum(self.memory(rank, num_blocks).region_bytes)

    def memory(self, rank: int, num_blocks: int, *, region_per_tensor: bool = False) -> RankMemory:
        """A rank's memory if its tensors are dense, pages padded where the geometry says so.

        Args:
            rank: whose memory.
            num_blocks: blocks per tensor, the null block included.
            region_per_tensor: one region per tensor; otherwise all lie in region 0, one after
                the other, ``nbytes(rank, num_blocks)`` in all.
        """
        self.cache_shape(rank, num_blocks)  # raises
        tensors = [
            (name, kind, self.box(rank, num_blocks, kind))
            for name, kind in self.tensors(rank).items()
        ]
        return dense_memory(tensors, num_blocks, region_per_tensor=region_per_tensor)

    # ---- the wire --------------------------------------------------------------------------

    def description(self) -> GroupDescription:
        """This geometry as plain data; :meth:`from_description` gives it back."""
        return GroupDescription(
            layout=str(self.layout),
            **{field: getattr(self.parallel, field) for field in _SHAPE_FIELDS},
            **{field: getattr(self, field) for field in _PLAIN_FIELDS},
        )

    @classmethod
    def from_description(cls, group: GroupDescription) -> "EngineGeometry":
        """The geometry that a peer described.

        Raises:
            ValueError: the description makes no geometry.
        """
        return cls(
            layout=Layout.parse(group.layout),
            parallel=ParallelShape(**{field: getattr(group, field) for field in _SHAPE_FIELDS}),
            **{field: getattr(group, field) for field in _PLAIN_FIELDS},
        )
