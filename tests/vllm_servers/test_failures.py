"""What happens to servers and requests when the other side, or the client, goes wrong.

Every test ends with the right tokens or a clear error, with both servers alive, and with all their
blocks free. One prefill server serves two decode servers, one of each load failure policy. Reads
begin two seconds late, so that there is time to interfere; leases last six.
"""

import contextlib
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from benchmarks.vllm_servers.client import RefusalError, complete
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import Pair
from benchmarks.vllm_servers.server import ServerOptions
from kvferry.control.client import fetch_status

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).parent / "plugin"
READ_S = 2.0
"""Of the plugin."""
LEASE_S = 6.0
EXTRA = {
    "transport": "slow_tcp",
    "lease_duration_s": LEASE_S,
    "request_timeout_s": 1.0,
    "handshake_timeout_s": 4.0,
    "stall_timeout_s": 4.0,
    "cluster_key": "of the servers of one test run alone",
}
POLICIES = ("recompute", "fail")


class Cluster:
    """One prefill server and a decode server per policy; each may be started again."""

    def __init__(self, start):
        self._start = start
        self._stack = contextlib.ExitStack()
        options = [
            self._options("prefill", "kv_producer", block_size=64),
            *(self._options(policy, "kv_consumer", block_size=128) for policy in POLICIES),
        ]
        servers = self._stack.enter_context(start(options))
        self._servers = {server.options.name: server for server in servers}

    def _options(self, name, role, block_size):
        policy: Any = name if name in POLICIES else "recompute"
        return ServerOptions(
            name=name,
            model=tiny_model(),
            block_size=block_size,
            transfer=KVFerry(extra=EXTRA, policy=policy).config(role, name),
            path=(PLUGIN,),
        )

    def pair(self, policy):
        return Pair(self._servers["prefill"], self._servers[policy])

    def restart(self, name):
        """Starts a server that was killed, with its old name and ports."""
        options = [self._servers[name].options]
        (self._servers[name],) = self._stack.enter_context(self._start(options))

    def port(self, name):
        return self._servers[name].options.transfer["kv_port"]

    def expired_leases(self):
        """How many of the prefill server's leases have expired."""
        report = fetch_status("127.0.0.1", self.port("prefill"), timeout_s=60.0)
        return report.counters.get("leases.expired", 0)

    def close(self):
        self._stack.close()


@pytest.fixture(scope="module")
def cluster(start):
    cluster = Cluster(start)
    yield cluster
    cluster.close()


@pytest.fixture(params=POLICIES)
def policy(request):
    return request.param


@pytest.fixture
def prompt(request):
    draw = random.Random(request.node.name)
    return [draw.randrange(8, tiny_model().vocab_size) for _ in range(300)]


@pytest.fixture
def right(reference, prompt):
    """The right tokens."""
    return reference.tokens(tiny_model(), prompt)


def later(function, *args, **options):
    """Calls in a thread of its own; a future."""
    threads = ThreadPoolExecutor(1)
    future = threads.submit(function, *args, **options)
    threads.shutdown(wait=False)
    return future


def outcome(policy, answer):
    """``answer()``'s tokens, or ``None`` where the policy makes it an error, which it must."""
    if policy == "recompute":
        return answer().tokens
    with pytest.raises(RefusalError) as refused:
        answer()
    assert refused.value.status == httpx.codes.INTERNAL_SERVER_ERROR
    return None


def assert_recovered(pair, reference):
    """All blocks are free, and another request goes through."""
    assert pair.idle(), "blocks are held for ever"
    draw = random.Random(time.monotonic())
    prompt = [draw.randrange(8, tiny_model().vocab_size) for _ in range(200)]
    before = pair.external_tokens()
    assert pair.ask(prompt).tokens == reference.tokens(tiny_model(), prompt)
    assert pair.external_tokens() - before >= 199
    assert pair.idle(), "blocks are held for ever"


def test_prefill_server_killed_before_the_transfer(cluster, policy, prompt, right, reference):
    pair = cluster.pair(policy)
    ticket = pair.start(prompt)
    pair.prefill.kill()
    try:
        tokens = outcome(policy, lambda: pair.finish(prompt, ticket))
        assert pair.decode.healthy()
    finally:
        cluster.restart("prefill")
    assert tokens in (None, right)
    assert_recovered(cluster.pair(policy), reference)


def test_prefill_server_killed_during_the_transfer(cluster, policy, prompt, right, reference):
    pair = cluster.pair(policy)
    answer = later(pair.finish, prompt, pair.start(prompt))
    time.sleep(READ_S / 2)
    assert not answer.done()
    pair.prefill.kill()
    try:
        tokens = outcome(policy, answer.result)
        assert pair.decode.healthy()
    finally:
        cluster.restart("prefill")
    assert tokens in (None, right)
    assert_recovered(cluster.pair(policy), reference)


