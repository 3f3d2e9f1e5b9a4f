"""What an engine did for each of its last requests: for ``kvferry trace``, and for spans.

The scheduler half writes a :class:`RequestRecord` while a request lives. It notes the moments at
which something came to pass, on the engine's own clock. What lies between two of them is a part:
:data:`_PARTS`. The ranks' parts (``read``, ``confirm``, ``copy``) are made of their
:class:`~kvferry.connectors.base.TransferRecord`. Requests that neither load nor lend have none.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvferry.connectors.base import RequestView, TransferRecord
from kvferry.control.leases import EndedLease
from kvferry.control.messages import MAX_ID_CHARS, MAX_TRACES, RequestTrace, TracePart
from kvferry.control.tracing import Spans, checked_traceparent

REMEMBERED = 1024
"""Requests that an engine can tell of."""
MAX_RANKS = 64
"""Ranks of which one record tells."""
MAX_ERROR_CHARS = 500
"""Characters of an error that are kept."""
MAX_ROUTED_S = 3600.0
"""A router that says that it took longer is not believed."""

_PARTS = (
    # At the router, between the source's answer and its own request here; if it says so.
    ("router", "routed", "received"),
    # On the engine's HTTP server, and from there to the scheduler half.
    ("front", "received", "arrived"),
    # A prompt that is computed here: to be lent, or because its load failed or was not needed.
    ("queue", "arrived", "scheduled"),
    ("prefill", "scheduled", "computed"),
    # What is lent. It is fetched from the moment on at which a target takes the lease.
    ("untaken", "lent", "fetched"),
    ("held", "fetched", "ended"),
    # What is loaded. The ranks read and confirm within ``load``.
    ("handshake", "unknown", "shaken"),
    ("ticket", "asking", "granted"),
    ("lease", "asked", "taken"),
    ("wait", "taken", "reading"),
    ("load", "reading", "loaded"),
    ("first token", "loaded", "drawn"),
    ("answer", "drawn", "ended"),
)
"""Name, first and last moment of each part of the scheduler half."""
_BREAKS = ("failed", "scheduled", "ended")
"""Moments that end a part whose last moment does not come."""

_LONG_ID = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b")
"""Ids of leases and of starts, which errors name."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request's life on this engine. A few hundred bytes, and as many per rank."""

    request_id: str
    traceparent: str
    loads: bool
    """Whether it is to load its prompt, or computes it."""
    moments: dict[str, float]
    """When what came to pass: names as in :data:`_PARTS` → clock readings."""
    peer: str = ""
    """Engine id of the other side."""
    peer_request_id: str = ""
    """The request's id at the source of its load."""
    outcome: str = "waiting"
    """How it stands, in a few words."""
    error: str = ""
    """The first thing that went wrong."""
    ranks: list[TransferRecord] = field(default_factory=list)
    request: RequestView | None = None
    """The request itself, while its first token is awaited."""
    tokens_before: int = 0
    """Tokens that it has without that one."""

    def note(self, moment: str, at: float) -> None:
        """Something came to pass; only the first time counts."""
        self.moments.setdefault(moment, at)

    def fail(self, at: float, error: str) -> None:
        """Its load cannot be had; only the first reason counts."""
        self.note("failed", at)
        self.error = self.error or _shortened(error)
        self.outcome = "failed"

    def add(self, record: TransferRecord) -> None:
        """Takes in what one rank did."""
        if len(self.ranks) < MAX_RANKS:
            error = _shortened(record.error)
            self.ranks.append(msgspec.structs.replace(record, token_digests=None, error=error))

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes to pass."""
        return "ended" in self.moments

    def trace(self, now: float) -> RequestTrace:
        """All of it, on the wall clock. For any thread.

        Args:
            now: the reading of the engine's clock.
        """
        moments = dict(self.moments)
        wall = time.time() - now  # a monotonic difference to now stays true if the clock is set
        parts = [*self._parts(moments, now, wall), *self._rank_parts()]
        return RequestTrace(
            request_id=self.request_id,
            peer=self.peer,
            peer_request_id=self.peer_request_id[:MAX_ID_CHARS],
            traceparent=self.traceparent,
            started=wall + moments.get("received", moments["arrived"]),
            seconds=moments.get("ended", now) - moments.get("received", moments["arrived"]),
            outcome=self.outcome,
            error=self.error,
            parts=tuple(sorted(parts, key=lambda part: part.started)),
        )

    def _parts(self, moments: dict[str, float], now: float, wall: float) -> Iterator[TracePart]:
        for name, first, last in _PARTS:
            if first not in moments or (name == "queue" and self.loads):
                continue  # who loads has told of its waiting in other words
            began, broken = moments[first], ""
            end = moments.get(last)
            if end is None:
                breaks = [b for b in _BREAKS if b != first and moments.get(b, -1.0) >= began]
                broken = min(breaks, key=lambda b: moments[b], default="")
                end = moments.get(broken)
            yield TracePart(
                name=name,
                started=wall + began,
                seconds=(now if end is None else end) - began,
                is_open=end is None,
                error=self.error if broken == "failed" else "",
            )

    def _rank_parts(self) -> Iterator[TracePart]:
        for record in list(self.ranks):
            yield TracePart(
                name="read" if record.direction == "recv" else "copy",
                started=record.started,
                seconds=max(0.0, record.finished - record.started),
                moving=record.moving,
                rank=record.rank,
                source_ranks=record.source_ranks,
                transport=record.transport,
                nbytes=record.nbytes,
                note=f"{record.tokens} tokens",
                error=record.error,
            )
            if record.confirmed:
                yield TracePart(
                    name="confirm",
                    started=record.finished,
                    seconds=max(0.0, record.confirmed - record.finished),
                    rank=record.rank,
                )


def _shortened(error: str) -> str:
    """An error, without what only a peer needs to know of a lease, and not too long."""
    return _LONG_ID.sub(r"\1…", error)[:MAX_ERROR_CHARS]


class RequestRecords:
    """The records of the last requests. One thread changes them; any may :meth:`find`."""

    def __init__(
        self,
        clock: Callable[[], float],
        spans: Spans | None = None,
    ) -> None:
        """Args:
        clock: seconds that never run backwards.
        spans: is told of each request once nothing more comes to pass; stays the caller's.
        """
        self._clock = clock
        self._spans = spans
        self._records: deque[RequestRecord] = deque()
        self._by_id: dict[str, RequestRecord] = {}
        self._undrawn: list[RequestRecord] = []

    def begin(self, request: RequestView, *, loads: bool) -> RequestRecord:
        """A request arrived that loads its prompt, or lends it; the newest of an id is told of."""
        now = self._clock()
        record = RequestRecord(
            request_id=request.request_id,
            traceparent=checked_traceparent(request.traceparent),
            loads=loads,
            moments={"arrived": now},
        )
        if request.received:
            received = now - max(0.0, time.time() - request.received)
            record.note("received", received)
            # Only told to people, so what is no number of seconds is passed over.
            routed = (request.kv_transfer_params or {}).get("router_s")
            if loads and isinstance(routed, float) and 0.0 <= routed < MAX_ROUTED_S:
                record.note("routed", received - routed)
        if len(record.request_id) > MAX_ID_CHARS:
            return record  # nobody could ask for it, and it may be of any length
        self._records.append(record)
        self._by_id[record.request_id] = record
        if len(self._records) > REMEMBERED:
            oldest = self._records.popleft()
            if self._by_id.get(oldest.request_id) is oldest:
                del self._by_id[oldest.request_id]
        return record

    def admitted(self, request: RequestView, num_external_tokens: int) -> None:
        """A request got its blocks; without external tokens it computes its prompt."""
        record = self._live(request.request_id)
        if record is None:
            return
        if num_external_tokens == 0:
            record.note("scheduled", self._clock())
        if not record.loads:
            return  # it ends with its first token
        record.request, record.tokens_before = request, request.num_tokens
        if num_external_tokens == 0:
            self._undrawn.append(record)

    def add(self, report: TransferRecord) -> None:
        """What one rank did."""
        if (record := self._by_id.get(report.request_id)) is not None:
            record.add(report)

    def loaded(self, record: RequestRecord, error: str | None) -> None:
        """Every rank has reported a load: it is there, or failed for ``error``."""
        if error is not None:
            record.fail(self._clock(), error)
        elif not record.is_over:
            record.note("loaded", self._clock())
            record.outcome = "loaded"
            self._undrawn.append(record)

    def look(self) -> None:
        """Notes which of the awaited tokens have been drawn; to be called in every step."""
        if self._undrawn:
            self._undrawn = [record for record in self._undrawn if not self._is_drawn(record)]

    def _is_drawn(self, record: RequestRecord) -> bool:
        """Whether a request has its first token, or will have none."""
        if record.request is not None and record.request.num_tokens > record.tokens_before:
            now = self._clock()
            record.note("drawn", now)
            record.note("computed", now)
            record.request = None
        return record.request is None

    def finished(self, request: RequestView, keep: bool, params: object) -> None:
        """A request ended, and this is what :meth:`PullScheduler.request_finished` answers."""
        record = self._live(request.request_id)
        if record is None or (keep and params is None):
            return  # a load is given up, and ends later
        if not keep:
            self.end(record, request.finish_reason or "over")
            return
        self._is_drawn(record)
        record.request = None
        now = self._clock()
        record.note("computed", now)
        record.note("lent", now)
        record.outcome = "lent"

    def freed(self, lease: EndedLease) -> None:
        """A lease on a request's blocks ended."""
        record = self._live(lease.request_id)
        if record is None:
            return
        if lease.taken is not None:
            record.note("fetched", lease.taken)
        if lease.target is not None:
            record.peer = lease.target[0]
        self.end(record, f"lease {lease.outcome}", lease.ended)

    def end(self, record: RequestRecord, outcome: str, at: float | None = None) -> None:
        """Nothing more comes to pass for a request. Idempotent."""
        if record.is_over:
            return
        self._is_drawn(record)
        record.request = None
        record.note("ended", self._clock() if at is None else at)
        record.outcome = outcome
        if self._spans is not None:
            self._spans.tell(lambda: record.trace(self._clock()))

    def _live(self, request_id: str) -> RequestRecord | None:
        record = self._by_id.get(request_id)
        return None if record is None or record.is_over else record

    def find(self, request_id: str) -> tuple[int, tuple[RequestTrace, ...]]:
        """How many requests are known, and those of an id, oldest first. For any thread.

        An engine may put the id that a client or router chose between others: ``cmpl-ID-0-1a2b``.
        So one is found by its own id, by that at its source, and by what stands between hyphens.
        """
        records = list(self._records)
        wanted = f"-{request_id}-"
        found = [
            record
            for record in records
            if wanted in f"-{record.request_id}-" or wanted in f"-{record.peer_request_id}-"
        ]
        now = self._clock()
        return len(records), tuple(record.trace(now) for record in found[-MAX_TRACES:])
