"""Who may speak of a lease: only who was given its ticket.

A ticket carries its lease's secret. A message about the lease carries no secret but a proof: a
keyed BLAKE2b (RFC 7693) under the secret over what the message says and who says it. So whoever
listens on the network can at most repeat a message, under the name and for the start of the engine
that sent it; and an engine that knows a lease id, from a status report say, can do nothing to that
lease.

The source keeps one key for each of its starts, and derives each lease's secret from it. Of the
claims on a shared lease (:mod:`kvferry.control.leases`) who was given the lease's ticket may speak.

A ticket that travels over the control channel, as the answer to an ask, has its secret veiled: only
who has the transfer's secret, which the router sends to both engines, can read it.
"""

import hashlib
import hmac
import secrets

import msgspec

PROOF_BYTES = 16
"""Bytes of a secret, and of a proof."""

_encoder = msgspec.msgpack.Encoder()


class LeaseKey:
    """The key of one start of a source, from which the secrets of all its leases follow."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def secret(self, lease_id: str) -> bytes:
        """The secret that the ticket of a lease carries."""
        return _mac(self._key, lease_id.encode())

    def accepts(self, proof: bytes, action: str, lease_id: str, *said: object) -> bool:
        """Whether who made the proof knows the lease's secret, and said this."""
        expected = prove(self.secret(lease_of(lease_id)), action, lease_id, *said)
        return hmac.compare_digest(proof, expected)


def claim_on(lease_id: str) -> str:
    """The id of a new claim on a shared lease: random, so that no two requests have the same."""
    return f"{lease_id}/{secrets.token_hex(8)}"


def lease_of(lease_id: str) -> str:
    """The lease that a claim is on; of the id of a lease, the lease itself.

    >>> lease_of("5f/a1") == lease_of("5f") == "5f"
    True
    """
    return lease_id.partition("/")[0]


def prove(secret: bytes, action: str, lease_id: str, *said: object) -> bytes:
    """The proof for one lease in one message.

    Args:
        secret: the lease's.
        action: the kind of message.
        lease_id: the lease.
        said: all else that the message says of the lease, and the names of who speaks to whom.
    """
    return _mac(secret, _encoder.encode((action, lease_id, *said)))


def veil(secret: bytes, key: bytes, lease_id: str) -> bytes:
    """The secret of a lease as only who has ``key`` can read it; veiled again, it is as it was.

    >>> veil(veil(b"s" * 16, b"key", "5f"), b"key", "5f")
    b'ssssssssssssssss'
    """
    pad = prove(key, "veil", lease_id)  # no two leases have one id, so none is used twice
    return bytes(one ^ other for one, other in zip(secret, pad, strict=True))


def _mac(key: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=key, digest_size=PROOF_BYTES).digest()
