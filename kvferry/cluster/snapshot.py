"""What a cluster does just now: one :class:`Snapshot`, which the page and ``kvferry top`` show.

It is made of three things. The router knows where its engines are, what it has given them, and its
last requests. Each engine's ``/metrics`` tells of its requests and blocks, those of vLLM servers in
vLLM's words. Each engine's control channel tells of leases, loads, peers and errors, where the
router knows the channel. What nobody tells is ``None``, or an empty text where it is a name; it is
never zero.
"""

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvferry.cluster.engines import Engine
from kvferry.config import printable
from kvferry.control.messages import ErrorEvent, LeaseStatus, StatusReport, TransferStatus
from kvferry.control.tracing import RequestSpan
from kvferry.engine.loop import DrainState

MOST_ROWS = 100
"""Rows of a table of the snapshot; how many more there are is told."""
MOST_CHARACTERS = 2000
"""Of a text that comes from elsewhere."""
WINDOW_S = 5.0
"""Seconds over which bytes per second are taken: loads come in bursts."""


class EngineView(msgspec.Struct, kw_only=True):
    """One engine."""

    name: str
    role: str
    url: str
    state: str
    """``ready``, ``slow``, ``down``, ``draining`` or ``drained``."""
    problem: str = ""
    """Why it is not healthy, or whom it does not reach."""
    outstanding: int
    """Requests of this router that it works on."""
    untaken: int
    """Prompts of this router that it computed, and no decode engine has fetched yet."""
    drain: DrainState | None = None
    engine_id: str = ""
    """What other engines know it by."""
    running: int | None = None
    waiting: int | None = None
    loading: int | None = None
    """Requests whose KV its ranks read."""
    lent: int | None = None
    """Ended requests whose KV others may still read."""
    free_blocks: int | None = None
    blocks: int | None = None
    untold: list[str] = msgspec.field(default_factory=list)
    """Why something is not told."""


class PairView(msgspec.Struct, kw_only=True):
    """Who loads from whom."""

    source: str
    """Engine id; empty where it is not told."""
    target: str
    transport: str = ""
    """What moved the last load."""
    loaded_bytes: int
    """Since the start of both."""
    bytes_per_s: float | None = None
    """Over the last :data:`WINDOW_S`; ``None`` until that can be told."""


class LeaseView(msgspec.Struct, kw_only=True):
    """Blocks that an engine keeps for another one."""

    engine: str
    """Engine id of the owner."""
    request_id: str
    num_blocks: int
    age_s: float
    remaining_s: float
    target: str
    """Engine id of the holder; empty until one takes it."""
    ranks_done: int
    """Ranks of the target that have reported."""


class LoadView(msgspec.Struct, kw_only=True):
    """A load under way."""

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
    """Something that went wrong."""

    time: float
    """Unix seconds of the clock of who tells it."""
    engine: str
    """Engine id; empty for the router."""
    message: str
    request_id: str = ""
    """The request it speaks of, if it names one."""


class RequestView(msgspec.Struct, kw_only=True):
    """One of the router's last requests."""

    request_id: str
    path: str
    started: float
    """Unix seconds of the router's clock."""
    seconds: float
    is_open: bool
    engines: list[str]
    """The names of those that were asked, in their order."""
    error: str


class Snapshot(msgspec.Struct, kw_only=True):
    """The cluster at one moment."""

    time: float
    """Unix seconds of the router's clock."""
    engines: list[EngineView]
    pairs: list[PairView]
    leases: list[LeaseView]
    """Oldest first, as loads."""
    loads: list[LoadView]
    failures: list[FailureView]
    """Newest first."""
    requests: list[RequestView]
    """Of the router, newest first."""
    left_out: dict[str, int]
    """Table → rows that are not shown, if there are any."""


# ---- metrics ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Figures:
    """What an engine's ``/metrics`` tells; ``None`` is what it does not tell."""

    running: int | None = None
    waiting: int | None = None
    loading: int | None = None
    lent: int | None = None
    free_blocks: int | None = None
    blocks: int | None = None
    loaded: dict[str, int] = field(default_factory=dict)
    """Engine id of a source, or nothing where it is not told → bytes that were loaded from it."""


_LIVE, _BLOCKS = "kvferry_engine_live_requests", "kvferry_engine_kv_blocks"
_LOADED = "kvferry_engine_transfer_bytes_total"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _CACHE = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
_VLLM_LOADED = "vllm:kvferry_load_bytes_sum"
_NAMES = (_LIVE, _BLOCKS, _LOADED, _RUNNING, _WAITING, _USAGE, _CACHE, _VLLM_LOADED)
_BEGINNINGS = tuple(f"{name}{after}" for name in _NAMES for after in "{ ")


