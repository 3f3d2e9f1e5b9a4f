"""The strided copy itself: Numba kernels on raw addresses.

A tile and a run make one box of at most three dims: token, head, element. Each kernel first sorts
the dims by the target's strides. Dims that lie without a gap on both sides merge into one
*segment*. At most three loops remain around a segment, written in the order of the target's
addresses, so that stores go out sequentially.

Four techniques make the kernels as fast as one large ``memcpy``, measured:

* streaming stores for large jobs: each target line is written once and never read;
* with streaming stores, four pages of a long segment in turns: memory delivers from several pages
  at a time;
* a prefetch of the next run's source during the copy of the current run: a shuffled block table
  defeats the hardware's prefetcher;
* the merging of adjacent runs into one segment.

The kernels check no bounds; see :mod:`kvferry.layouts.bounds`.
"""

from typing import Any

import numpy as np

from kvferry.layouts.compiled import kernel
from kvferry.layouts.intrinsics import (
    fence,
    memcpy,
    move_1,
    move_2,
    move_4,
    move_8,
    move_16,
    move_64,
    prefetch,
    stream_16,
    stream_64,
    transpose_1,
    transpose_2,
    transpose_4,
    transpose_8,
)

DIM_DTYPE = np.dtype(
    [("extent", np.int64), ("source_stride", np.int64), ("target_stride", np.int64)]
)
"""A dim of a box around its segments; strides are bytes."""

ANY_TOKENS = -1
"""Number of tokens in a run whose number of tokens is unknown."""

_SHORT = 256
"""Number of bytes up to which the C library's copy is fastest. Longer copies of the library begin
with string instructions, which start slowly and, on some processors, read memory at half its
speed."""
_LARGE = 4096
"""Number of bytes from which it pays to align a segment separately."""
_PAGE, _STEP = 4096, 256
"""Number of bytes of a memory page, and number of bytes copied from each page in a turn."""
_PREFETCH_LIMIT = 65536
"""Number of bytes of a segment above which the hardware's prefetcher needs no help."""


@kernel
def source_at(tile: Any, run: Any) -> int:
    """Number of bytes from the start of the source region to the first element of a run."""
    at: int = (
        tile.source_offset
        + run.source_block * tile.source_block_stride
        + run.source_token * tile.source_token_stride
    )
    return at


@kernel
def target_at(tile: Any, run: Any) -> int:
    """Number of bytes from the start of the target region to the first element of a run."""
    at: int = (
        tile.target_offset
        + run.target_block * tile.target_block_stride
        + run.target_token * tile.target_token_stride
    )
    return at


@kernel
def merge_dims(tile: Any, run: Any, dims: Any) -> tuple[int, int]:
    """Number of bytes of a segment, and number of dims left around the segment.

    Args:
        tile: a row of ``TILE_DTYPE``.
        run: a row of ``RUN_DTYPE``; only the extent and the steps count. With :data:`ANY_TOKENS`
            tokens, the token dim stays out of the segment.
        dims: three rows of ``DIM_DTYPE``, filled with the dims left, innermost on the target first.
    """
    count = 0
    for dim in range(3):
        if dim == 0:
            extent = run.tokens
            source = tile.source_token_stride * run.source_step
            target = tile.target_token_stride * run.target_step
        elif dim == 1:
            extent, source, target = tile.heads, tile.source_head_stride, tile.target_head_stride
        else:
            extent = tile.elements
            source, target = tile.source_element_stride, tile.target_element_stride
        if extent == 1:
            continue
        place = count
        while place > 0 and abs(dims[place - 1].target_stride) > abs(target):
            dims[place] = dims[place - 1]
            place -= 1
        dims[place].extent = extent
        dims[place].source_stride = source
        dims[place].target_stride = target
        count += 1
    segment, merged = tile.itemsize, 0
    while (
        merged < count
        and dims[merged].source_stride == dims[merged].target_stride == segment
        and dims[merged].extent != ANY_TOKENS
    ):
        segment *= dims[merged].extent
        merged += 1
    for left in range(count - merged):
        dims[left] = dims[left + merged]
    return segment, count - merged


@kernel
def count_pieces(dims: Any, left: int) -> int:
    """Number of segments of a box with ``left`` dims around a segment; see :func:`merge_dims`."""
    pieces = 1
    for dim in range(left):
        pieces *= dims[dim].extent
    return pieces


@kernel
def piece_at(dims: Any, left: int, piece: int) -> tuple[int, int]:
    """Bytes from the first segment of a box to segment ``piece``, at source and target."""
    source, target = 0, 0
    for dim in range(left):
        step = piece % dims[dim].extent
        piece //= dims[dim].extent
        source += step * dims[dim].source_stride
        target += step * dims[dim].target_stride
    return source, target


