"""A repack on a GPU in one pass: each frame is read once and written once, in place.

A program owns a frame of one unit, or a slice of the elements of all cells of a frame, which is a
separate permutation. The program loads all its bytes into registers, waits until all its threads
have loaded, and stores each cell in the right place. No other program touches these bytes, so no
scratch is needed::

    as it was filled   | cell 0 | cell 1 | cell 2 | ...   slots of the cache, in their order
                           │ load                         barrier
    as it must be      | head 0 of token 0 | ...          store

A single launch moves all frames of all units. Other kinds of repacks (several parts or sources,
different units, elements with gaps), and frames of more than :data:`MOST_UNITS` units, go through
scratch and the device's copier.
"""

import functools
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from kvferry.layouts.arrays import Int64s
from kvferry.layouts.copier_triton import (
    copy_tiles_device,
    move_units,
    on_device,
    triton_kernel,
    triton_kernel_for_any,
)
from kvferry.layouts.cuda_driver import driver_of
from kvferry.layouts.cuda_stream import UploadSlots
from kvferry.layouts.repack import Repack
from kvferry.layouts.repack_run import repack_on_device
from kvferry.layouts.tiles import Runs, Tiles

MOST_UNITS = 8192
"""Largest number of units (up to 16 bytes) of a program: half of a multiprocessor's registers."""

_PLACE = ("block_stride", "token_stride", "head_stride", "element_stride")


def repack_with_triton(
    repack: Repack, regions: Sequence[torch.Tensor], addresses: tuple[int, ...], block_ids: Int64s
) -> None:
    """Repacks blocks in place, on the device's current stream.

    Args:
        repack: the permutation to carry out.
        regions: tensors that begin where the regions begin, all on the same device.
        addresses: address of each region, as the device sees it.
        block_ids: block ids from :func:`~kvferry.layouts.repack.check_ids`.

    Raises:
        ValueError: host memory without the interpreter.
        HostError: no memory for the block ids can be pinned.
        TransferError: the device failed.
    """
    device = regions[0].device
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("device: Triton reaches host memory with TRITON_INTERPRET=1 alone")
    plan = _plan(repack, addresses, device)
    if plan is None:
        repack_on_device(repack, regions, block_ids, _copy)
        return
    frames = len(block_ids) // repack.frame_blocks
    slots = slots_of(device)
    if slots is None:
        plan.launch(torch.from_numpy(block_ids), frames, None)
        return
    # Triton asks torch for a handle alone; torch's object of a stream takes 10 µs to make.
    stream = driver.active.get_current_stream(device.index)
    with slots.driver:
        slot = slots.take(block_ids.nbytes)
        try:
            slots.send(slot, block_ids, stream)
            plan.launch(slot.device, frames, stream)
        finally:
            slot.event.record(stream)
            slots.give_back(slot)


_slots: dict[torch.device, UploadSlots] = {}
_slots_lock = threading.Lock()


def slots_of(device: torch.device, /) -> UploadSlots | None:
    """Slots for block ids, kept for as long as the process lives; ``None`` for host memory.

    The first call for a device waits for the device's current stream.

    Raises:
        HostError: there is no driver, or no memory can be pinned.
    """
    found = _slots.get(device)
    if found is not None or device.type == "cpu":
        return found
    with _slots_lock:
        if device not in _slots:
            made = UploadSlots(driver_of(device.index), device)
            torch.cuda.current_stream(device).synchronize()  # any stream may use the memory now
            _slots[device] = made
        return _slots[device]


