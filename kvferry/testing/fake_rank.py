"""What the fake engine is made of: requests and steps as a connector sees them, and ranks.

A rank is a connector's worker half, and cells that show what it did.
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
    WorkerConnector,
)
from kvferry.decoding import decoder_for
from kvferry.errors import KVFerryError
from kvferry.testing.known_cache import KnownCache
from kvferry.topology.group import GroupGeometry
from kvferry.topology.windows import first_kept_token


class Stage(enum.Enum):
    """Where a request of the fake engine stands."""

    WAITING = "waiting"
    LOADING = "loading"
    COMPUTING = "computing"
    FINISHED = "finished"


@dataclass(eq=False)
class FakeRequest:
    """A request: computed in one step, or in chunks, and ended after one token."""

    request_id: str
    prompt_token_ids: Sequence[int]
    kv_transfer_params: dict[str, Any] | None = None
    local_tokens: int = 0
    """Tokens of the local prefix hit."""
    stage: Stage = Stage.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    tables: list[list[int]] = field(default_factory=list)
    """Its block tables while it holds blocks, one per KV cache group; 0 is the null block."""
    external_tokens: int = 0
    """Tokens that the connector was to fill."""
    loads_in_step: bool = False
    """Whether these are filled within the step that computes it."""
    failed: bool = False
    """Whether that load failed."""
    error: KVFerryError | None = None
    """Why the connector refused to load for it."""
    response_params: dict[str, Any] | None = None
    """What ``request_finished`` returned."""
    resumed: bool = False
    """Whether it was preempted after its last step."""
    started: bool = False
    """Whether a step with its tokens has been scheduled."""
    traceparent: str = ""
    received: float = 0.0
    content: Mapping[str, str] = field(default_factory=dict)
    """What :meth:`content_keys` answers, whatever the tokens."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def hit_salt(self) -> int:
        """Salt of the cells of its local hit: those that are lent on must be the true ones."""
        return 0 if (self.kv_transfer_params or {}).get("do_remote_decode") else LOCAL

    @property
    def finished_cleanly(self) -> bool:
        """Whether it ended by length."""
        return self.finish_reason == "length"

    def end_of_chunk(self, chunk_tokens: int | None) -> int:
        """The token up to which its next step computes."""
        chunk = self.num_tokens if chunk_tokens is None else chunk_tokens
        return min(self.num_tokens, self.num_computed_tokens + chunk)

    def take_resumed(self) -> bool:
        """Whether it was preempted, once."""
        resumed, self.resumed = self.resumed, False
        return resumed

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """What else than its tokens decides its KV."""
        return self.content

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The block tables, as the connector sees them."""
        return tuple(list(table) for table in self.tables)


@dataclass(frozen=True)
class FakePart:
    """A request's part of a step."""

    request_id: str
    first_position: int
    block_ids: tuple[list[int], ...]
    num_new_blocks: tuple[int, ...]
    resumed: bool = False


@dataclass(frozen=True)
class FakeSchedule:
    """One step."""

    requests: Sequence[FakePart]
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str]
    preempted_req_ids: set[str] = field(default_factory=set)


LOCAL = 1
"""Salt of the cells of a local prefix hit, so that a load that overwrites them shows."""


class ContractBrokenError(AssertionError):
    """The connector did what the plugin API forbids; the message says what."""


def promise(kept: bool, otherwise: str) -> None:
    """Checks what the plugin API promises.

    Raises:
        ContractBrokenError: it was not kept; says ``otherwise``.
    """
    if not kept:
        raise ContractBrokenError(otherwise)


