"""Pairs of unequal vLLM servers: whose answers are right.

``python -m benchmarks.vllm_shapes`` has kvferry and NixlConnector serve the same prompts, one at a
time, over the same pairs of shapes, and compares the tokens with a single server's: with a plain
model, and with models that have recurrent layers.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec

from benchmarks import report
from benchmarks.programs import ServerError
from benchmarks.vllm_servers.client import RefusalError, complete, less_likely
from benchmarks.vllm_servers.connectors import Connector, KVFerry, Nixl
from benchmarks.vllm_servers.models import Model, delta_net_model, mamba2_model, tiny_model
from benchmarks.vllm_servers.pair import Pair, Shape, pair_options, running
from benchmarks.vllm_servers.server import ServerOptions

_TOKENS = 16
_NO_PREFIXES = ("--no-enable-prefix-caching",)
"""vLLM's mode ``none`` for states; with prefix caching it is ``align``."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What is tried, and told on a page of its own."""

    title: str
    models: Mapping[str, Callable[[], Model]]
    shapes: Mapping[str, tuple[Shape, Shape]]
    """Name → the shapes of the prefill and the decode server."""
    lengths: Sequence[int]
    """Tokens of each prompt."""
    connectors: tuple[Connector, ...]
    tie_nats: float = 0.0
    """By how much less likely than a single server's a token of an answer may be and count as
    tied: TP and decode round in another order than prefill."""


TRIALS = {
    "vllm_shapes": Trial(
        title="vLLM servers of unequal shapes, beside NIXL",
        models={"tiny": tiny_model},
        shapes={
            "block 64 to 128": (Shape(64), Shape(128)),
            "block 128 to 64": (Shape(128), Shape(64)),
            "block 32 to 96": (Shape(32), Shape(96)),
            "TP 2 to 1": (Shape(tp=2), Shape()),
            "PP 1 to 2": (Shape(), Shape(pp=2)),
        },
        lengths=(5, 100, 128, 129, 300, 1000),
        connectors=(KVFerry(), Nixl()),
    ),
    "vllm_states": Trial(
        title="Recurrent models beside NIXL inside vLLM",
        models={"gdn": delta_net_model, "mamba2": mamba2_model},
        shapes={
            "equal": (Shape(), Shape()),
            "tp 1 to 2": (Shape(), Shape(tp=2)),
            "tp 2 to 1": (Shape(tp=2), Shape()),
            "tp 2 to 2, conv DS to SD": (Shape(tp=2, conv="DS"), Shape(tp=2)),
            "conv SD to DS, none to align": (Shape(arguments=_NO_PREFIXES), Shape(conv="DS")),
            "tp 1 to 2, align to none": (Shape(), Shape(tp=2, arguments=_NO_PREFIXES)),
        },
        lengths=(5, 100, 639, 641, 642, 1300),  # vLLM gives such models blocks of 640 or so
        connectors=(KVFerry(), Nixl("nixl, both with conv DS", conv="DS")),
        tie_nats=0.5,  # of these models the tokens in doubt were found to differ by up to 0.2
    ),
}
"""Name of the results → what is tried."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the requests of one pair."""

    shape: str
    contender: str
    right: int = 0
    tied: int = 0
    """Answered with other tokens, which a single server finds about as likely."""
    wrong: int = 0
    """Answered with HTTP 200 and other tokens than a single server's."""
    refused: int = 0
    """Answered with an error, or not at all."""
    why: str = ""
    """Of the first refusal."""

    def __str__(self) -> str:
        parts = [
            f"{count} {name}"
            for name, count in (
                ("right", self.right),
                ("tied", self.tied),
                ("wrong", self.wrong),
                ("refused", self.refused),
            )
            if count
        ]
        return ", ".join(parts) + (f" ({self.why})" if self.why else "")


class ShapeResults(report.Results, frozen=True, kw_only=True):
    """All that one run found."""

    trial: str
    verdicts: dict[str, tuple[Verdict, ...]]
    """Model → what came of its pairs."""


