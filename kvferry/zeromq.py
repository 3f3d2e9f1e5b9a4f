"""All use of ZeroMQ: addresses, keys, listening, and the mapping of its errors to kvferry's errors.

The control channel and the publisher of KV cache events use this module. Modules on plain TCP
sockets, above all the ``tcp`` transport, also use it: to listen with the same errors, and to notice
a lost host as soon as ZeroMQ does.
"""

import errno
import functools
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import zmq

from kvferry.errors import (
    ConfigError,
    HostError,
    KVFerryError,
    PeerLostError,
    PortInUseError,
    TransferError,
)

HEARTBEAT_S = 3.0
"""Seconds between two heartbeats by default."""

REFUSED_S = 0.1
"""Seconds for a host to refuse a connection. A slower host may only be slow."""

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Options of a plain TCP socket. With them, the kernel notices within 12 s that the other host is
gone. A host that is only slow keeps its connection, because its kernel answers."""

BACKLOG = 4096
"""Largest number of connections that wait to be accepted, as far as the system allows. Many engines
may reconnect at once; otherwise the kernel would let them retry one or three seconds later."""

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

CONNECTION_LOST: dict[int, str] = {
    zmq.Event.CLOSED: (
        "it cannot be connected to; open the port to this machine, or set host or "
        "advertise_host of the other engine to an address that this machine reaches"
    ),
    zmq.Event.DISCONNECTED: "the connection broke",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: (
        "the connection broke before it was set up: the other side was just ending, or the two "
        "have different curve_keys (give both the same file, or neither)"
    ),
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: (
        "it does not speak our protocol; give both sides the same curve_keys, or neither"
    ),
    zmq.Event.HANDSHAKE_FAILED_AUTH: (
        "it does not admit the key in our curve_keys; add it to its allowed_keys"
    ),
}
"""Events of a connection after which nothing arrives on it → their meaning."""

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


def error_of(error: zmq.ZMQError | OSError, doing: str) -> KVFerryError:
    """The kvferry error for an error of ZeroMQ or of a socket; ``doing`` names the attempt."""
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
    """Raises each ``ZMQError`` of the block as the matching kvferry error."""
    try:
        yield
    except zmq.ZMQError as error:
        raise error_of(error, doing) from error


def join_address(host: str, port: int | str) -> str:
    """``host:port``, with an IPv6 address in brackets and in its usual form; ``port`` may be ``*``.

    >>> join_address("fd77:0::1", 80)
    '[fd77::1]:80'
    """
    if ":" not in host:
        return f"{host}:{port}"
    with suppress(ValueError):  # a bad address shows when it is connected to
        host = str(ipaddress.ip_address(host))
    return f"[{host}]:{port}"


def tune_tcp(descriptor: int) -> None:
    """Makes a plain TCP connection send short messages at once, and notice a lost host."""
    with socket.socket(fileno=os.dup(descriptor)) as tcp:
        # A message in two pieces would wait until the other side acknowledges the first piece.
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in KEEPALIVE:
            tcp.setsockopt(*option)


def is_refused(host: str, port: int) -> bool:
    """Whether a host's kernel says that nothing listens on a port. Waits at most ``REFUSED_S``.

    ZeroMQ does not distinguish a refusal from an unreachable host, whose processes may be alive.
    """
    try:
        socket.create_connection((host, port), REFUSED_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def tcp_address(host: str, port: int | str) -> str:
    """``tcp://host:port``, with an IPv6 address in brackets; ``port`` may be ``*``."""
    return f"tcp://{join_address(host, port)}"


@functools.lru_cache(maxsize=1024)  # called for every request
def split_address(address: str) -> tuple[str, int]:
    """Splits ``host:port`` (or ``[host]:port``) into host and port.

    Raises:
        ValueError: the address does not have this form.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"address: {address!r} is not host:port")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"address: {address!r}: the port is not one of 1 to 65535")
    return host, int(port)


def listen(socket: Socket, host: str, port: int, key: str) -> int:
    """Binds a socket to a TCP port and returns the port.

    Args:
        socket: an unbound socket.
        host: an address of this machine, or ``*`` for all addresses.
        port: TCP port; 0 takes a free port.
        key: the configuration key under which the user wrote the port.

    Raises:
        PortInUseError: the port is taken.
        HostError: the address is not of this machine, or the port needs privileges.
    """
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    with listen_errors(host, port, key):
        socket.bind(tcp_address(host, port or "*"))
    last = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(last, bytes)  # the type of this option
    return int(last.rstrip(b"\0").rpartition(b":")[2])


@contextmanager
def listen_errors(host: str, port: int, key: str) -> Iterator[None]:
    """Raises the errors of binding a socket in the block, with the messages of
    :func:`listen`.
    """
    try:
        yield
    except (zmq.ZMQError, OSError) as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"{key}: {host} port {port} is taken by another process, such as another engine of "
                f"this host; give this engine another {key}, or 0 to take a free one"
            ) from error
        if error.errno == errno.EACCES:
            raise HostError(
                f"{key}: {host} port {port} needs privileges that this process lacks; take a "
                "port above 1023"
            ) from error
        raise HostError(
            f"host: cannot listen on {host!r}, port {port}: {error}; name an address of this "
            "machine"
        ) from error


def is_address(host: str) -> bool:
    """Whether a host is given by its address, so that no look-up is necessary."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself, and not an address for other machines."""
    if host == "localhost":
        return True
    return is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback


