"""The example runs, and its copies put the cells where they belong."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from kvferry.topology import plan_transfer, run_copies

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("plan_alone", HERE / "plan_alone.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_prints_who_reads_what(example, capsys):
    example.main()
    printed = capsys.readouterr().out
    assert "target rank 1 reads head 2 of layer 0 from source rank 2" in printed
    assert "target rank 0 reads head 1" not in printed


def test_every_token_lies_where_the_target_looks_for_it(example):
    source, target = example.engines()
    sources = example.random_caches(source, num_blocks=5)
    for rank in range(2):
        plan = plan_transfer(source=source, target=target, target_rank=rank)
        shape = target.cache_shape(rank, num_blocks=4)
        cache = {name: np.zeros(shape, np.float32) for name in target.tensor_names(rank)}
        run_copies(
            plan.bind(example.SOURCE_BLOCKS, example.TARGET_BLOCKS, example.NUM_TOKENS),
            sources=sources,
            target=cache,
        )
        for token in range(example.NUM_TOKENS):
            theirs = example.SOURCE_BLOCKS[token // 16]
            ours = example.TARGET_BLOCKS[token // 24]
            for slot, head in enumerate(target.heads(rank)):
                for name, tensor in cache.items():
                    # HND on the source: [part, block, head, token, element]; one head per rank.
                    wanted = sources[head][name][:, theirs, 0, token % 16]
                    assert np.array_equal(tensor[:, ours, token % 24, slot], wanted)