@kernel
def same_shape(one: Any, two: Any) -> bool:
    """Whether two runs make boxes of the same extents and strides."""
    same: bool = (
        one.tokens == two.tokens
        and one.source_step == two.source_step
        and one.target_step == two.target_step
    )
    return same


@kernel
def _copy_cached(target: int, source: int, nbytes: int) -> None:
    """Copies a segment whose target stays in the cache."""
    whole = nbytes & ~63 if nbytes > _SHORT else 0
    for at in range(0, whole, 64):
        move_64(target + at, source + at)
    if whole < nbytes:
        memcpy(target + whole, source + whole, nbytes - whole)


@kernel
def _stream_step(target: int, source: int, nbytes: int, ahead: int) -> None:
    if ahead != 0:
        for line in range(0, nbytes, 64):
            prefetch(source + ahead + line)
    for line in range(0, nbytes, 64):
        stream_64(target + line, source + line)


@kernel
def _stream_lines(target: int, source: int, nbytes: int, ahead: int) -> None:
    """Copies whole lines around the cache, four pages in turns as long as there are four."""
    at = 0
    while nbytes - at >= 4 * _PAGE:
        for step in range(at, at + _PAGE, _STEP):
            for piece in range(step, step + 4 * _PAGE, _PAGE):
                _stream_step(target + piece, source + piece, _STEP, ahead)
        at += 4 * _PAGE
    for step in range(at, nbytes, _STEP):
        _stream_step(target + step, source + step, min(_STEP, nbytes - step), ahead)


@kernel
def _copy_segment(target: int, source: int, nbytes: int, stream: bool, ahead: int) -> None:
    """Copies a segment.

    With stores around the cache, also prefetches the bytes ``ahead`` bytes from the source, if
    ``ahead`` is not 0.
    """
    if not stream or nbytes < 64:
        _copy_cached(target, source, nbytes)
        return
    if target & 63:
        lead = 64 - (target & 63)
        memcpy(target, source, lead)
        target += lead
        source += lead
        nbytes -= lead
    whole = nbytes & ~63
    _stream_lines(target, source, whole, ahead)
    if whole < nbytes:
        memcpy(target + whole, source + whole, nbytes - whole)


@kernel
def _copy_long(target: int, source: int, nbytes: int, stream: bool, ahead: int) -> None:
    """Copies a long segment; also prefetches the bytes ``ahead`` bytes from its source."""
    if nbytes > _PREFETCH_LIMIT:
        ahead = 0
    if ahead == 0 or (stream and nbytes >= 64):
        _copy_segment(target, source, nbytes, stream, ahead)
        return
    at = 0
    while at < nbytes:
        step = min(nbytes - at, _STEP)
        if step == _STEP:
            step -= (target + at) & 63  # the later steps then begin on a line
        for line in range(at, at + step, 64):
            prefetch(source + ahead + line)
        _copy_cached(target + at, source + at, step)
        at += step


@kernel
def _copy_segments(
    target: int,
    source: int,
    dims: Any,
    segment: int,
    stream: bool,
    ahead: int,
    target_ahead: int,
) -> None:
    """Copies segments in three loops."""
    inner_source, inner_target = dims[0].source_stride, dims[0].target_stride
    for k in range(dims[2].extent):
        for j in range(dims[1].extent):
            source_row = source + k * dims[2].source_stride + j * dims[1].source_stride
            target_row = target + k * dims[2].target_stride + j * dims[1].target_stride
            for i in range(dims[0].extent):
                from_ = source_row + i * inner_source
                if ahead != 0:
                    for line in range(0, min(segment, _PREFETCH_LIMIT), 64):
                        prefetch(from_ + ahead + line)
                to = target_row + i * inner_target
                if target_ahead != 0:
                    for line in range(0, min(segment, _PREFETCH_LIMIT), 64):
                        prefetch(to + target_ahead + line)
                _copy_segment(to, from_, segment, stream, 0)


@kernel
def _stream_segments(target: int, source: int, dims: Any, segment: int, ahead: int) -> None:
    """Copies short segments around the cache, in a loop without calls.

    A call per segment would add a sixth to the time. All segments begin and end on 16 bytes.
    Segments that do not begin and end on lines must be adjacent on the target, so that each segment
    completes the line of the previous segment.
    """
    count, source_step, target_step = dims[0].extent, dims[0].source_stride, dims[0].target_stride
    for k in range(dims[2].extent):
        for j in range(dims[1].extent):
            from_ = source + k * dims[2].source_stride + j * dims[1].source_stride
            to = target + k * dims[2].target_stride + j * dims[1].target_stride
            for _ in range(count):
                first, at = -to & 63, 0
                while at < first:
                    stream_16(to + at, from_ + at)
                    at += 16
                while at + 64 <= segment:
                    prefetch(from_ + at + ahead)
                    stream_64(to + at, from_ + at)
                    at += 64
                while at < segment:
                    prefetch(from_ + at + ahead)
                    stream_16(to + at, from_ + at)
                    at += 16
                from_ += source_step
                to += target_step


