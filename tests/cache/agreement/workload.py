"""A seeded scheduler in miniature, which drives a manager.

Every decision follows from the seed and from the manager's answers, so two managers that answer
alike see the same operations, and the first operation whose records differ is where they part.
"""

import random
from typing import Any

import msgspec

from benchmarks.peers.peer import Allocation, CachePeer
from tests.cache.agreement.trace import Record, Recorder

_NUM_TOKEN_IDS = 1000


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to a manager."""

    seed: int
    steps: int = 250
    """Of the engine; in most of them every request that runs has a turn."""
    longest_prompt: int = 100
    """Tokens."""
    most_live: int = 12
    """Requests that hold blocks at once, at most."""
    step_tokens: int = 40
    """Tokens of one request that a step computes, at most."""
    num_drafts: int = 0
    """Drafts of a speculative step, at most; as many tokens are looked ahead."""
    must_fit_share: float = 0.0
    """Share of the admissions that ask whether the whole sequence fits."""
    load_share: float = 0.0
    """Share of the admissions in which something outside fills a part."""
    load_multiple: int = 1
    """A load ends at a multiple of this many tokens, plus ``load_offset``."""
    load_offset: int = 0


class _Live(msgspec.Struct, eq=False):
    """A request that was made and has not ended."""

    request: Any
    answer_tokens: int
    """Still to be produced."""
    loaded: int = 0
    """Tokens that are in the cache once the load under way has ended; 0 without one."""
    local: int = 0
    """Of these, tokens of the local hit."""


def run(peer: CachePeer, workload: Workload) -> list[Record]:
    """Does the workload to a new manager; the trace."""
    return _Run(peer, workload).run()


class _Run:
    def __init__(self, peer: CachePeer, workload: Workload) -> None:
        self._peer = peer
        self._workload = workload
        self._random = random.Random(workload.seed)
        # Prompts begin alike, so that there are hits of all lengths.
        self._documents = [self._tokens(workload.longest_prompt) for _ in range(4)]
        self._waiting: list[_Live] = []
        self._running: list[_Live] = []
        self._num_made = 0
        self._trace = Recorder(peer)

    def run(self) -> list[Record]:
        for _ in range(self._workload.steps):
            chance = self._random.random()
            has_place = len(self._running) < self._workload.most_live
            if not self._running or (chance < 0.25 and has_place):
                self._admit(self._waiting.pop(0) if self._waiting else self._make())
            elif chance < 0.95:
                self._step()
            elif chance < 0.994:
                self._end(self._random.choice(self._running), "abort")
            else:
                self._reset()
        return self._trace.records

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(_NUM_TOKEN_IDS) for _ in range(count)]

    def _make(self) -> _Live:
        """A new request: the beginning of a document, mostly with an ending of its own."""
        size = self._random.randint(1, self._workload.longest_prompt)
        tokens = self._random.choice(self._documents)[:size]
        if self._random.random() < 0.6:
            own = self._random.randint(1, min(size, 24))
            tokens = tokens[:-own] + self._tokens(own)
        request = self._peer.request(f"request-{self._num_made}", tokens)
        self._num_made += 1
        room = self._peer.setup.max_model_len - size - self._workload.num_drafts - 1
        return _Live(request, self._random.randint(0, max(0, min(60, room))))

    def _admit(self, live: _Live) -> None:
        request = live.request
        self._peer.new_step()
        hit = self._peer.lookup(request)
        external = self._external_tokens(request.num_tokens, hit.num_tokens)
        missing = request.num_tokens - hit.num_tokens
        asked = Allocation(
            0 if external else min(missing, self._random.randint(1, self._workload.step_tokens)),
            num_lookahead_tokens=0 if external else self._workload.num_drafts,
            num_external_tokens=external,
            reserved_blocks=self._random.choice((0, 0, 0, 3)),
            must_fit=self._random.random() < self._workload.must_fit_share,
        )
        new = self._peer.allocate(request, asked, hit)
        self._trace.add("admit", request, hit=hit, asked=asked, new=new)
        if new is None:
            self._waiting.append(live)
            return
        self._running.append(live)
        if external:
            live.loaded, live.local = hit.num_tokens + external, hit.num_tokens
        else:
            request.num_computed_tokens = hit.num_tokens + asked.num_new_tokens

    def _external_tokens(self, num_tokens: int, num_hit: int) -> int:
        """Tokens that a load fills, of all but the last one; 0 for no load."""
        if self._random.random() >= self._workload.load_share:
            return 0
        most = self._random.randint(0, num_tokens - 1) - self._workload.load_offset
        multiple = self._workload.load_multiple
        return max(0, most // multiple * multiple + self._workload.load_offset - num_hit)

    def _step(self) -> None:
        """One step of the engine: nearly every request that runs has a turn."""
        for live in self._running.copy():
            if live not in self._running or self._random.random() < 0.2:
                continue  # preempted by one before it, or left out
            if live.loaded:
                self._end_load(live)
            elif live.request.num_computed_tokens < live.request.num_tokens - 1:
                self._prefill(live)
            elif live.answer_tokens:
                self._decode(live)
            else:
                self._end(live, "finish")

    def _end_load(self, live: _Live) -> None:
        """All of a load arrived, or a part of it, or nothing."""
        arrived = live.loaded
        if self._random.random() < 0.3:
            arrived = self._random.randint(live.local, live.loaded)
        if arrived < live.loaded and self._peer.setup.has_windows:
            # Only the window of the whole load was to be filled, so what arrived is of no use.
            self._requeue(live, "load failed")
            return
        live.request.num_computed_tokens = arrived
        live.loaded = 0
        self._peer.cache(live.request, arrived)
        self._trace.add(f"loaded {arrived}", live.request)

    def _prefill(self, live: _Live) -> None:
        request = live.request
        missing = request.num_tokens - request.num_computed_tokens
        asked = Allocation(
            min(missing, self._random.randint(1, self._workload.step_tokens)),
            num_lookahead_tokens=self._workload.num_drafts,
        )
        if self._grow("prefill", live, asked):
            request.num_computed_tokens += asked.num_new_tokens

    def _decode(self, live: _Live) -> None:
        """Drafts are computed with the last token; a part of them is accepted."""
        request = live.request
        max_model_len = self._peer.setup.max_model_len
        if request.num_computed_tokens == request.num_tokens:
            # The step before computed the last token of the prompt and so produced the next.
            request.append_output_token_ids(self._tokens(1))
        drafts = self._random.randint(0, self._workload.num_drafts)
        drafts = min(drafts, max_model_len - request.num_tokens)
        asked = Allocation(1 + drafts, num_lookahead_tokens=self._workload.num_drafts)
        if not self._grow("decode", live, asked):
            return
        accepted = self._random.randint(0, drafts)
        request.num_computed_tokens += 1 + accepted
        live.answer_tokens = max(0, live.answer_tokens - 1 - accepted)
        room = max_model_len - request.num_tokens
        request.append_output_token_ids(self._tokens(1 + accepted)[:room])
        if not live.answer_tokens or room <= 1 + accepted:
            self._end(live, "finish")

    def _grow(self, op: str, live: _Live, asked: Allocation) -> bool:
        """Allocates for a running request; preempts the youngest until it fits."""
        while True:
            new = self._peer.allocate(live.request, asked)
            self._trace.add(op, live.request, asked=asked, new=new)
            if new is not None:
                return True
            victim = self._running[-1]
            self._requeue(victim, "preempt")
            if victim is live:
                return False

    def _requeue(self, live: _Live, op: str) -> None:
        self._end(live, op)
        live.request.num_computed_tokens = 0
        live.loaded = 0
        self._waiting.append(live)

    def _end(self, live: _Live, op: str) -> None:
        self._peer.free(live.request)
        self._running.remove(live)
        self._trace.add(op, live.request)

    def _reset(self) -> None:
        """Half of the times while nothing is held, so that it works."""
        if self._random.random() < 0.5:
            for live in self._running.copy():
                self._end(live, "abort")
        self._trace.add(f"reset {self._peer.reset()}")
