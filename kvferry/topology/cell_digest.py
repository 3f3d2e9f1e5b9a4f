"""Digests of a request's cells on one rank; sums over ranks compare two engines."""

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.tiles import TILE_DTYPE, Tiles
from kvferry.topology.binding import BlockIds, bind_own
from kvferry.topology.group import GroupGeometry
from kvferry.topology.lowering import Piece, Places, lower_pieces
from kvferry.topology.tensors import RankMemory


def token_digests(
    geometry: GroupGeometry,
    rank: int,
    memory: RankMemory,
    addresses: Sequence[int],
    block_ids: BlockIds,
    num_tokens: int,
    first_token: int = 0,
    layers: Iterable[int] | None = None,
) -> npt.NDArray[np.uint64]:
    """Sums, modulo 2**64 and per token, a hash of each row of cells that a rank holds of a request.

    A row is one layer, part, token position and head (of a state: section and channel, at the last
    token's position), all by the model's indices, with the bits of its elements in order. The sum
    over all ranks of an engine, modulo 2**64, therefore does not depend on its layout, block size
    or sharding. Cells with replicas are counted by the first rank that holds them and by no other.
    Any span can be compared by the sum over its tokens, and a defect is located.

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
        geometry: what the ranks hold.
        rank: whose memory.
        memory: how its tensors lie.
        addresses: address of each of its regions in this process.
        block_ids: the request's whole block table for this group.
        num_tokens: end of the span of tokens.
        first_token: start of the span.
        layers: only these of the model's layers, where the rank holds them; all if left out.

    Returns:
        uint64[num_tokens - first_token]; 0 for tokens that other context ranks hold.

    Raises:
        BlockError: the table is too short, or names a null, negative or repeated block.
        BoundsError: a block lies outside the memory.
        ProtocolError: the memory lacks a tensor or a part.
    """
    from kvferry.layouts.digest import digest_rows

    held = geometry.layers(rank)
    wanted = held if layers is None else sorted(set(layers).intersection(held))
    tiles, keys = _counted(geometry, rank, memory, wanted)
    runs, positions = bind_own(geometry, rank, block_ids, num_tokens, first_token)
    check_bounds(tiles, runs, memory.region_bytes, None)
    sums = np.zeros(num_tokens - first_token, dtype=np.uint64)
    sums[positions - first_token] = digest_rows(
        np.array(addresses, dtype=np.int64), tiles, runs, positions, keys
    )
    return sums


def _counted(
    geometry: GroupGeometry, rank: int, memory: RankMemory, layers: Sequence[int]
) -> tuple[Tiles, npt.NDArray[np.int64]]:
    """One tile per layer and part for the heads that this rank counts, and their keys."""
    context = geometry.parallel.context_rank(rank)
    places = Places(geometry, rank, memory)
    tiles, keys = [np.empty(0, dtype=TILE_DTYPE)], [np.empty((0, 3), dtype=np.int64)]
    for share in geometry.shares(rank) if layers else ():
        _, owners = next(geometry.owners(layers[0], share, context))
        if owners[0] != rank:
            continue
        pieces = [Piece(rank, layer, share.heads, share.part) for layer in layers]
        for part in filter(pieces[0].has, geometry.parts):
            # One part at a time, so that packed parts stay apart.
            tiles.append(lower_pieces(pieces, (part,), places, places))
            number = zlib.crc32(part.name.encode())
            rows = [(layer, number, share.heads.start) for layer in layers]
            keys.append(np.array(rows, dtype=np.int64))
    return np.concatenate(tiles), np.concatenate(keys)
