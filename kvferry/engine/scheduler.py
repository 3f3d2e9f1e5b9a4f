"""The scheduler: chooses the tokens and the blocks of the next step.

Continuous batching with chunked prefill, first come first served. A request is in one of four
places, each in order of arrival::

    waiting ──────────────► running      holds blocks, computes
       │  ▲                  ▲   │
       │  └─ preempted ──────┼───┘
       ▼                     │
    loading ──► ready ───────┘           hold blocks that the connector fills, or has filled

A router may send a request only to borrow the cached part of its prompt. Such a request ends in
the first step after its arrival, with its prefix cache hits. The request waits for no other
request and takes no block that other requests need.

There are no deadlocks. A request is admitted only if its whole known sequence fits into the pool
beside the remaining needs of all admitted requests. If answers outgrow the pool later, the
scheduler preempts the youngest running or ready request: the request loses its blocks and is
computed again. So the oldest request always makes progress. Blocks of loads and lent blocks of
ended requests cannot be taken back, but all of them return in the end. Leases on cached prefixes
that no engine has fetched yet end early if the pool lacks blocks.
"""

import logging
import time
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

import msgspec

from kvferry.cache import KVCacheConfig, KVCacheManager
from kvferry.connectors.base import KVConnectorOutput, SchedulerConnector
from kvferry.engine.messages import EngineOutput, ScheduledRequest, SchedulerOutput
from kvferry.engine.request import (
    EngineRequest,
    ExternalLoad,
    RequestStatus,
    SchedulerOptions,
    check_request,
    output_limit,
)
from kvferry.engine.transfers import KVTransfers
from kvferry.errors import EngineError, KVFerryError, TransferError

