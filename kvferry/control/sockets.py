"""What the control channel's sockets have in common: options, keys, addresses, error mapping."""

import contextlib
import errno
import functools
import socket
import threading
from collections.abc import Callable

import zmq

from kvferry.control.options import ControlOptions, CurveKeys
from kvferry.errors import ConfigError, HostError, KVFerryError, PortInUseError
from kvferry.lifetimes import Closing


class Wakeup:
    """Wakes a thread that waits in ``zmq.Poller.poll``; any thread may call :meth:`set`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.fd = self._reader.fileno()

    def set(self) -> None:
        """Makes ``fd`` readable; does nothing once closed."""
        # A full buffer means that the thread will wake anyway.
        with contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Makes ``fd`` unreadable again."""
        with contextlib.suppress(BlockingIOError):
            while len(self._reader.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        """Frees both ends. Idempotent."""
        self._reader.close()
        self._writer.close()


class Listener(Closing):
    """A thread that owns a socket: it waits for messages, and closes the socket at its end."""

    def __init__(
        self,
        name: str,
        target: "zmq.Socket[bytes]",
        answer: Callable[[], object],
        *,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Starts the thread.

        Args:
            name: of the thread.
            target: nobody else touches it from now on.
            answer: takes what has come, without waiting, and deals with it; must not raise.
            on_end: called once the socket is closed.
        """
        self._target = target
        self._answer = answer
        self._on_end = on_end
        self._wakeup = Wakeup()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes the socket. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._target, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        try:
            while not self._closing:
                poller.poll()
                self._answer()
        finally:
            self._target.close(linger=0)
            self._on_end()


def endpoint(host: str, port: int | str) -> str:
    """The ZeroMQ endpoint of a TCP address; ``port`` may be ``*``."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@functools.lru_cache(maxsize=1024)  # asked with every request
def split_address(address: str) -> tuple[str, int]:
    """``host:port`` (or ``[host]:port``) as host and port.

    Raises:
        ValueError: it is not of that form.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"address: {address!r} is not host:port")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"address: {address!r}: the port is not one of 1 to 65535")
    return host, int(port)


def configure(target: "zmq.Socket[bytes]", host: str, options: ControlOptions) -> None:
    """Sets what servers and clients share."""
    heartbeat_ms = max(1, round(options.heartbeat_s * 1000))
    target.setsockopt(zmq.LINGER, 0)
    target.setsockopt(zmq.MAXMSGSIZE, options.max_message_bytes)
    target.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
    target.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * heartbeat_ms)
    target.setsockopt(zmq.HANDSHAKE_IVL, max(1, round(options.request_timeout_s * 1000)))
    if ":" in host:
        target.setsockopt(zmq.IPV6, 1)


def configure_curve(target: "zmq.Socket[bytes]", keys: CurveKeys, *, server: bool) -> None:
    """Sets the keys of a socket.

    Raises:
        ConfigError: a key is not Z85, or this libzmq was built without CURVE.
    """
    try:
        target.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key.encode())
        target.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key.encode())
        if server:
            target.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            target.setsockopt(zmq.CURVE_SERVERKEY, (keys.server_key or keys.public_key).encode())
    except zmq.ZMQError as error:
        raise ConfigError(
            f"curve: libzmq refuses a key ({error}); make keys with `kvferry keys`"
        ) from error


def bind_error(error: zmq.ZMQError, host: str, port: int, key: str = "kv_port") -> KVFerryError:
    """What a failed ``bind`` means to the user, who wrote the port under ``key``."""
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"{key}: {host}:{port} is taken by another process; give this engine another "
            f"{key}, or 0 to take a free one"
        )
    if error.errno == errno.EACCES:
        return HostError(
            f"{key}: {host}:{port} needs privileges that this process lacks; take a port above 1023"
        )
    return HostError(
        f"host: cannot listen on {host!r}, port {port}: {error}; name an address of "
        "this machine, or * for all of them"
    )


def bound_port(target: "zmq.Socket[bytes]") -> int:
    """The TCP port that a socket is bound to."""
    last = target.getsockopt(zmq.LAST_ENDPOINT)
    return int(bytes(last).rstrip(b"\0").rpartition(b":")[2])
