"""Asks for transfers: who is told what, when, and what it costs."""

import queue
import tracemalloc

import pytest
from msgspec.structs import replace

from kvferry.control import asks
from kvferry.control.asks import MAX_ASKERS, MAX_UNKNOWN, AskTable, ask_proof
from kvferry.control.messages import Ask, Asked, AskState
from kvferry.control.proofs import veil
from kvferry.control.tickets import (
    Ticket,
    TransferId,
    read_transfer,
    transfer_secret,
    verify,
)
from kvferry.errors import HandshakeNeededError, TicketError, TicketForgedError
from kvferry.testing.waiting import WAIT_S

KEY = b"k" * 32
ADDRESS = "10.0.0.1:14579"


def ask_for(transfer, *, engine="d", secret=None):
    ask = Ask(
        id=7,
        engine_id=engine,
        incarnation="d1",
        source_incarnation="p1",
        transfer_id=transfer.transfer_id,
        proof=b"",
    )
    return replace(ask, proof=ask_proof(secret or transfer.secret, ask))


@pytest.fixture(params=[KEY, None], ids=["key", "no key"])
def key(request):
    return request.param


@pytest.fixture
def clock(clock_class):
    return clock_class()


@pytest.fixture
def table(key, clock):
    return AskTable(key, clock)


@pytest.fixture
def transfer(key):
    return TransferId.begin(ADDRESS, key)


def ticket_of(served, lease_id):
    return Ticket(
        lease_id=lease_id,
        engine_id="p",
        incarnation=served.incarnation,
        secret=served.server.secret(lease_id),
        host="127.0.0.1",
        port=served.server.port,
        request_id="r",
        num_tokens=40,
        block_ids=((3, 9, 200_000),),
        lease_duration_s=30.0,
    )


# ---- what a router gives ------------------------------------------------------------------------


@pytest.mark.parametrize("address", [ADDRESS, "prefill-0.cluster:1", "[fd00::1]:65535"])
def test_what_a_router_sends_is_read_by_both_engines(key, address):
    transfer = TransferId.begin(address, key)
    assert read_transfer(transfer.text, key) == transfer
    assert transfer.address == address
    assert transfer.secret.hex() not in repr(transfer)


def test_no_two_transfers_are_alike(key):
    assert len({TransferId.begin(ADDRESS, key).text for _ in range(100)}) == 100


def test_a_transfer_of_another_key_or_with_another_address_is_refused():
    text = TransferId.begin(ADDRESS, KEY).text
    for false, key in (
        (text, b"x" * 32),
        (text.replace("10.0.0.1", "10.0.0.2"), KEY),
        (TransferId.begin(ADDRESS, None).text, KEY),
        (text[:-1] + ("0" if text[-1] != "0" else "1"), KEY),
    ):
        with pytest.raises(TicketForgedError, match="same cluster_key_file"):
            read_transfer(false, key)


def test_both_engines_make_the_same_transfer_of_a_room(key):
    transfer = TransferId.of_room(ADDRESS, 12, key)
    assert transfer == TransferId.of_room(ADDRESS, 12, key) == read_transfer(transfer.text, key)
    assert transfer.address == ADDRESS
    assert transfer.text not in (
        TransferId.of_room(ADDRESS, 13, key).text,
        TransferId.of_room("10.0.0.2:1", 12, key).text,
        TransferId.of_room(ADDRESS, 12, b"x" * 32).text,
    )


def test_a_room_without_the_key_of_the_cluster_is_refused():
    with pytest.raises(TicketForgedError, match="same cluster_key_file"):
        read_transfer(TransferId.of_room(ADDRESS, 12, None).text, KEY)


@pytest.mark.parametrize(
    "text",
    [
        *(None, 3, "", "x", "a" * 32, f"{'a' * 32}@h:1", f"{'a' * 32}@h.{'0' * 32}"),
        *(f"{'a' * 32}@h:0.{'0' * 32}", f"{'a' * 32}@h:01.{'0' * 32}"),
        *(f"{'a' * 32}@{'h' * 300}:1.{'0' * 32}", f"{'g' * 32}@h:1.{'0' * 32}"),
    ],
)
def test_what_is_no_transfer_is_refused(key, text):
    with pytest.raises(TicketError, match="transfer"):
        read_transfer(text, key)


