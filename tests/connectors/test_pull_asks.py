"""Requests that reach source and target at once: the target asks for the ticket."""

import queue
import re
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvferry.connectors.pull import asks
from kvferry.connectors.pull.pursuit import PursuitState
from kvferry.control.client import ControlClient
from kvferry.control.give_backs import WORD
from kvferry.control.messages import AskState
from kvferry.control.proofs import veil
from kvferry.control.tickets import TransferId, verify
from kvferry.errors import PeerEndedError, PeerLostError, TicketError, TicketExpiredError
from kvferry.testing.fake_engine import run
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S, until
from tests.connectors.engines import KEY, SOURCE, TARGET, renew_now

TOKENS = tuple(range(1000, 1021))
KEYS = KEY.encode()


@pytest.fixture
def source(open_engine):
    return open_engine("p", SOURCE)


@pytest.fixture
def begin(source):
    """Makes transfers of the source."""
    return lambda key=KEYS: TransferId.begin(f"127.0.0.1:{source.scheduler.port}", key)


@dataclass(frozen=True)
class Asker:
    """Somebody who asks for what a source lends."""

    client: ControlClient
    address: str
    incarnation: str
    told: queue.Queue[Any] = field(default_factory=queue.Queue)
    """What the source says unasked."""

    def ask_for(self, transfer):
        return self.client.ask(self.address, self.incarnation, transfer).result(WAIT_S)


@pytest.fixture
def asker(source, open_engine):
    """Somebody who has met the source."""
    target = open_engine("d", TARGET)
    described = target.scheduler.description.told
    with ControlClient(engine_id="d", incarnation=described.incarnation) as client:
        address = f"127.0.0.1:{source.scheduler.port}"
        theirs = client.handshake(address, described).result(WAIT_S)
        asker = Asker(client, address, theirs.incarnation)
        client.listen(lambda _, news: asker.told.put(news))
        yield asker


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
    asker.client.release(address, ticket.incarnation, {ticket.lease_id: secret}).result(WAIT_S)
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
    source.scheduler.lender.leases.max_blocks = 1
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
    assert source.scheduler.lender.leases.counters()["released"] == 1


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("is_asked", [True, False])
def test_what_a_request_lends_is_taken_back_by_its_word(source, begin, is_asked, is_early):
    """With a transfer, and without."""
    word = bytes(16)
    give_backs = source.scheduler.server.give_backs
    params = {"do_remote_decode": True, **(lends(begin()) if is_asked else {}), WORD: word.hex()}
    if is_early:
        assert not give_backs.take_back(word)
    source.add("r", TOKENS, params)
    if not is_early:
        run([source], lambda: "r" in source.held, timeout_s=WAIT_S, what="the lease")
        assert not give_backs.take_back(bytes(15))
        assert give_backs.take_back(word)
    run([source], is_over(source), timeout_s=WAIT_S, what="the end of the lease")
    assert source.scheduler.lender.leases.counters()["released"] == 1
    assert len(give_backs) == 0


# ---- the target ---------------------------------------------------------------------------------

LOADS_LATER = ("the target first", "the source first", "the source is done")


@pytest.fixture
def target(open_engine):
    return open_engine("d", TARGET)


def loads(transfer):
    return {"do_remote_prefill": True, "transfer": transfer.text}


def counter(engine, name):
    return engine.scheduler.server.status().counters.get(name, 0)


@pytest.mark.parametrize("order", LOADS_LATER)
def test_a_target_that_is_sent_the_request_at_once_loads_it(source, target, begin, order):
    transfer = begin()

    def add_source():
        return source.add("at the source", TOKENS, lends(transfer))

    def add_target():
        return target.add("r", (*TOKENS, 7), loads(transfer))

    if order == "the target first":
        request = add_target()
        until_asked(target, source, "requests.Ask")
        add_source()
    else:
        add_source()
        if order == "the source is done":
            run([source], lambda: "at the source" in source.held, timeout_s=WAIT_S, what="a lease")
        request = add_target()
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the load")
    assert (request.error, request.failed, request.external_tokens) == (None, False, len(TOKENS))
    assert source.scheduler.lender.leases.counters() == {"done": 1}
    assert not target.scheduler.borrower.loads
    source.check_memory()
    target.check_memory()


@pytest.fixture
def soon(monkeypatch):
    """Targets ask again and again."""
    monkeypatch.setattr(asks, "ASK_AGAIN_S", 0.01)


