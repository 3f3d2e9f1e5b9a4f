"""Transfer plans: which source rank gives which cells to a target rank, and as what tiles.

A plan intersects the target's shard with every source shard. It knows no block ids and no bytes,
so it is computed once per peer; binding block ids to it is :mod:`kvferry.topology.binding`.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.errors import BoundsError, ProtocolError
from kvferry.layouts.convert import is_convertible, is_lossless
from kvferry.layouts.tiles import TILE_DTYPE, Tiles
from kvferry.topology.description import RankMemory, TensorMemory
from kvferry.topology.geometry import CROSS_LAYER_NAME, EngineGeometry
from kvferry.topology.layer_ranges import ranges_text
from kvferry.topology.parts import Part
from kvferry.topology.states import Share

if TYPE_CHECKING:
    from kvferry.topology.binding import BoundCopies


_CELL_FIELDS = (
    *("num_kv_heads", "head_size", "head_size_v", "dtype", "use_mla", "scale_dtype"),
    *("recurrent_state", "opaque_blocks"),
)
"""Fields of a geometry that say what a cell is."""

_REMEDIES = {"dtype": "they must be equal, or without scales and convert=True given"}


@dataclass(frozen=True, slots=True)
class Piece:
    """The cells of one layer and some neighbouring heads or channels that one source rank gives.

    Of the tokens, it gives those that it holds; see :meth:`EngineGeometry.token_shard`.
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


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Who gives what to one target rank. A value: equal plans are interchangeable."""

    source: EngineGeometry
    target: EngineGeometry
    target_rank: int
    pieces: tuple[Piece, ...]
    """Ascending by layer, by the source's context rank, by section, by head. Together they cover
    the target's cells exactly once."""

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The ranks that give anything, ascending."""
        return tuple(sorted({piece.source_rank for piece in self.pieces}))

    @property
    def source_contexts(self) -> tuple[int, ...]:
        """The context ranks of the source that hold tokens of the plan, ascending."""
        if self.source.parallel.num_context_ranks == 1:
            return (0,)
        return tuple(sorted({self.source.parallel.context_rank(r) for r in self.source_ranks}))

    @property
    def conversion(self) -> tuple[str, str] | None:
        """Source dtype and target dtype where they differ: such a plan is staged and converted."""
        dtypes = self.source.dtype, self.target.dtype
        return None if dtypes[0] == dtypes[1] else dtypes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that leave the source for one token, which lies in one of ``source_contexts``.

        Of a state: for the one token that it is bound to.
        """
        nbytes = sum(
            len(piece.heads) * part.head_size * part.itemsize
            for part in self.source.parts
            for piece in self.pieces
            if piece.has(part)
        )
        return nbytes // max(len(self.source_contexts), 1)

    def for_layers(self, layers: Iterable[int]) -> "TransferPlan":
        """The part of the plan that concerns some of the model's layers."""
        wanted = frozenset(layers)
        return replace(self, pieces=tuple(p for p in self.pieces if p.layer in wanted))

    def for_source(self, rank: int) -> "TransferPlan":
        """The part of the plan that one source rank gives."""
        return replace(self, pieces=tuple(p for p in self.pieces if p.source_rank == rank))

    def bind(
        self,
        source_blocks: Sequence[int] | npt.NDArray[np.integer[Any]],
        target_blocks: Sequence[int] | npt.NDArray[np.integer[Any]],
        num_tokens: int,
        first_token: int = 0,
    ) -> "BoundCopies":
        """The copies of one request; see :func:`kvferry.topology.binding.bind`."""
        from kvferry.topology.binding import bind

        return bind(self, source_blocks, target_blocks, num_tokens, first_token)

    def lower(
        self,
        source_memory: Mapping[int, RankMemory],
        target_memory: RankMemory,
        parts: Sequence[Part] | None = None,
    ) -> dict[int, Tiles]:
        """Strided tiles per source rank; compute them once per peer.

        With a :attr:`conversion`, ``itemsize`` is the source's and the target's strides are in the
        target's bytes: such tiles are only for :func:`kvferry.layouts.staging.stage`.

        Args:
            source_memory: source rank → its memory, as the peer described it.
            target_memory: the memory of ``target_rank``.
            parts: only these parts; all of them if left out.

        Raises:
            ValueError: a source rank of the plan is missing.
            ProtocolError: a memory lacks a tensor or a part that the plan needs.
            BoundsError: numbers that do not fit 64 bits.
        """
        missing = [rank for rank in self.source_ranks if rank not in source_memory]
        if missing:
            raise ValueError(
                f"source_memory: ranks {missing} are missing; the plan reads from ranks "
                f"{list(self.source_ranks)}"
            )
        target = _Places(self.target, self.target_rank, target_memory)
        return {
            rank: _tiles(
                self.for_source(rank).pieces,
                self.target.parts if parts is None else parts,
                _Places(self.source, rank, memory),
                target,
            )
            for rank, memory in source_memory.items()
            if rank in self.source_ranks
        }


