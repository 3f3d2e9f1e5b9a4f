"""The plugin API, the registry, the connectors that ship, and the output aggregator."""

from typing import TYPE_CHECKING, Any

from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.base import (
    BlocksView,
    ConnectorContext,
    KVConnector,
    KVConnectorMetadata,
    KVConnectorOutput,
    RequestView,
    ScheduledRequestView,
    SchedulerConnector,
    SchedulerOutputView,
    WorkerConnector,
    yield_req_data,
)
from kvferry.connectors.registry import (
    connector_context,
    get_kv_connector_cache_layout,
    load_connector,
)
from kvferry.observe.records import TransferRecord

if TYPE_CHECKING:
    from kvferry.connectors.pull import PullConnector as PullConnector

__all__ = [
    "BlocksView",
    "ConnectorContext",
    "KVConnector",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVOutputAggregator",
    "PullConnector",
    "RequestView",
    "ScheduledRequestView",
    "SchedulerConnector",
    "SchedulerOutputView",
    "TransferRecord",
    "WorkerConnector",
    "connector_context",
    "get_kv_connector_cache_layout",
    "load_connector",
    "yield_req_data",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: a connector of another author needs no part of PullConnector.
    if name == "PullConnector":
        from kvferry.connectors.pull import PullConnector

        return PullConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
