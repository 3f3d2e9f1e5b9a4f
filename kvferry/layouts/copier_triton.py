"""The copier on a GPU: tiles × runs between memories that one device addresses, in one launch.

Source and target are addresses: of this device, of a peer's memory that was mapped (CUDA IPC, or
another device with peer access), or of pinned host memory. Which threads move what is counted off
in **units**, the largest power of two up to 16 bytes to which a tile and its memory are aligned;
:func:`device_boxes` works that out on the host, a row per tile, so that the kernel
knows nothing but numbers, is compiled once, and one launch serves tiles of any shapes.

With ``TRITON_INTERPRET=1``, set before this module is imported, it runs on host memory.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvferry.layouts.copier import Int64s
from kvferry.layouts.kernels import DIM_DTYPE
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows, blank_runs, num_bytes

UNITS = 512
"""Units that a program moves at a time: four of 16 bytes per thread, all in flight at once."""

_OF_SIDE = ("", "_block_stride", "_token_stride")

BOX_DTYPE = np.dtype(
    [
        *((f"{side}{field}", np.int64) for side in ("source", "target") for field in _OF_SIDE),
        ("unit_bytes", np.int64),
        ("segment_units", np.int64),
        ("dims", DIM_DTYPE, 3),
    ]
)
"""A tile as the kernel reads it: its addresses in block 0, strides in bytes, the bytes of a unit
(1, 2, 4, 8 or 16), the units of a segment that lies without a gap on both sides, and the dims
around a segment, innermost on the target first; an extent of 0 stands for the tokens of the run."""

BOX_WORDS = BOX_DTYPE.itemsize // 8
RUN_WORDS = RUN_DTYPE.itemsize // 8

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
    with on_device(device, stream):
        tables = [boxes.view(np.int64), as_rows(runs, RUN_DTYPE).view(np.int64)]
        copy_kernel[(works, splits)](
            to_device(np.concatenate(tables), device), len(tiles), len(runs),
            BOX_WORDS=BOX_WORDS, RUN_WORDS=RUN_WORDS, UNITS=UNITS,
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
) -> npt.NDArray[np.void]:
    """What the kernel reads of each tile, as rows of :data:`BOX_DTYPE`."""
    boxes = np.zeros(len(tiles), dtype=BOX_DTYPE)
    for side, addresses in (("source", source_addresses), ("target", target_addresses)):
        regions = np.asarray(addresses, dtype=np.int64)
        boxes[side] = regions[tiles[f"{side}_region"]] + tiles[f"{side}_offset"]
        for name in ("block_stride", "token_stride"):
            boxes[f"{side}_{name}"] = tiles[f"{side}_{name}"]
    segment, dims = _merged(tiles)
    outwards = np.where(
        dims["extent"] == 1, np.iinfo(np.int64).max, np.abs(dims["target_stride"])
    ).argsort(axis=1)
    boxes["dims"] = np.take_along_axis(dims, outwards, axis=1)
    apart = [boxes[f"{side}{field}"] for side in ("source", "target") for field in _OF_SIDE]
    apart += [*dims["source_stride"].T, *dims["target_stride"].T, segment]
    boxes["unit_bytes"] = np.gcd(np.gcd.reduce(apart, axis=0), 16)
    boxes["segment_units"] = segment // boxes["unit_bytes"]
    return boxes


def _merged(tiles: Tiles) -> tuple[Int64s, npt.NDArray[np.void]]:
    """Bytes of each tile's segment, and its dims: ``DIM_DTYPE[tiles, 3]``.

    Elements and heads merge into the segment where they follow it without a gap on both sides.
    Tokens do not: how many they are is up to the run, and a warp's addresses are as dense without.
    """
    segment = tiles["itemsize"].copy()
    dims = np.zeros((len(segment), 3), dtype=DIM_DTYPE)
    for index, extent in enumerate(("elements", "heads")):
        dims[:, index]["extent"] = tiles[extent]
    for index, dim in enumerate(("element", "head", "token")):
        for side in ("source", "target"):
            dims[:, index][f"{side}_stride"] = tiles[f"{side}_{dim}_stride"]
    for index in (0, 1, 0):  # elements once more: they may lie around the heads
        around = dims[:, index]
        merges = (around["extent"] == 1) | (
            (around["source_stride"] == segment) & (around["target_stride"] == segment)
        )
        segment *= np.where(merges, around["extent"], 1)
        around[merges] = (1, 0, 0)
    return segment, dims


def _most_units(boxes: npt.NDArray[np.void], tokens: int) -> int:
    """Units of the largest box."""
    extents = boxes["dims"]["extent"]
    most = int(
        (boxes["segment_units"] * np.where(extents == 0, tokens, extents).prod(axis=1)).max()
    )
    if most >= 1 << 31:
        raise ValueError(f"runs: {most} units in one tile and run; cut it below 2147483648")
    return most


def on_device(device: torch.device, stream: "torch.cuda.Stream | None" = None) -> Any:
    """A context in which launches go to a device, and to a stream of it if one is given."""
    if stream is not None:
        return torch.cuda.stream(stream)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(table: Int64s, device: torch.device) -> torch.Tensor:
    """The numbers on the device, without waiting for what its stream holds."""
    found = torch.from_numpy(table)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def triton_kernel(function: Callable[..., Any], **options: Any) -> Any:
    """``triton.jit``, which has no types and would read those of a kernel as code."""
    return triton.jit(function, **options)


def triton_kernel_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel that is not compiled again for special values of these numbers."""
    return partial(triton_kernel, do_not_specialize=numbers)


