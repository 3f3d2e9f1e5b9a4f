"""Specs of layers that look back a bounded way: sliding windows and chunks.

Blocks below what a layer looks at are freed before a step's blocks are allocated, so a request
holds at most the tokens looked back at plus those of one step. The rule for the first token kept
is in :mod:`kvferry.topology.windows`.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvferry.cache.specs import AttentionSpec, CacheLimits, check_count


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer whose tokens attend to the last ``sliding_window`` tokens, themselves included.

    >>> spec = SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=4096)
    >>> limits = CacheLimits(max_model_len=32768, max_num_batched_tokens=2048)
    >>> spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
    385
    """

    sliding_window: int = field(kw_only=True)
    """Tokens that a token attends to, itself included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "sliding_window")

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`~kvferry.cache.KVCacheSpec.slot_rule`: the window."""
        return ("window", self.sliding_window)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Bytes of one layer on one rank: the window before a step, and the step's tokens.

        One block more than the tokens need, because the window need not begin with a block.
        vLLM asserts that tokens are not spread over ranks; here such a block just holds more.
        """
        num_tokens = min(self.sliding_window - 1 + limits.max_step_tokens, limits.max_model_len)
        return (self.count_blocks(num_tokens, limits) + 1) * self.page_size_bytes


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer whose tokens attend to those before them in the same chunk.

    >>> spec = ChunkedLocalAttentionSpec(16, 8, 128, "bfloat16", attention_chunk_size=8192)
    >>> limits = CacheLimits(max_model_len=131072, max_num_batched_tokens=2048)
    >>> spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
    640
    """

    attention_chunk_size: int = field(kw_only=True)
    """Tokens of a chunk; chunks begin at its multiples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "attention_chunk_size")

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`~kvferry.cache.KVCacheSpec.slot_rule`: the chunk."""
        return ("chunk", self.attention_chunk_size)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Bytes of one layer on one rank: the chunk before a step, and the step's tokens.

        Where chunks do not begin with a block, one more block than vLLM counts, which is needed.
        """
        num_tokens = self.attention_chunk_size + limits.max_step_tokens
        is_aligned = self.attention_chunk_size % (self.block_size * limits.num_token_shards) == 0
        num_blocks = self.count_blocks(num_tokens, limits) + (not is_aligned)
        return min(num_blocks, self.count_blocks(limits.max_model_len, limits)) * (
            self.page_size_bytes
        )
