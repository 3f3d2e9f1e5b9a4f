"""The sources of a target engine: handshakes, and leases from first use to the end.

The scheduler thread asks for the lease of a load itself where it knows the source, and otherwise
only reads states and adds or drops loads, under one lock. A background thread does what depends on
time, so that a busy step delays no renewal: it shakes hands, and renews. Of a ticket that was
asked for, whichever thread hears it takes the lease, so that a long step costs no lease either.
An engine that makes no step at all for ``progress_timeout_s`` loses the leases that it does not
read under.

A load goes through ``WAITING`` (its source's handshake, then its lease, are awaited), ``READY``
(the lease is ours, or the ranks may read before we know), ``LOADING`` (the ranks read) and
``LOADED`` (they have reported; its lease is no longer ours). Before that it may become ``FAILED``
with an error that says why.
"""

import enum
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from kvferry.connectors.pull.asks import Asks, PendingTicket
from kvferry.connectors.pull.groups import Filled, SourceGroups
from kvferry.connectors.pull.metadata import LoadSpec
from kvferry.connectors.pull.pace import PromptPace
from kvferry.connectors.pull.record import RequestRecord
from kvferry.connectors.pull.tickets import AcceptedTickets
from kvferry.control.client import ControlClient
from kvferry.control.connection import News
from kvferry.control.messages import MAX_ITEMS, Asked, LeaseAnswer, Renewed
from kvferry.control.tickets import Ticket, Transfer, check_incarnation
from kvferry.errors import (
    HandshakeNeededError,
    IncompatibleError,
    KVFerryError,
    LeaseError,
    LeaseRevokedError,
    LeaseTakenError,
    PeerEndedError,
    PeerLostError,
    StalledError,
    TicketError,
)
from kvferry.mailbox import Mailbox
from kvferry.topology.description import EngineDescription
from kvferry.topology.group import GroupGeometry
from kvferry.zeromq import is_loopback, split_address

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks while a load waits, so that we know whether we ran ourselves."""
RETRY_S = 0.5
"""Pause after a handshake or a renewal that failed."""
PENDING_RETRY_S = 0.01
"""Pause after a lease was not to be had yet: its source, of a release before leases could grow, is
copying the blocks to host memory."""
SILENT_RETRY_S = 2.0
"""Pause after an attempt to reach a source that is silent."""
PROMPT_S = 1.0
"""Seconds after which a source that owes an answer is not read from before it gives it: what such
loads hold, others could use."""
TIMES_ANEW = 3
"""How often a load whose lease is revoked while it is read begins anew."""
LAST_CHUNKS = 3
"""Chunks of a prompt that tell how much faster or slower it is computed than others were."""
NAMED_S = 600.0
"""Seconds for which a silent source is asked, and named as silent, after a load last named it: one
that no request names any more may have left for good. One that is not connected either is forgotten
after that time, unless it stands in ``peers``."""
REFUSED_RETRY_S = 10.0
"""Pause after a refused handshake: only a restart of the other side can change the answer."""

_ASKED_AGAIN = "; peers names it, so it is asked until it answers: start it, or correct peers"


class LoadState(enum.Enum):
    """Where a load stands."""

    WAITING = "waiting"
    READY = "ready"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Source:
    """One engine we load from, known by the address of its control channel."""

    address: str
    configured: bool
    """Whether it stands in ``peers``, so that we keep trying without a request."""
    description: EngineDescription | None = None
    groups: SourceGroups | None = None
    """Its KV cache groups, paired with ours; set with the description."""
    error: KVFerryError | None = None
    """Why it did not answer well when it was last asked; ``None`` if it did."""
    awaited: float | None = None
    """Clock reading since which it owes the answer to a Renew; ``None`` while it owes none."""
    failed_at: float = 0.0
    """Clock reading of that error."""
    handshake: "Future[EngineDescription] | None" = None
    """The handshake under way."""
    next_attempt: float = 0.0
    """Clock reading before which no handshake starts."""
    stale: bool = False
    """Whether a ticket or an answer spoke of another start of this engine than we know."""
    silent: str | None = None
    """The start of this engine for any answer of which a load has waited in vain: until there is
    one, further loads from that start do not wait. A ticket of another start is a sign of life."""
    silent_at: float = 0.0
    """Clock reading at which a load of that start last failed for it."""
    computes: PromptPace = field(default_factory=PromptPace)
    """How fast it computes prompts."""
    moves: float | None = None
    """Tokens per second that came from it while a load moved, of late; ``None`` while unknown."""
    given_up: list[Ticket] = field(default_factory=list)
    """Tickets whose leases were given up before the source knew us; told after the handshake."""
    loads: dict[str, "Load"] = field(default_factory=dict)
    """Lease id → the load that obtains or holds it."""
    used: float = 0.0
    """Clock reading at which a request last wanted something of it, or its connection lived."""
    due: float = math.inf
    """Clock reading at which it is to be looked at."""

    @property
    def name(self) -> str:
        """How people know it: its address, and its name once it told."""
        known = self.description
        return self.address if known is None else f"{known.engine_id} ({self.address})"

    def is_prompt(self, now: float) -> bool:
        """Whether it has answered well what it was asked, all but a moment ago."""
        return self.error is None and (self.awaited is None or now - self.awaited < PROMPT_S)

    @property
    def knows_us(self) -> bool:
        """Whether its present start and ours have shaken hands."""
        return self.description is not None and not self.stale


@dataclass(slots=True, eq=False)
class Load:
    """One request's load from one lease."""

    request_id: str
    ticket: Ticket
    source: Source
    deadline: float
    """Clock reading by which the source must have been reached."""
    started: float
    """Clock reading of its arrival."""
    record: RequestRecord
    """What is told of the request."""
    state: LoadState = LoadState.WAITING
    groups: SourceGroups | None = None
    """The source's KV cache groups; set before it is ``READY``."""
    pending: PendingTicket | None = None
    """Its ticket, where that was asked for."""
    error: KVFerryError | None = None
    rank_error: str = ""
    """What the first rank that failed said, and which one it was."""
    next_renewal: float = 0.0
    """Clock reading of the next Renew."""
    is_asked: bool = False
    """Whether a Renew for it is under way."""
    readable: int | None = 0
    """Tokens that can be read under its lease so far, as far as we know; ``None`` for all."""
    is_held: bool = False
    """Whether the lease was ours when its source last spoke of it."""
    is_early: bool = False
    """Whether it was admitted before all could be read."""
    grown: tuple[tuple[float, int], ...] = ()
    """The last times that the lease grew: clock reading, and tokens readable then. Before it grew:
    when it became known that it will."""
    chunk: int = 0
    """Tokens by which it grew last."""
    times_anew: int = 0
    """How often the ranks have begun anew, as the lease before was revoked."""
    moved_s: float = 0.0
    """Seconds for which the rank moved that was longest at it."""
    taken_until: float | None = None
    """Clock reading until which it waits for a lease that another target holds; ``None`` while
    nobody is known to."""
    cancelled: bool = False
    """Whether the ranks were told to give it up."""
    spec: LoadSpec | None = None
    """What the ranks were told last; ``None`` until they read."""
    filled: Filled | None = None
    """What it fills of our groups; set when the ranks begin to read."""
    progress: tuple[int, int] = (0, 0)
    """Bytes in place, and bytes in all, over all ranks."""
    progressed: float = field(kw_only=True)
    """Clock reading since when that is so."""

    @property
    def lease_id(self) -> str:
        """The lease it reads under."""
        return self.ticket.lease_id

    @property
    def wants_lease(self) -> bool:
        """Whether the lease is to be obtained, or to be renewed."""
        return self.state is not LoadState.FAILED and self.next_renewal != float("inf")

    @property
    def awaits_source(self) -> bool:
        """Whether it cannot go on before its source does something."""
        if self.state is LoadState.LOADING:
            return self.is_early and self.readable is not None
        return self.state is LoadState.WAITING

    @property
    def may_ask_again(self) -> bool:
        """Whether its source has revoked the lease before anything was read, and another one may
        follow: the prompt was preempted there, say.
        """
        is_revoked = isinstance(self.error, LeaseRevokedError)
        return self.pending is not None and self.state is LoadState.FAILED and is_revoked

    @property
    def may_begin_anew(self) -> bool:
        """Whether its source has revoked the lease while it was read and the prompt computed, and
        another one may follow.
        """
        is_revoked = isinstance(self.error, LeaseRevokedError)
        is_read = self.state is LoadState.LOADING and self.awaits_source
        return self.pending is not None and is_read and is_revoked and self.times_anew < TIMES_ANEW

    def whole_in(self, now: float) -> float:
        """Seconds until the source has computed the rest of the prompt, if it goes on as it did
        with its last chunks; infinity while nothing is known.
        """
        if not self.grown:
            return math.inf
        pace = self.source.computes
        (since, before), (last, tokens) = self.grown[0], self.grown[-1]
        rest, took = pace.seconds(tokens, self.ticket.num_tokens), pace.seconds(before, tokens)
        if rest is None or took is None:  # as if all tokens cost the same
            rest, took = self.ticket.num_tokens - tokens, tokens - before
            if not took:
                return math.inf
        if took:
            rest *= (last - since) / took
        return rest - (now - last)

    @property
    def is_renewable(self) -> bool:
        """Whether a Renew can be sent for it."""
        return self.wants_lease and self.source.knows_us


