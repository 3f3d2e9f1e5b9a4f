"""The Triton kernels. Legend: ``R`` row of a program, ``C`` word in a row.

Bytes are moved as whole words of one, two, four or eight bytes, whatever the dtype. Pointers are
made from addresses, because the tensors of all layers are in one launch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Bytes of a word → its dtype."""


def _kernel(function: Callable[..., Any], **options: Any) -> Any:
    """``triton.jit``, which has no types and would read those of a kernel as code."""
    return triton.jit(function, **options)


def _kernel_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel that is not compiled again for special values of these numbers."""
    return partial(_kernel, do_not_specialize=numbers)


@_kernel
def _cache_rows(
    slots,
    offsets,
    bases,
    strides,
    ids,
    rows,
    mask,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Addresses of rows of the cache; ``bases`` and ``ids`` are those of the program's frame."""
    at_R = tl.load(offsets + rows, mask=mask, other=0)
    if BLOCKS == 1 and CHUNKS == 1:
        return at_R + (tl.load(bases) + tl.load(ids) * tl.load(strides))
    slot_R = tl.load(slots + rows, mask=mask, other=0)
    chunk_R = slot_R // BLOCKS
    block_R = tl.load(ids + slot_R % BLOCKS)
    return at_R + tl.load(bases + chunk_R) + block_R * tl.load(strides + chunk_R)


@_kernel
def repack_kernel(
    source_slots,  # int64[num_rows], and so the three others
    source_offsets,
    target_slots,
    target_offsets,
    bases,  # int64[units, CHUNKS]: address of each chunk in block 0
    strides,  # int64[CHUNKS]: bytes from block to block
    block_ids,  # int64[frames * BLOCKS]
    staging,  # uint8[programs, num_rows, row bytes]; not used in place
    first,  # frames of all units before this launch
    frames,
    num_rows,
    WORD: tl.constexpr,  # dtype of a word
    WORD_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes to which every row of the cache is aligned
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    FROM_CACHE: tl.constexpr,
    TO_CACHE: tl.constexpr,
):
    """Moves the rows of one frame of one unit, or some of them: cache or staging to either."""
    program = tl.program_id(0)
    work = (first + program).to(tl.int64)
    bases += work // frames * CHUNKS
    block_ids += work % frames * BLOCKS
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    staged_R = (program.to(tl.int64) * num_rows + rows) * (COLS * WORD_BYTES)
    staged_R = staged_R + staging.to(tl.int64)
    if FROM_CACHE:
        from_R = _cache_rows(
            source_slots, source_offsets, bases, strides, block_ids, rows, mask, BLOCKS, CHUNKS
        )
    else:
        from_R = staged_R
    if TO_CACHE:
        to_R = _cache_rows(
            target_slots, target_offsets, bases, strides, block_ids, rows, mask, BLOCKS, CHUNKS
        )
    else:
        to_R = staged_R
    cols = tl.arange(0, COLS)
    from_RC = tl.multiple_of(from_R.to(tl.pointer_type(WORD)), ALIGN)[:, None] + cols[None, :]
    to_RC = tl.multiple_of(to_R.to(tl.pointer_type(WORD)), ALIGN)[:, None] + cols[None, :]
    words_RC = tl.load(from_RC, mask=mask[:, None])
    if FROM_CACHE and TO_CACHE:
        # No thread may store where another has still to load.
        tl.debug_barrier()
    tl.store(to_RC, words_RC, mask=mask[:, None])


#: Columns of a row of the table of boxes that :func:`copy_kernel` reads, all int64.
BOX_COLUMNS = 17


@_kernel
def _move_units(from_U, to_U, mask_U, WORD: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr):
    """Copies units of ``WORDS`` words each, from addresses to addresses."""
    words = tl.arange(0, WORDS)
    from_UW = tl.multiple_of(from_U.to(tl.pointer_type(WORD)), ALIGN)[:, None] + words[None, :]
    to_UW = tl.multiple_of(to_U.to(tl.pointer_type(WORD)), ALIGN)[:, None] + words[None, :]
    tl.store(to_UW, tl.load(from_UW, mask=mask_U[:, None]), mask=mask_U[:, None])


@_kernel
def _extent_and_strides(dim, tokens, source_step, target_step):
    """Extent, source and target stride of one dim of a box; its extent 0 is the run's tokens."""
    extent, source, target = tl.load(dim), tl.load(dim + 1), tl.load(dim + 2)
    if extent == 0:
        extent = tokens
        source = source * source_step
        target = target * target_step
    return extent.to(tl.int32), source, target


@_kernel_for_any("num_tiles", "num_runs")
def copy_kernel(
    boxes,  # int64[num_tiles, 17]: copier_triton.device_boxes; then int64[num_runs, 7]: RUN_DTYPE
    num_tiles,
    num_runs,
    BOX_COLUMNS: tl.constexpr,
    UNITS: tl.constexpr,  # units that a program moves at a time
):
    """Copies a box of one tile and one run, or some of its units: ``U`` unit of a program.

    A unit is what one thread moves with one load and one store: 16 bytes where alignment allows.
    Units are counted in the order of the target's addresses, so that stores are coalesced.
    """
    work = tl.program_id(0)
    box = boxes + (work // num_runs).to(tl.int64) * BOX_COLUMNS
    run = boxes + num_tiles.to(tl.int64) * BOX_COLUMNS + (work % num_runs).to(tl.int64) * 7
    tokens, source_step, target_step = tl.load(run + 4), tl.load(run + 5), tl.load(run + 6)
    source = tl.load(box) + tl.load(run) * tl.load(box + 2) + tl.load(run + 1) * tl.load(box + 4)
    target = (
        tl.load(box + 1) + tl.load(run + 2) * tl.load(box + 3) + tl.load(run + 3) * tl.load(box + 5)
    )
    unit_bytes = tl.load(box + 6)
    piece = tl.load(box + 7).to(tl.int32)  # units that lie side by side on both sides
    count_0, source_0, target_0 = _extent_and_strides(box + 8, tokens, source_step, target_step)
    count_1, source_1, target_1 = _extent_and_strides(box + 11, tokens, source_step, target_step)
    count_2, source_2, target_2 = _extent_and_strides(box + 14, tokens, source_step, target_step)
    units = piece * count_0 * count_1 * count_2
    for first in range(tl.program_id(1) * UNITS, units, tl.num_programs(1) * UNITS):
        unit_U = first + tl.arange(0, UNITS)
        row_U = unit_U // piece
        rest_U = row_U // count_0
        at_U = (unit_U % piece) * unit_bytes
        dim_0_U = (row_U % count_0).to(tl.int64)
        dim_1_U = (rest_U % count_1).to(tl.int64)
        dim_2_U = (rest_U // count_1).to(tl.int64)
        from_U = source + at_U + dim_0_U * source_0 + dim_1_U * source_1 + dim_2_U * source_2
        to_U = target + at_U + dim_0_U * target_0 + dim_1_U * target_1 + dim_2_U * target_2
        mask_U = unit_U < units
        if unit_bytes == 16:
            _move_units(from_U, to_U, mask_U, tl.int64, 2, 16)
        elif unit_bytes == 8:
            _move_units(from_U, to_U, mask_U, tl.int64, 1, 8)
        elif unit_bytes == 4:
            _move_units(from_U, to_U, mask_U, tl.int32, 1, 4)
        elif unit_bytes == 2:
            _move_units(from_U, to_U, mask_U, tl.int16, 1, 2)
        else:
            _move_units(from_U, to_U, mask_U, tl.int8, 1, 1)
