"""The plugin API: what a connector is, and what an engine calls on it.

A connector has two halves, written as two classes so that an implementer sees at once what must
be written. The **scheduler half** lives in the engine's scheduler process and decides: which tokens
can come from outside, which blocks stay alive for somebody else. The **worker half** lives in
every rank and moves. They speak through one metadata struct per step (scheduler to workers) and
one :class:`KVConnectorOutput` per rank and step (workers to scheduler, joined by the
:class:`~kvferry.connectors.aggregator.KVOutputAggregator`).

Order of calls in one step::

    scheduler   get_num_new_matched_tokens   per waiting request; None = ask later
                update_state_after_alloc     once its blocks are allocated
                build_connector_meta         last
    worker      start_load_kv                before the forward pass; never blocks
                wait_for_layer_load          before each layer's attention
                save_kv_layer                after each layer's attention
                wait_for_save                after the forward pass
                get_transfer_results         last
    scheduler   update_connector_output      with the joined output
                request_finished             for every request that ends, aborted ones included
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.config import KVTransferConfig
from kvferry.topology.description import ModelFingerprint
from kvferry.topology.group import GroupGeometry
from kvferry.topology.heads import HeadDigests


class KVConnectorMetadata(msgspec.Struct):
    """What the scheduler half tells every worker half in one step. Subclass it with fields."""


class KVConnectorOutput(msgspec.Struct, kw_only=True):
    """What one worker half reports after one step; after aggregation, what all of them did."""

    finished_sending: set[str] = msgspec.field(default_factory=set)
    """Ids whose blocks nobody reads any more; the engine frees them."""
    finished_recving: set[str] = msgspec.field(default_factory=set)
    """Requests whose load ended, well or not."""
    failed_recving: set[str] = msgspec.field(default_factory=set)
    """Those of ``finished_recving`` whose load failed; their blocks hold nothing of worth."""
    invalid_block_ids: set[int] = msgspec.field(default_factory=set)
    """Blocks of a failed load, for engines with one KV cache group."""
    kv_connector_stats: dict[str, float] = msgspec.field(default_factory=dict)
    """Counters of this step; the aggregator adds them."""
    kv_connector_gauges: dict[str, float] = msgspec.field(default_factory=dict)
    """Values as they are now on this rank; the aggregator adds them."""
    kv_cache_events: list[Any] = msgspec.field(default_factory=list)
    """Events of this step; the aggregator concatenates them."""
    transfer_records: list["TransferRecord"] = msgspec.field(default_factory=list)
    """One record per load that ended in this step on this rank."""
    transfer_progress: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Request id → (bytes in place, bytes in all) of the loads under way; the aggregator adds."""
    written: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    """Lease id → rank → leading tokens of the prompt that this rank has written, and that can be
    read, for prompts that are lent while they are computed; the aggregator unites them."""
    expected_finished_count: int = 0
    """When positive, how many ranks must report a request from now on."""

    def is_empty(self) -> bool:
        """Whether this says nothing."""
        return not any(getattr(self, field) for field in self.__struct_fields__)


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank moved for one request. Times are Unix seconds of the rank's wall clock."""

    request_id: str
    lease_id: str
    rank: int
    peer: str = ""
    """Engine id of the other side; empty for what was lent."""
    direction: str
    """``"recv"``, or ``"send"`` for the source's digest of what it lent."""
    first_token: int
    """Position of the first token that moved; those before it were here already."""
    tokens: int
    nbytes: int
    copies: int = 0
    """Contiguous copies after merging."""
    started: float
    finished: float
    ok: bool
    error: str = ""
    token_digests: tuple[int, ...] | None = None
    """When asked for: per token, the sum modulo 2**64 of a hash over this rank's logical cells
    (layer, part, token, head and bytes; replicas once). Sums over an engine's ranks do not depend
    on layout or sharding; see :func:`kvferry.connectors.records.digest_mismatch`."""
    transport: str = ""
    """What moved it, staged or not; empty if nothing had to move."""
    source_ranks: tuple[int, ...] = ()
    """Ranks of the other side that it was read from."""
    confirmed: float = 0.0
    """When the source had said whether it counts; 0 for what was lent."""
    moving: float = 0.0
    """Seconds in which something of it moved: less than from ``started`` to ``finished`` where it
    waited for its source to compute more. 0 if nobody measured them."""

    @property
    def moved_s(self) -> float:
        """Seconds in which something of it moved, as far as anybody knows."""
        return self.moving or self.finished - self.started


class RequestView(Protocol):
    """What a connector may know of a request."""

    @property
    def request_id(self) -> str:
        """Unique among the live requests of the engine."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt."""

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """What else than the token ids decides the KV of the first ``num_tokens`` tokens.

        A part (``lora``, ``multimodal``, ``prompt_embeds``, ...) → a short text, never empty, that
        another engine has for a request exactly if its KV is the same: names and digests, no ids
        of this process. Empty where the token ids say all. What keeps the caches of equal requests
        apart (a salt) is no part of it.
        """

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in this engine's cache."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What the router sent along; ``None`` for an ordinary request."""

    @property
    def traceparent(self) -> str:
        """The W3C trace context that came with it, as it came; empty if none did."""

    @property
    def received(self) -> float:
        """When the engine's HTTP server had it, in Unix seconds of this host; 0 if nobody says."""

    @property
    def finished_cleanly(self) -> bool:
        """Whether it ended by stop or by length, not by abort or error."""

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error`` once it has ended."""


class BlocksView(Protocol):
    """A request's blocks."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The whole block tables, one list per KV cache group."""


