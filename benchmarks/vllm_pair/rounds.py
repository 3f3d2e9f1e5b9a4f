"""Rounds of requests through pairs of servers that take turns."""

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from benchmarks.vllm_pair.cases import GOALS, LOW_GOAL, REQUESTS, Case
from benchmarks.vllm_servers.client import complete, stream
from benchmarks.vllm_servers.connectors import Connector
from benchmarks.vllm_servers.models import Model
from benchmarks.vllm_servers.pair import Pair, Shape, pair_options, running
from benchmarks.vllm_servers.server import ServerOptions

_TOKENS = 4
"""Generated per request."""
_LOAD_METRICS = ("vllm:kvferry_load_seconds", "vllm:nixl_xfer_time_seconds")
"""What either connector says of its own transfers, from post to completion."""
_CACHE_BYTES = 1 << 30
"""Of a server: eight of the longest prompts fit twice."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One round of a case through one pair. Means over its requests, in seconds."""

    transfer: float
    """Of a load, as the connector's own metric has it."""
    handover: float
    """From the prefill server's answer to the decode server's first token."""
    cpu: float
    """User and system time of all processes of both servers, per request."""


MEASURES: Mapping[str, str] = {
    "transfer": "transfer",
    "handover": "end of prefill to first token",
    "cpu": "CPU of both servers",
}
"""Field of a sample → what people call it."""


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """One connector in one case."""

    name: str
    samples: tuple[Sample, ...]
    """One per round."""
    wrong: int
    """Answers with other tokens than a single server's."""

    def median(self, measure: str) -> float:
        """Seconds."""
        values: list[float] = [getattr(sample, measure) for sample in self.samples]
        return statistics.median(values)


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times less ours takes: of each round's ratio the median, lowest and highest."""

    median: float
    low: float
    high: float
    goal: float

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.median >= self.goal and self.high >= LOW_GOAL


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A case in a group: ours and theirs."""

    group: str
    case: Case
    ours: Contender
    theirs: Contender
    ratios: dict[str, Ratio]
    """By measure."""


def compare(group: str, case: Case, ours: Contender, theirs: Contender) -> Row:
    """Sets the two against each other, round by round."""
    ratios = {}
    for measure in MEASURES:
        each = [
            getattr(his, measure) / getattr(mine, measure)
            for mine, his in zip(ours.samples, theirs.samples, strict=True)
        ]
        ratios[measure] = Ratio(
            median=statistics.median(each), low=min(each), high=max(each), goal=GOALS[group]
        )
    return Row(group=group, case=case, ours=ours, theirs=theirs, ratios=ratios)


class Prompts:
    """The prompts of all cases, and the tokens that a single server generates after them."""

    def __init__(self, model: Model, cases: Sequence[Case], logs: Path) -> None:
        draw = random.Random(0)
        self.of = {
            case: [
                [draw.randrange(8, model.vocab_size) for _ in range(case.tokens)]
                for _ in range(REQUESTS)
            ]
            for case in cases
        }
        options = ServerOptions(
            name="single", model=model, max_model_len=8192, kv_cache_bytes=_CACHE_BYTES
        )
        with running([options], logs) as (single,):
            self.expected = {
                case: [complete(single.url, prompt, _TOKENS).tokens for prompt in prompts]
                for case, prompts in self.of.items()
            }


def measure_group(
    group: str,
    connectors: tuple[Connector, Connector],
    model: Model,
    prompts: Prompts,
    rounds: int,
    logs: Path,
    say: Callable[[str], object],
) -> list[Row]:
    """Both pairs run; the one whose turn it is not is stopped, so that it takes no core."""
    cases = list(prompts.of)
    samples: dict[tuple[Case, str], list[Sample]] = {}
    wrong: dict[tuple[Case, str], int] = {}
    names = [connector.name for connector in connectors]
    with contextlib.ExitStack() as stack:
        pairs = {}
        for connector in connectors:
            say(f"{group}: starting {connector.name}")
            pairs[connector.name] = stack.enter_context(_stopped(model, connector, logs))
        for number in range(-1, rounds):
            for case in cases:
                # Whoever is first finds the machine as the other one left it: they take turns.
                for name in names if number % 2 else reversed(names):
                    say(f"{group}, round {number + 1} of {rounds}: {case}: {name}")
                    sample, errors = _round(pairs[name], prompts, case)
                    wrong[case, name] = wrong.get((case, name), 0) + errors
                    # Before the first round the prefill server computes the prompts.
                    if number >= 0:
                        samples.setdefault((case, name), []).append(sample)

    def contender(case: Case, name: str) -> Contender:
        return Contender(name=name, samples=tuple(samples[case, name]), wrong=wrong[case, name])

    ours, theirs = names
    return [compare(group, case, contender(case, ours), contender(case, theirs)) for case in cases]


@contextlib.contextmanager
def _stopped(model: Model, connector: Connector, logs: Path) -> Iterator[Pair]:
    """A pair that is up, and stopped until its turn comes."""
    prefill, decode = pair_options(
        model, Shape(), Shape(), connector, max_model_len=8192, kv_cache_bytes=_CACHE_BYTES
    )
    folder = logs / connector.name
    folder.mkdir(parents=True, exist_ok=True)
    # Prompts are computed once; the decode server fetches them anew in every round.
    decode = dataclasses.replace(decode, arguments=("--no-enable-prefix-caching",))
    with running([prefill, decode], folder) as servers:
        pair = Pair(*servers)
        pair.pause()
        yield pair


def _round(pair: Pair, prompts: Prompts, case: Case) -> tuple[Sample, int]:
    """One round of a case; the sample and the number of wrong answers."""
    pair.resume()
    try:
        pair.ask(prompts.of[case][0][:32], 1)  # connections that a stop has ended come back
        before = _Reading(pair)
        with ThreadPoolExecutor(case.concurrency) as threads:
            answers = list(threads.map(lambda prompt: _request(pair, prompt), prompts.of[case]))
        after = _Reading(pair)
        pair.idle()
    finally:
        pair.pause()
    wrong = sum(
        tokens != expected
        for (_, tokens), expected in zip(answers, prompts.expected[case], strict=True)
    )
    sample = Sample(
        transfer=(after.load_seconds - before.load_seconds) / (after.loads - before.loads),
        handover=statistics.mean(seconds for seconds, _ in answers),
        cpu=(after.cpu_seconds - before.cpu_seconds) / len(answers),
    )
    return sample, wrong


class _Reading:
    """Counters of a pair at one moment."""

    def __init__(self, pair: Pair) -> None:
        metrics = pair.decode.metrics()
        self.cpu_seconds = pair.prefill.cpu_seconds() + pair.decode.cpu_seconds()
        (name,) = [name for name in _LOAD_METRICS if f"{name}_count" in metrics]
        self.loads = metrics[f"{name}_count"]
        self.load_seconds = metrics[f"{name}_sum"]


def _request(pair: Pair, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """One request; seconds from the end of its prefill to its first token, and its tokens."""
    ticket = pair.start(prompt)
    begin = time.perf_counter()
    at, tokens = stream(pair.decode.url, prompt, _TOKENS, kv_transfer_params=ticket)
    return at - begin, tokens
