"""The answering end of the control channel: the answers, and the socket on which requests arrive.

:class:`ControlService` decides on answers and knows no sockets. It turns the bytes of any request
into the bytes of a reply and never raises. :class:`ControlServer` has one thread and one ROUTER
socket, on which all requests arrive. This thread answers every request itself, so that no request
waits for a second thread.
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

from kvferry import __version__
from kvferry.control import messages
from kvferry.control.asks import AskTable
from kvferry.control.give_backs import GiveBacks
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
    TakeBack,
    ToSource,
    TraceReply,
    TraceRequest,
    TransferStatus,
)
from kvferry.control.options import ControlOptions, CurveKeys, configure
from kvferry.control.peers import PeerRecord, PeerTable
from kvferry.control.proofs import LeaseKey, veil
from kvferry.control.tickets import Ticket, TransferId, sign
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
"""Returns the number of requests that it knows, and the traces of a request id (at most
``MAX_TRACES``)."""

_BURST = 64  # messages that the thread answers between two checks whether to stop
LOOK_S = 1.0
"""Largest number of seconds between two checks which leases have expired."""
_NOTHING = messages.encode(Renewed(id=0, states={}))
"""A :class:`Renewed` that answers no request. Clients drop this message; sending it shows whether a
connection still takes messages."""


class _ErrorLog:
    """The last errors with their times, and the number of errors of each kind. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._events: deque[ErrorEvent] = deque(maxlen=limit)
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, message: str) -> None:
        """Counts an error of a kind and keeps the message."""
        with self._lock:
            self._counts[f"errors.{kind}"] += 1
            # Peers choose parts of a message; a long message must not fill the memory.
            self._events.append(ErrorEvent(time=time.time(), message=message[:2000]))

    def events(self) -> tuple[ErrorEvent, ...]:
        """The kept errors, oldest first."""
        with self._lock:
            return tuple(self._events)

    def counts(self) -> dict[str, int]:
        """Number of errors since the start, by ``errors.<kind>``."""
        with self._lock:
            return dict(self._counts)


