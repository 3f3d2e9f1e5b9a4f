"""What no decode server will fetch goes back to the prefill server at once, long before its lease
ends: the router sends the word over the control channel, or has the decode server refuse a request.
"""

import http.client
import random
import socket
import time
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import EXTERNAL_TOKENS, Shape
from kvferry.control.client import fetch_status
from kvferry.testing.waiting import WAIT_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LEASE_S = 600.0
EXTRA = {"cluster_key": "of one test run alone", "lease_duration_s": LEASE_S}
REFUSED = {"max_tokens": 5000}
"""Only the decode server sees that this is more than its longest sequence."""


@pytest.fixture(scope="module")
def pair(start_pair):
    with start_pair(tiny_model(), Shape(64), Shape(64), KVFerry(extra=EXTRA)) as pair:
        yield pair


@pytest.fixture(scope="module", params=["by the channel", "by a decode server"])
def url(request, pair, start_router):
    arguments = []
    if request.param == "by the channel":
        for server in (pair.prefill, pair.decode):
            arguments += ["--control", f"127.0.0.1:{server.options.transfer['kv_port']}"]
    with start_router(pair, *arguments) as url:
        yield url


def counters(pair):
    port = pair.prefill.options.transfer["kv_port"]
    return fetch_status("127.0.0.1", port, timeout_s=WAIT_S).counters


def released(pair):
    return counters(pair).get("leases.released", 0)


def body_of(seed, **fields):
    draw = random.Random(seed)
    prompt = [draw.randrange(8, tiny_model().vocab_size) for _ in range(300)]
    return {"model": "model", "prompt": prompt, "max_tokens": 16, **fields}


def lapsed(url):
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=WAIT_S).text.splitlines()
    return [line for line in lines if line.startswith("kvferry_router_loans_lapsed_total")]


def test_a_decode_server_that_knows_no_such_model_gives_the_lease_back_and_moves_nothing(pair):
    """What the router relies on if it does not know the channel."""
    before = released(pair)
    ticket = dict(pair.start(body_of("no such model")["prompt"]))
    body = {"model": "none", "prompt": [0], "max_tokens": 1, "kv_transfer_params": ticket}
    answer = httpx.post(f"{pair.decode.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 404
    until(lambda: released(pair) > before)
    assert pair.idle(WAIT_S)
    assert not pair.decode.metrics()[EXTERNAL_TOKENS]


def test_a_server_tells_until_when_it_lends(pair):
    """What an operator looks at before the end of a server."""

    def num_open():
        return pair.prefill.metrics()["vllm:kvferry_open_requests"]

    body = body_of("told while it is lent")
    ticket = dict(pair.start(body["prompt"]))
    until(lambda: num_open() == 1)
    fetched = {**body, "kv_transfer_params": ticket}
    answer = httpx.post(f"{pair.decode.url}/v1/completions", json=fetched, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    until(lambda: num_open() == 0)
    assert pair.decode.metrics()["vllm:kvferry_open_requests"] == 0


def test_what_a_decode_server_refuses_goes_back(pair, url):
    before = released(pair)
    body = body_of(url, **REFUSED)
    answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=WAIT_S)
    assert answer.status_code == 400, answer.text
    until(lambda: released(pair) > before)
    assert pair.idle(WAIT_S)
    assert lapsed(url) == ["kvferry_router_loans_lapsed_total 0.0"]


def test_what_clients_that_leave_had_computed_goes_back(pair, url):
    """Without the channel, a client must not leave while the prefill server answers."""
    draw = random.Random(url)
    for number in range(20):
        client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
        body = msgspec.json.encode(body_of(f"{url} {number}", stream=True))
        client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        time.sleep(draw.uniform(0.0, 0.3))
        assert client.sock is not None
        client.sock.shutdown(socket.SHUT_RDWR)
        client.close()
    assert pair.idle(WAIT_S)
    assert counters(pair).get("leases.expired", 0) == 0
