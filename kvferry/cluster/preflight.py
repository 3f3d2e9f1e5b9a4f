"""What can be known to be wrong with a cluster before any engine starts."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from kvferry.cluster.process import listen
from kvferry.config import ClusterConfig, EngineConfig, ModelConfig, parse_struct
from kvferry.connectors.registry import load_connector
from kvferry.control.options import CurveKeys
from kvferry.engine.builder import engine_cache
from kvferry.engine.model_config import DecoderConfig, parse_config
from kvferry.engine.weights import load_model_config, prepare_model
from kvferry.engine.weights_folder import CONFIG_FILE, TINY_MODELS, Progress, read_json
from kvferry.errors import ConfigError, HostError, PortInUseError
from kvferry.zeromq import is_loopback


def check_cluster(
    cluster: ClusterConfig,
    where: str = "",
    *,
    api_key: str | None = None,
    router: bool = True,
    is_here: bool = True,
) -> None:
    """Checks connectors, keys and ports. Needs no model, and leaves nothing behind.

    Args:
        cluster: the cluster.
        where: how the user finds the cluster, the name of its file say.
        api_key: what engines will ask for at their HTTP servers.
        router: whether it has a router.
        is_here: whether this machine runs the engines; else other machines reach them, and their
            ports cannot be tried here.

    Raises:
        PluginError, ConfigError: the first thing found wrong, with the engine's name.
        PortInUseError: ports are taken; names all of them.
        HostError: the router's address is not of this machine.
    """
    try:
        extras = check_plugins(cluster)
        check_cluster_keys(cluster, extras)
        _check_hosts(cluster, extras, api_key, is_here)
    except ConfigError as error:
        raise placed(error, where) from error
    check_ports(cluster, extras, router=router, engines=is_here)


def _check_hosts(
    cluster: ClusterConfig,
    extras: Mapping[str, msgspec.Struct],
    api_key: str | None,
    is_here: bool,
) -> None:
    """Whoever reaches an engine's HTTP server may use it, unless it asks for a key."""
    for engine in cluster.engines:
        if engine.nodes and is_here:
            raise ConfigError(
                f"engine {engine.name!r}: nodes are those of a Ray cluster; name it with "
                "`kvferry serve --ray ADDRESS`, or delete the key"
            )
        is_open = api_key is None and not getattr(extras[engine.name], "insecure", False)
        if is_open and not (is_here and is_loopback(engine.host)):
            host = f"host {engine.host}" if is_here else "its Ray node"
            raise ConfigError(
                f"engine {engine.name!r}: {host} is reached from other machines, and nothing keeps "
                "them from using the engine; set KVFERRY_API_KEY for engines and router, or "
                "insecure: true in kv_connector_extra_config if the network is trusted"
            )


def check_ports(
    cluster: ClusterConfig,
    extras: dict[str, msgspec.Struct],
    *,
    router: bool = True,
    engines: bool = True,
) -> None:
    """Tries the ports that the cluster file names for the router and for the engines, where this
    machine runs them. A process may still take one afterwards.

    Raises:
        PortInUseError: all ports that are taken, each with who wants it and the key it stands in.
        HostError: the router's address is not of this machine.
    """
    taken: list[str] = []
    try:
        if router:
            _try_port(cluster.router.host, cluster.router.port, "router", "port")
    except PortInUseError as error:
        taken.append(str(error))
    for engine in cluster.engines if engines else ():
        who = f"engine {engine.name!r}"
        for host, port, key in _engine_ports(engine, extras[engine.name]):
            try:
                _try_port(host, port, who, key)
            except PortInUseError as error:
                taken.append(str(error))
            except HostError:
                # ZeroMQ knows more forms of an address (names of interfaces); what it cannot use
                # the engine reports.
                continue
    if taken:
        raise PortInUseError("\n  ".join(taken))


def _engine_ports(engine: EngineConfig, extra: msgspec.Struct) -> Iterator[tuple[str, int, str]]:
    yield engine.host, engine.port, "port"
    host = getattr(extra, "host", None)
    # A connector without a host does not listen: its kv_port means nothing.
    if isinstance(host, str):
        yield "" if host == "*" else host, engine.transfer_config().kv_port, "kv_port"


