"""The KV cache manager: the scheduler's one door to blocks."""

from weakref import WeakSet

from kvferry.cache.block_pool import BlockPool
from kvferry.cache.blocks import KVCacheBlocks
from kvferry.cache.coordinator import KVCacheCoordinator, Tables
from kvferry.cache.kv_cache_config import KVCacheConfig
from kvferry.cache.request import CacheRequest
from kvferry.cache.stats import PrefixCacheStats


class KVCacheManager:
    """Block tables of all requests, and the prefix cache they share.

    A request's life: :meth:`get_computed_blocks`, :meth:`allocate_slots` per step,
    :meth:`free`. Blocks become hits when the step that computes them is scheduled, not when it
    has run: a step must write the KV of all its requests before it reads any of it. Blocks that
    something outside fills are allocated with ``delay_cache_blocks`` and become hits by
    :meth:`cache_blocks`. Not thread-safe.

    Args:
        kv_cache_config: blocks and groups; one full-attention group for now.
        max_model_len: longest sequence, prompt and answer, in tokens.
        enable_caching: whether blocks are hashed and shared at all.
        use_eagle: not supported yet.
        log_stats: whether :meth:`make_prefix_cache_stats` has something to say.
        enable_kv_cache_events: not supported yet.
        dcp_world_size: ranks that split a block's tokens; only 1 is supported yet.
        pcp_world_size: likewise.

    Raises:
        ValueError: an argument out of its range, or something that is not supported yet.
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
        if max_model_len < 1:
            raise ValueError(f"max_model_len: {max_model_len} is less than 1")
        for name, value, default in (
            ("use_eagle", use_eagle, False),
            ("enable_kv_cache_events", enable_kv_cache_events, False),
            ("dcp_world_size", dcp_world_size, 1),
            ("pcp_world_size", pcp_world_size, 1),
        ):
            if value != default:
                raise ValueError(f"{name}: {value} is not supported yet; leave it at {default}")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.log_stats = log_stats
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks, len(kv_cache_config.kv_cache_groups)
        )
        """The blocks themselves."""
        self._coordinator = KVCacheCoordinator(kv_cache_config, self.block_pool)
        self._tables: dict[str, Tables] = {}
        # Requests that were freed and not admitted again. Weak, because a manager has no other
        # way to learn that a request is gone for good.
        self._freed: WeakSet[CacheRequest] = WeakSet()
        self._no_blocks = KVCacheBlocks(((),) * len(kv_cache_config.kv_cache_groups))
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
                                          | hits         | blocks are allocated       |

        Args:
            request: running, or about to be.
            num_new_tokens: tokens to be computed, unverified drafts included. May be 0 when there
                are external tokens.
            num_new_computed_tokens: tokens of the local hit; what ``get_computed_blocks`` said.
            new_computed_blocks: blocks of the local hit, likewise. Those that are free use
                capacity up as new blocks would.
            num_lookahead_tokens: further tokens to make room for; cut at the model length.
            delay_cache_blocks: hash nothing now; see :meth:`cache_blocks`.
            num_encoder_tokens: not supported yet.
            num_external_computed_tokens: tokens after the local hit that a connector fills.
            reserved_blocks: free blocks to be left for others.
            full_sequence_must_fit: whether to refuse unless all tokens that the request has so
                far would fit (``reserved_blocks`` apart), not only those of this step.

        Returns:
            The blocks that are new, external ones included and hits excluded; ``None`` when there
            are not enough free blocks, and then nothing has changed.

        Raises:
            ValueError: nothing to do, a negative number, tokens past the model length, hits that
                do not fit or come for a request that holds blocks already, or a request that has
                computed tokens and no blocks. Nothing has changed.
        """
        num_total = (
            request.num_computed_tokens
            + num_new_computed_tokens
            + num_external_computed_tokens
            + num_new_tokens
        )
        # One branch for the usual call: the bitwise or is negative if any operand is.
        counts = num_new_tokens | num_new_computed_tokens | num_external_computed_tokens
        if (
            (counts | num_lookahead_tokens | reserved_blocks) < 0
            or num_new_tokens + num_external_computed_tokens == 0
            or num_total > self.max_model_len
            or num_encoder_tokens
        ):
            raise self._bad_counts(request, num_total, num_encoder_tokens)
        coordinator = self._coordinator
        hits = self._no_blocks if new_computed_blocks is None else new_computed_blocks
        tables = held = self._tables.get(request.request_id)
        num_free_hits = 0
        if tables is None or num_new_computed_tokens or hits is not self._no_blocks:
            num_free_hits = self._check_hits(request, hits, num_new_computed_tokens)
        if tables is None:
            tables = coordinator.new_tables()

        num_free = self.block_pool.get_num_free_blocks()
        if full_sequence_must_fit:
            num_needed = coordinator.count_missing(tables, request.num_tokens, hits.blocks)
            if num_needed + num_free_hits > num_free:
                return None
        num_slots = min(num_total + num_lookahead_tokens, self.max_model_len)
        num_needed = coordinator.count_missing(tables, num_slots, hits.blocks)
        if num_needed + num_free_hits > num_free - reserved_blocks:
            return None

        if held is None:
            # Hits first: growing may evict whatever is free.
            coordinator.add_hits(tables, hits.blocks)
            self._tables[request.request_id] = tables
            self._freed.discard(request)
        new_blocks = self._no_blocks
        if num_needed:
            new_blocks = KVCacheBlocks(coordinator.grow(tables, num_slots))
        if self.enable_caching and not delay_cache_blocks:
            # Drafts lie beyond num_tokens and may be rejected: they are never hashed.
            coordinator.cache_blocks(tables, request, min(num_total, request.num_tokens))
        return new_blocks

    def cache_blocks(self, request: CacheRequest, num_computed_tokens: int) -> None:
        """Makes a request's full blocks hits, after what fills them has done so.

        Without caching, and for blocks that are hits already, nothing happens.

        Args:
            request: holds blocks, allocated with ``delay_cache_blocks``.
            num_computed_tokens: leading tokens whose KV is in the blocks. After a load that
                failed in part, those before the first block that is missing.

        Raises:
            ValueError: the request holds no blocks, or too few for these tokens, or has fewer
                tokens.
        """
        tables = self._tables.get(request.request_id)
        if tables is None:
            raise ValueError(f"request {request.request_id!r} holds no blocks that could be cached")
        if not 0 <= num_computed_tokens <= request.num_tokens or self._coordinator.count_missing(
            tables, num_computed_tokens, self._no_blocks.blocks
        ):
            raise ValueError(
                f"request {request.request_id!r}: num_computed_tokens: {num_computed_tokens}, but "
                f"it has {request.num_tokens} tokens and blocks "
                f"{[len(table.blocks) for table in tables]}"
            )
        if self.enable_caching:
            self._coordinator.cache_blocks(tables, request, num_computed_tokens)

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

    def reset_prefix_cache(self) -> bool:
        """Forgets all hits, for example after new weights; ``False`` while blocks are held."""
        if not self.block_pool.reset_prefix_cache():
            return False
        self._stats.reset = True
        return True

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks that a request holds; none for an unknown one."""
        tables = self._tables.get(request_id)
        if tables is None:
            return self._no_blocks
        return KVCacheBlocks(tuple(table.blocks.copy() for table in tables))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of those blocks, one list per KV cache group."""
        tables = self._tables.get(request_id)
        if tables is None:
            return self._no_blocks.get_block_ids()
        return tuple([block.block_id for block in table.blocks] for table in tables)

    def create_empty_block_list(self) -> KVCacheBlocks:
        """No blocks, one list per KV cache group."""
        return self._no_blocks

    def _check_hits(
        self, request: CacheRequest, hits: KVCacheBlocks, num_new_computed_tokens: int
    ) -> int:
        """How many of the hits are free, once they are known to fit."""
        is_held = request.request_id in self._tables
        if not is_held and request.num_computed_tokens:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_computed_tokens} computed tokens "
                "and no blocks; set num_computed_tokens to 0 when a request is freed"
            )
        if self.enable_caching:
            self._coordinator.hash_blocks(request)  # so that what can fail has done so by now
        if not num_new_computed_tokens and not any(hits.blocks):
            return 0
        if is_held:
            raise ValueError(
                f"request {request.request_id!r} holds blocks already; give the hit when it is "
                "admitted"
            )
        return self._coordinator.count_free_hits(request, hits.blocks, num_new_computed_tokens)

    def _bad_counts(
        self, request: CacheRequest, num_total: int, num_encoder_tokens: int
    ) -> ValueError:
        """The error for numbers that no request can have."""
        if num_encoder_tokens:
            reason = f"num_encoder_tokens: {num_encoder_tokens} is not supported yet; leave it at 0"
        elif num_total > self.max_model_len:
            reason = f"{num_total} tokens are more than max_model_len={self.max_model_len}"
        else:
            reason = (
                "a number of tokens or blocks is negative, or num_new_tokens and "
                "num_external_computed_tokens are both 0: there is nothing to allocate"
            )
        return ValueError(f"request {request.request_id!r}: {reason}")
