"""The transport over UCX: two-sided messages, over RDMA, shared memory or TCP as UCX finds them.

Cut into chunks and packed as by ``tcp`` (:mod:`~kvferry.transports.tcp_chunks`); the source packs
(:mod:`~kvferry.transports.ucx_server`), the reader unpacks from bounce buffers of its own
(:mod:`~kvferry.transports.ucx_reader`), which is what makes it fence. One thread owns UCX.
"""

import contextlib
import ipaddress
import logging
import os
import queue
import secrets
import select
import threading
import time
from collections.abc import Callable

import msgspec

from kvferry.config import parse_struct
from kvferry.errors import ConfigError, KVFerryError
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.copier import warm
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.topology.strategies import Addressing
from kvferry.transports.base import (
    ByteArray,
    Peer,
    Transfer,
    Transport,
    TransportOptions,
    Waitable,
)
from kvferry.transports.movers import Landing, Ledger, MoverPool, start_after
from kvferry.transports.regions import Regions, private_memory
from kvferry.transports.tcp_wire import MAX_CHUNK_BYTES, Endpoint, decode_endpoint, encode
from kvferry.transports.ucx_reader import UcxPeer, UcxRead, UcxReader
from kvferry.transports.ucx_seam import Ucx
from kvferry.transports.ucx_server import UcxServer

logger = logging.getLogger(__name__)


class UcxExtraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the ``ucx`` transport."""

    port: int = 0
    """Port of the data endpoint; 0 takes a free one."""
    config: dict[str, str] = {}
    """UCX's own settings, without the prefix ``UCX_``: ``{"TLS": "rc,sm"}``."""
    chunk_bytes: int = 4 << 20
    """Bytes per message of a read."""
    window_bytes: int = 16 << 20
    """Bytes that a reader has asked for at most, per connection."""
    max_readers: int = 256
    """Connections that are served; beyond them the one silent longest is dropped."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is not a port (0 to 65535)")
        if not 4096 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes: {self.chunk_bytes} is not in 4096 to {MAX_CHUNK_BYTES}")
        for field in ("window_bytes", "max_readers"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)} is less than 1")


class UcxTransport(Transport):
    """UCX messages between ranks."""

    name = "ucx"
    addressing = Addressing.PACKED
    fences = True
    ExtraConfig = UcxExtraConfig

    def __init__(self, options: TransportOptions, extra: UcxExtraConfig) -> None:
        self._host = options.host
        self._token = secrets.token_bytes(16)
        self._regions = Regions()
        self._ledger = Ledger()
        self._tick_s = min(1.0, max(0.02, options.stall_timeout_s / 8))
        self._ucx = Ucx(extra.config, extra.port)
        self._server = UcxServer(self._regions, self._token, extra.max_readers)
        self._pool = MoverPool("ucx", options.threads)
        self._reader = UcxReader(
            self._ucx,
            self._regions,
            self._pool,
            chunk_bytes=extra.chunk_bytes,
            window_bytes=extra.window_bytes,
            stall_timeout_s=options.stall_timeout_s,
        )
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
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

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """See :meth:`Transport.allocate`."""
        memory = private_memory(nbytes)
        return self.register(memory), memory

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`."""
        return self._regions.add(memory, serve=serve)

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`."""
        return encode(
            Endpoint(
                transport="ucx",
                host=self._host,
                port=self._ucx.port,
                token=self._token,
                regions=self._regions.served_nbytes,
            )
        )

    def connect(self, endpoint: bytes) -> UcxPeer:
        """Takes note of a peer; UCX connects at the first read, and where nobody is, that fails.

        Raises:
            DecodeError: the endpoint does not decode.
        """
        return UcxPeer(decode_endpoint(endpoint, "ucx"), self._lose)

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """See :meth:`Transport.read`."""
        if not isinstance(peer, UcxPeer):
            raise TypeError(f"peer: expected what connect() returned, got {peer!r}")
        check_bounds(tiles, runs, peer.region_bytes, self._regions.nbytes)
        transfer = Transfer(nbytes=num_bytes(tiles, runs))
        landing = Landing(
            transfer,
            self._ledger,
            on_end=lambda _: self._post(lambda: self._reader.end(peer, read)),
        )
        read = UcxRead(tiles, runs, landing)
        if not self._ledger.enter(landing):
            return transfer
        if not transfer.nbytes:
            landing.enter()
            landing.leave(0, 0)
        else:
            start_after(after, landing, lambda: self._post(lambda: self._reader.start(peer, read)))
        return transfer

    def poll(self) -> list[Transfer]:
        """See :meth:`Transport.poll`."""
        return self._ledger.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transport.cancel`; terminal once the chunks under way are unpacked."""
        self._ledger.cancel(transfer)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if not self._ledger.close():
            return
        self._closing = True
        self._post(lambda: None)
        self._thread.join()
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1
        self._pool.close()

    def _post(self, task: Callable[[], object]) -> None:
        """Has the thread call ``task``. After ``close`` nothing happens."""
        self._tasks.put(task)
        with self._wake_lock:  # once closed, the descriptor may be somebody else's
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _lose(self, peer: UcxPeer, error: KVFerryError) -> None:
        self._post(lambda: self._reader.lose(peer, error))

    # What follows runs in the transport's thread.

    def _run(self) -> None:
        checked = time.monotonic()
        while not self._closing:
            try:
                if not self._round():
                    self._sleep()
                if time.monotonic() - checked >= self._tick_s:
                    checked = time.monotonic()
                    self._reader.fail_stalled(checked)
            except Exception:  # a bug must not end the thread that every read needs
                logger.exception("the ucx thread failed; it goes on")
        self._run_tasks()
        self._reader.close()
        self._server.close()
        self._ucx.close(lambda: self._reader.idle and self._server.idle)

    def _round(self) -> bool:
        self._ucx.progress()
        progressed = self._run_tasks()
        self._server.accept(self._ucx.arrivals())
        return progressed | self._server.round() | self._reader.round()

    def _sleep(self) -> None:
        if self._ucx.may_sleep():
            select.select([self._ucx.event_fd, self._wake], [], [], self._tick_s)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)

    def _run_tasks(self) -> bool:
        ran = False
        while not self._tasks.empty():  # nobody else takes from it
            self._tasks.get()()
            ran = True
        return ran
