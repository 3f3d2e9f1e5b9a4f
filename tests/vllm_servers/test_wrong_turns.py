"""What a user of real servers gets to see of a wrong turn: one line of the log, or one error.

All are provoked in one process, and much faster, by tests/connectors/test_wrong_turns.py and
tests/integrations/vllm/test_wrong_turns.py. Here they come through vLLM's log and HTTP.
"""

import httpx
import pytest

from benchmarks.programs import ServerError
from benchmarks.vllm_servers.client import RefusalError, complete
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import hybrid_model, tiny_model
from benchmarks.vllm_servers.pair import Pair
from benchmarks.vllm_servers.server import ServerOptions
from kvferry.testing.waiting import until
from tests.wrong_turns import told_among

KEY = {"cluster_key": "of the servers of one test run alone"}
PLAIN = "vllm:kvferry_plain_requests_total"
PROMPT = [number % 900 + 8 for number in range(900)]
"""Of fifteen blocks."""


def options(name, role, extra=KEY, *, model=None, policy="fail", **changes):
    """How a server is started; ``changes`` are of its ``--kv-transfer-config``."""
    transfer = KVFerry(extra=extra, policy=policy).config(role, name) | changes
    return ServerOptions(name=name, model=model or tiny_model(), block_size=64, transfer=transfer)


def the_line(turn, server):
    """The line that a server's log has, once it has been flushed; it comes once."""

    def found():
        return told_among(turn, server.log.read_text(errors="replace").splitlines())

    (line,) = until(found)
    return line


@pytest.fixture(scope="module")
def pair(start):
    """Prefill can lend twelve blocks at most: what nobody fetches stays lent for a while."""
    prefill = options("prefill", "kv_producer", KEY | {"max_leased_blocks": 12})
    with start([prefill, options("decode", "kv_consumer")]) as servers:
        yield Pair(*servers)


def plain_requests(server):
    return sum(value for name, value in server.metrics().items() if name.startswith(PLAIN))


def test_a_proxy_that_drops_the_parameters(pair, reference):
    """Clients see nothing of it, the log says it once, and a metric counts."""
    before = plain_requests(pair.decode)
    for _ in range(3):
        pair.start(PROMPT[:100])
        answer = complete(pair.decode.url, PROMPT[:100], 16)
        assert answer.tokens == reference.tokens(tiny_model(), PROMPT[:100])
    assert "] request cmpl-" in the_line("the proxy drops the parameters", pair.decode)
    until(lambda: plain_requests(pair.decode) - before == 3)


@pytest.mark.slow
def test_a_proxy_that_writes_parameters_of_its_own(pair):
    with pytest.raises(RefusalError) as refused:
        complete(
            pair.decode.url,
            PROMPT,
            16,
            kv_transfer_params={"do_remote_prefill": True},
            request_id="the-request",
        )
    assert refused.value.status == httpx.codes.INTERNAL_SERVER_ERROR
    line = the_line("the proxy writes parameters of its own", pair.decode)
    assert "request cmpl-the-request-" in line
    assert "was refused and it will fail: " in line


@pytest.mark.slow
def test_a_prompt_with_more_blocks_than_may_be_lent(pair):
    asked = {"do_remote_decode": True}
    answer = complete(pair.prefill.url, PROMPT, 1, kv_transfer_params=asked, request_id="too-long")
    assert answer.kv_transfer_params is None
    line = the_line("the prompt has more blocks than all leases may hold", pair.prefill)
    assert "request cmpl-too-long-" in line
    assert "the prompt has 15 blocks and all leases together may hold 12" in line


@pytest.mark.slow
def test_a_prompt_that_is_too_long_for_the_server(pair):
    """vLLM's own error for the client names both lengths."""
    prompt = [8] * 3000
    for server in (pair.prefill, pair.decode):
        with pytest.raises(RefusalError, match=r"2048 tokens.*3000") as refused:
            complete(server.url, prompt, 1)
        assert refused.value.status == httpx.codes.BAD_REQUEST


@pytest.mark.slow
def test_other_keys_and_a_port_that_is_taken(start, pair):
    """A second decode server with another key; then a third one on the port of the second."""
    other = options("other", "kv_consumer", {"cluster_key": "of another cluster's servers"})
    with start([other]) as (decode,):
        with pytest.raises(RefusalError) as refused:
            Pair(pair.prefill, decode).ask(PROMPT[:100])
        assert refused.value.status == httpx.codes.INTERNAL_SERVER_ERROR
        the_line("the cluster keys differ", decode)
        late = options("late", "kv_consumer", kv_port=other.transfer["kv_port"])
        with pytest.raises(ServerError, match="ended with"), start([late]):
            pass
        log = decode.log.with_name("late.log").read_text(errors="replace").splitlines()
        (line,) = (
            line
            for line in told_among("two servers of one host have one port", log)
            if "engine late does not start: " in line
        )
        assert f"port {other.transfer['kv_port']} is taken" in line


@pytest.mark.slow
def test_another_model_is_told_of_before_the_first_request(start, pair):
    peers = {"peers": [f"127.0.0.1:{pair.prefill.options.transfer['kv_port']}"]}
    model = hybrid_model()
    with start([options("hybrid", "kv_consumer", KEY | peers, model=model)]) as (decode,):
        line = the_line("the models differ, and `peers` names the prefill server", decode)
        assert f"({model.folder})" in line
        assert f"({tiny_model().folder})" in line
