"""Tickets: what the source tells the target through the router, in one string.

A ticket is MessagePack of named fields in base64url, a dot, and an HMAC-SHA256 of these bytes under
the cluster's key; without a key there is no dot. The router and the client carry it, so the target
trusts nothing else of what they send: host, port and block ids come from the verified ticket. This
protects against clients, not against a hostile engine, which knows the key. Whoever sees a ticket
can speak of its lease, and of no other.

A router that sends a request to both engines at once has no ticket yet. It gives both a
:class:`Transfer`, for which the target asks the source (:mod:`kvferry.control.asks`).

A ticket carries durations, never times, because two machines' clocks need not agree: whether a
lease has expired is the source's to say.
"""

import base64
import hashlib
import hmac
import re
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
from msgspec.structs import replace

from kvferry.config import shown
from kvferry.control.messages import MAX_ID_CHARS, BlockTables
from kvferry.control.proofs import PROOF_BYTES, claim_on
from kvferry.decoding import decode
from kvferry.errors import DecodeError, TicketError, TicketExpiredError, TicketForgedError
from kvferry.zeromq import join_address, split_address

TICKET_VERSION = 3
"""The version that this release writes and reads."""
MAX_TICKET_CHARS = 1 << 20
"""Characters of the longest ticket that is looked at."""
MIN_KEY_BYTES = 16
"""Bytes of the shortest key."""

_DOMAIN = b"kvferry ticket\n"  # so that a MAC made for something else under the key is no ticket
_TRANSFER_DOMAIN = b"kvferry transfer\n"
_TRANSFER = re.compile(rf"([0-9a-f]{{32}}@(.+))\.([0-9a-f]{{{2 * PROOF_BYTES}}})")

MAX_ADDRESS_CHARS = MAX_ID_CHARS - 35
"""Of a source's control channel: with 32 hexadecimal digits, an ``@`` and brackets it is an id."""

MAX_CONTENT_PARTS = 16
"""Parts that a ticket's ``content`` has at most."""

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the target needs to load the KV of a prompt."""

    version: int = TICKET_VERSION
    lease_id: Name
    engine_id: Name
    """The source engine."""
    incarnation: Name
    """The start of the source engine that granted the lease."""
    secret: Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
    """Proves to the source that the target was given this ticket."""
    host: Name
    """Address of the source's control channel."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """TCP port of the source's control channel."""
    request_id: Name
    """The request's id at the source; for people and logs, never a key."""
    num_tokens: Count
    """Tokens whose KV lies in ``block_ids``, from token 0."""
    block_ids: BlockTables
    """The source's whole block tables, one per KV cache group; of a lease that grows, those so far.
    """
    lease_duration_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    """Seconds that the lease lives without being renewed."""
    prompt_digest: str = ""
    """:func:`prompt_digest` of the tokens whose KV this is, so that a router that mixes two
    tickets up is found out; empty where the source does not say."""
    tp: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Tensor-parallel ranks of the source; for information."""
    pp: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Pipeline stages of the source; for information."""
    first_tokens: tuple[Count, ...] = ()
    """For each KV cache group, a token before which its blocks hold nothing, though the one in
    which it lies is not null: so after a load of a window. Empty if there is none."""
    content: Annotated[dict[Name, Name], msgspec.Meta(max_length=MAX_CONTENT_PARTS)] = {}
    """What else than its tokens decides this KV: part (``lora``, ``multimodal``, ...) → a text
    that tells it from others of its kind. Empty where the tokens alone do."""
    shared: bool = False
    """Whether the lease is shared: each request that loads under it does so by a claim of its own,
    see :meth:`claimed`."""
    whole: bool = False
    """Whether all of it was written when the ticket was, so that the target may read before it
    knows that the lease is its own: the confirm decides."""

    @property
    def address(self) -> str:
        """``host:port`` of the source's control channel, an IPv6 address in brackets."""
        return join_address(self.host, self.port)

    def claimed(self) -> "Ticket":
        """The ticket as one more request uses it: of a shared lease it names a new claim in place
        of the lease, of another one it is the ticket itself.
        """
        return replace(self, lease_id=claim_on(self.lease_id)) if self.shared else self


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a router gives to the source and to the target of a load that both are sent at once."""

    transfer_id: str
    """Random, and the address of the source's control channel (``random@host:port``)."""
    secret: bytes = field(repr=False)
    """Proves that the router gave it; follows from the cluster's key, where there is one."""

    @classmethod
    def begin(cls, address: str, key: bytes | None) -> "Transfer":
        """A new one.

        Args:
            address: ``host:port`` of the source's control channel.
            key: the cluster's; without one anybody can make a transfer.

        Raises:
            ValueError: the address is none, or too long; the key is shorter than 16 bytes.
        """
        transfer_id = f"{secrets.token_hex(16)}@{channel_address(address)}"
        secret = transfer_secret(transfer_id, key) or secrets.token_bytes(PROOF_BYTES)
        return cls(transfer_id, secret)

    @property
    def address(self) -> str:
        """``host:port`` of the source's control channel, an IPv6 address in brackets."""
        return self.transfer_id.partition("@")[2]

    @property
    def text(self) -> str:
        """What both engines are sent."""
        return f"{self.transfer_id}.{self.secret.hex()}"


