"""Small helpers for connector authors, with the meaning they have elsewhere in the field."""

from collections.abc import Iterator

from kvferry.config import KVTransferConfig
from kvferry.connectors.base import SchedulerOutputView
from kvferry.connectors.registry import load_connector

DEFAULT_CACHE_LAYOUT = "NHD"


def get_kv_connector_cache_layout(config: KVTransferConfig | None = None) -> str:
    """The layout in which an engine should keep its cache for a connector.

    Args:
        config: names the connector; ``None`` for an engine without one.

    Returns:
        What the connector requires, or NHD: its name or order.

    Raises:
        PluginError: see :func:`~kvferry.connectors.registry.load_connector`.
    """
    required = None if config is None else load_connector(config).required_cache_layout
    return required or DEFAULT_CACHE_LAYOUT


def yield_req_data(
    scheduler_output: SchedulerOutputView,
) -> Iterator[tuple[str, tuple[list[int], ...], bool]]:
    """What each request of a step got in blocks.

    Yields:
        ``(req_id, new_block_id_groups, preempted)``: one list of block ids per KV cache group,
        those the request did not have in its last step. The first time, and when ``preempted``
        (it lost its blocks since its last step), that is its whole table, prefix hits included.
    """
    for request in scheduler_output.requests:
        tables = zip(request.block_ids, request.num_new_blocks, strict=True)
        new = tuple(table[len(table) - count :] for table, count in tables)
        yield request.request_id, new, request.resumed
