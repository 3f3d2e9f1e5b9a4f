"""Leases: the source's promise to keep blocks until a target engine has read them.

A lease moves through these states; every arrow is taken under one lock and judged by one
monotonic clock, the source's:

    grant ──> untaken ──renew/finish──> held ──every rank finished──> done
                 │  <──given up with keep──┘ │
                 │      another target takes over once the holder stopped renewing,
                 │      another start of the holder's engine at once
                 └──────────── release / expiry / revoke ─────────> released, expired, revoked

A lease expires only at :meth:`LeaseTable.expire`, which the thread calls that answers renewals,
when it has answered those that came. So a lease is not charged for time in which the source itself
did not run, and a renewal that comes late is taken as long as the lease is open. Nor is it charged
for time in which a target did not run: it waits :data:`SLOW` durations for the first one to take
it, and for a holder that does not renew and whose connection lives, which needs nothing of the
holder's interpreter. A renewed lease expires all the same once it is ``max_age_s`` old.

A lease may be granted before its tokens are written: it *grows* until every rank of the source has
reported all of them to :meth:`LeaseTable.written`. Until then it expires only once it is
``max_age_s`` old, it may be taken by a target that knows such leases, which reads no token before
it was told that every rank has written it, and nothing that was read under it counts: whoever
reports success before it is whole has lost it. A written token stays as it is while the lease is
open. Where that cannot be kept, as the source's request is preempted or aborted, the source revokes
the lease first.

An ended lease never comes back to life, and a target (an engine and its incarnation) that has lost
a lease never gets it again: what it read before and what it would read after could not be told
apart. That leaves the target one duty: within one incarnation each rank reads a lease at most
once (:class:`~kvferry.control.tickets.SeenTickets` sees to it).

So ``HELD`` in answer to a finish proves that the blocks were kept while that rank was reading:
they are freed only after :meth:`LeaseTable.sweep` returned the lease, a lease is returned only
once it has ended, and an ended lease confirms nothing but repetitions of reports that were
confirmed while it was held. A report's nonce tells its repetition from another's report.

A *shared* lease serves any number of requests, of one target or of several. Nobody holds it; each
request holds a claim on it, whose id is the lease's and a random name (``lease/name``), begun by
the first message that names it. A claim is in everything a lease as drawn above: one holder at a
time, its own reports, silence, takeover and end, and its own memory of all that once it has ended.
The lease keeps the blocks::

    claims on it            ── no arrow of theirs frees anything
    the shared lease  grant ── until it is whole, :data:`SLOW` durations have passed and none of
                               its claims is open ──> done (a claim was), else expired
                            └─ withdraw: as soon as none of its claims is open
                            └─ revoke, ``max_age_s`` ──> revoked, expired, with all its claims

So what was said of ``HELD`` holds for claims: a claim is open only while its lease is, as a lease
that ends takes its claims along, and the blocks are freed only when the lease was swept. That each
rank reads a claim at most once follows from its random name. (A claim that has ended, and been
forgotten since, may begin anew while its lease lives. What is confirmed then was kept as well.) A
message that names the lease itself, as those of releases before shared leases do, speaks of the one
claim without a name, so that for them it is a lease as any other.

Who may speak of a lease is not judged here, see :mod:`kvferry.control.proofs`.
"""

import enum
import functools
import math
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.control.messages import BlockTables, FinishAnswer, LeaseAnswer, LeaseStatus
from kvferry.control.options import ControlOptions
from kvferry.control.proofs import lease_of
from kvferry.errors import BoundsError

Target: TypeAlias = tuple[str, str]
"""A target engine: its engine id and its incarnation."""
Report: TypeAlias = tuple[bool, bytes]
"""What one rank reported: whether its reads succeeded, and the report's nonce."""

SLOW = 3.0
"""Lease durations for which a target may say nothing and count as slow."""
MAX_CLAIMS = 1024
"""Claims that are open on a shared lease at most; whoever has its ticket can make as many."""
EXTENSION = 1 / 6
"""Share of its duration by which the lease of a slow holder is extended at a time."""


