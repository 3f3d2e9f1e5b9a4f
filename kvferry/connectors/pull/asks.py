"""The tickets that a target has asked for: of requests that reached it and their source at once."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvferry.connectors.pull.record import RequestRecord
from kvferry.control.client import ControlClient
from kvferry.control.messages import Asked, AskState
from kvferry.control.tickets import Transfer
from kvferry.errors import KVFerryError, PeerEndedError, PeerLostError, TicketExpiredError

ASK_AGAIN_S = 5.0
"""Seconds after which a source is asked again, as what it told unasked may have been lost."""
RETRY_S = 0.5
"""Pause after an ask that failed."""


@dataclass(slots=True, eq=False)
class PendingTicket:
    """One ticket that was asked for. Its last four fields are read on any thread."""

    request_id: str
    transfer: Transfer
    record: RequestRecord
    """What is told of the request."""
    deadline: float
    """Clock reading by which the source must know of the request; infinite once it does. Time in
    which it owes us an answer, and nothing else is wrong with it, is not charged."""
    looked: float
    """Clock reading of the last look at that."""
    is_owed: bool = False
    """Whether it owed us an answer then."""
    next_ask: float = 0.0
    """Clock reading of the next ask."""
    is_asked: bool = False
    """Whether an ask is under way."""
    incarnation: str = ""
    """The start of the source that knows of the request; empty before."""
    is_wanted: bool = True
    """Whether anybody here still waits for it."""
    give_back: Callable[[str], None] = lambda _ticket: None
    """Takes the ticket if it comes after that."""
    ticket: str = ""
    """Signed, with a veiled secret; empty until it comes."""
    reason: str = ""
    """Why the source lends nothing, once it has said so."""
    error: KVFerryError | None = None
    """Why nobody knows, once the wait is over."""

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for."""
        return bool(self.ticket or self.reason or self.error)


