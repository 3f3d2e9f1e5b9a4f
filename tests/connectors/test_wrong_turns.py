"""Each wrong turn of a user ends in one line, which docs/vllm/connector.md explains."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import kvferry.testing.fake_engine as fake_engine
from kvferry.errors import KVFerryError
from kvferry.testing.connector_conformance import Pair, prompt
from kvferry.testing.fake_engine import FakeEngine
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S, until
from kvferry.zeromq import curve_keypair
from tests.connectors.engines import SOURCE, TARGET, retold, served
from tests.wrong_turns import assert_all_are_provoked, assert_told

OpenEngine = Callable[..., FakeEngine]


def told(turn: str, error: KVFerryError | None) -> None:
    """An engine says an error with its name, in one line that the page knows."""
    assert error is not None, f"{turn}: nothing is said"
    assert_told(turn, f"{type(error).__name__}: {error}")


def port_of(engine: FakeEngine) -> int:
    port: int = engine.scheduler.port  # type: ignore[attr-defined]
    return port


def refused(pair: Pair, source: FakeRequest) -> KVFerryError | None:
    """Why the consumer does not load a prompt."""
    try:
        request = pair.decode(source)
    except KVFerryError as error:
        return error
    fake_engine.run(
        [pair.consumer],
        lambda: request.stage is Stage.FINISHED,
        timeout_s=WAIT_S,
        what="the load to be refused",
    )
    return request.error


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The warnings of kvferry's threads. What other tests have left running does not count."""
    others, told = set(threading.enumerate()) - {threading.current_thread()}, []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread() not in others:
                told.append(record.getMessage())

    logger, handler = logging.getLogger("kvferry"), Handler(logging.WARNING)
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


@pytest.fixture
def start_fails(open_engine: OpenEngine) -> Callable[..., KVFerryError]:
    """Why an engine does not start; takes what ``open_engine`` does."""

    def start(*args: object, **options: object) -> KVFerryError:
        with pytest.raises(KVFerryError) as raised:
            open_engine(*args, **options)
        return raised.value

    return start


@pytest.fixture
def pair(open_engine: OpenEngine) -> Pair:
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    return Pair(producer, open_engine("d", TARGET), WAIT_S)


# ---- an engine does not start -------------------------------------------------------------------


