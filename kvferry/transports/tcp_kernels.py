"""One chunk through a socket: Numba kernels around ``sendmsg(2)`` and ``recvmsg(2)``.

A chunk is tiles × runs on one side and dense bytes on the wire, in the order of
:mod:`kvferry.layouts.staging`. The chunk goes through the socket in **parts**. A part is a table of
at most :data:`MAX_ROWS` rows, in the order of the wire; a row is a contiguous piece of memory:

* **direct** rows lie in a region. A tile is direct if its pieces have :data:`DIRECT_BYTES` or more:
  only the system's own copy touches these bytes;
* **packed** rows lie in a buffer that stays in the second-level cache, because a row of the table
  costs the system as much as some hundred bytes. The source copies short pieces into the buffer
  before sending; the reader copies short pieces out of the buffer after receiving, in the same
  call.

No call waits unless the caller allows waits, and no call holds the interpreter lock. The kernels
check no bounds; see :mod:`kvferry.layouts.bounds`.
"""

import errno
import select
import socket
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import Int64s
from kvferry.layouts.compiled import kernel
from kvferry.layouts.kernels import (
    DIM_DTYPE,
    copy_table,
    count_pieces,
    merge_dims,
    piece_at,
    same_shape,
    source_at,
    target_at,
)
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE
from kvferry.transports.iovec import (
    INT32,
    INT64,
    IOVEC_DTYPE,
    MAX_ROWS,
    end_of,
    skip,
    system_call,
)

DIRECT_BYTES = 4096
"""Least bytes of a piece that is not copied in user space."""
PACK_BYTES = 256 << 10
"""Number of bytes of the buffer for shorter pieces: a quarter of the second-level cache of a
server's core. The system's copy into the socket needs as much again."""
MAX_PACK_BYTES = 4 << 20
"""Number of bytes of the buffer if one run of a tile is larger than :data:`PACK_BYTES`; a socket
may hold as much. If a run does not fit either, its short pieces get a row each."""
WAIT_MS = 1
"""Milliseconds of one wait. While data flows, the next bytes are some ten microseconds away, less
than a pass of the thread through Python takes."""
_FLAGS = 0x4040
"""``MSG_DONTWAIT | MSG_NOSIGNAL``."""

STATE_DTYPE = np.dtype(
    [
        ("tile", np.int64),
        ("run", np.int64),
        ("piece", np.int64),
        ("first_tile", np.int64),
        ("first_run", np.int64),
        ("row", np.int64),
        ("rows", np.int64),
        ("packed", np.int64),
        ("nbytes", np.int64),
        ("segments", np.int64),
        ("header", np.bool_),
        ("direct_bytes", np.int64),
        ("judged", np.int64),
        ("direct", np.bool_),
        ("stream", np.bool_),
    ]
)
"""How far a chunk is. ``tile``, ``run``, ``piece``: where the next part begins. ``first_tile``,
``first_run``: where this part began. ``row``, ``rows``: next row of this part, and number of its
rows. ``packed``, ``nbytes``: bytes of this part in the buffer, and in total. ``segments``: segments
read or written so far. ``header``: whether to send a header first. ``direct_bytes``: the chunk's
own :data:`DIRECT_BYTES`. ``judged``, ``direct``: the last tile that was judged, and whether that
tile is direct. ``stream``: whether stores from the buffer go around the cache."""


class Part(NamedTuple):
    """Tables and buffer for one chunk at a time; see :func:`new_part`."""

    rows: npt.NDArray[np.void]
    """``[MAX_ROWS]`` of ``IOVEC_DTYPE``."""
    state: npt.NDArray[np.void]
    """``[1]`` of ``STATE_DTYPE``."""
    dims: npt.NDArray[np.void]
    """``[3]``: scratch for the dims of a box."""
    header: Int64s
    """``[3]``: header to send before a chunk."""
    message: Int64s
    """``[7]``: the system's ``struct msghdr``."""
    watched: Int64s
    """``[1]``: the system's ``struct pollfd``."""
    base: Int64s
    """``[1]``: address at which the first byte of the whole chunk would lie in the buffer."""
    buffer: npt.NDArray[np.uint8]
    """``[nbytes]``: the buffer for short pieces."""


