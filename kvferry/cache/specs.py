"""KV cache specs: what one layer keeps per token, and how much memory that takes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from kvferry.topology.geometry import ITEMSIZES, dtype_name


def _check_positive(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{type(owner).__name__}.{field}: {value!r} is not a positive integer")


@dataclass(frozen=True)
class CacheLimits:
    """What bounds the memory of one request.

    Raises:
        ValueError: a limit is not a positive integer.
    """

    max_model_len: int
    """Longest sequence, prompt and answer, in tokens."""

    def __post_init__(self) -> None:
        _check_positive(self, "max_model_len")


@dataclass(frozen=True)
class KVCacheSpec(ABC):
    """What one layer keeps. Layers of equal specs may share a block table.

    Raises:
        ValueError: a field out of its range.
    """

    block_size: int
    """Tokens per block."""

    def __post_init__(self) -> None:
        _check_positive(self, "block_size")

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer on one rank."""

    @abstractmethod
    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Bytes of one layer that the longest request may hold at once."""


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """A layer that keeps keys and values per token and head."""

    num_kv_heads: int
    """KV heads that a rank holds."""
    head_size: int
    """Elements of a key per head; with MLA, of the latent."""
    dtype: Any
    """A torch dtype or its name; kept as the bare name, for example ``"bfloat16"``."""
    use_mla: bool = False
    """Whether one latent is kept in place of keys and values."""
    page_size_padded: int | None = None
    """Bytes to which a page is padded, so that pages of unlike layers agree."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "num_kv_heads", "head_size")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise ValueError(
                f"{type(self).__name__}.page_size_padded: {self.page_size_padded} bytes are fewer "
                f"than the page needs; give {self.real_page_size_bytes} or more"
            )

    @property
    def elements_per_head(self) -> int:
        """Elements kept per token and KV head, all parts together."""
        return self.head_size if self.use_mla else 2 * self.head_size

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block of one layer without padding."""
        per_token = self.num_kv_heads * self.elements_per_head * ITEMSIZES[self.dtype]
        return self.block_size * per_token

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer on one rank, padding included."""
        return self.page_size_padded or self.real_page_size_bytes


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose every token attends to all before it: blocks are kept to the end.

    >>> spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    >>> spec.page_size_bytes
    65536
    """

    head_size_v: int | None = None
    """Elements of a value per head; ``head_size`` if left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_mla and self.head_size_v is not None:
            raise ValueError(
                f"FullAttentionSpec.head_size_v: {self.head_size_v} has no meaning with use_mla, "
                "which keeps one latent of head_size elements; leave it out"
            )
        if not self.use_mla:
            # Equal layers have equal specs, whether the value's size is spelt out or not.
            object.__setattr__(self, "head_size_v", self.elements_per_head - self.head_size)
            _check_positive(self, "head_size_v")

    @property
    def elements_per_head(self) -> int:
        """Elements kept per token and KV head, all parts together."""
        if self.use_mla:
            return self.head_size
        return self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Bytes of one layer that the longest request may hold at once."""
        return -(-limits.max_model_len // self.block_size) * self.page_size_bytes
