"""Tickets: one string in which the source describes a lease to the target, by way of the router.

A ticket consists of named fields in MessagePack and base64url, a dot, and an HMAC-SHA256 of these
bytes under the key of the cluster; without a key there is no dot. The router and the client carry
the ticket. Therefore the target trusts only the verified ticket: host, port and block ids come from
it. The signature protects against clients, but not against a hostile engine, which knows the key. A
program that sees a ticket can speak of the lease of this ticket, and of no other lease.

A router that sends a request to both engines at once has no ticket yet. Instead, the router gives
both engines a :class:`TransferId`, and the target asks the source for the ticket of this transfer
(:mod:`kvferry.control.asks`).

A ticket carries durations, never times, because the clocks of two machines may differ. Only the
source decides whether a lease has expired.
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
from kvferry.control.messages import MAX_ID_CHARS, BlockTables, Note
from kvferry.control.proofs import PROOF_BYTES, claim_on
from kvferry.decoding import decode
from kvferry.errors import DecodeError, TicketError, TicketExpiredError, TicketForgedError
from kvferry.zeromq import join_address, split_address

TICKET_VERSION = 3
"""Version of tickets in this release."""
MAX_TICKET_BLOCKS = 1 << 21
"""Largest number of block ids in a ticket, over all KV cache groups. The source lends no prompt
with more blocks, because no target would read the ticket."""
MAX_TICKET_CHARS = 16 << 20
"""Largest number of characters of a ticket; longer tickets are refused unread. A ticket with
:data:`MAX_TICKET_BLOCKS` block ids and the longest other fields is shorter. By default, the ticket
also fits into a message of the control channel (``max_message_bytes``)."""
CHANNEL_SCHEME = "kvferry://"
"""Beginning of a room's ``bootstrap_host`` that is the host of a control channel, as the source has
no bootstrap server."""
NOTE_PARAMETER = "note_first_token"
"""Name of the transfer parameter with which a router asks the source to put the first token of the
answer into the note of its lease."""
MIN_KEY_BYTES = 16
"""Smallest number of bytes of a key."""

_DOMAIN = b"kvferry ticket\n"  # a MAC made for another purpose under the same key is no ticket
_TRANSFER_DOMAIN = b"kvferry transfer\n"
_TRANSFER = re.compile(rf"([0-9a-f]{{32}}@(.+))\.([0-9a-f]{{{2 * PROOF_BYTES}}})")

MAX_ADDRESS_CHARS = MAX_ID_CHARS - 35
"""Largest number of characters of the address of a source's control channel. With 32 hexadecimal
digits, an ``@`` and brackets the address is still a valid id."""

MAX_CONTENT_PARTS = 16
"""Largest number of parts in the ``content`` of a ticket."""

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the target needs to load the KV of a prompt."""

    version: int = TICKET_VERSION
    lease_id: Name
    engine_id: Name
    """Engine id of the source."""
    incarnation: Name
    """Incarnation of the source engine at the grant of the lease."""
    secret: Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
    """Secret of the lease, which proves to the source that the target was given this ticket."""
    host: Name
    """Address of the source's control channel."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """TCP port of the source's control channel."""
    request_id: Name
    """Id of the request at the source, for people and logs; never used as a key."""
    num_tokens: Count
    """Number of tokens whose KV lies in ``block_ids``, from token 0."""
    block_ids: BlockTables
    """Whole block tables of the source, one per KV cache group; the tables so far if the lease
    grows."""
    lease_duration_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    """Seconds that the lease lives without a renewal."""
    prompt_digest: str = ""
    """:func:`prompt_digest` of the tokens of this KV, which reveals a router that confuses two
    tickets; empty if the source does not give a digest."""
    tp: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Number of tensor-parallel ranks of the source; for information."""
    pp: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Number of pipeline stages of the source; for information."""
    first_tokens: tuple[Count, ...] = ()
    """A token for each KV cache group: the group's blocks hold nothing before this token, although
    the block that contains the token is not null. This happens after a load of a window. Empty if
    there is no such token."""
    content: Annotated[dict[Name, Name], msgspec.Meta(max_length=MAX_CONTENT_PARTS)] = {}
    """Further content that decides this KV, besides the tokens: part (``lora``, ``multimodal``,
    ...) → text that identifies this content. Empty if the tokens alone decide the KV."""
    shared: bool = False
    """Whether the lease is shared: each request that loads under a shared lease has its own claim,
    see :meth:`claimed`."""
    whole: bool = False
    """Whether all KV was written when the ticket was made. If so, the target may read before it
    knows that it holds the lease: the confirm decides."""
    note: Note = b""
    """What the engine of the source wrote for the engine of the target when the prompt was whole,
    for example the first token of the answer; kvferry never reads a note. For a lease that grew,
    the note comes with the answer to a renewal."""

    @property
    def address(self) -> str:
        """``host:port`` of the source's control channel, an IPv6 address in brackets."""
        return join_address(self.host, self.port)

    def claimed(self) -> "Ticket":
        """The ticket for one more request. The ticket of a shared lease gets the id of a new claim
        in place of the lease id; any other ticket stays unchanged.
        """
        return replace(self, lease_id=claim_on(self.lease_id)) if self.shared else self


