"""The copier on a GPU: tiles × runs between memories that one device addresses, in one launch.

Source and target are addresses: of this device, of a peer's mapped memory (CUDA IPC, or another
device with peer access), or of pinned host memory. The threads of a kernel share the bytes in
**units**. A unit is the largest power of two, up to 16 bytes, to which a tile and its memory are
aligned. :func:`write_boxes` computes the units on the host, with a row per tile, and
:class:`DeviceTiles` keeps the rows on the device, so that a copy needs only its runs.

There are two kernels. The first kernel takes all extents as numbers: it is compiled once, and a
single launch serves tiles of any shapes. The second kernel moves **short boxes**, which are too
small for a program each: several boxes per program, with extents that are compiled in, so that a
program loads less before moving bytes. The second kernel serves tiles of a single shape, with runs
that are known to be short.

With ``TRITON_INTERPRET=1``, set before this module is imported, the kernels run on host memory.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.layouts.arrays import Int64s
from kvferry.layouts.compiled import kernel
from kvferry.layouts.kernels import ANY_TOKENS, DIM_DTYPE, merge_dims
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows, blank_runs

UNITS = 1024
"""Number of units that a program of the first kernel moves at a time: four of 16 bytes per thread,
all in flight at once."""
STEPS = 3
"""Number of times after which a program of a long box leaves the rest to other programs."""

_OF_SIDE = ("", "_block_stride", "_token_stride")

BOX_DTYPE = np.dtype(
    [
        *((f"{side}{field}", np.int64) for side in ("source", "target") for field in _OF_SIDE),
        ("unit_bytes", np.int64),
        ("segment_units", np.int64),
        ("dims", DIM_DTYPE, 3),
    ]
)
"""A tile as the kernel reads it. First the addresses in block 0 and the strides, in bytes. Then the
number of bytes of a unit (1, 2, 4, 8 or 16), and the number of units of a segment, which lies
without a gap on both sides. Last the dims around a segment, innermost on the target first; an
extent of 0 stands for the tokens of the run."""

BOX_WORDS = BOX_DTYPE.itemsize // 8
RUN_WORDS = RUN_DTYPE.itemsize // 8

_ANY_RUN = blank_runs(1)
_ANY_RUN["tokens"] = ANY_TOKENS

_WARPS = 8
_PROGRAMS = 1 << 14
"""Number of programs up to which a launch splits boxes: enough to keep every multiprocessor of a
large GPU busy several times over."""

SHORT_PROGRAM_UNITS = 512
"""Number of units of a program of the second kernel: four of 16 bytes per thread."""
_SHORT_WARPS = 4
SHORT_UNITS = SHORT_PROGRAM_UNITS // 2
"""Largest number of units of a short box: two such boxes fill a program."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTiles:
    """Tiles as the kernels read them, on the device; shared by all copies of the tiles."""

    boxes: torch.Tensor
    """Rows of ``BOX_DTYPE`` as int64, on the device."""
    num_tiles: int
    token_units: int
    """Number of units of one token in the largest box."""
    short_shape: tuple[int, ...] = ()
    """Compiled-in numbers of short boxes: bytes of a unit, units of a segment, and extents of the
    three dims, 0 for the tokens. Empty for boxes that are not short."""
    most_tokens: int = 0
    """Number of tokens of the longest run for which the boxes are short."""
    compiled: dict[bool, Any] = field(default_factory=dict)
    """Compiled kernel by kind, ``True`` for short boxes: the kernel that was launched, as compiled
    for the device; ``None`` under the interpreter."""

    @classmethod
    def of(
        cls,
        source_addresses: Sequence[int] | Int64s,
        target_addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        device: torch.device,
        most_tokens: int = 0,
    ) -> "DeviceTiles":
        """Puts tiles on a device, without waiting for work on the device's current stream.

        Args:
            source_addresses: address of each source region, as the device sees it.
            target_addresses: address of each target region, as the device sees it.
            tiles: a 1-d array of ``TILE_DTYPE``; may change afterwards.
            device: device that copies the tiles.
            most_tokens: tokens of the longest expected run; 0 if unknown.
        """
        boxes = np.empty(len(tiles), dtype=BOX_DTYPE)
        units = write_boxes(source_addresses, target_addresses, tiles, boxes.view(np.int64))
        extents = boxes["dims"]["extent"]
        short: tuple[int, ...] = ()
        if len(boxes) and 0 < units * most_tokens <= SHORT_UNITS:
            shapes = np.column_stack([boxes["unit_bytes"], boxes["segment_units"], extents])
            if (shapes == shapes[0]).all():
                short = tuple(shapes[0].tolist())
        table = to_device(boxes.view(np.int64), device)
        return cls(table, len(boxes), units, short, most_tokens)

    def copy(
        self,
        table: torch.Tensor,
        num_runs: int,
        most_tokens: int,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        """Launches the copy of all tiles × runs.

        Args:
            table: rows of ``RUN_DTYPE`` as int64, on the device.
            num_runs: number of runs.
            most_tokens: tokens of the longest run.
            stream: stream for the copy, whose device's context is current; the device's current
                stream if ``None``.

        Raises:
            ValueError: 2³⁰ units or more in one tile and run.
        """
        most = self.token_units * most_tokens
        if most >= 1 << 30:  # the kernel counts up to a launch's share beyond, in 32 bits
            raise ValueError(f"runs: {most} units in one tile and run; cut it below 1073741824")
        works = self.num_tiles * num_runs
        is_short = bool(self.short_shape) and most_tokens <= self.most_tokens
        if is_short:
            units = SHORT_PROGRAM_UNITS
            programs = -(-works * self.token_units * self.most_tokens // units)
            constants = BOX_WORDS, RUN_WORDS, units, *self.short_shape, self.most_tokens
            grid, numbers = (programs, 1, 1), (works, num_runs, *constants)
            kernel, warps = copy_short_boxes, _SHORT_WARPS
        else:
            wanted = max(_PROGRAMS // works, most // (STEPS * UNITS))
            splits = max(1, min(-(-most // UNITS), wanted, 65535))  # CUDA takes no more
            grid, numbers = (works, splits, 1), (num_runs, BOX_WORDS, RUN_WORDS, UNITS)
            kernel, warps = copy_kernel, _WARPS
        compiled = self.compiled.get(is_short)
        if compiled is not None:
            handle = None if stream is None else stream.cuda_stream
            compiled[grid](self.boxes, table, *numbers, stream=handle)
            return
        # A launch through Triton takes three times as long as a launch of the compiled kernel.
        with on_device(self.boxes.device, stream):
            self.compiled[is_short] = kernel[grid](
                self.boxes, table, *numbers, num_warps=warps, enable_fp_fusion=False
            )


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

    The function checks nothing: see :func:`~kvferry.layouts.bounds.check_bounds`. Source and target
    bytes must not overlap. The tables may change after the call.

    Args:
        source_addresses: address of each source region, as the device sees it.
        target_addresses: address of each target region, as the device sees it.
        tiles: a 1-d array of ``TILE_DTYPE``.
        runs: a 1-d array of ``RUN_DTYPE``.
        stream: stream for the copy; the device's current stream if ``None``.
        device: device that copies; if ``None``, the stream's device, or the current CUDA device.

    Raises:
        ValueError: host memory without the interpreter, or 2³⁰ units or more in one tile and run.
    """
    if not len(tiles) or not len(runs):
        return 0
    if device is None:
        device = torch.device("cuda") if stream is None else stream.device
    device = torch.device(device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("device: Triton reaches host memory with TRITON_INTERPRET=1 alone")
    with on_device(device, stream):
        there = DeviceTiles.of(source_addresses, target_addresses, tiles, device)
        table = to_device(as_rows(runs, RUN_DTYPE).view(np.int64), device)
        there.copy(table, len(runs), int(runs["tokens"].max()))
    return 1


def warm_device(stream: "torch.cuda.Stream") -> None:
    """Compiles the kernel for boxes of any shape, for the device of ``stream``.

    Then the first copy need not wait. The first call on a machine takes about a second; later calls
    take milliseconds.
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


def write_boxes(
    source_addresses: Sequence[int] | Int64s,
    target_addresses: Sequence[int] | Int64s,
    tiles: Tiles,
    words: Int64s,
) -> int:
    """Writes a row of :data:`BOX_DTYPE` per tile, the numbers that the kernels read, as int64.

    Returns:
        Number of units of one token in the largest box; 0 without tiles.
    """
    units: int = _list_boxes(
        np.array(source_addresses, dtype=np.int64),
        np.array(target_addresses, dtype=np.int64),
        as_rows(tiles, TILE_DTYPE),
        _ANY_RUN,
        words.reshape(-1, BOX_WORDS),
    )
    return units


@kernel
def _list_boxes(
    source_addresses: Any, target_addresses: Any, tiles: Any, any_run: Any, out: Any
) -> int:
    """Writes the numbers that a GPU's kernel reads for each tile; see :data:`BOX_DTYPE`.

    Returns the number of units of one token in the largest box; 0 without tiles.

    Args:
        source_addresses: int64, address of each source region.
        target_addresses: int64, address of each target region.
        tiles: rows of ``TILE_DTYPE``.
        any_run: a single row of ``RUN_DTYPE``, with :data:`ANY_TOKENS`.
        out: a row of int64 per tile.
    """
    dims = np.empty(3, DIM_DTYPE)
    most = 0
    for t in range(len(tiles)):
        tile, row = tiles[t], out[t]
        row[0] = source_addresses[tile.source_region] + tile.source_offset
        row[1], row[2] = tile.source_block_stride, tile.source_token_stride
        row[3] = target_addresses[tile.target_region] + tile.target_offset
        row[4], row[5] = tile.target_block_stride, tile.target_token_stride
        segment, count = merge_dims(tile, any_run[0], dims)
        unit = math.gcd(segment, 16)
        for number in range(6):
            unit = math.gcd(unit, row[number])
        for dim in range(3):
            place = 8 + 3 * dim
            row[place], row[place + 1], row[place + 2] = 1, 0, 0
            if dim < count:
                row[place] = max(dims[dim].extent, 0)  # 0 for tokens
                row[place + 1] = dims[dim].source_stride
                row[place + 2] = dims[dim].target_stride
                unit = math.gcd(unit, math.gcd(row[place + 1], row[place + 2]))
        row[6], row[7] = unit, segment // unit
        most = max(most, row[7] * max(row[8], 1) * max(row[11], 1) * max(row[14], 1))
    return most


def on_device(device: torch.device, stream: "torch.cuda.Stream | None" = None) -> Any:
    """A context in which launches go to a device, and to a stream of the device if given."""
    if stream is not None:
        return torch.cuda.stream(stream)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(table: Int64s, device: torch.device) -> torch.Tensor:
    """The table on the device, without waiting for work on the device's stream."""
    found = torch.from_numpy(table)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def triton_kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Untyped ``triton.jit``, which would read a kernel's type hints as code."""
    return triton.jit(function, **options)


def triton_kernel_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a kernel that is not compiled again for special values of these numbers."""
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

    With ``WAITS``, every load of the program comes before any store, so source and target may be
    the same bytes.
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
    """Extent, source stride and target stride of a box dim; extent 0 means the run's tokens."""
    extent, source, target = tl.load(dim), tl.load(dim + 1), tl.load(dim + 2)
    if extent == 0:
        extent = tokens
        source = source * source_step
        target = target * target_step
    return extent.to(tl.int32), source, target


@triton_kernel
def _run_at(run):
    """Fields of a run, in the order of the dtype; block and token of the source first."""
    return (
        tl.load(run),
        tl.load(run + 1),
        tl.load(run + 2),
        tl.load(run + 3),
        tl.load(run + 4),
        tl.load(run + 5),
        tl.load(run + 6),
    )


@triton_kernel
def _box_at(box, source_block, source_token, target_block, target_token):
    """Start of a box at the blocks and tokens of a run, on the source and the target."""
    source = tl.load(box) + source_block * tl.load(box + 1) + source_token * tl.load(box + 2)
    target = tl.load(box + 3) + target_block * tl.load(box + 4) + target_token * tl.load(box + 5)
    return source, target


@triton_kernel_for_any("num_runs")
def copy_kernel(
    boxes,  # rows of BOX_DTYPE, as int64
    runs,  # num_runs rows of RUN_DTYPE, as int64
    num_runs,
    BOX_WORDS: tl.constexpr,  # number of int64 words in a row of BOX_DTYPE
    RUN_WORDS: tl.constexpr,
    UNITS: tl.constexpr,  # number of units that a program moves at a time
):
    """Copies a box of one tile and one run, or some of its units: ``U`` unit of a program.

    A unit is moved by a thread with one load and one store: 16 bytes if alignment allows. Units are
    counted in the order of the target's addresses, so that stores are coalesced.
    """
    work = tl.program_id(0)
    box = boxes + (work // num_runs).to(tl.int64) * BOX_WORDS
    run = runs + (work % num_runs).to(tl.int64) * RUN_WORDS
    source_block, source_token, target_block, target_token, tokens, source_step, target_step = (
        _run_at(run)
    )
    source, target = _box_at(box, source_block, source_token, target_block, target_token)
    unit_bytes = tl.load(box + 6)
    segment = tl.load(box + 7).to(tl.int32)  # units of a segment, contiguous on both sides
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


@triton_kernel
def _along(
    from_U,
    to_U,
    mask_U,
    dim_U,
    box_U,  # address of the dim's strides
    tokens_U,
    source_step_U,
    target_step_U,
    EXTENT: tl.constexpr,
):
    """Adds the index of a dim to addresses of short boxes; masks tokens that the run lacks."""
    if EXTENT != 1:
        source_U, target_U = tl.load(box_U + 1), tl.load(box_U + 2)
        if EXTENT == 0:
            source_U = source_U * source_step_U
            target_U = target_U * target_step_U
            mask_U = mask_U & (dim_U < tokens_U)
        from_U += dim_U * source_U
        to_U += dim_U * target_U
    return from_U, to_U, mask_U


@triton_kernel_for_any("num_works", "num_runs")
def copy_short_boxes(
    boxes,  # rows of BOX_DTYPE, as int64, of one shape
    runs,  # num_runs rows of RUN_DTYPE, as int64
    num_works,  # boxes times runs
    num_runs,
    BOX_WORDS: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    SEGMENT: tl.constexpr,  # number of units of a segment, contiguous on both sides
    EXTENT_0: tl.constexpr,  # extents of the dims around a segment; 0 stands for the tokens
    EXTENT_1: tl.constexpr,
    EXTENT_2: tl.constexpr,
    TOKENS: tl.constexpr,  # number of tokens of the longest run; tokens that a run lacks are masked
):
    """Copies boxes shorter than a program's share, end to end: ``U`` unit of a program.

    Two neighbouring programs may share a box. The numbers of a box and a run are loaded for each
    unit; neighbouring threads load the same numbers.
    """
    COUNT_0: tl.constexpr = TOKENS if EXTENT_0 == 0 else EXTENT_0
    COUNT_1: tl.constexpr = TOKENS if EXTENT_1 == 0 else EXTENT_1
    COUNT_2: tl.constexpr = TOKENS if EXTENT_2 == 0 else EXTENT_2
    BOX_UNITS: tl.constexpr = SEGMENT * COUNT_0 * COUNT_1 * COUNT_2
    first = tl.program_id(0).to(tl.int64) * UNITS
    place_U = (first % BOX_UNITS).to(tl.int32) + tl.arange(0, UNITS)
    work_U = (first // BOX_UNITS).to(tl.int32) + place_U // BOX_UNITS
    mask_U = work_U < num_works
    work_U = tl.minimum(work_U, num_works - 1)
    box_U = boxes + (work_U // num_runs).to(tl.int64) * BOX_WORDS
    run_U = runs + (work_U % num_runs).to(tl.int64) * RUN_WORDS
    (
        source_block_U,
        source_token_U,
        target_block_U,
        target_token_U,
        tokens_U,
        source_step_U,
        target_step_U,
    ) = _run_at(run_U)
    from_U, to_U = _box_at(box_U, source_block_U, source_token_U, target_block_U, target_token_U)
    unit_U = place_U % BOX_UNITS
    row_U = unit_U // SEGMENT
    rest_U = row_U // COUNT_0
    from_U += (unit_U % SEGMENT) * UNIT_BYTES
    to_U += (unit_U % SEGMENT) * UNIT_BYTES
    from_U, to_U, mask_U = _along(
        from_U, to_U, mask_U, (row_U % COUNT_0).to(tl.int64), box_U + 8,
        tokens_U, source_step_U, target_step_U, EXTENT_0,
    )  # fmt: skip
    from_U, to_U, mask_U = _along(
        from_U, to_U, mask_U, (rest_U % COUNT_1).to(tl.int64), box_U + 11,
        tokens_U, source_step_U, target_step_U, EXTENT_1,
    )  # fmt: skip
    from_U, to_U, mask_U = _along(
        from_U, to_U, mask_U, (rest_U // COUNT_1).to(tl.int64), box_U + 14,
        tokens_U, source_step_U, target_step_U, EXTENT_2,
    )  # fmt: skip
    move_units(from_U, to_U, mask_U, UNIT_BYTES, False)
