"""The ownership of blocks: specs, groups, block pool, prefix cache, manager, block tables."""

from kvferry.cache.block_pool import BlockPool, KVCacheBlock, KVCacheBlocks
from kvferry.cache.block_table import BlockTable
from kvferry.cache.config_builder import build_kv_cache_config, group_layers, largest_model_len
from kvferry.cache.events import PrefixCacheStats
from kvferry.cache.kv_cache_config import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.request import CacheRequest, MultiModalInput, Request
from kvferry.cache.specs import (
    AttentionSpec,
    CacheLimits,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
)
from kvferry.cache.specs_local import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

__all__ = [
    "AttentionSpec",
    "BlockPool",
    "BlockTable",
    "CacheLimits",
    "CacheRequest",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheTensor",
    "MLAAttentionSpec",
    "MambaSpec",
    "MultiModalInput",
    "PrefixCacheStats",
    "Request",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "build_kv_cache_config",
    "group_layers",
    "largest_model_len",
]
