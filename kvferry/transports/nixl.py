"""The transport over NIXL: RDMA, shared memory or TCP, whichever its backends find.

The reader does all the work: it turns tiles × runs into descriptors and posts NIXL READs
(:mod:`~kvferry.transports.nixl_service`). NIXL has no fence, so a transfer that fails or is
cancelled stays running until its READs are done or their agent has ended
(:mod:`~kvferry.transports.nixl_agents` says what that proves); from a peer that has merely stopped
that may be never, and whoever owns the target memory keeps it back so long.
"""

import logging
from collections.abc import Sequence

import msgspec

from kvferry.config import parse_struct
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.copier import warm
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.transports.base import (
    Addressing,
    ByteArray,
    Peer,
    Transfer,
    Transfers,
    Transport,
    TransportOptions,
    Waitable,
)
from kvferry.transports.movers import start_after
from kvferry.transports.nixl_agents import AgentOptions
from kvferry.transports.nixl_service import NixlPeer, NixlRead, NixlService, cut
from kvferry.transports.nixl_wire import Region, decode_endpoint, encode_endpoint
from kvferry.transports.regions import Regions, private_memory

logger = logging.getLogger(__name__)

_kept: list[Sequence[ByteArray]] = []
"""Memory of closed transports in which bytes may still land; kept while the process lives."""


class NixlExtraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the ``nixl`` transport."""

    backends: tuple[str, ...] = ("UCX",)
    """NIXL's backends, for example ``["UCX"]`` or ``["LIBFABRIC"]``."""
    backend_params: dict[str, dict[str, str]] = {}
    """By backend, what NIXL hands to it; ``{"UCX": {"engine_config": "TLS=tcp"}}``."""
    num_threads: int = 0
    """Threads per agent of the backends UCX and LIBFABRIC; 0: the transport's own one."""
    chunk_bytes: int = 8 << 20
    """Bytes per READ; what has not been posted yet can be cancelled."""
    max_descriptors: int = 2048
    """Pieces per READ at most."""

    def __post_init__(self) -> None:
        if not self.backends:
            raise ValueError("backends: expected at least one, for example UCX")
        for backend in self.backend_params:
            if backend not in self.backends:
                raise ValueError(
                    f"backend_params: {backend} is not in backends ({', '.join(self.backends)})"
                )
        for field, least in (("num_threads", 0), ("chunk_bytes", 4096), ("max_descriptors", 1)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}: {getattr(self, field)} is less than {least}")


class NixlTransport(Transport):
    """NIXL READs between registered memories."""

    name = "nixl"
    addressing = Addressing.SEGMENTS
    fences = False
    ExtraConfig = NixlExtraConfig

    def __init__(self, extra: NixlExtraConfig) -> None:
        self._extra = extra
        self._regions = Regions()
        self._transfers = Transfers()
        self._service = NixlService(
            AgentOptions(extra.backends, extra.backend_params, extra.num_threads), self._regions
        )

    @classmethod
    def open(cls, options: TransportOptions) -> "NixlTransport":
        """Makes the agent that serves, loads the copier and starts the thread.

        ``options.host`` means nothing here: the backends choose their devices, and their
        parameters restrict them.

        Raises:
            ConfigError: NIXL is not installed; a backend does not exist or does not start; unknown
                or wrong keys in ``options.extra``.
        """
        extra = parse_struct(NixlExtraConfig, options.extra, "nixl")
        warm()
        return cls(extra)

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """See :meth:`Transport.allocate`."""
        memory = private_memory(nbytes)
        return self.register(memory), memory

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`.

        Raises:
            TransferError: NIXL cannot register the memory.
        """
        region = self._regions.add(memory, serve=serve)
        if serve:
            self._service.serve(region)
        return region

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`."""
        sizes = self._regions.served_nbytes
        agent, metadata = self._service.metadata()
        addresses = self._regions.addresses.tolist()
        regions = tuple(
            Region(address if nbytes else 0, nbytes)
            for address, nbytes in zip(addresses, sizes, strict=False)
        )
        return encode_endpoint(agent, metadata, regions)

    def connect(self, endpoint: bytes) -> NixlPeer:
        """Takes note of a peer; NIXL connects at the first read, and where nobody is, that fails.

        Raises:
            DecodeError: the endpoint does not decode.
        """
        return NixlPeer(decode_endpoint(endpoint), self._service)

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """See :meth:`Transport.read`."""
        if not isinstance(peer, NixlPeer):
            raise TypeError(f"peer: expected what connect() returned, got {peer!r}")
        check_bounds(tiles, runs, peer.region_bytes, self._regions.nbytes)
        requests = cut(
            tiles, runs, peer.endpoint, self._extra.chunk_bytes, self._extra.max_descriptors
        )
        read = NixlRead(num_bytes(tiles, runs), self._transfers, requests)
        if not self._transfers.add(read):
            return read
        if not read.nbytes:
            read.enter()
            read.leave(0, 0)
        else:
            start_after(after, read, lambda: self._service.start(peer, read))
        return read

    def poll(self) -> list[Transfer]:
        """See :meth:`Transport.poll`."""
        return self._transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transport.cancel`; terminal once the READs that were posted are done."""
        self._transfers.cancel(transfer)

    def close(self) -> None:
        """See :meth:`Transport.close`. READs under way end with their agents."""
        if not self._transfers.close():
            return
        self._service.close()
        if self._service.unproven:
            _kept.append(self._regions.arrays)
            logger.error("READs may still land; the memory is kept until the process ends")
