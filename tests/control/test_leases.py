"""What a lease promises, one sentence per test. Law 3 as a whole: test_law3.py."""

import threading

import pytest

from kvferry.control.leases import MAX_CLAIMS, Lease, LeaseOutcome, LeaseRefusal, LeaseTable
from kvferry.control.messages import FinishAnswer, LeaseAnswer
from kvferry.control.options import ControlOptions
from kvferry.errors import BoundsError

D1, D2 = ("d1", "a"), ("d2", "b")


@pytest.fixture
def clock(clock_class):
    return clock_class(1000.0)


@pytest.fixture
def table(clock):
    return LeaseTable(duration_s=30.0, max_blocks=100, clock=clock)


def grant(table, num_blocks=10, *, shared=False):
    lease = table.grant("request", num_blocks, shared=shared)
    assert isinstance(lease, Lease)
    return lease.lease_id


def renew(table, target, lease_id):
    return table.renew(*target, [lease_id])[lease_id]


def finish(table, target, lease_id, rank=0, ok=True, nonce=b"n", world_size=2):
    return table.finish(lease_id, *target, rank=rank, ok=ok, nonce=nonce, world_size=world_size)


def swept(table):
    """What has ended, also because its time is over."""
    table.expire()
    return table.sweep()


def outcomes(table):
    return [ended.outcome for ended in swept(table)]


def test_lease_ids_are_random_and_never_the_request_id(table):
    ids = {grant(table, 0) for _ in range(100)}
    assert len(ids) == 100
    assert all(len(lease_id) == 32 for lease_id in ids)


def test_a_lease_beyond_the_cap_is_refused_with_both_numbers_and_the_key_to_change(table):
    grant(table, 60)
    refusal = table.grant("big", 41)
    assert isinstance(refusal, LeaseRefusal)
    for word in ("max_leased_blocks", "60 of 100 just now", "41"):
        assert word in refusal.reason
    never = table.grant("bigger", 101)
    assert isinstance(never, LeaseRefusal)
    for word in ("max_leased_blocks", "has 101", "may hold 100", "never"):
        assert word in never.reason
    assert isinstance(table.grant("fits", 40), Lease)
    assert table.counters() == {"refused": 2}


def test_blocks_stay_pinned_until_the_lease_is_swept(table):
    lease_id = grant(table, 100)
    table.release(*D1, [lease_id])
    assert isinstance(table.grant("next", 1), LeaseRefusal)
    assert outcomes(table) == [LeaseOutcome.RELEASED]
    assert isinstance(table.grant("next", 1), Lease)


def test_the_cap_comes_from_the_options_or_is_three_quarters_of_the_pool():
    assert LeaseTable.from_options(ControlOptions(), 101).max_blocks == 75
    assert LeaseTable.from_options(ControlOptions(max_leased_blocks=7), 101).max_blocks == 7


def test_an_untaken_lease_expires_after_three_durations_and_is_swept_once(table, clock):
    lease_id = grant(table)
    clock.now += 89.9
    assert swept(table) == []
    clock.now += 0.1
    (ended,) = swept(table)
    assert (ended.lease_id, ended.outcome, ended.target) == (lease_id, LeaseOutcome.EXPIRED, None)
    assert (ended.num_blocks, ended.request_id) == (10, "request")
    assert swept(table) == []
    assert table.num_open == table.pinned_blocks == 0


def test_each_renewal_extends_by_one_duration_from_now(table, clock):
    lease_id = grant(table)
    for _ in range(10):
        clock.now += 29.0
        assert renew(table, D1, lease_id) == LeaseAnswer.HELD
        assert swept(table) == []
    clock.now += 30.0
    assert outcomes(table) == [LeaseOutcome.EXPIRED]


def test_an_expired_lease_answers_revoked_for_ever_even_before_it_is_swept(table, clock):
    lease_id = grant(table)
    assert renew(table, D1, lease_id) == LeaseAnswer.HELD
    assert finish(table, D1, lease_id, rank=0) == FinishAnswer.HELD
    clock.now += 30.0
    table.expire()
    for _ in range(2):
        assert renew(table, D1, lease_id) == LeaseAnswer.REVOKED
        assert finish(table, D1, lease_id, rank=1) == FinishAnswer.REVOKED
        assert finish(table, D1, lease_id, rank=0) == FinishAnswer.REVOKED
        table.sweep()


