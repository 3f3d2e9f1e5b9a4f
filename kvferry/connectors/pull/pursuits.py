"""The pursuits of a target engine, and their events.

If the source of a load knows this engine, the scheduler thread itself asks for the lease. Otherwise
the scheduler thread only reads the standing of pursuits, and adds or drops pursuits, under one
lock. The thread of :class:`~kvferry.connectors.pull.sources.Sources` does the timed work, as
renewals; so a busy step delays no renewal. If a ticket was requested, the thread that receives the
ticket takes the lease; so a long step costs no lease either. An engine that makes no step at all
for ``progress_timeout_s`` loses the leases under which no rank reads.
"""

import logging
import math
from collections.abc import Callable

from kvferry.connectors.pull.agenda import Agenda
from kvferry.connectors.pull.asks import RETRY_S, Asks
from kvferry.connectors.pull.pursuit import (
    Pursuit,
    PursuitState,
    Silence,
    Source,
    Standing,
)
from kvferry.connectors.pull.renewals import Renewals
from kvferry.connectors.pull.tickets import AcceptedTickets
from kvferry.control.client import ControlClient
from kvferry.control.connection import News
from kvferry.control.messages import Asked
from kvferry.control.proofs import lease_of
from kvferry.control.tickets import Ticket, TransferId
from kvferry.errors import KVFerryError, PeerEndedError, PeerLostError, TicketError
from kvferry.observe.records import RequestRecord
from kvferry.zeromq import is_loopback, split_address

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at a source while a load waits, by which we know whether our own thread
ran."""


class Pursuits:
    """The pursuits of all leases for this engine, from all its sources. Thread-safe."""

    def __init__(
        self,
        agenda: Agenda,
        client: ControlClient,
        tickets: AcceptedTickets,
        *,
        renew_interval: Callable[[Ticket], float],
        handshake_timeout_s: float,
        progress_timeout_s: float,
        note_error: Callable[[str, str], None],
        asks: Callable[..., Asks] = Asks,
        renewals: Callable[..., Renewals] = Renewals,
    ) -> None:
        """Args:
        agenda: the sources, and the time of the next look at each.
        client: control client of this engine; stays the caller's.
        tickets: judges the tickets of other engines.
        renew_interval: returns the seconds between two renewals of a ticket's lease.
        handshake_timeout_s: longest wait in seconds of a load for an unreachable or starting
            source. While an answer is awaited on a live connection, the load waits on.
        progress_timeout_s: seconds without progress, or without a step of the engine, after which a
            lease is given up.
        note_error: takes the kind and text of an error, for ``kvferry status``.
        asks: makes the object for ticket requests.
        renewals: makes the object for obtaining and renewing leases.
        """
        self._agenda = agenda
        self._client = client
        self.tickets = tickets
        """The accepted tickets; a ticket is retired when its lease is not pursued any more."""
        self._handshake_timeout_s = handshake_timeout_s
        self._note_error = note_error
        self.asks = asks(
            agenda,
            client,
            patience_s=handshake_timeout_s,
            on_ticket=self._ticket_came,
            on_failure=self.note_failure,
        )
        """The requested tickets."""
        self.renewals = renewals(
            agenda,
            client,
            interval=renew_interval,
            handshake_timeout_s=handshake_timeout_s,
            progress_timeout_s=progress_timeout_s,
            note_error=note_error,
            on_loss=self._lose,
            on_failure=self.note_end,
        )
        """The leases of received tickets."""
        client.listen(self._told)

    def stepped(self) -> None:
        """Notes a step of the engine, in which reads under its leases can begin."""
        self.renewals.stepped()

    def add(self, record: RequestRecord, ticket: Ticket, *, waits: bool = True) -> Pursuit:
        """Begins to obtain the lease of ``ticket`` for a request.

        Args:
            record: the record of the request; gets the moments of the pursuit.
            ticket: names the lease.
            waits: whether the ranks must not read before the source has confirmed our lease. If
                only this request was given the ticket and the ticket is whole, a source that
                answers promptly need not confirm first: if the lease has ended, the confirm of the
                load says so.
        """
        with self._agenda.lock:
            now = self._agenda.clock()
            source = self._agenda.find(ticket.address, now)
            standing = Standing(PursuitState.LEASING)
            pursuit = Pursuit(record, source, standing, deadline=math.inf, progressed=now)
            self._take(pursuit, ticket, waits=waits)
        return pursuit

    def ask(self, record: RequestRecord, transfer: TransferId) -> Pursuit:
        """Begins to request the ticket of a request that the router sent to the source as well;
        once the ticket is accepted, obtains the lease.

        Raises:
            TicketExpiredError: another request has brought the transfer.
        """
        with self._agenda.lock:
            source = self._agenda.find(transfer.address, self._agenda.clock())
            pursuit = self.asks.begin(record, source, transfer)
            self.asks.add(pursuit)
            if source.knows_us:
                self.asks.send_due(source, self._agenda.clock())
            else:
                record.note("unknown", self._agenda.clock())
            self._agenda.wake(source)
        return pursuit

    def begin_anew(self, source: Source) -> None:
        """Notes that this engine has another incarnation, which the source does not know. The new
        incarnation must obtain all leases under which no rank reads. The caller must hold the lock.
        """
        source.stale = True
        for pursuit in source.pursuits.values():
            if pursuit.wants_lease and not pursuit.is_read:
                deadline = self._agenda.clock() + self._handshake_timeout_s
                pursuit.lend(pursuit.ticket, deadline)

    def start(self, pursuit: Pursuit) -> None:
        """Notes the start of the ranks' reads; the lease is renewed until :meth:`drop`.

        The call is needed also if the lease was lost a moment ago: the ranks will learn of the loss
        by their confirm, and until they have reported, the lease must not count as a lease without
        readers.
        """
        with self._agenda.lock:
            pursuit.progressed = self._agenda.clock()
            pursuit.is_read = True
            pursuit.record.note("reading", pursuit.progressed)

    def is_due_early(self, pursuit: Pursuit, *, waits: bool) -> bool:
        """Whether a load begins now although its source still computes the prompt.

        Args:
            pursuit: the pursuit of its lease.
            waits: whether the load begins as late as possible, so that all but the last chunk moves
                before the source has computed the prompt; if ``False``, at once.
        """
        with self._agenda.lock:
            if pursuit.standing.state is not PursuitState.GROWING:
                return False
            now, num_tokens = self._agenda.clock(), pursuit.ticket.num_tokens
            if waits:
                pace, growth = pursuit.source.pace, pursuit.growth
                # All tokens but the last chunk can be read before the prompt is whole. If we
                # counted only the tokens written by now, the rest of them would be left for the
                # end.
                moved_in = pace.moving_s(num_tokens - growth.chunk)
                if growth.whole_in(now, num_tokens, pace.computes) > moved_in:
                    return False
            pursuit.record.note("taken", now)
            return True

    def moved(self, source: Source, num_tokens: int, seconds: float) -> None:
        """Notes a move of ``num_tokens`` tokens from a source in ``seconds`` seconds."""
        with self._agenda.lock:
            source.pace.moved(num_tokens, seconds)

    def refuse(self, pursuit: Pursuit, error: KVFerryError, kind: str = "load") -> None:
        """Ends a pursuit whose lease is of no use, with an error of this kind. An obtained lease is
        kept until :meth:`release`.
        """
        with self._agenda.lock:
            if pursuit.standing.is_asked_for:
                self.asks.leave(pursuit)
            self.forgo(pursuit)
            pursuit.lose(error)
            self.note_failure(pursuit, error, kind)

    def forgo(self, pursuit: Pursuit) -> None:
        """Gives up the successor of a pursuit, and wants no other lease if this lease is
        revoked.
        """
        with self._agenda.lock:
            successor = pursuit.successor
            pursuit.ask = pursuit.successor = None
            if successor is not None:
                self.release(successor)

    def drop(self, pursuit: Pursuit) -> None:
        """Notes the reports of all ranks; their Finishes have ended the lease."""
        with self._agenda.lock:
            self._remove(pursuit)

    def release(self, pursuit: Pursuit, *, keep: bool = False) -> None:
        """Gives a lease back, as no rank will read under it; the source may free the blocks. With
        ``keep`` the source keeps the lease for other holders of its ticket. A requested ticket is
        given back once it comes. Idempotent.
        """
        source = pursuit.source
        with self._agenda.lock:
            if pursuit.standing.is_asked_for:
                pursuit.unwant()
                return
            self.forgo(pursuit)
            ticket = pursuit.standing.ticket
            if ticket is None or source.pursuits.get(ticket.lease_id) is not pursuit:
                return
            self._remove(pursuit)
            if not source.knows_us:  # the source would ignore us
                if not keep:  # with keep, as if we never had the ticket
                    source.given_up.append(ticket)
                    self._agenda.wake(source)
                return
        self.renewals.release(ticket, keep=keep)

    # ---- for the thread of the sources, with the lock held --------------------------------------

    def expire(self, source: Source, now: float) -> None:
        """Ends waits for a source after their deadline."""
        has_run = self._agenda.thread.awake_s >= self._handshake_timeout_s
        self.asks.expire(source, now, has_run)
        if not has_run:
            return  # answers may have come since
        for pursuit in self.waiting_for(source):
            if not pursuit.awaits_source or now < pursuit.deadline:
                continue  # also lost meanwhile, with another pursuit
            if source.error is None or source.handshake is not None or pursuit.is_asked:
                continue  # an answer is awaited; if the source has gone, the connection shows it
            self._lose(
                pursuit,
                PeerLostError(
                    f"engine {pursuit.ticket.engine_id!r} at {source.address} did not grant lease "
                    f"{pursuit.lease_id} within {self._handshake_timeout_s:g} s "
                    f"(handshake_timeout_s); last error: {source.error}"
                ),
            )
            self._note_silence(source, pursuit.ticket.incarnation)

    def fail_all(self, source: Source, error: KVFerryError) -> None:
        """Fails all waiting pursuits of a source, as the source will lend nothing, for this
        error.
        """
        self.asks.fail_all(source.address, error)
        for pursuit in self.waiting_for(source):
            self._lose(pursuit, error)

    def waiting_for(self, source: Source) -> list[Pursuit]:
        """Pursuits that cannot go on before a source does something."""
        return [each for each in source.pursuits.values() if each.awaits_source]

    def note_end(self, source: Source, asking: list[Pursuit]) -> None:
        """If the process of a source has ended, fails the asks for its tickets, and notes the
        silence of the incarnations named by the tickets of ``asking``.
        """
        if isinstance(source.error, PeerEndedError):
            self.asks.fail_all(source.address, source.error)
            for incarnation in {each.ticket.incarnation for each in asking}:
                self._note_silence(source, incarnation)

    # ---- with the lock held, on any thread ------------------------------------------------------

    def _take(self, pursuit: Pursuit, ticket: Ticket, *, waits: bool) -> None:
        """Begins to obtain the lease of a ticket received from the pursuit's source."""
        now, source = self._agenda.clock(), pursuit.source
        known = source.description
        if known is not None and known.incarnation != ticket.incarnation:
            source.stale = True
        pursuit.lend(ticket, deadline=now + self._handshake_timeout_s)
        if not source.knows_us:
            pursuit.record.note("unknown", now)
        source.pursuits[ticket.lease_id] = pursuit
        silence = source.silence
        if silence is not None and silence.incarnation == ticket.incarnation:
            source.silence = Silence(ticket.incarnation, now)
            self._lose(pursuit, _silent(source))
        elif silence is not None:
            source.next_attempt = now
        elif pursuit.is_renewable:
            is_prompt = source.is_prompt(now) and self._client.is_connected(source.address)
            self.renewals.send(source, [pursuit], now)
            self._agenda.plan(source, now + LOOK_S)
            if is_prompt and not waits and pursuit.standing.state is PursuitState.LEASING:
                pursuit.trust()
                pursuit.record.note("taken", self._agenda.clock())
            return
        self._agenda.wake(source)

    def _ticket_came(self, pursuit: Pursuit, text: str) -> None:
        """Takes a ticket from a source. The caller must hold the lock; any thread may call. The
        lease is taken here, as the engine's next step may be far and the lease would end meanwhile.
        """
        ask = pursuit.ask
        assert ask is not None  # the ticket was asked for
        try:
            ticket = self.tickets.read_asked(text, ask.transfer)
            if pursuit.standing.state is PursuitState.UNWANTED:
                self.renewals.release(ticket)
            elif ticket.shared or ticket.lease_id != ask.lost:
                ticket = self.tickets.claim(ticket, pursuit.request_id)
                pursuit.source = self._agenda.find(ticket.address, self._agenda.clock())
                # Ranks that begin again must know how far they can read, which only the source can
                # say.
                self._take(pursuit, ticket, waits=not ticket.whole or bool(ask.lost))
        except TicketError as error:
            self.asks.fail(pursuit, error, "ticket")

    def _told(self, address: str, news: News) -> None:
        """Handles news of a source: grown or revoked leases, or requested transfers. Any thread may
        call.
        """
        with self._agenda.lock:
            if isinstance(news, Asked):
                self.asks.told(address, news)
            else:
                self.renewals.told(address, news)

    def _remove(self, pursuit: Pursuit) -> None:
        """Forgets a pursuit: its ticket is retired, and its lease is not renewed any more."""
        self.tickets.retire(pursuit.ticket)
        if pursuit.source.pursuits.pop(pursuit.lease_id, None) is not None:
            self._agenda.use(pursuit.source, self._agenda.clock())

    def _note_silence(self, source: Source, incarnation: str) -> None:
        """Notes that a load has waited in vain for a source. If no answer at all came from the
        source, the other loads do not wait any longer.
        """
        if not isinstance(source.error, PeerLostError):
            return
        source.silence, source.stale = Silence(incarnation, self._agenda.clock()), True
        for pursuit in self.waiting_for(source):
            if pursuit.ticket.incarnation == incarnation:
                self._lose(pursuit, _silent(source))

    def _lose(self, pursuit: Pursuit, error: KVFerryError) -> None:
        """Loses an unobtainable lease. The loss is reported as a failure, unless another lease is
        requested.
        """
        if pursuit.is_revoked_early(error):
            self._follow(pursuit)
            pursuit.lose(error)
            return
        host, _ = split_address(pursuit.source.address)
        if isinstance(error, PeerEndedError) and is_loopback(host):
            error = PeerEndedError(
                f"{error}; engine {pursuit.ticket.engine_id!r} has ended, or it runs on another "
                f"machine and its host is {host}, which leads each machine to itself: set it to an "
                "address that this machine reaches"
            )
        pursuit.lose(error)
        self.note_failure(pursuit, error)

    def _follow(self, pursuit: Pursuit) -> None:
        """Asks for another lease, as a source has revoked a lease whose ticket was asked for."""
        before = pursuit.ask
        assert before is not None  # see Pursuit.is_revoked_early
        logger.info(
            "request %s: engine %s has revoked the lease that it lent, and is asked for another",
            pursuit.request_id,
            pursuit.source.name,
        )
        source = self._agenda.find(before.transfer.address, self._agenda.clock())
        lost = lease_of(pursuit.lease_id)
        successor = self.asks.begin(pursuit.record, source, before.transfer, lost=lost)
        if before.lost:  # the source may revoke the next lease at once
            successor.due = self._agenda.clock() + RETRY_S
        try:
            self.asks.add(successor)
        except TicketError as error:
            successor.lose(error)
            self.note_failure(successor, error)
        pursuit.successor = successor
        if not pursuit.is_read:  # otherwise its ranks report
            self._remove(pursuit)
        self._agenda.wake(source)

    def note_failure(self, pursuit: Pursuit, error: KVFerryError, kind: str = "load") -> None:
        """Notes the error by which a request gets nothing from its source, with the kind of the
        error; ``kvferry status`` and ``kvferry trace`` show the error.
        """
        text = f"{type(error).__name__}: {error}"
        self._note_error(kind, f"request {pursuit.request_id}: {text}")
        pursuit.record.fail(self._agenda.clock(), text)


def _silent(source: Source) -> PeerLostError:
    if isinstance(source.error, PeerEndedError):
        return source.error
    return PeerLostError(f"{source.address} has been silent: {source.error}")
