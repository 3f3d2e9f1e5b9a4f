"""What a user may write in ``kv_connector_extra_config`` for the PullConnector."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from kvferry.config import parse_struct
from kvferry.control.options import ControlOptions, CurveKeys
from kvferry.control.tickets import MIN_KEY_BYTES
from kvferry.errors import ConfigError
from kvferry.transports.registry import transport_class
from kvferry.zeromq import is_everywhere, join_address, split_address

MIN_STAGING_BYTES = 4096
"""The smallest staging memory that makes any sense."""


class PullConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Extra keys of the PullConnector. Times are seconds."""

    transport: str | tuple[str, ...] = "shm"
    """Transports this engine offers, best first; a pair uses the first that both offer and that
    reaches: with ``["shm", "tcp"]``, shared memory on one host and TCP between hosts."""
    transport_config: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Transport name → its own extra keys."""
    host: str = "127.0.0.1"
    """Address on which this engine listens and which its tickets name."""
    advertise_host: str = ""
    """Host that tickets name and peers are told in place of ``host``, where another one leads
    here; empty: ``host``."""
    advertise_port: int = 0
    """Port of the control channel that tickets name, where a mapping leads from it to ``kv_port``;
    0: ``kv_port``."""
    peers: tuple[str, ...] = ()
    """``host:port``, for IPv6 ``[address]:port``, of engines to shake hands with at start. Without
    a cluster key, these are the only ones a ticket may name."""
    cluster_key: str | None = None
    """Secret of the whole cluster; tickets are signed with it."""
    cluster_key_file: str | None = None
    """File that holds the secret; used instead of ``cluster_key``."""
    curve_keys: str | None = None
    """JSON file with the keys that ``kvferry keys`` made; encrypts the control channel."""
    insecure: bool = False
    """Whether the engine may listen beyond this machine without any key."""
    lease_duration_s: float = 30.0
    """How long a lease lives without renewal, by which the source knows that we are gone; renewed
    every sixth of it. Before it is taken, and while our connection lives, three times as long."""
    max_leased_blocks: int | None = None
    """KV blocks that leases may pin, three quarters of the pool unless given; beyond it a prompt
    is not lent out."""
    max_lent_prefix_blocks: int | None = None
    """Of these, KV blocks that cached prefixes may pin which other engines asked for
    (``only_cached``); half unless given. 0 lends none."""
    request_timeout_s: float = 120.0
    """Time after which a peer that is connected, and has not answered, counts as hung."""
    control_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """The other keys of ``ControlOptions``, rarely needed."""
    handshake_timeout_s: float = 30.0
    """Wait of a request for a peer that cannot be reached, or is starting; then the load fails."""
    stall_timeout_s: float = 120.0
    """Time in which a source that is connected sends nothing; then the read fails as stalled."""
    progress_timeout_s: float = 120.0
    """Time in which no rank of ours reports progress of a load, or in which the engine makes no
    step and so begins none; then its lease is given up, as what hangs must not keep the source's
    blocks."""
    mover_threads: int = 2
    """Threads that copy, per rank."""
    staging_bytes: int = 256 << 20
    """Staging memory per rank, in bytes, for cells that a transport does not put in place itself;
    taken when it is first needed."""
    early_load: Literal["off", "late", "now"] = "late"
    """When this engine begins to load a prompt that the source still computes: when it is whole, as
    late as it can be read by the time it is whole, or as soon as the source has begun."""
    convert_dtype: bool = False
    """Whether a source whose KV cache has another dtype is read although precision is lost."""
    record_digests: bool = False
    """Whether each rank adds a digest of the cells it lent or loaded to its transfer records."""

    def __post_init__(self) -> None:
        for field in (
            "lease_duration_s",
            "request_timeout_s",
            "handshake_timeout_s",
            "stall_timeout_s",
            "progress_timeout_s",
        ):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field}: {getattr(self, field)} s is not positive")
        for cap in ("max_leased_blocks", "max_lent_prefix_blocks"):
            if (value := getattr(self, cap)) is not None and value < 0:
                raise ValueError(f"{cap}: {value} is negative")
        if self.mover_threads < 1:
            raise ValueError(f"mover_threads: {self.mover_threads} is less than 1")
        if self.staging_bytes < MIN_STAGING_BYTES:
            raise ValueError(
                f"staging_bytes: {self.staging_bytes} is less than {MIN_STAGING_BYTES}"
            )
        if not self.transports:
            raise ValueError("transport: name at least one")
        self._check_told()
        self._check_transports()
        if self.cluster_key is not None and self.cluster_key_file is not None:
            raise ValueError("cluster_key and cluster_key_file: write one of them")

    def _check_told(self) -> None:
        if not 0 <= self.advertise_port <= 65535:
            raise ValueError(
                f"advertise_port: {self.advertise_port} is not a TCP port (0 to 65535)"
            )
        if self.advertise_host and is_everywhere(self.advertise_host):
            raise ValueError(
                f"advertise_host: {self.advertise_host} is every address of a machine; name the "
                "one at which other engines reach this one"
            )

    def _check_transports(self) -> None:
        """Everything that can be known of them before a rank starts.

        Raises:
            ConfigError: unknown transport, or wrong extra keys.
        """
        for name in self.transports:
            kind = transport_class(name)
            keys = self.transport_config.get(name, {})
            parse_struct(kind.ExtraConfig, keys, f"transport_config of {name}")
        for name in self.transport_config:
            if name not in self.transports:
                raise ConfigError(
                    f"transport_config: has keys for {name!r}, which is not in transport "
                    f"({', '.join(self.transports)}); add it there or delete the keys"
                )

    @property
    def transports(self) -> tuple[str, ...]:
        """The offered transports, best first."""
        return (self.transport,) if isinstance(self.transport, str) else self.transport

    def told(self, port: int) -> tuple[str, int]:
        """Host and port that peers are told, where the control channel listens on ``port``."""
        return self.advertise_host or self.host, self.advertise_port or port

    def peer_addresses(self) -> tuple[str, ...]:
        """``peers`` as tickets name them, in one form for each address.

        Raises:
            ConfigError: one is not ``host:port``.
        """
        try:
            return tuple(join_address(*split_address(peer)) for peer in self.peers)
        except ValueError as error:
            raise ConfigError(f"peers: {error}") from error

    def key(self) -> bytes | None:
        """The cluster's key.

        Raises:
            ConfigError: ``cluster_key_file`` cannot be read, or the key is too short.
        """
        if self.cluster_key is not None:
            field, key = "cluster_key", self.cluster_key.encode()
        elif self.cluster_key_file is not None:
            field = f"cluster_key_file: {self.cluster_key_file}"
            try:
                key = Path(self.cluster_key_file).read_bytes().strip()
            except OSError as error:
                raise ConfigError(
                    _unread("cluster_key_file", self.cluster_key_file, error)
                ) from error
        else:
            return None
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"{field}: the key has {len(key)} bytes, it needs at least {MIN_KEY_BYTES}; "
                "take 32 random ones, for example from `kvferry keys`"
            )
        return key

    def curve(self) -> CurveKeys | None:
        """The CURVE keys of the control channel.

        Raises:
            ConfigError: ``curve_keys`` cannot be read, or does not hold keys.
        """
        if self.curve_keys is None:
            return None
        try:
            values = msgspec.json.decode(Path(self.curve_keys).read_bytes())
        except OSError as error:
            raise ConfigError(_unread("curve_keys", self.curve_keys, error)) from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"curve_keys: {self.curve_keys} is not JSON: {error}") from error
        return parse_struct(CurveKeys, values, f"curve_keys: {self.curve_keys}")

    def control_options(self) -> ControlOptions:
        """The options of every control client and server of an engine.

        Raises:
            ConfigError: ``curve_keys`` or ``control_config`` cannot be used.
        """
        own = {
            "lease_duration_s": self.lease_duration_s,
            "max_leased_blocks": self.max_leased_blocks,
            "request_timeout_s": self.request_timeout_s,
            "curve": self.curve(),
        }
        for key in self.control_config:
            if key in own:
                where = "curve_keys" if key == "curve" else key
                raise ConfigError(
                    f"control_config: {key!r} does not belong here; write {where} beside "
                    "control_config"
                )
        options = parse_struct(ControlOptions, self.control_config, "control_config")
        try:
            return msgspec.structs.replace(options, **own)
        except ValueError as error:
            raise ConfigError(f"control_config: {error}") from error


def _unread(key: str, file: str, error: OSError) -> str:
    return (
        f"{key}: {Path(file).absolute()} cannot be read: {error.strerror}; name the file that "
        "`kvferry keys` made for the cluster"
    )
