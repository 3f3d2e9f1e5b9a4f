"""Where ucxx's objects and errors become ours.

The package ucxx asks for RMM and CUDA's bindings; moving host memory needs neither. Its asyncio
interface wants an event loop of the application's, so this uses the objects beneath it: a worker,
a listener and endpoints, all owned by one thread.
"""

import contextlib
import logging
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from kvferry.errors import (
    ConfigError,
    HostError,
    KVFerryError,
    PeerLostError,
    PortInUseError,
    ProtocolError,
    TransferError,
)
from kvferry.transports.base import ByteArray
from kvferry.transports.wire_messages import MAX_REQUEST_BYTES

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
_LENGTH = struct.Struct("<Q")
"""What stands before each message: its bytes."""
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
    """A connection: short messages that arrive whole and in order, and buffers by their tag.

    Short messages are a stream, each behind its length. UCX's active messages would know where they
    end, but ucxx queues what waits for them by the address of the connection in memory: a receive
    that waited when a connection ended swallows the first message of a later one at that address.
    """

    def __init__(self, ucx: "Ucx", endpoint: Any) -> None:
        self._ucx = ucx
        self._endpoint = endpoint
        self._receiving: Request = None
        self._buffer = np.empty(0, dtype=np.uint8)
        """What it receives into: a length, or a message."""
        self._is_length = True

    @property
    def alive(self) -> bool:
        """Whether the other side is there, as far as UCX knows."""
        return bool(self._endpoint.alive)

    def send(self, frame: bytes) -> Request:
        """Sends a message; the request tells when it has left."""
        framed = np.frombuffer(_LENGTH.pack(len(frame)) + frame, dtype=np.uint8)
        self._check_alive()
        with ucx_errors("cannot send"):
            request = self._endpoint.stream_send(self._ucx.array(framed))
        return self._ucx.hold(request, framed)

    def receive(self) -> bytes | None:
        """The next message, or ``None``.

        Raises:
            PeerLostError, TransferError: the connection is gone.
            ProtocolError: the message would be longer than any may be.
        """
        while self._has_come():
            buffer, self._receiving = self._buffer, None
            if not self._is_length:
                self._is_length = True
                return buffer.tobytes()
            (nbytes,) = _LENGTH.unpack(buffer.tobytes())
            if not 0 < nbytes <= MAX_REQUEST_BYTES:
                raise ProtocolError(
                    f"a message of {nbytes} bytes; expected 1 to {MAX_REQUEST_BYTES}"
                )
            self._is_length = False
            self._expect(nbytes)
        return None

    def _has_come(self) -> bool:
        """Whether the buffer is full; begins to receive a length where nothing is awaited."""
        if self._receiving is None and self.alive:  # else UCX would let it wait for ever
            self._expect(_LENGTH.size)
        if self._receiving is None or not self._receiving.completed:
            return False
        try:
            self._receiving.check_error()
        except Exception as error:
            # UCX calls it a message cut short when the other side goes.
            raise PeerLostError(f"the connection has ended: UCX says {error}") from error
        return True

    def _expect(self, nbytes: int) -> None:
        self._buffer = np.empty(nbytes, dtype=np.uint8)
        with ucx_errors("cannot receive"):
            request = self._endpoint.stream_recv(self._ucx.array(self._buffer))
        self._receiving = self._ucx.hold(request, self._buffer)

    def send_buffer(self, tag: int, buffer: ByteArray) -> Request:
        """Sends a buffer to whoever expects ``tag``; it must stay as it is until it has left."""
        self._check_alive()
        with ucx_errors("cannot send"):
            request = self._endpoint.tag_send(self._ucx.array(buffer), self._ucx.tag(tag))
        return self._ucx.hold(request, buffer)

    def expect(self, tag: int, buffer: ByteArray) -> Request:
        """Receives what comes under ``tag``, at most as much as fits, into ``buffer``."""
        self._check_alive()
        with ucx_errors("cannot receive"):
            request = self._endpoint.tag_recv(
                self._ucx.array(buffer), self._ucx.tag(tag), self._ucx.whole_tag
            )
        return self._ucx.hold(request, buffer)

    def _check_alive(self) -> None:
        """UCX would not come back from a message to a connection that it has given up."""
        if not self.alive:
            raise PeerLostError("the connection has ended")

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
        self._held: list[tuple[Request, ByteArray]] = []
        """Messages under way, which UCX reads or writes."""
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

    def hold(self, request: Request, buffer: ByteArray) -> Request:
        """Keeps a buffer until UCX has let go of it, whatever becomes of the connection."""
        self._held.append((request, buffer))
        return request

    def progress(self) -> None:
        """Moves everything on."""
        self._worker.progress()
        self._held = [each for each in self._held if not each[0].completed]

    def may_sleep(self) -> bool:
        """Whether nothing is left to do before :attr:`event_fd` becomes readable."""
        return bool(self._worker.arm())

    def close(self) -> None:
        """Ends the listener and the worker, once UCX has let go of all buffers."""
        for _ in range(1000):
            if not self._held:
                break
            self.progress()
        del self._listener, self._worker, self._context
