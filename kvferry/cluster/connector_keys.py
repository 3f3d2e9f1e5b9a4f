"""What a cluster checks and fills in of its engines' connector keys, before anything is started."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from kvferry.config import ClusterConfig, EngineConfig, parse_struct
from kvferry.connectors.registry import load_connector
from kvferry.errors import ConfigError


@runtime_checkable
class _HoldsKeys(Protocol):
    """Extra keys of a connector that signs tickets and may encrypt its control channel."""

    def key(self) -> bytes | None:
        """The cluster's key."""

    def curve(self) -> object | None:
        """The keys of the control channel."""


def check_plugins(cluster: ClusterConfig) -> dict[str, msgspec.Struct]:
    """Finds every engine's connector and checks its extra keys, before anything is started.

    Returns:
        Name of an engine → its connector's checked extra keys.

    Raises:
        PluginError, ConfigError: the first thing found wrong, with the engine's name.
    """
    extras = {}
    for engine in cluster.engines:
        transfer = engine.transfer_config()
        plugin = load_connector(transfer)
        where = f"engine {engine.name!r}: kv_connector_extra_config"
        extras[engine.name] = parse_struct(
            plugin.ExtraConfig, transfer.kv_connector_extra_config, where
        )
    return extras


def check_cluster_keys(cluster: ClusterConfig, extras: Mapping[str, msgspec.Struct]) -> None:
    """Makes sure that all engines that sign tickets have the same key, or none was given one.

    Raises:
        ConfigError: a file of keys cannot be used, or two engines' keys differ.
    """
    held = [
        (engine.name, _key(engine.name, extra))
        for engine in cluster.engines
        if isinstance(extra := extras[engine.name], _HoldsKeys)
    ]
    given = next(((name, key) for name, key in held if key is not None), None)
    if given is None:
        return
    for name, key in held:
        if key != given[1]:
            problem = "has none" if key is None else "has another one"
            raise ConfigError(
                f"engine {given[0]!r} has a cluster key, but engine {name!r} {problem}; give every "
                "engine the same cluster_key or cluster_key_file in kv_connector_extra_config, or "
                "none of them, and one is made for this start"
            )


def _key(name: str, extra: _HoldsKeys) -> bytes | None:
    try:
        extra.curve()
        return extra.key()
    except ConfigError as error:
        raise ConfigError(f"engine {name!r}: kv_connector_extra_config: {error}") from error


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