@triton_kernel
def _move_words(
    from_U,
    to_U,
    mask_U,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGN: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Copies units of ``WORDS`` words each, from addresses to addresses."""
    words = tl.arange(0, WORDS)
    from_UW = tl.multiple_of(from_U.to(tl.pointer_type(WORD)), ALIGN)[:, None] + words[None, :]
    to_UW = tl.multiple_of(to_U.to(tl.pointer_type(WORD)), ALIGN)[:, None] + words[None, :]
    values_UW = tl.load(from_UW, mask=mask_U[:, None])
    if WAITS:
        tl.debug_barrier()
    tl.store(to_UW, values_UW, mask=mask_U[:, None])


@triton_kernel
def move_units(from_U, to_U, mask_U, unit_bytes, WAITS: tl.constexpr):
    """Copies units of 1, 2, 4, 8 or 16 bytes, from addresses to addresses.

    With ``WAITS`` every load of the program comes before any store, so that both may be the same
    bytes.
    """
    if unit_bytes == 16:
        _move_words(from_U, to_U, mask_U, tl.int64, 2, 16, WAITS)
    elif unit_bytes == 8:
        _move_words(from_U, to_U, mask_U, tl.int64, 1, 8, WAITS)
    elif unit_bytes == 4:
        _move_words(from_U, to_U, mask_U, tl.int32, 1, 4, WAITS)
    elif unit_bytes == 2:
        _move_words(from_U, to_U, mask_U, tl.int16, 1, 2, WAITS)
    else:
        _move_words(from_U, to_U, mask_U, tl.int8, 1, 1, WAITS)


@triton_kernel
def _extent_and_strides(dim, tokens, source_step, target_step):
    """Extent, source and target stride of one dim of a box; its extent 0 is the run's tokens."""
    extent, source, target = tl.load(dim), tl.load(dim + 1), tl.load(dim + 2)
    if extent == 0:
        extent = tokens
        source = source * source_step
        target = target * target_step
    return extent.to(tl.int32), source, target


@triton_kernel_for_any("num_tiles", "num_runs")
def copy_kernel(
    tables,  # num_tiles rows of BOX_DTYPE, then num_runs rows of RUN_DTYPE, as int64
    num_tiles,
    num_runs,
    BOX_WORDS: tl.constexpr,  # int64 of a row of BOX_DTYPE
    RUN_WORDS: tl.constexpr,
    UNITS: tl.constexpr,  # units that a program moves at a time
):
    """Copies a box of one tile and one run, or some of its units: ``U`` unit of a program.

    A unit is what one thread moves with one load and one store: 16 bytes where alignment allows.
    Units are counted in the order of the target's addresses, so that stores are coalesced.
    """
    work = tl.program_id(0)
    box = tables + (work // num_runs).to(tl.int64) * BOX_WORDS
    run = tables + num_tiles.to(tl.int64) * BOX_WORDS + (work % num_runs).to(tl.int64) * RUN_WORDS
    # The fields of a run, of a box: in the order of their dtypes.
    source_block, source_token = tl.load(run), tl.load(run + 1)
    target_block, target_token = tl.load(run + 2), tl.load(run + 3)
    tokens, source_step, target_step = tl.load(run + 4), tl.load(run + 5), tl.load(run + 6)
    source, source_block_stride, source_token_stride = (
        tl.load(box),
        tl.load(box + 1),
        tl.load(box + 2),
    )
    target, target_block_stride, target_token_stride = (
        tl.load(box + 3),
        tl.load(box + 4),
        tl.load(box + 5),
    )
    source += source_block * source_block_stride + source_token * source_token_stride
    target += target_block * target_block_stride + target_token * target_token_stride
    unit_bytes = tl.load(box + 6)
    segment = tl.load(box + 7).to(tl.int32)  # units that lie side by side on both sides
    count_0, source_0, target_0 = _extent_and_strides(box + 8, tokens, source_step, target_step)
    count_1, source_1, target_1 = _extent_and_strides(box + 11, tokens, source_step, target_step)
    count_2, source_2, target_2 = _extent_and_strides(box + 14, tokens, source_step, target_step)
    units = segment * count_0 * count_1 * count_2
    for first in range(tl.program_id(1) * UNITS, units, tl.num_programs(1) * UNITS):
        unit_U = first + tl.arange(0, UNITS)
        row_U = unit_U // segment
        rest_U = row_U // count_0
        at_U = (unit_U % segment) * unit_bytes
        dim_0_U = (row_U % count_0).to(tl.int64)
        dim_1_U = (rest_U % count_1).to(tl.int64)
        dim_2_U = (rest_U // count_1).to(tl.int64)
        from_U = source + at_U + dim_0_U * source_0 + dim_1_U * source_1 + dim_2_U * source_2
        to_U = target + at_U + dim_0_U * target_0 + dim_1_U * target_1 + dim_2_U * target_2
        mask_U = unit_U < units
        move_units(from_U, to_U, mask_U, unit_bytes, False)
