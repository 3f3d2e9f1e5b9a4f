"""The router's prefix index: memory of a million blocks, seconds of a choice, delay of others, and
how often it is wrong about engines that evict all the time.
"""

import asyncio
import gc
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from benchmarks import tables
from benchmarks.machine import Machine
from kvferry.cache.events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from kvferry.cluster.choice import Chooser
from kvferry.cluster.engine_client import EngineClient
from kvferry.cluster.members import Members
from kvferry.cluster.messages import EngineAddress, KVEventsPlace, Role, RouterSettings
from kvferry.cluster.metrics import RouterMetrics
from kvferry.cluster.prefixes import PAUSE_S, CachedBlocks, PrefixIndex, Prompt
from kvferry.config import EngineConfig
from kvferry.config.cluster import KVEventsConfig
from kvferry.control.cache_events import ReceivedEvents
from kvferry.engine.builder import build_engine
from kvferry.engine.engine import Engine
from kvferry.engine.messages import EngineOutput, SamplingParams
from kvferry.engine.weights import prepare_model
from kvferry.lifetimes import Closing

GOAL_BYTES = 200_000_000
GOAL_SECONDS = 1e-3
"""Of a choice, up to :data:`_GOAL_TOKENS`."""
_GOAL_TOKENS = 16_384

_BLOCKS = 1_000_000
_SIZES = (16, 16, 32, 64, 16, 24, 32, 64)
"""Tokens per block of the engines; the first half are prefill engines."""
_TOKENS = (1024, 4096, 16_384, 32_768)
_RUN = 64
"""Blocks of one event."""


_EVICTING = (16, 24, 32)
"""Tokens per block of the engines that evict."""
_ROOM = 1920
"""Tokens that one of them has room for."""
_CONVERSATIONS = 24
_UNDER_WAY = 9
_NEW = 64
"""Tokens that a turn brings."""
_ANSWER = 16
_LONGEST = 500
"""Tokens with which a conversation ends."""
_VOCABULARY = 256
_SAMPLING = SamplingParams(max_tokens=_ANSWER, ignore_eos=True)
_DTYPE = "float64"
"""However a prompt is divided into steps, the tokens are the same."""


class ChoiceSample(msgspec.Struct, frozen=True, kw_only=True):
    """The choice for one prompt."""

    tokens: int
    is_known: bool
    """Whether all engines have all of it; else none has anything."""
    sizes: str
    """Of the engines' blocks."""
    seconds: float
    """The median round."""
    longest: float
    """99 % of the rounds took no longer."""


class DelaySample(msgspec.Struct, frozen=True, kw_only=True):
    """How late an event loop wakes up that sleeps for a millisecond at a time."""

    case: str
    seconds: float
    """The median."""
    longest: float
    """99 % were no later."""


class EvictionResults(msgspec.Struct, frozen=True, kw_only=True):
    """Guesses while engines evict all the time."""

    requests: int
    evicted: int
    """Blocks that left the caches meanwhile."""
    told: int
    """Guesses that an engine has something of a prompt."""
    wrong: int
    """Of these, those that told of more than the engine had when it took the request up."""
    short: int
    """Guesses that told of less."""
    prompt_tokens: int
    tokens_told: int
    tokens_missed: int
    """Of these, those that the engine did not have."""
    answer_tokens: int
    differing: int
    """Answers that are not those of an engine without a prefix cache."""


class PrefixResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    machine: Machine
    quick: bool
    """Whether this was only a test of the benchmark."""
    blocks: int
    nbytes: int
    """By which the process grew."""
    block_seconds: float
    """To take one block in, its events decoded already."""
    choices: tuple[ChoiceSample, ...]
    delays: tuple[DelaySample, ...]
    evictions: EvictionResults


