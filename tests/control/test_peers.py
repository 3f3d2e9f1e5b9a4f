"""One Peer per engine id: starts, restarts, refusals, eviction."""

import pytest

from kvferry.control.peers import PeerTable
from kvferry.errors import HandshakeNeededError, IncompatibleError


@pytest.fixture
def clock(clock_class):
    return clock_class(50.0)


@pytest.fixture
def peers(clock):
    return PeerTable(max_peers=3, twin_silence_s=30.0, clock=clock)


def test_an_unknown_engine_must_shake_hands_first(peers):
    with pytest.raises(HandshakeNeededError, match="has not shaken hands"):
        peers.current("d", "one")


def test_a_new_start_replaces_the_old_one(peers, describe):
    assert not peers.admit(describe("d", "one", tp=3))
    assert peers.current("d", "one").world_size == 3
    assert not peers.admit(describe("d", "one"))
    assert peers.admit(describe("d", "two"))
    with pytest.raises(HandshakeNeededError, match=r"known as two, this message is from one"):
        peers.current("d", "one")
    assert peers.current("d", "two").world_size == 1


def test_two_live_engines_of_one_id_are_told_so_instead_of_taking_turns(peers, describe, clock):
    peers.admit(describe("d", "one"))
    peers.admit(describe("d", "two"))
    clock.now += 29
    with pytest.raises(IncompatibleError, match="give each engine its own engine_id"):
        peers.admit(describe("d", "one"))
    peers.current("d", "two")
    clock.now += 29
    with pytest.raises(IncompatibleError):
        peers.admit(describe("d", "one"))
    clock.now += 30
    assert peers.admit(describe("d", "one"))


def test_a_refused_peer_is_shown_and_nothing_is_exchanged_with_it(peers, describe):
    peers.refuse(describe("d", "one"), "other weights")
    with pytest.raises(HandshakeNeededError):
        peers.current("d", "one")
    (status,) = peers.snapshot()
    assert (status.state, status.last_error) == ("refused", "other weights")
    peers.admit(describe("d", "two"))
    (status,) = peers.snapshot()
    assert (status.state, status.last_error, status.incarnation) == ("ready", "", "two")


def test_a_refused_start_does_not_displace_one_that_fits(peers, describe):
    peers.admit(describe("d", "one"))
    peers.refuse(describe("d", "two"), "other weights")
    assert peers.current("d", "one").last_error == "other weights"


def test_when_full_refused_peers_go_first_then_the_longest_silent(peers, describe, clock):
    for name in ("a", "b", "c"):
        clock.now += 1
        peers.admit(describe(name, "one"))
    for number in range(10):
        clock.now += 1
        peers.refuse(describe(f"stranger-{number}", "one"), "no")
    clock.now += 1
    peers.current("a", "one")
    peers.admit(describe("d", "one"))
    assert [status.engine_id for status in peers.snapshot()] == ["a", "c", "d"]


def test_ages_count_from_the_first_message_of_a_start_and_from_the_last(peers, describe, clock):
    peers.admit(describe("d", "one", pp=2))
    clock.now += 5
    peers.current("d", "one")
    clock.now += 2
    (status,) = peers.snapshot()
    assert (status.age_s, status.last_seen_s, status.ranks) == (7.0, 2.0, 2)


def test_a_forgotten_peer_must_shake_hands_again(peers, describe):
    peers.admit(describe("d", "one"))
    peers.forget("d")
    peers.forget("d")
    assert peers.snapshot() == ()
    with pytest.raises(HandshakeNeededError):
        peers.current("d", "one")
