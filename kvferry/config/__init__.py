"""The user's configuration: the ``kv_transfer_config`` JSON and the cluster file.

Each table is checked against a struct. An unknown key raises a
:class:`~kvferry.errors.ConfigError` that names the nearest known key; a wrong type raises an error
with the field and both types.
"""

from kvferry.config.cluster import (
    DEPRECATED_KEYS,
    AtOnce,
    ClusterConfig,
    DecodeOnly,
    EngineConfig,
    KVEventsConfig,
    KVRole,
    KVTransferConfig,
    LoadFailurePolicy,
    ModelConfig,
    RouteBy,
    RouterConfig,
    load_cluster,
    split_endpoint,
)
from kvferry.config.parsing import parse_struct, printable, shown

__all__ = [
    "DEPRECATED_KEYS",
    "AtOnce",
    "ClusterConfig",
    "DecodeOnly",
    "EngineConfig",
    "KVEventsConfig",
    "KVRole",
    "KVTransferConfig",
    "LoadFailurePolicy",
    "ModelConfig",
    "RouteBy",
    "RouterConfig",
    "load_cluster",
    "parse_struct",
    "printable",
    "shown",
    "split_endpoint",
]