class ScheduledRequestView(Protocol):
    """What a connector may know of one request's part of a step."""

    @property
    def request_id(self) -> str:
        """The request."""

    @property
    def first_position(self) -> int:
        """Position of the first token computed in this step."""

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        """The request's whole block tables, one list per KV cache group."""

    @property
    def num_new_blocks(self) -> tuple[int, ...]:
        """Entries at the end of each table that the request did not have in its last step."""

    @property
    def resumed(self) -> bool:
        """Whether the request was preempted after its last step."""


class SchedulerOutputView(Protocol):
    """What a connector may know of one step's schedule."""

    @property
    def requests(self) -> Sequence[ScheduledRequestView]:
        """The requests that compute in this step."""

    @property
    def finished_req_ids(self) -> set[str]:
        """Requests that ended since the last step."""

    @property
    def preempted_req_ids(self) -> set[str]:
        """Requests that lost their blocks since the last step, and will be computed again."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Request id → tokens computed in this step."""


def yield_req_data(
    scheduler_output: SchedulerOutputView,
) -> Iterator[tuple[str, tuple[list[int], ...], bool]]:
    """What each request of a step got in blocks.

    Yields:
        ``(req_id, new_block_id_groups, preempted)``: one list of block ids per KV cache group,
        those the request did not have in its last step. The first time, and when ``preempted``
        (it lost its blocks since its last step), that is its whole table, prefix hits included.
    """
    for request in scheduler_output.requests:
        tables = zip(request.block_ids, request.num_new_blocks, strict=True)
        new = tuple(table[len(table) - count :] for table, count in tables)
        yield request.request_id, new, request.resumed


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What both halves are built from."""

    config: KVTransferConfig
    extra: msgspec.Struct
    """``kv_connector_extra_config``, checked against the plugin's ``ExtraConfig``."""
    incarnation: str
    """Random per start of the engine; the same in all its processes."""
    groups: tuple[GroupGeometry, ...]
    """One geometry per KV cache group."""
    model: ModelFingerprint
    num_blocks: int
    """KV blocks per rank, the null block included."""
    world_size: int
    layer_windows: Mapping[int, int] = field(default_factory=dict)
    """Layer of the model → tokens that one of its tokens attends to, itself included; without the
    layers that see all. Also where the layer's group keeps more than that."""
    shows_steps: bool = True
    """Whether :meth:`SchedulerConnector.build_connector_meta` is given a
    :class:`SchedulerOutputView` in every step. A prompt in an engine that does not is lent when it
    is whole."""
    asks_what_was_filled: bool = True
    """Whether the engine asks :meth:`SchedulerConnector.partial_groups` and
    :meth:`SchedulerConnector.first_filled_tokens` after a load. To one that does not, every block
    of a load may become a prefix hit."""