class FakeRank:
    """A worker half between the memory that it allocated and the fake engine's steps."""

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
        """One per KV cache group."""
        self._metadata = decoder_for(plugin.Metadata)
        self._windows = context.layer_windows
        self._rank = caches[0].rank
        self._reported: set[tuple[str, str]] = set()
        self._layer_names = [
            name
            for _, name in sorted(
                (layer, cache.geometry.layer_name(layer))
                for cache in caches
                for layer in cache.geometry.layers(cache.rank)
            )
        ]

    @classmethod
    def open(cls, plugin: type[KVConnector], context: ConnectorContext, rank: int) -> "FakeRank":
        """Builds the worker half and registers the rank's caches with it.

        Raises:
            KVFerryError: what the connector raises.
        """
        worker = plugin.worker(context, rank)
        try:
            caches = _open_caches(context, rank, worker)
            by_layer = len(caches) > 1
            tensors = [cache.registered(by_layer=by_layer) for cache in caches]
            worker.register_kv_caches({name: t for each in tensors for name, t in each.items()})
        except BaseException:
            worker.close()
            raise
        return cls(plugin, context, worker, caches)

    def forget(self, request_id: str) -> None:
        """The id is used again: reports on it count anew."""
        kinds = ("finished_sending", "finished_recving")
        self._reported -= {(kind, request_id) for kind in kinds}

    def run(
        self, metadata: bytes, schedule: FakeSchedule, requests: Mapping[str, FakeRequest]
    ) -> KVConnectorOutput:
        """One step, in the order that the plugin API documents.

        Args:
            metadata: the scheduler half's, as MessagePack.
            schedule: what is computed.
            requests: every request of the engine, by id.
        """
        decoded: KVConnectorMetadata = self._metadata.decode(metadata)
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
        # What comes before its first chunk; a window may let go of it with the next.
        is_first = request.num_computed_tokens == request.local_tokens + request.external_tokens
        if is_first and not request.failed:
            self.check_seen(request)
        for cache, table in zip(self.caches, request.tables, strict=True):
            first = request.num_computed_tokens
            cache.write(table, request.prompt_token_ids, first, end)

    def check_seen(self, request: FakeRequest) -> None:
        """Checks a load's cells, and those of the hit before it, as far as any layer looks back.

        Raises:
            ContractBrokenError: some are not what they must be.
        """
        for line in self._wrong(request, self._windows, of_hit=True):
            promise(False, f"{request.request_id}: the load changed the local hit: {line}")
        for line in self._wrong(request, self._windows):
            promise(False, f"{request.request_id}: the load is not what the source held: {line}")

    def check_whole(
        self, request: FakeRequest, partial: Collection[int], filled: Sequence[int] | None
    ) -> None:
        """Checks every cell that a group keeps, as anybody's prefix hit may need it.

        Args:
            request: whose load ended well.
            partial: groups that it left tokens out of.
            filled: for each group, the token from which on it says to have filled it.

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
        """Wrong cells of a request's local hit, or of what was loaded behind it."""
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
        """Marks blocks that nobody holds any more."""
        for cache in self.caches:
            cache.spoil(blocks)

    def check_untouched(self, blocks: Sequence[int]) -> None:
        """Checks that nobody wrote to blocks since they were spoilt.

        Raises:
            ContractBrokenError: somebody did.
        """
        for cache in self.caches:
            touched = cache.touched(blocks)
            promise(
                not touched,
                f"rank {self._rank}: blocks {touched} were written to, held by nobody",
            )


def _open_caches(context: ConnectorContext, rank: int, worker: WorkerConnector) -> list[KnownCache]:
    """One cache per group; those of equal shape lie in the same memory, as in a real engine.

    A block id belongs to one group at a time, so they cannot disturb each other; a connector that
    confuses groups does.
    """
    num_blocks = context.num_blocks
    sizes = [group.nbytes(rank, num_blocks) for group in context.groups]
    shapes = {
        (group.cache_shape(rank, num_blocks), group.kinds(rank))
        for group, size in zip(context.groups, sizes, strict=True)
        if size
    }
    offsets = [0 if len(shapes) == 1 else sum(sizes[:index]) for index in range(len(sizes))]
    memory = worker.allocate(max(map(sum, zip(offsets, sizes, strict=True))))
    return [
        KnownCache(group, rank, num_blocks, memory[offset : offset + size])
        for group, offset, size in zip(context.groups, offsets, sizes, strict=True)
    ]


def _by_first_token(
    cache: KnownCache, num_tokens: int, windows: Mapping[int, int]
) -> dict[int, list[int]]:
    """First token that counts → the cache's layers for which it does."""
    geometry: GroupGeometry = cache.geometry
    layers = defaultdict(list)
    for layer in geometry.layers(cache.rank):
        seen = first_kept_token(num_tokens, sliding_window=windows.get(layer))
        layers[max(seen, geometry.first_kept_token(num_tokens))].append(layer)
    return layers
