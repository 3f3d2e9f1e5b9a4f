"""The wire schema of the control channel: tagged structs, MessagePack, one frame per message.

A request carries an ``id`` that its reply echoes. Structs are frozen and evolve by optional fields
at the end, so that releases of one protocol range understand each other; a field that is unknown
here is ignored. Requests:

==================  ==================================  ===================================
request             who sends it                        answer
==================  ==================================  ===================================
:class:`Handshake`  scheduler half, once per pair       :class:`HandshakeReply`, :class:`Refused`
:class:`Renew`      target's scheduler half             :class:`Renewed`
:class:`Finishes`   target's ranks                      :class:`FinishReply`
:class:`Release`    target's scheduler half             :class:`Released`
:class:`Ask`        target's scheduler half             :class:`Asked`
:class:`StatusRequest`  anyone                          :class:`StatusReply`
:class:`TraceRequest`  anyone                           :class:`TraceReply`
:class:`DescriptionRequest`  anyone                     :class:`DescriptionReply`
==================  ==================================  ===================================

A source whose lease grows, or is revoked, tells its holder at once, with a :class:`Renewed` that
answers nothing (its id is 0); likewise it tells who has asked for a transfer, with an
:class:`Asked`. A request about leases proves for each of them that its sender was given the
ticket, an :class:`Ask` that it was given the transfer, see :mod:`kvferry.control.proofs`. Any
request may be answered by :class:`ErrorReply`, whose ``name`` is a class of
:mod:`kvferry.errors`. ``engine_id`` and
``incarnation`` always speak of the target (the engine whose blocks are filled),
``source_incarnation`` of the engine whose blocks are read.
"""

import enum
from typing import Annotated, Any, TypeAlias

import msgspec

from kvferry.decoding import decode
from kvferry.topology.description import EngineDescription

MAX_ITEMS = 1024
"""Leases or finishes that one message names at most."""
MAX_ID_CHARS = 256
"""Characters of the longest id that a message names."""
MAX_TRACES = 16
"""Requests of which one :class:`TraceReply` tells, the newest ones."""

Id: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)]
Proof: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]
Proofs: TypeAlias = Annotated[dict[Id, Proof], msgspec.Meta(max_length=MAX_ITEMS)]
"""Lease id → the proof that the sender may speak of it."""
BlockId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
BlockTables: TypeAlias = tuple[tuple[BlockId, ...], ...]
"""Whole block tables of a request, one per KV cache group."""


class LeaseAnswer(enum.StrEnum):
    """What the source says of a lease when its target renews it."""

    HELD = "held"
    """The blocks are kept for this target for one more lease duration."""
    PENDING = "pending"
    """The blocks are kept, and cannot be read yet; ask again in a moment. For targets that do not
    know leases that grow."""
    TAKEN = "taken"
    """Another target engine holds the lease now."""
    DONE = "done"
    """Every rank of this target has reported; there is nothing left to renew."""
    REVOKED = "revoked"
    """The lease will never be held by this target again; what it reads must not be used."""


class AskState(enum.StrEnum):
    """What the source says of a transfer for which its target asks."""

    UNKNOWN = "unknown"
    """No request here has it, or has it yet; ask again."""
    COMING = "coming"
    """Its request is here; who asked is told as soon as there is more to say."""
    LENT = "lent"
    """Here is the ticket."""
    NEVER = "never"
    """Nothing is lent, and nothing will be."""


class FinishAnswer(enum.StrEnum):
    """The confirm: may the rank use what it has read?"""

    HELD = "held"
    """The blocks were kept until the rank had finished; the data is good."""
    REVOKED = "revoked"
    """They may have been reused while the rank was reading; drop the data."""


