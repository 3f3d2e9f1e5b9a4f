"""Waiting for what must come, in tests."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 600.0
"""Limit of every wait in seconds. It says where a test hangs; it measures no machine."""


class NotInTimeError(AssertionError):
    """What a test waited for did not come in time."""


def until(
    condition: Callable[[], T],
    limit_s: float = WAIT_S,
    *,
    what: object = "what is waited for",
    every_s: float = 0.02,
) -> T:
    """Waits until ``condition()`` is true, and returns its value.

    Args:
        condition: is called again and again; may do the work that is waited for.
        limit_s: seconds after which the wait ends; another value than :data:`WAIT_S` is for tests
            of limits.
        what: names what is waited for, in the error; a function is called for it.
        every_s: seconds between two calls.

    Raises:
        NotInTimeError: the value is still false after ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            name = what() if callable(what) else what
            raise NotInTimeError(f"{name} did not come within {limit_s:g} s")
        time.sleep(every_s)
    return found
