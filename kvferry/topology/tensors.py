"""The tensors that hold a rank's cells: what lies in one of them, and where.

The parts of a cell (``k`` and ``v``, or one latent) lie in the layers' own tensors. Scales of a
quantised cache have another dtype, and tensors of their own beside each: ``layer.0.k_scale`` with
one element per token and head. Those may be views into the same memory; names and strides are all
that counts.

:class:`RankMemory` and what it is made of are also what the handshake carries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.layouts.layout import Box, CellStrides, Layout

#: Bytes per element of every dtype a KV cache may have.
ITEMSIZES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("int8", "uint8"), 1),
}


def dtype_name(dtype: Any) -> str:
    """The bare name of a torch or NumPy dtype, or of a name.

    >>> dtype_name("torch.bfloat16"), dtype_name("float32")
    ('bfloat16', 'float32')

    Raises:
        ValueError: not a dtype that a KV cache may have.
    """
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    name = text.removeprefix("torch.")
    if name not in ITEMSIZES:
        raise ValueError(f"dtype: {dtype!r} is unknown; known dtypes: {', '.join(ITEMSIZES)}")
    return name


# ---- where cells lie ---------------------------------------------------------------------------


class TensorMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache tensor of a rank: its place in a region, and the strides of its parts."""

    name: str
    region: int
    """Index into the rank's regions."""
    offset: int
    """Bytes from the start of the region to the tensor's first element."""
    parts: dict[str, CellStrides]
    """Name of a part (``k``, ``v``) → where its cells lie in the tensor, in bytes."""


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of one rank for one group."""

    num_blocks: int
    """Blocks that the strides may index, the null block included."""
    region_bytes: tuple[int, ...]
    """Size of each region in bytes."""
    tensors: tuple[TensorMemory, ...]


# ---- what lies there ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of content of a cell."""

    name: str
    """``k`` and ``v``, or ``latent`` for MLA; ``k_scale`` and so on for the scales of one."""
    head_size: int
    """Elements per head."""
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKind:
    """What all tensors of one kind on one rank have alike."""

    suffix: str
    """What follows the layer's name in theirs: nothing, or ``.k_scale``."""
    layout: Layout
    parts: tuple[Part, ...]
    """Of one dtype, in the order in which they lie."""
    tokens: int
    """Places per block, one per token; a state has one place per block."""
    heads: int
    """Heads of the rank, or channels of a state."""
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

    def box(self, layers: int, blocks: int) -> Box:
        """What a tensor of this kind holds, if it holds so many layers and blocks."""
        return Box(layers, blocks, self.tokens, self.heads, self.part_sizes)

    def part_box(self, box: Box, part: str) -> Box:
        """What of ``box`` one of the parts holds, elements apart."""
        return box

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
    ) -> dict[str, CellStrides]:
        """Where the cells of each part lie in a tensor that holds ``box``, in bytes."""
        if strides is None:
            strides = self.strides(self.layout.shape(box))
        return self.layout.strides(box, strides)


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
    parts: dict[str, dict[str, CellStrides]] = {}  # by suffix: tensors of one kind are alike
    for name, kind, box in tensors:
        if kind.suffix not in parts:
            parts[kind.suffix] = kind.part_strides(box)
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


def _dense_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return strides[::-1]
