"""Current state of a cluster: one :class:`Snapshot`, which the page and ``kvferry top`` show.

A snapshot has three sources. The router knows the addresses of its engines, their requests from
this router, and the last requests of its clients. Each engine's ``/metrics`` reports requests and
blocks; vLLM servers use vLLM's metric names. Each engine's control channel reports leases, loads,
peers and errors, if the router knows the channel. An unknown value is ``None``, or an empty text
for a name; it is never zero.
"""

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvferry.config import printable
from kvferry.control.messages import ErrorEvent, LeaseStatus, StatusReport, TransferStatus
from kvferry.engine.admission import DrainState
from kvferry.observe.spans import RequestSpan
from kvferry.router.engines import Engine
from kvferry.router.queue import QueueView

MOST_ROWS = 100
"""Maximum number of rows in a table of the snapshot; ``left_out`` has the number of further
rows."""
MOST_CHARACTERS = 2000
"""Maximum number of characters in a text from another program."""
WINDOW_S = 5.0
"""Seconds over which bytes per second are computed: loads come in bursts."""


class Occupancy(msgspec.Struct, kw_only=True):
    """Current work of an engine; ``None`` for values that the engine does not report."""

    running: int | None = None
    waiting: int | None = None
    loading: int | None = None
    """Number of requests whose KV the engine's ranks are reading."""
    lent: int | None = None
    """Number of ended requests whose KV other engines may still read."""
    free_blocks: int | None = None
    blocks: int | None = None


class EngineView(Occupancy, kw_only=True):
    """One engine."""

    name: str
    role: str
    kind: str = ""
    """Serving engine; empty if unknown."""
    url: str
    state: str
    """``ready``, ``slow``, ``down``, ``draining`` or ``drained``."""
    problem: str = ""
    """Reason why the engine is not healthy, or the names of its silent peers."""
    outstanding: int
    """Number of this router's requests at the engine."""
    untaken: int
    """Number of this router's prompts whose KV the engine lends and no other engine has fetched
    yet."""
    drain: DrainState | None = None
    engine_id: str = ""
    """Engine id for other engines; empty if unknown."""
    untold: list[str] = msgspec.field(default_factory=list)
    """Reasons why values are missing."""


class PairView(msgspec.Struct, kw_only=True):
    """An engine that loads KV from another engine."""

    source: str
    """Engine id of the source; empty if unknown."""
    target: str
    transport: str = ""
    """Transport of the last load."""
    loaded_bytes: int
    """Number of loaded bytes since the start of both engines."""
    bytes_per_s: float | None = None
    """Average over the last :data:`WINDOW_S`; ``None`` before the second observation."""


class LeaseView(msgspec.Struct, kw_only=True):
    """A lease: blocks that an engine keeps for another engine."""

    engine: str
    """Engine id of the source."""
    request_id: str
    num_blocks: int
    age_s: float
    remaining_s: float
    target: str
    """Engine id of the target; empty before an engine holds the lease."""
    ranks_done: int
    """Number of the target's ranks that have reported the end of their transfers."""


class LoadView(msgspec.Struct, kw_only=True):
    """A current load."""

    engine: str
    """Engine id of the target."""
    source: str
    request_id: str
    bytes_done: int
    bytes_total: int
    age_s: float
    progress_s: float
    """Seconds since the last progress."""


class FailureView(msgspec.Struct, kw_only=True):
    """An error."""

    time: float
    """Unix seconds by the clock of the engine or router that reports the error."""
    engine: str
    """Engine id; empty for the router."""
    message: str
    request_id: str = ""
    """Id of the request named in the error; empty if no request is named."""


class ShownRequest(msgspec.Struct, kw_only=True):
    """One of the router's last requests."""

    request_id: str
    path: str
    started: float
    """Unix seconds by the router's clock."""
    seconds: float
    is_open: bool
    engines: list[str]
    """Names of the engines asked, in order."""
    error: str
    waited_s: float = 0.0
    """Seconds in the router's queue, so far."""


