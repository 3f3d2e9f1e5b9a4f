"""Groups of recurrent layers: state that does not consist of tokens.

A recurrent layer (Mamba, linear attention) keeps one state, the state after the last token, in the
block of this token. The cells of a state are ``(layer, name, channel)``. TP divides the channels
section by section, by the same rule as KV heads. The convolution's state of Mamba2, on one rank of
several::

    channels  | x: one unit per head of the mixer | B: one per group | C: one per group |
    the rank  | its heads                         | its groups       | its groups       |

If there are more ranks than units of a section, ranks hold replicas; a section of one unit is
replicated on every rank.

In terms of tiles and runs, a channel corresponds to a head of attention, and the state corresponds
to one token, the last token of the request. The state has no place of its own inside the block (its
token stride is 0). A group of recurrent layers keeps the tokens that a window of
:data:`STATE_WINDOW` keeps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import msgspec

from kvferry.layouts.layout import Box, CellStrides, Layout
from kvferry.topology.group import GroupGeometry, Share
from kvferry.topology.sharding import check_count, heads_of, split_heads
from kvferry.topology.tensors import ITEMSIZES, TensorKind, TensorPart, dtype_name

STATE_WINDOW = 2
"""Number of tokens of the window that keeps a state: the last token and the next token."""

_PLAIN = Layout("BHD")
_ORDERS = (_PLAIN, Layout("BDH"))
_MAX_SECTIONS = 64
"""Largest number of sections of all states of a layer; a peer's description must not cost time."""


# ---- the states of a layer ---------------------------------------------------------------------


