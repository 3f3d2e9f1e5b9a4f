"""The repack between two geometries, for tests of what runs it: written down from a plan."""

from kvferry.layouts import repack
from kvferry.layouts.layout import CellStrides
from kvferry.topology import plan_transfer


def repack_between(plan, memory):
    """What makes blocks that were filled in the source's geometry hold the target's.

    Args:
        plan: who gives what; its source ranks filled their heads of every held block, ascending.
        memory: of the plan's target rank.
    """
    source, target, rank = plan.source, plan.target, plan.target_rank
    layers = sorted({piece.layer for piece in plan.pieces})
    slices = [len(piece.heads) for piece in plan.pieces if piece.layer in layers[:1]]
    groups = [[name] for name, _ in target.part_sizes]
    if not parts_lie_apart(source, target):
        groups = [[name for name, _ in target.part_sizes]]
    places = places_of(target, rank, memory)
    sizes = dict(target.part_sizes)
    return repack.make_repack(
        [
            repack.Unit(
                tuple((name, sizes[name]) for name in names),
                tuple(places[layer, name] for name in names),
            )
            for names in groups
            for layer in layers
        ],
        itemsize=target.itemsize,
        heads=len(target.heads(rank)) if slices else 0,
        block_size=target.block_size,
        slots=target.layout,
        held=[repack.HeldSlice(source.layout, heads) for heads in slices],
        held_block_size=source.block_size,
    )


def parts_lie_apart(*sides):
    """Whether K and V are filled one after the other, each in memory of its own."""
    apart = all(
        not side.layout.inner and side.layout.order.replace("L", "").replace("B", "")[0] == "K"
        for side in sides
    )
    return apart and len({size for _, size in sides[-1].part_sizes}) == 1


def places_of(geometry, rank, memory):
    """(layer, part) → where its cells lie: the target's side of a plan from the rank to itself."""
    found = {}
    tensors = {tensor.name: tensor for tensor in memory.tensors}
    for index, layer in enumerate(geometry.layers(rank)):
        own = tensors.get(geometry.layer_name(layer))
        tensor = own or tensors["layers"]
        for name, strides in tensor.parts.items():
            offset = tensor.offset + strides.offset + (0 if own else strides.layer * index)
            cells = CellStrides(
                offset, 0, strides.block, strides.token, strides.head, strides.element
            )
            found[layer, name] = repack.FramePlace(tensor.region, cells)
    return found


def repack_of_pair(source, target, memory):
    """See :func:`repack_between`; of the target's rank 0."""
    return repack_between(plan_transfer(source=source, target=target), memory)
