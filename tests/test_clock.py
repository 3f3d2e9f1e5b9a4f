"""The clock that tests move: whoever waits for a moment acts when it has come."""

import itertools
import threading
import time

import pytest

from kvferry.mailbox import Mailbox
from kvferry.testing.waiting import WAIT_S
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock.install(monkeypatch)


def alarm(clock: Clock, every_s: float, rung: list[float]) -> Mailbox:
    """A thread that does something at every so many seconds of the clock."""

    def turn() -> float:
        if not rung or clock() >= rung[-1] + every_s:
            rung.append(clock())
        return rung[-1] + every_s - clock()

    return Mailbox("alarm", turn, clock=clock)


def test_a_thread_acts_at_each_moment_that_a_move_passes(clock: Clock) -> None:
    rung: list[float] = []
    with alarm(clock, 600.0, rung) as mailbox:
        mailbox.call(lambda: None)
        clock.advance(6100.0)
    assert len(rung) >= 10
    assert all(later - sooner >= 600.0 for sooner, later in itertools.pairwise(rung))


def test_a_wait_passes_time_until_its_condition_holds(clock: Clock) -> None:
    began, real = clock(), time.monotonic()
    is_late = clock.passing(lambda: clock() >= began + 600.0, 60.0)
    while not is_late():
        pass
    assert 600.0 <= clock() - began <= 660.0 + time.monotonic() - real


def test_a_thread_that_stands_still_is_not_waited_for(clock: Clock) -> None:
    stands, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        with clock.stopped():
            stands.set()
            goes_on.wait(WAIT_S)

    with Mailbox("still", clock=clock) as mailbox:
        mailbox.post(stand)
        assert stands.wait(WAIT_S)
        clock.advance(60.0)
        goes_on.set()
        mailbox.call(lambda: None)
        clock.advance(60.0)


def test_a_thread_that_has_ended_is_not_waited_for(clock: Clock) -> None:
    with Mailbox("ended", clock=clock) as mailbox:
        mailbox.call(lambda: None)
        assert list(clock.mailboxes.values()) == [mailbox]
    assert not clock.mailboxes
    clock.advance(60.0)
