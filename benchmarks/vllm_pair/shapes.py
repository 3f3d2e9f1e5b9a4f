"""Pairs of unequal servers: whose answers are right."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec

from benchmarks import tables
from benchmarks.vllm_servers.client import RefusalError, complete, less_likely
from benchmarks.vllm_servers.connectors import Connector
from benchmarks.vllm_servers.models import Model
from benchmarks.vllm_servers.pair import Pair, Shape, pair_options, running
from benchmarks.vllm_servers.server import ServerError, ServerOptions

SHAPES = {
    "block 64 to 128": (Shape(64), Shape(128)),
    "block 128 to 64": (Shape(128), Shape(64)),
    "block 32 to 96": (Shape(32), Shape(96)),
    "TP 2 to 1": (Shape(tp=2), Shape()),
    "PP 1 to 2": (Shape(), Shape(pp=2)),
}
LENGTHS = (5, 100, 128, 129, 300, 1000)
_TOKENS = 16


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


def judge_shapes(
    connectors: tuple[Connector, ...],
    model: Model,
    shapes: Mapping[str, tuple[Shape, Shape]],
    lengths: Sequence[int],
    logs: Path,
    say: Callable[[str], object],
    tie_nats: float = 0.0,
) -> list[Verdict]:
    """Has each connector serve the same prompts over each pair of shapes.

    Args:
        connectors: those that are compared.
        model: what all servers run.
        shapes: name → the shapes of the prefill and the decode server.
        lengths: tokens of each prompt.
        logs: folder for the servers' logs.
        say: is told what is under way.
        tie_nats: by how much less likely than a single server's a token of an answer may be and
            count as tied.
    """
    draw = random.Random(1)
    prompts = [[draw.randrange(8, model.vocab_size) for _ in range(n)] for n in lengths]
    answers = {}
    for shape, sides in shapes.items():
        for connector in connectors:
            say(f"{shape}: {connector.name}")
            options = pair_options(model, *sides, connector)
            answers[shape, connector.name] = list(_answers(options, prompts, logs))
    with running([ServerOptions(name="single", model=model)], logs) as (single,):
        judge = Judge(single.url, prompts, tie_nats)
        return [
            judge.verdict(shape, contender, found) for (shape, contender), found in answers.items()
        ]


def shapes_table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Lines of a table: a row per pair of shapes, a column per connector."""
    contenders = list(dict.fromkeys(verdict.contender for verdict in verdicts))
    found = {(verdict.shape, verdict.contender): verdict for verdict in verdicts}
    rows = [
        (shape, *(str(found[shape, name]) for name in contenders))
        for shape in dict.fromkeys(verdict.shape for verdict in verdicts)
    ]
    yield from tables.markdown((("pair", *contenders), *rows), left=1 + len(contenders))


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
