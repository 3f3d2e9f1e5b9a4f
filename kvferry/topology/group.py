"""A KV cache group of an engine: the properties that attention groups and state groups share.

A group consists of some layers of the model that share a block table. A cell is ``(layer, part,
token, head, element)``, with the layer and head indices of the model. There are two kinds of
groups, and code that takes a group takes both kinds:

==============================================  ==================================  =============
class                                           divided by TP                       per block
==============================================  ==================================  =============
:class:`~kvferry.topology.EngineGeometry`       KV heads                            tokens
:class:`~kvferry.topology.StateGeometry`        channels of each section of state   one state
==============================================  ==================================  =============

Layers, stages, names, pages and memory are the same for both kinds and are defined here. The
abstract members below define the differences.
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
from kvferry.topology.tensors import RankMemory, TensorKind, TensorPart, dense_memory
from kvferry.topology.windows import first_kept_token

CROSS_LAYER_NAME = "layers"
"""Name of the tensor with all layers of a rank."""

_MAX_PAGE = 1 << 40
"""Number of bytes of the largest padded page."""


class Share(NamedTuple):
    """Neighbouring heads of all parts, or neighbouring channels of a section of a state."""

    part: str | None
    """Name of the part, for example ``"conv.x"``; ``None`` for heads, which all parts of a group
    share."""
    heads: range
    """Indices in the model; channels are counted from the start of their section."""

    def has(self, part: str) -> bool:
        """Whether the share contains heads or channels of ``part``."""
        return self.part in (None, part)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGeometry(ABC):
    """The cells of a KV cache group that each rank of an engine holds, and their layout.

    Raises:
        ValueError: a value is out of range; the message names the argument, the value and a value
            that would work. The check takes time only for the length of the arguments, not for the
            size of the numbers.
    """

    num_layers: int
    """Number of layers of the group."""
    block_size: int
    """Number of tokens per block and rank; one table entry has ``virtual_block_size`` tokens."""
    layout: Layout
    """Layout of the cache, given as a :class:`Layout`, a name or an order."""
    parallel: ParallelShape
    layer_split: tuple[int, ...] | None = None
    """Number of the group's layers per stage, first stage first; with ``layer_indices``, zeros are
    allowed."""
    layer_names: tuple[str, ...] | None = None
    """Tensor name of each of the group's layers, first layer first."""
    layer_indices: tuple[int, ...] | None = None
    """Index in the model of each of the group's layers, ascending; by default the first indices."""
    page_size_padded: int | None = None
    """Number of bytes to which a page (one block of one layer on a rank) is padded. The cells of a
    padded page lie together, in the layout's order of the other dims; pages follow each other."""

    is_recurrent: ClassVar[bool] = False
    """Whether a block keeps one state, after the last of its tokens, and no cell per token."""

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
        """Sets fields during construction."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # ---- differences -----------------------------------------------------------------------

    @property
    @abstractmethod
    def sliding_window(self) -> int | None:
        """Number of tokens that the group keeps of a request, see :func:`first_kept_token`."""

    @property
    @abstractmethod
    def attention_chunk_size(self) -> int | None:
        """Number of tokens per chunk if the group keeps only the chunk of the next token."""

    @property
    @abstractmethod
    def cells(self) -> Mapping[str, object]:
        """The properties of a cell, by name. Two engines must have equal values for each layer.

        Groups of different kinds share one of these names, ``recurrent_state``.
        """

    @abstractmethod
    def kinds(self, rank: int) -> tuple[TensorKind, ...]:
        """The content of the tensors of each layer of a rank, an entry per kind of tensor.

        Raises:
            ValueError: there is no such rank.
        """

    @abstractmethod
    def shares(self, rank: int) -> tuple[Share, ...]:
        """The heads of a rank, or its channels of each section, in each of its layers.

        Raises:
            ValueError: there is no such rank.
        """

    @abstractmethod
    def split_share(self, share: Share) -> Iterator[tuple[range, range]]:
        """Splits a share at the borders between TP ranks; yields each part and its TP ranks."""

    def first_bound_token(self, first_token: int, num_tokens: int) -> int:
        """The first token of a span that has its own cells: for states, only the last token."""
        return first_token

    def bound_span(self, first_token: int, num_tokens: int) -> tuple[int, int]:
        """The span of tokens that a copy of ``[first_token, num_tokens)`` moves."""
        return self.first_bound_token(first_token, num_tokens), num_tokens

    # ---- ranks and layers ------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks of the engine."""
        return self.parallel.world_size

    def rank_coordinates(self, rank: int) -> RankCoordinates:
        """The coordinates of a rank on each axis.

        Raises:
            ValueError: there is no such rank.
        """
        return self.parallel.coordinates(rank)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Number of the group's layers per stage."""
        if self.layer_split is not None:
            return self.layer_split
        return default_split(self.num_layers, self.parallel.pp)

    @property
    def model_layers(self) -> Sequence[int]:
        """Indices in the model of the group's layers, ascending."""
        return range(self.num_layers) if self.layer_indices is None else self.layer_indices

    def layers(self, rank: int) -> Sequence[int]:
        """Indices in the model of a rank's layers, if any; a range without ``layer_indices``."""
        stage = self.rank_coordinates(rank).pp
        first = sum(self.stage_layers[:stage])
        return self.model_layers[first : first + self.stage_layers[stage]]

    def layer_position(self, layer: int) -> int:
        """Number of the group's layers before ``layer``.

        Raises:
            ValueError: the layer does not belong to the group.
        """
        layers = self.model_layers
        position = bisect_left(layers, layer)
        if position == len(layers) or layers[position] != layer:
            raise ValueError(f"layer: {layer} is not one of the group's {ranges_text(layers)}")
        return position

    def stage_of(self, layer: int) -> int:
        """The pipeline stage of a layer of the group.

        Raises:
            ValueError: the layer does not belong to the group.
        """
        return bisect_right(list(accumulate(self.stage_layers)), self.layer_position(layer))

    # ---- heads -----------------------------------------------------------------------------

    def heads(self, rank: int, part: str | None = None) -> range:
        """The model's KV heads that a rank holds. If TP has more ranks than heads, ranks hold
        replicas.

        Args:
            rank: the rank of the heads.
            part: for a group of states, the section whose channels are returned.

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
        """Splits a share at the borders between ranks; yields each part and the ranks that hold it.

        Args:
            layer: a layer of the group.
            share: the heads or channels to split.
            context: only ranks that hold the tokens of this context rank are yielded.

        Raises:
            ValueError: the layer does not belong to the group.
        """
        pcp_rank, dcp_rank = divmod(context, self.parallel.dcp)
        first = (self.stage_of(layer) * self.parallel.pcp + pcp_rank) * self.parallel.tp
        for some, replicas in self.split_share(share):
            # The number of replicas is a multiple of dcp, and so is the first replica.
            turn = replicas[dcp_rank :: self.parallel.dcp]
            yield some, range(first + turn.start, first + turn.stop, turn.step)

    # ---- tokens ----------------------------------------------------------------------------

    @property
    def virtual_block_size(self) -> int:
        """Number of tokens that an entry of a block table spans, over all context ranks."""
        return self.block_size * self.parallel.num_context_ranks

    def token_shard(self, rank: int) -> TokenShard:
        """A rank's tokens of a request.

        Raises:
            ValueError: there is no such rank.
        """
        return self.parallel.token_shard(rank)

    def first_kept_token(self, num_computed: int) -> int:
        """The first token that the group still keeps after ``num_computed`` tokens are computed."""
        return first_kept_token(
            num_computed,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )

    # ---- tensors ---------------------------------------------------------------------------

    @property
    def tensor_kinds(self) -> tuple[TensorKind, ...]:
        """The kinds of tensors of rank 0; other ranks have the same kinds, but hold other heads."""
        return self.kinds(0)

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        """The parts of a cell: the parts in the layers' own tensors, in order, then the scales."""
        return tuple(part for kind in self.tensor_kinds for part in kind.parts)

    @property
    def part_sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and number of elements per head of each part in the layers' own tensors."""
        return self.tensor_kinds[0].part_sizes

    @property
    def itemsize(self) -> int:
        """Number of bytes per element in the layers' own tensors."""
        return self.tensor_kinds[0].itemsize

    def layer_name(self, layer: int) -> str:
        """The tensor name of a layer, given by its index in the model.

        Raises:
            ValueError: the layer does not belong to the group.
        """
        position = self.layer_position(layer)
        return f"layer.{layer}" if self.layer_names is None else self.layer_names[position]

    def tensors(self, rank: int) -> dict[str, TensorKind]:
        """Name → content of each tensor of a rank, in the order of :meth:`tensor_names`."""
        names = self._tensor_owners(rank)
        return {name + kind.suffix: kind for kind in self.kinds(rank) for name in names}

    def _tensor_owners(self, rank: int) -> list[str]:
        """The first parts of a rank's tensor names: a name per layer, or one for all layers."""
        layers = self.layers(rank)
        if self.layout.is_cross_layer:
            return [CROSS_LAYER_NAME] if layers else []
        return [self.layer_name(layer) for layer in layers]

    def tensor_names(self, rank: int) -> tuple[str, ...]:
        """Names of a rank's tensors: a name per layer, ascending; or ``("layers",)`` if
        cross-layer.

        A cache with scales has each of these names again with ``.k_scale``, and then with
        ``.v_scale`` (or only ``.latent_scale``). Recurrent layers have one name per state, for
        example ``layer.0.conv``. The result is empty if the rank's stage holds no layers of the
        group.
        """
        return tuple(self.tensors(rank))

    def box(self, rank: int, num_blocks: int, kind: TensorKind | None = None) -> Box:
        """The extents of a tensor of a rank: of a layer's own tensor unless ``kind`` is given."""
        kind = self.kinds(rank)[0] if kind is None else kind
        return kind.box(len(self.layers(rank)) if self.layout.is_cross_layer else 1, num_blocks)

    def cache_shape(self, rank: int, num_blocks: int, scale: str | None = None) -> tuple[int, ...]:
        """The shape of each tensor of a rank.

        Args:
            rank: the rank of the tensors.
            num_blocks: number of blocks of each tensor, including the null block.
            scale: name of a part of scales, for example ``"k_scale"``, for the shape of its
                tensors: they have one element per head, and no dim K. For recurrent layers, the
                name of a state (by default the first state); the dims of a channel's elements are
                joined into one dim.

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
        """The place of the cells of each part in a layer's own tensor, in bytes.

        Args:
            rank: the rank of the tensor.
            num_blocks: number of blocks of the tensor, including the null block.
            strides: bytes per dim of :meth:`cache_shape`; by default dense, or padded to
                ``page_size_padded``.
        """
        return self.kinds(rank)[0].part_strides(self.box(rank, num_blocks), strides)

    def nbytes(self, rank: int, num_blocks: int) -> int:
        """Number of bytes of all dense tensors of a rank, placed end to end, including padding."""
        return sum(self.memory(rank, num_blocks).region_bytes)

    def memory(self, rank: int, num_blocks: int, *, region_per_tensor: bool = False) -> RankMemory:
        """The memory of a rank whose tensors are dense; pages are padded to ``page_size_padded``.

        Args:
            rank: the rank of the memory.
            num_blocks: number of blocks per tensor, including the null block.
            region_per_tensor: whether each tensor has its own region; otherwise all tensors lie in
                region 0, without gaps, with ``nbytes(rank, num_blocks)`` bytes together.
        """
        self.cache_shape(rank, num_blocks)  # raises
        tensors = [
            (name, kind, self.box(rank, num_blocks, kind))
            for name, kind in self.tensors(rank).items()
        ]
        return dense_memory(tensors, num_blocks, region_per_tensor=region_per_tensor)
