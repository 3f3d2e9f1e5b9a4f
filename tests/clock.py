"""A clock that tests move, for time-outs that no machine is slow enough to meet by itself."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.base import ConnectorContext
from kvferry.connectors.pull import PullConnector
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.errors import EngineError
from kvferry.mailbox import Mailbox

STEP_S = 1.0
"""Seconds of one move: few enough that no thread counts as one that did not run."""


class Clock:
    """A clock that runs as the machine's, ahead of it by the time that a test has let pass.

    A test gives all parties time-outs of minutes, so that healthy parties act in time however busy
    the machine is, and moves the clock to end a time-out. After each step of a move, every mailbox
    takes a turn: a party that has something to do at that moment has done it before the next step.
    """

    def __init__(self) -> None:
        self.ahead_s = 0.0
        """Seconds by which this clock is ahead."""
        self.mailboxes: dict[threading.Thread, Mailbox] = {}
        """Thread → its mailbox, which a move of the clock wakes."""

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s

    def open(self, context: ConnectorContext) -> PullScheduler:
        """The engine half of a PullConnector that goes by this clock."""
        return PullScheduler.open(context, self)

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        while seconds > 0:
            step_s = min(seconds, STEP_S)
            self.ahead_s += step_s
            seconds -= step_s
            for mailbox in list(self.mailboxes.values()):
                with suppress(EngineError):  # it was closed a moment ago
                    mailbox.call(lambda: None)  # ends the sleep before a turn
                    mailbox.call(lambda: None)  # and this is after the turn

    def passing(self, condition: Callable[[], Any], seconds: float = STEP_S) -> Callable[[], Any]:
        """The same condition, for a wait in which this much time passes between two looks."""

        def is_met() -> Any:
            found = condition()
            if not found:
                self.advance(seconds)
            return found

        return is_met

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time passes although the thread that calls this stands still."""
        mailbox = self.mailboxes.pop(threading.current_thread())
        yield
        self.mailboxes[threading.current_thread()] = mailbox

    def move(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Has these modules read this clock, and mailboxes that are made from now on."""
        moved = SimpleNamespace(**{**vars(time), "monotonic": self})
        for module in modules:
            patch.setattr(module, "time", moved)
        assert Mailbox.__init__.__kwdefaults__ is not None
        patch.setitem(Mailbox.__init__.__kwdefaults__, "clock", self)

    @classmethod
    def install(cls, patch: pytest.MonkeyPatch) -> "Clock":
        """A clock that wakes the mailboxes that are started from now on. It is the clock of the
        engine halves of all PullConnectors that are opened from now on.
        """
        clock = cls()
        start, close = Mailbox.start, Mailbox.close

        def started(mailbox: Mailbox) -> Mailbox:
            mailbox.post(lambda: clock.mailboxes.update({threading.current_thread(): mailbox}))
            return start(mailbox)

        def closed(mailbox: Mailbox) -> None:
            mailbox.post(lambda: clock.mailboxes.pop(threading.current_thread(), None))
            close(mailbox)

        patch.setattr(Mailbox, "start", started)
        patch.setattr(Mailbox, "close", closed)
        patch.setattr(PullConnector, "scheduler", clock.open)
        return clock