def is_everywhere(host: str) -> bool:
    """Whether a host means every address of this machine, so that a peer cannot use it.

    >>> [is_everywhere(host) for host in ("*", "0.0.0.0", "::", "10.0.0.1", "host.test")]
    [True, True, True, False, False]
    """
    if host in ("", "*"):
        return True
    return is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_unspecified


def resolve(host: str) -> str:
    """The address of a host; the time depends on the name server.

    ZeroMQ looks a name up only once, on the thread that serves all its sockets. If the look-up
    fails, a connection that does not reconnect stays dead.

    Raises:
        PeerLostError: the name is unknown, or the name server cannot be asked.
    """
    if is_address(host):
        return host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PeerLostError(f"cannot resolve {host!r}: {error}") from error
    return str(found[0][4][0])


def connect(socket: Socket, host: str, port: int) -> None:
    """Begins to connect a socket; returns at once. A socket that does not reconnect needs an
    address, see :func:`resolve`.

    Raises:
        ZMQError: the host is neither a name nor an address.
    """
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.connect(tcp_address(host, port))


def beat(socket: Socket, heartbeat_s: float) -> None:
    """Makes the ends of a connection check each other; call before the socket is bound or
    connected.

    ZeroMQ's own thread asks and answers. Therefore a process counts as present even if its Python
    code does not run. A connection on which nothing came for three or four heartbeats is lost.

    Args:
        socket: the socket of either end.
        heartbeat_s: seconds between two heartbeats.
    """
    milliseconds = max(1, round(heartbeat_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * milliseconds)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3 * milliseconds)


def keep_alive(tcp: socket.socket, gone_s: float) -> None:
    """Makes the kernels at the ends of a plain TCP connection check each other.

    Unlike the answer to a heartbeat (:func:`beat`), the answer of a kernel does not wait behind a
    long message on a slow link, or for a process that gets no CPU. Therefore only a host that is
    gone or cut off is lost; a process that was stopped keeps its connection.

    Args:
        tcp: the socket of either end.
        gone_s: seconds without a sign of the other host after which the connection is lost. A
            process that takes no data for this time, while data is sent to it, counts as gone.
    """
    seconds = max(1, round(gone_s / 3))
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, seconds),
        (socket.TCP_KEEPINTVL, seconds),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, round(gone_s * 1000)),  # while data is not acknowledged
    ):
        tcp.setsockopt(socket.IPPROTO_TCP, option, value)


def use_curve(
    socket: Socket, public_key: str, secret_key: str, server_key: str | None = None
) -> None:
    """Encrypts all data that a socket sends and receives; call before it is bound or connected.

    Args:
        socket: the socket of either end.
        public_key: the public key of this end, 40 characters of Z85.
        secret_key: the secret key of this end, 40 characters of Z85.
        server_key: public key of the server to which the socket connects; ``None`` for a server's
            socket.

    Raises:
        ConfigError: a key is not Z85, or this libzmq was built without CURVE.
    """
    try:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key.encode())
        if server_key is None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    except zmq.ZMQError as error:
        raise ConfigError(
            f"curve: libzmq refuses a key ({error}); make keys with `kvferry keys`"
        ) from error


def curve_keypair() -> tuple[str, str]:
    """Makes a new public and secret key.

    Raises:
        ConfigError: the installed libzmq was built without CURVE.
    """
    try:
        public, secret = zmq.curve_keypair()
    except zmq.ZMQError as error:
        raise ConfigError(
            "this libzmq was built without CURVE; install pyzmq from its wheels"
        ) from error
    return public.decode(), secret.decode()
