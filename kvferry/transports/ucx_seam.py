"""Where ucxx's objects and errors become ours.

The package ucxx asks for RMM and CUDA's bindings; moving host memory needs neither. Its asyncio
interface wants an event loop of the application's, so this uses the objects beneath it: a worker,
a listener and endpoints, all owned by one thread.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from kvferry.errors import (
    ConfigError,
    HostError,
    KVFerryError,
    PeerLostError,
    PortInUseError,
    TransferError,
)
from kvferry.transports.base import ByteArray

logger = logging.getLogger(__name__)

Request: TypeAlias = Any
"""ucxx's handle of a message under way."""

_HOST_ERRORS = ("NoMemory", "NoDevice", "InvalidAddr", "NoResource")
_LOST_ERRORS = (
    "ConnectionReset",
    "EndpointTimeout",
    "NotConnected",
    "Unreachable",
    "Rejected",
    "Canceled",
    "Close",
    "TimedOut",
    "Failure",
    "IOError",
    "SomeConnectsFailed",
)
_ENDED_NS = 10**8
"""Nanoseconds that the end of a connection may take."""


def error_of(error: Exception, doing: str) -> KVFerryError:
    """Our error for one of ucxx's, by its name: they are many, and made when ucxx is imported."""
    name = type(error).__name__
    text = f"{doing}: UCX says {str(error) or name}"
    if "Busy" in name:
        return PortInUseError(f"{text}; end what listens there, or configure another port (0: any)")
    if any(part in name for part in _LOST_ERRORS):
        return PeerLostError(text)
    if any(part in name for part in _HOST_ERRORS):
        return HostError(text)
    return TransferError(text)


@contextlib.contextmanager
def ucx_errors(doing: str) -> Iterator[None]:
    """Raises every error of the block as the one of ours that it means."""
    try:
        yield
    except KVFerryError:
        raise
    except Exception as error:  # ucxx's have no common base but this, and Cython adds its own
        raise error_of(error, doing) from error


def _load() -> Any:
    """The objects of ucxx, and what wraps a buffer for them.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # ucxx sets some that this UCX lacks
    try:
        with contextlib.suppress(ImportError):  # UCX may be the system's
            import libucx

            libucx.load_library()  # libucxx would do it only after RMM's, which we go without
        import ucxx  # noqa: F401  (it loads the libraries that the next line needs)
        from ucxx._lib import arr, libucxx
    except ImportError as error:
        raise ConfigError(
            f"transport ucx: the package ucxx does not load ({error}); install kvferry[ucx], or "
            "without CUDA's packages `pip install --no-deps ucxx-cu12 libucxx-cu12 libucx-cu12`"
        ) from error
    return libucxx, arr.Array


class Link:
    """A connection: short messages that arrive whole, and buffers that arrive by their tag.

    Short messages may overtake longer ones that were sent before them.
    """

    def __init__(self, ucx: "Ucx", endpoint: Any) -> None:
        self._ucx = ucx
        self._endpoint = endpoint
        self._receiving: Request = None

    @property
    def alive(self) -> bool:
        """Whether the other side is there, as far as UCX knows."""
        return bool(self._endpoint.alive)

    def send(self, frame: bytes) -> Request:
        """Sends a message; the request tells when it has left."""
        with ucx_errors("cannot send"):
            return self._endpoint.am_send(self._ucx.array(np.frombuffer(frame, dtype=np.uint8)))

    def receive(self) -> bytes | None:
        """The next message, or ``None``.

        Raises:
            PeerLostError, TransferError: the connection is gone.
        """
        with ucx_errors("cannot receive"):
            if self._receiving is None:
                self._receiving = self._endpoint.am_recv()
            if not self._receiving.completed:
                return None
            request, self._receiving = self._receiving, None
            try:
                request.check_error()
            except Exception:
                # A receive that waits can be cancelled with an older connection of the same
                # address in memory; this one is none the worse for it.
                if self.alive:
                    return None
                raise
            return bytes(np.frombuffer(request.recv_buffer, dtype=np.uint8))

    def send_buffer(self, tag: int, buffer: ByteArray) -> Request:
        """Sends a buffer to whoever expects ``tag``; it must stay as it is until it has left."""
        with ucx_errors("cannot send"):
            return self._endpoint.tag_send(self._ucx.array(buffer), self._ucx.tag(tag))

    def expect(self, tag: int, buffer: ByteArray) -> Request:
        """Receives what comes under ``tag``, at most as much as fits, into ``buffer``."""
        with ucx_errors("cannot receive"):
            return self._endpoint.tag_recv(
                self._ucx.array(buffer), self._ucx.tag(tag), self._ucx.whole_tag
            )

    def close(self) -> None:
        """Ends the connection; what is under way on it is cancelled."""
        with contextlib.suppress(KVFerryError), ucx_errors("cannot close"):
            self._endpoint.close_blocking(period=_ENDED_NS, max_attempts=1)


class Ucx:
    """A UCX worker of its own, and what listens on it. Used by one thread at a time."""

    def __init__(self, config: Mapping[str, str], port: int) -> None:
        """Opens and listens.

        Raises:
            ConfigError: ucxx is not installed, or UCX refuses the configuration.
            PortInUseError: ``port`` is taken.
            HostError: there is no device to listen on.
        """
        self._api, self.array = _load()
        self.tag = self._api.UCXXTag
        self.whole_tag = self._api.UCXXTagMaskFull
        self._arrived: list[Any] = []
        try:
            self._context = self._api.UCXContext(dict(config))
        except Exception as error:
            raise ConfigError(f"transport ucx: config: {error}") from error
        with ucx_errors(f"cannot listen on port {port or '(any)'}"):
            self._worker = self._api.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self._listener = self._api.UCXListener.create(
                worker=self._worker, port=port, cb_func=self._arrived.append
            )
        self.port: int = self._listener.port
        self.event_fd: int = self._worker.epoll_file_descriptor
        """Readable when there is progress to be made, after :meth:`may_sleep` said yes."""

    def arrivals(self) -> list[Link]:
        """Connections that others have begun since the last call."""
        arrived, self._arrived[:] = list(self._arrived), []
        links = []
        for request in arrived:
            try:
                with ucx_errors("cannot accept a connection"):
                    endpoint = self._listener.create_endpoint_from_conn_request(request, True)
            except KVFerryError as error:  # it is the other side's loss
                logger.warning("%s", error)
                continue
            links.append(Link(self, endpoint))
        return links

    def connect(self, host: str, port: int) -> Link:
        """Begins a connection.

        Raises:
            PeerLostError, HostError, TransferError: it cannot be begun.
        """
        with ucx_errors(f"cannot connect to {host}:{port}"):
            return Link(self, self._api.UCXEndpoint.create(self._worker, host, port, True))

    def progress(self) -> None:
        """Moves everything on."""
        self._worker.progress()

    def may_sleep(self) -> bool:
        """Whether nothing is left to do before :attr:`event_fd` becomes readable."""
        return bool(self._worker.arm())

    def close(self, done: Callable[[], bool]) -> None:
        """Ends the listener and the worker, once ``done`` says that nothing is under way."""
        for _ in range(1000):
            if done():
                break
            self._worker.progress()
        del self._listener, self._worker, self._context
