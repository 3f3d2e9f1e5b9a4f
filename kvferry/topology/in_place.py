"""The repack that a target rank's blocks need after whole blocks were put into them.

The wire moved bytes in the source's order. For every held block of a frame (see
:mod:`kvferry.layouts.repack`), each source filled its heads, ascending, in its own order; a block
of the target took them in the order of its own dims::

    bytes of a frame | source a, held block 0 | source b, held block 0 | source a, held block 1 ..
    go to            | target block 0, in the order of the target's layout | target block 1 ..
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.layouts.layout import CellStrides, Layout
from kvferry.layouts.repack import HeldSlice, Place, Repack, Unit, make_repack
from kvferry.topology.group import GroupGeometry
from kvferry.topology.lowering import Piece
from kvferry.topology.plan import TransferPlan
from kvferry.topology.tensors import Part, RankMemory

_PARTS = ("k", "v", "latent")


def plan_repack(plan: TransferPlan, memory: RankMemory) -> Repack:
    """What makes blocks that hold the source's geometry hold the target's; once per peer.

    >>> from dataclasses import replace
    >>> from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer
    >>> target = EngineGeometry(num_layers=2, num_kv_heads=2, head_size=4, dtype="float32",
    ...                         block_size=4, layout="NHD", parallel=ParallelShape())
    >>> source = replace(target, layout=Layout.named("HND"), block_size=6)
    >>> repack = plan_repack(plan_transfer(source=source, target=target), target.memory(0, 8))
    >>> repack.frame_tokens, repack.frame_blocks, repack.units  # K and V of two layers
    (12, 3, 4)

    Args:
        plan: who gives what; its layers count.
        memory: of the target rank.

    Returns:
        A repack over the memory's regions. Block ids for it are whole frames of the target's
        blocks. It has no units where nothing need be changed.

    Raises:
        ValueError: a side spreads its tokens over context ranks, so that whole blocks of one side
            are not whole on the other; or it has parts beside k and v, or the latent.
        ProtocolError, BoundsError: see :meth:`TransferPlan.lower`.
    """
    check_whole_blocks(plan)
    target, rank = plan.target, plan.target_rank
    slices = head_slices(plan)
    groups = part_groups(plan.source, target)
    layers = sorted({piece.layer for piece in plan.pieces})
    heads = target.heads(rank)
    units = [
        unit for group in groups for unit in places_in(target, rank, memory, layers, heads, group)
    ]
    return make_repack(
        units,
        itemsize=target.itemsize,
        heads=len(heads) if slices else 0,
        block_size=target.block_size,
        slots=target.layout,
        held=[HeldSlice(plan.source.layout, heads) for heads in slices],
        held_block_size=plan.source.block_size,
    )


def check_whole_blocks(plan: TransferPlan) -> None:
    """Checks that whole blocks of the source can be whole blocks of the target.

    Raises:
        ValueError: they cannot; the message says why.
    """
    for side, geometry in (("source", plan.source), ("target", plan.target)):
        shape = geometry.parallel
        if (shape.dcp, shape.pcp) != (1, 1):
            raise ValueError(
                f"{side}: tokens are spread over dcp={shape.dcp} x pcp={shape.pcp} ranks, so its "
                "blocks cannot be moved whole; copy strided or through staging instead"
            )
        if others := [part.name for part in geometry.parts if part.name not in _PARTS]:
            raise ValueError(
                f"{side}: the parts {', '.join(others)} are not known in place; copy strided or "
                "through staging instead"
            )
    if plan.conversion is not None:
        raise ValueError(
            f"dtype: {plan.conversion[0]} becomes {plan.conversion[1]}, so blocks change their "
            "size; convert through staging instead"
        )


def head_slices(plan: TransferPlan) -> tuple[int, ...]:
    """Heads that each source gives of a layer, ascending: the same for all layers."""
    by_layer: dict[int, list[int]] = {}
    for piece in plan.pieces:
        by_layer.setdefault(piece.layer, []).append(len(piece.heads))
    found = {tuple(heads) for heads in by_layer.values()}
    assert len(found) <= 1  # borders between ranks do not depend on the layer
    return found.pop() if found else ()


def part_groups(source: GroupGeometry, target: GroupGeometry) -> list[tuple[Part, ...]]:
    """The parts that are permuted among each other: small frames fit on chip."""
    parts = target.parts
    apart = len({part.head_size for part in parts}) == 1 and all(
        _keeps_parts_apart(geometry.layout) for geometry in (source, target)
    )
    return [(part,) for part in parts] if apart else [parts]


def _keeps_parts_apart(layout: Layout) -> bool:
    inside = [dim for dim in layout.order if dim not in "LB"]
    return inside[:1] == ["K"] and not layout.inner


def places_in(
    geometry: GroupGeometry,
    rank: int,
    memory: RankMemory,
    layers: Sequence[int],
    heads: range,
    parts: tuple[Part, ...],
) -> list[Unit]:
    """Where some heads of each layer lie in a rank's memory: one unit per layer."""
    # A plan from the rank to itself: its tiles say where each part of each layer lies.
    itself = TransferPlan(
        geometry, geometry, rank, tuple(Piece(rank, layer, heads) for layer in layers)
    )
    tiles: list[Any] = [
        itself.lower({rank: memory}, memory, parts=[part])[rank] if layers else [] for part in parts
    ]
    sizes = tuple((part.name, part.head_size) for part in parts)
    return [
        Unit(sizes, tuple(_place(tile) for tile in of_parts))
        for of_parts in zip(*tiles, strict=True)
    ]


def _place(tile: np.void) -> Place:
    region, *cells = tile.tolist()[6:12]  # the target's side
    offset, block, token, head, element = cells
    return Place(region, CellStrides(offset, 0, block, token, head, element))
