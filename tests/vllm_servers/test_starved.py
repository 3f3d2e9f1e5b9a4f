"""Real vLLM servers whose processes hardly get to run: all of it is slow, and nothing is lost.

Three servers share the machine, the one that tells the right tokens included, one of them with two
ranks that spin; then eight spinning processes per core come in addition.
"""

import contextlib
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import Shape
from tests.cluster.test_starved import starved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

RUNS = int(os.environ.get("STARVED_RUNS", "2"))
"""Of twelve requests; a long run takes more."""
REQUESTS = 12
TIMEOUT_S = 1800.0
"""For one answer."""


@pytest.fixture(scope="module")
def pair(start_pair):
    connector = KVFerry(extra={"transport": "tcp"})
    with start_pair(tiny_model(), Shape(), Shape(tp=2), connector) as pair:
        yield pair


@pytest.mark.parametrize("spinning", [False, True], ids=["crowded", "starved"])
def test_every_request_is_served_with_the_tokens_of_a_single_server(pair, reference, spinning):
    served = []
    for run in range(RUNS):
        draw = random.Random(100 * run + spinning)
        prompts = [
            [draw.randrange(8, tiny_model().vocab_size) for _ in range(100 + 50 * number)]
            for number in range(REQUESTS)
        ]
        right = [reference.tokens(tiny_model(), prompt) for prompt in prompts]
        with (
            starved() if spinning else contextlib.nullcontext(),
            ThreadPoolExecutor(4) as threads,
        ):
            answers = list(
                threads.map(lambda one: pair.ask(one, timeout_s=TIMEOUT_S).tokens, prompts)
            )
        served.append(sum(map(list.__eq__, answers, right)))
        print(f"run {run}: {served[-1]} of {REQUESTS} right", flush=True)
    assert served == [REQUESTS] * RUNS
    assert pair.idle(within_s=TIMEOUT_S)