class Snapshot(msgspec.Struct, kw_only=True):
    """The cluster at one moment."""

    time: float
    """Unix seconds by the router's clock."""
    engines: list[EngineView]
    pairs: list[PairView]
    leases: list[LeaseView]
    """Leases, oldest first."""
    loads: list[LoadView]
    failures: list[FailureView]
    """Errors, newest first."""
    requests: list[ShownRequest]
    """Requests of the router, newest first."""
    left_out: dict[str, int]
    """Table → number of rows not shown; only tables with such rows."""
    queue: QueueView | None = None
    """The router's queue; ``None`` if engines have no limit."""


# ---- metrics ------------------------------------------------------------------------------------


class ClusterFigures(Occupancy, kw_only=True):
    """Values from an engine's ``/metrics``."""

    loaded: dict[str, int] = msgspec.field(default_factory=dict)
    """Engine id of a source (empty if unknown) → number of bytes loaded from this source."""


_LIVE, _BLOCKS = "kvferry_engine_live_requests", "kvferry_engine_kv_blocks"
_USAGE, _CACHE = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_FOREIGN_LOADED = ("vllm:kvferry_load_bytes_sum", "sglang:kvferry_load_bytes_sum")
_LOADED = ("kvferry_engine_transfer_bytes_total", *_FOREIGN_LOADED)
_NAMES = (_LIVE, _BLOCKS, _USAGE, _CACHE, *_RUNNING, *_WAITING, *_LOADED)
_BEGINNINGS = tuple(f"{name}{after}" for name in _NAMES for after in "{ ")


