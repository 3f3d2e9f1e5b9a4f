"""One chunk through a socket: Numba kernels around ``sendmsg(2)`` and ``recvmsg(2)``.

A chunk is tiles × runs on one side and dense bytes on the wire, in the order of
:mod:`kvferry.layouts.staging`. It goes through the socket in **parts**. A part is a table of at
most :data:`MAX_ROWS` rows, each some bytes side by side in memory, in the order of the wire:

* **direct** rows lie in a region. A tile is direct if its pieces have :data:`DIRECT_BYTES` or more:
  nothing but the system's own copy touches them;
* **packed** rows lie in a buffer that stays in the second-level cache, because a row of the table
  costs the system as much as some hundred bytes. The source copies short pieces there before it
  sends, the reader from there after it has received, each in the same call.

No call waits unless it is told to, and none holds the interpreter lock. Nothing here checks bounds;
see :mod:`kvferry.layouts.bounds`.
"""
# ruff: noqa: ARG001  (Numba reads an intrinsic's signature; only the generated code has the values)

import errno
import select
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kvferry.layouts.compiled import kernel
from kvferry.layouts.intrinsics import intrinsic
from kvferry.layouts.kernels import (
    DIM_DTYPE,
    copy_table,
    merge_dims,
    same_shape,
    source_at,
    target_at,
)
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE

Int64s = npt.NDArray[np.int64]

MAX_ROWS = 1024
"""Rows of one call: the kernel's ``UIO_MAXIOV``."""
DIRECT_BYTES = 4096
"""Bytes of a piece from which on it is not copied in user space."""
PACK_BYTES = 256 << 10
"""Bytes of the buffer for shorter pieces: a quarter of the second-level cache of a server's core,
of which the system's copy into the socket needs as much again."""
MAX_PACK_BYTES = 4 << 20
"""Bytes of that buffer where one run of a tile is larger than it: what a socket may hold too. Of a
run that does not fit either, short pieces get a row each."""
WAIT_MS = 1
"""Milliseconds of one wait. While data flows the next of it is some ten microseconds away, which is
less than a round of the thread in Python takes."""
_FLAGS = 0x4040
"""``MSG_DONTWAIT | MSG_NOSIGNAL``."""

ROW_DTYPE = np.dtype([("address", np.int64), ("nbytes", np.int64)])
"""The system's ``struct iovec``."""

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
"""How far a chunk is: the tile, the run and the piece of it with which the next part begins; the
tile and the run with which this part began; the next row of this part and how many it has; bytes of
the buffer that it takes, and bytes of all of it; segments that were read or written so far; whether
a header is to go before it; the chunk's own :data:`DIRECT_BYTES`; the tile that was judged last,
and whether it is direct; whether stores from the buffer go around the cache."""


class Part(NamedTuple):
    """What one chunk at a time goes through; see :func:`new_part`."""

    rows: npt.NDArray[np.void]
    """``[MAX_ROWS]`` of ``ROW_DTYPE``."""
    state: npt.NDArray[np.void]
    """``[1]`` of ``STATE_DTYPE``."""
    dims: npt.NDArray[np.void]
    """``[3]``: scratch for the dims of a box."""
    header: Int64s
    """``[3]``: what goes before a chunk that is sent."""
    message: Int64s
    """``[7]``: the system's ``struct msghdr``."""
    watched: Int64s
    """``[1]``: the system's ``struct pollfd``."""
    base: Int64s
    """``[1]``: address of what would be the first byte of the chunk in the buffer."""
    buffer: npt.NDArray[np.uint8]
    """For short pieces."""


def new_part(nbytes: int = PACK_BYTES) -> Part:
    """For one end of a connection; ``nbytes`` of buffer."""
    return Part(
        rows=np.zeros(MAX_ROWS, dtype=ROW_DTYPE),
        state=np.zeros(1, dtype=STATE_DTYPE),
        dims=np.zeros(3, dtype=DIM_DTYPE),
        header=np.zeros(3, dtype=np.int64),
        message=np.zeros(7, dtype=np.int64),
        watched=np.zeros(1, dtype=np.int64),
        base=np.zeros(1, dtype=np.int64),
        buffer=np.zeros(nbytes, dtype=np.uint8),
    )


_INT, _INT32 = ir.IntType(64), ir.IntType(32)