class SchedulerConnector(ABC):
    """The half that decides. Called from the scheduler's thread only."""

    takes_transfers: ClassVar[bool] = False
    """Whether a router may send a request to both engines at once, with a ``transfer`` in its
    ``kv_transfer_params``: the one that loads then asks the one that lends for the ticket."""

    def on_new_request(self, request: RequestView) -> None:
        """A request arrived. Default: nothing.

        Raises:
            KVFerryError: its ``kv_transfer_params`` cannot be used; the engine refuses it.
        """

    def lends_only_cached(self, request: RequestView) -> bool:
        """Whether nothing is to be computed for a request, and what is cached of it is to be lent.

        The engine gives it the blocks that its prefix cache has of it, with
        :meth:`update_state_after_alloc`, and ends it at once, so that :meth:`request_finished` can
        lend them; ``num_computed_tokens`` says how many tokens they hold, maybe 0. Asked once,
        after :meth:`on_new_request`. Default: there is no such request.
        """
        return False

    def withdraw(self, request_id: str) -> bool:
        """The engine needs the blocks that it keeps for a request of :meth:`lends_only_cached`.

        Returns:
            Whether nobody has fetched them yet: then nobody will, and the id comes in
            ``finished_sending`` soon. Default: nothing is withdrawn.
        """
        return False

    def counters(self) -> Mapping[str, float]:
        """Counters of this half since the start, for metrics. Default: none."""
        return {}

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the local hit can come from outside.

        Without side effects that show; may be called many times for one request.

        Args:
            request: a waiting request.
            num_computed_tokens: tokens of the local prefix hit, a multiple of the block size.

        Returns:
            ``(tokens, load_async)``. ``None`` tokens mean "ask later". ``load_async`` says that
            the request must be parked until its id comes back in ``finished_recving``.

        Raises:
            KVFerryError: the load is impossible; ``kv_load_failure_policy`` decides.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: RequestView, blocks: BlocksView, num_external_tokens: int
    ) -> None:
        """The request's blocks are allocated; ``num_external_tokens`` of them are ours to fill.

        May come again for the same request after its load, with 0 external tokens.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutputView) -> KVConnectorMetadata:
        """The metadata of this step, once per step; resets what was gathered for it."""

    @abstractmethod
    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What the ranks reported, joined. Unknown ids are ignored."""

    @abstractmethod
    def request_finished(
        self, request: RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, in any way.

        Returns:
            ``(keep_blocks, kv_transfer_params)``. With ``keep_blocks`` the blocks stay allocated
            until the id comes back in ``finished_sending``; the params travel in the response.
            For a request that ends while its load is under way, ``True`` says that bytes can
            still land; its blocks stay until the id comes back in ``finished_recving``.
        """

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """What :meth:`request_finished` returned for a response will be used by nobody.

        It comes from whoever was given the response, and may be anything. What is lent by it and
        not yet fetched may end; what somebody fetches goes on. Default: nothing is done, and what
        was lent ends as it does when nobody comes for it.
        """

    def partial_groups(self, request: RequestView) -> frozenset[int]:
        """KV cache groups of which the load that just ended left tokens out, for good.

        A group that keeps every token, fed from one that keeps a window, has blocks that are
        allocated and never filled. They serve this request, whose layers look no further back,
        but nobody else: the engine never makes blocks of these groups prefix hits. Asked once per
        load, after :meth:`update_connector_output`, unless all of it failed. Tokens that a group
        of this engine does not keep itself are no reason to name it. Default: none.
        """
        return frozenset()

    def first_filled_tokens(self, request: RequestView) -> tuple[int, ...] | None:
        """For each KV cache group, the token from which on the load that just ended filled it.

        Asked with :meth:`partial_groups`. A group with a window needs its tokens from
        ``first_kept_token`` on only, which may lie within a block; a block that the load filled
        from its beginning may become a prefix hit, another one never does. Tokens of the local
        hit count as filled. Default: ``None``, no more than was needed.
        """
        return None

    def silent_peers(self) -> tuple[str, ...]:
        """Engines that do not answer, and from which nothing is loaded until they do.

        Called from any thread, unlike all others; never waits. Default: none.
        """
        return ()

    def set_worker_handshakes(self, handshakes: Sequence[bytes]) -> None:
        """What each rank's ``handshake_metadata`` returned, by rank; once, at start."""

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although no request is scheduled."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Ends threads and sockets. Idempotent."""


class WorkerConnector(ABC):
    """The half that moves, one per rank. Called from the rank's step thread only."""

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Zeroed memory for the rank's KV cache; override it where a transport must own it.

        Raises:
            SharedMemoryError: no room for ``nbytes``.
        """
        return np.zeros(nbytes, dtype=np.uint8)

    @abstractmethod
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The rank's KV cache tensors by name, once, before anything moves.

        Each is a torch tensor or NumPy array shaped ``geometry.cache_shape(rank, num_blocks)``;
        its strides and address are taken as they are.
        """

    def set_head_digests(self, heads: HeadDigests) -> None:
        """Digests of the weights behind the rank's KV heads, by which two engines prove that they
        mean the same heads. Called before :meth:`handshake_metadata`, by engines that have weights.
        Default: nothing.
        """

    def handshake_metadata(self) -> bytes:
        """What the scheduler half must know of this rank; handed to ``set_worker_handshakes``."""
        return b""

    @abstractmethod
    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Starts this step's loads. Never blocks on the wire."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Blocks until a layer that loads synchronously is there."""

    def save_kv_layer(self, layer_name: str) -> None:
        """A layer's KV of this step is written."""

    def wait_for_save(self) -> None:
        """Blocks until the cache may be overwritten."""

    @abstractmethod
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """What ended on this rank since the last step. Drains: each report is made once."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and memory. Idempotent."""


class KVConnector(ABC):
    """The plugin: names its types and builds its halves. Never instantiated."""

    ExtraConfig: ClassVar[type[msgspec.Struct]]
    """Struct of the keys allowed in ``kv_connector_extra_config``."""
    Metadata: ClassVar[type[KVConnectorMetadata]]
    """Struct of the per-step metadata; it crosses process borders as MessagePack."""
    required_cache_layout: ClassVar[str | None] = None
    """Name or dim order of the layout that it needs; ``None`` if it serves any."""
    supports_groups: ClassVar[bool] = False
    """Whether it serves engines with several KV cache groups, or with one that keeps a window.
    Otherwise it meets one block table per request, without null blocks; such an engine is refused
    at start."""

    @classmethod
    @abstractmethod
    def scheduler(cls, context: ConnectorContext) -> SchedulerConnector:
        """Builds the scheduler half, ready to use.

        Raises:
            ConfigError, HostError: see the message.
        """

    @classmethod
    @abstractmethod
    def worker(cls, context: ConnectorContext, rank: int) -> WorkerConnector:
        """Builds the worker half of ``rank``, ready to use.

        Raises:
            ConfigError, HostError: see the message.
        """
