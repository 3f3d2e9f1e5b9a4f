"""Finds the configured connector, and prepares the context from which its halves are built."""

import inspect
from collections.abc import Mapping, Sequence

import msgspec

from kvferry.config import KVTransferConfig, parse_struct
from kvferry.connectors.base import ConnectorContext, KVConnector, KVConnectorMetadata
from kvferry.errors import ConfigError, PluginError
from kvferry.plugins import CONNECTORS, load_from_module, load_plugin
from kvferry.topology.description import ModelFingerprint
from kvferry.topology.group import GroupGeometry
from kvferry.topology.sharding import ranges_text

DEFAULT_CACHE_LAYOUT = "NHD"


def load_connector(config: KVTransferConfig) -> type[KVConnector]:
    """The plugin class that ``kv_connector`` names; its module is imported now.

    With ``kv_connector_module_path`` the class comes from this module, even if an installed plugin
    has the same name; otherwise from an entry point of the group ``kvferry.connectors``.

    Raises:
        PluginError: the connector is unknown or does not load, is no :class:`KVConnector`, or does
            not declare its ``ExtraConfig`` and ``Metadata``.
    """
    if config.kv_connector_module_path is not None:
        found = load_from_module(config.kv_connector_module_path, config.kv_connector, KVConnector)
    else:
        found = load_plugin(CONNECTORS, config.kv_connector, KVConnector)
    _check_declared(found, "ExtraConfig", msgspec.Struct)
    _check_declared(found, "Metadata", KVConnectorMetadata)
    return found


def get_kv_connector_cache_layout(config: KVTransferConfig | None = None) -> str:
    """The layout in which an engine should keep its cache for a connector.

    Args:
        config: names the connector; ``None`` for an engine without a connector.

    Returns:
        Name or dim order of the required layout, or NHD.

    Raises:
        PluginError: see :func:`load_connector`.
    """
    required = None if config is None else load_connector(config).required_cache_layout
    return required or DEFAULT_CACHE_LAYOUT


def connector_context(
    config: KVTransferConfig,
    *,
    incarnation: str,
    groups: Sequence[GroupGeometry],
    model: ModelFingerprint,
    num_blocks: int,
    world_size: int,
    layer_windows: Mapping[int, int] | None = None,
) -> tuple[type[KVConnector], ConnectorContext]:
    """Loads the connector and checks its extra keys.

    Args:
        config: the user's configuration.
        incarnation: random name of this start of the engine; the same in all processes of the
            engine.
        groups: one geometry per KV cache group.
        model: fingerprint of model and weights.
        num_blocks: KV blocks per rank, the null block included.
        world_size: number of ranks of the engine.
        layer_windows: layer of the model → its sliding window in tokens; layers with attention to
            all tokens are left out.

    Returns:
        The plugin class, and the context that its ``scheduler`` and ``worker`` factories take.

    Raises:
        PluginError: see :func:`load_connector`.
        ConfigError: an unknown or wrong key in ``kv_connector_extra_config``, or KV cache groups
            that the connector does not serve.
    """
    connector = load_connector(config)
    if not connector.supports_groups:
        _check_one_whole_group(config.kv_connector, groups)
    extra = parse_struct(
        connector.ExtraConfig,
        config.kv_connector_extra_config,
        f"kv_connector_extra_config of {config.kv_connector}",
    )
    context = ConnectorContext(
        config=config,
        extra=extra,
        incarnation=incarnation,
        groups=tuple(groups),
        model=model,
        num_blocks=num_blocks,
        world_size=world_size,
        layer_windows=dict(layer_windows or {}),
    )
    return connector, context


def _check_one_whole_group(name: str | None, groups: Sequence[GroupGeometry]) -> None:
    if len(groups) == 1 and _kept_text(groups[0]) == "all tokens":
        return
    kept = (f"layers {ranges_text(group.model_layers)}: {_kept_text(group)}" for group in groups)
    raise ConfigError(
        f"kv_connector: {name} serves one KV cache group that keeps all tokens, this engine has "
        f"{len(groups)} ({'; '.join(kept)}); write hybrid_kv_cache = false, or take a connector "
        "that declares supports_groups"
    )


def _kept_text(group: GroupGeometry) -> str:
    for field in ("sliding_window", "attention_chunk_size"):
        if getattr(group, field) is not None:
            return f"{field} {getattr(group, field)}"
    return "all tokens"


def _check_declared(connector: type[KVConnector], name: str, base: type) -> None:
    declared = getattr(connector, name, None)
    if not (inspect.isclass(declared) and issubclass(declared, base)):
        raise PluginError(
            f"connector {connector.__qualname__!r}: {name} is {declared!r}; declare a subclass of "
            f"{base.__module__}.{base.__qualname__} as its class attribute"
        )
