"""From pieces of a plan to strided tiles: where the cells lie that move.

A plan says which cells of which layers, as pieces. Here each piece is looked up in the memory of
the rank that gives it and of the rank that gets it, which makes one tile per part; parts that
follow each other in memory on both sides, as packed k and v do, become one tile.
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
from kvferry.topology.tensors import Part, RankMemory, TensorMemory


@dataclass(frozen=True, slots=True)
class Piece:
    """The cells of one layer and some neighbouring heads or channels that one source rank gives.

    Of the tokens, it gives those that it holds; see :meth:`GroupGeometry.token_shard`.
    """

    source_rank: int
    layer: int
    """Index in the model."""
    heads: range
    """Indices in the model."""
    part: str | None = None
    """The section of a state whose channels these are; heads of all parts if ``None``."""

    def has(self, part: Part) -> bool:
        """Whether it has cells of a part."""
        return self.part in (None, part.name)


class Place(NamedTuple):
    """Where the cells of a piece lie on one side: the fields of ``TILE_DTYPE`` of that side."""

    region: int
    offset: int
    block_stride: int
    token_stride: int
    head_stride: int
    element_stride: int


class Places:
    """Looks cells up in the memory of one rank."""

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
        """Bytes per element of each part."""

    def place(self, layer: int, first_head: int, part: str) -> Place:
        """Where the part of one layer lies, from the first head on.

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
        """The tensor that holds a layer, and the layer's index in it."""
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
    pieces: Sequence[Piece], parts: Sequence[Part], source: Places, target: Places
) -> Tiles:
    """The tiles of pieces that one source rank gives, piece by piece.

    Where the dtype is converted, ``itemsize`` is the source's and the target's strides are in the
    target's bytes.

    Args:
        pieces: what moves.
        parts: of the cells, those that move.
        source: the memory of the rank that gives.
        target: the memory of the rank that gets.

    Raises:
        ProtocolError: a memory lacks a tensor or a part.
        BoundsError: numbers that do not fit 64 bits.
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


def own_tiles(geometry: GroupGeometry, rank: int, memory: RankMemory) -> Tiles:
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
    pieces = [
        Piece(rank, layer, share.heads, share.part)
        for layer in geometry.layers(rank)
        for share in geometry.shares(rank)
    ]
    places = Places(geometry, rank, memory)
    return lower_pieces(pieces, geometry.parts, places, places)


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
    """Whether the elements of each tile but the first follow those of the tile before it."""
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
