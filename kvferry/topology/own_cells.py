"""The cells of a rank itself, as tiles."""

import numpy as np

from kvferry.layouts.tiles import TILE_DTYPE, Tiles
from kvferry.topology.description import RankMemory
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.plan import Piece, TransferPlan


def own_tiles(geometry: EngineGeometry, rank: int, memory: RankMemory) -> Tiles:
    """All cells that a rank holds, source and target side alike.

    With the runs of :func:`~kvferry.topology.binding.bind_own` they copy a request's cells to other
    memory that lies as this rank's does.

    Args:
        geometry: what the rank holds.
        rank: whose cells.
        memory: where they lie.

    Raises:
        ProtocolError: the memory lacks a tensor or a part.
    """
    pieces = tuple(
        Piece(rank, layer, share.heads, share.part)
        for layer in geometry.layers(rank)
        for share in geometry.shares(rank)
    )
    if not pieces:
        return np.empty(0, dtype=TILE_DTYPE)
    return TransferPlan(geometry, geometry, rank, pieces).lower({rank: memory}, memory)[rank]
