"""The asking end of the control channel.

Every request returns a :class:`concurrent.futures.Future` at once. Any thread may make a request,
and the request is sent on this thread::

    any thread      renew(), finish(), ... ──▶ send ─────────────────────────▶ server
    any thread      pump() ──▶ takes the answers that have come ──▶ futures ◀── server
    client thread   sleeps until an answer comes, a connection breaks or a call is overdue

The thread that takes an answer completes the future and runs the callbacks of the future; therefore
callbacks must be short.

If a connection breaks, all open requests on this connection fail at once, and everything queued on
it is dropped; the next request opens a new connection. Therefore no request is delivered long after
its caller has given up, and no connection is restored in the background.
"""

import itertools
import logging
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace

from kvferry.control.asks import ask_proof
from kvferry.control.connection import Call, Connection, Ended, News, expect, finish_answers
from kvferry.control.handshake import compare, unproved_heads, validate
from kvferry.control.links import ControlNetwork, ZmqNetwork
from kvferry.control.messages import (
    Ask,
    Asked,
    DescriptionReply,
    DescriptionRequest,
    Finish,
    FinishAnswer,
    Finishes,
    Handshake,
    HandshakeReply,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    StatusReply,
    StatusReport,
    StatusRequest,
    TakeBack,
    TraceReply,
    TraceRequest,
)
from kvferry.control.options import ControlOptions, CurveKeys
from kvferry.control.peers import PeerTable
from kvferry.control.proofs import prove
from kvferry.control.tickets import TransferId
from kvferry.errors import (
    CancelledError,
    IncompatibleError,
    KVFerryError,
    PeerLostError,
    ProtocolError,
)
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox
from kvferry.topology.description import EngineDescription
from kvferry.zeromq import is_address, join_address, split_address

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_PUMPED = 32
"""Largest number of connections that one call of :meth:`ControlClient.pump` reads. An engine calls
``pump`` in every step, and after a storm hundreds of connections owe an answer. The client's thread
reads the other connections."""

_Send: TypeAlias = Callable[[Connection, Call[Any]], Ended | None]
"""Sends a call on a connection; returns ``None`` if the connection has broken."""