class Sources:
    """All sources of this engine, and the loads that need them. Thread-safe.

    What is done for one source costs what that one has, however many others there are.
    """

    def __init__(
        self,
        client: ControlClient,
        *,
        groups: Sequence[GroupGeometry],
        addresses: Sequence[str],
        renew_interval: Callable[[Ticket], float],
        handshake_timeout_s: float,
        progress_timeout_s: float,
        note_error: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
        mailbox: Callable[..., Mailbox] = Mailbox,
    ) -> None:
        """Starts the thread; handshakes begin with :meth:`describe`.

        Args:
            client: speaks for this engine; stays the caller's.
            groups: this engine's geometries, one per KV cache group.
            addresses: ``host:port`` of the sources to shake hands with at start.
            renew_interval: seconds between two renewals of a ticket's lease.
            handshake_timeout_s: seconds a load may wait for a source that cannot be reached or is
                starting. Where an answer is awaited on a connection that lives, the load waits.
            progress_timeout_s: seconds without progress, or without a step of the engine, after
                which a lease is given up.
            note_error: takes the kind and text of what goes wrong, for ``kvferry status``.
            clock: seconds that never run backwards.
            mailbox: makes the thread.
        """
        self._client = client
        self._groups = tuple(groups)
        self._renew_interval = renew_interval
        self._handshake_timeout_s = handshake_timeout_s
        self._progress_timeout_s = progress_timeout_s
        self._note_error = note_error
        self._clock = clock
        self._sources = {address: Source(address, configured=True) for address in addresses}
        self._loads: dict[str, Load] = {}
        """All loads of all sources, by lease."""
        self._ours: EngineDescription | None = None
        self._news: list[EngineDescription] = []
        self._gone: dict[str, str] = {}
        """Engine id → the start of it that is forgotten, of which the ranks were not told."""
        self._dues: list[tuple[float, int, Source]] = []
        """A heap: which source is to be looked at when. One that was planned anew stands there
        more than once, and only its ``due`` counts."""
        self._numbers = itertools.count()
        self._sleeps_until = math.inf
        """Clock reading of the next turn, if nothing wakes the thread before."""
        self._lock = threading.RLock()  # an answer may be there before who asks has let go
        self._stepped = clock()
        """Clock reading of the engine's last step, or of what it did between two steps."""
        self._asks = Asks(
            client,
            lock=self._lock,
            patience_s=handshake_timeout_s,
            clock=clock,
            note_error=note_error,
            on_answer=self._ask_answered,
            on_ticket=self._ticket_came,
        )
        client.listen(self._told)
        self._thread = mailbox("sources", self._turn, survives=False)
        self._thread.start()  # its turn asks it whether it ran

    # ---- the scheduler thread -----------------------------------------------------------------

    def describe(self, ours: EngineDescription) -> None:
        """Sets what this engine tells its sources; from now on handshakes run.

        Those that were refused for what it said before run again at once.
        """
        with self._lock:
            self._ours = ours
            for source in self._sources.values():
                source.next_attempt = 0.0
                self._wake(source)
            self._thread.post(lambda: None)  # it may have been woken in vain before

    def stepped(self) -> None:
        """The engine makes a step, so that it can begin to read what it has leases of."""
        self._stepped = self._clock()

    def add(
        self,
        record: RequestRecord,
        ticket: Ticket,
        pending: PendingTicket | None = None,
        *,
        waits: bool = True,
    ) -> Load:
        """Begins to obtain the lease of ``ticket`` for a request, and notes how it goes. Where the
        ticket was asked for (``pending``), on any thread.

        Args:
            record: of the request.
            ticket: names the lease.
            pending: the ask by which it came.
            waits: whether the ranks must not read before the source has said that the lease is
                ours. A whole ticket that only this request was given needs no such word from a
                source that answers: should the lease have ended, the confirm says so.
        """
        now = self._clock()
        address = ticket.address
        with self._lock:
            source = self._source(address, now)
            known = source.description
            if known is not None and known.incarnation != ticket.incarnation:
                source.stale = True
            deadline = now + self._handshake_timeout_s
            load = Load(
                record.request_id,
                ticket,
                source,
                deadline,
                now,
                record,
                pending=pending,
                progressed=now,
            )
            if pending is not None:
                pending.ticket = ticket
            if not source.knows_us:
                record.note("unknown", now)
            self._loads[load.lease_id] = source.loads[load.lease_id] = load
            if source.silent == ticket.incarnation:
                source.silent_at = now
                self._fail(load, _silent(source))
            elif source.silent is not None:
                source.next_attempt = now
            elif load.is_renewable:
                waits = waits or not (source.is_prompt(now) and self._client.is_connected(address))
                self._ask(source, [load], now)
                self._plan(source, now + LOOK_S)
                if not waits and load.state is LoadState.WAITING:
                    self._taken(load)
                return load
            self._wake(source)
        return load

    def ask(
        self,
        record: RequestRecord,
        transfer: Transfer,
        tickets: AcceptedTickets,
        lost: str = "",
    ) -> PendingTicket:
        """Begins to ask for the ticket of a request that its source was sent as well; once
        ``tickets`` has accepted it, for its lease. That of the lease ``lost`` is of no use.
        """
        with self._lock:
            now = self._clock()
            source = self._source(transfer.address, now)
            pending = self._asks.add(record, transfer, tickets, lost)
            if source.knows_us:
                self._send_asks(source, now)
            else:
                record.note("unknown", now)
            self._wake(source)
        return pending

    def _source(self, address: str, now: float) -> Source:
        """A source that somebody wants something of."""
        source = self._sources.get(address)
        if source is None:
            source = self._sources[address] = Source(address, configured=False)
        source.used = now
        return source

    def drop_ask(self, pending: PendingTicket) -> Load | None:
        """Nobody wants a ticket any more: if it comes, it is given back.

        Returns:
            What goes for its lease, if it has come.
        """
        with self._lock:
            pending.is_wanted = False
            return self.load_of(pending)

    def load_of(self, pending: PendingTicket) -> Load | None:
        """What goes for the lease of a ticket that was asked for, once that has come."""
        with self._lock:
            return None if pending.ticket is None else self._loads.get(pending.ticket.lease_id)

    def refuse_ask(
        self, pending: PendingTicket, error: KVFerryError, kind: str = "load"
    ) -> Load | None:
        """A ticket is of no use, for an error of this kind.

        Returns:
            What goes for its lease, if it has come.
        """
        with self._lock:
            load, pending.ticket = self.load_of(pending), None
            self._asks.fail(pending, error, kind)
            return load

    def start(self, load: Load) -> None:
        """The ranks begin to read; the lease is renewed until :meth:`drop`.

        Also where the lease was lost a moment ago: the ranks will be told so by their confirm, and
        until they have reported, nothing may take the load for one that nobody reads.
        """
        with self._lock:
            load.progressed = self._clock()
            load.state = LoadState.LOADING
            load.record.note("reading", load.progressed)

    def admit_early(self, load: Load, *, waits: bool) -> bool:
        """Makes a load ``READY`` although its source still computes the prompt, and says so.

        Args:
            load: that waits.
            waits: whether to do so as late as all but the last chunk can be moved by the time when
                the source is done, and not at once.
        """
        with self._lock:
            readable, source = load.readable, load.source
            if load.state is not LoadState.WAITING or not load.is_held or readable is None:
                return False
            if waits:
                now = self._clock()
                # All that can be read before it is whole. What is written by now is less: the rest
                # of that would be left for the end.
                tokens = load.ticket.num_tokens - load.chunk
                moved_in = tokens / source.moves if source.moves else 0.0
                if load.whole_in(now) > moved_in:
                    return False
            load.is_early = True
            self._taken(load)
            return True

    def moved(self, load: Load) -> None:
        """A load has ended well: notes how fast its tokens came."""
        with self._lock:
            filled = load.filled
            if filled is None or not load.moved_s:
                return
            tokens = load.ticket.num_tokens - filled.first_token
            pace, before = tokens / load.moved_s, load.source.moves
            # The mean of the seconds per token, so that a link which has become slower is believed
            # soon: a load that begins too late costs its client time, one too early only blocks.
            load.source.moves = pace if before is None else 2 / (1 / pace + 1 / before)

    def _taken(self, load: Load) -> None:
        load.state = LoadState.READY
        load.record.note("taken", self._clock())

    def refuse(self, load: Load, error: KVFerryError) -> None:
        """What the source lent does not serve this load; its lease waits for :meth:`release`."""
        with self._lock:
            self._fail(load, error)

    def drop(self, load: Load) -> None:
        """The ranks have reported the load; their Finishes have ended the lease."""
        with self._lock:
            load.state = LoadState.LOADED
            self._remove(load)

    def release(self, load: Load, *, keep: bool = False) -> None:
        """Gives up a lease under which no rank will read; the source may free the blocks. With
        ``keep`` it is left to others who have its ticket.
        """
        with self._lock:
            self._remove(load)
            if not load.source.knows_us:  # it would not listen to us
                if not keep:  # else it is as if we had never had it
                    load.source.given_up.append(load.ticket)
                    self._wake(load.source)
                return
        self._tell_released(load.ticket, keep=keep)

    def _tell_released(self, ticket: Ticket, *, keep: bool = False) -> None:
        leases = {ticket.lease_id: ticket.secret}
        self._client.release(ticket.address, ticket.incarnation, leases, keep=keep)

    def _remove(self, load: Load) -> None:
        self._loads.pop(load.lease_id, None)
        if load.source.loads.pop(load.lease_id, None) is not None:
            load.source.used = self._clock()

    def silent_peers(self) -> tuple[str, ...]:
        """The sources that are silent, by name and address; for any thread, and never waits."""
        since = self._clock() - NAMED_S
        return tuple(
            source.name
            for source in list(self._sources.values())
            if source.silent and source.silent_at > since
        )

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take_news` has something to say."""
        return bool(self._news or self._gone) or self._thread.defect is not None

    def take_news(self) -> tuple[list[EngineDescription], dict[str, str]]:
        """Sources whose handshake succeeded since the last call, and engine id → the start of it
        that was forgotten; who is met again was forgotten before.

        Raises:
            EngineError: the thread has died of a defect; no lease is obtained or renewed any more.
        """
        self._thread.check()
        with self._lock:
            news, self._news = self._news, []
            gone, self._gone = self._gone, {}
            return news, gone

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.close()

    # ---- the background thread ----------------------------------------------------------------

    def _turn(self) -> float | None:
        """Does what is due; returns the seconds until something is, ``None`` until woken."""
        with self._lock:
            now = self._clock()
            self._sleeps_until = math.inf if self._ours is None else 0.0  # nobody need wake us
            if self._ours is None:
                return None
            for source in list(self._take_due(now)):
                self._shake_hands(source, self._ours, now)
                self._renew(source, now)
                self._send_asks(source, now)
                self._expire(source, now)
                self._plan_next(source, now)
            self._sleeps_until = self._dues[0][0] if self._dues else math.inf
            return max(self._sleeps_until - now, 0.001) if self._dues else None

    def _take_due(self, now: float) -> Iterator[Source]:
        """The sources that are to be looked at now; each is to be planned anew."""
        while self._dues and (self._dues[0][0] <= now or self._dues[0][0] != self._dues[0][2].due):
            due, _, source = heapq.heappop(self._dues)
            if due == source.due:
                source.due = math.inf
                yield source

    def _wake(self, source: Source) -> None:
        """Has the thread look at a source now."""
        self._plan(source, 0.0)

    def _plan(self, source: Source, when: float) -> None:
        """Has the thread look at a source by then."""
        if when < source.due:
            source.due = when
            heapq.heappush(self._dues, (when, next(self._numbers), source))
            if when < self._sleeps_until:
                self._sleeps_until = when
                self._thread.post(lambda: None)

    def _plan_next(self, source: Source, now: float) -> None:
        """Plans the next look at a source, or forgets it."""
        waits = self._asks.wants(source.address)
        waits = waits or any(load.awaits_source for load in source.loads.values())
        due = [now + LOOK_S] if waits else []
        due += [load.next_renewal for load in source.loads.values() if load.is_renewable]
        if source.knows_us:
            due += self._asks.due(source.address)
        if source.handshake is None and self._needs_handshake(source, now):
            due.append(source.next_attempt)
        if due:
            self._plan(source, max(min(due), now + 0.001))
        elif not (source.configured or source.loads or source.handshake):
            self._plan_end(source, now)

    def _plan_end(self, source: Source, now: float) -> None:
        """Forgets a source that nobody has wanted anything of for long, unless it is connected."""
        if now >= source.used + NAMED_S and self._client.is_connected(source.address):
            source.used = now
        until = max(source.used, source.silent_at if source.silent else 0.0) + NAMED_S
        if now < until:
            self._plan(source, until)
            return
        if self._sources.get(source.address) is not source:
            return  # it was forgotten before, and spoken of once more
        del self._sources[source.address]
        if source.description is not None:
            self._forget(source.description)

    def _forget(self, description: EngineDescription) -> None:
        """A start of a source is gone: nothing is kept of it, here and at the ranks. One that has
        another address too is kept.
        """
        name = description.engine_id, description.incarnation
        others = [one.description for one in self._sources.values() if one.description is not None]
        if name not in [(one.engine_id, one.incarnation) for one in others]:
            self._gone[description.engine_id] = description.incarnation
            self._client.forget(description)

    def _needs_handshake(self, source: Source, now: float) -> bool:
        if source.knows_us:
            return False
        if source.silent is not None and now < source.silent_at + NAMED_S:
            return True
        wanted = source.configured or source.given_up or self._asks.wants(source.address)
        return bool(wanted) or any(load.wants_lease for load in source.loads.values())

    def _shake_hands(self, source: Source, ours: EngineDescription, now: float) -> None:
        if source.handshake is not None or not self._needs_handshake(source, now):
            return
        if now < source.next_attempt:
            if isinstance(source.error, IncompatibleError):
                self._fail_all(source, source.error)
            return
        source.handshake = self._client.handshake(source.address, ours)
        asking = self._waiting_for(source)
        source.handshake.add_done_callback(partial(self._shaken, source, asking))

    def _shaken(
        self, source: Source, asking: list[Load], future: "Future[EngineDescription]"
    ) -> None:
        """A handshake ended; runs on the thread that took the answer."""
        with self._lock:
            source.handshake = None
            error = future.exception()
            if error is None:
                before, now = source.description, self._clock()
                source.description, source.error, source.stale = future.result(), None, False
                if before is not None and before.engine_id != source.description.engine_id:
                    self._forget(before)  # another engine has its address; ranks see new starts
                source.used = now
                source.silent = None
                # A source that says again and again that we have not is not asked at once.
                source.next_attempt = self._clock() + RETRY_S
                source.groups = SourceGroups.of(source.description, self._groups)
                self._news.append(source.description)
                for load in self._waiting_for(source):
                    load.record.note("shaken", self._clock())
                for ticket in source.given_up:
                    self._tell_released(ticket)
            else:
                self._failed(source, "handshake", _as_ours(error))
                refused = isinstance(error, IncompatibleError)
                pause = SILENT_RETRY_S if source.silent else RETRY_S
                source.next_attempt = self._clock() + (REFUSED_RETRY_S if refused else pause)
                if refused:
                    self._fail_all(source, _as_ours(error))
                self._note_end(source, asking)
            source.given_up.clear()  # told, or left to expire
            self._wake(source)

    def _failed(self, source: Source, what: str, error: KVFerryError) -> None:
        """Remembers what went wrong with a source; tells of it once, not at every attempt."""
        if str(error) != str(source.error):
            text = f"{what} with {source.address}: {type(error).__name__}: {error}"
            # A load that fails for it has a line of its own; a peer may have no load yet.
            is_told = source.configured or what == "renewal"
            told = logging.WARNING if is_told else logging.INFO
            logger.log(told, "%s%s", text, _ASKED_AGAIN if _is_absent(source, error) else "")
            self._note_error(what, text)
        source.error = error
        source.failed_at = self._clock()

    def _send_asks(self, source: Source, now: float) -> None:
        if source.knows_us and source.description is not None:
            self._asks.send(source.address, source.description.incarnation, now)

    def _ticket_came(self, pending: PendingTicket, text: str) -> None:
        """A source has lent what it was asked for; with the lock held, on any thread. The engine's
        next step may be far, and the lease would end meanwhile, so it is taken here.
        """
        tickets = pending.tickets
        try:
            ticket = tickets.read_asked(text, pending.transfer)
            if not pending.is_wanted:
                self._tell_released(ticket)
            elif ticket.shared or ticket.lease_id != pending.lost:
                ticket = tickets.claim(ticket, pending.request_id)
                self.add(pending.record, ticket, pending, waits=not ticket.whole)
        except TicketError as error:
            self._asks.fail(pending, error, "ticket")

    def _ask_answered(self, address: str, error: KVFerryError | None) -> None:
        """A source has answered an ask, or has not; with the lock held."""
        source = self._sources.get(address)
        if source is None:
            return  # it answers what nobody wants to know any more
        if error is None:
            source.error = None
        else:
            self._failed(source, "ask", error)
            source.stale |= isinstance(error, HandshakeNeededError)
        self._wake(source)

    def _renew(self, source: Source, now: float) -> None:
        """Sends one Renew for every lease at a source if any of them is due."""
        loads = [load for load in source.loads.values() if load.is_renewable]
        if any(load.next_renewal <= now for load in loads):
            self._ask(source, loads, now)

    def _ask(self, source: Source, loads: Sequence[Load], now: float) -> None:
        """Takes or renews the leases of some loads from a source that knows us."""
        description = source.description
        assert description is not None  # it knows us
        fitting = []
        for load in loads:
            try:
                check_incarnation(load.ticket, description.incarnation)
                self._check_progress(load, now)
            except KVFerryError as error:
                self._give_up(load, error)
                if isinstance(error, StalledError):  # our connection would keep the lease
                    self._tell_released(load.ticket)
            else:
                fitting.append(load)
                load.groups = source.groups
                load.next_renewal = now + self._renew_interval(load.ticket)
                load.is_asked = True
                load.record.note("asked", now)
        if fitting and source.awaited is None:
            source.awaited = now
        for first in range(0, len(fitting), MAX_ITEMS):
            together = fitting[first : first + MAX_ITEMS]
            leases = {load.lease_id: load.ticket.secret for load in together}
            future = self._client.renew(source.address, description.incarnation, leases)
            future.add_done_callback(partial(self._renewed, source, together))

    def _check_progress(self, load: Load, now: float) -> None:
        """Raises StalledError if the ranks have long reported no progress, or, before they read,
        the engine has long made no step.
        """
        limit = self._progress_timeout_s
        if load.state is LoadState.LOADING:
            stood, what = now - load.progressed, "no rank has reported progress"
            if load.awaits_source:
                return  # for more to read: no progress is nobody's fault here
        else:  # time in which this thread did not run either is not charged
            stood = min(now - self._stepped, self._thread.awake_s)
            what = "the engine has made no step"
        if stood >= limit:
            error = StalledError(
                f"{what} for {stood:.0f} s (progress_timeout_s: {limit:g}); lease "
                f"{load.lease_id} is given up"
            )
            self._note_error("load", f"request {load.request_id}: {error}")
            raise error

    def _renewed(self, source: Source, loads: list[Load], future: "Future[Renewed]") -> None:
        """A Renew was answered; runs on the thread that took the answer."""
        with self._lock:
            for load in loads:
                load.is_asked = False
            source.awaited = None
            error = future.exception()
            if error is None:
                source.error = None
                for load in loads:
                    self._answered(load, future.result())
            else:
                # The lease may live on: ask again soon, where the source has forgotten us as soon
                # as it knows us again. The load's deadline bounds it.
                self._failed(source, "renewal", _as_ours(error))
                forgotten = isinstance(error, HandshakeNeededError)
                source.stale |= forgotten
                self._note_end(source, loads)
                for load in loads:
                    if load.wants_lease:
                        load.next_renewal = self._clock() + (0.0 if forgotten else RETRY_S)
                self._wake(source)

    def _told(self, address: str, news: News) -> None:
        """A source tells of leases that have grown, or were revoked, or of transfers that we asked
        for; on any thread.
        """
        with self._lock:
            if isinstance(news, Asked):
                self._asks.told(address, news)
                return
            loads = [self._loads[lease_id] for lease_id in news.states if lease_id in self._loads]
            for load in loads:
                if load.source.address == address:
                    self._answered(load, news)

    def _answered(self, load: Load, renewed: Renewed) -> None:
        if load.lease_id not in self._loads:
            return  # dropped or released while the Renew was under way, which ended the lease
        answer = renewed.states[load.lease_id]
        if answer is LeaseAnswer.HELD:
            self._held(load, renewed)
        elif answer is LeaseAnswer.PENDING:
            load.next_renewal = self._clock() + PENDING_RETRY_S
            self._plan(load.source, load.next_renewal)
        elif answer is LeaseAnswer.TAKEN and self._may_pass_on(load):
            load.next_renewal = self._clock() + RETRY_S
            self._plan(load.source, load.next_renewal)
        else:
            self._give_up(load, _lost_lease(load.ticket, answer))

    def _held(self, load: Load, renewed: Renewed) -> None:
        """The lease is ours, and so much can be read under it; messages may overtake each other."""
        now, before = self._clock(), load.readable
        load.is_held, load.deadline = True, now + self._handshake_timeout_s
        written = renewed.written.get(load.lease_id)
        if written == 0 and not load.grown:
            load.grown = ((now, 0),)  # it has begun to be computed, or a little before
        if before is None or (written is not None and written <= before):
            return
        if tables := renewed.tables.get(load.lease_id):
            load.ticket = replace(load.ticket, block_ids=tables)
        # What is told unasked has just been written; an answer may speak of what was long ago.
        if written is not None and renewed.id == 0:
            load.chunk = written - before
            since, first = load.grown[-1] if load.grown else (now, 0)
            if first:  # of the first chunk it is not known when it began
                load.source.computes.note(first, written, now - since)
            load.grown = (*load.grown[-LAST_CHUNKS:], (now, written))
        if load.is_early:
            load.progressed = now
        load.readable = written  # after the tables: other threads look at it first
        if written is None and load.state is LoadState.WAITING:
            self._taken(load)

    def _may_pass_on(self, load: Load) -> bool:
        """Whether the holder of a lease may have died, and its source not have noticed.

        The processes of a server do not end at the same moment, and the kernel of a host that has
        gone says nothing. Who still holds it a lease duration later has renewed it, and lives.
        """
        now = self._clock()
        if load.taken_until is None:
            load.taken_until = now + load.ticket.lease_duration_s
        return now < load.taken_until

    def _give_up(self, load: Load, error: KVFerryError) -> None:
        """There is nothing left to renew."""
        load.next_renewal = float("inf")
        # While the ranks read, their confirm decides: a lost lease fails every one of them. Where
        # they wait for more to read, nobody would ever ask for it.
        if load.state is not LoadState.LOADING or load.awaits_source:
            self._fail(load, error)

    def _expire(self, source: Source, now: float) -> None:
        has_run = self._thread.awake_s >= self._handshake_timeout_s
        self._asks.expire(source.address, now, has_run, self._owes_answer)
        if not has_run:
            return  # answers may have come since
        for load in list(source.loads.values()):
            if load.error is not None or not load.awaits_source or now < load.deadline:
                continue
            if source.error is None or source.handshake is not None or load.is_asked:
                continue  # an answer is awaited: whoever is gone shows in the connection
            self._fail(
                load,
                PeerLostError(
                    f"engine {load.ticket.engine_id!r} at {source.address} did not grant lease "
                    f"{load.lease_id} within {self._handshake_timeout_s:g} s "
                    f"(handshake_timeout_s); last error: {source.error}"
                ),
            )
            self._note_silence(source, load.ticket.incarnation)

    def _owes_answer(self, pending: PendingTicket) -> bool:
        """Whether a source is asked for a ticket, or asked to know us, and all is well so far."""
        source = self._sources[pending.transfer.address]
        is_asked = pending.is_asked or source.handshake is not None
        return is_asked and source.error is None

    def _note_end(self, source: Source, asking: list[Load]) -> None:
        """Where the source's process has ended, nobody waits for what it lent before that."""
        if isinstance(source.error, PeerEndedError):
            self._asks.fail_all(source.address, source.error)
            for incarnation in {load.ticket.incarnation for load in asking}:
                self._note_silence(source, incarnation)

    def _note_silence(self, source: Source, incarnation: str) -> None:
        """A load has waited in vain: where nothing at all came back, the others do not wait on."""
        if not isinstance(source.error, PeerLostError):
            return
        source.silent, source.silent_at, source.stale = incarnation, self._clock(), True
        for load in self._waiting_for(source):
            if load.ticket.incarnation == incarnation:
                self._fail(load, _silent(source))

    def _fail_all(self, source: Source, error: KVFerryError) -> None:
        self._asks.fail_all(source.address, error)
        for load in self._waiting_for(source):
            self._fail(load, error)

    def _waiting_for(self, source: Source) -> list[Load]:
        return [load for load in source.loads.values() if load.awaits_source]

    def _fail(self, load: Load, error: KVFerryError) -> None:
        is_read = load.state is LoadState.LOADING
        load.error = error
        if load.may_begin_anew:
            return
        if isinstance(error, LeaseRevokedError) and load.pending is not None and not is_read:
            load.error, load.state = error, LoadState.FAILED
            if load.pending.is_wanted and self.load_of(load.pending) is load:
                self._remove(load)
                load.pending.tickets.retire(load.ticket)
                self._asks.add_again(load.pending)  # another ticket may come
                self._wake(load.source)
            return
        host, _ = split_address(load.source.address)
        if isinstance(error, PeerEndedError) and is_loopback(host):
            error = PeerEndedError(
                f"{error}; engine {load.ticket.engine_id!r} has ended, or it runs on another "
                f"machine and its host is {host}, which leads each machine to itself: set it to an "
                "address that this machine reaches"
            )
        self._note_error("load", f"request {load.request_id}: {type(error).__name__}: {error}")
        load.record.fail(self._clock(), f"{type(error).__name__}: {error}")
        load.error = error
        if load.state is not LoadState.LOADING:  # else the ranks are told, and report
            load.state = LoadState.FAILED


def _is_absent(source: Source, error: KVFerryError) -> bool:
    """Whether a peer that we were told of was never there."""
    return source.configured and source.description is None and isinstance(error, PeerLostError)


def _silent(source: Source) -> PeerLostError:
    if isinstance(source.error, PeerEndedError):
        return source.error
    return PeerLostError(f"{source.address} has been silent: {source.error}")


def _lost_lease(ticket: Ticket, answer: LeaseAnswer) -> LeaseError:
    if answer is LeaseAnswer.TAKEN:
        return LeaseTakenError(
            f"lease {ticket.lease_id} of engine {ticket.engine_id!r} is held by another target"
        )
    return LeaseRevokedError(
        f"lease {ticket.lease_id} of engine {ticket.engine_id!r} has ended; its blocks may have "
        "been reused"
    )


def _as_ours(error: BaseException) -> KVFerryError:
    """Errors of the client are ours; anything else is a defect that must not be swallowed."""
    if not isinstance(error, KVFerryError):
        raise error
    return error