class ControlService:
    """Answers every request to one engine. One thread calls :meth:`handle`; any thread may call the
    other methods.
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
        incarnation: the present incarnation of this engine.
        role: the ``kv_role`` of this engine, for ``kvferry status``.
        leases: the leases on this engine's blocks.
        options: timeouts, limits, keys.
        key: the key of the cluster, which signs tickets and transfers.
        clock: monotonic clock, in seconds; measures the silence of peers.
        """
        options = options or ControlOptions()
        self.engine_id = engine_id
        self.incarnation = incarnation
        """The present incarnation of this engine; messages for any other are refused."""
        self.role = role
        self.leases = leases
        self.peers = PeerTable(
            max_peers=options.max_peers, silence_s=options.lease_duration_s, clock=clock
        )
        """Engines whose handshake with this engine succeeded."""
        self.asks = AskTable(key, clock)
        """Transfers for which targets have asked."""
        self.give_backs = GiveBacks(leases)
        """Words with which a router gives loans back."""
        self._cluster_key = key
        self._key = LeaseKey()
        self._description: EngineDescription | None = None  # while the engine is starting
        self._list_transfers: TransferLister = tuple
        self._find_traces: TraceFinder = lambda _: (0, ())
        self._count_open: Callable[[], int | None] = lambda: None
        self._clock = clock
        self._started = clock()
        self._errors = _ErrorLog(options.remembered_errors)
        self._counts: Counter[str] = Counter()

    def set_description(self, description: EngineDescription) -> None:
        """Sets the description with which handshakes are answered from now on.

        Raises:
            ValueError: the description is of another engine or incarnation.
            ProtocolError: the description is inconsistent.
        """
        ours = (self.engine_id, self.incarnation)
        if (description.engine_id, description.incarnation) != ours:
            raise ValueError(
                f"description: is of {description.engine_id!r} ({description.incarnation}), this "
                f"is {self.engine_id!r} ({self.incarnation})"
            )
        validate(description)
        self._description = description

    def begin_anew(self, incarnation: str) -> None:
        """Makes this engine another incarnation, with which nobody has shaken hands. Until the next
        :meth:`set_description`, the engine is starting.
        """
        self._description = None
        self.incarnation = incarnation
        self.peers.forget_all()

    def set_transfers(self, lister: TransferLister) -> None:
        """Sets ``lister``, which lists the loads under way for each status request.

        ``lister`` runs on the thread that answers requests and must not block. An exception of
        ``lister`` is recorded and has no other effect.
        """
        self._list_transfers = lister

    def set_traces(self, finder: TraceFinder) -> None:
        """Sets ``finder``, which finds the traces of a request for each trace request.

        ``finder`` runs on the thread that answers requests and must not block.
        """
        self._find_traces = finder

    def set_open(self, counter: Callable[[], int]) -> None:
        """Sets ``counter``, which counts the open requests for each status request.

        ``counter`` runs on the thread that answers requests and must not block.
        """
        self._count_open = counter

    def secret(self, lease_id: str) -> bytes:
        """The secret in the ticket of a lease; an engine that knows it may speak of the lease."""
        return self._key.secret(lease_id)

    def written(self, lease_id: str, rank: int, num_tokens: int) -> None:
        """See :meth:`LeaseTable.written`; also tells the holder of the lease."""
        self._tell(self.leases.written(lease_id, rank, num_tokens))

    def revoke(self, lease_ids: Iterable[str]) -> None:
        """See :meth:`LeaseTable.revoke`; also tells the former holders of the leases."""
        self._tell(self.leases.revoke(lease_ids))

    def news(self, target: Target, lease_id: str) -> bytes:
        """The unasked message to a target about a lease that the target holds or has lost."""
        # This order matters: a lease that ends between the two calls is not reported as whole.
        written = self.leases.readable([lease_id])
        is_held = self.leases.is_held(target, lease_id)
        states = {lease_id: LeaseAnswer.HELD if is_held else LeaseAnswer.REVOKED}
        renewed = Renewed(id=0, states=states, written=written, **self._written_with([lease_id]))
        return messages.encode(renewed)

    def _written_with(self, lease_ids: list[str]) -> dict[str, Any]:
        """Fields of a :class:`Renewed` with what the source wrote beside the numbers of tokens."""
        return {"tables": self.leases.tables(lease_ids), "notes": self.leases.notes(lease_ids)}

    def _tell(self, holders: Iterable[tuple[Target, str]]) -> None:
        """Sends :meth:`news`; if a message is lost, the answer to the next renewal has the news."""

    def expect(self, transfer: TransferId) -> None:
        """See :meth:`AskTable.expect`."""
        for _ in self.asks.expect(transfer):
            self._note_ask(transfer.transfer_id)

    def is_asked(self, transfer: TransferId) -> bool:
        """See :meth:`AskTable.is_asked`."""
        return self.asks.is_asked(transfer.transfer_id)

    def lend(self, transfer: TransferId, ticket: Ticket) -> None:
        """Gives the ticket of a granted lease to the targets that asked for its transfer."""
        veiled = veil(ticket.secret, transfer.secret, ticket.lease_id)
        text = sign(replace(ticket, secret=veiled), self._cluster_key)
        self._tell_askers(*self.asks.lend(transfer.transfer_id, text))

    def recall(self, transfer: TransferId) -> None:
        """See :meth:`AskTable.recall`; must be called before the lease is revoked."""
        self.asks.recall(transfer.transfer_id)

    def deny(self, transfer: TransferId, reason: str) -> None:
        """Refuses a transfer, now and later, and tells the waiting targets the reason."""
        self._tell_askers(*self.asks.deny(transfer.transfer_id, reason))

    def _tell_askers(self, connections: Iterable[bytes], news: Asked) -> None:
        """Sends news to the asking targets; if lost, the answer to the next ask has the news."""

    def note_error(self, kind: str, message: str) -> None:
        """Adds an error to the counters and to the last errors in the status."""
        self._errors.note(kind, message)

    def handle(self, payload: bytes, connection: bytes = b"") -> bytes:
        """The reply to a request. Every payload gets a reply; no exception escapes.

        ``connection`` is the socket's name for the connection on which the request arrived.
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
        except Exception as error:  # a bug of ours must not end the thread that serves all peers
            self.note_error("internal", f"{type(request).__name__}: {error!r}")
            reply = ErrorReply(id=request.id, name="ProtocolError", message=f"bug: {error!r}")
        return messages.encode(reply)

    def status(self) -> messages.StatusReport:
        """The content of ``kvferry status``. Thread-safe."""
        leases = {f"leases.{key}": value for key, value in self.leases.counters().items()}
        return messages.StatusReport(
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
            release=__version__,
            serving_engine=self._description.serving_engine if self._description else "",
            open_requests=self._count_open(),
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
            case TakeBack():
                is_known = self.give_backs.take_back(request.word)
                return Released(id=request.id, is_known=is_known)
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
        # After the leases were taken: from now on the source tells the holder of every written
        # token.
        written = self.leases.readable(held)
        for lease_id in held:
            # A lease without a number of tokens is whole, unless it ended after it was taken.
            is_taken = states[lease_id] is LeaseAnswer.HELD and lease_id not in written
            if is_taken and not self.leases.is_held(target, lease_id):
                states[lease_id] = LeaseAnswer.REVOKED
        return Renewed(id=request.id, states=states, written=written, **self._written_with(held))

    def _answer_ask(self, request: Ask, connection: bytes) -> Asked:
        peer = self._target(request)
        answer = self.asks.ask(request, connection)
        if answer is None:
            self._note_ask(request.transfer_id)
            return Asked(
                id=request.id,
                transfer_id=request.transfer_id,
                state=AskState.NEVER,
                reason="the ask does not prove that the router sent it; compare cluster_key_file",
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

    def _target(self, request: ToSource) -> PeerRecord:
        """The sender of the request.

        Raises:
            HandshakeNeededError: the request is for an earlier incarnation of this engine, or the
                peer has another incarnation than in its last handshake.
        """
        if request.source_incarnation != self.incarnation:
            raise HandshakeNeededError(
                f"source_incarnation: engine {self.engine_id!r} now runs as {self.incarnation}, "
                f"the message is for {request.source_incarnation}, whose leases are gone; "
                "handshake again"
            )
        return self.peers.current(request.engine_id, request.incarnation)

    def _proven(self, request: Renew | Release) -> list[str]:
        """The leases for which the request has a valid proof.

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
        self, peer: PeerRecord, proof: bytes, action: str, lease_id: str, *said: object
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
            # Ranks do not shake hands. If either side was restarted, the answer is final: data that
            # was read across a restart does not count.
            return (FinishAnswer.REVOKED,) * len(request.items)
        for item in request.items:  # check all items before any item is applied
            check_rank(request.engine_id, item.rank, peer.world_size)
        return tuple(self._finish_one(peer, item) for item in request.items)

    def _finish_one(self, peer: PeerRecord, item: Finish) -> FinishAnswer:
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
        """Whether the connection of a target is alive, as far as this engine knows."""
        return True

    def _refusal(self, request_id: int, error: KVFerryError) -> ErrorReply:
        if not isinstance(error, NotReadyError):  # a request that comes too early is no error
            self.note_error(type(error).__name__, str(error))
        return ErrorReply(id=request_id, name=type(error).__name__, message=str(error))

    def _transfers(self) -> tuple[TransferStatus, ...]:
        try:
            return tuple(self._list_transfers())
        except Exception as error:  # code of the connector; the status is shown without it
            self.note_error("status", f"transfers cannot be listed: {error!r}")
            return ()


