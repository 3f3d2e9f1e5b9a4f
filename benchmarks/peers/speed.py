"""Timed operations of a manager that is busy: a thousand live requests, a cache that is full."""

import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from benchmarks.peers.peer import CachePeer
from benchmarks.peers.setups import Group, Setup

OPERATIONS = ("admit", "grow", "free", "lookup")
"""What is timed: see :meth:`Busy.round`."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager has to do."""

    live: int = 1000
    """Requests that hold blocks throughout."""
    batch: int = 200
    """Further ones, admitted and freed in every round."""
    shortest: int = 256
    """Tokens of a prompt."""
    longest: int = 1536
    hit_tokens: int = 32 * 1024
    """Tokens of the prompt that is looked up; a live request holds its blocks."""
    lookups: int = 20
    """In every round."""
    steps: int = 16
    """Tokens by which every live request grows in a round: one block."""

    @property
    def mean(self) -> int:
        """Tokens of a prompt."""
        return (self.shortest + self.longest) // 2


def make_setup(groups: Sequence[Group], load: Load, rounds: int) -> Setup:
    """A pool that has room for what is live and for some batches."""
    tokens = load.live * (load.mean + load.steps * (rounds + 2)) + load.hit_tokens
    tokens += 3 * load.batch * load.longest
    return Setup(
        groups=tuple(groups),
        num_blocks=sum(tokens // group.block_size for group in groups),
        max_model_len=load.hit_tokens + load.longest,
    )


class Busy:
    """A manager with live requests."""

    def __init__(self, peer: CachePeer, load: Load) -> None:
        self._peer = peer
        self._load = load
        self._random = random.Random(0)
        self._num_requests = 0
        prompt = self._tokens(load.hit_tokens)
        self._admit([self._request(prompt)])
        # One token more, because the last one is never looked up.
        self._asked = self._request([*prompt, 1])
        self._live = self._requests(load.live)
        self._admit(self._live)
        self._grow()  # windows give back what the prompts' tokens needed
        self._fill()

    def round(self) -> dict[str, float]:
        """Seconds of one operation, each the mean over the round.

        - ``admit``: look up a prompt that is not cached, and allocate all its blocks
        - ``grow``: allocate for one token of a live request
        - ``free``: give a request's blocks back
        - ``lookup``: find that all blocks of a long prompt are cached
        """
        # The garbage collector's work depends on what else the process has imported.
        gc.collect()
        gc.disable()
        try:
            return self._round()
        finally:
            gc.enable()

    def _round(self) -> dict[str, float]:
        load = self._load
        batch = self._requests(load.batch)
        free, lookup = self._peer.manager.free, self._peer.manager.get_computed_blocks
        admit_s = _timed(lambda: self._admit(batch))
        free_s = _timed(lambda: _for_each(free, batch))
        grow_s = sum(self._grow() for _ in range(load.steps))
        lookup_s = _timed(lambda: _for_each(lookup, [self._asked] * load.lookups))
        return {
            "admit": admit_s / load.batch,
            "grow": grow_s / load.steps / load.live,
            "free": free_s / load.batch,
            "lookup": lookup_s / load.lookups,
        }

    def _fill(self) -> None:
        """Until every block was used: from then on new blocks are taken from the prefix cache."""
        to_use = self._peer.num_free_blocks()
        while to_use > 0:
            batch = self._requests(self._load.batch)
            before = self._peer.num_free_blocks()
            self._admit(batch)
            to_use -= before - self._peer.num_free_blocks()
            _for_each(self._peer.manager.free, batch)

    def _grow(self) -> float:
        for request in self._live:
            request.append_output_token_ids(self._random.randrange(32000))
            request.num_computed_tokens = request.num_tokens - 1
        allocate = self._peer.manager.allocate_slots

        def grow_all() -> None:
            for request in self._live:
                allocate(request, 1)

        return _timed(grow_all)

    def _admit(self, requests: Sequence[Any]) -> None:
        manager = self._peer.manager
        lookup, allocate = manager.get_computed_blocks, manager.allocate_slots
        for request in requests:
            found = lookup(request)  # vLLM answers with a third item
            blocks, num_tokens = found[0], found[1]
            new = allocate(request, request.num_tokens - num_tokens, num_tokens, blocks)
            assert new is not None

    def _requests(self, count: int) -> list[Any]:
        sizes = (
            self._random.randint(self._load.shortest, self._load.longest) for _ in range(count)
        )
        return [self._request(self._tokens(size)) for size in sizes]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(32000) for _ in range(count)]

    def _request(self, token_ids: list[int]) -> Any:
        self._num_requests += 1
        return self._peer.request(f"request-{self._num_requests}", token_ids)


def _for_each(do: Callable[[Any], Any], items: Sequence[Any]) -> None:
    for item in items:
        do(item)


def _timed(do: Callable[[], None]) -> float:
    """Seconds of the processor: what else runs on the machine does not count."""
    began = time.process_time()
    do()
    return time.process_time() - began


def bytes_per_block(make: Callable[[Setup], CachePeer], block_size: int = 16) -> dict[str, float]:
    """Bytes of the process per block of a pool: of an ``unused`` one, and of a ``cached`` one."""
    num_blocks = 20_000
    tokens = 1000
    setup = Setup(
        groups=(Group(kind="full", block_size=block_size),),
        num_blocks=num_blocks + 1,
        max_model_len=tokens,
    )
    make(setup)  # what a first manager leaves behind, for example imports
    gc.collect()
    tracemalloc.start()
    try:
        before = _traced()
        peer = make(setup)
        unused = _traced() - before
        for index in range(-(-num_blocks * block_size // tokens) + 1):
            request = peer.request(f"request-{index}", [index] * tokens)
            assert peer.manager.allocate_slots(request, tokens) is not None
            peer.free(request)
        del request
        cached = _traced() - before
    finally:
        tracemalloc.stop()
    return {"unused": unused / num_blocks, "cached": cached / num_blocks}


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
