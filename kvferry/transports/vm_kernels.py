"""Reads tiles × runs out of another process: Numba kernels around ``process_vm_readv(2)``.

The cost of the call depends on the number of spans. A further contiguous segment of the source
takes about as long as ``SPAN_BYTES`` further bytes, because the kernel looks up and pins the pages
of each segment separately. So a tile is read in the cheaper of two ways:

* **direct**, straight into its final place: one span per contiguous segment of the source, however
  many pieces of the target the span goes to (a piece costs about half as much, ``PIECE_BYTES``);
* **by the bounce buffer**: long source spans, including small gaps, go into a small memory that
  stays in the second-level cache; the strided copier (:func:`kvferry.layouts.kernels.copy_table`)
  then puts the boxes in place.

The kernels check no bounds; see :mod:`kvferry.layouts.bounds`. A span with its gaps stays between
two requested bytes of the same region.
"""

from typing import Any

from kvferry.layouts.chunks import end, enter, leave, take
from kvferry.layouts.compiled import kernel
from kvferry.layouts.kernels import copy_table, merge_dims, same_shape, source_at, target_at
from kvferry.transports.iovec import MAX_ROWS, end_of
from kvferry.transports.vm_bounce import MAX_SHAPES, PIECE_BYTES, SPAN_BYTES, call


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
    """Reads chunks until about ``nbytes`` bytes are in place, as ``layouts.chunks.copy_chunks``.

    Args:
        pid: id of the process.
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        chunks: rows of ``CHUNK_DTYPE``.
        progress: the single row of ``PROGRESS_DTYPE`` of this read.
        bounce: working memory of the calling thread, with the addresses of both sides' regions.
        nbytes: number of bytes after which no new chunk begins.
        stream: whether stores from the buffer go around the cache.

    Returns:
        The ``errno`` of the failed call, or 0; whether chunks are left to take.
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
        pid: id of the process.
        tiles: rows of ``TILE_DTYPE``.
        runs: rows of ``RUN_DTYPE``.
        bounce: working memory of the calling thread, with the addresses of both sides' regions.
        stream: whether stores from the buffer go around the cache.

    Returns:
        The ``errno`` of the failed call, or 0; number of written segments; number of bytes read by
            the calls, gaps included.
    """
    state = bounce.state[0]
    state.pid, state.stream, state.direct, state.region = pid, stream, False, -1
    state.segments = state.bytes_read = state.error = 0
    state.spans = state.pieces = 0
    state.used = state.called = state.boxes = state.shapes = 0
    for t in range(len(tiles)):
        if state.error:
            break
        if _is_direct(tiles[t], runs, bounce):
            _add_direct(tiles[t], runs, bounce)
        else:
            _add_bounced(tiles[t], t, runs, bounce)
    _flush(bounce)
    return state.error, state.segments, state.bytes_read


@kernel
def _is_direct(tile: Any, runs: Any, bounce: Any) -> bool:
    """Whether single segments into place cost less than long spans through the buffer."""
    direct_spans, pieces, spans, nbytes, read = 0, 0, 0, 0, 0
    box, from_, to, span, low, each_read = 0, 1, 1, 1, 0, 0
    end_source, end_target, end_span = 0, 0, 0
    for r in range(len(runs)):
        run = runs[r]
        source, target = source_at(tile, run), target_at(tile, run)
        if r == 0 or not same_shape(run, runs[r - 1]):
            box, from_, to = _adjacent(tile, run, bounce.dims)
            span, low, _, each_read = _lay_out(tile, run, bounce.source_dims)
        if not (r > 0 and from_ == box and source == end_source):
            direct_spans += box // from_
        if not (r > 0 and to == box and target == end_target):
            pieces += box // to
        end_source, end_target = source + from_, target + to
        gap = source + low - end_span
        if r > 0 and each_read == span and 0 <= gap <= SPAN_BYTES:
            read += gap
        else:
            spans += each_read // span
        end_span = source + low + span
        read += each_read
        nbytes += box
    direct = direct_spans * SPAN_BYTES + pieces * PIECE_BYTES + nbytes
    # The way through the buffer is a third slower than straight into place.
    return direct <= spans * SPAN_BYTES + read + nbytes // 3