def figures_in(text: str) -> ClusterFigures:
    """Reads the few metrics for the snapshot.

    >>> figures = figures_in('vllm:num_requests_running{engine="0"} 3.0')
    >>> figures.running, figures.loading
    (3, None)

    Raises:
        ValueError: a line begins like such a metric, but cannot be parsed.
    """
    # vLLM reports thousands of metrics, and the parser is slow. Other requests need this thread.
    lines = [line for line in text.splitlines() if line.startswith(_BEGINNINGS)]
    samples: dict[str, list[Sample]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                samples[sample.name].append(sample)
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # errors of the parser
        raise ValueError(f"its metrics cannot be read: {error!r}") from error
    live = {one.labels.get("state"): _count(one.value) for one in samples[_LIVE]}
    blocks = {one.labels.get("state"): _count(one.value) for one in samples[_BLOCKS]}
    figures = ClusterFigures(
        running=live.get("running", _sum(samples, _RUNNING)),
        waiting=live.get("waiting", _sum(samples, _WAITING)),
        loading=live.get("loading"),
        lent=live.get("lent"),
    )
    free, used = blocks.get("free"), blocks.get("used")
    if free is not None and used is not None:
        figures.free_blocks, figures.blocks = free, free + used
    else:
        figures.free_blocks, figures.blocks = _vllm_blocks(samples[_USAGE], samples[_CACHE])
    for one in chain.from_iterable(samples[name] for name in _LOADED):
        peer = one.labels.get("peer", "")
        figures.loaded[peer] = figures.loaded.get(peer, 0) + (_count(one.value) or 0)
    return figures


def _vllm_blocks(usage: Sequence[Sample], cache: Sequence[Sample]) -> tuple[int | None, int | None]:
    """Number of free blocks and number of all blocks of a server's engines."""
    used = {one.labels.get("engine"): one.value for one in usage}
    free, blocks = 0.0, 0
    for one in cache:
        count, share = one.labels.get("num_gpu_blocks", ""), used.get(one.labels.get("engine"))
        if not (count.isascii() and count.isdigit()) or share is None or not 0 <= share <= 1:
            return None, None
        blocks += int(count[:_DIGITS])
        free += int(count[:_DIGITS]) * (1 - share)
    return (round(free), blocks) if cache else (None, None)


_DIGITS = 15
"""Number of digits of the longest number that a browser keeps exactly."""


def _count(value: float) -> int | None:
    """The value as a count; ``None`` if the value is not a count."""
    return int(value) if math.isfinite(value) and 0 <= value < 10**_DIGITS else None


def _sum(samples: Mapping[str, Sequence[Sample]], names: Sequence[str]) -> int | None:
    """The sum of the metrics with these names; ``None`` if the engine has none of them."""
    found = chain.from_iterable(samples[name] for name in names)
    counts = [count for one in found if (count := _count(one.value)) is not None]
    return sum(counts) if counts else None


# ---- the whole ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """Observations of one engine."""

    engine: Engine
    figures: ClusterFigures | None = None
    report: StatusReport | None = None
    untold: list[str] = field(default_factory=list)
    """Reasons why ``figures`` or ``report`` is missing."""
    at: float = 0.0
    """Time of the observation, in seconds on the monotonic clock."""

    @property
    def engine_id(self) -> str:
        """Engine id for other engines; the router's name of the engine if the id is unknown."""
        return self.report.engine_id if self.report is not None else self.engine.name


class Rates:
    """Bytes per second of each pair, from the sum of loaded bytes at several moments."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def rate(self, pair: tuple[str, str], at: float, loaded: int) -> float | None:
        """Notes the bytes loaded so far. Returns the rate over the window; ``None`` for the first
        observation.
        """
        seen = self._seen.setdefault(pair, deque())
        if seen and loaded < seen[-1][1]:
            seen.clear()  # restart of the engine
        if not seen or at > seen[-1][0]:
            seen.append((at, loaded))
        while len(seen) > 2 and seen[1][0] <= at - WINDOW_S:
            seen.popleft()
        (first, before), (last, now) = seen[0], seen[-1]
        return (now - before) / (last - first) if last > first else None

    def keep(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Forgets all other pairs."""
        kept = set(pairs)
        self._seen = {pair: seen for pair, seen in self._seen.items() if pair in kept}


def snapshot_of(
    seen: Sequence[Seen], requests: Sequence[ShownRequest], rates: Rates, now: float
) -> Snapshot:
    """Makes a snapshot.

    Args:
        seen: observations of the engines.
        requests: the router's last requests, newest first.
        rates: rates from earlier snapshots; takes the values of this snapshot too.
        now: Unix seconds.
    """
    reports = {
        (one.report.engine_id, one.report.incarnation): one.report
        for one in seen
        if one.report is not None  # an engine may have two roles
    }.values()
    errors = [(report.engine_id, error) for report in reports for error in report.errors]
    failures = [_failure(*one) for one in nlargest(MOST_ROWS, errors, lambda one: one[1].time)]
    failures += [_failed(one) for one in requests if one.error]
    failures.sort(key=lambda one: one.time, reverse=True)
    if len(seen) > MOST_ROWS:  # shows engines with trouble first
        seen = sorted(seen, key=lambda one: one.engine.state == "ready")
    pairs = _pairs(seen, rates)
    leases = [(report.engine_id, lease) for report in reports for lease in report.leases]
    loads = [(report.engine_id, load) for report in reports for load in report.transfers]
    rows = {
        "engines": len(seen),
        "pairs": len(pairs),
        "leases": len(leases),
        "loads": len(loads),
        "failures": len(errors) + sum(1 for one in requests if one.error),
        "requests": len(requests),
    }
    return Snapshot(
        time=now,
        engines=[_engine(one) for one in seen[:MOST_ROWS]],
        pairs=pairs[:MOST_ROWS],
        # Oldest first: operators look for leases and loads without progress.
        leases=[_lease(*one) for one in nlargest(MOST_ROWS, leases, lambda one: one[1].age_s)],
        loads=[_load(*one) for one in nlargest(MOST_ROWS, loads, lambda one: one[1].age_s)],
        failures=failures[:MOST_ROWS],
        requests=list(requests[:MOST_ROWS]),
        left_out={name: count - MOST_ROWS for name, count in rows.items() if count > MOST_ROWS},
    )


def _engine(seen: Seen) -> EngineView:
    engine, figures = seen.engine, seen.figures or ClusterFigures()
    silent = ", ".join(engine.told.silent_peers)
    return EngineView(
        name=_text(engine.name),
        role=engine.role,
        kind=_text(engine.told.kind),
        url=_text(engine.health.shown_url),
        state=engine.state,
        problem=_text(engine.status.last_error or (f"no answer from {silent}" if silent else "")),
        outstanding=engine.outstanding,
        untaken=engine.lent,
        drain=engine.told.drain,
        engine_id=_text(seen.report.engine_id) if seen.report is not None else "",
        **{name: getattr(figures, name) for name in Occupancy.__struct_fields__},
        untold=[_text(why) for why in seen.untold],
    )


def _pairs(seen: Sequence[Seen], rates: Rates) -> list[PairView]:
    """All pairs; from the control channels, and from the metrics of engines without a known
    channel.
    """
    pairs: dict[tuple[str, str], PairView] = {}
    for one in seen:
        for source, loaded, transport in _loaded(one):
            key = source, one.engine_id
            if key not in pairs:
                pairs[key] = PairView(
                    source=_text(source),
                    target=_text(one.engine_id),
                    transport=_text(transport),
                    loaded_bytes=loaded,
                    bytes_per_s=rates.rate(key, one.at, loaded),
                )
    rates.keep(pairs)
    return sorted(pairs.values(), key=lambda pair: (pair.source, pair.target))


def _loaded(seen: Seen) -> Iterator[tuple[str, int, str]]:
    """Source, number of bytes and transport of one engine's loads."""
    if seen.report is None:
        for source, loaded in (seen.figures.loaded if seen.figures is not None else {}).items():
            if loaded:  # a server that only lends also reports this metric
                yield source, loaded, ""
        return
    in_all: dict[str, tuple[int, str]] = {}
    for peer in seen.report.peers:  # a peer may have an entry per start
        if peer.loaded_bytes:
            count, _ = in_all.get(peer.engine_id, (0, ""))
            in_all[peer.engine_id] = (count + peer.loaded_bytes, peer.transport)
    for source, (count, transport) in in_all.items():
        yield source, count, transport


def _lease(engine_id: str, lease: LeaseStatus) -> LeaseView:
    return LeaseView(
        engine=_text(engine_id),
        request_id=_text(lease.request_id),
        num_blocks=lease.num_blocks,
        age_s=lease.age_s,
        remaining_s=lease.remaining_s,
        target=_text(lease.target),
        ranks_done=len(lease.ranks_done),
    )


def _load(engine_id: str, load: TransferStatus) -> LoadView:
    return LoadView(
        engine=_text(engine_id),
        source=_text(load.peer),
        request_id=_text(load.request_id),
        bytes_done=load.bytes_done,
        bytes_total=load.bytes_total,
        age_s=load.age_s,
        progress_s=load.progress_s,
    )


_ABOUT_A_REQUEST = re.compile(r"request (\S{1,256}?)[,:] ")
"""Beginning of an engine's message about a request."""


def _failure(engine_id: str, event: ErrorEvent) -> FailureView:
    about = _ABOUT_A_REQUEST.match(event.message)
    return FailureView(
        time=event.time,
        engine=_text(engine_id),
        message=_text(event.message),
        request_id=_text(about[1]) if about else "",
    )


def _failed(request: ShownRequest) -> FailureView:
    return FailureView(
        time=request.started + request.seconds,
        engine="",
        message=request.error,
        request_id=request.request_id,
    )


def request_view(span: RequestSpan) -> ShownRequest:
    """The view of a request of the router."""
    return ShownRequest(
        request_id=_text(span.request_id),
        path=_text(span.name),
        started=span.started,
        seconds=span.seconds,
        is_open=span.is_open,
        engines=[_text(name) for name in span.engines],
        error=_text(span.error),
        waited_s=span.waited_s,
    )


def _text(text: str) -> str:
    """A printable text of limited length from another program's text."""
    return printable(text[:MOST_CHARACTERS])
