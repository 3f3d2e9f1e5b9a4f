"""KV cache specs: the cells that a layer keeps per token, and their memory.

The formulas are the formulas that vLLM publishes (``vllm/v1/kv_cache_interface.py``, version 0.32);
a docstring says so if its formula differs. Windows, chunks and recurrent state are in
:mod:`kvferry.cache.specs_local`, groups of unlike layers in :mod:`kvferry.cache.kv_cache_config`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from kvferry.topology.tensors import ITEMSIZES, dtype_name


def check_count(owner: object, *names: str, least: int = 1) -> None:
    """Checks that fields of a spec are integers, ``least`` or more.

    Raises:
        ValueError: a field is not such an integer.
    """
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or value < least:
            wanted = "a positive integer" if least == 1 else f"an integer of {least} or more"
            raise ValueError(f"{type(owner).__name__}.{name}: {value!r} is not {wanted}")


@dataclass(frozen=True)
class CacheLimits:
    """The limits that bound the memory of a request.

    Raises:
        ValueError: a limit is not a positive integer.
    """

    max_model_len: int
    """Number of tokens of the longest sequence, prompt and answer."""
    max_num_batched_tokens: int | None = None
    """Largest number of tokens of a request that a step computes, including drafts; ``None`` if a
    step may compute ``max_model_len`` tokens."""
    max_num_encoder_tokens: int | None = None
    """Number of tokens of an encoder's longest output; needed by cross attention only."""
    dcp_world_size: int = 1
    """Number of decode context parallel ranks that share the tokens of a block table entry."""
    pcp_world_size: int = 1
    """Number of prefill context parallel ranks that share the tokens of a block table entry."""

    def __post_init__(self) -> None:
        check_count(self, "max_model_len", "dcp_world_size", "pcp_world_size")
        for name in ("max_num_batched_tokens", "max_num_encoder_tokens"):
            if getattr(self, name) is not None:
                check_count(self, name)

    @property
    def num_token_shards(self) -> int:
        """Number of ranks with different tokens of a request."""
        return self.dcp_world_size * self.pcp_world_size

    @property
    def max_step_tokens(self) -> int:
        """Largest number of tokens of a request that a step computes."""
        if self.max_num_batched_tokens is None:
            return self.max_model_len
        return min(self.max_num_batched_tokens, self.max_model_len)


