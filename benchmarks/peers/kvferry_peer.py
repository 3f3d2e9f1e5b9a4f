"""Our manager."""

from benchmarks.peers.peer import CachePeer
from benchmarks.peers.setups import Group, Setup
from kvferry.cache import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    Request,
    SlidingWindowSpec,
)


class KvferryPeer(CachePeer):
    """See :class:`~benchmarks.peers.peer.CachePeer`."""

    name = "kvferry"

    def __init__(self, setup: Setup) -> None:
        groups = [
            KVCacheGroupSpec([f"layer.{index}"], _spec(group))
            for index, group in enumerate(setup.groups)
        ]
        config = KVCacheConfig(setup.num_blocks, [], groups)
        manager = KVCacheManager(
            config,
            setup.max_model_len,
            use_eagle=setup.use_eagle,
            dcp_world_size=setup.dcp_world_size,
        )
        super().__init__(setup, manager)

    def request(self, request_id: str, token_ids: list[int]) -> Request:
        """See :meth:`~benchmarks.peers.peer.CachePeer.request`."""
        return Request(request_id, token_ids, hash_block_size=self.setup.hash_block_size)


def _spec(group: Group) -> KVCacheSpec:
    size, span = group.block_size, group.span
    match group.kind:
        case "full":
            return FullAttentionSpec(size, 1, 8, "float32")
        case "mla":
            return MLAAttentionSpec(size, 1, 16, "float32")
        case "window":
            return SlidingWindowSpec(size, 1, 8, "float32", sliding_window=span)
        case "chunk":
            return ChunkedLocalAttentionSpec(size, 1, 8, "float32", attention_chunk_size=span)
        case "mamba":
            return MambaSpec(size, [(1, 16)], ["float32"], mamba_cache_mode="all")
