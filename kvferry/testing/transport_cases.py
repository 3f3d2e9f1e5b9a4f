"""Copies for the tests of transports: random strided boxes, plain large boxes, and an oracle."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import ByteArray
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, blank_runs


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Tiles and runs whose addresses stay inside regions of the given sizes."""

    tiles: Tiles
    runs: Runs
    source_region_bytes: tuple[int, ...]
    target_region_bytes: tuple[int, ...]


@dataclass(slots=True)
class _Side:
    """Block layout of one side: byte strides by dim, and the bytes of one tile's area."""

    block_stride: int
    token_stride: int
    head_stride: int
    element_stride: int
    area: int


def random_case(seed: int) -> Case:
    """Makes tiles of any shape in regions of several sizes, and runs that cut blocks anywhere. Some
    runs have steps between their tokens.

    Strides come from a random order of the four dims with random gaps, separately for each side. No
    two bytes of a target coincide.
    """
    rng = np.random.default_rng(seed)
    heads, elements = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    itemsize = int(rng.choice([1, 2, 3, 4, 8, 24]))
    source_block, target_block = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    runs = _random_runs(rng, source_block, target_block)
    if rng.integers(2):
        source_block, target_block = _spread(rng, runs, source_block, target_block)
    blocks = [int(runs[f"{side}_block"].max()) + 1 for side in ("source", "target")]
    num_tiles, num_regions = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    tiles = np.zeros(num_tiles, dtype=TILE_DTYPE)
    tiles["heads"], tiles["elements"], tiles["itemsize"] = heads, elements, itemsize
    sizes = []
    for side, num_blocks, block in (
        ("source", blocks[0], source_block),
        ("target", blocks[1], target_block),
    ):
        lead = int(rng.integers(0, 40))
        lay = _random_side(rng, (num_blocks, block, heads, elements), itemsize)
        region_of = np.sort(rng.integers(0, num_regions, num_tiles))
        first = np.searchsorted(region_of, region_of)  # number of the region's first tile
        tiles[f"{side}_region"] = region_of
        tiles[f"{side}_offset"] = lead + (np.arange(num_tiles) - first) * lay.area
        for dim in ("block", "token", "head", "element"):
            tiles[f"{side}_{dim}_stride"] = getattr(lay, f"{dim}_stride")
        held = np.bincount(region_of, minlength=num_regions)
        sizes.append(tuple(int(lead + count * lay.area) or 1 for count in held))
    return Case(tiles, runs, *sizes)