class LeaseOutcome(enum.StrEnum):
    """How a lease ended."""

    DONE = "done"
    """Every rank of the target reported."""
    RELEASED = "released"
    """The target gave it up."""
    EXPIRED = "expired"
    """Nobody renewed it for its duration, though everybody could."""
    REVOKED = "revoked"
    """The source took it back itself."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as it was granted."""

    lease_id: str
    """Random; the key of everything that belongs to this lease."""
    request_id: str
    """The source's request whose blocks are kept."""
    num_blocks: int
    duration_s: float
    """Seconds it lives without being renewed once it is taken."""
    shared: bool = False
    """Whether any number of requests may load under it."""


@dataclass(frozen=True, slots=True)
class LeaseRefusal:
    """No lease: the blocks of this request are freed at once and the target computes them."""

    reason: str
    """Names the limit, both values and the remedy."""


@dataclass(frozen=True, slots=True)
class EndedLease:
    """A lease that ended; its blocks may be freed."""

    lease_id: str
    request_id: str
    num_blocks: int
    outcome: LeaseOutcome
    target: Target | None
    """Its last holder; of a shared lease, that of the last claim that was done."""
    reports: dict[int, Report]
    """What each rank of the holder reported."""
    taken: float | None
    """Clock reading at which that holder took it; ``None`` if nobody did."""
    ended: float
    """Clock reading of its end."""


@dataclass(slots=True)
class _Open:
    """One open lease, or one open claim on a shared lease."""

    lease: Lease
    granted: float
    deadline: float
    """Clock reading at which it expires."""
    num_tokens: int = 0
    """Tokens that are to be written before it is whole."""
    written: dict[int, int] = field(default_factory=dict)
    """Rank of the source that writes them → how many it has written."""
    tables: BlockTables = ()
    """The source's block tables so far, where it was granted before they were known."""
    holder: Target | None = None
    taken: float | None = None
    """Clock reading at which the holder took it."""
    heard: float = 0.0
    """Clock reading of the holder's last renewal."""
    reports: dict[int, Report] = field(default_factory=dict)
    """What each rank of the holder reported."""
    former: set[Target] = field(default_factory=set)
    """Targets that have lost it."""
    base: "_Open | None" = None
    """Of a claim, the shared lease that it is on."""
    claims: dict[str, "_Open"] = field(default_factory=dict)
    """Of a shared lease, the open claims on it, by id."""
    served: EndedLease | None = None
    """Of a shared lease, the last claim on it that was done."""
    is_withdrawn: bool = False
    """Of a shared lease, whether it ends with the last claim on it."""

    def take(self, target: Target, now: float) -> None:
        self.holder = target
        self.taken = now
        self.heard = now
        self.reports = {}

    def drop_holder(self) -> None:
        if self.holder is not None:
            self.former.add(self.holder)
        self.holder = None
        self.taken = None
        self.reports = {}


def check_rank(engine_id: str, rank: int, world_size: int) -> None:
    """Raises BoundsError unless ``rank`` is one of the engine's ``world_size`` ranks."""
    if not 0 <= rank < world_size:
        raise BoundsError(
            f"rank: engine {engine_id!r} reports rank {rank}, its description has ranks "
            f"0 to {world_size - 1}"
        )


def _holders(entry: _Open) -> list[tuple[Target, str]]:
    """Who holds a lease, or claims on it, and under which ids."""
    held = [entry, *entry.claims.values()]
    return [(one.holder, one.lease.lease_id) for one in held if one.holder is not None]