def both_over(source, target):
    return lambda: source.is_idle and target.is_idle


def until_asked(target, source, name, count=1):
    """The target steps until the source has got so many messages of a kind."""
    run([target], lambda: counter(source, name) >= count, timeout_s=WAIT_S, what=name)


def test_a_target_pins_nothing_while_it_waits(source, target, begin):
    transfer = begin()
    free = target.num_free_blocks
    target.add("r", TOKENS, loads(transfer))
    until_asked(target, source, "requests.Ask")
    target.step()
    assert target.num_free_blocks == free
    target.abort("r")


@pytest.mark.parametrize("when", ["unknown", "coming"])
def test_a_ticket_that_nobody_wants_any_more_is_given_back(source, target, begin, when):
    transfer = begin()
    if when == "coming":
        source.add("r", TOKENS, lends(transfer))
    target.add("r", TOKENS, loads(transfer))
    until_asked(target, source, "requests.Ask")
    target.abort("r")
    if when == "unknown":
        source.add("r", TOKENS, lends(transfer))
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the end of the lease")
    assert source.scheduler.lender.leases.counters() == {"released": 1}


@pytest.mark.parametrize("when", ["unknown", "lent"])
def test_a_request_that_the_engines_front_refused_gives_the_ticket_back(
    source, target, begin, when
):
    """All that is told of it is what the router has sent; the source was sent the request too."""
    transfer = begin()
    if when == "lent":
        source.add("at the source", TOKENS, lends(transfer))
        run([source], lambda: "at the source" in source.held, timeout_s=WAIT_S, what="the lease")
    target.scheduler.on_rejected_request(FakeRequest("r", (0,), loads(transfer)))
    if when == "unknown":
        until_asked(target, source, "requests.Ask")
        source.add("at the source", TOKENS, lends(transfer))
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the end of the lease")
    assert source.scheduler.lender.leases.counters() == {"released": 1}
    assert not target.scheduler.borrower.loads


def test_a_refused_request_does_not_give_back_what_another_one_asks_for(source, target, begin):
    transfer = begin()
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    target.scheduler.on_rejected_request(FakeRequest("other", (0,), loads(transfer)))
    source.add("at the source", TOKENS, lends(transfer))
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the load")
    assert (request.error, request.failed, request.external_tokens) == (None, False, len(TOKENS))


def test_a_target_that_has_all_of_it_gives_the_ticket_back(source, target, begin):
    transfer = begin()
    prompt = TOKENS[: target.block_size + 1]
    request = target.add("r", prompt, loads(transfer), local_blocks=1)
    source.add("r", prompt, lends(transfer))
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="both requests")
    assert (request.external_tokens, request.error) == (0, None)
    assert source.scheduler.lender.leases.counters() == {"released": 1}


def test_a_prompt_of_which_nothing_is_lent_is_computed_and_no_load_has_failed(
    source, target, begin, caplog
):
    transfer = begin()
    source.add("at the source", TOKENS, lends(transfer))
    request = target.add("r", TOKENS, loads(transfer))
    until_asked(target, source, "requests.Ask")
    source.abort("at the source")
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="both requests")
    assert (request.finish_reason, request.error) == ("length", None)
    assert target.scheduler.counters()["asks_denied"] == 1
    assert "request at the source has ended (abort) without a lease" in caplog.text


@pytest.mark.parametrize("when", ["unknown", "coming"])
def test_a_source_that_ends_is_not_waited_for(source, target, begin, when, soon):
    transfer = begin()
    if when == "coming":
        source.add("r", TOKENS, lends(transfer))
    request = target.add("r", TOKENS, loads(transfer))
    until_asked(target, source, "requests.Ask")
    source.close()
    run([target], is_over(target), timeout_s=WAIT_S, what="the end of the wait")
    assert isinstance(request.error, PeerEndedError)
    assert request.finish_reason == "length"


def test_a_source_that_does_not_get_the_request_is_named_after_a_while(
    clock, source, open_engine, begin
):
    target = open_engine("d", TARGET, handshake_timeout_s=120.0)
    request = target.add("r", TOKENS, loads(begin()))
    is_past = clock.passing(is_over(target))
    run([target], is_past, timeout_s=WAIT_S, what="the end of the wait")
    assert isinstance(request.error, PeerLostError)
    assert re.search(
        r"the engine at 127.0.0.1:\d+ did not get request 'r', .* within 120 s "
        r"\(handshake_timeout_s\); look there and at the router",
        str(request.error),
    )


