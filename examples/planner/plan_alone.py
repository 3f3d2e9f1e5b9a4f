"""The planner alone: which rank gives which cells to which rank, and a copy between NumPy arrays.

The example needs no engine, no server and no PyTorch. Run it with ``python plan_alone.py``.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvferry.layouts import Layout
from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer, run_copies

Caches = dict[str, npt.NDArray[np.float32]]

NUM_TOKENS = 40
SOURCE_BLOCKS = [3, 1, 4]  # in blocks of 16 tokens: the request's block table on the source
TARGET_BLOCKS = [2, 1]  # in blocks of 24 tokens: the request's block table on the target


def engines() -> tuple[EngineGeometry, EngineGeometry]:
    """A source with three ranks and a target with two; two does not divide the three KV heads."""
    source = EngineGeometry(
        num_layers=2,
        num_kv_heads=3,
        head_size=4,
        dtype="float32",
        block_size=16,
        layout=Layout.named("HND"),
        parallel=ParallelShape(tp=3),
    )
    target = replace(
        source, block_size=24, layout=Layout.named("NHD"), parallel=ParallelShape(tp=2)
    )
    return source, target


def random_caches(geometry: EngineGeometry, num_blocks: int) -> dict[int, Caches]:
    """Source rank → tensor name → a tensor with random cells."""
    random = np.random.default_rng(0)
    return {
        rank: {
            name: random.random(geometry.cache_shape(rank, num_blocks), dtype=np.float32)
            for name in geometry.tensor_names(rank)
        }
        for rank in range(geometry.parallel.world_size)
    }


def main() -> None:
    """Plans the reads of both target ranks, prints them, and runs the copies."""
    source, target = engines()
    sources = random_caches(source, num_blocks=5)
    for rank in range(target.parallel.world_size):
        plan = plan_transfer(source=source, target=target, target_rank=rank)
        for piece in plan.pieces:
            heads = ", ".join(map(str, piece.heads))
            print(
                f"target rank {rank} reads head {heads} of layer {piece.layer} "
                f"from source rank {piece.source_rank}"
            )
        shape = target.cache_shape(rank, num_blocks=4)
        cache = {name: np.zeros(shape, np.float32) for name in target.tensor_names(rank)}
        copies = plan.bind(SOURCE_BLOCKS, TARGET_BLOCKS, NUM_TOKENS)
        segments = run_copies(copies, sources=sources, target=cache)
        print(f"target rank {rank}: the copies were {segments} contiguous segments")


if __name__ == "__main__":
    main()
