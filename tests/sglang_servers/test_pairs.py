"""Pairs of real SGLang servers with any two page sizes, TP and PP answer as a lone server does.

The bytes that moved are counted: a decode server that computes the prompt itself would answer as
well.
"""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from benchmarks.programs import ServerError
from benchmarks.vllm_servers.front import router
from benchmarks.vllm_servers.models import one_head_model
from benchmarks.vllm_servers.ports import free_port
from kvferry.testing.waiting import until
from tests.sglang_servers.servers import (
    BYTES_PER_TOKEN,
    asked,
    launched,
    mini_lb,
    pair_arguments,
    prompts,
    streamed,
    tokens,
)

SHAPES = {
    "16 to 24": ((16, 24), (1, 1)),
    "1 to 64": ((1, 64), (1, 1)),
    "64 to 16": ((64, 16), (1, 1)),
    "16 to 16": ((16, 16), (1, 1)),
    "16 to 24, TP 1 to 2": ((16, 24), (1, 2)),
    "64 to 16, TP 2 to 1": ((64, 16), (2, 1)),
    "16 to 64, TP 2 to 2": ((16, 64), (2, 2)),
    "64 to 16, PP 1 to 2": ((64, 16), (1, 1), (1, 2)),
    "16 to 24, PP 2 to 1": ((16, 24), (1, 1), (2, 1)),
    "16 to 64, PP 2 to 2": ((16, 64), (1, 1), (2, 2)),
}
"""Page sizes, numbers of TP ranks, and numbers of pipeline stages."""
SHORT = "16 to 24"
PROMPTS = prompts("pairs")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(shape, id=name, marks=() if name == SHORT else pytest.mark.slow)
        for name, shape in SHAPES.items()
    ],
)
def pair(request, reference, start_pair):
    reference.learn(PROMPTS)  # before the pair runs: a lone server takes a core too
    pages, ranks, *stages = request.param
    with start_pair(*pages, ranks=ranks, stages=stages[0] if stages else (1, 1)) as pair:
        yield pair


def test_one_at_a_time(pair, reference, together):
    before = pair.decode.loaded_bytes()
    for prompt, right in zip(PROMPTS, reference.of(PROMPTS), strict=True):
        assert together([pair.prefill.url, pair.decode.url], pair.body(prompt)) == right
    moved = pair.decode.loaded_bytes() - before
    assert moved == BYTES_PER_TOKEN * sum(map(len, PROMPTS))
    until(lambda: pair.prefill.open_leases() == 0)
    assert pair.decode.metric("sglang:kvferry_load_bytes_sum") == pair.decode.loaded_bytes()
    assert pair.decode.metric("sglang:kvferry_load_seconds_count") >= len(PROMPTS)


def test_eight_at_a_time_behind_the_mini_load_balancer(pair, reference, tmp_path):
    before = pair.decode.loaded_bytes()
    with mini_lb(tmp_path / "lb.log", pair) as url, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: tokens(url, asked(prompt)), PROMPTS))
    assert answers == reference.of(PROMPTS)
    assert pair.decode.loaded_bytes() - before == BYTES_PER_TOKEN * sum(map(len, PROMPTS))
    until(lambda: pair.prefill.open_leases() == 0)


@pytest.mark.parametrize("ask", [tokens, streamed])
def test_eight_at_a_time_behind_the_router(pair, reference, tmp_path, ask):
    before = pair.decode.loaded_bytes()
    servers = ("--prefill", pair.prefill.url, "--decode", pair.decode.url)
    with router(tmp_path / "router.log", *servers) as url, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: ask(url, asked(prompt)), PROMPTS))
    assert answers == reference.of(PROMPTS)
    assert pair.decode.loaded_bytes() - before == BYTES_PER_TOKEN * sum(map(len, PROMPTS))
    until(lambda: pair.prefill.open_leases() == 0)


def test_a_list_of_prompts_has_a_room_for_each(pair, reference, tmp_path):
    asked_at_once, before = PROMPTS[:8], pair.decode.loaded_bytes()
    body = asked([]) | {"input_ids": asked_at_once}
    servers = ("--prefill", pair.prefill.url, "--decode", pair.decode.url)
    with router(tmp_path / "router.log", *servers) as url:
        answers = httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status().json()
    assert [answer["output_ids"] for answer in answers] == reference.of(asked_at_once)
    assert pair.decode.loaded_bytes() - before == BYTES_PER_TOKEN * sum(map(len, asked_at_once))
    until(lambda: pair.prefill.open_leases() == 0)


@pytest.mark.slow
def test_kv_heads_that_sglang_pads_are_refused_at_the_start(tmp_path):
    """On GPUs, SGLang gives a KV head to several ranks; on CPUs it adds heads of padding."""
    arguments = pair_arguments("prefill", free_port(), 16)
    server = launched(tmp_path / "padded.log", *arguments, ranks=2, model=one_head_model())
    refusal = "--tp-size: 2 does not divide the 1 KV heads"
    with server.program, pytest.raises(ServerError, match=refusal):
        server.program.wait()