logger = logging.getLogger(__name__)


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The load of the scheduler: requests by state, and use of the blocks."""

    running: int
    waiting: int
    """Number of requests without blocks, and of loaded requests that have no seat yet."""
    loading: int
    lent: int
    """Number of ended requests whose blocks the connector still needs."""
    lent_blocks: int
    """Number of blocks of these ended requests; a block of two requests counts twice."""
    free_blocks: int
    usable_blocks: int
    """Number of blocks in the pool without the null block."""
    usage: float
    """Share of the usable blocks that requests hold, 0 to 1."""
    preemptions: int
    """Number of preemptions since the start."""
    failed_loads: int
    """Number of requests since the start whose KV could not be loaded from another engine."""


class _Admission(Enum):
    ADMITTED = auto()
    """The request left the waiting list: the request runs, loads, or has ended."""
    LATER = auto()
    """The connector wants to be asked again later; other requests may pass this request."""
    BLOCKED = auto()
    """No blocks, no seat or no token budget: no other request may pass this request."""


@dataclass(slots=True)
class _Step:
    """A step during its assembly."""

    budget: int
    """Number of tokens that the step can still take."""
    now: float
    """Start of the step in Unix seconds."""
    parts: list[ScheduledRequest] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)


_by_arrival = attrgetter("sequence")


class Scheduler:
    """Schedules requests and keeps their state. Not thread-safe: use a single thread."""

    def __init__(
        self,
        options: SchedulerOptions,
        kv_cache_config: KVCacheConfig,
        connector: SchedulerConnector | None = None,
        *,
        enable_kv_cache_events: bool = False,
    ) -> None:
        self._options = options
        self.manager = KVCacheManager(
            kv_cache_config,
            options.max_model_len,
            enable_caching=options.enable_prefix_caching,
            enable_kv_cache_events=enable_kv_cache_events,
        )
        """The KV blocks, and the prefix cache that requests share."""
        self._usable_blocks = kv_cache_config.num_blocks - 1
        self.transfers = KVTransfers(connector, self.manager)
        """The requests that load, and the ended ones whose blocks are lent."""
        self.requests: dict[str, EngineRequest] = {}
        """Request id → request, for all that have not ended. Each is in one of the places above."""
        self.waiting: list[EngineRequest] = []
        self.ready: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self._finished: set[str] = set()
        self._news: list[EngineOutput] = []
        self._num_arrived = 0
        self._num_preemptions = 0
        self._num_failed_loads = 0

    # -- requests come and go ---------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Takes a request in.

        Raises:
            ValueError: the id belongs to a live request, to a request whose blocks are lent, or to
                a request whose end was not reported yet.
            KVFerryError: the request is refused: see :func:`~kvferry.engine.request.check_request`,
                or the connector cannot use the request's ``kv_transfer_params``.
        """
        name = request.request_id
        # An unreported end would be taken for the end of the new request.
        untold = any(news.request_id == name for news in self._news)
        if name in self.requests or self.transfers.holds(name) or untold:
            raise ValueError(f"request_id: {name!r} is in use; ids are unique among live requests")
        check_request(request, self._options, self.manager)
        self.transfers.arrived(request)
        self._num_arrived += 1
        request.sequence = self._num_arrived
        self.requests[name] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state; the next ``update`` brings the output. Takes back the blocks
        that an ended request lends. Returns whether a request ended; unknown ids are ignored.
        """
        request = self.requests.get(request_id)
        if request is None:
            self.transfers.take_back(request_id)
            return False
        self._end(request, RequestStatus.FINISHED_ABORTED)
        return True

    def take_news(self) -> list[EngineOutput]:
        """Returns the outputs since the last call."""
        news, self._news = self._news, []
        return news

    def has_work(self) -> bool:
        """Whether a step is useful, or reports of the ranks are still expected."""
        if self.requests or self._news or self.transfers.has_pending_work():
            return True
        return bool(self._finished) and self.transfers.has_connector

    def stats(self) -> SchedulerStats:
        """A snapshot of the scheduler's load."""
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self.waiting) + len(self.ready),
            loading=len(self.transfers.loading),
            lent=len(self.transfers.held),
            lent_blocks=self.transfers.num_held_blocks,
            free_blocks=self.manager.block_pool.get_num_free_blocks(),
            usable_blocks=self._usable_blocks,
            usage=self.manager.usage,
            preemptions=self._num_preemptions,
            failed_loads=self._num_failed_loads,
        )

    # -- a step is put together --------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Assembles the next step. The caller must pass each step to :meth:`update`."""
        self.manager.new_step_starts()
        step = _Step(budget=self._options.max_num_batched_tokens, now=time.time())
        self._lend_cached(step)
        self._schedule_running(step)
        if not step.preempted:  # else the preempted request would return at once
            self._schedule_ready(step)
            self._schedule_waiting(step)
        output = SchedulerOutput(
            requests=step.parts,
            finished_req_ids=self._finished,
            preempted_req_ids=step.preempted,
        )
        self._finished = set()
        output.connector_metadata = self.transfers.metadata(output)
        return output

    def _lend_cached(self, step: _Step) -> None:
        """Ends the requests that only borrow a cached prefix, with the blocks that they hit.

        Must run first in a step: blocks that the same step will write must not be lent yet.
        """
        for request in [each for each in self.waiting if each.only_cached]:
            blocks, num_local = self.manager.get_computed_blocks(request)
            allocated = num_local and self.manager.allocate_slots(
                request,
                0,
                num_new_computed_tokens=num_local,
                new_computed_blocks=blocks,
                reserved_blocks=self._reserved_blocks(),
            )
            if allocated:
                request.load = ExternalLoad(num_local)
                request.num_computed_tokens = request.num_cached_tokens = num_local
            request.timings.scheduled = step.now
            self.transfers.allocated(request)
            self._end(request, RequestStatus.FINISHED_LENGTH)

    def _schedule_running(self, step: _Step) -> None:
        # A long prefill leaves a token of the budget for each request that only decodes.
        decodes = sum(request.num_remaining_tokens == 1 for request in self.running)
        index = 0
        while index < len(self.running) and step.budget:
            request = self.running[index]
            remaining = request.num_remaining_tokens
            decodes -= remaining == 1
            count = min(remaining, max(1, step.budget - decodes))
            while not self._grow(request, count):
                if self._reclaim(request):
                    return  # the blocks that return may make a preemption unnecessary
                victim = max(self.running + self.ready, key=_by_arrival)
                self._preempt(victim, step)
                if victim is request:
                    return  # all younger requests have been preempted before
            self._compute(request, count, step)
            index += 1

    def _schedule_ready(self, step: _Step) -> None:
        """Seats requests whose load has ended; they already hold most of their blocks."""
        while self.ready and step.budget and self._has_seat():
            request = self.ready[0]
            count = min(request.num_remaining_tokens, step.budget)
            if not self._grow(request, count):
                # The blocks were reserved at admission. Since then, answers have outgrown the pool;
                # they return blocks at their end or, for lent blocks, after the fetch.
                self._reclaim(request)
                return
            del self.ready[0]
            self._run(request)
            self._compute(request, count, step)

    def _schedule_waiting(self, step: _Step) -> None:
        index = 0
        while index < len(self.waiting):
            admission = self._admit(self.waiting[index], step)
            if admission is _Admission.BLOCKED:
                return
            if admission is _Admission.LATER:
                index += 1

    def _admit(self, request: EngineRequest, step: _Step) -> _Admission:
        """Gives a waiting request its blocks and starts its computation or load, if possible."""
        local_blocks, num_local = self.manager.get_computed_blocks(request)
        try:
            if not self.transfers.match(request, num_local):
                return _Admission.LATER
        except KVFerryError as error:
            if self._load_failed(request, error):
                return _Admission.ADMITTED
        load = request.load
        computed = num_local + load.external_tokens
        count = 0
        if not load.is_async:
            if not step.budget or not self._has_seat():
                return _Admission.BLOCKED
            count = min(request.num_tokens - computed, step.budget)
        reserved = self._reserved_blocks()
        needed = self.manager.blocks_to_come(
            request,
            self._options.max_num_batched_tokens,
            num_local,
            local_blocks,
            load.external_tokens,
        )
        lacking = needed + reserved - self.manager.block_pool.get_num_free_blocks()
        if lacking > 0:
            self.transfers.reclaim(lacking)
            return _Admission.BLOCKED
        allocated = self.manager.allocate_slots(
            request,
            count,
            num_new_computed_tokens=num_local,
            new_computed_blocks=local_blocks,
            # Blocks that are still empty must not be cache hits: they are cached after the load.
            delay_cache_blocks=load.external_tokens > 0,
            num_external_computed_tokens=load.external_tokens,
            reserved_blocks=reserved,
        )
        if allocated is None:
            return _Admission.BLOCKED
        self.waiting.remove(request)
        self._admitted(request, count, step)
        return _Admission.ADMITTED

    def _admitted(self, request: EngineRequest, count: int, step: _Step) -> None:
        load = request.load
        request.num_computed_tokens = load.local_tokens
        request.allocated_tokens = load.local_tokens + load.external_tokens + count
        if request.timings.scheduled is None:
            request.timings.scheduled = step.now
            request.num_cached_tokens = load.local_tokens
        self.transfers.allocated(request)
        if load.external_tokens:
            request.timings.load_started = step.now
        if load.is_async:
            request.advance(RequestStatus.WAITING_FOR_REMOTE_KVS)
            return
        request.num_computed_tokens += load.external_tokens
        self._run(request)
        self._compute(request, count, step)

    def _run(self, request: EngineRequest) -> None:
        request.advance(RequestStatus.RUNNING)
        insort(self.running, request, key=_by_arrival)

    def _compute(self, request: EngineRequest, count: int, step: _Step) -> None:
        """Adds ``count`` tokens of a request to the step; the request has the blocks already."""
        start = request.num_computed_tokens
        end = start + count
        if request.timings.prefill_started is None:
            request.timings.prefill_started = step.now
        step.budget -= count
        block_ids = self.manager.get_block_ids(request.request_id)
        step.parts.append(
            ScheduledRequest(
                request_id=request.request_id,
                token_ids=list(request.all_token_ids[start:end]),
                first_position=start,
                block_ids=block_ids,
                num_new_blocks=request.note_blocks(block_ids),
                resumed=request.resumed,
                sample=request.sampling if end == request.num_tokens else None,
                output_index=request.output_index,
            )
        )
        request.resumed = False

    def _grow(self, request: EngineRequest, count: int) -> bool:
        """Allocates room for ``count`` more tokens of a request with blocks."""
        if self.manager.allocate_slots(request, count) is None:
            return False
        request.allocated_tokens = request.num_computed_tokens + count
        return True

    def _reclaim(self, request: EngineRequest) -> bool:
        """Asks for unfetched lent blocks for a request; returns whether any will come back."""
        needed = self.manager.blocks_to_come(request, self._options.max_num_batched_tokens)
        return self.transfers.reclaim(
            max(1, needed - self.manager.block_pool.get_num_free_blocks())
        )

    def _preempt(self, victim: EngineRequest, step: _Step) -> None:
        """Takes a request's blocks; all beyond its cache hits is computed or loaded again."""
        self._detach(victim)
        self._requeue(victim, RequestStatus.PREEMPTED)
        step.preempted.add(victim.request_id)
        self._num_preemptions += 1

    def _requeue(self, request: EngineRequest, status: RequestStatus) -> None:
        self.manager.free(request)
        request.forget_blocks()
        request.advance(status)
        insort(self.waiting, request, key=_by_arrival)

    def _has_seat(self) -> bool:
        return len(self.running) < self._options.max_num_seqs

    def _reserved_blocks(self) -> int:
        """Number of blocks that admitted requests still need for their known tokens."""
        admitted = (*self.running, *self.ready, *self.transfers.loading)
        return sum(
            self.manager.blocks_to_come(request, self._options.max_num_batched_tokens)
            for request in admitted
            if request.allocated_tokens < request.num_tokens
        )

    # -- a step has been computed ------------------------------------------------------------

    def update(
        self,
        output: SchedulerOutput,
        sampled: Mapping[str, int],
        gaps: Mapping[str, float],
        transfers: KVConnectorOutput | None = None,
    ) -> None:
        """Applies the results and reports of the ranks for a step of :meth:`schedule`.

        Args:
            output: the step.
            sampled: request id → sampled token, for every part of the step with sampling.
            gaps: request id → difference between the two highest logits at this position.
            transfers: the joined report of the connectors of all ranks.

        Raises:
            EngineError: the ranks sampled no token for a part with sampling.
        """
        for loaded in self.transfers.receive(transfers or KVConnectorOutput()):
            self._load_ended(loaded)
        for part in output.requests:
            request = self.requests.get(part.request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # the load failed in this step, so the computed tokens are worthless
            request.num_computed_tokens += len(part.token_ids)
            if part.sample is None:
                continue
            if part.request_id not in sampled:
                raise EngineError(f"no rank drew a token for request {part.request_id!r}")
            self._draw(request, sampled[part.request_id], gaps.get(part.request_id))

    def _draw(self, request: EngineRequest, token: int, gap: float | None) -> None:
        """Appends a sampled token, and ends the request if the token is the last."""
        now = time.time()
        if request.timings.first_token is None:
            request.timings.prefill_finished = now
            request.timings.first_token = now
        request.append_output_token_ids(token)
        news = request.news()
        news.token_ids.append(token)
        if gap is not None:
            news.gaps.append(gap)
        sampling = request.sampling
        is_eos = token in self._options.eos_token_ids and not sampling.ignore_eos
        if is_eos or token in sampling.stop_token_ids:
            self._end(request, RequestStatus.FINISHED_STOPPED, news)
        elif request.num_output_tokens >= output_limit(request, self._options):
            self._end(request, RequestStatus.FINISHED_LENGTH, news)
        else:
            self._news.append(news)

    def _load_ended(self, request: EngineRequest) -> None:
        load = request.load
        request.timings.load_finished = time.time()
        if not load.error:
            if not request.num_output_tokens:  # not for a second load after a preemption
                request.num_external_tokens = load.external_tokens
            if load.is_async:
                request.num_computed_tokens = load.valid_tokens
                request.advance(RequestStatus.WAITING)
                insort(self.ready, request, key=_by_arrival)
            return
        if self._load_failed(request, TransferError(f"KV could not be loaded: {load.error}")):
            return
        # The valid prefix is in the cache now. A new admission of the request hits the prefix,
        # unless other requests have needed the blocks more.
        if load.is_async:
            self._requeue(request, RequestStatus.WAITING)
        else:
            self._detach(request)
            self._requeue(request, RequestStatus.PREEMPTED)

    def _load_failed(self, request: EngineRequest, error: KVFerryError) -> bool:
        """Applies ``kv_load_failure_policy``; returns whether the policy ended the request."""
        self._num_failed_loads += 1
        policy = self._options.load_failure_policy
        logger.warning(
            "request %s: no KV from outside (policy: %s): %s: %s",
            request.request_id,
            policy,
            type(error).__name__,
            error,
        )
        request.may_load = False
        if policy == "recompute":
            return False
        self._end(request, RequestStatus.FINISHED_ERROR, error=error)
        return True

    # -- ends ---------------------------------------------------------------------------------

    def _end(
        self,
        request: EngineRequest,
        status: RequestStatus,
        news: EngineOutput | None = None,
        error: KVFerryError | None = None,
    ) -> None:
        self._detach(request)
        request.advance(status)
        request.timings.finished = time.time()
        del self.requests[request.request_id]
        self._finished.add(request.request_id)
        news = news or request.news()
        news.kv_transfer_params = self.transfers.ended(request)
        news.finish_reason = request.finish_reason
        news.timings = request.timings
        if error is not None:
            news.error = str(error)
            news.error_type = type(error).__name__
        self._news.append(news)

    def _detach(self, request: EngineRequest) -> None:
        """Removes a request from its list; the connector keeps the loading requests."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return
        elif request.allocated_tokens:
            self.ready.remove(request)
        else:
            self.waiting.remove(request)
