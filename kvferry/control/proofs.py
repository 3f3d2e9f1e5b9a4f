"""Proofs: only an engine that was given the ticket of a lease may speak of this lease.

A ticket carries the secret of its lease. A message about the lease does not carry the secret, but a
proof: a BLAKE2b hash (RFC 7693) over the content and the sender of the message, keyed with the
secret. A listener on the network can therefore only repeat a message, under the name and for the
incarnation of the original sender. An engine that knows only a lease id, for example from a status
report, can do nothing to this lease.

The source has one key per incarnation and derives the secret of each lease from this key. An engine
that was given the ticket of a shared lease may speak of every claim on this lease
(:mod:`kvferry.control.leases`).

A ticket that travels over the control channel, as the answer to an ask, has a veiled secret. Only
an engine with the secret of the transfer can read it. The router sends the secret of the transfer
to both engines.
"""

import hashlib
import hmac
import secrets

import msgspec

PROOF_BYTES = 16
"""Number of bytes of a secret and of a proof."""

_encoder = msgspec.msgpack.Encoder()


class LeaseKey:
    """The key of one incarnation of a source; the secrets of all leases derive from this key."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def secret(self, lease_id: str) -> bytes:
        """The secret in the ticket of a lease."""
        return _mac(self._key, lease_id.encode())

    def accepts(self, proof: bytes, action: str, lease_id: str, *said: object) -> bool:
        """Whether the sender of the proof knows the secret of the lease and said exactly this."""
        expected = prove(self.secret(lease_of(lease_id)), action, lease_id, *said)
        return hmac.compare_digest(proof, expected)


def claim_on(lease_id: str) -> str:
    """The id of a new claim on a shared lease; random, so that two requests never share a claim."""
    return f"{lease_id}/{secrets.token_hex(8)}"


def lease_of(lease_id: str) -> str:
    """The id of the lease to which a claim belongs; for the id of a lease, the same id.

    >>> lease_of("5f/a1") == lease_of("5f") == "5f"
    True
    """
    return lease_id.partition("/")[0]


def prove(secret: bytes, action: str, lease_id: str, *said: object) -> bytes:
    """The proof for one lease in one message.

    Args:
        secret: the secret of the lease.
        action: the kind of message.
        lease_id: the lease.
        said: all other content of the message about the lease, and the names of sender and
            receiver.
    """
    return _mac(secret, _encoder.encode((action, lease_id, *said)))


def veil(secret: bytes, key: bytes, lease_id: str) -> bytes:
    """Veils the secret of a lease: only an engine with ``key`` can read it. Veiling twice restores
    the secret.

    >>> veil(veil(b"s" * 16, b"key", "5f"), b"key", "5f")
    b'ssssssssssssssss'
    """
    pad = prove(key, "veil", lease_id)  # every lease has its own id, so no pad is used twice
    return bytes(one ^ other for one, other in zip(secret, pad, strict=True))


def _mac(key: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=key, digest_size=PROOF_BYTES).digest()
