"""The plugin API: the two halves of a connector, and the calls of an engine to them.

A connector has two halves, written as two classes, so that an implementer sees at once which
methods to write. The **scheduler half** lives in the scheduler process of the engine and decides:
which tokens can be loaded from another engine, and which blocks stay allocated for another engine.
The **worker half** lives in every rank and moves bytes. The two halves exchange one metadata struct
per step (scheduler to workers) and one :class:`KVConnectorOutput` per rank and step (workers to
scheduler). The :class:`~kvferry.connectors.aggregator.KVOutputAggregator` joins the outputs of the
ranks.

Order of calls in one step::

    scheduler   get_num_new_matched_tokens   per waiting request; None = ask later
                update_state_after_alloc     once the blocks of the request are allocated
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.config import KVTransferConfig
from kvferry.observe.records import TransferRecord
from kvferry.topology.description import ModelFingerprint
from kvferry.topology.group import GroupGeometry
from kvferry.topology.heads import HeadDigests


class KVConnectorMetadata(msgspec.Struct):
    """Message of the scheduler half to every worker half in one step. Subclass it with fields."""


class KVConnectorOutput(msgspec.Struct, kw_only=True):
    """Report of one worker half after one step; after aggregation, the report of all ranks."""

    finished_sending: set[str] = msgspec.field(default_factory=set)
    """Ids of requests whose lent blocks have no reader any more; the engine frees the blocks."""
    finished_recving: set[str] = msgspec.field(default_factory=set)
    """Ids of requests whose load ended, with success or not."""
    failed_recving: set[str] = msgspec.field(default_factory=set)
    """Ids in ``finished_recving`` whose load failed; their blocks hold no valid KV."""
    invalid_block_ids: set[int] = msgspec.field(default_factory=set)
    """Blocks of a failed load, for engines with one KV cache group."""
    kv_connector_stats: dict[str, float] = msgspec.field(default_factory=dict)
    """Counters of this step; the aggregator adds them."""
    kv_connector_gauges: dict[str, float] = msgspec.field(default_factory=dict)
    """Current values on this rank; the aggregator adds them."""
    kv_cache_events: list[Any] = msgspec.field(default_factory=list)
    """Events of this step; the aggregator concatenates them."""
    transfer_records: list["TransferRecord"] = msgspec.field(default_factory=list)
    """One record per load that ended in this step on this rank."""
    transfer_progress: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Request id → (bytes in place, bytes in all) of the loads under way; the aggregator adds."""
    written: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    """Lease id → rank → number of leading prompt tokens written by this rank and readable by a
    target. Only for prompts lent during their computation; the aggregator unites the maps."""
    expected_finished_count: int = 0
    """Number of ranks expected to report each request from now on; 0 for no change."""

    def is_empty(self) -> bool:
        """Whether every field of the report is empty."""
        return not any(getattr(self, field) for field in self.__struct_fields__)


class RequestView(Protocol):
    """View of a request for connectors."""

    @property
    def request_id(self) -> str:
        """Id of the request, unique among the live requests of the engine."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Token ids of the prompt."""

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """Names the inputs, beside token ids, on which the KV of the first ``num_tokens`` tokens
        depends.

        Returns:
            Part (``lora``, ``multimodal``, ``prompt_embeds``, ...) → a short text, never empty.
            Another engine has the same text for a request exactly if the KV is the same: the text
            holds names and digests, no ids of this process. The map is empty if the token ids alone
            decide the KV. A salt, which only keeps the caches of equal requests apart, is not in
            the map.
        """

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is in this engine's cache."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """Parameters from the router for this request; ``None`` for an ordinary request."""

    @property
    def traceparent(self) -> str:
        """W3C trace context of the request, unchanged; empty if the request has no context."""

    @property
    def received(self) -> float:
        """Unix seconds of this host at which the engine's HTTP server got the request; 0 if
        unknown.
        """

    @property
    def finished_cleanly(self) -> bool:
        """Whether the request ended by stop or by length, not by abort or error."""

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error``; ``None`` until the request has ended."""


class BlocksView(Protocol):
    """The blocks of a request."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The whole block tables, one list per KV cache group."""


