"""vLLM 0.29: a failed load is told by its blocks, and connectors are given no cache manager."""

from kvferry.integrations.vllm.compat import v0_30


class Release(v0_30.Release):
    """See the class that it inherits from."""

    lacks = v0_30.Release.lacks | {
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults",
        "KVConnectorBase_V1.bind_kv_cache_manager",
        "KVConnectorBase_V1.get_transfer_results",
    }

    gives_cache_manager = False
    takes_failed_requests = False
