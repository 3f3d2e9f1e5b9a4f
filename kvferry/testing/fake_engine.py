"""An engine without a model that drives both halves of a connector and checks their promises.

The engine schedules like a small real engine. Blocks are given out in random order and return;
blocks behind a window return at once. Every step runs on every rank, metadata crosses as
MessagePack, and the aggregator joins the reports. The caches are
:class:`~kvferry.testing.known_cache.KnownCache`, so the engine compares every load cell by cell and
watches every free block.
"""

import math
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import msgspec

from kvferry.config import KVTransferConfig
from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.base import (
    ConnectorContext,
    KVConnector,
    KVConnectorOutput,
    ScheduledPrompt,
    SchedulerConnector,
    StepView,
    WorkerConnector,
)
from kvferry.connectors.registry import connector_context
from kvferry.errors import KVFerryError
from kvferry.testing.fake_rank import (
    ContractBrokenError,
    FakeRank,
    FakeRequest,
    Stage,
    promise,
)
from kvferry.testing.known_cache import CacheDevice
from kvferry.testing.waiting import WAIT_S, NotInTimeError
from kvferry.topology.description import ModelFingerprint
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.group import GroupGeometry

Groups: TypeAlias = GroupGeometry | Sequence[GroupGeometry]
"""The geometry of each KV cache group of an engine, or of its single group."""