class ControlClient(Closing):
    """Speaks for one process of an engine with the control servers of other engines.

    An ``address`` is ``host:port``; an invalid address raises :class:`ValueError`. Any future may
    raise ``PeerLostError`` (no server there, the connection broke, no answer in time, wrong keys),
    ``ProtocolError`` (the bytes are no answer) or ``CancelledError`` (the client was closed). Any
    thread may call any method.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        incarnation: str,
        options: ControlOptions | None = None,
        peers: PeerTable | None = None,
        network: ControlNetwork | None = None,
        clock: Callable[[], float] = time.monotonic,
        mailbox: Callable[..., Mailbox] = Mailbox,
    ) -> None:
        """Args:
        engine_id: the engine of this process.
        incarnation: the present incarnation of this engine.
        options: timeouts, limits, keys.
        peers: table that receives the engines of successful handshakes; ``ControlServer.peers`` of
            the same engine, so that the engine's status shows them.
        network: makes links to servers; the client closes it. ZeroMQ by default.
        clock: monotonic clock, in seconds.
        mailbox: makes the mailbox with the client's thread.
        """
        self._engine_id = engine_id
        self.incarnation = incarnation
        """The present incarnation of this engine; messages sent later name the incarnation of
        then."""
        self._options = options or ControlOptions()
        self._peers = peers
        self._network = network or ZmqNetwork(self._options)
        self._clock = clock
        self._lock = threading.Lock()
        self._closing = False
        self._connections: dict[str, Connection] = {}
        """Open connections by address."""
        self._busy: dict[Connection, None] = {}
        """Connections with open calls, and connections that recently had open calls."""
        self._busy_lock = threading.Lock()
        self._lookups: dict[str, list[tuple[Call[Any], _Send]]] = {}
        """Calls that wait until the name in their address is resolved, by address."""
        self._broken: set[Connection] = set()
        """Replaced connections that are not closed yet."""
        self._ended: deque[tuple[Call[Any], Reply | Exception]] = deque()
        """Calls with their outcomes, whose futures must still be completed."""
        self._listener: Callable[[str, News], None] = lambda *_: None
        self._wakes_at = math.inf
        """Clock reading at which the thread wakes even if no message arrives."""
        self._mailbox = mailbox("client", self._turn, poller=select.poll()).start()

    def listen(self, listener: Callable[[str, News], None]) -> None:
        """Sets ``listener``, which gets each address and unasked message of a source: leases that
        grow or are revoked, and the outcome of transfers. The listener runs on the thread that
        completes futures.
        """
        self._listener = listener

    def handshake(
        self, address: str, description: EngineDescription
    ) -> "Future[EngineDescription]":
        """Describes this engine to another engine.

        Returns:
            A future of the peer's valid, fitting description; raises ``IncompatibleError`` (with
            every mismatch) or ``NotReadyError`` (the peer still starts).
        """

        def read(reply: Reply) -> EngineDescription:
            if isinstance(reply, Refused):
                raise IncompatibleError(reply.engine_id, reply.mismatches)
            theirs = expect(reply, HandshakeReply).description
            validate(theirs)
            mismatches = compare(theirs, description)  # we read
            if mismatches:
                raise IncompatibleError(theirs.engine_id, mismatches)
            for unproved in unproved_heads(theirs, description):
                logger.info("%s", unproved)
            if self._peers is not None:
                self._peers.admit(theirs, asked=True)
            return theirs

        return self._ask(address, Call(Handshake(id=0, description=description), read))

    def renew(
        self, address: str, source_incarnation: str, leases: Mapping[str, bytes]
    ) -> "Future[Renewed]":
        """Takes leases, or extends the leases of this engine, all in one message.

        Args:
            address: address of the source.
            source_incarnation: incarnation of the source when it granted the leases.
            leases: lease id → secret of the ticket; at most ``messages.MAX_ITEMS``.

        Returns:
            A future of the answers, by lease; raises ``HandshakeNeededError`` if either side was
            restarted since the handshake.
        """
        sender = _sender(self._engine_id, self.incarnation, source_incarnation)
        request = Renew(
            id=0,
            **sender,
            leases=_proofs("Renew", leases, *sender.values()),
            grows=True,
        )

        def read(reply: Reply) -> Renewed:
            renewed = expect(reply, Renewed)
            if renewed.states.keys() != request.leases.keys():
                raise ProtocolError(
                    f"renewed: answers for {len(renewed.states)} leases, asked for {len(leases)}"
                )
            return renewed

        return self._ask(address, Call(request, read))

    def finish(
        self,
        address: str,
        source_incarnation: str,
        lease_id: str,
        secret: bytes,
        *,
        rank: int,
        ok: bool,
        nonce: bytes,
    ) -> "Future[FinishAnswer]":
        """Reports that all reads of ``rank`` for a lease are complete, and asks for the confirm.

        While a message to the source is under way, new finishes wait and share the next message. A
        caller may repeat the same report, for example if the answer was lost.

        Args:
            address: address of the source.
            source_incarnation: incarnation of the source when it granted the lease.
            lease_id: the lease.
            secret: secret of the ticket.
            rank: the reporting rank.
            ok: whether the reads of the rank succeeded.
            nonce: random bytes, the same in every repetition of this report.

        Returns:
            A future of the answer. The caller may use the data only after ``HELD``; any error means
            the same as ``REVOKED``.
        """
        sender = _sender(self._engine_id, self.incarnation, source_incarnation)
        proof = prove(secret, "Finish", lease_id, *sender.values(), rank, ok, nonce)
        request = Finishes(
            id=0,
            **sender,
            items=(Finish(lease_id=lease_id, rank=rank, ok=ok, nonce=nonce, proof=proof),),
        )
        call = Call(request, lambda reply: finish_answers(reply, 1)[0])
        return self._ask(address, call, Connection.send_finish)

    def release(
        self,
        address: str,
        source_incarnation: str,
        leases: Mapping[str, bytes],
        *,
        keep: bool = False,
    ) -> "Future[None]":
        """Gives leases up.

        Args:
            address: address of the source.
            source_incarnation: incarnation of the source when it granted the leases.
            leases: lease id → secret of the ticket; at most ``messages.MAX_ITEMS``.
            keep: whether another target may take the leases; otherwise the leases end.

        Returns:
            A future that ends when the source has recorded the release; raises
            ``HandshakeNeededError`` if either side was restarted. Without an answer, the leases
            expire.
        """
        sender = _sender(self._engine_id, self.incarnation, source_incarnation)
        request = Release(
            id=0,
            **sender,
            leases=_proofs("Release", leases, *sender.values(), keep),
            keep=keep,
        )

        def read(reply: Reply) -> None:
            expect(reply, Released)

        return self._ask(address, Call(request, read))

    def ask(self, address: str, source_incarnation: str, transfer: TransferId) -> "Future[Asked]":
        """Asks for the ticket of a transfer; the source later reports changes without a request.

        Args:
            address: address of the source.
            source_incarnation: incarnation of the asked source.
            transfer: the transfer from the router.

        Returns:
            A future of the answer, whose ticket has a veiled secret
            (:func:`kvferry.control.proofs.veil`). The future raises ``HandshakeNeededError`` if
            either side was restarted.
        """
        sender = _sender(self._engine_id, self.incarnation, source_incarnation)
        request = Ask(id=0, **sender, transfer_id=transfer.transfer_id, proof=b"")
        request = replace(request, proof=ask_proof(transfer.secret, request))

        def read(reply: Reply) -> Asked:
            asked = expect(reply, Asked)
            if asked.transfer_id != transfer.transfer_id:
                raise ProtocolError(
                    f"asked: an answer for transfer {asked.transfer_id}, asked for "
                    f"{transfer.transfer_id}"
                )
            return asked

        return self._ask(address, Call(request, read))

    def take_back(self, address: str, word: bytes) -> "Future[bool]":
        """Gives back what a request lends, by the word that its source got with the request.

        Returns:
            A future that ends when the source has taken the loan back; whether the source knows a
            lease with this word. It raises if the source is of a release without this message.
        """
        call = Call(TakeBack(id=0, word=word), lambda reply: expect(reply, Released).is_known)
        return self._ask(address, call)

    def status(self, address: str) -> "Future[StatusReport]":
        """Asks an engine for its status."""
        return self._ask(
            address, Call(StatusRequest(id=0), lambda reply: expect(reply, StatusReply).report)
        )

    def trace(self, address: str, request_id: str) -> "Future[TraceReply]":
        """Asks an engine for its record of a request."""
        request = TraceRequest(id=0, request_id=request_id)
        return self._ask(address, Call(request, lambda reply: expect(reply, TraceReply)))

    def describe(self, address: str) -> "Future[DescriptionReply]":
        """Asks an engine to describe itself; unlike a handshake, this changes nothing there.

        Returns:
            A future of the answer, whose description is valid. The future raises ``NotReadyError``
            if the peer still starts.
        """

        def read(reply: Reply) -> DescriptionReply:
            described = expect(reply, DescriptionReply)
            validate(described.description)
            return described

        return self._ask(address, Call(DescriptionRequest(id=0), read))

    def pump(self) -> bool:
        """Takes all received answers and completes their futures; does not wait. Optional,
        as the client's thread does the same; a running thread need not wait for this.

        Returns:
            Whether a future was completed.
        """
        if self._busy:
            with self._busy_lock:
                busy = list(itertools.islice(self._busy, MOST_PUMPED))
                for connection in busy:
                    del self._busy[connection]
                    if connection.calls:  # to the end of the queue: other connections are next
                        self._busy[connection] = None
            for connection in busy:
                self._receive(connection)
        return self._complete()

    def is_connected(self, address: str) -> bool:
        """Whether there is a connection to an address that is not known to be broken."""
        return address in self._connections

    def forget(self, description: EngineDescription) -> None:
        """Stops speaking to an incarnation of an engine that has answered a handshake."""
        if self._peers is not None:
            self._peers.let_go(description)

    def close(self) -> None:
        """Ends all connections; open futures raise ``CancelledError``. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._mailbox.close()
        with self._lock:  # another thread may be moving a broken connection just now
            connections = [*self._connections.values(), *self._broken]
            waiting = [call for calls in self._lookups.values() for call, _ in calls]
            self._lookups.clear()
        closed = CancelledError("the control client was closed")
        self._ended.extend((call, closed) for call in waiting)
        for connection in connections:
            with connection.lock:
                self._ended.extend(connection.end(closed))
        self._network.close()
        self._complete()

    # ---- any thread ---------------------------------------------------------------------------

    def _ask(self, address: str, call: Call[T], send: _Send = Connection.send) -> "Future[T]":
        split_address(address)
        try:
            self._send(address, call, send)
        except KVFerryError as error:
            self._ended.append((call, error))
        if self._closing:
            self._complete()  # no other thread completes futures any more
        elif self._ended:
            self._mailbox.post(self._complete)
        if call.deadline < self._wakes_at:
            self._mailbox.post(partial(self._wake_at, call.deadline))
        return call.future

    def _send(
        self, address: str, call: Call[Any], send: _Send, resolved: str | None = None
    ) -> None:
        while True:
            connection = self._connection(address, resolved)
            if connection is None:
                self._look_up(address, call, send)
                return
            with connection.lock:
                ended = send(connection, call)
            if ended is not None:
                if connection.calls and connection not in self._busy:
                    with self._busy_lock:
                        self._busy[connection] = None
                self._ended.extend(ended)
                return
            # The connection broke, and our thread has not closed it yet. A new one takes its place.
            with self._lock:
                if self._connections.get(address) is connection:
                    del self._connections[address]
                    self._broken.add(connection)
            self._mailbox.post(partial(self._drop, connection))

    def _connection(self, address: str, resolved: str | None) -> Connection | None:
        """The connection to an address; ``None`` if a name must be resolved first."""
        with self._lock:
            if self._closing:
                raise CancelledError("the control client is closed")
            connection = self._connections.get(address)
            if connection is None:
                host = resolved or split_address(address)[0]
                if not is_address(host):
                    return None
                link = self._network.connect(address, host)
                connection = Connection(
                    link,
                    address,
                    self._options,
                    self._clock,
                    self._told,
                )
                self._connections[address] = connection
                self._mailbox.post(partial(self._watch, connection))
            return connection

    def _look_up(self, address: str, call: Call[Any], send: _Send) -> None:
        """Sends a call after the name in the address is resolved, once for all calls to it."""
        call.deadline = self._clock() + self._options.request_timeout_s
        with self._lock:
            waiting = self._lookups.get(address)
            if waiting is not None:
                waiting.append((call, send))
                return
            self._lookups[address] = [(call, send)]
        found = self._network.look_up(split_address(address)[0])
        found.add_done_callback(partial(self._resolved, address))

    def _resolved(self, address: str, found: "Future[str]") -> None:
        with self._lock:
            waiting = self._lookups.pop(address, [])
        for call, send in waiting:
            try:
                self._send(address, call, send, found.result())
            except KVFerryError as failed:
                self._ended.append((call, failed))
        self._complete()

    def _told(self, address: str, news: News) -> None:
        self._listener(address, news)

    def _receive(self, connection: Connection) -> None:
        with connection.lock:
            self._ended.extend(connection.receive())

    def _complete(self) -> bool:
        """Completes futures without holding a lock, because callbacks may make new requests."""
        completed = False
        while True:
            try:
                call, outcome = self._ended.popleft()
            except IndexError:
                return completed
            call.end(outcome)
            completed = True

    # ---- the thread ---------------------------------------------------------------------------

    def _turn(self) -> float | None:
        """Gives up overdue calls when it is time to do so."""
        now = self._clock()
        if now >= self._wakes_at:
            # Reset before the check: a thread whose call the check misses sees this and wakes us.
            self._wakes_at = math.inf
            self._wake_at(self._expire(now))
        return None if self._wakes_at == math.inf else self._wakes_at - now

    def _wake_at(self, when: float) -> None:
        self._wakes_at = min(self._wakes_at, when)

    def _expire(self, now: float) -> float:
        """Gives up overdue calls; returns the clock reading of the next check."""
        next_look = math.inf
        with self._lock:
            connections = tuple(self._connections.values())
        for connection in connections:
            with connection.lock:
                self._ended.extend(connection.expire(now))
                next_look = min(next_look, connection.next_look)
        next_look = min(next_look, self._expire_lookups(now))
        self._complete()
        return next_look

    def _expire_lookups(self, now: float) -> float:
        next_look = math.inf
        with self._lock:
            for address, waiting in self._lookups.items():
                lost = PeerLostError(
                    f"{address}: cannot resolve {split_address(address)[0]!r} within "
                    f"request_timeout_s ({self._options.request_timeout_s} s)"
                )
                while waiting and waiting[0][0].deadline <= now:
                    self._ended.append((waiting.pop(0)[0], lost))
                if waiting:
                    next_look = min(next_look, waiting[0][0].deadline)
        return next_look

    def _watch(self, connection: Connection) -> None:
        answers, monitor = connection.link.descriptors
        self._mailbox.watch(answers, partial(self._on_answers, connection))
        self._mailbox.watch(monitor, partial(self._on_monitor, connection))

    def _on_answers(self, connection: Connection) -> None:
        self._receive(connection)
        self._complete()

    def _on_monitor(self, connection: Connection) -> None:
        with connection.lock:
            is_lost = not connection.is_closed and connection.is_lost
        if is_lost:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection.is_closed:  # its descriptors may belong to another connection by now
            return
        for descriptor in connection.link.descriptors:
            self._mailbox.unwatch(descriptor)
        with self._lock:
            if self._connections.get(connection.address) is connection:
                del self._connections[connection.address]
            self._broken.discard(connection)
        with self._busy_lock:
            self._busy.pop(connection, None)
        with connection.lock:
            self._ended.extend(connection.end())
        self._complete()