def figures_in(text: str) -> Figures:
    """Reads the few metrics that are shown.

    >>> figures = figures_in('vllm:num_requests_running{engine="0"} 3.0')
    >>> figures.running, figures.loading
    (3, None)

    Raises:
        ValueError: what begins like one of them is none.
    """
    # vLLM tells of thousands; the parser takes its time with each, and others are served meanwhile.
    lines = [line for line in text.splitlines() if line.startswith(_BEGINNINGS)]
    samples: dict[str, list[Sample]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                samples[sample.name].append(sample)
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # as the parser does
        raise ValueError(f"its metrics cannot be read: {error!r}") from error
    live = {one.labels.get("state"): _count(one.value) for one in samples[_LIVE]}
    blocks = {one.labels.get("state"): _count(one.value) for one in samples[_BLOCKS]}
    figures = Figures(
        running=live.get("running", _sum(samples[_RUNNING])),
        waiting=live.get("waiting", _sum(samples[_WAITING])),
        loading=live.get("loading"),
        lent=live.get("lent"),
    )
    free, used = blocks.get("free"), blocks.get("used")
    if free is not None and used is not None:
        figures.free_blocks, figures.blocks = free, free + used
    else:
        figures.free_blocks, figures.blocks = _vllm_blocks(samples[_USAGE], samples[_CACHE])
    for one in samples[_LOADED] + samples[_VLLM_LOADED]:
        peer = one.labels.get("peer", "")
        figures.loaded[peer] = figures.loaded.get(peer, 0) + (_count(one.value) or 0)
    return figures


def _vllm_blocks(usage: Sequence[Sample], cache: Sequence[Sample]) -> tuple[int | None, int | None]:
    """Free blocks and all blocks of a server's engines."""
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
"""Of the longest number that a browser takes as it is."""


def _count(value: float) -> int | None:
    """A count, unless the value is none."""
    return int(value) if math.isfinite(value) and 0 <= value < 10**_DIGITS else None


def _sum(samples: Sequence[Sample]) -> int | None:
    counts = [count for one in samples if (count := _count(one.value)) is not None]
    return sum(counts) if counts else None


# ---- the whole ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What is known of one engine."""

    engine: Engine
    figures: Figures | None = None
    report: StatusReport | None = None
    untold: list[str] = field(default_factory=list)
    """Why one of the two is missing."""
    at: float = 0.0
    """When it was asked last, on the monotonic clock."""

    @property
    def engine_id(self) -> str:
        """What other engines know it by; the router's name of it where it does not say."""
        return self.report.engine_id if self.report is not None else self.engine.name


class Rates:
    """Bytes per second of each pair, from what it has loaded in all at several moments."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def rate(self, pair: tuple[str, str], at: float, loaded: int) -> float | None:
        """Notes a moment; the rate since the first one that counts, ``None`` if it is the first."""
        seen = self._seen.setdefault(pair, deque())
        if seen and loaded < seen[-1][1]:
            seen.clear()  # it was started again
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
    seen: Sequence[Seen], requests: Sequence[RequestView], rates: Rates, now: float
) -> Snapshot:
    """What is shown of what was seen.

    Args:
        seen: the engines.
        requests: the router's last ones, newest first.
        rates: of earlier snapshots; takes note of this one.
        now: Unix seconds.
    """
    reports = {
        (one.report.engine_id, one.report.incarnation): one.report
        for one in seen
        if one.report is not None  # one engine may have two roles
    }.values()
    errors = [(report.engine_id, error) for report in reports for error in report.errors]
    failures = [_failure(*one) for one in nlargest(MOST_ROWS, errors, lambda one: one[1].time)]
    failures += [_failed(one) for one in requests if one.error]
    failures.sort(key=lambda one: one.time, reverse=True)
    if len(seen) > MOST_ROWS:  # those that have trouble are among those that are shown
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
        # The oldest ones: what stands still is what somebody looks for.
        leases=[_lease(*one) for one in nlargest(MOST_ROWS, leases, lambda one: one[1].age_s)],
        loads=[_load(*one) for one in nlargest(MOST_ROWS, loads, lambda one: one[1].age_s)],
        failures=failures[:MOST_ROWS],
        requests=list(requests[:MOST_ROWS]),
        left_out={name: count - MOST_ROWS for name, count in rows.items() if count > MOST_ROWS},
    )


def _engine(seen: Seen) -> EngineView:
    engine, figures = seen.engine, seen.figures or Figures()
    silent = ", ".join(engine.silent_peers)
    return EngineView(
        name=_text(engine.name),
        role=engine.role,
        url=_text(engine.shown_url),
        state=engine.state,
        problem=_text(engine.last_error or (f"no answer from {silent}" if silent else "")),
        outstanding=engine.outstanding,
        untaken=engine.lent,
        drain=engine.drain,
        engine_id=_text(seen.report.engine_id) if seen.report is not None else "",
        running=figures.running,
        waiting=figures.waiting,
        loading=figures.loading,
        lent=figures.lent,
        free_blocks=figures.free_blocks,
        blocks=figures.blocks,
        untold=[_text(why) for why in seen.untold],
    )


def _pairs(seen: Sequence[Seen], rates: Rates) -> list[PairView]:
    """Who loads from whom; by the control channels, and by the metrics of who has none."""
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
    """Source, bytes and transport of what one engine has loaded."""
    if seen.report is None:
        for source, loaded in (seen.figures.loaded if seen.figures is not None else {}).items():
            if loaded:  # a server that only lends has a count of what it loaded as well
                yield source, loaded, ""
        return
    in_all: dict[str, tuple[int, str]] = {}
    for peer in seen.report.peers:  # one for each start of an engine
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
"""How a message of an engine begins that speaks of a request."""


def _failure(engine_id: str, event: ErrorEvent) -> FailureView:
    about = _ABOUT_A_REQUEST.match(event.message)
    return FailureView(
        time=event.time,
        engine=_text(engine_id),
        message=_text(event.message),
        request_id=_text(about[1]) if about else "",
    )


def _failed(request: RequestView) -> FailureView:
    return FailureView(
        time=request.started + request.seconds,
        engine="",
        message=request.error,
        request_id=request.request_id,
    )


def request_view(span: RequestSpan) -> RequestView:
    """What is shown of a request of the router."""
    return RequestView(
        request_id=_text(span.request_id),
        path=_text(span.name),
        started=span.started,
        seconds=span.seconds,
        is_open=span.is_open,
        engines=[_text(name) for name in span.engines],
        error=_text(span.error),
    )


def _text(text: str) -> str:
    """A text from elsewhere, fit to be shown."""
    return printable(text[:MOST_CHARACTERS])
