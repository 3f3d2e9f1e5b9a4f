"""vLLM 0.32 tells no connector when the memory of KV caches goes and comes back."""

from kvferry.integrations.vllm.compat import v0_33


class Release(v0_33.Release):
    """Adapts :class:`v0_33.Release` to this release."""

    lacks = v0_33.Release.lacks | {
        "KVConnectorBase_V1.restore_kv_caches",
        "KVConnectorBase_V1.supports_sleep_mode",
        "KVConnectorBase_V1.unregister_kv_caches",
    }
