"""A planner that reads KV heads from the wrong ranks is found by the digests of their weights."""

import dataclasses
import random
from pathlib import Path

import pytest

from benchmarks.vllm_servers.client import RefusalError
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import Pair, Shape, pair_options

pytestmark = pytest.mark.slow
PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture
def miscounting(start):
    """``miscounting(**environment)`` starts a pair whose decode server's planner is wrong."""

    def starting(**environment):
        prefill, decode = pair_options(tiny_model(), Shape(tp=2), Shape(), KVFerry())
        decode = dataclasses.replace(
            decode,
            transfer={
                **(decode.transfer or {}),
                "kv_connector": "MiscountingConnector",
                "kv_connector_module_path": "miscounting",
            },
            path=(PLUGIN,),
            environment={**decode.environment, **environment},
        )
        return start([prefill, decode])

    return starting


@pytest.fixture
def prompt():
    draw = random.Random(3)
    return [draw.randrange(8, tiny_model().vocab_size) for _ in range(300)]


def test_digests_refuse_it_before_a_block_moves(miscounting, prompt):
    with miscounting() as servers:
        pair = Pair(*servers)
        with pytest.raises(RefusalError):
            pair.ask(prompt)
        assert pair.external_tokens() == 0
        assert "KV heads: rank 0 of engine 'p0' and rank 0 of engine 'd0'" in pair.decode.tail()


def test_without_digests_its_tokens_are_wrong_and_nothing_says_so(miscounting, prompt, reference):
    with miscounting(WITHOUT_DIGESTS="1") as servers:
        pair = Pair(*servers)
        assert pair.ask(prompt).tokens != reference.tokens(tiny_model(), prompt)
        assert pair.external_tokens() == len(prompt) - 1
