"""Sends requests to many addresses and completes their futures: one thread, one DEALER per address.

A connection belongs to a :class:`_Link`. When it breaks, everything asked on it fails at once and
the link is dropped with all that was queued on it; the next request opens a new one. So a request
is never delivered long after its caller has given it up, and nothing reconnects in the background.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.control import messages
from kvferry.control.messages import Reply, Request
from kvferry.control.options import ControlOptions
from kvferry.control.sockets import Wakeup, configure, configure_curve, endpoint, split_address
from kvferry.errors import CancelledError, DecodeError, KVFerryError, PeerLostError, ProtocolError

T = TypeVar("T")

#: Events of a connection after which nothing comes back on it, and what they mean.
_BREAKS: dict[int, str] = {
    zmq.Event.CLOSED: "nobody listens there",
    zmq.Event.DISCONNECTED: "the connection broke",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: (
        "the connection broke before it was set up: the other side was just ending, or the two "
        "have different curve keys (give both the same ones, or neither)"
    ),
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: (
        "it does not speak our protocol; give both sides curve keys, or neither"
    ),
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it does not admit our curve key; add it to its allowed_keys",
}


@dataclass(slots=True)
class Call(Generic[T]):
    """One request on its way."""

    address: str
    """``host:port`` of the server."""
    request: Request
    """Its id is filled in when it is sent."""
    read: Callable[[Reply], T]
    """Turns a reply into the future's result, or raises what the future is to raise."""
    future: "Future[T]" = field(default_factory=Future)
    deadline: float = 0.0
    """``time.monotonic()`` after which it counts as lost."""

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # only we end it

    def fail(self, error: Exception) -> None:
        """Ends the call without a result."""
        self.future.set_exception(error)

    def resolve(self, reply: Reply) -> None:
        """Ends the call with what the peer answered."""
        try:
            result = self.read(reply)
        except Exception as error:  # whatever an answer provokes, the thread goes on
            self.fail(error)
        else:
            self.future.set_result(result)


class _Link:
    """One connection: its socket, the monitor that tells when it breaks, and its open calls."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, options: ControlOptions
    ) -> None:
        host, port = split_address(address)
        # By id, oldest first; deadlines ascend too, as all calls have the same timeout.
        self.calls: dict[int, Call[Any]] = {}
        self.socket = context.socket(zmq.DEALER)
        self.monitor = self.socket.get_monitor_socket(sum(_BREAKS))
        try:
            configure(self.socket, host, options)
            self.socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a broken link is dropped instead
            self.socket.setsockopt(zmq.CONNECT_TIMEOUT, round(options.request_timeout_s * 1000))
            if options.curve is not None:
                configure_curve(self.socket, options.curve, server=False)
            self.socket.connect(endpoint(host, port))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drops the connection and what is queued on it."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class CallThread:
    """The thread that owns the sockets of a :class:`~kvferry.control.client.ControlClient`."""

    def __init__(self, options: ControlOptions, gather: Callable[[], Iterable[Call[Any]]]) -> None:
        """Args:
        options: timeouts, limits, keys.
        gather: called on the thread after every :meth:`wake`; returns the calls to be sent.
        """
        self._options = options
        self._gather = gather
        self._closing = False
        self._wakeup = Wakeup()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self._links: dict[str, _Link] = {}
        self._ids = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There are calls to be sent. Thread-safe."""
        self._wakeup.set()

    def close(self) -> None:
        """Ends the thread; every call still open fails with ``CancelledError``."""
        self._closing = True
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                events = dict(self._poller.poll(self._wait_ms()))
                if self._wakeup.fd in events:
                    self._wakeup.clear()
                    for call in self._gather():
                        self._send(call)
                for address, link in list(self._links.items()):
                    if link.socket in events:
                        self._receive(link)
                    if link.monitor in events:
                        self._on_break(address, link)
                self._expire()
        finally:
            self._shut_down()

    def _wait_ms(self) -> int | None:
        first = [next(iter(link.calls.values())) for link in self._links.values() if link.calls]
        if not first:
            return None
        left = min(call.deadline for call in first) - time.monotonic()
        return max(0, int(left * 1000) + 1)

    def _send(self, call: Call[Any]) -> None:
        id = next(self._ids)
        try:
            payload = messages.encode(msgspec.structs.replace(call.request, id=id))
            if len(payload) > self._options.max_message_bytes:
                raise ProtocolError(
                    f"max_message_bytes: the message has {len(payload)} bytes, allowed are "
                    f"{self._options.max_message_bytes}; raise it on both sides"
                )
            link = self._link(call.address)
            link.socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            call.fail(PeerLostError(f"{call.address}: it takes no more messages"))
        except zmq.ZMQError as error:
            call.fail(PeerLostError(f"{call.address}: {error}"))
        except (KVFerryError, ValueError, OverflowError) as error:
            call.fail(error)
        else:
            call.deadline = time.monotonic() + self._options.request_timeout_s
            link.calls[id] = call

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            link = _Link(self._context, address, self._options)
            self._poller.register(link.socket, zmq.POLLIN)
            self._poller.register(link.monitor, zmq.POLLIN)
            self._links[address] = link
        return link

    def _receive(self, link: _Link) -> None:
        while True:
            try:
                payload = link.socket.recv_multipart(zmq.NOBLOCK)[-1]
            except zmq.ZMQError:  # nothing more; that the link broke is the monitor's to tell
                return
            try:
                reply = messages.decode_reply(payload)
            except DecodeError:
                continue  # whose answer it was cannot be told; that call runs into its timeout
            call = link.calls.pop(reply.id, None)
            if call is not None:  # else it came after its timeout
                call.resolve(reply)

    def _on_break(self, address: str, link: _Link) -> None:
        event = int(recv_monitor_message(link.monitor)["event"])
        self._receive(link)  # answers that came before the break are good
        del self._links[address]
        self._poller.unregister(link.socket)
        self._poller.unregister(link.monitor)
        link.close()
        for call in link.calls.values():
            call.fail(PeerLostError(f"{address}: {_BREAKS[event]}"))

    def _expire(self) -> None:
        now = time.monotonic()
        for address, link in self._links.items():
            for id, call in list(link.calls.items()):
                if call.deadline > now:
                    break
                del link.calls[id]
                call.fail(
                    PeerLostError(
                        f"{address}: no answer within request_timeout_s "
                        f"({self._options.request_timeout_s} s)"
                    )
                )

    def _shut_down(self) -> None:
        self._closing = True
        calls = list(self._gather())
        for link in self._links.values():
            calls += link.calls.values()
            link.close()
        self._links.clear()
        for call in calls:
            call.fail(CancelledError("the control client was closed"))
        self._context.destroy(linger=0)
