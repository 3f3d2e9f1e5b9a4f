"""One Peer per start of an engine: restarts, refusals, eviction."""

import pytest

from kvferry.control.peers import KEPT_S, LOOK_S, PeerTable
from kvferry.errors import HandshakeNeededError, IncompatibleError


@pytest.fixture
def clock(clock_class):
    return clock_class(50.0)


@pytest.fixture
def peers(clock):
    return PeerTable(max_peers=3, silence_s=30.0, clock=clock)


def test_an_unknown_engine_must_shake_hands_first(peers):
    with pytest.raises(HandshakeNeededError, match="has not shaken hands"):
        peers.current("d", "one")


def test_another_start_of_an_engine_takes_nothing_from_the_one_before(peers, describe, clock):
    peers.admit(describe("d", "one", tp=3))
    clock.now += 1
    peers.admit(describe("d", "two"))
    assert peers.current("d", "one").world_size == 3
    assert peers.current("d", "two").world_size == 1


def test_a_start_does_not_change_its_number_of_ranks(peers, describe):
    peers.admit(describe("d", "one", tp=3))
    peers.admit(describe("d", "one", tp=3))
    with pytest.raises(IncompatibleError, match="with 3 ranks, now it describes 1"):
        peers.admit(describe("d", "one"))
    assert peers.current("d", "one").world_size == 3


def test_a_silent_start_is_dropped_when_its_engine_comes_back(peers, describe, clock):
    peers.admit(describe("d", "one"))
    clock.now += 30
    peers.admit(describe("d", "two"))
    assert [status.incarnation for status in peers.snapshot()] == ["two"]


def test_two_live_engines_of_one_id_are_told_apart_and_shown(peers, describe, clock):
    peers.admit(describe("d", "one"))
    clock.now += 1
    peers.admit(describe("d", "two"))
    assert [status.last_error for status in peers.snapshot()] == ["", ""]
    clock.now += 1
    peers.current("d", "one")
    (one, two) = peers.snapshot()
    assert "heard beside start two" in one.last_error
    assert two.last_error == ""


def test_a_refused_peer_is_shown_and_nothing_is_exchanged_with_it(peers, describe):
    peers.refuse(describe("d", "one"), "other weights")
    with pytest.raises(HandshakeNeededError):
        peers.current("d", "one")
    (status,) = peers.snapshot()
    assert (status.state, status.last_error) == ("refused", "other weights")
    peers.admit(describe("d", "one"))
    (status,) = peers.snapshot()
    assert (status.state, status.last_error) == ("ready", "")


def test_a_refusal_does_not_displace_a_start_that_fits(peers, describe):
    peers.admit(describe("d", "one"))
    peers.refuse(describe("d", "one"), "other weights" * 1000)
    assert peers.current("d", "one").last_error.startswith("other weights")
    assert len(peers.current("d", "one").last_error) == 1000


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


def test_strangers_displace_nobody_who_has_shown_a_ticket_or_was_asked(peers, describe, clock):
    peers.admit(describe("reads", "one"))
    peers.current("reads", "one").is_trusted = True
    peers.admit(describe("lends", "one"), asked=True)
    for number in range(1100):
        clock.now += 0.001
        peers.admit(describe(f"stranger-{number}", "one"))
    left = {status.engine_id for status in peers.snapshot()}
    assert left == {"reads", "lends", "stranger-1099"}


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


def test_a_peer_that_shakes_hands_while_it_is_found_to_be_gone_is_kept(peers, describe, clock):
    peers.refuse(describe("d", "one"), "other weights")
    clock.now += KEPT_S

    def speaks(_):
        peers.admit(describe("d", "one"))
        return False

    peers.expire(speaks)
    assert [peer.state for peer in peers.snapshot()] == ["ready"]


def test_what_was_loaded_is_counted_for_the_newest_start_of_an_engine(peers, describe):
    for start in ("p1", "p2"):
        peers.admit(describe("p", start))
    peers.loaded("p", 5, "tcp")
    peers.loaded("p", 7, "shm")
    peers.loaded("stranger", 9, "tcp")

    shown = [(one.incarnation, one.loaded_bytes, one.transport) for one in peers.snapshot()]
    assert shown == [("p1", 0, ""), ("p2", 12, "shm")]


def test_a_peer_that_is_silent_and_gone_is_forgotten_and_shakes_hands_again(clock, describe):
    peers = PeerTable(clock=clock)
    for name in ("gone", "idle", "heard"):
        peers.admit(describe(name, "one"))
    peers.admit(describe("source", "one"), asked=True)
    clock.now += KEPT_S - 1
    peers.current("heard", "one")
    clock.now += 1
    peers.expire(lambda target: target == ("idle", "one"))
    assert [peer.engine_id for peer in peers.snapshot()] == ["idle", "heard", "source"]
    with pytest.raises(HandshakeNeededError):
        peers.current("gone", "one")
    peers.admit(describe("gone", "one"))
    # Once nothing more is asked of it, a source is forgotten like any other peer.
    peers.let_go(describe("source", "one"))
    clock.now += LOOK_S
    peers.expire(lambda target: True)
    peers.expire(lambda target: False)  # not yet: it has just looked
    clock.now += LOOK_S
    peers.expire(lambda target: False)
    assert [peer.engine_id for peer in peers.snapshot()] == ["heard", "gone"]


def test_what_was_loaded_is_counted_for_the_newest_start_of_its_engine(peers, describe):
    peers.admit(describe("p", "one"))
    peers.admit(describe("p", "two"))
    peers.loaded("p", 7, "shm")
    peers.forget("another")
    assert [peer.loaded_bytes for peer in peers.snapshot()] == [0, 7]
    peers.forget("p")
    peers.loaded("p", 7, "shm")
    assert peers.snapshot() == ()
