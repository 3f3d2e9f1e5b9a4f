"""Repacks: blocks that were filled in a source's geometry are made to hold the target's.

A wire that moves whole blocks fills the blocks of the target with bytes in the order of the source.
What must then happen is a permutation of the bytes of a few blocks, the same one everywhere::

    cache blocks ── gather tiles × gather runs ──▶ frame ── scatter tiles × scatter runs ──▶ the
                                                            same cache blocks

A **frame** is the smallest number of tokens that both sides cut into whole blocks: one block of the
target where the source's are equal or divide it, several where they are larger. Its bytes, one
block after the other, are what the wire filled::

    target blocks    |  ids[0]: 6 tokens  |  ids[1]: 6 tokens  |   block_size       6
    filled with      | 4 tokens | 4 tokens | 4 tokens |             held_block_size  4
                     └──────────── frame: 12 tokens ───────────┘

A **unit** is the memory that one permutation touches: a layer, or one part of a layer where both
sides keep the parts apart. A repack holds tiles of many units; it knows no block ids. Gather and
scatter are tiles × runs as everywhere, with a dense frame in between, so that block size, layout,
order of the parts and head slices of several sources are one computation.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockIdError
from kvferry.layouts.layout import Box, CellStrides, Layout
from kvferry.layouts.tiles import TILE_DTYPE, Runs, Tiles, blank_runs

Parts: TypeAlias = tuple[tuple[str, int], ...]
"""Name and elements per head of each part of a unit."""


class Place(NamedTuple):
    """Where one part of a unit lies in the cache."""

    region: int
    cells: CellStrides
    """In bytes, from the region's start; ``layer`` is not used."""


class HeldSlice(NamedTuple):
    """What one source filled of every held block: some neighbouring heads, all parts, dense."""

    layout: Layout
    """The source's layout; of its dims, those inside a block count."""
    heads: int


class Unit(NamedTuple):
    """One permutation's memory."""

    parts: Parts
    places: tuple[Place, ...]
    """One per part."""


@dataclass(frozen=True, slots=True, eq=False)
class Repack:
    """What lies where before and after; see the picture above. Frozen, without block ids."""

    block_size: int
    """Tokens of a block of the cache."""
    held_block_size: int
    """Tokens of a block as it was filled."""
    gather: Tiles
    """From the cache to a frame, ``tiles_per_unit[0]`` rows per unit."""
    scatter: Tiles
    """From a frame to the cache, ``tiles_per_unit[1]`` rows per unit."""
    tiles_per_unit: tuple[int, int]

    @property
    def frame_blocks(self) -> int:
        """Blocks of the cache that are permuted among themselves: a request has a multiple."""
        return self.frame_tokens // self.block_size

    @property
    def frame_tokens(self) -> int:
        """Tokens of a frame."""
        return math.lcm(self.block_size, self.held_block_size)

    @property
    def units(self) -> int:
        """How many units the tiles describe."""
        return len(self.gather) // self.tiles_per_unit[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the largest unit."""
        if not len(self.gather):
            return 0
        return int(self.gather["target_block_stride"].max())

    def bind(self, block_ids: npt.NDArray[np.int64], batch_frames: int = 0) -> tuple[Runs, Runs]:
        """The runs of gather and scatter for checked block ids, frame after frame.

        Args:
            block_ids: a multiple of ``frame_blocks`` of them.
            batch_frames: how many frames the dense memory holds at a time; all of them if 0.
        """
        blocks = self.frame_blocks
        templates = _frame_runs(self.block_size, self.held_block_size)
        frames = len(block_ids) // blocks
        place = np.arange(frames) % (batch_frames or max(frames, 1))
        gather = blank_runs(len(block_ids))
        gather["source_block"] = block_ids
        gather["target_block"] = (place[:, None] * blocks + np.arange(blocks)).ravel()
        gather["tokens"] = self.block_size
        scatter = np.tile(templates, frames)
        each = len(templates)
        held = self.frame_tokens // self.held_block_size
        scatter["source_block"] += np.repeat(place * held, each)
        at = np.repeat(np.arange(frames) * blocks, each)
        scatter["target_block"] = block_ids[scatter["target_block"] + at]
        return gather, scatter