class StateSection(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring channels of a recurrent state that TP divides by the same rule."""

    name: str
    num_units: int
    """Number of units that TP divides, by the same rule as KV heads. If there are more ranks than
    units, ranks hold replicas; so every rank holds a section of one unit."""
    unit_size: int = 1
    """Number of channels per unit."""

    def channels_of(self, units: range) -> range:
        """The channels of the given units."""
        return range(units.start * self.unit_size, units.stop * self.unit_size)


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a recurrent layer's state, kept per request."""

    name: str
    """Name of the state, for example ``conv`` in ``layer.0.conv``."""
    dtype: str
    sections: tuple[StateSection, ...]
    """Sections of the state, in the order of their channels."""
    channel_size: int = 1
    """Number of elements per channel: the product of all other dims of the state."""

    @property
    def num_channels(self) -> int:
        """Number of channels of the model, in all sections."""
        return sum(section.num_units * section.unit_size for section in self.sections)

    def part_name(self, section: StateSection) -> str:
        """The name of a section among the parts of a group, for example ``"conv.x"``."""
        return f"{self.name}.{section.name}"


def state_part(
    name: str, dtype: Any, sections: dict[str, tuple[int, int]], channel_size: int = 1
) -> StatePart:
    """Makes the part of a recurrent state and checks it.

    >>> state_part("conv", "bfloat16", {"x": (48, 64), "B": (1, 128)}, 3).num_channels
    3200

    Args:
        name: name of the state within its layer, and in its tensors (``conv`` in ``layer.0.conv``).
        dtype: a torch dtype or its name.
        sections: name → units and channels per unit, in the order of the channels.
        channel_size: number of elements per channel, the product of all other dims of the state.

    Raises:
        ValueError: a value is out of its range.
    """
    made = StatePart(
        name=name,
        dtype=dtype_name(dtype),
        sections=tuple(
            StateSection(name=section, num_units=units, unit_size=size)
            for section, (units, size) in sections.items()
        ),
        channel_size=channel_size,
    )
    _check_states((made,))
    return made


def mamba2_states(
    *,
    num_heads: int,
    head_size: int,
    state_size: int,
    num_groups: int,
    conv_kernel: int,
    dtype: Any,
    ssm_dtype: Any = None,
) -> tuple[StatePart, ...]:
    """The two states of a Mamba2 layer: the last inputs of its convolution, and the state of the
    SSM.

    Shapes as in vLLM 0.32 (``MambaStateShapeCalculator.mamba2_state_shape``): the convolution runs
    over x, B and C, and keeps the last ``conv_kernel - 1`` inputs of each channel; the SSM keeps
    ``head_size * state_size`` numbers per head.

    >>> [part.num_channels for part in mamba2_states(num_heads=48, head_size=64, state_size=128,
    ...                                              num_groups=1, conv_kernel=4, dtype="bfloat16")]
    [3328, 48]

    Args:
        num_heads: heads of the mixer; x has ``head_size`` channels per head.
        head_size: channels per head.
        state_size: elements of the SSM's state per channel; channels of B and C per group.
        num_groups: groups of B and C; replicated if there are more TP ranks than groups.
        conv_kernel: number of inputs on which an output of the convolution depends.
        dtype: dtype of the convolution's state.
        ssm_dtype: dtype of the SSM's state, if it differs.

    Raises:
        ValueError: a value is out of its range.
    """
    conv = {"x": (num_heads, head_size), **dict.fromkeys("BC", (num_groups, state_size))}
    ssm = {"heads": (num_heads, 1)}
    return (
        state_part("conv", dtype, conv, conv_kernel - 1),
        state_part("ssm", ssm_dtype or dtype, ssm, head_size * state_size),
    )


def gated_delta_net_states(
    *,
    num_heads: int,
    head_size: int,
    key_head_size: int,
    key_size: int,
    conv_kernel: int,
    dtype: Any,
    delta_dtype: Any = None,
    order: str = "vk",
) -> tuple[StatePart, ...]:
    """The two states of a gated delta net: the last inputs of its convolution, and its matrices.

    Shapes as in vLLM 0.32 (``MambaStateShapeCalculator.gated_delta_net_state_shape``): the
    convolution runs over queries, keys and values; each head of the values keeps a matrix.

    >>> [part.num_channels for part in gated_delta_net_states(num_heads=4, head_size=128,
    ...                     key_head_size=128, key_size=256, conv_kernel=4, dtype="bfloat16")]
    [1024, 4]

    Args:
        num_heads: heads of the values.
        head_size: elements of a value per head.
        key_head_size: elements of a query or key per head.
        key_size: channels of all queries; all keys have the same number of channels.
        conv_kernel: number of inputs on which an output of the convolution depends.
        dtype: dtype of the convolution's state.
        delta_dtype: dtype of the matrices, if it differs.
        order: order of a matrix's dims, values (v) and keys (k); kernels differ in this order. The
            order is part of the state's name, so that engines with different orders do not pair.

    Raises:
        ValueError: a value is out of its range.
    """
    conv = {"q": (key_size, 1), "k": (key_size, 1), "v": (num_heads, head_size)}
    delta = {"heads": (num_heads, 1)}
    return (
        state_part("conv", dtype, conv, conv_kernel - 1),
        state_part(f"delta_{order}", delta_dtype or dtype, delta, head_size * key_head_size),
    )


def _check_states(states: tuple[StatePart, ...]) -> None:
    """Checks the states of a layer.

    Raises:
        ValueError: a count is below 1, a dtype is unknown, or a name occurs twice.
    """
    names = [state.part_name(section) for state in states for section in state.sections]
    if not states or not all(state.sections for state in states) or len(names) > _MAX_SECTIONS:
        raise ValueError(
            f"states: {len(states)} states of {len(names)} sections; give each state one section "
            f"or more, {_MAX_SECTIONS} in all at most"
        )
    if len({state.name for state in states}) < len(states) or len(set(names)) < len(names):
        raise ValueError(
            f"states: {', '.join(names)}; give each state a name of its own, and each section of "
            "a state"
        )
    for state in states:
        if state.dtype not in ITEMSIZES:
            raise ValueError(f"states: {state.name}: dtype {state.dtype!r} is unknown")
        check_count(f"states: {state.name}: channel_size", state.channel_size)
        for section in state.sections:
            where = f"states: {state.part_name(section)}"
            check_count(f"{where}: num_units", section.num_units)
            check_count(f"{where}: unit_size", section.unit_size)


# ---- groups of recurrent layers ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGeometry(GroupGeometry):
    """A KV cache group of recurrent layers.

    >>> from kvferry.topology import ParallelShape
    >>> group = StateGeometry(
    ...     num_layers=2, block_size=2048, parallel=ParallelShape(tp=2), layout="B(conv=DH,ssm=HD)",
    ...     states=mamba2_states(num_heads=6, head_size=64, state_size=128, num_groups=1,
    ...                          conv_kernel=4, dtype="bfloat16"))
    >>> group.tensor_names(0)
    ('layer.0.conv', 'layer.0.ssm', 'layer.1.conv', 'layer.1.ssm')
    >>> group.cache_shape(1, 10, "conv"), group.cache_shape(1, 10, "ssm")
    ((10, 3, 448), (10, 3, 8192))
    >>> next(group.shape_mismatches([(3, 448), (3, 64, 100)]))
    ('ssm', (3, 6400), (3, 8192))

    A block holds one state, the state after the last token of the request in this block. With
    vLLM's ``mamba_cache_mode`` ``"none"``, a request has one block, as long as the longest request;
    with ``"all"``, a request has one block per ``block_size`` tokens. A page, padded or not, holds
    all states of a layer.

    Raises:
        ValueError: a value is out of range, the layout cannot hold a state, or the parallel shape
            has context ranks.
    """

    states: tuple[StatePart, ...]
    """States of each layer, a tensor per state, in the order of the states in a page."""
    layout: Layout = _PLAIN
    """Places of channels (H) and their elements (D) in a state of one block: ``"BHD"``, ``"BDH"``,
    or an order per state, ``"B(conv=DH,ssm=HD)"``."""

    is_recurrent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # Called by class name: a class with slots is replaced by a new class, so super() would
        # fail.
        GroupGeometry.__post_init__(self)
        self._set(states=tuple(self.states))
        _check_states(self.states)
        shape = self.parallel
        if shape.num_context_ranks > 1:
            raise ValueError(
                f"parallel: dcp={shape.dcp} x pcp={shape.pcp} ranks share the tokens of a request, "
                "but a recurrent state is not made of tokens; give it dcp=1 and pcp=1"
            )
        self.kinds(shape.tp - 1)  # raises; no rank has more of any section than the last rank

    @property
    def sliding_window(self) -> int:
        """The window that keeps the block of the last token."""
        return STATE_WINDOW

    @property
    def attention_chunk_size(self) -> None:
        """Always ``None``: states are not kept by chunks."""
        return None

    @property
    def cells(self) -> Mapping[str, object]:
        """The properties of a cell; see :attr:`GroupGeometry.cells`."""
        texts = []
        for state in self.states:
            sections = ", ".join(f"{s.name} {s.num_units}*{s.unit_size}" for s in state.sections)
            texts.append(f"{state.name} {state.dtype} ({sections}) of {state.channel_size}")
        return {"recurrent_state": "; ".join(texts)}

    def kinds(self, rank: int) -> tuple[TensorKind, ...]:
        """The content of the tensors of each state."""
        tp_rank = self.rank_coordinates(rank).tp
        return _kinds(self.states, self.layout, self.page_size_padded, tp_rank, self.parallel.tp)

    def tensors(self, rank: int) -> dict[str, TensorKind]:
        """Name → content of each tensor of a rank; states of one layer share the same pages."""
        kinds = self.kinds(rank)
        return {name + kind.suffix: kind for name in self._tensor_owners(rank) for kind in kinds}

    def shape_mismatches(
        self, shapes: Sequence[Sequence[int]]
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Compares the states in a serving engine with this geometry, on every TP rank; yields the
        name of each state that differs, its shape in the engine, and its shape in the geometry.

        Args:
            shapes: shape of each state of a layer in the engine, the same on all ranks, in the
                order of ``states``. All dims behind the first are joined into one dim.
        """
        for rank in range(self.parallel.tp):
            for state, (first, *others) in zip(self.states, shapes, strict=True):
                theirs = (first, math.prod(others))
                ours = self.cache_shape(rank, 1, state.name)[1:]
                if ours != theirs:
                    yield state.name, theirs, ours

    def first_bound_token(self, first_token: int, num_tokens: int) -> int:
        """The last token of a span; only this token has cells."""
        return max(first_token, num_tokens - 1)

    def shares(self, rank: int) -> tuple[Share, ...]:
        """A rank's channels of each section, in each of its layers, in order."""
        tp_rank, tp = self.rank_coordinates(rank).tp, self.parallel.tp
        return tuple(
            Share(
                state.part_name(section),
                section.channels_of(heads_of(tp_rank, tp, section.num_units)),
            )
            for state in self.states
            for section in state.sections
        )

    def split_share(self, share: Share) -> Iterator[tuple[range, range]]:
        """Splits channels at the borders between TP ranks; yields some channels and their ranks."""
        (section,) = (
            section
            for state in self.states
            for section in state.sections
            if state.part_name(section) == share.part
        )
        size = section.unit_size
        units = range(share.heads.start // size, share.heads.stop // size)
        for some, replicas in split_heads(units, self.parallel.tp, section.num_units):
            yield section.channels_of(some), replicas


# ---- tensors of the states ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind(TensorKind):
    """A state of a rank: a tensor of the channels of its sections, section after section.

    All states of a layer lie in the layer's page, in order; ``page_size_padded`` is always given.
    """

    name: str
    """Name of the state."""
    channels: tuple[int, ...]
    """Number of channels of each section on this rank; their sum is ``heads``."""

    @property
    def part_sizes(self) -> tuple[tuple[str, int], ...]:
        """Name of the whole state and number of elements per channel."""
        return ((self.name, self.parts[0].head_size),)

    def part_box(self, box: Box, part: str) -> Box:
        """The part of ``box`` for one section."""
        names = [each.name for each in self.parts]
        return box._replace(heads=self.channels[names.index(part)])

    def part_strides(
        self, box: Box, strides: Sequence[int] | None = None
    ) -> dict[str, CellStrides]:
        """The place of the channels of each section, in bytes."""
        whole = TensorKind.part_strides(self, box, strides)[self.name]
        firsts = accumulate(self.channels, initial=0)
        return {
            part.name: whole._replace(offset=whole.offset + whole.head * first)
            for part, first in zip(self.parts, firsts, strict=False)
        }


@lru_cache(maxsize=4096)
def _kinds(
    states: tuple[StatePart, ...],
    layout: Layout,
    page_size_padded: int | None,
    tp_rank: int,
    tp: int,
) -> tuple[StateKind, ...]:
    """The states of a layer on a TP rank, in the order in which they lie in the layer's page.

    Args:
        states: the states of the layer.
        layout: B, and the order of channels (H) and their elements (D), for all states or per state
            by name.
        page_size_padded: bytes of a page, if larger than the states need.
        tp_rank: the TP rank of the states.
        tp: number of TP ranks.

    Raises:
        ValueError: the layout does not hold a state.
    """
    inner = layout.inner_orders
    if inner and set(inner) != {state.name for state in states}:
        raise ValueError(
            f"layout {layout}: orders for {', '.join(inner)}, the states are "
            f"{', '.join(state.name for state in states)}; give each one its order"
        )
    kinds, end = [], 0
    for state in states:
        itemsize = ITEMSIZES[state.dtype]
        order = Layout(layout.order + inner.get(state.name, ""))
        if order not in _ORDERS:
            raise ValueError(
                f"layout {layout}: the state {state.name} of a block lies in the order of channels "
                f"and their elements, BHD, or BDH, not {order}"
            )
        start = -(-end // itemsize) * itemsize
        kind = _kind(state, order, start, tp_rank, tp)
        end = start + math.prod(order.shape(kind.box(1, 1))) * itemsize
        kinds.append(kind)
    align = max(kind.itemsize for kind in kinds)
    page = -(-end // align) * align
    if page_size_padded is not None:
        if page_size_padded < page or page_size_padded % align:
            raise ValueError(
                f"page_size_padded: {page_size_padded} bytes; the states of a layer need {page}, "
                f"and a whole number of elements of {align}"
            )
        page = page_size_padded
    return tuple(replace(kind, page_size_padded=page) for kind in kinds)


def _kind(state: StatePart, order: Layout, page_offset: int, tp_rank: int, tp: int) -> StateKind:
    channels = tuple(
        len(section.channels_of(heads_of(tp_rank, tp, section.num_units)))
        for section in state.sections
    )
    return StateKind(
        suffix=f".{state.name}",
        layout=order,
        parts=tuple(
            TensorPart(state.part_name(section), state.channel_size, state.dtype)
            for section in state.sections
        ),
        tokens=1,
        heads=sum(channels),
        page_offset=page_offset,
        name=state.name,
        channels=channels,
    )
