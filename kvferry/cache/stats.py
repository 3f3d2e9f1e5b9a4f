"""Counters of the prefix cache."""

import msgspec


class PrefixCacheStats(msgspec.Struct):
    """What the prefix cache was asked and could answer, over some span of time."""

    requests: int = 0
    """Lookups."""
    queries: int = 0
    """Tokens looked up."""
    hits: int = 0
    """Tokens found."""
    reset: bool = False
    """Whether the cache was reset in that time."""

    @property
    def hit_rate(self) -> float:
        """Tokens found per token looked up; 0 when there was no lookup."""
        return self.hits / self.queries if self.queries else 0.0

    def record(self, *, queries: int, hits: int) -> None:
        """Counts one lookup."""
        self.requests += 1
        self.queries += queries
        self.hits += hits
