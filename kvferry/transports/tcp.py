"""The transport between hosts: ZeroMQ over TCP, zero-copy frames.

The source packs chunks in the order of its own memory (:mod:`~kvferry.transports.tcp_server`), the
reader unpacks each frame straight into place (:mod:`~kvferry.transports.tcp_reader`); any change of
layout happens in these two passes. Only the reader's own threads write its memory, so a terminal
state is a fence: a peer that stalls, resumes or lies cannot write anything any more.
"""

import zmq

from kvferry.config import parse_struct
from kvferry.errors import KVFerryError
from kvferry.layouts.copier import warm
from kvferry.transports.base import TransportOptions
from kvferry.transports.movers import MoverPool
from kvferry.transports.tcp_reader import TcpReader
from kvferry.transports.tcp_server import TcpServer
from kvferry.transports.wire import WireConfig, WireTransport, check_host


class TcpExtraConfig(WireConfig, frozen=True, kw_only=True):
    """Keys of the ``tcp`` transport."""

    advertise_host: str = ""
    """Host that peers are told; empty: the one that is listened on."""
    io_threads: int = 1
    """ZeroMQ's own threads; one saturates about 4 GB/s."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.io_threads < 1:
            raise ValueError(f"io_threads: {self.io_threads} is less than 1")


class TcpTransport(WireTransport):
    """TCP between hosts, or between processes that share no memory."""

    name = "tcp"
    ExtraConfig = TcpExtraConfig

    def __init__(self, options: TransportOptions, extra: TcpExtraConfig) -> None:
        super().__init__(extra.advertise_host or options.host)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(extra.io_threads)
        try:
            self._server = TcpServer(
                self._context,
                self._regions,
                host=options.host,
                port=extra.port,
                token=self._token,
                chunk_bytes=extra.chunk_bytes,
                window_bytes=extra.window_bytes,
                max_readers=extra.max_readers,
            )
        except KVFerryError:
            self._context.term()
            raise
        self._port = self._server.port
        self._pool = MoverPool("tcp", options.threads)
        side = self._reading_side(self._pool, extra, options.stall_timeout_s)
        self._reader: TcpReader = TcpReader(self._context, side)

    @classmethod
    def open(cls, options: TransportOptions) -> "TcpTransport":
        """Binds the data port, loads the copier and starts the threads.

        Raises:
            ConfigError: unknown or wrong keys in ``options.extra``; a wildcard host without
                ``advertise_host``.
            PortInUseError: the configured port is taken.
            HostError: the host is no address of this machine.
        """
        extra = parse_struct(TcpExtraConfig, options.extra, "tcp")
        if not extra.advertise_host:
            check_host(options.host, ", or advertise_host of tcp where this engine lends nothing")
        warm()
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
        self._pool.close()
        self._server.close()
        self._context.term()
