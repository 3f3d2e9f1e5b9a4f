"""Where ZeroMQ's errors become ours."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from kvferry.errors import HostError, KVFerryError, PeerLostError, PortInUseError, TransferError

_HOST_ERRNOS = frozenset(
    {errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL, errno.EACCES, errno.EMFILE, errno.ENOMEM}
)
_LOST_ERRNOS = frozenset(
    {
        errno.EHOSTUNREACH,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
    }
)


def error_of(error: zmq.ZMQError, doing: str) -> KVFerryError:
    """Our error for one of ZeroMQ's; ``doing`` says what was tried, and on what."""
    text = f"{doing}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(f"{text}; end what listens there, or configure another port (0: any)")
    if error.errno in _HOST_ERRNOS:
        return HostError(text)
    if error.errno in _LOST_ERRNOS:
        return PeerLostError(text)
    return TransferError(text)


@contextmanager
def zmq_errors(doing: str) -> Iterator[None]:
    """Raises every ``ZMQError`` of the block as the error of ours that it means."""
    try:
        yield
    except zmq.ZMQError as error:
        raise error_of(error, doing) from error


def tcp_address(host: str, port: int | str) -> str:
    """``tcp://host:port``, an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