@dataclass(frozen=True)
class KVCacheSpec(ABC):
    """The cells that a layer keeps. Layers with equal specs may share a block table.

    Raises:
        ValueError: a field is out of range.
    """

    block_size: int
    """Number of tokens per block."""

    MERGED_FIELDS: ClassVar[frozenset[str]] = frozenset()
    """Fields in which layers of a group may differ; :meth:`merge` says how they combine."""

    def __post_init__(self) -> None:
        check_count(self, "block_size")

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Number of bytes of a block of a layer on a rank."""

    @abstractmethod
    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Number of bytes of a layer on a rank that the longest request may hold at once.

        Raises:
            ValueError: a limit that this kind of layer needs is not set.
        """

    @property
    def slot_rule(self) -> Hashable:
        """The rule that decides which blocks a request holds. Layers with equal rules and block
        sizes hold the same blocks, so they may share a block table even if their pages differ in
        size.
        """
        return self

    @property
    def num_reserved_blocks(self) -> int:
        """Number of blocks that a group of such layers takes from the pool permanently."""
        return 0

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same layer in blocks of ``block_size`` tokens."""
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Merges specs into a single spec that represents all layers of a group.

        Raises:
            ValueError: there are no specs, a spec is of another class, or the specs differ.
        """
        if not specs:
            raise ValueError(f"{cls.__name__}.merge: no specs; give one or more")
        first = specs[0]
        for index, spec in enumerate(specs):
            if type(spec) is not cls:
                raise ValueError(
                    f"{cls.__name__}.merge: spec {index} is a {type(spec).__name__}; layers of "
                    "one group are of one kind, put it into a group of its own"
                )
            for name in (entry.name for entry in fields(first)):
                value, wanted = getattr(spec, name), getattr(first, name)
                if name not in cls.MERGED_FIELDS and value != wanted:
                    raise ValueError(
                        f"{cls.__name__}.merge: {name}: spec {index} has {value!r}, spec 0 has "
                        f"{wanted!r}; layers that share a block table must agree"
                    )
        return first


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """A layer that keeps keys and values per token and head."""

    num_kv_heads: int
    """Number of KV heads of a rank."""
    head_size: int
    """Number of elements of a key per head; with MLA, of the latent."""
    dtype: Any
    """Dtype of the cells: a torch dtype or its name; stored as the bare name, for example
    ``"bfloat16"``."""
    use_mla: bool = False
    """Whether the layer keeps a latent instead of keys and values."""
    page_size_padded: int | None = None
    """Number of bytes to which a page is padded, so that pages of unlike layers agree."""
    head_size_v: int | None = None
    """Number of elements of a value per head; ``head_size`` by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "num_kv_heads", "head_size")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if not self.use_mla:
            # Equal layers have equal specs, even if only some give the size of a value.
            object.__setattr__(self, "head_size_v", self.elements_per_head - self.head_size)
            check_count(self, "head_size_v")
        elif self.head_size_v is not None:
            raise ValueError(
                f"{type(self).__name__}.head_size_v: {self.head_size_v} has no meaning with "
                "use_mla, which keeps one latent of head_size elements; leave it out"
            )
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise ValueError(
                f"{type(self).__name__}.page_size_padded: {self.page_size_padded} bytes are fewer "
                f"than the page needs; give {self.real_page_size_bytes} or more"
            )

    @property
    def elements_per_head(self) -> int:
        """Number of elements per token and KV head, all parts together."""
        if self.use_mla:
            return self.head_size
        return self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes per token, all heads and parts together."""
        return self.num_kv_heads * self.elements_per_head * ITEMSIZES[self.dtype]

    @property
    def real_page_size_bytes(self) -> int:
        """Number of bytes of a block of a layer without padding."""
        return self.block_size * self.bytes_per_token

    @property
    def page_size_bytes(self) -> int:
        """Number of bytes of a block of a layer on a rank, including padding."""
        return self.page_size_padded or self.real_page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same layer in blocks of ``block_size`` tokens; padding grows in proportion."""
        padded = self.page_size_padded
        if padded is not None:
            padded = -(-padded * block_size // self.block_size)
        return replace(self, block_size=block_size, page_size_padded=padded)

    def count_blocks(self, num_tokens: int, limits: CacheLimits) -> int:
        """Number of blocks for ``num_tokens`` consecutive tokens that begin at the start of a
        block.
        """
        return -(-num_tokens // (self.block_size * limits.num_token_shards))


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose blocks are kept to the end: a token may attend to all tokens before it.

    With ``sliding_window`` or ``attention_chunk_size``, the layer computes within a window or
    chunk. It still keeps the blocks of all tokens, so that it can share a block table with layers
    that attend to all tokens.

    >>> spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    >>> spec.page_size_bytes
    65536
    """

    sliding_window: int | None = None
    """Number of tokens to which a token attends, including itself; ``None`` for all tokens."""
    attention_chunk_size: int | None = None
    """Number of tokens of the chunks within which the layer attends; ``None`` for no chunks."""

    MERGED_FIELDS: ClassVar[frozenset[str]] = frozenset({"sliding_window", "attention_chunk_size"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.MERGED_FIELDS:
            if getattr(self, name) is not None:
                check_count(self, name)
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ValueError(
                f"{type(self).__name__}: sliding_window={self.sliding_window} and "
                f"attention_chunk_size={self.attention_chunk_size} exclude each other; keep one"
            )

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`KVCacheSpec.slot_rule`: a slot for every token, computed or not."""
        return "full"

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Number of bytes of a layer on a rank for a request of ``max_model_len`` tokens."""
        return self.count_blocks(limits.max_model_len, limits) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Merges specs into a single spec that represents all layers of a group.

        If some layers compute within a window or chunk, the merged spec has this window or chunk.

        Raises:
            ValueError: there are no specs, a spec is of another class, the specs differ, there are
                two sizes of window or chunk, or there are both windows and chunks.
        """
        return replace(
            super().merge(specs),
            sliding_window=cls._merge_sizes("sliding_window", specs),
            attention_chunk_size=cls._merge_sizes("attention_chunk_size", specs),
        )

    @classmethod
    def _merge_sizes(cls, name: str, specs: Sequence[Self]) -> int | None:
        sizes: set[int] = {getattr(spec, name) for spec in specs} - {None}
        if len(sizes) > 1:
            raise ValueError(
                f"{cls.__name__}.merge: {name}: layers have {sorted(sizes)}; layers of one "
                "merged spec have one size, use UniformTypeKVCacheSpecs for these"
            )
        return sizes.pop() if sizes else None


FP8_DS_MLA_BYTES = 512 + 4 * 4 + 64 * 2
"""Number of bytes per token of vLLM's ``fp8_ds_mla`` cache: 512 FP8 elements of the latent, four
float32 scales, 64 bfloat16 elements of the rotary key."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: a latent per token instead of keys and values.

    >>> MLAAttentionSpec(64, num_kv_heads=1, head_size=576, dtype="bfloat16").page_size_bytes
    73728
    """

    use_mla: bool = True
    """Whether the layer keeps a latent; always true in this class."""
    cache_dtype_str: str | None = None
    """vLLM's name of the cache format, if the dtype does not define it: ``"fp8_ds_mla"``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.use_mla:
            raise ValueError(
                "MLAAttentionSpec.use_mla: False; take a FullAttentionSpec for keys and values"
            )
        if self.is_fp8_ds_mla and (self.num_kv_heads, self.head_size) != (1, 576):
            raise ValueError(
                f"MLAAttentionSpec.cache_dtype_str: fp8_ds_mla is a format for 1 head of 576 "
                f"elements, not for {self.num_kv_heads} of {self.head_size}; leave it out"
            )

    @property
    def is_fp8_ds_mla(self) -> bool:
        """Whether a token is stored in vLLM's packed FP8 format."""
        return self.cache_dtype_str == "fp8_ds_mla"

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes per token."""
        return FP8_DS_MLA_BYTES if self.is_fp8_ds_mla else super().bytes_per_token


@dataclass(frozen=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with some learnt tokens (sinks) before the tokens of every request.

    The blocks of the sinks are taken once and belong to all requests. Therefore the memory limit of
    a request is the same as with full attention.
    """

    sink_len: int = field(kw_only=True)
    """Number of sink tokens, a multiple of the block size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "sink_len")
        if self.sink_len % self.block_size:
            raise ValueError(
                f"SinkFullAttentionSpec.sink_len: {self.sink_len} tokens do not fill blocks of "
                f"{self.block_size}; choose a block_size that divides it"
            )

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`KVCacheSpec.slot_rule`: all tokens, after the sinks."""
        return ("sink", self.sink_len)

    @property
    def num_reserved_blocks(self) -> int:
        """Number of blocks of the sinks."""
        return self.sink_len // self.block_size


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention over the output of an encoder: its slots are the encoder's tokens, all kept."""

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`KVCacheSpec.slot_rule`: the encoder's tokens."""
        return "cross"

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Number of bytes of a layer on a rank for the longest output of the encoder.

        Raises:
            ValueError: ``limits.max_num_encoder_tokens`` is not set.
        """
        if limits.max_num_encoder_tokens is None:
            raise ValueError(
                "CacheLimits.max_num_encoder_tokens: is not set, but cross attention keeps the "
                "encoder's output; give its greatest length (Whisper: 1500)"
            )
        return -(-limits.max_num_encoder_tokens // self.block_size) * self.page_size_bytes


@dataclass(frozen=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention within an encoder, computed in a single step: the layer keeps nothing."""

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`KVCacheSpec.slot_rule`: there are no slots."""
        return "encoder"

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Always 0: the layer keeps nothing between steps."""
        return 0
