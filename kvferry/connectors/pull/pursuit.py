"""The states of a load and of a pursuit. A pursuit obtains one lease for the load of one request.

A pursuit may change on any thread, by the answers of its source; the thread must hold the lock of
:class:`~kvferry.connectors.pull.agenda.Agenda`. Code that decides by a pursuit reads one
:class:`Standing`, an immutable value; every change replaces the value.

=========  =======================================================================================
pursuit    event → next
=========  =======================================================================================
ASKED      the source will lend → COMING; the source lends → LEASING; the source lends nothing →
           DENIED; the deadline passes, the source has ended, the ticket is refused → LOST; no load
           waits any more → UNWANTED
COMING     the source lends → LEASING; the source lends nothing → DENIED; the source knows nothing
           of the request any more → ASKED; the source was started again, the ticket is refused →
           LOST; no load waits any more → UNWANTED
UNWANTED   the source lends → the lease is given back; any other end of the wait → forgotten
LEASING    the prompt is whole → HELD; a number of its tokens is written → GROWING; another target
           holds the lease → CONTENDED; the lease is not available yet → LEASING; the lease ends,
           the deadline passes, the source is silent, the engine makes no step, refused → LOST
CONTENDED  as LEASING; another target still holds the lease after one lease duration → LOST
GROWING    more tokens are written → GROWING; the prompt is whole → HELD; the lease ends, the
           deadline passes, the source is silent, refused → LOST
HELD       before the ranks read: the lease ends, refused → LOST. While the ranks read: the lease
           ends → HELD, without further renewals, as the ranks' confirm decides
LOST       if the lease was revoked, its ticket was asked for, and the ranks did not read a whole
           prompt: the successor of this pursuit is ASKED
=========  =======================================================================================

A pursuit begins as ASKED, or as LEASING if the ticket came with the request. If another target
takes over the lease of a GROWING or HELD pursuit, the state stays for one lease duration; then the
lease counts as ended. A pursuit is forgotten when its ranks have reported, or when no rank will
read.

A load changes on the scheduler's thread alone.

==========  ======================================================================================
load        event → next
==========  ======================================================================================
WAITING     the pursuit is HELD, or trusted, or GROWING and admitted early → READY; the pursuit is
            DENIED, or all tokens are in the local cache → dropped; the pursuit is LOST → WAITING
            for the successor, or FAILED without a successor
READY       blocks are allocated → READING; no blocks are needed → the lease is given back; the
            pursuit is LOST → as WAITING
READING     the pursuit is LOST while GROWING: with a successor, at most :data:`TIMES_ANEW` times →
            RESTARTING, else CANCELLING; a rank fails while GROWING, the whole prompt lacks a block
            that the load needs, the weights change, the engine lets its caches go → CANCELLING; the
            request ends → ABORTING; all ranks succeed → LOADED
RESTARTING  the successor has a lease of the same prompt → READING; the successor will have no
            lease, or has a lease of another prompt, or obtains none within the progress timeout, a
            rank fails, the weights change, the engine lets its caches go → CANCELLING; the request
            ends → ABORTING
CANCELLING  the request ends → ABORTING
ABORTING    the ranks report
==========  ======================================================================================

In READING to ABORTING the ranks read, or are told to give up, and the request holds its blocks.
After all ranks have reported, a load that is whole is LOADED; any other load is FAILED and dropped.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kvferry.connectors.pull.groups import Filled, SourceGroups
from kvferry.connectors.pull.metadata import LoadSpec
from kvferry.connectors.pull.pace import PromptPace, SourcePace
from kvferry.control.tickets import Ticket, TransferId
from kvferry.errors import KVFerryError, LeaseRevokedError
from kvferry.observe.records import RequestRecord
from kvferry.topology.description import EngineDescription

PROMPT_S = 1.0
"""Seconds for which a source may owe an answer and still be read from before the answer comes.
Loads from a slower source wait, as other requests can use their blocks meanwhile."""
TIMES_ANEW = 3
"""Largest number of restarts of a load whose lease is revoked while ranks read."""
LAST_CHUNKS = 3
"""Number of a prompt's last chunks from which its speed is estimated, compared with other
prompts."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Mark of an engine from which a load has waited in vain for any answer. Until an answer comes,
    further loads from the same incarnation do not wait. A ticket of another incarnation is a sign
    of life.
    """

    incarnation: str
    """The silent incarnation (one start of the engine)."""
    since: float
    """Clock reading at which a load from this incarnation last failed for the silence."""


@dataclass(slots=True, eq=False)
class Source:
    """An engine from which this engine loads, known by the address of its control channel."""

    address: str
    description: EngineDescription | None = None
    groups: SourceGroups | None = None
    """KV cache groups of the source, paired with ours; set together with the description."""
    error: KVFerryError | None = None
    """Error of the last request to this source; ``None`` if this request succeeded."""
    awaited: float | None = None
    """Clock reading since which the source owes the answer to a Renew; ``None`` if no Renew is
    unanswered."""
    handshake: "Future[EngineDescription] | None" = None
    """The handshake under way."""
    next_attempt: float = 0.0
    """Clock reading before which no handshake starts."""
    stale: bool = False
    """Whether a ticket or an answer named another incarnation of this engine than we know."""
    silence: Silence | None = None
    """The silent incarnation; ``None`` if the source answers, or no load has waited."""
    pace: SourcePace = field(default_factory=SourcePace)
    """Speed at which the source computes prompts, and at which prompts move from the source."""
    given_up: list[Ticket] = field(default_factory=list)
    """Tickets whose leases were given up before the source knew us; released after the
    handshake."""
    pursuits: dict[str, "Pursuit"] = field(default_factory=dict)
    """Lease id → the pursuit of this lease."""

    @property
    def name(self) -> str:
        """Name of the source in messages: its address, and its engine id once it is known."""
        known = self.description
        return self.address if known is None else f"{known.engine_id} ({self.address})"

    def is_prompt(self, now: float) -> bool:
        """Whether the source has answered its requests well, except requests of the last
        :data:`PROMPT_S`.
        """
        return self.error is None and (self.awaited is None or now - self.awaited < PROMPT_S)

    @property
    def knows_us(self) -> bool:
        """Whether the present incarnations of the source and of this engine have shaken hands."""
        return self.description is not None and not self.stale


class PursuitState(enum.Enum):
    """State of the pursuit of a lease; see the table at the top of this module."""

    ASKED = "asked"
    COMING = "coming"
    UNWANTED = "unwanted"
    DENIED = "denied"
    LEASING = "leasing"
    CONTENDED = "contended"
    GROWING = "growing"
    HELD = "held"
    LOST = "lost"


_ASKING = (PursuitState.ASKED, PursuitState.COMING, PursuitState.UNWANTED)
"""States before the ticket has come."""
_OPEN = (PursuitState.LEASING, PursuitState.CONTENDED, PursuitState.GROWING)
"""States in which a source has not yet lent all of a prompt."""


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a pursuit and its data, as one immutable value."""

    state: PursuitState
    ticket: Ticket | None = None
    """Ticket of the lease, with the latest block tables of the source; ``None`` before the ticket
    has come."""
    written: int | None = 0
    """Number of readable tokens under the lease so far; ``None`` for all."""
    is_trusted: bool = False
    """Whether the ranks may read before the source has confirmed our lease."""
    contended_until: float | None = None
    """Clock reading until which another target may hold the lease; ``None`` if no other target
    does."""
    reason: str = ""
    """Reason why the source lends nothing, if the source has given a reason."""
    error: KVFerryError | None = None
    """Error by which the lease was lost."""

    @property
    def is_asked_for(self) -> bool:
        """Whether the ticket is awaited."""
        return self.state in _ASKING

    @property
    def is_whole(self) -> bool:
        """Whether the ranks may read all of the prompt."""
        if self.is_trusted:
            return self.state is not PursuitState.LOST
        return self.state is PursuitState.HELD


