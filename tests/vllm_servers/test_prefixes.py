"""Two real vLLM servers of unequal blocks that lend each other what their prefix caches have."""

import random
import uuid

import pytest

from benchmarks.vllm_servers.client import complete
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import EXTERNAL_TOKENS, Pair
from benchmarks.vllm_servers.server import ServerOptions

ONLY_CACHED = {"do_remote_decode": True, "do_remote_prefill": False, "only_cached": True}
TURNS = 4


@pytest.fixture(scope="module")
def both(start):
    options = [
        ServerOptions(
            name=name,
            model=tiny_model(),
            block_size=block_size,
            transfer=KVFerry().config("kv_both", name),
        )
        for name, block_size in (("p0", 64), ("d0", 128))
    ]
    with start(options) as servers:
        yield Pair(*servers)


def external_tokens(server):
    return server.metrics().get(EXTERNAL_TOKENS, 0.0)


def alone(server, prompt):
    """What a server answers that has nothing of the prompt, neither cached nor from outside."""
    return complete(server.url, prompt, 16, cache_salt=uuid.uuid4().hex).tokens


def test_a_conversation_goes_to_and_fro(both):
    """D lends the history to P, which computes the question and lends it all to D."""
    draw = random.Random(13)
    model = tiny_model()
    history = []
    for turn in range(TURNS):
        history += [draw.randrange(8, model.vocab_size) for _ in range(300 if turn == 0 else 40)]
        cached = complete(both.decode.url, history, 1, kv_transfer_params=ONLY_CACHED)
        params = cached.kv_transfer_params
        assert (params["remote_num_tokens"] > 0) == (turn > 0)
        before = external_tokens(both.prefill)
        ticket = complete(
            both.prefill.url, history, 1, kv_transfer_params=params | {"do_remote_decode": True}
        ).kv_transfer_params
        # Of what P lacks, and of what D has: all but the question of 40 tokens.
        moved = external_tokens(both.prefill) - before
        assert moved <= params["remote_num_tokens"] <= (len(history) - 40 if turn else 0)
        answer = complete(both.decode.url, history, 16, kv_transfer_params=ticket).tokens
        assert answer == alone(both.prefill, history)
        history += answer
    assert both.idle()


def test_a_server_that_has_computed_nothing_borrows_all_that_the_other_has(both):
    draw = random.Random(14)
    model = tiny_model()
    prompt = [draw.randrange(8, model.vocab_size) for _ in range(700)]
    expected = alone(both.prefill, prompt)
    assert complete(both.decode.url, prompt, 16).tokens == expected
    params = complete(both.decode.url, prompt, 1, kv_transfer_params=ONLY_CACHED).kv_transfer_params
    assert params["remote_num_tokens"] == 640
    before = external_tokens(both.prefill)
    assert complete(both.prefill.url, prompt, 16, kv_transfer_params=params).tokens == expected
    assert external_tokens(both.prefill) - before == 640
    assert both.idle()
