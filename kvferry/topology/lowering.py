"""Lowering: from the pieces of a plan to strided tiles, which say where the moving cells lie.

A plan says, as pieces, which cells of which layers move. This module looks up each piece in the
memory of its source rank and of its target rank, which gives one tile per part. Parts that follow
each other in memory on both sides, such as packed k and v, become one tile.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.errors import BoundsError, ProtocolError
from kvferry.layouts.tiles import TILE_DTYPE, Tiles
from kvferry.topology.group import CROSS_LAYER_NAME, GroupGeometry
from kvferry.topology.sharding import Int64s
from kvferry.topology.tensors import RankMemory, TensorMemory, TensorPart


@dataclass(frozen=True, slots=True)
class Piece:
    """Cells of a layer and some neighbouring heads or channels that a source rank gives.

    The source rank gives only the tokens that it holds, see :meth:`GroupGeometry.token_shard`.
    """

    source_rank: int
    layer: int
    """Index of the layer in the model."""
    heads: range
    """Indices of the heads or channels in the model."""
    part: str | None = None
    """The section of a state that contains the channels; ``None`` for heads of all parts."""

    def has(self, part: TensorPart) -> bool:
        """Whether the piece contains cells of a part."""
        return self.part in (None, part.name)


class Place(NamedTuple):
    """The place of a piece's cells on a side: the fields of ``TILE_DTYPE`` for this side."""

    region: int
    offset: int
    block_stride: int
    token_stride: int
    head_stride: int
    element_stride: int


class Places:
    """Finds the places of cells in the memory of a rank."""

    def __init__(self, geometry: GroupGeometry, rank: int, memory: RankMemory) -> None:
        self._geometry = geometry
        self._rank = rank
        self._layers = geometry.layers(rank)
        self._heads = {part.name: geometry.heads(rank, part.name) for part in geometry.parts}
        self._tensors = {tensor.name: tensor for tensor in memory.tensors}
        self._suffixes = {
            part.name: kind.suffix for kind in geometry.tensor_kinds for part in kind.parts
        }
        self.itemsizes = {part.name: part.itemsize for part in geometry.parts}
        """Number of bytes per element of each part."""

    def place(self, layer: int, first_head: int, part: str) -> Place:
        """The place of a part of a layer, from ``first_head`` on.

        Raises:
            ProtocolError: the memory lacks the tensor or the part.
        """
        tensor, index = self._tensor(layer, self._suffixes[part])
        strides = tensor.parts.get(part)
        if strides is None:
            raise ProtocolError(
                f"memory of rank {self._rank}: tensor {tensor.name!r} has no part {part!r}"
            )
        offset = tensor.offset + strides.offset + strides.layer * index
        offset += strides.head * (first_head - self._heads[part].start)
        return Place(
            tensor.region, offset, strides.block, strides.token, strides.head, strides.element
        )

    def _tensor(self, layer: int, suffix: str) -> tuple[TensorMemory, int]:
        """The tensor that contains a layer, and the index of the layer in this tensor."""
        name, cross = self._geometry.layer_name(layer) + suffix, CROSS_LAYER_NAME + suffix
        if name in self._tensors:
            return self._tensors[name], 0
        if cross in self._tensors:
            return self._tensors[cross], self._layers.index(layer)
        raise ProtocolError(
            f"memory of rank {self._rank}: has no tensor {name!r} nor {cross!r}, only "
            f"{', '.join(sorted(self._tensors)) or 'none'}"
        )


def lower_pieces(
    pieces: Sequence[Piece], parts: Sequence[TensorPart], source: Places, target: Places
) -> Tiles:
    """The tiles of the pieces that a source rank gives, piece by piece.

    If the dtype is converted, ``itemsize`` is the source's item size, and the target's strides are
    in the target's bytes.

    Args:
        pieces: the moving pieces.
        parts: the moving parts of a cell.
        source: the memory of the source rank.
        target: the memory of the target rank.

    Raises:
        ProtocolError: a memory lacks a tensor or a part.
        BoundsError: a number does not fit 64 bits.
    """
    rows = [
        (number, piece, part)
        for number, piece in enumerate(pieces)
        for part in parts
        if piece.has(part)
    ]
    tiles = np.empty(len(rows), dtype=TILE_DTYPE)
    for side, places in (("source", source), ("target", target)):
        found = [places.place(piece.layer, piece.heads.start, part.name) for _, piece, part in rows]
        for field in Place._fields:
            _fill(tiles, f"{side}_{field}", [getattr(place, field) for place in found])
    _fill(tiles, "heads", [len(piece.heads) for _, piece, _ in rows])
    _fill(tiles, "elements", [part.head_size for _, _, part in rows])
    _fill(tiles, "itemsize", [source.itemsizes[part.name] for _, _, part in rows])
    target_itemsizes = np.array([target.itemsizes[part.name] for _, _, part in rows], np.int64)
    numbers = np.array([number for number, _, _ in rows], np.int64)
    return _fused(tiles, numbers, target_itemsizes)


def _fill(tiles: Tiles, field: str, values: Iterable[int]) -> None:
    try:
        tiles[field] = values
    except OverflowError as error:
        raise BoundsError(f"{field}: a memory has numbers that do not fit 64 bits") from error


def _fused(tiles: Tiles, pieces: Int64s, target_itemsizes: Int64s) -> Tiles:
    """Joins tiles of one piece whose elements follow each other on both sides: packed k and v."""
    if not len(tiles):
        return tiles
    joins = _follow(tiles, target_itemsizes) & (pieces[1:] == pieces[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    fused = tiles[first]
    fused["elements"] = np.add.reduceat(tiles["elements"], first)
    return fused


def _follow(tiles: Tiles, target_itemsizes: Int64s) -> npt.NDArray[np.bool_]:
    """For each tile but the first, whether its elements follow the elements of the tile before."""
    before, after = tiles[:-1], tiles[1:]
    found: npt.NDArray[np.bool_] = before["heads"] == after["heads"]
    for side, itemsizes in (("source", tiles["itemsize"]), ("target", target_itemsizes)):
        for field in Place._fields:
            if field != "offset":
                found &= before[f"{side}_{field}"] == after[f"{side}_{field}"]
        end = before[f"{side}_offset"] + before["elements"] * itemsizes[:-1]
        found &= after[f"{side}_offset"] == end
        found &= before[f"{side}_element_stride"] == itemsizes[:-1]
        found &= itemsizes[:-1] == itemsizes[1:]
    return found
