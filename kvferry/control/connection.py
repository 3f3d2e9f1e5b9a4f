"""A connection of a :class:`~kvferry.control.client.ControlClient`, with its open calls."""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from kvferry import errors
from kvferry.control import messages
from kvferry.control.links import ControlLink
from kvferry.control.messages import (
    Asked,
    ErrorReply,
    FinishAnswer,
    Finishes,
    FinishReply,
    Renewed,
    Reply,
    Request,
    StatusRequest,
)
from kvferry.control.options import ControlOptions
from kvferry.errors import (
    DecodeError,
    IncompatibleError,
    KVFerryError,
    PeerLostError,
    ProtocolError,
)

T = TypeVar("T")

News: TypeAlias = Renewed | Asked
"""An unasked message of a server."""

SECOND_LOOK_S = 0.25
"""Seconds between the two checks for an answer after which a call is given up."""

#: Errors that a server may send by name: the errors that are built from a message alone.
_ERRORS: dict[str, type[KVFerryError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, KVFerryError)
    and not issubclass(kind, IncompatibleError)
}


@dataclass(slots=True, eq=False)
class Call(Generic[T]):
    """A request, from the start until its future is completed."""

    request: Request
    """The request to send; its id is filled in when it is sent."""
    read: Callable[[Reply], T]
    """Turns a reply into the result of the future, or raises the error for the future."""
    future: "Future[T]" = field(default_factory=Future)
    deadline: float = 0.0
    """Clock reading after which the peer counts as hung; set when the call is sent or begins to
    wait."""

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # only this code ends the future

    def end(self, outcome: Reply | Exception) -> None:
        """Completes the future with the outcome of the call."""
        try:
            if isinstance(outcome, Exception):
                raise outcome
            result = self.read(outcome)
        except Exception as error:  # the thread must survive any answer
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


Ended: TypeAlias = list[tuple[Call[Any], Reply | Exception]]
"""Finished calls with their outcomes. The receiver of this list must call their ``end``."""


