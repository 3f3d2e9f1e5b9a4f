"""An engine without a model, which drives both halves of a connector and checks what they promise.

It schedules like a small engine: blocks are given out in no order and come back, every step runs
on every rank, metadata crosses as MessagePack, reports are joined by the aggregator. Its caches are
:class:`~kvferry.testing.known_cache.KnownCache`, so every load is compared cell by cell and every
block that nobody holds is watched.
"""

import random
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from kvferry.config import KVTransferConfig
from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.base import (
    KVConnector,
    KVConnectorMetadata,
    KVConnectorOutput,
    SchedulerConnector,
    WorkerConnector,
)
from kvferry.connectors.registry import connector_context
from kvferry.errors import KVFerryError
from kvferry.testing.fake_request import FakePart, FakeRequest, FakeSchedule, Stage
from kvferry.testing.known_cache import KnownCache
from kvferry.topology.description import ModelFingerprint
from kvferry.topology.geometry import EngineGeometry

LOCAL = 1
"""Salt of the cells of a local prefix hit, so that a load that overwrites them shows."""


class ContractBrokenError(AssertionError):
    """The connector did what the plugin API forbids; the message says what."""


class FakeEngine:
    """One engine in this process. Build it with :meth:`open`; close it."""

    def __init__(
        self,
        plugin: type[KVConnector],
        geometry: EngineGeometry,
        num_blocks: int,
        scheduler: SchedulerConnector,
        workers: Sequence[WorkerConnector],
        caches: Sequence[KnownCache],
    ) -> None:
        self.plugin = plugin
        self.geometry = geometry
        self.scheduler = scheduler
        self.workers = workers
        self.caches = caches
        self.requests: dict[str, FakeRequest] = {}
        """Every request so far, by id; a later one of the same id takes the place."""
        self.held: dict[str, list[int]] = {}
        """Blocks of ended requests that the connector keeps."""
        self.outputs: list[KVConnectorOutput] = []
        """The joined report of every step."""
        self.during_step: Callable[[], None] = lambda: None
        """Called between a step's schedule and its ranks; tests put an abort here."""
        self.num_blocks = num_blocks
        self._free = list(range(1, num_blocks))
        self._finished: set[str] = set()
        self._aggregator = KVOutputAggregator.from_connector(plugin, len(workers))
        self._reported: list[set[tuple[str, str]]] = [set() for _ in workers]
        self._random = random.Random(0)

    @classmethod
    def open(
        cls, config: KVTransferConfig, geometry: EngineGeometry, *, num_blocks: int = 64
    ) -> "FakeEngine":
        """Builds the connector's halves and introduces them to each other.

        Raises:
            KVFerryError: what the connector raises.
        """
        plugin, context = connector_context(
            config,
            incarnation=uuid.uuid4().hex,
            groups=(geometry,),
            model=fake_model(geometry),
            num_blocks=num_blocks,
            world_size=geometry.world_size,
        )
        with ExitStack() as stack:
            workers, caches = [], []
            for rank in range(geometry.world_size):
                worker = plugin.worker(context, rank)
                stack.callback(worker.close)
                memory = worker.allocate(geometry.nbytes(rank, num_blocks))
                cache = KnownCache(geometry, rank, num_blocks, memory)
                worker.register_kv_caches(cache.registered())
                workers.append(worker)
                caches.append(cache)
            scheduler = plugin.scheduler(context)
            stack.callback(scheduler.close)
            scheduler.set_worker_handshakes([worker.handshake_metadata() for worker in workers])
            stack.pop_all()
        return cls(plugin, geometry, num_blocks, scheduler, workers, caches)

    # -- requests -----------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        params: dict[str, Any] | None = None,
        *,
        local_blocks: int = 0,
    ) -> FakeRequest:
        """Takes a request in; ``local_blocks`` of its prompt are a local prefix hit.

        Raises:
            KVFerryError: the connector refuses its params.
        """
        local_tokens = local_blocks * self.geometry.block_size
        request = FakeRequest(request_id, tuple(prompt), params, local_tokens)
        assert local_tokens < request.num_tokens, "a hit leaves one token to compute"
        self.scheduler.on_new_request(request)
        self._aggregator.forget(request_id)
        for reported in self._reported:
            reported -= {("finished_sending", request_id), ("finished_recving", request_id)}
        self.requests[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request at whatever point it is."""
        request = self.requests[request_id]
        if request.stage is not Stage.FINISHED:
            self._end(request, "abort")

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do and nothing to wait for."""
        live = any(request.stage is not Stage.FINISHED for request in self.requests.values())
        return not (live or self.held or self._finished or self.scheduler.has_pending_work())

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs one step; returns whether any token was computed."""
        for request in self._in_stage(Stage.WAITING):
            self._admit(request)
        computing = self._in_stage(Stage.COMPUTING)
        schedule = FakeSchedule(
            requests=[self._part(request) for request in computing],
            num_scheduled_tokens={
                request.request_id: request.num_tokens - request.num_computed_tokens
                for request in computing
            },
            finished_req_ids=self._finished,
        )
        self._finished = set()
        metadata = self.scheduler.build_connector_meta(schedule)
        _promise(
            type(metadata) is self.plugin.Metadata,
            f"build_connector_meta returned a {type(metadata).__name__}, not Metadata",
        )
        self.during_step()
        wire = msgspec.msgpack.encode(metadata)
        reports = [self._run_rank(rank, wire, schedule) for rank in range(len(self.workers))]
        self._receive(self._aggregator.join(reports))
        for request in computing:
            if request.stage is Stage.COMPUTING:
                request.num_computed_tokens = request.num_tokens
                request.output_token_ids.append(len(request.prompt_token_ids))
                self._end(request, "length")
        return bool(computing)

    def _in_stage(self, stage: Stage) -> list[FakeRequest]:
        return [request for request in self.requests.values() if request.stage is stage]

    def _part(self, request: FakeRequest) -> FakePart:
        request.started = True
        return FakePart(
            request_id=request.request_id,
            first_position=request.num_computed_tokens,
            block_ids=request.get_block_ids(),
            num_new_blocks=(len(request.table),),
        )

    def _admit(self, request: FakeRequest) -> None:
        local = request.local_tokens
        try:
            tokens, load_async = self._ask(request)
        except KVFerryError as error:
            request.error = error
            tokens, load_async = 0, False
        needed = -(-request.num_tokens // self.geometry.block_size)
        if tokens is None or needed > len(self._free):
            return
        self._random.shuffle(self._free)
        request.table, self._free = self._free[:needed], self._free[needed:]
        for cache in self.caches:
            cache.write(request.table, request.prompt_token_ids, 0, local, LOCAL)
        request.num_computed_tokens = local
        request.external_tokens = tokens
        self.scheduler.update_state_after_alloc(request, request, tokens)
        if load_async:
            request.stage = Stage.LOADING
        else:
            request.num_computed_tokens += tokens
            request.stage = Stage.COMPUTING

    def _ask(self, request: FakeRequest) -> tuple[int | None, bool]:
        local = request.local_tokens
        tokens, load_async = self.scheduler.get_num_new_matched_tokens(request, local)
        if tokens is None:
            return None, False
        again = self.scheduler.get_num_new_matched_tokens(request, local)
        id = request.request_id
        _promise(
            again == (tokens, load_async), f"{id}: asked twice: {(tokens, load_async)}, {again}"
        )
        _promise(
            0 <= tokens <= request.num_tokens - local,
            f"{id}: offers {tokens} tokens beyond {local} of {request.num_tokens}",
        )
        _promise(tokens > 0 or not load_async, f"{id}: offers to load 0 tokens asynchronously")
        # At least one token is computed here, whatever is offered.
        tokens = min(tokens, request.num_tokens - 1 - local)
        return tokens, load_async and tokens > 0

    def _run_rank(self, rank: int, metadata: bytes, schedule: FakeSchedule) -> KVConnectorOutput:
        worker, cache = self.workers[rank], self.caches[rank]
        decoded: KVConnectorMetadata = msgspec.msgpack.decode(metadata, type=self.plugin.Metadata)
        worker.start_load_kv(decoded)
        layers = [self.geometry.layer_name(layer) for layer in self.geometry.layers(rank)]
        for layer in layers:
            worker.wait_for_layer_load(layer)
        for part in schedule.requests:
            self._compute(cache, self.requests[part.request_id])
        for layer in layers:
            worker.save_kv_layer(layer)
        worker.wait_for_save()
        report = worker.get_transfer_results(set(schedule.finished_req_ids))
        self._check_report(rank, report)
        return report

    def _compute(self, cache: KnownCache, request: FakeRequest) -> None:
        if request.stage is not Stage.COMPUTING:
            return  # aborted during this step
        if not request.failed:
            self._check_load(cache, request)
        first = request.num_computed_tokens
        cache.write(request.table, request.prompt_token_ids, first, request.num_tokens)

    def _check_load(self, cache: KnownCache, request: FakeRequest) -> None:
        local, end = request.local_tokens, request.local_tokens + request.external_tokens
        tokens = request.prompt_token_ids
        wrong = cache.wrong_cells(request.table, tokens, 0, local, LOCAL)
        _promise(not wrong, f"{request.request_id}: the load changed the local hit: {wrong}")
        wrong = cache.wrong_cells(request.table, tokens, local, end)
        _promise(not wrong, f"{request.request_id}: the load is not what the source held: {wrong}")

    def _check_report(self, rank: int, report: KVConnectorOutput) -> None:
        _promise(
            report.failed_recving <= report.finished_recving,
            f"rank {rank}: failed_recving {report.failed_recving} is not in finished_recving",
        )
        for direction in ("finished_sending", "finished_recving"):
            for id in getattr(report, direction):
                _promise(id in self.requests, f"rank {rank}: {direction} names unknown {id!r}")
                key = (direction, id)
                _promise(key not in self._reported[rank], f"rank {rank}: {key} is reported twice")
                self._reported[rank].add(key)

    # -- what the ranks reported ----------------------------------------------------------------

    def _receive(self, output: KVConnectorOutput) -> None:
        self.outputs.append(output)
        self.scheduler.update_connector_output(output)
        for id in output.finished_recving:
            request = self.requests[id]
            if request.stage is Stage.LOADING:
                self._loaded(request, id in output.failed_recving)
            elif id in self.held and id not in output.finished_sending:
                self._release(self.held.pop(id))
        for id in output.finished_sending:
            _promise(id in self.held, f"{id}: finished_sending, but its blocks were not kept")
            self._release(self.held.pop(id))

    def _loaded(self, request: FakeRequest, failed: bool) -> None:
        request.failed = failed
        request.stage = Stage.COMPUTING
        if not failed:
            for cache in self.caches:
                self._check_load(cache, request)
            request.num_computed_tokens += request.external_tokens
        # With no more tokens to come from outside, as the plugin API says.
        self.scheduler.update_state_after_alloc(request, request, 0)

    def _end(self, request: FakeRequest, reason: str) -> None:
        request.finish_reason = reason
        request.stage = Stage.FINISHED
        keep, params = self.scheduler.request_finished(request, request.get_block_ids())
        request.response_params = params
        blocks, request.table = request.table, []
        if keep and blocks:
            self.held[request.request_id] = blocks
        else:
            self._release(blocks)
        self._finished.add(request.request_id)

    def _release(self, blocks: list[int]) -> None:
        for cache in self.caches:
            cache.spoil(blocks)
        self._free += blocks

    def check_memory(self) -> None:
        """Asserts that nobody wrote to the null block or to a block that nobody holds.

        Raises:
            ContractBrokenError: somebody did.
        """
        for cache in self.caches:
            touched = cache.touched([0, *self._free])
            _promise(
                not touched, f"rank {cache.rank}: blocks {touched} were written to, held by nobody"
            )

    def close(self) -> None:
        """Closes every half, twice: ``close`` is idempotent."""
        for _ in range(2):
            self.scheduler.close()
            for worker in self.workers:
                worker.close()


def run(
    engines: Sequence[FakeEngine], until: Callable[[], bool], *, timeout_s: float, what: str
) -> None:
    """Steps the engines in turn until a condition holds.

    Raises:
        ContractBrokenError: it does not hold after ``timeout_s`` seconds; ``what`` says what was
            waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not until():
        _promise(
            time.monotonic() < deadline,
            f"waited {timeout_s:g} s for {what}; "
            + "; ".join(
                f"requests { {id: r.stage.value for id, r in engine.requests.items()} }, "
                f"blocks kept of {sorted(engine.held)}, "
                f"pending work {engine.scheduler.has_pending_work()}"
                for engine in engines
            ),
        )
        computed = [engine.step() for engine in engines]
        if not any(computed):
            time.sleep(0.001)


def fake_model(geometry: EngineGeometry) -> ModelFingerprint:
    """The fingerprint of the model that :class:`KnownCache` stands for."""
    return ModelFingerprint(
        name="known-cells",
        architecture="KnownCache",
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size,
        dtype=geometry.dtype,
        rope="none",
        config_digest="known",
        weights_digest="known",
    )


def _promise(kept: bool, otherwise: str) -> None:
    if not kept:
        raise ContractBrokenError(otherwise)
