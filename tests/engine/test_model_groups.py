"""Models whose layers lie in several groups, on ranks of any shape; blocks come and go."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.cache.config_builder import group_layers
from kvferry.engine.attention import build_batch
from kvferry.engine.communicator import LocalGroup
from kvferry.engine.messages import SamplingParams, ScheduledRequest
from kvferry.engine.model import DecoderModel
from kvferry.engine.shard import ModelShard, PagedKVCache
from kvferry.engine.weights import load_model_config
from kvferry.engine.weights_folder import TinyLatent
from kvferry.errors import BlockTableError, ModelError
from kvferry.layouts.layout import LAYOUT_NAMES
from kvferry.topology import EngineGeometry, ParallelShape

LENGTHS = (1, 4, 7, 22, 37)
TOKENS = 6
#: Three layers with windows in groups of two and of one, and two without in one group.
HYBRID = {"num_layers": 5, "sliding_window": 6, "full_attention_every": 2}
#: Four groups of one layer with a window, and one of one without.
SPARSE = HYBRID | {"full_attention_every": 4}
LATENT = {"num_layers": 5, "latent": TinyLatent()}
LATENT_QUERIES = {"num_layers": 5, "latent": TinyLatent(q_lora_rank=20)}
MODELS = {"hybrid": HYBRID, "sparse": SPARSE, "mla": LATENT, "mla-q": LATENT_QUERIES}


@dataclass
class Answer:
    prompt: list[int]
    tables: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    computed: int = 0


class Ranks:
    """All ranks of an engine, and the least of a block manager: it frees what windows pass by.

    A free block, and the null block, hold NaN: whoever reads one shows it.
    """

    def __init__(self, folder, groups, num_blocks=150):
        self.groups = groups
        config = load_model_config(folder)
        dtype = getattr(torch, groups[0].dtype)
        local = LocalGroup(groups[0].parallel)
        self.caches, self.models = [], []
        for rank in range(groups[0].world_size):
            memory = np.full(PagedKVCache.nbytes(groups, rank, num_blocks), 0xFF, np.uint8)
            self.caches.append(PagedKVCache(groups, rank, num_blocks, memory))
            self.models.append(
                DecoderModel(folder, config, groups, local.communicator(rank), dtype)
            )
        self.free = deque(range(1, num_blocks))
        self.most_held: list[Any] = [0] * len(groups)

    def forget(self, group, block):
        for cache in self.caches:
            for layer in self.groups[group].model_layers:
                for cells_BNHD in cache._parts.get(layer, ()):
                    cells_BNHD[block] = torch.nan
        self.free.append(block)

    def part(self, answer, chunk, number):
        known = answer.prompt + answer.tokens
        tokens = known[answer.computed : answer.computed + chunk]
        end = answer.computed + len(tokens)
        for index, (geometry, table) in enumerate(zip(self.groups, answer.tables, strict=True)):
            for block in range(geometry.first_kept_token(answer.computed) // geometry.block_size):
                if table[block]:
                    self.forget(index, table[block])
                    table[block] = 0
            while len(table) * geometry.block_size < end:
                table.append(self.free.popleft())
            self.most_held[index] = max(self.most_held[index], np.count_nonzero(table))
        part = ScheduledRequest(
            request_id=str(number),
            token_ids=tokens,
            first_position=answer.computed,
            block_ids=tuple(map(list, answer.tables)),
            sample=SamplingParams() if end == len(known) else None,
        )
        answer.computed = end
        return part

    def step(self, requests):
        """Logits of the last stage's first rank."""

        def run(model, cache):
            with torch.inference_mode():
                batch = build_batch(
                    requests, self.groups, model.dtype, model.config.cache_shape.layer_windows
                )
                return model.forward(batch, cache)

        with ThreadPoolExecutor(len(self.models)) as pool:
            found = list(pool.map(run, self.models, self.caches))
        return next((logits for logits in found if logits is not None), None)

    def generate(self, prompts, chunk=512, together=True):
        answers = [Answer(list(prompt), [[] for _ in self.groups]) for prompt in prompts]
        for batch in [answers] if together else [[answer] for answer in answers]:
            while live := [answer for answer in batch if len(answer.tokens) < TOKENS]:
                requests = [self.part(answer, chunk, n) for n, answer in enumerate(live)]
                logits = self.step(requests)
                rows = iter(() if logits is None else logits)
                for answer, request in zip(live, requests, strict=True):
                    if request.sample:
                        best = next(rows).topk(2)
                        answer.tokens.append(int(best.indices[0]))
                        answer.gaps.append(float(best.values[0] - best.values[1]))
        return answers


