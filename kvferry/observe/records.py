"""Records of an engine's open requests and of the last that ended: for ``kvferry trace``, for
spans, and for ``kvferry drain``, which waits until no request is open.

The scheduler half writes a :class:`RequestRecord` while a request lives. The record notes the
moments of the request, on the engine's own clock. The time between two moments is a part:
:data:`_PARTS`. The parts of the ranks (``read``, ``confirm``, ``copy``) come from their
:class:`TransferRecord`. Requests that neither load nor lend have no
record.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvferry.control.leases import EndedLease
from kvferry.control.messages import (
    MAX_ID_CHARS,
    MAX_TRACES,
    LeaseStatus,
    RequestTrace,
    TracePart,
)
from kvferry.errors import KVFerryError
from kvferry.observe.spans import Spans, checked_traceparent

REMEMBERED = 1024
"""Number of ended requests whose records an engine keeps, beside those of all open requests."""
MAX_RANKS = 64
"""Number of transfer records that a request's record keeps."""
MAX_ERROR_CHARS = 500
"""Number of characters of an error that are kept."""
MAX_ROUTED_S = 3600.0
"""Longest time in seconds at the router that is believed."""

_PARTS = (
    # At the router, between the source's answer and the router's request to this engine; only if
    # the router gives the time.
    ("router", "routed", "received"),
    # On the engine's HTTP server, and from there to the scheduler half.
    ("front", "received", "arrived"),
    # A prompt that is computed here: to be lent, or because its load failed or was not needed.
    ("queue", "arrived", "scheduled"),
    ("prefill", "scheduled", "computed"),
    # A lent prompt. The fetch begins when a target takes the lease. If both engines got the request
    # at the same time, the target takes it while the prompt is computed: it is never untaken.
    ("untaken", "lent", "fetched"),
    ("held", "fetched", "ended"),
    # A load. The ranks read and confirm within ``load``.
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
"""Ids of leases and of incarnations, which errors name."""


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the bytes moved by one rank for one request. Times are Unix seconds of the rank's
    wall clock.
    """

    request_id: str
    lease_id: str
    rank: int
    peer: str = ""
    """Engine id of the other side; empty in the record of lent blocks."""
    direction: str
    """``"recv"``, or ``"send"`` for the source's digest of lent blocks."""
    first_token: int
    """Position of the first token that moved; the target's cache had the tokens before."""
    tokens: int
    nbytes: int
    copies: int = 0
    """Number of contiguous copies after merging."""
    started: float
    finished: float
    ok: bool
    error: str = ""
    token_digests: tuple[int, ...] | None = None
    """Digests, one per token; ``None`` if not requested. Each is the sum modulo 2**64 of a hash
    over this rank's logical cells (layer, part, token, head and bytes; replicas once). Sums over an
    engine's ranks do not depend on layout or sharding; see
    :func:`kvferry.connectors.records.digest_mismatch`."""
    transport: str = ""
    """Name of the transport, and whether cells were staged; empty if nothing had to move."""
    source_ranks: tuple[int, ...] = ()
    """Ranks of the other side from which this rank read."""
    confirmed: float = 0.0
    """Time at which the source had said whether the load counts; 0 in the record of lent blocks."""
    moving: float = 0.0
    """Seconds in which a transfer of this request was running; 0 if the seconds were not measured.
    The number is less than ``finished - started`` if the load waited for its source to compute
    more."""

    @property
    def moved_s(self) -> float:
        """Seconds in which a transfer was running; ``finished - started`` if they were not
        measured.
        """
        return self.moving or self.finished - self.started


class SeenRequest(Protocol):
    """The members of an engine's request that its record needs."""

    @property
    def request_id(self) -> str:
        """Id of the request."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far."""

    @property
    def received(self) -> float:
        """Time of arrival in Unix seconds; 0 if unknown."""

    @property
    def traceparent(self) -> str:
        """The W3C trace context of the request, if any."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Parameters from the router for the connector."""

    @property
    def finish_reason(self) -> str | None:
        """End of the request; ``None`` before the end."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The record of one request on this engine: a few hundred bytes, and as many per rank."""

    request_id: str
    traceparent: str
    loads: bool
    """Whether the request is to load its prompt; if not, the engine computes the prompt."""
    moments: dict[str, float]
    """Name of a moment, as in :data:`_PARTS` → clock reading."""
    peer: str = ""
    """Engine id of the other side."""
    peer_request_id: str = ""
    """The request's id at the source of its load."""
    outcome: str = "waiting"
    """State of the request, in a few words."""
    error: str = ""
    """The first error of the request."""
    ranks: list[TransferRecord] = field(default_factory=list)
    request: SeenRequest | None = None
    """The request itself, while its first token is awaited."""
    tokens_before: int = 0
    """Number of the request's tokens without its first token."""

    def note(self, moment: str, at: float) -> None:
        """Notes the time of a moment; only the first call for a moment counts."""
        self.moments.setdefault(moment, at)

    def fail(self, at: float, error: str) -> None:
        """Notes that the load failed; only the first error counts."""
        self.note("failed", at)
        self.error = self.error or _shortened(error)
        self.outcome = "failed"

    def add(self, record: TransferRecord) -> None:
        """Takes in the transfer record of a rank."""
        if len(self.ranks) < MAX_RANKS:
            error = _shortened(record.error)
            self.ranks.append(msgspec.structs.replace(record, token_digests=None, error=error))

    @property
    def is_over(self) -> bool:
        """Whether the request has ended."""
        return "ended" in self.moments

    def trace(self, now: float, lease: LeaseStatus | None = None) -> RequestTrace:
        """The whole record, on the wall clock. For any thread.

        Args:
            now: the reading of the engine's clock.
            lease: the lease on the request's blocks; ``None`` if no target holds a lease on them.
        """
        moments, peer = dict(self.moments), self.peer
        if lease is not None:
            moments.setdefault("fetched", now - lease.held_s)
            peer = peer or lease.target
        wall = time.time() - now  # a monotonic difference to now stays true if the clock is set
        parts = [*self._parts(moments, now, wall), *self._rank_parts()]
        return RequestTrace(
            request_id=self.request_id,
            peer=peer,
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
                continue  # other parts show the waiting of a load
            began, broken = moments[first], ""
            end = moments.get(last)
            if end is None:
                breaks = [b for b in _BREAKS if b != first and moments.get(b, -1.0) >= began]
                broken = min(breaks, key=lambda b: moments[b], default="")
                end = moments.get(broken)
            if end is not None and end < began:
                continue  # the lease was taken before the prompt was whole
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
    """An error at most :data:`MAX_ERROR_CHARS` long, with long ids cut: only a peer needs whole
    ids.
    """
    return _LONG_ID.sub(r"\1…", error)[:MAX_ERROR_CHARS]


class RequestRecords:
    """The records of the open requests, and of the last that ended. One thread changes them; any
    thread may call :meth:`find` and :meth:`num_open`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        spans: Spans | None = None,
        leases: Callable[[], Iterable[LeaseStatus]] = tuple,
    ) -> None:
        """Args:
        clock: monotonic clock, in seconds.
        spans: gets each request once it has ended; stays the caller's.
        leases: returns the open leases on the blocks of requests. Called on any thread.
        """
        self._clock = clock
        self._spans = spans
        self._leases = leases
        self._records: dict[int, RequestRecord] = {}
        """Python's id of a record → the record, the oldest first."""
        self._by_id: dict[str, list[RequestRecord]] = {}
        """Request id → its records, the oldest first; no id without a record."""
        self._ended: deque[RequestRecord] = deque()
        """The records whose requests have ended, the first end first."""
        self._undrawn: list[RequestRecord] = []
        self._num_open = 0

    def begin(self, request: SeenRequest, *, loads: bool) -> RequestRecord:
        """Begins the record of a request that loads or lends its prompt. If several requests have
        the same id, later notes go to the newest that has not ended.
        """
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
            # Only people read the value, so a value that is no number of seconds is ignored.
            routed = (request.kv_transfer_params or {}).get("router_s")
            if loads and isinstance(routed, float) and 0.0 <= routed < MAX_ROUTED_S:
                record.note("routed", received - routed)
        self._records[id(record)] = record
        self._by_id.setdefault(record.request_id, []).append(record)
        self._num_open += 1
        return record

    def refused(self, record: RequestRecord, error: KVFerryError) -> None:
        """Ends the record of a request whose ``kv_transfer_params`` cannot be used."""
        record.fail(self._clock(), f"{type(error).__name__}: {error}")
        self.end(record, "refused")

    def admitted(self, request: SeenRequest, num_external_tokens: int) -> None:
        """Notes that a request got its blocks; without external tokens the engine computes its
        prompt.
        """
        record = self._live(request.request_id)
        if record is None:
            return
        if num_external_tokens == 0:
            record.note("scheduled", self._clock())
        if not record.loads:
            return  # a lending request ends with its first token
        record.request, record.tokens_before = request, request.num_tokens
        if num_external_tokens == 0:
            self._undrawn.append(record)

    def add(self, report: TransferRecord) -> None:
        """Takes in the transfer record of a rank."""
        records = self._by_id.get(report.request_id)
        if records is not None:
            (self._live(report.request_id) or records[-1]).add(report)

    def loaded(self, record: RequestRecord, error: str | None) -> None:
        """Notes that every rank has reported a load: with success, or with ``error``."""
        if error is not None:
            record.fail(self._clock(), error)
        elif not record.is_over:
            record.note("loaded", self._clock())
            record.outcome = "loaded"
            self._undrawn.append(record)

    def look(self) -> None:
        """Notes which of the awaited first tokens have been sampled; must be called in every
        step.
        """
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

    def finished(self, request: SeenRequest, keep: bool, params: object) -> None:
        """Notes the end of a request, and the answer of :meth:`PullScheduler.request_finished`."""
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
        """Notes the end of the lease on a request's blocks."""
        record = self._live(lease.request_id)
        if record is None:
            return
        if lease.taken is not None:
            record.note("fetched", lease.taken)
        if lease.target is not None:
            record.peer = lease.target[0]
        self.end(record, f"lease {lease.outcome}", lease.ended)

    def end(self, record: RequestRecord, outcome: str, at: float | None = None) -> None:
        """Ends the record of a request. Idempotent."""
        if record.is_over:
            return
        self._is_drawn(record)
        record.request = None
        record.note("ended", self._clock() if at is None else at)
        record.outcome = outcome
        if self._spans is not None:
            self._spans.tell(lambda: record.trace(self._clock()))
        self._num_open -= 1
        if len(record.request_id) > MAX_ID_CHARS:
            self._forget(record)  # the id may be of any length, and no trace can ask for it
            return
        self._ended.append(record)
        if len(self._ended) > REMEMBERED:
            self._forget(self._ended.popleft())

    def _forget(self, record: RequestRecord) -> None:
        """Forgets the record of a request that has ended."""
        del self._records[id(record)]
        same = self._by_id[record.request_id]
        same.remove(record)
        if not same:
            del self._by_id[record.request_id]

    def _live(self, request_id: str) -> RequestRecord | None:
        """The newest record of an id whose request has not ended, if there is any."""
        records = reversed(self._by_id.get(request_id, []))
        return next((record for record in records if not record.is_over), None)

    def num_open(self) -> int:
        """Number of requests with a record that have not ended. For any thread."""
        return self._num_open

    def find(self, request_id: str) -> tuple[int, tuple[RequestTrace, ...]]:
        """The number of known requests, and the records of an id, oldest first. For any thread.

        An engine may put the id that a client or router chose between other texts:
        ``cmpl-ID-0-1a2b``. So a record is found by its own id, by the id at its source, and by any
        part between hyphens.
        """
        records = [
            each for each in list(self._records.values()) if len(each.request_id) <= MAX_ID_CHARS
        ]
        wanted = f"-{request_id}-"
        found = [
            record
            for record in records
            if wanted in f"-{record.request_id}-" or wanted in f"-{record.peer_request_id}-"
        ]
        held = {each.request_id: each for each in self._leases() if each.target}
        now = self._clock()
        return len(records), tuple(
            record.trace(now, None if record.is_over else held.get(record.request_id))
            for record in found[-MAX_TRACES:]
        )
