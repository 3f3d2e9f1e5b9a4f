"""Rounds of requests through pairs of servers that take turns."""

import contextlib
import dataclasses
import random
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.vllm_pair.cases import KEY, REQUESTS, Case, Place
from benchmarks.vllm_servers.client import complete, events, stream
from benchmarks.vllm_servers.connectors import Connector
from benchmarks.vllm_servers.models import Model
from benchmarks.vllm_servers.pair import REMOTE_DECODE, Pair, pair_options, running
from benchmarks.vllm_servers.server import ServerOptions
from kvferry.control.client import asking_client
from kvferry.control.tickets import TransferId
from kvferry.observe.timeline import Stretch, gather, handover

_TOKENS = 4
"""Generated per request."""
_BESIDE_TOKENS = 7000
"""Of an answer beside: more than a server draws while a round lasts."""
_ANSWER_S = 30.0
"""For an engine to tell of a request."""
_LOAD_METRICS = ("vllm:kvferry_load_seconds", "vllm:nixl_xfer_time_seconds")
"""What either connector says of its own transfers, from post to completion."""
_RUNNING = "vllm:num_requests_running"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One round of a case through one pair. Means over its requests, in seconds."""

    transfer: float
    """Of a load, as the connector's own metric has it."""
    handover: float
    """From the prefill server's answer to the decode server's first token."""
    cpu: float
    """User and system time of all processes of both servers, per request."""
    stretches: tuple[Stretch, ...] = ()
    """What the hand-over went to, as our engines tell it (``kvferry trace``); of ours only."""


MEASURES: Mapping[str, str] = {
    "transfer": "transfer",
    "handover": "end of prefill to first token",
    "cpu": "CPU of both servers",
}
"""Field of a sample → what people call it."""


AT_ONCE = ", at once"
"""Ends the name of who has both servers asked at once, as our router does it."""

_TRANSFER_AND_STEP = ("read", "first token")
"""Stretches of a hand-over that it cannot do without."""


def _each(found: Iterable[Stretch], of: Callable[[list[float]], float]) -> list[Stretch]:
    """One stretch in place of all of a name, in the order in which names first come."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for stretch in found:
        seconds.setdefault((stretch.name, stretch.owner), []).append(stretch.seconds)
    return [Stretch(name, owner, of(each)) for (name, owner), each in seconds.items()]


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

    def stretches(self) -> list[Stretch]:
        """Of each stretch of the hand-over the median."""
        found = [stretch for sample in self.samples for stretch in sample.stretches]
        return _each(found, statistics.median)

    @property
    def rest(self) -> float | None:
        """Seconds of the hand-over in which neither KV moved nor D's step was under way: of a
        round the mean, of these the median; ``None`` where nobody tells.
        """
        rests = [
            sum(each.seconds for each in sample.stretches if each.name not in _TRANSFER_AND_STEP)
            for sample in self.samples
            if sample.stretches
        ]
        return statistics.median(rests) if rests else None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A case in a group: ours and theirs."""

    group: str
    case: Case
    ours: Contender
    theirs: Contender

    @property
    def name(self) -> str:
        """For people."""
        way = AT_ONCE if self.ours.name.endswith(AT_ONCE) else ""
        return f"{self.group}, {self.case}{way}"

    def ratios(self, measure: str) -> list[float]:
        """How many times less ours takes, by round."""
        return [
            getattr(his, measure) / getattr(mine, measure)
            for mine, his in zip(self.ours.samples, self.theirs.samples, strict=True)
        ]


class Prompts:
    """The prompts of all cases, and the tokens that a single server generates after them."""

    def __init__(self, model: Model, place: Place, cases: Sequence[Case], logs: Path) -> None:
        draw = random.Random(0)

        def some(count: int, tokens: int) -> list[list[int]]:
            return [
                [draw.randrange(8, model.vocab_size) for _ in range(tokens)] for _ in range(count)
            ]

        self.of = {case: some(REQUESTS, case.tokens) for case in cases}
        self.beside = some(max(case.beside for case in cases), 256)
        """Of the answers that a decode server draws beside those."""
        options = ServerOptions(
            name="single",
            model=model,
            max_model_len=place.max_model_len,
            kv_cache_bytes=place.cache_gib << 30,
            block_size=place.shape.block_size,
            arguments=place.shape.arguments,
        )
        with running([options], logs) as (single,):
            self.expected = {
                case: [complete(single.url, prompt, _TOKENS).tokens for prompt in prompts]
                for case, prompts in self.of.items()
            }


class _Way(NamedTuple):
    """How one contender's requests are answered."""

    pair: Pair
    request: Callable[[Pair, Sequence[int], str], tuple[float, list[int]]]


def measure_group(
    group: str,
    place: Place,
    model: Model,
    prompts: Prompts,
    rounds: int,
    logs: Path,
    say: Callable[[str], object],
) -> list[Row]:
    """Both pairs run; the one whose turn it is not is stopped, so that it takes no core. Ours is
    measured in both ways in which it can be asked.
    """
    cases, connectors = list(prompts.of), place.groups[group]
    samples: dict[tuple[Case, str], list[Sample]] = {}
    wrong: dict[tuple[Case, str], int] = {}
    ours, theirs = (connector.name for connector in connectors)
    with contextlib.ExitStack() as stack:
        pairs = {}
        for connector in connectors:
            say(f"{group}: starting {connector.name}")
            pairs[connector.name] = stack.enter_context(_stopped(model, place, connector, logs))
        ways = {
            ours: _Way(pairs[ours], _request),
            f"{ours}{AT_ONCE}": _Way(pairs[ours], _request_at_once),
            theirs: _Way(pairs[theirs], _request),
        }
        for number in range(-1, rounds):
            for case in cases:
                # Whoever is first finds the machine as the other one left it: they take turns.
                for name in ways if number % 2 else reversed(ways):
                    say(f"{group}, round {number + 1} of {rounds}: {case}: {name}")
                    sample, errors = _round(ways[name], prompts, case)
                    wrong[case, name] = wrong.get((case, name), 0) + errors
                    # Before the first round the prefill server computes the prompts.
                    if number >= 0:
                        samples.setdefault((case, name), []).append(sample)

    def contender(case: Case, name: str) -> Contender:
        return Contender(name=name, samples=tuple(samples[case, name]), wrong=wrong[case, name])

    return [
        Row(
            group=group,
            case=case,
            ours=contender(case, name),
            theirs=contender(case, theirs),
        )
        for name in (ours, f"{ours}{AT_ONCE}")
        for case in cases
    ]