@kernel
def _adjacent(tile: Any, run: Any, dims: Any) -> tuple[int, int, int]:
    """Bytes of a box, and its contiguous bytes at the source and at the target.

    The segments of the box are taken in the target's order.
    """
    from_, left = merge_dims(tile, run, dims)
    box, to, at_source, at_target = from_, from_, True, True
    for dim in range(left):
        at_source = at_source and dims[dim].source_stride == from_
        at_target = at_target and dims[dim].target_stride == to
        if at_source:
            from_ *= dims[dim].extent
        if at_target:
            to *= dims[dim].extent
        box *= dims[dim].extent
    return box, from_, to


@kernel
def _lay_out(tile: Any, run: Any, dims: Any) -> tuple[int, int, int, int]:
    """The source spans of a box, with small gaps merged.

    Dims merge into the span from the innermost outwards, including gaps that cost less than a span.

    Args:
        tile: a row of ``TILE_DTYPE``.
        run: a row of ``RUN_DTYPE``.
        dims: rows of ``SOURCE_DIM_DTYPE``; filled with the dims around a span, innermost first.

    Returns:
        Bytes of each span; bytes from the first element to the start of the first span (0 or
            negative); number of dims around a span; bytes of all spans.
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
def _add_direct(tile: Any, runs: Any, bounce: Any) -> None:
    """Queues every run of a tile for its final place.

    Adjacent bytes at the source become one span, and adjacent bytes at the target become one piece,
    independently.
    """
    state, dims = bounce.state[0], bounce.dims
    if not state.direct:
        _flush(bounce)
        state.direct = True
    source_base = bounce.sources[tile.source_region]
    target_base = bounce.targets[tile.target_region]
    segment = 0
    for r in range(len(runs)):
        run = runs[r]
        if r == 0 or not same_shape(run, runs[r - 1]):
            segment, left = merge_dims(tile, run, dims)
            for dim in range(left, 3):
                dims[dim].extent, dims[dim].source_stride, dims[dim].target_stride = 1, 0, 0
        source = source_base + source_at(tile, run)
        target = target_base + target_at(tile, run)
        for k in range(dims[2].extent):
            for j in range(dims[1].extent):
                _add_segments(
                    source + k * dims[2].source_stride + j * dims[1].source_stride,
                    target + k * dims[2].target_stride + j * dims[1].target_stride,
                    segment,
                    bounce,
                )


@kernel
def _add_segments(source: int, target: int, nbytes: int, bounce: Any) -> None:
    """Queues segments of ``nbytes`` along the first dim, without a call for each segment."""
    state, dims, remote, local = bounce.state[0], bounce.dims, bounce.remote, bounce.local
    for _ in range(dims[0].extent):
        new_span = source != end_of(remote, state.spans)
        new_piece = target != end_of(local, state.pieces)
        if (new_span and state.spans == MAX_ROWS) or (new_piece and state.pieces == MAX_ROWS):
            call(bounce)
            if state.error:
                return
            new_span = new_piece = True
        if new_span:
            remote[state.spans].address, remote[state.spans].nbytes = source, 0
            state.spans += 1
        if new_piece:
            local[state.pieces].address, local[state.pieces].nbytes = target, 0
            state.pieces += 1
        remote[state.spans - 1].nbytes += nbytes
        local[state.pieces - 1].nbytes += nbytes
        state.segments += new_span or new_piece
        source += dims[0].source_stride
        target += dims[0].target_stride


@kernel
def _add_bounced(tile: Any, number: int, runs: Any, bounce: Any) -> None:
    """Queues every run of a tile for the buffer; a run that is too large is cut into parts."""
    part = bounce.part[0]
    first, fits = 0, False
    for r in range(len(runs)):
        run = runs[r]
        if r == 0 or not same_shape(run, runs[r - 1]):
            fits = _fits(tile, run, bounce)
        if fits:
            continue
        _add_boxes(tile, number, runs[first:r], bounce)
        first = r + 1
        bounce.part[0] = run
        while not _fits(tile, part, bounce) and part.tokens > 1:
            part.tokens = (part.tokens + 1) // 2
        each = part.tokens
        for token in range(0, run.tokens, each):
            part.tokens = min(each, run.tokens - token)
            part.source_token = run.source_token + token * run.source_step
            part.target_token = run.target_token + token * run.target_step
            if _fits(tile, part, bounce):
                _add_boxes(tile, number, bounce.part, bounce)
            else:  # a single token that is larger than the buffer
                _add_direct(tile, bounce.part, bounce)
    _add_boxes(tile, number, runs[first:], bounce)


@kernel
def _fits(tile: Any, run: Any, bounce: Any) -> bool:
    """Whether a box fits into the buffer."""
    needed = _lay_out(tile, run, bounce.source_dims)[3] + SPAN_BYTES
    fits: bool = needed <= len(bounce.memory)
    return fits


@kernel
def _add_boxes(tile: Any, number: int, runs: Any, bounce: Any) -> None:
    """Queues every run of a tile for the buffer.

    Inside a span, a box lies as at the source. The spans of a box are adjacent in the buffer, and a
    short gap between two boxes is read as well.
    """
    state, dims, boxes = bounce.state[0], bounce.source_dims, bounce.runs
    region, source_base = tile.source_region, bounce.sources[tile.source_region]
    span, low, nbytes, new_shape = 0, 0, 0, True
    for r in range(len(runs)):
        run = runs[r]
        if r == 0 or not same_shape(run, runs[r - 1]):
            span, low, left, nbytes = _lay_out(tile, run, dims)
            _note_strides(tile, run, span, left, bounce)
            new_shape = True
        full = state.used + SPAN_BYTES + nbytes > len(bounce.memory)
        if full or state.direct or state.boxes == MAX_ROWS or state.shapes == MAX_SHAPES:
            _flush(bounce)
            if state.error:
                return
            state.direct = False
            new_shape = True
        if new_shape:
            _note_shape(tile, number, bounce)
            new_shape = False
        source = source_base + source_at(tile, run) + low
        at = -1
        for k in range(dims[2].extent):
            for j in range(dims[1].extent):
                from_ = source + k * dims[2].stride + j * dims[1].stride
                place = _add_spans(from_, span, region, at < 0, bounce)
                at = place if at < 0 else at
        boxes[state.boxes] = run
        box = boxes[state.boxes]
        box.source_block, box.source_token, box.source_step = at - low, 0, 1
        state.boxes += 1


@kernel
def _add_spans(source: int, nbytes: int, region: int, first: bool, bounce: Any) -> int:
    """Queues spans of ``nbytes`` along the first dim; returns the place of the first span.

    The kernel makes no call per span. A gap may be read before the ``first`` span of a box. The
    place is an offset in the buffer.
    """
    state, dims, remote = bounce.state[0], bounce.source_dims, bounce.remote
    at = -1
    for _ in range(dims[0].extent):
        last, gap = state.spans - 1, -1
        if last >= 0 and state.region == region:  # never over the end of a region
            gap = source - end_of(remote, state.spans)
        if gap != 0 and not (first and 0 < gap <= SPAN_BYTES):
            if state.spans == MAX_ROWS:
                call(bounce)
            remote[state.spans].address, remote[state.spans].nbytes = source, 0
            state.region, last, gap = region, state.spans, 0
            state.spans += 1
        remote[last].nbytes += gap + nbytes
        at = state.used + gap if at < 0 else at
        first = False
        state.used += gap + nbytes
        source += dims[0].stride
    return at


@kernel
def _note_strides(tile: Any, run: Any, span: int, left: int, bounce: Any) -> None:
    """Sets the strides of a box in the buffer, and extents of 1 for dims inside a span."""
    dims, strides = bounce.source_dims, bounce.strides
    strides[0] = tile.source_token_stride * run.source_step
    strides[1], strides[2] = tile.source_head_stride, tile.source_element_stride
    stride = span
    for dim in range(left):
        strides[dims[dim].dim] = stride
        stride *= dims[dim].extent
    for dim in range(left, 3):
        dims[dim].extent, dims[dim].stride = 1, 0


@kernel
def _note_shape(tile: Any, number: int, bounce: Any) -> None:
    """Notes how the next boxes lie in the buffer, unless the previous boxes lie alike."""
    state, strides = bounce.state[0], bounce.strides
    row = state.shapes
    if row and state.tile == number:
        held = bounce.tiles[row - 1]
        if (
            held.source_token_stride == strides[0]
            and held.source_head_stride == strides[1]
            and held.source_element_stride == strides[2]
        ):
            return
    bounce.tiles[row] = tile
    held = bounce.tiles[row]
    held.source_region, held.source_block_stride = 0, 1
    held.source_offset = bounce.memory.ctypes.data
    held.source_token_stride = strides[0]
    held.source_head_stride = strides[1]
    held.source_element_stride = strides[2]
    bounce.firsts[row] = state.boxes
    state.shapes, state.tile = row + 1, number


@kernel
def _flush(bounce: Any) -> None:
    """Reads the queued spans, then copies the boxes in the buffer into place."""
    state = bounce.state[0]
    call(bounce)
    bounce.firsts[state.shapes] = state.boxes
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
