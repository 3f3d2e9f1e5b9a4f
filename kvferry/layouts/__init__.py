"""Where cells lie: layouts, and the copier that moves strided boxes between them."""

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
    "num_bytes",
]
