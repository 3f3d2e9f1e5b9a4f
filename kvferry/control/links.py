"""The links over which a :class:`~kvferry.control.client.ControlClient` reaches servers.

A link carries bytes to a server and back, and tells when it is lost. Other modules decide on the
messages and on the meaning of a loss: :class:`~kvferry.control.connection.Connection` knows no
sockets.
"""

import threading
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.control.options import ControlOptions, configure
from kvferry.errors import PeerEndedError, PeerLostError
from kvferry.lifetimes import Closing
from kvferry.zeromq import (
    CONNECTION_LOST,
    Context,
    Socket,
    connect,
    is_refused,
    resolve,
    split_address,
)

MAX_SOCKETS = 65_535
"""ZeroMQ's own limit of sockets (its default is 1,023; a link takes three). The real limit is the
number of open files."""

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # enums take longer than the check itself


class ControlLink(Protocol):
    """A connection to a server; a lost link is never restored. Not thread-safe."""

    @property
    def descriptors(self) -> tuple[Hashable, Hashable]:
        """Descriptors for :meth:`Mailbox.watch`. The first descriptor becomes ready when a message
        may have arrived, the second when the link may be lost. Any use of the link may reset them.
        """

    def send(self, payload: bytes) -> None:
        """Sends a message; never waits.

        Raises:
            PeerLostError: the message cannot be sent.
        """

    def receive(self) -> bytes | None:
        """The next received message; ``None`` if there is no message."""

    def why_lost(self) -> PeerLostError | None:
        """The reason why no message can arrive any more; ``None`` if messages may still arrive."""

    def close(self) -> None:
        """Closes the link; unsent messages are lost."""


class ControlNetwork(Protocol):
    """Makes links. Any thread may call any method."""

    def connect(self, address: str, host: str) -> ControlLink:
        """Begins to connect; returns at once.

        Args:
            address: ``host:port`` as the caller knows it.
            host: the resolved host of the address.

        Raises:
            ConfigError: a key is wrong.
            PeerLostError: the address is invalid.
        """

    def look_up(self, host: str) -> "Future[str]":
        """The address of a host name; returns at once. The future may raise PeerLostError."""

    def close(self) -> None:
        """Ends all links. Idempotent."""


class ZmqNetwork(Closing):
    """Links over ZeroMQ: a DEALER socket per link."""

    def __init__(self, options: ControlOptions) -> None:
        """Prepares a network without links.

        Args:
            options: timeouts, limits, keys.
        """
        self._options = options
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)

    def connect(self, address: str, host: str) -> "ZmqLink":
        """See :meth:`ControlNetwork.connect`."""
        return ZmqLink(self._context, address, host, self._options)

    def look_up(self, host: str) -> "Future[str]":
        """See :meth:`ControlNetwork.look_up`. Uses a new thread: a look-up may take long."""
        found: Future[str] = Future()

        def run() -> None:
            try:
                found.set_result(resolve(host))
            except PeerLostError as unknown:
                found.set_exception(unknown)

        threading.Thread(target=run, name="kvferry-lookup", daemon=True).start()
        return found

    def close(self) -> None:
        """See :meth:`ControlNetwork.close`."""
        self._context.destroy(linger=0)


class ZmqLink:
    """A DEALER socket, and the monitor that tells when it is lost."""

    def __init__(self, context: Context, address: str, host: str, options: ControlOptions) -> None:
        """See :meth:`ControlNetwork.connect`."""
        self._address = address
        self._host = host
        try:
            self._socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise _no_socket(address, error) from error
        try:
            self._monitor = self._socket.get_monitor_socket(sum(CONNECTION_LOST))
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise _no_socket(address, error) from error
        try:
            configure(self._socket, options, is_server=False)
            self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a lost connection is dropped instead
            # The kernel of the peer answers this.
            self._socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, round(options.heartbeat_s * 1000)))
            connect(self._socket, host, split_address(address)[1])
        except zmq.ZMQError as error:
            self.close()
            raise PeerLostError(f"{address}: {error}") from error
        except BaseException:
            self.close()
            raise
        self.descriptors: tuple[Hashable, Hashable] = (
            self._socket.getsockopt(zmq.FD),
            self._monitor.getsockopt(zmq.FD),
        )

    def send(self, payload: bytes) -> None:
        """See :meth:`ControlLink.send`."""
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerLostError(f"{self._address}: it takes no more messages") from error
        except zmq.ZMQError as error:
            raise PeerLostError(f"{self._address}: {error}") from error

    def receive(self) -> bytes | None:
        """See :meth:`ControlLink.receive`."""
        if not _can_receive(self._socket):
            return None
        return self._socket.recv_multipart(zmq.NOBLOCK)[-1]

    def why_lost(self) -> PeerLostError | None:
        """See :meth:`ControlLink.why_lost`; looks at the monitor."""
        if not _can_receive(self._monitor):
            return None
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.Event.CLOSED and is_refused(self._host, split_address(self._address)[1]):
            return PeerEndedError(f"{self._address}: nobody listens there")
        return PeerLostError(f"{self._address}: {CONNECTION_LOST[event]}")

    def close(self) -> None:
        """See :meth:`ControlLink.close`."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _no_socket(address: str, error: zmq.ZMQError) -> PeerLostError:
    return PeerLostError(
        f"{address}: there is no socket to be had for it: {error}; allow the process more open "
        "files (`ulimit -n`): each engine that it is connected with takes four"
    )


def _can_receive(socket: Socket) -> bool:
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)