@dataclass(slots=True)
class Growth:
    """The last times at which a lease grew, from which we estimate when its prompt will be
    whole.
    """

    times: tuple[tuple[float, int], ...] = ()
    """Pairs of a clock reading and the number of readable tokens then. The first pair, with 0
    tokens, is the time at which we learned that the lease will grow."""
    chunk: int = 0
    """Number of tokens by which the lease grew last."""

    def begin(self, now: float) -> None:
        """Notes the start of the prompt's computation: now, or a little before."""
        if not self.times:
            self.times = ((now, 0),)

    def note(self, now: float, before: int, written: int, pace: PromptPace) -> None:
        """Notes that the tokens up to ``written`` have just been computed, also in ``pace``."""
        self.chunk = written - before
        since, first = self.times[-1] if self.times else (now, 0)
        if first:  # the start of the first chunk is unknown
            pace.note(first, written, now - since)
        self.times = (*self.times[-LAST_CHUNKS:], (now, written))

    def whole_in(self, now: float, num_tokens: int, pace: PromptPace) -> float:
        """Seconds until the source has computed the rest of a prompt of ``num_tokens``, if the
        source goes on at the speed of the last chunks; infinity while nothing is known.
        """
        if not self.times:
            return math.inf
        (since, before), (last, tokens) = self.times[0], self.times[-1]
        rest, took = pace.seconds(tokens, num_tokens), pace.seconds(before, tokens)
        if rest is None or took is None:  # assume equal costs of all tokens
            rest, took = num_tokens - tokens, tokens - before
            if not took:
                return math.inf
        if took:
            rest *= (last - since) / took
        return rest - (now - last)