@contextlib.contextmanager
def _stopped(model: Model, place: Place, connector: Connector, logs: Path) -> Iterator[Pair]:
    """A pair that is up, and stopped until its turn comes."""
    prefill, decode = pair_options(
        model,
        place.shape,
        place.shape,
        connector,
        max_model_len=place.max_model_len,
        kv_cache_bytes=place.cache_gib << 30,
    )
    folder = logs / connector.name
    folder.mkdir(parents=True, exist_ok=True)
    # Prompts are computed once; the decode server fetches them anew in every round.
    prefill = dataclasses.replace(prefill, kv_cache_bytes=place.prefill_cache_gib << 30)
    arguments = (*decode.arguments, "--no-enable-prefix-caching")
    decode = dataclasses.replace(decode, arguments=arguments)
    with running([prefill, decode], folder) as servers:
        pair = Pair(*servers)
        pair.pause()
        yield pair


def _round(way: _Way, prompts: Prompts, case: Case) -> tuple[Sample, int]:
    """One round of a case; the sample and the number of wrong answers."""
    pair = way.pair
    pair.resume()
    try:
        pair.ask(prompts.of[case][0][:32], 1)  # connections that a stop has ended come back
        ids = [uuid.uuid4().hex for _ in prompts.of[case]]
        with _answering(pair, prompts.beside[: case.beside]):
            before = _Reading(pair)
            with ThreadPoolExecutor(case.concurrency) as threads:
                answers = list(threads.map(partial(way.request, pair), prompts.of[case], ids))
            after = _Reading(pair)
        pair.idle()
        stretches = _stretches(pair, ids)
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
        stretches=tuple(stretches),
    )
    return sample, wrong


@contextlib.contextmanager
def _answering(pair: Pair, prompts: Sequence[Sequence[int]]) -> Iterator[None]:
    """The decode server draws an answer to each of these prompts until this ends."""
    with contextlib.ExitStack() as stack:
        for prompt in prompts:
            drawn = events(pair.decode.url, prompt, _BESIDE_TOKENS)
            stack.enter_context(contextlib.closing(drawn))
            next(drawn)  # the rest is drawn though nobody reads it
        yield
        if prompts:
            running = pair.decode.metrics()[_RUNNING]
            assert running >= len(prompts), "an answer beside has ended too early"


class _Reading:
    """Counters of a pair at one moment."""

    def __init__(self, pair: Pair) -> None:
        metrics = pair.decode.metrics()
        self.cpu_seconds = pair.prefill.cpu_seconds() + pair.decode.cpu_seconds()
        (name,) = [name for name in _LOAD_METRICS if f"{name}_count" in metrics]
        self.loads = metrics[f"{name}_count"]
        self.load_seconds = metrics[f"{name}_sum"]


def _request(pair: Pair, prompt: Sequence[int], request_id: str) -> tuple[float, list[int]]:
    """One request; seconds from the end of its prefill to its first token, and its tokens."""
    ticket = pair.start(prompt, request_id=request_id)
    begin = time.perf_counter()
    at, tokens = stream(
        pair.decode.url, prompt, _TOKENS, kv_transfer_params=ticket, request_id=request_id
    )
    return at - begin, tokens


def _request_at_once(pair: Pair, prompt: Sequence[int], request_id: str) -> tuple[float, list[int]]:
    """The same where both servers get the request at once."""
    config = pair.prefill.options.transfer
    assert config is not None  # it is a pair's
    transfer = TransferId.begin(f"127.0.0.1:{config['kv_port']}", KEY.encode()).text

    def prefill() -> float:
        lent = {**REMOTE_DECODE, "transfer": transfer}
        complete(pair.prefill.url, prompt, 1, kv_transfer_params=lent, request_id=request_id)
        return time.perf_counter()

    with ThreadPoolExecutor(1) as thread:
        prefilled = thread.submit(prefill)
        loaded = {"do_remote_prefill": True, "transfer": transfer}
        at, tokens = stream(
            pair.decode.url, prompt, _TOKENS, kv_transfer_params=loaded, request_id=request_id
        )
        return at - prefilled.result(), tokens


def _stretches(pair: Pair, request_ids: Iterable[str]) -> list[Stretch]:
    """What the hand-over of requests went to, on average; nothing if the pair is not ours."""
    configs = [server.options.transfer or {} for server in (pair.prefill, pair.decode)]
    if any(config.get("kv_connector") != "KVFerryConnector" for config in configs):
        return []
    addresses = [f"127.0.0.1:{config['kv_port']}" for config in configs]
    with asking_client("benchmark", _ANSWER_S) as client:
        told = [handover(gather(client, addresses, each)) for each in request_ids]
    assert all(told), "an engine has forgotten a request of this round"
    return _each((stretch for stretches in told for stretch in stretches), statistics.mean)
