"""The engine over a real model: its tokens are those of computing every sequence from scratch."""

import pytest

from kvferry.cache import KVCacheConfig
from kvferry.cache.config_builder import group_layers
from kvferry.engine.engine import Engine
from kvferry.engine.executor import Executor
from kvferry.engine.messages import SamplingParams, ScheduledRequest, SchedulerOutput
from kvferry.engine.request import SchedulerOptions
from kvferry.engine.weights import load_model_config

TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS)
SEEDED = SamplingParams(max_tokens=TOKENS, temperature=0.9, top_k=40, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def reference(tiny_folder, worker_spec):
    """Answers token by token, each from the whole sequence, with nothing kept in between."""
    executor = Executor(worker_spec(tiny_folder(num_layers=3), num_blocks=40), in_process=True)

    def answer(prompt, sampling):
        known = list(prompt)
        for index in range(sampling.max_tokens):
            part = ScheduledRequest(
                request_id="r",
                token_ids=known,
                first_position=0,
                block_ids=(list(range(39, 0, -1)),),
                sample=sampling,
                output_index=index + sampling.seed_offset,
            )
            (output,) = executor.execute(SchedulerOutput(requests=[part]))
            assert output is not None
            known = [*known, output.sampled["r"]]
        return known[len(prompt) :]

    with executor:
        yield answer


@pytest.fixture
def open_engine(tiny_folder, worker_spec):
    opened = []

    def make(options, **spec_values):
        folder = tiny_folder(num_layers=3)
        spec = worker_spec(folder, **spec_values)
        specs = load_model_config(folder).cache_shape.kv_cache_specs(
            spec.geometries[0].block_size, spec.dtype
        )
        config = KVCacheConfig(spec.num_blocks, (), group_layers(specs))
        opened.append(Engine(options, config, Executor(spec, in_process=True)))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({}, {"num_blocks": 80}),
        ({"max_num_batched_tokens": 7}, {"num_blocks": 80}),
        ({"max_num_batched_tokens": 1}, {"num_blocks": 80}),
        ({"max_num_seqs": 2, "enable_prefix_caching": False}, {"num_blocks": 80}),
        ({}, {"num_blocks": 16}),
        ({"max_num_batched_tokens": 9}, {"num_blocks": 16, "layout": "HND", "tp": 2}),
        ({"max_num_batched_tokens": 9}, {"num_blocks": 9, "block_size": 7, "pp": 2}),
    ],
    ids=["whole", "chunks", "single", "two", "preempted", "preempted-tp2", "preempted-pp2"],
)
def test_tokens_are_those_of_computing_every_sequence_from_scratch(
    options, spec, sampling, reference, open_engine, prompts
):
    sent = prompts(3, 9, 17, 30, 30)
    sent[4][:16] = sent[3][:16]
    engine = open_engine(SchedulerOptions(**options), **spec)
    done = engine.generate(sent, sampling)
    assert [c.token_ids for c in done] == [reference(prompt, sampling) for prompt in sent]
    assert all(len(c.gaps) == TOKENS for c in done)
    stats = engine.stats().scheduler
    assert (stats.preemptions > 0) == (spec["num_blocks"] < 80)
    assert stats.free_blocks == spec["num_blocks"] - 1


def test_a_prefix_hit_changes_no_token(reference, open_engine, prompts):
    (prompt,) = prompts(40)
    engine = open_engine(SchedulerOptions(), num_blocks=80)
    engine.generate([prompt[:33]], GREEDY)
    (done,) = engine.generate([prompt], GREEDY)
    assert done.num_cached_tokens == 32
    assert done.token_ids == reference(prompt, GREEDY)


def test_an_answer_goes_on_elsewhere_with_the_same_draws(reference, open_engine, prompts):
    (prompt,) = prompts(12)
    whole = reference(prompt, SEEDED)
    engine = open_engine(SchedulerOptions(), num_blocks=80)
    rest = SamplingParams(
        max_tokens=TOKENS - 3, temperature=0.9, top_k=40, top_p=0.95, seed=11, seed_offset=3
    )
    (done,) = engine.generate([prompt + whole[:3]], rest)
    assert done.token_ids == whole[3:]
