"""Every timeout and limit of the control channel, with unit and default; and the CURVE keys."""

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvferry.zeromq import Socket


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that encrypt the control channel and decide which clients may use it.

    In the simple setup, all processes of a cluster share a key pair (:func:`make_keys`): servers
    admit the clients that own this pair. A client with its own pair (for example a monitor) sets
    ``server_key``, and its public key is listed in the servers' ``allowed_keys``.
    """

    public_key: str
    """This process's public key: 40 characters of Z85."""
    secret_key: str
    """This process's secret key: 40 characters of Z85."""
    server_key: str | None = None
    """Public key of the servers to which this process connects; by default ``public_key``."""
    allowed_keys: tuple[str, ...] = ()
    """Public keys of further clients that this process's server admits."""

    def __post_init__(self) -> None:
        named = [("public_key", self.public_key), ("secret_key", self.secret_key)]
        if self.server_key is not None:
            named.append(("server_key", self.server_key))
        named += [("allowed_keys", key) for key in self.allowed_keys]
        for field, key in named:
            # The message does not contain the value: it may be the secret key.
            if len(key) != 40 or not key.isascii():
                raise ValueError(f"{field}: a CURVE key is 40 characters of Z85, got {len(key)}")

    def __repr__(self) -> str:
        return f"CurveKeys(public_key={self.public_key!r}, secret_key='...')"


class ControlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the control channel. All engines of a cluster may differ in any of them."""

    lease_duration_s: float = 30.0
    """Seconds that a lease lives without a renewal, by the source's monotonic clock. The time is
    three times as long before a target takes the lease, and while the holder's connection is alive.
    """
    renewals_per_lease: int = 6
    """Number of renewals by the target within a lease duration."""
    takeover_after_s: float | None = None
    """Seconds without renewal after which another target may take a lease over; half of
    ``lease_duration_s`` by default."""
    max_lease_age_s: float = 1800.0
    """Seconds after which a lease ends even if its holder renews it."""
    max_leased_blocks: int | None = None
    """Number of KV blocks that leases may pin together; three quarters of the pool by default."""
    request_timeout_s: float = 120.0
    """Seconds without an answer after which a peer with a live connection counts as hung; a process
    may fail to run for a minute."""
    heartbeat_s: float = 3.0
    """Seconds between ZeroMQ heartbeats, which do not depend on a process's Python code. A peer
    that misses three heartbeats is disconnected."""
    max_message_bytes: int = 16 << 20
    """Number of bytes of the largest accepted or sent message."""
    max_peers: int = 1024
    """Number of remembered peers; the peer that was silent for longest makes room."""
    remembered_leases: int = 16384
    """Number of ended leases whose late messages still get the same answers."""
    remembered_errors: int = 64
    """Number of errors kept for ``kvferry status``."""
    curve: CurveKeys | None = None
    """CURVE keys; without keys the channel is neither encrypted nor authenticated."""

    def __post_init__(self) -> None:
        for field in ("lease_duration_s", "max_lease_age_s", "request_timeout_s", "heartbeat_s"):
            value = getattr(self, field)
            if not 0 < value < 1e6:
                raise ValueError(f"{field}: {value} is not a number of seconds above 0")
        for field in (
            "renewals_per_lease",
            "max_message_bytes",
            "max_peers",
            "remembered_leases",
            "remembered_errors",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)} is less than 1")
        if self.max_leased_blocks is not None and self.max_leased_blocks < 0:
            raise ValueError(f"max_leased_blocks: {self.max_leased_blocks} is negative")
        if self.takeover_after_s is not None and not (
            0 < self.takeover_after_s <= self.lease_duration_s
        ):
            raise ValueError(
                f"takeover_after_s: {self.takeover_after_s} is not between 0 and "
                f"lease_duration_s ({self.lease_duration_s})"
            )

    def leased_blocks_cap(self, num_blocks: int) -> int:
        """Number of blocks that leases may pin in a pool of ``num_blocks``, null block included."""
        return num_blocks * 3 // 4 if self.max_leased_blocks is None else self.max_leased_blocks


def configure(socket: "Socket", options: ControlOptions, *, is_server: bool) -> None:
    """Sets the options of a socket, before the socket is bound or connected.

    Raises:
        ConfigError: a key is not Z85, or this libzmq was built without CURVE.
    """
    import zmq

    from kvferry.zeromq import beat, use_curve

    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, options.max_message_bytes)
    beat(socket, options.heartbeat_s)
    if (keys := options.curve) is not None:
        servers = None if is_server else keys.server_key or keys.public_key
        use_curve(socket, keys.public_key, keys.secret_key, servers)
        # Python code decides whether a key is admitted.
        socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, round(options.request_timeout_s * 1000)))


def make_keys() -> CurveKeys:
    """Makes a new CURVE key pair for a cluster.

    Raises:
        ConfigError: the installed libzmq was built without CURVE.
    """
    from kvferry.zeromq import curve_keypair

    public_key, secret_key = curve_keypair()
    return CurveKeys(public_key=public_key, secret_key=secret_key)
