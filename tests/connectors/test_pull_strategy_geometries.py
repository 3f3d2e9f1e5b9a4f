"""Staged and in place, through windows, context parallelism, latents, scales and recurrent states.

The engines look at every cell: of loads, of the hits before them, and of blocks that nobody holds.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull import routes
from kvferry.connectors.pull.reads import InPlaceRead
from kvferry.testing.connector_conformance import Pair, open_pair
from kvferry.testing.fake_engine import Groups
from kvferry.testing.fake_rank import Stage
from kvferry.testing.hybrid_conformance import WINDOW, WINDOWED, hybrid_group
from kvferry.topology import (
    EngineGeometry,
    ParallelShape,
    mamba2_states,
    plan_transfer,
    recurrent_group,
    whole_block_copies,
)

BOTH = frozenset(("staged", "in place"))


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
    recurrent = recurrent_group(
        num_layers=2,
        layer_indices=(0, 2),
        states=kinds,
        block_size=block_size,
        layout="BHD",
        parallel=ParallelShape(tp=tp),
    )
    return attention, recurrent


#: (groups of the producer, groups of the consumer, what moves them if they are to move in place)
CASES = {
    "equal": (windows(4, "NHD"), windows(4, "NHD"), {"in place"}),
    "windows": (windows(4, "HND", tp=2), windows(6, "NHD"), {"in place"}),
    "windows-large-frames": (windows(6, "HND"), windows(4, "NHD", tp=3), {"in place"}),
    "context-parallel": (dense(4, tp=4, dcp=2), dense(6, "HND"), {"strided"}),
    "latents": (latent(8, "NHD"), latent(6, "BND", tp=2), {"in place"}),
    "latents-context-parallel": (latent(4, "BND", tp=4, dcp=4), latent(4, "BND"), {"strided"}),
    "scales": (quantised(dense(4, "HND", tp=2)), quantised(dense(6)), {"strided"}),
    "states": (states(4, 2), states(4, 1), {"in place", "strided"}),
}  # fmt: skip


@pytest.fixture(params=list(CASES), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[Groups, Groups, set[str]]:
    found: tuple[Groups, Groups, set[str]] = CASES[request.param]
    return found


@pytest.fixture(params=sorted(BOTH))
def strategy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pair(
    case: tuple[Groups, Groups, set[str]],
    strategy: str,
    producer_and_consumer: tuple[KVTransferConfig, KVTransferConfig],
) -> Iterator[Pair]:
    """Two open engines, of which the consumer wants the strategy."""
    producer, consumer = (
        msgspec.structs.replace(
            config,
            kv_connector_extra_config={
                **config.kv_connector_extra_config,
                "lease_duration_s": 5.0,  # a busy machine renews late
                "strategy": strategy,
            },
        )
        for config in producer_and_consumer
    )
    windows_of = dict.fromkeys(WINDOWED, WINDOW) if isinstance(case[0], tuple) else {}
    with open_pair((producer, consumer), case[:2], 128, layer_windows=windows_of) as pair:
        yield pair


@pytest.fixture
def moved_whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read that moved whole blocks."""
    moved: list[int] = []

    class Noted(InPlaceRead):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            moved.append(self.nbytes)

    monkeypatch.setattr(routes, "InPlaceRead", Noted)
    return moved


def test_the_cells_are_right_and_those_of_others_are_left_alone(
    pair: Pair, case: tuple[Groups, Groups, set[str]], strategy: str, moved_whole: list[int]
) -> None:
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
        group.choice.strategy
        for worker in pair.consumer.workers
        for peer in worker._loader._peers.values()  # type: ignore[attr-defined]
        for group in peer.groups
    }
    assert found == ({"staged"} if strategy == "staged" else case[2])
    assert bool(moved_whole) == ("in place" in found)
    pair.settle()


# ---- what whole blocks may fill -----------------------------------------------------------------


SIZES = st.integers(1, 6)


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, st.data())
def test_whole_blocks_fill_the_requests_own_blocks_behind_its_hit_and_no_others(
    theirs: int, ours: int, data: st.DataObject
) -> None:
    """Or they are refused: null blocks of a window, a hit inside a frame, a table that ends there.

    Of what they fill, only blocks that the span reaches hold cells of the request; those up to
    the end of the last frame are the request's own, without any cells yet.
    """
    plan = plan_transfer(source=dense(theirs, "HND"), target=dense(ours))
    num_tokens = data.draw(st.integers(1, 40), label="num_tokens")
    first = data.draw(st.integers(0, num_tokens), label="first_token")
    spare = data.draw(st.integers(0, 3), label="blocks for tokens to come")
    behind = data.draw(st.integers(0, num_tokens // ours), label="blocks behind a window")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    source = rng.permutation(60)[: -(-num_tokens // theirs)] + 1
    table = rng.permutation(60)[: -(-num_tokens // ours) + spare] + 1
    table[:behind] = 0
    whole = whole_block_copies(plan, {0: plan.source.memory(0, 64)}, plan.target.memory(0, 64))
    copies = plan.bind(source, table, num_tokens, first)
    frame = whole.frame_tokens
    end = -(-num_tokens // frame) * frame
    moves_none = first == num_tokens
    fits = first % frame == 0 and len(table) * ours >= end and behind * ours <= first
    assert (whole.obstacle(copies) is None) == (moves_none or fits)
    if moves_none or not fits:
        return
    bound = whole.bind(copies)
    own = table[first // ours : end // ours]
    assert bound.target_blocks.tolist() == own.tolist()
    landing = np.unique(bound.runs[0]["target_block"])
    assert set(landing.tolist()) <= set(own.tolist())
    assert set(table[first // ours : -(-num_tokens // ours)].tolist()) <= set(landing.tolist())