def make_repack(
    units: Sequence[Unit],
    *,
    itemsize: int,
    heads: int,
    block_size: int,
    slots: Layout,
    held: Sequence[HeldSlice],
    held_block_size: int,
) -> Repack:
    """Describes a repack. Units that it would not change are left out.

    >>> cells = CellStrides(offset=0, layer=0, block=8, token=2, head=1, element=1)
    >>> unit = Unit((("k", 1),), (Place(0, cells),))  # 4 tokens, 2 heads, 1 byte: NHD
    >>> nhd, hnd = Layout.named("NHD"), Layout.named("HND")
    >>> options = {"itemsize": 1, "heads": 2, "block_size": 4, "slots": nhd}
    >>> repack = make_repack([unit], held=[HeldSlice(hnd, 2)], held_block_size=8, **options)
    >>> repack.frame_blocks, repack.block_bytes
    (2, 8)
    >>> make_repack([unit], held=[HeldSlice(nhd, 2)], held_block_size=4, **options).units
    0

    Args:
        units: where the cells lie; all with as many parts.
        itemsize: bytes per element.
        heads: heads of the target rank.
        block_size: tokens per block of the cache.
        slots: the order in which the bytes of a block of the cache were filled, its own as a rule.
        held: what each source filled of a held block, ascending by heads.
        held_block_size: tokens per block as it was filled.

    Raises:
        ValueError: the slices do not make up the heads, a block size is below 1, or a layout
            cannot hold the cells.
    """
    if min(block_size, held_block_size) < 1:
        raise ValueError(f"block sizes: {block_size} and {held_block_size}; both are at least 1")
    if sum(each.heads for each in held) != heads:
        raise ValueError(
            f"held: slices of {[each.heads for each in held]} heads, but the target rank has "
            f"{heads}; give each of its heads once"
        )
    shape = _Shape(itemsize, heads, block_size, slots, tuple(held), held_block_size)
    return _described(shape, [unit for unit in units if _moves(_described(shape, [unit]))])


def _described(shape: "_Shape", units: Sequence[Unit]) -> Repack:
    gather = [_gather_rows(shape, unit) for unit in units]
    scatter = [_scatter_rows(shape, unit) for unit in units]
    return Repack(
        shape.block_size,
        shape.held_block_size,
        np.array([row for rows in gather for row in rows], dtype=TILE_DTYPE),
        np.array([row for rows in scatter for row in rows], dtype=TILE_DTYPE),
        (len(gather[0]), len(scatter[0])) if units else (1, 1),
    )


def check_ids(repack: Repack, block_ids: Any, num_blocks: int) -> npt.NDArray[np.int64]:
    """Block ids as an array, ready for :meth:`Repack.bind`.

    Where a frame is a single block, a block that stands twice is repacked once.

    Args:
        repack: what they are for.
        block_ids: a sequence, an array, or a torch tensor (one on a device is waited for).
        num_blocks: blocks of the cache.

    Raises:
        ValueError: they are no whole frames, or a block stands in two places of frames.
        BlockIdError: an id is negative or not below ``num_blocks``.
    """
    tolist = getattr(block_ids, "tolist", None)
    ids = np.array(block_ids if tolist is None else tolist(), dtype=np.int64).reshape(-1)
    if len(ids) % repack.frame_blocks:
        raise ValueError(
            f"block ids: {len(ids)} blocks, but {repack.frame_blocks} consecutive ones of "
            f"{repack.block_size} tokens hold whole blocks of {repack.held_block_size}; give a "
            f"multiple of {repack.frame_blocks}"
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_blocks:
        wrong = ids.max() if ids.min() >= 0 else ids.min()
        raise BlockIdError(f"block {wrong} does not exist; there are {num_blocks} blocks")
    different = np.unique(ids)
    if len(different) == len(ids):
        return ids
    if repack.frame_blocks == 1:
        return different
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]][0]
    raise ValueError(f"block ids: {twice} stands twice; its bytes can belong to one frame only")