def test_a_late_renewal_and_a_late_report_are_taken_as_long_as_the_blocks_are_there(table, clock):
    renewed, reported = grant(table), grant(table)
    assert renew(table, D1, renewed) == LeaseAnswer.HELD
    clock.now += 1000.0
    assert renew(table, D1, renewed) == LeaseAnswer.HELD
    assert finish(table, D1, reported, world_size=1) == FinishAnswer.HELD
    assert outcomes(table) == [LeaseOutcome.DONE]


def test_nothing_expires_before_its_owner_has_run_for_a_whole_duration(table, clock):
    lease_id = grant(table)
    assert renew(table, D1, lease_id) == LeaseAnswer.HELD
    clock.now += 1000.0
    table.expire(awake_s=29.9)
    assert table.sweep() == []
    table.expire(awake_s=30.0)
    assert outcomes(table) == [LeaseOutcome.EXPIRED]


def test_a_holder_whose_connection_lives_may_say_nothing_for_three_durations(table, clock):
    held, untaken = grant(table), grant(table)
    assert renew(table, D1, held) == LeaseAnswer.HELD
    ended: list[tuple[str, float]] = []
    while len(ended) < 2:
        clock.now += 1.0
        table.expire(lives=lambda target: target == D1)
        ended += [(one.lease_id, clock.now) for one in table.sweep()]
    assert dict(ended) == {held: 1090.0, untaken: 1090.0}


def test_a_holder_whose_connection_has_ended_loses_its_leases_after_one_duration(table, clock):
    lease_id = grant(table)
    assert renew(table, D1, lease_id) == LeaseAnswer.HELD
    clock.now += 40.0
    table.expire(lives=lambda _: True)
    assert table.sweep() == []
    clock.now += 5.0
    table.expire(lives=lambda _: False)
    assert outcomes(table) == [LeaseOutcome.EXPIRED]


def test_a_lease_that_its_holder_passes_over_when_it_renews_others_expires(table, clock):
    forgotten, wanted = grant(table), grant(table)
    table.renew(*D1, [forgotten, wanted])
    for _ in range(6):
        clock.now += 5.0
        assert renew(table, D1, wanted) == LeaseAnswer.HELD
        table.expire(lives=lambda _: True)
    assert [ended.lease_id for ended in table.sweep()] == [forgotten]


def grow(table, *, writers=(0, 1), **how):
    """A lease of 40 tokens, none of which is written."""
    return table.grant("request", 10, num_tokens=40, writers=writers, **how).lease_id


def take(table, target, lease_id):
    """Takes a lease that grows; what is answered."""
    return table.renew(*target, [lease_id], grows=True)[lease_id]


def test_a_lease_grows_with_the_slowest_of_its_writers_and_its_holder_is_to_be_told(table):
    lease_id = grow(table)
    assert take(table, D1, lease_id) == LeaseAnswer.HELD
    assert table.readable([lease_id, "unknown"]) == {lease_id: 0}
    assert table.written(lease_id, 0, 32) == []
    assert table.written(lease_id, 1, 16) == [(D1, lease_id)]
    assert table.readable([lease_id]) == {lease_id: 16}
    for rank, tokens in ((1, 8), (1, 16), (0, 40), (7, 40)):  # it never shrinks
        assert table.written(lease_id, rank, tokens) == []
    assert table.written(lease_id, 1, 40) == [(D1, lease_id)]
    assert table.readable([lease_id]) == {}
    assert table.written("unknown", 0, 1) == []


def test_nothing_counts_before_a_lease_is_whole_and_who_says_so_has_lost_it(table):
    lease_id = grow(table, writers=(0,))
    table.written(lease_id, 0, 39)
    assert take(table, D1, lease_id) == LeaseAnswer.HELD
    assert finish(table, D1, lease_id) == FinishAnswer.REVOKED
    table.written(lease_id, 0, 40)
    assert finish(table, D1, lease_id) == FinishAnswer.REVOKED
    assert take(table, D1, lease_id) == LeaseAnswer.REVOKED
    assert renew(table, D2, lease_id) == LeaseAnswer.HELD
    assert finish(table, D2, lease_id) == FinishAnswer.HELD