@dataclass(frozen=True, slots=True)
class TransferId:
    """The name and secret of a load that a router gives to the source and to the target at once."""

    transfer_id: str
    """Random name and address of the source's control channel (``random@host:port``)."""
    secret: bytes = field(repr=False)
    """Proof that the router gave the transfer; derived from the key of the cluster if there is a
    key."""

    @classmethod
    def begin(cls, address: str, key: bytes | None) -> "TransferId":
        """Creates a new transfer.

        Args:
            address: ``host:port`` of the source's control channel.
            key: the key of the cluster; without a key, any program can make a transfer.

        Raises:
            ValueError: the address is invalid or too long, or the key is shorter than 16 bytes.
        """
        transfer_id = f"{secrets.token_hex(16)}@{channel_address(address)}"
        secret = transfer_secret(transfer_id, key) or secrets.token_bytes(PROOF_BYTES)
        return cls(transfer_id, secret)

    @classmethod
    def of_room(cls, address: str, room: int, key: bytes | None) -> "TransferId":
        """The transfer of a bootstrap room: a number that a router gives to the source and to the
        target, and from which each of the two makes the same transfer.

        A room is neither secret nor sure to be unique. With a cluster key, the secret of the
        transfer proves that a part of the cluster asks. The ticket names the digest of the prompt,
        so a request never loads the prompt of another request with the same room.

        >>> TransferId.of_room("127.0.0.1:1", 7, None) == TransferId.of_room("127.0.0.1:1", 7, None)
        True

        Args:
            address: ``host:port`` of the source's control channel.
            room: the number of the room.
            key: the key of the cluster; ``None`` without a key.

        Raises:
            ValueError: see :meth:`begin`.
        """
        name = hashlib.sha256(f"room {room}".encode()).digest()
        transfer_id = f"{name[:16].hex()}@{channel_address(address)}"
        secret = transfer_secret(transfer_id, key) or name[16 : 16 + PROOF_BYTES]
        return cls(transfer_id, secret)

    @property
    def address(self) -> str:
        """``host:port`` of the source's control channel, an IPv6 address in brackets."""
        return self.transfer_id.partition("@")[2]

    @property
    def text(self) -> str:
        """The string for both engines."""
        return f"{self.transfer_id}.{self.secret.hex()}"


def channel_address(address: str) -> str:
    """The address of a source's control channel, ``host:port``, in the spelling that transfers use.

    Raises:
        ValueError: the address is invalid or too long.
    """
    if len(address) > MAX_ADDRESS_CHARS:
        raise ValueError(f"address: {shown(address)} is too long for a transfer")
    return join_address(*split_address(address))


def transfer_secret(transfer_id: str, key: bytes | None) -> bytes | None:
    """The secret of a transfer; ``None`` without a key, because the router then drew the secret."""
    if key is None:
        return None
    return mac(transfer_id.encode(), key, _TRANSFER_DOMAIN)[:PROOF_BYTES]


