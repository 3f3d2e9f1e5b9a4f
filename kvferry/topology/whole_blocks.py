"""Whole blocks of the source into the final slots of the target, as tiles × runs.

First half of the strategy *in place*; :func:`~kvferry.topology.in_place.plan_repack` is the second.
The bytes of a frame are one stream, in which each side's blocks lie one after the other::

    source  | held block 0: source a, source b | held block 1: source a, source b | ...
    stream  |------------------------ bytes of a frame ------------------------->|
    target  | block 0                 | block 1                 | block 2          |

An **extent** is a part of a block that is contiguous in memory and in the stream. Where an extent
of the source meets one of the target, bytes are copied as they come. The tiles look at extents as
tokens of a few bytes each, as many as divide every place where an extent is cut.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.layouts.layout import CellStrides
from kvferry.layouts.repack import Unit, dense_strides
from kvferry.layouts.tiles import TILE_DTYPE, Runs, Tiles, blank_runs
from kvferry.topology.group import GroupGeometry
from kvferry.topology.in_place import check_whole_blocks, part_groups, places_in
from kvferry.topology.plan import BoundCopies, TransferPlan
from kvferry.topology.sharding import Int64s
from kvferry.topology.tensors import Part, RankMemory


@dataclass(frozen=True, slots=True, eq=False)
class BoundBlocks:
    """The whole blocks of one request."""

    runs: Mapping[int, Runs]
    """Source rank → what its tiles are applied to."""
    target_blocks: Int64s
    """The blocks that are filled, frame after frame: those to repack."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeBlocks:
    """The whole blocks that a plan moves. Frozen; knows no block ids."""

    plan: TransferPlan
    tiles: Mapping[int, Tiles]
    """Source rank → a row per layer, part or parts that lie together."""
    templates: Mapping[int, Runs]
    """Source rank → the runs of a frame; blocks are named by their place in it."""

    @property
    def frame_tokens(self) -> int:
        """Tokens of a frame, the smallest number that both sides cut into whole blocks."""
        return math.lcm(self.plan.source.block_size, self.plan.target.block_size)

    def obstacle(self, copies: BoundCopies) -> str | None:
        """Why the whole blocks of a request cannot be moved; ``None`` if they can."""
        first, last = copies.span
        if first == last:
            return None
        frame = self.frame_tokens
        if first % frame:
            return (
                f"the span begins at token {first}, inside a frame of {frame} tokens, whose "
                "earlier tokens must not change"
            )
        blocks = self._filled(copies)
        needed = -(-last // frame) * frame - first
        if len(blocks) * self.plan.target.block_size < needed:
            return (
                f"the target's block table ends inside a frame of {frame} tokens: "
                f"{len(copies.target_blocks)} blocks of {self.plan.target.block_size}"
            )
        if (blocks == 0).any():
            return "the target's block table has null blocks in the span"
        if len(np.unique(blocks)) < len(blocks):
            return "the target's block table names a block twice in the last frame"
        return None

    def bind(self, copies: BoundCopies) -> BoundBlocks:
        """The whole blocks of a request.

        They fill the target's blocks to the end of the last frame: what no token of the span
        covers there is undefined afterwards.

        Raises:
            ValueError: see :meth:`obstacle`.
        """
        reason = self.obstacle(copies)
        if reason is not None:
            raise ValueError(f"whole blocks cannot be moved: {reason}")
        first, last = copies.span
        frame, source_size = self.frame_tokens, self.plan.source.block_size
        target_size = self.plan.target.block_size
        frames = np.arange(first // frame, -(-last // frame) if last > first else first // frame)
        runs = {}
        for rank, template in self.templates.items():
            rows = np.tile(template, len(frames))
            at = np.repeat(frames, len(template))
            held = rows["source_block"] + at * (frame // source_size)
            slots = rows["target_block"] + at * (frame // target_size)
            brought = held * source_size < last  # later ones hold no token of the request
            rows = rows[brought]
            rows["source_block"] = copies.source_blocks[held[brought]]
            rows["target_block"] = copies.target_blocks[slots[brought]]
            runs[rank] = rows
        return BoundBlocks(runs, self._filled(copies))

    def _filled(self, copies: BoundCopies) -> Int64s:
        first, last = copies.span
        frame, size = self.frame_tokens, self.plan.target.block_size
        end = -(-last // frame) * frame if last > first else first
        return copies.target_blocks[first // size : end // size]


def whole_block_copies(
    plan: TransferPlan, source_memory: Mapping[int, RankMemory], target_memory: RankMemory
) -> WholeBlocks:
    """What moves whole blocks of a plan into their final slots; once per peer.

    >>> from dataclasses import replace
    >>> from kvferry.layouts import Layout
    >>> from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer
    >>> target = EngineGeometry(num_layers=1, num_kv_heads=2, head_size=4, dtype="float32",
    ...                         block_size=4, layout="NHD", parallel=ParallelShape())
    >>> source = replace(target, layout=Layout.named("HND"), block_size=6)
    >>> plan = plan_transfer(source=source, target=target)
    >>> whole = whole_block_copies(plan, {0: source.memory(0, 4)}, target.memory(0, 6))
    >>> blocks = whole.bind(plan.bind([3, 1], [2, 5, 4], num_tokens=12))
    >>> blocks.runs[0][["source_block", "target_block", "tokens"]].tolist()
    [(3, 2, 2), (3, 5, 1), (1, 5, 1), (1, 4, 2)]
    >>> blocks.target_blocks.tolist()  # to repack
    [2, 5, 4]

    Args:
        plan: who gives what; its layers count.
        source_memory: source rank → its memory.
        target_memory: the memory of the plan's target rank.

    Raises:
        ValueError: whole blocks of one side are not whole on the other, or do not lie together;
            see :func:`in_place_obstacle`.
        ProtocolError, BoundsError: see :meth:`TransferPlan.lower`.
    """
    check_whole_blocks(plan)
    target, rank = plan.target, plan.target_rank
    heads = target.heads(rank)
    tiles: dict[int, Tiles] = {}
    templates: dict[int, Runs] = {}
    for source_rank in plan.source_ranks:
        given = plan.for_source(source_rank).pieces
        layers = [piece.layer for piece in given]
        ours = given[0].heads  # the same in every layer
        rows: list[tuple[int, ...]] = []
        for parts in part_groups(plan.source, target):
            frame = _Frame.of(plan, parts, ours)
            held = places_in(
                plan.source, source_rank, source_memory[source_rank], layers, ours, parts
            )
            slots = places_in(target, rank, target_memory, layers, heads, parts)
            for one, two in zip(held, slots, strict=True):
                for row, runs in frame.copies(one, two):
                    rows.append(row)
                    known = templates.setdefault(source_rank, runs)
                    if not np.array_equal(known, runs):
                        raise ValueError(
                            "parts lie together on one side only, and blocks of "
                            f"{plan.source.block_size} and {target.block_size} tokens cut each of "
                            "them in other places; copy strided or through staging instead"
                        )
        tiles[source_rank] = np.array(rows, dtype=TILE_DTYPE)
    return WholeBlocks(plan, tiles, templates)


def in_place_obstacle(
    plan: TransferPlan, source_memory: Mapping[int, RankMemory], target_memory: RankMemory
) -> str | None:
    """Why whole blocks of a plan cannot be moved and permuted in place; ``None`` if they can.

    A request can have reasons of its own: :meth:`WholeBlocks.obstacle`.
    """
    try:
        whole_block_copies(plan, source_memory, target_memory)
    except ValueError as error:
        return str(error)
    return None


class _Extent(NamedTuple):
    """Bytes of a block that lie together, in memory and in the stream."""

    start: int
    """In the stream, from the start of the block."""
    nbytes: int
    region: int
    offset: int
    """Of block 0, from the region's start."""
    block: int
    """Bytes from a block to the next."""


class _Side(NamedTuple):
    """How the blocks of one side make up the stream of a frame."""

    name: str
    blocks: int
    """In a frame."""
    pitch: int
    """Bytes of the stream from a block to the next."""
    start: int
    """Bytes of the stream before the first block."""
    tokens: int
    heads: int
    cells: Mapping[str, CellStrides]
    """Part → where its cells lie in a dense block."""


class _Frame(NamedTuple):
    """The stream of a frame, as one source rank and the target see it."""

    source: _Side
    target: _Side
    itemsize: int

    @classmethod
    def of(cls, plan: TransferPlan, parts: tuple[Part, ...], heads: range) -> "_Frame":
        """The frame of some parts, of which one source rank gives some heads."""
        target_heads = plan.target.heads(plan.target_rank)
        itemsize = plan.target.itemsize
        token = sum(part.head_size for part in parts) * itemsize  # of one head
        tokens = math.lcm(plan.source.block_size, plan.target.block_size)
        sizes = tuple((part.name, part.head_size) for part in parts)

        def side(name: str, geometry: GroupGeometry, held: range) -> _Side:
            size = geometry.block_size
            return _Side(
                name,
                tokens // size,
                len(target_heads) * size * token,
                (held.start - target_heads.start) * size * token,
                size,
                len(held),
                dense_strides(geometry.layout, sizes, itemsize, size, len(held)),
            )

        return cls(
            side("source", plan.source, heads),
            side("target", plan.target, target_heads),
            itemsize,
        )

    def copies(self, held: Unit, slots: Unit) -> Iterator[tuple[tuple[int, ...], Runs]]:
        """A tile, and its runs in the first frame, per two extents that meet.

        Raises:
            ValueError: blocks do not lie together.
        """
        for one in _extents(self.source, held, self.itemsize):
            for two in _extents(self.target, slots, self.itemsize):
                cuts = np.array(list(self._cuts(one, two)), dtype=np.int64).reshape(-1, 5)
                if not len(cuts):
                    continue
                first = cuts[:, 1:4:2].min(axis=0)
                cuts[:, 1:4:2] -= first
                step = int(np.gcd.reduce(cuts[:, (1, 3, 4)], axis=None))
                runs = blank_runs(len(cuts))
                runs["source_block"], runs["target_block"] = cuts[:, 0], cuts[:, 2]
                runs["source_token"], runs["target_token"] = cuts[:, 1] // step, cuts[:, 3] // step
                runs["tokens"] = cuts[:, 4] // step
                cells = (step, step, self.itemsize)
                yield (
                    (
                        *(one.region, one.offset + int(first[0]), one.block, *cells),
                        *(two.region, two.offset + int(first[1]), two.block, *cells),
                        *(1, step // self.itemsize, self.itemsize),
                    ),
                    runs,
                )

    def _cuts(self, one: _Extent, two: _Extent) -> Iterator[tuple[int, ...]]:
        """Held block, byte in it, slot, byte in it, bytes."""
        for held in range(self.source.blocks):
            start = self.source.start + held * self.source.pitch + one.start
            last = start + one.nbytes - 1
            for slot in range(start // self.target.pitch, last // self.target.pitch + 1):
                there = slot * self.target.pitch + two.start
                begin, end = max(start, there), min(last + 1, there + two.nbytes)
                if begin < end:
                    yield held, begin - start, slot, begin - there, end - begin


def _extents(side: _Side, unit: Unit, itemsize: int) -> list[_Extent]:
    """The whole block if its parts lie as they would in a dense one, else each part by itself.

    Raises:
        ValueError: neither lies together.
    """
    per_element = side.tokens * side.heads * itemsize
    found = []
    for (name, elements), place in zip(unit.parts, unit.places, strict=True):
        dense, cells = side.cells[name], place.cells
        counts = (side.tokens, side.heads, elements)
        if any(
            count > 1 and one != two
            for count, one, two in zip(counts, cells[3:], dense[3:], strict=True)
        ):
            raise ValueError(
                f"{side.name}: the bytes of a block do not lie together in the order of its dims; "
                "copy strided or through staging instead"
            )
        nbytes = per_element * elements
        found.append(_Extent(dense.offset, nbytes, place.region, cells.offset, cells.block))
    if len({(one.region, one.block, one.offset - one.start) for one in found}) == 1:
        total = sum(one.nbytes for one in found)
        return [found[0]._replace(start=0, nbytes=total, offset=found[0].offset - found[0].start)]
    for (name, elements), one in zip(unit.parts, found, strict=True):
        reach = sum(
            (count - 1) * stride
            for count, stride in zip(
                (side.tokens, side.heads, elements), side.cells[name][3:], strict=True
            )
        )
        if reach + itemsize != one.nbytes:
            raise ValueError(
                f"{side.name}: the parts of a block are woven into each other in the layout, but "
                "lie apart; copy strided or through staging instead"
            )
    return found