def test_a_target_whose_ranks_have_failed_ends_a_lease_that_grows(table):
    lease_id = grow(table)
    for rank in (0, 1):
        assert finish(table, D1, lease_id, rank, ok=False) == FinishAnswer.HELD
    assert outcomes(table) == [LeaseOutcome.DONE]


def test_an_engine_that_knows_no_leases_that_grow_gets_them_when_they_are_whole(table):
    lease_id = grow(table, writers=(0,))
    assert renew(table, D1, lease_id) == LeaseAnswer.PENDING
    assert table.snapshot()[0].target == ""
    table.written(lease_id, 0, 40)
    assert renew(table, D1, lease_id) == LeaseAnswer.HELD


def test_a_lease_that_grows_does_not_expire_and_passes_on_as_any_other(table, clock):
    lease_id = grow(table, writers=(0,))
    assert take(table, D1, lease_id) == LeaseAnswer.HELD
    assert take(table, D2, lease_id) == LeaseAnswer.TAKEN
    clock.now += 1000.0
    assert outcomes(table) == []
    assert take(table, D2, lease_id) == LeaseAnswer.HELD
    assert take(table, D1, lease_id) == LeaseAnswer.REVOKED
    table.written(lease_id, 0, 40)
    clock.now += 29.9
    assert outcomes(table) == []
    clock.now += 0.1
    assert outcomes(table) == [LeaseOutcome.EXPIRED]


def test_the_time_of_a_lease_that_nobody_has_taken_begins_when_it_is_whole(table, clock):
    lease_id = grow(table, writers=(0,))
    clock.now += 1000.0
    table.written(lease_id, 0, 40)
    clock.now += 89.9
    assert outcomes(table) == []
    clock.now += 0.1
    assert outcomes(table) == [LeaseOutcome.EXPIRED]
    assert renew(table, D1, lease_id) == LeaseAnswer.REVOKED


def test_who_holds_a_lease_that_is_revoked_is_to_be_told(table):
    lease_id, shared = grow(table), grow(table, shared=True)
    take(table, D1, lease_id)
    for name in "ab":
        take(table, D2, f"{shared}/{name}")
    told = table.revoke([lease_id, shared, "unknown"])
    assert told == [(D1, lease_id), (D2, f"{shared}/a"), (D2, f"{shared}/b")]
    assert not table.is_held(D1, lease_id)
    assert table.written(lease_id, 0, 40) == []
    assert finish(table, D1, lease_id) == FinishAnswer.REVOKED


def test_one_target_at_a_time_holds_a_lease(table):
    lease_id = grant(table)
    assert renew(table, D1, lease_id) == LeaseAnswer.HELD
    assert renew(table, D2, lease_id) == LeaseAnswer.TAKEN
    assert finish(table, D2, lease_id) == FinishAnswer.REVOKED
    table.release(*D2, [lease_id])
    assert renew(table, D1, lease_id) == LeaseAnswer.HELD


def test_another_target_takes_over_at_once_where_the_holders_connection_has_gone(table):
    lease_id = grant(table)
    renew(table, D1, lease_id)
    assert finish(table, D1, lease_id, rank=0) == FinishAnswer.HELD

    def asks(lives):
        return table.renew(*D2, [lease_id], lives=lives)[lease_id]

    assert asks(lambda target: target == D1) == LeaseAnswer.TAKEN
    assert asks(lambda target: target != D1) == LeaseAnswer.HELD
    assert finish(table, D1, lease_id, rank=1) == FinishAnswer.REVOKED
    assert table.sweep() == []
    assert [finish(table, D2, lease_id, rank=rank) for rank in (0, 1)] == [FinishAnswer.HELD] * 2


def test_another_target_takes_over_once_the_holder_stopped_renewing(table, clock):
    lease_id = grant(table)
    renew(table, D1, lease_id)
    assert finish(table, D1, lease_id, rank=0) == FinishAnswer.HELD
    clock.now += 14.9
    assert renew(table, D2, lease_id) == LeaseAnswer.TAKEN
    clock.now += 0.1
    assert renew(table, D2, lease_id) == LeaseAnswer.HELD
    assert renew(table, D1, lease_id) == LeaseAnswer.REVOKED
    assert finish(table, D1, lease_id, rank=1) == FinishAnswer.REVOKED
    # The first holder's report does not count for the second.
    assert finish(table, D2, lease_id, rank=1) == FinishAnswer.HELD
    assert swept(table) == []
    assert finish(table, D2, lease_id, rank=0) == FinishAnswer.HELD
    assert outcomes(table) == [LeaseOutcome.DONE]