def cell_differences(
    source: EngineGeometry, target: EngineGeometry, *, convert: bool = False
) -> Iterator[tuple[str, object, object]]:
    """Where the cells of two geometries are not the same thing: field, source's value, target's.

    Layers, parallel shapes, block sizes, layouts and what is kept may differ at will. So may dtypes
    of which the target's holds every value of the source's; with ``convert`` any that can be
    converted; with scales none.

    >>> from kvferry.topology import ParallelShape
    >>> one = EngineGeometry(num_layers=2, num_kv_heads=1, head_size=4, dtype="float32",
    ...                      block_size=2, layout="NHD", parallel=ParallelShape())
    >>> list(cell_differences(one, replace(one, dtype="bfloat16", block_size=3)))
    [('dtype', 'float32', 'bfloat16')]
    >>> list(cell_differences(replace(one, dtype="bfloat16"), one))
    []
    """
    for field in _CELL_FIELDS:
        one, two = getattr(source, field), getattr(target, field)
        if field == "head_size_v":  # left out where k and v are alike
            one, two = one or source.head_size, two or target.head_size
        if one != two and not (field == "dtype" and _may_convert(source, target, convert)):
            yield field, one, two


def _may_convert(source: EngineGeometry, target: EngineGeometry, convert: bool) -> bool:
    if any(side.scale_dtype is not None or side.states for side in (source, target)):
        return False  # scales belong to the very codes of their cells; states have dtypes each
    allowed = is_convertible if convert else is_lossless
    return allowed(source.dtype, target.dtype)


def plan_transfer(
    *,
    source: EngineGeometry,
    target: EngineGeometry,
    target_rank: int = 0,
    target_engine_id: str = "",
    layers: Iterable[int] | None = None,
    convert: bool = False,
) -> TransferPlan:
    """Plans what one target rank reads, and from whom.

    >>> from kvferry.layouts import Layout
    >>> from kvferry.topology import ParallelShape
    >>> source = EngineGeometry(num_layers=2, num_kv_heads=3, head_size=4, dtype="float32",
    ...                         block_size=16, layout="HND", parallel=ParallelShape(tp=3))
    >>> target = replace(source, block_size=24, layout=Layout.named("NHD"),
    ...                  parallel=ParallelShape(tp=2))
    >>> plan_transfer(source=source, target=target, target_rank=1).source_ranks
    (1, 2)

    Where several source ranks hold replicas of a head's cells, the choice goes round over them by
    layer and target rank, with an offset from the target's engine id: both sides compute the same,
    and all replicas share the work.

    Args:
        source: a group of the engine that is read from.
        target: a group of the engine that reads.
        target_rank: who reads.
        target_engine_id: decides the choice among replicas.
        layers: only these of the model's layers, which both groups must have; all of the
            target's if left out. :func:`~kvferry.topology.groups.pair_groups` finds them.
        convert: allow a conversion of the dtype that rounds; without it only one that does not.

    Raises:
        ValueError: there is no such target rank, or the geometries can never match; the message
            lists every mismatch.
    """
    wanted = frozenset(target.model_layers if layers is None else layers)
    mismatches = [
        f"{field}: source has {one}, target has {two}; {_REMEDIES.get(field, 'they must be equal')}"
        for field, one, two in cell_differences(source, target, convert=convert)
    ]
    for side, geometry in (("source", source), ("target", target)):
        if lacking := sorted(wanted.difference(geometry.model_layers)):
            mismatches.append(
                f"layers: {ranges_text(lacking)} not in the {side}, which has "
                f"{ranges_text(geometry.model_layers)}; name layers that both groups have"
            )
    if mismatches:
        raise ValueError("these geometries cannot exchange KV: " + "; ".join(mismatches))
    start = zlib.crc32(target_engine_id.encode()) + target_rank
    shares = target.shares(target_rank)
    contexts = _giving_contexts(source, target, target_rank)
    pieces = tuple(
        piece
        for layer in target.layers(target_rank)
        if layer in wanted
        for context in contexts
        for share in shares
        for piece in _layer_pieces(source, layer, share, context, start + layer)
    )
    return TransferPlan(source, target, target_rank, pieces)


