"""The asking end of the control channel.

Every request returns a :class:`concurrent.futures.Future` at once and may be made from any thread.
Callbacks added to a future run on the client's thread: keep them short.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry import errors
from kvferry.control.calls import Call, CallThread
from kvferry.control.handshake import compare, validate
from kvferry.control.messages import (
    DescriptionReply,
    DescriptionRequest,
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
    StatusReply,
    StatusReport,
    StatusRequest,
)
from kvferry.control.options import ControlOptions, CurveKeys
from kvferry.control.peers import PeerTable
from kvferry.control.sockets import split_address
from kvferry.errors import CancelledError, IncompatibleError, KVFerryError, ProtocolError
from kvferry.lifetimes import Closing
from kvferry.topology.description import EngineDescription

T = TypeVar("T")

_MAX_BATCH = 1024  # finishes that share one message

#: Errors that a server may send by name: those that are built from a message alone.
_ERRORS: dict[str, type[KVFerryError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, KVFerryError)
    and not issubclass(kind, IncompatibleError)
}


@dataclass(slots=True)
class _Finishing:
    """One finish that may share a message with others for the same start of a source."""

    address: str
    source_incarnation: str
    item: Finish
    future: "Future[FinishAnswer]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()


class ControlClient(Closing):
    """Speaks for one process of an engine with the control servers of other engines.

    An ``address`` is ``host:port``; a :class:`ValueError` says that one is not. Any future may
    raise ``PeerLostError`` (nobody there, the connection broke, no answer in time, keys that do
    not fit), ``ProtocolError`` (what came is no answer) or ``CancelledError`` (the client was
    closed).
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
        self._peers = peers
        self._lock = threading.Lock()
        self._closing = False
        self._calls: deque[Call[Any]] = deque()
        self._finishes: deque[_Finishing] = deque()
        self._thread = CallThread(options or ControlOptions(), self._gather)

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
            theirs = _expect(reply, HandshakeReply).description
            validate(theirs)
            mismatches = compare(theirs, description)  # we read
            if mismatches:
                raise IncompatibleError(theirs.engine_id, mismatches)
            if self._peers is not None:
                self._peers.admit(theirs)
            return theirs

        return self._ask(address, Handshake(id=0, description=description), read)

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
            states = _expect(reply, Renewed).states
            if states.keys() != set(request.lease_ids):
                raise ProtocolError(
                    f"renewed: answers for {len(states)} leases, asked for {len(lease_ids)}"
                )
            return states

        return self._ask(address, request, read)

    def finish(
        self, address: str, source_incarnation: str, lease_id: str, *, rank: int, ok: bool
    ) -> "Future[FinishAnswer]":
        """Reports that all reads of ``rank`` for a lease are terminal, and asks for the confirm.

        Finishes that wait together for the same source share a message. The same report may be
        repeated, for example when its answer was lost.

        Returns:
            A future of the answer. Only after ``HELD`` may the data be used; any error means the
            same as ``REVOKED``.
        """
        split_address(address)
        item = Finish(lease_id=lease_id, rank=rank, ok=ok)
        finishing = _Finishing(address, source_incarnation, item)
        self._submit(self._finishes, finishing)
        return finishing.future

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
            _expect(reply, Released)

        return self._ask(address, request, read)

    def status(self, address: str) -> "Future[StatusReport]":
        """Asks an engine for its status."""
        return self._ask(
            address, StatusRequest(id=0), lambda reply: _expect(reply, StatusReply).report
        )

    def describe(self, address: str) -> "Future[DescriptionReply]":
        """Asks an engine to describe itself; unlike a handshake it changes nothing there.

        Returns:
            A future of the answer, whose description is valid. It raises ``NotReadyError`` while
            the peer starts.
        """

        def read(reply: Reply) -> DescriptionReply:
            described = _expect(reply, DescriptionReply)
            validate(described.description)
            return described

        return self._ask(address, DescriptionRequest(id=0), read)

    def close(self) -> None:
        """Ends all connections; open futures raise ``CancelledError``. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._thread.close()

    def _ask(self, address: str, request: Request, read: Callable[[Reply], T]) -> "Future[T]":
        split_address(address)
        call = Call(address, request, read)
        self._submit(self._calls, call)
        return call.future

    def _submit(self, queue: "deque[Any]", entry: "Call[Any] | _Finishing") -> None:
        with self._lock:
            if self._closing:
                entry.future.set_exception(CancelledError("the control client is closed"))
                return
            asleep = not self._calls and not self._finishes
            queue.append(entry)
        if asleep:  # else somebody has woken the thread already, and it has not looked yet
            self._thread.wake()

    def _gather(self) -> list[Call[Any]]:
        """What is to be sent now; waiting finishes are put together. Called on the thread."""
        with self._lock:
            calls, self._calls = self._calls, deque()
            finishes, self._finishes = self._finishes, deque()
        batches: dict[tuple[str, str], list[_Finishing]] = {}
        for finishing in finishes:
            key = (finishing.address, finishing.source_incarnation)
            batches.setdefault(key, []).append(finishing)
        joined = [
            self._join(batch[first : first + _MAX_BATCH])
            for batch in batches.values()
            for first in range(0, len(batch), _MAX_BATCH)
        ]
        return [*joined, *calls]

    def _join(self, batch: list[_Finishing]) -> Call[tuple[FinishAnswer, ...]]:
        """One call for finishes of the same source."""
        request = Finishes(
            id=0,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            source_incarnation=batch[0].source_incarnation,
            items=tuple(finishing.item for finishing in batch),
        )

        def read(reply: Reply) -> tuple[FinishAnswer, ...]:
            answers = _expect(reply, FinishReply).answers
            if len(answers) != len(batch):
                raise ProtocolError(f"finish: {len(answers)} answers to {len(batch)} reports")
            return answers

        def deliver(done: "Future[tuple[FinishAnswer, ...]]") -> None:
            error = done.exception()
            for index, finishing in enumerate(batch):
                if error is not None:
                    finishing.future.set_exception(error)
                else:
                    finishing.future.set_result(done.result()[index])

        call = Call(batch[0].address, request, read)
        call.future.add_done_callback(deliver)
        return call


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
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
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


def _expect(reply: Reply, kind: type[T]) -> T:
    """The reply, if it is of the kind that answers the request.

    Raises:
        KVFerryError: the error that the peer answered instead.
        ProtocolError: any other kind of reply.
    """
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, ErrorReply):
        raise _ERRORS.get(reply.name, ProtocolError)(f"the peer answers: {reply.message}")
    raise ProtocolError(f"expected {kind.__name__}, the peer answered {type(reply).__name__}")
