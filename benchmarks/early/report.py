"""What was measured, and the page for people."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TypeAlias

import msgspec

from benchmarks import tables
from benchmarks.early.cluster import ANSWER_TOKENS, BLOCK_SIZES, CHUNK, MODES, Served
from benchmarks.machine import Machine

HALF = "half"
"""The link over which the KV of a prompt takes half as long as its prefill; of each length its
own."""
SHORT = 256
"""Tokens of the prompt that must not be slower."""
GOAL_SOONER, GOAL_SHORT, GOAL_PINNED = 5.0, 1.05, 0.5
"""Times less after prefill over the link ``half``; times as long at most for a short prompt; times
the block-seconds of ``now`` at most."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are seconds."""

    link: str
    bytes_per_s: float | None
    """Of the link; ``None`` for what the relay carries."""
    tokens: int
    """Of the prompt."""
    mode: str
    turn: int
    """Samples of one turn were taken one after the other, one of each mode."""
    prefill_s: float
    """From the first step that computes the prompt to its last token."""
    after_prefill_s: float
    """From there to the first token of the decode engine."""
    first_token_s: float
    """From the request to the first token at the client."""
    second_token_s: float
    early_s: float
    """By how much the decode engine took blocks before the prompt was computed."""
    load_s: float
    """From the admission of the load until the engine knows that all is there."""
    block_s: float
    """Blocks of the decode engine, times seconds from the admission to its first token."""
    nbytes: int
    """That were loaded."""
    is_right: bool
    """Whether the answer is that of one undivided engine."""

    @classmethod
    def of(
        cls,
        link: str,
        bytes_per_s: float | None,
        mode: str,
        turn: int,
        one: Served,
        *,
        is_right: bool,
    ) -> "Sample":
        """What is kept of a request."""
        p, d = one.prefill.timings, one.decode.timings
        assert p is not None  # it has ended
        assert d is not None
        blocks = -(-one.decode.prompt_tokens // BLOCK_SIZES["decode"])
        return cls(
            link=link,
            bytes_per_s=bytes_per_s,
            tokens=one.prefill.prompt_tokens,
            mode=mode,
            turn=turn,
            prefill_s=seconds(p.prefill_started, p.prefill_finished),
            after_prefill_s=seconds(p.prefill_finished, d.first_token),
            first_token_s=one.first_token_s,
            second_token_s=one.second_token_s,
            early_s=seconds(d.scheduled, p.prefill_finished),
            load_s=seconds(d.load_started, d.load_finished),
            block_s=blocks * seconds(d.scheduled, d.first_token),
            nbytes=one.nbytes,
            is_right=is_right,
        )


def seconds(first: float | None, last: float | None) -> float:
    """Between two moments of a request that has ended well."""
    assert first is not None
    assert last is not None
    return last - first


class EarlyResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one call measured."""

    command: str
    machine: Machine
    load_after: float
    """Load average at the end."""
    rounds: int
    samples: tuple[Sample, ...]


class Cell:
    """All samples of one link and one length, by mode."""

    def __init__(self, link: str, tokens: int, samples: Sequence[Sample]) -> None:
        self.link = link
        self.tokens = tokens
        self._samples = {
            mode: [one for one in samples if one.mode == mode]
            for mode in MODES
            if any(one.mode == mode for one in samples)
        }

    def __str__(self) -> str:
        return f"{self.link}, {self.tokens:,} tokens"

    @property
    def modes(self) -> list[str]:
        """Those that were measured."""
        return list(self._samples)

    def median(self, mode: str, figure: Callable[[Sample], float]) -> float:
        """Of one figure."""
        return statistics.median(map(figure, self._samples[mode]))

    def times(self, figure: Callable[[Sample], float], mode: str, base: str) -> float:
        """How many times as much it is as of another mode: the median over the turns."""
        of = {one.turn: figure(one) for one in self._samples[base]}
        return statistics.median(figure(one) / of[one.turn] for one in self._samples[mode])

    @property
    def ratio(self) -> float:
        """How long the transfer of the whole prompt takes, to how long its prefill does."""
        return self.median("in turn", lambda one: one.load_s / one.prefill_s)

    def wrong(self, mode: str) -> int:
        """Answers of a mode that are not right."""
        return sum(not one.is_right for one in self._samples[mode])

    def count(self, mode: str) -> int:
        """Requests of a mode."""
        return len(self._samples[mode])


def cells(samples: Sequence[Sample]) -> list[Cell]:
    """In the order in which they were measured."""
    links = list(dict.fromkeys(one.link for one in samples))
    keys = {(links.index(one.link), one.tokens) for one in samples}
    return [
        Cell(
            links[link],
            tokens,
            [one for one in samples if (one.link, one.tokens) == (links[link], tokens)],
        )
        for link, tokens in sorted(keys)
    ]


def _prefill_s(one: Sample) -> float:
    return one.prefill_s


def _after_s(one: Sample) -> float:
    return one.after_prefill_s


def _first_s(one: Sample) -> float:
    return one.first_token_s


def _second_s(one: Sample) -> float:
    return one.second_token_s


def _block_s(one: Sample) -> float:
    return one.block_s


def rows(samples: Sequence[Sample]) -> Iterator[tuple[str, ...]]:
    """The table, its header first."""
    yield (
        "link",
        "prompt",
        "mode",
        "transfer / prefill",
        "prefill ms",
        "after prefill ms",
        "times less than off",
        "first token ms",
        "second token ms",
        "block-seconds",
        "wrong",
    )
    for cell in cells(samples):
        for mode in cell.modes:
            after = cell.median(mode, _after_s)
            is_off = mode in ("in turn", "off") or "off" not in cell.modes
            yield (
                cell.link,
                f"{cell.tokens:,}",
                mode,
                f"{cell.ratio:.2f}" if mode == "in turn" else "",
                _ms(cell.median(mode, _prefill_s)),
                _ms(after),
                "" if is_off else f"{cell.times(_after_s, 'off', mode):.1f}",
                _ms(cell.median(mode, _first_s)),
                _ms(cell.median(mode, _second_s)),
                f"{cell.median(mode, _block_s):.1f}",
                f"{cell.wrong(mode)} of {cell.count(mode)}",
            )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


Goal: TypeAlias = tuple[str, bool]
"""In words, with what came out, and whether it is met."""


def goals(samples: Sequence[Sample]) -> Iterator[Goal]:
    """All that can be judged."""
    for cell in cells(samples):
        if set(MODES) <= set(cell.modes):
            if cell.link == HALF:
                yield from _sooner(cell)
            if cell.tokens == SHORT:
                yield from _no_slower(cell)
            if cell.tokens > CHUNK:
                yield _pins_less(cell)


def _sooner(cell: Cell) -> Iterator[Goal]:
    for mode, base in product(("late", "now"), ("in turn", "off")):
        times = cell.times(_after_s, base, mode)
        text = (
            f"{cell}: `{mode}` takes {times:.1f} times less after prefill than `{base}` (goal: "
            f"{GOAL_SOONER:g}; transfer / prefill is {cell.ratio:.2f})"
        )
        yield text, times >= GOAL_SOONER


def _no_slower(cell: Cell) -> Iterator[Goal]:
    whats = (("after prefill", _after_s), ("first token", _first_s), ("second token", _second_s))
    for (what, figure), mode in product(whats, ("late", "now")):
        turn, off = (cell.times(figure, mode, base) for base in ("in turn", "off"))
        text = (
            f"{cell}: {what} of `{mode}` takes {off:.2f} times as long as of `off`, {turn:.2f} "
            f"times as long as of `in turn` (goal: at most {GOAL_SHORT:g})"
        )
        yield text, max(turn, off) <= GOAL_SHORT


def _pins_less(cell: Cell) -> Goal:
    share = cell.times(_block_s, "late", "now")
    text = (
        f"{cell}: block-seconds of `late` are {share:.2f} times those of `now` (goal: at most "
        f"{GOAL_PINNED:g})"
    )
    return text, share <= GOAL_PINNED


def markdown(results: EarlyResults) -> str:
    """The page for people."""
    machine = results.machine
    links = {one.link: one.bytes_per_s for one in results.samples}
    made = (
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores. "
        f"Load average {machine.load_before} before, {results.load_after} after. Reference engines "
        f"of one rank on hosts made of network namespaces, each request alone; a relay in user "
        f"space is the links between them, transport tcp. Prompts are computed in chunks of "
        f"{CHUNK} tokens, answers have {ANSWER_TOKENS}. Blocks of {BLOCK_SIZES['prefill']} tokens "
        f"(prefill) and {BLOCK_SIZES['decode']} (decode), unequal layouts. Modes take turns, "
        f"request by request; medians, and medians of each turn's ratio. Rounds: {results.rounds}."
    )
    told = [
        (
            "`in turn`: the prefill engine, then the decode engine, as routers do by default. The "
            "others: both engines at once (`at_once`), with that `early_load` of the decode engine."
        ),
        (
            "`after prefill`: from the prompt's last computed token to the decode engine's first "
            "token, which is the answer's second one `in turn`, and its first one otherwise. "
            "`first token`, `second token`: at the client, through the router."
        ),
        (
            "`block-seconds`: blocks of the decode engine, times the seconds from the admission of "
            "the request to its first token there."
        ),
        (
            "`transfer / prefill`: how long the load `in turn` takes, to how long the prompt is "
            f"computed. Of the link `{HALF}` the rate was chosen for each length so that this is "
            "about one half."
        ),
    ]
    told.append(
        "Engines, relay, routers and client share the cores: what loads while a prompt is computed "
        "also slows its computation here, which it does not between machines."
    )
    if None in links.values():
        told.append("Link `full`: as fast as the relay is.")
    judged = [f"{'met' if met else '**missed**'}: {text}" for text, met in goals(results.samples)]
    lines = [
        "# Loads that begin while the prompt is computed",
        "",
        made,
        "",
        *tables.bullets(told),
        "",
        *tables.markdown(rows(results.samples), 3),
        "",
        "## Goals",
        "",
        *tables.bullets(judged),
    ]
    return "\n".join(lines) + "\n"
