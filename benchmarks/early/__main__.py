"""The command."""

import itertools
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.early.cluster import (
    ANSWER_TOKENS,
    BLOCK_SIZES,
    CHUNK,
    DTYPE,
    MODEL,
    MODES,
    EarlyCluster,
    Served,
)
from benchmarks.early.report import HALF, EarlyResults, Measured, Sample, page, seconds
from benchmarks.faults.system import SystemFailedError
from benchmarks.report import RESULTS, Out, Rounds, Run, in_turn, start
from benchmarks.undivided import undivided
from kvferry.engine.messages import SamplingParams
from kvferry.engine.weights import prepare_model

PROMPTS = {256: 12, 1000: 6, 4000: 2, 16_000: 1}
"""Tokens of a prompt → requests of each mode in a round."""
LINKS: dict[str, float | None] = {"full": None, "200 MB/s": 200e6, "50 MB/s": 50e6}
"""Name → bytes per second."""
LONG = 4000
"""Tokens from which on a prompt is tried over the link that takes half as long as its prefill."""
LONGEST = max(PROMPTS)
LONGEST_KINDS = 3
"""Different prompts of that length, as an undivided engine computes each too. It fills the prefix
cache of an engine: the next one finds nothing."""
LATEST = 8
"""Requests whose prefill says how fast the link is to be that takes half as long."""
WARM_UP_TOKENS = 1000
WARM_UP = 3
"""Requests of each mode before a link is measured: the paces of loads are learned from them."""

Prompt = tuple[int, ...]


class Prompts:
    """Draws prompts that no engine has in its prefix cache."""

    def __init__(self) -> None:
        self._chance = random.Random(23)
        self._last: dict[str, int] = {}
        """Prefill engine and each decode engine → which of the longest prompts it had last."""
        self._longest = [self._draw(LONGEST) for _ in range(LONGEST_KINDS)]

    def _draw(self, tokens: int) -> Prompt:
        return tuple(self._chance.randrange(3, MODEL.vocab_size) for _ in range(tokens))

    def next(self, tokens: int, mode: str) -> Prompt:
        """One for a mode."""
        if tokens != LONGEST:
            return self._draw(tokens)
        engines = ("prefill", MODES[mode][0])
        had = {self._last.get(engine) for engine in engines}
        kind = next(number for number in range(LONGEST_KINDS) if number not in had)
        self._last.update(dict.fromkeys(engines, kind))
        return self._longest[kind]


class Rotation:
    """Measures round by round."""

    def __init__(
        self,
        cluster: EarlyCluster,
        links: Sequence[str],
        lengths: Sequence[int],
        say: Callable[[str], object],
    ) -> None:
        self._cluster = cluster
        self._links = [link for link in LINKS if link in links] or ["full"]
        self._lengths = lengths
        self._long = [length for length in lengths if length >= LONG] if HALF in links else []
        self._say = say
        self._prompts = Prompts()
        self._turns = 0
        self.measured: list[Measured] = []

    def round(self, number: int) -> None:
        """All modes over all links. They take turns, in every turn another one first."""
        for name in self._links:
            self._begin(number, name, LINKS[name], self._lengths)
            for length in self._lengths:
                for _ in range(PROMPTS[length]):
                    self._take_turns(name, LINKS[name], length)
        for length in self._long:
            rate = self._half_rate(length)
            self._begin(number, HALF, rate, [length])
            for _ in range(PROMPTS[length]):
                self._take_turns(HALF, rate, length)

    def _begin(
        self, number: int, name: str, bytes_per_s: float | None, lengths: Sequence[int]
    ) -> None:
        self._say(f"round {number + 1}: {name}: {', '.join(map(str, lengths))} tokens")
        self._cluster.slow(bytes_per_s)
        for mode, _ in itertools.product(MODES, range(WARM_UP)):
            self._ask(mode, min(WARM_UP_TOKENS, max(self._lengths)))

    def _take_turns(self, name: str, bytes_per_s: float | None, length: int) -> None:
        """One request of each mode."""
        self._turns += 1
        for mode in in_turn(list(MODES), self._turns):
            prompt, served = self._ask(mode, length)
            self.measured.append(Measured(name, bytes_per_s, mode, self._turns, prompt, served))

    def _ask(self, mode: str, tokens: int) -> tuple[Prompt, Served]:
        prompt = self._prompts.next(tokens, mode)
        served = self._cluster.serve(mode, prompt)
        cached = max(one.num_cached_tokens for one in (served.prefill, served.decode))
        if cached > tokens / 100:
            raise SystemFailedError(f"{mode}: {cached} of {tokens} tokens were cached")
        return prompt, served

    def _half_rate(self, tokens: int) -> float:
        """Bytes per second at which the KV of a prompt takes half as long as its prefill."""
        found = [
            2 * one.served.nbytes / seconds(timings.prefill_started, timings.prefill_finished)
            for one in self.measured
            if len(one.prompt) == tokens
            if (timings := one.served.prefill.timings) is not None
        ]
        return statistics.median(found[-LATEST:])


