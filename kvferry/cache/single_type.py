"""The common part of all kinds of layers: block tables of a KV cache group.

A manager holds no state of requests. The blocks of a request in a group are a :class:`GroupTable`.
The :class:`~kvferry.cache.KVCacheManager` keeps these tables, so forgetting a request is a single
``del``.

The kinds differ in one function, :meth:`SingleTypeManager.first_kept`: tokens before the returned
token are never needed again. Blocks wholly before this token are given back and replaced by the
null block::

    tokens   | never needed again   | needed            | computed in this step | lookahead |
    table    | null | null | null | b | b  |  b  |  b   |  b  |  b  |  b  |  b  |  b  |  b  |
                                  ^ first_kept(num_computed) may lie within a block
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from kvferry.cache.block_pool import BlockPool, KVCacheBlock
from kvferry.cache.request import CacheRequest
from kvferry.cache.specs import KVCacheSpec

NEVER = sys.maxsize
"""Number of tokens or blocks that no request reaches."""


@dataclass(slots=True, eq=False)
class GroupTable:
    """The blocks of a request in a group."""

    blocks: list[KVCacheBlock] = field(default_factory=list)
    """Blocks in token order."""
    num_cached: int = 0
    """Number of leading blocks already hashed, or never to be hashed."""
    num_passed: int = 0
    """Number of leading blocks that are no longer needed and are replaced by the null block."""
    first_token: int = 0
    """First token whose content the table holds, after this token is computed."""


class Room(NamedTuple):
    """The request of an ``allocate_slots`` call to every group, as token counts from the start."""

    num_local: int
    """Number of tokens computed here before the call, including the hit of an admission."""
    num_ready: int
    """Number of these tokens and of external tokens, which another component fills."""
    num_slots: int
    """Number of these tokens, of the tokens to compute, and of the lookahead."""
    num_encoder_tokens: int = 0
    """Number of tokens of an encoder's output; used by cross attention only."""


@dataclass(frozen=True, slots=True)
class HitRules:
    """The rules for hits on which all groups of a config must agree."""

    hash_block_size: int
    """Number of tokens per block hash; divides every group's block size."""
    alignment: int
    """Number of tokens that divides the length of every hit; a multiple of every group's block
    size."""
    use_eagle: bool = False
    """Whether the block after a hit must also be cached. A drafter (EAGLE, MTP) needs the model's
    output for the tokens just before the tokens that it continues. Therefore the last matching
    block is dropped from the hit and computed again."""
    num_groups: int = 1
    """Number of KV cache groups of the config."""


class Limits(NamedTuple):
    """Limits within which a table does not change; each step checks the tightest limits of all
    groups.
    """

    num_slots: int
    """Number of tokens for which the table has room."""
    quiet_from: int
    """Least number of computed tokens from which the request can continue."""
    quiet_until: int
    """Number of computed tokens at which a block can be given back."""
    next_hashed: int
    """Number of computed tokens at which a block can become a hit."""