class _Shape(NamedTuple):
    """What all units of a repack share."""

    itemsize: int
    heads: int
    block_size: int
    slots: Layout
    held: tuple[HeldSlice, ...]
    held_block_size: int


def dense_strides(
    layout: Layout, parts: Parts, itemsize: int, tokens: int, heads: int
) -> dict[str, CellStrides]:
    """Byte strides of dense blocks, one after the other, in the order of a layout."""
    order = "B" + "".join(dim for dim in layout.order if dim not in "LB")
    inner = Layout(order, layout.inner)
    box = Box(1, 1, tokens, heads, parts)
    strides = [itemsize]
    for extent in reversed(inner.shape(box)[1:]):
        strides.insert(0, strides[0] * extent)
    return inner.strides(box, strides)


def _gather_rows(shape: _Shape, unit: Unit) -> list[tuple[int, ...]]:
    """One row per part; what lies in memory as it was filled is merged when it is copied."""
    dense = dense_strides(shape.slots, unit.parts, shape.itemsize, shape.block_size, shape.heads)
    return [
        (
            *_side(place.region, place.cells),
            *_side(0, dense[name]),
            *(shape.heads, elements, shape.itemsize),
        )
        for (name, elements), place in zip(unit.parts, unit.places, strict=True)
    ]


def _scatter_rows(shape: _Shape, unit: Unit) -> list[tuple[int, ...]]:
    per_head = shape.held_block_size * sum(n for _, n in unit.parts) * shape.itemsize
    rows = []
    head = 0
    for held in shape.held:
        dense = dense_strides(
            held.layout, unit.parts, shape.itemsize, shape.held_block_size, held.heads
        )
        for (name, elements), place in zip(unit.parts, unit.places, strict=True):
            found = dense[name]
            source = found._replace(
                offset=found.offset + head * per_head, block=shape.heads * per_head
            )
            target = place.cells._replace(offset=place.cells.offset + head * place.cells.head)
            extents = (held.heads, elements, shape.itemsize)
            rows.append((*_side(0, source), *_side(place.region, target), *extents))
        head += held.heads
    return rows


def _side(region: int, cells: CellStrides) -> tuple[int, ...]:
    return (region, cells.offset, cells.block, cells.token, cells.head, cells.element)


@functools.cache
def _frame_runs(block_size: int, held_block_size: int) -> Runs:
    frame = math.lcm(block_size, held_block_size)
    starts = np.unique(
        np.concatenate([np.arange(0, frame, size) for size in (block_size, held_block_size)])
    )
    runs = blank_runs(len(starts))
    runs["source_block"], runs["source_token"] = np.divmod(starts, held_block_size)
    runs["target_block"], runs["target_token"] = np.divmod(starts, block_size)
    runs["tokens"] = np.diff(starts, append=frame)
    return runs


def _moves(repack: Repack) -> bool:
    """Whether any byte of a repack of one unit goes to another place than it lies in."""
    from kvferry.layouts.copier import expand  # compiles; planning alone need not

    gather_runs, scatter_runs = repack.bind(np.arange(repack.frame_blocks))
    before, after = expand(repack.gather, gather_runs), expand(repack.scatter, scatter_runs)
    edges = np.union1d(before["target_offset"], after["source_offset"])
    lies = _cache_places(before, "target", "source", edges)
    goes = _cache_places(after, "source", "target", edges)
    return bool((lies != goes).any())


def _cache_places(segments: npt.NDArray[np.void], frame: str, cache: str, at: Any) -> Any:
    """int64[2, n]: region and offset in the cache of the bytes at these offsets of a frame."""
    segments = segments[np.argsort(segments[f"{frame}_offset"])]
    found = segments[np.searchsorted(segments[f"{frame}_offset"], at, side="right") - 1]
    inside = at - found[f"{frame}_offset"]
    return np.stack([found[f"{cache}_region"], found[f"{cache}_offset"] + inside])
