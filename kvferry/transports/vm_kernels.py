"""Reads tiles × runs out of another process: Numba kernels around ``process_vm_readv(2)``.

The call costs by the span: one more contiguous segment of the source takes about as long as
``SPAN_BYTES`` more bytes (the kernel looks up and pins the pages of each by itself). So a tile is
read in one of two ways, whichever costs less:

* **direct**, one span per segment that is contiguous on both sides, straight into its final place;
* **by the bounce buffer**: long source spans, small gaps between them included, into a small memory
  that stays in the second-level cache, from which the strided copier
  (:func:`kvferry.layouts.kernels.copy_table`) puts them in place.

Nothing here checks bounds; see :mod:`kvferry.layouts.bounds`. A span with its gaps stays between
two bytes of one region that the read asks for.
"""

from typing import Any

from kvferry.layouts.chunks import end, enter, leave, take
from kvferry.layouts.kernels import (
    copy_table,
    kernel,
    merge_dims,
    same_shape,
    source_at,
    target_at,
)
from kvferry.transports.vm_bounce import MAX_SHAPES, MAX_SPANS, SPAN_BYTES, call


@kernel
def read_chunks(
    pid: int,
    tiles: Any,
    runs: Any,
    chunks: Any,
    progress: Any,
    bounce: Any,
    nbytes: int,
    stream: bool,
) -> tuple[int, bool]:
    """Reads chunks until about ``nbytes`` bytes are there, as ``layouts.chunks.copy_chunks``.

    Args:
        pid: the process.
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        chunks: rows of ``CHUNK_DTYPE``.
        progress: the one row of ``PROGRESS_DTYPE`` of this read.
        bounce: of the calling thread alone, with the addresses of both sides' regions.
        nbytes: no chunk is begun once so many are there.
        stream: whether stores from the buffer go around the cache.

    Returns:
        The ``errno`` of the call that failed, or 0; whether chunks are left to take.
    """
    failed, copied = 0, 0
    enter(progress)
    while copied < nbytes:
        number = take(progress, len(chunks))
        if number < 0:
            break
        chunk = chunks[number]
        failed, segments, _ = read_table(
            pid,
            tiles[chunk.first_tile : chunk.end_tile],
            runs[chunk.first_run : chunk.end_run],
            bounce,
            stream,
        )
        if failed:
            break
        copied += end(progress, chunk, segments)
    return failed, leave(progress, len(chunks))


@kernel
def read_table(pid: int, tiles: Any, runs: Any, bounce: Any, stream: bool) -> tuple[int, int, int]:
    """Reads every tile of every run out of a process.

    Args:
        pid: the process.
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        bounce: of the calling thread alone, with the addresses of both sides' regions.
        stream: whether stores from the buffer go around the cache.

    Returns:
        The ``errno`` of the call that failed, or 0; the segments that were written; the bytes that
        the calls have read, gaps included.
    """
    state = bounce.state[0]
    state.pid, state.stream, state.direct, state.region = pid, stream, False, -1
    state.segments = state.bytes_read = state.error = 0
    state.spans = state.used = state.called = state.boxes = state.shapes = 0
    for t in range(len(tiles)):
        direct = _is_direct(tiles[t], runs, bounce)
        for r in range(len(runs)):
            if state.error:
                break
            if direct:
                _add_segments(tiles[t], runs[r], bounce)
            else:
                _add_run(tiles[t], t, runs[r], bounce)
    _flush(bounce)
    return state.error, state.segments, state.bytes_read


@kernel
def _is_direct(tile: Any, runs: Any, bounce: Any) -> bool:
    """Whether single segments into their places cost less than long spans by the bounce."""
    segments, spans, nbytes, read = 0, 0, 0, 0
    segment, left, each_segments, span, low, each_spans, each_read = 0, 0, 0, 0, 0, 0, 0
    end_source, end_target, end_span = 0, 0, 0
    for r in range(len(runs)):
        run = runs[r]
        source, target = source_at(tile, run), target_at(tile, run)
        if r == 0 or not same_shape(run, runs[r - 1]):
            segment, left = merge_dims(tile, run, bounce.dims)
            each_segments = 1
            for dim in range(left):
                each_segments *= bounce.dims[dim].extent
            span, low, _, each_read = _lay_out(tile, run, bounce.source_dims)
            each_spans = each_read // span
        adjacent = r > 0 and left == 0 and source == end_source and target == end_target
        if not adjacent:
            segments += each_segments
        end_source, end_target = source + segment, target + segment
        gap = source + low - end_span
        if r > 0 and each_spans == 1 and 0 <= gap <= SPAN_BYTES:
            read += gap
        else:
            spans += each_spans
        end_span = source + low + span
        read += each_read
        nbytes += segment * each_segments
    # Each byte in the buffer is written and read once more, at about the speed of the call.
    return segments * SPAN_BYTES + nbytes <= spans * SPAN_BYTES + read + nbytes


