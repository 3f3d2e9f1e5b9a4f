"""The digests of :mod:`kvferry.layouts.digest` on a GPU, in one launch: the same hash, row by row.

A program takes rows of one tile and one run. A thread hashes a row element by element, because each
step of the hash needs the previous step; rows are hashed in parallel. The sums wrap around, so the
order of adding rows does not matter.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from kvferry.layouts.arrays import Int64s
from kvferry.layouts.copier_triton import (
    on_device,
    to_device,
    triton_kernel,
    triton_kernel_for_any,
)
from kvferry.layouts.digest import LAST_SHIFT, MULTIPLIER, SHIFT, check_widths
from kvferry.layouts.tiles import Runs, Tiles

_MULTIPLIER = tl.constexpr(int(MULTIPLIER))
_SHIFT = tl.constexpr(int(SHIFT))
_LAST_SHIFT = tl.constexpr(int(LAST_SHIFT))

ROWS = 128
"""Number of rows that a program hashes at a time, a row per thread."""
_PROGRAMS = 1 << 14

_OF_TILE = ("block_stride", "token_stride", "head_stride", "element_stride")
TILE_WORDS, RUN_WORDS = 11, 5


def digest_rows_device(
    addresses: Sequence[int] | Int64s,
    tiles: Tiles,
    runs: Runs,
    positions: Int64s,
    keys: Int64s,
    stream: "torch.cuda.Stream | None" = None,
    *,
    device: "torch.device | str" = "cuda",
) -> npt.NDArray[np.uint64]:
    """Digests memory that a device addresses; see :func:`~kvferry.layouts.digest.digest_rows`.

    The calling thread waits for the sums.

    Args:
        addresses: address of each region, as the device sees it.
        tiles: see ``digest_rows``.
        runs: see ``digest_rows``.
        positions: see ``digest_rows``.
        keys: see ``digest_rows``.
        stream: stream of the digest, after its earlier work; the device's current stream if
            ``None``.
        device: device that digests; the stream's device if a stream is given. Host memory needs the
            interpreter.

    Raises:
        ValueError: elements of another size.
    """
    check_widths(tiles)
    device = torch.device(device) if stream is None else stream.device
    tokens = runs["tokens"].astype(np.int64)
    if not (len(tiles) and tokens.sum()):
        return np.zeros(int(tokens.sum()), dtype=np.uint64)
    words = [
        np.asarray(addresses, dtype=np.int64)[tiles["source_region"]] + tiles["source_offset"],
        *(tiles[f"source_{stride}"] for stride in _OF_TILE),
        *(tiles[extent] for extent in ("heads", "elements", "itemsize")),
        *keys.T,
    ]
    ranges = [
        *(runs[f"source_{field}"] for field in ("block", "token", "step")),
        tokens,
        np.cumsum(tokens) - tokens,
    ]
    table = np.concatenate([np.stack(words, 1).ravel(), np.stack(ranges, 1).ravel(), positions])
    works = len(tiles) * len(runs)
    most = int(tokens.max()) * int(tiles["heads"].max())
    splits = max(1, min(-(-most // ROWS), _PROGRAMS // works))
    with on_device(device, stream):
        sums = torch.zeros(len(positions), dtype=torch.int64, device=device)
        digest_kernel[(works, splits)](
            to_device(table, device), sums, len(tiles), len(runs),
            TILE_WORDS=TILE_WORDS, RUN_WORDS=RUN_WORDS, ROWS=ROWS,
            num_warps=ROWS // 32, enable_fp_fusion=False,
        )  # fmt: skip
        found: npt.NDArray[np.uint64] = sums.cpu().numpy().view(np.uint64)
    return found


@triton_kernel
def _mixed(state, value):
    """A step of the hash, as on the host."""
    state = (state ^ value.to(tl.uint64)) * _MULTIPLIER
    return state ^ (state >> _SHIFT)


@triton_kernel
def _row_hashes(state_U, address_U, mask_U, elements, step, WORD: tl.constexpr):
    """Hashes of rows with elements of the same width."""
    for _ in range(elements):
        value_U = tl.load(address_U.to(tl.pointer_type(WORD)), mask=mask_U, other=0)
        state_U = _mixed(state_U, value_U)
        address_U += step
    state_U = state_U * _MULTIPLIER
    return state_U ^ (state_U >> _LAST_SHIFT)


@triton_kernel_for_any("num_tiles", "num_runs")
def digest_kernel(
    tables,  # num_tiles rows of TILE_WORDS, num_runs rows of RUN_WORDS, then positions; int64
    sums,  # int64 sum of each token
    num_tiles,
    num_runs,
    TILE_WORDS: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the hashes of all or some rows of one tile and one run: ``U`` row of a program."""
    work = tl.program_id(0)
    tile = tables + (work // num_runs).to(tl.int64) * TILE_WORDS
    runs = tables + num_tiles.to(tl.int64) * TILE_WORDS
    run = runs + (work % num_runs).to(tl.int64) * RUN_WORDS
    positions = runs + num_runs.to(tl.int64) * RUN_WORDS
    # Fields of a tile and of a run, in the order in which the host writes the fields.
    token_stride, head_stride = tl.load(tile + 2), tl.load(tile + 3)
    step, heads = tl.load(tile + 4), tl.load(tile + 5).to(tl.int32)
    elements, itemsize = tl.load(tile + 6).to(tl.int32), tl.load(tile + 7)
    layer, part, first_head = tl.load(tile + 8), tl.load(tile + 9), tl.load(tile + 10)
    first_token, token_step = tl.load(run + 1), tl.load(run + 2)
    first_row = tl.load(run + 4)
    base = tl.load(tile) + tl.load(run) * tl.load(tile + 1)
    rows = tl.load(run + 3).to(tl.int32) * heads
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row_U = first + tl.arange(0, ROWS)
        mask_U = row_U < rows
        token_U, head_U = (row_U // heads).to(tl.int64), (row_U % heads).to(tl.int64)
        address_U = base + (first_token + token_U * token_step) * token_stride
        address_U += head_U * head_stride
        position_U = tl.load(positions + first_row + token_U, mask=mask_U, other=0)
        state_U = _mixed(_mixed(tl.full((ROWS,), 1, tl.uint64), layer), part)
        state_U = _mixed(_mixed(state_U, position_U), first_head + head_U)
        if itemsize == 8:
            hash_U = _row_hashes(state_U, address_U, mask_U, elements, step, tl.uint64)
        elif itemsize == 4:
            hash_U = _row_hashes(state_U, address_U, mask_U, elements, step, tl.uint32)
        elif itemsize == 2:
            hash_U = _row_hashes(state_U, address_U, mask_U, elements, step, tl.uint16)
        else:
            hash_U = _row_hashes(state_U, address_U, mask_U, elements, step, tl.uint8)
        # Modulo 2**64, in any order: signed and unsigned sums have the same bits.
        sum_U = sums + first_row + token_U
        tl.atomic_add(sum_U, hash_U.to(tl.int64), mask=mask_U, sem="relaxed")