def test_decode_server_killed_during_the_transfer(cluster, prompt, right, reference):
    pair = cluster.pair("recompute")
    answer = later(pair.finish, prompt, pair.start(prompt))
    time.sleep(READ_S / 2)
    assert not answer.done()
    pair.decode.kill()
    with pytest.raises(httpx.HTTPError):
        answer.result()
    cluster.restart("recompute")
    pair = cluster.pair("recompute")
    assert_recovered(pair, reference)
    assert pair.ask(prompt).tokens == right


@pytest.mark.parametrize("into_s", [-1.0, READ_S / 2], ids=["before", "during"])
def test_prefill_server_stopped_past_the_lease(cluster, policy, prompt, right, reference, into_s):
    """It resumes when nobody waits for it any more; nothing that it sends then may count."""
    pair = cluster.pair(policy)
    ticket = pair.start(prompt)
    answer = later(pair.finish, prompt, ticket) if into_s > 0 else None
    time.sleep(max(into_s, 0))
    pair.prefill.pause()
    try:
        answer = answer or later(pair.finish, prompt, ticket)
        time.sleep(LEASE_S + 3)
        assert pair.decode.healthy()
        tokens = outcome(policy, answer.result)
    finally:
        pair.prefill.resume()
    assert tokens in (None, right)
    assert_recovered(pair, reference)


def test_prefill_server_stopped_for_a_moment(cluster, policy, prompt, right, reference):
    """Shorter than every timeout: the request is only late."""
    pair = cluster.pair(policy)
    answer = later(pair.finish, prompt, pair.start(prompt))
    time.sleep(READ_S / 2)
    pair.prefill.pause()
    time.sleep(READ_S)
    pair.prefill.resume()
    assert answer.result().tokens == right
    assert_recovered(pair, reference)


def test_client_gone_while_the_prompt_is_computed(cluster, policy, reference):
    pair = cluster.pair(policy)
    long = [random.randrange(8, tiny_model().vocab_size) for _ in range(2000)]
    with pytest.raises(httpx.TimeoutException):
        pair.start(long, timeout_s=0.03)
    assert_recovered(pair, reference)


def test_client_gone_between_the_servers(cluster, policy, prompt, reference):
    pair = cluster.pair(policy)
    pair.start(prompt)
    assert_recovered(pair, reference)


@pytest.mark.parametrize("stage_s", [0.1, READ_S / 2, READ_S + 0.5], ids=["ask", "load", "decode"])
def test_client_gone_at_the_decode_server(cluster, policy, prompt, reference, stage_s):
    pair = cluster.pair(policy)
    with pytest.raises(httpx.TimeoutException):
        pair.finish(prompt, pair.start(prompt), max_tokens=1500, timeout_s=stage_s)
    assert_recovered(pair, reference)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_garbage_on_the_control_port(cluster, prompt, right, reference, side):
    draw = random.Random(side)
    port = cluster.port("prefill" if side == "prefill" else "recompute")
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
            plain.sendall(draw.randbytes(draw.randrange(1, 4000)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(200):
            frames = [draw.randbytes(draw.randrange(300)) for _ in range(draw.randrange(1, 5))]
            dealer.send_multipart(frames)
        pair = cluster.pair("recompute")
        assert pair.ask(prompt).tokens == right
    assert_recovered(pair, reference)


def test_ticket_that_was_changed_on_the_way(cluster, policy, prompt, right, reference):
    pair = cluster.pair(policy)
    ticket = dict(pair.start(prompt))
    ((field, text),) = [(key, value) for key, value in ticket.items() if "ticket" in key]
    ticket[field] = text[:-8] + text[-8:].swapcase()[::-1]
    assert outcome(policy, lambda: pair.finish(prompt, ticket)) in (None, right)
    assert_recovered(pair, reference)


def test_request_that_the_decode_server_rejects_frees_its_blocks(cluster, policy, prompt):
    """It asks for more tokens than the model has room for, so the engine never sees it."""
    pair = cluster.pair(policy)
    before = cluster.expired_leases()
    ticket = pair.start(prompt)
    with pytest.raises(RefusalError) as refused:
        pair.finish(prompt, ticket, max_tokens=1_000_000)
    assert refused.value.status == httpx.codes.BAD_REQUEST
    assert pair.idle()
    assert cluster.expired_leases() == before, "the lease was left to expire"


def test_ticket_used_twice(cluster, policy, prompt, right, reference):
    """The second request finds the lease ended, or the prompt in its own cache."""
    pair = cluster.pair(policy)
    ticket = pair.start(prompt)
    assert pair.finish(prompt, ticket).tokens == right
    with contextlib.suppress(RefusalError):
        assert pair.finish(prompt, ticket, cache_salt="another").tokens == right
    assert_recovered(pair, reference)


def test_request_that_nobody_prefilled(cluster, policy, prompt, right, reference):
    """A request without parameters is an ordinary one."""
    pair = cluster.pair(policy)
    assert complete(pair.decode.url, prompt, 16).tokens == right
    assert_recovered(pair, reference)