def test_a_source_that_has_forgotten_the_request_is_named_after_a_while(
    clock, source, open_engine, begin, soon
):
    target = open_engine("d", TARGET, handshake_timeout_s=120.0)
    transfer = begin()
    source.add("r", TOKENS, lends(transfer))
    request = target.add("r", TOKENS, loads(transfer))
    pursuits = target.scheduler.sources.pursuits
    pursuit = target.scheduler.borrower.loads["r"].pursuit
    run([target], lambda: pursuit.ask.incarnation, timeout_s=WAIT_S, what="the source to know it")
    assert pursuits.asks._waiting
    # It said that it will lend nothing, to nobody; and longer ago than it remembers.
    source.scheduler.server.asks._known.clear()
    is_past = clock.passing(is_over(target))
    run([target], is_past, timeout_s=WAIT_S, what="the end of the wait")
    assert "did not get request 'r'" in str(request.error)


def test_time_in_which_a_source_owes_an_answer_is_not_charged(target, begin):
    """The simulation has the whole of it; this is the arithmetic."""
    pulled = target.scheduler
    waiting, now = pulled.sources.pursuits.asks, time.monotonic()
    target.add("r", TOKENS, loads(begin()))
    pursuit = pulled.borrower.loads["r"].pursuit
    with pulled.sources.agenda.lock:
        pursuit.deadline, pursuit.ask.looked, pursuit.ask.is_owed = now + 30.0, now, False
        pursuit.source.error = pursuit.source.handshake = None

        def look(seconds, *, owes, has_run=True):
            pursuit.is_asked = owes
            waiting.expire(pursuit.source, now + seconds, has_run)
            return pursuit.deadline - now

        assert look(0.0, owes=True) == pytest.approx(30.0)
        assert look(100.0, owes=False) == pytest.approx(130.0)  # a slow answer
        assert look(300.0, owes=False, has_run=False) == pytest.approx(330.0)  # we did not run
        for asked in range(305, 400, 5):  # and now it says every 5 s, in 1 s, that it knows nothing
            assert pursuit.standing.error is None
            look(asked, owes=True)
            look(asked + 1, owes=False)
            if pursuit.standing.error is not None:
                break
    # Of each 5 s 4 are charged: 8 times that is more than 30 s.
    assert asked == 340
    assert isinstance(pursuit.standing.error, PeerLostError)


def test_a_target_whose_lease_was_revoked_before_it_read_asks_again(source, open_engine, begin):
    target = open_engine("d", TARGET, early_load="off")
    transfer = begin()
    source.chunk_tokens = 8
    lent = source.add("at the source", TOKENS, lends(transfer))
    source.step()
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    known = target.scheduler.borrower.loads

    def is_ours():
        return "r" in known and known["r"].pursuit.standing.state is PursuitState.GROWING

    run([target], is_ours, timeout_s=WAIT_S, what="the lease")
    first = known["r"].lease_id
    source.preempt("at the source")
    source.step()
    assert source.scheduler.server.asks._known[transfer.transfer_id].answer.state == "coming"
    run([target], lambda: known["r"].pursuit.ask.lost, timeout_s=WAIT_S, what="another ask")
    target.step()
    assert request.stage is Stage.WAITING
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the load")
    assert (request.error, request.failed, request.external_tokens) == (None, False, len(TOKENS))
    assert lent.finished_cleanly
    assert source.scheduler.lender.leases.counters() == {"revoked": 1, "done": 1}
    assert first not in known
    assert not counter(target, "errors.load")
    source.check_memory()
    target.check_memory()


def test_a_target_that_asks_again_in_vain_computes_the_prompt(source, open_engine, begin):
    target = open_engine("d", TARGET, early_load="off")
    transfer = begin()
    source.chunk_tokens = 8
    source.add("at the source", TOKENS, lends(transfer))
    source.step()
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    known = target.scheduler.borrower.loads

    def is_ours():
        return "r" in known and known["r"].pursuit.standing.state is PursuitState.GROWING

    run([target], is_ours, timeout_s=WAIT_S, what="the lease")
    source.preempt("at the source")
    source.step()
    source.abort("at the source")
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="both requests")
    assert (request.error, request.external_tokens) == (None, 0)
    assert target.scheduler.counters()["asks_denied"] == 1
    assert not target.scheduler.borrower.loads


