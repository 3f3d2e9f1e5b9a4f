"""What travels inside the reference engine: requests in, steps to the ranks, outputs back.

Ranks keep no state of requests: every step carries all that a rank needs, so a rank can never
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

# What a client may write, at the router as at an engine. Every integer fits into the 64 bits of a
# message to a rank; a length bounds what is kept, and sent with every step.
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ModelName = Annotated[str, Meta(max_length=1024)]
StopTokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=256)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen."""

    max_tokens: MaxTokens = 16
    temperature: Temperature = 0.0
    """0 is greedy."""
    top_k: TopK = 0
    """0 and -1 keep all."""
    top_p: TopP = 1.0
    seed: Seed | None = None
    """With a seed, output token ``i`` is drawn by a generator seeded with ``(seed, i)``: the draw
    does not depend on batch, rank or engine."""
    seed_offset: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Output tokens already drawn elsewhere (by the prefill engine); token ``i`` here is drawn as
    token ``i + seed_offset``."""
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False


class ScheduledRequest(msgspec.Struct, kw_only=True):
    """One request's part of a step."""

    request_id: str
    token_ids: list[int]
    """Tokens to compute in this step."""
    first_position: int
    """Position of ``token_ids[0]`` in the sequence; KV of all earlier positions is in the cache."""
    block_ids: tuple[list[int], ...]
    """The whole block tables, one list per KV cache group, covering all positions computed."""
    num_new_blocks: tuple[int, ...] = ()
    """Entries at the end of each table that the request did not have in its last step: all of
    them in its first, and when ``resumed``."""
    resumed: bool = False
    """Whether the request was preempted after its last step."""
    sample: SamplingParams | None = None
    """Given when the last token's logits are to be sampled (the prompt is complete)."""
    output_index: int = 0
    """Index of the output token to be drawn, ``seed_offset`` included."""


class SchedulerOutput(msgspec.Struct, kw_only=True, tag="step"):
    """One step."""

    requests: list[ScheduledRequest] = msgspec.field(default_factory=list)
    finished_req_ids: set[str] = msgspec.field(default_factory=set)
    """Requests that ended since the last step."""
    preempted_req_ids: set[str] = msgspec.field(default_factory=set)
    connector_metadata: bytes | None = None
    """MessagePack of the connector's ``Metadata``; ``None`` without a connector."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Request id → tokens computed in this step."""
        return {request.request_id: len(request.token_ids) for request in self.requests}


class RankOutput(msgspec.Struct, kw_only=True, tag="output"):
    """What one rank returns for one step."""

    sampled: dict[str, int] = msgspec.field(default_factory=dict)
    """Request id → token drawn; only the first rank of the last stage fills it."""
    gaps: dict[str, float] = msgspec.field(default_factory=dict)
    """Request id → difference of the two best logits behind ``sampled``."""
    kv_connector_output: KVConnectorOutput | None = None


class RequestTimings(msgspec.Struct, kw_only=True):
    """When the parts of a request's life began and ended: Unix seconds, ``None`` before."""

    arrival: float
    scheduled: float | None = None
    """First time it got blocks."""
    load_started: float | None = None
    load_finished: float | None = None
    """When the scheduler learned that every rank's load had ended."""
    prefill_started: float | None = None
    """Start of the first step that computes its tokens."""
    prefill_finished: float | None = None
    """End of the step that computed the last token of the prompt."""
    first_token: float | None = None
    finished: float | None = None


class EngineOutput(msgspec.Struct, kw_only=True):
    """News of one request after a step, or after several that were added up."""

    request_id: str
    token_ids: list[int] = msgspec.field(default_factory=list)
    """New tokens."""
    gaps: list[float] = msgspec.field(default_factory=list)
    """For each of them, the difference of the two best logits."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error`` once it has ended."""
    error: str = ""
    """Why it ended with ``error``."""
    error_type: str = ""
    """Class name of that error, ``OutOfBlocksError`` for example."""
    kv_transfer_params: dict[str, object] | None = None
    """What the connector returned at the end."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the local prefix cache."""
    num_external_tokens: int = 0
    """Prompt tokens loaded through the connector."""
    timings: RequestTimings | None = None
    """Given with ``finish_reason``."""

    def __add__(self, later: "EngineOutput") -> "EngineOutput":
        """This news and that of a later step of the same request."""
        return msgspec.structs.replace(
            later, token_ids=self.token_ids + later.token_ids, gaps=self.gaps + later.gaps
        )


# -- between an executor and its ranks --------------------------------------------------------


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is started from; the same for every rank of an engine."""

    engine: str
    """Name of the engine, for logs and messages."""
    model_folder: str
    """A converted model folder, see :func:`kvferry.engine.weights.prepare_model`."""
    geometries: tuple[EngineGeometry, ...]
    """The KV cache groups; their dtype is also that of weights and activations."""
    num_blocks: int
    """KV blocks per rank, the null block included."""
    incarnation: str
    """Random per start of the engine."""
    layer_windows: dict[int, int] = msgspec.field(default_factory=dict)
    """Model layer → sliding window that it computes within."""
    kv_transfer_config: KVTransferConfig | None = None
    """``None`` for an engine that exchanges no KV."""
    threads: int = 1
    """Compute threads per rank."""
    start_timeout_s: float = 300.0
    """Seconds in which every rank must be ready."""
    step_timeout_s: float = 600.0
    """Seconds after which a rank that has not answered a step counts as dead."""

    @property
    def parallel(self) -> ParallelShape:
        """The shape of the engine, the same for every group."""
        return self.geometries[0].parallel

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV cache."""
        return self.geometries[0].dtype

    @property
    def folder(self) -> Path:
        """The model folder."""
        return Path(self.model_folder)

    def connector(self, config: KVTransferConfig) -> tuple[type[KVConnector], ConnectorContext]:
        """The connector's class, and what both of its halves are made from.

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
    """The ranks of an engine that are processes of other hosts, and wait there for the engine."""

    host: str
    """Address of the engine's own host, at which they reach it."""
    addresses: tuple[str, ...]
    """``host:port`` of each; they are the last ranks of the engine."""
    key: str
    """Secret that both sides prove to know."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a rank."""

    spec: WorkerSpec
    rank: int
    init_method: str
    """Where ranks that are processes meet; see
    :class:`~kvferry.engine.communicator.GlooCommunicator`."""
    log_level: int
    """Of the logger ``kvferry``, as in :mod:`logging`."""
    host: str = ""
    """Address at which ranks on other hosts reach this one; empty where there are none."""

    def on(self, host: str, model_folder: str) -> "Start":
        """The same for a rank on another host than the engine's.

        Args:
            host: that host's address; the rank's connector listens there too, and is told so.
            model_folder: the converted model on that host.
        """
        transfer = self.spec.kv_transfer_config
        if transfer is not None and "host" in transfer.kv_connector_extra_config:
            extra = {**transfer.kv_connector_extra_config, "host": host}
            extra.pop("advertise_host", None)  # leads to the engine's host
            transfer = msgspec.structs.replace(transfer, kv_connector_extra_config=extra)
        spec = msgspec.structs.replace(
            self.spec, model_folder=model_folder, kv_transfer_config=transfer
        )
        return msgspec.structs.replace(self, host=host, spec=spec)


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The rank raised, and ends."""

    kind: str
    """Class name of the error."""
    text: str


#: What a rank receives: its start, then steps; ``None`` lets it close its worker and end.
Command = Start | SchedulerOutput | None


#: What a rank answers: its connector's handshake once the worker is open, an output for each step.
Answer = bytes | RankOutput | Failed
