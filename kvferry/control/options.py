"""Every timeout and limit of the control channel, with unit and default; and the CURVE keys."""

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvferry.zeromq import Socket


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that encrypt the control channel and say who may speak on it.

    The plain setup gives every process of a cluster one pair (:func:`make_keys`): servers admit
    the clients that own it. A client with a pair of its own (a monitor, say) sets ``server_key``,
    and its public key is listed in the servers' ``allowed_keys``.
    """

    public_key: str
    """This process's public key: 40 characters of Z85."""
    secret_key: str
    """This process's secret key: 40 characters of Z85."""
    server_key: str | None = None
    """Public key of the servers it connects to; its own ``public_key`` unless given."""
    allowed_keys: tuple[str, ...] = ()
    """Public keys of clients that its server admits beside its own."""

    def __post_init__(self) -> None:
        named = [("public_key", self.public_key), ("secret_key", self.secret_key)]
        if self.server_key is not None:
            named.append(("server_key", self.server_key))
        named += [("allowed_keys", key) for key in self.allowed_keys]
        for field, key in named:
            # The value is left out of the message: it may be the secret one.
            if len(key) != 40 or not key.isascii():
                raise ValueError(f"{field}: a CURVE key is 40 characters of Z85, got {len(key)}")

    def __repr__(self) -> str:
        return f"CurveKeys(public_key={self.public_key!r}, secret_key='...')"


class ControlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the control channel behaves. All engines of a cluster may differ in any of these."""

    lease_duration_s: float = 30.0
    """Seconds that a lease lives without being renewed, by the source's monotonic clock; three
    times as long before it is taken, and while its holder's connection lives."""
    renewals_per_lease: int = 6
    """How often the target renews within one lease duration."""
    takeover_after_s: float | None = None
    """Seconds without renewal after which another target may take a lease over; half of
    ``lease_duration_s`` unless given."""
    max_lease_age_s: float = 1800.0
    """Seconds after which a lease ends however often it is renewed."""
    max_leased_blocks: int | None = None
    """KV blocks that leases may pin together; three quarters of the pool unless given."""
    request_timeout_s: float = 120.0
    """Seconds after which a peer whose connection lives, and which has not answered, counts as
    hung: a process may not get to run for a minute."""
    heartbeat_s: float = 3.0
    """Seconds between ZeroMQ heartbeats, which need nothing of a process's Python; a peer that
    misses three is disconnected."""
    max_message_bytes: int = 16 << 20
    """Bytes of the largest message that is accepted or sent."""
    max_peers: int = 1024
    """Peers that are remembered; the one silent for longest makes room."""
    remembered_leases: int = 16384
    """Ended leases whose late messages are still answered as before."""
    remembered_errors: int = 64
    """Errors kept for ``kvferry status``."""
    curve: CurveKeys | None = None
    """Keys; without them the channel is neither encrypted nor authenticated."""

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
        """Blocks that leases may pin in a pool of ``num_blocks`` (the null block included)."""
        return num_blocks * 3 // 4 if self.max_leased_blocks is None else self.max_leased_blocks


def configure(socket: "Socket", options: ControlOptions, *, is_server: bool) -> None:
    """Sets what the options say of a socket, before it is bound or connected.

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
        # Whether a key is admitted is decided in Python.
        socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, round(options.request_timeout_s * 1000)))


def make_keys() -> CurveKeys:
    """A new CURVE key pair for a cluster.

    Raises:
        ConfigError: the installed libzmq was built without CURVE.
    """
    from kvferry.zeromq import curve_keypair

    public_key, secret_key = curve_keypair()
    return CurveKeys(public_key=public_key, secret_key=secret_key)
