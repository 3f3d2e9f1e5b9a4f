"""Repacks: blocks filled in a source's geometry are made to hold the target's geometry.

A wire that moves whole blocks fills the blocks of the target with bytes in the order of the source.
Afterwards the bytes of these blocks must be permuted; the permutation is the same everywhere::

    cache blocks ── gather tiles × gather runs ──▶ frame ── scatter tiles × scatter runs ──▶ the
                                                            same cache blocks

A **frame** is the smallest number of tokens that both sides cut into whole blocks. A frame is a
single block of the target if the source's block size divides the target's block size, otherwise
several blocks. Its bytes, block after block, are the bytes that the wire filled::

    target blocks    |  ids[0]: 6 tokens  |  ids[1]: 6 tokens  |   block_size       6
    filled with      | 4 tokens | 4 tokens | 4 tokens |             held_block_size  4
                     └──────────── frame: 12 tokens ───────────┘

A **unit** is the memory that one permutation touches: a layer, or one part of a layer if both sides
keep the parts separate. A repack holds tiles of many units, and knows no block ids. Gather and
scatter are tiles × runs as everywhere, with a dense frame between. So block size, layout, order of
the parts and head slices of several sources are a single computation.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockIdError
from kvferry.layouts.arrays import Int64s, whole_ids
from kvferry.layouts.layout import Box, CellStrides, Layout
from kvferry.layouts.tiles import TILE_DTYPE, Runs, Tiles, blank_runs

_FEW_IDS = 64
"""Number of block ids up to which Python's own list and set check the ids sooner than NumPy."""

Parts: TypeAlias = tuple[tuple[str, int], ...]
"""Name and elements per head of each part of a unit."""


class FramePlace(NamedTuple):
    """Place of one part of a unit in the cache."""

    region: int
    cells: CellStrides
    """Offset and strides of the cells in bytes, from the region's start; ``layer`` is not used."""


class HeldSlice(NamedTuple):
    """The share of a source in every held block: some neighbouring heads, all parts, dense."""

    layout: Layout
    """Layout of the source; only the dims inside a block count."""
    heads: int


class Unit(NamedTuple):
    """The memory of one permutation."""

    parts: Parts
    places: tuple[FramePlace, ...]
    """Place of each part of the unit, in the order of ``parts``."""


@dataclass(frozen=True, slots=True, eq=False)
class Repack:
    """Places of all bytes before and after; see the picture above. Frozen, without block ids."""

    block_size: int
    """Number of tokens of a block of the cache."""
    held_block_size: int
    """Number of tokens of a block as filled by the source."""
    gather: Tiles
    """Tiles from the cache to a frame, ``tiles_per_unit[0]`` rows per unit."""
    scatter: Tiles
    """Tiles from a frame to the cache, ``tiles_per_unit[1]`` rows per unit."""
    tiles_per_unit: tuple[int, int]

    @property
    def frame_blocks(self) -> int:
        """Number of cache blocks in a frame; the number of a request's blocks is a multiple."""
        return self.frame_tokens // self.block_size

    @property
    def frame_tokens(self) -> int:
        """Number of tokens of a frame."""
        return math.lcm(self.block_size, self.held_block_size)

    @property
    def units(self) -> int:
        """Number of units that the tiles describe."""
        return len(self.gather) // self.tiles_per_unit[0]

    @property
    def block_bytes(self) -> int:
        """Number of bytes of a block of the largest unit."""
        if not len(self.gather):
            return 0
        return int(self.gather["target_block_stride"].max())

    def bind(self, block_ids: Int64s, batch_frames: int = 0) -> tuple[Runs, Runs]:
        """The runs of gather and scatter for checked block ids, frame after frame.

        Args:
            block_ids: block ids; their number is a multiple of ``frame_blocks``.
            batch_frames: number of frames that the dense memory holds at a time; 0 for all frames.
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
    """Describes a repack. Units that the repack would not change are left out.

    >>> cells = CellStrides(offset=0, layer=0, block=8, token=2, head=1, element=1)
    >>> unit = Unit((("k", 1),), (FramePlace(0, cells),))  # 4 tokens, 2 heads, 1 byte: NHD
    >>> nhd, hnd = Layout.named("NHD"), Layout.named("HND")
    >>> options = {"itemsize": 1, "heads": 2, "block_size": 4, "slots": nhd}
    >>> repack = make_repack([unit], held=[HeldSlice(hnd, 2)], held_block_size=8, **options)
    >>> repack.frame_blocks, repack.block_bytes
    (2, 8)
    >>> make_repack([unit], held=[HeldSlice(nhd, 2)], held_block_size=4, **options).units
    0

    Args:
        units: places of the cells; all units have the same number of parts.
        itemsize: bytes per element.
        heads: number of heads of the target rank.
        block_size: tokens per block of the cache.
        slots: order in which the bytes of a cache block were filled; usually the cache's own
            layout.
        held: share of each source in a held block, ascending by heads.
        held_block_size: tokens per block as filled by the source.

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
    slots = [HeldSlice(shape.slots, shape.heads)]
    gather = [_rows(shape, unit, slots, shape.block_size, gather=True) for unit in units]
    scatter = [
        _rows(shape, unit, shape.held, shape.held_block_size, gather=False) for unit in units
    ]
    return Repack(
        shape.block_size,
        shape.held_block_size,
        np.array([row for rows in gather for row in rows], dtype=TILE_DTYPE),
        np.array([row for rows in scatter for row in rows], dtype=TILE_DTYPE),
        (len(gather[0]), len(scatter[0])) if units else (1, 1),
    )


