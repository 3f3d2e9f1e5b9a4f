"""Repacks on a GPU: one Triton kernel, one launch for all layers and all frames.

Where a frame fits on chip, one program holds it: it loads every row, waits until all of its
threads have, and stores every row where it belongs. Each byte is read once and written once, in
place. Larger frames go through a bounded staging buffer in two launches of the same kernel.

The kernel (:mod:`kvferry.layouts.triton_kernels`) knows no geometry: a small table of rows
(:mod:`kvferry.layouts.frame_rows`) says what goes where.

With ``TRITON_INTERPRET=1``, set before this module is imported, it runs on CPU tensors.
"""

import os
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.layouts.frame_rows import FrameRows, chunks_of, frame_rows
from kvferry.layouts.repack import Repack
from kvferry.layouts.triton_kernels import WORDS, repack_kernel

ON_CHIP_BYTES = 128 << 10
"""Largest frame that one program holds: 1,024 threads with 128 bytes each in registers."""

STAGING_BYTES = 64 << 20
"""Bytes of the staging buffer: enough to fill a GPU, little beside a KV cache."""

_THREAD_BYTES = 128
"""Bytes that a thread holds: 32 of its 64 registers at full occupancy."""

_THREAD_WORDS = 32
"""Words that a thread holds where they are short: each has an address of its own."""

_MOST_WARPS = 32

_STAGED_BYTES = 16 << 10
"""Bytes per program of a staged copy."""


@dataclass(frozen=True, slots=True)
class _Class:
    """Units that one table of rows serves."""

    rows: FrameRows
    tables: tuple[torch.Tensor, ...]
    """Source slots and offsets, target slots and offsets, on the device."""
    aligned: int
    """Bytes to which all offsets and strides are aligned, 16 at most."""
    regions: npt.NDArray[np.int64]
    """int64[units, chunks]"""
    offsets: npt.NDArray[np.int64]
    """int64[units, chunks], bytes."""
    strides: torch.Tensor
    """int64[chunks], bytes, on the device."""


_classes: weakref.WeakKeyDictionary[Repack, dict[torch.device, list[_Class]]] = (
    weakref.WeakKeyDictionary()
)


def repack_with_triton(
    repack: Repack, regions: Sequence[torch.Tensor], block_ids: npt.NDArray[np.int64]
) -> int:
    """Repacks blocks in place, on the current stream; returns the number of kernel launches.

    Args:
        repack: what to do. Its tables are sent to the device once.
        regions: tensors that begin where the regions begin, all on one device.
        block_ids: as :func:`~kvferry.layouts.repack.check_ids` gives them.

    Raises:
        ValueError: host memory, without the interpreter.
    """
    if not (len(block_ids) and repack.units):
        return 0
    device = regions[0].device
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("method: triton reaches host memory with TRITON_INTERPRET=1 alone")
    per_device = _classes.setdefault(repack, {})
    if device not in per_device:
        per_device[device] = _classes_of(repack, device)
    addresses = np.array([region.data_ptr() for region in regions], dtype=np.int64)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        ids = torch.from_numpy(block_ids).to(device)
        return sum(_launch(repack, found, addresses, ids) for found in per_device[device])


def _classes_of(repack: Repack, device: torch.device) -> list[_Class]:
    units: dict[Any, list[int]] = {}
    rows = {}
    alike: dict[bytes, FrameRows] = {}  # listing pieces costs more than comparing tiles
    for unit in range(repack.units):
        relative = _relative(repack, unit)
        if relative not in alike:
            alike[relative] = frame_rows(repack, unit)
        chunks = chunks_of(repack, unit)
        key = (alike[relative].key, tuple(chunk.block_stride for chunk in chunks))
        rows[key] = alike[relative]
        units.setdefault(key, []).append(unit)
    return [_class_of(repack, rows[key], members, device) for key, members in units.items()]


def _class_of(
    repack: Repack, rows: FrameRows, units: Sequence[int], device: torch.device
) -> _Class:
    columns = (rows.source_slots, rows.source_offsets, rows.target_slots, rows.target_offsets)
    chunks = [chunks_of(repack, unit) for unit in units]
    strides = [chunk.block_stride for chunk in chunks[0]]
    offsets = np.concatenate([rows.source_offsets, rows.target_offsets])
    return _Class(
        rows=rows,
        tables=tuple(torch.from_numpy(column.copy()).to(device) for column in columns),
        aligned=gcd(16, rows.row_bytes, *strides, int(np.gcd.reduce(offsets))),
        regions=np.array([[chunk.region for chunk in each] for each in chunks]),
        offsets=np.array([[chunk.offset for chunk in each] for each in chunks]),
        strides=torch.tensor(strides, dtype=torch.int64, device=device),
    )


def _relative(repack: Repack, unit: int) -> bytes:
    """The tiles of a unit without where it begins."""
    gather, scatter = (tiles.copy() for tiles in repack.unit_tiles(unit))
    region, offset = int(gather["source_region"][0]), int(gather["source_offset"][0])
    for tiles, side in ((gather, "source"), (scatter, "target")):
        tiles[f"{side}_region"] -= region
        tiles[f"{side}_offset"] -= offset
    return gather.tobytes() + scatter.tobytes()


def _launch(
    repack: Repack, found: _Class, addresses: npt.NDArray[np.int64], ids: torch.Tensor
) -> int:
    rows, row_bytes = len(found.rows.source_slots), found.rows.row_bytes
    bases = addresses[found.regions] + found.offsets
    aligned = gcd(found.aligned, int(np.gcd.reduce(bases, axis=None)))
    word = min(aligned, 8)
    frames = len(ids) // repack.frame_blocks
    works = bases.shape[0] * frames
    tables = (
        *found.tables,
        torch.from_numpy(bases).to(ids.device),
        found.strides,
        ids,
    )
    options = {
        "WORD": WORDS[word],
        "WORD_BYTES": word,
        "ALIGN": aligned,
        "COLS": row_bytes // word,
        "BLOCKS": repack.frame_blocks,
        "CHUNKS": bases.shape[1],
    }
    padded = 1 << (rows - 1).bit_length()
    on_chip = min(ON_CHIP_BYTES, _MOST_WARPS * 32 * _THREAD_WORDS * word)
    if padded * row_bytes <= on_chip:
        repack_kernel[(works, 1)](
            *tables, ids, 0, frames, rows, **options, ROWS=padded, FROM_CACHE=True, TO_CACHE=True,
            num_warps=_warps(padded * row_bytes, word), enable_fp_fusion=False,
        )  # fmt: skip
        return 1
    each = max(1, _STAGED_BYTES // row_bytes)
    batch = min(works, max(1, STAGING_BYTES // (rows * row_bytes)))
    staging = torch.empty(batch * rows * row_bytes, dtype=torch.uint8, device=ids.device)
    launches = 0
    for first in range(0, works, batch):
        grid = (min(batch, works - first), -(-rows // each))
        for from_cache in (True, False):
            repack_kernel[grid](
                *tables, staging, first, frames, rows, **options, ROWS=each, FROM_CACHE=from_cache,
                TO_CACHE=not from_cache, num_warps=_warps(each * row_bytes, word),
                enable_fp_fusion=False,
            )  # fmt: skip
            launches += 1
    return launches


def _warps(nbytes: int, word: int) -> int:
    """Warps of a program that holds so many bytes in such words; a power of two."""
    per_thread = min(_THREAD_BYTES, _THREAD_WORDS * word)
    return min(_MOST_WARPS, max(1, nbytes // (32 * per_thread)))
