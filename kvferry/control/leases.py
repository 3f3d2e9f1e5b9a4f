"""Leases: the source promises to keep blocks until a target engine has read them.

A lease moves through the states below. Every arrow is taken under one lock, and one monotonic clock
decides: the clock of the source.

    grant ──> untaken ──renew/finish──> held ──every rank finished──> done
                 │  <──given up with keep──┘ │
                 │      another target takes over once the holder stopped renewing,
                 │      another start of the holder's engine at once
                 └──────────── release / expiry / revoke ─────────> released, expired, revoked

A lease expires only in :meth:`LeaseTable.expire`. The thread that answers renewals calls this
method after it has answered every renewal that has arrived. Therefore a lease is not charged for
time in which the source did not run, and a late renewal is accepted as long as the lease is open. A
lease is not charged for time in which its target did not run either. The source waits :data:`SLOW`
durations for the first target to take the lease. The source waits equally long for a holder that
does not renew but whose connection is alive; a connection stays alive without the holder's
interpreter. Even a renewed lease expires when it is ``max_age_s`` old.

A lease may be granted before the tokens are written. Such a lease *grows* until every rank of the
source has reported all tokens to :meth:`LeaseTable.written`. Until then:

- The lease expires only when it is ``max_age_s`` old.
- Only a target that knows growing leases may take the lease. Such a target reads a token only after
  the source has told the target that every rank has written this token.
- No read counts. A target that reports success before the lease is whole loses the lease.

A written token does not change while the lease is open. If the source cannot keep this promise,
because its request is preempted or aborted, the source first revokes the lease.

An ended lease never opens again. A target (an engine and its incarnation) that has lost a lease
never gets this lease again: reads before the loss could not be told from reads after the loss. The
target has one duty in return: within one incarnation, each rank reads a lease at most once
(:class:`~kvferry.control.tickets.SeenTickets` ensures this).

Therefore the answer ``HELD`` to a finish proves that the blocks were kept while the rank was
reading. The proof has three steps: the blocks are freed only after :meth:`LeaseTable.sweep` has
returned the lease; ``sweep`` returns only ended leases; an ended lease confirms only repetitions of
reports that were confirmed while the lease was held. The nonce of a report distinguishes a
repetition from a different report.

A *shared* lease serves any number of requests of any number of targets. The lease itself has no
holder. Instead, each request holds a claim on the lease. The id of a claim is the id of the lease
and a random name (``lease/name``); the first message with this id begins the claim. A claim follows
the states above like a lease: one holder at a time, own reports, silence, takeover and end, and an
own record of these after the end. The lease keeps the blocks::

    claims on it            ── no arrow of theirs frees anything
    the shared lease  grant ── until it is whole, :data:`SLOW` durations have passed and none of
                               its claims is open ──> done (a claim was), else expired
                            └─ withdraw: as soon as none of its claims is open
                            └─ revoke, ``max_age_s`` ──> revoked, expired, with all its claims

Therefore the proof for ``HELD`` also holds for claims. A claim is open only while its lease is
open, because a lease that ends also ends its claims. The blocks are freed only after the lease was
swept. Each rank reads a claim at most once, because the name of a claim is random. (A claim that
has ended and was forgotten may begin again while its lease is open. The blocks were kept all this
time, so the confirmation is still correct.) Releases of kvferry before shared leases name the lease
itself in their messages. Such a message refers to the single claim with the empty name, so that
these releases see an ordinary lease.

:mod:`kvferry.control.proofs` decides which sender may speak of a lease; this module does not.
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
"""Report of one rank: whether the reads of the rank succeeded, and the nonce of the report."""

SLOW = 3.0
"""Number of lease durations for which a silent target counts as slow, not as gone."""
MAX_CLAIMS = 1024
"""Largest number of open claims on one shared lease. A bearer of the ticket could otherwise create
any number of claims."""
EXTENSION = 1 / 6
"""Share of the lease duration by which the source extends the lease of a slow holder each time."""


class LeaseOutcome(enum.StrEnum):
    """The ways in which a lease ends."""

    DONE = "done"
    """Every rank of the target has reported."""
    RELEASED = "released"
    """The target gave the lease up."""
    EXPIRED = "expired"
    """No target renewed the lease for one lease duration, although every target could renew."""
    REVOKED = "revoked"
    """The source took the lease back."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease at the time of its grant."""

    lease_id: str
    """Random id; the key of all data of this lease."""
    request_id: str
    """Id of the source's request whose blocks are kept."""
    num_blocks: int
    duration_s: float
    """Seconds that the lease lives without a renewal after a target has taken it."""
    shared: bool = False
    """Whether any number of requests may load under the lease."""