def measure(
    command: str, machine: Machine, rounds: int, quick: bool, say: Callable[[str], object]
) -> PrefixResults:
    """Fills an index in this process, and asks it."""
    rng = random.Random(0)
    blocks = 8_000 if quick else _BLOCKS
    prompt = [rng.randrange(1 << 17) for _ in range(max(_TOKENS))]
    engines = [CachedBlocks() for _ in _SIZES]
    gc.collect()
    before, seconds = _resident(), 0.0
    for engine, size in zip(engines, _SIZES, strict=True):
        say(f"prefix index: {len(engines)} engines")
        names = iter(range(1, 1 << 40))
        seconds += _fill(engine, _chains([prompt], size, names))
        left = blocks // len(_SIZES) - len(engine)
        others = ([rng.randrange(1 << 17) for _ in range(_RUN * size)] for _ in range(left // _RUN))
        seconds += _fill(engine, _chains(others, size, names))
    known = sum(map(len, engines))
    gc.collect()
    nbytes = _resident() - before
    say("prefix index: choices")
    choices = _choices(prompt, engines, 20 if quick else 20 * rounds)
    say("prefix index: delays")
    delays = _delays(rng, 50 if quick else 200 * rounds)
    say("prefix index: engines that evict")
    return PrefixResults(
        command=command,
        machine=machine,
        quick=quick,
        blocks=known,
        nbytes=nbytes,
        block_seconds=seconds / known,
        choices=choices,
        delays=delays,
        evictions=_evictions(rng, 12 if quick else 20 * rounds),
    )


def missed(results: PrefixResults) -> list[str]:
    """A sentence for each goal that was missed."""
    if results.quick:
        return []
    missed = [
        f"choice for {one.tokens:,} tokens, {_who(one)}: {one.seconds * 1e3:.2f} ms, the goal is "
        f"{GOAL_SECONDS * 1e3:g} ms"
        for one in results.choices
        if one.tokens <= _GOAL_TOKENS and one.seconds > GOAL_SECONDS
    ]
    if results.evictions.differing:
        missed.append(f"{results.evictions.differing} answers of engines that evict are wrong")
    if results.nbytes > GOAL_BYTES:
        missed.append(f"memory: {results.nbytes / 1e6:.0f} MB, the goal is {GOAL_BYTES / 1e6:g} MB")
    return missed


def show(results: PrefixResults, console: Console) -> None:
    """Prints the tables."""
    for line in (*_lines(results), *missed(results)):
        console.print(line, highlight=False, markup=False)


def write(results: PrefixResults, folder: Path) -> None:
    """Writes ``prefixes.json`` and ``PREFIXES.md`` into ``folder``."""
    machine = results.machine
    made = (
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, one thread, Python "
        f"{machine.python}. Load average {machine.load_before} before."
    )
    lines = [
        "# The router's prefix index",
        "",
        made,
        "",
        *(["**A quick run: its figures say nothing.**", ""] if results.quick else []),
        *_lines(results),
        "",
        "## Goals",
        "",
        *(tables.bullets(missed(results)) or ["All that were measured are met."]),
    ]
    tables.write(folder, "prefixes", results, "\n".join(lines) + "\n")


def _lines(results: PrefixResults) -> Iterator[str]:
    yield (
        f"{results.blocks:,} blocks of {len(_SIZES)} engines take {results.nbytes / 1e6:.0f} MB "
        f"({results.nbytes / results.blocks:.0f} bytes each, goal {GOAL_BYTES / 1e6:g} MB for a "
        f"million); one takes {results.block_seconds * 1e6:.1f} µs to take in."
    )
    yield ""
    yield (
        f"A choice among {len(_SIZES) // 2} prefill and {len(_SIZES) // 2} decode engines, goal "
        f"{GOAL_SECONDS * 1e3:g} ms up to {_GOAL_TOKENS:,} tokens, in processor time:"
    )
    yield ""
    yield "| tokens of the prompt | blocks of | who has it | ms | 99 % |"
    yield "| ---: | --- | --- | ---: | ---: |"
    for one in results.choices:
        yield (
            f"| {one.tokens:,} | {one.sizes} | {_who(one)} | {one.seconds * 1e3:.3f} "
            f"| {one.longest * 1e3:.3f} |"
        )
    yield ""
    yield (
        "How late an event loop wakes up that sleeps for 1 ms at a time, while a thread takes in "
        f"events of {_RUN} blocks:"
    )
    yield ""
    yield "| events | ms | 99 % |"
    yield "| --- | ---: | ---: |"
    for each in results.delays:
        yield f"| {each.case} | {each.seconds * 1e3:.3f} | {each.longest * 1e3:.3f} |"
    yield ""
    yield from _eviction_lines(results.evictions)


def _eviction_lines(found: EvictionResults) -> Iterator[str]:
    yield (
        f"Guesses while engines evict: {_CONVERSATIONS} conversations of up to "
        f"{_LONGEST + _NEW + _ANSWER} tokens are held over {len(_EVICTING)} reference engines with "
        f"room for {_ROOM:,} tokens each, in blocks of {', '.join(map(str, _EVICTING))}. "
        f"{_UNDER_WAY} requests are under way at a time. Each goes to the engine that the index "
        "says has most of it, with nothing else considered, and waits there while others evict. "
        "The guess is compared with what the engine finds when it takes the request up, and every "
        "answer with that of an engine without a prefix cache."
    )
    yield ""
    yield "| | |"
    yield "| --- | ---: |"
    yield f"| requests | {found.requests:,} |"
    yield f"| blocks evicted meanwhile | {found.evicted:,} |"
    yield f"| guesses that an engine has something | {found.told:,} |"
    yield f"| of these, told more than there was | {_share(found.wrong, found.told)} |"
    yield f"| guesses that told less than there was | {_share(found.short, found.requests)} |"
    yield f"| tokens told, of {found.prompt_tokens:,} in prompts | {found.tokens_told:,} |"
    missed_share = _share(found.tokens_missed, found.tokens_told)
    yield f"| of these, missed, and computed instead | {missed_share} |"
    yield f"| tokens answered | {found.answer_tokens:,} |"
    yield f"| answers that differ | {found.differing} |"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"


def _who(sample: ChoiceSample) -> str:
    return "all of them, all of it" if sample.is_known else "nobody"


def _resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _chains(
    prompts: "Iterator[list[int]] | list[list[int]]", size: int, names: Iterator[int]
) -> Iterator[ReceivedEvents]:
    """The events of prompts that become cached, a run of blocks each."""
    for prompt in prompts:
        parent = None
        for start in range(0, len(prompt) - size + 1, _RUN * size):
            tokens = prompt[start : start + _RUN * size]
            hashes = [_hash(next(names)) for _ in range(len(tokens) // size)]
            event = BlockStored(
                block_hashes=list(hashes),
                parent_block_hash=parent,
                token_ids=tokens[: len(hashes) * size],
                block_size=size,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                group_idx=0,
            )
            parent = hashes[-1]
            yield ReceivedEvents(0, KVEventBatch(ts=0.0, events=[event]), is_gapless=True)


def _hash(number: int) -> int:
    """64 bits, as engines send them."""
    return number * 0x9E3779B97F4A7C15 % (1 << 64)


def _fill(blocks: CachedBlocks, batches: Iterator[ReceivedEvents]) -> float:
    """Takes the batches in; returns the seconds of that alone."""
    seconds = 0.0
    for batch in batches:
        began = time.thread_time()
        blocks.apply(batch)
        seconds += time.thread_time() - began
    return seconds


class _Index(PrefixIndex):
    """An index that heard of its engines otherwise."""

    def __init__(self, engines: dict[KVEventsPlace, CachedBlocks]) -> None:
        super().__init__()
        self._engines = engines

    @property
    def is_empty(self) -> bool:
        return False

    def blocks(self, place: KVEventsPlace | None) -> CachedBlocks | None:
        return None if place is None else self._engines.get(place)


def _chooser(engines: list[CachedBlocks]) -> Chooser:
    """Chooses among these, half of them prefill engines."""
    roles: list[Role] = ["prefill", "decode"]
    addresses = [
        EngineAddress(
            name=str(number),
            role=roles[number * 2 // len(engines)],
            url=f"http://{number}",
            kv_events=KVEventsPlace(endpoint=f"tcp://127.0.0.1:{number + 1}"),
        )
        for number in range(len(engines))
    ]
    settings = RouterSettings(engines=tuple(addresses), foreign=True)
    members = Members(settings, EngineClient({}))
    known = zip((one.kv_events for one in addresses if one.kv_events), engines, strict=True)
    members.index = _Index(dict(known))
    for engine in members:
        engine.up()
    return Chooser(members, RouterMetrics(members), direct_tokens=512)


def _choices(
    prompt: list[int], engines: list[CachedBlocks], rounds: int
) -> tuple[ChoiceSample, ...]:
    samples = []
    same = [engine for engine, size in zip(engines, _SIZES, strict=True) if size == 16]
    cases = [("16 tokens", (same * len(_SIZES))[: len(_SIZES)]), ("16 to 64 tokens", engines)]
    for sizes, asked in cases:
        chooser = _chooser(asked)
        for tokens in _TOKENS:
            for is_known in (False, True):
                one = prompt[:tokens] if is_known else prompt[1 : tokens + 1]
                seconds = []
                for _ in range(rounds):
                    began = time.thread_time()
                    route = chooser.choose("r", one, set())
                    seconds.append(time.thread_time() - began)
                    assert route is not None
                    assert bool(route.begin.cached) == is_known
                samples.append(
                    ChoiceSample(
                        tokens=tokens,
                        is_known=is_known,
                        sizes=sizes,
                        seconds=statistics.median(seconds),
                        longest=_most(seconds),
                    )
                )
    return tuple(samples)


def _delays(rng: random.Random, rounds: int) -> tuple[DelaySample, ...]:
    """A loop beside a thread that decodes batches and takes them in, as a listener does."""
    tokens = [rng.randrange(1 << 17) for _ in range(_RUN * 16 * 50)]
    batches = [
        msgspec.msgpack.encode(one.batch) for one in _chains([tokens], 16, iter(range(99999)))
    ]
    decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def listen(ended: threading.Event, wait_s: float) -> None:
        blocks = CachedBlocks()
        while not ended.is_set():
            for data in batches:
                blocks.apply(ReceivedEvents(0, decoder.decode(data), is_gapless=True))
                ended.wait(wait_s)

    samples = []
    for case, wait_s in (
        ("none", None),
        ("100 per second (100,000 tokens)", 0.01),
        ("one after the other, as in a replay", PAUSE_S),
    ):
        ended = threading.Event()
        thread = threading.Thread(target=listen, args=(ended, wait_s))
        if wait_s is not None:
            thread.start()
        try:
            late = asyncio.run(_lateness(rounds))
        finally:
            ended.set()
            if wait_s is not None:
                thread.join()
        samples.append(DelaySample(case=case, seconds=statistics.median(late), longest=_most(late)))
    return tuple(samples)


@dataclass(slots=True)
class _Turn:
    """A request under way."""

    conversation: int
    prompt: list[int]
    guess: int
    answer: list[int] = field(default_factory=list)
    cached: int | None = None
    """Tokens that its engine had; known with its first token."""


class _Crowd(Closing):
    """Conversations over reference engines that have no room for them, stepped in turn."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.turns: list[_Turn] = []
        self.evicted = 0
        self._rng = rng
        self._histories: list[list[int]] = [[] for _ in range(_CONVERSATIONS)]
        self._under_way: dict[str, _Turn] = {}
        self._engines = [_evicting_engine(folder, size) for size in _EVICTING]
        self._index = PrefixIndex()
        self._places = [self._watched(engine) for engine in self._engines]
        self._index.follow(self._places)

    def _watched(self, engine: Engine) -> KVEventsPlace:
        """Where an engine publishes; what it evicts is counted from now on."""
        events = engine.events
        assert events is not None  # it was opened with them
        publish = events.publish

        def counted(told: Sequence[KVCacheEvent]) -> None:
            self.evicted += sum(len(e.block_hashes) for e in told if isinstance(e, BlockRemoved))
            publish(told)

        events.publish = counted  # type: ignore[method-assign, assignment]
        return KVEventsPlace(endpoint=events.endpoint, replay_endpoint=events.replay_endpoint)

    def run(self, requests: int) -> None:
        """Has so many requests answered."""
        while len(self.turns) < requests or self._under_way:
            while len(self.turns) < requests and len(self._under_way) < _UNDER_WAY:
                self._ask()
            for engine in self._engines:
                for output in engine.step() if engine.has_work() else ():
                    self._take(output)

    def _ask(self) -> None:
        """The next turn of a conversation, at the engine that should have most of it."""
        busy = {turn.conversation for turn in self._under_way.values()}
        conversation = self._rng.choice([n for n in range(_CONVERSATIONS) if n not in busy])
        history = self._histories[conversation]
        if len(history) > _LONGEST:
            history = []
        prompt = [*history, *(self._rng.randrange(_VOCABULARY) for _ in range(_NEW))]
        looked_up = Prompt(prompt)
        guesses = []
        for number, blocks in enumerate(map(self._index.blocks, self._places)):
            held = 0 if blocks is None else min(blocks.held(looked_up), len(prompt) - 1)
            guesses.append((held, self._rng.random(), number))
        guess, _, best = max(guesses)
        name = str(len(self.turns))
        self._under_way[name] = _Turn(conversation, prompt, guess)
        self.turns.append(self._under_way[name])
        self._engines[best].add_request(name, prompt, _SAMPLING)

    def _take(self, output: EngineOutput) -> None:
        assert not output.error, output.error
        turn = self._under_way[output.request_id]
        if turn.cached is None and output.token_ids:
            turn.cached = output.num_cached_tokens
        turn.answer += output.token_ids
        if output.finish_reason is not None:
            self._histories[turn.conversation] = turn.prompt + turn.answer
            del self._under_way[output.request_id]

    def close(self) -> None:
        """Ends engines and listeners."""
        self._index.close()
        for engine in self._engines:
            engine.close()


def _evicting_engine(folder: Path, size: int) -> Engine:
    free = "tcp://127.0.0.1:0"
    config = EngineConfig(
        name=f"blocks of {size}",
        kv_transfer_config={},
        block_size=size,
        num_blocks=_ROOM // size,
        kv_events=KVEventsConfig(endpoint=free, replay_endpoint=free),
    )
    return build_engine(config, folder, dtype=_DTYPE, executor="inprocess", connect=False)


def _evictions(rng: random.Random, requests: int) -> EvictionResults:
    """Guesses about engines that evict, and what came of them."""
    torch.set_num_threads(1)
    folder = prepare_model("tiny")
    with _Crowd(rng, folder) as crowd:
        crowd.run(requests)
    turns = crowd.turns
    config = EngineConfig(name="one", kv_transfer_config={}, num_blocks=8 * _LONGEST)
    with build_engine(
        config,
        folder,
        dtype=_DTYPE,
        executor="inprocess",
        connect=False,
        enable_prefix_caching=False,
    ) as one:
        right = one.generate([turn.prompt for turn in turns], _SAMPLING)
    guesses = [(turn.guess, turn.cached or 0) for turn in turns]
    return EvictionResults(
        requests=len(turns),
        evicted=crowd.evicted,
        told=sum(guess > 0 for guess, _ in guesses),
        wrong=sum(guess > had for guess, had in guesses),
        short=sum(guess < had for guess, had in guesses),
        prompt_tokens=sum(len(turn.prompt) for turn in turns),
        tokens_told=sum(guess for guess, _ in guesses),
        tokens_missed=sum(max(0, guess - had) for guess, had in guesses),
        answer_tokens=sum(len(turn.answer) for turn in turns),
        differing=sum(
            turn.answer != answer.token_ids for turn, answer in zip(turns, right, strict=True)
        ),
    )


async def _lateness(rounds: int) -> list[float]:
    late = []
    for _ in range(rounds):
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - began - 0.001)
    return late


def _most(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) * 99 // 100]
