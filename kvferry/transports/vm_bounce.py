"""The bounce buffer of a thread that reads out of another process, and the call that fills it.

Spans are queued; :func:`call` reads what is queued with ``process_vm_readv(2)``, either into the
bounce buffer, a small memory that stays in the second-level cache, or straight into place.
"""
# ruff: noqa: ARG001  (Numba reads an intrinsic's signature; only the generated code has the values)

import errno
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kvferry.layouts.compiled import kernel
from kvferry.layouts.intrinsics import intrinsic
from kvferry.layouts.kernels import DIM_DTYPE
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles

Int64s = npt.NDArray[np.int64]

MAX_SPANS = 1024
"""Spans of one call: the kernel's ``UIO_MAXIOV``."""

SPAN_BYTES = 3072
"""What one more span costs, as bytes that could be copied meanwhile: 0.3 µs at 10 GB/s."""

PIECE_BYTES = 1536
"""The same for one more piece of memory here that a span goes to: 0.15 µs."""

BOUNCE_BYTES = (512 << 10) + SPAN_BYTES
"""Bytes of a bounce buffer: some of the second-level cache of a server's core, and room for the gap
before the last box. With half as much a read takes 2 % longer, with twice as much 2 % less."""

MAX_SHAPES = 256

IOVEC_DTYPE = np.dtype([("address", np.int64), ("nbytes", np.int64)])
"""The kernel's ``struct iovec``: bytes side by side in one process."""

SOURCE_DIM_DTYPE = np.dtype([("extent", np.int64), ("stride", np.int64), ("dim", np.int64)])
"""A dim of a box at the source: its stride in bytes, and 0 for token, 1 for head, 2 for element."""

STATE_DTYPE = np.dtype(
    [
        ("pid", np.int64),
        ("spans", np.int64),
        ("pieces", np.int64),
        ("used", np.int64),
        ("called", np.int64),
        ("boxes", np.int64),
        ("shapes", np.int64),
        ("tile", np.int64),
        ("region", np.int64),
        ("segments", np.int64),
        ("bytes_read", np.int64),
        ("error", np.int64),
        ("stream", np.bool_),
        ("direct", np.bool_),
    ]
)
"""How far a thread is: the process that it reads; spans that are queued for the next call, and the
pieces of memory here that they go straight to; bytes of the buffer that are taken, and those of
them that calls have filled; boxes in the buffer, and rows of ``Bounce.tiles`` in use; the number of
the tile of the last box, and the source region of the last span; segments written so far, and bytes
read so far, gaps included; the ``errno`` of a call that failed; whether stores from the buffer go
around the cache; whether what is queued goes straight to its place."""


class Bounce(NamedTuple):
    """What one thread works with: its buffer, and its queue of spans; see :func:`new_bounce`."""

    sources: Int64s
    """Address of each source region in the process that is read."""
    targets: Int64s
    """Address of each target region in this process."""
    remote: npt.NDArray[np.void]
    """``[MAX_SPANS]`` of ``IOVEC_DTYPE``: what the next call reads."""
    local: npt.NDArray[np.void]
    """``[MAX_SPANS]`` of ``IOVEC_DTYPE``: where that goes."""
    tiles: Tiles
    """``[S]``: the boxes in the buffer as tiles whose source is the buffer; a row per shape."""
    firsts: Int64s
    """``[S + 1]``: for each of them the first of its ``runs``, which end where the next begin."""
    runs: Runs
    """``[MAX_SPANS]``: a row per box; its source block is its byte offset in the buffer."""
    part: Runs
    """``[1]``: a run that is cut out of a longer one."""
    dims: npt.NDArray[np.void]
    """``[3]``: scratch of :func:`~kvferry.layouts.kernels.merge_dims`."""
    source_dims: npt.NDArray[np.void]
    """``[3]`` of ``SOURCE_DIM_DTYPE``: scratch for the dims of a box at the source."""
    strides: Int64s
    """``[3]``: strides of a box in the buffer, by token, head and element."""
    state: npt.NDArray[np.void]
    """``[1]`` of ``STATE_DTYPE``."""
    zero: Int64s
    """``[1]``: 0, the base of addresses in the buffer."""
    memory: npt.NDArray[np.uint8]
    """The buffer itself."""


def new_bounce(nbytes: int = BOUNCE_BYTES) -> Bounce:
    """For one thread. The buffer is written here, so that its pages are there."""
    return Bounce(
        sources=np.zeros(1, dtype=np.int64),
        targets=np.zeros(1, dtype=np.int64),
        remote=np.zeros(MAX_SPANS, dtype=IOVEC_DTYPE),
        local=np.zeros(MAX_SPANS, dtype=IOVEC_DTYPE),
        tiles=np.zeros(MAX_SHAPES, dtype=TILE_DTYPE),
        firsts=np.zeros(MAX_SHAPES + 1, dtype=np.int64),
        runs=np.zeros(MAX_SPANS, dtype=RUN_DTYPE),
        part=np.zeros(1, dtype=RUN_DTYPE),
        dims=np.zeros(3, dtype=DIM_DTYPE),
        source_dims=np.zeros(3, dtype=SOURCE_DIM_DTYPE),
        strides=np.zeros(3, dtype=np.int64),
        state=np.zeros(1, dtype=STATE_DTYPE),
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
def call(bounce: Any) -> None:
    """Reads the queued spans, with as many calls as the kernel needs for them."""
    state, remote, local = bounce.state[0], bounce.remote, bounce.local
    spans, num_local = state.spans, state.pieces
    if not state.direct:
        num_local = min(spans, 1)
        local[0].address = bounce.memory.ctypes.data + state.called
        local[0].nbytes = state.used - state.called
        state.called = state.used
    wanted = 0
    for span in range(spans):
        wanted += remote[span].nbytes
    first_remote, first_local = 0, 0
    while wanted > 0 and not state.error:
        done = _process_vm_readv(
            state.pid,
            local.ctypes.data + 16 * first_local,
            num_local - first_local,
            remote.ctypes.data + 16 * first_remote,
            spans - first_remote,
        )
        if done <= 0:
            state.error = _errno() if done < 0 else errno.EIO
            break
        wanted -= done
        state.bytes_read += done
        if wanted > 0:  # it stopped early, before a page that is not there, perhaps
            first_local = _skip(local, first_local, done)
            first_remote = _skip(remote, first_remote, done)
    state.spans = state.pieces = 0


@kernel
def _skip(spans: Any, first: int, nbytes: int) -> int:
    """Takes ``nbytes`` off the spans from ``first`` on; returns the first that is left."""
    while nbytes > 0:
        if nbytes < spans[first].nbytes:
            spans[first].address += nbytes
            spans[first].nbytes -= nbytes
            return first
        nbytes -= spans[first].nbytes
        first += 1
    return first