def _giving_contexts(
    source: EngineGeometry, target: EngineGeometry, target_rank: int
) -> tuple[int, ...]:
    """The context ranks of the source that hold any token of the target rank, ascending."""
    ours = target.token_shard(target_rank)
    return tuple(
        context
        for context in range(source.parallel.num_context_ranks)
        if source.parallel.shard_of_context(context).meets(ours)
    )


def _layer_pieces(
    source: EngineGeometry, layer: int, share: Share, context: int, choice: int
) -> Iterator[Piece]:
    """Splits what a rank wants of one layer at the borders between source ranks."""
    for heads, replicas in source.owners(layer, share, context):
        yield Piece(replicas[choice % len(replicas)], layer, heads, share.part)


class _Side(NamedTuple):
    """One side of a tile, fields in the order of ``TILE_DTYPE``; all but the region are bytes."""

    region: int
    offset: int
    block: int
    token: int
    head: int
    element: int


class _Tile(NamedTuple):
    """A row of ``TILE_DTYPE`` in the making."""

    source: _Side
    target: _Side
    heads: int
    elements: int
    itemsize: int
    target_itemsize: int
    """Not part of the row; other than ``itemsize`` only if the dtype is converted."""


class _Places:
    """Looks cells up in the memory of one rank."""

    def __init__(self, geometry: EngineGeometry, rank: int, memory: RankMemory) -> None:
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

    def side(self, layer: int, first_head: int, part: Part) -> _Side:
        """Where the part of one layer lies, from the first head on."""
        tensor, index = self._tensor(layer, self._suffixes[part.name])
        strides = tensor.parts.get(part.name)
        if strides is None:
            raise ProtocolError(
                f"memory of rank {self._rank}: tensor {tensor.name!r} has no part {part.name!r}"
            )
        offset = tensor.offset + strides.offset + strides.layer * index
        offset += strides.head * (first_head - self._heads[part.name].start)
        return _Side(
            tensor.region, offset, strides.block, strides.token, strides.head, strides.element
        )

    def _tensor(self, layer: int, suffix: str) -> tuple[TensorMemory, int]:
        name, cross = self._geometry.layer_name(layer) + suffix, CROSS_LAYER_NAME + suffix
        if name in self._tensors:
            return self._tensors[name], 0
        if cross in self._tensors:
            return self._tensors[cross], self._layers.index(layer)
        raise ProtocolError(
            f"memory of rank {self._rank}: has no tensor {name!r} nor {cross!r}, only "
            f"{', '.join(sorted(self._tensors)) or 'none'}"
        )


def _tiles(
    pieces: Sequence[Piece], parts: Sequence[Part], source: _Places, target: _Places
) -> Tiles:
    tiles = [
        tile
        for piece in pieces
        for tile in _fused(
            _Tile(
                source.side(piece.layer, piece.heads.start, part),
                target.side(piece.layer, piece.heads.start, part),
                len(piece.heads),
                part.head_size,
                source.itemsizes[part.name],
                target.itemsizes[part.name],
            )
            for part in parts
            if piece.has(part)
        )
    ]
    try:
        return np.array([(*t.source, *t.target, *t[2:5]) for t in tiles], dtype=TILE_DTYPE)
    except OverflowError as error:
        raise BoundsError("a memory has offsets or strides that do not fit 64 bits") from error


def _fused(tiles: Iterable[_Tile]) -> list[_Tile]:
    """Joins parts whose elements follow each other on both sides: packed k and v."""
    fused: list[_Tile] = []
    for tile in tiles:
        if fused and _follows(fused[-1], tile):
            fused[-1] = fused[-1]._replace(elements=fused[-1].elements + tile.elements)
        else:
            fused.append(tile)
    return fused


def _follows(tile: _Tile, other: _Tile) -> bool:
    return (tile.heads, *tile[4:]) == (other.heads, *other[4:]) and all(
        one.element == itemsize
        and two == one._replace(offset=one.offset + tile.elements * itemsize)
        for one, two, itemsize in (
            (tile.source, other.source, tile.itemsize),
            (tile.target, other.target, tile.target_itemsize),
        )
    )
