"""The parts of the fake engine: requests and steps as a connector sees them, and ranks.

A rank consists of a connector's worker half and of cells that show the worker's actions.
"""

import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.base import (
    ConnectorContext,
    KVConnector,
    KVConnectorMetadata,
    KVConnectorOutput,
    StepView,
    WorkerConnector,
)
from kvferry.decoding import decoder_for
from kvferry.errors import KVFerryError
from kvferry.layouts.arrays import ByteArray, MemorySpan
from kvferry.testing.known_cache import CacheDevice, KnownCache
from kvferry.topology.group import GroupGeometry
from kvferry.topology.windows import first_kept_token


class Stage(enum.Enum):
    """Stage of a request of the fake engine."""

    WAITING = "waiting"
    LOADING = "loading"
    COMPUTING = "computing"
    FINISHED = "finished"


@dataclass(eq=False)
class FakeRequest:
    """A request: computed in one step or in chunks, and ended after one token."""

    request_id: str
    prompt_token_ids: Sequence[int]
    kv_transfer_params: dict[str, Any] | None = None
    local_tokens: int = 0
    """Number of tokens in the local prefix hit."""
    stage: Stage = Stage.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    tables: list[list[int]] = field(default_factory=list)
    """Block tables while the request holds blocks, one per KV cache group; 0 is the null block."""
    external_tokens: int = 0
    """Number of tokens that the connector must fill."""
    loads_in_step: bool = False
    """Whether the connector fills these tokens within the step that computes the request, and this
    step has not ended."""
    failed: bool = False
    """Whether the request's load failed."""
    error: KVFerryError | None = None
    """Error with which the connector refused the request's load."""
    response_params: dict[str, Any] | None = None
    """Parameters that ``request_finished`` returned."""
    resumed: bool = False
    """Whether the request was preempted after its last step."""
    started: bool = False
    """Whether a step with the request's tokens has been scheduled."""
    traceparent: str = ""
    received: float = 0.0
    content: Mapping[str, str] = field(default_factory=dict)
    """Answer of :meth:`content_keys` for any number of tokens."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def hit_salt(self) -> int:
        """Salt of the cells of the local hit; cells for a later lease must be the true cells."""
        return 0 if (self.kv_transfer_params or {}).get("do_remote_decode") else LOCAL

    @property
    def finished_cleanly(self) -> bool:
        """Whether the request ended by length."""
        return self.finish_reason == "length"

    def end_of_chunk(self, chunk_tokens: int | None) -> int:
        """The token at which the request's next step ends."""
        chunk = self.num_tokens if chunk_tokens is None else chunk_tokens
        return min(self.num_tokens, self.num_computed_tokens + chunk)

    def take_resumed(self) -> bool:
        """Whether the request was preempted; true only once per preemption."""
        resumed, self.resumed = self.resumed, False
        return resumed

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """Content beside the tokens that decides the request's KV."""
        return self.content

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The block tables, as the connector sees them."""
        return tuple(list(table) for table in self.tables)


LOCAL = 1
"""Salt of the cells of a local prefix hit, which reveals a load that overwrites the hit."""


class ContractBrokenError(AssertionError):
    """The connector broke the plugin API; the message names the violation."""


def promise(kept: bool, otherwise: str) -> None:
    """Checks a promise of the plugin API.

    Raises:
        ContractBrokenError: the promise was not kept; ``otherwise`` is the message.
    """
    if not kept:
        raise ContractBrokenError(otherwise)


class FakeRank:
    """A worker half with its memory, driven by the fake engine's steps."""

    def __init__(
        self,
        plugin: type[KVConnector],
        context: ConnectorContext,
        worker: WorkerConnector,
        caches: Sequence[KnownCache],
    ) -> None:
        """Takes ownership of the worker half; use :meth:`open`."""
        self.worker = worker
        self.caches = caches
        """Caches of the rank, one per KV cache group."""
        self._metadata = decoder_for(plugin.Metadata)
        self._windows = context.layer_windows
        self._rank = caches[0].rank
        self._reported: set[tuple[str, str]] = set()
        self._seen: dict[str, list[str]] = {}
        """Request id → wrong cells that this step's computation saw, for loads within the step."""
        self._layer_names = [
            name
            for _, name in sorted(
                (layer, cache.geometry.layer_name(layer))
                for cache in caches
                for layer in cache.geometry.layers(cache.rank)
            )
        ]

    @classmethod
    def open(
        cls,
        plugin: type[KVConnector],
        context: ConnectorContext,
        rank: int,
        device: CacheDevice | None = None,
    ) -> "FakeRank":
        """Builds the worker half and registers the rank's caches.

        Args:
            plugin: the connector.
            context: the context for the connector's halves.
            rank: index of the rank.
            device: memory for the caches; if left out, host memory that the connector allocates.

        Raises:
            KVFerryError: the connector raised an error.
        """
        worker = plugin.worker(context, rank)
        try:
            caches = _open_caches(context, rank, worker, device)
            by_layer = len(caches) > 1
            tensors = [cache.registered(by_layer=by_layer) for cache in caches]
            worker.register_kv_caches({name: t for each in tensors for name, t in each.items()})
        except BaseException:
            worker.close()
            raise
        return cls(plugin, context, worker, caches)

    def forget(self, request_id: str) -> None:
        """Forgets the reports of a request whose id is used again, or which loads again."""
        kinds = ("finished_sending", "finished_recving")
        self._reported -= {(kind, request_id) for kind in kinds}

    def run(
        self, metadata: bytes, schedule: StepView, requests: Mapping[str, FakeRequest]
    ) -> KVConnectorOutput:
        """Runs one step, in the order that the plugin API documents.

        Args:
            metadata: metadata of the scheduler half, as MessagePack.
            schedule: the computation of the step.
            requests: every request of the engine, by id.
        """
        decoded: KVConnectorMetadata = self._metadata.decode(metadata)
        self._seen = {}
        self.worker.start_load_kv(decoded)
        for layer in self._layer_names:
            self.worker.wait_for_layer_load(layer)
        for part in schedule.requests:
            request = requests[part.request_id]
            if request.stage is Stage.COMPUTING:  # and not aborted during this step
                count = schedule.num_scheduled_tokens[part.request_id]
                self._compute(request, part.first_position + count)
        for layer in self._layer_names:
            self.worker.save_kv_layer(layer)
        self.worker.wait_for_save()
        report = self.worker.get_transfer_results(set(schedule.finished_req_ids))
        self._check_report(report, requests)
        return report

    def write_hit(self, request: FakeRequest) -> None:
        """Writes the cells of a request's local prefix hit."""
        end, salt = request.local_tokens, request.hit_salt
        for cache, table in zip(self.caches, request.tables, strict=True):
            cache.write(table, request.prompt_token_ids, 0, end, salt)

    def _compute(self, request: FakeRequest, end: int) -> None:
        # Checks the cells before the first chunk; a window may free them with the next chunk.
        is_first = request.num_computed_tokens == request.local_tokens + request.external_tokens
        if is_first and request.loads_in_step:
            self._seen[request.request_id] = list(self._wrong_seen(request))  # a report decides
        elif is_first and not request.failed:
            self.check_seen(request)
        for cache, table in zip(self.caches, request.tables, strict=True):
            first = request.num_computed_tokens
            cache.write(table, request.prompt_token_ids, first, end)

    def await_device(self, request: FakeRequest, end: int) -> None:
        """Waits until ``end`` tokens of a prompt are computed, as an engine waits for a token.

        Raises:
            ContractBrokenError: the cells of the last token have changed.
        """
        tokens = request.prompt_token_ids
        for cache, table in zip(self.caches, request.tables, strict=True):
            for line in cache.wrong_cells(table, tokens, max(0, end - 1), end):
                promise(False, f"{request.request_id}: what was computed has changed: {line}")

    def check_seen(self, request: FakeRequest) -> None:
        """Checks a load's cells and the cells of the local hit, as far as any layer looks back.

        After a load within a step, the cells count that the step's computation saw.

        Raises:
            ContractBrokenError: a cell has a wrong value.
        """
        lines = self._seen.get(request.request_id)
        for line in self._wrong_seen(request) if lines is None else lines:
            promise(False, f"{request.request_id}: {line}")

    def _wrong_seen(self, request: FakeRequest) -> Iterable[str]:
        for line in self._wrong(request, self._windows, of_hit=True):
            yield f"the load changed the local hit: {line}"
        for line in self._wrong(request, self._windows):
            yield f"the load is not what the source held: {line}"

    def check_whole(
        self, request: FakeRequest, partial: Collection[int], filled: Sequence[int] | None
    ) -> None:
        """Checks every cell that a group keeps, because any prefix hit may need it.

        Args:
            request: the request whose load succeeded.
            partial: groups with tokens that the load left out.
            filled: for each group, the first token of the part that the connector claims to have
                filled.

        Raises:
            ContractBrokenError: cells of a group that is not ``partial`` are wrong.
        """
        for line in self._wrong(request, {}, partial=partial, filled=filled):
            promise(
                False,
                f"{request.request_id}: the load left tokens out, and partial_groups names "
                f"{sorted(partial)} only, first_filled_tokens says {filled}: {line}",
            )

    def _wrong(
        self,
        request: FakeRequest,
        windows: Mapping[int, int],
        of_hit: bool = False,
        partial: Collection[int] = (),
        filled: Sequence[int] | None = None,
    ) -> Iterable[str]:
        """Wrong cells of a request's local hit, or of the load behind the hit."""
        salt = request.hit_salt if of_hit else 0
        local, end = request.local_tokens, request.local_tokens + request.external_tokens
        for group, cache in enumerate(self.caches):
            if group in partial:
                continue
            for needed, layers in _by_first_token(cache, end, windows).items():
                first = needed if filled is None else min(needed, filled[group])
                span = (min(first, local), local) if of_hit else (max(first, local), end)
                tokens, table = request.prompt_token_ids, request.tables[group]
                lines = cache.wrong_cells(table, tokens, *span, salt, layers)
                yield from (f"group {group}, {line}" for line in lines)

    def _check_report(self, report: KVConnectorOutput, requests: Mapping[str, FakeRequest]) -> None:
        where = f"rank {self._rank}"
        promise(
            report.failed_recving <= report.finished_recving,
            f"{where}: failed_recving {report.failed_recving} is not in finished_recving",
        )
        for direction in ("finished_sending", "finished_recving"):
            for id in getattr(report, direction):
                promise(id in requests, f"{where}: {direction} names unknown {id!r}")
                key = (direction, id)
                promise(key not in self._reported, f"{where}: {key} is reported twice")
                self._reported.add(key)

    def spoil(self, blocks: Sequence[int]) -> None:
        """Marks newly free blocks."""
        for cache in self.caches:
            cache.spoil(blocks)

    def check_untouched(self, blocks: Sequence[int]) -> None:
        """Checks that blocks were not written to since they were spoilt.

        Raises:
            ContractBrokenError: a block was written to.
        """
        for cache in self.caches:
            touched = cache.touched(blocks)
            promise(
                not touched,
                f"rank {self._rank}: blocks {touched} were written to, held by nobody",
            )