def test_two_engines_on_one_port(open_engine, start_fails):
    first = open_engine("p", SOURCE)
    told("two servers of one host have one port", start_fails("d", TARGET, kv_port=port_of(first)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_a_host_that_tickets_cannot_name(start_fails, host):
    told("`host` is a wildcard", start_fails("p", SOURCE, host=host))


def test_a_host_that_is_not_of_this_machine(start_fails):
    told("`host` is another machine's", start_fails("p", SOURCE, host="203.0.113.7"))


def test_a_key_file_that_is_not_there(start_fails):
    error = start_fails("p", SOURCE, cluster_key=None, cluster_key_file="kvferry-keys/none.key")
    told("the key file is not there", error)
    assert str(Path.cwd()) in str(error)


# ---- hosts and ports ----------------------------------------------------------------------------


def test_a_ticket_that_leads_the_decode_host_to_a_port_of_its_own(pair):
    """As from an engine of another host that was left at 127.0.0.1."""
    source = pair.prefill("r", 21)
    pair.producer.close()
    told("prefill has `host` at 127.0.0.1, decode is on another machine", refused(pair, source))


def test_a_ticket_that_leads_the_decode_engine_to_itself(pair):
    """The same where both have the same ``kv_port``, each on its host."""
    source = pair.prefill("r", 21)
    source.response_params = retold(source.response_params, port=port_of(pair.consumer))
    told("both have `host` at 127.0.0.1 and one `kv_port`, on two machines", refused(pair, source))


def test_peers_without_the_prefill_engine(open_engine):
    producer = open_engine("p", SOURCE, cluster_key=None)
    consumer = open_engine("d", TARGET, cluster_key=None, peers=["127.0.0.1:1"])
    pair = Pair(producer, consumer, WAIT_S)
    told(
        "`peers` lacks the prefill server, and there is no cluster key",
        refused(pair, pair.prefill("r", 21)),
    )


def test_peers_that_are_not_there(open_engine, lines):
    open_engine("d", TARGET, peers=["127.0.0.1:1"])
    (line,) = until(lambda: lines)
    assert_told("`peers` names a server that is not there", line)


# ---- keys ---------------------------------------------------------------------------------------


def test_two_cluster_keys(open_engine):
    pair = Pair(open_engine("p", SOURCE, cluster_key="x" * 32), open_engine("d", TARGET), WAIT_S)
    told("the cluster keys differ", refused(pair, pair.prefill("r", 21)))


def test_a_cluster_key_on_the_decode_side_alone(open_engine):
    pair = Pair(open_engine("p", SOURCE, cluster_key=None), open_engine("d", TARGET), WAIT_S)
    told("the decode server alone has a cluster key", refused(pair, pair.prefill("r", 21)))


@pytest.mark.parametrize("both", [True, False])
def test_curve_keys_that_differ(open_engine, tmp_path, both):
    files = []
    for name in ("p", "d"):
        public, secret = curve_keypair()
        files.append(tmp_path / f"{name}.json")
        files[-1].write_bytes(msgspec.json.encode({"public_key": public, "secret_key": secret}))
    producer = open_engine("p", SOURCE, curve_keys=str(files[0]))
    theirs = {"curve_keys": str(files[1])} if both else {}
    pair = Pair(producer, open_engine("d", TARGET, handshake_timeout_s=3.0, **theirs), WAIT_S)
    told("the CURVE keys differ, or one server has none", refused(pair, pair.prefill("r", 21)))


# ---- models -------------------------------------------------------------------------------------


def test_two_checkpoints_of_one_shape(pair):
    """Engines that tell their weights apart say so in the ticket."""
    source = pair.producer.add(
        "r", prompt(21, "r"), {"do_remote_decode": True}, content={"weights": "aa"}
    )
    pair.run(lambda: source.stage is Stage.FINISHED, "the prompt to be computed")
    tokens = (*source.prompt_token_ids, *source.output_token_ids)
    with pytest.raises(KVFerryError) as raised:
        pair.consumer.add("r", tokens, source.response_params, content={"weights": "bb"})
    told("the models differ", raised.value)
    assert "weights: prefill had aa, here it is bb" in str(raised.value)


def test_a_model_of_another_path(open_engine, monkeypatch, lines):
    producer = open_engine("p", SOURCE)
    ours = fake_engine.fake_model((TARGET,))
    other = msgspec.structs.replace(
        ours, name="models/other", weights_digest="other", config_digest="else"
    )
    monkeypatch.setattr(fake_engine, "fake_model", lambda groups: other)
    address = f"127.0.0.1:{port_of(producer)}"
    pair = Pair(producer, open_engine("d", TARGET, peers=[address]), WAIT_S)
    error = refused(pair, pair.prefill("r", 21))
    assert "known (known-cells), engine 'd' has other (models/other)" in str(error)
    (line,) = lines
    assert line.startswith(f"handshake with {address}: ")
    assert_told("the models differ, and `peers` names the prefill server", line)
    assert line.endswith(str(error))


# ---- requests -----------------------------------------------------------------------------------


def test_a_proxy_that_drops_the_parameters_is_told_of_once(lines, pair):
    for request_id in ("first", "second"):
        source = pair.prefill(request_id, 21)
        source.response_params = None
        request = pair.decode(source)
        pair.finish(request)
        assert request.error is None
        assert request.external_tokens == 0
    (line,) = lines
    assert_told("the proxy drops the parameters", line)
    assert line.startswith("request first ")


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_an_engine_that_computes_prompts_anyway_says_nothing_of_it(open_engine, lines, role):
    engine = open_engine("e", TARGET, role=role)
    request = engine.add("r", range(21))
    fake_engine.run(
        [engine], lambda: request.stage is Stage.FINISHED, timeout_s=WAIT_S, what="the request"
    )
    assert lines == []


def test_a_proxy_that_drops_the_ticket_alone(pair):
    source = pair.prefill("r", 21)
    source.response_params = {"do_remote_prefill": True}
    told("the proxy writes parameters of its own", refused(pair, source))


def not_lent(source: FakeRequest, lines: list[str]) -> str:
    """The line that says why a prompt was not lent."""
    assert source.response_params is None
    (line,) = lines
    assert line.startswith(f"request {source.request_id}: its KV is not lent")
    return line


def test_a_prompt_that_can_never_be_lent(open_engine, lines):
    producer = open_engine("p", SOURCE, max_leased_blocks=5)  # of 4 tokens
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    assert_told(
        "the prompt has more blocks than all leases may hold",
        not_lent(pair.prefill("r", 21), lines),
    )
    served_shorter = pair.decode(pair.prefill("s", 19))
    pair.finish(served_shorter)
    assert served_shorter.external_tokens == 19


def test_a_prompt_that_cannot_be_lent_just_now(open_engine, lines):
    producer = open_engine("p", SOURCE, max_leased_blocks=8, lease_duration_s=600.0)
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    first = pair.prefill("first", 21)
    line = not_lent(pair.prefill("r", 21), lines)
    assert_told("leases hold too many blocks just now", line)
    assert "6 blocks, and leases hold 6 of 8" in line
    pair.finish(pair.decode(first))
    served(pair, "later")


def test_a_consumer_in_the_place_of_prefill(open_engine, lines):
    producer = open_engine("p", SOURCE, role="kv_consumer")
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    assert_told("the prefill server has the role of decode", not_lent(pair.prefill("r", 21), lines))


def test_a_producer_in_the_place_of_decode(open_engine):
    pair = Pair(open_engine("p", SOURCE), open_engine("q", TARGET, role="kv_producer"), WAIT_S)
    told("the decode server has the role of prefill", refused(pair, pair.prefill("r", 21)))


def test_every_row_of_the_page_is_provoked_here():
    assert_all_are_provoked(__file__)