@dataclass(frozen=True, slots=True)
class LeaseRefusal:
    """A lease was not granted: the source frees the blocks at once, and the target computes."""

    reason: str
    """Reason, which names the limit, both values and the remedy."""


@dataclass(frozen=True, slots=True)
class EndedLease:
    """An ended lease; its blocks may be freed."""

    lease_id: str
    request_id: str
    num_blocks: int
    outcome: LeaseOutcome
    target: Target | None
    """Last holder of the lease; for a shared lease, the holder of the last claim that was done."""
    reports: dict[int, Report]
    """Report of each rank of the holder, by rank."""
    taken: float | None
    """Clock reading when this holder took the lease; ``None`` if the lease was never taken."""
    ended: float
    """Clock reading at the end of the lease."""


@dataclass(slots=True)
class _Open:
    """An open lease, or an open claim on a shared lease."""

    lease: Lease
    granted: float
    deadline: float
    """Clock reading at which the lease expires."""
    num_tokens: int = 0
    """Number of tokens that must be written before the lease is whole."""
    written: dict[int, int] = field(default_factory=dict)
    """Rank of the source that writes tokens → number of tokens that this rank has written."""
    tables: BlockTables = ()
    """Block tables of the source so far; empty if they were known when the lease was granted."""
    note: bytes = b""
    """Note of the source; empty while the lease grows."""
    holder: Target | None = None
    taken: float | None = None
    """Clock reading when the holder took the lease."""
    heard: float = 0.0
    """Clock reading of the holder's last renewal."""
    reports: dict[int, Report] = field(default_factory=dict)
    """Report of each rank of the holder, by rank."""
    former: set[Target] = field(default_factory=set)
    """Targets that have lost the lease."""
    base: "_Open | None" = None
    """The shared lease of a claim; ``None`` for a lease."""
    claims: dict[str, "_Open"] = field(default_factory=dict)
    """Open claims on a shared lease, by claim id."""
    served: EndedLease | None = None
    """Last claim on a shared lease with the outcome ``DONE``."""
    is_withdrawn: bool = False
    """Whether a shared lease ends when its last open claim ends."""

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
    """Raises BoundsError unless ``rank`` is a rank of an engine of ``world_size`` ranks."""
    if not 0 <= rank < world_size:
        raise BoundsError(
            f"rank: engine {engine_id!r} reports rank {rank}, its description has ranks "
            f"0 to {world_size - 1}"
        )


def _holders(entry: _Open) -> list[tuple[Target, str]]:
    """The holders of a lease and of its claims, each with the id that it holds."""
    held = [entry, *entry.claims.values()]
    return [(one.holder, one.lease.lease_id) for one in held if one.holder is not None]