def asking_client(name: str, timeout_s: float, curve: CurveKeys | None = None) -> ControlClient:
    """A client for a process that is no engine and only asks engines.

    Args:
        name: engine id and incarnation in the messages of the client.
        timeout_s: seconds to wait for each answer.
        curve: CURVE keys, if the channels use them.
    """
    options = ControlOptions(request_timeout_s=timeout_s, curve=curve)
    return ControlClient(engine_id=name, incarnation=name, options=options)


def fetch_status(
    host: str, port: int, timeout_s: float = 5.0, curve: CurveKeys | None = None
) -> StatusReport:
    """Asks the engine whose control channel listens on ``host:port`` for its status; blocks.

    Args:
        host: name or address.
        port: TCP port.
        timeout_s: seconds to wait for the answer.
        curve: CURVE keys, if the channel uses them.

    Raises:
        PeerLostError: no server answers, or the keys do not fit.
        ProtocolError: the server does not speak this protocol.
    """
    with asking_client("status", timeout_s, curve) as client:
        return client.status(join_address(host, port)).result()


def fetch_descriptions(
    addresses: Sequence[str], timeout_s: float = 5.0, curve: CurveKeys | None = None
) -> list[DescriptionReply | KVFerryError]:
    """Asks several engines at once to describe themselves; blocks.

    Args:
        addresses: ``host:port`` of each engine's control channel.
        timeout_s: seconds to wait for the answers.
        curve: CURVE keys, if the channels use them.

    Returns:
        For each address, the answer or the error: ``PeerLostError`` (no server answers, or the keys
        do not fit), ``ProtocolError`` (the server does not speak this protocol) or
        ``NotReadyError``.
    """
    found: list[DescriptionReply | KVFerryError] = []
    with asking_client("check", timeout_s, curve) as client:
        for future in [client.describe(address) for address in addresses]:
            try:
                found.append(future.result())
            except KVFerryError as error:
                found.append(error)
    return found


def _sender(engine_id: str, incarnation: str, source_incarnation: str) -> dict[str, str]:
    """The names of sender and receiver, for every message to a source; proofs use this order."""
    return {
        "engine_id": engine_id,
        "incarnation": incarnation,
        "source_incarnation": source_incarnation,
    }


def _proofs(action: str, leases: Mapping[str, bytes], *said: object) -> dict[str, bytes]:
    """The proof for each lease of one message."""
    return {lease_id: prove(secret, action, lease_id, *said) for lease_id, secret in leases.items()}
