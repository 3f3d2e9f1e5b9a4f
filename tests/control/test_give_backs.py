"""Loans that a router gives back by the word that the source got with the request."""

import pytest

from kvferry.control import give_backs
from kvferry.control.client import ControlClient
from kvferry.control.give_backs import GiveBacks
from kvferry.control.leases import Lease, LeaseTable
from kvferry.control.messages import LeaseAnswer, Released, TakeBack, decode_reply, encode
from kvferry.control.options import ControlOptions
from kvferry.control.server import ControlServer
from kvferry.errors import KVFerryError
from kvferry.testing.waiting import WAIT_S

WORD, OTHER = bytes(16), b"x" * 16
TARGET = ("d", "d1")


@pytest.fixture
def table():
    return LeaseTable(max_blocks=100)


@pytest.fixture
def backs(table):
    return GiveBacks(table)


def grant(table, **how):
    lease = table.grant("r", 10, **how)
    assert isinstance(lease, Lease)
    return lease.lease_id


def swept(table):
    return [each.lease_id for each in table.sweep()]


def test_the_word_ends_the_leases_of_its_request_alone(table, backs):
    mine, again, foreign = (grant(table) for _ in range(3))
    for word, lease_id in ((WORD, mine), (WORD, again), (OTHER, foreign)):
        backs.granted(word, lease_id)
    backs.take_back(WORD)
    assert sorted(swept(table)) == sorted([mine, again])
    for lease_id in (mine, again, "unknown"):
        backs.ended(lease_id)
    assert len(backs) == 1


def test_a_loan_may_be_given_back_before_its_lease_is_granted(table, backs):
    backs.take_back(WORD)
    lease_id = grant(table)
    backs.granted(WORD, lease_id)
    assert swept(table) == [lease_id]
    growing = grant(table, num_tokens=8, writers=(0,))
    backs.granted(WORD, growing)
    assert swept(table) == [growing]


def test_what_a_target_holds_is_left_to_it(table, backs):
    held, shared = grant(table), grant(table, shared=True)
    for lease_id in (held, shared):
        backs.granted(WORD, lease_id)
    claim = f"{shared}/one"
    assert set(table.renew(*TARGET, [held, claim]).values()) == {LeaseAnswer.HELD}
    backs.take_back(WORD)
    assert swept(table) == []
    table.release(*TARGET, [held, claim])
    assert sorted(swept(table)) == sorted([held, shared])


def test_a_target_that_comes_after_the_word_never_holds_the_lease(table, backs):
    lease_id = grant(table)
    backs.granted(WORD, lease_id)
    backs.take_back(WORD)
    assert table.renew(*TARGET, [lease_id]) == {lease_id: LeaseAnswer.REVOKED}
    said = {"rank": 0, "ok": True, "nonce": b"n", "world_size": 1}
    assert table.finish(lease_id, *TARGET, **said) == "revoked"


def test_words_of_strangers_cost_bounded_memory(table, backs, monkeypatch):
    monkeypatch.setattr(give_backs, "MAX_REMEMBERED", 3)
    for number in range(10):
        backs.take_back(bytes([number]) * 16)
    lease_ids = [grant(table) for _ in range(10)]
    for number, lease_id in enumerate(lease_ids):
        backs.granted(bytes([number]) * 16, lease_id)
    assert swept(table) == lease_ids[-3:]


def test_the_message_needs_no_handshake(serve):
    served = serve(ready=False)
    lease_id = served.grant()
    served.server.give_backs.granted(WORD, lease_id)
    with ControlClient(engine_id="router", incarnation="router") as client:
        assert not client.take_back(served.address, OTHER).result(WAIT_S)
        assert swept(served.leases) == []
        assert client.take_back(served.address, WORD).result(WAIT_S)
    assert swept(served.leases) == [lease_id]
    assert isinstance(
        decode_reply(served.server.handle(encode(TakeBack(id=7, word=WORD)))), Released
    )


def test_a_source_that_does_not_know_the_message_says_so_and_goes_on(serve, monkeypatch):
    served = serve()
    handle, name = ControlServer.handle, b"TakeBack"
    monkeypatch.setattr(
        ControlServer,
        "handle",
        lambda server, payload, *more: handle(server, payload.replace(name, b"TakeBacc"), *more),
    )
    options = ControlOptions(request_timeout_s=1.0)
    with ControlClient(engine_id="router", incarnation="router", options=options) as client:
        with pytest.raises(KVFerryError):
            client.take_back(served.address, WORD).result(WAIT_S)
        assert client.status(served.address).result(WAIT_S).ready
