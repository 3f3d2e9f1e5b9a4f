"""Which tokens of a request a context-parallel rank holds, and where they lie among its own.

The tokens of a request go round over an engine's context ranks, ``interleave_size`` at a time::

    token         0 1 2 3 | 4 5 6 7 | 8 9 ...      2 ranks, interleave_size 2
    context rank  0 0 1 1 | 0 0 1 1 | 0 0 ...
    slot          0 1 0 1 | 2 3 2 3 | 4 5 ...      the token's number among its rank's own

A rank's blocks hold its own tokens, slot after slot.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens of one context rank.

    >>> shard = TokenShard(num_ranks=2, rank=1, interleave_size=2)
    >>> shard.slots(np.array([2, 3, 6]))  # the tokens of the picture above
    array([0, 1, 2])
    >>> shard.tokens(np.arange(4))
    array([2, 3, 6, 7])
    >>> shard.holds(np.array([1, 2]))
    array([False,  True])
    """

    num_ranks: int = 1
    """Context ranks of the engine."""
    rank: int = 0
    """The rank's number among them."""
    interleave_size: int = 1
    """Consecutive tokens that one rank holds; 1 where there is only one rank."""

    @property
    def period(self) -> int:
        """Tokens after which every rank has had its turn."""
        return self.num_ranks * self.interleave_size

    def slots(self, tokens: Int64s) -> Int64s:
        """How many of the shard's tokens come before each token."""
        if self.num_ranks == 1:
            return tokens
        rounds, rest = np.divmod(tokens, self.period)
        size = self.interleave_size
        found: Int64s = rounds * size + np.clip(rest - self.rank * size, 0, size)
        return found

    def tokens(self, slots: Int64s) -> Int64s:
        """The shard's tokens with these slots."""
        if self.num_ranks == 1:
            return slots
        rounds, rest = np.divmod(slots, self.interleave_size)
        return rounds * self.period + self.rank * self.interleave_size + rest

    def holds(self, tokens: Int64s) -> npt.NDArray[np.bool_]:
        """Which of these tokens the rank holds."""
        found: npt.NDArray[np.bool_] = tokens // self.interleave_size % self.num_ranks == self.rank
        return found

    def meets(self, other: "TokenShard") -> bool:
        """Whether the two hold any token alike.

        >>> one = TokenShard(num_ranks=4, rank=1, interleave_size=2)  # 2, 3, 10, 11, ...
        >>> [one.meets(TokenShard(num_ranks=2, rank=rank)) for rank in (0, 1)]
        [True, True]
        >>> one.meets(TokenShard(num_ranks=2, rank=0, interleave_size=2))  # 0, 1, 4, 5, 8, 9, ...
        False
        """
        # Turns [a, a + m) every S tokens and [b, b + n) every T: a - b takes every value that is
        # equal modulo gcd(S, T), and two turns meet where -m < a - b < n.
        common = math.gcd(self.period, other.period)
        apart = self.rank * self.interleave_size - other.rank * other.interleave_size
        apart %= common
        return apart < other.interleave_size or common - apart < self.interleave_size