def new_part(nbytes: int = PACK_BYTES) -> Part:
    """Tables for one end of a connection, with a buffer of ``nbytes``."""
    return Part(
        rows=np.zeros(MAX_ROWS, dtype=IOVEC_DTYPE),
        state=np.zeros(1, dtype=STATE_DTYPE),
        dims=np.zeros(3, dtype=DIM_DTYPE),
        header=np.zeros(3, dtype=np.int64),
        message=np.zeros(7, dtype=np.int64),
        watched=np.zeros(1, dtype=np.int64),
        base=np.zeros(1, dtype=np.int64),
        buffer=np.zeros(nbytes, dtype=np.uint8),
    )


_sendmsg = system_call("sendmsg", INT64, INT32, INT64, INT32)
_recvmsg = system_call("recvmsg", INT64, INT32, INT64, INT32)
_poll = system_call("poll", INT32, INT64, INT64, INT32)


@kernel
def begin(part: Any, direct_bytes: int, stream: bool, header: bool) -> None:
    """Begins another chunk."""
    state = part.state[0]
    state.tile = state.run = state.piece = state.first_tile = state.first_run = 0
    state.row = state.rows = state.packed = state.nbytes = state.segments = 0
    state.direct_bytes, state.stream, state.judged = direct_bytes, stream, -1
    state.header = header


@kernel
def send(
    descriptor: int, part: Any, addresses: Any, tiles: Any, runs: Any, most: int, waits: int
) -> tuple[int, int]:
    """Sends about ``most`` bytes of a chunk at most, as many as the socket takes.

    Args:
        descriptor: descriptor of the socket.
        part: tables of this end of the connection.
        addresses: int64, address of each source region.
        tiles: rows of ``TILE_DTYPE`` whose target is the dense chunk.
        runs: rows of ``RUN_DTYPE`` whose target is the dense chunk.
        most: number of bytes after which no new call begins.
        waits: how often to wait up to :data:`WAIT_MS` until the socket takes more.

    Returns:
        Number of sent bytes, and the ``errno`` of a failed call, or 0.
    """
    state = part.state[0]
    sent = 0
    while sent < most:
        if state.row == state.rows and not fill(part, addresses, tiles, runs, True):
            break
        done, failed = _call(descriptor, part, True)
        if failed != 0:
            return sent, failed
        took(part, done)
        sent += done
        # While the socket is full, the next call would take little more, at the same cost.
        if state.row < state.rows:
            if waits == 0 or not _wait(descriptor, part, True):
                break
            waits -= 1
    return sent, 0


@kernel
def receive(
    descriptor: int, part: Any, addresses: Any, tiles: Any, runs: Any, most: int, waits: int
) -> tuple[int, int, int]:
    """Receives about ``most`` bytes of a chunk at most, as many as have come, into place.

    Args:
        descriptor: descriptor of the socket.
        part: tables of this end of the connection.
        addresses: int64, address of each target region.
        tiles: rows of ``TILE_DTYPE`` whose source is the dense chunk.
        runs: rows of ``RUN_DTYPE`` whose source is the dense chunk.
        most: number of received bytes after which no new call begins.
        waits: how often to wait up to :data:`WAIT_MS` until more has come.

    Returns:
        Number of received bytes. Number of bytes put in place, which may be larger if earlier bytes
            were still in the buffer. The ``errno`` of a failed call, or 0; -1 if the connection
            ended.
    """
    state = part.state[0]
    came, placed = 0, 0
    while came < most:
        if state.row == state.rows and not fill(part, addresses, tiles, runs, False):
            break
        done, failed = _call(descriptor, part, False)
        if failed != 0:
            return came, placed, failed
        came += done
        took(part, done)
        if state.row == state.rows:
            placed += state.nbytes
            place(part, addresses, tiles, runs)
        else:  # no more has come, or little more since
            if waits == 0 or not _wait(descriptor, part, False):
                break
            waits -= 1
    return came, placed, 0


