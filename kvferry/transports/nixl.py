"""The transport over NIXL: RDMA, shared memory or TCP, as NIXL's backends choose.

The reader does all the work. The reader turns tiles × runs into segments
(:mod:`~kvferry.transports.nixl_segments`) and posts NIXL READs, straight to the final place of the
cells (:mod:`~kvferry.transports.nixl_reader`). For some backends, the end of an agent proves that
no byte lands any more (:mod:`~kvferry.transports.nixl_agents` explains why). With these backends
the transport fences: READs that do not complete end with their agent. With other backends the
transport does not fence. A failed or cancelled read then stays running until its READs are done,
which may never happen if the peer has merely stopped; so the transport gets staging memory only.

A single thread makes progress for the readers of local memory, if a backend needs such progress,
and looks after READs in progress. NIXL wakes no thread, so this thread looks again and again: less
often while nothing happens, and not at all while nothing can happen.
"""

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from kvferry.config import parse_struct
from kvferry.errors import HostError, PeerLostError, TransferError
from kvferry.layouts.arrays import ByteArray, MemorySpan
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.copier import warm
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.mailbox import Mailbox
from kvferry.transports.base import (
    Addressing,
    DeviceTransport,
    Peer,
    Transfer,
    Transfers,
    Transport,
    TransportOptions,
    Waitable,
    own_peer,
)
from kvferry.transports.movers import start_after
from kvferry.transports.nixl_agents import (
    Agent,
    AgentOptions,
    Region,
    decode_endpoint,
    encode_endpoint,
    has_rdma,
    memory_kind,
)
from kvferry.transports.nixl_reader import SHORT_BYTES, NixlPeer, NixlRead, SharedAgent
from kvferry.transports.nixl_segments import cut_requests
from kvferry.transports.regions import Regions, keep_for_ever, private_memory

logger = logging.getLogger(__name__)

_BUSY_S = 2e-5
"""Seconds above which a look at the serving agent counts as progress: then look again at once."""
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3
"""Seconds between two looks, shortest and longest; doubled while nothing happens."""


class NixlExtraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the ``nixl`` transport."""

    backends: tuple[str, ...] = ("UCX",)
    """Names of NIXL's backends, for example ``["UCX"]`` or ``["LIBFABRIC"]``."""
    backend_params: dict[str, dict[str, str]] = {}
    """Parameters for each backend, by name of the backend, for example
    ``{"UCX": {"engine_config": "TLS=tcp"}}``."""
    num_threads: int = 0
    """Number of threads per agent in the backends UCX and LIBFABRIC; 0: the transport's own
    thread."""
    chunk_bytes: int = 8 << 20
    """Number of bytes per READ; READs that are not yet posted can be cancelled."""
    max_descriptors: int = 2048
    """Largest number of segments per READ."""
    max_agents: int = 8
    """Largest number of agents that read; each agent registers the memory into which it reads.
    Connections share agents: when an agent must end, the READs of all connections that share the
    agent are posted again."""
    device_memory: bool = False
    """Whether KV caches on GPUs are served and read in place, without copies in host memory; the
    backends must know the GPU's memory (UCX with CUDA does)."""
    only_rdma: bool = False
    """Whether only pairs with RDMA use this transport; other pairs use the next transport."""

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
    least_segment_bytes = 32 << 10
    """Mean number of bytes of a segment from which placing is faster than staging. Measured over
    UCX on a host with two cores, with a dense source. Over shared memory, placing moves at 0.07 of
    the rate of staging with segments of 512 bytes, 0.36 with 4 KiB, 0.75 with 16 KiB and 1.06 with
    32 KiB. Over TCP the rates are 0.10, 0.64, 0.93 and 0.91, and 1.13 with 64 KiB. With a scattered
    source, both are equally fast up to 2 KiB, and placing is faster with longer segments."""
    ExtraConfig = NixlExtraConfig

    def __init__(self, extra: NixlExtraConfig, stall_timeout_s: float) -> None:
        self._extra = extra
        self._regions = Regions()
        self._transfers = Transfers()
        options = AgentOptions(
            extra.backends, extra.backend_params, extra.num_threads, extra.device_memory
        )
        if extra.device_memory:
            logger.info(
                "nixl: the backends get %s; of UCX's settings, those in the environment count",
                {backend: options.params(backend) for backend in extra.backends},
            )
        self.fences = options.fenced
        self._serving: Agent = Agent(options)
        self._lock = threading.Lock()
        """Guards the serving agent."""
        self._serves = False
        self._make = partial(SharedAgent, options, self._regions, stall_timeout_s)
        self._agents: tuple[SharedAgent, ...] = ()
        """Agents that read."""
        self._joins = threading.Lock()
        """Guards the choice of an agent for a connection."""
        self._pause_s = _SHORTEST_S
        self._thread = Mailbox("nixl", self._look).start()

    @classmethod
    def with_keys(cls, extra: Mapping[str, Any]) -> type["NixlTransport"]:
        """See :meth:`Transport.with_keys`."""
        config = parse_struct(NixlExtraConfig, extra, "nixl")
        return NixlDeviceTransport if config.device_memory else NixlTransport

    @classmethod
    def open(cls, options: TransportOptions) -> "NixlTransport":
        """Makes the serving agent, loads the copier and starts the thread.

        ``options.host`` has no effect: the backends choose their devices, and ``backend_params``
        restrict the choice.

        Raises:
            ConfigError: NIXL is not installed; a backend does not exist or does not start; unknown
                or wrong keys in ``options.extra``.
            HostError: ``only_rdma`` is set, and this machine has no RDMA.
        """
        extra = parse_struct(NixlExtraConfig, options.extra, "nixl")
        if extra.only_rdma and not has_rdma():
            raise HostError(
                "only_rdma: no port in /sys/class/infiniband is active, or no device in "
                "/dev/infiniband may be opened; take another transport"
            )
        warm()
        return cls.with_keys(options.extra)(extra, options.stall_timeout_s)

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """See :meth:`Transport.allocate`."""
        memory = private_memory(nbytes)
        return self.register(memory), memory

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`.

        Raises:
            TransferError: NIXL cannot register the memory.
        """
        return self._serve(self._regions.add(memory, serve=serve), serve)

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`.

        Raises:
            TransferError: the transport is closed.
        """
        with self._lock:
            self._check_open()
            agent, metadata = self._serving.name, self._serving.metadata()
        known = self._regions
        regions = tuple(
            Region(span.address if served else 0, served, memory_kind(span), device)
            for span, served, device in zip(
                known.spans, known.served_nbytes, known.devices.tolist(), strict=False
            )
        )
        return encode_endpoint(agent, metadata, regions, rdma=has_rdma())

    def connect(self, endpoint: bytes) -> NixlPeer:
        """Makes a peer and returns at once; if no rank serves there, the first read fails.

        The thread makes an agent and the connection, so that no read waits for them. The peer gets
        its own agent as long as there are fewer than ``max_agents``.

        Raises:
            DecodeError: the endpoint does not decode.
            PeerLostError: ``only_rdma`` is set, and the peer has no RDMA.
        """
        described = decode_endpoint(endpoint)
        if self._extra.only_rdma and not described.rdma:
            raise PeerLostError(f"only_rdma: {described.agent} has no active port for RDMA")
        with self._joins:
            agent = min(self._agents, key=partial(_load_of, described.agent), default=None)
            if agent is None or (agent.names and len(self._agents) < self._extra.max_agents):
                agent = self._make()
                self._agents = (*self._agents, agent)
            peer = NixlPeer(described, agent, self._wake)
            agent.join(peer)
        self._wake()
        return peer

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """See :meth:`Transport.read`. A short read is often over when the call returns."""
        ours = own_peer(peer, NixlPeer)
        check_bounds(tiles, runs, ours.region_bytes, self._regions.nbytes)
        kinds = ours.kinds, tuple(memory_kind(span) for span in self._regions.spans)
        requests = cut_requests(
            tiles, runs, kinds, self._extra.chunk_bytes, self._extra.max_descriptors
        )
        read = NixlRead(num_bytes(tiles, runs), self._transfers, requests)
        if not self._transfers.add(read):
            return read
        start_after(after, read, lambda: self._start(ours, read))
        return read

    def poll(self) -> list[Transfer]:
        """See :meth:`Transport.poll`."""
        return self._transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transport.cancel`.

        The transfer is terminal once its posted READs are done, or their agent has ended.
        """
        self._transfers.cancel(transfer)
        self._wake()

    def close(self) -> None:
        """See :meth:`Transport.close`.

        READs in progress complete within :data:`~kvferry.transports.nixl_reader.END_S` seconds, or
        end with their agents.
        """
        if not self._transfers.close():
            return
        self._thread.close()
        for agent in self._agents:
            agent.close()
            agent.look()
        while any(agent.is_reading for agent in self._agents):
            time.sleep(_SHORTEST_S)
            for agent in self._agents:
                agent.look()
        with self._lock:
            self._serving.destroy([])
        if any(agent.may_be_written for agent in self._agents):
            keep_for_ever(self._regions.arrays)
            logger.error("READs may still land; the memory is kept until the process ends")

    def _serve(self, region: int, serve: bool) -> int:
        """Lets peers read a local region if ``serve`` is true; returns the region id.

        Raises:
            TransferError: NIXL cannot register the region, or the transport is closed.
        """
        if serve:
            span, device = self._regions.spans[region], int(self._regions.devices[region])
            with self._lock:
                self._check_open()
                self._serving.register(span, device)
            self._serves = True
            self._wake()
        return region

    def _check_open(self) -> None:
        if self._transfers.closed:
            raise TransferError("the transport is closed")

    def _start(self, peer: NixlPeer, read: NixlRead) -> None:
        peer.turns.append(read)
        if peer.lost is not None:
            peer.refuse_turns()
        elif read.nbytes > SHORT_BYTES or not peer.agent.post_now(peer):
            self._wake()

    def _wake(self) -> None:
        """Makes the thread look now."""
        self._thread.post(self._hurry)

    # ---- the thread ---------------------------------------------------------------------------

    def _hurry(self) -> None:
        self._pause_s = _SHORTEST_S

    def _look(self) -> float | None:
        """Looks once at all agents; returns the seconds until the next look."""
        progressed, under_way = False, False
        for agent in self._agents:
            ended, more = agent.look()
            progressed |= ended
            under_way |= more
        if self._serves:
            progressed |= self._make_progress()
        if progressed:
            self._pause_s = _SHORTEST_S
            return 0.0
        if not under_way:
            return _LONGEST_S if self._serves else None
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_S)
        return pause_s

    def _make_progress(self) -> bool:
        """Makes progress for the readers of local memory; returns whether there was any."""
        began = time.perf_counter()
        with self._lock:
            self._serving.serve()
        return time.perf_counter() - began > _BUSY_S


def _load_of(name: str, agent: SharedAgent) -> tuple[bool, int]:
    """Sort key to choose an agent for a new connection to ``name``.

    Connections to the same serving agent are better kept apart: these would end together.
    """
    names = agent.names
    return name in names, len(names)


class NixlDeviceTransport(NixlTransport, DeviceTransport):
    """NIXL READs between registered memories, also memories of GPUs."""

    def allocate_device(self, nbytes: int) -> tuple[int, MemorySpan]:
        """Always fails: NIXL cannot allocate memory.

        Raises:
            TransferError: always; register existing memory instead.
        """
        raise TransferError(f"nixl allocates no device memory; register {nbytes} bytes of yours")

    def register_device(self, memory: MemorySpan, *, serve: bool = True) -> int:
        """See :meth:`DeviceTransport.register_device`."""
        return self._serve(self._regions.add_device(memory, serve=serve), serve)
