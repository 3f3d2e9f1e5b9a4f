"""Tokens do not depend on how the model is cut, batched, chunked or laid out in memory."""

from typing import Any

import pytest
import torch

from kvferry.engine.communicator import LocalGroup
from kvferry.engine.executor import Executor
from kvferry.engine.messages import SamplingParams
from kvferry.engine.shard import ModelShard
from kvferry.engine.weights import load_model_config
from kvferry.errors import ModelError, WorkerDiedError
from kvferry.layouts.layout import LAYOUT_NAMES
from kvferry.topology import ParallelShape

LENGTHS = (1, 4, 7, 22, 37)


@pytest.fixture(scope="module")
def undivided(tiny_folder, worker_spec, generate, prompts):
    """Tokens and gaps of one rank in float64, each prompt alone and unchunked."""
    known = {}

    def answer(**model):
        key = tuple(model.items())
        if key not in known:
            folder = tiny_folder(num_layers=5, **model)
            with Executor(worker_spec(folder), in_process=True) as executor:
                known[key] = generate(executor, prompts(*LENGTHS), together=False)
        return known[key]

    return answer


def assert_same(found, expected):
    assert [sequence.output for sequence in found] == [one.output for one in expected]
    for sequence, one in zip(found, expected, strict=True):
        assert sequence.gaps == pytest.approx(one.gaps, abs=1e-9)


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_tokens_are_those_of_one_rank(
    tp, pp, tiny_folder, worker_spec, generate, prompts, undivided
):
    """3 KV heads over 2 and 4 ranks, 5 layers over 2 and 3 stages, 130 inner over 3 and 4."""
    spec = worker_spec(tiny_folder(num_layers=5), tp=tp, pp=pp)
    with Executor(spec, in_process=True) as executor:
        found = generate(executor, prompts(*LENGTHS), chunk=9, seed=tp)
    assert_same(found, undivided())


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_ranks_without_a_query_head_change_nothing(
    tp, tiny_folder, worker_spec, generate, prompts, undivided
):
    model = {"num_heads": 2, "num_kv_heads": 1}
    spec = worker_spec(tiny_folder(num_layers=5, **model), tp=tp)
    counts = [len(spec.geometries[0].query_heads(rank, 2)) for rank in range(tp)]
    assert (0 in counts) == (tp > 2)
    with Executor(spec, in_process=True) as executor:
        found = generate(executor, prompts(*LENGTHS))
        ranks: list[Any] = list(executor.ranks)
        replicas = [rank.worker.cache.layer(3) for rank in ranks]
        for keys, values in replicas[1:]:
            assert torch.equal(keys, replicas[0][0])
            assert torch.equal(values, replicas[0][1])
    assert_same(found, undivided(**model))


def test_replicas_of_a_head_agree_to_the_last_bit_in_float32(
    tiny_folder, worker_spec, generate, prompts
):
    """A target may read either; the ranks' products for queries have other shapes."""
    model = {"num_heads": 9, "num_kv_heads": 3, "hidden_size": 144}
    spec = worker_spec(tiny_folder(**model), tp=7, dtype="float32")
    with Executor(spec, in_process=True) as executor:
        generate(executor, prompts(40, 33), chunk=16)
        for head in range(3):
            ranks = spec.geometries[0].head_replicas(head)
            assert len(ranks) > 1
            for layer in range(4):
                first, *others = [executor.ranks[r].worker.cache.layer(layer) for r in ranks]
                for other in others:
                    assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_size_changes_nothing(
    block_size, tiny_folder, worker_spec, generate, prompts, undivided
):
    spec = worker_spec(tiny_folder(num_layers=5), block_size=block_size, num_blocks=130)
    with Executor(spec, in_process=True) as executor:
        assert_same(generate(executor, prompts(*LENGTHS), chunk=5), undivided())


@pytest.mark.parametrize("layout", [*LAYOUT_NAMES, "BHK(k=DN,v=ND)", "KHB(k=ND,v=DN)"])
def test_layout_changes_nothing(layout, tiny_folder, worker_spec, generate, prompts, undivided):
    spec = worker_spec(tiny_folder(num_layers=5), layout=layout, tp=2, pp=2)
    with Executor(spec, in_process=True) as executor:
        assert_same(generate(executor, prompts(*LENGTHS)), undivided())


@pytest.mark.parametrize("chunk", [1, 2, 10, 36])
def test_chunks_change_nothing(chunk, tiny_folder, worker_spec, generate, prompts, undivided):
    with Executor(worker_spec(tiny_folder(num_layers=5)), in_process=True) as executor:
        assert_same(generate(executor, prompts(*LENGTHS), chunk=chunk), undivided())


def test_stale_memory_changes_nothing(tiny_folder, worker_spec, generate, prompts, undivided):
    """Blocks that others used hold anything, NaN included."""
    with Executor(worker_spec(tiny_folder(num_layers=5)), in_process=True) as executor:
        rank: Any = executor.ranks[0]
        for tensor in rank.worker.cache.tensors.values():
            tensor.fill_(float("nan"))
        assert_same(generate(executor, prompts(*LENGTHS), chunk=9), undivided())


def test_seeded_draws_do_not_depend_on_shape_or_batch(tiny_folder, worker_spec, generate, prompts):
    sampling = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=7)
    folder, asked = tiny_folder(), prompts(*LENGTHS)
    with Executor(worker_spec(folder), in_process=True) as executor:
        alone = generate(executor, asked, sampling=sampling, tokens=10, together=False)
        greedy = generate(executor, asked, tokens=10)
    with Executor(worker_spec(folder, tp=3, pp=2), in_process=True) as executor:
        found = generate(executor, asked, sampling=sampling, tokens=10, chunk=8)
    assert_same(found, alone)
    assert [one.output for one in greedy] != [one.output for one in alone]


def test_a_geometry_of_another_model_is_refused(tiny_folder, worker_spec):
    config = load_model_config(tiny_folder())
    geometry = worker_spec(tiny_folder(num_kv_heads=2)).geometries[0]
    with pytest.raises(ModelError, match="num_kv_heads: the geometry has 2, the model 3"):
        ModelShard.of(config, (geometry,), 0)


def test_a_silent_rank_is_an_error_and_not_a_hang():
    group = LocalGroup(ParallelShape(tp=2, pp=2), timeout_s=0.05)
    with pytest.raises(WorkerDiedError, match="a TP rank of stage 0 is gone or silent"):
        group.communicator(0).all_reduce(torch.ones(2))
    with pytest.raises(WorkerDiedError, match="the previous stage is gone or silent"):
        group.communicator(3).recv(torch.ones(2))
