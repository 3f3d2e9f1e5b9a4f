"""The one thread class: order, waking, watching, defects, the end."""

import itertools
import os
import select
import threading
import time

import pytest

import kvferry.mailbox as mailbox_module
from kvferry.errors import EngineError
from kvferry.mailbox import Mailbox
from kvferry.testing.waiting import until


def polling(name="test", **options):
    return Mailbox(name, poller=select.poll(), **options)


class Clock:
    """A clock that stands until it is turned."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture(params=[Mailbox, polling], ids=["queue", "poller"])
def make(request):
    return request.param


def test_tasks_run_in_order_on_its_thread(make):
    seen = []
    with make("order") as mailbox:
        for number in range(100):
            mailbox.post(
                lambda number=number: seen.append((number, threading.current_thread().name))
            )
        mailbox.call(lambda: None)
    assert seen == [(number, "kvferry-order") for number in range(100)]


def test_close_runs_what_was_posted_before_and_may_be_repeated(make):
    seen = []
    mailbox = make("close").start()
    mailbox.post(lambda: seen.append("posted"))
    mailbox.close()
    mailbox.close()
    assert seen == ["posted"]


def test_an_idle_one_begins_a_task_at_once(make):
    with make("idle") as mailbox:
        mailbox.call(lambda: None)
        time.sleep(0.05)  # it sleeps without end now
        begun = threading.Event()
        mailbox.post(begun.set)
        assert begun.wait(60)  # it would be never if it were not woken


def test_its_turn_comes_after_the_time_it_asked_for(make):
    turns = []
    done = threading.Event()

    def turn():
        turns.append(time.monotonic())
        if len(turns) == 4:
            done.set()
            return None
        return 0.02

    with make("turns", turn=turn):
        assert done.wait(60)
    assert all(two - one > 0.015 for one, two in itertools.pairwise(turns))


def test_a_turn_that_is_overdue_comes_at_once(make):
    pauses = [-0.02, -1.0, 0.0]
    done = threading.Event()

    def turn():
        if pauses:
            return pauses.pop(0)
        done.set()
        return None

    with make("overdue", turn=turn) as mailbox:
        assert done.wait(60)
        mailbox.check()


def test_a_turn_that_failed_comes_again(make, monkeypatch, caplog):
    monkeypatch.setattr(mailbox_module, "AFTER_FAILURE_S", 0.01)
    failures = [ZeroDivisionError(), ZeroDivisionError()]
    done = threading.Event()

    def turn():
        if failures:
            raise failures.pop()
        done.set()

    with make("clumsy", turn=turn):
        assert done.wait(60)
    assert caplog.text.count("kvferry-clumsy failed") == 2


def test_an_error_of_a_call_is_the_callers(make):
    def fail():
        raise KeyError("mine")

    with make("caller") as mailbox:
        with pytest.raises(KeyError, match="mine"):
            mailbox.call(fail)
        assert mailbox.call(lambda: 1) == 1


def test_one_that_survives_goes_on_after_an_error(make, caplog):
    with make("tough") as mailbox:
        mailbox.post(lambda: 1 / 0)
        assert mailbox.call(lambda: 2) == 2
        mailbox.check()
    assert "kvferry-tough failed" in caplog.text


def test_one_that_does_not_tells_its_owner_why_it_died(make):
    mailbox = make("frail", survives=False).start()
    mailbox.post(lambda: 1 / 0)
    with pytest.raises(EngineError, match=r"kvferry-frail has ended"):
        mailbox.call(lambda: None)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        mailbox.check()
    mailbox.close()


def test_a_watched_descriptor_is_handled_until_it_is_not_watched():
    reader, writer = os.pipe()
    got = []
    came = threading.Event()
    mailbox = polling("watch")

    def handle():
        got.append(os.read(reader, 10))
        came.set()

    with mailbox:
        mailbox.call(lambda: mailbox.watch(reader, handle))
        os.write(writer, b"one")
        assert came.wait(60)
        mailbox.call(lambda: mailbox.unwatch(reader))
        os.write(writer, b"two")
        mailbox.call(lambda: None)
    assert got == [b"one"]
    os.close(reader)
    os.close(writer)


def test_who_posts_again_and_again_keeps_neither_turn_nor_descriptor_off():
    reader, writer = os.pipe()
    handled, turns = threading.Event(), []
    mailbox = polling("fair", turn=lambda: turns.append(1) or 0.0)

    def again():
        if not handled.is_set():
            mailbox.post(again)

    with mailbox:
        mailbox.call(lambda: mailbox.watch(reader, lambda: (os.read(reader, 1), handled.set())))
        mailbox.post(again)
        seen = len(turns)
        os.write(writer, b"x")
        assert handled.wait(60)
        mailbox.call(lambda: None)
    assert len(turns) > seen
    os.close(reader)
    os.close(writer)


def test_while_a_turn_is_late_nobody_can_be_called_silent(make):
    clock = Clock(100.0)
    held, release = threading.Event(), threading.Event()
    with make("held", turn=lambda: 1.0, clock=clock) as mailbox:
        mailbox.call(lambda: None)
        clock.now += 0.5
        assert mailbox.awake_since == 100.0
        mailbox.post(lambda: (held.set(), release.wait(60)))
        assert held.wait(60)
        clock.now += 50.0
        assert mailbox.awake_since == clock.now
        release.set()


def test_it_knows_since_when_it_has_come_to_every_turn_in_time(make):
    """Whether it was kept from running between its turns or within one."""
    clock = Clock(100.0)
    turns, taken = iter([0.0, 50.0, 1.5, 3.0]), threading.Semaphore(0)
    awake = []

    def turn():
        awake.append(mailbox.awake_s)
        clock.now += next(turns, 0.0)
        taken.release()
        return 0.0 if len(awake) < 5 else None

    mailbox = make("late", turn=turn, clock=clock)
    with mailbox:
        for _ in range(5):
            assert taken.acquire(timeout=60)
    assert awake == [0.0, 0.0, 0.0, 1.5, 0.0]


@pytest.mark.slow
def test_turns_that_are_wanted_within_microseconds_come_whatever_is_posted():
    """With ``queue.SimpleQueue`` about one in 30,000 never came: see :class:`Mailbox`."""
    turns = itertools.count()
    taken = 0

    def turn():
        nonlocal taken
        taken = next(turns)
        return 1e-6

    with Mailbox("short", turn) as mailbox:
        for _ in range(20_000):
            mailbox.call(lambda: None)
            wanted = taken + 3

            def is_reached(wanted: int = wanted) -> bool:
                return taken >= wanted

            until(is_reached, every_s=0, what="three turns")
