"""The other tests would notice blocks of another request: the tokens do depend on what is moved."""

import random
from pathlib import Path

import pytest

from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import Shape

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).parent / "plugin"


def test_blocks_of_another_request_give_wrong_tokens(start_pair, reference):
    model = tiny_model()
    draw = random.Random(0)
    first, second = ([draw.randrange(8, model.vocab_size) for _ in range(300)] for _ in range(2))
    mixed_up = KVFerry(extra={"transport": "mixed_up_tcp"})
    with start_pair(model, Shape(64), Shape(128), mixed_up, path=(PLUGIN,)) as pair:
        assert pair.ask(first).tokens == reference.tokens(model, first)
        assert pair.ask(second).tokens != reference.tokens(model, second)
        assert pair.external_tokens() >= 598
