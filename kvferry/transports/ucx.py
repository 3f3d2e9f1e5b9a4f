"""The transport over UCX: two-sided messages, over RDMA, shared memory or TCP as UCX finds them.

Cut into chunks and packed as by ``tcp`` (:mod:`~kvferry.transports.wire_chunks`); the source packs
(:mod:`~kvferry.transports.ucx_server`), the reader unpacks from bounce buffers of its own
(:mod:`~kvferry.transports.ucx_reader`), which is what makes it fence. One thread owns UCX.
"""

import contextlib
import ipaddress
import logging
import select
import threading

import msgspec

from kvferry.config import parse_struct
from kvferry.errors import ConfigError
from kvferry.layouts.copier import warm
from kvferry.transports.base import TransportOptions
from kvferry.transports.movers import MoverPool
from kvferry.transports.ucx_link import Ucx
from kvferry.transports.ucx_reader import UcxReader
from kvferry.transports.ucx_server import UcxServer
from kvferry.transports.wire import WireConfig, WireTransport
from kvferry.transports.wire_reader import WireLimits

logger = logging.getLogger(__name__)


class UcxExtraConfig(WireConfig, frozen=True, kw_only=True):
    """Keys of the ``ucx`` transport."""

    config: dict[str, str] = msgspec.field(default_factory=dict)
    """UCX's own settings, without the prefix ``UCX_``: ``{"TLS": "rc,sm"}``."""


class UcxTransport(WireTransport):
    """UCX messages between ranks."""

    name = "ucx"
    ExtraConfig = UcxExtraConfig

    def __init__(self, options: TransportOptions, extra: UcxExtraConfig) -> None:
        super().__init__(options.host)
        limits = WireLimits(extra.chunk_bytes, extra.window_bytes, options.stall_timeout_s)
        self._tick_s = limits.tick_s
        self._ucx = Ucx(extra.config, extra.port)
        self._port = self._ucx.port
        self._server = UcxServer(self._regions, self._token, extra.max_readers)
        self._pool = MoverPool("ucx", options.threads)
        self._reader: UcxReader = UcxReader(
            self._ucx, self._regions, self._transfers, self._pool, limits
        )
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-ucx", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, options: TransportOptions) -> "UcxTransport":
        """Listens, loads the copier and starts the threads.

        Raises:
            ConfigError: ucxx is not installed; unknown or wrong keys in ``options.extra``; a
                wildcard host, which peers cannot be told.
            PortInUseError: the configured port is taken.
            HostError: UCX finds nothing to listen on.
        """
        extra = parse_struct(UcxExtraConfig, options.extra, "ucx")
        with contextlib.suppress(ValueError):  # a name
            if ipaddress.ip_address(options.host).is_unspecified:
                raise ConfigError(
                    f"ucx: host {options.host} is everywhere, but peers cannot be told that; set "
                    "host to the address under which they reach this machine"
                )
        warm()
        return cls(options, extra)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if not self._transfers.close():
            return
        self._closing = True
        self._reader.tasks.post(lambda: None)
        self._thread.join()
        self._reader.tasks.close()
        self._pool.close()

    # What follows runs in the transport's thread.

    def _run(self) -> None:
        while not self._closing:
            try:
                if not self._round():
                    self._sleep()
                self._reader.fail_stalled()
            except Exception:  # a bug must not end the thread that every read needs
                logger.exception("the ucx thread failed; it goes on")
        self._reader.tasks.run()
        self._reader.lose_all()
        self._server.close()
        self._ucx.close(lambda: self._reader.idle and self._server.idle)

    def _round(self) -> bool:
        self._ucx.progress()
        progressed = self._reader.tasks.run()
        self._server.accept(self._ucx.arrivals())
        return progressed | self._server.round() | self._reader.round()

    def _sleep(self) -> None:
        if self._ucx.may_sleep():
            select.select([self._ucx.event_fd, self._reader.tasks.event_fd], [], [], self._tick_s)
            self._reader.tasks.quiet()
