"""Where NIXL's agents and errors become ours.

An :class:`Agent` is used by one thread at a time, any one. NIXL's own progress thread is off: it
looks without a pause and would take a core of every rank; progress is made by whoever owns the
agent.

**What proves that nothing lands any more.** A READ that NIXL reports as done, and nothing else that
it says. A released handle cancels nothing on the wire; neither does a removed remote agent, nor
deregistered memory. An error ends a READ for NIXL at its first failed descriptor, while others of
it may still be under way. What does prove it, for the backends in ``FENCED_BACKENDS``, is the end
of the whole agent: UCX's worker closes its sockets and destroys its queue pairs, and after that
neither the kernel nor a network card has anywhere to put late bytes. Copies that the worker has
enqueued on a GPU of ours outlive it; when that GPU has done all its work, they are over too. So
:meth:`Agent.destroy` also looks whether the agent is really gone, because one forgotten reference
to it would keep the worker alive.

**What peers are told.** NIXL parses an agent's metadata with code of its own, which malformed bytes
can crash. A digest keeps bytes that were garbled or cut short away from it; against a peer that
lies on purpose only the control channel's keys protect.
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
"""Descriptors: one row of address, bytes and device each."""
Handle: TypeAlias = Any
"""NIXL's handle of a READ."""

FENCED_BACKENDS = frozenset({"UCX"})
"""Backends for which the end of an agent proves that nothing lands any more."""
_THREADED_BACKENDS = frozenset({"UCX", "LIBFABRIC"})
_UCX_CONFIG = "KEEPALIVE_INTERVAL=1s"
"""So that a peer that died is noticed in seconds; UCX's own default is 20."""
_LOST = frozenset({"nixlRemoteDisconnectError", "nixlCancelledError"})
"""NIXL's errors that mean that the peer is gone, whatever was being done."""
VERSION = 1
"""Of the endpoint."""
MAX_METADATA_BYTES = 16 << 20
"""Largest agent metadata that is handed to NIXL."""
_MEMORIES = ("DRAM", "VRAM")


def error_of(
    error: Exception, doing: str, kind: type[KVFerryError] = TransferError
) -> KVFerryError:
    """Our error for one of NIXL's; ``kind`` unless NIXL says that the peer is gone."""
    name = type(error).__name__
    text = f"{doing}: NIXL says {str(error) or name}"
    return PeerLostError(text) if name in _LOST else kind(text)