@dataclass(slots=True)
class Ask:
    """The state of asking a source for a ticket."""

    transfer: TransferId
    """Transfer that names the request at the source; the router sent the request to the source as
    well."""
    looked: float
    """Clock reading of the last look at the deadline of the pursuit."""
    lost: str = ""
    """Id of the earlier, revoked lease for this transfer; its ticket is of no use any more."""
    is_owed: bool = False
    """Whether the source owed an answer at the last look."""
    incarnation: str = ""
    """Incarnation of the source that knows the request; empty before."""


@dataclass(slots=True, eq=False)
class Pursuit:
    """The pursuit of one lease for one request. Its methods are events; the caller must hold the
    lock of :class:`~kvferry.connectors.pull.agenda.Agenda`.
    """

    record: RequestRecord
    """The record of the request."""
    source: Source
    standing: Standing
    """State and data; every change replaces the value, so any thread may read the attribute."""
    deadline: float
    """Clock reading by which the source must have been reached. For a requested ticket, the source
    must know of the request by then; infinite once it does, and time in which the source owes an
    answer is not charged."""
    progressed: float
    """Clock reading of the last progress of the reading ranks."""
    ask: Ask | None = None
    """State of asking for the ticket; ``None`` if the ticket came with the request."""
    groups: SourceGroups | None = None
    """The source's KV cache groups; set before the lease can be obtained."""
    due: float = 0.0
    """Clock reading of the next Ask or Renew; infinite if there will be none."""
    is_asked: bool = False
    """Whether an Ask or a Renew is under way."""
    is_read: bool = False
    """Whether the ranks read under the lease."""
    growth: Growth = field(default_factory=Growth)
    successor: "Pursuit | None" = None
    """The pursuit of the next lease, if the lease of this pursuit was revoked; set before this
    pursuit is lost."""

    @property
    def request_id(self) -> str:
        """Id of the loading request."""
        return self.record.request_id

    @property
    def ticket(self) -> Ticket:
        """Ticket of the lease, which must have come, with the latest block tables of the source."""
        assert self.standing.ticket is not None
        return self.standing.ticket

    @property
    def lease_id(self) -> str:
        """Id of the lease; its ticket must have come."""
        return self.ticket.lease_id

    @property
    def wants_lease(self) -> bool:
        """Whether the lease is to be obtained or renewed."""
        is_open = self.standing.state in _OPEN or self.standing.state is PursuitState.HELD
        return is_open and self.due != math.inf

    @property
    def is_renewable(self) -> bool:
        """Whether a Renew can be sent."""
        return self.wants_lease and self.source.knows_us

    @property
    def awaits_source(self) -> bool:
        """Whether the load cannot go on before the source does something."""
        return self.standing.state in _OPEN and not self.standing.is_trusted

    def is_revoked_early(self, error: KVFerryError) -> bool:
        """Whether the source has revoked a lease before the ranks read a whole prompt, and may
        grant another lease: the source may have preempted the prompt, for example.
        """
        is_confirmed = self.is_read and self.standing.written is None  # the confirm decides then
        return self.ask is not None and isinstance(error, LeaseRevokedError) and not is_confirmed

    def come(self, incarnation: str) -> None:
        """The source, in this incarnation, knows of the request, and will lend or deny."""
        assert self.ask is not None  # the source was asked
        self.deadline, self.ask.incarnation = math.inf, incarnation
        if self.standing.state is PursuitState.ASKED:
            self._stand(state=PursuitState.COMING)

    def await_again(self, deadline: float) -> None:
        """The source does not know the request any more, or cannot be asked."""
        if self.deadline == math.inf:
            self.deadline = deadline
            if self.standing.state is PursuitState.COMING:
                self._stand(state=PursuitState.ASKED)

    def lend(self, ticket: Ticket, deadline: float) -> None:
        """The ticket has come."""
        self.deadline, self.due, self.is_asked = deadline, 0.0, False
        self._stand(
            state=PursuitState.LEASING,
            ticket=ticket,
            written=0,
            is_trusted=False,
            contended_until=None,
        )

    def deny(self, reason: str) -> None:
        """The source lends nothing."""
        self._stand(state=PursuitState.DENIED, reason=reason)

    def unwant(self) -> None:
        """No load waits for the ticket any more."""
        self._stand(state=PursuitState.UNWANTED)

    def trust(self) -> None:
        """The ranks may read before the source has confirmed our lease."""
        self._stand(is_trusted=True)

    def hold(
        self,
        now: float,
        written: int | None,
        tables: Sequence[Sequence[int]],
        note: bytes = b"",
        *,
        is_news: bool,
    ) -> bool:
        """The lease is ours, and ``written`` tokens can be read; messages may overtake each other.

        Args:
            now: clock reading.
            written: number of readable tokens; ``None`` for all.
            tables: block ids of each KV cache group, if the source has told them.
            note: the source's note; empty if the ticket has it, or if there is none.
            is_news: whether the source sent the message unasked, just after the last of these
                tokens was written. An answer to a Renew may tell of tokens written long ago.

        Returns:
            Whether all tokens can be read now, and could not before.
        """
        if self.standing.contended_until is not None:
            self._stand(contended_until=None)
        before = self.standing
        if before.state not in _OPEN:
            return False
        if written == 0:
            self.growth.begin(now)
        is_growing = before.state is PursuitState.GROWING
        if written is not None and is_growing and written <= (before.written or 0):
            return False
        if written and is_news:
            self.growth.note(now, before.written or 0, written, self.source.pace.computes)
        if is_growing:
            self.progressed = now
        news = ({"block_ids": tables} if tables else {}) | ({"note": note} if note else {})
        self._stand(
            state=PursuitState.HELD if written is None else PursuitState.GROWING,
            ticket=replace(self.ticket, **news) if news else self.ticket,
            written=written,
        )
        return written is None

    def contend(self, now: float) -> bool:
        """Another target holds the lease; returns whether the lease may still be passed on to us.

        The holder may have died without the source's notice: the processes of a server do not end
        at the same moment, and the kernel of a lost host sends nothing. If the holder still has the
        lease after one lease duration, the holder has renewed it, and lives.
        """
        until, state = self.standing.contended_until, self.standing.state
        if until is None:
            until = now + self.ticket.lease_duration_s
            is_leasing = state is PursuitState.LEASING
            state = PursuitState.CONTENDED if is_leasing else state
            self._stand(state=state, contended_until=until)
        return now < until

    def lose(self, error: KVFerryError) -> None:
        """The lease cannot be obtained, or is of no use."""
        self._stand(state=PursuitState.LOST, error=error)

    def _stand(self, **changes: Any) -> None:
        self.standing = dataclasses.replace(self.standing, **changes)


