"""Which engines serve a prompt: the way that costs the fewest seconds.

Where engines publish their KV cache events, the router knows what they have
(:mod:`kvferry.cluster.prefixes`). Then it adds up, for each way, what the client waits for::

    over a prefill engine P         compute at P the rest of what P has
                                    + move to D what D has not       + decode at D
    directly, at a decode engine D  compute at D the rest of what D has   + decode at D

The second way is taken only where D has a beginning of the prompt and the rest is short
(``direct_tokens``). ``compute`` and ``move`` are lines over the tokens that are under way and those
that are added; ``decode`` is what each request under way adds to an answer. All are measured of the
requests that were served, and forgotten after a while: an engine that was slow is tried again. What
has not been measured of an engine is taken from all of them.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.cluster.engines import Engine
from kvferry.cluster.members import Members
from kvferry.cluster.metrics import RouterMetrics
from kvferry.cluster.prefixes import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One way for a prompt."""

    prefill: Engine | None
    """``None`` where the decode engine computes the prompt."""
    decode: Engine
    tokens: int
    """Of the prompt."""
    cached: int
    """Tokens that the one that computes should have."""
    held: int
    """Tokens that the decode engine should have."""
    costs: tuple[tuple[str, float], ...]
    """What it is made of, in seconds."""

    @property
    def computed(self) -> int:
        """Tokens to compute."""
        return self.tokens - self.cached

    @property
    def moved(self) -> int:
        """Tokens to move to the decode engine."""
        return self.tokens - self.held if self.prefill is not None else 0

    @property
    def seconds(self) -> float:
        """What it costs."""
        return sum(seconds for _, seconds in self.costs)

    @property
    def header(self) -> str:
        """For whoever sent the prompt."""
        parts = {
            "prefill": "-" if self.prefill is None else _ascii(self.prefill.name),
            "decode": _ascii(self.decode.name),
            "cached": self.cached,
            "computed": self.computed,
            "moved": self.moved,
            "seconds": f"{self.seconds:.4f}",
        }
        return "; ".join(f"{name}={value}" for name, value in parts.items())

    def __str__(self) -> str:
        way = f"{self.prefill.name} > " if self.prefill is not None else "directly "
        sums = " + ".join(f"{name} {seconds:.4f}" for name, seconds in self.costs)
        return (
            f"{way}{self.decode.name}: {self.cached} of {self.tokens} tokens cached, "
            f"{self.computed} computed, {self.moved} moved; {sums} = {self.seconds:.4f} s"
        )


def _ascii(name: str) -> str:
    return name.encode("ascii", "backslashreplace").decode()


@dataclass(slots=True)
class Chooser:
    """Finds the way for each prompt."""

    members: Members
    metrics: RouterMetrics
    direct_tokens: int
    """See :class:`~kvferry.config.RouterConfig`."""
    explain: bool = False
    """Whether each choice is logged, with what was not chosen."""

    def choose(self, request_id: str, tokens: Sequence[int], tried: set[Engine]) -> Route | None:
        """The way for a prompt, over engines that were not tried; ``None`` where no engine tells
        what it has, or none of a role is fit.
        """
        if self.members.index.is_empty:
            return None
        ways = list(self.ways(tokens, tried))
        if not ways:
            return None
        best = min(ways, key=_cost)
        for source, count in (
            ("prefill" if best.prefill is not None else "decode", best.cached),
            ("computed", best.computed),
        ):
            self.metrics.prefix_tokens.labels(source).inc(count)
        if self.explain:
            others = "".join(
                f"\n    not {way}" for way in sorted(ways, key=_cost) if way is not best
            )
            logger.info("request %s: %s%s", request_id, best, others)
        return best

    def missed(self, tokens: int) -> None:
        """An engine had so many tokens less than it was chosen for; no less if it is negative."""
        self.metrics.prefix_missed.inc(max(0, tokens))

    def ways(self, tokens: Sequence[int], tried: set[Engine]) -> Iterator[Route]:
        """All of them; of those over a prefill engine only the ones that begin with the best
        prefill engine or end with the best decode engine, as the others cost more than either.
        """
        prefills, decodes = (
            pool.fit(tried) for pool in (self.members.prefill, self.members.decode)
        )
        if not prefills or not decodes:
            return
        prompt, count = Prompt(tokens), len(tokens)
        has = {engine: self._held(engine, prompt) for engine in (*prefills, *decodes)}
        computes = {
            engine: engine.pace.computing.cost(count - has[engine])
            for engine in (*prefills, *decodes)
        }
        moves = {engine: engine.pace.moving.cost(count - has[engine]) for engine in decodes}
        draws = {engine: engine.pace.slowing(engine.outstanding) for engine in decodes}

        def over(prefill: Engine, decode: Engine) -> Route:
            (queue, compute), (wait, move) = computes[prefill], moves[decode]
            return Route(
                prefill=prefill,
                decode=decode,
                tokens=count,
                cached=has[prefill],
                held=has[decode],
                costs=(
                    ("queue", queue + wait),
                    ("compute", compute),
                    ("move", move),
                    ("decode", draws[decode]),
                ),
            )

        first = min(prefills, key=lambda each: (sum(computes[each]), each.outstanding))
        last = min(decodes, key=lambda each: (sum(moves[each]) + draws[each], each.outstanding))
        yield over(first, last)
        yield from (over(prefill, last) for prefill in prefills if prefill is not first)
        yield from (over(first, decode) for decode in decodes if decode is not last)
        for decode in decodes:
            if has[decode] and count - has[decode] <= self.direct_tokens:
                queue, compute = computes[decode]
                yield Route(
                    prefill=None,
                    decode=decode,
                    tokens=count,
                    cached=has[decode],
                    held=has[decode],
                    costs=(("queue", queue), ("compute", compute), ("decode", draws[decode])),
                )

    def _held(self, engine: Engine, prompt: Prompt) -> int:
        """Tokens that an engine should have; its last one is always computed."""
        blocks = self.members.index.blocks(engine.kv_events)
        return 0 if blocks is None else min(blocks.held(prompt), len(prompt.tokens) - 1)


def _cost(way: Route) -> tuple[float, int]:
    return way.seconds, way.decode.outstanding