def test_an_address_that_is_too_long_makes_no_transfer(key):
    with pytest.raises(ValueError, match="too long for a transfer"):
        TransferId.begin(f"{'h' * 220}:1", key)


@pytest.mark.parametrize("host", ["h" * 219, ":" * 219])
def test_the_longest_address_makes_a_transfer_that_engines_read(key, host):
    transfer = TransferId.begin(f"{host}:1", key)
    assert read_transfer(transfer.text, key) == transfer


# ---- the table ----------------------------------------------------------------------------------


def test_who_asks_before_the_request_has_come_is_told_when_it_is_lent(table, transfer):
    assert table.ask(ask_for(transfer), b"c").state is AskState.UNKNOWN
    assert table.expect(transfer) == []
    connections, news = table.lend(transfer.transfer_id, "ticket")
    assert connections == [b"c"]
    assert (news.id, news.state, news.ticket) == (0, AskState.LENT, "ticket")


def test_who_asks_later_is_answered_at_once(table, transfer):
    table.expect(transfer)
    assert table.ask(ask_for(transfer), b"c").state is AskState.COMING
    table.lend(transfer.transfer_id, "ticket")
    answer = table.ask(ask_for(transfer, engine="d2"), b"e")
    assert (answer.id, answer.state, answer.ticket) == (7, AskState.LENT, "ticket")


def test_who_waits_is_told_that_nothing_is_lent(table, transfer):
    table.expect(transfer)
    table.ask(ask_for(transfer), b"c")
    connections, news = table.deny(transfer.transfer_id, "it was aborted")
    assert (connections, news.state, news.reason) == ([b"c"], AskState.NEVER, "it was aborted")
    assert table.ask(ask_for(transfer), b"c").reason == "it was aborted"
    assert table.deny(transfer.transfer_id, "again") == ([], replace(news, reason="again"))


def test_the_end_of_a_lease_is_not_told_to_who_has_the_ticket(table, transfer):
    table.expect(transfer)
    table.ask(ask_for(transfer), b"c")
    table.lend(transfer.transfer_id, "ticket")
    assert table.deny(transfer.transfer_id, "it has ended")[0] == []
    answer = table.ask(ask_for(transfer), b"c")
    assert (answer.state, answer.ticket) == (AskState.NEVER, "")


def test_an_ask_that_the_router_did_not_send_is_answered_no_ticket(table, transfer, key):
    false = ask_for(transfer, secret=b"s" * 16)
    early = table.ask(false, b"stranger")
    assert early is None if key else early.state is AskState.UNKNOWN
    table.ask(ask_for(transfer), b"c")
    assert table.expect(transfer) == ([] if key else [b"stranger"])
    assert table.ask(false, b"stranger") is None
    assert table.lend(transfer.transfer_id, "ticket")[0] == [b"c"]
    assert table.ask(false, b"stranger") is None


def test_a_proof_is_of_one_asker_and_one_start_of_the_source(table, transfer):
    table.expect(transfer)
    ask = ask_for(transfer)
    for change in ({"engine_id": "e"}, {"incarnation": "d2"}, {"source_incarnation": "p2"}):
        assert table.ask(replace(ask, **change), b"c") is None
    other = TransferId.begin(ADDRESS, None)
    table.expect(other)
    assert table.ask(replace(ask, transfer_id=other.transfer_id), b"c") is None


def test_a_transfer_that_comes_twice_does_not_undo_what_was_lent(table, transfer):
    table.expect(transfer)
    table.lend(transfer.transfer_id, "ticket")
    table.expect(transfer)
    assert table.ask(ask_for(transfer), b"c").ticket == "ticket"


def test_unknown_asks_are_forgotten_after_a_while_and_live_ones_are_not(
    table, transfer, key, clock
):
    live = TransferId.begin(ADDRESS, key)
    table.expect(live)
    table.ask(ask_for(transfer), b"c")
    clock.now = asks.KEPT_S / 2
    table.ask(ask_for(transfer), b"c")
    clock.now = asks.KEPT_S
    table.expire()
    assert len(table) == 2
    clock.now = 2 * asks.KEPT_S
    table.expire()
    assert len(table) == 1
    table.expect(transfer)
    assert table.lend(transfer.transfer_id, "ticket")[0] == []
    assert table.ask(ask_for(live), b"c").state is AskState.COMING


