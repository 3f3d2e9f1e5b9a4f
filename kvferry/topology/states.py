"""State that is not made of tokens: what recurrent layers keep of a request.

A recurrent layer (Mamba, linear attention) keeps one state, that after the last token, in the block
of that token. Its cells are ``(layer, name, channel)``; TP divides the channels section by section,
by the rule that divides KV heads. The convolution's state of Mamba2, on a rank of a few::

    channels  | x: one unit per head of the mixer | B: one per group | C: one per group |
    the rank  | its heads                         | its groups       | its groups       |

Ranks that outnumber the units of a section hold replicas; a section of one unit is replicated.

In terms of tiles and runs a channel is what a head is to attention, and the state is one token, the
last of the request: it has no place of its own inside the block (a token stride of 0), and a group
of such layers keeps the tokens that a window of :data:`STATE_WINDOW` keeps.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvferry.layouts.layout import Box, Layout
from kvferry.topology.description import PartStrides, StatePart, StateSection
from kvferry.topology.head_ranges import heads_of, split_heads
from kvferry.topology.parallel import check_count
from kvferry.topology.parts import ITEMSIZES, Part, dtype_name
from kvferry.topology.tensors import TensorKind

if TYPE_CHECKING:
    from kvferry.topology.geometry import EngineGeometry

STATE_WINDOW = 2
"""The window that keeps what a state is: the last token, and the one that comes next."""

NO_ATTENTION: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_size": 1,
    "head_size_v": None,
    "dtype": "uint8",
    "use_mla": False,
    "scale_dtype": None,
    "attention_chunk_size": None,
    "sliding_window": STATE_WINDOW,
}
"""Fields of a group that have no meaning for states, and the values that they get."""

_ORDERS = (Layout("BHD"), Layout("BDH"))
_MAX_SECTIONS = 64
"""Sections of all states of a layer: a peer's description must not cost time."""


class Share(NamedTuple):
    """Neighbouring heads of all parts, or channels of one section of a state."""

    part: str | None
    """Name of the part, ``"conv.x"``; ``None`` for heads, which all parts of a group share."""
    heads: range
    """Indices in the model; channels count from the start of their section."""