def _open_caches(
    context: ConnectorContext, rank: int, worker: WorkerConnector, device: CacheDevice | None
) -> list[KnownCache]:
    """Opens one cache per group; caches of equal shape share memory, as in a real engine.

    A block id belongs to one group at a time, so the caches cannot disturb each other. A connector
    that confuses groups does disturb them.
    """
    num_blocks = context.num_blocks
    sizes = [group.nbytes(rank, num_blocks) for group in context.groups]
    shapes = {
        (group.cache_shape(rank, num_blocks), group.kinds(rank))
        for group, size in zip(context.groups, sizes, strict=True)
        if size
    }
    offsets = [0 if len(shapes) == 1 else sum(sizes[:index]) for index in range(len(sizes))]
    nbytes = max(map(sum, zip(offsets, sizes, strict=True)))
    memory = worker.allocate(nbytes) if device is None else device.allocate(nbytes)
    return [
        KnownCache(group, rank, num_blocks, _part(memory, offset, size), device)
        for group, offset, size in zip(context.groups, offsets, sizes, strict=True)
    ]


def _part(memory: ByteArray | MemorySpan, offset: int, nbytes: int) -> ByteArray | MemorySpan:
    if isinstance(memory, MemorySpan):
        return MemorySpan(memory.address + offset, nbytes, memory.device)
    return memory[offset : offset + nbytes]


def _by_first_token(
    cache: KnownCache, num_tokens: int, windows: Mapping[int, int]
) -> dict[int, list[int]]:
    """First token that counts → the layers of the cache for which it counts."""
    geometry: GroupGeometry = cache.geometry
    layers = defaultdict(list)
    for layer in geometry.layers(cache.rank):
        seen = first_kept_token(num_tokens, sliding_window=windows.get(layer))
        layers[max(seen, geometry.first_kept_token(num_tokens))].append(layer)
    return layers
