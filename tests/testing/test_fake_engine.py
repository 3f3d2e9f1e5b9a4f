"""The engine without a model does to a connector what an engine does."""

import pytest

from kvferry.testing.connector_conformance import GEOMETRIES, open_pair
from kvferry.testing.fake_rank import Stage


@pytest.fixture
def pair(configs):
    """Two engines that share a folder."""
    with open_pair(configs, GEOMETRIES["tp2-pp2"]) as pair:
        yield pair


@pytest.fixture
def source(pair):
    """A prompt of 40 tokens that lies in the folder."""
    source = pair.prefill("r", 40)
    pair.settle()
    return source


@pytest.fixture
def no_file(example, monkeypatch):
    """Loads fail from now on, on the second rank only."""
    plan = example.plan_transfer

    def lost(**shapes):
        if shapes.get("target_rank") == 1:
            raise FileNotFoundError("the file is lost")
        return plan(**shapes)

    monkeypatch.setattr(example, "plan_transfer", lost)


def test_a_prompt_whose_load_failed_takes_no_more_blocks_than_it_needs(pair, source, no_file):
    pair.consumer.chunk_tokens = 4
    taken = []
    pair.consumer.during_step = lambda: taken.append(
        pair.consumer.num_blocks - 1 - pair.consumer.num_free_blocks
    )
    request = pair.decode(source)
    pair.finish(request)
    assert request.failed
    assert max(taken) == -(-request.num_tokens // pair.consumer.block_size)
    pair.settle()


def test_a_preempted_request_may_load_again(pair, source):
    pair.consumer.chunk_tokens = 2
    request = pair.decode(source)
    pair.run(lambda: request.stage is Stage.COMPUTING, "the end of its load")
    loaded = request.external_tokens
    pair.consumer.preempt("r")
    pair.finish(request)
    assert request.external_tokens == loaded > 0
    ends = [output for output in pair.consumer.outputs if "r" in output.finished_recving]
    assert len(ends) == 2
    pair.settle()


def test_a_prompt_whose_load_failed_within_the_step_is_computed(in_step, pair, source, no_file):
    request = pair.decode(source)
    stages = []
    pair.consumer.during_step = lambda: stages.append((request.stage, request.external_tokens))
    pair.finish(request)
    assert stages == [(Stage.COMPUTING, 40), (Stage.COMPUTING, 0)]
    assert request.failed
    assert request.finish_reason == "length"
    pair.settle()
