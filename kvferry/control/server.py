"""The answering end of the control channel: what is answered, and the socket it comes in at.

:class:`ControlService` decides and knows no sockets: it turns the bytes of any request into the
bytes of a reply and never raises, whatever they are. :class:`ControlServer` has the one thread and
the one ROUTER socket that requests arrive at; that thread answers each by itself, so that nothing
is handed on between the arrival of a request and its reply.
"""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import zmq
from msgspec.structs import replace
from zmq.auth.thread import ThreadAuthenticator

from kvferry.control import messages
from kvferry.control.asks import AskTable
from kvferry.control.handshake import compare, validate
from kvferry.control.leases import LeaseTable, Target, check_rank
from kvferry.control.messages import (
    Ask,
    Asked,
    AskState,
    DescriptionReply,
    DescriptionRequest,
    ErrorEvent,
    ErrorReply,
    Finish,
    FinishAnswer,
    Finishes,
    FinishReply,
    Handshake,
    HandshakeReply,
    LeaseAnswer,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    RequestTrace,
    StatusReply,
    StatusReport,
    TraceReply,
    TraceRequest,
    TransferStatus,
)
from kvferry.control.options import ControlOptions, CurveKeys, configure
from kvferry.control.peers import Peer, PeerTable
from kvferry.control.proofs import LeaseKey, veil
from kvferry.control.tickets import Ticket, Transfer, sign
from kvferry.errors import (
    DecodeError,
    HandshakeNeededError,
    IncompatibleError,
    KVFerryError,
    NotReadyError,
)
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox
from kvferry.topology.description import EngineDescription, without_endpoints
from kvferry.zeromq import Context, listen

TransferLister = Callable[[], Iterable[TransferStatus]]
TraceFinder = Callable[[str], tuple[int, tuple[RequestTrace, ...]]]
"""Says how many requests it knows, and tells of those of an id, ``MAX_TRACES`` at most."""

_BURST = 64  # messages answered between two looks at whether to stop
LOOK_S = 1.0
"""Seconds between two looks at which leases have expired, at most."""
_NOTHING = messages.encode(Renewed(id=0, states={}))
"""The answer to no request, which clients drop: tells whether a connection still takes messages."""