def test_a_holder_that_gave_up_with_keep_leaves_the_lease_to_others_and_never_gets_it_back(table):
    lease_id = grant(table)
    renew(table, D1, lease_id)
    table.release(*D1, [lease_id], keep=True)
    assert swept(table) == []
    assert renew(table, D1, lease_id) == LeaseAnswer.REVOKED
    assert finish(table, D1, lease_id) == FinishAnswer.REVOKED
    assert renew(table, D2, lease_id) == LeaseAnswer.HELD


def test_a_target_that_needs_nothing_may_release_a_lease_it_never_took(table):
    lease_id = grant(table)
    table.release(*D1, [lease_id])
    (ended,) = swept(table)
    assert ended.outcome == LeaseOutcome.RELEASED
    assert renew(table, D2, lease_id) == LeaseAnswer.REVOKED


def test_done_needs_every_rank_of_the_target_by_identity(table):
    lease_id = grant(table)
    for _ in range(5):
        assert finish(table, D1, lease_id, rank=1, world_size=3) == FinishAnswer.HELD
    assert finish(table, D1, lease_id, rank=0, world_size=3) == FinishAnswer.HELD
    assert swept(table) == []
    assert finish(table, D1, lease_id, rank=2, ok=False, world_size=3) == FinishAnswer.HELD
    (ended,) = swept(table)
    assert ended.outcome == LeaseOutcome.DONE
    assert ended.reports == {0: (True, b"n"), 1: (True, b"n"), 2: (False, b"n")}
    assert ended.target == D1


def test_after_it_is_done_a_repeated_report_gets_its_old_answer_and_nobody_else_gets_held(table):
    lease_id = grant(table)
    finish(table, D1, lease_id, rank=0)
    finish(table, D1, lease_id, rank=1, ok=False)
    swept(table)
    assert finish(table, D1, lease_id, rank=0) == FinishAnswer.HELD
    assert finish(table, D1, lease_id, rank=1, ok=False) == FinishAnswer.HELD
    assert finish(table, D1, lease_id, rank=1, ok=True) == FinishAnswer.REVOKED
    assert finish(table, D2, lease_id, rank=0) == FinishAnswer.REVOKED
    assert finish(table, ("d1", "later"), lease_id, rank=0) == FinishAnswer.REVOKED
    assert renew(table, D1, lease_id) == LeaseAnswer.DONE
    assert renew(table, D2, lease_id) == LeaseAnswer.REVOKED


def test_a_report_that_contradicts_the_first_is_not_confirmed(table):
    lease_id = grant(table)
    assert finish(table, D1, lease_id, rank=0, ok=False) == FinishAnswer.HELD
    assert finish(table, D1, lease_id, rank=0, ok=True) == FinishAnswer.REVOKED


def test_a_rank_outside_the_target_is_an_error_and_changes_nothing(table):
    lease_id = grant(table)
    for rank in (-1, 2, 10**9):
        with pytest.raises(BoundsError, match="ranks 0 to 1"):
            finish(table, D1, lease_id, rank=rank)
    assert renew(table, D2, lease_id) == LeaseAnswer.HELD


def test_a_lease_may_be_taken_at_once_by_another_start_of_its_holder(table, clock):
    lease_id = grant(table)
    renew(table, D1, lease_id)
    finish(table, D1, lease_id, rank=0)
    clock.now += 10
    assert renew(table, D2, lease_id) == LeaseAnswer.TAKEN
    assert renew(table, ("d1", "later"), lease_id) == LeaseAnswer.HELD
    assert finish(table, D1, lease_id, rank=1) == FinishAnswer.REVOKED
    assert renew(table, D1, lease_id) == LeaseAnswer.REVOKED
    (status,) = table.snapshot()
    assert status.ranks_done == ()


def test_only_a_repetition_of_the_same_report_is_confirmed_again(table):
    lease_id = grant(table)
    for late in range(2):
        assert finish(table, D1, lease_id, rank=0, nonce=b"one") == FinishAnswer.HELD
        assert finish(table, D1, lease_id, rank=0, nonce=b"two") == FinishAnswer.REVOKED
        # The second time round the lease is done.
        assert finish(table, D1, lease_id, rank=1, nonce=b"one") == FinishAnswer.HELD, late


