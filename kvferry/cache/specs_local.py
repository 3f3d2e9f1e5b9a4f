"""Specs of layers with a bounded view of the past: sliding windows, chunks, recurrent states.

Blocks below this view are freed before a step's blocks are allocated. Therefore a request holds at
most the tokens in view and the tokens of a step. :mod:`kvferry.topology.windows` contains the rule
for the first token that is kept.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from kvferry.cache.specs import AttentionSpec, CacheLimits, KVCacheSpec, check_count
from kvferry.topology.tensors import ITEMSIZES, dtype_name


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer whose tokens attend to the last ``sliding_window`` tokens, including themselves.

    >>> spec = SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=4096)
    >>> limits = CacheLimits(max_model_len=32768, max_num_batched_tokens=2048)
    >>> spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
    385
    """

    sliding_window: int = field(kw_only=True)
    """Number of tokens to which a token attends, including itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "sliding_window")

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`~kvferry.cache.KVCacheSpec.slot_rule`: the window."""
        return ("window", self.sliding_window)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Number of bytes of a layer on a rank: the window before a step, and the step's tokens.

        This is a block more than the tokens need, because the window may begin within a block. vLLM
        asserts that tokens are not spread over ranks; here such a block just holds more tokens.
        """
        num_tokens = min(self.sliding_window - 1 + limits.max_step_tokens, limits.max_model_len)
        return (self.count_blocks(num_tokens, limits) + 1) * self.page_size_bytes


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer whose tokens attend to the tokens before them in the same chunk.

    >>> spec = ChunkedLocalAttentionSpec(16, 8, 128, "bfloat16", attention_chunk_size=8192)
    >>> limits = CacheLimits(max_model_len=131072, max_num_batched_tokens=2048)
    >>> spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
    640
    """

    attention_chunk_size: int = field(kw_only=True)
    """Number of tokens of a chunk; chunks begin at multiples of this number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "attention_chunk_size")

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`~kvferry.cache.KVCacheSpec.slot_rule`: the chunk."""
        return ("chunk", self.attention_chunk_size)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Number of bytes of a layer on a rank: the chunk before a step, and the step's tokens.

        If chunks do not begin with a block, this is a block more than vLLM counts; the block is
        needed.
        """
        num_tokens = self.attention_chunk_size + limits.max_step_tokens
        is_aligned = self.attention_chunk_size % (self.block_size * limits.num_token_shards) == 0
        num_blocks = self.count_blocks(num_tokens, limits) + (not is_aligned)
        return min(num_blocks, self.count_blocks(limits.max_model_len, limits)) * (
            self.page_size_bytes
        )


MAMBA_CACHE_MODES = ("none", "all")


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A layer that keeps the state after the last token; a block is a single state.

    >>> spec = MambaSpec(64, shapes=[(3, 8192), (8192, 16)], dtypes=["bfloat16", "float32"])
    >>> spec.page_size_bytes
    573440
    """

    shapes: Sequence[Sequence[int]]
    """Shape of each tensor of the state on a rank; stored as tuples."""
    dtypes: Sequence[Any]
    """Dtype of each tensor: a torch dtype or its name; stored as bare names."""
    page_size_padded: int | None = None
    """Number of bytes to which a page is padded, so that pages of unlike layers agree."""
    num_speculative_blocks: int = 0
    """Number of states of drafted tokens, kept until it is known which drafts are accepted."""
    mamba_cache_mode: str = "none"
    """Mode of the state cache, with vLLM's names. ``"none"``: a single block holds a request of any
    length, so its state is updated in place and no prefix can be a hit; ``block_size`` is the model
    length or more. ``"all"``: the state at the end of every block is kept until the next step, so
    that a prefix can be a hit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            shapes = tuple(tuple(shape) for shape in self.shapes)
        except TypeError as error:
            raise ValueError(
                f"MambaSpec.shapes: {self.shapes!r} is not one shape per state, such as ((3, 4),)"
            ) from error
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "dtypes", tuple(dtype_name(dtype) for dtype in self.dtypes))
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ValueError(
                f"MambaSpec.shapes: {len(self.shapes)} shapes and {len(self.dtypes)} dtypes; give "
                "one dtype per shape, and one shape at least"
            )
        if min(min(shape, default=0) for shape in self.shapes) < 1:
            raise ValueError(f"MambaSpec.shapes: {self.shapes} has a size that is not 1 or more")
        check_count(self, "num_speculative_blocks", least=0)
        if self.mamba_cache_mode not in MAMBA_CACHE_MODES:
            raise ValueError(
                f"MambaSpec.mamba_cache_mode: {self.mamba_cache_mode!r} is none of "
                f"{', '.join(MAMBA_CACHE_MODES)}"
            )
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise ValueError(
                f"MambaSpec.page_size_padded: {self.page_size_padded} bytes are fewer than the "
                f"state needs; give {self.real_page_size_bytes} or more"
            )

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`~kvferry.cache.KVCacheSpec.slot_rule`: the states kept."""
        return ("mamba", self.num_speculative_blocks, self.mamba_cache_mode)

    @property
    def real_page_size_bytes(self) -> int:
        """Number of bytes of a state without padding."""
        return sum(
            prod(shape) * ITEMSIZES[dtype]
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def page_size_bytes(self) -> int:
        """Number of bytes of a state of a layer on a rank, including padding."""
        return self.page_size_padded or self.real_page_size_bytes

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Number of bytes of a layer on a rank: the states that a step reads and writes.

        With ``"all"``, vLLM once published a limit of a state per block of the whole request. Older
        states are freed here, so the limit is lower if a step is shorter than the request.
        """
        num_states = 1
        if self.mamba_cache_mode == "all":
            num_states = min(
                -(-limits.max_model_len // self.block_size),
                1 + -(-limits.max_step_tokens // self.block_size),
            )
        return (num_states + self.num_speculative_blocks) * self.page_size_bytes
