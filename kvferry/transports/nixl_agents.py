"""The seam to NIXL: kvferry's own classes and errors around NIXL's agents.

Only a single thread at a time may use an :class:`Agent`; any thread may. NIXL's own progress thread
is off, because it polls without a pause and would take a core of every rank. The owner of the agent
makes progress instead.

**What proves that no byte lands any more.** A READ that NIXL reports as done proves this; no other
report of NIXL does. A released handle cancels nothing on the wire; neither does a removed remote
agent, nor deregistered memory. For NIXL, an error ends a READ at its first failed descriptor, while
other descriptors of the READ may still be in progress. For the backends in ``FENCED_BACKENDS``, the
end of the whole agent is a proof: UCX's worker closes its sockets and destroys its queue pairs, and
afterwards neither the kernel nor a network card can put late bytes anywhere. Copies that the worker
has enqueued on a local GPU outlive the worker; they are over when that GPU has done all its work.
:meth:`Agent.destroy` also checks that the agent is really gone, because a single forgotten
reference would keep the worker alive.

**Metadata of peers.** NIXL parses an agent's metadata with its own code, which malformed bytes can
crash. A digest keeps garbled or truncated bytes away from NIXL. Only the control channel's keys
protect against a peer that lies on purpose.
"""

import contextlib
import gc
import hashlib
import logging
import os
import uuid
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.decoding import decode_as
from kvferry.errors import (
    ConfigError,
    DecodeError,
    KVFerryError,
    PeerLostError,
    TransferError,
)
from kvferry.layouts.arrays import MemorySpan

logger = logging.getLogger(__name__)

Rows: TypeAlias = npt.NDArray[np.uint64]
"""Descriptors: each row has an address, a number of bytes and a device."""
Handle: TypeAlias = Any
"""NIXL's handle of a READ."""

_RDMA_PORTS, _RDMA_DEVICES = Path("/sys/class/infiniband"), Path("/dev/infiniband")
FENCED_BACKENDS = frozenset({"UCX"})
"""Backends for which the end of an agent proves that no byte lands any more."""
_THREADED_BACKENDS = frozenset({"UCX", "LIBFABRIC"})
_UCX_CONFIG = "KEEPALIVE_INTERVAL=1s"
"""UCX setting to notice a dead peer within seconds; UCX's own default is 20 seconds."""
_UCX_GPU_CONFIG = "CUDA_IPC_ENABLE_GET_ZCOPY=on"
"""UCX setting to read GPU memory over CUDA IPC; without NVLink, UCX itself would choose TCP."""
_LOST = frozenset({"nixlRemoteDisconnectError", "nixlCancelledError"})
"""Names of NIXL's errors which mean that the peer is gone, whatever was being done."""
VERSION = 1
"""Version of the endpoint."""
MAX_METADATA_BYTES = 16 << 20
"""Largest number of bytes of agent metadata that is given to NIXL."""
_MEMORIES = ("DRAM", "VRAM")


def error_of(
    error: Exception, doing: str, kind: type[KVFerryError] = TransferError
) -> KVFerryError:
    """The kvferry error for a NIXL error: ``PeerLostError`` if NIXL says so, else ``kind``."""
    name = type(error).__name__
    text = f"{doing}: NIXL says {str(error) or name}"
    return PeerLostError(text) if name in _LOST else kind(text)


@contextlib.contextmanager
def nixl_errors(doing: str, kind: type[KVFerryError] = TransferError) -> Iterator[None]:
    """Raises every error in the block as the matching kvferry error.

    NIXL's errors have no common base but ``Exception``, and NIXL's bindings also raise
    ``RuntimeError`` and ``ValueError``. The errors are not chained: their frames would keep the
    agent alive.
    """
    try:
        yield
    except KVFerryError:
        raise
    except Exception as error:
        mapped = error_of(error, doing, kind)
        error.with_traceback(None)
    else:
        return
    raise mapped


def memory_kind(span: MemorySpan) -> str:
    """NIXL's name of a kind of memory.

    >>> memory_kind(MemorySpan(0, 1, "cpu")), memory_kind(MemorySpan(0, 1, "cuda:1"))
    ('DRAM', 'VRAM')
    """
    return "DRAM" if span.is_host else "VRAM"


def has_rdma() -> bool:
    """Whether UCX finds a port for RDMA: an active port, and a device that may be opened."""
    try:
        active = any("ACTIVE" in port.read_text() for port in _RDMA_PORTS.glob("*/ports/*/state"))
    except OSError:  # a device has gone, or does not report its state
        return False
    usable = os.R_OK | os.W_OK
    return active and any(os.access(each, usable) for each in _RDMA_DEVICES.glob("uverbs*"))


