"""The bounds of clients: how many have a request at a time, and how long a body is."""

import contextlib
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import running_router
from tests.cluster.streams import CHAT, MESSAGES, Server

pytestmark = pytest.mark.processes

MOST = 20
LONGEST = 5000


@pytest.fixture(scope="module")
def bounded(server_thread):
    """A router before one server, and its address."""
    server = Server(waits_after="nothing")
    url = server_thread.start(server.app())
    bounds = ("--max-connections", str(MOST), "--max-request-bytes", str(LONGEST))
    with running_router([], [url], *bounds) as router:
        yield server, router
        server.goes_on.set()


@pytest.fixture
def holding(bounded):
    """The same, with a server that has no request yet, and answers none until it may go on."""
    server, _ = bounded
    server.goes_on.clear()
    server.bodies.clear()
    return bounded


@pytest.fixture
def full(holding):
    """The same, with as many requests under way as it takes; yields what they get at last."""
    server, url = holding
    with ThreadPoolExecutor(MOST) as pool:
        asked = [pool.submit(post, url) for _ in range(MOST)]
        until(lambda: len(server.bodies) == MOST)
        try:
            yield url, asked
        finally:
            server.goes_on.set()


def post(url, path=CHAT, **body):
    """A request over a connection of its own."""
    answer = httpx.post(url + path, json={"messages": [], **body}, timeout=WAIT_S, trust_env=False)
    return answer.status_code, answer.headers.get("retry-after"), answer.json()


def count_of_busy(url):
    """Number of requests that were refused, as the router counts them."""
    told = httpx.get(f"{url}/metrics", timeout=WAIT_S, trust_env=False).text
    found = re.search(r'^kvferry_router_errors_total{code="busy"} (.+)$', told, re.MULTILINE)
    return float(found[1]) if found else 0


def test_of_40_clients_20_are_served_and_20_are_told_to_come_again(holding):
    server, url = holding
    before = count_of_busy(url)
    with ThreadPoolExecutor(2 * MOST) as pool:
        asked = [pool.submit(post, url) for _ in range(2 * MOST)]
        until(lambda: sum(each.done() for each in asked) == MOST)
        server.goes_on.set()
        answers = [each.result(WAIT_S) for each in asked]

    assert sorted(status for status, *_ in answers) == [200] * MOST + [503] * MOST
    refused = [(again, told) for status, again, told in answers if status == 503]
    assert {again for again, _ in refused} == {"1"}
    assert all(
        told["error"]["code"] == "busy" and "--max-connections" in told["error"]["message"]
        for _, told in refused
    )
    assert post(url)[0] == 200
    assert count_of_busy(url) == before + MOST


def test_bodies_that_end_beyond_the_bound_are_refused_too(holding):
    server, url = holding
    before = count_of_busy(url)
    place, body = httpx.URL(url), json.dumps({"messages": []}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(MOST + 5):
            client = socket.create_connection((place.host, place.port), timeout=WAIT_S)
            clients.append(stack.enter_context(client))
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
            assert client.recv(99).startswith(b"HTTP/1.1 100")  # the router waits for the body
        pool = stack.enter_context(ThreadPoolExecutor(len(clients)))
        for client in clients:
            client.sendall(body)
        asked = [pool.submit(client.recv, 9999) for client in clients]
        until(lambda: len(server.bodies) + sum(each.done() for each in asked) == len(clients))
        server.goes_on.set()
        told = sorted(each.result(WAIT_S) for each in asked)

    assert [each[:12] for each in told] == [b"HTTP/1.1 200"] * MOST + [b"HTTP/1.1 503"] * 5
    assert all(b"\r\nretry-after: 1\r\n" in each for each in told[MOST:])
    assert count_of_busy(url) == before + 5


def test_a_long_body_beyond_the_bound_is_answered_and_not_cut(full):
    url, _ = full

    status, again, told = post(url, MESSAGES, text="x" * 5_000_000)

    assert (status, again) == (503, "1")
    assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")


def test_the_state_is_told_beyond_the_bound(full):
    url, _ = full

    for path in ("/health", "/metrics"):
        assert httpx.get(url + path, timeout=WAIT_S, trust_env=False).status_code == 200


def test_connections_that_send_nothing_keep_no_client_out(bounded):
    server, url = bounded
    server.goes_on.set()
    place = httpx.URL(url)
    with contextlib.ExitStack() as stack:
        for _ in range(3 * MOST):
            stack.enter_context(socket.create_connection((place.host, place.port)))
        assert post(url)[0] == 200


def test_a_body_that_is_too_long_names_the_option(bounded):
    _, url = bounded

    status, _, told = post(url, text="x" * LONGEST)

    assert status == 413
    assert f"--max-request-bytes (max_request_bytes, {LONGEST})" in json.dumps(told)