def test_a_lease_ends_at_its_greatest_age_however_often_it_is_renewed(clock):
    table = LeaseTable(duration_s=30.0, max_age_s=100.0, max_blocks=10, clock=clock)
    lease_id = grant(table)
    for _ in range(9):
        clock.now += 10
        assert renew(table, D1, lease_id) == LeaseAnswer.HELD
    clock.now += 9
    assert swept(table) == []
    clock.now += 1
    assert [ended.outcome for ended in swept(table)] == [LeaseOutcome.EXPIRED]
    assert renew(table, D1, lease_id) == LeaseAnswer.REVOKED


def test_the_source_may_revoke_and_then_nothing_is_confirmed(table):
    lease_id = grant(table)
    renew(table, D1, lease_id)
    table.revoke([lease_id, "unknown"])
    assert finish(table, D1, lease_id) == FinishAnswer.REVOKED
    assert outcomes(table) == [LeaseOutcome.REVOKED]


def test_the_source_may_revoke_all(table):
    taken, untaken = grant(table), grant(table)
    renew(table, D1, taken)
    table.revoke_all()
    assert finish(table, D1, taken) == FinishAnswer.REVOKED
    assert renew(table, D1, untaken) == LeaseAnswer.REVOKED
    assert outcomes(table) == [LeaseOutcome.REVOKED] * 2


@pytest.fixture
def shared(table):
    """A shared lease of ten blocks, granted at 1000."""
    return table.grant("request", 10, shared=True).lease_id


def test_a_shared_lease_has_any_number_of_takers_at_once(table, clock, shared):
    claims = [(D1, f"{shared}/a"), (D1, f"{shared}/b"), (D2, f"{shared}/c")]
    for target, claim in claims:
        assert renew(table, target, claim) == LeaseAnswer.HELD
    clock.now += 29.0
    for target, claim in claims:
        assert renew(table, target, claim) == LeaseAnswer.HELD
        assert [finish(table, target, claim, rank) for rank in (0, 1)] == [FinishAnswer.HELD] * 2
        assert renew(table, target, claim) == LeaseAnswer.DONE
    assert table.pinned_blocks == 10


def test_who_names_a_shared_lease_itself_holds_the_claim_without_a_name(table, shared):
    assert not table.is_held(D1, shared)
    assert renew(table, D1, shared) == LeaseAnswer.HELD
    assert table.is_held(D1, shared)
    assert not table.is_held(D2, shared)


def test_a_shared_lease_ends_when_its_time_is_over_and_no_taker_reads(table, clock, shared):
    idle = table.grant("nobody's", 1, shared=True).lease_id
    clock.now += 80.0
    assert renew(table, D1, f"{shared}/a") == LeaseAnswer.HELD
    clock.now += 9.9
    assert swept(table) == []
    clock.now += 0.1
    (ended,) = swept(table)
    assert (ended.lease_id, ended.outcome, ended.target) == (idle, LeaseOutcome.EXPIRED, None)
    assert renew(table, D2, f"{shared}/b") == LeaseAnswer.HELD  # as long as it is there
    for target, claim in ((D1, f"{shared}/a"), (D2, f"{shared}/b")):
        assert swept(table) == []
        assert [finish(table, target, claim, rank) for rank in (0, 1)] == [FinishAnswer.HELD] * 2
    (ended,) = table.sweep()
    assert (ended.lease_id, ended.outcome, ended.target) == (shared, LeaseOutcome.DONE, D2)
    assert (ended.taken, ended.ended, ended.num_blocks) == (1090.0, 1090.0, 10)
    assert table.num_open == table.pinned_blocks == 0
    assert finish(table, D1, f"{shared}/a") == FinishAnswer.HELD  # a repetition
    assert finish(table, D1, f"{shared}/a", nonce=b"other") == FinishAnswer.REVOKED
    assert finish(table, D1, f"{shared}/c") == FinishAnswer.REVOKED


