"""A trainer changes the weights of a pair of vLLM servers that clients keep asking."""

import dataclasses
from functools import partial

import pytest

from benchmarks.vllm_servers.client import complete
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import Pair, Shape, pair_options
from benchmarks.vllm_servers.server import ServerOptions
from tests.trainer import Day, draw_prompts, post

pytestmark = pytest.mark.slow

CHANGES = 50
SEEDS = (0, 1, 2)
"""Three weights: those of two changes ago are not those of now."""
TOKENS = 8
PROMPTS = draw_prompts(tiny_model().vocab_size, 500)
LEASE_S = 10.0
CONNECTOR = KVFerry(policy="recompute", extra={"lease_duration_s": LEASE_S})
FAILED = "vllm:kvferry_failed_loads_total"
OPERATOR = {"Authorization": "Bearer of-the-trainer"}


@pytest.fixture(scope="module")
def models():
    return [tiny_model(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def expected(start, models):
    """The answers of each weight to all prompts, by a lone server."""
    answers = []
    for model in models:
        with start([ServerOptions(name=f"single-{model.name}", model=model)]) as (single,):
            answers.append([complete(single.url, prompt, TOKENS).tokens for prompt in PROMPTS])
    return answers


@pytest.fixture(scope="module")
def pair(start, models):
    options = pair_options(models[0], Shape(64), Shape(128), CONNECTOR)
    for_trainers = {"VLLM_SERVER_DEV_MODE": "1"}
    with start(
        [
            dataclasses.replace(each, environment={**each.environment, **for_trainers})
            for each in options
        ]
    ) as servers:
        yield Pair(*servers)


@pytest.fixture
def url(pair, models, start_router):
    reload(pair, models, 0)
    with start_router(pair, "--operator-key", "of-the-trainer", "--decode-only", "never") as url:
        yield url


def reload(pair, models, number):
    arguments = {"weights_path": str(models[number % len(models)].folder)}
    for server in (pair.prefill, pair.decode):
        body = {"method": "reload_weights", "kwargs": arguments}
        post(f"{server.url}/collective_rpc", json=body)


def test_no_answer_of_fifty_changes_mixes_weights(pair, url, models, expected):
    def change(number):
        for server in (pair.prefill, pair.decode):  # D fetches what P has lent, so P first
            post(f"{server.url}/pause", params={"mode": "wait"})
        reload(pair, models, number)
        post(f"{url}/resume", headers=OPERATOR)

    before = pair.external_tokens()
    with Day(lambda prompt: complete(url, prompt, TOKENS).tokens, PROMPTS) as day:
        for _ in range(CHANGES):
            day.change(change)
    assert day.errors == []
    assert day.wrong(expected) == []
    assert day.certain() == set(range(CHANGES))
    assert pair.external_tokens() - before > 50 * CHANGES
    assert pair.decode.metrics().get(FAILED, 0) == 0
    assert pair.idle()


def test_without_a_pause_only_requests_under_way_see_both_weights(pair, url, models, expected):
    """A request that begins after a change never gets KV of the weights before."""
    with Day(lambda prompt: complete(url, prompt, TOKENS).tokens, PROMPTS) as day:
        for _ in range(CHANGES):
            day.change(partial(reload, pair, models))
    assert day.errors == []
    day.answers = [each for each in day.answers if len(each[1]) == 1]
    assert day.wrong(expected) == []
    assert {weights[0] for _, weights, _ in day.answers} == set(range(CHANGES))
    # Leases that D refused for their weights end by themselves.
    assert pair.idle(within_s=6 * LEASE_S)
