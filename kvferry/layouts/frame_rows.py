"""A repack as a list of rows: which bytes of a frame go where, in the form that a GPU wants.

Every unit with the same relative geometry has the same rows, so one small table serves all layers
and all frames, and no geometry is left in the kernel. A byte of the cache is named by a **slot**
and an offset. Slots count chunk by chunk, and in a chunk block by block of the frame::

    slot = chunk * frame_blocks + place of the block in the frame
    address = region address + chunk offset + block id * chunk stride + row offset

A **chunk** is the memory of a unit that lies in one region with one block stride.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layouts.copier import expand
from kvferry.layouts.repack import Repack, frame_maps
from kvferry.layouts.tiles import Tiles

Int64s: TypeAlias = npt.NDArray[np.int64]

ROW_BYTES = 256
"""Most bytes per row: a few hundred make the table small beside the data."""

_FAR = 1 << 40
"""Bytes between two blocks when pieces are listed: far more than any block has."""


class Chunk(NamedTuple):
    """Memory of one unit."""

    region: int
    offset: int
    """Bytes from the region's start to the chunk in block 0."""
    block_stride: int
    """Bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class FrameRows:
    """Where each row of a frame lies, and where it goes; rows that stay are left out."""

    row_bytes: int
    """A power of two."""
    source_slots: Int64s
    source_offsets: Int64s
    target_slots: Int64s
    target_offsets: Int64s

    @property
    def key(self) -> tuple[int, bytes, bytes, bytes, bytes]:
        """Equal for units that one table serves."""
        return (
            self.row_bytes,
            self.source_slots.tobytes(),
            self.source_offsets.tobytes(),
            self.target_slots.tobytes(),
            self.target_offsets.tobytes(),
        )


def chunks_of(repack: Repack, unit: int) -> tuple[Chunk, ...]:
    """The chunks of a unit, in the order of their first tiles."""
    found: dict[tuple[int, int], int] = {}
    for tile in repack.unit_tiles(unit)[0]:
        key = (int(tile["source_region"]), int(tile["source_block_stride"]))
        found[key] = min(found.get(key, 1 << 62), int(tile["source_offset"]))
    return tuple(Chunk(region, offset, stride) for (region, stride), offset in found.items())


def frame_rows(repack: Repack, unit: int) -> FrameRows:
    """The rows of one unit."""
    gather, gather_runs, scatter, scatter_runs = frame_maps(repack, unit)
    chunks = chunks_of(repack, unit)
    before = expand(_by_chunk(gather, "source", chunks), gather_runs)
    after = expand(_by_chunk(scatter, "target", chunks), scatter_runs)
    row_bytes = math.gcd(ROW_BYTES, *before["nbytes"], *after["nbytes"], *before["target_offset"])
    row_bytes = math.gcd(row_bytes, *after["source_offset"])
    sources = _places(before, "source", "target", row_bytes, repack.frame_blocks)
    targets = _places(after, "target", "source", row_bytes, repack.frame_blocks)
    moved = (sources != targets).any(axis=0)
    return FrameRows(row_bytes, *sources[:, moved], *targets[:, moved])


def _by_chunk(tiles: Tiles, side: str, chunks: tuple[Chunk, ...]) -> Tiles:
    """Tiles whose cache side speaks of chunks, with blocks far apart so that none melt."""
    result = tiles.copy()
    for row in result:
        key = (row[f"{side}_region"], row[f"{side}_block_stride"])
        index = next(i for i, c in enumerate(chunks) if (c.region, c.block_stride) == key)
        row[f"{side}_region"] = index
        row[f"{side}_offset"] -= chunks[index].offset
        row[f"{side}_block_stride"] = _FAR
    return result


def _places(
    pieces: npt.NDArray[np.void], cache: str, frame: str, row_bytes: int, frame_blocks: int
) -> Int64s:
    """int64[2, rows] slots and offsets on the cache side, in the order of the frame."""
    pieces = pieces[np.argsort(pieces[f"{frame}_offset"], kind="stable")]
    counts = pieces["nbytes"] // row_bytes
    block, offset = np.divmod(pieces[f"{cache}_offset"] + _FAR // 2, _FAR)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    inside = (np.arange(counts.sum()) - firsts) * row_bytes
    slots = pieces[f"{cache}_region"] * frame_blocks + block
    return np.stack([np.repeat(slots, counts), np.repeat(offset - _FAR // 2, counts) + inside])
