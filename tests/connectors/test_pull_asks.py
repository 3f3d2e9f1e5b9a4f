"""Requests that reach source and target at once: the target asks for the ticket."""

import queue

import pytest

from kvferry.control.client import ControlClient
from kvferry.control.messages import AskState
from kvferry.control.proofs import veil
from kvferry.control.tickets import Transfer, verify
from kvferry.errors import TicketError
from kvferry.testing.fake_engine import run
from tests.connectors.engines import KEY, SOURCE, TARGET, WAIT_S

TOKENS = tuple(range(1000, 1021))
KEYS = KEY.encode()


@pytest.fixture
def source(open_engine):
    return open_engine("p", SOURCE)


@pytest.fixture
def begin(source):
    """Makes transfers of the source."""
    return lambda key=KEYS: Transfer.begin(f"127.0.0.1:{source.scheduler.port}", key)


@pytest.fixture
def asker(source, open_engine):
    """Somebody who asks for what the source lends; and what it is told unasked."""
    target = open_engine("d", TARGET)
    described = target.scheduler._description
    told = queue.Queue()
    with ControlClient(engine_id="d", incarnation=described.incarnation) as client:
        address = f"127.0.0.1:{source.scheduler.port}"
        theirs = client.handshake(address, described).result(WAIT_S)
        client.listen(lambda _, news: told.put(news))
        client.told = told
        client.ask_for = lambda transfer: client.ask(address, theirs.incarnation, transfer).result(
            WAIT_S
        )
        yield client


def lends(transfer):
    return {"do_remote_decode": True, "transfer": transfer.text}


def is_over(engine):
    return lambda: engine.is_idle


def test_who_asked_gets_the_ticket_as_soon_as_the_prompt_is_lent(source, begin, asker):
    transfer = begin()
    assert asker.ask_for(transfer).state is AskState.UNKNOWN
    request = source.add("r", TOKENS, lends(transfer))
    assert asker.ask_for(transfer).state is AskState.COMING
    run([source], lambda: "r" in source.held, timeout_s=WAIT_S, what="the lease")
    news = asker.told.get(timeout=WAIT_S)
    assert news.state is AskState.LENT
    ticket = verify(news.ticket, KEYS)
    assert (ticket.request_id, ticket.num_tokens) == ("r", len(TOKENS))
    # The answer over HTTP has no block ids and no ticket.
    assert request.response_params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_num_tokens": len(TOKENS),
        "transfer": transfer.text,
    }
    secret = veil(ticket.secret, transfer.secret, ticket.lease_id)
    address = f"127.0.0.1:{source.scheduler.port}"
    asker.release(address, ticket.incarnation, {ticket.lease_id: secret}).result(WAIT_S)
    run([source], is_over(source), timeout_s=WAIT_S, what="the end of the lease")
    assert asker.ask_for(transfer).reason == f"lease {ticket.lease_id} has ended"


@pytest.mark.parametrize("when", ["waiting", "in a step"])
def test_who_asked_hears_of_an_abort(source, begin, asker, when):
    transfer = begin()
    source.add("r", TOKENS, lends(transfer))
    asker.ask_for(transfer)
    if when == "waiting":
        source.abort("r")
    else:
        source.during_step = lambda: source.abort("r")
    run([source], is_over(source), timeout_s=WAIT_S, what="the end of the request")
    news = asker.told.get(timeout=WAIT_S)
    assert (news.state, news.ticket) == (AskState.NEVER, "")
    assert news.reason == "request r has ended (abort) without a lease"


def test_who_asked_hears_that_the_source_may_not_lend_so_much(source, begin, asker):
    source.scheduler._leases.max_blocks = 1
    transfer = begin()
    source.add("r", TOKENS, lends(transfer))
    asker.ask_for(transfer)
    run([source], is_over(source), timeout_s=WAIT_S, what="the end of the request")
    assert "max_leased_blocks" in asker.told.get(timeout=WAIT_S).reason


def test_what_was_asked_for_and_nobody_took_is_taken_back(source, begin):
    transfer = begin()
    request = source.add("r", TOKENS, lends(transfer))
    run([source], lambda: "r" in source.held, timeout_s=WAIT_S, what="the lease")
    false = replace_secret(transfer)
    source.scheduler.take_back({"transfer": false.text})
    source.step()
    assert "r" in source.held
    source.scheduler.take_back(request.response_params)
    run([source], is_over(source), timeout_s=WAIT_S, what="the end of the lease")
    assert source.scheduler._leases.counters()["released"] == 1


def replace_secret(transfer):
    return Transfer(transfer.transfer_id, bytes(16))


@pytest.mark.parametrize("false", ["", 7, "another key", "another ticket"])
def test_a_request_with_a_transfer_that_is_not_the_routers_is_refused(source, begin, false):
    text = begin(b"x" * 32).text if false == "another key" else false
    with pytest.raises(TicketError, match="transfer"):
        source.add("r", TOKENS, {"do_remote_decode": True, "transfer": text})
    assert len(source.scheduler._server.asks) == 0