class FakeEngine:
    """An engine in this process. Build an instance with :meth:`open`; close it at the end."""

    def __init__(
        self,
        plugin: type[KVConnector],
        context: ConnectorContext,
        scheduler: SchedulerConnector,
        ranks: Sequence[FakeRank],
    ) -> None:
        self.plugin = plugin
        self.groups = context.groups
        self.scheduler = scheduler
        self.ranks = ranks
        self.requests: dict[str, FakeRequest] = {}
        """Every request so far, by id; a later request with the same id replaces the earlier
        request."""
        self.held: dict[str, list[int]] = {}
        """Request id → blocks of the ended request, kept by the connector."""
        self.outputs: list[KVConnectorOutput] = []
        """The joined report of every step."""
        self.during_step: Callable[[], None] = lambda: None
        """Function called in each step, after the schedule and before the ranks; tests put an abort
        here."""
        self.chunk_tokens: int | None = None
        """Number of tokens that a request computes, and gets blocks for, in a step at most;
        ``None``: all."""
        self.num_blocks = context.num_blocks
        self._free = list(range(1, self.num_blocks))
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._aggregator = KVOutputAggregator.from_connector(plugin, len(ranks))
        self._random = random.Random(0)

    @classmethod
    def open(
        cls,
        config: KVTransferConfig,
        groups: Groups,
        *,
        num_blocks: int = 64,
        layer_windows: Mapping[int, int] | None = None,
        device: CacheDevice | None = None,
    ) -> "FakeEngine":
        """Builds the connector's halves and exchanges their handshakes.

        Args:
            config: the config, as a user would write it.
            groups: the geometry of each KV cache group, or of the single group.
            num_blocks: KV blocks per rank, including the null block; the groups share the blocks.
            layer_windows: layer of the model → window in tokens, even if the layer's group keeps
                more.
            device: memory for the caches; host memory if left out.

        Raises:
            KVFerryError: the connector raised an error.
        """
        groups = (groups,) if isinstance(groups, GroupGeometry) else tuple(groups)
        world_size = groups[0].world_size
        plugin, context = connector_context(
            config,
            incarnation=uuid.uuid4().hex,
            groups=groups,
            model=fake_model(groups),
            num_blocks=num_blocks,
            world_size=world_size,
            layer_windows=layer_windows,
        )
        with ExitStack() as stack:
            ranks = []
            for rank in range(world_size):
                ranks.append(FakeRank.open(plugin, context, rank, device))
                stack.callback(ranks[-1].worker.close)
            scheduler = plugin.scheduler(context)
            stack.callback(scheduler.close)
            scheduler.set_worker_handshakes([rank.worker.handshake_metadata() for rank in ranks])
            stack.pop_all()
        return cls(plugin, context, scheduler, ranks)

    @property
    def workers(self) -> list[WorkerConnector]:
        """The connector's worker halves, by rank."""
        return [rank.worker for rank in self.ranks]

    @property
    def block_size(self) -> int:
        """Unit of local hits in tokens: the least common multiple of the groups' block sizes."""
        return math.lcm(*(group.virtual_block_size for group in self.groups))

    # -- requests -----------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        params: dict[str, Any] | None = None,
        *,
        local_blocks: int = 0,
        content: Mapping[str, str] | None = None,
    ) -> FakeRequest:
        """Adds a request to the engine.

        Args:
            request_id: id of the request.
            prompt: token ids.
            params: ``kv_transfer_params`` of the request.
            local_blocks: size of the local hit, in units of :attr:`block_size` tokens.
            content: content beside the tokens that decides the request's KV.

        Raises:
            KVFerryError: the connector refuses the params.
        """
        local_tokens = local_blocks * self.block_size
        request = FakeRequest(request_id, tuple(prompt), params, local_tokens)
        request.content = content or {}
        assert local_tokens < request.num_tokens, "a hit leaves one token to compute"
        self.scheduler.on_new_request(request)
        self._forget_reports(request_id)
        self.requests[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request at any point."""
        request = self.requests[request_id]
        if request.stage is not Stage.FINISHED:
            self._end(request, "abort")

    def preempt(self, request_id: str) -> None:
        """Takes the blocks of a computing request, which will be computed again from the start."""
        request = self.requests[request_id]
        if request.stage is not Stage.COMPUTING:
            return
        self._release([block for table in request.tables for block in table if block != 0])
        request.tables, request.stage = [], Stage.WAITING
        request.num_computed_tokens = request.external_tokens = 0
        request.resumed = True
        self._preempted.add(request_id)

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
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
        computing = [each for each in self._in_stage(Stage.COMPUTING) if self._has_room(each)]
        ends = {each.request_id: each.end_of_chunk(self.chunk_tokens) for each in computing}
        schedule = StepView(
            requests=[self._part(request) for request in computing],
            num_scheduled_tokens={
                request.request_id: ends[request.request_id] - request.num_computed_tokens
                for request in computing
            },
            finished_req_ids=self._finished,
            preempted_req_ids=self._preempted,
        )
        self._finished, self._preempted = set(), set()
        metadata = self.scheduler.build_connector_meta(schedule)
        promise(
            type(metadata) is self.plugin.Metadata,
            f"build_connector_meta returned a {type(metadata).__name__}, not Metadata",
        )
        self.during_step()
        wire = msgspec.msgpack.encode(metadata)
        reports = [rank.run(wire, schedule, self.requests) for rank in self.ranks]
        ending = [each.request_id for each in computing if each.loads_in_step]
        self._receive(self._aggregator.join(reports, ending))
        for request in computing:
            if request.stage is Stage.COMPUTING:
                self._computed(request, ends[request.request_id])
        return bool(computing)

    def _forget_reports(self, request_id: str) -> None:
        """Makes later reports of an id belong to the request or load that begins now."""
        self._aggregator.forget(request_id)
        for rank in self.ranks:
            rank.forget(request_id)

    def _has_room(self, request: FakeRequest) -> bool:
        """Gives a request the blocks of the next step; returns whether there were enough."""
        end = request.end_of_chunk(self.chunk_tokens)
        lacking = [
            # After a failed load, a table is longer than the next chunk needs.
            max(0, -(-end // group.virtual_block_size) - len(table))
            for group, table in zip(self.groups, request.tables, strict=True)
        ]
        if sum(lacking) > len(self._free):
            return False
        for table, count in zip(request.tables, lacking, strict=True):
            table += self._free[:count]
            self._free = self._free[count:]
        return True

    def _computed(self, request: FakeRequest, end: int) -> None:
        """Ends a step of a request; the last step samples the only token of the answer."""
        if end < request.num_tokens:
            self._let_go(request, end)
            request.num_computed_tokens = end
            return
        for rank in self.ranks:
            rank.await_device(request, request.num_tokens)
        # The engine acts as if the last token had been computed in another step: blocks that a
        # window freed by then are free, and one token more than the next step needs is still there.
        self._let_go(request, request.num_tokens - 1)
        request.num_computed_tokens = request.num_tokens
        request.output_token_ids.append(len(request.prompt_token_ids))
        self._end(request, "length")

    def _let_go(self, request: FakeRequest, num_computed: int) -> None:
        """Frees the blocks without needed tokens once ``num_computed`` tokens are computed."""
        for group, table in zip(self.groups, request.tables, strict=True):
            behind = group.first_kept_token(num_computed) // group.virtual_block_size
            self._release([block for block in table[:behind] if block != 0])
            table[:behind] = [0] * behind

    def _in_stage(self, stage: Stage) -> list[FakeRequest]:
        return [request for request in self.requests.values() if request.stage is stage]

    def _part(self, request: FakeRequest) -> ScheduledPrompt:
        request.started = True
        return ScheduledPrompt(
            request_id=request.request_id,
            first_position=request.num_computed_tokens,
            block_ids=request.get_block_ids(),
            num_new_blocks=tuple(map(len, request.tables)),
            resumed=request.take_resumed(),
        )

    def _admit(self, request: FakeRequest) -> None:
        local = request.local_tokens
        if self.scheduler.lends_only_cached(request):
            self._lend_cached(request)
            return
        try:
            tokens, load_async = (0, False) if request.failed else self._ask(request)
        except KVFerryError as error:
            request.error = error
            tokens, load_async = 0, False
        if tokens is None or not self._allocate(request, local + tokens):
            return
        request.num_computed_tokens = local
        request.external_tokens = tokens
        request.loads_in_step = tokens > 0 and not load_async
        for rank in self.ranks:
            rank.write_hit(request)
        self.scheduler.update_state_after_alloc(request, request, tokens)
        if tokens:  # it may be the second load of this request, after a preemption
            self._forget_reports(request.request_id)
        request.stage = Stage.LOADING if load_async else Stage.COMPUTING
        request.num_computed_tokens += 0 if load_async else tokens

    def _lend_cached(self, request: FakeRequest) -> None:
        """Ends a request with the blocks of the local hit, which stand for earlier computed
        blocks.
        """
        local = request.local_tokens
        if not self._allocate(request, local, num_tokens=local):
            return
        request.num_computed_tokens = local
        for rank in self.ranks:
            rank.write_hit(request)
            rank.await_device(request, local)
        self.scheduler.update_state_after_alloc(request, request, 0)
        self._end(request, "length")

    def _allocate(
        self, request: FakeRequest, num_computed: int, num_tokens: int | None = None
    ) -> bool:
        """Gives a request its blocks, except for blocks behind the windows from the start."""
        chunk = num_computed + (self.chunk_tokens or request.num_tokens)
        end = min(request.num_tokens, chunk) if num_tokens is None else num_tokens
        sizes = [
            (
                group.first_kept_token(num_computed) // group.virtual_block_size,
                -(-end // group.virtual_block_size),
            )
            for group in self.groups
        ]
        if sum(last - first for first, last in sizes) > len(self._free):
            return False
        self._random.shuffle(self._free)
        for first, last in sizes:
            request.tables.append([0] * first + self._free[: last - first])
            self._free = self._free[last - first :]
        return True

    def _ask(self, request: FakeRequest) -> tuple[int | None, bool]:
        local = request.local_tokens
        tokens, load_async = self.scheduler.get_num_new_matched_tokens(request, local)
        if tokens is None:
            return None, False
        again = self.scheduler.get_num_new_matched_tokens(request, local)
        id = request.request_id
        promise(
            again == (tokens, load_async), f"{id}: asked twice: {(tokens, load_async)}, {again}"
        )
        promise(
            0 <= tokens <= request.num_tokens - local,
            f"{id}: offers {tokens} tokens beyond {local} of {request.num_tokens}",
        )
        promise(tokens > 0 or not load_async, f"{id}: offers to load 0 tokens asynchronously")
        # The engine computes at least one token, whatever the offer.
        tokens = min(tokens, request.num_tokens - 1 - local)
        return tokens, load_async and tokens > 0

    # -- the ranks' reports --------------------------------------------------------------------

    def _receive(self, output: KVConnectorOutput) -> None:
        self.outputs.append(output)
        self.scheduler.update_connector_output(output)
        for request in self._in_stage(Stage.COMPUTING):
            if request.loads_in_step:
                self._loaded(request, request.request_id in output.failed_recving)
        for id in output.finished_recving:
            request = self.requests[id]
            if request.stage is Stage.LOADING:
                self._loaded(request, id in output.failed_recving)
            elif id in self.held and id not in output.finished_sending:
                self._release(self.held.pop(id))
        for id in output.finished_sending:
            promise(id in self.held, f"{id}: finished_sending, but its blocks were not kept")
            self._release(self.held.pop(id))

    def _loaded(self, request: FakeRequest, failed: bool) -> None:
        request.failed = failed
        if not failed:
            for rank in self.ranks:
                rank.check_seen(request)
            self._check_whole(request)
        if request.stage is Stage.LOADING:
            request.stage = Stage.COMPUTING
            request.num_computed_tokens += 0 if failed else request.external_tokens
            # The plugin API calls this again, with no more tokens to load.
            self.scheduler.update_state_after_alloc(request, request, 0)
        elif failed:  # the tokens of this step were computed from cells that are not valid
            self.preempt(request.request_id)
        request.loads_in_step = False

    def _check_whole(self, request: FakeRequest) -> None:
        """Checks the blocks that an engine would now offer as prefix hits."""
        partial = self.scheduler.partial_groups(request)
        promise(
            partial <= set(range(len(self.groups))),
            f"{request.request_id}: partial_groups names {sorted(partial)}, there are "
            f"{len(self.groups)} groups",
        )
        filled = self.scheduler.first_filled_tokens(request)
        promise(
            filled is None or len(filled) == len(self.groups),
            f"{request.request_id}: first_filled_tokens says {filled}, there are "
            f"{len(self.groups)} groups",
        )
        for rank in self.ranks:
            rank.check_whole(request, partial, filled)

    def _end(self, request: FakeRequest, reason: str) -> None:
        request.finish_reason = reason
        request.stage = Stage.FINISHED
        keep, params = self.scheduler.request_finished(request, request.get_block_ids())
        request.response_params = params
        blocks = [block for table in request.tables for block in table if block != 0]
        request.tables = []
        if keep and blocks:
            self.held[request.request_id] = blocks
        else:
            self._release(blocks)
        self._finished.add(request.request_id)

    def _release(self, blocks: list[int]) -> None:
        for rank in self.ranks:
            rank.spoil(blocks)
        self._free += blocks

    def check_memory(self) -> None:
        """Checks the null block and all free blocks for unexpected writes.

        Raises:
            ContractBrokenError: something was written there.
        """
        for rank in self.ranks:
            rank.check_untouched([0, *self._free])

    def close(self) -> None:
        """Closes every half twice, because ``close`` is idempotent."""
        for _ in range(2):
            self.scheduler.close()
            for worker in self.workers:
                worker.close()


class NeverCameError(ContractBrokenError, NotInTimeError):
    """Engines were stepped until the time was over, and what the connector owes did not come."""


def run(
    engines: Sequence[FakeEngine],
    until: Callable[[], bool],
    *,
    timeout_s: float = WAIT_S,
    what: str,
) -> None:
    """Steps the engines in turn until a condition holds.

    Raises:
        NeverCameError: the condition does not hold after ``timeout_s`` seconds; the message names
            ``what``.
    """
    deadline = time.monotonic() + timeout_s
    while not until():
        if time.monotonic() > deadline:
            states = (
                f"requests { {id: r.stage.value for id, r in engine.requests.items()} }, "
                f"blocks kept of {sorted(engine.held)}, "
                f"pending work {engine.scheduler.has_pending_work()}"
                for engine in engines
            )
            raise NeverCameError(f"waited {timeout_s:g} s for {what}; {'; '.join(states)}")
        computed = [engine.step() for engine in engines]
        if not any(computed):
            time.sleep(0.001)


def fake_model(groups: Sequence[GroupGeometry]) -> ModelFingerprint:
    """The fingerprint of the model that the known cells of these groups represent."""
    # Recurrent groups have no heads; engines may order their groups differently.
    attention = [group for group in groups if isinstance(group, EngineGeometry)]
    num_kv_heads, head_size, dtype = 1, 1, "uint8"
    if attention:
        first = attention[0]
        num_kv_heads, head_size, dtype = first.num_kv_heads, first.head_size, first.dtype
    return ModelFingerprint(
        name="known-cells",
        architecture="KnownCache",
        num_layers=sum(group.num_layers for group in groups),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        rope="none",
        config_digest="known",
        weights_digest="known",
    )