class ScheduledRequestView(Protocol):
    """View of one request's part of a step, for connectors."""

    @property
    def request_id(self) -> str:
        """Id of the request."""

    @property
    def first_position(self) -> int:
        """Position of the first token computed in this step."""

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        """The whole block tables of the request, one list per KV cache group."""

    @property
    def num_new_blocks(self) -> tuple[int, ...]:
        """Number of new entries at the end of each table since the request's last step."""

    @property
    def resumed(self) -> bool:
        """Whether the request was preempted after its last step."""


class SchedulerOutputView(Protocol):
    """View of one step's schedule for connectors."""

    @property
    def requests(self) -> Sequence[ScheduledRequestView]:
        """The requests computed in this step."""

    @property
    def finished_req_ids(self) -> set[str]:
        """Ids of the requests ended since the last step."""

    @property
    def preempted_req_ids(self) -> set[str]:
        """Ids of the requests preempted since the last step; they lost their blocks and will be
        computed again.
        """

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Request id → number of tokens computed in this step."""


@dataclass(frozen=True, slots=True)
class ScheduledPrompt:
    """A part of a prompt as a :class:`ScheduledRequestView`."""

    request_id: str
    first_position: int
    block_ids: tuple[list[int], ...]
    num_new_blocks: tuple[int, ...]
    resumed: bool


@dataclass(frozen=True, slots=True)
class StepView:
    """A step, or the part of it that computes some prompts, as a :class:`SchedulerOutputView`."""

    requests: list[ScheduledPrompt]
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    num_scheduled_tokens: Mapping[str, int]


def yield_req_data(
    scheduler_output: SchedulerOutputView,
) -> Iterator[tuple[str, tuple[list[int], ...], bool]]:
    """Yields the new blocks of each request of a step.

    Yields:
        ``(req_id, new_block_id_groups, preempted)``. ``new_block_id_groups`` has one list of block
        ids per KV cache group: the blocks added since the request's last step. In the first step of
        a request, and if ``preempted`` (the request lost its blocks since its last step), the lists
        are the whole tables, prefix hits included.
    """
    for request in scheduler_output.requests:
        tables = zip(request.block_ids, request.num_new_blocks, strict=True)
        new = tuple(table[len(table) - count :] for table, count in tables)
        yield request.request_id, new, request.resumed


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """The arguments from which both halves of a connector are built."""

    config: KVTransferConfig
    extra: msgspec.Struct
    """``kv_connector_extra_config``, checked against the plugin's ``ExtraConfig``."""
    incarnation: str
    """Random name of this start of the engine; the same in all processes of the engine."""
    groups: tuple[GroupGeometry, ...]
    """One geometry per KV cache group."""
    model: ModelFingerprint
    num_blocks: int
    """Number of KV blocks per rank, the null block included."""
    world_size: int
    layer_windows: Mapping[int, int] = field(default_factory=dict)
    """Layer of the model → number of tokens to which a token of this layer attends, itself
    included. Layers with attention to all tokens are left out. The window is given also if the
    layer's group keeps more tokens."""
    shows_steps: bool = True
    """Whether :meth:`SchedulerConnector.build_connector_meta` gets a :class:`SchedulerOutputView`
    in every step. If ``False``, a prompt is lent only after all tokens are computed."""
    may_sleep: bool = False
    """Whether the engine lets the memory of its caches go while it sleeps. Transports whose peers
    read this memory without the engine then do not serve."""
    asks_what_was_filled: bool = True
    """Whether the engine calls :meth:`SchedulerConnector.partial_groups` and
    :meth:`SchedulerConnector.first_filled_tokens` after a load. If ``False``, every block of a load
    may become a prefix hit."""
    serving_engine: str = "kvferry"
    """The serving engine and its release, for operators."""