def channel_address(address: str) -> str:
    """The address of a source's control channel, ``host:port``, as transfers have it.

    Raises:
        ValueError: it is none, or too long.
    """
    if len(address) > MAX_ADDRESS_CHARS:
        raise ValueError(f"address: {shown(address)} is too long for a transfer")
    return join_address(*split_address(address))


def transfer_secret(transfer_id: str, key: bytes | None) -> bytes | None:
    """The secret of a transfer; ``None`` without a key, where the router has drawn it."""
    if key is None:
        return None
    return _mac(transfer_id.encode(), key, _TRANSFER_DOMAIN)[:PROOF_BYTES]


def read_transfer(text: object, key: bytes | None) -> Transfer:
    """What a router has sent.

    Raises:
        TicketForgedError: its signature is wrong.
        TicketError: it is no transfer.
        ValueError: the key is shorter than 16 bytes.
    """
    found = _TRANSFER.fullmatch(text) if isinstance(text, str) else None
    if found is None or len(found[1]) > MAX_ID_CHARS:
        raise TicketError("transfer: it is not what a router of kvferry sends")
    try:
        is_plain = join_address(*split_address(found[2])) == found[2]
    except ValueError as error:
        raise TicketError(f"transfer: its {error}") from error
    if not is_plain:
        raise TicketError(f"transfer: its address {found[2]!r} is not as we write it")
    transfer = Transfer(found[1], bytes.fromhex(found[3]))
    expected = transfer_secret(transfer.transfer_id, key)
    if expected is not None and not hmac.compare_digest(expected, transfer.secret):
        raise TicketForgedError(
            "transfer: its signature does not match this engine's cluster key; give the router and "
            "all engines of the cluster the same cluster_key_file"
        )
    return transfer


def prompt_digest(token_ids: Iterable[int]) -> str:
    """SHA-256 (hex) of a sequence of token ids.

    >>> prompt_digest([1, 2]) == prompt_digest((1, 2)) != prompt_digest([12])
    True
    """
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()


class _Header(msgspec.Struct):
    """Read first, so that a ticket of another version is called that."""

    version: int


_encoder = msgspec.msgpack.Encoder()
_header: msgspec.msgpack.Decoder[_Header] = msgspec.msgpack.Decoder(_Header)
_ticket: msgspec.msgpack.Decoder[Ticket] = msgspec.msgpack.Decoder(Ticket)


def sign(ticket: Ticket, key: bytes | None) -> str:
    """The ticket as one string of URL-safe characters; unsigned without a key.

    Raises:
        ValueError: the key is shorter than 16 bytes.
    """
    payload = _encoder.encode(ticket)
    if key is None:
        return _to_text(payload)
    return f"{_to_text(payload)}.{_to_text(_mac(payload, key))}"