def held_by(source):
    """The leases of a source: id → the engine that holds it."""
    leases = source.scheduler.lender.leases.snapshot()
    return {lease.lease_id: lease.target for lease in leases if lease.target}


def keeps_nothing(target):
    """Whether a target has forgotten all that it has asked for."""
    sources = target.scheduler.sources
    asks, tickets = sources.pursuits.asks, sources.pursuits.tickets
    return not (sources.agenda.pursuits or asks._waiting or tickets.seen._live)


def test_a_target_that_makes_no_step_takes_the_lease_that_it_has_asked_for(source, target, begin):
    transfer = begin()
    source.add("at the source", TOKENS, lends(transfer))
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    run([source], lambda: held_by(source), timeout_s=WAIT_S, what="the lease to be taken")
    assert list(held_by(source).values()) == ["d"]
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the load")
    assert (request.error, request.external_tokens) == (None, len(TOKENS))
    assert keeps_nothing(target)


def test_a_lease_that_was_taken_between_two_steps_is_given_back_with_the_request(
    source, target, begin
):
    transfer = begin()
    source.add("at the source", TOKENS, lends(transfer))
    target.add("r", (*TOKENS, 7), loads(transfer))
    run([source], lambda: held_by(source), timeout_s=WAIT_S, what="the lease to be taken")
    target.abort("r")
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the end of the lease")
    assert source.scheduler.lender.leases.counters() == {"released": 1}
    assert keeps_nothing(target)


def test_an_engine_that_hangs_does_not_keep_the_lease_that_it_has_asked_for(clock, open_engine):
    source = open_engine("p", SOURCE, lease_duration_s=120.0)
    target = open_engine("d", TARGET, progress_timeout_s=120.0)
    transfer = TransferId.begin(f"127.0.0.1:{source.scheduler.port}", KEYS)
    source.add("at the source", TOKENS, lends(transfer))
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    is_past = clock.passing(is_over(source))
    run([source], is_past, timeout_s=WAIT_S, what="the end of the lease")
    # It was given up: a lease of a living connection is not left to expire.
    assert source.scheduler.lender.leases.counters() == {"released": 1}
    run([target], is_over(target), timeout_s=WAIT_S, what="the end of the request")
    assert "the engine has made no step for" in str(request.error)
    assert keeps_nothing(target)


def test_a_target_that_makes_no_step_asks_again_for_a_lease_that_was_revoked(
    source, open_engine, begin
):
    target = open_engine("d", TARGET, early_load="off")
    transfer = begin()
    source.chunk_tokens = 8
    source.add("at the source", TOKENS, lends(transfer))
    source.step()
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    until(lambda: held_by(source))
    (first,) = held_by(source)
    source.preempt("at the source")
    source.step()

    def is_taken_again():
        return held_by(source).keys() - {first}

    run([source], is_taken_again, timeout_s=WAIT_S, what="the second lease to be taken")
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the load")
    assert (request.error, request.failed, request.external_tokens) == (None, False, len(TOKENS))
    assert source.scheduler.lender.leases.counters() == {"revoked": 1, "done": 1}
    assert keeps_nothing(target)


def test_the_ticket_of_a_lease_that_was_revoked_is_not_taken_for_another(source, target, begin):
    transfer = begin()
    source.add("at the source", TOKENS, lends(transfer))
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    run([source], lambda: held_by(source), timeout_s=WAIT_S, what="the lease to be taken")
    lost = target.scheduler.borrower.loads["r"].pursuit
    # And it goes on saying that it is lent until its next step.
    source.scheduler.lender.leases.revoke_all()
    renew_now(target, "r")
    before = counter(source, "requests.Ask")
    until(lambda: counter(source, "requests.Ask") >= before + 2)
    assert lost.successor.standing.is_asked_for
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="both requests")
    assert (request.error, request.external_tokens) == (None, 0)
    assert keeps_nothing(target)


def test_a_load_that_is_refused_as_its_lease_is_revoked_waits_for_no_other(source, target, begin):
    transfer = begin()
    source.add("at the source", TOKENS, lends(transfer))
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    run([source], lambda: held_by(source), timeout_s=WAIT_S, what="the lease to be taken")
    revoked = target.scheduler.borrower.loads["r"].pursuit
    source.scheduler.lender.leases.revoke_all()
    renew_now(target, "r")
    until(lambda: revoked.successor is not None)
    followed = revoked.successor
    target.scheduler.sources.pursuits.refuse(revoked, TicketExpiredError("other weights"))
    assert revoked.successor is None
    assert followed.standing.state is PursuitState.UNWANTED
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="both requests")
    assert isinstance(request.error, TicketExpiredError)
    run([source, target], lambda: keeps_nothing(target), timeout_s=WAIT_S, what="the last answer")


