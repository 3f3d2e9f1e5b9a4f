"""Builders shared by the tests of the cache core."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvferry.cache import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    Request,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 4


@pytest.fixture
def make_config() -> Callable[..., KVCacheConfig]:
    def make(num_blocks: int = 11, block_size: int = BLOCK_SIZE) -> KVCacheConfig:
        spec = FullAttentionSpec(block_size, num_kv_heads=2, head_size=8, dtype="float32")
        return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer.0"], spec)])

    return make


@pytest.fixture
def make_manager(make_config: Callable[..., KVCacheConfig]) -> Callable[..., KVCacheManager]:
    """A manager over 10 usable blocks of 4 tokens."""

    def make(num_blocks: int = 11, max_model_len: int = 64, **options: Any) -> KVCacheManager:
        return KVCacheManager(make_config(num_blocks), max_model_len, **options)

    return make


def _spec(kind: str, size: int = 0, block_size: int = BLOCK_SIZE) -> KVCacheSpec:
    heads: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
    match kind:
        case "full":
            return FullAttentionSpec(block_size, **heads)
        case "window":
            return SlidingWindowSpec(block_size, **heads, sliding_window=size)
        case "chunk":
            return ChunkedLocalAttentionSpec(block_size, **heads, attention_chunk_size=size)
        case "sink":
            return SinkFullAttentionSpec(block_size, **heads, sink_len=size)
        case "cross":
            return CrossAttentionSpec(block_size, **heads)
        case "mamba":
            return MambaSpec(block_size, [(4, 8)], ["float32"], num_speculative_blocks=size)
    raise ValueError(kind)


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., KVCacheSpec]:
    """``make_spec(kind, size, block_size)``: the size of a window, a chunk, the sinks, or the
    number of speculative blocks."""
    return _spec


@pytest.fixture(scope="session")
def make_group_manager() -> Callable[..., KVCacheManager]:
    """A manager with one group per ``(kind, size, block_size)``, by default of 40 usable blocks."""

    def make(
        *groups: tuple[Any, ...],
        num_blocks: int = 41,
        max_model_len: int = 128,
        **options: Any,
    ) -> KVCacheManager:
        specs = [
            KVCacheGroupSpec([f"layer.{index}"], _spec(*group))
            for index, group in enumerate(groups)
        ]
        return KVCacheManager(KVCacheConfig(num_blocks, [], specs), max_model_len, **options)

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """A request over given tokens, with a fresh id."""
    count = iter(range(1_000_000))

    def make(token_ids: Iterable[int], **options: Any) -> Request:
        return Request(f"request-{next(count)}", list(token_ids), **options)

    return make
