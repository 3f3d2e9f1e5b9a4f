"""Digests of a request's cells on a rank; sums over all ranks compare two engines."""

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.tiles import TILE_DTYPE, Tiles
from kvferry.topology.binding import BlockIds, bind_own
from kvferry.topology.group import GroupGeometry
from kvferry.topology.lowering import Piece, Places, lower_pieces
from kvferry.topology.tensors import RankMemory

if TYPE_CHECKING:
    from kvferry.layouts.device import CopyStream  # compiles; planning alone need not


def token_digests(
    geometry: GroupGeometry,
    rank: int,
    memory: RankMemory,
    addresses: Sequence[int],
    block_ids: BlockIds,
    num_tokens: int,
    first_token: int = 0,
    layers: Iterable[int] | None = None,
    stream: "CopyStream | None" = None,
) -> npt.NDArray[np.uint64]:
    """Hashes each row of a request's cells on a rank, and sums the hashes per token, modulo 2**64.

    A row is a layer, part, token position and head (for a state: section and channel, at the
    position of the last token), all by the indices of the model, with the bits of its elements in
    order. Therefore the sum over all ranks of an engine, modulo 2**64, does not depend on the
    layout, block size or sharding. If cells have replicas, only the first rank that holds the cells
    counts them. The sum over the tokens of a span compares this span, so that a defect can be
    located.

    >>> from kvferry.topology import EngineGeometry, ParallelShape, memory_of
    >>> def of(block_size, layout, block_ids):
    ...     one = EngineGeometry(num_layers=1, num_kv_heads=1, head_size=1, dtype="int32",
    ...                          block_size=block_size, layout=layout, parallel=ParallelShape())
    ...     cache = np.zeros(one.cache_shape(0, num_blocks=5), dtype=np.int32)
    ...     memory, regions = memory_of(one, 0, {"layer.0": cache})
    ...     return token_digests(one, 0, memory, [regions[0].ctypes.data], block_ids, 4).tolist()
    >>> of(2, "NHD", [1, 2]) == of(3, "HND", [4, 1])
    True

    Args:
        geometry: geometry of the group.
        rank: the rank of the memory.
        memory: places of the rank's tensors.
        addresses: address of each region of the memory in this process.
        block_ids: the request's whole block table for this group.
        num_tokens: end of the span of tokens.
        first_token: start of the span.
        layers: the layers of the model to digest, as far as the rank holds them; all by default.
        stream: stream of the device on which the memory lies; ``None`` for host memory.

    Returns:
        uint64[num_tokens - first_token]; 0 for tokens that other context ranks hold.

    Raises:
        BlockError: the table is too short, or contains a null, negative or repeated block.
        BoundsError: a block lies outside the memory.
        ProtocolError: the memory lacks a tensor or a part.
        TransferError: the device failed.
    """
    from kvferry.layouts.digest import digest_rows

    held = geometry.layers(rank)
    wanted = held if layers is None else sorted(set(layers).intersection(held))
    tiles, keys = _counted(geometry, rank, memory, wanted)
    runs, positions = bind_own(geometry, rank, block_ids, num_tokens, first_token)
    check_bounds(tiles, runs, memory.region_bytes, None)
    sums = np.zeros(num_tokens - first_token, dtype=np.uint64)
    digest = digest_rows if stream is None else stream.digest
    sums[positions - first_token] = digest(
        np.array(addresses, dtype=np.int64), tiles, runs, positions, keys
    )
    return sums


def _counted(
    geometry: GroupGeometry, rank: int, memory: RankMemory, layers: Sequence[int]
) -> tuple[Tiles, npt.NDArray[np.int64]]:
    """A tile per layer and part for the heads that this rank counts, and their keys."""
    context = geometry.parallel.context_rank(rank)
    places = Places(geometry, rank, memory)
    tiles, keys = [np.empty(0, dtype=TILE_DTYPE)], [np.empty((0, 3), dtype=np.int64)]
    for share in geometry.shares(rank) if layers else ():
        _, owners = next(geometry.owners(layers[0], share, context))
        if owners[0] != rank:
            continue
        pieces = [Piece(rank, layer, share.heads, share.part) for layer in layers]
        for part in filter(pieces[0].has, geometry.parts):
            # Part by part, so that packed parts stay separate.
            tiles.append(lower_pieces(pieces, (part,), places, places))
            number = zlib.crc32(part.name.encode())
            rows = [(layer, number, share.heads.start) for layer in layers]
            keys.append(np.array(rows, dtype=np.int64))
    return np.concatenate(tiles), np.concatenate(keys)
