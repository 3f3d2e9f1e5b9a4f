"""The copier on a GPU: tiles × runs between memories that one device addresses, in one launch.

Source and target are addresses: of this device, of a peer's memory that was mapped (CUDA IPC, or
another device with peer access), or of pinned host memory. Which threads move what is counted off
in **units**, the largest power of two up to 16 bytes to which a tile and its memory are aligned;
:func:`device_boxes` works that out on the host, a row per tile, so that the kernel
(:mod:`kvferry.layouts.triton_kernels`) knows nothing but numbers, is compiled once, and one launch
serves tiles of any shapes.

With ``TRITON_INTERPRET=1``, set before this module is imported, it runs on host memory.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.layouts.copier import Int64s
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows, blank_runs, num_bytes
from kvferry.layouts.triton_kernels import BOX_COLUMNS, copy_kernel

UNITS = 512
"""Units that a program moves at a time: four of 16 bytes per thread, all in flight at once."""

_WARPS = 4
_PROGRAMS = 1 << 14
"""As many programs as keep every multiprocessor of a large GPU busy several times over."""


def copy_tiles_device(
    source_addresses: Sequence[int] | Int64s,
    target_addresses: Sequence[int] | Int64s,
    tiles: Tiles,
    runs: Runs,
    stream: "torch.cuda.Stream | None" = None,
    *,
    device: "torch.device | str | None" = None,
) -> int:
    """Enqueues the copy of ``tiles`` × ``runs``; returns the number of kernel launches, 0 or 1.

    Nothing is checked: see :func:`~kvferry.layouts.bounds.check_bounds`. Source and target bytes
    must not overlap. The tables may change when it has returned.

    Args:
        source_addresses: address of each source region, as the device sees it.
        target_addresses: address of each target region, as the device sees it.
        tiles: a 1-d array of ``TILE_DTYPE``.
        runs: a 1-d array of ``RUN_DTYPE``.
        stream: where it is enqueued; the device's current stream unless given.
        device: which device copies; the stream's, or the current CUDA device, unless given.

    Raises:
        ValueError: host memory without the interpreter, or 2³¹ units or more in one tile and run.
    """
    if not num_bytes(tiles, runs):
        return 0
    if device is None:
        device = torch.device("cuda") if stream is None else stream.device
    device = torch.device(device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("device: Triton reaches host memory with TRITON_INTERPRET=1 alone")
    boxes = device_boxes(source_addresses, target_addresses, tiles)
    most = _most_units(boxes, int(runs["tokens"].max()))
    works = len(tiles) * len(runs)
    splits = max(1, min(-(-most // UNITS), _PROGRAMS // works))
    with _on(device, stream):
        tables = np.concatenate([boxes.ravel(), as_rows(runs, RUN_DTYPE).view(np.int64)])
        copy_kernel[(works, splits)](
            _to_device(tables, device), len(tiles), len(runs), BOX_COLUMNS=BOX_COLUMNS, UNITS=UNITS,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return 1


def warm_device(stream: "torch.cuda.Stream") -> None:
    """Compiles the kernel for the device of ``stream``, so that the first copy does not wait.

    About a second at the first call on a machine, milliseconds later.
    """
    with torch.cuda.stream(stream):
        memory = torch.zeros(32, dtype=torch.uint8, device=stream.device)
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    tiles["target_offset"] = tiles["itemsize"] = 16
    tiles["heads"] = tiles["elements"] = 1
    runs = blank_runs(1)
    runs["tokens"] = 1
    copy_tiles_device([memory.data_ptr()], [memory.data_ptr()], tiles, runs, stream)
    stream.synchronize()


def device_boxes(
    source_addresses: Sequence[int] | Int64s,
    target_addresses: Sequence[int] | Int64s,
    tiles: Tiles,
) -> Int64s:
    """What the kernel reads of each tile: a row of int64, addresses and strides in bytes.

    ====== ==========================================================================
    column value
    ====== ==========================================================================
    0, 1   address in block 0 of the source, of the target
    2, 3   block stride of the source, of the target
    4, 5   token stride of the source, of the target
    6      bytes of a unit: 1, 2, 4, 8 or 16
    7      units of a segment, which lies without a gap on both sides
    8 – 16 the dims around a segment, innermost on the target first, each as its extent (0 stands
           for the tokens of the run), its source stride and its target stride
    ====== ==========================================================================
    """
    bases = [
        np.asarray(addresses, dtype=np.int64)[tiles[f"{side}_region"]] + tiles[f"{side}_offset"]
        for side, addresses in (("source", source_addresses), ("target", target_addresses))
    ]
    segment, dims = _merged(tiles)
    boxes = np.zeros((len(tiles), BOX_COLUMNS), dtype=np.int64)
    boxes[:, 0], boxes[:, 1] = bases
    for column, name in enumerate(("block_stride", "token_stride")):
        boxes[:, 2 + 2 * column] = tiles[f"source_{name}"]
        boxes[:, 3 + 2 * column] = tiles[f"target_{name}"]
    order = np.argsort(np.where(dims[:, :, 0] == 1, np.iinfo(np.int64).max, abs(dims[:, :, 2])))
    boxes[:, 8:] = np.take_along_axis(dims, order[:, :, None], axis=1).reshape(-1, 9)
    apart = np.concatenate([boxes[:, :6], dims[:, :, 1:].reshape(-1, 6), segment[:, None]], axis=1)
    boxes[:, 6] = np.gcd(np.gcd.reduce(apart, axis=1), 16)
    boxes[:, 7] = segment // boxes[:, 6]
    return boxes


def _merged(tiles: Tiles) -> tuple[Int64s, npt.NDArray[np.int64]]:
    """Bytes of each tile's segment, and int64[tiles, 3, 3]: extents and strides of its dims.

    Elements and heads merge into the segment where they follow it without a gap on both sides.
    Tokens do not: how many they are is up to the run, and a warp's addresses are as dense without.
    """
    segment = tiles["itemsize"].copy()
    dims = np.zeros((len(segment), 3, 3), dtype=np.int64)
    for index, extent in enumerate(("elements", "heads")):
        dims[:, index, 0] = tiles[extent]
    for index, dim in enumerate(("element", "head", "token")):
        dims[:, index, 1] = tiles[f"source_{dim}_stride"]
        dims[:, index, 2] = tiles[f"target_{dim}_stride"]
    for index in (0, 1, 0):  # elements once more: they may lie around the heads
        extents, source, target = dims[:, index].T
        merges = (extents == 1) | ((source == segment) & (target == segment))
        segment *= np.where(merges, extents, 1)
        dims[merges, index] = (1, 0, 0)
    return segment, dims


def _most_units(boxes: Int64s, tokens: int) -> int:
    """Units of the largest box."""
    extents = boxes[:, 8::3]
    most = int((boxes[:, 7] * np.where(extents == 0, tokens, extents).prod(axis=1)).max())
    if most >= 1 << 31:
        raise ValueError(f"runs: {most} units in one tile and run; cut it below 2147483648")
    return most


def _on(device: torch.device, stream: "torch.cuda.Stream | None") -> Any:
    if stream is not None:
        return torch.cuda.stream(stream)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _to_device(table: Int64s, device: torch.device) -> torch.Tensor:
    """The numbers on the device, without waiting for what its stream holds."""
    found = torch.from_numpy(table)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