@contextlib.contextmanager
def nixl_errors(doing: str, kind: type[KVFerryError] = TransferError) -> Iterator[None]:
    """Raises every error of the block as the one of ours that it means.

    NIXL's errors have no common base but ``Exception``, and its bindings raise ``RuntimeError`` and
    ``ValueError`` besides. They are not chained: their frames would keep the agent alive.
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


def _wait_for_devices(devices: set[int]) -> None:
    """Returns when GPUs have done all the work of this process."""
    import torch

    for device in devices:
        torch.cuda.synchronize(device)


def _load() -> Any:
    """NIXL's Python API.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    # Of an agent that ends UCX lists every segment that was under way.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        from nixl import _api
    except ImportError as error:
        raise ConfigError(
            f"transport nixl: the package nixl does not load ({error}); install kvferry[nixl], or "
            "without CUDA's packages `pip install --no-deps nixl nixl-cu12`"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        # It writes a line per agent to stdout, which is the application's.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What every agent of a transport is made with."""

    backends: tuple[str, ...] = ("UCX",)
    backend_params: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By backend: the parameters that NIXL hands to it."""
    num_threads: int = 0
    """Threads of backends that have some; 0 leaves the work to the calling thread."""

    def params(self, backend: str) -> dict[str, str]:
        """Parameters of one backend."""
        params = dict(self.backend_params.get(backend, {}))
        if self.num_threads and backend in _THREADED_BACKENDS:
            params.setdefault("num_threads", str(self.num_threads))
        if backend == "UCX":
            params.setdefault("engine_config", _UCX_CONFIG)
        return params

    @property
    def fenced(self) -> bool:
        """Whether the end of an agent proves that nothing lands any more."""
        return FENCED_BACKENDS.issuperset(self.backends)


class Agent:
    """One NIXL agent and the memory that it knows."""

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
        """Under which peers know it; random, so that no two starts share one."""
        name: str = self._agent.name
        return name

    def metadata(self) -> bytes:
        """What a peer's agent needs to reach this one and the memory registered so far."""
        with nixl_errors("cannot describe our agent"):
            metadata: bytes = self._agent.get_agent_metadata()
            return metadata

    def register(self, span: MemorySpan, device: int) -> None:
        """Lets peers or our own READs use memory of this host, or of its GPU number ``device``.

        Raises:
            TransferError: a backend cannot register it.
        """
        rows = np.array([[span.address, span.nbytes, device]], dtype=np.uint64)
        with nixl_errors(f"cannot register {span.nbytes} bytes on {span.device}"):
            self._agent.register_memory(rows, memory_kind(span))
        if not span.is_host:
            self._devices.add(device)

    def connect(self, metadata: bytes, name: str) -> None:
        """Makes a peer known. The connection itself comes with the first READ.

        Raises:
            DecodeError: NIXL refuses the metadata, or it is another agent's.
        """
        with nixl_errors("cannot use the metadata of the peer's agent", DecodeError):
            loaded = self._agent.add_remote_agent(metadata)
        if loaded not in (name, name.encode()):
            raise DecodeError(f"the peer's metadata is of agent {loaded!r}, not of {name!r}")

    def forget(self, name: str) -> None:
        """Ends the connection to a peer of which nothing is under way."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # it may be gone already
            logger.debug("agent %s was not removed: %s", name, error)

    def prepare(self, name: str, kinds: tuple[str, str], source: Rows, target: Rows) -> Handle:
        """A READ from ``source`` at the peer to ``target``; nothing of it moves yet.

        Args:
            name: of the peer's agent.
            kinds: of the memory of source and target, ``DRAM`` or ``VRAM``.
            source: at the peer.
            target: here.

        Raises:
            TransferError: NIXL knows no way, or the rows leave the registered memory.
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
        """Posts a prepared READ; whether it is done. Over shared memory it copies right here.

        Raises:
            PeerLostError, TransferError: it failed. That proves nothing: see the module.
        """
        with nixl_errors("a READ cannot be posted"):
            return self._is_done(self._agent.transfer(handle))

    def is_done(self, handle: Handle) -> bool:
        """Makes progress; whether the READ is done. Raises as :meth:`start`."""
        with nixl_errors("a READ failed"):
            return self._is_done(self._agent.check_xfer_state(handle))

    def _is_done(self, state: str) -> bool:
        if state == "ERR":
            raise TransferError("the READ ended as ERR")
        return state == "DONE"

    def release(self, handle: Handle) -> None:
        """Gives back the handle of a READ that is done."""
        with nixl_errors("cannot release a READ"):
            self._agent.release_xfer_handle(handle)

    def serve(self) -> None:
        """Makes the progress that readers wait for, where a backend needs ours."""
        with nixl_errors("cannot serve"):
            self._agent.get_new_notifs()

    def destroy(self, running: list[Handle]) -> bool:
        """Ends the agent, READs under way included; empties ``running``.

        Returns whether that proves that nothing of them can land any more; :meth:`is_over` may be
        asked again later. A stopped peer cannot hold it up. The agent must not be used again.
        """
        while running:
            _give_up(running.pop())  # no name here may keep a handle, which keeps the agent
        del self._agent
        if self._core() is not None:
            gc.collect()
        return self.is_over()

    def is_over(self) -> bool:
        """Whether it is proved, after :meth:`destroy`, that nothing lands any more."""
        if self._core() is not None or not self._options.fenced:
            return False
        if self._devices:
            _wait_for_devices(self._devices)
        return True


def _give_up(handle: Handle) -> None:
    try:
        handle.release()
    except Exception as error:  # the backend could not cancel it; the agent goes anyway
        logger.debug("a READ under way was not released: %s", error)


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One region, where it lies in the serving process."""

    address: int
    nbytes: int
    """0 for a region that is not served."""
    memory: str = "DRAM"
    """NIXL's name of the kind: ``DRAM`` is host memory, ``VRAM`` a GPU's."""
    device: int = 0
    """Number of the GPU."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves, and what. Travels in the engine's description."""

    transport: str = "nixl"
    version: int = VERSION
    agent: str
    """The agent's name."""
    metadata: bytes
    """What NIXL needs to reach it: opaque to us."""
    digest: bytes
    """SHA-256 of the metadata."""
    regions: tuple[Region, ...]


def encode_endpoint(agent: str, metadata: bytes, regions: tuple[Region, ...]) -> bytes:
    """The endpoint as bytes."""
    digest = hashlib.sha256(metadata).digest()
    return msgspec.msgpack.encode(
        Endpoint(agent=agent, metadata=metadata, digest=digest, regions=regions)
    )


def decode_endpoint(data: bytes) -> Endpoint:
    """Who serves, and what.

    Raises:
        DecodeError: it does not match the schema, or speaks of impossible memory.
    """
    endpoint = decode_as(Endpoint, data, "nixl", VERSION)
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
