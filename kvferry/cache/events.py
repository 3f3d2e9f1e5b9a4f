"""KV cache events: what becomes a hit and what stops being one, for routers and indexes outside.

They are those of vLLM, whose consumers parse them: the field names, which of them are always sent,
and the MessagePack form (a batch is an array, an event a map whose ``type`` is the class name; so
since vLLM pull request 42892). Whoever applies all events in order, to one set of hashes per group,
holds exactly the hashes that this engine's requests may hit: a hash is announced when its first
block is cached and withdrawn with its last one.

The counters of the prefix cache stand here too.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import msgspec

from kvferry.cache.request import CacheRequest


class PrefixCacheStats(msgspec.Struct):
    """What the prefix cache was asked and could answer, over some span of time."""

    requests: int = 0
    """Lookups."""
    queries: int = 0
    """Tokens looked up."""
    hits: int = 0
    """Tokens found."""
    reset: bool = False
    """Whether the cache was reset in that time."""

    @property
    def hit_rate(self) -> float:
        """Tokens found per token looked up; 0 when there was no lookup."""
        return self.hits / self.queries if self.queries else 0.0

    def record(self, *, queries: int, hits: int) -> None:
        """Counts one lookup."""
        self.requests += 1
        self.queries += queries
        self.hits += hits


BlockHash: TypeAlias = bytes | int
"""A block hash, whole; or its last 8 bytes as a big-endian integer, see :func:`with_short_hashes`.
"""

MEDIUM = "GPU"
"""Consumers know the memory that an engine computes in by this name, whatever the device."""


class BlockStored(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False
):
    """Neighbouring blocks of one request have become hits."""

    block_hashes: list[BlockHash]
    """One per block, in token order."""
    parent_block_hash: BlockHash | None
    """Hash of the block before the first one; ``None`` for the beginning of a request."""
    token_ids: list[int]
    """``block_size`` tokens per block."""
    block_size: int
    """Tokens per block."""
    lora_id: int | None
    """Never known here; ``lora_name`` says it."""
    medium: str | None
    """Where the blocks lie."""
    lora_name: str | None
    """LoRA adapter that they were computed with."""
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """What went into each block's hash beside tokens, see ``Request.extra_keys``; ``None`` if
    nothing did."""
    group_idx: int | None = None
    """KV cache group; hashes of different groups have nothing to do with one another."""


class BlockRemoved(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False
):
    """Blocks have stopped being hits."""

    block_hashes: list[BlockHash]
    """In the order in which they were given up."""
    medium: str | None
    """Where the blocks lay."""
    group_idx: int | None = None
    """KV cache group."""


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No block of any group is a hit any more."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The events of one engine step."""

    ts: float
    """Unix seconds at which the batch was made."""
    events: list[KVCacheEvent]
    """In order."""
    data_parallel_rank: int | None = None
    """Which of an engine's schedulers made it."""


def stored_events(
    request: CacheRequest,
    block_hashes: Sequence[bytes],
    indices: Iterable[int],
    hash_stride: int,
    group_id: int,
) -> Iterator[BlockStored]:
    """What is told when blocks of a request's table become hits: one event per unbroken run.

    Args:
        request: hashed already.
        block_hashes: the request's, as for ``BlockPool.cache_full_blocks``.
        indices: places in the table, ascending.
        hash_stride: hashes per block.
        group_id: KV cache group of the table.
    """
    assert request.hash_block_size is not None
    size = hash_stride * request.hash_block_size
    for _, run in groupby(enumerate(indices), lambda place: place[1] - place[0]):
        places = [index for _, index in run]
        first, last = places[0], places[-1] + 1
        extra_keys = [request.extra_keys(i * size, (i + 1) * size) for i in places]
        yield BlockStored(
            block_hashes=[block_hashes[(i + 1) * hash_stride - 1] for i in places],
            parent_block_hash=block_hashes[first * hash_stride - 1] if first else None,
            token_ids=list(request.all_token_ids[first * size : last * size]),
            block_size=size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=request.lora_name,
            extra_keys=extra_keys if any(extra_keys) else None,
            group_idx=group_id,
        )


def with_short_hashes(event: KVCacheEvent) -> KVCacheEvent:
    """The event with its hashes as integers of 64 bits, which every consumer reads.

    >>> removed = BlockRemoved(block_hashes=[bytes(31) + bytes([7])], medium=MEDIUM)
    >>> with_short_hashes(removed).block_hashes
    [7]
    """
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        return msgspec.structs.replace(
            event,
            block_hashes=[_short(block_hash) for block_hash in event.block_hashes],
            parent_block_hash=None if parent is None else _short(parent),
        )
    if isinstance(event, BlockRemoved):
        return msgspec.structs.replace(
            event, block_hashes=[_short(block_hash) for block_hash in event.block_hashes]
        )
    return event


def _short(block_hash: BlockHash) -> int:
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
