"""Where cells lie: layouts, and the copier that moves strided boxes between memories.

Lay out, tile, copy::

    Layout            the order of a tensor's dims           layout.py
    Tiles, Runs       strided boxes × block ids              tiles.py
    check_bounds      checks that copies stay in bounds      bounds.py
    copy_tiles        copies at once; CopyJob in chunks      copier.py, chunks.py
    copy_tiles_device copies on a GPU, in one launch         copier_triton.py
    stage             goes through a dense buffer, for wires staging.py
    expand            lists single contiguous copies         copier.py
    Repack            a permutation of blocks in place       repack.py
    run_repack        runs a repack on host or device        postprocess.py
    copy_kv_blocks    blocks between device and host         block_copies.py
"""

from kvferry.layouts.block_copies import copy_kv_blocks
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.layout import LAYOUT_NAMES, Box, CellStrides, Layout
from kvferry.layouts.postprocess import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    run_repack,
    zero_tail,
)
from kvferry.layouts.repack import Repack
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, blank_runs, num_bytes

__all__ = [
    "LAYOUT_NAMES",
    "RUN_DTYPE",
    "TILE_DTYPE",
    "Box",
    "CellStrides",
    "Layout",
    "Repack",
    "Runs",
    "Tiles",
    "blank_runs",
    "check_bounds",
    "copy_kv_blocks",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "num_bytes",
    "run_repack",
    "zero_tail",
]