@kernel
def _copy_row(
    target: int, source: int, count: int, target_step: int, source_step: int, width: int
) -> None:
    """Copies ``count`` single elements of ``width`` bytes."""
    if width == 1:
        for i in range(count):
            move_1(target + i * target_step, source + i * source_step)
    elif width == 2:
        for i in range(count):
            move_2(target + i * target_step, source + i * source_step)
    elif width == 4:
        for i in range(count):
            move_4(target + i * target_step, source + i * source_step)
    elif width == 8:
        for i in range(count):
            move_8(target + i * target_step, source + i * source_step)
    else:
        for i in range(count):
            move_16(target + i * target_step, source + i * source_step)


@kernel
def _transpose_square(
    target: int, target_step: int, source: int, source_step: int, width: int
) -> None:
    """Transposes 16 bytes times 16 bytes; rows lie dense on the source, columns on the target."""
    if width == 1:
        transpose_1(target, target_step, source, source_step)
    elif width == 2:
        transpose_2(target, target_step, source, source_step)
    elif width == 4:
        transpose_4(target, target_step, source, source_step)
    else:
        transpose_8(target, target_step, source, source_step)


@kernel
def _copy_plane(
    target: int, source: int, inner: Any, across: Any, width: int, ahead: int, target_ahead: int
) -> None:
    """Copies two dims of elements: ``inner`` lies closest on the target, ``across`` on the source.

    If both dims lie dense, whole squares are transposed in registers; the margins go element by
    element. ``ahead`` and ``target_ahead`` lead to the next run. The next run's lines are
    prefetched on both sides, because squares of 16 bytes are too short to stream.
    """
    inner_count, inner_source, inner_target = inner.extent, inner.source_stride, inner.target_stride
    across_count = across.extent
    across_source, across_target = across.source_stride, across.target_stride
    edge = 16 // width
    squares = inner_target == width and across_source == width and edge > 1
    inner_whole = inner_count - inner_count % edge if squares else 0
    across_whole = across_count - across_count % edge if squares else 0
    for i in range(0, inner_whole, edge):
        for j in range(0, across_whole, edge):
            from_ = source + i * inner_source + j * width
            to = target + i * width + j * across_target
            if ahead != 0 and j * width % 64 == 0:
                for row in range(edge):
                    prefetch(from_ + ahead + row * inner_source)
            if target_ahead != 0 and i * width % 64 == 0:
                for row in range(edge):
                    prefetch(to + target_ahead + row * across_target)
            _transpose_square(to, across_target, from_, inner_source, width)
    for j in range(across_count):
        first = inner_whole if j < across_whole else 0
        _copy_row(
            target + j * across_target + first * inner_target,
            source + j * across_source + first * inner_source,
            inner_count - first,
            inner_target,
            inner_source,
            width,
        )


@kernel
def _copy_elements(
    target: int, source: int, dims: Any, left: int, width: int, ahead: int, target_ahead: int
) -> None:
    """Copies elements in up to three loops."""
    across = 1  # the outer dim along which the source lies closest
    if left > 2 and abs(dims[2].source_stride) < abs(dims[1].source_stride):
        across = 2
    rest = 3 - across
    for k in range(dims[rest].extent):
        _copy_plane(
            target + k * dims[rest].target_stride,
            source + k * dims[rest].source_stride,
            dims[0],
            dims[across],
            width,
            ahead,
            target_ahead,
        )


@kernel
def _copy_box(
    target: int,
    source: int,
    dims: Any,
    left: int,
    segment: int,
    stream: bool,
    ahead: int,
    target_ahead: int,
    in_place: bool,
) -> int:
    """Copies one run of one tile with several segments; returns the number of segments."""
    for dim in range(left, 3):
        dims[dim].extent, dims[dim].source_stride, dims[dim].target_stride = 1, 0, 0
    edges = target | dims[0].target_stride | dims[1].target_stride | dims[2].target_stride | segment
    aligned = edges & 63 == 0 or (edges & 15 == 0 and dims[0].target_stride == segment)
    if segment <= 16 and segment & (segment - 1) == 0:  # a set would be made at each call
        _copy_elements(target, source, dims, left, segment, ahead, target_ahead)
    elif stream and not in_place and aligned and 64 <= segment < _LARGE:
        _stream_segments(target, source, dims, segment, ahead)
    else:
        # Segments are written whole, so prefetching their lines pays only if these are read first.
        read_ahead = target_ahead if in_place else 0
        _copy_segments(target, source, dims, segment, stream, ahead, read_ahead)
    segments = 1
    for dim in range(left):
        segments *= dims[dim].extent
    return segments


