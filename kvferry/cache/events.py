"""KV cache events: blocks that become hits or stop being hits, for outside routers and indexes.

The events are vLLM's events, because vLLM's consumers parse them. The field names, the fields that
are always sent and the MessagePack form are the same: a batch is an array, an event is a map whose
``type`` is the class name (since vLLM pull request 42892). A consumer that applies all events in
order, to a set of hashes per group, holds exactly the hashes that this engine's requests may hit. A
hash is announced when its first block is cached, and withdrawn with its last block.

The counters of the prefix cache are also in this module.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import msgspec

from kvferry.cache.request import CacheRequest


class PrefixCacheStats(msgspec.Struct):
    """Requests to the prefix cache and hits, over a span of time."""

    requests: int = 0
    """Number of lookups."""
    queries: int = 0
    """Number of tokens looked up."""
    hits: int = 0
    """Number of tokens found."""
    reset: bool = False
    """Whether the cache was reset in this time."""

    @property
    def hit_rate(self) -> float:
        """Number of tokens found per token looked up; 0 if there was no lookup."""
        return self.hits / self.queries if self.queries else 0.0

    def record(self, *, queries: int, hits: int) -> None:
        """Counts a lookup."""
        self.requests += 1
        self.queries += queries
        self.hits += hits


BlockHash: TypeAlias = bytes | int
"""A whole block hash, or its last 8 bytes as a big-endian integer, see :func:`with_short_hashes`.
"""

MEDIUM = "GPU"
"""Name under which consumers know the memory of an engine's device, whatever the device is."""


class BlockStored(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False
):
    """Neighbouring blocks of a request have become hits."""

    block_hashes: list[BlockHash]
    """Block hashes, one per block, in token order."""
    parent_block_hash: BlockHash | None
    """Hash of the block before the first block; ``None`` at the beginning of a request."""
    token_ids: list[int]
    """Token ids, ``block_size`` tokens per block."""
    block_size: int
    """Number of tokens per block."""
    lora_id: int | None
    """Id of the LoRA adapter, which is never known here; see ``lora_name``."""
    medium: str | None
    """Memory in which the blocks lie."""
    lora_name: str | None
    """Name of the LoRA adapter with which the blocks were computed."""
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """Further content in each block's hash besides tokens, see ``Request.extra_keys``; ``None`` if
    there is none."""
    group_idx: int | None = None
    """Index of the KV cache group; hashes of different groups are unrelated."""
    kv_cache_spec_kind: str | None = None
    """vLLM's name for the kind of the group, such as ``mamba``; never sent by this package."""


class BlockRemoved(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False
):
    """Blocks have stopped being hits."""

    block_hashes: list[BlockHash]
    """Block hashes, in the order in which the blocks were given up."""
    medium: str | None
    """Memory in which the blocks lay."""
    group_idx: int | None = None
    """Index of the KV cache group."""


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No block of any group is a hit any more."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The events of an engine step."""

    ts: float
    """Unix seconds at which the batch was made."""
    events: list[KVCacheEvent]
    """Events of the step, in order."""
    data_parallel_rank: int | None = None
    """Rank of the batch's scheduler, among the engine's schedulers."""


def stored_events(
    request: CacheRequest,
    block_hashes: Sequence[bytes],
    indices: Iterable[int],
    hash_stride: int,
    group_id: int,
) -> Iterator[BlockStored]:
    """The events for new hits in a request's table: an event per unbroken run.

    Args:
        request: a hashed request.
        block_hashes: the request's block hashes, as for ``BlockPool.cache_full_blocks``.
        indices: indices of the blocks in the table, ascending.
        hash_stride: number of hashes per block.
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
    """The event with its hashes as integers of 64 bits, which every consumer can read.

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
