"""The strided copy itself: Numba kernels on raw addresses.

A tile and a run make one box of at most three dims: token, head, element. Each kernel first sorts
the dims by the target's strides and melts those that lie without a gap on both sides into one
*piece*. What is left are at most three loops around a piece, written in the order of the target's
addresses, so that stores go out sequentially.

Three things make it as fast as one large ``memcpy``, measured: streaming stores for large jobs
(each target line is written once and never read), a prefetch of the next run's source while this
one is copied (a shuffled block table defeats the hardware's prefetcher), and the melting of
adjacent runs into one piece.

Nothing here checks bounds; see :mod:`kvferry.layouts.bounds`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

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

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compiles a function for use without the interpreter lock; keeps the result on disk."""
    compiled: _Function = numba.njit(nogil=True, cache=True)(function)
    return compiled


# Columns of a tile and of a run as int64 tables; the order of TILE_DTYPE and RUN_DTYPE.
S_REGION, S_OFFSET, S_BLOCK, S_TOKEN, S_HEAD, S_ELEMENT = range(6)
T_REGION, T_OFFSET, T_BLOCK, T_TOKEN, T_HEAD, T_ELEMENT = range(6, 12)
HEADS, ELEMENTS, ITEMSIZE = range(12, 15)
R_S_BLOCK, R_S_TOKEN, R_T_BLOCK, R_T_TOKEN, R_TOKENS, R_S_STEP, R_T_STEP = range(7)

_SHORT = 256
"""Bytes up to which the C library's copy is the fastest; beyond, it begins with string
instructions, which start slowly and, on some processors, read memory at half its speed."""
_LARGE = 4096
"""Bytes from which a piece is worth aligning on its own."""
_PREFETCH_LIMIT = 65536
"""Bytes of a piece above which the hardware's prefetcher needs no help."""


@kernel
def melt(tile: Any, run: Any, dims: Any) -> tuple[int, int]:
    """Bytes of a piece, and how many dims are left around it.

    Args:
        tile: one row of the tile table.
        run: one row of the run table; only its extent and its steps count.
        dims: int64[3, 3], filled with (extent, source stride, target stride) of the dims that
            are left, innermost on the target first.
    """
    count = 0
    for dim in range(3):
        if dim == 0:
            extent = run[R_TOKENS]
            source, target = tile[S_TOKEN] * run[R_S_STEP], tile[T_TOKEN] * run[R_T_STEP]
        elif dim == 1:
            extent, source, target = tile[HEADS], tile[S_HEAD], tile[T_HEAD]
        else:
            extent, source, target = tile[ELEMENTS], tile[S_ELEMENT], tile[T_ELEMENT]
        if extent == 1:
            continue
        place = count
        while place > 0 and abs(dims[place - 1, 2]) > abs(target):
            dims[place] = dims[place - 1]
            place -= 1
        dims[place, 0] = extent
        dims[place, 1] = source
        dims[place, 2] = target
        count += 1
    piece = tile[ITEMSIZE]
    melted = 0
    while melted < count and dims[melted, 1] == piece and dims[melted, 2] == piece:
        piece *= dims[melted, 0]
        melted += 1
    for left in range(count - melted):
        dims[left] = dims[left + melted]
    return piece, count - melted


@kernel
def same_shape(runs: Any, one: int, two: int) -> bool:
    """Whether two runs make boxes of the same extents and strides."""
    same: bool = (
        runs[one, R_TOKENS] == runs[two, R_TOKENS]
        and runs[one, R_S_STEP] == runs[two, R_S_STEP]
        and runs[one, R_T_STEP] == runs[two, R_T_STEP]
    )
    return same


@kernel
def _copy_cached(target: int, source: int, nbytes: int) -> None:
    """A piece whose target stays in the cache."""
    whole = nbytes & ~63 if nbytes > _SHORT else 0
    for at in range(0, whole, 64):
        move_64(target + at, source + at)
    if whole < nbytes:
        memcpy(target + whole, source + whole, nbytes - whole)


@kernel
def _copy_piece(target: int, source: int, nbytes: int, stream: bool, sequential: bool) -> None:
    if not stream or nbytes < 64:
        _copy_cached(target, source, nbytes)
        return
    if sequential and target & 63 and target & 15 == 0:
        # Its neighbours complete the first and the last line, so nothing need be aligned.
        whole = nbytes & ~15
        for at in range(0, whole, 16):
            stream_16(target + at, source + at)
        if whole < nbytes:
            memcpy(target + whole, source + whole, nbytes - whole)
        return
    if target & 63:
        lead = 64 - (target & 63)
        memcpy(target, source, lead)
        target += lead
        source += lead
        nbytes -= lead
    whole = nbytes & ~63
    for at in range(0, whole, 64):
        stream_64(target + at, source + at)
    if whole < nbytes:
        memcpy(target + whole, source + whole, nbytes - whole)


