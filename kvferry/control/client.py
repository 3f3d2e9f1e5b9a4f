"""The asking end of the control channel.

Every request returns a :class:`concurrent.futures.Future` at once and may be made from any thread;
it leaves on that thread::

    any thread      renew(), finish(), ... ──▶ send ─────────────────────────▶ server
    any thread      pump() ──▶ takes the answers that have come ──▶ futures ◀── server
    client thread   sleeps until an answer comes, a connection breaks or a call is overdue

Whoever takes an answer completes its future, and so runs its callbacks: keep them short.

A connection that breaks fails everything asked on it at once and is dropped with all that was
queued on it; the next request opens a new one. So a request is never delivered long after its
caller has given it up, and nothing reconnects in the background.
"""

import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import zmq

from kvferry.control.connection import Call, Connection, Ended, expect, finish_answers
from kvferry.control.handshake import compare, validate
from kvferry.control.messages import (
    DescriptionReply,
    DescriptionRequest,
    Finish,
    FinishAnswer,
    Finishes,
    Handshake,
    HandshakeReply,
    LeaseAnswer,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    StatusReply,
    StatusReport,
    StatusRequest,
)
from kvferry.control.options import ControlOptions, CurveKeys
from kvferry.control.peers import PeerTable
from kvferry.errors import CancelledError, IncompatibleError, KVFerryError, ProtocolError
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox
from kvferry.topology.description import EngineDescription
from kvferry.zeromq import Context, split_address, tcp_address

T = TypeVar("T")


