"""Requests that are dropped, and servers that stop, are killed or come back."""

import contextlib
import dataclasses
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvferry.testing.waiting import until
from tests.sglang_servers.servers import launched, pair_arguments, prompts, running, tokens

pytestmark = pytest.mark.slow
PROMPTS = prompts("failures", 16)
LONG = [prompt for prompt in prompts("long", 40) if len(prompt) > 900][:6]


@pytest.fixture(scope="module", params=[(1, 1), (2, 2)], ids=str)
def pair(request, reference, start_pair):
    """Pairs of servers with these numbers of ranks."""
    reference.learn(PROMPTS, LONG)
    with start_pair(16, 24, ranks=request.param) as pair:
        yield pair


def send(pair, prompt, cut=None, after=0.0):
    """Sends a request to both servers; the server ``cut`` hears no more of it after a time."""
    body = pair.body(prompt)

    def one(url):
        with contextlib.suppress(httpx.TimeoutException):
            return httpx.post(f"{url}/generate", json=body, timeout=after if url == cut else 120)
        return None

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one, pair.prefill.url)
        answer = one(pair.decode.url)
        first.result()
    return answer


def test_dropped_requests_leave_nothing_behind_and_harm_no_other(pair, reference):
    draw = random.Random(5)
    cuts = [None, None, pair.prefill.url, pair.decode.url]
    jobs = [
        (prompt, right, draw.choice(cuts), draw.choice([0.01, 0.05, 0.1, 0.3]))
        for prompt, right in zip(PROMPTS * 3, reference.of(PROMPTS) * 3, strict=True)
    ]

    def one(job):
        prompt, right, cut, after = job
        answer = send(pair, prompt, cut, after)
        if answer is not None and answer.status_code == httpx.codes.OK:
            assert answer.json()["output_ids"] == right
        elif answer is not None:
            assert cut == pair.prefill.url
            assert "KVTransferError" in answer.text
        else:
            assert cut == pair.decode.url

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, jobs))
    until(lambda: pair.prefill.open_leases() == 0)


def test_a_prefill_server_that_stops_for_a_while_only_delays(pair, reference):
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(send, pair, prompt) for prompt in LONG]
        time.sleep(0.3)
        pair.prefill.program.pause()
        time.sleep(5)
        pair.prefill.program.resume()
        found = [answer.result().json()["output_ids"] for answer in answers]
    assert found == reference.of(LONG)


def test_a_decode_server_goes_on_with_the_next_start_of_a_killed_prefill_server(
    pair, reference, tmp_path
):
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(ask_decode, pair, prompt) for prompt in LONG]
        with contextlib.suppress(httpx.HTTPError):
            list(threads.map(lambda prompt: post(pair.prefill.url, pair.body(prompt)), LONG[:1]))
        pair.prefill.program.close()
        for answer in answers:
            assert answer.result().status_code == httpx.codes.INTERNAL_SERVER_ERROR
    arguments = pair_arguments("prefill", pair.bootstrap, 64)
    again = launched(tmp_path / "again.log", *arguments)
    with running(again):
        for prompt, right in zip(PROMPTS, reference.of(PROMPTS), strict=True):
            body = pair.body(prompt)
            with ThreadPoolExecutor(1) as threads:
                first = threads.submit(tokens, again.url, body)
                assert tokens(pair.decode.url, body) == right
                first.result()


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)], ids=str)
def test_polls_that_fail_on_a_rank_of_their_own_spoil_no_answer(reference, start_pair, ranks):
    """SGLang ends a request on all ranks when one of them takes it for failed."""
    right = reference.of(PROMPTS)
    with start_pair(16, 24, ranks=ranks, failures=0.01) as pair:
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda prompt: send(pair, prompt), PROMPTS * 3))
        failed = 0
        for answer, tokens_of in zip(answers, right * 3, strict=True):
            if answer.status_code == httpx.codes.OK:
                assert answer.json()["output_ids"] == tokens_of
            else:
                assert "KVTransferError" in answer.text
                failed += 1
        assert 0 < failed < len(answers)
        until(lambda: pair.prefill.open_leases() == 0, 100)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
def test_of_a_killed_decode_server_the_leases_end_and_the_next_start_goes_on(
    reference, start_pair, tmp_path, ranks
):
    right = reference.of(PROMPTS)
    with start_pair(16, 24, ranks=ranks) as pair, ThreadPoolExecutor(8) as threads:
        for prompt in LONG[:4]:
            threads.submit(send, pair, prompt)
        until(lambda: any(each.target for each in pair.prefill.leases()))
        pair.decode.program.kill()
        killed = time.monotonic()
        assert pair.prefill.leases()
        again = launched(tmp_path / "again.log", *pair_arguments("decode", pair.bootstrap, 64))
        with running(again):
            new = dataclasses.replace(pair, decode=again)
            found = [send(new, prompt).json()["output_ids"] for prompt in PROMPTS]
            assert found == right
            # A taken lease ends after lease_duration_s, a lease that nobody takes after three.
            until(lambda: not pair.prefill.leases(), killed + 100 - time.monotonic())


def post(url, body):
    return httpx.post(f"{url}/generate", json=body, timeout=120)


def ask_decode(pair, prompt):
    """A request that the prefill server never gets."""
    return post(pair.decode.url, pair.body(prompt))
