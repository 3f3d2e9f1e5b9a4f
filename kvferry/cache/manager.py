"""The KV cache manager: the scheduler's one door to blocks."""

from collections.abc import Collection, Sequence
from weakref import WeakSet

from kvferry.cache.block_pool import BlockPool, KVCacheBlocks
from kvferry.cache.coordinator import KVCacheCoordinator, RequestTables
from kvferry.cache.events import KVCacheEvent, PrefixCacheStats
from kvferry.cache.kv_cache_config import KVCacheConfig
from kvferry.cache.request import CacheRequest
from kvferry.cache.single_type import Room


class KVCacheManager:
    """Block tables of all requests, one per KV cache group, and the prefix cache they share.

    A request's life: :meth:`get_computed_blocks`, :meth:`allocate_slots` per step,
    :meth:`free`. Blocks become hits when the step that computes them is scheduled, not when it
    has run: a step must write the KV of all its requests before it reads any of it (and a
    scheduler of recurrent layers calls :meth:`new_step_starts`). Blocks that something outside
    fills are allocated with ``delay_cache_blocks`` and become hits by :meth:`cache_blocks`. Not
    thread-safe.

    A group with a window or chunks keeps the blocks that hold a token from
    :func:`~kvferry.topology.windows.first_kept_token` on; the null block stands in the place of
    the others. What the field does otherwise, and why we do not:

    - It makes hits of blocks that an external load filled only in part (the block in which a
      window begins). Another request whose window begins elsewhere would read what nobody wrote.
      Here such a block never becomes a hit.
    - It finds hits of a chunk that begins within a block without that block's first part.
    - It asserts that layers with windows do not spread a block's tokens over ranks (DCP, PCP).
      Here their blocks grow as those of full attention do.

    Args:
        kv_cache_config: blocks and groups.
        max_model_len: longest sequence, prompt and answer, in tokens.
        enable_caching: whether blocks are hashed and shared at all. Without effect in a model with
            cross attention (what its decoder keeps depends on the encoder's input, which the
            hashes do not cover) and where a block is as long as the longest sequence.
        use_eagle: whether the last block that matches is dropped from every hit, so that a drafter
            gets the model's output for it.
        log_stats: whether :meth:`make_prefix_cache_stats` has something to say.
        enable_kv_cache_events: whether :meth:`take_events` has; then it must be called.
        dcp_world_size: decode context parallel ranks, which split a block's tokens: a block of
            a block table spans as many times the spec's ``block_size``.
        pcp_world_size: prefill context parallel ranks, likewise.

    Raises:
        ValueError: an argument out of its range, or a group that no manager serves.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> None:
        for name, value in (
            ("max_model_len", max_model_len),
            ("dcp_world_size", dcp_world_size),
            ("pcp_world_size", pcp_world_size),
        ):
            if value < 1:
                raise ValueError(f"{name}: {value} is less than 1")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.log_stats = log_stats
        num_groups = len(kv_cache_config.kv_cache_groups)
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks, num_groups, enable_events=enable_kv_cache_events
        )
        """The blocks themselves."""
        self._coordinator = KVCacheCoordinator(
            kv_cache_config,
            self.block_pool,
            dcp_world_size * pcp_world_size,
            use_eagle,
            max_hit=max_model_len - 1 if enable_caching else 0,
        )
        self.enable_caching = self._coordinator.enable_caching
        """Whether requests share blocks."""
        self._tables: dict[str, RequestTables] = {}
        # Requests that were freed and not admitted again. Weak, because a manager has no other
        # way to learn that a request is gone for good.
        self._freed: WeakSet[CacheRequest] = WeakSet()
        self._no_blocks = KVCacheBlocks(((),) * num_groups)
        self._stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, from 0 to 1."""
        return self.block_pool.usage

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """What was counted since the last call; ``None`` without ``log_stats``."""
        if not self.log_stats:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def get_computed_blocks(self, request: CacheRequest) -> tuple[KVCacheBlocks, int]:
        """Looks the request's tokens up in the prefix cache.

        Takes no reference: hand both results to :meth:`allocate_slots` before anything else is
        allocated. At least the last token is left to be computed, for its logits; hits are whole
        blocks, so a prompt of whole blocks that is cached entirely misses its last block.

        Returns:
            ``(blocks, tokens)``; none for a request that wants prompt logprobs.

        Raises:
            ValueError: the request is hashed with another block size.
        """
        if not self.enable_caching or request.prompt_logprobs is not None:
            return self._no_blocks, 0
        hits, num_tokens = self._coordinator.find_longest_hit(request, request.num_tokens - 1)
        if self.log_stats:
            self._stats.record(queries=request.num_tokens, hits=num_tokens)
        return (KVCacheBlocks(hits), num_tokens) if num_tokens else (self._no_blocks, 0)

    def allocate_slots(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        reserved_blocks: int = 0,
        full_sequence_must_fit: bool = False,
    ) -> KVCacheBlocks | None:
        """Gives a request room for the tokens of the coming step, or admits it.

        ::

            | request.num_computed_tokens | new computed | external | new | lookahead |
              may be passed by a window   | hits         | blocks are allocated       |

        Blocks that windows have passed are given back first, even if the call then fails. Of the
        hits and the external tokens, those that windows pass at once get the null block.

        Args:
            request: running, or about to be.
            num_new_tokens: tokens to be computed, unverified drafts included. May be 0 when there
                are external tokens, or a hit is all that is wanted.
            num_new_computed_tokens: tokens of the local hit; what ``get_computed_blocks`` said.
            new_computed_blocks: blocks of the local hit, likewise. Those that are free use
                capacity up as new blocks would.
            num_lookahead_tokens: further tokens to make room for; cut at the model length.
            delay_cache_blocks: hash nothing now; see :meth:`cache_blocks`.
            num_encoder_tokens: tokens of the encoder's output, for cross attention; 0 once they
                have their blocks.
            num_external_computed_tokens: tokens after the local hit that a connector fills, of a
                group with a window only those that the window keeps.
            reserved_blocks: free blocks to be left for others.
            full_sequence_must_fit: whether to refuse unless all tokens that the request has so
                far would fit (``reserved_blocks`` apart), not only those of this step. A group
                with a window counts what it holds at most in steps no larger than this one.

        Returns:
            The blocks that are new, external ones included, hits and null blocks excluded;
            ``None`` when there are not enough free blocks, and then nothing else has changed.

        Raises:
            ValueError: nothing to do, a negative number, tokens past the model length, encoder
                tokens without cross attention, hits that do not fit, hits or external tokens for
                a request that holds blocks already, or a request that has computed tokens and no
                blocks, or too few for its windows. Nothing has changed.
        """
        num_computed = request.num_computed_tokens
        num_ready = num_computed + num_new_computed_tokens + num_external_computed_tokens
        num_total = num_ready + num_new_tokens
        # One branch for the usual call: the bitwise or is negative if any operand is.
        rare = num_new_computed_tokens | num_external_computed_tokens
        rare |= num_encoder_tokens | reserved_blocks
        if (
            (num_new_tokens | num_lookahead_tokens | rare) < 0
            or num_new_tokens + num_external_computed_tokens + num_new_computed_tokens == 0
            or num_total > self.max_model_len
            or (num_encoder_tokens and not self._coordinator.has_cross_attention)
        ):
            raise self._bad_counts(request, num_total, num_encoder_tokens)
        num_slots = min(num_total + num_lookahead_tokens, self.max_model_len)
        tables = held = self._tables.get(request.request_id)
        if (
            tables is not None
            and num_slots <= tables.num_slots
            and num_total < tables.next_hashed
            and tables.quiet_from <= num_computed < tables.quiet_until
            and not (rare or full_sequence_must_fit)
            and new_computed_blocks is None
        ):
            return self._no_blocks

        hits = new_computed_blocks
        if hits is None or not any(hits.blocks):
            hits = self._no_blocks
        num_local = num_computed + num_new_computed_tokens
        room = Room(num_local, num_ready, num_slots, num_encoder_tokens)
        coordinator = self._coordinator
        coordinator.check_fits(request, tables, hits.blocks, room)
        if tables is None:
            tables = coordinator.new_tables()
        coordinator.drop_passed(tables, num_computed)
        max_step_tokens = None
        if full_sequence_must_fit:
            # Only a load adds no token to be computed; the step after it computes the rest.
            max_step_tokens = num_new_tokens or max(1, request.num_tokens - num_ready)
            max_step_tokens += num_lookahead_tokens
        if not self._has_blocks(request, tables, hits, room, reserved_blocks, max_step_tokens):
            return None

        if held is None:
            # The hits of all groups first: growing may evict whatever is free.
            coordinator.add_hits(tables, hits.blocks, room)
            self._tables[request.request_id] = tables
            self._freed.discard(request)
        new_blocks = KVCacheBlocks(coordinator.grow(tables, room))
        if self.enable_caching and not delay_cache_blocks:
            # Drafts lie beyond num_tokens and may be rejected: they are never hashed.
            coordinator.cache_blocks(tables, request, min(num_total, request.num_tokens))
        coordinator.settle(tables)
        return new_blocks

    def cache_blocks(
        self,
        request: CacheRequest,
        num_computed_tokens: int,
        skip_groups: Collection[int] = (),
        first_filled: Sequence[int] | None = None,
    ) -> None:
        """Makes a request's full blocks hits, after what fills them has done so.

        Without caching, and for blocks that are hits already, nothing happens.

        Args:
            request: holds blocks, allocated with ``delay_cache_blocks``.
            num_computed_tokens: leading tokens whose KV is in the blocks. After a load that
                failed in part, those before the first block that is missing.
            skip_groups: KV cache groups of which the load filled a part only. Their blocks never
                become hits while this request holds them, those that it computes included.
            first_filled: for each group, the token from which on a load has filled it. Where a
                group has a window that begins within a block, a load need not fill what lies
                before it in that block, and unless this says that it did, that block never
                becomes a hit.

        Raises:
            ValueError: the request holds no blocks, or too few for these tokens, or has fewer
                tokens, or there is no such group, or there are more or fewer than
                ``first_filled``. Nothing has changed.
        """
        tables = self._tables.get(request.request_id)
        if tables is None:
            raise ValueError(f"request {request.request_id!r} holds no blocks that could be cached")
        coordinator = self._coordinator
        room = Room(num_computed_tokens, num_computed_tokens, num_computed_tokens)
        if not 0 <= num_computed_tokens <= request.num_tokens or coordinator.count_missing(
            tables, room, self._no_blocks.blocks
        ):
            raise ValueError(
                f"request {request.request_id!r}: num_computed_tokens: {num_computed_tokens}, but "
                f"it has {request.num_tokens} tokens and blocks "
                f"{[len(table.blocks) for table in tables.groups]}"
            )
        coordinator.note_load(tables, skip_groups, first_filled)
        if self.enable_caching:
            coordinator.cache_blocks(tables, request, num_computed_tokens)
        coordinator.settle(tables)

    def can_resume(self, request: CacheRequest, num_computed_tokens: int) -> bool:
        """Whether the request's blocks hold what token ``num_computed_tokens`` needs, once all
        tokens before it that were to be computed or loaded are.

        After a load that failed in part a group with a window may not, for only the window of
        the whole load was to be filled. The request must then be freed and admitted again.
        """
        tables = self._tables.get(request.request_id)
        return tables is not None and tables.quiet_from <= num_computed_tokens

    def free(self, request: CacheRequest) -> None:
        """Gives the request's blocks back; those that are hashed stay hits until they are reused.

        A request that was never admitted holds nothing, and nothing happens.

        Raises:
            ValueError: the request was freed before and not admitted since. A preempted request
                was freed when it was preempted.
        """
        tables = self._tables.pop(request.request_id, None)
        if tables is not None:
            self._coordinator.free(tables)
            self._freed.add(request)
        elif request in self._freed:
            raise ValueError(
                f"request {request.request_id!r} is freed twice; its blocks may belong to others"
            )

    def new_step_starts(self) -> None:
        """Tells that the steps scheduled so far have run, or will before what comes next.

        Of meaning to recurrent layers only: the state that a request writes in a step can be read
        by others in the next one. Call it before each step, or never if a step has one request.
        """
        self._coordinator.new_step_starts()

    def reset_prefix_cache(self) -> bool:
        """Forgets all hits, for example after new weights; ``False`` while requests are admitted,
        even those that hold null blocks alone.
        """
        if self._tables or not self._coordinator.reset_prefix_cache():
            return False
        self._stats.reset = True
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """What has become a hit and what is none any more since the last call, in order."""
        return self.block_pool.take_events()

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Leading blocks of a request that all requests with blocks share, per KV cache group.

        0 for groups that give blocks back, and for an unknown request.
        """
        tables = self._tables.get(request_id)
        if tables is None:
            return [0] * len(self._no_blocks.blocks)
        return self._coordinator.count_common_prefix(tables, len(self._tables))

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks that a request holds at once, over all groups but cross attention.

        Args:
            num_tokens: slots that it needs in the end, the lookahead included.
            max_step_tokens: most tokens that one call of :meth:`allocate_slots` adds, the
                lookahead included; hits and external tokens do not count.
        """
        return self._coordinator.peak_blocks(num_tokens, max_step_tokens)

    def blocks_to_come(
        self,
        request: CacheRequest,
        max_step_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Free blocks that a request takes at most until all its tokens so far are computed.

        Those of an encoder's output left out, and as long as it shares no block that a window of
        its own passes meanwhile: others may keep such a block, and then another one is taken.

        Args:
            request: holds blocks, or is about to be admitted with the hit that follows.
            max_step_tokens: most tokens that one call of :meth:`allocate_slots` adds.
            num_new_computed_tokens: see :meth:`allocate_slots`.
            new_computed_blocks: likewise; those that are free are taken, so they count.
            num_external_computed_tokens: likewise.
        """
        coordinator = self._coordinator
        tables = self._tables.get(request.request_id) or coordinator.new_tables()
        hits = self._no_blocks if new_computed_blocks is None else new_computed_blocks
        num_local = request.num_computed_tokens + num_new_computed_tokens
        num_ready = num_local + num_external_computed_tokens
        room = Room(num_local, num_ready, num_ready)
        num_missing = coordinator.count_missing_for_all(
            tables, room, hits.blocks, request.num_tokens, max_step_tokens
        )
        return num_missing + coordinator.count_free_hits(hits.blocks, room)

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks that a request holds in all groups, null blocks left out."""
        tables = self._tables.get(request_id)
        if tables is None:
            return 0
        return sum(len(table.blocks) - table.num_passed for table in tables.groups)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks that a request holds; none for an unknown one."""
        tables = self._tables.get(request_id)
        if tables is None:
            return self._no_blocks
        return KVCacheBlocks(tuple(table.blocks.copy() for table in tables.groups))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of those blocks, one list per KV cache group; 0 is the null block."""
        tables = self._tables.get(request_id)
        if tables is None:
            return self._no_blocks.get_block_ids()
        return tuple([block.block_id for block in table.blocks] for table in tables.groups)

    def create_empty_block_list(self) -> KVCacheBlocks:
        """No blocks, one list per KV cache group."""
        return self._no_blocks

    def _has_blocks(
        self,
        request: CacheRequest,
        tables: RequestTables,
        hits: KVCacheBlocks,
        room: Room,
        reserved_blocks: int,
        max_step_tokens: int | None,
    ) -> bool:
        """Whether enough blocks are free for ``room``, and ``reserved_blocks`` others.

        With ``max_step_tokens``, the bound of the steps to come, all tokens that the request has
        so far must fit as well.
        """
        coordinator, blocks = self._coordinator, hits.blocks
        num_free = self.block_pool.get_num_free_blocks() - coordinator.count_free_hits(blocks, room)
        if max_step_tokens is not None:
            num_tokens = min(request.num_tokens, self.max_model_len)
            if num_free < coordinator.count_missing_for_all(
                tables, room, blocks, num_tokens, max_step_tokens
            ):
                return False
        return coordinator.count_missing(tables, room, blocks) <= num_free - reserved_blocks

    def _bad_counts(
        self, request: CacheRequest, num_total: int, num_encoder_tokens: int
    ) -> ValueError:
        """The error for numbers that no request can have."""
        if num_total > self.max_model_len:
            reason = f"{num_total} tokens are more than max_model_len={self.max_model_len}"
        elif num_encoder_tokens > 0 and not self._coordinator.has_cross_attention:
            reason = (
                f"num_encoder_tokens: {num_encoder_tokens}, but no KV cache group is cross "
                "attention; leave it at 0"
            )
        else:
            reason = (
                "a number of tokens or blocks is negative, or num_new_tokens, "
                "num_new_computed_tokens and num_external_computed_tokens are all 0: there is "
                "nothing to allocate"
            )
        return ValueError(f"request {request.request_id!r}: {reason}")
