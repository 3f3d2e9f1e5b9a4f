"""Pairs of real vLLM servers of any two shapes generate what a single server does.

vLLM's own counters tell that the decode server computed nothing of the prompt but its last token.
"""

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.vllm_servers.client import RefusalError, complete, stream
from benchmarks.vllm_servers.connectors import Connector, KVFerry, Nixl
from benchmarks.vllm_servers.models import (
    Model,
    demo_model,
    gemma4_model,
    hybrid_model,
    latent_model,
    tiny_model,
)
from benchmarks.vllm_servers.pair import Shape

LENGTHS = (5, 31, 100, 128, 129, 300, 1000, 1400)
"""Tokens: shorter than any block, on and next to borders, and more than a step computes."""
PLAIN = Shape()
OURS = KVFerry()


@dataclasses.dataclass(frozen=True)
class Case:
    """Two shapes, a model, and what connects them."""

    prefill: Shape = PLAIN
    decode: Shape = PLAIN
    model: Callable[[], Model] = tiny_model
    connector: Connector = OURS


CASES = {
    "block 64 to 128": Case(Shape(64), Shape(128)),
    "equal": Case(),
    "block 128 to 64": Case(Shape(128), Shape(64)),
    "block 32 to 96": Case(Shape(32), Shape(96)),
    "tp 1 to 2": Case(PLAIN, Shape(tp=2)),
    "tp 2 to 1": Case(Shape(tp=2), PLAIN),
    "pp 2 to 1": Case(Shape(pp=2), PLAIN),
    "pp 1 to 2": Case(PLAIN, Shape(pp=2)),
    "hybrid": Case(model=hybrid_model),
    "hybrid, block 64 to 128": Case(Shape(64), Shape(128), model=hybrid_model),
    "mla, tp 1 to 2": Case(PLAIN, Shape(tp=2), model=latent_model),
    "unequal heads, tp 1 to 2": Case(PLAIN, Shape(tp=2), model=gemma4_model),
    "one full head, tp 1 to 2": Case(PLAIN, Shape(tp=2), model=lambda: gemma4_model(1)),
    "unequal heads, tp 2 to 1": Case(Shape(tp=2), PLAIN, model=gemma4_model),
    "SmolLM2": Case(Shape(64), Shape(128), model=demo_model),
    "through tcp": Case(Shape(64), Shape(128), connector=KVFerry(extra={"transport": "tcp"})),
    # What stands around the connector is right if vLLM's own one passes.
    "equal, NIXL": Case(connector=Nixl()),
}
SHORT = "block 64 to 128"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=pytest.mark.smoke if name == SHORT else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def model(case):
    return case.model()


@pytest.fixture(scope="module")
def pair(case, model, start_pair):
    with start_pair(model, case.prefill, case.decode, case.connector) as pair:
        yield pair


@pytest.fixture
def prompt_of(model, request):
    """``prompt_of(length)``: random tokens, other ones in every test."""
    draw = random.Random(request.node.name)
    return lambda length: [draw.randrange(8, model.vocab_size) for _ in range(length)]


def test_the_tokens_of_a_single_server_come_out_and_the_prompt_from_outside(
    pair, model, reference, prompt_of
):
    for length in LENGTHS:
        prompt = prompt_of(length)
        before = pair.external_tokens()
        assert pair.ask(prompt).tokens == reference.tokens(model, prompt), length
        assert pair.external_tokens() - before >= length - 1
    assert pair.idle()


def test_the_weights_of_both_servers_prove_every_kv_head_that_moves(case, pair):
    if not isinstance(case.connector, KVFerry):
        pytest.skip("kvferry's servers alone describe themselves")
    servers = (pair.prefill, pair.decode)
    addresses = [f"127.0.0.1:{server.options.transfer['kv_port']}" for server in servers]
    command = [sys.executable, "-m", "kvferry.cli", "check", "--json", *addresses]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    (verdict,) = json.loads(told.stdout)
    assert verdict["fits"]
    assert verdict["unproved_heads"] == []


def test_a_prefix_that_the_decode_server_has_is_not_fetched_again(
    pair, model, reference, prompt_of
):
    if not model.prefix_hits:
        pytest.skip("vLLM's CPU backend finds no prefixes of this model")
    shared, rest = prompt_of(400), prompt_of(250)
    pair.ask(shared)
    before = pair.external_tokens()
    prompt = shared + rest
    assert pair.ask(prompt).tokens == reference.tokens(model, prompt)
    assert len(rest) - 1 <= pair.external_tokens() - before <= len(prompt) - 300
    assert pair.idle()


def test_two_dozen_requests_eight_at_a_time(pair, model, reference, prompt_of):
    prompts = [prompt_of(random.Random(index).randrange(3, 700)) for index in range(24)]
    expected = [reference.tokens(model, prompt) for prompt in prompts]
    before = pair.external_tokens()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: pair.ask(prompt).tokens, prompts))
    assert answers == expected
    assert pair.external_tokens() - before >= sum(len(prompt) - 1 for prompt in prompts)
    assert pair.idle()


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
def test_behind_our_router(case, pair, model, reference, prompt_of, start_router, first_token):
    if first_token == "prefill" and isinstance(case.connector, Nixl):
        pytest.skip("NixlConnector's decode server takes no token more than prefill had")
    tokenizer = ("--tokenizer", str(model.folder)) if first_token == "prefill" else ()
    with start_router(pair, *tokenizer) as url:
        assert_right_through(url, pair, model, reference, prompt_of)


@pytest.mark.slow
def test_behind_vllms_own_example_proxy(pair, model, reference, prompt_of, start_vllms_proxy):
    with start_vllms_proxy(pair) as url:
        assert_right_through(url, pair, model, reference, prompt_of)


def assert_right_through(url, pair, model, reference, prompt_of):
    """Four requests at a time, whole and as streams."""
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [reference.tokens(model, prompt) for prompt in prompts]
    before = pair.external_tokens()
    with ThreadPoolExecutor(4) as threads:
        whole = list(threads.map(lambda prompt: complete(url, prompt, 16).tokens, prompts))
        streamed = list(threads.map(lambda prompt: stream(url, prompt, 16)[1], prompts))
    assert whole == expected
    assert streamed == expected
    assert pair.external_tokens() - before >= sum(len(prompt) - 1 for prompt in prompts)
    assert pair.idle()


def test_a_ticket_with_another_prompt(case, pair, model, reference, prompt_of):
    """Ours is for one prompt. Without that the tokens are wrong, which the other tests notice."""
    prompt, other = prompt_of(300), prompt_of(300)
    ticket = pair.start(other)
    if isinstance(case.connector, KVFerry):
        with pytest.raises(RefusalError):
            pair.finish(prompt, ticket)
    else:
        assert pair.finish(prompt, ticket).tokens != reference.tokens(model, prompt)
    assert pair.finish(other, pair.start(other)).tokens == reference.tokens(model, other)
    assert pair.idle()