@pytest.fixture(scope="module")
def open_ranks(tiny_folder):
    def make(
        model, *, tp=1, pp=1, layout="NHD", block_size=4, dtype="float64", hybrid=True, **values
    ):
        folder = tiny_folder(**model)
        config = load_model_config(folder)
        groups = config.cache_shape.geometries(
            group_layers(config.cache_shape.kv_cache_specs(block_size, dtype), hybrid=hybrid),
            layout=layout,
            parallel=ParallelShape(tp=tp, pp=pp),
        )
        return Ranks(folder, groups, **values)

    return make


@pytest.fixture(scope="module")
def undivided(open_ranks, prompts):
    """Answers of one rank that keeps every token, each prompt alone and unchunked."""
    known = {}

    def answers(name, model=None):
        if name not in known:
            ranks = open_ranks(model or MODELS[name], hybrid=False, num_blocks=60)
            known[name] = ranks.generate(prompts(*LENGTHS), together=False)
        return known[name]

    return answers


def assert_same(found, expected):
    assert [answer.tokens for answer in found] == [one.tokens for one in expected]
    for answer, one in zip(found, expected, strict=True):
        assert answer.gaps == pytest.approx(one.gaps, abs=1e-9)


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_rank(name, tp, pp, open_ranks, prompts, undivided):
    """6 query heads and 1 or 3 KV heads over 2 and 4 ranks, 5 layers over 2 and 3 stages."""
    ranks = open_ranks(MODELS[name], tp=tp, pp=pp)
    assert len(ranks.groups) == {"hybrid": 3, "sparse": 5}.get(name, 1)
    assert_same(ranks.generate(prompts(*LENGTHS), chunk=9), undivided(name))


def test_a_stage_may_have_no_layer_of_a_group(open_ranks, prompts, undivided):
    ranks = open_ranks(SPARSE, pp=3)
    assert any(not group.layers(0) for group in ranks.groups)
    assert_same(ranks.generate(prompts(*LENGTHS), chunk=9), undivided("sparse"))


def test_more_ranks_than_query_heads_change_nothing(open_ranks, prompts, undivided):
    ranks = open_ranks(LATENT, tp=7)
    assert [len(model.shard.query_heads) for model in ranks.models].count(0) == 1
    assert_same(ranks.generate(prompts(*LENGTHS)), undivided("mla"))


@pytest.mark.parametrize("name", ["hybrid", "mla", "mla-q"])
def test_replicas_agree_to_the_last_bit_in_float32(name, open_ranks, prompts):
    ranks = open_ranks(MODELS[name], tp=7, dtype="float32")
    ranks.generate(prompts(40, 33), chunk=16)
    heads = ranks.groups[0].num_kv_heads
    for head in range(heads):
        first, *others = (ranks.caches[rank] for rank in ranks.groups[0].head_replicas(head))
        assert others
        for layer in range(5):
            for other in others:
                pairs = zip(first.layer(layer), other.layer(layer), strict=True)
                assert all(torch.equal(*(x.view(torch.int32) for x in pair)) for pair in pairs)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("name", ["hybrid", "mla"])
def test_layout_changes_nothing(name, layout, open_ranks, prompts, undivided):
    ranks = open_ranks(MODELS[name], layout=layout, tp=2, pp=2)
    assert_same(ranks.generate(prompts(*LENGTHS), chunk=10), undivided(name))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("name", ["hybrid", "mla"])
def test_block_size_changes_nothing(name, block_size, open_ranks, prompts, undivided):
    ranks = open_ranks(MODELS[name], block_size=block_size, num_blocks=400)
    assert_same(ranks.generate(prompts(*LENGTHS), chunk=5), undivided(name))


@pytest.mark.parametrize("chunk", [1, 2, 7, 36])
@pytest.mark.parametrize("name", ["hybrid", "mla"])
def test_chunks_change_nothing(name, chunk, open_ranks, prompts, undivided):
    ranks = open_ranks(MODELS[name])
    assert_same(ranks.generate(prompts(*LENGTHS), chunk=chunk), undivided(name))


