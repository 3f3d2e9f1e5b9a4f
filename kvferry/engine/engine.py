"""The reference engine: a scheduler, the ranks that compute, and the connector between engines."""

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from kvferry.cache import KVCacheConfig
from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.base import KVConnectorOutput, SchedulerConnector, TransferRecord
from kvferry.control.cache_events import CacheEventPublisher
from kvferry.engine.executor import Executor
from kvferry.engine.messages import (
    EngineOutput,
    RankOutput,
    SamplingParams,
    SchedulerOutput,
)
from kvferry.engine.request import EngineRequest, SchedulerOptions
from kvferry.engine.scheduler import Scheduler, SchedulerStats
from kvferry.errors import EngineError, KVFerryError, RequestError
from kvferry.lifetimes import Closing

IDLE_SLEEP_S = 0.001
"""Pause after a step that computed nothing, while loads or leases are pending."""

_MAX_RECORDS = 65_536
"""Transfer records kept for whoever asks; beyond it the oldest are dropped."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine."""

    scheduler: SchedulerStats
    steps: int
    """Steps that computed something, since the start."""
    computed_tokens: int
    """Tokens computed since the start."""
    output_tokens: int
    """Tokens drawn since the start."""
    connector: dict[str, float]
    """Counters of the connector: of its half between engines, and those of its ranks together."""
    connector_gauges: dict[str, float]
    """What the connector's ranks together had in the last step."""
    transfer_progress: dict[str, tuple[int, int]]
    """Request id → (bytes in place, bytes in all) of the loads under way."""


