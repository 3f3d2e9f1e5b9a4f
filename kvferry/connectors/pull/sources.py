"""The sources of a target engine: handshakes, and the thread for timed work.

The pursuit of the leases of sources is in :mod:`~kvferry.connectors.pull.pursuits`.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from kvferry.connectors.pull.agenda import Agenda
from kvferry.connectors.pull.asks import RETRY_S, as_ours
from kvferry.connectors.pull.groups import SourceGroups
from kvferry.connectors.pull.pursuit import Pursuit, Source
from kvferry.connectors.pull.pursuits import LOOK_S, Pursuits
from kvferry.connectors.pull.tickets import AcceptedTickets
from kvferry.control.client import ControlClient
from kvferry.control.tickets import Ticket
from kvferry.errors import (
    IncompatibleError,
)
from kvferry.mailbox import Mailbox
from kvferry.topology.description import EngineDescription
from kvferry.topology.group import GroupGeometry

logger = logging.getLogger(__name__)

SILENT_RETRY_S = 2.0
"""Seconds between two attempts to reach a silent source."""
NAMED_S = 600.0
"""Seconds for which a silent source is asked, and reported as silent, after a load last named the
source; a source without later requests may have left for good. A source without a connection is
forgotten after this time, unless it is in ``peers``."""
REFUSED_RETRY_S = 10.0
"""Seconds until a refused handshake is repeated: only a restart of the other side can change the
answer."""


class Sources:
    """All sources of this engine. Thread-safe."""

    def __init__(
        self,
        client: ControlClient,
        tickets: AcceptedTickets,
        *,
        groups: Sequence[GroupGeometry],
        addresses: Sequence[str],
        renew_interval: Callable[[Ticket], float],
        handshake_timeout_s: float,
        progress_timeout_s: float,
        note_error: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
        mailbox: Callable[..., Mailbox] = Mailbox,
        pursuits: Callable[..., Pursuits] = Pursuits,
    ) -> None:
        """Starts the thread; handshakes begin with :meth:`describe`.

        Args:
            client: control client of this engine; stays the caller's.
            tickets: judges the tickets of other engines.
            groups: this engine's geometries, one per KV cache group.
            addresses: ``host:port`` of the sources to shake hands with at start.
            renew_interval: returns the seconds between two renewals of a ticket's lease.
            handshake_timeout_s: longest wait in seconds of a load for an unreachable or starting
                source. While an answer is awaited on a live connection, the load waits on.
            progress_timeout_s: seconds without progress, or without a step of the engine, after
                which a lease is given up.
            note_error: takes the kind and text of an error, for ``kvferry status``.
            clock: monotonic clock, in seconds.
            mailbox: makes the thread.
            pursuits: makes the object for the pursuits of leases.
        """
        self.client = client
        self._groups = tuple(groups)
        self.agenda = Agenda(addresses, note_error=note_error, clock=clock)
        """The sources, and the time of the next look at each."""
        self.pursuits = pursuits(
            self.agenda,
            client,
            tickets,
            renew_interval=renew_interval,
            handshake_timeout_s=handshake_timeout_s,
            progress_timeout_s=progress_timeout_s,
            note_error=note_error,
        )
        """The pursuits of the leases of this engine."""
        self._ours: EngineDescription | None = None
        self._news: list[EngineDescription] = []
        self._gone: dict[str, str] = {}
        """Engine id → the forgotten incarnation, until the ranks are told."""
        self.thread = self.agenda.thread = mailbox("sources", self._turn, survives=False)
        self.thread.start()  # its turn asks the thread whether it ran

    # ---- the scheduler thread -----------------------------------------------------------------

    def describe(self, ours: EngineDescription) -> None:
        """Sets this engine's description for its sources; from now on handshakes run.

        Refused handshakes run again at once with the new description. All handshakes run again if
        the description is of another incarnation.
        """
        with self.agenda.lock:
            is_anew = self._ours is not None and self._ours.incarnation != ours.incarnation
            self._ours = ours
            for source in self.agenda.sources.values():
                if is_anew:
                    self.pursuits.begin_anew(source)
                source.next_attempt = 0.0
                self.agenda.wake(source)
            self.thread.post(lambda: None)  # the thread may have been woken in vain before

    def silent_peers(self) -> tuple[str, ...]:
        """Names and addresses of the silent sources. For any thread; never waits."""
        since = self.agenda.clock() - NAMED_S
        return tuple(
            source.name
            for source in list(self.agenda.sources.values())
            if source.silence is not None and source.silence.since > since
        )

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take_news` has something to return or to raise."""
        return bool(self._news or self._gone) or self.thread.defect is not None

    def take_news(self) -> tuple[list[EngineDescription], dict[str, str]]:
        """Sources whose handshake succeeded since the last call, and engine id → its forgotten
        incarnation. An engine in both was forgotten first and then met again.

        Raises:
            EngineError: the thread has died of a defect; no lease is obtained or renewed any more.
        """
        self.thread.check()
        with self.agenda.lock:
            news, self._news = self._news, []
            gone, self._gone = self._gone, {}
            return news, gone

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self.thread.close()

    # ---- the background thread ----------------------------------------------------------------

    def _turn(self) -> float | None:
        """Does the due work; returns the seconds until the next work, ``None`` to sleep until
        woken.
        """
        with self.agenda.lock:
            now = self.agenda.clock()
            if self._ours is None:
                self.agenda.sleeps_until = math.inf
                return None
            self.agenda.sleeps_until = 0.0  # no wake-up is needed
            for source in list(self.agenda.take_due(now)):
                self._shake_hands(source, self._ours, now)
                self.pursuits.renewals.send_due(source, now)
                self.pursuits.asks.send_due(source, now)
                self.pursuits.expire(source, now)
                self._plan_next(source, now)
            self.agenda.sleeps_until = due = self.agenda.next_due
            return None if due == math.inf else max(due - now, 0.001)

    def _plan_next(self, source: Source, now: float) -> None:
        """Plans the next look at a source, or forgets the source."""
        waits = self.pursuits.asks.wants(source.address) or self.pursuits.waiting_for(source)
        due = [now + LOOK_S] if waits else []
        due += [each.due for each in source.pursuits.values() if each.is_renewable]
        if source.knows_us:
            due += self.pursuits.asks.due(source.address)
        if source.handshake is None and self._needs_handshake(source, now):
            due.append(source.next_attempt)
        if due:
            self.agenda.plan(source, max(min(due), now + 0.001))
        elif not (source.address in self.agenda.peers or source.pursuits or source.handshake):
            self._plan_end(source, now)

    def _plan_end(self, source: Source, now: float) -> None:
        """Forgets a source from which nothing was wanted for long, unless it is connected."""
        if now >= self.agenda.last_use(source) + NAMED_S and self.client.is_connected(
            source.address
        ):
            self.agenda.use(source, now)
        silent_since = 0.0 if source.silence is None else source.silence.since
        until = max(self.agenda.last_use(source), silent_since) + NAMED_S
        if now < until:
            self.agenda.plan(source, until)
            return
        if self.agenda.sources.get(source.address) is not source:
            return  # it was forgotten before, and then named again
        self.agenda.forget(source)
        if source.description is not None:
            self._forget(source.description)

    def _forget(self, description: EngineDescription) -> None:
        """Forgets an incarnation of a source, here and at the ranks, unless it has another address
        too.
        """
        name = description.engine_id, description.incarnation
        others = [
            one.description for one in self.agenda.sources.values() if one.description is not None
        ]
        if name not in [(one.engine_id, one.incarnation) for one in others]:
            self._gone[description.engine_id] = description.incarnation
            self.client.forget(description)

    def _needs_handshake(self, source: Source, now: float) -> bool:
        if source.knows_us:
            return False
        if source.silence is not None and now < source.silence.since + NAMED_S:
            return True
        is_peer = source.address in self.agenda.peers
        wanted = is_peer or source.given_up or self.pursuits.asks.wants(source.address)
        return bool(wanted) or any(each.wants_lease for each in source.pursuits.values())

    def _shake_hands(self, source: Source, ours: EngineDescription, now: float) -> None:
        if source.handshake is not None or not self._needs_handshake(source, now):
            return
        if now < source.next_attempt:
            if isinstance(source.error, IncompatibleError):
                self.pursuits.fail_all(source, source.error)
            return
        source.handshake = self.client.handshake(source.address, ours)
        asking = self.pursuits.waiting_for(source)
        source.handshake.add_done_callback(partial(self._shaken, source, ours, asking))

    def _shaken(
        self,
        source: Source,
        ours: EngineDescription,
        asking: list[Pursuit],
        future: "Future[EngineDescription]",
    ) -> None:
        """Handles the end of a handshake; runs on the receiving thread."""
        with self.agenda.lock:
            source.handshake = None
            error = future.exception()
            if error is None:
                before, now = source.description, self.agenda.clock()
                source.description, source.error = future.result(), None
                assert self._ours is not None  # a handshake has run
                source.stale = ours.incarnation != self._ours.incarnation
                if before is not None and before.engine_id != source.description.engine_id:
                    self._forget(before)  # the address has another engine now; ranks see restarts
                self.agenda.use(source, now)
                source.silence = None
                # A source that denies our handshake again and again is not asked at once.
                source.next_attempt = self.agenda.clock() + RETRY_S
                source.groups = SourceGroups.of(source.description, self._groups)
                self._news.append(source.description)
                for pursuit in self.pursuits.waiting_for(source):
                    pursuit.record.note("shaken", self.agenda.clock())
                for ticket in source.given_up:
                    self.pursuits.renewals.release(ticket)
            else:
                self.agenda.failed(source, "handshake", as_ours(error))
                refused = isinstance(error, IncompatibleError)
                pause = RETRY_S if source.silence is None else SILENT_RETRY_S
                source.next_attempt = self.agenda.clock() + (REFUSED_RETRY_S if refused else pause)
                if refused:
                    self.pursuits.fail_all(source, as_ours(error))
                self.pursuits.note_end(source, asking)
            source.given_up.clear()  # released, or left to expire
            self.agenda.wake(source)
