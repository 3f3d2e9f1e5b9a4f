"""Reads tiles × runs out of another process: Numba kernels around ``process_vm_readv(2)``.

The call costs by the span: one more contiguous segment of the source takes about as long as
``SPAN_BYTES`` more bytes (the kernel looks up and pins the pages of each by itself). So a tile is
read in one of two ways, whichever costs less:

* **direct**, one span per segment that is contiguous on both sides, straight into its final place;
* **by the desk**: long source spans, small gaps between them included, into a small memory that
  stays in the second-level cache, from which the strided copier
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
from kvferry.transports.vm_desk import (
    BOXES,
    BYTES,
    CALLED,
    DIRECT,
    ERROR,
    MAX_SHAPES,
    MAX_SPANS,
    PID,
    REGION,
    SEGMENTS,
    SHAPES,
    SPAN_BYTES,
    SPANS,
    STREAM,
    TILE,
    USED,
    call,
)


@kernel
def read_chunks(
    pid: int,
    tiles: Any,
    runs: Any,
    chunks: Any,
    progress: Any,
    desk: Any,
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
        desk: of the calling thread alone, with the addresses of both sides' regions.
        nbytes: no chunk is begun once so many are there.
        stream: whether stores from the desk go around the cache.

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
            desk,
            stream,
        )
        if failed:
            break
        copied += end(progress, chunk, segments)
    return failed, leave(progress, len(chunks))


@kernel
def read_table(pid: int, tiles: Any, runs: Any, desk: Any, stream: bool) -> tuple[int, int, int]:
    """Reads every tile of every run out of a process.

    Args:
        pid: the process.
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        desk: of the calling thread alone, with the addresses of both sides' regions.
        stream: whether stores from the desk go around the cache.

    Returns:
        The ``errno`` of the call that failed, or 0; the segments that were written; the bytes that
        the calls have read, gaps included.
    """
    state = desk.state
    state[:] = 0
    state[PID], state[STREAM], state[REGION] = pid, stream, -1
    for t in range(len(tiles)):
        direct = _is_direct(tiles[t], runs, desk)
        for r in range(len(runs)):
            if state[ERROR]:
                break
            if direct:
                _add_segments(tiles[t], runs[r], desk)
            else:
                _add_run(tiles[t], t, runs[r], desk)
    _flush(desk)
    return state[ERROR], state[SEGMENTS], state[BYTES]


@kernel
def _is_direct(tile: Any, runs: Any, desk: Any) -> bool:
    """Whether single segments into their places cost less than long spans by the desk."""
    segments, spans, nbytes, read = 0, 0, 0, 0
    segment, left, each_segments, span, low, each_spans = 0, 0, 0, 0, 0, 0
    end_source, end_target, end_span = 0, 0, 0
    for r in range(len(runs)):
        run = runs[r]
        source, target = source_at(tile, run), target_at(tile, run)
        if r == 0 or not same_shape(run, runs[r - 1]):
            segment, left = merge_dims(tile, run, desk.dims)
            each_segments = 1
            for dim in range(left):
                each_segments *= desk.dims[dim].extent
            span, low, outer = _lay_out(tile, run, desk.box)
            each_spans = 1
            for dim in range(outer):
                each_spans *= desk.box[dim, 0]
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
        read += span * each_spans
        nbytes += segment * each_segments
    # Each byte on the desk is written and read once more, at about the speed of the call.
    return segments * SPAN_BYTES + nbytes <= spans * SPAN_BYTES + read + nbytes


@kernel
def _lay_out(tile: Any, run: Any, box: Any) -> tuple[int, int, int]:
    """The source spans of a box: their bytes, how far below the first element the first begins
    (0 or negative), and the number of dims around a span.

    Dims merge into the span from the innermost on, gaps included that cost less than a span.

    Args:
        tile: a row of ``TILE_DTYPE``.
        run: a row of ``RUN_DTYPE``.
        box: int64[3, 3], filled with (extent, stride, 0 token 1 head 2 element) of the dims that
            are left, innermost first.
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
        while place > 0 and abs(box[place - 1, 1]) > abs(stride):
            box[place] = box[place - 1]
            place -= 1
        box[place, 0], box[place, 1], box[place, 2] = extent, stride, dim
        count += 1
    span, low, merged = tile.itemsize, 0, 0
    while merged < count and span <= abs(box[merged, 1]) <= span + SPAN_BYTES:
        reach = box[merged, 1] * (box[merged, 0] - 1)
        span += abs(reach)
        low += min(reach, 0)
        merged += 1
    for dim in range(count - merged):
        box[dim] = box[dim + merged]
    return span, low, count - merged


@kernel
def _add_segments(tile: Any, run: Any, desk: Any) -> None:
    """Queues a box, segment by segment, for its final place."""
    state, dims = desk.state, desk.dims
    if not state[DIRECT]:
        _flush(desk)
        state[DIRECT] = 1
    segment, left = merge_dims(tile, run, dims)
    for dim in range(left, 3):
        dims[dim].extent, dims[dim].source_stride, dims[dim].target_stride = 1, 0, 0
    source = desk.sources[tile.source_region] + source_at(tile, run)
    target = desk.targets[tile.target_region] + target_at(tile, run)
    for k in range(dims[2].extent):
        for j in range(dims[1].extent):
            from_ = source + k * dims[2].source_stride + j * dims[1].source_stride
            to = target + k * dims[2].target_stride + j * dims[1].target_stride
            for i in range(dims[0].extent):
                _add_segment(
                    from_ + i * dims[0].source_stride, to + i * dims[0].target_stride, segment, desk
                )


