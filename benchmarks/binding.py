"""How long ``bind`` takes: from a request's block tables to its copies."""

import statistics
import time

import msgspec
import numpy as np

from kvferry.topology import EngineGeometry, ParallelShape, TransferPlan, plan_transfer

GOAL_SECONDS = 1e-3
"""For 4,096 tokens."""


class BindResult(msgspec.Struct, frozen=True, kw_only=True):
    """One length of request."""

    tokens: int
    target_ranks: int
    median_seconds: float
    """Of one target rank's ``bind``, over all ranks and rounds."""
    p99_seconds: float
    plan_seconds: float
    """Of planning and lowering for one target rank, which happens once per peer."""
    runs: int
    """Rows that a bind makes; each is applied to every tile."""
    tiles: int
    """Rows of the largest target rank's tiles, all its sources together."""
    goal_seconds: float | None = None


def geometries() -> tuple[EngineGeometry, EngineGeometry]:
    """80 layers and 8 KV heads, from 8 ranks to 3, blocks of 16 to blocks of 24 tokens."""
    source, target = (
        EngineGeometry(
            num_layers=80,
            num_kv_heads=8,
            head_size=128,
            dtype="bfloat16",
            block_size=block_size,
            layout=layout,
            parallel=ParallelShape(tp=tp),
        )
        for tp, block_size, layout in ((8, 16, "HND"), (3, 24, "NHD"))
    )
    return source, target


def measure_bind(tokens: int, rounds: int) -> BindResult:
    """Binds shuffled block tables ``rounds`` times for each target rank."""
    source, target = geometries()
    source_table = shuffled_table(tokens, source.block_size, seed=1)
    target_table = shuffled_table(tokens, target.block_size, seed=2)
    began = time.perf_counter()
    plans = [_plan(source, target, rank) for rank in range(target.world_size)]
    plan_seconds = (time.perf_counter() - began) / len(plans)
    seconds = []
    for number in range(rounds + 1):
        for plan, _ in plans:
            began = time.perf_counter()
            copies = plan.bind(source_table, target_table, tokens)
            if number > 0:  # the first one loads the module
                seconds.append(time.perf_counter() - began)
    return BindResult(
        tokens=tokens,
        target_ranks=len(plans),
        median_seconds=statistics.median(seconds),
        p99_seconds=statistics.quantiles(seconds, n=100, method="inclusive")[98],
        plan_seconds=plan_seconds,
        runs=len(copies.runs_of(0)),
        tiles=max(tiles for _, tiles in plans),
        goal_seconds=GOAL_SECONDS if tokens == 4096 else None,
    )


def shuffled_table(tokens: int, block_size: int, seed: int) -> list[int]:
    """Block ids from all over a pool that is twice as large."""
    blocks = -(-tokens // block_size)
    ids: list[int] = (1 + np.random.default_rng(seed).permutation(2 * blocks)[:blocks]).tolist()
    return ids


def _plan(source: EngineGeometry, target: EngineGeometry, rank: int) -> tuple[TransferPlan, int]:
    """The plan of a target rank, and how many tiles it has."""
    plan = plan_transfer(source=source, target=target, target_rank=rank)
    memories = {giver: source.memory(giver, 1024) for giver in plan.source_ranks}
    tiles = plan.lower(memories, target.memory(rank, 1024))
    return plan, sum(map(len, tiles.values()))
