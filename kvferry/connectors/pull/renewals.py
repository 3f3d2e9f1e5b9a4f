"""The leases of received tickets: obtained from their sources, renewed, given up.

One Renew message names several leases of a source. The first Renew of a lease takes the lease for
this engine. Later Renews keep the lease from expiring, and ask how many tokens are written if the
source still computes the prompt.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from kvferry.connectors.pull.agenda import Agenda
from kvferry.connectors.pull.asks import RETRY_S, as_ours
from kvferry.connectors.pull.pursuit import Pursuit, Source
from kvferry.control.client import ControlClient
from kvferry.control.messages import MAX_ITEMS, LeaseAnswer, Renewed
from kvferry.control.tickets import Ticket, check_incarnation
from kvferry.errors import (
    HandshakeNeededError,
    KVFerryError,
    LeaseError,
    LeaseRevokedError,
    LeaseTakenError,
    PeerEndedError,
    PeerLostError,
    StalledError,
)

PENDING_RETRY_S = 0.01
"""Seconds until the engine asks again for a lease not available yet. The source, of a release
before leases could grow, is copying the blocks to host memory."""

RELEASE_ATTEMPTS = 3
"""Number of times that a source is told of a lease that is given up, if its connection breaks
before it has answered. A source that does not hear of it keeps the blocks until the lease expires,
and pauses and drains wait for the lease."""


class Renewals:
    """All leases that one engine holds or wants. The caller of a method must hold the agenda's
    lock.
    """

    def __init__(
        self,
        agenda: Agenda,
        client: ControlClient,
        *,
        interval: Callable[[Ticket], float],
        handshake_timeout_s: float,
        progress_timeout_s: float,
        note_error: Callable[[str, str], None],
        on_loss: Callable[[Pursuit, KVFerryError], None],
        on_failure: Callable[[Source, list[Pursuit]], None],
    ) -> None:
        """Args:
        agenda: the sources, and the time of the next look at each.
        client: control client of this engine; stays the caller's.
        interval: returns the seconds between two renewals of a ticket's lease.
        handshake_timeout_s: seconds for which a granted lease is pursued without an answer of its
            source.
        progress_timeout_s: seconds without progress, or without a step of the engine, after which a
            lease is given up.
        note_error: takes the kind and text of an error, for ``kvferry status``.
        on_loss: called with an unobtainable lease, and the error; with the lock held.
        on_failure: called with a source that did not answer, and the pursuits in the request; with
            the lock held.
        """
        self._agenda = agenda
        self._client = client
        self._interval = interval
        self._handshake_timeout_s = handshake_timeout_s
        self._progress_timeout_s = progress_timeout_s
        self._note_error = note_error
        self._on_loss = on_loss
        self._on_failure = on_failure
        self._stepped = agenda.clock()
        """Clock reading of the engine's last step, or of its last call between two steps."""

    def stepped(self) -> None:
        """Notes a step of the engine, in which reads under its leases can begin."""
        self._stepped = self._agenda.clock()

    def send_due(self, source: Source, now: float) -> None:
        """Sends a Renew for every lease at a source if any of them is due."""
        pursuits = [each for each in source.pursuits.values() if each.is_renewable]
        if any(each.due <= now for each in pursuits):
            self.send(source, pursuits, now)

    def send(self, source: Source, pursuits: Sequence[Pursuit], now: float) -> None:
        """Takes or renews some leases of a source that knows us."""
        description = source.description
        assert description is not None  # the source knows us
        fitting = []
        for pursuit in pursuits:
            try:
                check_incarnation(pursuit.ticket, description.incarnation)
                self._check_progress(pursuit, now)
            except KVFerryError as error:
                self._give_up(pursuit, error)
                if isinstance(error, StalledError):  # our connection would keep the lease
                    self.release(pursuit.ticket)
            else:
                fitting.append(pursuit)
                pursuit.groups = source.groups
                pursuit.due = now + self._interval(pursuit.ticket)
                pursuit.is_asked = True
                pursuit.record.note("asked", now)
        if fitting and source.awaited is None:
            source.awaited = now
        for first in range(0, len(fitting), MAX_ITEMS):
            together = fitting[first : first + MAX_ITEMS]
            leases = {each.lease_id: each.ticket.secret for each in together}
            future = self._client.renew(source.address, description.incarnation, leases)
            future.add_done_callback(partial(self._renewed, source, together))

    def release(
        self, ticket: Ticket, *, keep: bool = False, attempts: int = RELEASE_ATTEMPTS
    ) -> None:
        """Tells the source that a lease is given up; with ``keep`` by this engine alone."""
        leases = {ticket.lease_id: ticket.secret}
        sent = self._client.release(ticket.address, ticket.incarnation, leases, keep=keep)

        def answered(sent: "Future[None]") -> None:
            error = sent.exception()
            ended = isinstance(error, PeerEndedError)  # and with it the lease
            if attempts > 1 and isinstance(error, PeerLostError) and not ended:
                self.release(ticket, keep=keep, attempts=attempts - 1)

        sent.add_done_callback(answered)

    def told(self, address: str, renewed: Renewed) -> None:
        """Handles news of a source about grown or revoked leases."""
        source = self._agenda.sources.get(address)
        if source is not None:
            for lease_id in renewed.states:
                if (pursuit := source.pursuits.get(lease_id)) is not None:
                    self._answered(pursuit, renewed)

    def _check_progress(self, pursuit: Pursuit, now: float) -> None:
        """Raises StalledError if the ranks have reported no progress for too long, or, before the
        ranks read, if the engine has made no step for too long.
        """
        limit = self._progress_timeout_s
        if pursuit.is_read:
            stood, what = now - pursuit.progressed, "no rank has reported progress"
            if pursuit.awaits_source:
                return  # waits for more to read, which is no stall of ours
        else:  # time in which this thread did not run is not charged
            stood = min(now - self._stepped, self._agenda.thread.awake_s)
            what = "the engine has made no step"
        if stood >= limit:
            error = StalledError(
                f"{what} for {stood:.0f} s (progress_timeout_s: {limit:g}); lease "
                f"{pursuit.lease_id} is given up"
            )
            self._note_error("load", f"request {pursuit.request_id}: {error}")
            raise error

    def _renewed(self, source: Source, pursuits: list[Pursuit], future: "Future[Renewed]") -> None:
        """Takes the answer to a Renew; runs on the receiving thread."""
        with self._agenda.lock:
            for pursuit in pursuits:
                pursuit.is_asked = False
            source.awaited = None
            error = future.exception()
            if error is None:
                source.error = None
                for pursuit in pursuits:
                    # If a lease was dropped or released meanwhile, it has ended.
                    if pursuit.source.pursuits.get(pursuit.lease_id) is pursuit:
                        self._answered(pursuit, future.result())
            else:
                # The lease may live on, so ask again soon. If the source has forgotten us, ask as
                # soon as the source knows us again. The pursuit's deadline bounds the wait.
                self._agenda.failed(source, "renewal", as_ours(error))
                forgotten = isinstance(error, HandshakeNeededError)
                self._on_failure(source, pursuits)
                for pursuit in pursuits:
                    if pursuit.wants_lease:
                        pursuit.due = self._agenda.clock() + (0.0 if forgotten else RETRY_S)
                self._agenda.wake(source)

    def _answered(self, pursuit: Pursuit, renewed: Renewed) -> None:
        now, answer = self._agenda.clock(), renewed.states[pursuit.lease_id]
        if answer is LeaseAnswer.HELD:
            self._held(pursuit, renewed, now)
        elif answer is LeaseAnswer.PENDING or (
            answer is LeaseAnswer.TAKEN and pursuit.contend(now)
        ):
            pause = RETRY_S if answer is LeaseAnswer.TAKEN else PENDING_RETRY_S
            pursuit.due = now + pause
            self._agenda.plan(pursuit.source, pursuit.due)
        else:
            self._give_up(pursuit, _lost_lease(pursuit.ticket, answer))

    def _held(self, pursuit: Pursuit, renewed: Renewed, now: float) -> None:
        lease_id = pursuit.lease_id
        pursuit.deadline = now + self._handshake_timeout_s
        written, tables = renewed.written.get(lease_id), renewed.tables.get(lease_id, ())
        note = renewed.notes.get(lease_id, b"")
        if pursuit.hold(now, written, tables, note, is_news=renewed.id == 0):
            pursuit.record.note("taken", now)

    def _give_up(self, pursuit: Pursuit, error: KVFerryError) -> None:
        """Ends the renewals of a lease."""
        pursuit.due = math.inf
        # While the ranks read, their confirm decides: a lost lease fails every load. If the ranks
        # wait for more to read, no confirm would follow.
        if not pursuit.is_read or pursuit.awaits_source:
            self._on_loss(pursuit, error)


def _lost_lease(ticket: Ticket, answer: LeaseAnswer) -> LeaseError:
    if answer is LeaseAnswer.TAKEN:
        return LeaseTakenError(
            f"lease {ticket.lease_id} of engine {ticket.engine_id!r} is held by another target"
        )
    return LeaseRevokedError(
        f"lease {ticket.lease_id} of engine {ticket.engine_id!r} has ended; its blocks may have "
        "been reused"
    )
