"""What a connector must do with several KV cache groups, some of which keep windows.

    class TestMyConnector(HybridConnectorConformance):
        @pytest.fixture
        def configs(self, tmp_path): ...

Every test of :class:`~kvferry.testing.connector_conformance.ConnectorConformance`, over engines
that group the layers of one model differently. The groups of an engine share block ids and memory,
as in a real one, so that a block of the wrong group shows.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from kvferry.testing.connector_conformance import ConnectorConformance, Pair
from kvferry.testing.fake_engine import Groups
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.sharding import split_of_group

NUM_LAYERS = 5
WINDOW = 7
"""Tokens that a layer with a window sees: less than two blocks, and no multiple of one."""
WINDOWED = (0, 1, 2, 4)
"""Layers with a window; the other sees all."""


def hybrid_group(
    layers: Sequence[int],
    layout: str,
    block_size: int,
    *,
    window: int | None = None,
    stage_layers: Sequence[int] = (NUM_LAYERS,),
    tp: int = 1,
) -> EngineGeometry:
    """One KV cache group of a model of 5 layers and 3 heads.

    Args:
        layers: those of the model that the group has.
        layout: of its tensors.
        block_size: tokens per block.
        window: tokens that the group keeps; all if left out.
        stage_layers: layers of the whole model per pipeline stage.
        tp: tensor-parallel ranks per stage.
    """
    return EngineGeometry(
        num_layers=len(layers),
        layer_indices=layers,
        layer_split=split_of_group(layers, stage_layers),
        sliding_window=window,
        num_kv_heads=3,
        head_size=2,
        dtype="float32",
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(tp=tp, pp=len(stage_layers)),
    )


#: (groups of the producer, groups of the consumer) by name.
HYBRID_GEOMETRIES = {
    "equal": 2
    * (
        (
            hybrid_group([3], "NHD", 4),
            hybrid_group(WINDOWED, "NHD", 4, window=WINDOW),
        ),
    ),
    # Another order of groups, and a stage without any layer of one of them.
    "tp2-pp2": (
        (
            hybrid_group(WINDOWED, "HND", 4, window=WINDOW, tp=2),
            hybrid_group([3], "HND", 4, tp=2),
        ),
        (
            hybrid_group([3], "NHD", 6, stage_layers=(2, 3)),
            hybrid_group(WINDOWED, "NHD", 6, window=WINDOW, stage_layers=(2, 3)),
        ),
    ),
    # Layers with a window in two groups on one side; blocks of two sizes on the other.
    "tp1-tp4": (
        (
            hybrid_group([0, 4], "BLKNHD", 8, window=WINDOW),
            hybrid_group([3], "BLKNHD", 8),
            hybrid_group([1, 2], "BLKNHD", 8, window=WINDOW),
        ),
        (
            hybrid_group([3], "NHD", 8, tp=4),
            hybrid_group(WINDOWED, "NHD", 4, window=WINDOW, tp=4),
        ),
    ),
    # The consumer keeps all tokens of every layer, and can never have those behind the windows.
    "windows-whole": (
        (
            hybrid_group([3], "NHD", 4),
            hybrid_group(WINDOWED, "NHD", 4, window=WINDOW),
        ),
        (hybrid_group(range(NUM_LAYERS), "HND", 5, tp=2),),
    ),
    # The producer keeps more than the consumer has room for.
    "whole-windows": (
        (hybrid_group(range(NUM_LAYERS), "NHD", 4),),
        (
            hybrid_group(WINDOWED, "HND", 5, window=WINDOW, tp=2),
            hybrid_group([3], "HND", 5, tp=2),
        ),
    ),
    # No layer sees all.
    "windows-only": (
        (hybrid_group(range(NUM_LAYERS), "NHD", 4, window=WINDOW),),
        (hybrid_group(range(NUM_LAYERS), "NHD", 6, window=WINDOW, stage_layers=(2, 3)),),
    ),
}


class HybridConnectorConformance(ConnectorConformance):
    """The tests. Override ``configs``, as in the suite for one group."""

    num_blocks: ClassVar[int] = 128
    layer_windows: ClassVar[Mapping[int, int]] = dict.fromkeys(WINDOWED, WINDOW)

    @pytest.fixture(params=list(HYBRID_GEOMETRIES.values()), ids=list(HYBRID_GEOMETRIES))
    def geometries(self, request: pytest.FixtureRequest) -> tuple[Groups, Groups]:
        """The groups of producer and consumer."""
        pair: tuple[Groups, Groups] = request.param
        return pair

    @pytest.mark.parametrize("num_tokens", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 40])
    def test_a_prompt_of_any_length_arrives(self, pair: Pair, num_tokens: int) -> None:
        request = pair.decode(pair.prefill("r", num_tokens))
        pair.finish(request)
        assert not request.failed
        pair.settle()

    @pytest.mark.parametrize("num_tokens", [27, 33, 49])
    def test_a_local_hit_that_ends_in_or_behind_the_window_is_left_alone(
        self, pair: Pair, num_tokens: int
    ) -> None:
        blocks = (num_tokens - 1) // pair.consumer.block_size
        request = pair.decode(pair.prefill("r", num_tokens), local_blocks=blocks)
        pair.finish(request)
        assert not request.failed
        pair.settle()
