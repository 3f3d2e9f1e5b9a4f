"""What is moved in the transport benchmark, and whether it arrived.

The data are known on both sides: a block of a given number holds the same cells in every process,
whatever the layout it is stored in. So the check needs neither the source nor kvferry: it indexes
the target with NumPy and compares.
"""

import functools
import math
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.remote import WrongDataError
from kvferry.layouts.tiles import Tiles
from kvferry.topology import EngineGeometry, ParallelShape, TransferPlan, plan_transfer

Cells: TypeAlias = npt.NDArray[np.uint16]
"""bfloat16 cells as bits: ``[layer, part, block, token, head, element]``, dims in this order and
strides of any layout."""

Ids: TypeAlias = npt.NDArray[np.int64]
"""Numbers of blocks."""

LAYOUTS = ("NHD", "HND")
THREADS = (1, 2)
"""On both sides."""
_NULL_BLOCKS = 1
_LINE = 64
"""Bytes of a cache line."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of both engines, on one rank each."""

    layers: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    """Tokens per block."""
    tokens: int = 2048
    """Tokens that a transfer moves."""

    @property
    def blocks(self) -> int:
        """Blocks of the pool; block 0 is the null block, a transfer moves all others."""
        return _NULL_BLOCKS + -(-self.tokens // self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one part of one layer: what lies together in both layouts."""
        return self.block_size * self.kv_heads * self.head_size * 2

    @property
    def region_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.layers * 2 * self.blocks * self.block_bytes

    @property
    def transfer_bytes(self) -> int:
        """Bytes that one transfer moves."""
        return self.layers * 2 * self.tokens * self.kv_heads * self.head_size * 2

    def geometry(self, layout: str) -> EngineGeometry:
        """The same, as kvferry describes it."""
        return EngineGeometry(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            dtype="bfloat16",
            block_size=self.block_size,
            layout=layout,
            parallel=ParallelShape(),
        )

    def cells(self, region: npt.NDArray[np.uint8], layout: str) -> Cells:
        """The cells of a cache whose layers lie one after the other in ``region``."""
        inner = {
            "NHD": (self.block_size, self.kv_heads, self.head_size),
            "HND": (self.kv_heads, self.block_size, self.head_size),
        }[layout]
        stored = region.view(np.uint16).reshape(self.layers, 2, self.blocks, *inner)
        return stored.swapaxes(3, 4) if layout == "HND" else stored

    def known_cells(self) -> Cells:
        """What every source holds: random bits, the same in every process."""
        shape = (self.layers, 2, self.blocks, self.block_size, self.kv_heads, self.head_size)
        words = np.random.Generator(np.random.SFC64(1)).integers(
            0, 2**64, math.prod(shape) // 4, dtype=np.uint64
        )
        return words.view(np.uint16).reshape(shape)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    source_layout: str
    target_layout: str
    shuffled: bool
    threads: int

    @property
    def mismatched(self) -> bool:
        """Whether the layout changes on the way."""
        return self.source_layout != self.target_layout

    @property
    def tables(self) -> str:
        """How the block tables go."""
        return "shuffled" if self.shuffled else "in order"

    @property
    def layouts(self) -> str:
        """Source and target layout."""
        return f"{self.source_layout}→{self.target_layout}"

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.layouts}, {self.tables}, {threads}"

    def block_tables(self, shape: CacheShape) -> tuple[Ids, Ids]:
        """Source and target block ids; no two tables of the shuffled case are alike."""
        ids = np.arange(_NULL_BLOCKS, shape.blocks, dtype=np.int64)
        if not self.shuffled:
            return ids, ids
        rng = np.random.default_rng(7)
        return rng.permutation(ids), rng.permutation(ids)


def all_cases(threads: tuple[int, ...] = THREADS) -> list[Case]:
    """Every case, equal layouts first."""
    pairs = (("NHD", "NHD"), ("NHD", "HND"), ("HND", "NHD"))
    return [
        Case(source, target, shuffled, count)
        for count, (source, target), shuffled in product(threads, pairs, (False, True))
    ]


@functools.cache
def lowered(
    shape: CacheShape, source_layout: str, target_layout: str
) -> tuple[TransferPlan, Tiles]:
    """The plan between two layouts, and its tiles: source region ``i`` holds ``LAYOUTS[i]``.

    Made once per pair of engines, so no part of what is measured.
    """
    source, target = shape.geometry(source_layout), shape.geometry(target_layout)
    plan = plan_transfer(source=source, target=target)
    memory = source.memory(0, shape.blocks), target.memory(0, shape.blocks)
    tiles = plan.lower({0: memory[0]}, memory[1])[0].copy()
    tiles["source_region"] = LAYOUTS.index(source_layout)
    return plan, tiles


def merged_blocks(
    shape: CacheShape, case: Case
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Whole blocks of all layers and parts: source offsets, target offsets and sizes in bytes.

    Neighbours on both sides become one.

    >>> shape = CacheShape(layers=1, kv_heads=1, head_size=8, block_size=2, tokens=6)
    >>> [rows.tolist() for rows in merged_blocks(shape, Case("NHD", "NHD", False, 1))]
    [[32, 160], [32, 160], [96, 96]]
    """
    size = shape.block_bytes
    starts = np.arange(shape.layers * 2, dtype=np.int64) * shape.blocks * size
    source, target = (
        (starts[:, None] + table[None, :] * size).ravel() for table in case.block_tables(shape)
    )
    follows = (np.diff(source) == size) & (np.diff(target) == size)
    firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
    counts = np.diff(np.append(firsts, len(source)))
    return source[firsts], target[firsts], counts * size


class Reader:
    """Private memory for a whole pool, touched and zero. It begins on a cache line, as the tensors
    of engines do; NumPy's own arrays begin 16 bytes behind one.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._known = shape.known_cells()
        memory = np.zeros(shape.region_bytes + _LINE, dtype=np.uint8)
        first = -memory.ctypes.data % _LINE
        self.target = memory[first : first + shape.region_bytes]
        self.clear()

    def clear(self) -> None:
        """Zeroes the target."""
        self.target[:] = 0

    def check(self, _contender: str, case: Case) -> None:
        """Checks the target after a transfer.

        Raises:
            WrongDataError: it holds something else than it should.
        """
        check_target(self.shape, case, self.target, self._known)


def check_target(
    shape: CacheShape, case: Case, target: npt.NDArray[np.uint8], known: Cells
) -> None:
    """Compares every cell of a target that was zero before the transfer.

    Raises:
        WrongDataError: a cell is wrong, or the null block was written.
    """
    found = shape.cells(target, case.target_layout)
    source_table, target_table = case.block_tables(shape)
    for layer in range(shape.layers):
        same = found[layer][:, target_table] == known[layer][:, source_table]
        if not same.all():
            part, block, token, head, element = np.argwhere(~same)[0]
            raise WrongDataError(
                f"{case}: {np.count_nonzero(~same)} of {same.size} cells of layer {layer} are "
                f"wrong; the first is {'kv'[part]}, block {target_table[block]}, token {token}, "
                f"head {head}, element {element}"
            )
    if found[:, :, :_NULL_BLOCKS].any():
        raise WrongDataError(f"{case}: the null block was written")
