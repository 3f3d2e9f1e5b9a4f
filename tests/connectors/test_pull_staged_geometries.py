"""Staged loads with windows, context parallelism, latents, scales and recurrent states.

The engines look at every cell: of loads, of the hits before them, and of blocks that nobody holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.config import KVTransferConfig
from kvferry.layouts import Layout
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.testing.connector_conformance import WINDOW, WINDOWED, Pair, hybrid_group, open_pair
from kvferry.testing.fake_engine import Groups
from kvferry.testing.fake_rank import Stage
from kvferry.topology import (
    EngineGeometry,
    ParallelShape,
    StateGeometry,
    mamba2_states,
)
from kvferry.transports.shm import ShmTransport


class WithoutProof(ShmTransport):
    """Says that it cannot prove the end of a read, so that all is staged."""

    fences = False


def dense(block_size: int, layout: str = "NHD", heads: int = 2, **more: int) -> EngineGeometry:
    """Two layers; ``more`` are parallel dims."""
    return EngineGeometry(
        num_layers=2,
        num_kv_heads=heads,
        head_size=9,
        dtype="bfloat16",
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(**more),
        use_mla=heads == 1,
    )


def quantised(one: EngineGeometry) -> EngineGeometry:
    return replace(one, dtype="float8_e4m3fn", scale_dtype="float32")


def latent(block_size: int, layout: str, **parallel: int) -> EngineGeometry:
    return dense(block_size, layout, heads=1, **parallel)


def windows(block_size: int, layout: str, **where: Any) -> Groups:
    """A layer that sees all, and four that see a window."""
    return (
        hybrid_group([3], layout, block_size, **where),
        hybrid_group(WINDOWED, layout, block_size, window=WINDOW, **where),
    )


def states(block_size: int, tp: int) -> Groups:
    """A layer of attention, and two with a state per block."""
    kinds = mamba2_states(
        num_heads=6, head_size=2, state_size=3, num_groups=1, conv_kernel=4,
        dtype="bfloat16", ssm_dtype="float32",
    )  # fmt: skip
    attention = replace(dense(block_size, tp=tp), num_layers=1, layer_indices=(1,))
    recurrent = StateGeometry(
        num_layers=2,
        layer_indices=(0, 2),
        states=kinds,
        block_size=block_size,
        layout=Layout.parse("BHD"),
        parallel=ParallelShape(tp=tp),
    )
    return attention, recurrent


#: Groups of the producer and of the consumer.
CASES = {
    "equal": (windows(4, "NHD"), windows(4, "NHD")),
    "windows": (windows(4, "HND", tp=2), windows(6, "NHD")),
    "windows-large-frames": (windows(6, "HND"), windows(4, "NHD", tp=3)),
    "context-parallel": (dense(4, tp=4, dcp=2), dense(6, "HND")),
    "latents": (latent(8, "NHD"), latent(6, "BND", tp=2)),
    "latents-context-parallel": (latent(4, "BND", tp=4, dcp=4), latent(4, "BND")),
    "scales": (quantised(dense(4, "HND", tp=2)), quantised(dense(6))),
    "states": (states(4, 2), states(4, 1)),
}


@pytest.fixture(params=list(CASES), ids=list(CASES))
def pair(
    request: pytest.FixtureRequest,
    pull_configs: Callable[..., tuple[KVTransferConfig, KVTransferConfig]],
) -> Iterator[Pair]:
    """Two open engines between which all cells are staged."""
    geometries: tuple[Groups, Groups] = CASES[request.param]
    configs = pull_configs(record_digests=True)
    windows_of = dict.fromkeys(WINDOWED, WINDOW) if isinstance(geometries[0], tuple) else {}
    with (
        temporary_plugin(TRANSPORTS, "shm", WithoutProof),
        open_pair(configs, geometries, 128, layer_windows=windows_of) as pair,
    ):
        yield pair


def test_the_cells_are_right_and_those_of_others_are_left_alone(pair: Pair) -> None:
    size = pair.consumer.block_size
    lengths = {"a": (4 * size + 3, 0), "b": (3, 0), "c": (3 * size, 1), "d": (3 * size + 1, 2)}
    lengths["e"] = (24, 0)  # whole frames everywhere
    sources = {id: pair.prefill(id, length) for id, (length, _) in lengths.items()}
    requests = [pair.decode(source, local_blocks=lengths[id][1]) for id, source in sources.items()]
    pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "all to end")
    errors = [
        record.error for output in pair.consumer.outputs for record in output.transfer_records
    ]
    assert [error for error in errors if error] == []
    assert [(r.request_id, r.error) for r in requests if r.failed or r.error] == []
    found = {
        str(one.way)
        for worker in pair.consumer.workers
        for peer in worker.cache.loads.peers.connected.values()  # type: ignore[attr-defined]
        for one in peer.plans
    }
    assert found == {"staged"}
    pair.settle()
