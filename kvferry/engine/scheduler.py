"""The scheduler: which tokens are computed in the next step, in which blocks.

Continuous batching with chunked prefill, first come first served. A request is in one of four
places, each in order of arrival::

    waiting ──────────────► running      holds blocks, computes
       │  ▲                  ▲   │
       │  └─ preempted ──────┼───┘
       ▼                     │
    loading ──► ready ───────┘           hold blocks that the connector fills, or has filled

A request that only wants what is cached of its prompt to be lent ends in the first step after its
arrival, with as many blocks as it hits. It waits for nobody, and takes no block that others need.

Nothing deadlocks: a request is admitted only if its whole known sequence fits beside what the
admitted ones still need for theirs. When answers then outgrow the pool, the youngest of those that
run or are ready gives its blocks up and is computed again, so the oldest always gets on. Blocks of
loads and of ended requests that are lent out cannot be taken back, but all of them come back;
cached prefixes that nobody has fetched yet are no longer lent then.
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
    Load,
    RequestStatus,
    SchedulerOptions,
    check_request,
    output_limit,
)
from kvferry.engine.transfers import KVTransfers
from kvferry.errors import EngineError, KVFerryError, TransferError

logger = logging.getLogger(__name__)


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the scheduler is."""

    running: int
    waiting: int
    """Requests without blocks, and those whose load has ended but that have no seat yet."""
    loading: int
    lent: int
    """Ended requests whose blocks the connector still needs."""
    lent_blocks: int
    """Their blocks; one that two of them share counts twice."""
    free_blocks: int
    usable_blocks: int
    """Blocks of the pool without the null block."""
    usage: float
    """Share of the usable blocks that requests hold, 0 to 1."""
    preemptions: int
    """Since the start."""
    failed_loads: int
    """Requests whose KV did not come from outside, since the start."""


class _Admission(Enum):
    ADMITTED = auto()
    """It left the waiting list: it runs, loads, or has ended."""
    LATER = auto()
    """The connector wants to be asked again; others may pass."""
    BLOCKED = auto()
    """No blocks, no seat or no budget: nobody may pass."""


@dataclass(slots=True)
class _Step:
    """A step while it is put together."""

    budget: int
    """Tokens that may still be added."""
    now: float
    """Unix seconds."""
    parts: list[ScheduledRequest] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)


_by_arrival = attrgetter("sequence")


