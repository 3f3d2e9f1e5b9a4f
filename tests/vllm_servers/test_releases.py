"""Servers of two releases of vLLM, as there are while a cluster is upgraded host by host.

They run with an older release under test: beside the newest one, where that is installed too.
"""

import dataclasses
import random

import pytest

from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import Pair, Shape, pair_options
from benchmarks.vllm_servers.server import NEWEST_VLLM, VLLM

pytestmark = pytest.mark.skipif(
    VLLM == NEWEST_VLLM or not NEWEST_VLLM.exists(),
    reason="with `make test-vllm VLLM=0.31.0`, say, where `make test-vllm` has run before",
)
LENGTHS = (5, 128, 300, 1400)


@pytest.mark.parametrize("upgraded", ["prefill", "decode"])
def test_a_pair_of_an_older_and_the_newest_release(start, reference, upgraded):
    model = tiny_model()
    prefill, decode = pair_options(model, Shape(64), Shape(128), KVFerry())
    if upgraded == "prefill":
        prefill = dataclasses.replace(prefill, vllm=NEWEST_VLLM)
    else:
        decode = dataclasses.replace(decode, vllm=NEWEST_VLLM)
    draw = random.Random(upgraded)
    prompts = [[draw.randrange(8, model.vocab_size) for _ in range(length)] for length in LENGTHS]
    with start([prefill, decode]) as servers:
        pair = Pair(*servers)
        for prompt in prompts:
            assert pair.ask(prompt).tokens == reference.tokens(model, prompt)
        assert pair.external_tokens() >= sum(len(prompt) - 1 for prompt in prompts)
        assert pair.idle()
