"""Messages inside the reference engine: requests, steps for the ranks, and outputs.

Ranks keep no state of requests. Each step carries all data that a rank needs, so a rank can never
disagree with the scheduler about a block table.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.config import KVTransferConfig
from kvferry.connectors.base import ConnectorContext, KVConnector, KVConnectorOutput
from kvferry.connectors.registry import connector_context
from kvferry.engine.weights import fingerprint
from kvferry.topology import EngineGeometry, ParallelShape

# Types of values that a client may send to the router or to an engine. Every integer fits into the
# 64 bits of a message to a rank. Each length bounds data that is kept and sent with every step.
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ModelName = Annotated[str, Meta(max_length=1024)]
StopTokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=256)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for the sampling of a request's tokens."""

    max_tokens: MaxTokens = 16
    temperature: Temperature = 0.0
    """Softmax temperature; 0 for greedy sampling."""
    top_k: TopK = 0
    """Number of most likely tokens to sample from; 0 and -1 for all tokens."""
    top_p: TopP = 1.0
    seed: Seed | None = None
    """Seed; a generator with the seed ``(seed, i)`` samples output token ``i``. So the token does
    not depend on batch, rank or engine."""
    seed_offset: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Number of output tokens that another engine (the prefill engine) has sampled. Token ``i`` is
    sampled here as token ``i + seed_offset``."""
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False


class ScheduledRequest(msgspec.Struct, kw_only=True):
    """The part of a step that belongs to a request."""

    request_id: str
    token_ids: list[int]
    """Tokens to compute in this step."""
    first_position: int
    """Position of ``token_ids[0]`` in the sequence; KV of all earlier positions is in the cache."""
    block_ids: tuple[list[int], ...]
    """The whole block tables, a list per KV cache group; they cover all computed positions."""
    num_new_blocks: tuple[int, ...] = ()
    """Number of entries at the end of each table that are new since the request's last step. All
    entries are new in the first step, and if ``resumed`` is true."""
    resumed: bool = False
    """Whether the request was preempted after its last step."""
    sample: SamplingParams | None = None
    """Sampling parameters if the last token's logits must be sampled (the prompt is complete)."""
    output_index: int = 0
    """Index of the output token to sample, including ``seed_offset``."""


class SchedulerOutput(msgspec.Struct, kw_only=True, tag="step"):
    """A step: the parts of all requests, and the changes since the last step."""

    requests: list[ScheduledRequest] = msgspec.field(default_factory=list)
    finished_req_ids: set[str] = msgspec.field(default_factory=set)
    """Ids of the requests that ended since the last step."""
    preempted_req_ids: set[str] = msgspec.field(default_factory=set)
    connector_metadata: bytes | None = None
    """MessagePack of the connector's ``Metadata``; ``None`` without a connector."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Request id → number of tokens computed in this step."""
        return {request.request_id: len(request.token_ids) for request in self.requests}


class RankOutput(msgspec.Struct, kw_only=True, tag="output"):
    """The answer of a rank to a step."""

    sampled: dict[str, int] = msgspec.field(default_factory=dict)
    """Request id → sampled token; filled only by the first rank of the last stage."""
    gaps: dict[str, float] = msgspec.field(default_factory=dict)
    """Request id → difference between the two highest logits at the token in ``sampled``."""
    kv_connector_output: KVConnectorOutput | None = None


class RequestTimings(msgspec.Struct, kw_only=True):
    """Times of the events in a request's life, in Unix seconds; ``None`` before the event."""

    arrival: float
    scheduled: float | None = None
    """Time at which the request first got blocks."""
    load_started: float | None = None
    load_finished: float | None = None
    """Time at which the scheduler learned of the end of the load on all ranks."""
    prefill_started: float | None = None
    """Start of the first step that computes tokens of the request."""
    prefill_finished: float | None = None
    """End of the step that computed the last token of the prompt."""
    first_token: float | None = None
    finished: float | None = None


class EngineOutput(msgspec.Struct, kw_only=True):
    """Changes of a request in a step, or in several steps that were added up."""

    request_id: str
    token_ids: list[int] = msgspec.field(default_factory=list)
    """New tokens since the last output."""
    gaps: list[float] = msgspec.field(default_factory=list)
    """Difference between the two highest logits, for each new token."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error`` after the end; ``None`` before."""
    error: str = ""
    """Message of the error that ended the request; empty without an error."""
    error_type: str = ""
    """Class name of that error, for example ``OutOfBlocksError``."""
    kv_transfer_params: dict[str, object] | None = None
    """Parameters that the connector returned at the end of the request."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the local prefix cache."""
    num_external_tokens: int = 0
    """Number of prompt tokens loaded through the connector."""
    timings: RequestTimings | None = None
    """Times of the request's events; set together with ``finish_reason``."""

    def __add__(self, later: "EngineOutput") -> "EngineOutput":
        """Joins two outputs of the same request; ``later`` is of a later step."""
        return msgspec.structs.replace(
            later, token_ids=self.token_ids + later.token_ids, gaps=self.gaps + later.gaps
        )


