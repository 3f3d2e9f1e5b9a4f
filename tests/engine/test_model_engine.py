"""Models with windows and latents under the real scheduler: hits, preemption and freed blocks."""

from typing import Any

import pytest
import torch

from kvferry.cache import KVCacheConfig
from kvferry.cache.config_builder import group_layers
from kvferry.engine.engine import Engine
from kvferry.engine.executor import Executor
from kvferry.engine.messages import SamplingParams
from kvferry.engine.request import SchedulerOptions
from kvferry.engine.weights import load_model_config
from kvferry.engine.weights_folder import TinyLatent

GREEDY = SamplingParams(max_tokens=24)
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {"num_layers": 5, "sliding_window": 6},
    "sparse": {"num_layers": 5, "sliding_window": 9, "full_attention_every": 4},
    "windows alone": {"num_layers": 3, "sliding_window": 6, "full_attention_every": 0},
    "mla": {"latent": TinyLatent()},
}


@pytest.fixture
def open_engine(tiny_folder, worker_spec):
    opened = []

    def make(model, options, **shape):
        folder = tiny_folder(**MODELS[model])
        spec = worker_spec(folder, **shape)
        groups = group_layers(
            load_model_config(folder).cache_shape.kv_cache_specs(
                spec.geometries[0].block_size, spec.dtype
            ),
            hybrid=len(spec.geometries) > 1,
        )
        executor = Executor(spec, in_process=True)
        ranks: list[Any] = list(executor.ranks)
        for rank in ranks:
            for tensor in rank.worker.cache.tensors.values():
                tensor.fill_(torch.nan)
        config = KVCacheConfig(spec.num_blocks, (), groups)
        opened.append(Engine(SchedulerOptions(**options), config, executor))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, {"num_blocks": 300}),
        ({"max_num_batched_tokens": 7}, {"num_blocks": 300, "tp": 2, "layout": "BLHNC"}),
        ({"max_num_batched_tokens": 9}, {"num_blocks": 300, "pp": 2, "block_size": 3}),
        ({}, {"num_blocks": 60}),
        ({"max_num_batched_tokens": 9}, {"num_blocks": 30, "layout": "HND"}),
    ],
    ids=["whole", "chunks-tp2", "chunks-pp2", "tight", "preempted"],
)
@pytest.mark.parametrize("model", ["hybrid", "windows alone", "mla"])
def test_tokens_are_those_of_an_engine_that_keeps_everything(
    model, options, shape, open_engine, prompts
):
    sent = prompts(3, 9, 17, 30, 30)
    sent[4][:16] = sent[3][:16]
    alone = {"enable_prefix_caching": False, "max_num_seqs": 1}
    plain = open_engine(model, alone, num_blocks=60, hybrid_kv_cache=False)
    expected = [done.token_ids for done in plain.generate(sent, GREEDY)]
    engine = open_engine(model, options, **shape)
    for _ in range(2):
        found = engine.generate(sent, GREEDY)
        assert [done.token_ids for done in found] == expected
        stats = engine.stats().scheduler
        assert stats.free_blocks == shape["num_blocks"] - 1
    assert shape["num_blocks"] < 300 or found[3].num_cached_tokens > 24
    assert shape["num_blocks"] > 30 or model == "windows alone" or stats.preemptions


def test_more_groups_than_one_of_each_kind(open_engine, prompts):
    sent = prompts(9, 30, 23)
    expected = open_engine("sparse", {}, num_blocks=60, hybrid_kv_cache=False).generate(
        sent, GREEDY
    )
    engine = open_engine("sparse", {"max_num_batched_tokens": 11}, num_blocks=100, pp=2)
    found = engine.generate(sent, GREEDY)
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]


def test_a_longer_prompt_hits_in_every_group(open_engine, prompts):
    """The windows before the end of the hit are still cached, older ones are not needed."""
    (prompt,) = prompts(60)
    cold = open_engine("hybrid", {"enable_prefix_caching": False}, num_blocks=100)
    (expected,) = cold.generate([prompt], GREEDY)
    engine = open_engine("hybrid", {}, num_blocks=100)
    engine.generate([prompt[:33]], GREEDY)
    (found,) = engine.generate([prompt], GREEDY)
    assert found.num_cached_tokens == 32
    assert found.token_ids == expected.token_ids
