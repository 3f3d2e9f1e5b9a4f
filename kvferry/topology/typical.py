"""A typical request, for choosing the path of its cells and estimating the cost."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np

from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.topology.group import GroupGeometry
from kvferry.topology.plan import BoundCopies, TransferPlan
from kvferry.topology.tensors import ITEMSIZES, RankMemory

TYPICAL_TOKENS = 2048
"""Number of tokens of a typical request."""


def typical_copies(
    plan: TransferPlan,
    num_tokens: int = TYPICAL_TOKENS,
    first_token: int = 0,
    seed: int | None = None,
) -> BoundCopies:
    """The copies of a request with shuffled block tables; tables are in order without a seed."""
    tables = [
        np.arange(1, table_blocks(geometry, num_tokens) + 1)
        for geometry in (plan.source, plan.target)
    ]
    if seed is not None:
        shuffle = np.random.default_rng(seed)
        tables = [shuffle.permutation(table) for table in tables]
    return plan.bind(tables[0], tables[1], num_tokens, first_token)


def table_blocks(geometry: GroupGeometry, num_tokens: int) -> int:
    """Number of entries in the block table of ``num_tokens`` tokens."""
    return -(-num_tokens // geometry.virtual_block_size)


@lru_cache(maxsize=1024)  # every target rank asks for the same source ranks
def dense_memory_of(geometry: GroupGeometry, rank: int, num_tokens: int) -> RankMemory:
    """The memory of a rank with room for a request of ``num_tokens`` tokens."""
    return geometry.memory(rank, table_blocks(geometry, num_tokens) + 1)


def mean_segment_bytes(tiles: Mapping[int, Tiles], copies: BoundCopies) -> float:
    """The mean number of bytes per contiguous copy, after merging, over all source ranks.

    Args:
        tiles: source rank → tiles of this rank: the plan, lowered onto real memory.
        copies: copies of a request; :func:`typical_copies` makes the copies of a typical request.
    """
    tables = ((table, copies.runs_of(rank)) for rank, table in tiles.items())
    return _mean_bytes(tables, copies.plan.conversion)


def mean_source_bytes(tiles: Mapping[int, Tiles], copies: BoundCopies) -> float:
    """The mean of :func:`mean_segment_bytes` if the target were laid out like the source.

    A wire that transfers dense chunks delivers segments of this length.
    """
    tables = (_source_only(table, copies.runs_of(rank)) for rank, table in tiles.items())
    return _mean_bytes(tables, None)


def _mean_bytes(tables: Iterable[tuple[Tiles, Runs]], conversion: tuple[str, str] | None) -> float:
    nbytes = segments = 0
    for table, runs in tables:
        nbytes += num_bytes(table, runs)
        segments += count_copies(table, runs, conversion)
    return nbytes / max(segments, 1)


def _source_only(tiles: Tiles, runs: Runs) -> tuple[Tiles, Runs]:
    """Tiles and runs whose target has the same layout as the source."""
    tiles, runs = tiles.copy(), runs.copy()
    for table in (tiles, runs):
        for name in table.dtype.names or ():
            if name.startswith("source_"):
                table[name.replace("source_", "target_")] = table[name]
    return tiles, runs


def count_copies(tiles: Tiles, runs: Runs, conversion: tuple[str, str] | None = None) -> int:
    """Number of contiguous copies after merging.

    A conversion copies cells twice (:mod:`kvferry.layouts.staging`): from the source into dense
    chunks, and from the converted chunks into the target. The number is that of the pass with more
    copies.

    Args:
        tiles: a 1-d array of ``TILE_DTYPE``.
        runs: a 1-d array of ``RUN_DTYPE``.
        conversion: dtypes of source and target if they differ.
    """
    # These modules compile; planning alone need not.
    from kvferry.layouts.copier import count_segments
    from kvferry.layouts.staging import stage

    packed = unpacked = 0
    for tile, times in unlike_tiles(tiles):
        if conversion is None:
            packed += times * count_segments(tile, runs)
            continue
        for chunk in stage(tile, runs, target_itemsize=ITEMSIZES[conversion[1]]):
            packed += times * count_segments(chunk.pack_tiles, chunk.pack_runs)
            unpacked += times * count_segments(chunk.unpack_tiles, chunk.unpack_runs)
    return max(packed, unpacked)


def unlike_tiles(tiles: Tiles) -> Iterator[tuple[Tiles, int]]:
    """For tiles that differ only in their start, one such tile and the number of such tiles.

    Copies of different tiles never merge, so each of these tiles gives the same number of segments.
    """
    shapes = tiles.copy()
    for name in ("source_region", "source_offset", "target_region", "target_offset"):
        shapes[name] = 0
    _, first, counts = np.unique(shapes, return_index=True, return_counts=True)
    for index, times in zip(first.tolist(), counts.tolist(), strict=True):
        yield tiles[index : index + 1], times