class Connection:
    """A link to a server, and the open calls on this link.

    Any thread may send and receive. The caller of every method except the constructor must hold
    :attr:`lock`, and must not wait while it holds the lock. No future is completed under the lock:
    a method returns the calls that it has ended, and the caller completes them after releasing the
    lock.

    The client's thread sleeps on the descriptors of the link. These are descriptors of ZeroMQ and
    only report *changes*: a descriptor becomes readable when ZeroMQ puts a message into a socket
    whose owner has checked (``EVENTS``) and found nothing. Any use of the socket, by any thread,
    may make the descriptor unreadable again although an answer lies in the socket. Therefore every
    thread must check the socket last of all before it releases the lock: :meth:`receive` continues
    until the socket is empty, and a thread that has sent a call also calls ``receive``. The
    client's thread may find nothing because another thread was faster, but no answer is ever
    missed.
    """

    def __init__(
        self,
        link: ControlLink,
        address: str,
        options: ControlOptions,
        clock: Callable[[], float] = time.monotonic,
        listener: Callable[[str, News], None] = lambda *_: None,
    ) -> None:
        """Args:
        link: link to the server; the connection closes it.
        address: ``host:port`` as the caller knows it.
        options: timeouts, limits, keys.
        clock: monotonic clock, in seconds.
        listener: gets the unasked messages of the server.
        """
        self.link = link
        self.address = address
        self.lock = threading.Lock()
        self.is_closed = False
        self.calls: dict[int, Call[Any]] = {}
        """Sent calls without an answer, by id. Deadlines ascend, because all timeouts are
        equal."""
        self._waiting: deque[Call[FinishAnswer]] = deque()
        """Unsent finishes, oldest first."""
        self._lost: KVFerryError | None = None
        """Reason why no message can arrive any more; ``None`` if messages may still arrive."""
        self._looked = math.inf
        """Clock reading when a call was first seen to be overdue; infinite if no call is."""
        self._options = options
        self._clock = clock
        self._listener = listener
        self._ids = itertools.count(1)

    # ---- sending ------------------------------------------------------------------------------

    def send(self, call: Call[Any]) -> Ended | None:
        """Sends a call at once, or ends it; returns ``None`` if the connection has broken."""
        if self.is_lost:
            return None
        return self._send(call) + self.receive()

    def send_finish(self, call: Call[FinishAnswer]) -> Ended | None:
        """Like :meth:`send`, but waits for the next message if another call is under way."""
        if not self.calls:
            return self.send(call)
        if self._lost is not None:
            return None
        call.deadline = self._patience_ends()
        self._waiting.append(call)
        return []

    def _send(self, call: Call[Any]) -> Ended:
        id = next(self._ids)
        try:
            payload = messages.encode(msgspec.structs.replace(call.request, id=id))
            if len(payload) > self._options.max_message_bytes:
                raise ProtocolError(
                    f"max_message_bytes: the message has {len(payload)} bytes, allowed are "
                    f"{self._options.max_message_bytes}; raise it on both sides"
                )
            self.link.send(payload)
        except (KVFerryError, ValueError, OverflowError) as error:
            # A link that has just broken takes no message, and knows the reason before.
            reason = self._lost if self.is_lost else None
            return [(call, reason or error)]
        call.deadline = self._patience_ends()
        self.calls[id] = call
        return []

    def _send_waiting(self) -> Ended:
        ended: Ended = []
        while self._waiting and not self.calls:
            # Only finishes for the same incarnation of the source; another incarnation follows only
            # after a restart.
            source = _finishes(self._waiting[0]).source_incarnation
            batch: list[Call[FinishAnswer]] = []
            while (
                self._waiting
                and len(batch) < messages.MAX_ITEMS
                and _finishes(self._waiting[0]).source_incarnation == source
            ):
                batch.append(self._waiting.popleft())
            ended += self._send(_joined(batch))
        return ended

    def _patience_ends(self) -> float:
        return self._clock() + self._options.request_timeout_s

    # ---- receiving ----------------------------------------------------------------------------

    def receive(self) -> Ended:
        """Takes all received answers, and sends the finishes that waited for them."""
        ended: Ended = []
        while not self.is_closed and (payload := self.link.receive()) is not None:
            try:
                reply = messages.decode_reply(payload)
            except DecodeError:
                continue  # the call of this answer is unknown; it will time out
            if reply.id == 0 and isinstance(reply, News):
                ended.append((self._news(reply), reply))
                continue
            call = self.calls.pop(reply.id, None)
            if call is not None:  # otherwise the answer came after the timeout
                ended.append((call, reply))
                ended += self._send_waiting()
        return ended

    def _news(self, news: News) -> Call[News]:
        """A call without a caller, for an unasked message of the server."""
        call: Call[News] = Call(StatusRequest(id=0), lambda _: news)
        call.future.add_done_callback(lambda told: self._listener(self.address, told.result()))
        return call

    @property
    def is_lost(self) -> bool:
        """Whether no message can arrive any more."""
        if self._lost is None:
            self._lost = self.link.why_lost()
        return self._lost is not None

    @property
    def next_look(self) -> float:
        """Clock reading at which to call :meth:`expire`; infinite without calls."""
        first = itertools.chain(itertools.islice(self.calls.values(), 1), self._waiting)
        deadline = min((call.deadline for call in first), default=math.inf)
        return deadline if self._looked == math.inf else self._looked + SECOND_LOOK_S

    def expire(self, now: float) -> Ended:
        """Gives up the calls whose answer came neither in time nor before a second check.

        This is for peers that hang; the link shows if a peer is gone. A process that did not run
        for a while finds its calls overdue although they are answered: the answers lie in the link,
        or ZeroMQ's own thread is about to put them there.
        """
        ended = self.receive()
        if now < self.next_look:
            return ended
        looked, self._looked = self._looked, now
        if looked == math.inf:
            return ended
        self._looked = math.inf
        overdue = [id for id, call in self.calls.items() if call.deadline <= looked]
        calls = [self.calls.pop(id) for id in overdue]
        while self._waiting and self._waiting[0].deadline <= looked:
            calls.append(self._waiting.popleft())
        patience = f"request_timeout_s ({self._options.request_timeout_s} s)"
        lost = PeerLostError(f"{self.address}: no answer within {patience}")
        ended += [(call, lost) for call in calls]
        return ended + self._send_waiting() + self.receive()

    def end(self, error: KVFerryError | None = None) -> Ended:
        """Closes the connection; open calls end with ``error``, or with the reason of the loss."""
        waiting = [*self._waiting]
        self._waiting.clear()
        ended = self.receive()  # answers that came before the end are valid
        reason = error or self._lost or PeerLostError(f"{self.address}: the connection is closed")
        ended += [(call, reason) for call in [*self.calls.values(), *waiting]]
        self.calls.clear()
        self._lost = reason
        self.is_closed = True
        self.link.close()
        return ended


def expect(reply: Reply, kind: type[T]) -> T:
    """The reply, if its kind answers the request.

    Raises:
        KVFerryError: the peer answered with this error instead.
        ProtocolError: the reply is of another kind.
    """
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, ErrorReply):
        raise _ERRORS.get(reply.name, ProtocolError)(f"the peer answers: {reply.message}")
    raise ProtocolError(f"expected {kind.__name__}, the peer answered {type(reply).__name__}")


def finish_answers(reply: Reply, count: int) -> tuple[FinishAnswer, ...]:
    """The answers to ``count`` finishes.

    Raises:
        ProtocolError: the number of answers differs, or the reply does not answer finishes.
    """
    answers = expect(reply, FinishReply).answers
    if len(answers) != count:
        raise ProtocolError(f"finish: {len(answers)} answers to {count} reports")
    return answers


def _finishes(call: Call[FinishAnswer]) -> Finishes:
    assert isinstance(call.request, Finishes)  # only such calls wait
    return call.request


def _joined(calls: Sequence[Call[FinishAnswer]]) -> Call[Any]:
    """A single call for finishes of the same source."""
    if len(calls) == 1:
        return calls[0]
    items = tuple(item for call in calls for item in _finishes(call).items)
    request = msgspec.structs.replace(_finishes(calls[0]), items=items)

    def deliver(done: "Future[tuple[FinishAnswer, ...]]") -> None:
        error = done.exception()
        for index, call in enumerate(calls):
            if error is not None:
                call.future.set_exception(error)
            else:
                call.future.set_result(done.result()[index])

    joined = Call(request, partial(finish_answers, count=len(calls)))
    joined.future.add_done_callback(deliver)
    return joined
