"""The bounce buffer of a thread that reads out of another process, and the call that fills it.

Spans are queued. :func:`call` reads the queued spans with ``process_vm_readv(2)``, either into the
bounce buffer, a small memory that stays in the second-level cache, or straight into place.
"""

import errno
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import Int64s
from kvferry.layouts.compiled import kernel
from kvferry.layouts.kernels import DIM_DTYPE
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles
from kvferry.transports.iovec import INT32, INT64, IOVEC_DTYPE, MAX_ROWS, skip, system_call

SPAN_BYTES = 3072
"""Cost of a further span, as bytes that could be copied meanwhile: 0.3 µs at 10 GB/s."""

PIECE_BYTES = 1536
"""Cost of a further local piece of memory for a span, in bytes: 0.15 µs at 10 GB/s."""

BOUNCE_BYTES = (512 << 10) + SPAN_BYTES
"""Number of bytes of a bounce buffer: a part of the second-level cache of a server's core, and room
for the gap before the last box. With half as many bytes a read takes 2 % longer, with twice as many
2 % less."""

MAX_SHAPES = 256

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
"""How far a thread is. ``pid``: the process that is read. ``spans``, ``pieces``: spans queued for
the next call, and local pieces for direct spans. ``used``, ``called``: bytes taken in the buffer,
and bytes of these that calls have filled. ``boxes``, ``shapes``: boxes in the buffer, and rows of
``Bounce.tiles`` in use. ``tile``, ``region``: number of the tile of the last box, and source region
of the last span. ``segments``, ``bytes_read``: segments written and bytes read so far, gaps
included. ``error``: ``errno`` of a failed call. ``stream``: whether stores from the buffer go
around the cache. ``direct``: whether queued spans go straight into place."""


class Bounce(NamedTuple):
    """Working memory of a thread: its buffer, and its queue of spans; see :func:`new_bounce`."""

    sources: Int64s
    """Address of each source region in the process that is read."""
    targets: Int64s
    """Address of each target region in this process."""
    remote: npt.NDArray[np.void]
    """``[MAX_ROWS]`` of ``IOVEC_DTYPE``: remote memory that the next call reads."""
    local: npt.NDArray[np.void]
    """``[MAX_ROWS]`` of ``IOVEC_DTYPE``: local memory that the next call writes."""
    tiles: Tiles
    """``[S]``: the boxes in the buffer as tiles whose source is the buffer; a row per shape."""
    firsts: Int64s
    """``[S + 1]``: for each row of ``tiles``, index of its first row of ``runs``; these rows end
    where the rows of the next tile begin."""
    runs: Runs
    """``[MAX_ROWS]``: a row per box; its source block is its byte offset in the buffer."""
    part: Runs
    """``[1]``: a run that is cut out of a longer run."""
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
    """The buffer."""


def new_bounce(nbytes: int = BOUNCE_BYTES) -> Bounce:
    """Working memory for one thread. Writes the buffer at once, so that its pages are present."""
    return Bounce(
        sources=np.zeros(1, dtype=np.int64),
        targets=np.zeros(1, dtype=np.int64),
        remote=np.zeros(MAX_ROWS, dtype=IOVEC_DTYPE),
        local=np.zeros(MAX_ROWS, dtype=IOVEC_DTYPE),
        tiles=np.zeros(MAX_SHAPES, dtype=TILE_DTYPE),
        firsts=np.zeros(MAX_SHAPES + 1, dtype=np.int64),
        runs=np.zeros(MAX_ROWS, dtype=RUN_DTYPE),
        part=np.zeros(1, dtype=RUN_DTYPE),
        dims=np.zeros(3, dtype=DIM_DTYPE),
        source_dims=np.zeros(3, dtype=SOURCE_DIM_DTYPE),
        strides=np.zeros(3, dtype=np.int64),
        state=np.zeros(1, dtype=STATE_DTYPE),
        zero=np.zeros(1, dtype=np.int64),
        memory=np.full(nbytes, 1, dtype=np.uint8),
    )


_process_vm_readv = system_call("process_vm_readv", INT64, INT32, INT64, INT64, INT64, INT64, INT64)


@kernel
def call(bounce: Any) -> None:
    """Reads the queued spans, with as many calls as the kernel needs."""
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
            0,
        )
        if done <= 0:
            state.error = -done if done < 0 else errno.EIO
            break
        wanted -= done
        state.bytes_read += done
        if wanted > 0:  # stopped early, perhaps before a page that is not there
            first_local = skip(local, first_local, done)
            first_remote = skip(remote, first_remote, done)
    state.spans = state.pieces = 0
