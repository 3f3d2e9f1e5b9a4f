"""Which engines serve a prompt: the way that costs the fewest seconds.

Where engines publish their KV cache events, the router knows what they have
(:mod:`kvferry.cluster.prefixes`). Of the others it can go by what it sent them (``assume_cached``).
Then it adds up, for each way, what the client waits for::

    over a prefill engine P         compute at P the rest of what P has
                                    + move to D what D has not       + decode at D
    directly, at a decode engine D  compute at D the rest of what D has   + decode at D

Whoever computes may first borrow what another engine has and it has not: then ``ask`` and
``borrow`` are added, and less is computed. The second way is taken only where D has a beginning of
the prompt, or borrows one, and the rest is short (``direct_tokens``). ``compute``, ``borrow`` and
``move`` are lines over the tokens that are under way and those that are added; ``decode`` is what
each request under way adds to an answer. All are measured of the requests that were served, and
forgotten after a while: an engine that was slow is tried again. What has not been measured of an
engine is taken from all of them.
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
class Begin:
    """How an engine comes by the KV of a prompt."""

    engine: Engine
    tokens: int
    """Of the prompt."""
    cached: int
    """Tokens that it should have."""
    lender: Engine | None = None
    """Who lends it what follows these."""
    borrowed: int = 0
    """How many that should be."""
    costs: tuple[tuple[str, float], ...]
    """What it is made of, in seconds; the queue first."""

    @classmethod
    def of(
        cls, engine: Engine, tokens: int, cached: int, lender: Engine | None = None, has: int = 0
    ) -> "Begin":
        """With what it costs; ``has`` are the tokens that the lender should have."""
        borrowed = has - cached if lender is not None else 0
        queue, compute = engine.pace.computing.cost(tokens - cached - borrowed)
        costs = [("queue", queue), ("compute", compute)]
        if lender is not None:
            wait, move = engine.pace.moving.cost(borrowed)
            costs = [
                ("queue", queue + wait),
                ("ask", lender.pace.asking.seconds(1)),
                ("borrow", move),
                ("compute", compute),
            ]
        return cls(
            engine=engine,
            tokens=tokens,
            cached=cached,
            lender=lender,
            borrowed=borrowed,
            costs=tuple(costs),
        )

    @property
    def computed(self) -> int:
        """Tokens to compute."""
        return self.tokens - self.cached - self.borrowed

    @property
    def seconds(self) -> float:
        """What it costs."""
        return sum(seconds for _, seconds in self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One way for a prompt."""

    begin: Begin
    prefill: Engine | None
    """``None`` where the decode engine computes the prompt."""
    decode: Engine
    held: int
    """Tokens that the decode engine should have."""
    costs: tuple[tuple[str, float], ...]
    """What it is made of, in seconds."""

    @property
    def moved(self) -> int:
        """Tokens to move to the decode engine."""
        return self.begin.tokens - self.held if self.prefill is not None else 0

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
            "cached": self.begin.cached,
            "borrowed": self.begin.borrowed,
            "lender": "-" if self.begin.lender is None else _ascii(self.begin.lender.name),
            "computed": self.begin.computed,
            "moved": self.moved,
            "seconds": f"{self.seconds:.4f}",
        }
        return "; ".join(f"{name}={value}" for name, value in parts.items())

    def __str__(self) -> str:
        begin = self.begin
        way = f"{self.prefill.name} > " if self.prefill is not None else "directly "
        loan = f"{begin.borrowed} borrowed of {begin.lender.name}, " if begin.lender else ""
        sums = " + ".join(f"{name} {seconds:.4f}" for name, seconds in self.costs)
        return (
            f"{way}{self.decode.name}: {begin.cached} of {begin.tokens} tokens cached, {loan}"
            f"{begin.computed} computed, {self.moved} moved; {sums} = {self.seconds:.4f} s"
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
    assume_cached: bool = False
    """See :class:`~kvferry.config.RouterConfig`."""

    def choose(
        self, request_id: str, tokens: Sequence[int], tried: set[Engine], *, borrow: bool = True
    ) -> Route | None:
        """The way for a prompt, over engines that were not tried, with a loan if one may be made;
        ``None`` where nothing is known of what engines have, or none of a role is fit.
        """
        if self.members.index.is_empty and not self.assume_cached:
            return None
        ways = list(self.ways(tokens, tried, borrow=borrow))
        if not ways:
            return None
        best = min(ways, key=_cost)
        begin = best.begin
        for source, count in (
            ("prefill" if best.prefill is not None else "decode", begin.cached),
            ("borrowed", begin.borrowed),
            ("computed", begin.computed),
        ):
            self.metrics.prefix_tokens.labels(source).inc(count)
        if self.explain:
            others = "".join(
                f"\n    not {way}" for way in sorted(ways, key=_cost) if way is not best
            )
            logger.info("request %s: %s%s", request_id, best, others)
        return best

    def computed(self, engine: Engine, prompt: Sequence[int], drawn: Sequence[int]) -> None:
        """An engine has the KV of a prompt now, and of what was drawn behind it."""
        if self.assume_cached and self.members.index.blocks(engine.kv_events) is None:
            engine.sent.note(Prompt((*prompt, *drawn)))

    def borrowed(self, tokens: int, expected: int) -> None:
        """An engine lends so many tokens, and so many were expected."""
        self.metrics.borrowed_tokens.inc(tokens)
        self.metrics.prefix_missed.inc(max(0, expected - tokens))

    def missed(self, engine: Engine, tokens: int) -> None:
        """An engine had so many tokens less than it was chosen for; no less if it is negative."""
        if tokens > 0:
            self.metrics.prefix_missed.inc(tokens)
            engine.sent.missed()

    def ways(self, tokens: Sequence[int], tried: set[Engine], *, borrow: bool) -> Iterator[Route]:
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
        lenders = sorted((e for e in has if e.lends and borrow), key=has.__getitem__, reverse=True)

        def begins(engine: Engine) -> Iterator[Begin]:
            yield Begin.of(engine, count, has[engine])
            # Of the engines at one address, one is the other.
            others = (each for each in lenders if each.url != engine.url)
            lender = next(others, None) if engine.borrows else None
            if lender is not None and has[lender] > has[engine]:
                yield Begin.of(engine, count, has[engine], lender, has[lender])

        def over(begin: Begin, decode: Engine) -> Route:
            wait, move = decode.pace.moving.cost(count - has[decode])
            costs = (("queue", begin.costs[0][1] + wait), *begin.costs[1:], ("move", move))
            return Route(
                begin=begin,
                prefill=begin.engine,
                decode=decode,
                held=has[decode],
                costs=(*costs, ("decode", decode.pace.slowing(decode.outstanding))),
            )

        starts = [begin for engine in prefills for begin in begins(engine)]
        first = min(starts, key=lambda begin: (begin.seconds, begin.engine.outstanding))
        last = min((over(first, decode) for decode in decodes), key=_cost).decode
        yield over(first, last)
        yield from (over(begin, last) for begin in starts if begin is not first)
        yield from (over(first, decode) for decode in decodes if decode is not last)
        for begin in (begin for engine in decodes for begin in begins(engine)):
            if begin.cached + begin.borrowed and begin.computed <= self.direct_tokens:
                draw = begin.engine.pace.slowing(begin.engine.outstanding)
                yield Route(
                    begin=begin,
                    prefill=None,
                    decode=begin.engine,
                    held=begin.cached,
                    costs=(*begin.costs, ("decode", draw)),
                )

    def _held(self, engine: Engine, prompt: Prompt) -> int:
        """Tokens that an engine should have; its last one is always computed."""
        blocks = self.members.index.blocks(engine.kv_events)
        held = (engine.sent if blocks is None else blocks).held(prompt)
        return min(held, prompt.num_tokens - 1)


def _cost(way: Route) -> tuple[float, int]:
    return way.seconds, way.decode.outstanding
