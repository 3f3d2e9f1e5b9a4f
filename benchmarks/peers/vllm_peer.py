"""vLLM's manager. Its environment and ours have nothing in common but msgspec."""

import functools

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from benchmarks.peers.peer import CachePeer
from benchmarks.peers.setups import Group, Setup


class VllmPeer(CachePeer):
    """See :class:`~benchmarks.peers.peer.CachePeer`."""

    name = "vllm"

    def __init__(self, setup: Setup) -> None:
        _prepare()
        groups = [
            KVCacheGroupSpec([f"layer.{index}"], _spec(group))
            for index, group in enumerate(setup.groups)
        ]
        manager = KVCacheManager(
            KVCacheConfig(setup.num_blocks, [], groups),
            setup.max_model_len,
            scheduler_block_size=setup.hit_block_size,
            hash_block_size=setup.hash_block_size,
            use_eagle=setup.use_eagle,
            dcp_world_size=setup.dcp_world_size,
        )
        super().__init__(setup, manager)
        self._hasher = get_request_block_hasher(setup.hash_block_size, sha256)

    def request(self, request_id: str, token_ids: list[int]) -> Request:
        """See :meth:`~benchmarks.peers.peer.CachePeer.request`."""
        return Request(
            request_id, token_ids, SamplingParams(max_tokens=1), None, block_hasher=self._hasher
        )


@functools.cache
def _prepare() -> None:
    """What vLLM's engine does before it makes a manager."""
    init_none_hash(sha256)
    register_all_kvcache_specs(None)


def _spec(group: Group) -> KVCacheSpec:
    size, span, dtype = group.block_size, group.span, torch.float32
    one = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": dtype}
    match group.kind:
        case "full":
            return FullAttentionSpec(**one)
        case "mla":
            return MLAAttentionSpec(**{**one, "head_size": 16})
        case "window":
            return SlidingWindowSpec(**one, sliding_window=span)
        case "chunk":
            return ChunkedLocalAttentionSpec(**one, attention_chunk_size=span)
        case "mamba":
            return MambaSpec(
                block_size=size, shapes=((1, 16),), dtypes=(dtype,), mamba_cache_mode="all"
            )
