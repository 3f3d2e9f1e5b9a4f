"""Repacks in host memory: the copier, through a frame buffer that stays in the core's cache.

Each batch of frames is gathered into the buffer and scattered back while its cache lines are still
close, so the memory itself is read once and written once, and no line is fetched only to be
overwritten. As batches are scattered, the memory of the next ones is asked for, so that the core
does not wait for it. Streaming stores would be slower here: the lines are in the cache already.
"""

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layouts.copier import as_table
from kvferry.layouts.kernels import copy_table, kernel
from kvferry.layouts.repack import Repack
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE

Int64s: TypeAlias = npt.NDArray[np.int64]

BUFFER_BYTES = 128 << 10
"""Bytes of the buffer unless one frame needs more: with the frames themselves a core's share of
the second-level cache."""


def repack_on_host(
    repack: Repack, addresses: Sequence[int], block_ids: Int64s, threads: int = 1
) -> None:
    """Repacks blocks in place. Releases the interpreter lock.

    Args:
        repack: what to do.
        addresses: of each region in this process.
        block_ids: as :func:`~kvferry.layouts.repack.check_ids` gives them.
        threads: how many share the work, this one included.
    """
    frames = len(block_ids) // repack.frame_blocks
    if not (frames and repack.units):
        return
    frame_bytes = repack.block_bytes * repack.frame_blocks
    batch = min(frames, max(1, BUFFER_BYTES // frame_bytes))
    gather_runs, scatter_runs = repack.bind(block_ids, batch)
    tables = (
        np.array(addresses, dtype=np.int64),
        as_table(repack.gather, TILE_DTYPE),
        as_table(repack.scatter, TILE_DTYPE),
        as_table(gather_runs, RUN_DTYPE),
        as_table(scatter_runs, RUN_DTYPE),
    )
    batches = -(-frames // batch)
    # The next batch has room in the cache only beside small ones: of larger, it drives out this.
    reach = 2 if batch * frame_bytes <= BUFFER_BYTES else 1
    per_batch = (batch * repack.frame_blocks, batch * (len(scatter_runs) // frames))
    total = repack.units * batches
    threads = max(1, min(threads, total))
    edges = [total * number // threads for number in range(threads + 1)]

    def work(number: int) -> None:
        # Bytes of a frame may not share lines with another thread's.
        buffer = np.empty(frame_bytes * batch + 128, dtype=np.uint8)
        repack_table(
            *tables,
            np.array([*repack.tiles_per_unit, *per_batch, batches, reach], dtype=np.int64),
            edges[number],
            edges[number + 1],
            np.array([(buffer.ctypes.data + 63) & ~63], dtype=np.int64),
            np.empty((3, 3), dtype=np.int64),
        )

    others = [threading.Thread(target=work, args=(number,)) for number in range(1, threads)]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()


@kernel
def repack_table(
    addresses: Any,
    gather: Any,
    scatter: Any,
    gather_runs: Any,
    scatter_runs: Any,
    sizes: Any,
    first: int,
    last: int,
    buffer: Any,
    dims: Any,
) -> None:
    """Gathers and scatters some batches; a batch is some frames of one unit.

    Args:
        addresses: int64, address of each region.
        gather: int64[U * sizes[0], 15].
        scatter: int64[U * sizes[1], 15].
        gather_runs: int64[R, 7], of all frames; block places count from the start of a batch.
        scatter_runs: likewise.
        sizes: tiles per unit, runs per batch (gather, scatter each), batches per unit, and 2 if the
            next batch is asked for, else 1.
        first: first batch, counted over all units.
        last: end of the batches.
        buffer: int64[1], address of the frames' dense memory.
        dims: int64[3, 3], scratch of this call.
    """
    one, two, gather_each, scatter_each, batches, reach = sizes
    for work in range(first, last):
        unit, batch = work // batches, work % batches
        copy_table(
            addresses,
            buffer,
            gather[unit * one : (unit + 1) * one],
            gather_runs[batch * gather_each : (batch + 1) * gather_each],
            dims,
            False,
            0,
        )
        copy_table(
            buffer,
            addresses,
            scatter[unit * two : (unit + 1) * two],
            scatter_runs[batch * scatter_each : (batch + reach) * scatter_each],
            dims,
            False,
            scatter_each,
        )