class ControlClient(Closing):
    """Speaks for one process of an engine with the control servers of other engines.

    An ``address`` is ``host:port``; a :class:`ValueError` says that one is not. Any future may
    raise ``PeerLostError`` (nobody there, the connection broke, no answer in time, keys that do
    not fit), ``ProtocolError`` (what came is no answer) or ``CancelledError`` (the client was
    closed). All methods may be called from any thread.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        incarnation: str,
        options: ControlOptions | None = None,
        peers: PeerTable | None = None,
    ) -> None:
        """Args:
        engine_id: the engine that this process is part of.
        incarnation: this start of it.
        options: timeouts, limits, keys.
        peers: where to enter the engines that handshakes succeed with, ``ControlServer.peers``
            of the same engine, so that its status shows them.
        """
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._options = options or ControlOptions()
        self._peers = peers
        self._context: Context = zmq.Context()
        self._lock = threading.Lock()
        self._closing = False
        self._connections: dict[str, Connection] = {}
        """By address."""
        self._broken: set[Connection] = set()
        """Replaced by others, and not closed yet."""
        self._ended: deque[tuple[Call[Any], Reply | Exception]] = deque()
        """Calls whose futures somebody has to complete."""
        self._wakes_at = math.inf
        """``time.monotonic()`` at which the thread wakes though nothing has come."""
        self._mailbox = Mailbox("client", self._turn, poller=select.poll()).start()

    def handshake(
        self, address: str, description: EngineDescription
    ) -> "Future[EngineDescription]":
        """Describes this engine to another one.

        Returns:
            A future of the peer's description, which is valid and fits ours. It raises
            ``IncompatibleError`` with every mismatch, or ``NotReadyError`` while the peer starts.
        """

        def read(reply: Reply) -> EngineDescription:
            if isinstance(reply, Refused):
                raise IncompatibleError(reply.engine_id, reply.mismatches)
            theirs = expect(reply, HandshakeReply).description
            validate(theirs)
            mismatches = compare(theirs, description)  # we read
            if mismatches:
                raise IncompatibleError(theirs.engine_id, mismatches)
            if self._peers is not None:
                self._peers.admit(theirs)
            return theirs

        return self._ask(address, Call(Handshake(id=0, description=description), read))

    def renew(
        self, address: str, source_incarnation: str, lease_ids: Sequence[str]
    ) -> "Future[dict[str, LeaseAnswer]]":
        """Takes leases, or extends those this engine holds, all in one message.

        Returns:
            A future of the answer per lease. It raises ``HandshakeNeededError`` when either side
            was started again since the handshake.
        """
        request = Renew(
            id=0,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            source_incarnation=source_incarnation,
            lease_ids=tuple(lease_ids),
        )

        def read(reply: Reply) -> dict[str, LeaseAnswer]:
            states = expect(reply, Renewed).states
            if states.keys() != set(request.lease_ids):
                raise ProtocolError(
                    f"renewed: answers for {len(states)} leases, asked for {len(lease_ids)}"
                )
            return states

        return self._ask(address, Call(request, read))

    def finish(
        self, address: str, source_incarnation: str, lease_id: str, *, rank: int, ok: bool
    ) -> "Future[FinishAnswer]":
        """Reports that all reads of ``rank`` for a lease are terminal, and asks for the confirm.

        Where several messages with finishes are under way to a source, further ones share one. The
        same report may be repeated, for example when its answer was lost.

        Returns:
            A future of the answer. Only after ``HELD`` may the data be used; any error means the
            same as ``REVOKED``.
        """
        request = Finishes(
            id=0,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            source_incarnation=source_incarnation,
            items=(Finish(lease_id=lease_id, rank=rank, ok=ok),),
        )
        call = Call(request, lambda reply: finish_answers(reply, 1)[0])
        return self._ask(address, call, Connection.send_finish)

    def release(
        self,
        address: str,
        source_incarnation: str,
        lease_ids: Sequence[str],
        *,
        keep: bool = False,
    ) -> "Future[None]":
        """Gives leases up; with ``keep`` another target may take them, else they end.

        Returns:
            A future that ends when the source has noted it. It raises ``HandshakeNeededError``
            when either side was started again. Without an answer the leases expire by themselves.
        """
        request = Release(
            id=0,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            source_incarnation=source_incarnation,
            lease_ids=tuple(lease_ids),
            keep=keep,
        )

        def read(reply: Reply) -> None:
            expect(reply, Released)

        return self._ask(address, Call(request, read))

    def status(self, address: str) -> "Future[StatusReport]":
        """Asks an engine for its status."""
        return self._ask(
            address, Call(StatusRequest(id=0), lambda reply: expect(reply, StatusReply).report)
        )

    def describe(self, address: str) -> "Future[DescriptionReply]":
        """Asks an engine to describe itself; unlike a handshake it changes nothing there.

        Returns:
            A future of the answer, whose description is valid. It raises ``NotReadyError`` while
            the peer starts.
        """

        def read(reply: Reply) -> DescriptionReply:
            described = expect(reply, DescriptionReply)
            validate(described.description)
            return described

        return self._ask(address, Call(DescriptionRequest(id=0), read))

    def pump(self) -> bool:
        """Takes the answers that have come, and completes their futures; does not wait.

        Nobody has to call it: the client's thread takes them too, as soon as it gets to run. A
        thread that runs already need not wait for that.

        Returns:
            Whether a future was completed.
        """
        for connection in tuple(self._connections.values()):
            if connection.calls:
                self._receive(connection)
        return self._complete()

    def close(self) -> None:
        """Ends all connections; open futures raise ``CancelledError``. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._mailbox.close()
        with self._lock:  # who has just found one broken may be moving it
            connections = [*self._connections.values(), *self._broken]
        for connection in connections:
            with connection.lock:
                closed = CancelledError("the control client was closed")
                self._ended.extend(connection.end(closed))
        self._context.destroy(linger=0)
        self._complete()

    # ---- any thread ---------------------------------------------------------------------------

    def _ask(
        self,
        address: str,
        call: Call[T],
        send: Callable[[Connection, Call[T]], Ended] = Connection.send,
    ) -> "Future[T]":
        split_address(address)
        try:
            self._send(address, call, send)
        except KVFerryError as error:
            self._ended.append((call, error))
        if self._closing:
            self._complete()  # nobody else does any more
        elif self._ended:
            self._mailbox.post(self._complete)
        if call.deadline < self._wakes_at:
            self._mailbox.post(partial(self._wake_at, call.deadline))
        return call.future

    def _send(
        self, address: str, call: Call[T], send: Callable[[Connection, Call[T]], Ended]
    ) -> None:
        while True:
            connection = self._connection(address)
            with connection.lock:
                if not connection.is_lost:
                    self._ended.extend(send(connection, call))
                    self._ended.extend(connection.receive())
                    return
            # It broke, and our thread has not come to closing it yet. A new one takes its place.
            with self._lock:
                if self._connections.get(address) is connection:
                    del self._connections[address]
                    self._broken.add(connection)
            self._mailbox.post(partial(self._drop, connection))

    def _connection(self, address: str) -> Connection:
        with self._lock:
            if self._closing:
                raise CancelledError("the control client is closed")
            connection = self._connections.get(address)
            if connection is None:
                connection = Connection(self._context, address, self._options)
                self._connections[address] = connection
                self._mailbox.post(partial(self._watch, connection))
            return connection

    def _receive(self, connection: Connection) -> None:
        with connection.lock:
            self._ended.extend(connection.receive())

    def _complete(self) -> bool:
        """Completes futures, with no lock held: their callbacks may ask again."""
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
        """Gives up calls that are overdue, once it is time for that."""
        now = time.monotonic()
        if now >= self._wakes_at:
            # Before the look: who sends a call that it does not see finds this and wakes us.
            self._wakes_at = math.inf
            self._wake_at(self._expire(now))
        return None if self._wakes_at == math.inf else self._wakes_at - now

    def _wake_at(self, when: float) -> None:
        self._wakes_at = min(self._wakes_at, when)

    def _expire(self, now: float) -> float:
        """Gives up what is overdue; returns when to look again."""
        next_look = math.inf
        with self._lock:
            connections = tuple(self._connections.values())
        for connection in connections:
            with connection.lock:
                self._ended.extend(connection.expire(now))
                next_look = min(next_look, connection.next_look)
        self._complete()
        return next_look

    def _watch(self, connection: Connection) -> None:
        answers, monitor = connection.descriptors
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
        if connection.is_closed:  # its descriptors may be another one's by now
            return
        for descriptor in connection.descriptors:
            self._mailbox.unwatch(descriptor)
        with self._lock:
            if self._connections.get(connection.address) is connection:
                del self._connections[connection.address]
            self._broken.discard(connection)
        with connection.lock:
            self._ended.extend(connection.end())
        self._complete()


