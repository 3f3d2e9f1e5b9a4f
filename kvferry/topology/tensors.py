"""The tensors that hold a rank's cells: what lies in one of them, and how.

The parts of a cell lie in the layers' own tensors. Scales of a quantised cache have another dtype,
and tensors of their own beside each: ``layer.0.k_scale`` with one element per token and head. Those
may be views into the same memory; names and strides are all that counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.layouts.layout import Box, CellStrides, Layout
from kvferry.topology.description import PartStrides, RankMemory, TensorMemory
from kvferry.topology.parts import Part


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What all tensors of one kind have alike."""

    suffix: str
    """What follows the layer's name in theirs: nothing, or ``.k_scale``."""
    layout: Layout
    parts: tuple[Part, ...]
    """Of one dtype, in the order in which they lie."""
    page_size_padded: int | None = None
    """Bytes from one block of one layer to the next; dense if ``None``."""
    page_offset: int = 0
    """Bytes from the start of a page to its cells. If it is not 0, its cells lie in the pages of
    the tensor before it."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.parts[0].itemsize

    @property
    def part_sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and elements per head of each part."""
        return tuple((part.name, part.head_size) for part in self.parts)

    def box(self, layers: int, blocks: int, block_size: int, heads: int) -> Box:
        """What a tensor of this kind holds, if it holds so much."""
        return Box(layers, blocks, block_size, heads, self.part_sizes)

    def part_box(self, box: Box, part: str) -> Box:
        """What of ``box`` one of the parts holds, elements apart."""
        return box

    def scale(self, part: Part, of: str) -> "TensorKind":
        """The kind of the scales of one of the parts: its order of dims, one element per head."""
        order = self.layout.order.replace("K", "").replace("C", "D")
        order += self.layout.inner_orders.get(of, "").replace("C", "D")
        return TensorKind(f".{part.name}", Layout(order), (part,))

    def nbytes(self, box: Box) -> int:
        """Bytes of a tensor that holds ``box``, padding included."""
        if self.page_size_padded is not None:
            return self.page_size_padded * box.blocks * box.layers
        return math.prod(self.layout.shape(box)) * self.itemsize

    def strides(self, shape: Sequence[int]) -> list[int]:
        """Bytes per dim of a tensor that lies dense, or whose pages are padded."""
        if self.page_size_padded is None:
            return _dense_strides(shape, self.itemsize)
        dims = self.layout.dims(self.part_sizes)
        inside = [dim for dim, letter in enumerate(dims) if letter not in "LB"]
        outside = [dim for dim, letter in enumerate(dims) if letter in "LB"]
        strides = dict.fromkeys(range(len(shape)), 0)
        for some, unit in ((inside, self.itemsize), (outside, self.page_size_padded)):
            found = _dense_strides([shape[dim] for dim in some], unit)
            strides |= dict(zip(some, found, strict=True))
        return list(strides.values())

    def part_strides(
        self, box: Box, strides: Sequence[int] | None = None
    ) -> dict[str, PartStrides]:
        """Where the cells of each part lie in a tensor that holds ``box``, in bytes."""
        if strides is None:
            strides = self.strides(self.layout.shape(box))
        cells = self.layout.strides(box, strides)
        return {part: part_strides_of(found) for part, found in cells.items()}


def dense_memory(
    tensors: Sequence[tuple[str, TensorKind, Box]], num_blocks: int, *, region_per_tensor: bool
) -> RankMemory:
    """The memory of a rank whose tensors lie one after the other, or each in a region of its own.

    Args:
        tensors: name, kind and content of each, in the order in which they lie.
        num_blocks: blocks of each, the null block included.
        region_per_tensor: otherwise all lie in region 0. Tensors that share pages share a region.
    """
    placed: list[TensorMemory] = []
    sizes: list[int] = []
    start = end = 0
    parts = {kind.suffix: kind.part_strides(box) for _, kind, box in dict.fromkeys(tensors)}
    for name, kind, box in tensors:
        if not kind.page_offset:
            start = 0 if region_per_tensor else -(-end // kind.itemsize) * kind.itemsize
            end = start + kind.nbytes(box)
            sizes.append(end)
        placed.append(
            TensorMemory(
                name=name,
                region=len(sizes) - 1 if region_per_tensor else 0,
                offset=start + kind.page_offset,
                parts=parts[kind.suffix],
            )
        )
    if not region_per_tensor:
        sizes = sizes[-1:]
    return RankMemory(num_blocks=num_blocks, region_bytes=tuple(sizes), tensors=tuple(placed))


def part_strides_of(cells: CellStrides) -> PartStrides:
    """The wire form of strides in bytes."""
    return PartStrides(**cells._asdict())


def _dense_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return strides[::-1]
