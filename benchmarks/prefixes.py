"""The router's prefix index: memory of a million blocks, and how often it is wrong about engines
that evict all the time.
"""

import gc
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.undivided import undivided
from kvferry.cache.events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from kvferry.config.cluster import KVEventsConfig
from kvferry.control.cache_events import ReceivedEvents
from kvferry.engine.engine import Engine
from kvferry.engine.messages import EngineOutput, SamplingParams
from kvferry.engine.weights import prepare_model
from kvferry.lifetimes import Closing
from kvferry.router.prefixes import CachedBlocks, PrefixIndex, Prompt
from kvferry.serving.messages import KVEventsPlace

_BLOCKS = 1_000_000
_SIZES = (16, 16, 32, 64, 16, 24, 32, 64)
"""Tokens per block of the engines."""
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


class PrefixResults(report.Results, frozen=True, kw_only=True):
    """All that one run measured."""

    blocks: int
    nbytes: int
    """By which the process grew."""
    block_seconds: float
    """To take one block in, its events decoded already."""
    evictions: EvictionResults


def measure(run: report.Run) -> PrefixResults:
    """Fills an index in this process, and asks it."""
    rng = random.Random(0)
    blocks = 8_000 if run.quick else _BLOCKS
    engines = [CachedBlocks() for _ in _SIZES]
    gc.collect()
    before, seconds = _resident(), 0.0
    run.say(f"prefix index: {len(engines)} engines")
    for engine, size in zip(engines, _SIZES, strict=True):
        names = iter(range(1, 1 << 40))
        for _ in range(blocks // len(_SIZES) // _RUN):
            event = _stored([rng.randrange(1 << 17) for _ in range(_RUN * size)], size, names)
            began = time.thread_time()
            engine.apply(event)
            seconds += time.thread_time() - began
    known = sum(map(len, engines))
    gc.collect()
    nbytes = _resident() - before
    run.say("prefix index: engines that evict")
    return run.results(
        PrefixResults,
        blocks=known,
        nbytes=nbytes,
        block_seconds=seconds / known,
        evictions=_evictions(rng, 12 if run.quick else 20 * run.rounds),
    )


def page(results: PrefixResults) -> str:
    """The page for people."""
    return report.page("The router's prefix index", results, "One thread.", _lines(results))


def _lines(results: PrefixResults) -> Iterator[str]:
    yield (
        f"{results.blocks:,} blocks of {len(_SIZES)} engines take {results.nbytes / 1e6:.0f} MB "
        f"({results.nbytes / results.blocks:.0f} bytes each); one takes "
        f"{results.block_seconds * 1e6:.1f} µs to take in."
    )
    yield ""
    found = results.evictions
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
    yield from report.table(
        [
            ("", ""),
            ("requests", f"{found.requests:,}"),
            ("blocks evicted meanwhile", f"{found.evicted:,}"),
            ("guesses that an engine has something", f"{found.told:,}"),
            ("of these, told more than there was", _share(found.wrong, found.told)),
            ("guesses that told less than there was", _share(found.short, found.requests)),
            (f"tokens told, of {found.prompt_tokens:,} in prompts", f"{found.tokens_told:,}"),
            (
                "of these, missed, and computed instead",
                _share(found.tokens_missed, found.tokens_told),
            ),
            ("tokens answered", f"{found.answer_tokens:,}"),
            ("answers that differ", f"{found.differing}"),
        ]
    )


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"


def _resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _stored(tokens: list[int], size: int, names: Iterator[int]) -> ReceivedEvents:
    """The event of a prompt that becomes cached; hashes have 64 bits, as engines send them."""
    hashes = [next(names) * 0x9E3779B97F4A7C15 % (1 << 64) for _ in range(len(tokens) // size)]
    event = BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=tokens,
        block_size=size,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
    )
    return ReceivedEvents(0, KVEventBatch(ts=0.0, events=[event]), is_gapless=True)


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
    events = KVEventsConfig(endpoint=free, replay_endpoint=free)
    return undivided(folder, _DTYPE, block_size=size, num_blocks=_ROOM // size, kv_events=events)


def _evictions(rng: random.Random, requests: int) -> EvictionResults:
    """Guesses about engines that evict, and what came of them."""
    folder = prepare_model("tiny")
    with _Crowd(rng, folder) as crowd:
        crowd.run(requests)
    turns = crowd.turns
    with undivided(folder, _DTYPE, keeps_prefixes=False, num_blocks=8 * _LONGEST) as one:
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
