"""The desk of a mover thread that reads out of another process, and the call that fills it.

Spans are queued; :func:`call` reads what is queued with ``process_vm_readv(2)``, either onto the
desk, a small memory that stays in the second-level cache, or straight into place.
"""
# ruff: noqa: ARG001  (Numba reads an intrinsic's signature; only the generated code has the values)

import errno
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kvferry.layouts.intrinsics import intrinsic
from kvferry.layouts.kernels import DIM_DTYPE, kernel
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles

Int64s = npt.NDArray[np.int64]

MAX_SPANS = 1024
"""Spans of one call: the kernel's ``UIO_MAXIOV``."""

SPAN_BYTES = 3072
"""What one more span costs, as bytes that could be copied meanwhile: 0.3 µs at 10 GB/s."""

DESK_BYTES = 512 << 10
"""Memory of a desk: half of the second-level cache of a server's core."""

MAX_SHAPES = 256

# What `Desk.state` holds, by index.
(
    PID,  # the process that is read
    STREAM,  # whether stores from the desk go around the cache
    DIRECT,  # whether what is queued goes straight to its place
    SPANS,  # queued for the next call
    USED,  # bytes of the desk that are taken
    CALLED,  # bytes of them that calls have filled
    BOXES,  # on the desk
    SHAPES,  # rows of `Desk.tiles` in use
    TILE,  # number of the tile of the last one
    REGION,  # source region of the last span
    SEGMENTS,  # written so far
    BYTES,  # read so far, gaps included
    ERROR,  # `errno` of a call that failed
) = range(13)


class Desk(NamedTuple):
    """What one mover thread works with; see :func:`new_desk`. Numbers are int64."""

    sources: Int64s
    """Address of each source region in the process that is read."""
    targets: Int64s
    """Address of each target region in this process."""
    remote: Int64s
    """``[MAX_SPANS, 2]``: address and bytes of what the next call reads (``struct iovec``)."""
    local: Int64s
    """``[MAX_SPANS, 2]``: where that goes."""
    tiles: Tiles
    """``[S]``: the boxes on the desk as tiles whose source is the desk; a row per shape."""
    firsts: Int64s
    """``[S + 1]``: for each of them the first of its ``runs``, which end where the next begin."""
    runs: Runs
    """``[MAX_SPANS]``: a row per box; its source block is its byte offset on the desk."""
    part: Runs
    """``[1]``: a run that is cut out of a longer one."""
    dims: npt.NDArray[np.void]
    """``[3]``: scratch of :func:`~kvferry.layouts.kernels.merge_dims`."""
    box: Int64s
    """``[3, 3]``: dims of a box at the source: extent, stride, number; see :func:`_lay_out`."""
    strides: Int64s
    """``[3]``: strides of a box on the desk, by token, head and element."""
    state: Int64s
    """Counters and flags, named above."""
    zero: Int64s
    """``[1]``: 0, the base of addresses on the desk."""
    memory: npt.NDArray[np.uint8]
    """The desk itself."""


def new_desk(nbytes: int = DESK_BYTES) -> Desk:
    """A desk for one thread. Its memory is written here, so that its pages are there."""
    return Desk(
        sources=np.zeros(1, dtype=np.int64),
        targets=np.zeros(1, dtype=np.int64),
        remote=np.zeros((MAX_SPANS, 2), dtype=np.int64),
        local=np.zeros((MAX_SPANS, 2), dtype=np.int64),
        tiles=np.zeros(MAX_SHAPES, dtype=TILE_DTYPE),
        firsts=np.zeros(MAX_SHAPES + 1, dtype=np.int64),
        runs=np.zeros(MAX_SPANS, dtype=RUN_DTYPE),
        part=np.zeros(1, dtype=RUN_DTYPE),
        dims=np.zeros(3, dtype=DIM_DTYPE),
        box=np.zeros((3, 3), dtype=np.int64),
        strides=np.zeros(3, dtype=np.int64),
        state=np.zeros(ERROR + 1, dtype=np.int64),
        zero=np.zeros(1, dtype=np.int64),
        memory=np.full(nbytes, 1, dtype=np.uint8),
    )


_INT, _INT32 = ir.IntType(64), ir.IntType(32)


@intrinsic
def _process_vm_readv(
    _context: Any, pid: Any, local: Any, num_local: Any, remote: Any, num_remote: Any
) -> Any:
    """The C function of that name, without its flags; tables by address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_INT, [_INT32, _INT, _INT, _INT, _INT, _INT])
        found = builder.module.globals.get("process_vm_readv")
        function = found or ir.Function(builder.module, kind, "process_vm_readv")
        return builder.call(
            function, [builder.trunc(args[0], _INT32), *args[1:], ir.Constant(_INT, 0)]
        )

    int64 = types.int64
    return int64(int64, int64, int64, int64, int64), generate


@intrinsic
def _errno(_context: Any) -> Any:
    """The C library's ``errno`` of this thread."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        kind = ir.FunctionType(_INT32.as_pointer(), [])
        found = builder.module.globals.get("__errno_location")
        function = found or ir.Function(builder.module, kind, "__errno_location")
        return builder.sext(builder.load(builder.call(function, [])), _INT)

    return types.int64(), generate


@kernel
def call(desk: Any) -> None:
    """Reads the queued spans, with as many calls as the kernel needs for them."""
    state, remote, local = desk.state, desk.remote, desk.local
    spans = num_local = state[SPANS]
    if not state[DIRECT]:
        num_local = min(spans, 1)
        local[0, 0] = desk.memory.ctypes.data + state[CALLED]
        local[0, 1] = state[USED] - state[CALLED]
        state[CALLED] = state[USED]
    wanted = 0
    for span in range(spans):
        wanted += remote[span, 1]
    first_remote, first_local = 0, 0
    while wanted > 0 and not state[ERROR]:
        done = _process_vm_readv(
            state[PID],
            local.ctypes.data + 16 * first_local,
            num_local - first_local,
            remote.ctypes.data + 16 * first_remote,
            spans - first_remote,
        )
        if done <= 0:
            state[ERROR] = _errno() if done < 0 else errno.EIO
            break
        wanted -= done
        state[BYTES] += done
        if wanted > 0:  # it stopped early, before a page that is not there, perhaps
            first_local = _skip(local, first_local, done)
            first_remote = _skip(remote, first_remote, done)
    state[SPANS] = 0


@kernel
def _skip(spans: Any, first: int, nbytes: int) -> int:
    """Takes ``nbytes`` off the spans from ``first`` on; returns the first that is left."""
    while nbytes > 0:
        if nbytes < spans[first, 1]:
            spans[first, 0] += nbytes
            spans[first, 1] -= nbytes
            return first
        nbytes -= spans[first, 1]
        first += 1
    return first