class SchedulerConnector(ABC):
    """The half of a connector that decides. The engine calls the methods from the scheduler's
    thread only.
    """

    takes_transfers: ClassVar[bool] = False
    """Whether a router may send a request to both engines at once, with a ``transfer`` in the
    ``kv_transfer_params``. The decode engine then requests the ticket from the prefill engine."""

    takes_weights: ClassVar[bool] = False
    """Whether the connector has :meth:`set_weights`."""

    def set_weights(
        self,
        digest: str,
        outdated: Iterable[str] | None,
        heads: Sequence[HeadDigests | None] | None = None,
    ) -> None:
        """The engine has other weights now: KV of the older weights is neither lent nor loaded.

        Leases end, and loads under way fail. The engine calls the method between two steps.

        Args:
            digest: digest of the new weights.
            outdated: ids of the requests with KV of the older weights; ``None`` if the ids will
                never be known again, and nothing more is lent.
            heads: digests of each rank's KV heads with the new weights; ``None`` if unknown.
        """
        raise NotImplementedError

    def on_new_request(self, request: RequestView) -> None:
        """Handles the arrival of a request. Default: nothing.

        Raises:
            KVFerryError: the ``kv_transfer_params`` of the request cannot be used; the engine
                refuses the request.
        """

    def lends_only_cached(self, request: RequestView) -> bool:
        """Whether a request asks for a lease of cached blocks, and for nothing to be computed.

        The engine gives such a request the cached blocks of the prompt, calls
        :meth:`update_state_after_alloc`, and ends the request at once, so that
        :meth:`request_finished` can lend the blocks. ``num_computed_tokens`` says how many tokens
        the blocks hold, maybe 0. The engine asks once per request, after :meth:`on_new_request`.
        Default: no request is of this kind.
        """
        return False

    def withdraw(self, request_id: str) -> bool:
        """Gives up the blocks lent for a request of :meth:`lends_only_cached`, as the engine needs
        them.

        Returns:
            Whether no target has fetched the blocks yet. If so, no target can fetch them any more,
            and the id comes in ``finished_sending`` soon. Default: nothing is withdrawn.
        """
        return False

    def counters(self) -> Mapping[str, float]:
        """Counters of this half since the start of the engine, for metrics. Default: none."""
        return {}

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Number of tokens available from another engine, beyond the local prefix hit.

        The call has no visible side effects, and may come many times for one request.

        Args:
            request: a waiting request.
            num_computed_tokens: tokens of the local prefix hit, a multiple of the block size.

        Returns:
            ``(tokens, load_async)``. ``None`` tokens mean "ask later". With ``load_async`` the
            request must be parked until its id comes back in ``finished_recving``.

        Raises:
            KVFerryError: the load is impossible; ``kv_load_failure_policy`` decides.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: RequestView, blocks: BlocksView, num_external_tokens: int
    ) -> None:
        """Notes the blocks of a request; the connector fills ``num_external_tokens`` tokens of
        them.

        The call may come again for the same request after its load, with 0 external tokens.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutputView) -> KVConnectorMetadata:
        """Returns the metadata of this step and starts an empty one; called once per step."""

    @abstractmethod
    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Takes in the joined report of the ranks. Unknown ids are ignored."""

    @abstractmethod
    def request_finished(
        self, request: RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handles the end of a request, by any cause.

        Returns:
            ``(keep_blocks, kv_transfer_params)``. With ``keep_blocks`` the blocks stay allocated
            until the id comes back in ``finished_sending``; the params travel in the response. For
            a request that ends while its load is under way, ``True`` means: bytes can still land;
            the blocks stay until the id comes back in ``finished_recving``.
        """

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Takes back params of :meth:`request_finished` that no engine will use.

        The params come back from a client or router, and may be anything. Blocks lent by these
        params and not yet fetched may be freed; a fetch under way goes on. Default: nothing is
        done, and the lease ends by the usual timeout.
        """

    def partial_groups(self, request: RequestView) -> frozenset[int]:
        """KV cache groups in which the last load of the request left tokens out, for good.

        If a group keeps every token, and its source keeps only a window, some blocks of the group
        are allocated and never filled. These blocks serve this request, whose layers look no
        further back, but no other request: the engine never makes blocks of such groups prefix
        hits. The engine asks once per load, after :meth:`update_connector_output`, unless the whole
        load failed. A group is not named for tokens that it does not keep itself. Default: none.
        """
        return frozenset()

    def first_filled_tokens(self, request: RequestView) -> tuple[int, ...] | None:
        """For each KV cache group, the first token of the part that the last load filled.

        The engine asks together with :meth:`partial_groups`. A group with a window needs its tokens
        from ``first_kept_token`` on only, which may lie within a block. A block filled by the load
        from its beginning may become a prefix hit; any other block may not. Tokens of the local hit
        count as filled. Default: ``None``, for no more than was needed.
        """
        return None

    def silent_peers(self) -> tuple[str, ...]:
        """Engines without an answer; nothing is loaded from them until they answer.

        Unlike all other methods, this method may be called from any thread. Never waits. Default:
        none.
        """
        return ()

    def set_worker_handshakes(self, handshakes: Sequence[bytes]) -> None:
        """Takes the ``handshake_metadata`` of each rank, by rank; called once, at start."""

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although no request is scheduled."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Ends threads and sockets. Idempotent."""


class WorkerConnector(ABC):
    """The half of a connector that moves blocks, one per rank. The engine calls the methods from
    the rank's step thread only.
    """

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Zeroed memory for the rank's KV cache; override the method if a transport must own the
        memory.

        Raises:
            SharedMemoryError: no room for ``nbytes``.
        """
        return np.zeros(nbytes, dtype=np.uint8)

    @abstractmethod
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Takes the rank's KV cache tensors by name; called once, before anything moves.

        Each tensor is a torch tensor or NumPy array of shape ``geometry.cache_shape(rank,
        num_blocks)``; its strides and address are taken as they are.
        """

    def set_head_digests(self, heads: HeadDigests) -> None:
        """Takes digests of the weights behind the rank's KV heads, by which two engines prove that
        they mean the same heads. Engines with weights call the method before
        :meth:`handshake_metadata`. Default: nothing.
        """

    def handshake_metadata(self) -> bytes:
        """Description of this rank for the scheduler half; handed to ``set_worker_handshakes``."""
        return b""

    @abstractmethod
    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Starts this step's loads. Never blocks on the wire."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Blocks until the KV of a synchronously loaded layer is in place."""

    def save_kv_layer(self, layer_name: str) -> None:
        """Notes that a layer's KV of this step is written."""

    def wait_for_save(self) -> None:
        """Blocks until the cache may be overwritten."""

    @abstractmethod
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """Reports the loads ended on this rank since the last step, each exactly once."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and frees memory. Idempotent."""


class KVConnector(ABC):
    """The plugin: names its types and builds its halves. Never instantiated."""

    ExtraConfig: ClassVar[type[msgspec.Struct]]
    """Struct of the keys allowed in ``kv_connector_extra_config``."""
    Metadata: ClassVar[type[KVConnectorMetadata]]
    """Struct of the per-step metadata, sent between processes as MessagePack."""
    required_cache_layout: ClassVar[str | None] = None
    """Name or dim order of the required cache layout; ``None`` if any layout serves."""
    supports_groups: ClassVar[bool] = False
    """Whether the connector serves engines with several KV cache groups, or with a windowed group.
    If ``False``, every request has one block table without null blocks, and an engine with other
    groups is refused at start."""

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