def _copy(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], tiles: Tiles, runs: Runs
) -> None:
    from_, to = ([region.data_ptr() for region in regions] for regions in (sources, targets))
    copy_tiles_device(from_, to, tiles, runs, device=sources[0].device)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Numbers that all launches for one repack of the same tensors share."""

    bases: torch.Tensor
    """int64 on the device: address of the cells of block 0, for each unit."""
    units: int
    """Number of units."""
    block_stride: int
    """Number of bytes from a block to the next."""
    slices: int
    """Number of programs per frame."""
    constants: dict[str, Any]
    """Compile-time arguments of :func:`permute_frames`, in order."""
    compiled: list[Any] = field(default_factory=list)
    """The kernel as compiled for the device, once launched; empty under the interpreter."""

    def launch(self, block_ids: torch.Tensor, frames: int, stream: int | None) -> None:
        """Launches the permutation of all frames of all units.

        Args:
            block_ids: int64 on the device; begins with the ids of the frames' blocks.
            frames: number of frames.
            stream: handle of the device's current stream, whose context is current; ``None`` for
                host memory.
        """
        grid = (frames * self.slices, self.units, 1)
        numbers = self.block_stride, *self.constants.values()
        if self.compiled:  # a launch through Triton takes three times as long
            # The launcher asks the driver about each tensor, and takes an address as it is.
            addresses = self.bases.data_ptr(), block_ids.data_ptr()
            self.compiled[0][grid](*addresses, *numbers, stream=stream)
            return
        warps = 8 if self.constants["UNITS"] >= 4096 else 4
        with on_device(self.bases.device):
            made = permute_frames[grid](
                self.bases, block_ids, *numbers, num_warps=warps, enable_fp_fusion=False
            )
        if made is not None:
            self.compiled.append(made)


@functools.lru_cache(maxsize=1024)  # a caller may postprocess layer by layer, K and V apart
def _plan(repack: Repack, addresses: tuple[int, ...], device: torch.device) -> _Plan | None:
    """Plan of a repack in one pass; ``None`` if one pass is impossible."""
    gather, scatter = repack.gather, repack.scatter
    fields = [f"source_{name}" for name in _PLACE] + ["heads", "elements", "itemsize"]
    first = gather[0]
    size = int(first["itemsize"])
    alike = all((gather[name] == first[name]).all() for name in fields)
    dense = all(
        int(row[f"{side}_element_stride"]) == size
        for row, side in ((first, "source"), (first, "target"), (scatter[0], "source"))
    )
    if repack.tiles_per_unit != (1, 1) or not alike or not dense:
        return None
    heads, cell = int(first["heads"]), int(first["elements"]) * size
    places = [int(first[f"source_{name}"]) for name in _PLACE[:3]]
    bases = np.array(addresses, np.int64)[gather["source_region"]] + gather["source_offset"]
    unit = math.gcd(16, cell, *places, *map(int, bases))
    cells, words = repack.frame_tokens * heads, cell // unit
    fits = [
        each for each in (words, 8, 4, 2, 1) if words % each == 0 and cells * each <= MOST_UNITS
    ]
    if not fits:
        return None
    constants = {
        "HEADS": heads,
        "FRAME": repack.frame_tokens,
        "BLOCK": repack.block_size,
        "HELD": repack.held_block_size,
        "TOKEN_STRIDE": places[1],
        "HEAD_STRIDE": places[2],
        "UNIT_BYTES": unit,
        "SLICE": fits[0],
        "SLICES": words // fits[0],
        "UNITS": triton.next_power_of_2(cells * fits[0]),
        # With one head or one token, either order is right.
        "BY_TOKENS": int(first["target_token_stride"]) > int(first["target_head_stride"]),
        "HELD_BY_TOKENS": int(scatter[0]["source_token_stride"])
        > int(scatter[0]["source_head_stride"]),
    }
    there = torch.from_numpy(bases).to(device)
    return _Plan(there, len(bases), places[0], words // fits[0], constants)


@triton_kernel
def _split(cell_U, HEADS: tl.constexpr, TOKENS: tl.constexpr, BY_TOKENS: tl.constexpr):
    """Block, token and head of cells that lie block by block, inside by tokens or by heads."""
    within_U = cell_U % (TOKENS * HEADS)
    if BY_TOKENS:
        token_U, head_U = within_U // HEADS, within_U % HEADS
    else:
        token_U, head_U = within_U % TOKENS, within_U // TOKENS
    return cell_U // (TOKENS * HEADS), token_U, head_U


@triton_kernel_for_any("block_stride")
def permute_frames(
    bases,  # int64 per unit: address of the unit's cells of block 0
    block_ids,  # int64 per block; the blocks of a frame are adjacent
    block_stride,  # bytes
    HEADS: tl.constexpr,
    FRAME: tl.constexpr,  # tokens of a frame
    BLOCK: tl.constexpr,  # tokens of a block of the cache
    HELD: tl.constexpr,  # tokens of a block as filled by the source
    TOKEN_STRIDE: tl.constexpr,  # bytes, in the cache
    HEAD_STRIDE: tl.constexpr,
    UNIT_BYTES: tl.constexpr,  # bytes that a thread moves with a load and a store
    SLICE: tl.constexpr,  # units of a cell that a program moves
    SLICES: tl.constexpr,  # programs per frame
    UNITS: tl.constexpr,  # units of a program, rounded up to a power of two
    BY_TOKENS: tl.constexpr,  # whether slots of the cache were filled token by token
    HELD_BY_TOKENS: tl.constexpr,  # whether the cells came token by token
):
    """Permutes one slice of one frame of one unit: ``U`` unit of the program."""
    BLOCKS: tl.constexpr = FRAME // BLOCK
    ids = block_ids + (tl.program_id(0) // SLICES).to(tl.int64) * BLOCKS
    base = tl.load(bases + tl.program_id(1))
    base += (tl.program_id(0) % SLICES) * (SLICE * UNIT_BYTES)
    unit_U = tl.arange(0, UNITS)
    mask_U = unit_U < FRAME * HEADS * SLICE
    cell_U = unit_U // SLICE
    at_U = base + (unit_U % SLICE) * UNIT_BYTES
    # The slot in which a cell lies, and the cell's token and head.
    number_U, slot_U, slot_head_U = _split(cell_U, HEADS, BLOCK, BY_TOKENS)
    held_U, token_U, head_U = _split(cell_U, HEADS, HELD, HELD_BY_TOKENS)
    token_U += held_U * HELD
    if BLOCKS == 1:
        block_U = tl.load(ids) * block_stride
        target_block_U = block_U
    else:
        block_U = tl.load(ids + number_U, mask=mask_U) * block_stride
        target_block_U = tl.load(ids + token_U // BLOCK, mask=mask_U) * block_stride
    slot_at_U = slot_U.to(tl.int64) * TOKEN_STRIDE + slot_head_U.to(tl.int64) * HEAD_STRIDE
    token_at_U = (token_U % BLOCK).to(tl.int64) * TOKEN_STRIDE + head_U.to(tl.int64) * HEAD_STRIDE
    from_U = at_U + block_U + slot_at_U
    to_U = at_U + target_block_U + token_at_U
    move_units(from_U, to_U, mask_U, UNIT_BYTES, True)
