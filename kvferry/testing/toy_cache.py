"""A KV cache whose content can be read back: the toy model of the simulated engine.

One layer, one KV head, one element. The K cell of a token is the token itself; its V cell is a
hash of all tokens up to it, as a real V depends on the whole prefix. So whether a block table
holds exactly the KV of a token sequence can be decided by looking.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.topology.geometry import EngineGeometry, ParallelShape

ToyCache: TypeAlias = npt.NDArray[np.int64]
"""Shape ``[2, blocks, tokens per block, 1, 1]``: K, then V."""

_MODULUS = (1 << 61) - 1
_FACTOR = 6_364_136_223_846_793_005 % _MODULUS

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


def prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    """For each token, the hash of all tokens up to it.

    >>> prefix_hashes([5, 7])[0] == prefix_hashes([5])[0]
    True
    """
    state, hashes = 1, []
    for token in token_ids:
        state = (state * _FACTOR + token + 1) % _MODULUS
        hashes.append(state)
    return hashes


def next_token(token_ids: Sequence[int], vocab_size: int) -> int:
    """The token that the toy model draws after a sequence."""
    return prefix_hashes(token_ids)[-1] % vocab_size


def reference_tokens(
    prompt: Sequence[int], max_tokens: int, vocab_size: int, stop: Sequence[int] = ()
) -> list[int]:
    """The toy model's answer, without any cache."""
    sequence = list(prompt)
    for _ in range(max_tokens):
        sequence.append(next_token(sequence, vocab_size))
        if sequence[-1] in stop:
            break
    return sequence[len(prompt) :]


def write_tokens(
    cache: ToyCache, block_ids: Sequence[int], token_ids: Sequence[int], first: int, end: int
) -> None:
    """Writes the cells of the tokens ``[first, end)`` of a sequence, as if it had computed them.

    Args:
        cache: the cells.
        block_ids: the block table, token 0 first.
        token_ids: the sequence, of ``end`` tokens at least.
        first: position of the first token to write.
        end: position after the last one.
    """
    blocks, slots = _addresses(cache, block_ids, first, end)
    cache[0, blocks, slots, 0, 0] = token_ids[first:end]
    cache[1, blocks, slots, 0, 0] = prefix_hashes(token_ids[:end])[first:]


def spoil_tokens(cache: ToyCache, block_ids: Sequence[int], first: int, end: int) -> None:
    """Writes nonsense into the cells of the tokens ``[first, end)``."""
    blocks, slots = _addresses(cache, block_ids, first, end)
    cache[:, blocks, slots] = UNWRITTEN


def read_tokens(cache: ToyCache, block_ids: Sequence[int], num_tokens: int) -> list[int] | None:
    """The first ``num_tokens`` tokens of a block table; ``None`` if they are not one sequence."""
    blocks, slots = _addresses(cache, block_ids, 0, num_tokens)
    token_ids = cache[0, blocks, slots, 0, 0].tolist()
    if cache[1, blocks, slots, 0, 0].tolist() != prefix_hashes(token_ids):
        return None
    return [int(token) for token in token_ids]


def _addresses(
    cache: ToyCache, block_ids: Sequence[int], first: int, end: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    block_size = cache.shape[2]
    positions = np.arange(first, end)
    return np.asarray(block_ids, dtype=np.int64)[positions // block_size], positions % block_size
