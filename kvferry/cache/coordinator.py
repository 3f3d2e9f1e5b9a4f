"""What all KV cache groups of a request must do together."""

from collections.abc import Sequence
from typing import TypeAlias

from kvferry.cache.block_pool import BlockPool
from kvferry.cache.blocks import KVCacheBlock
from kvferry.cache.kv_cache_config import KVCacheConfig
from kvferry.cache.request import CacheRequest
from kvferry.cache.single_type import GroupTable, manager_for

Tables: TypeAlias = tuple[GroupTable, ...]
"""All that one request holds: one table per group."""

BlockLists: TypeAlias = tuple[Sequence[KVCacheBlock], ...]
"""Blocks, one list per group."""


class KVCacheCoordinator:
    """Applies each step of a request's life to all groups.

    Args:
        config: the groups; their order is the order of all lists here.
        pool: the blocks that the groups share.

    Raises:
        ValueError: more than one group, or a spec that no manager serves.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool) -> None:
        groups = config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(
                f"kv_cache_groups: {len(groups)} groups are not supported yet; give all layers "
                "one full-attention group"
            )
        self.managers = tuple(
            manager_for(group.kv_cache_spec, group_id, pool)
            for group_id, group in enumerate(groups)
        )
        self.hash_block_size = self.managers[0].block_size
        """Tokens per block hash."""

    def new_tables(self) -> Tables:
        """Empty tables for a request."""
        return tuple(GroupTable() for _ in self.managers)

    def hash_blocks(self, request: CacheRequest) -> Sequence[bytes]:
        """The request's block hashes.

        Raises:
            ValueError: it is hashed with another block size, or has a bad token id.
        """
        return request.hash_blocks(self.hash_block_size)

    def find_longest_hit(self, request: CacheRequest, max_tokens: int) -> tuple[BlockLists, int]:
        """The longest prefix that every group has cached, and its length in tokens."""
        manager = self.managers[0]
        hits = manager.find_longest_hit(self.hash_blocks(request), max_tokens)
        return (hits,), len(hits) * manager.block_size

    def count_free_hits(self, request: CacheRequest, hits: BlockLists, num_tokens: int) -> int:
        """How many of the hits are free.

        Raises:
            ValueError: they do not fit the request; see ``SingleTypeManager.count_free_hits``.
        """
        block_hashes = self.hash_blocks(request)
        return sum(
            manager.count_free_hits(group_hits, num_tokens, block_hashes)
            for manager, group_hits in zip(self.managers, hits, strict=True)
        )

    def count_missing(self, tables: Tables, num_slots: int, hits: BlockLists) -> int:
        """Blocks that are lacking for ``num_slots`` tokens once ``hits`` are in the tables."""
        num_missing = 0
        for manager, table, group_hits in zip(self.managers, tables, hits, strict=True):
            missing = manager.count_missing(table, num_slots) - len(group_hits)
            if missing > 0:
                num_missing += missing
        return num_missing

    def add_hits(self, tables: Tables, hits: BlockLists) -> None:
        """Makes the hits the beginning of empty tables."""
        for manager, table, group_hits in zip(self.managers, tables, hits, strict=True):
            manager.add_hits(table, group_hits)

    def grow(self, tables: Tables, num_slots: int) -> BlockLists:
        """Gives every table room for ``num_slots`` tokens; returns the blocks that are new."""
        return tuple(
            manager.grow(table, num_slots)
            for manager, table in zip(self.managers, tables, strict=True)
        )

    def cache_blocks(self, tables: Tables, request: CacheRequest, num_tokens: int) -> None:
        """Makes the full blocks of the first ``num_tokens`` tokens hits for later requests."""
        for manager, table in zip(self.managers, tables, strict=True):
            manager.cache_blocks(table, request, num_tokens)

    def free(self, tables: Tables) -> None:
        """Gives all blocks back."""
        for manager, table in zip(self.managers, tables, strict=True):
            manager.free(table)
