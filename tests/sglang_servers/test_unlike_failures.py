"""Pairs of a vLLM server and an SGLang server: clients that leave, and servers that are killed.

No answer is wrong, other requests go on, and in the end nothing is lent, loaded or held.
"""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from benchmarks.vllm_servers.client import RefusalError, complete, events
from kvferry.testing.waiting import until
from tests.sglang_servers.servers import prompts
from tests.sglang_servers.unlike import Shape, unlike_pair

pytestmark = pytest.mark.slow
PROMPTS = prompts("unlike failures", 16)
LONG = [prompt for prompt in prompts("unlike long", 40) if len(prompt) > 900][:6]
SHAPES = {
    "vllm": Shape(first="vllm", block_size=32, page_size=24, extra={"lease_duration_s": 6.0}),
    "sglang": Shape(first="sglang", block_size=96, page_size=16, extra={"lease_duration_s": 6.0}),
}


@pytest.fixture(scope="module", params=SHAPES)
def unlike(request, reference, tmp_path_factory):
    """Pairs in which this engine computes the prompts."""
    reference.learn(PROMPTS, LONG)
    with unlike_pair(tmp_path_factory.mktemp("unlike"), SHAPES[request.param]) as pair:
        yield pair


def leave(pair, prompt, after):
    """A client that waits for a whole answer, and leaves after a time."""
    with contextlib.suppress(httpx.TimeoutException):
        return complete(pair.url, prompt, 200, timeout_s=after).tokens[:16]
    return None


def leave_mid_answer(pair, prompt, _):
    """A client that leaves after the third event of a stream; returns the tokens so far."""
    told = events(pair.url, prompt, 400)
    found = [next(told) for _ in range(3)]
    told.close()
    return [token for drawn in found for token in drawn]


def stay(pair, prompt, _):
    return complete(pair.url, prompt, 16).tokens


def test_clients_that_leave_strand_nothing_and_harm_no_other(unlike, reference):
    draw = random.Random(11)
    ways = [stay, stay, leave, leave_mid_answer]
    jobs = [
        (draw.choice(ways), prompt, right, draw.choice([0.01, 0.03, 0.1, 0.2, 0.4]))
        for prompt, right in zip(
            (PROMPTS + LONG) * 4, reference.of(PROMPTS + LONG) * 4, strict=True
        )
    ]

    def one(job):
        way, prompt, right, after = job
        found = way(unlike, prompt, after)
        if found is not None:
            assert found
            assert found[: len(right)] == right[: len(found)]
        return way if found is not None else None

    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(one, jobs))
    left = sum(way is None for way in told)
    print(f"{left} clients left before the first token, {told.count(leave_mid_answer)} later")
    assert left > 5
    until(lambda: unlike.is_idle, 60)
    assert [stay(unlike, prompt, 0) for prompt in PROMPTS] == reference.of(PROMPTS)
    until(lambda: unlike.is_idle, 60)


def test_a_decode_server_outlives_a_prefill_server_that_is_killed(unlike, reference):
    """The last test of a pair: its prefill server is gone. vLLM computes the prompts itself then,
    and an SGLang decode server cannot.
    """
    prefill, _ = unlike.programs
    right = reference.of(LONG)
    before = unlike.loaded_bytes

    def ask(prompt):
        try:
            return complete(unlike.url, prompt, 16).tokens
        except RefusalError as error:
            return error

    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(ask, prompt) for prompt in LONG]
        until(lambda: unlike.loaded_bytes > before or unlike.reports[1].transfers)
        prefill.kill()
        killed = time.monotonic()
        found = [answer.result() for answer in answers]
    print(f"the last answer came {time.monotonic() - killed:.1f} s after the kill")
    refused = [each for each in found if isinstance(each, RefusalError)]
    print(f"{len(refused)} of {len(found)} refused:", *{str(each) for each in refused}, sep="\n")
    assert bool(refused) == unlike.shape.is_vllm_first
    assert all(each == of for each, of in zip(found, right, strict=True) if each not in refused)
    until(lambda: unlike.decode_is_idle, 60)