@pytest.mark.parametrize("window", [1, 2, 5, 1000])
def test_a_window_of_any_length_is_computed_alike_whether_or_not_its_blocks_are_freed(
    window, open_ranks, prompts, undivided
):
    model = HYBRID | {"sliding_window": window}
    found = open_ranks(model, block_size=3).generate(prompts(*LENGTHS), chunk=8)
    assert_same(found, undivided(f"window {window}", model))


def test_a_model_of_windows_alone_is_one_group(open_ranks, prompts, undivided):
    model = HYBRID | {"full_attention_every": 0}
    ranks = open_ranks(model, tp=2)
    assert [group.sliding_window for group in ranks.groups] == [6]
    assert_same(ranks.generate(prompts(*LENGTHS), chunk=8), undivided("windows alone", model))


def test_windows_matter_and_hold_few_blocks(open_ranks, prompts, undivided):
    """Otherwise the tests above would show nothing."""
    without = undivided("no windows", {"num_layers": 5})
    assert [answer.tokens for answer in undivided("hybrid")] != [one.tokens for one in without]
    ranks = open_ranks(HYBRID)
    ranks.generate(prompts(37), chunk=5)
    held = dict(zip([group.sliding_window for group in ranks.groups], ranks.most_held, strict=True))
    # A window of 6 and a step of 5 tokens touch 4 blocks of 4 tokens at most, 43 tokens fill 11.
    assert held == {6: 4, None: 11}


def test_a_block_that_was_freed_too_early_is_named(open_ranks, prompts):
    ranks = open_ranks(HYBRID)
    for group in ranks.groups:
        if group.sliding_window:
            object.__setattr__(group, "sliding_window", group.sliding_window - 1)
    with pytest.raises(BlockTableError, match=r"'\d': entry \d of its table is the null block"):
        ranks.generate(prompts(*LENGTHS), chunk=9)


def group_of(config, layers, **values):
    defaults: dict[str, Any] = {
        "num_kv_heads": 3,
        "head_size": 16,
        "dtype": "float32",
        "block_size": 4,
        "layout": "NHD",
        "parallel": ParallelShape(),
    }
    return EngineGeometry(num_layers=len(layers), layer_indices=layers, **(defaults | values))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([([0, 1], {}), ([3, 4], {})], "layers: the geometries have 0-1, 3-4, the model 0-4"),
        ([([0, 1, 2], {}), ([2, 3, 4], {})], "layers: the geometries have 0-2, 2-4, the model"),
        ([([0, 1, 2, 3, 4], {"sliding_window": 6})], "keeps 6 tokens of layer 1, .* to all"),
        (
            [([0, 1, 2, 4], {"sliding_window": 5}), ([3], {})],
            "keeps 5 tokens of layer 0, which attends to 6",
        ),
        (
            [([0, 1, 2, 3, 4], {"attention_chunk_size": 6})],
            "attention_chunk_size: the geometry has 6, the model None",
        ),
        ([([0, 1, 2, 3, 4], {"head_size": 8})], "head_size: the geometry has 8, the model 16"),
        (
            [([0, 1, 2, 3, 4], {"head_size_v": 8})],
            "head_size_v: the geometry has 8, the model None",
        ),
        (
            [([0, 1, 2, 3, 4], {"use_mla": True, "num_kv_heads": 1})],
            "num_kv_heads: the geometry has 1",
        ),
        (
            [
                ([0, 1, 2, 3], {"parallel": ParallelShape(pp=2), "layer_split": (2, 2)}),
                ([4], {"parallel": ParallelShape(pp=2), "layer_split": (1, 0)}),
            ],
            "stages 0, 0, 1, 1, 0 of the layers",
        ),
        (
            [([0, 1, 2, 3, 4], {"parallel": ParallelShape(pp=2), "layer_split": (0, 5)})],
            "stages 1, 1, 1, 1, 1 of the layers",
        ),
        (
            [([0, 1, 2, 3], {}), ([4], {"parallel": ParallelShape(tp=2)})],
            "parallel: the geometry has",
        ),
    ],
)
def test_geometries_of_another_model_are_refused(groups, message, tiny_folder):
    config = load_model_config(tiny_folder(**HYBRID))
    with pytest.raises(ModelError, match=message):
        ModelShard.of(config, [group_of(config, layers, **it) for layers, it in groups], 0)
