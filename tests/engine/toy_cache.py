"""A KV cache whose content can be read back: the toy model of the simulated executor.

One layer per KV cache group, one KV head, one element. The K cell of a token is the token itself;
its V cell is a hash of all tokens up to it, as a real V depends on the whole prefix. So whether a
block table holds exactly the KV of a token sequence can be decided by looking; that of a table
which keeps a window only, by chaining the hashes from its first token on.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.testing.known_cache import NO_TOKENS, prefix_states
from kvferry.topology import EngineGeometry, ParallelShape

ToyCache: TypeAlias = npt.NDArray[np.int64]
"""Shape ``[2, blocks, tokens per block, 1, 1]``: K, then V."""

UNWRITTEN = -1
"""What the cells of a block hold that somebody spoilt."""


def toy_geometry(block_size: int, world_size: int = 1) -> EngineGeometry:
    """The geometry of the toy model; with several ranks, each holds the one head."""
    return EngineGeometry(
        num_layers=1,
        num_kv_heads=1,
        head_size=1,
        dtype="int64",
        block_size=block_size,
        layout="NHD",
        parallel=ParallelShape(tp=world_size),
    )


def toy_groups(
    block_size: int, world_size: int = 1, windows: Sequence[int | None] = (None, 8)
) -> tuple[EngineGeometry, ...]:
    """The geometries of the toy model with one layer, and one KV cache group, per window.

    Args:
        block_size: tokens per block.
        world_size: ranks; each holds the one head.
        windows: for each layer, the tokens that it sees and keeps; ``None`` for all.
    """
    return tuple(
        replace(toy_geometry(block_size, world_size), layer_indices=(layer,), sliding_window=window)
        for layer, window in enumerate(windows)
    )


def state_of(token_ids: Sequence[int]) -> int:
    """The hash of a sequence."""
    return prefix_states(token_ids)[-1] if token_ids else NO_TOKENS


def reference_tokens(
    prompt: Sequence[int], max_tokens: int, vocab_size: int, stop: Sequence[int] = ()
) -> list[int]:
    """The toy model's answer, without any cache: each token is drawn from the hash so far."""
    answer: list[int] = []
    state = state_of(prompt)
    for _ in range(max_tokens):
        answer.append(state % vocab_size)
        if answer[-1] in stop:
            break
        state = prefix_states(answer[-1:], state)[0]
    return answer


def write_tokens(
    cache: ToyCache, block_ids: Sequence[int], token_ids: Sequence[int], first: int, end: int
) -> None:
    """Writes the cells of the tokens ``[first, end)`` of a sequence, as if it had computed them."""
    append_tokens(cache, block_ids, token_ids[first:end], first, state_of(token_ids[:first]))


def append_tokens(
    cache: ToyCache, block_ids: Sequence[int], token_ids: Sequence[int], first: int, state: int
) -> int:
    """Writes the cells of new tokens, as if they had been computed.

    Args:
        cache: the cells.
        block_ids: the block table, token 0 first; nothing is written where it has the null block.
        token_ids: the new tokens, not the whole sequence.
        first: position of the first of them.
        state: the hash of the ``first`` tokens before, :attr:`Window.state`.

    Returns:
        The hash of all tokens now.
    """
    hashes = prefix_states(token_ids, state)
    _write(cache, block_ids, token_ids, hashes, first)
    return hashes[-1] if hashes else state


def spoil_tokens(cache: ToyCache, block_ids: Sequence[int], first: int, end: int) -> None:
    """Writes nonsense into the cells of the tokens ``[first, end)``, null blocks left out."""
    unknown = [UNWRITTEN] * (end - first)
    _write(cache, block_ids, unknown, unknown, first)


class Window(NamedTuple):
    """The last tokens of a sequence, as a cache holds them."""

    token_ids: tuple[int, ...]
    hashes: tuple[int, ...]
    """For each, the hash of all tokens of the sequence up to it."""

    @property
    def state(self) -> int:
        """The hash of the whole sequence."""
        return self.hashes[-1] if self.hashes else NO_TOKENS


def read_window(
    cache: ToyCache, block_ids: Sequence[int], first: int, num_tokens: int
) -> Window | None:
    """The tokens ``[first, num_tokens)`` of a block table.

    The hash of the first of them is believed unless it is token 0; the others must follow from
    it. So cells of another sequence, or stale ones, or those of the null block show.

    Returns:
        ``None`` if they are not the consecutive tokens of one sequence.
    """
    blocks, slots = _addresses(cache, block_ids, first, num_tokens)
    if (blocks == 0).any():
        return None
    token_ids = cache[0, blocks, slots, 0, 0].tolist()
    hashes = cache[1, blocks, slots, 0, 0].tolist()
    known = 0 if first == 0 else 1
    before = NO_TOKENS if first == 0 or not hashes else hashes[0]
    if hashes[known:] != prefix_states(token_ids[known:], before):
        return None
    return Window(tuple(token_ids), tuple(hashes))


def read_groups(
    caches: Sequence[ToyCache],
    block_ids: Sequence[Sequence[int]],
    firsts: Sequence[int],
    num_tokens: int,
) -> Window | None:
    """What several KV cache groups hold of one sequence.

    Args:
        caches: one per group.
        block_ids: one block table per group.
        firsts: for each group, the first token that it must still hold.
        num_tokens: tokens of the sequence.

    Returns:
        What the group that holds most has; ``None`` if any group's cells are wrong, or those of
        two groups contradict each other.
    """
    windows = [
        read_window(cache, ids, first, num_tokens)
        for cache, ids, first in zip(caches, block_ids, firsts, strict=True)
    ]
    longest = max(windows, key=lambda window: len(window.token_ids) if window else 0)
    for window in windows:
        if window is None or longest is None:
            return None
        cut = len(longest.token_ids) - len(window.token_ids)
        if window != Window(longest.token_ids[cut:], longest.hashes[cut:]):
            return None
    return longest


def _write(
    cache: ToyCache,
    block_ids: Sequence[int],
    token_ids: Sequence[int],
    hashes: Sequence[int],
    first: int,
) -> None:
    blocks, slots = _addresses(cache, block_ids, first, first + len(token_ids))
    kept = blocks != 0
    cache[0, blocks[kept], slots[kept], 0, 0] = np.asarray(token_ids, dtype=np.int64)[kept]
    cache[1, blocks[kept], slots[kept], 0, 0] = np.asarray(hashes, dtype=np.int64)[kept]


def _addresses(
    cache: ToyCache, block_ids: Sequence[int], first: int, end: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    block_size = cache.shape[2]
    positions = np.arange(first, end)
    return np.asarray(block_ids, dtype=np.int64)[positions // block_size], positions % block_size