def check_ids(repack: Repack, block_ids: Any, num_blocks: int) -> Int64s:
    """Block ids as an array, ready for :meth:`Repack.bind`.

    If a frame is a single block, a repeated block is repacked once.

    Args:
        repack: the repack for the ids.
        block_ids: a sequence, an array, or a torch tensor (the call waits for a tensor on a
            device).
        num_blocks: number of blocks of the cache.

    Raises:
        ValueError: the ids are no whole frames, or a block stands in two places of frames.
        BlockIdError: an id is no whole number, negative, or not below ``num_blocks``.
    """
    ids = whole_ids("block ids", block_ids)
    each = repack.frame_blocks
    if len(ids) % each:
        raise ValueError(
            f"block ids: {len(ids)} blocks, but {each} consecutive ones of {repack.block_size} "
            f"tokens hold whole blocks of {repack.held_block_size}; give a multiple of {each}"
        )
    are_few = len(ids) <= _FEW_IDS
    ordered: Any = ids.tolist() if are_few else ids.copy()
    ordered.sort()
    if len(ids) and not 0 <= ordered[0] <= ordered[-1] < num_blocks:
        wrong = ordered[-1] if ordered[0] >= 0 else ordered[0]
        raise BlockIdError(f"block {wrong} does not exist; there are {num_blocks} blocks")
    if are_few and len(set(ordered)) == len(ids):
        return ids
    ordered = np.asarray(ordered)
    again = ordered[1:] == ordered[:-1]
    if not again.any():
        return ids
    if each == 1:
        return np.unique(ids)
    twice = ordered[1:][again][0]
    raise ValueError(f"block ids: {twice} stands twice; its bytes can belong to one frame only")


class _Shape(NamedTuple):
    """Numbers that all units of a repack share."""

    itemsize: int
    heads: int
    block_size: int
    slots: Layout
    held: tuple[HeldSlice, ...]
    held_block_size: int


def dense_strides(
    layout: Layout, parts: Parts, itemsize: int, tokens: int, heads: int
) -> dict[str, CellStrides]:
    """Byte strides of dense, adjacent blocks, in the order of a layout."""
    order = "B" + "".join(dim for dim in layout.order if dim not in "LB")
    inner = Layout(order, layout.inner)
    box = Box(1, 1, tokens, heads, parts)
    strides = [itemsize]
    for extent in reversed(inner.shape(box)[1:]):
        strides.insert(0, strides[0] * extent)
    return inner.strides(box, strides)


def _rows(
    shape: _Shape, unit: Unit, filled: Sequence[HeldSlice], tokens: int, *, gather: bool
) -> list[tuple[int, ...]]:
    """Rows of ``TILE_DTYPE`` between a unit in the cache and a frame: a row per slice and part.

    Args:
        shape: numbers that all units share.
        unit: places of the cells in the cache.
        filled: slices of heads in a block of the frame, ascending by heads.
        tokens: number of tokens of such a block.
        gather: whether the rows go from the cache to the frame; otherwise the rows go back.
    """
    per_head = tokens * sum(n for _, n in unit.parts) * shape.itemsize
    rows = []
    head = 0
    for each in filled:
        dense = dense_strides(each.layout, unit.parts, shape.itemsize, tokens, each.heads)
        for (name, elements), place in zip(unit.parts, unit.places, strict=True):
            found = dense[name]
            frame = found._replace(
                offset=found.offset + head * per_head, block=shape.heads * per_head
            )
            cells = place.cells._replace(offset=place.cells.offset + head * place.cells.head)
            sides = (_side(place.region, cells), _side(0, frame))
            source, target = sides if gather else sides[::-1]
            rows.append((*source, *target, each.heads, elements, shape.itemsize))
        head += each.heads
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
    """Whether the repack of one unit moves any byte to another place."""
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
