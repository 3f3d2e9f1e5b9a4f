"""The pursuit of a lease beside a slow model, which looks through all that was ever said of it."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.connectors.pull.pursuit import Ask, Pursuit, PursuitState, Source, Standing
from kvferry.control.tickets import Ticket
from kvferry.errors import LeaseRevokedError, LeaseTakenError, PeerLostError
from kvferry.observe.records import RequestRecord

DURATION_S = 30.0
WRITTEN = st.integers(0, 64)
SECONDS = st.sampled_from((0.0, 1.0, 20.0, 40.0))
ERRORS = st.sampled_from((LeaseRevokedError("gone"), LeaseTakenError("taken"), PeerLostError("-")))


def ticket() -> Ticket:
    return Ticket(
        lease_id="lease",
        engine_id="p",
        incarnation="p1",
        secret=b"s",
        host="127.0.0.1",
        port=1,
        request_id="at p",
        num_tokens=64,
        block_ids=((1,),),
        lease_duration_s=DURATION_S,
    )


def begin(*, is_asked_for: bool = False) -> Pursuit:
    source = Source("127.0.0.1:1")
    record = RequestRecord("r", "", True, {"arrived": 0.0})
    standing = Standing(PursuitState.LEASING, ticket())
    nothing: Any = None
    ask = Ask(nothing, looked=0.0) if is_asked_for else None
    return Pursuit(record, source, standing, deadline=10.0, progressed=0.0, ask=ask)


class Machine(RuleBasedStateMachine):
    """Whatever a source says, in any order, and more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.pursuit = begin(is_asked_for=True)
        self.now = 0.0
        self.said: list[tuple[str, Any]] = []
        self.seen: list[Standing] = []

    def lost(self) -> list[Any]:
        return [what for kind, what in self.said if kind == "lost"]

    def held(self) -> list[int | None]:
        """What could be read, as far as it was said before the lease was lost."""
        kinds = [kind for kind, _ in self.said]
        end = kinds.index("lost") if "lost" in kinds else len(kinds)
        return [what for kind, what in self.said[:end] if kind == "held"]

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(written=st.none() | WRITTEN, is_news=st.booleans(), table=st.integers(0, 9))
    def hold(self, written: int | None, is_news: bool, table: int) -> None:
        before = self.held()
        tables = ((table,),) if table else ()
        is_whole = self.pursuit.hold(self.now, written, tables, is_news=is_news)
        self.said.append(("held", written))
        is_new = not self.lost() and None not in before
        assert is_whole == (is_new and written is None)
        best = max((known for known in before if known is not None), default=-1)
        if is_new and tables and (written is None or written > best):
            assert self.pursuit.ticket.block_ids == tables

    @rule()
    def contend(self) -> None:
        since = self.now
        for kind, what in reversed(self.said):
            if kind == "held":
                break
            since = what if kind == "contended" else since
        assert self.pursuit.contend(self.now) == (self.now < since + DURATION_S)
        self.said.append(("contended", self.now))

    @rule(error=ERRORS)
    def lose(self, error: Any) -> None:
        self.pursuit.lose(error)
        self.said.append(("lost", error))

    @precondition(lambda self: not self.lost())
    @rule()
    def read(self) -> None:
        self.pursuit.is_read = True

    @invariant()
    def it_stands_where_the_model_does(self) -> None:
        standing, held, lost = self.pursuit.standing, self.held(), self.lost()
        most = None if None in held else max([0, *(each or 0 for each in held)])
        if lost:
            state = PursuitState.LOST
        elif held:
            state = PursuitState.HELD if most is None else PursuitState.GROWING
        elif "contended" in [kind for kind, _ in self.said]:
            state = PursuitState.CONTENDED
        else:
            state = PursuitState.LEASING
        assert (standing.state, standing.written) == (state, most)
        assert standing.error is (lost[-1] if lost else None)
        assert self.pursuit.awaits_source == (not lost and most is not None)
        assert self.pursuit.wants_lease == (not lost)
        for error in (LeaseRevokedError("gone"), LeaseTakenError("taken")):
            is_early = isinstance(error, LeaseRevokedError) and not (
                self.pursuit.is_read and most is None
            )
            assert self.pursuit.is_revoked_early(error) == is_early

    @invariant()
    def what_was_seen_once_stays_as_it_was(self) -> None:
        standing = self.pursuit.standing
        if not self.seen or self.seen[-1] is not standing:
            self.seen.append(standing)
        written = [each.written for each in self.seen if each.written is not None]
        assert written == sorted(written)


