"""What goes wrong around the PullConnector ends in right cells or in one clear error."""

import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

import kvferry.testing.fake_engine as fake_engine
from kvferry.connectors.pull import lender
from kvferry.connectors.pull.renewals import RELEASE_ATTEMPTS
from kvferry.control import links
from kvferry.control.client import fetch_descriptions, fetch_status
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import DescriptionReply
from kvferry.control.options import ControlOptions
from kvferry.control.tickets import TransferId, sign, verify
from kvferry.errors import (
    BlockTableError,
    ConfigError,
    IncompatibleError,
    LeaseRevokedError,
    NullBlockError,
    PeerEndedError,
    PeerLostError,
    PluginError,
    PortInUseError,
    TicketError,
    TicketExpiredError,
    TicketForgedError,
)
from kvferry.testing.connector_conformance import Pair
from kvferry.testing.fake_engine import FakeEngine, run
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S, until
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.transports.local import boot_id, host_digest
from tests.clock import Clock
from tests.connectors.engines import (
    KEY,
    SOURCE,
    TARGET,
    end_leases,
    keep_parked,
    params_of,
    passed_on,
    pull_scheduler,
    retold,
    served,
)

OpenEngine = Callable[..., FakeEngine]


@pytest.fixture
def pair(open_engine: OpenEngine) -> Pair:
    """Two engines. What nobody takes stays lent until a test ends it."""
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    return Pair(producer, open_engine("d", TARGET), WAIT_S)


def test_a_lease_given_up_before_the_handshake_has_ended_is_free_as_soon_as_it_has(open_engine):
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    request = pair.decode(pair.prefill("r", 21))
    pair.consumer.step()  # asks for the lease: the first that the two hear of each other

    pair.consumer.abort(request.request_id)

    pair.settle()


def rejected(source: FakeRequest, request_id: str) -> FakeRequest:
    """What an engine's front tells of a request that it refused: not even its prompt."""
    return FakeRequest(request_id, (0,), source.response_params)


def test_a_request_that_the_engines_front_refused_gives_its_lease_back(open_engine):
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    source = pair.prefill("r", 21)

    pull_scheduler(pair.consumer).on_rejected_request(rejected(source, "r"))

    pair.settle()


def test_a_refused_request_cannot_give_back_what_another_one_reads(pair: Pair) -> None:
    source = pair.prefill("r", 21)
    request = pair.decode(source)

    pull_scheduler(pair.consumer).on_rejected_request(rejected(source, "other"))

    pair.finish(request)
    assert not request.failed
    assert request.external_tokens == 21
    pair.settle()


def port_of(engine: FakeEngine) -> int:
    port: int = engine.scheduler.port  # type: ignore[attr-defined]
    return port


# ---- tickets ----------------------------------------------------------------------------------


def test_a_ticket_signed_with_another_key_is_refused_before_anyone_is_contacted(
    pair: Pair,
) -> None:
    source = pair.prefill("r", 21)
    assert source.response_params is not None
    ticket = verify(source.response_params["ticket"], KEY.encode())
    source.response_params["ticket"] = sign(ticket, b"x" * 32)
    with pytest.raises(TicketForgedError, match="signature"):
        pair.decode(source)
    assert fetch_status("127.0.0.1", port_of(pair.producer)).peers == ()
    (event,) = fetch_status("127.0.0.1", port_of(pair.consumer)).errors
    assert "request r: TicketForgedError" in event.message
    end_leases(pair.producer)
    served(pair, "next")


@pytest.mark.parametrize("text", ["", "nonsense", "AAAA.BBBB", "é", "A" * 2_000_000])
def test_text_that_is_no_ticket_is_refused(pair: Pair, text: str) -> None:
    source = pair.prefill("r", 21)
    source.response_params = {"do_remote_prefill": True, "ticket": text}
    with pytest.raises(TicketError, match="ticket"):
        pair.decode(source)
    end_leases(pair.producer)
    served(pair, "next")


def test_fields_beside_the_ticket_are_not_believed(pair: Pair) -> None:
    source = pair.prefill("r", 21)
    assert source.response_params is not None
    source.response_params |= {"remote_host": "203.0.113.1", "remote_block_ids": [[0, 0, 0, 0]]}
    request = pair.decode(source)
    pair.finish(request)
    assert not request.failed
    pair.settle()


