"""What a plan has to move for a typical request, counted without moving anything."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from kvferry.layouts.tiles import Tiles, num_bytes
from kvferry.topology.in_place import plan_repack
from kvferry.topology.lowering import Piece
from kvferry.topology.plan import BoundCopies, TransferPlan
from kvferry.topology.strategies import StrategyWork
from kvferry.topology.tensors import RankMemory
from kvferry.topology.typical import (
    TYPICAL_TOKENS,
    count_copies,
    dense_memory_of,
    table_blocks,
    typical_copies,
    unlike_tiles,
)
from kvferry.topology.whole_blocks import WholeBlocks, whole_block_copies


def strategy_work(
    plan: TransferPlan,
    *,
    source_memory: Mapping[int, RankMemory] | None = None,
    target_memory: RankMemory | None = None,
    tiles: Mapping[int, Tiles] | None = None,
    num_tokens: int = TYPICAL_TOKENS,
    first_token: int = 0,
    seed: int = 0,
) -> StrategyWork:
    """The numbers by which :func:`~kvferry.topology.strategies.choose_strategy` chooses.

    What is alike is counted once: tiles that differ in nothing but where they begin, and for whole
    blocks layers whose heads come in the same portions.

    >>> from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer
    >>> one = EngineGeometry(num_layers=2, num_kv_heads=2, head_size=4, dtype="float32",
    ...                      block_size=16, layout="NHD", parallel=ParallelShape())
    >>> work = strategy_work(plan_transfer(source=one, target=one), num_tokens=64)
    >>> work.nbytes, work.segments_ordered, work.segments_shuffled, work.chunks
    (8192, 4, 16, 1)

    Args:
        plan: who gives what to one target rank; its layers count.
        source_memory: source rank → its memory, as the peer described it; dense if left out.
        target_memory: the memory of the plan's target rank; dense if left out.
        tiles: the plan lowered onto these memories, if the caller has it.
        num_tokens: end of the request's span.
        first_token: start of the span.
        seed: of the shuffled block tables.

    Raises:
        ValueError: the span is no span.
        ProtocolError, BoundsError: a memory does not fit its geometry.
    """
    if source_memory is None:
        source_memory = {
            rank: dense_memory_of(plan.source, rank, num_tokens) for rank in plan.source_ranks
        }
    if target_memory is None:
        target_memory = dense_memory_of(plan.target, plan.target_rank, num_tokens)
    if tiles is None:
        tiles = plan.lower(source_memory, target_memory)
    ordered = typical_copies(plan, num_tokens, first_token)
    shuffled = typical_copies(plan, num_tokens, first_token, seed)
    total = _copied(plan, tiles, ordered, shuffled)
    whole_blocks: Counter[str] = Counter()
    obstacle = None
    try:
        for part, times in _unlike_layers(plan):
            whole = whole_block_copies(part, source_memory, target_memory)
            found = _in_place(whole, replace(shuffled, plan=part), target_memory)
            whole_blocks.update({name: count * times for name, count in found.items()})
    except ValueError as error:
        obstacle = str(error)
        whole_blocks.clear()
    return StrategyWork(
        **total, **whole_blocks, conversion=plan.conversion, in_place_obstacle=obstacle
    )


def _copied(
    plan: TransferPlan,
    tiles: Mapping[int, Tiles],
    ordered: BoundCopies,
    shuffled: BoundCopies,
) -> dict[str, int]:
    from kvferry.layouts.chunks import cut_chunks
    from kvferry.layouts.staging import WIRE_CHUNK_BYTES, stage

    found = dict.fromkeys(
        ("segments_ordered", "segments_shuffled", "chunks", "pack_segments", "unpack_segments"), 0
    )
    itemsizes = plan.source.itemsize, plan.target.itemsize
    for rank, table in tiles.items():
        runs = shuffled.runs_of(rank)
        for length in np.unique(runs["tokens"]):
            same = runs[runs["tokens"] == length]
            found["chunks"] += len(cut_chunks(table, same, WIRE_CHUNK_BYTES))
        for tile, times in unlike_tiles(table):
            found["segments_ordered"] += times * count_copies(tile, ordered.runs_of(rank))
            found["segments_shuffled"] += times * count_copies(tile, runs)
            for chunk in stage(
                tile, runs, target_itemsize=itemsizes[1] if plan.conversion else None
            ):
                packed = count_copies(chunk.pack_tiles, chunk.pack_runs)
                unpacked = count_copies(chunk.unpack_tiles, chunk.unpack_runs)
                found["pack_segments"] += times * packed
                found["unpack_segments"] += times * unpacked
    found["nbytes"] = shuffled.nbytes
    found["placed_nbytes"] = shuffled.nbytes
    if plan.conversion is not None:
        found["placed_nbytes"] = shuffled.nbytes * itemsizes[1] // itemsizes[0]
    return found


def _unlike_layers(plan: TransferPlan) -> Iterator[tuple[TransferPlan, int]]:
    """The plan of one of those layers whose heads come in the same portions, and their number."""
    pieces: dict[int, list[Piece]] = {}
    for piece in plan.pieces:
        pieces.setdefault(piece.layer, []).append(piece)
    alike: dict[tuple[range, ...], list[int]] = {}
    for layer, found in pieces.items():
        alike.setdefault(tuple(piece.heads for piece in found), []).append(layer)
    for layers in alike.values():
        yield replace(plan, pieces=tuple(pieces[layers[0]])), len(layers)


def _in_place(whole: WholeBlocks, copies: BoundCopies, target_memory: RankMemory) -> dict[str, int]:
    """What whole blocks take.

    Raises:
        ValueError: they cannot be moved.
    """
    plan, num_tokens = whole.plan, copies.span[1]
    if copies.span[0] < num_tokens:  # a request has blocks to the end of its last frame
        end = -(-num_tokens // whole.frame_tokens) * whole.frame_tokens
        more = table_blocks(plan.target, end) - len(copies.target_blocks)
        spare = len(copies.target_blocks) + 1 + np.arange(more)
        tables = copies.source_blocks, np.concatenate([copies.target_blocks, spare])
        # A load begins where a block of the target does, if the source still has the tokens.
        first_token = copies.span[0] // plan.target.block_size * plan.target.block_size
        copies = plan.bind(*tables, num_tokens, first_token)
    blocks = whole.bind(copies)
    repack = plan_repack(plan, target_memory)
    gather, scatter = repack.bind(blocks.target_blocks)
    return {
        "block_nbytes": sum(
            num_bytes(tiles, blocks.runs[rank]) for rank, tiles in whole.tiles.items()
        ),
        "block_segments": sum(
            count_copies(tiles, blocks.runs[rank]) for rank, tiles in whole.tiles.items()
        ),
        "repack_nbytes": repack.nbytes(len(blocks.target_blocks)),
        "repack_segments": count_copies(repack.gather, gather)
        + count_copies(repack.scatter, scatter),
    }
