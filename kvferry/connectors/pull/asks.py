"""The requested tickets of a target: for requests that the router sent to both engines."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

from kvferry.connectors.pull.agenda import Agenda
from kvferry.connectors.pull.pursuit import Ask, Pursuit, PursuitState, Source, Standing
from kvferry.control.client import ControlClient
from kvferry.control.messages import Asked, AskState
from kvferry.control.tickets import TransferId
from kvferry.errors import (
    KVFerryError,
    PeerEndedError,
    PeerLostError,
    TicketExpiredError,
)
from kvferry.observe.records import RequestRecord

ASK_AGAIN_S = 5.0
"""Seconds after which a source is asked again, as an unrequested message of the source may have
been lost."""
RETRY_S = 0.5
"""Seconds until a failed ask, renewal or handshake is repeated."""


class Asks:
    """All tickets that one engine waits for. The caller of a method must hold the agenda's lock."""

    def __init__(
        self,
        agenda: Agenda,
        client: ControlClient,
        *,
        patience_s: float,
        on_ticket: Callable[[Pursuit, str], None],
        on_failure: Callable[[Pursuit, KVFerryError, str], None],
    ) -> None:
        """Args:
        agenda: the sources, and the time of the next look at each.
        client: control client of this engine; stays the caller's.
        patience_s: seconds in which a reachable source must hear of a request.
        on_ticket: takes a received ticket, signed and with a veiled secret, on the receiving thread
            and with the lock held. The call makes the pursuit lent or lost, or neither if the
            ticket is of no use. The pursuit may be unwanted.
        on_failure: called with a pursuit whose ticket will not come although a load waits, the
            error, and the kind of the error; with the lock held.
        """
        self._agenda = agenda
        self._client = client
        self._patience_s = patience_s
        self._on_ticket = on_ticket
        self._on_failure = on_failure
        self._waiting: dict[str, Pursuit] = {}
        """Transfer id → its pursuit. Unwanted pursuits stay until their tickets can be given
        back."""
        self._by_address: dict[str, dict[str, Pursuit]] = {}
        """Address of the source → the pursuits of :attr:`_waiting` there; no address without
        pursuits."""

    def begin(
        self, record: RequestRecord, source: Source, transfer: TransferId, lost: str = ""
    ) -> Pursuit:
        """A new pursuit whose ticket is to be asked for; the ticket of the lease ``lost`` is of no
        use.
        """
        now = self._agenda.clock()
        return Pursuit(
            record,
            source,
            Standing(PursuitState.ASKED),
            deadline=now + self._patience_s,
            progressed=now,
            ask=Ask(transfer, looked=now, lost=lost),
        )

    def add(self, pursuit: Pursuit) -> None:
        """Asks for the ticket of a pursuit from now on.

        Raises:
            TicketExpiredError: another request has brought the transfer.
        """
        transfer = _ask(pursuit).transfer
        name, address = transfer.transfer_id, transfer.address
        other = self._waiting.get(name)
        # The ticket of an unwanted pursuit was only to be given back.
        if other is not None and other.standing.state in (PursuitState.ASKED, PursuitState.COMING):
            raise TicketExpiredError(
                f"transfer: {name} was brought by request {other.request_id!r}, now request "
                f"{pursuit.request_id!r} brings it again; each serves one request"
            )
        self._waiting[name] = pursuit
        self._by_address.setdefault(address, {})[name] = pursuit

    def leave(self, pursuit: Pursuit) -> None:
        """Stops waiting for the ticket of a pursuit; other pursuits of the same transfer stay."""
        transfer = _ask(pursuit).transfer
        name, address = transfer.transfer_id, transfer.address
        if self._waiting.get(name) is not pursuit:
            return
        del self._waiting[name]
        others = self._by_address[address]
        del others[name]
        if not others:
            del self._by_address[address]

    def wants(self, address: str) -> bool:
        """Whether a ticket is awaited from a source."""
        return address in self._by_address

    def due(self, address: str) -> list[float]:
        """Clock readings of the next asks of a source."""
        return [one.due for one in self._of(address) if not one.is_asked]

    def send_due(self, source: Source, now: float) -> None:
        """Sends the due ticket requests to a source that knows us."""
        if not source.knows_us or source.description is None:
            return
        address, incarnation = source.address, source.description.incarnation
        for one in list(self._of(address)):
            ask = _ask(one)
            if not one.standing.is_asked_for:  # its ticket came meanwhile
                continue
            if ask.incarnation not in ("", incarnation):
                self.fail(
                    one,
                    TicketExpiredError(
                        f"the engine at {address} was started again while it had request "
                        f"{one.request_id!r}; send the request again"
                    ),
                )
            elif now >= one.due and not one.is_asked:
                one.is_asked = True
                one.record.note("asking", now)
                future = self._client.ask(address, incarnation, ask.transfer)
                future.add_done_callback(partial(self._answered, one, address, incarnation))

    def told(self, address: str, news: Asked, incarnation: str = "") -> None:
        """Handles the news of a source about a transfer; ``incarnation`` is the incarnation that
        was asked.
        """
        one = self._waiting.get(news.transfer_id)
        if one is None or _ask(one).transfer.address != address:
            return
        now = self._agenda.clock()
        if news.state is AskState.COMING:
            one.come(incarnation or _ask(one).incarnation)
        elif news.state is AskState.LENT:
            one.record.note("granted", now)
            one.due = now + RETRY_S  # if the ticket is of no use
            is_wanted = one.standing.state is not PursuitState.UNWANTED
            self._on_ticket(one, news.ticket)
            if not is_wanted:
                self.leave(one)
        elif news.state is AskState.NEVER:
            one.deny(news.reason or "it says no reason")
        if not one.standing.is_asked_for:
            self.leave(one)

    def expire(self, source: Source, now: float, has_run: bool) -> None:
        """Ends waits for a source after their deadline. Must be called after each answer of the
        source, and each ask.

        Args:
            source: the source.
            now: clock reading.
            has_run: whether this process could have taken answers since the last call.
        """
        address = source.address
        for one in list(self._of(address)):
            ask = _ask(one)
            if ask.is_owed or not has_run:
                one.deadline += now - ask.looked
            ask.looked, ask.is_owed = now, self._is_owed(one, source)
            if has_run and now >= one.deadline and not one.is_asked:
                self.fail(
                    one,
                    PeerLostError(
                        f"the engine at {address} did not get request "
                        f"{one.request_id!r}, or could not be asked for it, within "
                        f"{self._patience_s:g} s (handshake_timeout_s); look there and at the "
                        "router, which sends both engines a request at once"
                    ),
                )

    def fail_all(self, address: str, error: KVFerryError) -> None:
        """Fails all waits for a source, as the source will not answer any more."""
        for one in list(self._of(address)):
            self.fail(one, error)

    def fail(self, pursuit: Pursuit, error: KVFerryError, kind: str = "load") -> None:
        """Ends the wait for a ticket that was refused or will not come."""
        self.leave(pursuit)
        standing = pursuit.standing
        if standing.is_asked_for:
            pursuit.lose(error)
            if standing.state is not PursuitState.UNWANTED:
                self._on_failure(pursuit, error, kind)

    def _is_owed(self, pursuit: Pursuit, source: Source) -> bool:
        """Whether an ask or a handshake with the source is unanswered, and no request has failed so
        far.
        """
        is_asked = pursuit.is_asked or source.handshake is not None
        return is_asked and source.error is None

    def _of(self, address: str) -> Iterator[Pursuit]:
        return iter(self._by_address.get(address, {}).values())

    def _answered(
        self, one: Pursuit, address: str, incarnation: str, future: "Future[Asked]"
    ) -> None:
        """Takes the answer to an ask; runs on the receiving thread."""
        with self._agenda.lock:
            now, error = self._agenda.clock(), future.exception()
            is_waiting = one.standing.is_asked_for  # otherwise its Renew may be under way
            if is_waiting:
                one.is_asked = False
                one.due = now + (ASK_AGAIN_S if error is None else RETRY_S)
            if error is None:
                if is_waiting and future.result().state is AskState.UNKNOWN:
                    one.await_again(now + self._patience_s)  # the source has forgotten how it ended
                self.told(address, future.result(), incarnation)
                self._heard(address, None)
                return
            failure = as_ours(error)
            if is_waiting:
                one.await_again(now + self._patience_s)
            if isinstance(failure, PeerEndedError):
                self.fail_all(address, failure)
            self._heard(address, failure)

    def _heard(self, address: str, error: KVFerryError | None) -> None:
        """Notes an answer of a source, or the error by which the ask failed."""
        source = self._agenda.sources.get(address)
        if source is None:
            return  # the source was forgotten; no load waits for the answer
        if error is None:
            source.error = None
        else:
            self._agenda.failed(source, "ask", error)
        self._agenda.wake(source)


def _ask(pursuit: Pursuit) -> Ask:
    """State of asking for the ticket of a pursuit; the pursuit must have such a state."""
    assert pursuit.ask is not None
    return pursuit.ask


def as_ours(error: BaseException) -> KVFerryError:
    """Errors of the client are ours; any other error is a defect, and must not be swallowed."""
    if not isinstance(error, KVFerryError):
        raise error
    return error