def test_hostile_asks_cost_bounded_memory(key, clock):
    table = AskTable(key, clock)
    long = "x" * 256
    tracemalloc.start()
    try:
        for number in range(2 * MAX_UNKNOWN):
            name = f"{number:032x}@{'h' * 200}:1"
            transfer = TransferId(name, transfer_secret(name, key) or b"s" * 16)
            for connection in range(2 * MAX_ASKERS):
                ask = replace(ask_for(transfer, engine=long), source_incarnation=long)
                table.ask(ask, b"connection %d" % connection)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(table) <= MAX_UNKNOWN
    assert grown < 16 << 20, grown


# ---- over sockets -------------------------------------------------------------------------------


def open_target(served, describe, told, engine_id="decode-0"):
    description = describe(engine_id, "d1")
    client = served.client(description)
    client.handshake(served.address, description).result(WAIT_S)
    client.listen(lambda address, news: told.put(news))
    return client


def test_the_ticket_comes_unasked_and_only_the_transfer_opens_its_secret(serve, describe, key):
    served = serve(key=key)
    told: queue.Queue[Asked] = queue.Queue()
    client = open_target(served, describe, told)
    transfer = TransferId.begin(served.address, key)

    def ask():
        return client.ask(served.address, served.incarnation, transfer).result(WAIT_S)

    assert ask().state is AskState.UNKNOWN
    served.server.expect(transfer)
    assert ask().state is AskState.COMING
    lease_id = served.grant()
    ticket = ticket_of(served, lease_id)
    served.server.lend(transfer, ticket)
    news = told.get(timeout=WAIT_S)
    assert (news.id, news.transfer_id, news.state) == (0, transfer.transfer_id, AskState.LENT)
    veiled = verify(news.ticket, key)
    assert veiled.secret != ticket.secret
    assert replace(veiled, secret=veil(veiled.secret, transfer.secret, lease_id)) == ticket
    assert ask().ticket == news.ticket
    served.server.deny(transfer, "it has ended")
    assert (ask().state, ask().reason) == (AskState.NEVER, "it has ended")


def test_who_waits_hears_at_once_that_nothing_comes(serve, describe, key):
    served = serve(key=key)
    told: queue.Queue[Asked] = queue.Queue()
    client = open_target(served, describe, told)
    transfer = TransferId.begin(served.address, key)
    served.server.expect(transfer)
    client.ask(served.address, served.incarnation, transfer).result(WAIT_S)
    served.server.deny(transfer, "request r has ended (abort)")
    news = told.get(timeout=WAIT_S)
    assert (news.state, news.reason) == (AskState.NEVER, "request r has ended (abort)")


def test_an_ask_without_a_right_is_answered_never_and_noted(serve, describe):
    served = serve(key=KEY)
    told: queue.Queue[Asked] = queue.Queue()
    client = open_target(served, describe, told)
    false = TransferId.begin(served.address, b"x" * 32)
    answer = client.ask(served.address, served.incarnation, false).result(WAIT_S)
    assert answer.state is AskState.NEVER
    assert "does not prove that the router sent it" in answer.reason
    assert served.server.status().counters["errors.authority"] == 1
    assert len(served.server.asks) == 0


def test_a_stranger_who_repeats_an_ask_does_not_keep_its_news_from_the_asker(serve, describe):
    served = serve(key=KEY)
    told: queue.Queue[Asked] = queue.Queue()
    overheard: queue.Queue[Asked] = queue.Queue()
    client = open_target(served, describe, told)
    stranger = open_target(served, describe, overheard)  # he says what he hears, on his connection
    transfer = TransferId.begin(served.address, KEY)
    served.server.expect(transfer)
    for one in (client, stranger):
        one.ask(served.address, served.incarnation, transfer).result(WAIT_S)
    ticket = ticket_of(served, served.grant())
    served.server.lend(transfer, ticket)
    assert told.get(timeout=WAIT_S).state is AskState.LENT
    assert verify(overheard.get(timeout=WAIT_S).ticket, KEY).secret != ticket.secret


def test_an_ask_to_another_start_of_the_source_needs_a_handshake(serve, describe):
    served = serve(key=KEY)
    told: queue.Queue[Asked] = queue.Queue()
    client = open_target(served, describe, told)
    with pytest.raises(HandshakeNeededError):
        client.ask(served.address, "p0", TransferId.begin(served.address, KEY)).result(WAIT_S)
