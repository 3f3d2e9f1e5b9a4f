"""The transport between hosts: TCP sockets that scatter and gather.

The source sends straight from its regions (:mod:`~kvferry.transports.tcp_server`). The reader
receives straight into its own regions (:mod:`~kvferry.transports.tcp_reader`). Pieces under 4 KiB,
and any change of layout, go through a small buffer on either side, which stays in the CPU cache
(:mod:`~kvferry.transports.tcp_kernels`). Only the reader's own threads write the reader's memory,
so a terminal state is a fence: a peer that stalls, resumes or lies cannot write anything
afterwards.
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
    """Host given to peers; if empty, the engine's ``advertise_host``, else its ``host``."""
    advertise_port: int = 0
    """Port given to peers for rank 0; for rank ``n`` the port plus ``n``. 0: the rank's own
    port."""
    connections: int = 0
    """Connections to each source rank; the chunks of a read are distributed over these connections.
    0: one connection per receiving thread."""

    encrypt_data: bool = False
    """Whether data goes through TLS 1.3. Both sides need the same value."""

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
        self.server = TcpServer(
            self._regions,
            self._token,
            identity,
            host=options.host,
            port=port_of(extra.port, options.rank),
            max_readers=extra.max_readers,
            threads=options.threads,
        )
        """The side that serves our regions to peers."""
        self._port = port_of(extra.advertise_port, options.rank) or self.server.port
        side = self._reading_side(extra, options.stall_timeout_s)
        self.reader: TcpReader = TcpReader(
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
        """Number of messages to the local data port that were refused since the port was opened."""
        return self.server.refused

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if not self._transfers.close():
            return
        self.reader.close()
        self.server.close()