class _ErrorLog:
    """The last errors with their times, and how many there were of each kind. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._events: deque[ErrorEvent] = deque(maxlen=limit)
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, message: str) -> None:
        """Counts an error of a kind and keeps its message."""
        with self._lock:
            self._counts[f"errors.{kind}"] += 1
            # Peers choose parts of a message; a long one must not fill the memory.
            self._events.append(ErrorEvent(time=time.time(), message=message[:2000]))

    def events(self) -> tuple[ErrorEvent, ...]:
        """The kept errors, oldest first."""
        with self._lock:
            return tuple(self._events)

    def counts(self) -> dict[str, int]:
        """Errors since the start, by ``errors.<kind>``."""
        with self._lock:
            return dict(self._counts)


class ControlService:
    """Answers every request to one engine. :meth:`handle` is called from one thread, the other
    methods from any.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        incarnation: str,
        role: str,
        leases: LeaseTable,
        options: ControlOptions | None = None,
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        engine_id: this engine.
        incarnation: this start of it.
        role: its ``kv_role``, to be shown by ``kvferry status``.
        leases: the leases on this engine's blocks.
        options: timeouts, limits, keys.
        key: the cluster's, which signs tickets and transfers.
        clock: seconds that never run backwards; tells how long peers have been silent.
        """
        options = options or ControlOptions()
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.role = role
        self.leases = leases
        self.peers = PeerTable(
            max_peers=options.max_peers, silence_s=options.lease_duration_s, clock=clock
        )
        """The engines that have shaken hands with this one."""
        self.asks = AskTable(key, clock)
        """Who wants which transfer."""
        self._cluster_key = key
        self._key = LeaseKey()
        self._description: EngineDescription | None = None  # while the engine is starting
        self._list_transfers: TransferLister = tuple
        self._find_traces: TraceFinder = lambda _: (0, ())
        self._clock = clock
        self._started = clock()
        self._errors = _ErrorLog(options.remembered_errors)
        self._counts: Counter[str] = Counter()

    def set_description(self, description: EngineDescription) -> None:
        """From now on handshakes are answered with this.

        Raises:
            ValueError: it describes another engine or start.
            ProtocolError: it is inconsistent.
        """
        ours = (self.engine_id, self.incarnation)
        if (description.engine_id, description.incarnation) != ours:
            raise ValueError(
                f"description: is of {description.engine_id!r} ({description.incarnation}), this "
                f"is {self.engine_id!r} ({self.incarnation})"
            )
        validate(description)
        self._description = description

    def set_transfers(self, lister: TransferLister) -> None:
        """``lister`` lists the loads under way whenever somebody asks for the status.

        It runs on the thread that answers and must not block; what it raises is noted and harms
        nothing.
        """
        self._list_transfers = lister

    def set_traces(self, finder: TraceFinder) -> None:
        """``finder`` tells what was done for a request whenever somebody asks for it.

        It runs on the thread that answers and must not block.
        """
        self._find_traces = finder

    def secret(self, lease_id: str) -> bytes:
        """What the ticket of a lease carries, so that its bearer may speak of the lease."""
        return self._key.secret(lease_id)

    def written(self, lease_id: str, rank: int, num_tokens: int) -> None:
        """See :meth:`LeaseTable.written`; who holds the lease is told."""
        self._tell(self.leases.written(lease_id, rank, num_tokens))

    def revoke(self, lease_ids: Iterable[str]) -> None:
        """See :meth:`LeaseTable.revoke`; who held the leases is told."""
        self._tell(self.leases.revoke(lease_ids))

    def news(self, target: Target, lease_id: str) -> bytes:
        """What a target is told, without having asked, of a lease that it holds or has lost."""
        # In this order: of one that ends in between it is not said that it is whole.
        written = self.leases.readable([lease_id])
        is_held = self.leases.is_held(target, lease_id)
        states = {lease_id: LeaseAnswer.HELD if is_held else LeaseAnswer.REVOKED}
        tables = self.leases.tables([lease_id])
        return messages.encode(Renewed(id=0, states=states, written=written, tables=tables))

    def _tell(self, holders: Iterable[tuple[Target, str]]) -> None:
        """Sends :meth:`news`; what is lost comes with the answer to the next renewal."""

    def expect(self, transfer: Transfer) -> None:
        """See :meth:`AskTable.expect`."""
        for _ in self.asks.expect(transfer):
            self._note_ask(transfer.transfer_id)

    def lend(self, transfer: Transfer, ticket: Ticket) -> None:
        """The lease of a transfer was granted; who asked for it is given the ticket."""
        veiled = veil(ticket.secret, transfer.secret, ticket.lease_id)
        text = sign(replace(ticket, secret=veiled), self._cluster_key)
        self._tell_askers(*self.asks.lend(transfer.transfer_id, text))

    def recall(self, transfer: Transfer) -> None:
        """See :meth:`AskTable.recall`; to be called before the lease is revoked."""
        self.asks.recall(transfer.transfer_id)

    def deny(self, transfer: Transfer, reason: str) -> None:
        """Nothing will be lent for a transfer, or is any more; who waits for it is told why."""
        self._tell_askers(*self.asks.deny(transfer.transfer_id, reason))

    def _tell_askers(self, connections: Iterable[bytes], news: Asked) -> None:
        """Sends news to who has asked; what is lost comes with the answer to the next ask."""

    def note_error(self, kind: str, message: str) -> None:
        """Adds an error to the counters and to the last errors of the status."""
        self._errors.note(kind, message)

    def handle(self, payload: bytes, connection: bytes = b"") -> bytes:
        """The reply to a request; whatever the request is, there is a reply and no exception.

        ``connection`` is how the socket names the one that the request came on.
        """
        try:
            request = messages.decode_request(payload)
        except DecodeError as error:
            return messages.encode(self._refusal(0, error))
        self._counts[f"requests.{type(request).__name__}"] += 1
        reply: Reply
        try:
            reply = self._answer(request, connection)
        except KVFerryError as error:
            reply = self._refusal(request.id, error)
        except Exception as error:  # a bug of ours must not end the listener for all peers
            self.note_error("internal", f"{type(request).__name__}: {error!r}")
            reply = ErrorReply(id=request.id, name="ProtocolError", message=f"bug: {error!r}")
        return messages.encode(reply)

    def status(self) -> StatusReport:
        """What ``kvferry status`` shows. Thread-safe."""
        leases = {f"leases.{key}": value for key, value in self.leases.counters().items()}
        return StatusReport(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            role=self.role,
            ready=self._description is not None,
            uptime_s=self._clock() - self._started,
            peers=self.peers.snapshot(),
            leases=self.leases.snapshot(),
            transfers=self._transfers(),
            counters=dict(self._counts) | leases | self._errors.counts(),
            errors=self._errors.events(),
        )

    def _answer(self, request: Request, connection: bytes) -> Reply:
        match request:
            case Handshake():
                return self._shake_hands(request)
            case Renew():
                return self._renew(request, connection)
            case Finishes():
                return FinishReply(id=request.id, answers=self._finish(request))
            case Release():
                self.leases.release(
                    request.engine_id,
                    request.incarnation,
                    self._proven(request),
                    keep=request.keep,
                )
                return Released(id=request.id)
            case Ask():
                return self._answer_ask(request, connection)
            case DescriptionRequest():
                return DescriptionReply(
                    id=request.id, role=self.role, description=without_endpoints(self._described())
                )
            case TraceRequest():
                return self._trace(request)
            case _:
                return StatusReply(id=request.id, report=self.status())

    def _renew(self, request: Renew, connection: bytes) -> Renewed:
        held = self._proven(request)
        target = request.engine_id, request.incarnation
        if held:
            self.peers.current(*target).connection = connection
        states = dict.fromkeys(request.leases, LeaseAnswer.REVOKED)
        states |= self.leases.renew(*target, held, grows=request.grows, lives=self._lives)
        # After the leases were taken: who took one is told of what is written from now on.
        written = self.leases.readable(held)
        for lease_id in held:
            # What has no number of tokens is whole, unless it has ended since it was taken.
            is_taken = states[lease_id] is LeaseAnswer.HELD and lease_id not in written
            if is_taken and not self.leases.is_held(target, lease_id):
                states[lease_id] = LeaseAnswer.REVOKED
        tables = self.leases.tables(held)
        return Renewed(id=request.id, states=states, written=written, tables=tables)

    def _answer_ask(self, request: Ask, connection: bytes) -> Asked:
        peer = self._target(request)
        answer = self.asks.ask(request, connection)
        if answer is None:
            self._note_ask(request.transfer_id)
            reason = "the ask does not prove that the router sent it"
            return Asked(
                id=request.id,
                transfer_id=request.transfer_id,
                state=AskState.NEVER,
                reason=reason,
            )
        peer.is_trusted |= answer.state is not AskState.UNKNOWN
        return answer

    def _note_ask(self, transfer_id: str) -> None:
        self.note_error(
            "authority",
            f"ask for transfer {transfer_id}: it does not prove that the router sent it",
        )

    def _trace(self, request: TraceRequest) -> TraceReply:
        remembered, found = self._find_traces(request.request_id)
        return TraceReply(
            id=request.id,
            engine_id=self.engine_id,
            now=time.time(),
            remembered=remembered,
            requests=found,
        )

    def _shake_hands(self, request: Handshake) -> HandshakeReply | Refused:
        ours, theirs = self._described(), request.description
        validate(theirs)
        mismatches = compare(ours, theirs)
        if not mismatches:
            try:
                self.peers.admit(theirs)
            except IncompatibleError as error:
                mismatches = list(error.mismatches)
            else:
                return HandshakeReply(id=request.id, description=ours)
        reason = str(IncompatibleError(theirs.engine_id, mismatches))
        self.peers.refuse(theirs, reason)
        self.note_error("IncompatibleError", reason)
        return Refused(id=request.id, engine_id=self.engine_id, mismatches=tuple(mismatches))

    def _described(self) -> EngineDescription:
        if self._description is None:
            raise NotReadyError(
                f"engine {self.engine_id!r} is still starting; ask again in a moment"
            )
        return self._description

    def _target(self, request: Renew | Finishes | Release | Ask) -> Peer:
        """The peer that speaks.

        Raises:
            HandshakeNeededError: it speaks to an earlier start of ours, or we know another of its.
        """
        if request.source_incarnation != self.incarnation:
            raise HandshakeNeededError(
                f"source_incarnation: engine {self.engine_id!r} now runs as {self.incarnation}, "
                f"the message is for {request.source_incarnation}, whose leases are gone; "
                "handshake again"
            )
        return self.peers.current(request.engine_id, request.incarnation)

    def _proven(self, request: Renew | Release) -> list[str]:
        """The leases of which the sender may speak.

        Raises:
            HandshakeNeededError: see :meth:`_target`.
        """
        peer, action = self._target(request), type(request).__name__
        said: tuple[object, ...] = (peer.engine_id, peer.incarnation, self.incarnation)
        if isinstance(request, Release):
            said += (request.keep,)
        return [
            lease_id
            for lease_id, proof in request.leases.items()
            if self._is_proven(peer, proof, action, lease_id, *said)
        ]

    def _is_proven(
        self, peer: Peer, proof: bytes, action: str, lease_id: str, *said: object
    ) -> bool:
        if self._key.accepts(proof, action, lease_id, *said):
            peer.is_trusted = True
            return True
        self.note_error(
            "authority",
            f"{action} of engine {peer.engine_id!r} for lease {lease_id}: it does not prove that "
            "the engine was given the lease's ticket",
        )
        return False

    def _finish(self, request: Finishes) -> tuple[FinishAnswer, ...]:
        try:
            peer = self._target(request)
        except HandshakeNeededError:
            # Ranks do not shake hands. Whichever side was restarted, the answer is final:
            # nothing read across a restart counts.
            return (FinishAnswer.REVOKED,) * len(request.items)
        for item in request.items:  # all of them before any is applied
            check_rank(request.engine_id, item.rank, peer.world_size)
        return tuple(self._finish_one(peer, item) for item in request.items)

    def _finish_one(self, peer: Peer, item: Finish) -> FinishAnswer:
        said = (peer.engine_id, peer.incarnation, self.incarnation, item.rank, item.ok, item.nonce)
        if not self._is_proven(peer, item.proof, "Finish", item.lease_id, *said):
            return FinishAnswer.REVOKED
        return self.leases.finish(
            item.lease_id,
            peer.engine_id,
            peer.incarnation,
            rank=item.rank,
            ok=item.ok,
            nonce=item.nonce,
            world_size=peer.world_size,
        )

    def _lives(self, target: Target) -> bool:
        """Whether the connection of a target lives, as far as is known."""
        return True

    def _refusal(self, request_id: int, error: KVFerryError) -> ErrorReply:
        if not isinstance(error, NotReadyError):  # asking too early is no error
            self.note_error(type(error).__name__, str(error))
        return ErrorReply(id=request_id, name=type(error).__name__, message=str(error))

    def _transfers(self) -> tuple[TransferStatus, ...]:
        try:
            return tuple(self._list_transfers())
        except Exception as error:  # the connector's code; the status is shown without it
            self.note_error("status", f"transfers cannot be listed: {error!r}")
            return ()


class ControlServer(ControlService, Closing):
    """Listens, and answers handshakes, renewals, finishes, releases, and who asks how it is.

    It answers as soon as it is made; handshakes are put off until :meth:`set_description`. All
    methods but :meth:`handle`, which its own thread calls, may be called from any thread.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        incarnation: str,
        role: str,
        leases: LeaseTable,
        host: str = "127.0.0.1",
        port: int = 0,
        options: ControlOptions | None = None,
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens on ``host:port`` and returns.

        Args:
            engine_id: this engine.
            incarnation: this start of it.
            role: its ``kv_role``, to be shown by ``kvferry status``.
            leases: the leases on this engine's blocks.
            host: address of this machine, or ``*`` for all of them.
            port: TCP port; 0 takes a free one, see :attr:`port`.
            options: timeouts, limits, keys.
            key: the cluster's, which signs tickets and transfers.
            clock: seconds that never run backwards; tells how long peers have been silent.

        Raises:
            PortInUseError: the port is taken.
            HostError: the address is not of this machine, or the port needs privileges.
            ConfigError: a CURVE key is wrong.
        """
        options = options or ControlOptions()
        super().__init__(
            engine_id=engine_id,
            incarnation=incarnation,
            role=role,
            leases=leases,
            options=options,
            key=key,
            clock=clock,
        )
        self._context: Context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        try:
            self._router = self._context.socket(zmq.ROUTER)
            configure(self._router, options, is_server=True)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # see _lives
            if options.curve is not None:
                self._authenticate(options.curve)
            self.port = listen(self._router, host, port, "kv_port")
            """TCP port it listens on."""
        except BaseException:
            self._let_go()
            raise
        self._mailbox = Mailbox("control", self._look_at_leases, poller=zmq.Poller())
        self._mailbox.watch(self._router, self._serve)
        self._mailbox.start()

    def close(self) -> None:
        """Stops listening and frees the port. Idempotent."""
        self._mailbox.close()
        self._let_go()

    def _let_go(self) -> None:
        self._authenticator.stop()
        self._context.destroy(linger=0)

    def _authenticate(self, keys: CurveKeys) -> None:
        admitted = {keys.public_key, *keys.allowed_keys}

        def is_admitted(_domain: str, key: bytes) -> bool:  # on pyzmq's own thread
            text = key.decode("ascii", "replace")
            if text not in admitted:
                self.note_error("curve", f"a client with the unknown public key {text} was refused")
            return text in admitted

        self._authenticator.start()
        provider: Any = SimpleNamespace(callback=is_admitted)
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=provider)

    def _look_at_leases(self) -> float:
        """Ends the leases whose time is over; returns when to look again. On the thread."""
        self.leases.expire(awake_s=self._mailbox.awake_s, lives=self._lives)
        self.asks.expire()
        self.peers.expire(self._lives)
        return min(LOOK_S, self.leases.duration_s / 12)

    def _lives(self, target: Target) -> bool:
        """Whether the connection lives on which a target last renewed a lease.

        ZeroMQ's own thread answers heartbeats, so a process lives although it does not get to run
        its Python; one that was killed, stopped or cut off is disconnected.
        """
        connection = self.peers.connection(*target)
        try:
            if connection:
                self._router.send_multipart((connection, _NOTHING), zmq.NOBLOCK)
        except zmq.Again:
            return True  # it takes nothing just now
        except zmq.ZMQError:
            return False
        return bool(connection)

    def _tell(self, holders: Iterable[tuple[Target, str]]) -> None:
        for target, lease_id in holders:
            self._mailbox.post(partial(self._send_news, target, lease_id))

    def _send_news(self, target: Target, lease_id: str) -> None:
        connection = self.peers.connection(*target)
        if connection:
            self._send(connection, self.news(target, lease_id))

    def _tell_askers(self, connections: Iterable[bytes], news: Asked) -> None:
        payload = messages.encode(news)
        for connection in connections:
            self._mailbox.post(partial(self._send, connection, payload))

    def _send(self, connection: bytes, news: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # gone, or it takes nothing just now
            self._router.send_multipart((connection, news), zmq.NOBLOCK)

    def _serve(self) -> None:
        """Answers what has come; on the thread."""
        for _ in range(_BURST):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                self.note_error("zmq", f"receiving: {error}")
                return
            reply = self._reply(frames[1:], frames[0])
            try:
                self._router.send_multipart((frames[0], reply), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:  # who has gone needs no answer
                    self.note_error("zmq", f"replying: {error}")

    def _reply(self, frames: list[bytes], connection: bytes) -> bytes:
        """The answer to the frames of one message."""
        if len(frames) == 1:
            return self.handle(frames[0], connection)
        message = f"a message has one frame, this one has {len(frames)}"
        self.note_error("ProtocolError", message)
        return messages.encode(ErrorReply(id=0, name="ProtocolError", message=message))