def test_a_ticket_serves_one_request_only(pair: Pair) -> None:
    source = pair.prefill("r", 21)
    first = pair.decode(source)
    pair.finish(first)
    with pytest.raises(TicketExpiredError, match="was used"):
        pair.consumer.add("thief", first.prompt_token_ids, source.response_params)
    pair.settle()


def test_a_shared_ticket_serves_any_number_of_requests_and_engines(
    pair: Pair, open_engine: OpenEngine
) -> None:
    params = {"do_remote_decode": True, "shared": True}
    source = pair.producer.add("r", range(1, 22), params)
    pair.run(lambda: source.stage is Stage.FINISHED, "the prompt to be computed")
    others = Pair(pair.producer, open_engine("e", TARGET), WAIT_S)
    requests = [pair.decode(source), others.decode(source)]
    requests.append(pair.consumer.add("twin", requests[0].prompt_token_ids, source.response_params))
    engines = [pair.producer, pair.consumer, others.consumer]
    run(
        engines,
        lambda: all(one.stage is Stage.FINISHED for one in requests),
        timeout_s=WAIT_S,
        what="the loads",
    )
    for request in requests:
        assert not request.failed
        assert request.external_tokens == 21
    pair.producer.scheduler.take_back(params_of(source))
    pair.settle()
    others.settle()


