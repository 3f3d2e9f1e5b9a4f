"""Where cells lie: layouts, and the copier that moves strided boxes between them.

Lay out, tile, copy::

    Layout            the order of a tensor's dims           layout.py
    Tiles, Runs       strided boxes × block ids              tiles.py
    check_bounds      do they stay inside their memory?      bounds.py
    copy_tiles        copy them now; CopyJob in chunks       copier.py
    stage             through a dense buffer, for wires      staging.py
    expand            as single contiguous copies            copier.py
"""

from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.layout import LAYOUT_NAMES, Box, CellStrides, Layout
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, num_bytes

__all__ = [
    "LAYOUT_NAMES",
    "RUN_DTYPE",
    "TILE_DTYPE",
    "Box",
    "CellStrides",
    "Layout",
    "Runs",
    "Tiles",
    "check_bounds",
    "num_bytes",
]
