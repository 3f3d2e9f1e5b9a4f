"""The tensors that hold a rank's cells: the content of each tensor, and the place of each cell.

The parts of a cell (``k`` and ``v``, or one latent) lie in the layers' own tensors. Scales of a
quantised cache have another dtype and lie in separate tensors: ``layer.0.k_scale`` with an element
per token and head. Tensors of scales may be views into the same memory; only names and strides
matter.

The handshake carries :class:`RankMemory` and the structs in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.layouts.layout import Box, CellStrides, Layout

#: Number of bytes per element of every dtype that a KV cache may have.
ITEMSIZES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("int8", "uint8"), 1),
}


def dtype_name(dtype: Any) -> str:
    """The bare name of a torch dtype, a NumPy dtype or a dtype name.

    >>> dtype_name("torch.bfloat16"), dtype_name("float32")
    ('bfloat16', 'float32')

    Raises:
        ValueError: a KV cache cannot have this dtype.
    """
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    name = text.removeprefix("torch.")
    if name not in ITEMSIZES:
        raise ValueError(f"dtype: {dtype!r} is unknown; known dtypes: {', '.join(ITEMSIZES)}")
    return name


# ---- places of cells ---------------------------------------------------------------------------


class TensorMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A KV cache tensor of a rank: its place in a region, and the strides of its parts."""

    name: str
    region: int
    """Index of the region among the rank's regions."""
    offset: int
    """Number of bytes from the start of the region to the first element of the tensor."""
    parts: dict[str, CellStrides]
    """Name of a part (``k``, ``v``) → place of its cells in the tensor, in bytes."""


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of a rank for a group."""

    num_blocks: int
    """Number of blocks that the strides may index, including the null block."""
    region_bytes: tuple[int, ...]
    """Number of bytes of each region."""
    tensors: tuple[TensorMemory, ...]


# ---- content of tensors ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a cell, such as ``k``."""

    name: str
    """Name of the part: ``k`` and ``v``, or ``latent`` for MLA; ``k_scale`` etc. for scales."""
    head_size: int
    """Number of elements per head."""
    dtype: str

    @property
    def itemsize(self) -> int:
        """Number of bytes per element."""
        return ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKind:
    """The properties that all tensors of one kind on one rank share."""

    suffix: str
    """Suffix of the tensor's name after the layer's name: empty, or for example ``.k_scale``."""
    layout: Layout
    parts: tuple[TensorPart, ...]
    """Parts, all of the same dtype, in the order in which they lie in memory."""
    tokens: int
    """Number of places per block, a place per token; a state has one place per block."""
    heads: int
    """Number of heads of the rank, or of channels of a state."""
    page_size_padded: int | None = None
    """Number of bytes from a block of a layer to the next block; dense if ``None``."""
    page_offset: int = 0
    """Number of bytes from the start of a page to the cells of this kind. If this number is not 0,
    the cells lie in the pages of the tensor before."""

    @property
    def itemsize(self) -> int:
        """Number of bytes per element."""
        return self.parts[0].itemsize

    @property
    def part_sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and number of elements per head of each part."""
        return tuple((part.name, part.head_size) for part in self.parts)

    def box(self, layers: int, blocks: int) -> Box:
        """The extents of a tensor of this kind with ``layers`` layers and ``blocks`` blocks."""
        return Box(layers, blocks, self.tokens, self.heads, self.part_sizes)

    def part_box(self, box: Box, part: str) -> Box:
        """The extents of a part in ``box``, without the elements."""
        return box

    def nbytes(self, box: Box) -> int:
        """Number of bytes of a tensor with the extents ``box``, including padding."""
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
        """The place of the cells of each part in a tensor with the extents ``box``, in bytes."""
        if strides is None:
            strides = self.strides(self.layout.shape(box))
        return self.layout.strides(box, strides)


def dense_memory(
    tensors: Sequence[tuple[str, TensorKind, Box]], num_blocks: int, *, region_per_tensor: bool
) -> RankMemory:
    """The memory of a rank whose tensors lie end to end, or each in its own region.

    Args:
        tensors: name, kind and extents of each tensor, in the order in memory.
        num_blocks: number of blocks of each tensor, including the null block.
        region_per_tensor: whether each tensor has its own region; otherwise all tensors lie in
            region 0. Tensors that share pages always share a region.
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
