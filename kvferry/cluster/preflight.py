"""What can be known to be wrong with a cluster before any engine starts."""

from collections.abc import Iterator

import msgspec

from kvferry.cluster.child import listen
from kvferry.cluster.connector_keys import check_cluster_keys, check_plugins
from kvferry.config import ClusterConfig, EngineConfig
from kvferry.engine.builder import engine_cache
from kvferry.engine.model_config import DecoderConfig
from kvferry.errors import ConfigError, HostError, PortInUseError


def check_cluster(cluster: ClusterConfig, engine_host: str, where: str = "") -> None:
    """Checks connectors, cluster keys and ports. Needs no model, and leaves nothing behind.

    Args:
        cluster: the cluster.
        engine_host: address on which engines serve HTTP.
        where: how the user finds the cluster, the name of its file say.

    Raises:
        PluginError, ConfigError: the first thing found wrong, with the engine's name.
        PortInUseError: ports are taken; names all of them.
        HostError: the router's address is not of this machine.
    """
    try:
        extras = check_plugins(cluster)
        check_cluster_keys(cluster, extras)
    except ConfigError as error:
        raise placed(error, where) from error
    check_ports(cluster, extras, engine_host)


def check_ports(
    cluster: ClusterConfig, extras: dict[str, msgspec.Struct], engine_host: str
) -> None:
    """Tries every port that the cluster file names. A process may still take one afterwards.

    Raises:
        PortInUseError: all ports that are taken, each with who wants it and the key it stands in.
        HostError: the router's address is not of this machine.
    """
    taken: list[str] = []
    router = cluster.router
    try:
        _try_port(router.host, router.port, "router", "port")
    except PortInUseError as error:
        taken.append(str(error))
    for engine in cluster.engines:
        who = f"engine {engine.name!r}"
        for host, port, key in _engine_ports(engine, extras[engine.name], engine_host):
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


def _engine_ports(
    engine: EngineConfig, extra: msgspec.Struct, engine_host: str
) -> Iterator[tuple[str, int, str]]:
    yield engine_host, engine.port, "port"
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
