"""A typical request, by which the way of its cells is chosen and its cost is told."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np

from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.topology.group import GroupGeometry
from kvferry.topology.plan import BoundCopies, TransferPlan
from kvferry.topology.tensors import RankMemory

TYPICAL_TOKENS = 2048
"""Tokens of a typical request."""


def typical_copies(
    plan: TransferPlan,
    num_tokens: int = TYPICAL_TOKENS,
    first_token: int = 0,
    seed: int | None = None,
) -> BoundCopies:
    """A request's copies whose block tables are shuffled, or in order without a seed."""
    tables = [
        np.arange(1, table_blocks(geometry, num_tokens) + 1)
        for geometry in (plan.source, plan.target)
    ]
    if seed is not None:
        shuffle = np.random.default_rng(seed)
        tables = [shuffle.permutation(table) for table in tables]
    return plan.bind(tables[0], tables[1], num_tokens, first_token)


def table_blocks(geometry: GroupGeometry, num_tokens: int) -> int:
    """Entries of the block table of so many tokens."""
    return -(-num_tokens // geometry.virtual_block_size)


@lru_cache(maxsize=1024)  # every target rank asks for the same source ranks
def dense_memory_of(geometry: GroupGeometry, rank: int, num_tokens: int) -> RankMemory:
    """A rank's memory with room for a request of so many tokens."""
    return geometry.memory(rank, table_blocks(geometry, num_tokens) + 1)


def mean_segment_bytes(tiles: Mapping[int, Tiles], copies: BoundCopies) -> float:
    """Bytes of a contiguous copy on average, after merging, over all source ranks.

    Args:
        tiles: source rank → its tiles, the plan lowered onto real memory.
        copies: of a request; :func:`typical_copies` gives those of a typical one.
    """
    return _mean_bytes((table, copies.runs_of(rank)) for rank, table in tiles.items())


def mean_source_bytes(tiles: Mapping[int, Tiles], copies: BoundCopies) -> float:
    """As :func:`mean_segment_bytes`, of what is contiguous at the source, whatever the target.

    So long are the segments in which a wire brings dense chunks.
    """
    return _mean_bytes(_source_only(table, copies.runs_of(rank)) for rank, table in tiles.items())


def _mean_bytes(tables: Iterable[tuple[Tiles, Runs]]) -> float:
    nbytes = segments = 0
    for table, runs in tables:
        nbytes += num_bytes(table, runs)
        segments += sum(times * count_copies(tile, runs) for tile, times in unlike_tiles(table))
    return nbytes / max(segments, 1)


def _source_only(tiles: Tiles, runs: Runs) -> tuple[Tiles, Runs]:
    """Tables whose target is laid out as the source is."""
    tiles, runs = tiles.copy(), runs.copy()
    for table in (tiles, runs):
        for name in table.dtype.names or ():
            if name.startswith("source_"):
                table[name.replace("source_", "target_")] = table[name]
    return tiles, runs


def count_copies(tiles: Tiles, runs: Runs) -> int:
    """Contiguous copies after merging."""
    from kvferry.layouts.copier import count_segments  # compiles; planning alone need not

    return count_segments(tiles, runs)


def unlike_tiles(tiles: Tiles) -> Iterator[tuple[Tiles, int]]:
    """One of those tiles that differ only in where they begin, and how many there are.

    Nothing merges from tile to tile, so that each of them is as many segments.
    """
    shapes = tiles.copy()
    for name in ("source_region", "source_offset", "target_region", "target_offset"):
        shapes[name] = 0
    _, first, counts = np.unique(shapes, return_index=True, return_counts=True)
    for index, times in zip(first.tolist(), counts.tolist(), strict=True):
        yield tiles[index : index + 1], times