@kernel
def _call(descriptor: int, part: Any, sending: bool) -> tuple[int, int]:
    """Number of transferred bytes, 0 if the call would wait; and an ``errno``, or -1 at the end."""
    state, message = part.state[0], part.message
    message[2] = part.rows.ctypes.data + 16 * state.row
    message[3] = state.rows - state.row
    if sending:
        done = _sendmsg(descriptor, message.ctypes.data, _FLAGS)
    else:
        done = _recvmsg(descriptor, message.ctypes.data, _FLAGS)
    if done > 0:
        return done, 0
    if done == 0:
        return 0, -1
    if done == -errno.EAGAIN or done == -errno.EINTR:
        return 0, 0
    return 0, -done


@kernel
def _wait(descriptor: int, part: Any, sending: bool) -> bool:
    """Whether the socket takes more, or more has come, within :data:`WAIT_MS`."""
    part.watched[0] = descriptor | (select.POLLOUT if sending else select.POLLIN) << 32
    ready: bool = _poll(part.watched.ctypes.data, 1, WAIT_MS) > 0
    return ready


@kernel
def took(part: Any, nbytes: int) -> None:
    """Counts ``nbytes`` of the part as sent or received."""
    state = part.state[0]
    state.row = skip(part.rows, state.row, nbytes)


@kernel
def fill(part: Any, addresses: Any, tiles: Any, runs: Any, sending: bool) -> bool:
    """Makes the table of the next part, and packs its bytes if sending; false at the end."""
    state = part.state[0]
    state.first_tile, state.first_run = state.tile, state.run
    state.row = state.rows = state.packed = state.nbytes = 0
    if state.header:
        state.header = False
        _add_row(part.header.ctypes.data, 24, part)
    while state.tile < len(tiles):
        tile = tiles[state.tile : state.tile + 1]
        if _is_direct(state.tile, tile[0], runs, part):
            whole = _add_pieces(tile[0], runs, part, addresses, sending)
        else:
            whole = _add_packed(tile, runs, part, addresses, sending)
        if not whole:
            break
        state.tile += 1
        state.run = state.piece = 0
    some: bool = state.rows > 0
    return some


@kernel
def place(part: Any, addresses: Any, tiles: Any, runs: Any) -> None:
    """Copies the bytes in the part's buffer into place."""
    state = part.state[0]
    packed = 0
    for t in range(state.first_tile, min(state.tile + 1, len(tiles))):
        tile = tiles[t : t + 1]
        first = state.first_run if t == state.first_tile else 0
        end = state.run if t == state.tile else len(runs)
        if first >= end or _is_direct(t, tile[0], runs, part):
            continue
        part.base[0] = part.buffer.ctypes.data + packed - source_at(tile[0], runs[first])
        state.segments += copy_table(
            part.base, addresses, tile, runs[first:end], part.dims, state.stream, 0
        )
        packed += (end - first) * _box_bytes(tile[0], runs)


@kernel
def _box_bytes(tile: Any, runs: Any) -> int:
    """Number of bytes of one run of a tile; all runs of a chunk have the same length."""
    nbytes: int = runs[0].tokens * tile.heads * tile.elements * tile.itemsize
    return nbytes


@kernel
def _is_direct(number: int, tile: Any, runs: Any, part: Any) -> bool:
    """Whether a tile is direct. The check looks at every run, so its result is kept."""
    state = part.state[0]
    if state.judged != number:
        state.judged, state.direct = number, _has_long_pieces(tile, runs, part)
    direct: bool = state.direct
    return direct


@kernel
def _has_long_pieces(tile: Any, runs: Any, part: Any) -> bool:
    """Whether the tile has long pieces, or one run does not fit into the buffer.

    If runs are contiguous, the mean length of pieces counts.
    """
    if _box_bytes(tile, runs) > len(part.buffer):
        return True
    least = part.state[0].direct_bytes
    pieces, nbytes = 0, 0
    end_source, end_target = 0, 0
    segment, left = 0, 0
    for r in range(len(runs)):
        source, target = source_at(tile, runs[r]), target_at(tile, runs[r])
        if r == 0 or not same_shape(runs[r], runs[r - 1]):
            segment, left = merge_dims(tile, runs[r], part.dims)
        if left > 0:
            break
        if r == 0 or source != end_source or target != end_target:
            pieces += 1
        end_source, end_target = source + segment, target + segment
        nbytes += segment
    long: bool = segment >= least if left > 0 else nbytes >= least * pieces
    return long