@kernel
def _copy_long(target: int, source: int, nbytes: int, stream: bool, ahead: int) -> None:
    """One long piece; meanwhile asks for what lies ``ahead`` bytes from its source."""
    if ahead == 0 or nbytes > _PREFETCH_LIMIT:
        _copy_piece(target, source, nbytes, stream, False)
        return
    at = 0
    while at < nbytes:
        step = min(nbytes - at, 256)
        if at == 0 and step == 256:
            step -= target & 63  # the later steps then begin on a line
        for line in range(at, at + step, 64):
            prefetch(source + ahead + line)
        _copy_piece(target + at, source + at, step, stream, False)
        at += step


@kernel
def _copy_pieces(
    target: int,
    source: int,
    dims: Any,
    left: int,
    piece: int,
    stream: bool,
    ahead: int,
    target_ahead: int,
) -> None:
    """Up to three loops around a piece."""
    outer = dims[2, 0] if left > 2 else 1
    middle = dims[1, 0] if left > 1 else 1
    inner_source, inner_target = dims[0, 1], dims[0, 2]
    sequential = inner_target == piece and piece < _LARGE
    for k in range(outer):
        for j in range(middle):
            source_row, target_row = source, target
            if left > 1:
                source_row += j * dims[1, 1]
                target_row += j * dims[1, 2]
            if left > 2:
                source_row += k * dims[2, 1]
                target_row += k * dims[2, 2]
            for i in range(dims[0, 0]):
                from_ = source_row + i * inner_source
                if ahead != 0:
                    for line in range(0, min(piece, _PREFETCH_LIMIT), 64):
                        prefetch(from_ + ahead + line)
                to = target_row + i * inner_target
                if target_ahead != 0:
                    for line in range(0, min(piece, _PREFETCH_LIMIT), 64):
                        prefetch(to + target_ahead + line)
                _copy_piece(to, from_, piece, stream, sequential)


@kernel
def _copy_row(
    target: int, source: int, count: int, target_step: int, source_step: int, width: int
) -> None:
    """``count`` single elements of ``width`` bytes."""
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
    """16 bytes times 16 bytes; rows lie dense on the source, columns on the target."""
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
    """Two dims of single elements: ``inner`` lies closest on the target, ``across`` on the source.

    Where each lies dense, whole squares are transposed in registers; the margins go one by one.
    ``ahead`` and ``target_ahead`` are where the next run lies: its lines are asked for on both
    sides, because squares of 16 bytes are too short to stream.
    """
    inner_count, across_count = inner[0], across[0]
    edge = 16 // width
    squares = inner[2] == width and across[1] == width and edge > 1
    inner_whole = inner_count - inner_count % edge if squares else 0
    across_whole = across_count - across_count % edge if squares else 0
    for i in range(0, inner_whole, edge):
        for j in range(0, across_whole, edge):
            at = source + i * inner[1] + j * width
            if ahead != 0 and j * width % 64 == 0:
                for row in range(edge):
                    prefetch(at + ahead + row * inner[1])
            if target_ahead != 0 and i * width % 64 == 0:
                for row in range(edge):
                    prefetch(target + i * width + j * across[2] + target_ahead + row * across[2])
            _transpose_square(target + i * width + j * across[2], across[2], at, inner[1], width)
    for j in range(across_count):
        first = inner_whole if j < across_whole else 0
        _copy_row(
            target + j * across[2] + first * inner[2],
            source + j * across[1] + first * inner[1],
            inner_count - first,
            inner[2],
            inner[1],
            width,
        )


