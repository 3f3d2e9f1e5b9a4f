"""The engine without a model does to a connector what an engine does."""

import pytest

from kvferry.testing.connector_conformance import GEOMETRIES, open_pair
from kvferry.testing.fake_rank import Stage


@pytest.fixture
def pair(configs):
    """Two engines that share a folder."""
    with open_pair(configs, GEOMETRIES["equal"]) as pair:
        yield pair


@pytest.fixture
def source(pair):
    """A prompt of 40 tokens that lies in the folder."""
    source = pair.prefill("r", 40)
    pair.settle()
    return source


@pytest.fixture
def no_file(example, monkeypatch):
    """Loads fail from now on."""

    def lost(self, job):
        raise FileNotFoundError(job.path)

    monkeypatch.setattr(example.FolderWorker, "_copy", lost)


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