Machine.TestCase.settings = settings(max_examples=200, stateful_step_count=20)
test_a_pursuit_stands_where_a_slow_model_does = Machine.TestCase


def test_under_a_trusted_lease_all_is_read_until_it_is_lost() -> None:
    pursuit = begin()
    pursuit.trust()
    assert pursuit.standing.is_whole
    assert not pursuit.awaits_source
    pursuit.contend(0.0)
    assert pursuit.standing.is_whole
    pursuit.lose(LeaseRevokedError("gone"))
    assert not pursuit.standing.is_whole


def test_only_what_a_source_tells_unasked_says_how_fast_it_computes() -> None:
    pursuit = begin()
    pursuit.hold(0.0, 0, (), is_news=False)
    pursuit.hold(5.0, 8, (), is_news=True)
    pursuit.hold(6.0, 16, (), is_news=False)  # it may have been written long before
    assert list(pursuit.growth.times) == [(0.0, 0), (5.0, 8)]
    pursuit.hold(10.0, 24, (), is_news=True)
    assert list(pursuit.growth.times) == [(0.0, 0), (5.0, 8), (10.0, 24)]
    assert pursuit.growth.chunk == 8
    assert pursuit.source.pace.computes.seconds(8, 24) == pytest.approx(5.0)


def test_a_growing_lease_counts_as_progress_and_a_message_that_comes_twice_does_not() -> None:
    pursuit = begin()
    for now, written in ((1.0, 8), (2.0, 16), (3.0, 16), (4.0, 8)):
        pursuit.hold(now, written, (), is_news=True)
    assert pursuit.progressed == 2.0


# ---- before the ticket has come ------------------------------------------------------------------

ASKING = (PursuitState.ASKED, PursuitState.COMING, PursuitState.UNWANTED)


class Asking(RuleBasedStateMachine):
    """Whatever becomes of a ticket that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.pursuit = begin(is_asked_for=True)
        self.pursuit.standing = Standing(PursuitState.ASKED)
        self.expected = PursuitState.ASKED

    def is_asking(self) -> bool:
        return self.expected in ASKING

    @rule()
    def read(self) -> None:
        """Once the wait is over nothing else is left to do."""
        self.pursuit.is_read = True

    @precondition(is_asking)
    @rule()
    def come(self) -> None:
        self.pursuit.come("p1")
        assert self.pursuit.deadline == float("inf")
        if self.expected is PursuitState.ASKED:
            self.expected = PursuitState.COMING

    @precondition(is_asking)
    @rule(deadline=SECONDS)
    def forget(self, deadline: float) -> None:
        known = self.pursuit.deadline == float("inf")
        before = self.pursuit.deadline
        self.pursuit.await_again(deadline)
        assert self.pursuit.deadline == (deadline if known else before)
        if self.expected is PursuitState.COMING:
            self.expected = PursuitState.ASKED

    @precondition(is_asking)
    @rule()
    def unwant(self) -> None:
        self.pursuit.unwant()
        self.expected = PursuitState.UNWANTED

    @precondition(is_asking)
    @rule(end=st.sampled_from(("lend", "deny", "lose")))
    def end(self, end: str) -> None:
        if end == "lend" and self.expected is not PursuitState.UNWANTED:
            self.pursuit.is_asked = True
            self.pursuit.lend(ticket(), deadline=99.0)
            assert (self.pursuit.deadline, self.pursuit.is_asked) == (99.0, False)
            self.expected = PursuitState.LEASING
        elif end == "deny":
            self.pursuit.deny("the request has ended")
            self.expected = PursuitState.DENIED
        else:
            self.pursuit.lose(PeerLostError("it is gone"))
            self.expected = PursuitState.LOST

    @invariant()
    def it_stands_as_expected(self) -> None:
        standing = self.pursuit.standing
        assert standing.state is self.expected
        assert standing.is_asked_for == self.is_asking()
        assert (standing.ticket is not None) == (self.expected is PursuitState.LEASING)
        assert bool(standing.reason) == (self.expected is PursuitState.DENIED)
        assert self.pursuit.awaits_source == (self.expected is PursuitState.LEASING)
        assert self.pursuit.wants_lease == (self.expected is PursuitState.LEASING)


Asking.TestCase.settings = settings(max_examples=100, stateful_step_count=10)
test_a_ticket_that_is_asked_for_comes_or_does_not = Asking.TestCase