def test_a_ticket_for_another_prompt_is_refused_and_left_alone(source, target, begin):
    transfer = begin()
    request = target.add("r", range(50, 71), loads(transfer))
    source.add("r", TOKENS, lends(transfer))
    run([source, target], is_over(target), timeout_s=WAIT_S, what="the refusal")
    assert isinstance(request.error, TicketError)
    assert "begins with other tokens" in str(request.error)
    run([target], lambda: not held_by(source), timeout_s=WAIT_S, what="the lease to be left")
    assert source.scheduler.lender.leases.counters() == {}
    assert keeps_nothing(target)


def test_one_transfer_serves_one_request(source, target, begin):
    transfer = begin()
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    with pytest.raises(TicketError, match="each serves one request"):
        target.add("again", (*TOKENS, 7), loads(transfer))
    source.add("r", TOKENS, lends(transfer))
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the load")
    late = target.add("late", (*TOKENS, 7), loads(transfer))
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the second one")
    assert (request.external_tokens, late.external_tokens) == (len(TOKENS), 0)


def test_a_target_asks_again_as_what_it_was_told_may_be_lost(source, target, begin, monkeypatch):
    monkeypatch.setattr(asks, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(source.scheduler.server, "_tell_askers", lambda *_: None)
    transfer = begin()
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    until_asked(target, source, "requests.Ask", 2)
    source.add("r", TOKENS, lends(transfer))
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the load")
    assert request.external_tokens == len(TOKENS)


@pytest.mark.parametrize("false", ["", 7, "another key"])
def test_a_target_asks_nobody_for_what_the_router_did_not_send(source, target, begin, false):
    text = begin(b"x" * 32).text if false == "another key" else false
    with pytest.raises(TicketError, match="transfer"):
        target.add("r", TOKENS, {"do_remote_prefill": True, "transfer": text})
    target.step()
    assert not counter(source, "requests.Handshake")
    assert counter(target, "errors.ticket") == 1


def test_without_a_key_a_target_asks_its_peers_only(open_engine, begin):
    target = open_engine("d", TARGET, cluster_key=None, peers=["127.0.0.1:1"])
    with pytest.raises(TicketError, match="which is not in peers"):
        target.add("r", TOKENS, loads(begin(None)))


def test_without_a_key_a_target_loads_what_it_has_asked_for(open_engine):
    source = open_engine("p", SOURCE, cluster_key=None)
    target = open_engine("d", TARGET, cluster_key=None)
    transfer = TransferId.begin(f"127.0.0.1:{source.scheduler.port}", None)
    request = target.add("r", (*TOKENS, 7), loads(transfer))
    until_asked(target, source, "requests.Ask")
    source.add("r", TOKENS, lends(transfer))
    run([source, target], both_over(source, target), timeout_s=WAIT_S, what="the load")
    assert request.external_tokens == len(TOKENS)


def test_a_source_that_was_started_again_is_not_waited_for(open_engine, target, free_port, soon):
    source = open_engine("p", SOURCE, kv_port=free_port)
    transfer = TransferId.begin(f"127.0.0.1:{free_port}", KEYS)
    source.add("r", TOKENS, lends(transfer))
    request = target.add("r", TOKENS, loads(transfer))
    pursuit = target.scheduler.borrower.loads["r"].pursuit
    run([target], lambda: pursuit.ask.incarnation, timeout_s=WAIT_S, what="the source to know it")
    source.close()
    again = open_engine("p", SOURCE, kv_port=free_port)
    run([target, again], is_over(target), timeout_s=WAIT_S, what="the end of the wait")
    assert isinstance(request.error, PeerEndedError | TicketExpiredError)


def replace_secret(transfer):
    return TransferId(transfer.transfer_id, bytes(16))


@pytest.mark.parametrize("false", ["", 7, "another key", "another ticket"])
def test_a_request_with_a_transfer_that_is_not_the_routers_is_refused(source, begin, false):
    text = begin(b"x" * 32).text if false == "another key" else false
    with pytest.raises(TicketError, match="transfer"):
        source.add("r", TOKENS, {"do_remote_decode": True, "transfer": text})
    assert len(source.scheduler.server.asks) == 0
