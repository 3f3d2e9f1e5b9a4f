"""Blocks, the lists of blocks that a scheduler sees, and the pool of all blocks.

The pool knows which blocks are free, which blocks are shared, and which content free blocks still
hold. A free hashed block keeps its content until the block is taken. Therefore the order of reuse
decides what the prefix cache forgets:

    reused first                                                        reused last
    | unhashed blocks, last freed first |  hashed blocks, longest unused first |
      a stack (a list)                     a queue (a deque)

Unhashed blocks hold nothing of value, so they never lie between two hashed blocks, and a list
suffices.

A hit takes its block out of the middle of the queue. The entry of the block stays in the queue and
becomes void: it no longer counts, and it is discarded when it is the oldest entry. Meanwhile the
block may be freed and queued again. Therefore each block counts its void entries, which are always
older than its valid entry. Links from block to block would avoid void entries, but freeing a block
would then also write to the neighbours: in a measurement, freeing a request took a quarter longer.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

from kvferry.cache.events import (
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    KVCacheEvent,
    stored_events,
)
from kvferry.cache.request import CacheRequest


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """A block of a :class:`BlockPool`. Only :class:`~kvferry.cache.BlockPool` writes to it."""

    block_id: int
    """Index of the block in the KV cache tensors; 0 is the null block."""
    ref_cnt: int = 0
    """Number of block tables with this block; the null block keeps 1."""
    block_hash: bytes | None = None
    """Chained hash of the block's content, after the block is full and may be shared."""
    group_id: int = 0
    """KV cache group of the block's content; valid only while the block is hashed."""
    num_void: int = field(default=0, repr=False)
    """Number of void entries of the block in the queue of free blocks."""

    @property
    def is_null(self) -> bool:
        """Whether this is the null block, which means "no block"."""
        return self.block_id == 0


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of a request, in a list per KV cache group, in token order."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        """The blocks of this object, then the blocks of ``other``, group by group.

        Raises:
            ValueError: the numbers of groups differ.
        """
        if len(self.blocks) != len(other.blocks):
            raise ValueError(
                f"blocks of {len(self.blocks)} and of {len(other.blocks)} KV cache groups cannot "
                "be added; both must come from one manager"
            )
        return KVCacheBlocks(
            tuple([*mine, *theirs] for mine, theirs in zip(self.blocks, other.blocks, strict=True))
        )

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None: ...

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Block ids, in a list per group; with ``allow_none``, ``None`` if there are no blocks."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks without a hash, which wait for their content. No null blocks.

        Raises:
            ValueError: there is more than one group.
        """
        if len(self.blocks) != 1:
            raise ValueError(
                f"get_unhashed_block_ids: works on one KV cache group, not on {len(self.blocks)}; "
                "call get_unhashed_block_ids_all_groups"
            )
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        """Ids of the blocks without a hash, in a list per group; see
        :meth:`get_unhashed_block_ids`.
        """
        return tuple(
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        )

    def new_empty(self) -> "KVCacheBlocks":
        """An object without blocks, for the same groups."""
        return KVCacheBlocks(((),) * len(self.blocks))


