"""vLLM 0.31 does not ask which blocks a load fills, nor where loaded tokens come from."""

from kvferry.integrations.vllm.compat import v0_32


class Release(v0_32.Release):
    """Adapts :class:`v0_32.Release` to this release."""

    lacks = v0_32.Release.lacks | {
        "vllm.v1.metrics.cache_hit_source:CacheHitSource",
        "KVConnectorBase_V1.get_loaded_kv_cache_group_ids",
    }

    cache_hit_source = None
    serves_states = False
    serves_packed = False