def _wait_for_devices(devices: set[int]) -> None:
    """Returns when GPUs have done all the work of this process."""
    import torch

    for device in devices:
        torch.cuda.synchronize(device)


def _load() -> Any:
    """NIXL's Python API.

    Raises:
        ConfigError: NIXL is not installed, or does not load.
    """
    # When an agent ends, UCX would log every segment in progress.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        from nixl import _api
    except ImportError as error:
        raise ConfigError(
            f"transport nixl: the package nixl does not load ({error}); install kvferry[nixl], or "
            "without CUDA's packages `pip install --no-deps nixl nixl-cu12`"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        # NIXL writes a line per agent to stdout, which belongs to the application.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of every agent of a transport."""

    backends: tuple[str, ...] = ("UCX",)
    backend_params: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Parameters for each backend, by name of the backend."""
    num_threads: int = 0
    """Number of threads of a backend that has threads; 0 leaves the work to the calling thread."""
    device_memory: bool = False
    """Whether memory of GPUs is read."""

    def params(self, backend: str) -> dict[str, str]:
        """Parameters of one backend.

        The user's settings of UCX come last and so override kvferry's. NIXL overrides no setting
        from the environment.
        """
        params = dict(self.backend_params.get(backend, {}))
        if self.num_threads and backend in _THREADED_BACKENDS:
            params.setdefault("num_threads", str(self.num_threads))
        if backend == "UCX":
            ours = (_UCX_CONFIG, _UCX_GPU_CONFIG) if self.device_memory else (_UCX_CONFIG,)
            theirs = params.get("engine_config")
            params["engine_config"] = ",".join(ours if theirs is None else (*ours, theirs))
        return params

    @property
    def fenced(self) -> bool:
        """Whether the end of an agent proves that no byte lands any more."""
        return FENCED_BACKENDS.issuperset(self.backends)


class Agent:
    """A NIXL agent and the memory that the agent knows."""

    def __init__(self, options: AgentOptions) -> None:
        """Makes the agent and its backends.

        Raises:
            ConfigError: NIXL is not installed, or a backend does not exist or does not start.
        """
        api = _load()
        self._options = options
        with nixl_errors("cannot make an agent", ConfigError):
            config = api.nixl_agent_config(backends=[], enable_prog_thread=False)
            self._agent: Any = api.nixl_agent(f"kvferry-{uuid.uuid4().hex}", config)
        self._core = weakref.ref(self._agent.agent)
        self._devices: set[int] = set()
        for backend in options.backends:
            self._create(backend)

    def _create(self, backend: str) -> None:
        installed = sorted(self._agent.get_plugin_list())
        if backend not in installed:
            raise ConfigError(
                f"transport nixl: backends: {backend!r} is not one of this NIXL's: "
                f"{', '.join(installed)}"
            )
        with nixl_errors(f"transport nixl: backend {backend} does not start", ConfigError):
            self._agent.create_backend(backend, self._options.params(backend))

    @property
    def name(self) -> str:
        """Name of the agent for peers; random, so that no two starts share a name."""
        name: str = self._agent.name
        return name

    def metadata(self) -> bytes:
        """Bytes with which a peer's agent reaches this agent and the memory registered so far."""
        with nixl_errors("cannot describe our agent"):
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def register(self, span: MemorySpan, device: int) -> None:
        """Registers host memory, or memory of local GPU ``device``, for local and remote READs.

        Raises:
            TransferError: a backend cannot register the memory.
        """
        rows = np.array([[span.address, span.nbytes, device]], dtype=np.uint64)
        with nixl_errors(f"cannot register {span.nbytes} bytes on {span.device}"):
            self._agent.register_memory(rows, memory_kind(span))
        if not span.is_host:
            self._devices.add(device)

    def connect(self, metadata: bytes, name: str) -> None:
        """Makes a peer known to the agent. The connection itself comes with the first READ.

        Raises:
            DecodeError: NIXL refuses the metadata, or the metadata is of another agent.
        """
        with nixl_errors("cannot use the metadata of the peer's agent", DecodeError):
            loaded = self._agent.add_remote_agent(metadata)
        if loaded not in (name, name.encode()):
            raise DecodeError(f"the peer's metadata is of agent {loaded!r}, not of {name!r}")

    def forget(self, name: str) -> None:
        """Ends the connection to a peer without READs in progress."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # the remote agent may be gone already
            logger.debug("agent %s was not removed: %s", name, error)

    def prepare(self, name: str, kinds: tuple[str, str], source: Rows, target: Rows) -> Handle:
        """A READ from ``source`` at the peer to ``target``; no byte moves yet.

        Args:
            name: name of the peer's agent.
            kinds: kinds of memory of source and target, ``DRAM`` or ``VRAM``.
            source: descriptors at the peer.
            target: local descriptors.

        Raises:
            TransferError: NIXL has no path, or the rows leave the registered memory.
            PeerLostError: the peer is gone.
        """
        with nixl_errors(f"cannot prepare a READ of {len(source)} descriptors"):
            return self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(target, kinds[1]),
                self._agent.get_xfer_descs(source, kinds[0]),
                name,
            )

    def start(self, handle: Handle) -> bool:
        """Posts a prepared READ; returns whether it is done. Shared memory is copied right here.

        Raises:
            PeerLostError, TransferError: the READ failed. That proves nothing: see the module.
        """
        with nixl_errors("a READ cannot be posted"):
            return self._is_done(self._agent.transfer(handle))

    def is_done(self, handle: Handle) -> bool:
        """Makes progress; returns whether the READ is done. Raises the errors of :meth:`start`."""
        with nixl_errors("a READ failed"):
            return self._is_done(self._agent.check_xfer_state(handle))

    def _is_done(self, state: str) -> bool:
        if state == "ERR":
            raise TransferError("the READ ended as ERR")
        return state == "DONE"

    def release(self, handle: Handle) -> None:
        """Releases the handle of a READ that is done."""
        with nixl_errors("cannot release a READ"):
            self._agent.release_xfer_handle(handle)

    def serve(self) -> None:
        """Makes progress for readers, if a backend needs it."""
        with nixl_errors("cannot serve"):
            self._agent.get_new_notifs()

    def destroy(self, running: list[Handle]) -> bool:
        """Ends the agent, including READs in progress; empties ``running``.

        Returns whether the end proves that no byte of the READs can land any more; the caller may
        ask :meth:`is_over` again later. A stopped peer cannot delay the call. The agent must not be
        used afterwards.
        """
        while running:
            _give_up(running.pop())  # no name here may keep a handle, which keeps the agent
        del self._agent
        if self._core() is not None:
            gc.collect()
        return self.is_over()

    def is_over(self) -> bool:
        """Whether it is proved, after :meth:`destroy`, that no byte lands any more."""
        if self._core() is not None or not self._options.fenced:
            return False
        if self._devices:
            _wait_for_devices(self._devices)
        return True


def _give_up(handle: Handle) -> None:
    try:
        handle.release()
    except Exception as error:  # the backend could not cancel the READ; the agent goes anyway
        logger.debug("a READ under way was not released: %s", error)


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A region, as it lies in the serving process."""

    address: int
    nbytes: int
    """Number of bytes of the region; 0 for a region that is not served."""
    memory: str = "DRAM"
    """NIXL's name of the kind of memory: ``DRAM`` for host memory, ``VRAM`` for memory of a GPU."""
    device: int = 0
    """Number of the GPU."""


class AgentEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Agent and regions of a serving rank. Travels in the engine's description."""

    transport: str = "nixl"
    version: int = VERSION
    agent: str
    """Name of the serving agent."""
    metadata: bytes
    """Bytes with which NIXL reaches the serving agent; opaque to kvferry."""
    digest: bytes
    """SHA-256 of the metadata."""
    regions: tuple[Region, ...]
    rdma: bool = False
    """Whether the serving rank has a port for RDMA."""


def encode_endpoint(
    agent: str, metadata: bytes, regions: tuple[Region, ...], *, rdma: bool = False
) -> bytes:
    """The endpoint as bytes."""
    digest = hashlib.sha256(metadata).digest()
    return msgspec.msgpack.encode(
        AgentEndpoint(agent=agent, metadata=metadata, digest=digest, regions=regions, rdma=rdma)
    )


def decode_endpoint(data: bytes) -> AgentEndpoint:
    """Decodes the endpoint of a serving rank.

    Raises:
        DecodeError: the data does not match the schema, or names impossible memory.
    """
    endpoint = decode_as(AgentEndpoint, data, "nixl", VERSION)
    if not endpoint.agent or not 0 < len(endpoint.metadata) <= MAX_METADATA_BYTES:
        raise DecodeError(
            f"endpoint: agent {endpoint.agent[:80]!r} with {len(endpoint.metadata)} bytes of "
            f"metadata, expected a name and 1 to {MAX_METADATA_BYTES} bytes"
        )
    if hashlib.sha256(endpoint.metadata).digest() != endpoint.digest:
        raise DecodeError(f"endpoint: the metadata of agent {endpoint.agent!r} was garbled")
    for number, region in enumerate(endpoint.regions):
        fits = region.address >= 0 and 0 <= region.nbytes < 1 << 60
        fits = fits and region.address + region.nbytes < 1 << 63
        if not fits or region.memory not in _MEMORIES or not 0 <= region.device < 1 << 16:
            raise DecodeError(f"endpoint: region {number} is impossible memory: {region}")
    return endpoint
