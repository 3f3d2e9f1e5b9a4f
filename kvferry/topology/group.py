"""One KV cache group of an engine: what groups of attention and groups of states have in common.

A group is some layers of the model that share a block table. A cell is
``(layer, part, token, head, element)`` with the model's own layer and head indices. Two kinds of
groups exist, and whoever takes a group takes either:

==============================================  ==================================  =============
class                                           what TP divides                     per block
==============================================  ==================================  =============
:class:`~kvferry.topology.EngineGeometry`       KV heads                            tokens
:class:`~kvferry.topology.StateGeometry`        channels of each section of state   one state
==============================================  ==================================  =============

Layers, stages, names, pages and memory are the same for both, and are here. What differs is what
the abstract members below say.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

from kvferry.layouts.layout import Box, CellStrides, Layout
from kvferry.topology.sharding import (
    ParallelShape,
    RankCoordinates,
    TokenShard,
    check_count,
    check_indices,
    check_split,
    default_split,
    ranges_text,
)
from kvferry.topology.tensors import Part, RankMemory, TensorKind, dense_memory
from kvferry.topology.windows import first_kept_token

CROSS_LAYER_NAME = "layers"
"""Name of the tensor that holds every layer of a rank."""

_MAX_PAGE = 1 << 40
"""Bytes of the largest padded page."""


class Share(NamedTuple):
    """Neighbouring heads of all parts, or channels of one section of a state."""

    part: str | None
    """Name of the part, ``"conv.x"``; ``None`` for heads, which all parts of a group share."""
    heads: range
    """Indices in the model; channels count from the start of their section."""

    def has(self, part: str) -> bool:
        """Whether these are heads or channels of a part."""
        return self.part in (None, part)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGeometry(ABC):
    """Which cells of one KV cache group each rank of an engine holds, and in what layout.

    Raises:
        ValueError: a value is out of its range; the message names the argument, its value and what
            would work. Whatever the numbers, this takes time only for the length of what is given.
    """

    num_layers: int
    """Layers of the group."""
    block_size: int
    """Tokens per block and rank; one table entry has ``virtual_block_size``."""
    layout: Layout
    """Given as a :class:`Layout`, a name or an order."""
    parallel: ParallelShape
    layer_split: tuple[int, ...] | None = None
    """The group's layers per stage, first stage first; zeros are fine with ``layer_indices``."""
    layer_names: tuple[str, ...] | None = None
    """Tensor name of each of the group's layers, first layer first."""
    layer_indices: tuple[int, ...] | None = None
    """The model's index of each of the group's layers, ascending; the first ones if left out."""
    page_size_padded: int | None = None
    """Bytes to which a page, one block of one layer on a rank, is padded. The cells of such a page
    lie together, in the layout's order of the other dims; pages follow each other."""

    is_recurrent: ClassVar[bool] = False
    """Whether a block keeps one state, that after the last of its tokens, and no cell per token."""

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            self._set(layout=Layout.parse(self.layout))
        for field in ("layer_split", "layer_names", "layer_indices"):
            if (given := getattr(self, field)) is not None:
                self._set(**{field: tuple(given)})
        check_count("num_layers", self.num_layers)
        check_count("block_size", self.block_size)
        if self.page_size_padded is not None:
            check_count("page_size_padded", self.page_size_padded, most=_MAX_PAGE)
        if self.layer_indices is not None:
            check_indices(self.num_layers, self.layer_indices)
        check_split(self.num_layers, self.layer_indices, self.layer_split, self.parallel.pp)
        names = self.layer_names
        if names is not None and not len(set(names)) == len(names) == self.num_layers:
            raise ValueError(
                f"layer_names: {len(names)} names, {len(set(names))} of them different, for "
                f"{self.num_layers} layers; give each layer its own"
            )

    def _set(self, **values: object) -> None:
        """Sets fields of a geometry in the making."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # ---- what differs ----------------------------------------------------------------------

    @property
    @abstractmethod
    def sliding_window(self) -> int | None:
        """Tokens that the group keeps of a request, as :func:`first_kept_token` counts them."""

    @property
    @abstractmethod
    def attention_chunk_size(self) -> int | None:
        """The same for a group that keeps the chunk of the next token, in tokens per chunk."""

    @property
    @abstractmethod
    def cells(self) -> Mapping[str, object]:
        """What a cell of the group is, by name: two engines must have it alike for each layer.

        Groups of different kinds have one of these names in common, ``recurrent_state``.
        """

    @abstractmethod
    def kinds(self, rank: int) -> tuple[TensorKind, ...]:
        """What lies in the tensors of each layer of a rank, kind by kind.

        Raises:
            ValueError: there is no such rank.
        """

    @abstractmethod
    def shares(self, rank: int) -> tuple[Share, ...]:
        """What a rank holds of each of its layers: its heads, or its channels of each section.

        Raises:
            ValueError: there is no such rank.
        """

    @abstractmethod
    def split_share(self, share: Share) -> Iterator[tuple[range, range]]:
        """Splits heads or channels at the borders between TP ranks: some, and those with them."""

    def first_bound_token(self, first_token: int, num_tokens: int) -> int:
        """The first token of a span that has cells of its own: of states only the last one."""
        return first_token

    def bound_span(self, first_token: int, num_tokens: int) -> tuple[int, int]:
        """The tokens that a copy of ``[first_token, num_tokens)`` moves."""
        return self.first_bound_token(first_token, num_tokens), num_tokens

    # ---- ranks and layers ------------------------------------------------------------------

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

    # ---- heads -----------------------------------------------------------------------------

    def heads(self, rank: int, part: str | None = None) -> range:
        """The model's KV heads that a rank holds; ranks beyond the heads hold replicas.

        Args:
            rank: whose.
            part: of a group of states: the section, of which the rank holds these channels.

        Raises:
            ValueError: there is no such rank, or no such section.
        """
        shares = self.shares(rank)
        for share in shares:
            if share.part in (None, part):
                return share.heads
        names = ", ".join(str(share.part) for share in shares)
        raise ValueError(f"part: {part!r} is not one of the group's sections, {names}")

    def owners(self, layer: int, share: Share, context: int) -> Iterator[tuple[range, range]]:
        """Splits heads or channels at the borders between ranks: some, and the ranks with them.

        Args:
            layer: one of the group's.
            share: what is split.
            context: only ranks that hold the tokens of this context rank.

        Raises:
            ValueError: the layer is not one of the group's.
        """
        pcp_rank, dcp_rank = divmod(context, self.parallel.dcp)
        first = (self.stage_of(layer) * self.parallel.pcp + pcp_rank) * self.parallel.tp
        for some, replicas in self.split_share(share):
            # Their number is a multiple of dcp, and so is the first of them.
            turn = replicas[dcp_rank :: self.parallel.dcp]
            yield some, range(first + turn.start, first + turn.stop, turn.step)

    # ---- tokens ----------------------------------------------------------------------------

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

    def first_kept_token(self, num_computed: int) -> int:
        """The first token that the group still keeps once ``num_computed`` are computed."""
        return first_kept_token(
            num_computed,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )

    # ---- tensors ---------------------------------------------------------------------------

    @property
    def tensor_kinds(self) -> tuple[TensorKind, ...]:
        """The kinds of tensors of rank 0; those of other ranks hold other heads."""
        return self.kinds(0)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a cell: those of the layers' own tensors as they lie there, then scales."""
        return tuple(part for kind in self.tensor_kinds for part in kind.parts)

    @property
    def part_sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and elements per head of each part in the layers' own tensors."""
        return self.tensor_kinds[0].part_sizes

    @property
    def itemsize(self) -> int:
        """Bytes per element in the layers' own tensors."""
        return self.tensor_kinds[0].itemsize

    def layer_name(self, layer: int) -> str:
        """The name of the tensor of one layer, given by its index in the model.

        Raises:
            ValueError: the layer is not one of the group's.
        """
        position = self.layer_position(layer)
        return f"layer.{layer}" if self.layer_names is None else self.layer_names[position]

    def tensors(self, rank: int) -> dict[str, TensorKind]:
        """A rank's tensors: name → what lies in it, as :meth:`tensor_names` orders them."""
        names = self._tensor_owners(rank)
        return {name + kind.suffix: kind for kind in self.kinds(rank) for name in names}

    def _tensor_owners(self, rank: int) -> list[str]:
        """What the names of a rank's tensors begin with: its layers, or all of them."""
        layers = self.layers(rank)
        if self.layout.is_cross_layer:
            return [CROSS_LAYER_NAME] if layers else []
        return [self.layer_name(layer) for layer in layers]

    def tensor_names(self, rank: int) -> tuple[str, ...]:
        """Names of a rank's tensors: one per layer ascending, or ``("layers",)`` cross-layer.

        With scales, each of these names again with ``.k_scale``, then with ``.v_scale`` (or
        ``.latent_scale``). Of recurrent layers one per state, ``layer.0.conv``. Empty where the
        rank's stage holds none of the group's layers.
        """
        return tuple(self.tensors(rank))

    def box(self, rank: int, num_blocks: int, kind: TensorKind | None = None) -> Box:
        """What one tensor of a rank holds: one of a layer's own, unless a kind is given."""
        kind = self.kinds(rank)[0] if kind is None else kind
        return kind.box(len(self.layers(rank)) if self.layout.is_cross_layer else 1, num_blocks)

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
        kinds = {kind.suffix: kind for kind in self.kinds(rank)}
        suffix = next(iter(kinds)) if scale is None else f".{scale}"
        if suffix not in kinds:
            names = ", ".join(known[1:] for known in kinds if known) or "none"
            raise ValueError(f"scale: {scale!r} is not one of the group's scales, {names}")
        return kinds[suffix].layout.shape(self.box(rank, num_blocks, kinds[suffix]))

    def part_strides(
        self, rank: int, num_blocks: int, strides: Sequence[int] | None = None
    ) -> dict[str, CellStrides]:
        """Where the cells of each part lie in one of a layer's own tensors, in bytes.

        Args:
            rank: whose tensor.
            num_blocks: blocks of the tensor, the null block included.
            strides: bytes per dim of :meth:`cache_shape`; if left out, dense or as
                ``page_size_padded`` says.
        """
        return self.kinds(rank)[0].part_strides(self.box(rank, num_blocks), strides)

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
