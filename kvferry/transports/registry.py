"""Opens a transport by its name."""

from kvferry.plugins import TRANSPORTS, load_plugin
from kvferry.transports.base import Transport, TransportOptions


def transport_class(name: str) -> type[Transport]:
    """The transport registered as ``name``; its module is imported now.

    Raises:
        PluginError: it is unknown or does not load; the message lists what is installed.
    """
    return load_plugin(TRANSPORTS, name, Transport)


def open_transport(name: str, options: TransportOptions | None = None) -> Transport:
    """Opens the transport registered as ``name``.

    Raises:
        PluginError: it is unknown or does not load.
        ConfigError: unknown or wrong keys in ``options.extra``.
        HostError: the machine lacks what it needs.
    """
    return transport_class(name).open(options or TransportOptions())
