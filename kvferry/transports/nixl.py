"""The transport over NIXL: RDMA, shared memory or TCP, whichever its backends find.

The reader does all the work: it turns tiles × runs into segments
(:mod:`~kvferry.transports.nixl_segments`) and posts NIXL READs, straight to where the cells belong
(:mod:`~kvferry.transports.nixl_reader`). Where the end of an agent proves that nothing lands any
more (:mod:`~kvferry.transports.nixl_agents` says why), the transport fences: READs that do not
complete end with their agent. With other backends it does not: a read that failed or was cancelled
stays running until its READs are done, which from a peer that has merely stopped may be never, and
it is given staging memory only.
"""

import logging
from collections.abc import Sequence

import msgspec

from kvferry.config import parse_struct
from kvferry.errors import TransferError
from kvferry.layouts.arrays import MemorySpan
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
from kvferry.transports.device import DeviceTransport
from kvferry.transports.movers import start_after
from kvferry.transports.nixl_agents import AgentOptions, memory_kind
from kvferry.transports.nixl_reader import NixlPeer, NixlRead
from kvferry.transports.nixl_segments import cut_requests
from kvferry.transports.nixl_service import NixlService
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
    """Segments per READ at most."""
    max_agents: int = 8
    """Agents that read, at most; each registers the memory into which it reads. Connections share
    them: when one has to end, the READs of all that share it are posted again."""
    device_memory: bool = False
    """Whether KV caches on GPUs are served and read into as they are, without copies in host
    memory; the backends must know the GPU's memory (UCX with CUDA does)."""

    def __post_init__(self) -> None:
        if not self.backends:
            raise ValueError("backends: expected at least one, for example UCX")
        for backend in self.backend_params:
            if backend not in self.backends:
                raise ValueError(
                    f"backend_params: {backend} is not in backends ({', '.join(self.backends)})"
                )
        limits = {"num_threads": 0, "chunk_bytes": 4096, "max_descriptors": 1, "max_agents": 1}
        for field, least in limits.items():
            if getattr(self, field) < least:
                raise ValueError(f"{field}: {getattr(self, field)} is less than {least}")


class NixlTransport(Transport):
    """NIXL READs between registered memories."""

    name = "nixl"
    addressing = Addressing.SEGMENTS
    fences = True
    least_segment_bytes = 16 << 10
    """Over UCX on a host of two cores, cells whose source is dense over 16 times as much: placing
    moves at 0.24 of the rate of staging with segments of 512 bytes over shared memory, 0.43 with
    4 KiB, 0.92 with 16 KiB; over TCP at 0.10, 0.56 and 1.01."""
    ExtraConfig = NixlExtraConfig

    def __init__(self, extra: NixlExtraConfig, stall_timeout_s: float) -> None:
        self._extra = extra
        self._regions = Regions()
        self._transfers = Transfers()
        options = AgentOptions(extra.backends, extra.backend_params, extra.num_threads)
        self.fences = options.fenced
        self._service = NixlService(options, self._regions, extra.max_agents, stall_timeout_s)

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
        kind = NixlDeviceTransport if extra.device_memory else NixlTransport
        return kind(extra, options.stall_timeout_s)

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
        agent, metadata = self._service.metadata()
        known = self._regions
        regions = tuple(
            Region(span.address if served else 0, served, memory_kind(span), device)
            for span, served, device in zip(
                known.spans, known.served_nbytes, known.devices.tolist(), strict=False
            )
        )
        return encode_endpoint(agent, metadata, regions)

    def connect(self, endpoint: bytes) -> NixlPeer:
        """Takes note of a peer; NIXL connects at the first read, and where nobody is, that fails.

        Raises:
            DecodeError: the endpoint does not decode.
        """
        return self._service.connect(decode_endpoint(endpoint))

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """See :meth:`Transport.read`."""
        if not isinstance(peer, NixlPeer):
            raise TypeError(f"peer: expected what connect() returned, got {peer!r}")
        check_bounds(tiles, runs, peer.region_bytes, self._regions.nbytes)
        kinds = peer.kinds, tuple(memory_kind(span) for span in self._regions.spans)
        requests = cut_requests(
            tiles, runs, kinds, self._extra.chunk_bytes, self._extra.max_descriptors
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
        """See :meth:`Transport.cancel`; terminal once the READs that were posted are done, or
        their agent has ended.
        """
        self._transfers.cancel(transfer)
        self._service.wake()

    def close(self) -> None:
        """See :meth:`Transport.close`. READs under way end with their agents."""
        if not self._transfers.close():
            return
        self._service.close()
        if self._service.may_be_written:
            _kept.append(self._regions.arrays)
            logger.error("READs may still land; the memory is kept until the process ends")


class NixlDeviceTransport(NixlTransport, DeviceTransport):
    """NIXL READs between registered memories of GPUs too."""

    def allocate_device(self, nbytes: int) -> tuple[int, MemorySpan]:
        """Not here: NIXL has no memory of its own.

        Raises:
            TransferError: always; register memory that exists.
        """
        raise TransferError(f"nixl allocates no device memory; register {nbytes} bytes of yours")

    def register_device(self, memory: MemorySpan, *, serve: bool = True) -> int:
        """See :meth:`DeviceTransport.register_device`."""
        region = self._regions.add_device(memory, serve=serve)
        if serve:
            self._service.serve(region)
        return region
