"""The transport between hosts: TCP sockets that scatter and gather.

The source sends straight from its regions (:mod:`~kvferry.transports.tcp_server`), the reader
receives straight into its own (:mod:`~kvferry.transports.tcp_reader`); pieces under 4 KiB, and any
change of layout, go through a small buffer on either side that stays in the cache
(:mod:`~kvferry.transports.tcp_kernels`). Only the reader's own threads write its memory, so a
terminal state is a fence: a peer that stalls, resumes or lies cannot write anything any more.
"""

from kvferry.config import parse_struct
from kvferry.layouts import copier
from kvferry.transports import tcp_kernels, tcp_tls
from kvferry.transports.base import TransportOptions
from kvferry.transports.tcp_reader import TcpReader
from kvferry.transports.tcp_server import TcpServer
from kvferry.transports.wire import WireConfig, WireTransport, check_host, port_of


class TcpExtraConfig(WireConfig, frozen=True, kw_only=True):
    """Keys of the ``tcp`` transport."""

    advertise_host: str = ""
    """Host that peers are told; empty: the engine's ``advertise_host``, else its ``host``."""
    advertise_port: int = 0
    """Port that peers are told for rank 0, and so on by rank; 0: the one that is listened on."""
    connections: int = 0
    """Connections to each rank that is read from, over which the chunks of a read are dealt; 0: one
    per thread that receives."""

    encrypt_data: bool = False
    """Whether data goes through TLS 1.3. Both sides must have the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.connections <= 64:
            raise ValueError(f"connections: {self.connections} is not in 0 to 64")
        if not 0 <= self.advertise_port <= 65535:
            raise ValueError(
                f"advertise_port: {self.advertise_port} is not a TCP port (0 to 65535)"
            )
        if self.advertise_port and not self.port:
            raise ValueError(
                f"advertise_port: {self.advertise_port} leads to port, which is 0 and takes a free "
                "one at each start; give port a number"
            )


class TcpTransport(WireTransport):
    """TCP between hosts, or between processes that share no memory."""

    name = "tcp"
    ExtraConfig = TcpExtraConfig

    def __init__(self, options: TransportOptions, extra: TcpExtraConfig) -> None:
        super().__init__(extra.advertise_host or options.advertise_host or options.host)
        identity = None
        if extra.encrypt_data:
            identity, self._certificate = tcp_tls.new_identity()
        self._server = TcpServer(
            self._regions,
            self._token,
            identity,
            host=options.host,
            port=port_of(extra.port, options.rank),
            max_readers=extra.max_readers,
            threads=options.threads,
        )
        self._port = port_of(extra.advertise_port, options.rank) or self._server.port
        side = self._reading_side(extra, options.stall_timeout_s)
        self._reader: TcpReader = TcpReader(
            side, options.threads, extra.connections or options.threads, extra.encrypt_data
        )

    @classmethod
    def open(cls, options: TransportOptions) -> "TcpTransport":
        """Binds the data port, loads the copier and starts the threads.

        Raises:
            ConfigError: unknown or wrong keys in ``options.extra``; a wildcard host without
                ``advertise_host``; ``encrypt_data`` without the package that it needs.
            PortInUseError: the configured port is taken.
            HostError: the host is no address of this machine.
        """
        extra = parse_struct(TcpExtraConfig, options.extra, "tcp")
        check_host(extra.advertise_host or options.advertise_host or options.host)
        copier.warm()
        tcp_kernels.warm(encrypted=extra.encrypt_data)
        return cls(options, extra)

    @property
    def refused_messages(self) -> int:
        """Messages to our data port that were refused since it was opened."""
        return self._server.refused

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if not self._transfers.close():
            return
        self._reader.close()
        self._server.close()