def fetch_status(
    host: str, port: int, timeout_s: float = 5.0, curve: CurveKeys | None = None
) -> StatusReport:
    """Asks the engine whose control channel listens on ``host:port`` for its status; blocks.

    Args:
        host: name or address.
        port: TCP port.
        timeout_s: seconds to wait for the answer.
        curve: keys, where the channel has some.

    Raises:
        PeerLostError: nobody answers, or the keys do not fit.
        ProtocolError: what answers does not speak this protocol.
    """
    options = ControlOptions(request_timeout_s=timeout_s, curve=curve)
    address = tcp_address(host, port).removeprefix("tcp://")
    with ControlClient(engine_id="status", incarnation="status", options=options) as client:
        return client.status(address).result()


def fetch_descriptions(
    addresses: Sequence[str], timeout_s: float = 5.0, curve: CurveKeys | None = None
) -> list[DescriptionReply | KVFerryError]:
    """Asks engines to describe themselves, all at once; blocks.

    Args:
        addresses: ``host:port`` of each engine's control channel.
        timeout_s: seconds to wait for the answers.
        curve: keys, where the channels have some.

    Returns:
        Per address the answer, or why there is none: ``PeerLostError`` (nobody answers, or the
        keys do not fit), ``ProtocolError`` (what answers does not speak this protocol) or
        ``NotReadyError``.
    """
    options = ControlOptions(request_timeout_s=timeout_s, curve=curve)
    found: list[DescriptionReply | KVFerryError] = []
    with ControlClient(engine_id="check", incarnation="check", options=options) as client:
        for future in [client.describe(address) for address in addresses]:
            try:
                found.append(future.result())
            except KVFerryError as error:
                found.append(error)
    return found
