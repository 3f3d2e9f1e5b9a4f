"""The transport over UCX: two-sided messages, over RDMA, shared memory or TCP as UCX chooses.

Reads are cut into chunks and packed as in ``tcp`` (:mod:`~kvferry.transports.wire_chunks`). The
source packs (:mod:`~kvferry.transports.ucx_server`). The reader unpacks from its own bounce buffers
(:mod:`~kvferry.transports.ucx_reader`); therefore the transport fences. A single thread owns UCX.
"""

import select
from functools import partial

import msgspec

from kvferry.config import parse_struct
from kvferry.layouts.copier import warm
from kvferry.mailbox import Mailbox
from kvferry.transports.base import TransportOptions
from kvferry.transports.movers import MoverPool
from kvferry.transports.ucx_link import Ucx
from kvferry.transports.ucx_reader import UcxReader
from kvferry.transports.ucx_server import UcxServer
from kvferry.transports.wire import WireConfig, WireTransport, check_host, port_of


class UcxExtraConfig(WireConfig, frozen=True, kw_only=True):
    """Keys of the ``ucx`` transport."""

    window_bytes: int = 16 << 20
    """Largest number of bytes that a reader requests ahead, per connection."""
    config: dict[str, str] = msgspec.field(default_factory=dict)
    """Settings of UCX, without the prefix ``UCX_``: ``{"TLS": "rc,sm"}``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_bytes < 1:
            raise ValueError(f"window_bytes: {self.window_bytes} is less than 1")


class UcxTransport(WireTransport):
    """UCX messages between ranks."""

    name = "ucx"
    ExtraConfig = UcxExtraConfig

    def __init__(self, options: TransportOptions, extra: UcxExtraConfig) -> None:
        super().__init__(options.advertise_host or options.host)
        self._ucx = Ucx(extra.config, port_of(extra.port, options.rank))
        self._mailbox = Mailbox("ucx", self._turn, poller=select.poll())
        self._port = self._ucx.port
        wake = partial(self._mailbox.post, lambda: None)
        self.server = UcxServer(self._regions, self._token, extra.max_readers, wake)
        """The side that serves our regions to peers."""
        self._pool = MoverPool("ucx", options.threads)
        side = self._reading_side(extra, options.stall_timeout_s)
        self.reader: UcxReader = UcxReader(
            self._ucx, self._mailbox, side, self._pool, extra.window_bytes
        )
        self._mailbox.watch(self._ucx.event_fd, lambda: None)  # the turn makes the progress
        self._mailbox.start()

    @classmethod
    def open(cls, options: TransportOptions) -> "UcxTransport":
        """Listens, loads the copier and starts the threads.

        Raises:
            ConfigError: ucxx is not installed; unknown or wrong keys in ``options.extra``; a
                wildcard host, which peers cannot use.
            PortInUseError: the configured port is taken.
            HostError: UCX finds no device to listen on.
        """
        extra = parse_struct(UcxExtraConfig, options.extra, "ucx")
        check_host(options.advertise_host or options.host)
        warm()
        return cls(options, extra)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if not self._transfers.close():
            return
        self._mailbox.close()  # from here on this thread owns UCX
        self.reader.lose_all()
        self.server.close()
        self._ucx.close()
        self._pool.close()

    def _turn(self) -> float:
        """One turn of the transport's thread; returns the seconds until the next turn."""
        self._ucx.progress()
        self.server.accept(self._ucx.arrivals())
        progressed = self.server.round() | self.reader.round()
        pause_s = self.reader.fail_stalled()
        return pause_s if not progressed and self._ucx.may_sleep() else 0.0
