"""Answers the requests of the control channel; knows no sockets.

:class:`ControlDesk` is the part of a :class:`~kvferry.control.server.ControlServer` that decides.
It turns the bytes of any request into the bytes of a reply and never raises, whatever they are.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from kvferry.control import messages
from kvferry.control.handshake import compare, validate
from kvferry.control.leases import LeaseTable, check_rank
from kvferry.control.messages import (
    DescriptionReply,
    DescriptionRequest,
    ErrorEvent,
    ErrorReply,
    FinishAnswer,
    Finishes,
    FinishReply,
    Handshake,
    HandshakeReply,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    StatusReply,
    StatusReport,
    TransferStatus,
)
from kvferry.control.peers import Peer, PeerTable
from kvferry.errors import (
    DecodeError,
    HandshakeNeededError,
    IncompatibleError,
    KVFerryError,
    NotReadyError,
)
from kvferry.topology.description import EngineDescription, without_endpoints

TransferProvider = Callable[[], Iterable[TransferStatus]]


class ErrorLog:
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


class ControlDesk:
    """Decides every request to one engine. :meth:`handle` is called from one thread."""

    def __init__(
        self,
        *,
        engine_id: str,
        incarnation: str,
        role: str,
        leases: LeaseTable,
        peers: PeerTable,
        errors: ErrorLog,
    ) -> None:
        """Args:
        engine_id: this engine.
        incarnation: this start of it.
        role: its ``kv_role``, to be shown.
        leases: the leases on this engine's blocks.
        peers: the engines it has shaken hands with.
        errors: where to note what goes wrong.
        """
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.role = role
        self.leases = leases
        self.peers = peers
        self.errors = errors
        self._description: EngineDescription | None = None
        self._transfers: TransferProvider | None = None
        self._started = time.monotonic()
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

    def set_transfers(self, provider: TransferProvider) -> None:
        """``provider`` lists the loads under way whenever somebody asks for the status.

        It is called from the server's thread and must not block; what it raises is noted.
        """
        self._transfers = provider

    def handle(self, payload: bytes) -> bytes:
        """The reply to a request; whatever the request is, there is a reply and no exception."""
        try:
            request = messages.decode_request(payload)
        except DecodeError as error:
            return messages.encode(self._refusal(0, error))
        self._counts[f"requests.{type(request).__name__}"] += 1
        reply: Reply
        try:
            reply = self._answer(request)
        except KVFerryError as error:
            reply = self._refusal(request.id, error)
        except Exception as error:  # a bug of ours must not end the listener for all peers
            self.errors.note("internal", f"{type(request).__name__}: {error!r}")
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
            uptime_s=time.monotonic() - self._started,
            peers=self.peers.snapshot(),
            leases=self.leases.snapshot(),
            transfers=self._list_transfers(),
            counters=dict(self._counts) | leases | self.errors.counts(),
            errors=self.errors.events(),
        )

    def _answer(self, request: Request) -> Reply:
        match request:
            case Handshake():
                return self._shake_hands(request)
            case Renew():
                self._target(request)
                states = self.leases.renew(
                    request.engine_id, request.incarnation, request.lease_ids
                )
                return Renewed(id=request.id, states=states)
            case Finishes():
                return FinishReply(id=request.id, answers=self._finish(request))
            case Release():
                self._target(request)
                self.leases.release(
                    request.engine_id, request.incarnation, request.lease_ids, keep=request.keep
                )
                return Released(id=request.id)
            case DescriptionRequest():
                return DescriptionReply(
                    id=request.id, role=self.role, description=without_endpoints(self._described())
                )
            case _:
                return StatusReply(id=request.id, report=self.status())

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
                self.leases.drop_older(theirs.engine_id, theirs.incarnation)
                return HandshakeReply(id=request.id, description=ours)
        reason = str(IncompatibleError(theirs.engine_id, mismatches))
        self.peers.refuse(theirs, reason)
        self.errors.note("IncompatibleError", reason)
        return Refused(id=request.id, engine_id=self.engine_id, mismatches=tuple(mismatches))

    def _described(self) -> EngineDescription:
        if self._description is None:
            raise NotReadyError(
                f"engine {self.engine_id!r} is still starting; ask again in a moment"
            )
        return self._description

    def _target(self, request: Renew | Finishes | Release) -> Peer:
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

    def _finish(self, request: Finishes) -> tuple[FinishAnswer, ...]:
        try:
            peer = self._target(request)
        except HandshakeNeededError:
            # Ranks do not shake hands. Whichever side was restarted, the answer is final:
            # nothing read across a restart counts.
            return (FinishAnswer.REVOKED,) * len(request.items)
        for item in request.items:  # all of them before any is applied
            check_rank(request.engine_id, item.rank, peer.world_size)
        return tuple(
            self.leases.finish(
                item.lease_id,
                request.engine_id,
                request.incarnation,
                rank=item.rank,
                ok=item.ok,
                world_size=peer.world_size,
            )
            for item in request.items
        )

    def _refusal(self, request_id: int, error: KVFerryError) -> ErrorReply:
        if not isinstance(error, NotReadyError):  # asking too early is no error
            self.errors.note(type(error).__name__, str(error))
        return ErrorReply(id=request_id, name=type(error).__name__, message=str(error))

    def _list_transfers(self) -> tuple[TransferStatus, ...]:
        if self._transfers is None:
            return ()
        try:
            return tuple(self._transfers())
        except Exception as error:  # the connector's code; the status is shown without it
            self.errors.note("status", f"transfers cannot be listed: {error!r}")
            return ()
