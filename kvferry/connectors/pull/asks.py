"""The tickets that a target has asked for: of requests that reached it and their source at once."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvferry.connectors.pull.record import RequestRecord
from kvferry.connectors.pull.tickets import AcceptedTickets
from kvferry.control.client import ControlClient
from kvferry.control.messages import Asked, AskState
from kvferry.control.proofs import lease_of
from kvferry.control.tickets import Ticket, Transfer
from kvferry.errors import KVFerryError, PeerEndedError, PeerLostError, TicketExpiredError

ASK_AGAIN_S = 5.0
"""Seconds after which a source is asked again, as what it told unasked may have been lost."""
RETRY_S = 0.5
"""Pause after an ask that failed."""


@dataclass(slots=True, eq=False)
class PendingTicket:
    """One ticket that was asked for. Its last three fields are read on any thread."""

    request_id: str
    transfer: Transfer
    record: RequestRecord
    """What is told of the request."""
    tickets: AcceptedTickets
    """Judges the ticket that comes."""
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
    lost: str = ""
    """The lease that was lent for it last, and revoked; its ticket is of no use any more."""
    ticket: Ticket | None = None
    """As the request uses it, since it has come."""
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
        on_ticket: Callable[[PendingTicket, str], None],
    ) -> None:
        """Args:
        client: speaks for this engine; stays the caller's.
        lock: held whenever anything here is looked at.
        patience_s: seconds in which a source that can be reached must hear of a request.
        clock: seconds that never run backwards.
        note_error: takes the kind and text of what goes wrong, for ``kvferry status``.
        on_answer: told the address of a source that has answered, or why it did not; with the lock
            held.
        on_ticket: takes a ticket that has come, signed and with a veiled secret, on whichever
            thread has heard it and with the lock held. Sets the ticket or the error of what waits
            for it, or neither, where it is of no use; nobody may want it any more.
        """
        self._client = client
        self._lock = lock
        self._patience_s = patience_s
        self._clock = clock
        self._note_error = note_error
        self._on_answer = on_answer
        self._on_ticket = on_ticket
        self._waiting: dict[str, PendingTicket] = {}
        """By transfer; those too that nobody wants any more, until they can be given back."""
        self._by_address: dict[str, dict[str, PendingTicket]] = {}
        """The same, by the address of the source; no address without any."""

    def add(
        self, record: RequestRecord, transfer: Transfer, tickets: AcceptedTickets, lost: str
    ) -> PendingTicket:
        """From now on the ticket of a transfer is wanted, but for one of the lease ``lost``.

        Raises:
            TicketExpiredError: another request has brought it.
        """
        now = self._clock()
        deadline = now + self._patience_s
        pending = PendingTicket(record.request_id, transfer, record, tickets, deadline, now)
        pending.lost = lost
        self._enter(pending)
        return pending

    def add_again(self, pending: PendingTicket) -> None:
        """The lease of the ticket that came was revoked, and another one may be granted."""
        assert pending.ticket is not None  # it came
        pending.looked = now = self._clock()
        pending.deadline, pending.is_owed = now + self._patience_s, False
        pending.next_ask = now + (RETRY_S if pending.lost else 0.0)
        pending.incarnation = ""
        pending.lost, pending.ticket = lease_of(pending.ticket.lease_id), None
        try:
            self._enter(pending)
        except TicketExpiredError as error:
            self.fail(pending, error)

    def _enter(self, pending: PendingTicket) -> None:
        name = pending.transfer.transfer_id
        other = self._waiting.get(name)
        # Of one that nobody wants any more the ticket was only to be given back.
        if other is not None and other is not pending and other.is_wanted:
            raise TicketExpiredError(
                f"transfer: {name} was brought by request {other.request_id!r}, now request "
                f"{pending.request_id!r} brings it again; each serves one request"
            )
        self._waiting[name] = pending
        self._by_address.setdefault(pending.transfer.address, {})[name] = pending

    def _leave(self, pending: PendingTicket) -> None:
        """Nobody waits for it any more; others of the same transfer stay."""
        name, address = pending.transfer.transfer_id, pending.transfer.address
        if self._waiting.get(name) is not pending:
            return
        del self._waiting[name]
        others = self._by_address[address]
        del others[name]
        if not others:
            del self._by_address[address]

    def wants(self, address: str) -> bool:
        """Whether any is awaited of a source."""
        return address in self._by_address

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
        one = self._waiting.get(news.transfer_id)
        if one is None or one.transfer.address != address:
            return
        now = self._clock()
        if news.state is AskState.COMING:
            one.deadline = float("inf")
        elif news.state is AskState.LENT:
            one.record.note("granted", now)
            one.next_ask = now + RETRY_S  # where it is of no use
            self._on_ticket(one, news.ticket)
            if not one.is_wanted:
                self._leave(one)
        elif news.state is AskState.NEVER:
            one.reason = news.reason or "it says no reason"
        if one.is_settled:
            self._leave(one)

    def expire(
        self, address: str, now: float, has_run: bool, owes: Callable[[PendingTicket], bool]
    ) -> None:
        """Ends the waits for a source that have lasted too long. To be called after each of its
        answers, and each ask.

        Args:
            address: of the source.
            now: clock reading.
            has_run: whether we could have taken answers since the last call.
            owes: whether the source owes us an answer, and nothing else is wrong with it.
        """
        for one in list(self._of(address)):
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

    def fail(self, pending: PendingTicket, error: KVFerryError, kind: str = "load") -> None:
        """The wait for one is over, and nobody knows of a ticket, or it was refused."""
        self._leave(pending)
        if pending.reason or pending.error is not None:
            return
        pending.error = error
        if pending.is_wanted:
            text = f"{type(error).__name__}: {error}"
            self._note_error(kind, f"request {pending.request_id}: {text}")
            pending.record.fail(self._clock(), text)

    def _of(self, address: str) -> Iterator[PendingTicket]:
        return iter(self._by_address.get(address, {}).values())

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