class ControlServer(ControlService, Closing):
    """Listens on a socket, and answers handshakes, renewals, finishes, releases and status
    requests.

    The server answers as soon as it exists; handshakes get ``NotReadyError`` until
    :meth:`set_description` is called. Any thread may call any method except :meth:`handle`, which
    only the server's own thread calls.
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
            incarnation: the present incarnation of this engine.
            role: the ``kv_role`` of this engine, for ``kvferry status``.
            leases: the leases on this engine's blocks.
            host: address of this machine, or ``*`` for all addresses.
            port: TCP port; 0 takes a free port, see :attr:`port`.
            options: timeouts, limits, keys.
            key: the key of the cluster, which signs tickets and transfers.
            clock: monotonic clock, in seconds; measures the silence of peers.

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
            """TCP port of the server."""
        except BaseException:
            self._let_go()
            raise
        self._mailbox = Mailbox("control", self._look_at_leases, poller=zmq.Poller(), clock=clock)
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
        """Ends the leases whose time is over. Returns the seconds until the next check. Runs on the
        server's thread.
        """
        self.leases.expire(awake_s=self._mailbox.awake_s, lives=self._lives)
        self.asks.expire()
        self.peers.expire(self._lives)
        return min(LOOK_S, self.leases.duration_s / 12)

    def _lives(self, target: Target) -> bool:
        """Whether the connection on which a target last renewed a lease is alive.

        ZeroMQ's own thread answers heartbeats. Therefore a process counts as alive even if its
        Python code does not run. The connection of a process that was killed, stopped or cut off
        breaks.
        """
        connection = self.peers.connection(*target)
        try:
            if connection:
                self._router.send_multipart((connection, _NOTHING), zmq.NOBLOCK)
        except zmq.Again:
            return True  # the connection takes no message just now
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
        with contextlib.suppress(zmq.ZMQError):  # gone, or it takes no message just now
            self._router.send_multipart((connection, news), zmq.NOBLOCK)

    def _serve(self) -> None:
        """Answers all received messages; runs on the server's thread."""
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
                if error.errno != zmq.EHOSTUNREACH:  # a client that is gone needs no answer
                    self.note_error("zmq", f"replying: {error}")

    def _reply(self, frames: list[bytes], connection: bytes) -> bytes:
        """The answer to the frames of one message."""
        if len(frames) == 1:
            return self.handle(frames[0], connection)
        message = f"a message has one frame, this one has {len(frames)}"
        self.note_error("ProtocolError", message)
        return messages.encode(ErrorReply(id=0, name="ProtocolError", message=message))
