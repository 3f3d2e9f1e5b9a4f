"""Order of the cells in a CPU attention block, found by letting vLLM's operation write a block.

CPU caches have the shape ``[B, H, N, 2 * D]``, but inside a (block, head) the order of elements
depends on dtype, instruction set and block size. float32 and float16 hold K as ``[D, N]``, then V
as ``[N, D]``; bfloat16 on AMX machines holds tiles of 16 tokens. So nothing is assumed: the probe
writes the index of every (token, element) bit by bit, and finds the place of each index.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Indices = npt.NDArray[np.int64]

WriteBlock = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""K and V, each [tokens, elements] → the flat block, with one element of any dtype per cell."""

TRANSPOSED_K = "BH(k=DN,v=ND)"
"""Layout of float32 and float16 caches."""

#: Layout → for an index array [N, D], the places of the cells of K and V.
_KNOWN: dict[str, Callable[[Indices], tuple[Indices, Indices]]] = {
    TRANSPOSED_K: lambda cells: (cells.T, cells),
    "BH(k=ND,v=ND)": lambda cells: (cells, cells),
}


@dataclass(frozen=True, slots=True)
class Packing:
    """Places of the cells of a (block, head)."""

    layout: str
    """Layout of the block; for an opaque block, a layout with the same outer dims and bytes."""
    name: str = ""
    """Name of an opaque block's order; empty if the layout describes the order."""


def probe_packing(
    write: WriteBlock, dtype: torch.dtype, block_size: int, head_size: int, *, name: str
) -> Packing:
    """Finds the order of the cells of one (block, head).

    Args:
        write: stores one block of one head.
        dtype: dtype of the arguments of ``write``.
        block_size: tokens per block.
        head_size: elements per head.
        name: name of the writer; part of the name of an order that no layout describes.
    """
    k_cells, v_cells = _order(write, dtype, block_size, head_size)
    cells = np.arange(block_size * head_size).reshape(block_size, head_size)
    for layout, expected in _KNOWN.items():
        k, v = expected(cells)
        if np.array_equal(k_cells, k.ravel()) and np.array_equal(v_cells, v.ravel()):
            return Packing(layout)
    order = np.concatenate([k_cells, v_cells]).astype("<i8")
    digest = hashlib.sha256(order.tobytes()).hexdigest()[:16]
    return Packing(TRANSPOSED_K, f"{name} {digest}")


def _order(
    write: WriteBlock, dtype: torch.dtype, block_size: int, head_size: int
) -> tuple[Indices, Indices]:
    """For each place of the K part and of the V part, the index ``n * head_size + d`` of the cell.

    Only 0 and 1 are exact in every dtype, so the probe writes one bit of the index at a time. At
    the end, the probe writes 1 everywhere. A place without this 1 holds no cell, and no order can
    describe such a block.
    """
    cells = np.arange(block_size * head_size)
    found = np.zeros(2 * len(cells), dtype=np.int64)
    for bit in range(int(cells[-1]).bit_length()):
        found |= _written(write, dtype, (cells >> bit) & 1, block_size) << bit
    if not _written(write, dtype, np.ones_like(cells), block_size).all():
        found[:] = -1
    return found[: len(cells)], found[len(cells) :]


def _written(write: WriteBlock, dtype: torch.dtype, values: Indices, block_size: int) -> Indices:
    part_ND = torch.from_numpy(values.reshape(block_size, -1)).to(dtype)
    block = write(part_ND, part_ND.clone())
    return (block != 0).numpy().astype(np.int64)
