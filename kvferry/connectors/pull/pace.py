"""When a source will have computed a prompt."""

_KEPT = 0.97
"""Weight that a chunk has left after another one: about the last thirty count."""
_BEYOND = 2
"""How many times as far as any chunk that was seen the growth of the cost is believed in."""


class PromptPace:
    """Seconds that a source computes at the tokens of a prompt.

    A token costs a constant, and something for each token before it, to which it attends. Both are
    fitted to the chunks of late by least squares. Beyond what was seen less growth is assumed than
    there is, as a load that begins too late costs its client time, and one too early only blocks.
    """

    def __init__(self) -> None:
        self._reach = 0
        """The furthest token that was seen."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        """Sums over chunks: x is the middle of a chunk, y its seconds per token."""

    def note(self, first: int, last: int, seconds: float) -> None:
        """The tokens ``[first, last)`` of a prompt took so long; there are some."""
        x, y = (first + last) / 2, seconds / (last - first)
        self._reach = max(self._reach, last)
        self._weight = self._weight * _KEPT + 1
        self._x, self._y = self._x * _KEPT + x, self._y * _KEPT + y
        self._xx, self._xy = self._xx * _KEPT + x * x, self._xy * _KEPT + x * y

    def seconds(self, first: int, last: int) -> float | None:
        """How long the tokens ``[first, last)`` of a prompt take; ``None`` while nothing is known.

        >>> pace = PromptPace()
        >>> pace.note(0, 100, 1.0)
        >>> pace.note(100, 200, 2.0)
        >>> round(pace.seconds(200, 300), 6)
        3.0
        """
        if not self._weight:
            return None
        constant, growth = self._fitted()
        return constant * (last - first) + growth * (self._area(last) - self._area(first))

    def _fitted(self) -> tuple[float, float]:
        """Seconds per token, and for each token before it; neither is less than nothing."""
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        covariance = self._xy / self._weight - x * y
        if variance < 1.0 or covariance <= 0.0:  # one chunk, or none that costs more than others
            return y, 0.0
        growth = covariance / variance
        if y < growth * x:
            return 0.0, self._xy / self._xx
        return y - growth * x, growth

    def _area(self, tokens: int) -> float:
        """Tokens before each of the first ``tokens``, added up as far as growth is believed in."""
        known = min(tokens, _BEYOND * self._reach)
        return known * known / 2 + known * (tokens - known)