class LeaseTable:
    """All leases of one source engine. Thread-safe; no method waits for anything but its lock."""

    def __init__(
        self,
        *,
        duration_s: float = 30.0,
        max_blocks: int,
        takeover_after_s: float | None = None,
        max_age_s: float = 1800.0,
        remembered: int = 16384,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        duration_s: seconds that a lease lives without being renewed once it is taken.
        max_blocks: blocks that leases may pin together, those not yet swept included.
        takeover_after_s: seconds of the holder's silence after which another target may take a
            lease; half of ``duration_s`` unless given. At once where its connection has gone.
        max_age_s: seconds after which a lease expires however often it is renewed.
        remembered: ended leases whose late messages are still answered as before.
        clock: seconds that never run backwards; the only judge of expiry.
        """
        self.duration_s = duration_s
        self.max_blocks = max_blocks
        self._takeover_after_s = duration_s / 2 if takeover_after_s is None else takeover_after_s
        self._max_age_s = max_age_s
        self._remembered = remembered
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, EndedLease] = OrderedDict()
        self._unswept: list[EndedLease] = []
        self._pinned = 0
        self._outcomes: Counter[str] = Counter()

    @classmethod
    def from_options(
        cls,
        options: ControlOptions,
        num_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> "LeaseTable":
        """A table for an engine whose pool has ``num_blocks`` blocks, the null block included."""
        return cls(
            duration_s=options.lease_duration_s,
            max_blocks=options.leased_blocks_cap(num_blocks),
            takeover_after_s=options.takeover_after_s,
            max_age_s=options.max_lease_age_s,
            remembered=options.remembered_leases,
            clock=clock,
        )

    def grant(
        self,
        request_id: str,
        num_blocks: int,
        *,
        shared: bool = False,
        num_tokens: int = 0,
        writers: Iterable[int] = (),
    ) -> Lease | LeaseRefusal:
        """Promises to keep blocks of a request, or says why not. Never waits.

        Args:
            request_id: the source's request.
            num_blocks: how many blocks.
            shared: whether it serves any number of requests; it is kept for :data:`SLOW` durations
                at least.
            num_tokens: tokens that are still to be written; none unless there are ``writers``.
            writers: ranks of the source that write them, see :meth:`written`.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks: {num_blocks} is negative")
        with self._lock:
            if self._pinned + num_blocks > self.max_blocks:
                self._outcomes["refused"] += 1
                return LeaseRefusal(self._why_not(num_blocks))
            lease = Lease(secrets.token_hex(16), request_id, num_blocks, self.duration_s, shared)
            now = self._clock()
            deadline = now + min(SLOW * self.duration_s, self._max_age_s)
            written = dict.fromkeys(writers, 0)
            self._open[lease.lease_id] = _Open(lease, now, deadline, num_tokens, written)
            self._pinned += num_blocks
            return lease

    def _why_not(self, num_blocks: int) -> str:
        """Why so many more blocks cannot be leased out: for ever, or just now."""
        if num_blocks > self.max_blocks:
            return (
                f"max_leased_blocks: the prompt has {num_blocks} blocks and all leases together "
                f"may hold {self.max_blocks}, so it can never be lent; raise max_leased_blocks, or "
                "give the KV cache more blocks"
            )
        return (
            f"max_leased_blocks: the prompt has {num_blocks} blocks, and leases hold "
            f"{self._pinned} of {self.max_blocks} just now; if that goes on, raise "
            "max_leased_blocks or add decode capacity"
        )

    def allocated(self, lease_id: str, tables: BlockTables) -> None:
        """The source's request has these block tables now. To be called before :meth:`written`
        speaks of tokens in them; ended leases and unknown ids are ignored.
        """
        with self._lock:
            if (entry := self._open.get(lease_id)) is not None:
                entry.tables = tables

    def written(self, lease_id: str, rank: int, num_tokens: int) -> list[tuple[Target, str]]:
        """A rank of the source has written the first ``num_tokens`` tokens of a lease; ended ones
        and unknown ids are ignored. Once the lease is whole its time begins.

        Returns:
            Who holds it, or a claim on it, and under which id, if more can be read now.
        """
        with self._lock:
            entry = self._open.get(lease_id)
            if entry is None or rank not in entry.written:
                return []
            before = self._readable(entry)
            entry.written[rank] = max(entry.written[rank], num_tokens)
            if self._readable(entry) == before:
                return []
            if self._readable(entry) is None:
                seconds = self.duration_s if entry.holder else SLOW * self.duration_s
                self._extend(entry, self._clock(), seconds)
            return _holders(entry)

    def readable(self, lease_ids: Iterable[str]) -> dict[str, int]:
        """How many tokens every rank of the source has written, for the leases that grow."""
        with self._lock:
            found = [(lease_id, self._open.get(lease_id)) for lease_id in lease_ids]
            grown = [(lease_id, self._readable(entry)) for lease_id, entry in found if entry]
            return {lease_id: tokens for lease_id, tokens in grown if tokens is not None}

    def tables(self, lease_ids: Iterable[str]) -> dict[str, BlockTables]:
        """What :meth:`allocated` said last, for the leases of which it said anything. To be asked
        after :meth:`readable`, so that what can be read lies in them.
        """
        with self._lock:
            found = [(lease_id, self._open.get(lease_id)) for lease_id in lease_ids]
            named = [(lease_id, entry.base or entry) for lease_id, entry in found if entry]
            return {lease_id: entry.tables for lease_id, entry in named if entry.tables}

    def is_held(self, target: Target, lease_id: str) -> bool:
        """Whether a target holds a lease, or a claim; the one without a name, where it names a
        shared lease.
        """
        entry = self._open.get(lease_id)
        if entry is not None and entry.lease.shared:
            entry = entry.claims.get(f"{lease_id}/")
        return entry is not None and entry.holder == target

    def renew(
        self,
        engine_id: str,
        incarnation: str,
        lease_ids: Iterable[str],
        *,
        grows: bool = False,
        lives: Callable[[Target], bool] = lambda _: True,
    ) -> dict[str, LeaseAnswer]:
        """Takes leases for a target, or extends those it holds by one duration.

        Args:
            engine_id: the target.
            incarnation: the engine's current one; the caller has made sure of that.
            lease_ids: the leases.
            grows: whether the target knows leases that grow; if not it gets none that does.
            lives: whether the connection of a target lives; called with this table's lock held.
        """
        target = (engine_id, incarnation)
        with self._lock:
            now = self._clock()
            return {
                lease_id: self._renew(lease_id, target, now, lives, grows=grows)
                for lease_id in lease_ids
            }

    def finish(
        self,
        lease_id: str,
        engine_id: str,
        incarnation: str,
        *,
        rank: int,
        ok: bool,
        nonce: bytes,
        world_size: int,
    ) -> FinishAnswer:
        """Notes that all reads of one rank of the target are terminal; answers the confirm.

        The first report of a rank stands. A repetition of it gets the same answer, also after the
        lease is done; any other report of that rank gets ``REVOKED``. An untaken lease is taken by
        the report: its blocks were kept all the time.

        Args:
            lease_id: the lease.
            engine_id: the target.
            incarnation: the target's current incarnation; the caller has made sure of that.
            rank: which of the target's ranks reports.
            ok: whether its reads succeeded.
            nonce: random, the same in repetitions of this report.
            world_size: ranks of the *target*; the lease is done when each has reported.

        Raises:
            BoundsError: ``rank`` is not a rank of the target.
        """
        check_rank(engine_id, rank, world_size)
        target = (engine_id, incarnation)
        with self._lock:
            now = self._clock()
            entry = self._named(lease_id, now)
            if entry is None:
                return self._late_finish(lease_id, target, rank, (ok, nonce))
            if target in entry.former or entry.holder not in (None, target):
                return FinishAnswer.REVOKED
            if entry.holder is None:
                entry.take(target, now)
            if ok and not self._is_whole(entry):
                entry.drop_holder()
                return FinishAnswer.REVOKED
            answer = self._report(entry, rank, (ok, nonce))
            if self._is_done(entry, world_size):
                self._end(entry, LeaseOutcome.DONE)
            return answer

    def release(
        self, engine_id: str, incarnation: str, lease_ids: Iterable[str], *, keep: bool = False
    ) -> None:
        """The target gives leases up and will count no read of them.

        Leases that it does not hold, and that somebody else holds, are left alone.

        Args:
            engine_id: the target.
            incarnation: its start that speaks.
            lease_ids: the leases.
            keep: leave the lease to other targets until it expires, instead of ending it.
        """
        target = (engine_id, incarnation)
        with self._lock:
            now = self._clock()
            for lease_id in lease_ids:
                entry = self._named(lease_id, now)
                if entry is None or target in entry.former or entry.holder not in (None, target):
                    continue
                if keep:
                    entry.former.add(target)
                    entry.drop_holder()
                else:
                    entry.holder = target
                    self._end(entry, LeaseOutcome.RELEASED)

    def withdraw(self, lease_id: str) -> bool:
        """Ends a lease that nobody has taken, and says so; others and unknown ids are left alone.
        A shared one on which claims are open ends with the last of them.
        """
        with self._lock:
            entry = self._open.get(lease_id)
            if entry is None or entry.holder is not None:
                return False
            if entry.claims:
                entry.is_withdrawn = True
                return False
            self._end(entry, LeaseOutcome.RELEASED)
            return True

    def revoke(self, lease_ids: Iterable[str]) -> list[tuple[Target, str]]:
        """The source takes leases back; unknown ids are ignored.

        Returns:
            Who held them, or claims on them, and under which ids.
        """
        with self._lock:
            lost: list[tuple[Target, str]] = []
            for lease_id in lease_ids:
                entry = self._open.get(lease_id)
                if entry is not None:
                    lost += _holders(entry)
                    self._end(entry, LeaseOutcome.REVOKED)
            return lost

    def revoke_all(self) -> None:
        """The source takes every lease back."""
        with self._lock:
            for entry in [entry for entry in self._open.values() if entry.base is None]:
                self._end(entry, LeaseOutcome.REVOKED)

    def expire(
        self, *, awake_s: float = math.inf, lives: Callable[[Target], bool] = lambda _: False
    ) -> None:
        """Ends the leases whose time is over. To be called by the thread that answers renewals,
        after those that have come.

        Args:
            awake_s: seconds for which that thread has run without a gap. Until it has run for a
                whole lease duration nothing ends: renewals may have come that it could not take.
            lives: whether the connection of a target lives; called with this table's lock held.
        """
        if awake_s < self.duration_s:
            return
        lives = functools.cache(lives)
        with self._lock:
            now = self._clock()
            due = [entry for entry in self._open.values() if now >= entry.deadline]
            last_heard = self._last_heard() if due else {}
            for entry in due:
                if entry.claims:
                    continue  # it ends with the last of them
                if self._is_slow(entry, now, last_heard, lives):
                    self._extend(entry, now, EXTENSION * self.duration_s)
                if now >= entry.deadline:  # of its greatest age too
                    self._end(entry, LeaseOutcome.EXPIRED)

    def sweep(self) -> list[EndedLease]:
        """The leases that ended since the last call, each exactly once: free their blocks."""
        if not self._unswept:
            return []  # engines ask in every step
        with self._lock:
            swept, self._unswept = self._unswept, []
            self._pinned -= sum(ended.num_blocks for ended in swept)
            return swept

    @property
    def num_open(self) -> int:
        """Leases, and claims on shared ones, that have not ended."""
        return len(self._open)

    @property
    def pinned_blocks(self) -> int:
        """Blocks that leases pin, those of ended but not yet swept leases included."""
        return self._pinned

    def counters(self) -> dict[str, int]:
        """How many leases ended in which way, and how many grants were refused."""
        with self._lock:
            return dict(self._outcomes)

    def snapshot(self) -> tuple[LeaseStatus, ...]:
        """The open leases, oldest first; claims on shared leases too, which have no blocks."""
        with self._lock:
            now = self._clock()
            return tuple(
                LeaseStatus(
                    lease_id=entry.lease.lease_id,
                    request_id=entry.lease.request_id,
                    num_blocks=entry.lease.num_blocks,
                    age_s=now - entry.granted,
                    remaining_s=max(0.0, entry.deadline - now),
                    target=entry.holder[0] if entry.holder else "",
                    ranks_done=tuple(sorted(entry.reports)),
                )
                for entry in self._open.values()
            )

    # All below is called with the lock held.

    def _extend(self, entry: _Open, now: float, seconds: float) -> None:
        entry.deadline = min(now + seconds, entry.granted + self._max_age_s)

    def _last_heard(self) -> dict[Target, float]:
        """When each holder last renewed any lease."""
        heard: dict[Target, float] = {}
        for entry in self._open.values():
            if entry.holder is not None:
                heard[entry.holder] = max(entry.heard, heard.get(entry.holder, -math.inf))
        return heard

    def _is_slow(
        self,
        entry: _Open,
        now: float,
        last_heard: Mapping[Target, float],
        lives: Callable[[Target], bool],
    ) -> bool:
        """Whether somebody may want a lease who cannot say so: we ourselves, or its holder."""
        if not self._is_whole(entry):
            return True
        if entry.holder is None or now - entry.heard >= SLOW * self.duration_s:
            return False
        if last_heard[entry.holder] - entry.heard >= self._takeover_after_s:
            return False  # it renews others, and not this
        return lives(entry.holder)

    def _named(self, lease_id: str, now: float) -> _Open | None:
        """The open lease that a target speaks of, or claim, which begins by being spoken of."""
        base = self._open.get(lease_of(lease_id))
        if base is None or not base.lease.shared:
            return self._open.get(lease_id)
        claim_id = lease_id if "/" in lease_id else f"{lease_id}/"
        claim = base.claims.get(claim_id)
        if claim is None and claim_id not in self._ended and len(base.claims) < MAX_CLAIMS:
            lease = Lease(claim_id, base.lease.request_id, 0, base.lease.duration_s)
            claim = _Open(lease, base.granted, now, base=base)
            self._extend(claim, now, SLOW * self.duration_s)
            self._open[claim_id] = base.claims[claim_id] = claim
        return claim

    def _readable(self, entry: _Open) -> int | None:
        """How many tokens every rank of the source has written; ``None`` once that is all."""
        base = entry.base or entry
        tokens = min(base.written.values(), default=base.num_tokens)
        return tokens if tokens < base.num_tokens else None

    def _is_whole(self, entry: _Open) -> bool:
        return self._readable(entry) is None

    def _renew(
        self,
        lease_id: str,
        target: Target,
        now: float,
        lives: Callable[[Target], bool],
        *,
        grows: bool,
    ) -> LeaseAnswer:
        entry = self._named(lease_id, now)
        if entry is None:
            is_done = self._done_by(lease_id, target) is not None
            return LeaseAnswer.DONE if is_done else LeaseAnswer.REVOKED
        if target in entry.former:
            return LeaseAnswer.REVOKED
        if not (grows or self._is_whole(entry)):
            return LeaseAnswer.PENDING
        if entry.holder is not None and entry.holder != target:
            # Another start of the same engine was given the same request: the one before is gone,
            # or somebody has sent them both the request, and then either may have it.
            is_other = entry.holder[0] != target[0]
            is_heard = now - entry.heard < self._takeover_after_s
            if is_other and is_heard and lives(entry.holder):
                return LeaseAnswer.TAKEN
            entry.drop_holder()
        if entry.holder is None:
            entry.take(target, now)
        entry.heard = now
        self._extend(entry, now, self.duration_s)
        return LeaseAnswer.HELD

    def _report(self, entry: _Open, rank: int, report: Report) -> FinishAnswer:
        first = entry.reports.setdefault(rank, report)
        return FinishAnswer.HELD if first == report else FinishAnswer.REVOKED

    def _is_done(self, entry: _Open, world_size: int) -> bool:
        return len(entry.reports) == world_size

    def _late_finish(
        self, lease_id: str, target: Target, rank: int, report: Report
    ) -> FinishAnswer:
        """Answers a report on an ended lease: only a repetition of a confirmed one is confirmed."""
        ended = self._done_by(lease_id, target)
        is_held = ended is not None and ended.reports.get(rank) == report
        return FinishAnswer.HELD if is_held else FinishAnswer.REVOKED

    def _done_by(self, lease_id: str, target: Target) -> EndedLease | None:
        """The ended lease, if every rank of this target has reported it."""
        ended = self._ended.get(f"{lease_id}/", self._ended.get(lease_id))
        if ended is None or ended.outcome is not LeaseOutcome.DONE or ended.target != target:
            return None
        return ended

    def _end(self, entry: _Open, outcome: LeaseOutcome) -> None:
        lease = entry.lease
        del self._open[lease.lease_id]
        for claim in list(entry.claims.values()):
            self._end(claim, outcome)
        if entry.served is not None and outcome is LeaseOutcome.EXPIRED:
            outcome = LeaseOutcome.DONE  # its time was over, and it was of use
        last = entry.served
        ended = EndedLease(
            lease.lease_id,
            lease.request_id,
            lease.num_blocks,
            outcome,
            last.target if last else entry.holder,
            entry.reports,
            last.taken if last else entry.taken,
            self._clock(),
        )
        self._ended[lease.lease_id] = ended
        while len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
        if entry.base is None:
            self._outcomes[outcome.value] += 1
            self._unswept.append(ended)
        else:
            self._end_claim(entry.base, ended)

    def _end_claim(self, base: _Open, ended: EndedLease) -> None:
        """A claim has ended; with the last one its lease does, if its time is over."""
        del base.claims[ended.lease_id]
        if ended.outcome is LeaseOutcome.DONE:
            base.served = ended
        if base.claims or base.lease.lease_id not in self._open:
            return
        is_over = self._is_whole(base) and self._clock() >= base.deadline
        if is_over or base.is_withdrawn:
            self._end(base, LeaseOutcome.EXPIRED)