@pytest.mark.parametrize("release", ["ours", "the one before"])
def test_a_load_waits_until_every_token_of_its_lease_is_written(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    """Of our release the source says so unasked; of the one before it is asked again and again."""
    source = open_engine("p", SOURCE, lease_duration_s=600.0)
    pair = Pair(source, open_engine("d", TARGET, early_load="off"), WAIT_S)
    scheduler: Any = pair.producer.scheduler
    table, server = scheduler.lender.leases, scheduler.server
    grant, renew = table.grant, table.renew
    monkeypatch.setattr(
        table, "grant", lambda *said, **how: grant(*said, **how | {"writers": (0,)})
    )
    if release != "ours":
        monkeypatch.setattr(table, "renew", lambda *said, grows, lives: renew(*said, lives=lives))
    request = pair.decode(pair.prefill("r", 21))
    times = 1 if release == "ours" else 3
    pair.run(lambda: server.status().counters.get("requests.Renew", 0) >= times, "renewals")
    (lease,) = table.snapshot()
    server.written(lease.lease_id, 0, 20)
    pair.consumer.step()
    assert request.stage is Stage.WAITING
    server.written(lease.lease_id, 0, 21)
    pair.finish(request)
    assert not request.failed
    assert request.external_tokens == 21
    pair.settle()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lease_is_given_back_although_connections_break_before_the_source_has_heard(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    served(pair, "first")  # the engines know each other
    client = pull_scheduler(pair.consumer).client
    release, said = client.release, []

    def broken_at_first(*release_of: Any, **how: Any) -> "Future[None]":
        said.append(release_of)
        if len(said) > lost:
            return release(*release_of, **how)
        future: Future[None] = Future()
        future.set_exception(PeerLostError("the connection broke"))
        return future

    monkeypatch.setattr(client, "release", broken_at_first)
    pair.decode(pair.prefill("r", 21))
    pair.consumer.abort("r")
    pair.settle()
    assert said == (lost + 1) * said[:1]


def test_a_release_is_not_repeated_for_ever(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    served(pair, "first")
    source, client = pair.prefill("r", 21), pull_scheduler(pair.consumer).client
    broken: Future[None] = Future()
    broken.set_exception(PeerLostError("the connection broke"))
    releases: list[object] = []
    monkeypatch.setattr(client, "release", lambda *_, **__: releases.append(0) or broken)
    pair.decode(source)
    pair.consumer.abort("r")
    assert len(releases) == RELEASE_ATTEMPTS


def test_a_ticket_does_not_serve_another_prompt(pair: Pair) -> None:
    sources = [pair.prefill("one", 21), pair.prefill("two", 21)]
    sources[0].response_params, sources[1].response_params = (
        sources[1].response_params,
        sources[0].response_params,
    )
    with pytest.raises(TicketError, match="begins with other tokens"):
        pair.decode(sources[0])
    end_leases(pair.producer)
    served(pair, "next")


LORA = {"lora": "sql 1f"}
BOTH = {"lora": "sql 1f", "multimodal": "1 inputs aa"}


def prefill_with(pair: Pair, content: dict[str, str]) -> FakeRequest:
    """A prompt of 21 tokens that more than its tokens decides the KV of."""
    params = {"do_remote_decode": True}
    source = pair.producer.add("r", range(1, 22), params, content=content)
    pair.run(lambda: source.stage is Stage.FINISHED, "the prompt to be computed")
    return source


@pytest.mark.parametrize("content", [{}, LORA, BOTH], ids=repr)
def test_equal_tokens_and_equal_content_are_loaded(pair: Pair, content: dict[str, str]) -> None:
    source = prefill_with(pair, content)
    prompt = (*source.prompt_token_ids, *source.output_token_ids)
    request = pair.consumer.add("r", prompt, source.response_params, content=content)
    pair.finish(request)
    assert not request.failed
    assert request.external_tokens == 21
    pair.settle()


@pytest.mark.parametrize(
    ("theirs", "ours", "differing"),
    [
        (LORA, {}, "(lora: prefill had sql 1f, here it is none)"),
        ({}, LORA, "(lora: prefill had none, here it is sql 1f)"),
        (LORA, {"lora": "sql 2e"}, "(lora: prefill had sql 1f, here it is sql 2e)"),
        (BOTH, LORA, "(multimodal: prefill had 1 inputs aa, here it is none)"),
        (
            BOTH,
            {"lora": "chat 77", "multimodal": "1 inputs bb"},
            "; multimodal: prefill had 1 inputs aa, here it is 1 inputs bb)",
        ),
    ],
)
def test_equal_tokens_of_other_content_are_refused_with_every_part(
    pair: Pair, theirs: dict[str, str], ours: dict[str, str], differing: str
) -> None:
    source = prefill_with(pair, theirs)
    prompt = (*source.prompt_token_ids, *source.output_token_ids)
    with pytest.raises(TicketError, match=re.escape(differing)) as refused:
        pair.consumer.add("r", prompt, source.response_params, content=ours)
    assert "send both engines the same request" in str(refused.value)
    # The ticket is not spent: the right request may still come.
    request = pair.consumer.add("r", prompt, source.response_params, content=theirs)
    pair.finish(request)
    assert request.external_tokens == 21
    pair.settle()


def test_content_is_asked_for_the_tokens_of_the_ticket_on_both_sides(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def content_keys(request: FakeRequest, num_tokens: int) -> dict[str, str]:
        asked.append(num_tokens)
        return {}

    monkeypatch.setattr(FakeRequest, "content_keys", content_keys)
    request = pair.decode(pair.prefill("r", 21))
    pair.finish(request)
    assert asked == [21, 21]


def test_a_lease_that_nobody_took_in_time_is_not_read(open_engine: OpenEngine) -> None:
    producer = open_engine("p", SOURCE, lease_duration_s=0.3)
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    source = pair.prefill("r", 21)
    pair.run(lambda: not producer.held, "the lease to expire")
    request = pair.decode(source)
    pair.finish(request)
    assert isinstance(request.error, LeaseRevokedError)
    assert request.external_tokens == 0
    pair.settle()


@pytest.mark.parametrize(
    ("tables", "kind", "message"),
    [
        (((1, 2),), BlockTableError, "2 blocks of 4 tokens hold 8, not 21"),
        (((1, 2, 0, 4, 5, 6),), NullBlockError, "no longer keeps token 8 of layers 0-2"),
        ((), TicketError, "block tables for 0 KV cache groups, engine 'p' has 1"),
        (((1,), (2,)), TicketError, "block tables for 2 KV cache groups, engine 'p' has 1"),
    ],
)
def test_tables_that_cannot_serve_the_load_are_refused_before_a_block_is_allocated(
    pair: Pair, tables: tuple[tuple[int, ...], ...], kind: type[Exception], message: str
) -> None:
    source = pair.prefill("r", 21)
    assert source.response_params is not None
    source.response_params = retold(source.response_params, block_ids=tables)
    request = pair.decode(source)
    pair.finish(request)
    assert isinstance(request.error, kind)
    assert message in str(request.error)
    assert request.external_tokens == 0
    errors = fetch_status("127.0.0.1", port_of(pair.consumer)).errors
    assert [message in event.message for event in errors] == [True]
    served(pair, "next")


def test_a_block_that_does_not_exist_fails_the_load_and_nothing_else(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    source = pair.prefill("r", 21)
    assert source.response_params is not None
    blocks = (1, 2, 3, 4, 5, 6_000)
    source.response_params = retold(source.response_params, block_ids=(blocks,))
    request = pair.decode(source)
    pair.finish(request)
    assert request.failed
    records = [r for o in pair.consumer.outputs for r in o.transfer_records]
    assert any("block 6000 does not exist" in record.error for record in records)
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert re.match(
        rf"request r: its load from engine p \(127.0.0.1:{port_of(pair.producer)}\) failed, and it "
        r"will \w.*: rank \d: \w+Error: .*block 6000 does not exist",
        line,
    )
    served(pair, "next")


# ---- leases and clocks ------------------------------------------------------------------------


@pytest.fixture
def source_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of every lease table from now on: an hour ahead of the targets'."""
    clock, open_table = Clock(), LeaseTable.from_options
    clock.ahead_s = 3600.0

    def opened(options: ControlOptions, num_blocks: int, _: object) -> LeaseTable:
        return open_table(options, num_blocks, clock)

    monkeypatch.setattr(LeaseTable, "from_options", opened)
    return clock


def test_clocks_an_hour_apart_do_not_matter(source_clock: Clock, open_engine: OpenEngine) -> None:
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    served(pair, "first")
    source_clock.ahead_s -= 3600.0  # and set back while it runs: no lease
    served(pair, "second")


def test_a_parked_request_keeps_its_lease_by_renewal(clock: Clock, open_engine: OpenEngine) -> None:
    producer = open_engine("p", SOURCE, lease_duration_s=60.0)
    pair = Pair(producer, open_engine("d", TARGET, progress_timeout_s=6000.0), WAIT_S)
    request = pair.decode(pair.prefill("r", 21))
    keep_parked(clock, pair, 60.0)
    pair.finish(request)
    assert request.error is None
    assert not request.failed
    pair.settle()


def test_a_read_whose_lease_ended_before_the_confirm_is_not_used(open_engine: OpenEngine) -> None:
    pair = Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S)
    request = pair.decode(pair.prefill("r", 21))

    def end_it_once_loading() -> None:
        if request.stage is Stage.LOADING:
            lease_id = pair.consumer.scheduler.borrower.loads["r"].lease_id  # type: ignore[attr-defined]
            pair.producer.scheduler.lender.leases.revoke([lease_id])  # type: ignore[attr-defined]
            pair.consumer.during_step = lambda: None

    pair.consumer.during_step = end_it_once_loading
    pair.finish(request)
    assert request.failed
    records = [r for o in pair.consumer.outputs for r in o.transfer_records]
    assert {record.ok for record in records} == {False}
    assert all("LeaseRevokedError" in record.error for record in records)
    served(pair, "next")


def test_beyond_the_cap_a_prompt_is_not_lent_out(open_engine: OpenEngine) -> None:
    producer = open_engine("p", SOURCE, max_leased_blocks=7)
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    assert pair.prefill("fits", 21).response_params is not None
    assert pair.prefill("does not", 21).response_params is None
    errors = fetch_status("127.0.0.1", port_of(producer)).errors
    assert any("max_leased_blocks" in event.message for event in errors)


@pytest.fixture
def tokenwise(open_engine: OpenEngine) -> Pair:
    """Two engines with blocks of one token and room for 200,000 of them, and for a few more."""
    geometry = EngineGeometry(
        num_layers=1,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        block_size=1,
        layout="NHD",
        parallel=ParallelShape(),
    )
    producer, consumer = (
        open_engine(name, geometry, num_blocks=200_100, max_leased_blocks=200_100)
        for name in ("p", "d")
    )
    return Pair(producer, consumer, WAIT_S)


@pytest.mark.parametrize("way", ["with the ticket", "with a transfer"])
def test_a_prompt_of_very_many_blocks_is_loaded(tokenwise: Pair, way: str) -> None:
    if way == "with the ticket":
        request = tokenwise.decode(tokenwise.prefill("r", 200_000))
    else:
        address = f"127.0.0.1:{pull_scheduler(tokenwise.producer).port}"
        transfer = TransferId.begin(address, KEY.encode()).text
        tokens = range(200_000)
        tokenwise.producer.add("r", tokens, {"do_remote_decode": True, "transfer": transfer})
        asked = {"do_remote_prefill": True, "transfer": transfer}
        request = tokenwise.consumer.add("r", (*tokens, 7), asked)
    tokenwise.finish(request)
    assert request.error is None
    assert request.external_tokens == 200_000
    tokenwise.settle()


@pytest.mark.parametrize("way", ["with the ticket", "with a transfer"])
def test_a_prompt_of_more_blocks_than_a_ticket_names_is_not_lent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(lender, "MAX_TICKET_BLOCKS", 5)  # of 4 tokens
    lends: dict[str, Any] = {"do_remote_decode": True}
    if way == "with a transfer":
        address = f"127.0.0.1:{port_of(pair.producer)}"
        lends["transfer"] = TransferId.begin(address, KEY.encode()).text
    request = pair.producer.add("r", range(21), lends)
    pair.run(lambda: request.stage is Stage.FINISHED, "the prompt")
    assert request.response_params is None
    status = fetch_status("127.0.0.1", port_of(pair.producer))
    (told,) = [event.message for event in status.errors]
    assert "21 tokens have 6 entries over 1 KV cache groups, and a ticket holds 5" in told
    assert "--page-size" in told
    assert not status.leases
    pair.settle()
    served(pair, "shorter")


# ---- engines that come, go and come back -------------------------------------------------------


def test_a_consumer_may_start_before_its_producer(open_engine: OpenEngine, free_port: int) -> None:
    consumer = open_engine("d", TARGET, peers=[f"127.0.0.1:{free_port}"])
    time.sleep(0.3)
    producer = open_engine("p", SOURCE, kv_port=free_port)
    until(
        lambda: fetch_status("127.0.0.1", free_port).peers,
        what="a handshake, although nobody sends a request,",
    )
    served(Pair(producer, consumer, WAIT_S), "r")


@pytest.mark.parametrize("written", ["[::1]:{}", "::1:{}", "[0::0:1]:{}"])
def test_a_peer_is_known_by_its_ipv6_address_however_that_is_written(
    open_engine: OpenEngine, written: str
) -> None:
    key = {"cluster_key": None, "host": "::1"}  # without one, only peers are contacted
    producer = open_engine("p", SOURCE, transport="tcp", **key)
    peers = [written.format(port_of(producer))]
    consumer = open_engine("d", TARGET, transport="tcp", peers=peers, **key)
    served(Pair(producer, consumer, WAIT_S), "r")
    assert len(consumer.scheduler.sources.agenda.sources) == 1  # type: ignore[attr-defined]


def test_a_restarted_producer_is_met_again_and_its_old_tickets_are_refused(
    open_engine: OpenEngine, free_port: int
) -> None:
    consumer = open_engine("d", TARGET)
    old = Pair(open_engine("p", SOURCE, kv_port=free_port), consumer, WAIT_S)
    served(old, "before")
    stale = old.prefill("stale", 21)
    old.producer.close()

    new = Pair(open_engine("p", SOURCE, kv_port=free_port), consumer, WAIT_S)
    served(new, "after")
    request = new.decode(stale)
    new.finish(request)
    assert isinstance(request.error, TicketExpiredError)
    assert "start" in str(request.error)
    new.settle()


def test_the_silence_of_an_engine_that_died_is_not_held_against_its_next_start(
    open_engine: OpenEngine, free_port: int
) -> None:
    consumer = open_engine("d", TARGET, handshake_timeout_s=600.0)  # nobody waits for the dead
    old = Pair(open_engine("p", SOURCE, kv_port=free_port), consumer, WAIT_S)
    served(old, "before")
    source = passed_on(old.prefill("lost", 21))
    old.producer.close()
    request = old.decode(source)
    fake_engine.run(
        [consumer], lambda: request.stage is Stage.FINISHED, timeout_s=WAIT_S, what="the load"
    )
    assert isinstance(request.error, PeerEndedError)
    assert len(consumer.scheduler.silent_peers()) == 1

    new = Pair(open_engine("p", SOURCE, kv_port=free_port), consumer, WAIT_S)
    served(new, "after")
    assert consumer.scheduler.silent_peers() == ()


def test_a_restarted_consumer_takes_new_leases_and_the_old_ones_end(
    clock: Clock, open_engine: OpenEngine
) -> None:
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    old = Pair(producer, open_engine("d", TARGET), WAIT_S)
    abandoned = old.decode(old.prefill("abandoned", 21))
    old.run(lambda: abandoned.stage is not Stage.WAITING, "the load to start")
    old.consumer.close()  # its ranks may have reported their reads, and may not

    new = Pair(producer, open_engine("d", TARGET), WAIT_S)
    after = new.decode(new.prefill("after", 21))
    new.finish(after)
    assert not after.failed
    new.run(clock.passing(lambda: producer.is_idle), "the lease of the first start to end")
    new.settle()


def test_a_producer_that_has_ended_is_not_waited_for(open_engine: OpenEngine) -> None:
    consumer = open_engine("d", TARGET, handshake_timeout_s=600.0)
    pair = Pair(open_engine("p", SOURCE), consumer, WAIT_S)
    source = pair.prefill("r", 21)
    pair.producer.close()
    request = pair.decode(source)
    fake_engine.run(
        [consumer], lambda: request.stage is Stage.FINISHED, timeout_s=WAIT_S, what="the failure"
    )
    assert isinstance(request.error, PeerEndedError)


def test_a_producer_that_cannot_be_reached_fails_the_load_in_the_configured_time(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What ZeroMQ tells is the same; the kernel of a host that is there would refuse.
    monkeypatch.setattr(links, "is_refused", lambda _host, _port: False)
    consumer = open_engine("d", TARGET, handshake_timeout_s=0.5)
    pair = Pair(open_engine("p", SOURCE), consumer, WAIT_S)
    source = pair.prefill("r", 21)
    pair.producer.close()
    request = pair.decode(source)
    fake_engine.run(
        [consumer], lambda: request.stage is Stage.FINISHED, timeout_s=WAIT_S, what="the failure"
    )
    assert type(request.error) is PeerLostError
    assert "handshake_timeout_s" in str(request.error)


def test_engines_of_different_models_are_refused_with_every_mismatch_before_a_block_moves(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = open_engine("p", SOURCE)
    model = fake_engine.fake_model((TARGET,))
    other = msgspec.structs.replace(model, weights_digest="other", rope="other")
    monkeypatch.setattr(fake_engine, "fake_model", lambda groups: other)
    pair = Pair(producer, open_engine("d", TARGET), WAIT_S)
    request = pair.decode(pair.prefill("r", 21))
    pair.finish(request)
    assert isinstance(request.error, IncompatibleError)
    assert request.external_tokens == 0
    text = "\n".join(request.error.mismatches)
    assert "weights" in text
    assert "rope" in text


def test_a_lease_that_nobody_will_fetch_is_taken_back(pair: Pair) -> None:
    """Before a target has taken it; whoever writes a ticket without its secret takes nothing."""
    source = pair.prefill("r", 21)
    producer: Any = pair.producer
    for nonsense in (
        {},
        {"ticket": 7},
        {"ticket": "x"},
        retold(params_of(source), secret=bytes(16)),
        retold(params_of(source), lease_id="unknown"),
    ):
        producer.scheduler.take_back(nonsense)
        assert producer.scheduler.lender.leases.num_open == 1
    producer.scheduler.take_back(source.response_params)
    pair.settle()
    used = pair.prefill("s", 21)
    request = pair.decode(used)
    pair.run(lambda: request.stage is Stage.LOADING, "the load")
    producer.scheduler.take_back(used.response_params)
    pair.finish(request)
    assert request.error is None
    assert not request.failed
    pair.settle()


# ---- configuration ----------------------------------------------------------------------------


def test_a_taken_port_is_named(open_engine: OpenEngine) -> None:
    first = open_engine("p", SOURCE)
    with pytest.raises(PortInUseError, match=str(port_of(first))):
        open_engine("q", SOURCE, role="kv_producer", kv_port=port_of(first))


@pytest.mark.parametrize(
    ("extra", "kind", "message"),
    [
        ({"transprot": "shm"}, ConfigError, "did you mean 'transport'"),
        ({"transport": "carrier-pigeon"}, PluginError, "shm"),
        ({"transport_config": {"tcp": {}}}, ConfigError, "not in transport"),
        ({"transport_config": {"shm": {"chunk_byte": 1}}}, ConfigError, "chunk_bytes"),
        ({"control_config": {"heartbeats": 1}}, ConfigError, "did you mean 'heartbeat_s'"),
        ({"control_config": {"curve": None}}, ConfigError, "beside control_config"),
        ({"control_config": {"takeover_after_s": 90.0}}, ConfigError, "takeover_after_s"),
        ({"max_leased_blocks": -1}, ConfigError, "max_leased_blocks"),
        ({"cluster_key": "short"}, ConfigError, "at least 16"),
        ({"cluster_key": None, "cluster_key_file": "/nowhere/key"}, ConfigError, "cannot be read"),
        ({"lease_duration_s": 0.0}, ConfigError, "lease_duration_s"),
        ({"lease_duration_s": "30"}, ConfigError, "lease_duration_s"),
        ({"peers": ["nonsense"]}, ConfigError, "peers"),
        ({"curve_keys": "/nowhere/keys.json"}, ConfigError, "curve_keys"),
        ({"host": "0.0.0.0", "cluster_key": None}, ConfigError, "insecure: true"),
        ({"host": "decode.test", "cluster_key": None}, ConfigError, "insecure: true"),
        (
            {"advertise_host": "203.0.113.7", "cluster_key": None},
            ConfigError,
            r"advertise_host: 203\.0\.113\.7 is reached from other machines",
        ),
        ({"advertise_host": "0.0.0.0"}, ConfigError, "every address of a machine"),
        ({"advertise_port": 70000}, ConfigError, "advertise_port: 70000 is not a TCP port"),
        ({"advertise_port": 30579}, ConfigError, "30579 leads to kv_port, which is 0"),
    ],
)
def test_wrong_extra_keys_are_named_with_the_remedy(
    open_engine: OpenEngine, extra: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        open_engine("d", TARGET, **extra)


def test_a_ticket_names_what_peers_are_told_in_place_of_what_is_listened_on(
    open_engine: OpenEngine, free_port: int
) -> None:
    told = {"host": "0.0.0.0", "advertise_host": "203.0.113.7", "advertise_port": 30579}
    producer = open_engine("p", SOURCE, kv_port=free_port, **told)
    consumer = open_engine("d", TARGET)
    params = params_of(Pair(producer, consumer, WAIT_S).prefill("r", 21))
    assert (params["remote_host"], params["remote_port"]) == ("203.0.113.7", 30579)
    assert producer.scheduler.address == "203.0.113.7:30579"  # type: ignore[attr-defined]


def test_a_producer_refuses_to_load(pair: Pair) -> None:
    source = pair.prefill("r", 21)
    with pytest.raises(ConfigError, match="kv_role"):
        pair.producer.add("s", range(22), source.response_params)


def test_without_a_key_only_configured_peers_are_contacted(open_engine: OpenEngine) -> None:
    producer = open_engine("p", SOURCE, cluster_key=None)
    consumer = open_engine("d", TARGET, cluster_key=None, peers=["127.0.0.1:1"])
    pair = Pair(producer, consumer, WAIT_S)
    with pytest.raises(TicketError, match="not in peers"):
        pair.decode(pair.prefill("r", 21))


def test_an_engine_without_a_key_that_only_this_machine_reaches_or_that_says_so_starts(
    open_engine: OpenEngine,
) -> None:
    for host, extra in (("127.0.0.2", {}), ("localhost", {}), ("0.0.0.0", {"insecure": True})):
        open_engine("d", TARGET, host=host, cluster_key=None, **extra).close()


def test_a_peer_that_cannot_reach_this_engine_is_warned_of(
    open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    open_engine("d", TARGET, peers=["127.0.0.1:1"])
    assert "do not reach this one" not in caplog.text
    open_engine("e", TARGET, peers=["127.0.0.1:1", "10.255.255.1:14579"])
    assert "peers names 10.255.255.1:14579" in caplog.text


# ---- what the on-call engineer sees -----------------------------------------------------------


def test_ranks_tell_whether_they_share_a_host_and_not_its_name(pair: Pair) -> None:
    ports = (port_of(pair.producer), port_of(pair.consumer))
    answers = fetch_descriptions([f"127.0.0.1:{port}" for port in ports])
    told = [answer.description for answer in answers if isinstance(answer, DescriptionReply)]
    hosts = {rank.host for description in told for rank in description.ranks}
    assert hosts == {host_digest()}
    assert boot_id() not in host_digest()


def test_status_shows_peers_leases_and_transfers(pair: Pair) -> None:
    request = pair.decode(pair.prefill("r", 21))
    pair.prefill("waiting for nobody", 5)
    pair.finish(request)
    report = fetch_status("127.0.0.1", port_of(pair.producer))
    assert [peer.engine_id for peer in report.peers] == ["d"]
    assert [lease.request_id for lease in report.leases] == ["waiting for nobody"]
    assert report.leases[0].num_blocks == 2
    assert report.leases[0].remaining_s > 0
    report = fetch_status("127.0.0.1", port_of(pair.consumer))
    assert [peer.engine_id for peer in report.peers] == ["p"]
    assert report.transfers == ()