@kernel
def _lay_out(tile: Any, run: Any, dims: Any) -> tuple[int, int, int, int]:
    """The source spans of a box: bytes of each, how far below the first element the first begins
    (0 or negative), the number of dims around a span, and the bytes of all of them.

    Dims merge into the span from the innermost on, gaps included that cost less than a span.

    Args:
        tile: a row of ``TILE_DTYPE``.
        run: a row of ``RUN_DTYPE``.
        dims: rows of ``SOURCE_DIM_DTYPE``, filled with those that are left, innermost first.
    """
    count = 0
    for dim in range(3):
        if dim == 0:
            extent, stride = run.tokens, tile.source_token_stride * run.source_step
        elif dim == 1:
            extent, stride = tile.heads, tile.source_head_stride
        else:
            extent, stride = tile.elements, tile.source_element_stride
        if extent == 1:
            continue
        place = count
        while place > 0 and abs(dims[place - 1].stride) > abs(stride):
            dims[place] = dims[place - 1]
            place -= 1
        dims[place].extent, dims[place].stride, dims[place].dim = extent, stride, dim
        count += 1
    span, low, merged = tile.itemsize, 0, 0
    while merged < count and span <= abs(dims[merged].stride) <= span + SPAN_BYTES:
        reach = dims[merged].stride * (dims[merged].extent - 1)
        span += abs(reach)
        low += min(reach, 0)
        merged += 1
    nbytes = span
    for dim in range(count - merged):
        dims[dim] = dims[dim + merged]
        nbytes *= dims[dim].extent
    return span, low, count - merged, nbytes


@kernel
def _add_segments(tile: Any, run: Any, bounce: Any) -> None:
    """Queues a box, segment by segment, for its final place."""
    state, dims = bounce.state[0], bounce.dims
    if not state.direct:
        _flush(bounce)
        state.direct = True
    segment, left = merge_dims(tile, run, dims)
    for dim in range(left, 3):
        dims[dim].extent, dims[dim].source_stride, dims[dim].target_stride = 1, 0, 0
    source = bounce.sources[tile.source_region] + source_at(tile, run)
    target = bounce.targets[tile.target_region] + target_at(tile, run)
    for k in range(dims[2].extent):
        for j in range(dims[1].extent):
            from_ = source + k * dims[2].source_stride + j * dims[1].source_stride
            to = target + k * dims[2].target_stride + j * dims[1].target_stride
            for _ in range(dims[0].extent):
                _add_segment(from_, to, segment, bounce)
                from_ += dims[0].source_stride
                to += dims[0].target_stride


@kernel
def _add_segment(source: int, target: int, nbytes: int, bounce: Any) -> None:
    state, remote, local = bounce.state[0], bounce.remote, bounce.local
    last = state.spans - 1
    follows = last >= 0 and source == remote[last].address + remote[last].nbytes
    if follows and target == local[last].address + local[last].nbytes:
        remote[last].nbytes += nbytes
        local[last].nbytes += nbytes
        return
    if last + 1 == MAX_SPANS:
        call(bounce)
        last = -1
    remote[last + 1].address, remote[last + 1].nbytes = source, nbytes
    local[last + 1].address, local[last + 1].nbytes = target, nbytes
    state.spans = last + 2
    state.segments += 1


@kernel
def _add_run(tile: Any, number: int, run: Any, bounce: Any) -> None:
    """Puts a box on the bounce, in parts if it is too large for it."""
    each = run.tokens
    bounce.part[0] = run
    part = bounce.part[0]
    while _lay_out(tile, part, bounce.source_dims)[3] + SPAN_BYTES > len(bounce.memory):
        if each == 1:  # one token that is larger than the buffer
            _add_segments(tile, run, bounce)
            return
        each = (each + 1) // 2
        part.tokens = each
    for first in range(0, run.tokens, each):
        part.tokens = min(each, run.tokens - first)
        part.source_token = run.source_token + first * run.source_step
        part.target_token = run.target_token + first * run.target_step
        _add_box(tile, number, part, bounce)