class Judge:
    """Knows what one engine of one rank answers, which computes in the same chunks."""

    def __init__(self, model: Path, longest: int) -> None:
        longest += ANSWER_TOKENS
        self._config: dict[str, Any] = {
            "num_blocks": -(-longest // BLOCK_SIZES["prefill"]) + 1,
            "max_model_len": longest,
            "max_num_batched_tokens": CHUNK,
        }
        self._model = model
        self._known: dict[Prompt, list[int]] = {}

    def samples(self, measured: Sequence[Measured]) -> tuple[Sample, ...]:
        """What is kept of what was measured."""
        unknown = dict.fromkeys(one.prompt for one in measured if one.prompt not in self._known)
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        with undivided(self._model, DTYPE, **self._config) as engine:
            for prompt in unknown:
                (output,) = engine.generate([prompt], sampling)
                self._known[prompt] = list(output.token_ids)
        return tuple(
            Sample.of(one, is_right=list(one.served.tokens) == self._known[one.prompt])
            for one in measured
        )


def chosen(only: Sequence[str]) -> tuple[list[str], list[int]]:
    """The links and lengths that are named; all, where none is.

    >>> chosen(["256", "half"])
    (['half'], [256])

    Raises:
        typer.BadParameter: there is no such link or length.
    """
    links, lengths = [*LINKS, HALF], list(PROMPTS)
    for name in only:
        if name not in links and name not in map(str, lengths):
            known = ", ".join([*links, *map(str, lengths)])
            raise typer.BadParameter(f"{name!r} is none of {known}", param_hint="--only")
    return (
        [link for link in links if link in only] or links,
        [length for length in lengths if str(length) in only] or lengths,
    )


def main(
    rounds: Rounds = 3,
    only: Annotated[
        list[str], typer.Option(help="A link or a number of tokens; several times for more.")
    ] = [],  # noqa: B006 - typer's way
    out: Out = RESULTS,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for what engines and routers write.")
    ] = None,
) -> None:
    """Compares the ways to begin a load, over links of several speeds; writes what it has after
    every round.
    """
    links, lengths = chosen(only)
    run = Run("benchmarks.early", out, rounds=rounds)
    with tempfile.TemporaryDirectory(prefix="early-") as created:
        folder = logs or Path(created)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["KVFERRY_CACHE"] = str(Path(created) / "cache")
        model = prepare_model("tiny", tiny=MODEL)
        run.say("engines and routers start")
        with EarlyCluster(model, max(lengths), folder) as cluster:
            rotation = Rotation(cluster, links, lengths, run.say)
            judge = Judge(model, max(lengths))
            for number in range(rounds):
                rotation.round(number)
                run.rounds = number + 1
                results = run.results(EarlyResults, samples=judge.samples(rotation.measured))
                run.publish("early", results, page)


if __name__ == "__main__":
    start(main)
