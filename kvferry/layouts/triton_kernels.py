"""The Triton kernels. Legend: ``R`` row of a program, ``C`` word in a row.

Bytes are moved as whole words of one, two, four or eight bytes, whatever the dtype. Pointers are
made from addresses, because the tensors of all layers are in one launch.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Bytes of a word → its dtype."""


def _kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit``, which has no types and would read those of a kernel as code."""
    return triton.jit(function)


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
