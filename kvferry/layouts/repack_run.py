"""How a repack is carried out: the copier copies to dense frames and back.

In host memory, each batch of frames is gathered into a buffer and scattered back while its cache
lines are still close. So the memory itself is read once and written once, and no line is fetched
only for overwriting. During the scatter of a batch, the memory of the next batches is prefetched,
so that the core need not wait. Streaming stores are slower here, measured: the lines are in the
cache already.

On a device, Triton's kernel does the repack in one pass (``repack_triton.py``). Other repacks go to
a scratch buffer in one launch of the device's copier, and come back in another.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvferry.layouts.arrays import Int64s
from kvferry.layouts.compiled import kernel
from kvferry.layouts.kernels import DIM_DTYPE, copy_table
from kvferry.layouts.repack import Repack
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows

if TYPE_CHECKING:
    import torch


BUFFER_BYTES = 128 << 10
"""Number of bytes of the buffer unless one frame needs more: together with the frames themselves, a
core's share of the second-level cache."""

SCRATCH_BYTES = 256 << 20
"""Number of bytes of scratch on a device unless one frame of all units needs more. Two launches
then move enough to keep a GPU busy, and an engine that has filled the GPU still has room."""


def repack_on_host(
    repack: Repack, addresses: Sequence[int], block_ids: Int64s, threads: int = 1
) -> None:
    """Repacks blocks in place. Releases the interpreter lock.

    Args:
        repack: the permutation to carry out.
        addresses: address of each region in this process.
        block_ids: block ids from :func:`~kvferry.layouts.repack.check_ids`.
        threads: number of threads that share the work, including the calling thread.
    """
    frames = len(block_ids) // repack.frame_blocks
    frame_bytes = repack.block_bytes * repack.frame_blocks
    batch = min(frames, max(1, BUFFER_BYTES // frame_bytes))
    gather_runs, scatter_runs = repack.bind(block_ids, batch)
    tables = (
        np.array(addresses, dtype=np.int64),
        as_rows(repack.gather, TILE_DTYPE),
        as_rows(repack.scatter, TILE_DTYPE),
        as_rows(gather_runs, RUN_DTYPE),
        as_rows(scatter_runs, RUN_DTYPE),
    )
    batches = -(-frames // batch)
    # Only a small next batch has room in the cache; a larger one would drive out the current batch.
    reach = 2 if batch * frame_bytes <= BUFFER_BYTES else 1
    per_batch = (batch * repack.frame_blocks, batch * (len(scatter_runs) // frames))
    total = repack.units * batches
    threads = max(1, min(threads, total))
    edges = [total * number // threads for number in range(threads + 1)]

    def work(number: int) -> None:
        # Bytes of a frame must not share lines with another thread's frame.
        buffer = np.empty(frame_bytes * batch + 128, dtype=np.uint8)
        repack_table(
            *tables,
            Batches(*repack.tiles_per_unit, *per_batch, batches, reach),
            edges[number],
            edges[number + 1],
            np.array([(buffer.ctypes.data + 63) & ~63], dtype=np.int64),
        )

    others = [threading.Thread(target=work, args=(number,)) for number in range(1, threads)]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()


def repack_on_device(
    repack: Repack,
    regions: Sequence["torch.Tensor"],
    block_ids: Int64s,
    copy: Callable[[Sequence["torch.Tensor"], Sequence["torch.Tensor"], Tiles, Runs], object],
) -> None:
    """Repacks blocks in place, on the device's current stream.

    Args:
        repack: the permutation to carry out.
        regions: tensors that begin where the regions begin, all on the same device.
        block_ids: block ids from :func:`~kvferry.layouts.repack.check_ids`.
        copy: the device's copier: (source regions, target regions, tiles, runs).
    """
    import torch

    frame_bytes = repack.block_bytes * repack.frame_blocks
    frames = len(block_ids) // repack.frame_blocks
    batch = min(frames, max(1, SCRATCH_BYTES // (repack.units * frame_bytes)))
    each = -(-batch * frame_bytes // 16) * 16  # bytes of a unit, aligned for 16-byte words
    scratch = torch.empty(repack.units * each, dtype=torch.uint8, device=regions[0].device)
    gather, scatter = repack.gather.copy(), repack.scatter.copy()
    starts = each * np.arange(repack.units)
    gather["target_offset"] += np.repeat(starts, repack.tiles_per_unit[0])
    scatter["source_offset"] += np.repeat(starts, repack.tiles_per_unit[1])
    for first in range(0, frames, batch):
        ids = block_ids[first * repack.frame_blocks : (first + batch) * repack.frame_blocks]
        gather_runs, scatter_runs = repack.bind(ids)
        copy(regions, [scratch], gather, gather_runs)
        copy([scratch], regions, scatter, scatter_runs)


class Batches(NamedTuple):
    """Division of the tables of a repack; a batch is some frames of one unit."""

    gather_tiles: int
    """Number of gather tiles of a unit."""
    scatter_tiles: int
    gather_runs: int
    """Number of gather runs of a batch."""
    scatter_runs: int
    per_unit: int
    """Number of batches of a unit."""
    reach: int
    """2 if the memory of the next batch is prefetched, else 1."""


@kernel
def repack_table(
    addresses: Any,
    gather: Any,
    scatter: Any,
    gather_runs: Any,
    scatter_runs: Any,
    batches: Batches,
    first: int,
    last: int,
    buffer: Any,
) -> None:
    """Gathers and scatters some batches.

    Args:
        addresses: int64, address of each region.
        gather: rows of ``TILE_DTYPE``, for all units.
        scatter: rows of ``TILE_DTYPE``, for all units.
        gather_runs: rows of ``RUN_DTYPE``, for all frames; block places count from the start of a
            batch.
        scatter_runs: rows of ``RUN_DTYPE``, for all frames; block places count from the start of a
            batch.
        batches: how many tiles and runs belong together.
        first: first batch, counted over all units.
        last: end of the batches.
        buffer: int64[1], address of the frames' dense memory.
    """
    dims = np.empty(3, DIM_DTYPE)
    for work in range(first, last):
        unit, batch = work // batches.per_unit, work % batches.per_unit
        copy_table(
            addresses,
            buffer,
            gather[unit * batches.gather_tiles : (unit + 1) * batches.gather_tiles],
            gather_runs[batch * batches.gather_runs : (batch + 1) * batches.gather_runs],
            dims,
            False,
            0,
        )
        copy_table(
            buffer,
            addresses,
            scatter[unit * batches.scatter_tiles : (unit + 1) * batches.scatter_tiles],
            scatter_runs[
                batch * batches.scatter_runs : (batch + batches.reach) * batches.scatter_runs
            ],
            dims,
            False,
            batches.scatter_runs,
        )