def test_a_taker_that_falls_silent_loses_its_claim_and_no_other_does(table, clock, shared):
    for target, claim in ((D1, f"{shared}/a"), (D2, f"{shared}/b")):
        assert renew(table, target, claim) == LeaseAnswer.HELD
    for _ in range(3):
        clock.now += 15.0
        assert renew(table, D2, f"{shared}/b") == LeaseAnswer.HELD
        assert swept(table) == []
    assert renew(table, D1, f"{shared}/a") == LeaseAnswer.REVOKED
    assert finish(table, D1, f"{shared}/a") == FinishAnswer.REVOKED
    assert finish(table, D2, f"{shared}/b") == FinishAnswer.HELD


def test_a_shared_lease_that_grows_does_not_end_with_a_claim_before_it_is_whole(table, clock):
    lease_id = grow(table, writers=(0,), shared=True)
    for written in range(20):
        clock.now += 5.0
        assert take(table, D1, f"{lease_id}/a") == LeaseAnswer.HELD
        table.written(lease_id, 0, written)
        assert swept(table) == []
    table.release(*D1, [f"{lease_id}/a"])  # the request is aborted
    assert swept(table) == []
    table.written(lease_id, 0, 40)
    assert take(table, D2, f"{lease_id}/b") == LeaseAnswer.HELD
    clock.now += 1000.0
    assert outcomes(table) == [LeaseOutcome.EXPIRED]


def test_a_shared_lease_that_was_withdrawn_ends_with_its_last_claim_whole_or_not(table):
    leases = [table.grant("r", 1, shared=True).lease_id, grow(table, shared=True)]
    for lease_id in leases:
        assert take(table, D1, f"{lease_id}/a") == LeaseAnswer.HELD
        assert not table.withdraw(lease_id)
        assert table.is_held(D1, f"{lease_id}/a")
        table.release(*D1, [f"{lease_id}/a"])
    assert [ended.lease_id for ended in table.sweep()] == leases


def test_a_claim_has_one_holder_at_a_time_and_is_given_up_alone(table, shared):
    claim = f"{shared}/a"
    assert renew(table, D1, claim) == LeaseAnswer.HELD
    assert renew(table, D2, claim) == LeaseAnswer.TAKEN
    table.release(*D2, [claim, f"{shared}/never taken"])
    table.release(*D1, [claim])
    assert renew(table, D1, claim) == LeaseAnswer.REVOKED
    assert renew(table, D2, f"{shared}/never taken") == LeaseAnswer.REVOKED
    assert renew(table, D2, f"{shared}/b") == LeaseAnswer.HELD


def test_claims_end_with_their_lease(table, clock, shared):
    claim, nobodys = f"{shared}/a", table.grant("request", 1).lease_id
    assert finish(table, D1, claim) == FinishAnswer.HELD
    table.revoke([shared])
    assert finish(table, D1, claim, rank=1) == FinishAnswer.REVOKED
    assert finish(table, D1, claim, rank=0) == FinishAnswer.REVOKED
    assert [ended.outcome for ended in table.sweep()] == [LeaseOutcome.REVOKED]
    assert renew(table, D1, f"{nobodys}/a") == LeaseAnswer.REVOKED  # it is not shared
    assert renew(table, D1, f"{shared}/b") == LeaseAnswer.REVOKED
    table.grant("request", 1, shared=True)
    table.revoke_all()
    assert outcomes(table) == [LeaseOutcome.REVOKED] * 2


def test_a_shared_lease_that_is_withdrawn_ends_with_its_last_taker(table, shared):
    idle = table.grant("request", 1, shared=True).lease_id
    assert renew(table, D1, f"{shared}/a") == LeaseAnswer.HELD
    assert [table.withdraw(lease_id) for lease_id in (idle, shared)] == [True, False]
    assert [ended.lease_id for ended in swept(table)] == [idle]
    table.release(*D1, [f"{shared}/a"])
    assert outcomes(table) == [LeaseOutcome.EXPIRED]


def test_a_shared_lease_ends_at_its_greatest_age_with_all_its_claims(clock):
    table = LeaseTable(duration_s=30.0, max_age_s=100.0, max_blocks=10, clock=clock)
    shared = grant(table, shared=True)
    for _ in range(10):
        assert renew(table, D1, f"{shared}/a") == LeaseAnswer.HELD
        clock.now += 10
    assert outcomes(table) == [LeaseOutcome.EXPIRED]
    assert table.num_open == 0
    assert finish(table, D1, f"{shared}/a") == FinishAnswer.REVOKED