@kernel
def _copy_elements(
    target: int, source: int, dims: Any, left: int, width: int, ahead: int, target_ahead: int
) -> None:
    """Up to three loops around single elements."""
    for dim in range(left, 3):
        dims[dim, 0], dims[dim, 1], dims[dim, 2] = 1, 0, 0
    across = 1  # of the outer dims, the one along which the source lies closest
    if left > 2 and abs(dims[2, 1]) < abs(dims[1, 1]):
        across = 2
    rest = 3 - across
    for k in range(dims[rest, 0]):
        _copy_plane(
            target + k * dims[rest, 2],
            source + k * dims[rest, 1],
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
    piece: int,
    stream: bool,
    ahead: int,
    target_ahead: int,
    in_place: bool,
) -> int:
    """One run of one tile that is not a single piece; returns its number of pieces."""
    if piece in {1, 2, 4, 8, 16}:
        _copy_elements(target, source, dims, left, piece, ahead, target_ahead)
    else:
        # Pieces are written whole: their lines are worth asking for only if they are read first.
        read_ahead = target_ahead if in_place else 0
        _copy_pieces(target, source, dims, left, piece, stream, ahead, read_ahead)
    pieces = 1
    for dim in range(left):
        pieces *= dims[dim, 0]
    return pieces


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
    """Copies every tile of every run; returns the number of contiguous pieces, after merging.

    Args:
        source_addresses: int64, address of each source region.
        target_addresses: int64, address of each target region.
        tiles: int64[T, 15].
        runs: int64[R, 7].
        dims: int64[3, 3], scratch of this call.
        stream: whether stores go around the cache.
        in_place: if not 0, only so many runs are copied: the source is a buffer, and the memory
            that the same number of runs behind them write is read next, so it is asked for.
    """
    pieces = 0
    count = min(in_place, len(runs)) if in_place else len(runs)
    target_step = in_place if in_place else 1
    for t in range(len(tiles)):
        tile = tiles[t]
        source_base = source_addresses[tile[S_REGION]] + tile[S_OFFSET]
        target_base = target_addresses[tile[T_REGION]] + tile[T_OFFSET]
        piece, left = 0, 0
        held_source, held_target, held = 0, 0, 0  # a piece that may still grow
        for r in range(count):
            source = source_base + (
                runs[r, R_S_BLOCK] * tile[S_BLOCK] + runs[r, R_S_TOKEN] * tile[S_TOKEN]
            )
            target = target_base + (
                runs[r, R_T_BLOCK] * tile[T_BLOCK] + runs[r, R_T_TOKEN] * tile[T_TOKEN]
            )
            if r == 0 or not same_shape(runs, r, r - 1):
                piece, left = melt(tile, runs[r], dims)
            if left == 0 and held and held_source + held == source and held_target + held == target:
                held += piece
                continue
            if held:
                _copy_long(held_target, held_source, held, stream, source - held_source)
                pieces += 1
                held = 0
            if left == 0:
                held_source, held_target, held = source, target, piece
                continue
            ahead = 0
            if r + 1 < len(runs) and not in_place:
                ahead = (
                    source_base
                    - source
                    + (
                        runs[r + 1, R_S_BLOCK] * tile[S_BLOCK]
                        + runs[r + 1, R_S_TOKEN] * tile[S_TOKEN]
                    )
                )
            target_ahead = 0
            if r + target_step < len(runs):
                target_ahead = (
                    target_base
                    - target
                    + (
                        runs[r + target_step, R_T_BLOCK] * tile[T_BLOCK]
                        + runs[r + target_step, R_T_TOKEN] * tile[T_TOKEN]
                    )
                )
            pieces += _copy_box(
                target, source, dims, left, piece, stream, ahead, target_ahead, in_place != 0
            )
        if held:
            _copy_long(held_target, held_source, held, stream, 0)
            pieces += 1
    fence()
    return pieces


@kernel
def list_pieces(tiles: Any, runs: Any, dims: Any, out: Any) -> int:
    """What :func:`copy_table` would copy, as rows; returns their number.

    Args:
        tiles: int64[T, 15].
        runs: int64[R, 7].
        dims: int64[3, 3], scratch of this call.
        out: int64[M, 5] for (source region, source offset, target region, target offset, bytes);
            rows beyond M are counted and not written, so that M = 0 only counts.
    """
    count = 0
    for t in range(len(tiles)):
        tile = tiles[t]
        piece, left = 0, 0
        end_source, end_target, held = 0, 0, False
        for r in range(len(runs)):
            source = tile[S_OFFSET] + (
                runs[r, R_S_BLOCK] * tile[S_BLOCK] + runs[r, R_S_TOKEN] * tile[S_TOKEN]
            )
            target = tile[T_OFFSET] + (
                runs[r, R_T_BLOCK] * tile[T_BLOCK] + runs[r, R_T_TOKEN] * tile[T_TOKEN]
            )
            if r == 0 or not same_shape(runs, r, r - 1):
                piece, left = melt(tile, runs[r], dims)
            if left == 0 and held and end_source == source and end_target == target:
                if count <= len(out):
                    out[count - 1, 4] += piece
            else:
                count = _list_box(tile, source, target, dims, left, piece, out, count)
            held = left == 0
            end_source, end_target = source + piece, target + piece
    return count


@kernel
def _list_box(
    tile: Any, source: int, target: int, dims: Any, left: int, piece: int, out: Any, count: int
) -> int:
    total = 1
    for dim in range(left):
        total *= dims[dim, 0]
    if count >= len(out):
        return count + total
    for index in range(total):
        if count + index >= len(out):
            break
        rest, source_at, target_at = index, source, target
        for dim in range(left):
            step = rest % dims[dim, 0]
            rest //= dims[dim, 0]
            source_at += step * dims[dim, 1]
            target_at += step * dims[dim, 2]
        row = out[count + index]
        row[0], row[1] = tile[S_REGION], source_at
        row[2], row[3] = tile[T_REGION], target_at
        row[4] = piece
    return count + total
