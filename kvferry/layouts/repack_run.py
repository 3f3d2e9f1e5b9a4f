"""How a repack is carried out: the copier, to dense frames and back.

In host memory each batch of frames is gathered into a buffer and scattered back while its cache
lines are still close, so the memory itself is read once and written once, and no line is fetched
only to be overwritten. As batches are scattered, the memory of the next ones is asked for, so that
the core does not wait for it. Streaming stores are slower here, measured: the lines are in the
cache already.

On a device Triton's kernel does it in one pass (``repack_triton.py``). What it leaves goes to a
scratch buffer in one launch of the device's copier and comes back in another.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layouts.compiled import kernel
from kvferry.layouts.kernels import DIM_DTYPE, copy_table
from kvferry.layouts.repack import Repack
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows

if TYPE_CHECKING:
    import torch

Int64s: TypeAlias = npt.NDArray[np.int64]

BUFFER_BYTES = 128 << 10
"""Bytes of the buffer unless one frame needs more: with the frames themselves a core's share of
the second-level cache."""

SCRATCH_BYTES = 256 << 20
"""Bytes of scratch on a device unless one frame of all units needs more: two launches then move
enough to keep a GPU busy, and an engine that has filled the GPU has room for it."""


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
        repack: what to do.
        regions: tensors that begin where the regions begin, all on one device.
        block_ids: as :func:`~kvferry.layouts.repack.check_ids` gives them.
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
    """How the tables of a repack are divided; a batch is some frames of one unit."""

    gather_tiles: int
    """Of a unit."""
    scatter_tiles: int
    gather_runs: int
    """Of a batch."""
    scatter_runs: int
    per_unit: int
    """Batches of a unit."""
    reach: int
    """2 if the memory of the next batch is asked for, else 1."""


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
        gather: rows of ``TILE_DTYPE``, of all units.
        scatter: likewise.
        gather_runs: rows of ``RUN_DTYPE``, of all frames; block places count from the start of a
            batch.
        scatter_runs: likewise.
        batches: how many of each belong together.
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