@kernel
def _add_segment(source: int, target: int, nbytes: int, desk: Any) -> None:
    state, remote, local = desk.state, desk.remote, desk.local
    last = state[SPANS] - 1
    follows = last >= 0 and source == remote[last, 0] + remote[last, 1]
    if follows and target == local[last, 0] + local[last, 1]:
        remote[last, 1] += nbytes
        local[last, 1] += nbytes
        return
    if last + 1 == MAX_SPANS:
        call(desk)
        last = -1
    remote[last + 1, 0], remote[last + 1, 1] = source, nbytes
    local[last + 1, 0], local[last + 1, 1] = target, nbytes
    state[SPANS] = last + 2
    state[SEGMENTS] += 1


@kernel
def _add_run(tile: Any, number: int, run: Any, desk: Any) -> None:
    """Puts a box on the desk, in parts if it is too large for it."""
    each = run.tokens
    desk.part[0] = run
    part = desk.part[0]
    while not _fits(tile, part, desk):
        if each == 1:  # one token that is larger than the desk
            _add_segments(tile, run, desk)
            return
        each = (each + 1) // 2
        part.tokens = each
    for first in range(0, run.tokens, each):
        part.tokens = min(each, run.tokens - first)
        part.source_token = run.source_token + first * run.source_step
        part.target_token = run.target_token + first * run.target_step
        _add_box(tile, number, part, desk)


@kernel
def _fits(tile: Any, run: Any, desk: Any) -> bool:
    nbytes, _, left = _lay_out(tile, run, desk.box)
    for dim in range(left):
        nbytes *= desk.box[dim, 0]
    fits: bool = nbytes + SPAN_BYTES <= len(desk.memory)
    return fits


@kernel
def _add_box(tile: Any, number: int, run: Any, desk: Any) -> None:
    """Puts a box on the desk. In a span it lies as at the source; the spans lie side by side."""
    state, box, strides = desk.state, desk.box, desk.strides
    span, low, left = _lay_out(tile, run, box)
    strides[0] = tile.source_token_stride * run.source_step
    strides[1], strides[2] = tile.source_head_stride, tile.source_element_stride
    nbytes = span
    for dim in range(left):
        strides[box[dim, 2]] = nbytes
        nbytes *= box[dim, 0]
    for dim in range(left, 3):
        box[dim, 0], box[dim, 1] = 1, 0
    full = state[USED] + SPAN_BYTES + nbytes > len(desk.memory)
    if full or state[DIRECT] or state[BOXES] == MAX_SPANS or state[SHAPES] == MAX_SHAPES:
        _flush(desk)
        state[DIRECT] = 0
    source = desk.sources[tile.source_region] + source_at(tile, run) + low
    at = -1
    for k in range(box[2, 0]):
        for j in range(box[1, 0]):
            from_ = source + k * box[2, 1] + j * box[1, 1]
            for i in range(box[0, 0]):
                place = _add_span(from_ + i * box[0, 1], span, tile.source_region, at >= 0, desk)
                if at < 0:
                    at = place
    _note_box(tile, number, run, at - low, desk)


@kernel
def _add_span(source: int, nbytes: int, region: int, dense: bool, desk: Any) -> int:
    """Queues a span for the next free place on the desk; returns the place.

    A short gap after the span before is read along, unless this one must lie ``dense`` behind it.
    """
    state, remote = desk.state, desk.remote
    last = state[SPANS] - 1
    if last >= 0 and region == state[REGION]:
        gap = source - remote[last, 0] - remote[last, 1]
        if gap == 0 or (not dense and 0 < gap <= SPAN_BYTES):
            remote[last, 1] += gap + nbytes
            state[USED] += gap + nbytes
            place: int = state[USED] - nbytes
            return place
    if last + 1 == MAX_SPANS:
        call(desk)
        last = -1
    remote[last + 1, 0], remote[last + 1, 1] = source, nbytes
    state[SPANS] = last + 2
    state[REGION] = region
    state[USED] += nbytes
    at: int = state[USED] - nbytes
    return at


@kernel
def _note_box(tile: Any, number: int, run: Any, at: int, desk: Any) -> None:
    """Notes where on the desk the first element of a box will lie, and where the box belongs."""
    state, strides = desk.state, desk.strides
    row = state[SHAPES] - 1
    new = row < 0 or state[TILE] != number
    if not new:
        held = desk.tiles[row]
        new = (
            held.source_token_stride != strides[0]
            or held.source_head_stride != strides[1]
            or held.source_element_stride != strides[2]
        )
    if new:
        row += 1
        desk.tiles[row] = tile
        held = desk.tiles[row]
        held.source_region, held.source_block_stride = 0, 1
        held.source_offset = desk.memory.ctypes.data
        held.source_token_stride = strides[0]
        held.source_head_stride = strides[1]
        held.source_element_stride = strides[2]
        desk.firsts[row] = state[BOXES]
        state[SHAPES] = row + 1
        state[TILE] = number
    desk.runs[state[BOXES]] = run
    box = desk.runs[state[BOXES]]
    box.source_block, box.source_token, box.source_step = at, 0, 1
    state[BOXES] += 1
    desk.firsts[row + 1] = state[BOXES]


@kernel
def _flush(desk: Any) -> None:
    """Reads what is queued, then puts what lies on the desk in its place."""
    state = desk.state
    call(desk)
    if not state[ERROR]:
        for row in range(state[SHAPES]):
            boxes = desk.runs[desk.firsts[row] : desk.firsts[row + 1]]
            state[SEGMENTS] += copy_table(
                desk.zero,
                desk.targets,
                desk.tiles[row : row + 1],
                boxes,
                desk.dims,
                state[STREAM] != 0,
                0,
            )
    state[USED] = state[CALLED] = state[BOXES] = state[SHAPES] = 0
