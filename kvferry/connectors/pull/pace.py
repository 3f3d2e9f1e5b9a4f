"""Estimates of when a source will have computed a prompt, and of how long the prompt takes to
move.
"""

from dataclasses import dataclass, field

_KEPT = 0.97
"""Weight that a chunk keeps after each later chunk: about the last thirty chunks count."""
_BEYOND = 2
"""Multiple of the furthest token seen up to which the estimate lets the cost per token grow."""


class PromptPace:
    """Estimate of the seconds that a source takes to compute tokens of a prompt.

    The cost of a token is a constant, plus a cost for each earlier token, to which the token
    attends. Both are fitted to the recent chunks by least squares. Beyond the tokens seen, the
    estimate assumes less growth than is likely: a load that begins too late costs its client time,
    but a load that begins too early costs only blocks.
    """

    def __init__(self) -> None:
        self._reach = 0
        """The furthest token that was seen."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        """Sums over chunks: x is the middle of a chunk in tokens, y its seconds per token."""

    def note(self, first: int, last: int, seconds: float) -> None:
        """Notes that the tokens ``[first, last)`` of a prompt took ``seconds``; the range must not
        be empty.
        """
        x, y = (first + last) / 2, seconds / (last - first)
        self._reach = max(self._reach, last)
        self._weight = self._weight * _KEPT + 1
        self._x, self._y = self._x * _KEPT + x, self._y * _KEPT + y
        self._xx, self._xy = self._xx * _KEPT + x * x, self._xy * _KEPT + x * y

    def seconds(self, first: int, last: int) -> float | None:
        """Seconds that the tokens ``[first, last)`` of a prompt take; ``None`` while nothing is
        known.

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
        """Seconds per token, and seconds per token for each token before; neither is negative."""
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        covariance = self._xy / self._weight - x * y
        if variance < 1.0 or covariance <= 0.0:  # only one chunk, or the cost does not grow
            return y, 0.0
        growth = covariance / variance
        if y < growth * x:
            return 0.0, self._xy / self._xx
        return y - growth * x, growth

    def _area(self, tokens: int) -> float:
        """Number of tokens before each of the first ``tokens``, summed up to the limit of the
        growth.
        """
        known = min(tokens, _BEYOND * self._reach)
        return known * known / 2 + known * (tokens - known)


@dataclass(slots=True)
class SourcePace:
    """Speed at which a source computes prompts, and at which prompts move from the source."""

    computes: PromptPace = field(default_factory=PromptPace)
    moves: float | None = None
    """Tokens per second that recently came from the source while a load moved; ``None`` while
    unknown."""

    def moved(self, num_tokens: int, seconds: float) -> None:
        """Notes that ``num_tokens`` tokens of the source have come in ``seconds`` seconds."""
        pace, before = num_tokens / seconds, self.moves
        # The mean of the seconds per token, so that a link which has become slower shows soon: a
        # load that begins too late costs its client time, but a load that begins too early costs
        # only blocks.
        self.moves = pace if before is None else 2 / (1 / pace + 1 / before)

    def moving_s(self, num_tokens: int) -> float:
        """Seconds that ``num_tokens`` tokens take to move, as far as is known; 0 while nothing is
        known.
        """
        return num_tokens / self.moves if self.moves else 0.0