class LeaseTable:
    """All leases of one source engine. Thread-safe; no method waits, except for its lock."""

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
        duration_s: seconds that a taken lease lives without a renewal.
        max_blocks: number of blocks that all leases may pin, including ended but unswept leases.
        takeover_after_s: seconds of the holder's silence after which another target may take a
            lease; half of ``duration_s`` by default. No wait if the holder's connection is gone.
        max_age_s: seconds after which a lease expires even if its holder renews it.
        remembered: number of ended leases whose late messages still get the same answers.
        clock: monotonic clock, in seconds; only this clock decides on expiry.
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
        """A table for an engine whose pool has ``num_blocks`` blocks, including the null block."""
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
        """Promises to keep blocks of a request, or refuses and says why. Never waits.

        Args:
            request_id: the source's request.
            num_blocks: number of blocks.
            shared: whether the lease serves any number of requests; such a lease is kept for at
                least :data:`SLOW` durations.
            num_tokens: number of tokens still to be written; no tokens without ``writers``.
            writers: ranks of the source that write the tokens, see :meth:`written`.
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
        """The reason why ``num_blocks`` more blocks cannot be leased: never, or not at present."""
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

    def allocated(self, lease_id: str, tables: BlockTables, note: bytes = b"") -> None:
        """Records the present block tables of the source's request, and a note for the target of
        the whole lease. Must be called before :meth:`written` reports tokens in these tables.
        Ignores ended leases and unknown ids.
        """
        with self._lock:
            if (entry := self._open.get(lease_id)) is not None:
                entry.tables, entry.note = tables, note

    def written(self, lease_id: str, rank: int, num_tokens: int) -> list[tuple[Target, str]]:
        """Records that a rank of the source has written the first ``num_tokens`` tokens of a lease.
        A lease that becomes whole starts its duration. Ended leases and unknown ids are ignored.

        Returns:
            Holders of the lease and of its claims, with the ids, if more tokens can be read now.
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
        """Number of tokens that every rank of the source has written, for the growing leases."""
        with self._lock:
            found = [(lease_id, self._open.get(lease_id)) for lease_id in lease_ids]
            grown = [(lease_id, self._readable(entry)) for lease_id, entry in found if entry]
            return {lease_id: tokens for lease_id, tokens in grown if tokens is not None}

    def tables(self, lease_ids: Iterable[str]) -> dict[str, BlockTables]:
        """The last tables of :meth:`allocated`, for the leases that have any. Call this method
        after :meth:`readable`, so that the tables contain every readable token.
        """
        with self._lock:
            found = [(lease_id, self._open.get(lease_id)) for lease_id in lease_ids]
            named = [(lease_id, entry.base or entry) for lease_id, entry in found if entry]
            return {lease_id: entry.tables for lease_id, entry in named if entry.tables}

    def notes(self, lease_ids: Iterable[str]) -> dict[str, bytes]:
        """The notes of :meth:`allocated`, for the leases that have one."""
        with self._lock:
            found = [(lease_id, self._open.get(lease_id)) for lease_id in lease_ids]
            named = [(lease_id, entry.base or entry) for lease_id, entry in found if entry]
            return {lease_id: entry.note for lease_id, entry in named if entry.note}

    def is_held(self, target: Target, lease_id: str) -> bool:
        """Whether a target holds a lease or claim. A shared lease's id names its nameless claim."""
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
        """Takes leases for a target, or extends the leases that the target holds by one duration.

        Args:
            engine_id: the target.
            incarnation: the current incarnation of the target; the caller must have checked this.
            lease_ids: the leases.
            grows: whether the target knows growing leases; if not, they stay ``PENDING``.
            lives: whether the connection of a target is alive; called with this table's lock held.
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
        """Records that all reads of one rank of the target are complete, and answers the confirm.

        The first report of a rank is final. A repetition of this report gets the same answer, even
        after the lease is done. Any other report of the rank gets ``REVOKED``. A report takes a
        lease that no target has taken: the blocks were kept all the time.

        Args:
            lease_id: the lease.
            engine_id: the target.
            incarnation: the current incarnation of the target; the caller must have checked this.
            rank: the reporting rank of the target.
            ok: whether the reads of the rank succeeded.
            nonce: random bytes, the same in every repetition of this report.
            world_size: number of ranks of the *target*; after this many reports the lease is done.

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
        """Gives leases of the target up; the target will count no read under these leases.

        A lease that another target holds does not change.

        Args:
            engine_id: the target.
            incarnation: the sending incarnation of the target.
            lease_ids: the leases.
            keep: whether other targets may take the lease until it expires; otherwise the lease
                ends.
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
        """Ends a lease that has no holder, and returns whether the lease ended. Other leases and
        unknown ids do not change. A shared lease with open claims ends with the last claim.
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
        """Takes leases back on behalf of the source; unknown ids are ignored.

        Returns:
            Former holders of the leases and of their claims, each with the id that it held.
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
        """Takes all leases back on behalf of the source."""
        with self._lock:
            for entry in [entry for entry in self._open.values() if entry.base is None]:
                self._end(entry, LeaseOutcome.REVOKED)

    def expire(
        self, *, awake_s: float = math.inf, lives: Callable[[Target], bool] = lambda _: False
    ) -> None:
        """Ends the leases whose time is over. The thread that answers renewals must call this
        method, after it has answered the renewals that have arrived.

        Args:
            awake_s: seconds for which this thread has run without a gap. During the first lease
                duration of this time no lease ends: unread renewals may wait.
            lives: whether the connection of a target is alive; called with this table's lock held.
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
                    continue  # the lease ends with its last claim
                if self._is_slow(entry, now, last_heard, lives):
                    self._extend(entry, now, EXTENSION * self.duration_s)
                if now >= entry.deadline:  # also if the greatest age is reached
                    self._end(entry, LeaseOutcome.EXPIRED)

    def sweep(self) -> list[EndedLease]:
        """The leases that ended since the last call, each exactly once: free their blocks."""
        if not self._unswept:
            return []  # engines call this in every step
        with self._lock:
            swept, self._unswept = self._unswept, []
            self._pinned -= sum(ended.num_blocks for ended in swept)
            return swept

    @property
    def num_open(self) -> int:
        """Number of open leases and open claims."""
        return len(self._open)

    @property
    def pinned_blocks(self) -> int:
        """Number of blocks that leases pin, including ended but unswept leases."""
        return self._pinned

    def counters(self) -> dict[str, int]:
        """Number of ended leases per outcome, and number of refused grants."""
        with self._lock:
            return dict(self._outcomes)

    def snapshot(self) -> tuple[LeaseStatus, ...]:
        """The open leases and claims, oldest first; a claim on a shared lease has no blocks."""
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
                    held_s=0.0 if entry.taken is None else now - entry.taken,
                )
                for entry in self._open.values()
            )

    # The caller of every method below must hold the lock.

    def _extend(self, entry: _Open, now: float, seconds: float) -> None:
        entry.deadline = min(now + seconds, entry.granted + self._max_age_s)

    def _last_heard(self) -> dict[Target, float]:
        """For each holder, the clock reading of its last renewal of any lease."""
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
        """Whether the source, or a holder that cannot say so now, may still want a lease."""
        if not self._is_whole(entry):
            return True
        if entry.holder is None or now - entry.heard >= SLOW * self.duration_s:
            return False
        if last_heard[entry.holder] - entry.heard >= self._takeover_after_s:
            return False  # the holder renews other leases, but not this lease
        return lives(entry.holder)

    def _named(self, lease_id: str, now: float) -> _Open | None:
        """The open lease or claim of a target's message; the first message begins a claim."""
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
        """Number of tokens that all source ranks have written; ``None`` if the lease is whole."""
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
            # The router gave the same request to another start of the same engine. The earlier
            # start is gone; or both starts have the request, and then either may have the lease.
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
        """Answers a report on an ended lease: only a repetition of a confirmed report is good."""
        ended = self._done_by(lease_id, target)
        is_held = ended is not None and ended.reports.get(rank) == report
        return FinishAnswer.HELD if is_held else FinishAnswer.REVOKED

    def _done_by(self, lease_id: str, target: Target) -> EndedLease | None:
        """The ended lease or claim if all ranks of this target have reported, else ``None``."""
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
            outcome = LeaseOutcome.DONE  # its time was over, but a claim was done
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
        """Removes an ended claim. The last claim also ends its lease if its time is over."""
        del base.claims[ended.lease_id]
        if ended.outcome is LeaseOutcome.DONE:
            base.served = ended
        if base.claims or base.lease.lease_id not in self._open:
            return
        is_over = self._is_whole(base) and self._clock() >= base.deadline
        if is_over or base.is_withdrawn:
            self._end(base, LeaseOutcome.EXPIRED)
