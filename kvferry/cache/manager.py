"""The KV cache manager: the only interface through which the scheduler gets blocks."""

from collections.abc import Collection, Sequence
from weakref import WeakSet

from kvferry.cache.block_pool import BlockPool, KVCacheBlocks
from kvferry.cache.coordinator import KVCacheCoordinator, RequestTables
from kvferry.cache.events import KVCacheEvent, PrefixCacheStats
from kvferry.cache.kv_cache_config import KVCacheConfig
from kvferry.cache.request import CacheRequest
from kvferry.cache.single_type import Room


class KVCacheManager:
    """The block tables of all requests, one per KV cache group, and the shared prefix cache.

    The life of a request: :meth:`get_computed_blocks`, then :meth:`allocate_slots` in each step,
    then :meth:`free`. Blocks become hits when their step is scheduled, not after it has run.
    Therefore a step must write the KV of all its requests before it reads any KV (and a scheduler
    of recurrent layers calls :meth:`new_step_starts`). Blocks that another component fills are
    allocated with ``delay_cache_blocks``; :meth:`cache_blocks` makes them hits. Not thread-safe.

    A group with a window or chunks keeps the blocks with tokens from
    :func:`~kvferry.topology.windows.first_kept_token` on; the null block replaces all blocks
    before. Other managers of the field differ in three ways:

    - They make hits of blocks that an external load filled only in part (the block in which a
      window begins). Another request, whose window begins elsewhere, would read unwritten data.
      Here such a block never becomes a hit.
    - They find hits of a chunk that begins within a block, without the first part of this block.
    - They assert that layers with windows do not spread a block's tokens over ranks (DCP, PCP).
      Here the blocks of such layers grow like the blocks of full attention.

    Args:
        kv_cache_config: blocks and groups.
        max_model_len: number of tokens of the longest sequence, prompt and answer.
        enable_caching: whether blocks are hashed and shared. Without effect in a model with cross
            attention (its decoder's cells depend on the encoder's input, which no hash covers) and
            if a block is as long as the longest sequence.
        use_eagle: whether the last matching block is dropped from every hit, so that a drafter gets
            the model's output for this block.
        log_stats: whether :meth:`make_prefix_cache_stats` returns counts.
        enable_kv_cache_events: whether :meth:`take_events` returns events; then it must be called.
        dcp_world_size: decode context parallel ranks, which split a block's tokens: a block of a
            block table spans this many times the ``block_size`` of the spec.
        pcp_world_size: prefill context parallel ranks, with the same effect.

    Raises:
        ValueError: an argument is out of range, or no manager serves a group.
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
        """Pool of all blocks."""
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
        # Requests that were freed and not admitted again. Weak references, because a manager cannot
        # otherwise learn that a request is gone for good.
        self._freed: WeakSet[CacheRequest] = WeakSet()
        self._no_blocks = KVCacheBlocks(((),) * num_groups)
        self._stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """Share of blocks held by requests, from 0 to 1."""
        return self.block_pool.usage

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The counts since the last call; ``None`` without ``log_stats``."""
        if not self.log_stats:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def get_computed_blocks(self, request: CacheRequest) -> tuple[KVCacheBlocks, int]:
        """Looks the request's tokens up in the prefix cache.

        Takes no reference: pass both results to :meth:`allocate_slots` before any other allocation.
        At least the last token must still be computed, for its logits. Hits are whole blocks, so a
        fully cached prompt of whole blocks misses its last block.

        Returns:
            ``(blocks, tokens)``; empty and 0 for a request that wants prompt logprobs.

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
        """Gives a request room for the tokens of the next step, or admits the request.

        ::

            | request.num_computed_tokens | new computed | external | new | lookahead |
              may be passed by a window   | hits         | blocks are allocated       |

        Blocks that windows have passed are given back first, even if the call then fails. If a
        window passes some of the hits and external tokens at once, the null block replaces them.

        Args:
            request: a running request, or a request to be admitted.
            num_new_tokens: number of tokens to compute, including unverified drafts. May be 0 if
                there are external tokens, or if only a hit is wanted.
            num_new_computed_tokens: tokens of the local hit, from ``get_computed_blocks``.
            new_computed_blocks: blocks of the local hit, from ``get_computed_blocks``. Free blocks
                among them use capacity like new blocks.
            num_lookahead_tokens: further tokens that need room; cut at the model length.
            delay_cache_blocks: whether to hash nothing now; see :meth:`cache_blocks`.
            num_encoder_tokens: tokens of the encoder's output, for cross attention; 0 after they
                have their blocks.
            num_external_computed_tokens: tokens after the local hit that a connector fills. In a
                group with a window it fills only the tokens in the window.
            reserved_blocks: number of free blocks to leave for other requests.
            full_sequence_must_fit: whether to refuse unless all present tokens of the request would
                fit (``reserved_blocks`` not counted), not only the tokens of this step. A group
                with a window counts its largest number of blocks in steps no larger than this step.

        Returns:
            The new blocks, including blocks for external tokens, without hits and null blocks;
            ``None`` if too few blocks are free, in which case nothing else has changed.

        Raises:
            ValueError: nothing to do, a negative number, tokens past the model length, encoder
                tokens without cross attention, hits that do not fit, hits or external tokens for a
                request that holds blocks, or a request with computed tokens and no blocks, or too
                few blocks for its windows. Nothing has changed.
        """
        num_computed = request.num_computed_tokens
        num_ready = num_computed + num_new_computed_tokens + num_external_computed_tokens
        num_total = num_ready + num_new_tokens
        # A single branch for the usual call: the bitwise or is negative if any operand is.
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
            # A pure load adds no token to compute; the step after the load computes the rest.
            max_step_tokens = num_new_tokens or max(1, request.num_tokens - num_ready)
            max_step_tokens += num_lookahead_tokens
        if not self._has_blocks(request, tables, hits, room, reserved_blocks, max_step_tokens):
            return None

        if held is None:
            # The hits of all groups first: growing may evict any free block.
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
        """Makes a request's full blocks hits, after they have been filled.

        Without caching, and for blocks that are hits already, nothing happens.

        Args:
            request: a request with blocks that were allocated with ``delay_cache_blocks``.
            num_computed_tokens: number of leading tokens whose KV is in the blocks. After a load
                that failed in part, the tokens before the first missing block.
            skip_groups: KV cache groups that a load filled in part. Their blocks never
                become hits while this request holds them, even blocks that it computes.
            first_filled: a token per group, from which on a load has filled the group. If a group's
                window begins within a block, a load need not fill the tokens of this block before
                the window. Unless ``first_filled`` says that they are filled, the block never
                becomes a hit.

        Raises:
            ValueError: the request has no blocks, too few blocks for these tokens, or fewer tokens;
                a group does not exist; or ``first_filled`` has another number of tokens than there
                are groups. Nothing has changed.
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
        """Whether the request's blocks hold everything that token ``num_computed_tokens`` needs,
        once all tokens before it are computed or loaded.

        After a load that failed in part, a group with a window may lack tokens, for only the window
        of the whole load was to be filled. The request must then be freed and admitted again.
        """
        tables = self._tables.get(request.request_id)
        return tables is not None and tables.quiet_from <= num_computed_tokens

    def free(self, request: CacheRequest) -> None:
        """Gives the request's blocks back; hashed blocks stay hits until they are reused.

        For a request that was never admitted, nothing happens.

        Raises:
            ValueError: the request was freed before and not admitted since. Preemption also frees a
                request.
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
        """Records that the steps scheduled so far have run, or will run before the next step.

        This matters for recurrent layers only: others can read the state that a request writes in a
        step from the next step on. Call it before each step, or never if a step has a single
        request.
        """
        self._coordinator.new_step_starts()

    def reset_prefix_cache(self) -> bool:
        """Forgets all hits, for example after new weights; returns ``False`` while requests are
        admitted, even requests that hold only null blocks.
        """
        if self._tables or not self._coordinator.reset_prefix_cache():
            return False
        self._stats.reset = True
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """The changes of hits since the last call, in order: new hits and removed hits."""
        return self.block_pool.take_events()

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Number of leading blocks that all requests with blocks share, per KV cache group.

        0 for groups that give blocks back, and for an unknown request.
        """
        tables = self._tables.get(request_id)
        if tables is None:
            return [0] * len(self._no_blocks.blocks)
        return self._coordinator.count_common_prefix(tables, len(self._tables))

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Largest number of blocks of a request at a time, in all groups but cross attention.

        Args:
            num_tokens: number of slots that the request needs in the end, including the lookahead.
            max_step_tokens: largest number of tokens that a call of :meth:`allocate_slots` adds,
                including the lookahead; hits and external tokens do not count.
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
        """Largest number of free blocks that a request takes until its present tokens are computed.

        Without blocks for an encoder's output, and as long as the request shares no block that its
        own window passes: others may keep such a block, and then a further block is taken.

        Args:
            request: a request with blocks, or a request to be admitted with the hit below.
            max_step_tokens: largest number of tokens that a call of :meth:`allocate_slots` adds.
            num_new_computed_tokens: see :meth:`allocate_slots`.
            new_computed_blocks: see :meth:`allocate_slots`; free blocks among them count.
            num_external_computed_tokens: see :meth:`allocate_slots`.
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
        """Number of a request's blocks in all groups, without null blocks."""
        tables = self._tables.get(request_id)
        if tables is None:
            return 0
        return sum(len(table.blocks) - table.num_passed for table in tables.groups)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks of a request; no blocks for an unknown request."""
        tables = self._tables.get(request_id)
        if tables is None:
            return self._no_blocks
        return KVCacheBlocks(tuple(table.blocks.copy() for table in tables.groups))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Ids of a request's blocks, in a list per KV cache group; 0 is the null block."""
        tables = self._tables.get(request_id)
        if tables is None:
            return self._no_blocks.get_block_ids()
        return tuple([block.block_id for block in table.blocks] for table in tables.groups)

    def create_empty_block_list(self) -> KVCacheBlocks:
        """An object without blocks, with an empty list per KV cache group."""
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
        """Whether enough blocks are free for ``room``, and ``reserved_blocks`` more.

        With ``max_step_tokens``, the limit of later steps, all present tokens of the request must
        also fit.
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
        """The error for numbers that are invalid for every request."""
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
