"""What an engine has under way, and how fast it was seen to be.

The choice among engines is made of it (:mod:`kvferry.cluster.choice`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

HALF_LIFE_S = 60.0
"""Seconds after which a sample counts half."""
LEAST_SLOWING = 0.01
"""Of an answer's seconds, what each request under way adds at least: so that a measurement that
shows nothing does not send all requests to one engine."""


@dataclass(slots=True)
class Count:
    """How much of something is under way at an engine."""

    cells: "list[int] | memoryview[int]" = field(default_factory=lambda: [0])
    """What each process of the router has under way; each writes to a cell of its own."""
    own: int = 0
    """Index of this process's cell."""

    def add(self, count: int) -> None:
        """So much more is under way; less if it is negative."""
        self.cells[self.own] += count

    @property
    def total(self) -> int:
        """Of all processes."""
        return sum(self.cells)


COUNTS = 4
"""Counts of an engine."""


class Line:
    """Seconds as a line over a count, through samples of which older ones count less."""

    def __init__(self, base_s: float, each_s: float) -> None:
        """Begins with a guess: so long for nothing, and so long for each one."""
        self._guess = (base_s, each_s)
        self._at = 0.0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of weight, x, y, x * x, x * y

    def note(self, count: float, seconds: float, now: float | None = None) -> None:
        """Takes in a sample; ``now`` is on the monotonic clock."""
        now = time.monotonic() if now is None else now
        age = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
        sample = (1.0, count, seconds, count * count, count * seconds)
        old = (age * each for each in self._sums)
        self._sums = tuple(map(sum, zip(old, sample, strict=True)))  # type: ignore[assignment]
        self._at = now

    def is_known(self, now: float | None = None) -> bool:
        """Whether it is of more than half a fresh sample."""
        now = time.monotonic() if now is None else now
        return self._sums[0] * float(0.5 ** ((now - self._at) / HALF_LIFE_S)) > 0.5

    @property
    def both(self) -> tuple[float, float]:
        """Seconds for nothing, and for each one; neither is negative.

        >>> line = Line(0.1, 0.01)
        >>> line.both
        (0.1, 0.01)
        >>> for count in (10, 30):
        ...     line.note(count, 0.5 + 0.02 * count, now=0.0)
        >>> [round(each, 6) for each in line.both]
        [0.5, 0.02]
        """
        weight, x, y, xx, xy = self._sums
        if not weight:
            return self._guess
        spread = weight * xx - x * x
        # Counts that are all alike do not tell the two apart.
        each = (weight * xy - x * y) / spread if spread > 1e-3 * x * x else self._guess[1]
        each = max(0.0, each)
        if y < each * x:
            return 0.0, y / x
        return (y - each * x) / weight, each

    def seconds(self, count: float) -> float:
        """For so many."""
        base, each = self.both
        return base + each * count


class Work:
    """Tokens of one kind of work that are under way at an engine, and how long such take."""

    def __init__(self, shared: Line, count: Count) -> None:
        """``shared`` is of all engines, and stands in for what is not known of this one; ``count``
        is of tokens.
        """
        self.count = count
        self._shared = shared
        self._own = Line(*shared.both)

    @property
    def line(self) -> Line:
        """How long it takes here."""
        return self._own if self._own.is_known() else self._shared

    def cost(self, tokens: int) -> tuple[float, float]:
        """Seconds for what is under way, and for so many more tokens."""
        base, each = self.line.both
        return each * self.count.total, base + each * tokens

    @contextmanager
    def doing(self, tokens: int) -> Iterator[Callable[[int | None], None]]:
        """While the tokens are under way. What it gives is called as soon as they are done, with
        how many they were indeed; with ``None`` where the time was not theirs alone.
        """
        ahead, began, is_done = self.count.total, time.monotonic(), False
        self.count.add(tokens)

        def done(count: int | None) -> None:
            nonlocal is_done
            if is_done:
                return
            is_done = True
            self.count.add(-tokens)
            if count is not None:
                for line in (self._own, self._shared):
                    line.note(ahead + count, time.monotonic() - began)

        try:
            yield done
        finally:
            if not is_done:
                self.count.add(-tokens)


class Pace:
    """What an engine has under way, and how fast it was seen to be."""

    def __init__(self, shared: "Pace | None" = None, counts: Sequence[Count] | None = None) -> None:
        """``shared`` is of all engines; ``counts`` are :data:`COUNTS` that processes share."""
        self.shared = shared
        self.requests, self.lent, computing, moving = counts or [Count() for _ in range(COUNTS)]
        self.drawing = Line(1.0, 0.02)
        """From an answer's first token to its last, over the requests under way at its start."""
        self.asking = Line(0.01, 0.0)
        """To be told what it lends."""
        # The guesses: 1,000 tokens are computed, or 100,000 moved, in a second.
        self.computing: Work = Work(
            shared.computing.line if shared else Line(0.02, 1e-3), computing
        )
        self.moving: Work = Work(shared.moving.line if shared else Line(0.02, 1e-5), moving)

    def drew(self, outstanding: int, seconds: float) -> None:
        """Takes in how long an answer was drawn."""
        for pace in (self, self.shared):
            if pace is not None:
                pace.drawing.note(outstanding, seconds)

    def slowing(self, outstanding: int) -> float:
        """Seconds that requests under way add to an answer."""
        known = self.drawing.is_known() or self.shared is None
        base, each = (self if known else self.shared).drawing.both  # type: ignore[union-attr]
        return max(each, LEAST_SLOWING * base) * outstanding