def state_part(
    name: str, dtype: Any, sections: dict[str, tuple[int, int]], channel_size: int = 1
) -> StatePart:
    """A state, checked.

    >>> state_part("conv", "bfloat16", {"x": (48, 64), "B": (1, 128)}, 3).num_channels
    3200

    Args:
        name: of the state among those of its layer, and of its tensors: ``layer.0.conv``.
        dtype: a torch dtype or its name.
        sections: name → units and channels per unit, in the order of the channels.
        channel_size: elements per channel, all other dims of the state.

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
    check_states((made,))
    return made


def check_states(states: tuple[StatePart, ...]) -> None:
    """Checks the states of a layer.

    Raises:
        ValueError: a count below 1, an unknown dtype, a name that stands twice.
    """
    names = [part.name for part in _parts(states)]
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
        check_count(f"states: {state.name}: channel_size", state.channel_size)
        for section in state.sections:
            where = f"states: {state.name}.{section.name}"
            check_count(f"{where}: num_units", section.num_units)
            check_count(f"{where}: unit_size", section.unit_size)


def check_state_group(group: "EngineGeometry") -> None:
    """Checks a group of recurrent layers.

    Raises:
        ValueError: its states or its page are none, or it has what only attention has.
    """
    check_states(group.states)
    for field, wanted in NO_ATTENTION.items():
        if getattr(group, field) != wanted:
            raise ValueError(
                f"{field}: {getattr(group, field)} means nothing to the states "
                f"{', '.join(state.name for state in group.states)}; use recurrent_group"
            )
    shape = group.parallel
    if shape.num_context_ranks > 1:
        raise ValueError(
            f"parallel: dcp={shape.dcp} x pcp={shape.pcp} ranks share the tokens of a request, "
            "but a recurrent state is not made of tokens; give it dcp=1 and pcp=1"
        )
    for tp_rank in range(shape.tp):
        state_kinds(group.states, group.layout, group.page_size_padded, tp_rank, shape.tp)


def state_text(states: tuple[StatePart, ...]) -> str:
    """What the cells of some states are, in one line.

    >>> state_text((state_part("ssm", "float32", {"heads": (48, 64)}, 128),))
    'ssm float32 (heads 48*64) of 128'
    """
    return "; ".join(
        f"{state.name} {state.dtype} ("
        + ", ".join(f"{one.name} {one.num_units}*{one.unit_size}" for one in state.sections)
        + f") of {state.channel_size}"
        for state in states
    )


def _parts(states: tuple[StatePart, ...]) -> Iterator[Part]:
    for state in states:
        if state.dtype not in ITEMSIZES:
            raise ValueError(f"states: {state.name}: dtype {state.dtype!r} is unknown")
        for section in state.sections:
            yield Part(
                f"{state.name}.{section.name}",
                state.channel_size,
                state.dtype,
                ITEMSIZES[state.dtype],
            )


@dataclass(frozen=True, slots=True)
class StateKind(TensorKind):
    """One state of a rank: a tensor of its sections' channels, one after the other.

    All states of a layer lie in its page, in their order; ``page_size_padded`` is always given.
    """

    name: str = ""
    """Of the state."""
    channels: tuple[int, ...] = ()
    """Channels of each section on this rank."""

    @property
    def part_sizes(self) -> tuple[tuple[str, int], ...]:
        """The whole state, and elements per channel."""
        return ((self.name, self.parts[0].head_size),)

    def box(self, layers: int, blocks: int, block_size: int, heads: int) -> Box:
        """What a tensor holds: one state per block."""
        return Box(1, blocks, 1, sum(self.channels), self.part_sizes)

    def part_box(self, box: Box, part: str) -> Box:
        """What of it one section holds."""
        names = [each.name for each in self.parts]
        return box._replace(heads=self.channels[names.index(part)])

    def part_strides(
        self, box: Box, strides: Sequence[int] | None = None
    ) -> dict[str, PartStrides]:
        """Where the channels of each section lie, in bytes."""
        # Two arguments: a dataclass with slots is another class than the one super() closes over.
        whole = TensorKind.part_strides(self, box, strides)[self.name]
        firsts = accumulate(self.channels, initial=0)
        return {
            part.name: msgspec.structs.replace(whole, offset=whole.offset + whole.head * first)
            for part, first in zip(self.parts, firsts, strict=False)
        }


@lru_cache(maxsize=4096)
def state_kinds(
    states: tuple[StatePart, ...],
    layout: Layout,
    page_size_padded: int | None,
    tp_rank: int,
    tp: int,
) -> tuple[StateKind, ...]:
    """The states of a layer on a TP rank, in the order in which they lie in its page.

    Args:
        states: of the layer.
        layout: B, and for all states or by the names of states the order of channels (H) and of
            their elements (D).
        page_size_padded: bytes of a page, if it is more than its states need.
        tp_rank: whose.
        tp: ranks that share the channels.

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
        held = [heads_of(tp_rank, tp, one.num_units) for one in state.sections]
        kind = StateKind(
            f".{state.name}",
            order,
            tuple(_parts((state,))),
            page_offset=-(-end // itemsize) * itemsize,
            name=state.name,
            channels=tuple(
                len(units) * one.unit_size for units, one in zip(held, state.sections, strict=True)
            ),
        )
        shape = kind.layout.shape(kind.box(1, 1, 1, 1))
        end = kind.page_offset + math.prod(shape) * itemsize
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


def channels_of(states: tuple[StatePart, ...], tp_rank: int, tp: int) -> tuple[Share, ...]:
    """What a TP rank holds of each section, in the order of sections."""
    return tuple(
        Share(
            f"{state.name}.{section.name}",
            _channels(heads_of(tp_rank, tp, section.num_units), section),
        )
        for state in states
        for section in state.sections
    )


def split_channels(
    states: tuple[StatePart, ...], share: Share, tp: int
) -> Iterator[tuple[range, range]]:
    """Splits channels at the borders between TP ranks: channels, and the ranks that hold them."""
    (section,) = (
        one
        for state in states
        for one in state.sections
        if f"{state.name}.{one.name}" == share.part
    )
    size = section.unit_size
    units = range(share.heads.start // size, share.heads.stop // size)
    for some, replicas in split_heads(units, tp, section.num_units):
        yield _channels(some, section), replicas


def _channels(units: range, section: StateSection) -> range:
    return range(units.start * section.unit_size, units.stop * section.unit_size)
