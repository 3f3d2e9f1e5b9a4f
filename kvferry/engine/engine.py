"""The reference engine: a scheduler, the ranks, and the scheduler half of the connector."""

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from kvferry.cache import KVCacheConfig
from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.base import KVConnectorOutput, SchedulerConnector
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
from kvferry.errors import EngineError, KVFerryError, RequestError, WorkerDiedError
from kvferry.lifetimes import Closing
from kvferry.observe.records import TransferRecord

IDLE_SLEEP_S = 0.001
"""Seconds of pause after a step without computed tokens, while loads or leases are pending."""

_MAX_RECORDS = 65_536
"""Maximum number of transfer records kept for :meth:`Engine.records`; older records are dropped."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and states of an engine at a point in time."""

    scheduler: SchedulerStats
    steps: int
    """Number of steps that computed tokens since the start."""
    computed_tokens: int
    """Number of tokens computed since the start."""
    output_tokens: int
    """Number of tokens sampled since the start."""
    connector: dict[str, float]
    """Counters of the connector: from the scheduler half, and sums over the ranks."""
    connector_gauges: dict[str, float]
    """Gauges of the connector in the last step, joined over all ranks."""
    transfer_progress: dict[str, tuple[int, int]]
    """Request id → (bytes in place, bytes in total), for every load in progress."""