def _try_port(host: str, port: int, who: str, key: str) -> None:
    if port != 0:
        listen(host, port, who, key).close()


def check_shapes(cluster: ClusterConfig, model: DecoderConfig, where: str = "") -> None:
    """Checks every engine's shape, layout and blocks against the model.

    Raises:
        ConfigError: an engine's shape does not fit the model.
    """
    try:
        for engine in cluster.engines:
            engine_cache(engine, model, cluster.model.dtype)
    except ConfigError as error:
        raise placed(error, where) from error


def placed(error: ConfigError, where: str) -> ConfigError:
    """``error`` with ``where`` in front; of the same kind."""
    return type(error)(f"{where}: {error}") if where else error


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


def control_keys(cluster: ClusterConfig) -> CurveKeys | None:
    """The keys of the engines' control channels, if they have some that can be read here."""
    for extra in check_plugins(cluster).values():
        with contextlib.suppress(ConfigError):  # the files may lie on the engines' hosts alone
            if isinstance(extra, _HoldsKeys) and isinstance(keys := extra.curve(), CurveKeys):
                return keys
    return None


def cluster_key(cluster: ClusterConfig, made: str | None) -> bytes | None:
    """The key that all engines of a cluster sign with, the one made for this start if they were
    given none; ``None`` where the key they were given cannot be read here.
    """
    for extra in check_plugins(cluster).values():
        if isinstance(extra, _HoldsKeys):
            try:
                key = extra.key()
            except ConfigError:  # the file may lie on the engines' hosts alone
                return None
            if key is not None:
                return key
    return None if made is None else made.encode()


def _key(name: str, extra: _HoldsKeys) -> bytes | None:
    try:
        extra.curve()
        return extra.key()
    except ConfigError as error:
        raise ConfigError(f"engine {name!r}: kv_connector_extra_config: {error}") from error


def with_cluster_key(engine: EngineConfig, key: str) -> EngineConfig:
    """``engine``, its connector told the cluster's key if it takes one and was given none."""
    given = engine.kv_transfer_config.get("kv_connector_extra_config", {}).keys()
    if {"cluster_key", "cluster_key_file"} & given:
        return engine
    return _with_extra(engine, "cluster_key", key)


def with_host(engine: EngineConfig, host: str) -> EngineConfig:
    """``engine`` on the machine with the address ``host``; its connector listens there too."""
    return _with_extra(msgspec.structs.replace(engine, host=host), "host", host)


def _with_extra(engine: EngineConfig, name: str, value: str) -> EngineConfig:
    """``engine``, its connector told an extra key if it knows it."""
    plugin = load_connector(engine.transfer_config())
    if name not in {field.encode_name for field in msgspec.structs.fields(plugin.ExtraConfig)}:
        return engine
    extra: Mapping[str, Any] = engine.kv_transfer_config.get("kv_connector_extra_config", {})
    transfer = {**engine.kv_transfer_config, "kv_connector_extra_config": {**extra, name: value}}
    return msgspec.structs.replace(engine, kv_transfer_config=transfer)


def convert(model: ModelConfig, progress: Progress) -> Path:
    """Converts a model unless that was done before; returns its folder.

    Raises:
        ModelError: see :func:`~kvferry.engine.weights.prepare_model`.
    """
    tiny = TINY_MODELS.get(model.source)
    if tiny is not None:
        tiny = msgspec.structs.replace(tiny, seed=model.seed)
    return prepare_model(model.source, tiny=tiny, progress=progress)


def model_shape(
    model: ModelConfig, progress: Progress = lambda _doing, _done: None
) -> DecoderConfig:
    """The config of a model.

    A folder with a ``config.json`` is only looked at, and a random model is only drawn. A GGUF file
    is converted, once: its header takes a third of that time to read, and the result is what
    ``serve`` needs anyway.

    Raises:
        ModelError: the model's files cannot be used.
        HostError: the converted model cannot be written.
    """
    path = Path(model.source) / CONFIG_FILE
    if path.is_file():
        return parse_config(read_json(path), str(path))
    if model.source in TINY_MODELS:
        from kvferry.engine.weights_sources import open_source  # loads torch

        return open_source(model.source, None).read(progress)[0]
    return load_model_config(convert(model, progress))