@kernel
def _add_box(tile: Any, number: int, run: Any, bounce: Any) -> None:
    """Puts a box on the bounce. In a span it lies as at the source; the spans lie side by side."""
    state, dims, strides = bounce.state[0], bounce.source_dims, bounce.strides
    span, low, left, nbytes = _lay_out(tile, run, dims)
    strides[0] = tile.source_token_stride * run.source_step
    strides[1], strides[2] = tile.source_head_stride, tile.source_element_stride
    stride = span
    for dim in range(left):
        strides[dims[dim].dim] = stride
        stride *= dims[dim].extent
    for dim in range(left, 3):
        dims[dim].extent, dims[dim].stride = 1, 0
    full = state.used + SPAN_BYTES + nbytes > len(bounce.memory)
    if full or state.direct or state.boxes == MAX_SPANS or state.shapes == MAX_SHAPES:
        _flush(bounce)
        state.direct = False
    source = bounce.sources[tile.source_region] + source_at(tile, run) + low
    at = -1
    for k in range(dims[2].extent):
        for j in range(dims[1].extent):
            from_ = source + k * dims[2].stride + j * dims[1].stride
            for _ in range(dims[0].extent):
                place = _add_span(from_, span, tile.source_region, at >= 0, bounce)
                from_ += dims[0].stride
                if at < 0:
                    at = place
    _note_box(tile, number, run, at - low, bounce)


@kernel
def _add_span(source: int, nbytes: int, region: int, dense: bool, bounce: Any) -> int:
    """Queues a span for the next free place in the buffer; returns the place.

    A short gap after the span before is read along, unless this one must lie ``dense`` behind it.
    """
    state, remote = bounce.state[0], bounce.remote
    last = state.spans - 1
    if last >= 0 and region == state.region:
        gap = source - remote[last].address - remote[last].nbytes
        if gap == 0 or (not dense and 0 < gap <= SPAN_BYTES):
            remote[last].nbytes += gap + nbytes
            state.used += gap + nbytes
            place: int = state.used - nbytes
            return place
    if last + 1 == MAX_SPANS:
        call(bounce)
        last = -1
    remote[last + 1].address, remote[last + 1].nbytes = source, nbytes
    state.spans = last + 2
    state.region = region
    state.used += nbytes
    at: int = state.used - nbytes
    return at


@kernel
def _note_box(tile: Any, number: int, run: Any, at: int, bounce: Any) -> None:
    """Notes where in the buffer the first element of a box will lie, and where the box belongs."""
    state, strides = bounce.state[0], bounce.strides
    row = state.shapes - 1
    new = row < 0 or state.tile != number
    if not new:
        held = bounce.tiles[row]
        new = (
            held.source_token_stride != strides[0]
            or held.source_head_stride != strides[1]
            or held.source_element_stride != strides[2]
        )
    if new:
        row += 1
        bounce.tiles[row] = tile
        held = bounce.tiles[row]
        held.source_region, held.source_block_stride = 0, 1
        held.source_offset = bounce.memory.ctypes.data
        held.source_token_stride = strides[0]
        held.source_head_stride = strides[1]
        held.source_element_stride = strides[2]
        bounce.firsts[row] = state.boxes
        state.shapes = row + 1
        state.tile = number
    bounce.runs[state.boxes] = run
    box = bounce.runs[state.boxes]
    box.source_block, box.source_token, box.source_step = at, 0, 1
    state.boxes += 1
    bounce.firsts[row + 1] = state.boxes


@kernel
def _flush(bounce: Any) -> None:
    """Reads what is queued, then puts what lies in the buffer in its place."""
    state = bounce.state[0]
    call(bounce)
    if not state.error:
        for row in range(state.shapes):
            boxes = bounce.runs[bounce.firsts[row] : bounce.firsts[row + 1]]
            state.segments += copy_table(
                bounce.zero,
                bounce.targets,
                bounce.tiles[row : row + 1],
                boxes,
                bounce.dims,
                state.stream,
                0,
            )
    state.used = state.called = state.boxes = state.shapes = 0