# -- messages between an executor and its ranks -----------------------------------------------


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a rank, the same for every rank of an engine."""

    engine: str
    """Name of the engine, for logs and messages."""
    model_folder: str
    """Folder with the converted model; see :func:`kvferry.engine.weights.prepare_model`."""
    geometries: tuple[EngineGeometry, ...]
    """The KV cache groups; their dtype is also the dtype of weights and activations."""
    num_blocks: int
    """Number of KV blocks per rank, including the null block."""
    incarnation: str
    """Random id of the engine's current start."""
    layer_windows: dict[int, int] = msgspec.field(default_factory=dict)
    """Model layer → length of the layer's sliding window in tokens."""
    kv_transfer_config: KVTransferConfig | None = None
    """Configuration of the connector; ``None`` for an engine that exchanges no KV."""
    threads: int = 1
    """Number of compute threads per rank."""
    start_timeout_s: float = 300.0
    """Seconds within which a rank on another host must be reached, and then every rank be ready."""
    step_timeout_s: float = 600.0
    """Seconds without an answer to a step after which a rank counts as dead."""

    @property
    def parallel(self) -> ParallelShape:
        """The parallel shape of the engine, equal for all groups."""
        return self.geometries[0].parallel

    @property
    def dtype(self) -> str:
        """Dtype of weights, activations and KV cache."""
        return self.geometries[0].dtype

    @property
    def folder(self) -> Path:
        """The folder with the converted model."""
        return Path(self.model_folder)

    def connector(self, config: KVTransferConfig) -> tuple[type[KVConnector], ConnectorContext]:
        """The connector's class, and the context for the construction of its two halves.

        Raises:
            ConfigError, PluginError: see :func:`~kvferry.connectors.registry.connector_context`.
            ModelError: the model folder cannot be used.
        """
        return connector_context(
            config,
            incarnation=self.incarnation,
            groups=self.geometries,
            layer_windows=self.layer_windows,
            model=fingerprint(self.folder, self.dtype),
            num_blocks=self.num_blocks,
            world_size=self.parallel.world_size,
        )


class RanksElsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of an engine that are processes on other hosts and wait there for the engine."""

    host: str
    """Address of the engine's own host, at which remote ranks reach the engine."""
    addresses: tuple[str, ...]
    """``host:port`` of each remote rank; these are the last ranks of the engine."""
    key: str
    """Secret that both sides must prove to know."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a rank."""

    spec: WorkerSpec
    rank: int
    meeting: str
    """``host:port`` at which rank 0 listens for the other ranks; empty if ranks are threads."""
    listener: int | None = None
    """File descriptor of the socket that listens there, which rank 0 has inherited."""
    log_level: int
    """Level of the logger ``kvferry``, as in :mod:`logging`."""
    host: str = ""
    """Address at which ranks on other hosts reach this rank; empty if there are none."""

    def on(self, host: str, model_folder: str) -> "Start":
        """A copy of this message for a rank on another host than the engine's host.

        Args:
            host: address of the other host; the rank's connector listens on this address too.
            model_folder: folder with the converted model on the other host.
        """
        transfer = self.spec.kv_transfer_config
        if transfer is not None and "host" in transfer.kv_connector_extra_config:
            extra = {**transfer.kv_connector_extra_config, "host": host}
            extra.pop("advertise_host", None)  # this address leads to the engine's host
            transfer = msgspec.structs.replace(transfer, kv_connector_extra_config=extra)
        spec = msgspec.structs.replace(
            self.spec, model_folder=model_folder, kv_transfer_config=transfer
        )
        return msgspec.structs.replace(self, host=host, spec=spec)


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The report of a rank that raised an error and ends."""

    kind: str
    """Class name of the error."""
    text: str


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True, tag="weights"):
    """Makes a rank compute with other weights from the next step on."""

    model_folder: str
    """Folder with a converted model of the same shape."""


#: Messages to a rank: a start, then steps and weights; ``None`` makes the rank close its worker and
#: end.
Command = Start | SchedulerOutput | LoadWeights | None


#: Answers of a rank: its connector's handshake when the worker is open, then an output per step,
#: and the encoded :class:`~kvferry.topology.heads.HeadDigests` of other weights.
Answer = bytes | RankOutput | Failed
