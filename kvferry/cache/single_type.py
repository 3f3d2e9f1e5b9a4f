"""What differs between kinds of attention: one manager per KV cache group.

A manager holds no state of requests. A request's blocks of one group are a :class:`GroupTable`,
which the :class:`~kvferry.cache.KVCacheManager` keeps, so forgetting a request is one ``del``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.cache.block_pool import BlockPool
from kvferry.cache.blocks import KVCacheBlock
from kvferry.cache.request import CacheRequest
from kvferry.cache.specs import FullAttentionSpec, KVCacheSpec


@dataclass(slots=True, eq=False)
class GroupTable:
    """The blocks that one request holds in one group."""

    blocks: list[KVCacheBlock] = field(default_factory=list)
    """In token order."""
    num_cached: int = 0
    """Leading blocks that are hashed already."""


class SingleTypeManager(ABC):
    """Block tables of one KV cache group; subclasses know one kind of attention.

    Args:
        spec: of the group's layers.
        group_id: index of the group.
        pool: the blocks, shared by all groups.
    """

    def __init__(self, spec: KVCacheSpec, group_id: int, pool: BlockPool) -> None:
        self.block_size = spec.block_size
        self.group_id = group_id
        self.pool = pool

    @abstractmethod
    def find_longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int
    ) -> list[KVCacheBlock]:
        """The longest prefix of at most ``max_tokens`` tokens that the cache can stand in for."""

    def count_missing(self, table: GroupTable, num_slots: int) -> int:
        """Blocks that a table lacks for ``num_slots`` tokens; negative when it has spare ones."""
        return -(-num_slots // self.block_size) - len(table.blocks)

    def count_free_hits(
        self, hits: Sequence[KVCacheBlock], num_tokens: int, block_hashes: Sequence[bytes]
    ) -> int:
        """How many of ``hits`` are free: taking them uses capacity up, as new blocks would.

        Raises:
            ValueError: the hits do not cover ``num_tokens``, or a block does not hold the
                request's tokens (any more): it was reused since the lookup.
        """
        if len(hits) * self.block_size != num_tokens or len(hits) > len(block_hashes):
            raise ValueError(
                f"new_computed_blocks: {len(hits)} blocks of {self.block_size} tokens do not make "
                f"up num_new_computed_tokens={num_tokens}"
            )
        num_free = 0
        for block, block_hash in zip(hits, block_hashes, strict=False):
            if block.block_hash != block_hash:
                raise ValueError(
                    f"new_computed_blocks: block {block.block_id} does not hold the request's "
                    "tokens any more; call get_computed_blocks again before allocate_slots"
                )
            if not block.ref_cnt:
                num_free += 1
        return num_free

    def add_hits(self, table: GroupTable, hits: Sequence[KVCacheBlock]) -> None:
        """Makes ``hits`` the beginning of an empty table."""
        self.pool.touch(hits)
        table.blocks.extend(hits)
        table.num_cached = len(hits)

    def grow(self, table: GroupTable, num_slots: int) -> list[KVCacheBlock]:
        """Gives a table room for ``num_slots`` tokens; returns the blocks that are new."""
        num_new = self.count_missing(table, num_slots)
        if num_new <= 0:
            return []
        new_blocks = self.pool.get_new_blocks(num_new)
        table.blocks.extend(new_blocks)
        return new_blocks

    def cache_blocks(self, table: GroupTable, request: CacheRequest, num_tokens: int) -> None:
        """Makes the full blocks of the first ``num_tokens`` tokens hits for later requests."""
        num_full = num_tokens // self.block_size
        if num_full > table.num_cached:
            block_hashes = request.hash_blocks(self.block_size)
            self.pool.cache_full_blocks(
                table.blocks, block_hashes, table.num_cached, num_full, self.group_id
            )
            table.num_cached = num_full

    def free(self, table: GroupTable) -> None:
        """Gives the blocks back, tail first, so that the head of a prefix is kept for longest."""
        self.pool.free_blocks(reversed(table.blocks))


class FullAttentionManager(SingleTypeManager):
    """Every token attends to all before it: a hit is an unbroken run from the first block on."""

    def find_longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int
    ) -> list[KVCacheBlock]:
        """See :meth:`SingleTypeManager.find_longest_hit`."""
        get = self.pool.cached_blocks(self.group_id).get
        hits: list[KVCacheBlock] = []
        for block_hash in block_hashes[: max_tokens // self.block_size]:
            block = get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits


MANAGERS: dict[type[KVCacheSpec], type[SingleTypeManager]] = {
    FullAttentionSpec: FullAttentionManager,
}
"""Which manager serves which spec."""


def manager_for(spec: KVCacheSpec, group_id: int, pool: BlockPool) -> SingleTypeManager:
    """The manager of a group.

    Raises:
        ValueError: there is none for this kind of spec.
    """
    kind = MANAGERS.get(type(spec))
    if kind is None:
        raise ValueError(
            f"kv_cache_groups: group {group_id} has a {type(spec).__name__}, which no manager "
            f"serves; supported: {', '.join(known.__name__ for known in MANAGERS)}"
        )
    return kind(spec, group_id, pool)