class Engine(Closing):
    """One engine: requests in, tokens out, a step at a time. One thread owns it.

    When the engine cannot go on, because a rank is dead for example, ``step`` raises why, as does
    every later call of it; only ``close`` is left then.

    Args:
        options: of the scheduler.
        kv_cache_config: blocks and groups.
        executor: the ranks. From here on the engine owns this and what follows, and closes them.
        connector: the half between engines, if it exchanges KV.
        events: who is told what the prefix cache holds.

    Raises:
        KVFerryError: the connector cannot use what the ranks told it. All parts are closed.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        kv_cache_config: KVCacheConfig,
        executor: Executor,
        connector: SchedulerConnector | None = None,
        events: CacheEventPublisher | None = None,
    ) -> None:
        self.options = options
        self._executor = executor
        self._connector = connector
        self._events = events
        self._records: deque[TransferRecord] = deque(maxlen=_MAX_RECORDS)
        self._progress: dict[str, tuple[int, int]] = {}
        self._gauges: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self._totals = {"steps": 0, "computed": 0, "output": 0}
        self._last_step_tokens = 0
        self._failure: KVFerryError | None = None
        self._unsendable: dict[str, str] = {}
        with ExitStack() as parts:
            # They are closed in reverse: peers are told first; the ranks' memory goes last.
            parts.callback(executor.close)
            if events is not None:
                parts.callback(events.close)
            if connector is not None:
                parts.callback(connector.close)
                connector.set_worker_handshakes(executor.handshakes())
            self._scheduler = Scheduler(
                options, kv_cache_config, connector, enable_kv_cache_events=events is not None
            )
            self._aggregator = KVOutputAggregator.from_connector(connector, executor.world_size)
            self._parts = parts.pop_all()

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        arrival: float | None = None,
        traceparent: str = "",
    ) -> None:
        """Takes a request in; its news come from :meth:`step`.

        Args:
            request_id: unique among live requests and those whose blocks are lent out.
            prompt_token_ids: at least one.
            sampling: how its tokens are drawn; greedy, 16 at most, if left out.
            kv_transfer_params: what the router sent for the connector.
            cache_salt: prefixes are shared only between requests of equal salt.
            arrival: Unix seconds, for the timings; now if left out.
            traceparent: the W3C trace context that it came with, if any.

        Raises:
            ValueError: an empty prompt, or an id in use.
            KVFerryError: it is refused; see :meth:`Scheduler.add_request`.
        """
        request = EngineRequest(
            request_id,
            prompt_token_ids,
            SamplingParams() if sampling is None else sampling,
            kv_transfer_params=kv_transfer_params,
            cache_salt=cache_salt,
            arrival=arrival,
            traceparent=traceparent,
        )
        self._scheduler.add_request(request)
        # Reports that come late for an earlier request of this id were made before it was gone.
        self._aggregator.forget(request_id)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; the next step reports it. Unknown ids are ignored.

        Returns:
            Whether there was such a request.
        """
        return self._scheduler.abort(request_id)

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """The ``kv_transfer_params`` of an output of ours will be used by nobody."""
        if self.connector is not None:
            self.connector.take_back(kv_transfer_params)

    @property
    def events(self) -> CacheEventPublisher | None:
        """Who is told what the prefix cache holds."""
        return self._events

    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do, be it only to hear of loads and leases."""
        return self._scheduler.has_work()

    def step(self) -> list[EngineOutput]:
        """Computes one batch and returns what is new, requests that ended in between included.

        Raises:
            WorkerDiedError: a rank is gone. The engine cannot go on.
            KVFerryError: likewise, as the message says.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._run_step()
            self._publish()
        except BaseException as error:
            # Whatever it was: the ranks may have missed a step, or have an answer to it pending.
            if isinstance(error, KVFerryError):
                self._failure = error
            else:
                self._failure = EngineError(f"a step was broken off: {error!r}")
            raise
        news = self._scheduler.take_news()
        for output in news:
            if (reason := self._unsendable.pop(output.request_id, None)) is not None:
                output.finish_reason, output.error = "error", reason
                output.error_type = RequestError.__name__
        return news

    def check(self) -> None:
        """Raises if a rank has died meanwhile; for owners that have no step to make.

        Raises:
            WorkerDiedError: a rank is gone. The engine cannot go on.
        """
        if self._failure is None and not self._executor.alive():
            self._failure = self._executor.first_failure()
        if self._failure is not None:
            raise self._failure

    def _run_step(self) -> None:
        output = self._scheduler.schedule()
        self._count_step(output)
        if not output.requests and self._connector is None:
            return  # the ranks keep no state of requests: there is nothing to tell them
        for request_id in self._scheduler.take_started():
            self._aggregator.forget(request_id)
        ranks = self._execute(output)
        report = self._aggregator.join(
            [None if rank is None else rank.kv_connector_output for rank in ranks]
        )
        self._note(report)
        if any(rank is None for rank in ranks):
            raise self._executor.first_failure()
        sampled = {name: token for rank in ranks if rank for name, token in rank.sampled.items()}
        gaps = {name: gap for rank in ranks if rank for name, gap in rank.gaps.items()}
        self._scheduler.update(output, sampled, gaps, report)
        self._totals["output"] += len(sampled)

    def _execute(self, output: SchedulerOutput) -> Sequence[RankOutput | None]:
        try:
            return self._executor.execute(output)
        except (OverflowError, TypeError, ValueError):
            # A step that does not encode has reached no rank: it goes on without whose part it is.
            if not self._drop_unsendable(output):
                raise
            return self._executor.execute(output)

    def _drop_unsendable(self, output: SchedulerOutput) -> bool:
        """Ends the requests whose part of a step does not encode; whether there are any."""
        before = len(output.requests)
        for part in list(output.requests):
            try:
                msgspec.msgpack.encode(part)
            except (OverflowError, TypeError, ValueError) as error:
                output.requests.remove(part)
                self._unsendable[part.request_id] = f"it cannot be sent to the ranks: {error}"
                self._scheduler.abort(part.request_id)
        return len(output.requests) < before

    def _publish(self) -> None:
        if self._events is not None:
            self._events.publish(self._scheduler.manager.take_events())

    def _count_step(self, output: SchedulerOutput) -> None:
        tokens = sum(len(part.token_ids) for part in output.requests)
        self._totals["steps"] += bool(tokens)
        self._totals["computed"] += tokens
        self._last_step_tokens = tokens

    def _note(self, report: KVConnectorOutput) -> None:
        """Keeps what is not the scheduler's: records, progress, counters and gauges."""
        self._records.extend(report.transfer_records)
        self._progress = report.transfer_progress
        self._gauges = report.kv_connector_gauges
        for name, value in report.kv_connector_stats.items():
            self._counters[name] = self._counters.get(name, 0.0) + value

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        kv_transfer_params: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[EngineOutput]:
        """Runs a batch of prompts to its end, leases of its blocks apart.

        Args:
            prompts: token ids.
            sampling: for all, or one per prompt.
            kv_transfer_params: one per prompt.

        Returns:
            For each prompt, in order, its whole answer; one that failed has the finish reason
            ``error``.

        Raises:
            ValueError, KVFerryError: a prompt is refused, or the engine cannot go on.
        """
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        params = kv_transfer_params or [None] * len(prompts)
        done = {name: EngineOutput(request_id=name) for name in (uuid.uuid4().hex for _ in prompts)}
        for name, prompt, choice, param in zip(done, prompts, each, params, strict=True):
            self.add_request(name, prompt, choice, kv_transfer_params=param)
        while any(answer.finish_reason is None for answer in done.values()):
            for output in self.step():
                if output.request_id in done:
                    done[output.request_id] += output
            if not self.is_computing:
                time.sleep(IDLE_SLEEP_S)
        return list(done.values())

    @property
    def connector(self) -> SchedulerConnector | None:
        """The connector's half in this process; only the engine's thread may call it."""
        return self._connector

    @property
    def is_computing(self) -> bool:
        """Whether the last step computed anything; if not, a pause before the next is in order."""
        return self._last_step_tokens > 0

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that have not answered the step under way; for every thread."""
        return self._executor.waiting_for()

    def silent_peers(self) -> tuple[str, ...]:
        """Engines that the connector loads nothing from until they answer; for every thread."""
        return () if self._connector is None else self._connector.silent_peers()

    def records(self) -> list[TransferRecord]:
        """Transfer records since the last call, each once; of the last 65,536 at most."""
        records = list(self._records)
        self._records.clear()
        return records

    def stats(self) -> EngineStats:
        """A snapshot."""
        return EngineStats(
            scheduler=self._scheduler.stats(),
            steps=self._totals["steps"],
            computed_tokens=self._totals["computed"],
            output_tokens=self._totals["output"],
            connector={
                **self._counters,
                **({} if self._connector is None else self._connector.counters()),
            },
            connector_gauges=dict(self._gauges),
            transfer_progress=dict(self._progress),
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; ``False`` while any block is in use."""
        is_reset = self._scheduler.manager.reset_prefix_cache()
        self._publish()
        return is_reset

    def close(self) -> None:
        """Ends connector and ranks; live requests are dropped. Idempotent."""
        if self._failure is None:
            self._failure = EngineError("the engine is closed")
        self._parts.close()
