"""What the contenders of the benchmark of short loads share: the cache, its bytes, the pauses.

Imported by processes that measure another checkout: nothing here imports kvferry.
"""

import ctypes
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 16
"""Tokens per block."""
NUM_BLOCKS = 96
"""Blocks of a cache; block 0 is the null block."""
LOOK_S = 30e-6
"""Seconds that an idle rank sleeps between two looks."""
ITEM_BYTES = 2

_PR_SET_TIMERSLACK = 29
_FINEST_NS, _DEFAULT_NS = 1, 0

Loads: TypeAlias = "list[tuple[float, float, float]]"
"""Per load: seconds from the call to the result, until the call returned, until the bytes were
known to be in place."""
Lent: TypeAlias = "tuple[str, dict[str, Any], list[int]]"
"""A request id, the params of its response, and the blocks that are lent."""


class WrongBytesError(Exception):
    """A load ended well and left other bytes than the source holds."""


@dataclass(frozen=True)
class Cache:
    """A KV cache: per layer K, then V, each ``[block, token, head, element]``."""

    layers: int
    heads: int
    head_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in K or V of one layer."""
        return self.heads * self.head_size * ITEM_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of K or V of one layer."""
        return BLOCK_SIZE * self.token_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.layers * 2 * NUM_BLOCKS * self.block_bytes

    def load_bytes(self, tokens: int) -> int:
        """Bytes that a load of so many tokens moves."""
        return self.layers * 2 * tokens * self.token_bytes


def draw_table(shuffle: random.Random, tokens: int) -> list[int]:
    """Blocks for so many tokens, in no order."""
    return shuffle.sample(range(1, NUM_BLOCKS), -(-tokens // BLOCK_SIZE))


class KnownBlocks:
    """A cache's memory, and what each of the source's blocks holds.

    Every block holds a window of one long row of random words, each window begins one word further:
    so all blocks differ, and every process knows all of them without a copy of the cache.
    """

    def __init__(self, cache: Cache, memory: npt.NDArray[np.uint8]) -> None:
        self._rows = cache.layers * 2
        self._token_words = cache.token_bytes // 8
        self._block_words = cache.block_bytes // 8
        self._words = memory.view(np.uint64).reshape(self._rows, NUM_BLOCKS, self._block_words)
        self._random = np.random.default_rng(1).integers(
            1, 2**64, self._block_words + self._rows * NUM_BLOCKS, dtype=np.uint64
        )

    def fill(self) -> None:
        """Makes this the source's cache."""
        for row, block in itertools.product(range(self._rows), range(NUM_BLOCKS)):
            self._words[row, block] = self._known(row, block, self._block_words)

    def check(self, source: Sequence[int], target: Sequence[int], tokens: int) -> None:
        """Compares every byte that was loaded, and clears the blocks for the next load.

        Raises:
            WrongBytesError: one differs.
        """
        for row in range(self._rows):
            for number, (theirs, ours) in enumerate(zip(source, target, strict=False)):
                words = self._token_words * min(BLOCK_SIZE, tokens - number * BLOCK_SIZE)
                if not np.array_equal(
                    self._words[row, ours, :words], self._known(row, theirs, words)
                ):
                    raise WrongBytesError(
                        f"{'KV'[row % 2]} of layer {row // 2}, block {number} of {tokens} tokens"
                    )
        self._words[:, list(target)] = 0

    def _known(self, row: int, block: int, words: int) -> npt.NDArray[np.uint64]:
        first = row * NUM_BLOCKS + block
        return self._random[first : first + words]


def python_work(rounds: int) -> int:
    """Plain Python as in an engine's step: names are made, looked up and kept with small tuples."""
    table: dict[str, tuple[int, int]] = {}
    for number in range(rounds):
        name = f"request-{number & 63}"
        before = table.get(name, (0, 0))
        table[name] = (before[0] + 1, number)
    return len(table)


def rounds_of(seconds: float) -> int:
    """Rounds of :func:`python_work` that take so long where nothing disturbs them."""
    rounds = 1000
    best = min(_seconds_of(lambda: python_work(rounds)) for _ in range(100))
    return max(1, round(rounds * seconds / best))


def _seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def pausing(work_rounds: int) -> Iterator[Callable[[], object]]:
    """What the main thread does between two looks: works, or for 0 rounds sleeps.

    The garbage collector is off meanwhile, and the kernel wakes this thread, and no other, without
    the 50 microseconds by which it may be late.
    """
    libc = ctypes.CDLL(None)
    gc.collect()
    gc.disable()
    libc.prctl(_PR_SET_TIMERSLACK, _FINEST_NS)
    try:
        if work_rounds:
            python_work(work_rounds)
            yield lambda: python_work(work_rounds)
        else:
            yield lambda: time.sleep(LOOK_S)
    finally:
        libc.prctl(_PR_SET_TIMERSLACK, _DEFAULT_NS)
        gc.enable()
