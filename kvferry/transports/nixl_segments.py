"""The READs of a read: contiguous segments, merged, and distributed over READs of bounded size.

The segments of a single tile are merged already, if blocks are neighbours. Segments of different
tiles (layers, parts) are neighbours too if a block holds all layers; sorting finds these.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import Int64s
from kvferry.layouts.copier import expand
from kvferry.layouts.tiles import Runs, Tiles, num_bytes

Segments: TypeAlias = npt.NDArray[np.void]
"""A 1-d array of ``SEGMENT_DTYPE``."""

BATCH_BYTES = 256 << 20
"""Approximate number of bytes of a read that are turned into segments at a time."""


class SegmentRequest(NamedTuple):
    """The segments and kinds of memory of one READ."""

    source_memory: str
    """NIXL's name of the kind of memory: ``DRAM`` or ``VRAM``."""
    target_memory: str
    segments: Segments

    @property
    def nbytes(self) -> int:
        """Number of bytes that the READ moves."""
        return int(self.segments["nbytes"].sum())


def cut_requests(
    tiles: Tiles,
    runs: Runs,
    kinds: tuple[tuple[str, ...], tuple[str, ...]],
    chunk_bytes: int,
    max_descriptors: int,
) -> Iterator[SegmentRequest]:
    """The READs of a read, computed only when their turn comes.

    Args:
        tiles: a 1-d array of ``TILE_DTYPE``.
        runs: a 1-d array of ``RUN_DTYPE``.
        kinds: NIXL's name of the kind of each source region and of each target region.
        chunk_bytes: largest number of bytes per READ.
        max_descriptors: largest number of segments per READ.
    """
    for source_memory, target_memory, alike in _by_kind(tiles, *kinds):
        for batch in _batches(alike, runs):
            segments = cut_long(merge(expand(alike, batch)), chunk_bytes)
            for first, end in _deal(segments["nbytes"], chunk_bytes, max_descriptors):
                yield SegmentRequest(source_memory, target_memory, segments[first:end])


def merge(segments: Segments) -> Segments:
    """Merges segments into as few segments as possible, ordered by their place at the source.

    >>> from kvferry.layouts.copier import SEGMENT_DTYPE
    >>> rows = [(0, 64, 0, 64, 32), (0, 0, 0, 0, 32), (0, 32, 0, 32, 32), (0, 96, 0, 99, 1)]
    >>> merge(np.array(rows, dtype=SEGMENT_DTYPE)).tolist()
    [(0, 0, 0, 0, 96), (0, 96, 0, 99, 1)]
    """
    if len(segments) < 2:
        return segments
    # take() moves a row at once, but an index moves field by field.
    ordered = segments.take(np.lexsort((segments["source_offset"], segments["source_region"])))
    nbytes = ordered["nbytes"]
    follows = np.ones(len(ordered) - 1, dtype=bool)
    for side in ("source", "target"):
        region, offset = ordered[f"{side}_region"], ordered[f"{side}_offset"]
        follows &= (region[1:] == region[:-1]) & (offset[1:] == offset[:-1] + nbytes[:-1])
    if not follows.any():
        return ordered
    firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
    merged = ordered.take(firsts)
    merged["nbytes"] = np.add.reduceat(nbytes, firsts)
    return merged


def cut_long(segments: Segments, most: int) -> Segments:
    """Cuts segments into segments of at most ``most`` bytes.

    >>> from kvferry.layouts.copier import SEGMENT_DTYPE
    >>> cut_long(np.array([(0, 0, 0, 8, 5)], dtype=SEGMENT_DTYPE), 2).tolist()
    [(0, 0, 0, 8, 2), (0, 2, 0, 10, 2), (0, 4, 0, 12, 1)]
    """
    counts = -(-segments["nbytes"] // most)
    if int(counts.max(initial=0)) <= 1:
        return segments
    pieces = np.repeat(segments, counts)
    number = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces["source_offset"] += number * most
    pieces["target_offset"] += number * most
    pieces["nbytes"] = np.minimum(pieces["nbytes"] - number * most, most)
    return pieces


def _by_kind(
    tiles: Tiles, source_kinds: tuple[str, ...], target_kinds: tuple[str, ...]
) -> Iterator[tuple[str, str, Tiles]]:
    """The tiles for each pair of kinds of memory, source and target."""
    if len(set(source_kinds)) == 1 == len(set(target_kinds)):
        yield source_kinds[0], target_kinds[0], tiles
        return
    sources = np.array(source_kinds)[tiles["source_region"]]
    targets = np.array(target_kinds)[tiles["target_region"]]
    for source in np.unique(sources).tolist():
        for target in np.unique(targets).tolist():
            alike = tiles[(sources == source) & (targets == target)]
            if len(alike):
                yield source, target, alike


def _batches(tiles: Tiles, runs: Runs) -> Iterator[Runs]:
    """Batches of runs for all tiles, so that neighbours of different tiles stay together."""
    if (total := num_bytes(tiles, runs)) <= BATCH_BYTES:
        yield runs
        return
    tokens = np.cumsum(runs["tokens"])
    batch = tokens * (total // int(tokens[-1])) // BATCH_BYTES
    cuts = np.flatnonzero(np.diff(batch)) + 1
    yield from np.split(runs, cuts)


def _deal(nbytes: Int64s, most: int, count: int) -> Iterator[tuple[int, int]]:
    """First and end of the segments of each READ: at most ``most`` bytes and ``count`` segments."""
    ends = np.cumsum(nbytes)
    first = 0
    while first < len(nbytes):
        before = int(ends[first] - nbytes[first])
        full = int(np.searchsorted(ends, before + most, side="right"))
        end = min(max(full, first + 1), first + count)
        yield first, end
        first = end
