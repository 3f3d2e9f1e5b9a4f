"""Who owns which blocks: specs, groups, block pool, prefix cache, manager, block tables."""

from kvferry.cache.block_pool import BlockPool
from kvferry.cache.block_table import BlockTable
from kvferry.cache.blocks import KVCacheBlock, KVCacheBlocks
from kvferry.cache.config_builder import build_kv_cache_config, largest_model_len
from kvferry.cache.grouping import group_layers
from kvferry.cache.hashing import MultiModalInput
from kvferry.cache.kv_cache_config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.request import CacheRequest, Request
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
from kvferry.cache.specs_local import ChunkedLocalAttentionSpec, SlidingWindowSpec
from kvferry.cache.specs_mamba import MambaSpec
from kvferry.cache.specs_uniform import UniformTypeKVCacheSpecs
from kvferry.cache.stats import PrefixCacheStats

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