def read_transfer(text: object, key: bytes | None) -> TransferId:
    """Reads a transfer from a router.

    Raises:
        TicketForgedError: the signature of the transfer is wrong.
        TicketError: the text is no transfer.
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
    transfer = TransferId(found[1], bytes.fromhex(found[3]))
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
    """The first field of a ticket, read alone so that another version gives a clear error."""

    version: int


_encoder = msgspec.msgpack.Encoder()
_header: msgspec.msgpack.Decoder[_Header] = msgspec.msgpack.Decoder(_Header)
_ticket: msgspec.msgpack.Decoder[Ticket] = msgspec.msgpack.Decoder(Ticket)


def sign(ticket: Ticket, key: bytes | None) -> str:
    """Encodes the ticket as one string of URL-safe characters; unsigned without a key.

    Raises:
        ValueError: the key is shorter than 16 bytes.
    """
    payload = _encoder.encode(ticket)
    if key is None:
        return to_text(payload)
    return f"{to_text(payload)}.{to_text(mac(payload, key))}"


def verify(text: object, key: bytes | None) -> Ticket:
    """Checks the signature and then the schema of a ticket, and returns the ticket.

    With a key, an unsigned ticket is refused. Without a key, every ticket that decodes is accepted,
    even a signed ticket, because its signature cannot be checked.

    Raises:
        TicketForgedError: the signature is missing or wrong.
        TicketError: the text is no ticket of this version: it is too long, cut off, random or
            written by a newer release.
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
        if not hmac.compare_digest(mac(payload, key), _to_bytes(signature)):
            raise TicketForgedError(
                "ticket: its signature does not match this engine's cluster key; give all engines "
                "of the cluster the same cluster_key_file, or find who changed it on its way"
            )
    return _decode(payload)


def check_incarnation(ticket: Ticket, incarnation: str) -> None:
    """Compares a ticket with the source's present incarnation, known from the handshake.

    Raises:
        TicketExpiredError: the source was restarted since the ticket was made; its blocks are gone.
    """
    if ticket.incarnation != incarnation:
        raise TicketExpiredError(
            f"incarnation: the ticket is from start {ticket.incarnation} of engine "
            f"{ticket.engine_id!r}, which now runs as {incarnation}; compute the prompt again"
        )


class SeenTickets:
    """Ensures that each lease or claim serves only one request in this incarnation of the target.
    Thread-safe.

    Leases of live requests are never forgotten. Of all other leases, the last ``limit`` leases are
    remembered. (A lease that is forgotten here has long ended at the source, and the source refuses
    it.)
    """

    def __init__(self, limit: int = 65536) -> None:
        """Args:
        limit: number of ended leases to remember.
        """
        if limit < 1:
            raise ValueError(f"limit: {limit} is less than 1")
        self.limit = limit
        self._lock = threading.Lock()
        self._live: dict[str, str] = {}  # lease id -> request id
        self._used: OrderedDict[str, None] = OrderedDict()

    def claim(self, lease_id: str, request_id: str) -> None:
        """Assigns a lease to a live request; may be repeated for the same request.

        Raises:
            TicketExpiredError: the lease belongs or belonged to another request, or this request
                has already ended.
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
        """Ends the request of a lease; the lease can never be claimed again. Ignores other ids."""
        with self._lock:
            if self._live.pop(lease_id, None) is None:
                return
            self._used[lease_id] = None
            while len(self._used) > self.limit:
                self._used.popitem(last=False)


def mac(payload: bytes, key: bytes, domain: bytes = _DOMAIN) -> bytes:
    """The code by which engines with the same key recognise a payload.

    Raises:
        ValueError: the key is too short.
    """
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(
            f"key: {len(key)} bytes, a ticket key has at least {MIN_KEY_BYTES}; take 32 random ones"
        )
    return hmac.new(key, domain + payload, hashlib.sha256).digest()


def to_text(data: bytes) -> str:
    """Bytes as base64 for URLs, without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _to_bytes(text: str) -> bytes:
    """Strict base64url: each byte string has exactly one spelling, so that a ticket has one too."""
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        data = base64.b64decode(padded, altchars=b"-_", validate=True)
    except ValueError as error:  # UnicodeEncodeError and binascii.Error are ValueErrors
        raise TicketError(f"ticket: {len(text)} characters that are not base64url") from error
    if to_text(data) != text:
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
