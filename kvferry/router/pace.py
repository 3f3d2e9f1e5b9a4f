"""Current work and measured speed of an engine, for the choice among engines
(:mod:`kvferry.router.choice`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

HALF_LIFE_S = 60.0
"""Seconds after which a measurement counts half."""
LEAST_SLOWING = 0.01
"""Smallest assumed delay per current request, as a share of an answer's seconds. Without this
minimum, a measurement without any delay would send all requests to one engine."""


@dataclass(slots=True)
class Count:
    """Number of current requests, prompts or tokens at an engine."""

    cells: "list[int] | memoryview[int]" = field(default_factory=lambda: [0])
    """Counts of the router's processes; each process writes to its own cell."""
    own: int = 0
    """Index of this process's cell."""

    def add(self, count: int) -> None:
        """Adds ``count``, which may be negative."""
        self.cells[self.own] += count

    def put(self, count: int) -> None:
        """Makes ``count`` the number of this process."""
        self.cells[self.own] = count

    @property
    def total(self) -> int:
        """Sum over all processes."""
        return sum(self.cells)


COUNTS = 4
"""Number of counts per engine."""


class FittedLine:
    """Seconds as a linear function of a count, fitted to measurements; old measurements lose
    weight.
    """

    def __init__(self, base_s: float, each_s: float) -> None:
        """Begins with a guess: ``base_s`` seconds, plus ``each_s`` seconds per unit of the
        count.
        """
        self._guess = (base_s, each_s)
        self._at = 0.0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # sums of weight, x, y, x * x, x * y

    def note(self, count: float, seconds: float, now: float | None = None) -> None:
        """Adds a measurement; ``now`` is in seconds on the monotonic clock."""
        now = time.monotonic() if now is None else now
        age = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
        sample = (1.0, count, seconds, count * count, count * seconds)
        old = (age * each for each in self._sums)
        self._sums = tuple(map(sum, zip(old, sample, strict=True)))  # type: ignore[assignment]
        self._at = now

    def is_known(self, now: float | None = None) -> bool:
        """Whether the measurements weigh more than half of a new measurement."""
        now = time.monotonic() if now is None else now
        return self._sums[0] * float(0.5 ** ((now - self._at) / HALF_LIFE_S)) > 0.5

    @property
    def both(self) -> tuple[float, float]:
        """Seconds at count 0, and seconds per unit of the count; neither is negative.

        >>> line = FittedLine(0.1, 0.01)
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
        # Equal counts do not separate the two values.
        each = (weight * xy - x * y) / spread if spread > 1e-3 * x * x else self._guess[1]
        each = max(0.0, each)
        if y < each * x:
            return 0.0, y / x
        return (y - each * x) / weight, each

    def seconds(self, count: float) -> float:
        """Estimated seconds for ``count``."""
        base, each = self.both
        return base + each * count


class Work:
    """Current tokens of one kind of work at an engine, and the measured time for such tokens."""

    def __init__(self, shared: FittedLine, count: Count) -> None:
        """Begins without own measurements.

        Args:
            shared: measurements of all engines, used while this engine has too few of its own.
            count: number of current tokens.
        """
        self.count = count
        self.shared = shared
        self.own = FittedLine(*shared.both)

    @property
    def line(self) -> FittedLine:
        """The line of this engine, or of all engines while this engine has too few measurements."""
        return self.own if self.own.is_known() else self.shared

    def cost(self, tokens: int) -> tuple[float, float]:
        """Estimated seconds for the current tokens, and for ``tokens`` further tokens."""
        base, each = self.line.both
        return each * self.count.total, base + each * tokens

    @contextmanager
    def doing(self, tokens: int) -> Iterator[Callable[[int | None], None]]:
        """Counts ``tokens`` as current while the context is open.

        The caller calls the yielded function when the tokens are done, with the real number of
        tokens; or with ``None`` if the time also contains other work.
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
                for line in (self.own, self.shared):
                    line.note(ahead + count, time.monotonic() - began)

        try:
            yield done
        finally:
            if not is_done:
                self.count.add(-tokens)


class Pace:
    """Current work and measured speed of an engine."""

    def __init__(self, shared: "Pace | None" = None, counts: Sequence[Count] | None = None) -> None:
        """Begins with guesses.

        Args:
            shared: pace of all engines; ``None`` if this object is the pace of all engines.
            counts: :data:`COUNTS` counts in memory shared by processes; ``None`` for a single
                process.
        """
        self.shared = shared
        self.requests, self.lent, computing, moving = counts or [Count() for _ in range(COUNTS)]
        self.drawing = FittedLine(1.0, 0.02)
        """Seconds from an answer's first token to its last, over the number of requests at its
        start."""
        self.asking = FittedLine(0.01, 0.0)
        """Seconds to request a loan from a lender."""
        # Guesses: an engine computes 1,000 tokens, or transfers 100,000 tokens, per second.
        self.computing: Work = Work(
            shared.computing.line if shared else FittedLine(0.02, 1e-3), computing
        )
        self.moving: Work = Work(shared.moving.line if shared else FittedLine(0.02, 1e-5), moving)

    def drew(self, outstanding: int, seconds: float) -> None:
        """Adds a measurement: the seconds from first to last token of an answer that began with
        ``outstanding`` current requests.
        """
        for pace in (self, self.shared):
            if pace is not None:
                pace.drawing.note(outstanding, seconds)

    def slowing(self, outstanding: int) -> float:
        """Estimated seconds that ``outstanding`` requests add to an answer."""
        known = self.drawing.is_known() or self.shared is None
        base, each = (self if known else self.shared).drawing.both  # type: ignore[union-attr]
        return max(each, LEAST_SLOWING * base) * outstanding