class Engine(Closing):
    """An engine: takes requests and returns tokens step by step. A single thread owns the engine.

    If the engine cannot continue, for example because a rank died, ``step`` raises the error, and
    so does every later call of ``step``. The owner can then only call ``close``.

    Args:
        options: options of the scheduler.
        kv_cache_config: blocks and groups of the KV cache.
        executor: the ranks. The engine owns the executor and the next two arguments from here on,
            and closes them.
        connector: the scheduler half of the connector, if the engine exchanges KV.
        events: publisher of KV cache events, if the engine publishes events.

    Raises:
        KVFerryError: the connector cannot use the handshakes of the ranks. All parts are closed.
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
            # The parts close in reverse order: first inform peers, last free the ranks' memory.
            parts.callback(executor.close)
            if events is not None:
                parts.callback(events.close)
            if connector is not None:
                parts.callback(connector.close)
                connector.set_worker_handshakes(executor.handshakes())
            self.scheduler = Scheduler(
                options, kv_cache_config, connector, enable_kv_cache_events=events is not None
            )
            """Decides what each step computes, and keeps the requests."""
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
        """Takes a request in; :meth:`step` returns the outputs of the request.

        Args:
            request_id: an id that is unique among live requests and requests with lent blocks.
            prompt_token_ids: at least one token id.
            sampling: sampling parameters; by default, greedy and at most 16 tokens.
            kv_transfer_params: parameters from the router for the connector.
            cache_salt: only requests with equal salts share cached prefixes.
            arrival: arrival time in Unix seconds, for the timings; by default, now.
            traceparent: the W3C trace context of the request, if any.

        Raises:
            ValueError: an empty prompt, or an id in use.
            KVFerryError: the request is refused; see :meth:`Scheduler.add_request`.
        """
        request = EngineRequest(
            request_id,
            prompt_token_ids,
            SamplingParams() if sampling is None else sampling,
            kv_transfer_params=kv_transfer_params,
            cache_salt=cache_salt,
            arrival=arrival,
            traceparent=traceparent,
            weights_digest=self._executor.weights_digest,
        )
        self.scheduler.add_request(request)
        # Late reports for an earlier request with this id must not count for the new request.
        self._aggregator.forget(request_id)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; the next step reports the end. If the request has ended, the blocks
        that it lends are taken back, as its answer has no reader. Ignores unknown ids.

        Returns:
            Whether the request had not ended.
        """
        return self.scheduler.abort(request_id)

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Takes the lent blocks of an output back, since no engine will use its parameters."""
        if self.connector is not None:
            self.connector.take_back(kv_transfer_params)

    @property
    def events(self) -> CacheEventPublisher | None:
        """The publisher of KV cache events; ``None`` if the engine publishes no events."""
        return self._events

    def has_work(self) -> bool:
        """Whether :meth:`step` is needed: for tokens, or only for reports of loads and leases."""
        return self.scheduler.has_work()

    def step(self) -> list[EngineOutput]:
        """Computes a batch; returns new outputs, also of requests that ended since the last step.

        Raises:
            WorkerDiedError: a rank is gone. The engine cannot continue.
            KVFerryError: any other error after which the engine cannot continue.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._run_step()
            self._publish()
        except BaseException as error:
            # After any error, ranks may have missed a step or may still owe an answer to a step.
            if isinstance(error, KVFerryError):
                self._failure = error
            else:
                self._failure = EngineError(f"a step was broken off: {error!r}")
            raise
        news = self.scheduler.take_news()
        for output in news:
            if (reason := self._unsendable.pop(output.request_id, None)) is not None:
                output.finish_reason, output.error = "error", reason
                output.error_type = RequestError.__name__
        return news

    def check(self) -> None:
        """Checks that all ranks live; for an owner that currently makes no steps.

        Raises:
            WorkerDiedError: a rank is gone. The engine cannot continue.
        """
        if self._failure is None and not self._executor.alive():
            self._failure = self._executor.first_failure()
        if self._failure is not None:
            raise self._failure

    def _run_step(self) -> None:
        output = self.scheduler.schedule()
        self._count_step(output)
        if not output.requests and self._connector is None:
            return  # ranks keep no state of requests, so an empty step has no news for them
        for request_id in self.scheduler.transfers.take_started():
            self._aggregator.forget(request_id)
        ranks = self._execute(output)
        report = self._aggregator.join(
            [None if rank is None else rank.kv_connector_output for rank in ranks],
            self.scheduler.transfers.ending,
        )
        self._note(report)
        if any(rank is None for rank in ranks):
            raise self._executor.first_failure()
        sampled = {name: token for rank in ranks if rank for name, token in rank.sampled.items()}
        gaps = {name: gap for rank in ranks if rank for name, gap in rank.gaps.items()}
        self.scheduler.update(output, sampled, gaps, report)
        self._totals["output"] += len(sampled)

    def _execute(self, output: SchedulerOutput) -> Sequence[RankOutput | None]:
        try:
            return self._executor.execute(output)
        except (OverflowError, TypeError, ValueError):
            # A step that cannot be encoded has reached no rank: retry without the bad requests.
            if not self._drop_unsendable(output):
                raise
            return self._executor.execute(output)

    def _drop_unsendable(self, output: SchedulerOutput) -> bool:
        """Ends requests whose part of a step cannot be encoded; returns whether any were ended."""
        before = len(output.requests)
        for part in list(output.requests):
            try:
                msgspec.msgpack.encode(part)
            except (OverflowError, TypeError, ValueError) as error:
                output.requests.remove(part)
                self._unsendable[part.request_id] = f"it cannot be sent to the ranks: {error}"
                self.scheduler.abort(part.request_id)
        return len(output.requests) < before

    def _publish(self) -> None:
        if self._events is not None:
            self._events.publish(self.scheduler.manager.take_events())

    def _count_step(self, output: SchedulerOutput) -> None:
        tokens = sum(len(part.token_ids) for part in output.requests)
        self._totals["steps"] += bool(tokens)
        self._totals["computed"] += tokens
        self._last_step_tokens = tokens

    def _note(self, report: KVConnectorOutput) -> None:
        """Keeps records, progress, counters and gauges; the scheduler takes the rest."""
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
        """Runs a batch of prompts to the end; leases of their blocks may last longer.

        Args:
            prompts: token ids of each prompt.
            sampling: sampling parameters for all prompts, or a sequence with an item per prompt.
            kv_transfer_params: an item per prompt.

        Returns:
            The whole answer to each prompt, in order; a failed prompt has the finish reason
            ``error``.

        Raises:
            ValueError, KVFerryError: a prompt is refused, or the engine cannot continue.
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
        """The scheduler half of the connector; only the engine's thread may call this half."""
        return self._connector

    @property
    def is_computing(self) -> bool:
        """Whether the last step computed tokens; if not, the caller should pause before a step."""
        return self._last_step_tokens > 0

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that have not answered the current step. Thread-safe."""
        return self._executor.waiting_for()

    def silent_peers(self) -> tuple[str, ...]:
        """Engines from which the connector loads nothing until they answer. Thread-safe."""
        return () if self._connector is None else self._connector.silent_peers()

    def records(self) -> list[TransferRecord]:
        """Transfer records since the last call, each once; at most the newest 65,536."""
        records = list(self._records)
        self._records.clear()
        return records

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters and states."""
        return EngineStats(
            scheduler=self.scheduler.stats(),
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
        """Forgets all cached prefixes; returns ``False`` if any block is in use."""
        is_reset = self.scheduler.manager.reset_prefix_cache()
        self._publish()
        return is_reset

    def load_weights(self, folder: Path) -> str:
        """Computes with other weights from the next step on; returns the digest of the weights.

        Call the method between two steps, when no work is left, so that no KV of the older weights
        is used: cached prefixes are forgotten, and other engines are told.

        Args:
            folder: folder with a converted model of the same shape.

        Raises:
            EngineError: the engine still has work, or its connector cannot follow, or its ranks run
                on several hosts. The weights are as before.
            ModelError: the model has another shape, or the folder cannot be used. The weights are
                as before; cached prefixes are forgotten.
            WorkerDiedError: a rank is gone. The engine cannot continue.
        """
        self.check()
        connector = self._connector
        if connector is not None and not connector.takes_weights:
            raise EngineError(
                f"{type(connector).__name__} cannot follow a change of weights (takes_weights); "
                "restart the engine with the new model"
            )
        if self.has_work() or not self.reset_prefix_cache():
            stats = self.scheduler.stats()
            raise EngineError(
                f"weights: the engine has {stats.running + stats.waiting} requests, "
                f"{stats.loading} loads and {stats.lent} leases; pause it, and wait until all end"
            )
        try:
            heads = self._executor.load_weights(folder)
        except WorkerDiedError as error:
            self._failure = error
            raise
        digest = self._executor.weights_digest
        if connector is not None:
            connector.set_weights(digest, (), heads)
        return digest

    def close(self) -> None:
        """Ends the connector and the ranks, and drops live requests. Idempotent."""
        if self._failure is None:
            self._failure = EngineError("the engine is closed")
        self._parts.close()