@kernel
def _add_pieces(tile: Any, runs: Any, part: Any, addresses: Any, sending: bool) -> bool:
    """Adds a tile piece by piece; false if the table is full before the end of the tile."""
    state, dims = part.state[0], part.dims
    segment, left = 0, 0
    for r in range(state.run, len(runs)):
        if r == state.run or not same_shape(runs[r], runs[r - 1]):
            segment, left = merge_dims(tile, runs[r], dims)
            _order_as_wire(dims, left, sending)
        if sending:
            base = addresses[tile.source_region] + source_at(tile, runs[r])
        else:
            base = addresses[tile.target_region] + target_at(tile, runs[r])
        for piece in range(state.piece, count_pieces(dims, left)):
            from_, to = piece_at(dims, left, piece)
            if not _add_row(base + (from_ if sending else to), segment, part):
                state.run, state.piece = r, piece
                return False
        state.piece = 0
    return True


@kernel
def _order_as_wire(dims: Any, left: int, sending: bool) -> None:
    """Orders the dims around a piece as in the dense chunk, innermost first.

    :func:`merge_dims` orders dims by the target, which is the dense chunk only when sending.
    """
    if sending:
        return
    for dim in range(1, left):
        place = dim
        while place > 0 and dims[place - 1].source_stride > dims[place].source_stride:
            extent, source = dims[place].extent, dims[place].source_stride
            target = dims[place].target_stride
            dims[place] = dims[place - 1]
            dims[place - 1].extent, dims[place - 1].source_stride = extent, source
            dims[place - 1].target_stride = target
            place -= 1


@kernel
def _add_packed(tile: Any, runs: Any, part: Any, addresses: Any, sending: bool) -> bool:
    """Adds as many runs of a tile as fit into the buffer; false if runs are left."""
    state = part.state[0]
    box = _box_bytes(tile[0], runs)
    first = state.run
    end = min(len(runs), first + (len(part.buffer) - state.packed) // box)
    if end == first or not _add_row(
        part.buffer.ctypes.data + state.packed, (end - first) * box, part
    ):
        return False
    if sending:
        part.base[0] = part.buffer.ctypes.data + state.packed - target_at(tile[0], runs[first])
        state.segments += copy_table(
            addresses, part.base, tile, runs[first:end], part.dims, False, 0
        )
    state.packed += (end - first) * box
    state.run = end
    whole: bool = end == len(runs)
    return whole


@kernel
def _add_row(address: int, nbytes: int, part: Any) -> bool:
    """Adds a row, or extends the last row; false if the table is full."""
    state, rows = part.state[0], part.rows
    if address != end_of(rows, state.rows):
        if state.rows == MAX_ROWS:
            return False
        rows[state.rows].address, rows[state.rows].nbytes = address, 0
        state.rows += 1
        state.segments += 1
    rows[state.rows - 1].nbytes += nbytes
    state.nbytes += nbytes
    return True


def warm(*, encrypted: bool = False) -> None:
    """Compiles the kernels, or loads them from disk; see :func:`kvferry.layouts.copier.warm`."""
    tiles = np.array([(0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 4, 1)], dtype=TILE_DTYPE)
    runs = np.array([(0, 0, 0, 0, 1, 1, 1)], dtype=RUN_DTYPE)
    source, target = np.arange(4, dtype=np.uint8), np.zeros(4, dtype=np.uint8)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for tcp, memory, through in ((ours, source, send), (theirs, target, receive)):
            part = new_part(4)
            begin(part, DIRECT_BYTES, stream=False, header=False)
            addresses = np.array([memory.ctypes.data], dtype=np.int64)
            if encrypted:  # tcp_tls calls these kernels separately
                fill(part, addresses, tiles, runs, through is send)
                took(part, 4)
                place(part, addresses, tiles, runs)
                begin(part, DIRECT_BYTES, stream=False, header=False)
            through(tcp.fileno(), part, addresses, tiles, runs, 4, 1)
    assert bytes(source) == bytes(target)