def _system_call(name: str, result: Any, arguments: tuple[Any, Any, Any]) -> Callable[..., Any]:
    """A function of the C library with three arguments: what it returns, or the negative of an
    ``errno``.
    """

    def call(_context: Any, first: Any, second: Any, third: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            known = builder.module.globals
            function = known.get(name) or ir.Function(
                builder.module, ir.FunctionType(result, arguments), name
            )
            errno = known.get("__errno_location") or ir.Function(
                builder.module, ir.FunctionType(_INT32.as_pointer(), []), "__errno_location"
            )
            narrowed = [
                arg if kind is _INT else builder.trunc(arg, kind)
                for arg, kind in zip(args, arguments, strict=True)
            ]
            done = builder.call(function, narrowed)
            if result is not _INT:
                done = builder.sext(done, _INT)
            zero = ir.Constant(_INT, 0)
            failed = builder.sub(zero, builder.sext(builder.load(builder.call(errno, [])), _INT))
            return builder.select(builder.icmp_signed("<", done, zero), failed, done)

        return types.int64(types.int64, types.int64, types.int64), generate

    return intrinsic(call)


_sendmsg = _system_call("sendmsg", _INT, (_INT32, _INT, _INT32))
_recvmsg = _system_call("recvmsg", _INT, (_INT32, _INT, _INT32))
_poll = _system_call("poll", _INT32, (_INT, _INT, _INT32))


@kernel
def begin(part: Any, direct_bytes: int, stream: bool, header: bool) -> None:
    """Another chunk."""
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
        descriptor: of the socket.
        part: of this end of the connection.
        addresses: int64, address of each source region.
        tiles: rows of ``TILE_DTYPE``, of which the target is the dense chunk.
        runs: rows of ``RUN_DTYPE``, likewise.
        most: no call is begun once so many bytes are sent.
        waits: how often it waits for up to :data:`WAIT_MS` until the socket takes more.

    Returns:
        Bytes that were sent, and the ``errno`` of a call that failed, or 0.
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
        # While it is full the next call would take a little more, and cost as much.
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
        descriptor: of the socket.
        part: of this end of the connection.
        addresses: int64, address of each target region.
        tiles: rows of ``TILE_DTYPE``, of which the source is the dense chunk.
        runs: rows of ``RUN_DTYPE``, likewise.
        most: no call is begun once so many bytes have come.
        waits: how often it waits for up to :data:`WAIT_MS` until more has come.

    Returns:
        Bytes that have come, those of them that are in place now, which may be more where some
        came before, and the ``errno`` of a call that failed, or 0; -1 if the connection ended.
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
        else:  # that is all that has come, and little more has since
            if waits == 0 or not _wait(descriptor, part, False):
                break
            waits -= 1
    return came, placed, 0


@kernel
def _call(descriptor: int, part: Any, sending: bool) -> tuple[int, int]:
    """Bytes that went through, none where it would have to wait; an ``errno``, or -1 at the end."""
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
    """So many bytes of the part went through the socket."""
    state, rows = part.state[0], part.rows
    while nbytes > 0:
        row = rows[state.row]
        if nbytes < row.nbytes:
            row.address += nbytes
            row.nbytes -= nbytes
            return
        nbytes -= row.nbytes
        state.row += 1


@kernel
def fill(part: Any, addresses: Any, tiles: Any, runs: Any, sending: bool) -> bool:
    """Makes the table of the next part, and packs for it if it is to be sent; false at the end."""
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
    """Copies what the part has in its buffer into place."""
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
    """Bytes of one run of a tile; the runs of a chunk have one length."""
    nbytes: int = runs[0].tokens * tile.heads * tile.elements * tile.itemsize
    return nbytes


@kernel
def _is_direct(number: int, tile: Any, runs: Any, part: Any) -> bool:
    """Whether a tile is; it takes a look at every run, so the answer is kept for the next part."""
    state = part.state[0]
    if state.judged != number:
        state.judged, state.direct = number, _has_long_pieces(tile, runs, part)
    direct: bool = state.direct
    return direct


@kernel
def _has_long_pieces(tile: Any, runs: Any, part: Any) -> bool:
    """Whether its pieces are long enough, in the mean where runs lie side by side, or one run has
    no room in the buffer.
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
    """Adds a tile piece by piece; false if the table is full before its end."""
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
        pieces = 1
        for dim in range(left):
            pieces *= dims[dim].extent
        for piece in range(state.piece, pieces):
            rest, address = piece, base
            for dim in range(left):
                step = rest % dims[dim].extent
                rest //= dims[dim].extent
                stride = dims[dim].source_stride if sending else dims[dim].target_stride
                address += step * stride
            if not _add_row(address, segment, part):
                state.run, state.piece = r, piece
                return False
        state.piece = 0
    return True


@kernel
def _order_as_wire(dims: Any, left: int, sending: bool) -> None:
    """Puts the dims around a piece in the order in which the dense chunk has them, innermost first.

    :func:`merge_dims` goes by the target, which is the chunk only where it is sent.
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
    """Adds as many runs of a tile as the buffer has room for; false if not all of them."""
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
    """Adds a row, or makes the last one longer; false if the table is full."""
    state, rows = part.state[0], part.rows
    last = state.rows - 1
    if last >= 0 and address == rows[last].address + rows[last].nbytes:
        rows[last].nbytes += nbytes
        state.nbytes += nbytes
        return True
    if last + 1 == MAX_ROWS:
        return False
    rows[last + 1].address, rows[last + 1].nbytes = address, nbytes
    state.rows = last + 2
    state.segments += 1
    state.nbytes += nbytes
    return True


def warm(*, encrypted: bool = False) -> None:
    """Compiles the kernels, or loads them from disk, as :func:`kvferry.layouts.copier.warm`."""
    tiles = np.array([(0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 4, 1)], dtype=TILE_DTYPE)
    runs = np.array([(0, 0, 0, 0, 1, 1, 1)], dtype=RUN_DTYPE)
    source, target = np.arange(4, dtype=np.uint8), np.zeros(4, dtype=np.uint8)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for tcp, memory, through in ((ours, source, send), (theirs, target, receive)):
            part = new_part(4)
            begin(part, DIRECT_BYTES, stream=False, header=False)
            addresses = np.array([memory.ctypes.data], dtype=np.int64)
            if encrypted:  # which goes through these one by one, see tcp_tls
                fill(part, addresses, tiles, runs, through is send)
                took(part, 4)
                place(part, addresses, tiles, runs)
                begin(part, DIRECT_BYTES, stream=False, header=False)
            through(tcp.fileno(), part, addresses, tiles, runs, 4, 1)
    assert bytes(source) == bytes(target)