class LoadState(enum.Enum):
    """State of a load; see the table at the top of this module."""

    WAITING = "waiting"
    READY = "ready"
    READING = "reading"
    RESTARTING = "restarting"
    CANCELLING = "cancelling"
    ABORTING = "aborting"
    LOADED = "loaded"
    FAILED = "failed"


_READ = (LoadState.READING, LoadState.RESTARTING, LoadState.CANCELLING, LoadState.ABORTING)


@dataclass(slots=True, eq=False)
class Load:
    """The load of one request. Only the scheduler's thread uses the object."""

    pursuit: Pursuit
    """Pursuit of the lease under which the ranks read, or will read."""
    started: float
    """Clock reading at which the request arrived."""
    state: LoadState = LoadState.WAITING
    accepted: str = ""
    """Id of the lease whose ticket was found to fit the request's prompt."""
    is_early: bool = False
    """Whether the load was admitted before all tokens could be read."""
    times_anew: int = 0
    """Number of restarts of the ranks, each after a revoked lease."""
    spec: LoadSpec | None = None
    """Last message to the ranks about this load; ``None`` until they read."""
    filled: Filled | None = None
    """Tokens of our groups filled by the load; set once all moving tokens are known."""
    progress: tuple[int, int] = (0, 0)
    """Bytes in place, and bytes in all, over all ranks."""
    moved_s: float = 0.0
    """Seconds of running transfers, on the rank with the most."""
    rank_error: str = ""
    """Error of the first failed rank, with its number, or the reason of a cancellation."""

    @property
    def request_id(self) -> str:
        """Id of the loading request."""
        return self.pursuit.record.request_id

    @property
    def record(self) -> RequestRecord:
        """The record of the request."""
        return self.pursuit.record

    @property
    def ticket(self) -> Ticket:
        """Ticket of the lease, which must have come, with the latest block tables of the source."""
        return self.pursuit.ticket

    @property
    def lease_id(self) -> str:
        """Id of the lease under which the load is read."""
        return self.pursuit.lease_id

    def accept(self, ticket: Ticket) -> None:
        """Notes that the ticket fits the request's prompt; the record gets the source of the
        load.
        """
        self.accepted = ticket.lease_id
        self.record.peer, self.record.peer_request_id = ticket.engine_id, ticket.request_id

    @property
    def next_pursuit(self) -> Pursuit | None:
        """The last pursuit in the chain of successors; ``None`` without a successor."""
        last = self.pursuit.successor
        while last is not None and last.successor is not None:
            last = last.successor
        return last

    @property
    def is_read(self) -> bool:
        """Whether the ranks read, or have not reported yet."""
        return self.state in _READ

    @property
    def is_begun(self) -> bool:
        """Whether the ranks read, or have all read with success."""
        return self.is_read or self.state is LoadState.LOADED

    @property
    def is_growing(self) -> bool:
        """Whether the ranks read, and wait for more readable tokens."""
        is_going_on = self.state in (LoadState.READING, LoadState.RESTARTING)
        return is_going_on and self.spec is not None and self.spec.readable is not None