class SingleTypeManager(ABC):
    """Block tables of a KV cache group; each subclass serves a kind of layers.

    Args:
        spec: spec of the group's layers.
        group_id: index of the group.
        pool: the blocks, shared by all groups.
        num_token_shards: number of ranks with different tokens of a block (DCP and PCP).
        rules: rules for hits of all groups.
    """

    is_cacheable: ClassVar[bool] = True
    """Whether blocks of this kind can be hits."""
    is_token_sharded: ClassVar[bool] = True
    """Whether ranks divide a block's tokens (DCP, PCP); otherwise each rank holds all tokens."""

    def __init__(
        self,
        spec: KVCacheSpec,
        group_id: int,
        pool: BlockPool,
        num_token_shards: int,
        rules: HitRules,
    ) -> None:
        self.block_size = table_block_size(type(self), spec, num_token_shards)
        """Number of tokens per entry of a block table."""
        self.group_id = group_id
        self.pool = pool
        self._rules = rules
        self._hash_stride = self.block_size // rules.hash_block_size
        self._num_beyond = int(rules.use_eagle)
        """Number of blocks after a hit that must also be cached."""
        self.sink_blocks = pool.get_new_blocks(spec.num_reserved_blocks)
        """Blocks of learnt tokens before the tokens of every request. They are the first blocks
        that the pool gives, because the attention expects them at the ids 1, 2, ... They are in no
        table and are never given back."""
        self._adopt(spec)

    def _adopt(self, spec: KVCacheSpec) -> None:
        """Reads the fields of the spec that only this kind needs; called at the end of the
        constructor.
        """

    # -- Differences between kinds

    @abstractmethod
    def find_longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, num_known_tokens: int
    ) -> list[KVCacheBlock]:
        """The longest hit of at most ``max_tokens`` tokens, regardless of other groups.

        A hit is a number of tokens, a multiple of the common alignment. All blocks with a token
        from :meth:`first_kept` of this number on must be cached.

        Args:
            block_hashes: block hashes of the request, a hash per ``rules.hash_block_size`` tokens.
            max_tokens: largest number of tokens of the hit.
            num_known_tokens: number of leading tokens up to which the block after a hit is
                searched.

        Returns:
            The blocks of the hit, with null blocks for unneeded blocks.
        """

    def first_kept(self, num_computed: int) -> int:
        """First token that the token ``num_computed``, or a later token, needs."""
        return 0

    def forgets_at(self, num_tokens: int) -> int:
        """Least number of computed tokens after which the first ``num_tokens`` are never needed."""
        return NEVER if num_tokens > 0 else 0

    def num_required(self, num_slots: int) -> int:
        """Number of entries of a table with room for ``num_slots`` tokens."""
        return -(-num_slots // self.block_size)

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Largest number of blocks that a request holds at once until it has ``num_tokens`` slots,
        if no call requests more than ``max_step_tokens`` slots beyond the ready tokens.
        """
        return self.num_required(num_tokens)

    def first_whole_block(self, first_token: int) -> int:
        """First block that a load from ``first_token`` on fills completely, so that it may be
        shared.
        """
        return -(-first_token // self.block_size)

    def is_reachable(self, index: int) -> bool:
        """Whether any hit could need the block ``index`` of a table."""
        return True

    # -- Admission

    def check_hits(
        self, hits: Sequence[KVCacheBlock], num_tokens: int, block_hashes: Sequence[bytes]
    ) -> None:
        """Refuses hits of other requests.

        Raises:
            ValueError: the hits do not cover ``num_tokens``, or a block does not hold the request's
                tokens, for example because it was reused since the lookup.
        """
        stride = self._hash_stride
        end = len(hits) * stride
        if len(hits) * self.block_size != num_tokens or end > len(block_hashes):
            raise ValueError(
                f"new_computed_blocks: {len(hits)} blocks of {self.block_size} tokens do not make "
                f"up num_new_computed_tokens={num_tokens}"
            )
        first = self.first_kept(num_tokens) // self.block_size
        needed = hits[first:] if first else hits
        wanted = list(block_hashes[(first + 1) * stride - 1 : end : stride])
        is_own = [block.block_hash for block in needed] == wanted
        if is_own and self._rules.num_groups > 1:
            # Meanwhile a block may hold the same tokens for another group.
            is_own = [block.group_id for block in needed].count(self.group_id) == len(needed)
        if not is_own:
            stale = next(
                block
                for block, block_hash in zip(needed, wanted, strict=True)
                if (block.block_hash, block.group_id) != (block_hash, self.group_id)
            )
            raise ValueError(
                f"new_computed_blocks: block {stale.block_id} does not hold the request's "
                "tokens any more; call get_computed_blocks again before allocate_slots"
            )

    def count_free_hits(self, hits: Sequence[KVCacheBlock], room: Room) -> int:
        """Number of free blocks among the hits: taking them uses capacity like new blocks."""
        first = self.first_kept(room.num_ready) // self.block_size
        return [block.ref_cnt for block in hits[first:]].count(0)

    def count_missing(self, table: GroupTable, room: Room, num_hits: int) -> int:
        """Number of new blocks that a table needs for ``room``, after its hits are in the table."""
        have = len(table.blocks) + num_hits
        passed = self.first_kept(room.num_ready) // self.block_size
        return max(0, self.num_required(room.num_slots) - max(have, passed))

    def count_missing_for_all(
        self, table: GroupTable, room: Room, num_hits: int, num_tokens: int, max_step_tokens: int
    ) -> int:
        """Like :meth:`count_missing`, for a sequence of ``num_tokens`` tokens, or only for its
        window.

        A layer with a window never holds the whole sequence at once. Asking for the whole sequence
        would refuse for ever a request that can run. ``max_step_tokens`` limits the later steps.
        """
        # A load leaves out the tokens that its window passes before the load's tokens count as
        # computed.
        passed = max(self.first_kept(room.num_ready) // self.block_size, table.num_passed)
        at_once = min(
            self.num_required(num_tokens) - passed, self.peak_blocks(num_tokens, max_step_tokens)
        )
        return max(0, at_once - max(0, len(table.blocks) + num_hits - passed))

    def add_hits(self, table: GroupTable, hits: Sequence[KVCacheBlock], room: Room) -> None:
        """Makes ``hits`` the beginning of an empty table, without unneeded blocks.

        This only takes references, so that no group allocates before all groups have their hits.
        """
        table.num_cached = len(hits)
        kept = self.first_kept(room.num_ready)
        passed = min(kept // self.block_size, len(hits))
        if passed:
            hits = hits[passed:]
            table.blocks.extend([self.pool.null_block] * passed)
            table.num_passed = passed
            table.first_token = passed * self.block_size
        self.pool.touch(hits)
        table.blocks.extend(hits)
        if kept > room.num_local:
            # The load begins within a block. The tokens before it in this block are not written, so
            # the block must never be a hit. (Other managers of the field hash it nevertheless.)
            table.first_token = kept
            table.num_cached = self.first_whole_block(kept)

    def note_filled(self, table: GroupTable, first_filled: int) -> None:
        """Records that a load has filled a table from a token on: blocks from this token on are
        whole.
        """
        first = -(-first_filled // self.block_size)
        if table.num_cached == NEVER:
            return
        # Only blocks of the load change among the blocks that must not be hits: before them are the
        # local hit, or null blocks.
        null = self.pool.null_block
        while table.num_cached > first:
            block = table.blocks[table.num_cached - 1]
            if block is null or block.block_hash is not None:
                break
            table.num_cached -= 1

    # -- Growth

    def drop_passed(self, table: GroupTable, num_computed: int) -> bool:
        """Gives back all blocks that no token from ``num_computed`` on needs; says whether any."""
        passed = min(self.first_kept(num_computed) // self.block_size, len(table.blocks))
        first = table.num_passed
        if passed <= first:
            return False
        dropped = table.blocks[first:passed]
        table.blocks[first:passed] = [self.pool.null_block] * len(dropped)
        table.num_passed = passed
        table.first_token = max(table.first_token, passed * self.block_size)
        dropped.reverse()  # the tail first, as everywhere
        self.pool.free_blocks(dropped)
        return True

    def grow(self, table: GroupTable, room: Room) -> list[KVCacheBlock]:
        """Gives a table its room; returns the new blocks, without null blocks."""
        blocks = table.blocks
        passed = self.first_kept(room.num_ready) // self.block_size
        if passed > len(blocks):
            blocks.extend([self.pool.null_block] * (passed - len(blocks)))
            table.num_passed = passed
        num_new = self.num_required(room.num_slots) - len(blocks)
        if num_new <= 0:
            return []
        new_blocks = self.pool.get_new_blocks(num_new)
        blocks.extend(new_blocks)
        return new_blocks

    def cache_blocks(self, table: GroupTable, request: CacheRequest, num_tokens: int) -> None:
        """Makes full blocks of the first ``num_tokens`` tokens hits for later requests.

        Skips blocks that no hit could need, because hits end only at the common alignment.
        """
        num_full = self._num_cacheable(num_tokens)
        first = table.num_cached
        if num_full <= first:
            return
        block_hashes = request.hash_blocks(self._rules.hash_block_size)
        if self._rules.alignment == self.block_size:
            spans = [(first, num_full)]
        else:
            spans = [(i, i + 1) for i in range(first, num_full) if self.is_reachable(i)]
        for start, end in spans:
            self.pool.cache_full_blocks(
                table.blocks,
                block_hashes,
                start,
                end,
                self.group_id,
                hash_stride=self._hash_stride,
                request=request,
            )
        table.num_cached = num_full

    def free(self, table: GroupTable) -> None:
        """Gives the blocks back, tail first, so that the head of a prefix is kept for longest."""
        blocks = table.blocks[table.num_passed :] if table.num_passed else table.blocks
        self.pool.free_blocks(reversed(blocks))

    def limits(self, table: GroupTable) -> Limits:
        """The limits within which a table does not change."""
        return Limits(
            len(table.blocks) * self.block_size,
            self.forgets_at(table.first_token),
            self.forgets_at((table.num_passed + 1) * self.block_size),
            self._next_hashed(table.num_cached),
        )

    def _aligned(self, num_blocks: int) -> int:
        """Largest number of blocks, at most ``num_blocks``, that a hit may have."""
        alignment = self._rules.alignment
        if alignment == self.block_size:
            return num_blocks
        return num_blocks * self.block_size // alignment * alignment // self.block_size

    def _num_cacheable(self, num_tokens: int) -> int:
        """Number of leading blocks that a hit of ``num_tokens`` tokens or fewer, or its proof,
        needs.
        """
        num_full = num_tokens // self.block_size
        num_aligned = self._aligned(num_full)
        if num_aligned:
            num_aligned += self._num_beyond
        return min(num_full, num_aligned)

    def _next_hashed(self, num_cached: int) -> int:
        """Least number of tokens for which :meth:`_num_cacheable` exceeds ``num_cached``."""
        size, alignment = self.block_size, self._rules.alignment
        end = (num_cached + 1) * size
        aligned_end = (num_cached + 1 - self._num_beyond) * size
        return max(end, -(-aligned_end // alignment) * alignment, alignment)


def table_block_size(
    kind: type[SingleTypeManager], spec: KVCacheSpec, num_token_shards: int
) -> int:
    """Number of tokens per entry of a block table, over all ranks that hold some of them."""
    return spec.block_size * (num_token_shards if kind.is_token_sharded else 1)