class Handshake(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Describes the sender and asks for the receiver's description."""

    id: int
    description: EngineDescription


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Takes leases (the first time) and extends them, all of one target at one source."""

    id: int
    engine_id: Id
    incarnation: Id
    source_incarnation: Id
    leases: Proofs
    grows: bool = False
    """Whether the sender knows leases that grow."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """All reads of one rank for one lease are terminal."""

    lease_id: Id
    rank: int
    ok: bool
    """Whether they all succeeded; a rank that needed nothing says true."""
    nonce: Proof
    """Random, of this report and its repetitions: nobody else's report is taken for one."""
    proof: Proof


class Finishes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Finishes of ranks of one target, together."""

    id: int
    engine_id: Id
    incarnation: Id
    source_incarnation: Id
    items: Annotated[tuple[Finish, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The target gives leases up: it needs nothing of them any more and counts no read."""

    id: int
    engine_id: Id
    incarnation: Id
    source_incarnation: Id
    leases: Proofs
    keep: bool = False
    """Whether another target engine may take the leases; otherwise their blocks are freed."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the ticket of a transfer, which a router has given to both engines at once."""

    id: int
    engine_id: Id
    incarnation: Id
    source_incarnation: Id
    transfer_id: Id
    proof: Proof


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the engine's :class:`StatusReport`."""

    id: int


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks what the engine did for a request."""

    id: int
    request_id: Id
    """Of the request here or at the source of its load; a part of it between hyphens will do."""


class DescriptionRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks what the engine would say of itself in a handshake; it changes nothing."""

    id: int


class HandshakeReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The pair fits; this is the answering engine."""

    id: int
    description: EngineDescription


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The pair can never exchange KV."""

    id: int
    engine_id: str
    """The answering engine."""
    mismatches: tuple[str, ...]
    """One sentence per difference, each with both values and the remedy."""


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a :class:`Renew`, lease by lease; with id 0, tells of leases without being asked."""

    id: int
    states: dict[str, LeaseAnswer]
    written: dict[str, int] = {}
    """For each lease that grows, the tokens that can be read so far, from token 0; the others are
    whole."""
    tables: dict[str, BlockTables] = {}
    """For each lease that was granted before its blocks were allocated, the source's block tables
    so far, in place of its ticket's."""


class FinishReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers :class:`Finishes`, in the order of its items."""

    id: int
    answers: tuple[FinishAnswer, ...]


class Released(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The release is noted."""

    id: int


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers an :class:`Ask`; with id 0, tells who has asked without being asked again."""

    id: int
    transfer_id: str
    state: AskState
    ticket: str = ""
    """The signed ticket, whose secret only those can read who have the transfer's
    (:func:`kvferry.control.proofs.veil`); empty unless it is lent."""
    reason: str = ""
    """Why nothing is lent, for people; empty unless that is so."""


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request was refused; nothing changed."""

    id: int
    """0 when the request could not be decoded."""
    name: str
    """Name of a class of :mod:`kvferry.errors`."""
    message: str


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One other engine, as this one sees it."""

    engine_id: str
    incarnation: str
    state: str
    """``"ready"`` or ``"refused"``."""
    age_s: float
    """Seconds since it was first seen in this incarnation."""
    last_seen_s: float
    """Seconds since its last message."""
    ranks: int
    last_error: str = ""
    loaded_bytes: int = 0
    """KV bytes that ranks of this engine have loaded from it."""
    transport: str = ""
    """What moved the last of them; empty if none were."""


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One open lease on blocks of this engine."""

    lease_id: str
    request_id: str
    num_blocks: int
    age_s: float
    remaining_s: float
    """Seconds until it expires unless it is renewed."""
    target: str
    """Engine id of its holder; empty until one takes it."""
    ranks_done: tuple[int, ...]
    """Ranks of the target that have reported."""


class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One load under way into this engine."""

    request_id: str
    lease_id: str
    peer: str
    """Engine id of the source."""
    bytes_done: int
    bytes_total: int
    age_s: float
    progress_s: float
    """Seconds since the last progress."""


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An error that this engine noted."""

    time: float
    """Unix seconds of this machine's wall clock."""
    message: str


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``kvferry status`` shows."""

    engine_id: str
    incarnation: str
    role: str
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    ready: bool
    """Whether it answers handshakes."""
    uptime_s: float
    peers: tuple[PeerStatus, ...]
    leases: tuple[LeaseStatus, ...]
    transfers: tuple[TransferStatus, ...]
    counters: dict[str, int]
    """Messages, errors and lease outcomes since the start, by name."""
    errors: tuple[ErrorEvent, ...]
    """The last ones, oldest first."""


class StatusReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a :class:`StatusRequest`."""

    id: int
    report: StatusReport


class TracePart(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of a request's life on one engine."""

    name: str
    """What was done or waited for: ``handshake``, ``read`` and others."""
    started: float
    """Unix seconds of this engine's wall clock."""
    seconds: float
    is_open: bool = False
    """Whether it goes on."""
    rank: int | None = None
    """The rank that did it; ``None`` for the scheduler half."""
    source_ranks: tuple[int, ...] = ()
    """Ranks of the source that it read from."""
    transport: str = ""
    nbytes: int = 0
    note: str = ""
    """What else there is to say."""
    error: str = ""
    """Why it failed; empty if it did not."""
    moving: float = 0.0
    """Of its seconds those in which something moved, where that was measured."""


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine did for one request, without anything that only a peer may know."""

    request_id: str
    peer: str = ""
    """Engine id of the other side, once it is known."""
    peer_request_id: str = ""
    """The request's id at the source of its load; empty where nothing was to be loaded."""
    traceparent: str = ""
    """The W3C trace context that it came with."""
    started: float
    """Unix seconds of this engine's wall clock: when it arrived."""
    seconds: float
    """From then to its end here, or to now."""
    outcome: str
    """How it stands or ended here, in a few words."""
    error: str = ""
    """The first thing that went wrong, also where the request got on."""
    parts: tuple[TracePart, ...]
    """In the order in which they began."""


class TraceReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a :class:`TraceRequest`."""

    id: int
    engine_id: str
    now: float
    """Unix seconds of this engine's wall clock, so that clocks can be compared."""
    remembered: int
    """Requests that this engine can tell of."""
    requests: tuple[RequestTrace, ...]
    """Those that were asked for, oldest first; none where it knows no such request."""


class DescriptionReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a :class:`DescriptionRequest`."""

    id: int
    role: str
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    description: EngineDescription
    """Its endpoints are empty: they hold what only a peer may know."""


Request: TypeAlias = (
    Handshake | Renew | Finishes | Release | Ask | StatusRequest | TraceRequest | DescriptionRequest
)
Reply: TypeAlias = (
    HandshakeReply
    | Refused
    | Renewed
    | FinishReply
    | Released
    | Asked
    | StatusReply
    | TraceReply
    | DescriptionReply
    | ErrorReply
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Any) -> bytes:
    """The MessagePack of a struct of this module."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """Decodes what a client sent.

    Raises:
        DecodeError: the bytes are not a request of this schema; the message says what is wrong.
    """
    return decode(_requests, payload, "request")


def decode_reply(payload: bytes) -> Reply:
    """Decodes what a server sent.

    Raises:
        DecodeError: the bytes are not a reply of this schema.
    """
    return decode(_replies, payload, "reply")