def verify(text: object, key: bytes | None) -> Ticket:
    """Checks a ticket's signature, then its schema, and returns it.

    With a key an unsigned ticket is refused. Without one every ticket that decodes is accepted,
    signed ones too: nothing can be said about their signature.

    Raises:
        TicketForgedError: the signature is missing or wrong.
        TicketError: it is no ticket of this version: too long, cut off, random, a newer release's.
        ValueError: the key is shorter than 16 bytes.
    """
    if not isinstance(text, str):
        raise TicketError(f"ticket: expected a string, got {type(text).__name__}")
    if len(text) > MAX_TICKET_CHARS:
        raise TicketError(f"ticket: {len(text)} characters, at most {MAX_TICKET_CHARS} are read")
    body, dot, signature = text.partition(".")
    payload = _to_bytes(body)
    if key is not None:
        if not dot:
            raise TicketForgedError(
                "ticket: it is not signed, and this engine has a cluster key; give all engines of "
                "the cluster the same cluster_key_file"
            )
        if not hmac.compare_digest(_mac(payload, key), _to_bytes(signature)):
            raise TicketForgedError(
                "ticket: its signature does not match this engine's cluster key; give all engines "
                "of the cluster the same cluster_key_file, or find who changed it on its way"
            )
    return _decode(payload)


def check_incarnation(ticket: Ticket, incarnation: str) -> None:
    """Compares a ticket with the source's present incarnation, known from the handshake.

    Raises:
        TicketExpiredError: the source was restarted since, and its blocks are gone.
    """
    if ticket.incarnation != incarnation:
        raise TicketExpiredError(
            f"incarnation: the ticket is from start {ticket.incarnation} of engine "
            f"{ticket.engine_id!r}, which now runs as {incarnation}; compute the prompt again"
        )


class SeenTickets:
    """Lets each lease, or claim on one, serve one request only, in this incarnation of the target.
    Thread-safe.

    Leases of live requests are never forgotten; of the others the last ``limit`` are remembered.
    (A lease that is forgotten here has long ended at its source, which says so.)
    """

    def __init__(self, limit: int = 65536) -> None:
        """Args:
        limit: ended leases that are remembered.
        """
        if limit < 1:
            raise ValueError(f"limit: {limit} is less than 1")
        self._limit = limit
        self._lock = threading.Lock()
        self._live: dict[str, str] = {}  # lease id -> request id
        self._used: OrderedDict[str, None] = OrderedDict()

    def claim(self, lease_id: str, request_id: str) -> None:
        """Ties a lease to a live request; may be repeated for the same request.

        Raises:
            TicketExpiredError: the lease belongs, or belonged, to another request, or this
                request was ended already.
        """
        with self._lock:
            owner = self._live.get(lease_id)
            if lease_id in self._used or owner not in (None, request_id):
                used_by = "an earlier request" if owner is None else f"request {owner!r}"
                raise TicketExpiredError(
                    f"lease_id: {lease_id} was used by {used_by}, now request {request_id!r} "
                    f"brings it again; each ticket serves one request"
                )
            self._live[lease_id] = request_id

    def retire(self, lease_id: str) -> None:
        """The request is over; its lease can never be claimed again. Unknown ids are ignored."""
        with self._lock:
            if self._live.pop(lease_id, None) is None:
                return
            self._used[lease_id] = None
            while len(self._used) > self._limit:
                self._used.popitem(last=False)


def _mac(payload: bytes, key: bytes, domain: bytes = _DOMAIN) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(
            f"key: {len(key)} bytes, a ticket key has at least {MIN_KEY_BYTES}; take 32 random ones"
        )
    return hmac.new(key, domain + payload, hashlib.sha256).digest()


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _to_bytes(text: str) -> bytes:
    """Strict: exactly one text decodes to given bytes, so that a ticket has one spelling."""
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        data = base64.b64decode(padded, altchars=b"-_", validate=True)
    except ValueError as error:  # UnicodeEncodeError and binascii.Error are ValueErrors
        raise TicketError(f"ticket: {len(text)} characters that are not base64url") from error
    if _to_text(data) != text:
        raise TicketError(f"ticket: {len(text)} characters that are not base64url as we write it")
    return data


def _decode(payload: bytes) -> Ticket:
    try:
        version = decode(_header, payload, "ticket").version
        if version == TICKET_VERSION:
            return decode(_ticket, payload, "ticket")
    except DecodeError as error:
        raise TicketError(str(error)) from error
    raise TicketError(
        f"version: the ticket has {version}, this release reads {TICKET_VERSION}; run one release "
        "range on all engines"
    )