class BlockPool:
    """All blocks of a KV cache. Not thread-safe: only the scheduler's thread may use the pool.

    Args:
        num_blocks: number of all blocks, including the null block.
        num_groups: number of KV cache groups; groups share blocks, but never hits.
        enable_events: whether to collect events for :meth:`take_events`, which must then be called
            regularly.

    Raises:
        ValueError: fewer than two blocks.
    """

    def __init__(
        self, num_blocks: int, num_groups: int = 1, *, enable_events: bool = False
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks: {num_blocks} leaves nothing beside the null block; take 2 or more"
            )
        self.blocks: Sequence[KVCacheBlock] = [KVCacheBlock(i) for i in range(num_blocks)]
        """All blocks, by id."""
        self.null_block = self.blocks[0]
        """Block 0: taken before all other blocks, never freed, never hashed."""
        self.null_block.ref_cnt = 1
        # Ascending ids leave the stack first: neighbours in a table are neighbours in memory.
        self._unhashed = list(self.blocks[:0:-1])
        self._hashed: deque[KVCacheBlock] = deque()
        self._num_void = 0  # number of void entries of the queue, over all blocks
        self._cached: tuple[dict[bytes, KVCacheBlock], ...] = tuple({} for _ in range(num_groups))
        # Further blocks with a hash that is cached already. They are kept, because a table's blocks
        # never change under the request. They are rare, so the usual lookup needs only the dict
        # above.
        self._duplicates: tuple[dict[bytes, list[KVCacheBlock]], ...] = tuple(
            {} for _ in range(num_groups)
        )
        self._events: list[KVCacheEvent] | None = [] if enable_events else None

    @property
    def usage(self) -> float:
        """Share of blocks in use, from 0 to 1; the null block does not count."""
        return 1.0 - self.get_num_free_blocks() / (len(self.blocks) - 1)

    def get_num_free_blocks(self) -> int:
        """Number of blocks that :meth:`get_new_blocks` can give now, including hashed blocks."""
        return len(self._unhashed) + len(self._hashed) - self._num_void

    def get_free_block_ids(self) -> list[int]:
        """Ids of the free blocks, in the order in which the pool will reuse them."""
        # The latest entry of a free block is its valid entry.
        queued = dict.fromkeys(reversed(self._hashed))
        hashed = [
            block
            for block in reversed(queued)
            if block.ref_cnt == 0 and block.block_hash is not None
        ]
        return [block.block_id for block in (*reversed(self._unhashed), *hashed)]

    def cached_blocks(self, group_id: int = 0) -> Mapping[bytes, KVCacheBlock]:
        """Block hash → block, for every hash that a request of this group may hit; a live view."""
        return self._cached[group_id]

    def get_cached_block(self, block_hash: bytes, group_id: int = 0) -> KVCacheBlock | None:
        """The block with this content for this group, or ``None``."""
        return self._cached[group_id].get(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes free blocks and gives each block a reference; hashed blocks lose their content.

        Raises:
            ValueError: fewer blocks are free, or ``num_blocks`` is negative.
        """
        stack = self._unhashed
        num_stacked = len(stack)
        num_free = num_stacked + len(self._hashed) - self._num_void
        if not 0 <= num_blocks <= num_free:
            raise ValueError(f"num_blocks: {num_blocks} wanted, {num_free} are free")
        if num_blocks == 1 and num_stacked:  # the usual growth of a request that decodes
            block = stack.pop()
            block.ref_cnt = 1
            return [block]
        if num_blocks <= num_stacked:
            taken = stack[: -num_blocks - 1 : -1]
            del stack[num_stacked - num_blocks :]
        else:
            taken = stack[::-1]
            stack.clear()
            taken += self._evict(num_blocks - num_stacked)
        for block in taken:
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds a reference to each block; free blocks leave the free list with their content.

        The null block is skipped.

        Raises:
            ValueError: a block is free and not hashed, so it has nothing to share. All blocks
                before this block are touched.
        """
        num_taken = 0
        error = None
        for block in blocks:
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    error = f"block {block.block_id} is free and holds nothing to share"
                    break
                block.num_void += 1
                num_taken += 1
            block.ref_cnt += 1
        self._count_void(num_taken)
        self.null_block.ref_cnt = 1  # tables may hold it, and nothing counts that
        if error:
            raise ValueError(error)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drops a reference from each block; the null block is skipped.

        Args:
            ordered_blocks: blocks to free. Hashed blocks are reused in this order, after all blocks
                that were freed earlier. Give a request's tail first: the head of a prefix is more
                valuable.

        Raises:
            ValueError: a block has no reference left. All blocks before this block are freed.
        """
        queue = self._hashed
        for block in ordered_blocks:
            # First the case of nearly all blocks of a request, in as few steps as possible.
            if block.ref_cnt == 1 and block.block_hash is not None:
                block.ref_cnt = 0
                queue.append(block)
            elif block.ref_cnt > 1:
                block.ref_cnt -= 1
            elif block.ref_cnt < 1:
                raise ValueError(f"block {block.block_id} is freed more often than it was taken")
            elif block is not self.null_block:
                block.ref_cnt = 0
                self._unhashed.append(block)

    def cache_full_blocks(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[bytes],
        num_cached_blocks: int,
        num_full_blocks: int,
        group_id: int = 0,
        *,
        hash_stride: int = 1,
        request: CacheRequest | None = None,
    ) -> None:
        """Makes blocks of a table hits for later requests; null blocks are skipped.

        If another block already has the same hash, this block is kept as a duplicate: the older
        block stays the hit, and the duplicate replaces it when the older block is reused.

        Args:
            blocks: a request's block table for the group.
            block_hashes: the request's block hashes; block ``i`` of the table gets
                ``block_hashes[(i + 1) * hash_stride - 1]``, which covers all tokens before.
            num_cached_blocks: number of leading blocks cached already.
            num_full_blocks: number of leading blocks cached afterwards.
            group_id: KV cache group of the table.
            hash_stride: hashes per block, for a group whose blocks are larger than the hash blocks.
            request: the hashed request of the table; necessary only with events.

        Raises:
            ValueError: a block to be cached is hashed already; the table or the hashes are shorter
                than ``num_full_blocks``; or events are enabled and there is no request. All blocks
                before a hashed block are cached.
        """
        last_hash = num_full_blocks * hash_stride - 1
        if num_full_blocks > len(blocks) or last_hash >= len(block_hashes):
            raise ValueError(
                f"num_full_blocks: {num_full_blocks}, but the table has {len(blocks)} blocks and "
                f"{len(block_hashes)} hashes, {hash_stride} per block"
            )
        span = range(num_cached_blocks, num_full_blocks)
        if self._events is not None:
            new = self._new_hits(blocks, block_hashes, span, group_id, hash_stride)
            if request is None:
                raise ValueError("request: None, but the pool has events on; give the table's")
            self._events += stored_events(request, block_hashes, new, hash_stride, group_id)
        if hash_stride != 1:
            # Slices, so that the loop has a single index; without a stride they would cost more.
            first_hash = (num_cached_blocks + 1) * hash_stride - 1
            blocks = blocks[num_cached_blocks:num_full_blocks]
            block_hashes = block_hashes[first_hash : last_hash + 1 : hash_stride]
            span = range(len(blocks))
        cached = self._cached[group_id]
        null_block = self.null_block
        for index in span:
            block, block_hash = blocks[index], block_hashes[index]
            if block is null_block:
                continue
            if block.block_hash is not None:
                raise ValueError(f"block {block.block_id} is hashed already")
            block.block_hash = block_hash
            block.group_id = group_id
            if cached.setdefault(block_hash, block) is not block:
                self._duplicates[group_id].setdefault(block_hash, []).append(block)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Makes held or free blocks no longer hits; unhashed blocks are skipped.

        Raises:
            ValueError: an id is not in the pool. In this case no block changes.
        """
        block_ids = list(block_ids)
        for block_id in block_ids:
            if not 0 <= block_id < len(self.blocks):
                raise ValueError(f"block_ids: {block_id} is not one of {len(self.blocks)} blocks")
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.block_hash is None:
                continue
            self._forget(block)
            if block.ref_cnt == 0:
                block.num_void += 1
                self._count_void(1)
                self._unhashed.append(block)

    def take_events(self) -> list[KVCacheEvent]:
        """The changes of hits since the last call, in order: new hits and removed hits.

        Always empty unless the pool was made with ``enable_events``.
        """
        if self._events is None:
            return []
        events, self._events = self._events, []
        return events

    def reset_prefix_cache(self) -> bool:
        """Forgets all content if only the null block is in use; returns whether it did so."""
        if self.get_num_free_blocks() != len(self.blocks) - 1:
            return False
        # Downwards, so that the order of reuse does not change.
        order = self.get_free_block_ids()
        self._unhashed = [self.blocks[block_id] for block_id in reversed(order)]
        for block in self._unhashed:
            block.block_hash = None
            block.num_void = 0
        self._hashed.clear()
        self._num_void = 0
        for cached in self._cached:
            cached.clear()
        for duplicates in self._duplicates:
            duplicates.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        return True

    def _evict(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes the least recently used hashed blocks out of the queue and the cache."""
        evicted = []
        cached, duplicates = self._cached, self._duplicates
        is_logged = self._events is not None
        oldest = self._hashed.popleft
        for _ in range(num_blocks):
            block = oldest()
            while block.num_void:
                block.num_void -= 1
                self._num_void -= 1
                block = oldest()
            group_id, block_hash = block.group_id, block.block_hash
            if is_logged or duplicates[group_id] or block_hash is None:
                self._forget(block)
            else:  # same effect as _forget, without a call for each block
                del cached[group_id][block_hash]
                block.block_hash = None
            evicted.append(block)
        # Tables are freed tail first, so the reverse is mostly ascending: a transfer merges blocks
        # that are neighbours.
        evicted.reverse()
        return evicted

    def _count_void(self, num_blocks: int) -> None:
        """Counts new void entries; discards all void entries if there are as many as blocks in the
        pool.

        This bounds the queue and, as each pass follows so many hits, the cost per hit.
        """
        self._num_void += num_blocks
        if self._num_void < len(self.blocks):
            return
        kept: deque[KVCacheBlock] = deque()
        for block in self._hashed:
            if block.num_void:
                block.num_void -= 1
            else:
                kept.append(block)
        self._hashed = kept
        self._num_void = 0

    def _forget(self, block: KVCacheBlock) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        cached, duplicates = self._cached[block.group_id], self._duplicates[block.group_id]
        others = duplicates.get(block_hash)
        if others is None:
            del cached[block_hash]
            if self._events is not None:
                self._note_removed(self._events, block_hash, block.group_id)
        else:
            if cached[block_hash] is block:
                cached[block_hash] = others.pop(0)
            else:
                others.remove(block)
            if not others:
                del duplicates[block_hash]
        block.block_hash = None

    @staticmethod
    def _note_removed(events: list[KVCacheEvent], block_hash: bytes, group_id: int) -> None:
        last = events[-1] if events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group_id:
            last.block_hashes.append(block_hash)
        else:
            events.append(
                BlockRemoved(block_hashes=[block_hash], medium=MEDIUM, group_idx=group_id)
            )

    def _new_hits(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[bytes],
        span: range,
        group_id: int,
        hash_stride: int,
    ) -> list[int]:
        """Indices of the blocks that :meth:`cache_full_blocks` makes hits, without duplicates."""
        cached = self._cached[group_id]
        new = []
        for index in span:
            if blocks[index].block_hash is not None:
                break  # caching ends here as well
            is_known = block_hashes[(index + 1) * hash_stride - 1] in cached
            if not is_known and blocks[index] is not self.null_block:
                new.append(index)
        return new
