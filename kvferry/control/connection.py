"""One connection of a :class:`~kvferry.control.client.ControlClient`, with the calls open on it."""

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
from kvferry.control.links import Link
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
"""What a server says without being asked."""

SECOND_LOOK_S = 0.25
"""Seconds between the two looks for an answer after which a call is given up."""

#: Errors that a server may send by name: those that are built from a message alone.
_ERRORS: dict[str, type[KVFerryError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, KVFerryError)
    and not issubclass(kind, IncompatibleError)
}


@dataclass(slots=True, eq=False)
class Call(Generic[T]):
    """One request, from the moment it is asked until its future is completed."""

    request: Request
    """Its id is filled in when it is sent."""
    read: Callable[[Reply], T]
    """Turns a reply into the future's result, or raises what the future is to raise."""
    future: "Future[T]" = field(default_factory=Future)
    deadline: float = 0.0
    """Clock reading after which the peer counts as hung; set when it is sent or begins to wait."""

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # only we end it

    def end(self, outcome: Reply | Exception) -> None:
        """Completes the future with what came of the call."""
        try:
            if isinstance(outcome, Exception):
                raise outcome
            result = self.read(outcome)
        except Exception as error:  # whatever an answer provokes, the thread goes on
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


Ended: TypeAlias = list[tuple[Call[Any], Reply | Exception]]
"""Calls that are over, each with what came of it. Whoever gets them calls their ``end``."""


class Connection:
    """A link to a server, and the open calls.

    Any thread may send and receive: whatever is called here, except the constructor, is called
    with :attr:`lock` held, which nobody keeps while waiting. No future is completed under it: the
    calls that a method has ended it returns, and its caller completes them after the lock.

    One thread sleeps on the link's descriptors. They are ZeroMQ's, and tell of *news* only: a
    descriptor becomes readable when ZeroMQ puts something into a socket whose owner has looked
    (``EVENTS``) and found nothing, and any use of the socket, by whichever thread, may make it
    unreadable again though an answer lies in the socket. So nobody may give the lock back before
    having looked last of all: :meth:`receive` goes on until there is nothing, and whoever has sent
    calls it too. The thread may find nothing, because another one was faster; it never misses
    anything.
    """

    def __init__(
        self,
        link: Link,
        address: str,
        options: ControlOptions,
        clock: Callable[[], float] = time.monotonic,
        listener: Callable[[str, News], None] = lambda *_: None,
    ) -> None:
        """Args:
        link: to the server; from now on ours.
        address: ``host:port`` as the caller knows it.
        options: timeouts, limits, keys.
        clock: seconds that never run backwards.
        listener: is told what the server says of leases without being asked.
        """
        self.link = link
        self.address = address
        self.lock = threading.Lock()
        self.is_closed = False
        self.calls: dict[int, Call[Any]] = {}
        """Sent and not answered, by id. Deadlines ascend: all calls have the same patience."""
        self._waiting: deque[Call[FinishAnswer]] = deque()
        """Finishes that are not sent yet, oldest first."""
        self._lost: KVFerryError | None = None
        """Why nothing comes any more; ``None`` as long as something may."""
        self._looked = math.inf
        """When something was first seen to be overdue; infinite if nothing is."""
        self._options = options
        self._clock = clock
        self._listener = listener
        self._ids = itertools.count(1)

    # ---- sending ------------------------------------------------------------------------------

    def send(self, call: Call[Any]) -> Ended | None:
        """Sends a call at once, or ends it; ``None`` if the connection has broken."""
        if self.is_lost:
            return None
        return self._send(call) + self.receive()

    def send_finish(self, call: Call[FinishAnswer]) -> Ended | None:
        """Like :meth:`send`, but while a call is under way it waits, to share the next message."""
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
            return [(call, error)]
        call.deadline = self._patience_ends()
        self.calls[id] = call
        return []

    def _send_waiting(self) -> Ended:
        ended: Ended = []
        while self._waiting and not self.calls:
            # Those that are for one start of the source; another one follows only its restart.
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
        """Takes all answers that have come, and sends the finishes that waited for them."""
        ended: Ended = []
        while not self.is_closed and (payload := self.link.receive()) is not None:
            try:
                reply = messages.decode_reply(payload)
            except DecodeError:
                continue  # whose answer it was cannot be told; that call runs into its timeout
            if reply.id == 0 and isinstance(reply, News):
                ended.append((self._news(reply), reply))
                continue
            call = self.calls.pop(reply.id, None)
            if call is not None:  # else it came after its timeout
                ended.append((call, reply))
                ended += self._send_waiting()
        return ended

    def _news(self, news: News) -> Call[News]:
        """A call that nobody made, for what the server says without being asked."""
        call: Call[News] = Call(StatusRequest(id=0), lambda _: news)
        call.future.add_done_callback(lambda told: self._listener(self.address, told.result()))
        return call

    @property
    def is_lost(self) -> bool:
        """Whether nothing comes any more."""
        if self._lost is None:
            self._lost = self.link.why_lost()
        return self._lost is not None

    @property
    def next_look(self) -> float:
        """Clock reading at which :meth:`expire` is to be called; infinite without calls."""
        first = itertools.chain(itertools.islice(self.calls.values(), 1), self._waiting)
        deadline = min((call.deadline for call in first), default=math.inf)
        return deadline if self._looked == math.inf else self._looked + SECOND_LOOK_S

    def expire(self, now: float) -> Ended:
        """Gives up the calls for which no answer came in time, not even until a second look.

        That is for peers that hang: one that is gone shows in the link. And a process that did not
        run for a while finds its calls overdue though they are answered: the answers lie in the
        link, or ZeroMQ's own thread is just about to put them there.
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
        """Closes the connection; open calls end with ``error``, or with why it was lost."""
        waiting = [*self._waiting]
        self._waiting.clear()
        ended = self.receive()  # answers that came before the end are good
        reason = error or self._lost or PeerLostError(f"{self.address}: the connection is closed")
        ended += [(call, reason) for call in [*self.calls.values(), *waiting]]
        self.calls.clear()
        self._lost = reason
        self.is_closed = True
        self.link.close()
        return ended


def expect(reply: Reply, kind: type[T]) -> T:
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


def finish_answers(reply: Reply, count: int) -> tuple[FinishAnswer, ...]:
    """The answers to so many finishes.

    Raises:
        ProtocolError: it has more or fewer, or is no answer to finishes.
    """
    answers = expect(reply, FinishReply).answers
    if len(answers) != count:
        raise ProtocolError(f"finish: {len(answers)} answers to {count} reports")
    return answers


def _finishes(call: Call[FinishAnswer]) -> Finishes:
    assert isinstance(call.request, Finishes)  # only such calls wait
    return call.request


def _joined(calls: Sequence[Call[FinishAnswer]]) -> Call[Any]:
    """One call for finishes of the same source."""
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