class Scheduler:
    """Decides and keeps the state of all requests. Not thread-safe: one thread owns it."""

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
        """The blocks, and the prefix cache that requests share."""
        self._usable_blocks = kv_cache_config.num_blocks - 1
        self._transfers = KVTransfers(connector, self.manager)
        self._requests: dict[str, EngineRequest] = {}
        self._waiting: list[EngineRequest] = []
        self._ready: list[EngineRequest] = []
        self._running: list[EngineRequest] = []
        self._finished: set[str] = set()
        self._news: list[EngineOutput] = []
        self._num_arrived = 0
        self._num_preemptions = 0
        self._num_failed_loads = 0

    # -- requests come and go ---------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Takes a request in.

        Raises:
            ValueError: its id is that of a live request, or of one whose blocks are lent out, or
                whose end was not told yet.
            KVFerryError: it is refused: see :func:`~kvferry.engine.request.check_request`, or
                the connector cannot use its ``kv_transfer_params``.
        """
        name = request.request_id
        # An end that is yet to be told would be taken for that of the new request.
        untold = any(news.request_id == name for news in self._news)
        if name in self._requests or self._transfers.holds(name) or untold:
            raise ValueError(f"request_id: {name!r} is in use; ids are unique among live requests")
        check_request(request, self._options, self.manager)
        self._transfers.arrived(request)
        self._num_arrived += 1
        request.sequence = self._num_arrived
        self._requests[name] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request at whatever point it is; its output comes with the next ``update``.

        Returns:
            Whether there was one; unknown and ended ids are ignored.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, RequestStatus.FINISHED_ABORTED)
        return True

    def take_news(self) -> list[EngineOutput]:
        """Outputs since the last call."""
        news, self._news = self._news, []
        return news

    def take_started(self) -> list[str]:
        """Ids of loads and loans that began since the last call: earlier reports are not theirs."""
        return self._transfers.take_started()

    def has_work(self) -> bool:
        """Whether a step would get anything on, or somebody waits for a report of the ranks."""
        if self._requests or self._news or self._transfers.has_pending_work():
            return True
        return bool(self._finished) and self._transfers.has_connector

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._ready),
            loading=len(self._transfers.loading),
            lent=self._transfers.num_held,
            lent_blocks=self._transfers.num_held_blocks,
            free_blocks=self.manager.block_pool.get_num_free_blocks(),
            usable_blocks=self._usable_blocks,
            usage=self.manager.usage,
            preemptions=self._num_preemptions,
            failed_loads=self._num_failed_loads,
        )

    # -- a step is put together --------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Puts the next step together. Every call is followed by one of :meth:`update`."""
        self.manager.new_step_starts()
        step = _Step(budget=self._options.max_num_batched_tokens, now=time.time())
        self._lend_cached(step)
        self._schedule_running(step)
        if not step.preempted:  # whoever was pushed out would come straight back in
            self._schedule_ready(step)
            self._schedule_waiting(step)
        output = SchedulerOutput(
            requests=step.parts,
            finished_req_ids=self._finished,
            preempted_req_ids=step.preempted,
        )
        self._finished = set()
        output.connector_metadata = self._transfers.metadata(output)
        return output

    def _lend_cached(self, step: _Step) -> None:
        """Ends the requests that want nothing computed, with the blocks that they hit.

        Before the step has requests: of what it will write, nothing may be read yet.
        """
        for request in [each for each in self._waiting if each.only_cached]:
            blocks, num_local = self.manager.get_computed_blocks(request)
            allocated = num_local and self.manager.allocate_slots(
                request,
                0,
                num_new_computed_tokens=num_local,
                new_computed_blocks=blocks,
                reserved_blocks=self._reserved_blocks(),
            )
            if allocated:
                request.load = Load(num_local)
                request.num_computed_tokens = request.num_cached_tokens = num_local
            request.timings.scheduled = step.now
            self._transfers.allocated(request)
            self._end(request, RequestStatus.FINISHED_LENGTH)

    def _schedule_running(self, step: _Step) -> None:
        # A long prefill leaves one token of the budget to each request that only decodes.
        decodes = sum(request.num_remaining_tokens == 1 for request in self._running)
        index = 0
        while index < len(self._running) and step.budget:
            request = self._running[index]
            remaining = request.num_remaining_tokens
            decodes -= remaining == 1
            count = min(remaining, max(1, step.budget - decodes))
            while not self._grow(request, count):
                if self._reclaim(request):
                    return  # with the blocks that come back, nobody may have to be preempted
                victim = max(self._running + self._ready, key=_by_arrival)
                self._preempt(victim, step)
                if victim is request:
                    return  # it was the last one: all younger ones had gone before
            self._compute(request, count, step)
            index += 1

    def _schedule_ready(self, step: _Step) -> None:
        """Seats requests whose load has ended; they hold most of their blocks already."""
        while self._ready and step.budget and self._has_seat():
            request = self._ready[0]
            count = min(request.num_remaining_tokens, step.budget)
            if not self._grow(request, count):
                # Its blocks were reserved when it was admitted. Answers have outgrown the pool
                # since, and give the blocks back when they end or, if lent out, are read.
                self._reclaim(request)
                return
            del self._ready[0]
            self._run(request)
            self._compute(request, count, step)

    def _schedule_waiting(self, step: _Step) -> None:
        index = 0
        while index < len(self._waiting):
            admission = self._admit(self._waiting[index], step)
            if admission is _Admission.BLOCKED:
                return
            if admission is _Admission.LATER:
                index += 1

    def _admit(self, request: EngineRequest, step: _Step) -> _Admission:
        """Gives a waiting request its blocks and lets it run or load, if that is possible."""
        local_blocks, num_local = self.manager.get_computed_blocks(request)
        try:
            if not self._transfers.match(request, num_local):
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
            self._transfers.reclaim(lacking)
            return _Admission.BLOCKED
        allocated = self.manager.allocate_slots(
            request,
            count,
            num_new_computed_tokens=num_local,
            new_computed_blocks=local_blocks,
            # What is not there yet must not be found by others: cached once the load has ended.
            delay_cache_blocks=load.external_tokens > 0,
            num_external_computed_tokens=load.external_tokens,
            reserved_blocks=reserved,
        )
        if allocated is None:
            return _Admission.BLOCKED
        self._waiting.remove(request)
        self._admitted(request, count, step)
        return _Admission.ADMITTED

    def _admitted(self, request: EngineRequest, count: int, step: _Step) -> None:
        load = request.load
        request.num_computed_tokens = load.local_tokens
        request.allocated_tokens = load.local_tokens + load.external_tokens + count
        if request.timings.scheduled is None:
            request.timings.scheduled = step.now
            request.num_cached_tokens = load.local_tokens
        self._transfers.allocated(request)
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
        insort(self._running, request, key=_by_arrival)

    def _compute(self, request: EngineRequest, count: int, step: _Step) -> None:
        """Adds ``count`` tokens of a request, whose blocks are there, to the step."""
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
        """Allocates room for ``count`` more tokens of a request that has blocks."""
        if self.manager.allocate_slots(request, count) is None:
            return False
        request.allocated_tokens = request.num_computed_tokens + count
        return True

    def _reclaim(self, request: EngineRequest) -> bool:
        """Whether blocks that are lent come back, for a request that finds too few free ones."""
        needed = self.manager.blocks_to_come(request, self._options.max_num_batched_tokens)
        return self._transfers.reclaim(
            max(1, needed - self.manager.block_pool.get_num_free_blocks())
        )

    def _preempt(self, victim: EngineRequest, step: _Step) -> None:
        """Takes a request's blocks; it is computed, or loaded, again from where its hits end."""
        self._detach(victim)
        self._requeue(victim, RequestStatus.PREEMPTED)
        step.preempted.add(victim.request_id)
        self._num_preemptions += 1

    def _requeue(self, request: EngineRequest, status: RequestStatus) -> None:
        self.manager.free(request)
        request.forget_blocks()
        request.advance(status)
        insort(self._waiting, request, key=_by_arrival)

    def _has_seat(self) -> bool:
        return len(self._running) < self._options.max_num_seqs

    def _reserved_blocks(self) -> int:
        """Blocks that admitted requests still need for the tokens they are known to have."""
        admitted = (*self._running, *self._ready, *self._transfers.loading)
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
        """Takes in what the ranks computed and reported for a step of :meth:`schedule`.

        Args:
            output: the step.
            sampled: request id → token drawn, for every part of the step that was to be sampled.
            gaps: request id → difference of the two best logits behind it.
            transfers: the joined report of the ranks' connectors.

        Raises:
            EngineError: the ranks drew no token where one was due.
        """
        for loaded in self._transfers.receive(transfers or KVConnectorOutput()):
            self._load_ended(loaded)
        for part in output.requests:
            request = self._requests.get(part.request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # its load failed within this very step: what it computed is worthless
            request.num_computed_tokens += len(part.token_ids)
            if part.sample is None:
                continue
            if part.request_id not in sampled:
                raise EngineError(f"no rank drew a token for request {part.request_id!r}")
            self._draw(request, sampled[part.request_id], gaps.get(part.request_id))

    def _draw(self, request: EngineRequest, token: int, gap: float | None) -> None:
        """Appends an output token and ends the request if that was the last one."""
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
            if not request.num_output_tokens:  # not one that was preempted and loaded again
                request.num_external_tokens = load.external_tokens
            if load.is_async:
                request.num_computed_tokens = load.valid_tokens
                request.advance(RequestStatus.WAITING)
                insort(self._ready, request, key=_by_arrival)
            return
        if self._load_failed(request, TransferError(f"KV could not be loaded: {load.error}")):
            return
        # The valid prefix has just been cached: the request finds it there when it is admitted
        # again, unless somebody needed the blocks more.
        if load.is_async:
            self._requeue(request, RequestStatus.WAITING)
        else:
            self._detach(request)
            self._requeue(request, RequestStatus.PREEMPTED)

    def _load_failed(self, request: EngineRequest, error: KVFerryError) -> bool:
        """Applies ``kv_load_failure_policy``; returns whether it ended the request."""
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
        del self._requests[request.request_id]
        self._finished.add(request.request_id)
        news = news or request.news()
        news.kv_transfer_params = self._transfers.ended(request)
        news.finish_reason = request.finish_reason
        news.timings = request.timings
        if error is not None:
            news.error = str(error)
            news.error_type = type(error).__name__
        self._news.append(news)

    def _detach(self, request: EngineRequest) -> None:
        """Takes a request out of the list it is in; loading ones are the connector's."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return
        elif request.allocated_tokens:
            self._ready.remove(request)
        else:
            self._waiting.remove(request)
