"""What a cluster checks and fills in of its engines' connector keys, before anything is started."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.config import ClusterConfig, EngineConfig, parse_struct
from kvferry.connectors.registry import load_connector


def check_plugins(cluster: ClusterConfig) -> None:
    """Finds every engine's connector and checks its extra keys, before anything is started.

    Raises:
        PluginError, ConfigError: the first thing found wrong, with the engine's name.
    """
    for engine in cluster.engines:
        transfer = engine.transfer_config()
        plugin = load_connector(transfer)
        where = f"engine {engine.name!r}: kv_connector_extra_config"
        parse_struct(plugin.ExtraConfig, transfer.kv_connector_extra_config, where)


def with_cluster_key(engine: EngineConfig, key: str) -> EngineConfig:
    """``engine``, its connector told the cluster's key if it takes one and was given none."""
    plugin = load_connector(engine.transfer_config())
    extra: Mapping[str, Any] = engine.kv_transfer_config.get("kv_connector_extra_config", {})
    known = {field.encode_name for field in msgspec.structs.fields(plugin.ExtraConfig)}
    if "cluster_key" not in known or {"cluster_key", "cluster_key_file"} & extra.keys():
        return engine
    extra = {**extra, "cluster_key": key}
    transfer = {**engine.kv_transfer_config, "kv_connector_extra_config": extra}
    return msgspec.structs.replace(engine, kv_transfer_config=transfer)
