"""The seam to ucxx: kvferry's own classes and errors around ucxx's objects.

The package ucxx requires RMM and CUDA's bindings, although moving host memory needs neither. The
asyncio interface of ucxx needs an event loop of the application. So this module uses the objects
beneath: a worker, a listener and endpoints, all owned by a single thread.
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
from kvferry.layouts.arrays import ByteArray
from kvferry.transports.wire_messages import MAX_REQUEST_BYTES

logger = logging.getLogger(__name__)

Request: TypeAlias = Any
"""ucxx's handle of a message in progress."""

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
"""Header before each message: number of bytes of the message."""
_ENDED_NS = 10**8
"""Nanoseconds that the end of a connection may take."""


def error_of(error: Exception, doing: str) -> KVFerryError:
    """The kvferry error for a ucxx error, chosen by name: ucxx makes many classes at its import."""
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
    """Raises every error in the block as the matching kvferry error."""
    try:
        yield
    except KVFerryError:
        raise
    except Exception as error:  # ucxx's errors have no other common base, and Cython adds more
        raise error_of(error, doing) from error


def _load() -> Any:
    """The module of ucxx's objects, and the class that wraps a buffer for ucxx.

    Raises:
        ConfigError: ucxx is not installed, or does not load.
    """
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # ucxx sets some that this UCX lacks
    try:
        with contextlib.suppress(ImportError):  # UCX may belong to the system
            import libucx

            libucx.load_library()  # libucxx would load UCX only after RMM, which is not needed here
        import ucxx  # noqa: F401  (it loads the libraries that the next line needs)
        from ucxx._lib import arr, libucxx
    except ImportError as error:
        raise ConfigError(
            f"transport ucx: the package ucxx does not load ({error}); install kvferry[ucx], or "
            "without CUDA's packages `pip install --no-deps ucxx-cu12 libucxx-cu12 libucx-cu12`"
        ) from error
    return libucxx, arr.Array


class UcxLink:
    """A connection: short messages that arrive whole and in order, and buffers by their tag.

    Short messages form a stream; each message follows its length. UCX's active messages would keep
    message bounds, but ucxx queues waiting receives by the address of the connection in memory. A
    receive that waits when a connection ends would swallow the first message of a later connection
    at the same address.
    """

    def __init__(self, ucx: "Ucx", endpoint: Any) -> None:
        self._ucx = ucx
        self._endpoint = endpoint
        self._receiving: Request = None
        self._buffer = np.empty(0, dtype=np.uint8)
        """Buffer of the current receive: a length, or a message."""
        self._is_length = True

    @property
    def alive(self) -> bool:
        """Whether the remote side is there, as far as UCX knows."""
        return bool(self._endpoint.alive)

    def send(self, frame: bytes) -> Request:
        """Sends a message; the returned request is completed when the message has left."""
        framed = np.frombuffer(_LENGTH.pack(len(frame)) + frame, dtype=np.uint8)
        self._check_alive()
        with ucx_errors("cannot send"):
            request = self._endpoint.stream_send(self._ucx.array(framed))
        return self._ucx.hold(request, framed)

    def receive(self) -> bytes | None:
        """The next message, or ``None``.

        Raises:
            PeerLostError, TransferError: the connection is gone.
            ProtocolError: the message would be longer than the limit.
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
        """Whether the buffer is full; begins to receive a length if no receive is in progress."""
        if self._receiving is None and self.alive:  # else UCX would wait for ever
            self._expect(_LENGTH.size)
        if self._receiving is None or not self._receiving.completed:
            return False
        try:
            self._receiving.check_error()
        except Exception as error:
            # UCX reports a message cut short when the remote side goes.
            raise PeerLostError(f"the connection has ended: UCX says {error}") from error
        return True

    def _expect(self, nbytes: int) -> None:
        self._buffer = np.empty(nbytes, dtype=np.uint8)
        with ucx_errors("cannot receive"):
            request = self._endpoint.stream_recv(self._ucx.array(self._buffer))
        self._receiving = self._ucx.hold(request, self._buffer)

    def send_buffer(self, tag: int, buffer: ByteArray) -> Request:
        """Sends a buffer under ``tag``; the buffer must stay unchanged until it has left."""
        self._check_alive()
        with ucx_errors("cannot send"):
            request = self._endpoint.tag_send(self._ucx.array(buffer), self._ucx.tag(tag))
        return self._ucx.hold(request, buffer)

    def expect(self, tag: int, buffer: ByteArray) -> Request:
        """Receives the message under ``tag``, at most as much as fits, into ``buffer``."""
        self._check_alive()
        with ucx_errors("cannot receive"):
            request = self._endpoint.tag_recv(
                self._ucx.array(buffer), self._ucx.tag(tag), self._ucx.whole_tag
            )
        return self._ucx.hold(request, buffer)

    def _check_alive(self) -> None:
        """Raises PeerLostError for an ended connection, because UCX would never return."""
        if not self.alive:
            raise PeerLostError("the connection has ended")

    def close(self) -> None:
        """Ends the connection and cancels its messages in progress."""
        with contextlib.suppress(KVFerryError), ucx_errors("cannot close"):
            self._endpoint.close_blocking(period=_ENDED_NS, max_attempts=1)


class Ucx:
    """A private UCX worker and its listener. Used by one thread at a time."""

    def __init__(self, config: Mapping[str, str], port: int) -> None:
        """Opens the worker and listens.

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
        """Requests in progress, and their buffers, which UCX reads or writes."""
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
        """Descriptor that becomes readable when progress is possible, after :meth:`may_sleep` was
        true."""

    def arrivals(self) -> list[UcxLink]:
        """Connections begun by remote sides since the last call."""
        arrived, self._arrived[:] = list(self._arrived), []
        links = []
        for request in arrived:
            try:
                with ucx_errors("cannot accept a connection"):
                    endpoint = self._listener.create_endpoint_from_conn_request(request, True)
            except KVFerryError as error:  # only the remote side loses
                logger.warning("%s", error)
                continue
            links.append(UcxLink(self, endpoint))
        return links

    def connect(self, host: str, port: int) -> UcxLink:
        """Begins a connection.

        Raises:
            PeerLostError, HostError, TransferError: the connection cannot be begun.
        """
        with ucx_errors(f"cannot connect to {host}:{port}"):
            return UcxLink(self, self._api.UCXEndpoint.create(self._worker, host, port, True))

    def hold(self, request: Request, buffer: ByteArray) -> Request:
        """Keeps a buffer until UCX has released the buffer, whatever happens to the connection."""
        self._held.append((request, buffer))
        return request

    def progress(self) -> None:
        """Makes progress on all connections and messages."""
        self._worker.progress()
        self._held = [each for each in self._held if not each[0].completed]

    def may_sleep(self) -> bool:
        """Whether all work is done until :attr:`event_fd` becomes readable."""
        return bool(self._worker.arm())

    def close(self) -> None:
        """Ends the listener and the worker, once UCX has released all buffers."""
        for _ in range(1000):
            if not self._held:
                break
            self.progress()
        del self._listener, self._worker, self._context
