"""vLLM 0.29: a failed load is reported by block ids, and connectors receive no cache manager."""

from kvferry.integrations.vllm.compat import v0_30


class Release(v0_30.Release):
    """Adapts :class:`v0_30.Release` to this release."""

    lacks = v0_30.Release.lacks | {
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults",
        "KVConnectorBase_V1.bind_kv_cache_manager",
        "KVConnectorBase_V1.get_transfer_results",
    }

    gives_cache_manager = False
    takes_failed_requests = False