@kernel
def copy_table(
    source_addresses: Any,
    target_addresses: Any,
    tiles: Any,
    runs: Any,
    dims: Any,
    stream: bool,
    in_place: int,
) -> int:
    """Copies every tile of every run; returns the number of segments after merging.

    Args:
        source_addresses: int64, address of each source region.
        target_addresses: int64, address of each target region.
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        dims: three rows of ``DIM_DTYPE``, scratch of this call.
        stream: whether stores go around the cache.
        in_place: if not 0, number of runs to copy. Then the source is a buffer, and the target
            memory of the next ``in_place`` runs is prefetched, because that memory is read next.
    """
    segments = 0
    count = min(in_place, len(runs)) if in_place else len(runs)
    target_step = in_place if in_place else 1
    for t in range(len(tiles)):
        tile = tiles[t]
        source_base = source_addresses[tile.source_region]
        target_base = target_addresses[tile.target_region]
        segment, left = 0, 0
        held_source, held_target, held = 0, 0, 0  # a segment that may still grow
        for r in range(count):
            source = source_base + source_at(tile, runs[r])
            target = target_base + target_at(tile, runs[r])
            if r == 0 or not same_shape(runs[r], runs[r - 1]):
                segment, left = merge_dims(tile, runs[r], dims)
            if left == 0 and held and held_source + held == source and held_target + held == target:
                held += segment
                continue
            if held:
                _copy_long(held_target, held_source, held, stream, source - held_source)
                segments += 1
                held = 0
            if left == 0:
                held_source, held_target, held = source, target, segment
                continue
            ahead, target_ahead = 0, 0
            if r + 1 < len(runs) and not in_place:
                ahead = source_base + source_at(tile, runs[r + 1]) - source
            if r + target_step < len(runs):
                target_ahead = target_base + target_at(tile, runs[r + target_step]) - target
            segments += _copy_box(
                target, source, dims, left, segment, stream, ahead, target_ahead, in_place != 0
            )
        if held:
            _copy_long(held_target, held_source, held, stream, 0)
            segments += 1
    fence()
    return segments


@kernel
def token_bytes(tiles: Any) -> int:
    """Number of bytes of one token in all tiles together."""
    total = 0
    for t in range(len(tiles)):
        total += tiles[t].heads * tiles[t].elements * tiles[t].itemsize
    return total


@kernel
def count_tokens(runs: Any) -> int:
    """Number of tokens of all runs."""
    total = 0
    for r in range(len(runs)):
        total += runs[r].tokens
    return total


@kernel
def copy_now(
    source_addresses: Any, target_addresses: Any, tiles: Any, runs: Any, stream_bytes: int
) -> int:
    """Calls :func:`copy_table`, with stores around the cache from ``stream_bytes`` on."""
    dims = np.empty(3, DIM_DTYPE)
    stream = token_bytes(tiles) * count_tokens(runs) >= stream_bytes
    return copy_table(source_addresses, target_addresses, tiles, runs, dims, stream, 0)


@kernel
def list_segments(tiles: Any, runs: Any, out: Any) -> int:
    """Lists the copies of :func:`copy_table` as rows; returns the number of copies.

    Args:
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        out: rows of ``SEGMENT_DTYPE``, written; copies without room are only counted, so an empty
            array serves to count.
    """
    dims = np.empty(3, DIM_DTYPE)
    count = 0
    for t in range(len(tiles)):
        tile = tiles[t]
        segment, left = 0, 0
        end_source, end_target, held = 0, 0, False
        for r in range(len(runs)):
            source, target = source_at(tile, runs[r]), target_at(tile, runs[r])
            if r == 0 or not same_shape(runs[r], runs[r - 1]):
                segment, left = merge_dims(tile, runs[r], dims)
            if left == 0 and held and end_source == source and end_target == target:
                if count <= len(out):
                    out[count - 1].nbytes += segment
            else:
                count = _list_box(tile, source, target, dims, left, segment, out, count)
            held = left == 0
            end_source, end_target = source + segment, target + segment
    return count


@kernel
def _list_box(
    tile: Any, source: int, target: int, dims: Any, left: int, segment: int, out: Any, count: int
) -> int:
    total = count_pieces(dims, left)
    for index in range(min(total, len(out) - count)):
        from_, to = piece_at(dims, left, index)
        row = out[count + index]
        row.source_region, row.source_offset = tile.source_region, source + from_
        row.target_region, row.target_offset = tile.target_region, target + to
        row.nbytes = segment
    return count + total
