"""Choice of the engines for a prompt: the route that costs the fewest seconds.

If engines publish KV cache events, the router knows the contents of their caches
(:mod:`kvferry.router.prefixes`). For the other engines the router can assume cached prompts from
its own earlier requests (``assume_cached``). For each route the router adds up the client's waiting
time::

    over a prefill engine P         compute at P the tokens missing at P
                                    + move to D the tokens missing at D  + decode at D
    directly, at a decode engine D  compute at D the tokens missing at D + decode at D

The computing engine may first borrow tokens from another engine's cache. This adds ``ask`` and
``borrow``, and reduces ``compute``. The router takes the direct route only if D has a beginning of
the prompt, or borrows a beginning, and the rest is short (``direct_tokens``).

``compute``, ``borrow`` and ``move`` are linear functions of the current and the added tokens;
``decode`` is the delay of an answer by the decode engine's current requests. All functions are
measured from served requests. Old measurements lose weight: the router tries a formerly slow engine
again. An engine without recent measurements uses the measurements of all engines.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.router.engines import Engine
from kvferry.router.members import Members
from kvferry.router.metrics import RouterMetrics
from kvferry.router.prefixes import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Plan for the KV of a prompt at one engine: cached, borrowed or computed tokens."""

    engine: Engine
    tokens: int
    """Number of tokens in the prompt."""
    cached: int
    """Expected number of tokens in the engine's cache."""
    lender: Engine | None = None
    """Engine that lends the tokens after the cached tokens; ``None`` without a loan."""
    borrowed: int = 0
    """Expected number of tokens from the lender."""
    costs: tuple[tuple[str, float], ...]
    """Parts of the cost, in seconds; the queue first."""

    @classmethod
    def of(
        cls, engine: Engine, tokens: int, cached: int, lender: Engine | None = None, has: int = 0
    ) -> "Begin":
        """Makes a plan with its costs; ``has`` is the expected number of tokens in the lender's
        cache.
        """
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
        """Number of tokens to compute."""
        return self.tokens - self.cached - self.borrowed

    @property
    def seconds(self) -> float:
        """Cost of the plan in seconds."""
        return sum(seconds for _, seconds in self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Engines for a prompt, with the route's cost."""

    begin: Begin
    prefill: Engine | None
    """Engine that computes the prompt; ``None`` if the decode engine computes the prompt."""
    decode: Engine
    held: int
    """Expected number of tokens in the decode engine's cache."""
    costs: tuple[tuple[str, float], ...]
    """Parts of the cost, in seconds."""

    @property
    def moved(self) -> int:
        """Number of tokens to transfer to the decode engine."""
        return self.begin.tokens - self.held if self.prefill is not None else 0

    @property
    def seconds(self) -> float:
        """Cost of the route in seconds."""
        return sum(seconds for _, seconds in self.costs)

    @property
    def header(self) -> str:
        """Value of the ``x-kvferry-route`` header for the client."""
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
    """Chooses the route of each prompt."""

    members: Members
    metrics: RouterMetrics
    direct_tokens: int
    """See :class:`~kvferry.config.RouterConfig`."""
    explain: bool = False
    """Whether the chooser logs each choice together with the other routes."""
    assume_cached: bool = False
    """See :class:`~kvferry.config.RouterConfig`."""

    def choose(
        self, request_id: str, tokens: Sequence[int], tried: set[Engine], *, borrow: bool = True
    ) -> Route | None:
        """The cheapest route for a prompt over engines outside of ``tried``, with a loan if
        ``borrow`` allows a loan. ``None`` if no engine's cache is known, or a role has no fit
        engine.
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

    def computed(
        self, engine: Engine, prompt: Sequence[int], drawn: Sequence[int], *, missed: int = 0
    ) -> None:
        """Notes that an engine now has the KV of a prompt and of the tokens sampled after it.

        ``missed`` is the number of expected tokens that the engine did not have; a negative number
        counts as 0.
        """
        if missed > 0:
            self.metrics.prefix_missed.inc(missed)
            engine.health.sent.missed()
        if self.assume_cached and self.members.index.blocks(engine.told.kv_events) is None:
            engine.health.sent.note(Prompt((*prompt, *drawn)))

    def borrowed(self, tokens: int, expected: int) -> None:
        """Notes the number of tokens in a loan, and the number of tokens expected from the
        lender.
        """
        self.metrics.borrowed_tokens.inc(tokens)
        self.metrics.prefix_missed.inc(max(0, expected - tokens))

    def ways(self, tokens: Sequence[int], tried: set[Engine], *, borrow: bool) -> Iterator[Route]:
        """Yields the routes. A route over a prefill engine is left out if neither its prefill
        engine nor its decode engine is the best, because such a route costs more than the others.
        """
        prefills, decodes = (
            pool.fit(tried) for pool in (self.members.prefill, self.members.decode)
        )
        if not prefills or not decodes:
            return
        prompt, count = Prompt(tokens), len(tokens)
        has = {engine: self._held(engine, prompt) for engine in (*prefills, *decodes)}
        able = [engine for engine in has if engine.told.lends and borrow]
        lenders = sorted(able, key=has.__getitem__, reverse=True)

        def begins(engine: Engine) -> Iterator[Begin]:
            yield Begin.of(engine, count, has[engine])
            # Two engines with the same address are the same engine.
            others = (each for each in lenders if each.url != engine.url)
            lender = next(others, None) if engine.told.borrows else None
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
        """Expected number of tokens in an engine's cache; the prompt's last token is always
        computed.
        """
        blocks = self.members.index.blocks(engine.told.kv_events)
        held = (engine.health.sent if blocks is None else blocks).held(prompt)
        return min(held, prompt.num_tokens - 1)


def _cost(way: Route) -> tuple[float, int]:
    return way.seconds, way.decode.outstanding
