"""Pairs of unequal servers: whose answers are right."""

import random
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from benchmarks.vllm_servers.client import RefusalError, complete
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
_LENGTHS = (5, 100, 128, 129, 300, 1000)
_TOKENS = 16


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the requests of one pair."""

    shape: str
    contender: str
    right: int = 0
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
                ("wrong", self.wrong),
                ("refused", self.refused),
            )
            if count
        ]
        return ", ".join(parts) + (f" ({self.why})" if self.why else "")


def judge_shapes(
    connectors: tuple[Connector, ...], model: Model, logs: Path, say: Callable[[str], object]
) -> list[Verdict]:
    """Has each connector serve the same prompts over each pair of shapes."""
    draw = random.Random(1)
    prompts = [[draw.randrange(8, model.vocab_size) for _ in range(n)] for n in _LENGTHS]
    with running([ServerOptions(name="single", model=model)], logs) as (single,):
        expected = [complete(single.url, prompt, _TOKENS).tokens for prompt in prompts]
    verdicts = []
    for shape in SHAPES:
        for connector in connectors:
            say(f"{shape}: {connector.name}")
            verdicts.append(_judge(shape, connector, model, prompts, expected, logs))
    return verdicts


def _judge(
    shape: str,
    connector: Connector,
    model: Model,
    prompts: list[list[int]],
    expected: list[list[int]],
    logs: Path,
) -> Verdict:
    counts = {"right": 0, "wrong": 0, "refused": 0}
    why = ""
    try:
        with running(pair_options(model, *SHAPES[shape], connector), logs) as servers:
            for prompt, tokens in zip(prompts, expected, strict=True):
                try:
                    answer = Pair(*servers).ask(prompt, _TOKENS, timeout_s=30.0).tokens
                    counts["right" if answer == tokens else "wrong"] += 1
                except RefusalError as error:
                    counts["refused"] += 1
                    why = why or f"HTTP {error.status}"
                except httpx.HTTPError as error:
                    counts["refused"] += 1
                    why = why or type(error).__name__
    except ServerError:
        counts["refused"] = len(prompts)
        why = "a server does not start"
    return Verdict(shape=shape, contender=connector.name, why=why, **counts)