def test_a_shared_lease_may_grow_and_every_taker_is_to_be_told(table):
    lease_id = grow(table, writers=(0,), shared=True)
    a, b = f"{lease_id}/a", f"{lease_id}/b"
    assert take(table, D1, a) == take(table, D2, b) == LeaseAnswer.HELD
    assert renew(table, D2, f"{lease_id}/c") == LeaseAnswer.PENDING
    assert table.written(lease_id, 0, 8) == [(D1, a), (D2, b)]
    assert table.readable([a, b]) == {a: 8, b: 8}
    assert finish(table, D2, b) == FinishAnswer.REVOKED
    assert table.written(lease_id, 0, 40) == [(D1, a)]
    assert finish(table, D1, a) == FinishAnswer.HELD


def test_for_an_engine_that_knows_no_claims_a_shared_lease_is_one_as_any_other(table, shared):
    assert renew(table, D1, shared) == LeaseAnswer.HELD
    assert renew(table, D2, shared) == LeaseAnswer.TAKEN
    assert renew(table, D2, f"{shared}/a") == LeaseAnswer.HELD
    assert [finish(table, D1, shared, rank) for rank in (0, 1)] == [FinishAnswer.HELD] * 2
    assert renew(table, D1, shared) == LeaseAnswer.DONE
    table.revoke([shared])
    assert finish(table, D1, shared, rank=1) == FinishAnswer.HELD  # a repetition
    assert finish(table, D1, shared, rank=1, ok=False) == FinishAnswer.REVOKED


def test_only_so_many_claims_are_open_at_once(table, shared):
    claims = [f"{shared}/{number}" for number in range(MAX_CLAIMS + 1)]
    answers = table.renew(*D1, claims)
    assert [answers[claim] for claim in claims] == [LeaseAnswer.HELD] * MAX_CLAIMS + [
        LeaseAnswer.REVOKED
    ]
    table.release(*D1, claims[:1])
    assert renew(table, D1, f"{shared}/one more") == LeaseAnswer.HELD


def test_the_snapshot_shows_claims_without_blocks(table, shared):
    renew(table, D1, f"{shared}/a")
    shown = [(one.lease_id, one.num_blocks, one.target) for one in table.snapshot()]
    assert shown == [(shared, 10, ""), (f"{shared}/a", 0, "d1")]


def test_unknown_leases_are_revoked(table):
    assert table.renew("d", "i", ["nope"]) == {"nope": LeaseAnswer.REVOKED}
    assert finish(table, D1, "nope") == FinishAnswer.REVOKED
    table.release("d", "i", ["nope"])
    assert swept(table) == []


def test_only_so_many_ended_leases_are_remembered_and_a_forgotten_one_is_revoked(clock):
    table = LeaseTable(max_blocks=100, remembered=3, clock=clock)
    ids = [grant(table, 1) for _ in range(5)]
    for lease_id in ids:
        finish(table, D1, lease_id, world_size=1)
    answers = [finish(table, D1, lease_id, world_size=1) for lease_id in ids]
    assert answers == [FinishAnswer.REVOKED] * 2 + [FinishAnswer.HELD] * 3


def test_leases_may_be_asked_for_by_many_threads_at_once():
    table = LeaseTable(max_blocks=1000)
    ids = [grant(table, 1) for _ in range(200)]
    confirmed = []

    def rank(number):
        for lease_id in ids:
            table.renew(*D1, [lease_id])
            confirmed.append(finish(table, D1, lease_id, rank=number, world_size=4))

    ended = []
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ended += swept(table)
    ended += swept(table)
    assert confirmed == [FinishAnswer.HELD] * 800
    assert sorted(one.lease_id for one in ended) == sorted(ids)
    assert {one.outcome for one in ended} == {LeaseOutcome.DONE}
    assert table.pinned_blocks == 0


def test_the_snapshot_shows_age_rest_holder_and_ranks(table, clock):
    lease_id = grant(table, 7)
    clock.now += 5
    finish(table, D1, lease_id, rank=1, world_size=3)
    (status,) = table.snapshot()
    assert (status.lease_id, status.request_id, status.num_blocks) == (lease_id, "request", 7)
    assert (status.age_s, status.remaining_s) == (5.0, 85.0)
    assert (status.target, status.ranks_done) == ("d1", (1,))