class Asks:
    """All tickets that one engine waits for. Its owner calls each method with the lock held."""

    def __init__(
        self,
        client: ControlClient,
        *,
        lock: threading.RLock,
        patience_s: float,
        clock: Callable[[], float],
        note_error: Callable[[str, str], None],
        on_answer: Callable[[str, KVFerryError | None], None],
    ) -> None:
        """Args:
        client: speaks for this engine; stays the caller's.
        lock: held whenever anything here is looked at.
        patience_s: seconds in which a source that can be reached must hear of a request.
        clock: seconds that never run backwards.
        note_error: takes the kind and text of what goes wrong, for ``kvferry status``.
        on_answer: told the address of a source that has answered, or why it did not; with the lock
            held.
        """
        self._client = client
        self._lock = lock
        self._patience_s = patience_s
        self._clock = clock
        self._note_error = note_error
        self._on_answer = on_answer
        self._waiting: dict[str, PendingTicket] = {}
        """By transfer; those too that nobody wants any more, until they can be given back."""

    def add(self, record: RequestRecord, transfer: Transfer) -> PendingTicket:
        """From now on the ticket of a transfer is wanted.

        Raises:
            TicketExpiredError: another request has brought it.
        """
        if (other := self._waiting.get(transfer.transfer_id)) is not None:
            raise TicketExpiredError(
                f"transfer: {transfer.transfer_id} was brought by request {other.request_id!r}, "
                f"now request {record.request_id!r} brings it again; each serves one request"
            )
        now = self._clock()
        deadline = now + self._patience_s
        pending = PendingTicket(record.request_id, transfer, record, deadline, now)
        self._waiting[transfer.transfer_id] = pending
        return pending

    def drop(self, pending: PendingTicket, give_back: Callable[[str], None]) -> None:
        """Nobody wants it any more; ``give_back`` gets it as soon as it is there."""
        pending.is_wanted, pending.give_back = False, give_back
        if pending.ticket and pending.error is None:  # else it was refused, and is left alone
            give_back(pending.ticket)

    @property
    def is_waiting(self) -> bool:
        """Whether any is awaited."""
        return bool(self._waiting)

    def wants(self, address: str) -> bool:
        """Whether any is awaited of a source."""
        return any(True for _ in self._of(address))

    def due(self, address: str) -> list[float]:
        """Clock readings of the next asks of a source."""
        return [one.next_ask for one in self._of(address) if not one.is_asked]

    def send(self, address: str, incarnation: str, now: float) -> None:
        """Asks a source, which knows us, for what is due."""
        for one in list(self._of(address)):
            if one.is_settled:  # by what came meanwhile
                continue
            if one.incarnation not in ("", incarnation):
                self.fail(
                    one,
                    TicketExpiredError(
                        f"the engine at {address} was started again while it had request "
                        f"{one.request_id!r}; send the request again"
                    ),
                )
            elif now >= one.next_ask and not one.is_asked:
                one.is_asked = True
                one.record.note("asking", now)
                future = self._client.ask(address, incarnation, one.transfer)
                future.add_done_callback(partial(self._answered, one, incarnation))

    def told(self, address: str, news: Asked) -> None:
        """A source tells what became of a transfer."""
        name = news.transfer_id
        one = self._waiting.get(name)
        if one is None or one.transfer.address != address:
            return
        now = self._clock()
        if news.state is AskState.COMING:
            one.deadline = float("inf")
        elif news.state is AskState.LENT:
            one.ticket = news.ticket
            one.record.note("granted", now)
            if not one.is_wanted:
                one.give_back(one.ticket)
        elif news.state is AskState.NEVER:
            one.reason = news.reason or "it says no reason"
        if one.is_settled:
            del self._waiting[name]

    def expire(self, now: float, has_run: bool, owes: Callable[[PendingTicket], bool]) -> None:
        """Ends the waits that have lasted too long. To be called after each answer, and each ask.

        Args:
            now: clock reading.
            has_run: whether we could have taken answers since the last call.
            owes: whether the source owes us an answer, and nothing else is wrong with it.
        """
        for one in list(self._waiting.values()):
            if one.is_owed or not has_run:
                one.deadline += now - one.looked
            one.looked, one.is_owed = now, owes(one)
            if has_run and now >= one.deadline and not one.is_asked:
                self.fail(
                    one,
                    PeerLostError(
                        f"the engine at {one.transfer.address} did not get request "
                        f"{one.request_id!r}, or could not be asked for it, within "
                        f"{self._patience_s:g} s (handshake_timeout_s); look there and at the "
                        "router, which sends both engines a request at once"
                    ),
                )

    def fail_all(self, address: str, error: KVFerryError) -> None:
        """A source will tell nothing any more."""
        for one in list(self._of(address)):
            self.fail(one, error)

    def fail(self, pending: PendingTicket, error: KVFerryError) -> None:
        """The wait for one is over, and nobody knows of a ticket."""
        if self._waiting.pop(pending.transfer.transfer_id, None) is None:
            return
        pending.error = error
        if pending.is_wanted:
            text = f"{type(error).__name__}: {error}"
            self._note_error("load", f"request {pending.request_id}: {text}")
            pending.record.fail(self._clock(), text)

    def _of(self, address: str) -> Iterator[PendingTicket]:
        return (one for one in self._waiting.values() if one.transfer.address == address)

    def _answered(self, one: PendingTicket, incarnation: str, future: "Future[Asked]") -> None:
        """An ask was answered; runs on the thread that took the answer."""
        with self._lock:
            one.is_asked = False
            now, error = self._clock(), future.exception()
            if error is None:
                one.next_ask = now + ASK_AGAIN_S
                state = future.result().state
                if state is AskState.COMING:
                    one.incarnation = incarnation
                elif state is AskState.UNKNOWN and one.deadline == float("inf"):
                    one.deadline = now + self._patience_s  # it had it, and has forgotten its end
                self.told(one.transfer.address, future.result())
                self._on_answer(one.transfer.address, None)
                return
            if not isinstance(error, KVFerryError):
                raise error
            one.next_ask = now + RETRY_S
            if one.deadline == float("inf"):
                one.deadline = now + self._patience_s
            if isinstance(error, PeerEndedError):
                self.fail_all(one.transfer.address, error)
            self._on_answer(one.transfer.address, error)
