"""Builders shared by the tests of the cache core."""

from collections.abc import Callable, Iterable

import pytest

from kvferry.cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
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

    def make(num_blocks: int = 11, max_model_len: int = 64, **options: object) -> KVCacheManager:
        return KVCacheManager(make_config(num_blocks), max_model_len, **options)

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """A request over given tokens, with a fresh id."""
    count = iter(range(1_000_000))

    def make(token_ids: Iterable[int], **options: object) -> Request:
        return Request(f"request-{next(count)}", list(token_ids), **options)

    return make