def judge(
    trial: Trial, model: Model, logs: Path, say: Callable[[str], object]
) -> tuple[Verdict, ...]:
    """Has each connector serve the same prompts over each pair of shapes."""
    draw = random.Random(1)
    prompts = [[draw.randrange(8, model.vocab_size) for _ in range(n)] for n in trial.lengths]
    answers = {}
    for shape, sides in trial.shapes.items():
        for connector in trial.connectors:
            say(f"{model.name}, {shape}: {connector.name}")
            options = pair_options(model, *sides, connector)
            answers[shape, connector.name] = list(_answers(options, prompts, logs))
    with running([ServerOptions(name="single", model=model)], logs) as (single,):
        judge = Judge(single.url, prompts, trial.tie_nats)
        return tuple(
            judge.verdict(shape, contender, found) for (shape, contender), found in answers.items()
        )


def page(results: ShapeResults) -> str:
    """The page for people: for each model a row per pair of shapes, a column per connector."""
    trial = TRIALS[results.trial]
    lines: list[str] = []
    for model, verdicts in results.verdicts.items():
        found = {(each.shape, each.contender): str(each) for each in verdicts}
        contenders = list(dict.fromkeys(contender for _, contender in found))
        rows = [
            (shape, *(found[shape, name] for name in contenders))
            for shape in dict.fromkeys(shape for shape, _ in found)
        ]
        cells = (("pair", *contenders), *rows)
        lines += [f"## {model}", "", *report.table(cells, left=1 + len(contenders)), ""]
    return report.page(
        trial.title,
        results,
        f"vLLM 0.32.0 for CPUs. {len(trial.lengths)} prompts of {min(trial.lengths)} to "
        f"{max(trial.lengths):,} tokens, one at a time. *Right* are greedy tokens of a single "
        "server; a *tie* is an answer whose first other token that server finds less likely by "
        f"{trial.tie_nats:g} nats at most, since TP and decode round in another order.",
        lines,
    )


def _answers(
    options: tuple[ServerOptions, ServerOptions], prompts: list[list[int]], logs: Path
) -> Iterator[list[int] | str]:
    """For each prompt the tokens of a pair, or why there are none."""
    try:
        with running(options, logs) as servers:
            for prompt in prompts:
                try:
                    yield Pair(*servers).ask(prompt, _TOKENS, timeout_s=30.0).tokens
                except RefusalError as error:
                    yield f"HTTP {error.status}"
                except httpx.HTTPError as error:
                    yield type(error).__name__
    except ServerError:
        yield from ["a server does not start"] * len(prompts)


class Judge:
    """Compares answers with those of a single server."""

    def __init__(self, url: str, prompts: list[list[int]], tie_nats: float) -> None:
        self._url = url
        self._prompts = prompts
        self._tie_nats = tie_nats
        self._expected = [complete(url, prompt, _TOKENS).tokens for prompt in prompts]

    def verdict(self, shape: str, contender: str, answers: list[list[int] | str]) -> Verdict:
        """Counts the answers of one pair."""
        counts = Counter(
            "refused" if isinstance(answer, str) else self._what(index, answer)
            for index, answer in enumerate(answers)
        )
        why = next((answer for answer in answers if isinstance(answer, str)), "")
        return Verdict(shape=shape, contender=contender, why=why, **counts)

    def _what(self, index: int, tokens: list[int]) -> str:
        expected = self._expected[index]
        if tokens == expected:
            return "right"
        pairs = enumerate(zip(tokens, expected, strict=False))
        at = next((at for at, (ours, theirs) in pairs if ours != theirs), None)
        if at is None:
            return "wrong"  # one is longer
        prompt = [*self._prompts[index], *expected[:at]]
        tied = self._tie_nats and less_likely(self._url, prompt, tokens[at]) <= self._tie_nats
        return "tied" if tied else "wrong"


def main(out: report.Out = report.RESULTS, quick: report.Quick = False) -> None:
    """Counts right answers of KVFerryConnector and NixlConnector over unequal servers."""
    run = report.Run("benchmarks.vllm_shapes", out, quick=quick)
    few = 1 if quick else None
    with tempfile.TemporaryDirectory(prefix="vllm-shapes-") as logs:
        for name, trial in TRIALS.items():
            tried = msgspec.structs.replace(trial, shapes=dict([*trial.shapes.items()][:few]))
            verdicts = {
                model: judge(tried, make(), Path(logs), run.say)
                for model, make in [*trial.models.items()][:few]
            }
            run.publish(name, run.results(ShapeResults, trial=name, verdicts=verdicts), page)


if __name__ == "__main__":
    report.start(main)
