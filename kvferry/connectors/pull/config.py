"""The keys that a user may write in ``kv_connector_extra_config`` for the PullConnector."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvferry.config import parse_struct
from kvferry.control.options import ControlOptions, CurveKeys
from kvferry.control.tickets import MIN_KEY_BYTES
from kvferry.errors import ConfigError
from kvferry.transports.registry import ALLOCATED, IN_HOST_MEMORY, ON_A_DEVICE, transport_class
from kvferry.zeromq import is_everywhere, join_address, split_address

MIN_STAGING_BYTES = 4096
"""Smallest size of the staging memory, in bytes."""


class PullConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Extra keys of the PullConnector. Times are seconds."""

    transport: str | tuple[str, ...] | None = None
    """Transports that this engine offers, best first. A pair of engines uses the first transport
    that both offer and that reaches the source: with ``["shm", "tcp"]``, shared memory on one host
    and TCP between hosts. By default, the transports that serve the KV cache in its memory
    (:mod:`kvferry.transports.registry`)."""
    transport_config: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Transport name → its own extra keys."""
    host: str = "127.0.0.1"
    """Address on which this engine listens, and which its tickets name."""
    advertise_host: str = ""
    """Host that tickets and peers get in place of ``host``, if another address leads to this
    engine; empty: ``host``."""
    advertise_port: int = 0
    """Port of the control channel that tickets name, if a mapping leads from this port to
    ``kv_port``; 0: ``kv_port``."""
    peers: tuple[str, ...] = ()
    """Engines to shake hands with at start, as ``host:port``; for IPv6 ``[address]:port``. Without
    a cluster key, a ticket may name only these engines."""
    cluster_key: str | None = None
    """Secret of the whole cluster, with which tickets are signed."""
    cluster_key_file: str | None = None
    """File that holds the secret; used instead of ``cluster_key``."""
    curve_keys: str | None = None
    """JSON file with the keys that ``kvferry keys`` made; encrypts the control channel."""
    insecure: bool = False
    """Whether the engine may listen beyond this machine without any key."""
    lease_duration_s: float = 30.0
    """Seconds that a lease lives without renewal; so the source notices that the target is gone. A
    target renews a lease every sixth of this time. Before a target takes the lease, and while the
    target's connection lives, the lease lives three times as long."""
    max_leased_blocks: int | None = None
    """Number of KV blocks that leases may pin; by default three quarters of the pool. Beyond this
    number a prompt is not lent."""
    max_lent_prefix_blocks: int | None = None
    """Number of KV blocks, out of ``max_leased_blocks``, that cached prefixes may pin for other
    engines (``only_cached``); by default half. 0 lends no prefixes."""
    request_timeout_s: float = 120.0
    """Seconds after which a connected peer that has not answered counts as hung."""
    control_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """The other keys of ``ControlOptions``, rarely needed."""
    handshake_timeout_s: float = 30.0
    """Seconds that a request waits for a peer that cannot be reached or is starting; then the load
    fails."""
    stall_timeout_s: float = 120.0
    """Seconds in which a connected source sends nothing; then the read fails as stalled."""
    progress_timeout_s: float = 120.0
    """Seconds in which no rank of this engine reports progress of a load, or in which the engine
    makes no step and so begins no load. Then the lease of the load is given up, as a target that
    hangs must not keep the source's blocks."""
    mover_threads: int = 2
    """Number of copy threads per rank."""
    staging_bytes: int = 256 << 20
    """Staging memory per rank, in bytes, for cells that a transport does not put in place itself;
    allocated on first use."""
    packing_bytes: int = 256 << 20
    """Pinned host memory per rank, in bytes, in which a device packs blocks that are read over a
    transport of host memory; allocated when the KV cache is registered."""
    early_load: Literal["off", "late", "now"] = "late"
    """Time at which this engine begins to load a prompt that the source still computes: ``off``,
    when the prompt is whole; ``late``, as late as possible so that the rest is read soon after the
    prompt is whole; ``now``, as soon as the source has begun."""
    convert_dtype: bool = False
    """Whether a source whose KV cache has another dtype is read although precision is lost."""
    record_digests: bool = False
    """Whether each rank adds a digest of the lent or loaded cells to the transfer records."""

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
        for memory in ("staging_bytes", "packing_bytes"):
            if (value := getattr(self, memory)) < MIN_STAGING_BYTES:
                raise ValueError(f"{memory}: {value} is less than {MIN_STAGING_BYTES}")
        if self.transport is not None and not self.transports:
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
        """Checks all that can be known of the transports before a rank starts.

        Raises:
            ConfigError: unknown transport, or wrong extra keys.
        """
        for name in {*self.transports, *self.transport_config}:
            keys = self.transport_config.get(name, {})
            parse_struct(transport_class(name).ExtraConfig, keys, f"transport_config of {name}")
        self.check_keys(self.transports or (*ALLOCATED, *IN_HOST_MEMORY, *ON_A_DEVICE))

    def check_keys(self, transports: Iterable[str]) -> None:
        """Checks that ``transport_config`` has keys of these transports only.

        Raises:
            ConfigError: ``transport_config`` has keys of another transport.
        """
        for name in self.transport_config.keys() - {*transports}:
            raise ConfigError(
                f"transport_config: has keys for {name!r}, which is not in transport "
                f"({', '.join(transports)}); add it there or delete the keys"
            )

    def check_sleep(self) -> None:
        """Checks that the named transports serve caches whose memory the engine lets go in between.

        Raises:
            ConfigError: peers of a transport read the memory without this engine.
        """
        for name in self.transports:
            if not transport_class(name).may_sleep:
                raise ConfigError(
                    f"transport: peers read over {name!r} without this engine, and sleep mode lets "
                    "the memory go under them; name tcp or ucx in its place, or delete transport"
                )

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that the configuration names, best first."""
        return (self.transport,) if isinstance(self.transport, str) else self.transport or ()

    def told(self, port: int) -> tuple[str, int]:
        """Host and port that peers get, if the control channel listens on ``port``."""
        return self.advertise_host or self.host, self.advertise_port or port

    def peer_addresses(self) -> tuple[str, ...]:
        """``peers`` as tickets name them, with a single form for each address.

        Raises:
            ConfigError: an entry is not ``host:port``.
        """
        try:
            return tuple(join_address(*split_address(peer)) for peer in self.peers)
        except ValueError as error:
            raise ConfigError(f"peers: {error}") from error

    def key(self) -> bytes | None:
        """The cluster's key; ``None`` without a key.

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
        """The CURVE keys of the control channel; ``None`` without ``curve_keys``.

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
