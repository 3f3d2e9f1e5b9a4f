"""Checks of a cluster before any engine starts."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from kvferry.config import ClusterConfig, EngineConfig, ModelConfig, parse_struct
from kvferry.connectors.registry import load_connector
from kvferry.control.options import CurveKeys
from kvferry.engine.builder import engine_cache
from kvferry.engine.model_config import DecoderConfig, parse_config
from kvferry.engine.weights import load_model_config, prepare_model
from kvferry.engine.weights_folder import CONFIG_FILE, TINY_MODELS, Progress, read_json
from kvferry.errors import ConfigError, HostError, PortInUseError
from kvferry.serving.process import listen
from kvferry.zeromq import is_loopback


def check_cluster(
    cluster: ClusterConfig,
    where: str = "",
    *,
    api_key: str | None = None,
    router: bool = True,
    is_here: bool = True,
) -> None:
    """Checks connectors, keys and ports. Needs no model, and leaves no files or sockets behind.

    Args:
        cluster: the cluster.
        where: place of the cluster for error messages, such as the name of its file.
        api_key: bearer token that the engines' HTTP servers will require; ``None`` for no check.
        router: whether the cluster starts a router.
        is_here: whether the engines run on this machine. If not, other machines reach the engines,
            and their ports cannot be checked here.

    Raises:
        PluginError, ConfigError: the first problem, with the name of the engine.
        PortInUseError: ports are taken; the message names all of them.
        HostError: this machine does not have the router's address.
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
    """Refuses engines that any client on the network could use without a key."""
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
    """Checks that the ports in the cluster file are free: the router's, and, if ``engines``, the
    engines'. Another process may still take a port after this check.

    Raises:
        PortInUseError: all taken ports, each with its owner and its key in the cluster file.
        HostError: this machine does not have the router's address.
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
                # ZeroMQ accepts more kinds of addresses (names of interfaces). If ZeroMQ cannot use
                # an address either, the engine reports the error.
                continue
    if taken:
        raise PortInUseError("\n  ".join(taken))


def _engine_ports(engine: EngineConfig, extra: msgspec.Struct) -> Iterator[tuple[str, int, str]]:
    yield engine.host, engine.port, "port"
    host = getattr(extra, "host", None)
    # A connector without a host does not listen, so its kv_port has no meaning.
    if isinstance(host, str):
        yield "" if host == "*" else host, engine.transfer_config().kv_port, "kv_port"


def _try_port(host: str, port: int, who: str, key: str) -> None:
    if port != 0:
        listen(host, port, who, key).close()


def check_shapes(cluster: ClusterConfig, model: DecoderConfig, where: str = "") -> None:
    """Checks the shape, layout and blocks of every engine against the model.

    Raises:
        ConfigError: an engine's shape does not fit the model.
    """
    try:
        for engine in cluster.engines:
            engine_cache(engine, model, cluster.model.dtype)
    except ConfigError as error:
        raise placed(error, where) from error


def placed(error: ConfigError, where: str) -> ConfigError:
    """A copy of ``error``, of the same class, with ``where`` before the message."""
    return type(error)(f"{where}: {error}") if where else error


@runtime_checkable
class _HoldsKeys(Protocol):
    """Extra keys of a connector that signs tickets and may encrypt its control channel."""

    def key(self) -> bytes | None:
        """The cluster key; ``None`` if no key is given."""

    def curve(self) -> object | None:
        """The keys of the control channel; ``None`` if no keys are given."""


def check_plugins(cluster: ClusterConfig) -> dict[str, msgspec.Struct]:
    """Loads the connector of every engine and checks its extra keys.

    Returns:
        Engine name → the connector's checked extra keys.

    Raises:
        PluginError, ConfigError: the first problem, with the name of the engine.
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
    """Checks that all engines that sign tickets have the same cluster key, or all have none.

    Raises:
        ConfigError: a key file cannot be used, or the keys of two engines differ.
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
    """The keys of the engines' control channels; ``None`` if no keys can be read here."""
    for extra in check_plugins(cluster).values():
        with contextlib.suppress(ConfigError):  # the files may exist only on the engines' hosts
            if isinstance(extra, _HoldsKeys) and isinstance(keys := extra.curve(), CurveKeys):
                return keys
    return None


def cluster_key(cluster: ClusterConfig, made: str | None) -> bytes | None:
    """The key with which all engines of a cluster sign tickets. By default, the key ``made``, which
    the launcher made for this start. ``None`` if the given key cannot be read here.
    """
    for extra in check_plugins(cluster).values():
        if isinstance(extra, _HoldsKeys):
            try:
                key = extra.key()
            except ConfigError:  # the file may exist only on the engines' hosts
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
    """A copy of ``engine`` with the cluster key, if its connector takes a key and has none yet."""
    given = engine.kv_transfer_config.get("kv_connector_extra_config", {}).keys()
    if {"cluster_key", "cluster_key_file"} & given:
        return engine
    return _with_extra(engine, "cluster_key", key)


def with_host(engine: EngineConfig, host: str) -> EngineConfig:
    """A copy of ``engine`` for the host ``host``; its connector listens on this address too."""
    return _with_extra(msgspec.structs.replace(engine, host=host), "host", host)


def _with_extra(engine: EngineConfig, name: str, value: str) -> EngineConfig:
    """A copy of ``engine`` with an extra key for its connector, if the connector knows the key."""
    plugin = load_connector(engine.transfer_config())
    if name not in {field.encode_name for field in msgspec.structs.fields(plugin.ExtraConfig)}:
        return engine
    extra: Mapping[str, Any] = engine.kv_transfer_config.get("kv_connector_extra_config", {})
    transfer = {**engine.kv_transfer_config, "kv_connector_extra_config": {**extra, name: value}}
    return msgspec.structs.replace(engine, kv_transfer_config=transfer)


def convert(model: ModelConfig, progress: Progress) -> Path:
    """Converts a model, if this was not done before, and returns the folder with the result.

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

    For a folder with a ``config.json``, only this file is read. A random model is made but not
    written. A GGUF file is converted once: reading its header alone would take a third of that
    time, and ``serve`` needs the result anyway.

    Raises:
        ModelError: the model's files cannot be used.
        HostError: the converted model cannot be written.
    """
    path = Path(model.source) / CONFIG_FILE
    with contextlib.suppress(OSError):  # a source that cannot be looked at; convert() names it
        if path.is_file():
            return parse_config(read_json(path), str(path))
    if model.source in TINY_MODELS:
        from kvferry.engine.weights_sources import open_source  # imports torch, which is slow

        return open_source(model.source, None).read(progress)[0]
    return load_model_config(convert(model, progress))
