"""The steps that all KV cache groups of a request must do together."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import gcd, lcm
from typing import TypeAlias

from kvferry.cache.block_pool import BlockPool, KVCacheBlock
from kvferry.cache.kv_cache_config import KVCacheConfig
from kvferry.cache.request import CacheRequest
from kvferry.cache.single_type import NEVER, GroupTable, HitRules, Room, table_block_size
from kvferry.cache.single_type_kinds import (
    FullAttentionManager,
    MambaManager,
    layer_spec,
    manager_kind,
)

BlockLists: TypeAlias = tuple[Sequence[KVCacheBlock], ...]
"""Blocks, in a list per group."""


@dataclass(slots=True, eq=False)
class RequestTables:
    """Everything that a request holds, and the limits until which no table changes.

    Most steps give a request a token that changes no group's table. The numbers below show this
    without a look at the tables. The numbers may be too tight, but never too wide.
    """

    groups: tuple[GroupTable, ...]
    """Tables of the request, one per group."""
    num_slots: int = 0
    """Number of tokens for which every group has room."""
    quiet_from: int = 0
    """Least number of computed tokens from which the request can continue. With fewer computed
    tokens, it would need blocks that were given back or were never filled."""
    quiet_until: int = NEVER
    """Number of computed tokens at which a group can give a block back."""
    next_hashed: int = 0
    """Number of computed tokens at which a group has a new block to make a hit."""


class KVCacheCoordinator:
    """Applies each step of a request's life to all groups.

    The number of tokens of a block hash divides every group's block size (it is their greatest
    common divisor). The length of a hit is a multiple of every group's block size (a multiple of
    their least common multiple).

    Args:
        config: the groups; their order is the order of all lists here.
        pool: the blocks of all groups.
        num_token_shards: number of ranks with different tokens of a request (DCP times PCP). A
            block of layers that keep tokens spans this many times its own tokens.
        use_eagle: whether the last matching block is dropped from every hit.
        max_hit: largest number of tokens of a hit; 0 without caching. Nothing is hashed if this is
            too short for any hit. Nothing is hashed in a model with cross attention either: its
            decoder cells depend on the encoder's input, which no hash covers.

    Raises:
        ValueError: no manager serves a spec, or the sinks do not fit into the pool.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        pool: BlockPool,
        num_token_shards: int = 1,
        use_eagle: bool = False,
        max_hit: int = NEVER,
    ) -> None:
        specs = [layer_spec(group.kv_cache_spec) for group in config.kv_cache_groups]
        kinds = [manager_kind(spec, group_id) for group_id, spec in enumerate(specs)]
        self.has_cross_attention = not all(kind.is_cacheable for kind in kinds)
        """Whether a group holds the output of an encoder."""
        sizes = [
            table_block_size(kind, spec, num_token_shards)
            for kind, spec in zip(kinds, specs, strict=True)
        ]
        self.hash_block_size = gcd(*sizes)
        """Number of tokens per block hash."""
        rules = HitRules(self.hash_block_size, lcm(*sizes), use_eagle, len(specs))
        self.enable_caching = rules.alignment <= max_hit and not self.has_cross_attention
        """Whether requests share blocks."""
        self.managers = tuple(
            kind(spec, group_id, pool, num_token_shards, rules)
            for group_id, (kind, spec) in enumerate(zip(kinds, specs, strict=True))
        )
        # Full attention first: its run of hits from the left bounds the search of the other groups.
        self._lookup_order = sorted(
            self.managers, key=lambda manager: not isinstance(manager, FullAttentionManager)
        )
        self._pool = pool

    def new_tables(self) -> RequestTables:
        """Makes empty tables for a request."""
        return RequestTables(tuple(GroupTable() for _ in self.managers))

    def new_step_starts(self) -> None:
        """See :meth:`kvferry.cache.KVCacheManager.new_step_starts`."""
        for manager in self.managers:
            if isinstance(manager, MambaManager):
                manager.new_step_starts()

    # -- Hits

    def hash_blocks(self, request: CacheRequest) -> Sequence[bytes]:
        """The block hashes of the request.

        Raises:
            ValueError: the request is hashed with another block size, or has an invalid token id.
        """
        return request.hash_blocks(self.hash_block_size)

    def find_longest_hit(self, request: CacheRequest, max_tokens: int) -> tuple[BlockLists, int]:
        """The longest hit that every group has, and its length in tokens.

        Each group in turn gives its own longest hit that is not longer than the hit of the groups
        before. When all groups in a row agree, this is the longest common hit, because no group has
        a hit of a length in between.

        With a drafter, the block after the hit may also contain the last token, which is not
        computed from the cache. With a single group it may not. This is the usual rule of the
        field; it costs a single group one block if the prompt consists of whole blocks.
        """
        block_hashes = self.hash_blocks(request)
        order = self._lookup_order
        num_known = max_tokens
        if len(order) > 1:
            num_known = len(block_hashes) * self.hash_block_size
        hits: list[Sequence[KVCacheBlock]] = [()] * len(order)
        num_tokens = max_tokens
        num_agreed = 0
        for manager in cycle(order):
            known = hits[manager.group_id]
            if known and isinstance(manager, FullAttentionManager):
                found = known[: num_tokens // manager.block_size]  # any part of a run is a run
            else:
                found = manager.find_longest_hit(block_hashes, num_tokens, num_known)
            hits[manager.group_id] = found
            num_found = len(found) * manager.block_size
            num_agreed = num_agreed + 1 if num_found == num_tokens else 1
            num_tokens = num_found
            if num_agreed == len(order) or not num_tokens:
                break
        return tuple(hits), num_tokens

    def check_fits(
        self, request: CacheRequest, tables: RequestTables | None, hits: BlockLists, room: Room
    ) -> None:
        """Refuses inconsistent arguments.

        Args:
            request: a running request, or a request to be admitted.
            tables: tables of the request; ``None`` if it holds nothing.
            hits: blocks of its local hit; empty lists if there is no hit.
            room: the room that it requests.

        Raises:
            ValueError: the request holds blocks and brings hits or external tokens; the hits do not
                belong to the request; or its blocks do not hold its computed tokens.
        """
        num_computed = request.num_computed_tokens
        name = f"request {request.request_id!r}"
        if tables is not None:
            if any(hits) or room.num_ready != num_computed:
                raise ValueError(
                    f"{name} holds blocks already; give the hit and external tokens when it is "
                    "admitted"
                )
            if num_computed < tables.quiet_from:
                raise ValueError(
                    f"{name} has {num_computed} computed tokens, but its windows hold what follows "
                    f"{tables.quiet_from} or more; free it and admit it again"
                )
            return
        if num_computed:
            raise ValueError(
                f"{name} has {num_computed} computed tokens and no blocks; set "
                "num_computed_tokens to 0 when a request is freed"
            )
        if self.enable_caching:
            self.hash_blocks(request)  # so that any failure happens now
        if any(hits) or room.num_local:
            self._check_hits(request, hits, room.num_local)

    def _check_hits(self, request: CacheRequest, hits: BlockLists, num_tokens: int) -> None:
        if len(hits) != len(self.managers):
            raise ValueError(
                f"new_computed_blocks: blocks of {len(hits)} KV cache groups, but there are "
                f"{len(self.managers)}; give what get_computed_blocks returned"
            )
        block_hashes = self.hash_blocks(request)
        for manager, group_hits in zip(self.managers, hits, strict=True):
            manager.check_hits(group_hits, num_tokens, block_hashes)

    def count_free_hits(self, hits: BlockLists, room: Room) -> int:
        """Number of free hits, which will be taken."""
        return sum(
            manager.count_free_hits(group_hits, room)
            for manager, group_hits in zip(self.managers, hits, strict=True)
        )

    # -- Blocks

    def count_missing(self, tables: RequestTables, room: Room, hits: BlockLists) -> int:
        """Number of new blocks that ``room`` needs after ``hits`` are in the tables."""
        num_missing = 0
        for manager, table, group_hits in zip(self.managers, tables.groups, hits, strict=True):
            num_missing += manager.count_missing(table, room, len(group_hits))
        return num_missing

    def count_missing_for_all(
        self,
        tables: RequestTables,
        room: Room,
        hits: BlockLists,
        num_tokens: int,
        max_step_tokens: int,
    ) -> int:
        """Like :meth:`count_missing`, for ``num_tokens`` tokens; groups with a window need only
        that.
        """
        return sum(
            manager.count_missing_for_all(table, room, len(group_hits), num_tokens, max_step_tokens)
            for manager, table, group_hits in zip(self.managers, tables.groups, hits, strict=True)
        )

    def add_hits(self, tables: RequestTables, hits: BlockLists, room: Room) -> None:
        """Makes the hits of all groups the beginning of empty tables."""
        for manager, table, group_hits in zip(self.managers, tables.groups, hits, strict=True):
            manager.add_hits(table, group_hits, room)

    def drop_passed(self, tables: RequestTables, num_computed: int) -> None:
        """Gives back the blocks that no token from ``num_computed`` on needs."""
        if num_computed < tables.quiet_until:
            return
        for manager, table in zip(self.managers, tables.groups, strict=True):
            manager.drop_passed(table, num_computed)
        self.settle(tables)

    def grow(self, tables: RequestTables, room: Room) -> BlockLists:
        """Gives every table its room; returns the new blocks."""
        return tuple(
            manager.grow(table, room)
            for manager, table in zip(self.managers, tables.groups, strict=True)
        )

    def cache_blocks(self, tables: RequestTables, request: CacheRequest, num_tokens: int) -> None:
        """Makes full blocks of the first ``num_tokens`` tokens hits for later requests."""
        if num_tokens < tables.next_hashed:
            return
        for manager, table in zip(self.managers, tables.groups, strict=True):
            manager.cache_blocks(table, request, num_tokens)

    def note_load(
        self,
        tables: RequestTables,
        skip_groups: Collection[int],
        first_filled: Sequence[int] | None,
    ) -> None:
        """Records the effect of a load: see :meth:`kvferry.cache.KVCacheManager.cache_blocks`.

        Raises:
            ValueError: a group does not exist, or ``first_filled`` does not have a token per group.
                In this case nothing changes.
        """
        unknown = [group for group in skip_groups if not 0 <= group < len(self.managers)]
        if unknown:
            raise ValueError(
                f"skip_groups: {unknown} are no KV cache groups; there are {len(self.managers)}"
            )
        if first_filled is not None:
            if len(first_filled) != len(self.managers) or min(first_filled) < 0:
                raise ValueError(
                    f"first_filled: {tuple(first_filled)} for {len(self.managers)} KV cache "
                    "groups; give one token for each, 0 or more"
                )
            for manager, table, first in zip(
                self.managers, tables.groups, first_filled, strict=True
            ):
                manager.note_filled(table, first)
        for group in skip_groups:
            tables.groups[group].num_cached = NEVER
        self.settle(tables)  # otherwise new hits would not be looked for at once

    def settle(self, tables: RequestTables) -> None:
        """Records the limits until which no table changes."""
        limits = [
            manager.limits(table)
            for manager, table in zip(self.managers, tables.groups, strict=True)
        ]
        slots, starts, ends, hashed = zip(*limits, strict=True)
        tables.num_slots = min(slots)
        tables.quiet_from = max(starts)
        tables.quiet_until = min(ends)
        tables.next_hashed = min(hashed) if self.enable_caching else NEVER

    def free(self, tables: RequestTables) -> None:
        """Gives all blocks back."""
        for manager, table in zip(self.managers, tables.groups, strict=True):
            manager.free(table)

    def reset_prefix_cache(self) -> bool:
        """See :meth:`kvferry.cache.KVCacheManager.reset_prefix_cache`."""
        # The pool is reset only while no block is in use. Unhashed blocks that were freed last are
        # reused first, so every group gets its own sink blocks again, where the attention expects
        # them.
        for manager in reversed(self.managers):
            self._pool.free_blocks(reversed(manager.sink_blocks))
        is_reset = self._pool.reset_prefix_cache()
        for manager in self.managers:
            manager.sink_blocks = self._pool.get_new_blocks(len(manager.sink_blocks))
        return is_reset

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """See :meth:`kvferry.cache.KVCacheManager.peak_blocks`."""
        return sum(manager.peak_blocks(num_tokens, max_step_tokens) for manager in self.managers)

    def count_common_prefix(self, tables: RequestTables, num_requests: int) -> list[int]:
        """See :meth:`kvferry.cache.KVCacheManager.get_num_common_prefix_blocks`."""
        counts = []
        for manager, table in zip(self.managers, tables.groups, strict=True):
            count = 0
            if isinstance(manager, FullAttentionManager):
                for block in table.blocks:
                    if block.ref_cnt != num_requests:
                        break
                    count += 1
            counts.append(count)
        return counts