def large_case(nbytes: int, seed: int = 0) -> Case:
    """About ``nbytes`` in blocks of 16 KiB, shuffled on both sides, with one layout change."""
    heads, elements, tokens, itemsize = 2, 32, 16, 16
    block = heads * elements * tokens * itemsize
    num_tiles = 8
    num_blocks = max(1, nbytes // (block * num_tiles))
    rng = np.random.default_rng(seed)
    runs = blank_runs(num_blocks)
    runs["source_block"], runs["target_block"] = (
        rng.permutation(num_blocks),
        rng.permutation(num_blocks),
    )
    runs["tokens"] = tokens
    row = elements * itemsize
    tiles = np.zeros(num_tiles, dtype=TILE_DTYPE)
    tiles["heads"], tiles["elements"], tiles["itemsize"] = heads, elements, itemsize
    for side, token, head in (("source", heads * row, row), ("target", row, tokens * row)):
        tiles[f"{side}_offset"] = np.arange(num_tiles) * num_blocks * block
        tiles[f"{side}_block_stride"] = block
        tiles[f"{side}_token_stride"] = token
        tiles[f"{side}_head_stride"] = head
        tiles[f"{side}_element_stride"] = itemsize
    total = (num_tiles * num_blocks * block,)
    return Case(tiles, runs, total, total)


def violations(case: Case) -> list[tuple[str, Tiles, Runs]]:
    """Copies of the case, each with one number that makes the case leave the memory; with a
    name.
    """
    huge = 1 << 62
    changes: Sequence[tuple[str, str, int]] = (
        ("tiles", "source_region", len(case.source_region_bytes)),
        ("tiles", "target_region", len(case.target_region_bytes)),
        ("tiles", "source_region", -1),
        ("tiles", "target_region", -1),
        ("tiles", "source_offset", -1),
        ("tiles", "target_offset", -1),
        ("tiles", "source_offset", max(case.source_region_bytes)),
        ("tiles", "target_offset", max(case.target_region_bytes)),
        ("tiles", "source_block_stride", huge),
        ("tiles", "target_head_stride", -huge),
        ("tiles", "heads", huge),
        ("tiles", "elements", 0),
        ("tiles", "itemsize", -1),
        ("runs", "source_block", huge),
        ("runs", "source_block", 1 << 40),
        ("runs", "target_block", 1 << 40),
        ("runs", "target_block", -1),
        ("runs", "source_token", 1 << 40),
        ("runs", "target_token", 1 << 40),
        ("runs", "tokens", 1 << 40),
        ("runs", "tokens", -1),
        ("runs", "source_step", 0),
        ("runs", "source_step", 1 << 40),
        ("runs", "target_step", -1),
        ("runs", "target_step", 1 << 40),
    )
    result = []
    for table, field, value in changes:
        tiles, runs = case.tiles.copy(), case.runs.copy()
        (tiles if table == "tiles" else runs)[field][-1] = value
        result.append((f"{table}[-1].{field} = {value}", tiles, runs))
    return result


def copy_slowly(
    tiles: Tiles, runs: Runs, sources: Sequence[ByteArray], targets: Sequence[ByteArray]
) -> None:
    """Copies ``tiles`` × ``runs`` byte by byte, as :mod:`kvferry.layouts.tiles` defines them.

    The oracle of transports and copiers uses NumPy index arrays, and shares no line with the
    copier.

    Args:
        tiles: array of ``TILE_DTYPE``.
        runs: array of ``RUN_DTYPE``.
        sources: ``uint8`` regions of the source, 1-d.
        targets: ``uint8`` regions of the reader, 1-d; changed in place.

    Raises:
        IndexError: an address lies outside the region.
    """
    for tile in tiles:
        for run in runs:
            source = _byte_addresses(tile, run, "source")
            target = _byte_addresses(tile, run, "target")
            targets[tile["target_region"]][target] = sources[tile["source_region"]][source]


def _random_runs(rng: np.random.Generator, source_block: int, target_block: int) -> Runs:
    """A request's runs: shuffled block tables, cut at the block ends of both sides."""
    tokens = int(rng.integers(1, 40))
    source = rng.permutation(int(-(-tokens // source_block)) + 4)
    target = rng.permutation(int(-(-tokens // target_block)) + 4)
    first = int(rng.integers(0, tokens))
    rows = []
    at = first
    while at < tokens:
        until = min(
            tokens,
            (at // source_block + 1) * source_block,
            (at // target_block + 1) * target_block,
        )
        rows.append(
            (
                source[at // source_block],
                at % source_block,
                target[at // target_block],
                at % target_block,
                until - at,
                1,
                1,
            )
        )
        at = until
    return np.array(rows, dtype=RUN_DTYPE)


def _spread(
    rng: np.random.Generator, runs: Runs, source_block: int, target_block: int
) -> tuple[int, int]:
    """Pulls the tokens of the runs apart, as interleaving does; returns the wider blocks."""
    steps = rng.integers(1, 4, 2)
    for side, step in zip(("source", "target"), steps, strict=True):
        runs[f"{side}_token"] *= step
        runs[f"{side}_step"] = step
    return int(source_block * steps[0]), int(target_block * steps[1])


def _random_side(rng: np.random.Generator, extents: tuple[int, ...], itemsize: int) -> _Side:
    strides = [0, 0, 0, 0]
    reach = itemsize
    for dim in rng.permutation(4):
        strides[dim] = reach + int(rng.integers(0, 3))
        reach = strides[dim] * (extents[dim] - 1) + reach
    block, token, head, element = strides
    return _Side(block, token, head, element, area=reach + int(rng.integers(0, 20)))


def _byte_addresses(tile: np.void, run: np.void, side: str) -> npt.NDArray[np.int64]:
    """Address of every byte, in the order token, head, element, byte."""
    first = (
        int(tile[f"{side}_offset"])
        + int(run[f"{side}_block"]) * int(tile[f"{side}_block_stride"])
        + int(run[f"{side}_token"]) * int(tile[f"{side}_token_stride"])
    )
    step = int(run[f"{side}_step"]) * int(tile[f"{side}_token_stride"])
    token = np.arange(int(run["tokens"])) * step
    head = np.arange(int(tile["heads"])) * int(tile[f"{side}_head_stride"])
    element = np.arange(int(tile["elements"])) * int(tile[f"{side}_element_stride"])
    byte = np.arange(int(tile["itemsize"]))
    addresses = (
        first
        + token[:, None, None, None]
        + head[None, :, None, None]
        + element[None, None, :, None]
        + byte
    ).ravel()
    if addresses.size and addresses.min() < 0:
        raise IndexError(f"{side}: address {addresses.min()} lies before its region")
    return addresses
