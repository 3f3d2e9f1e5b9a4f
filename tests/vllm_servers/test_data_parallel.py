"""Servers of two data-parallel engines on either side: somebody chooses the engine, or vLLM does.

Each engine has an engine id and a control port of its own, which its tickets name.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.vllm_servers.client import complete, engine_metrics
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import EXTERNAL_TOKENS, Shape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OURS = KVFerry(extra={"cluster_key": "of one test run alone"})
CASES = {
    "prefill": (Shape(64, dp=2), Shape(128)),
    "decode": (Shape(64), Shape(128, dp=2)),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def shapes(request):
    return request.param


@pytest.fixture(scope="module")
def pair(shapes, start_pair):
    with start_pair(tiny_model(), *shapes, OURS) as pair:
        yield pair


def external_tokens(pair):
    """Data-parallel engine of decode → prompt tokens that it got from outside."""
    engines = engine_metrics(pair.decode.url)
    return {
        int(engine): found.get(EXTERNAL_TOKENS, 0) for engine, found in engines.items() if engine
    }


def test_a_router_that_chooses_the_engines(pair, shapes, prompts, expected):
    prefill, decode = shapes

    def ask(index):
        prompt = prompts[index]
        source, target = index % prefill.dp, index // 2 % decode.dp
        ticket = pair.start(prompt, data_parallel_rank=source)
        found = pair.finish(prompt, ticket, data_parallel_rank=target)
        return ticket, found.tokens

    before = external_tokens(pair)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(24)))
    assert [tokens for _, tokens in answers] == expected
    after = external_tokens(pair)
    for target in range(decode.dp):
        lengths = [len(prompt) for index, prompt in enumerate(prompts)]
        mine = [length for index, length in enumerate(lengths) if index // 2 % decode.dp == target]
        assert after[target] - before[target] >= sum(mine) - len(mine)
    assert sum(after.values()) - sum(before.values()) >= sum(map(len, prompts)) - 24
    port = pair.prefill.options.transfer["kv_port"]
    for index, (ticket, _) in enumerate(answers):
        source = index % prefill.dp
        suffix = f"_dp{source}" if prefill.dp > 1 else ""
        assert ticket["remote_engine_id"] == f"p0{suffix}"
        assert ticket["remote_port"] == port + source
    assert pair.idle()


def test_a_router_that_leaves_the_engine_to_vllm(pair, prompts, expected, start_router):
    before = external_tokens(pair)
    with start_router(pair) as url, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: complete(url, prompt, 16).tokens, prompts))
    assert answers == expected
    after = external_tokens(pair)
    assert sum(after.values()) - sum(before.values()) >= sum(map(len, prompts)) - 24
    assert pair.idle()
