"""The wire schema of the control channel: tagged structs, MessagePack, one frame per message.

A request carries an ``id``, and the reply repeats this id. Structs are frozen. They evolve by
optional fields at the end, so that releases of one protocol range understand each other; a decoder
ignores unknown fields. Requests:

==================  ==================================  ===================================
request             sender                              answer
==================  ==================================  ===================================
:class:`Handshake`  scheduler half, once per pair       :class:`HandshakeReply`, :class:`Refused`
:class:`Renew`      target's scheduler half             :class:`Renewed`
:class:`Finishes`   target's ranks                      :class:`FinishReply`
:class:`Release`    target's scheduler half             :class:`Released`
:class:`Ask`        target's scheduler half             :class:`Asked`
:class:`TakeBack`   router                              :class:`Released`
:class:`StatusRequest`  any client                      :class:`StatusReply`
:class:`TraceRequest`  any client                       :class:`TraceReply`
:class:`DescriptionRequest`  any client                 :class:`DescriptionReply`
==================  ==================================  ===================================

A source tells the holder of a lease at once if the lease grows or is revoked. The source sends a
:class:`Renewed` with id 0, which answers no request. In the same way, the source sends an
:class:`Asked` with id 0 to every target that has asked for a transfer. A request about leases
contains, for each lease, a proof that the sender was given the ticket; an :class:`Ask` contains a
proof that the sender was given the transfer (see :mod:`kvferry.control.proofs`). Any request may be
answered by :class:`ErrorReply`, whose ``name`` is a class of :mod:`kvferry.errors`. ``engine_id``
and ``incarnation`` always mean the target (the engine whose blocks are filled);
``source_incarnation`` means the engine whose blocks are read.
"""

import enum
from typing import Annotated, Any, TypeAlias

import msgspec

from kvferry.decoding import decode
from kvferry.topology.description import EngineDescription

MAX_ITEMS = 1024
"""Largest number of leases or finishes in one message."""
MAX_ID_CHARS = 256
"""Largest number of characters of an id in a message."""
MAX_NOTE_BYTES = 1 << 18
"""Largest number of bytes of a note."""
MAX_TRACES = 16
"""Largest number of requests in one :class:`TraceReply`; the newest requests are reported."""

Id: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)]
Proof: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]
Proofs: TypeAlias = Annotated[dict[Id, Proof], msgspec.Meta(max_length=MAX_ITEMS)]
"""Lease id → proof that the sender may speak of this lease."""
Note: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)]
"""Bytes that the engine of the source wrote for the engine of the target, beside a whole prompt."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]
"""A duration, neither infinite nor NaN."""
Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Unix seconds of a wall clock, within the years that a calendar has."""
BlockId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
BlockTables: TypeAlias = tuple[tuple[BlockId, ...], ...]
"""Whole block tables of a request, one table per KV cache group."""


class LeaseAnswer(enum.StrEnum):
    """Answer of the source when the target renews a lease."""

    HELD = "held"
    """The blocks are kept for this target for one more lease duration."""
    PENDING = "pending"
    """The blocks are kept, but cannot be read yet; the target must ask again in a moment. Only a
    target that does not know growing leases gets this answer."""
    TAKEN = "taken"
    """Another target engine holds the lease now."""
    DONE = "done"
    """Every rank of this target has reported; there is nothing left to renew."""
    REVOKED = "revoked"
    """This target will never hold the lease again and must not use the data that it reads."""


class AskState(enum.StrEnum):
    """Answer of the source when the target asks for a transfer."""

    UNKNOWN = "unknown"
    """No request of the source has this transfer, or no request has it yet; ask again."""
    COMING = "coming"
    """The source has the request of the transfer, and tells the target when there is news."""
    LENT = "lent"
    """The answer contains the ticket."""
    NEVER = "never"
    """The source lends nothing for this transfer, and never will."""


class FinishAnswer(enum.StrEnum):
    """The confirm: whether the rank may use the data that it has read."""

    HELD = "held"
    """The blocks were kept until the rank had finished; the data is good."""
    REVOKED = "revoked"
    """The blocks may have been reused while the rank was reading; drop the data."""


class Handshake(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Describes the sender and asks for the receiver's description."""

    id: int
    description: EngineDescription


class ToSource(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every message from a target: the target, and the source that the target knows."""

    id: int
    engine_id: Id
    """Engine id of the target."""
    incarnation: Id
    """Incarnation of the sending target."""
    source_incarnation: Id
    """Incarnation of the source to which the message is addressed."""


class Renew(ToSource, frozen=True, kw_only=True, tag=True):
    """Takes leases (the first time) or extends them; all leases of one target at one source."""

    leases: Proofs
    grows: bool = False
    """Whether the sender knows growing leases."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Says that all reads of one rank for one lease are complete."""

    lease_id: Id
    rank: int
    ok: bool
    """Whether all reads succeeded; a rank that had nothing to read says true."""
    nonce: Proof
    """Random bytes of this report and its repetitions; they tell it from every other report."""
    proof: Proof


class Finishes(ToSource, frozen=True, kw_only=True, tag=True):
    """Several finishes of ranks of one target."""

    items: Annotated[tuple[Finish, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Release(ToSource, frozen=True, kw_only=True, tag=True):
    """Gives leases up: the target needs nothing more of the leases and counts no read."""

    leases: Proofs
    keep: bool = False
    """Whether another target engine may take the leases; otherwise their blocks are freed."""


class Ask(ToSource, frozen=True, kw_only=True, tag=True):
    """Asks for the ticket of a transfer that a router has given to both engines at once."""

    transfer_id: Id
    proof: Proof


class TakeBack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gives back what a request lends, because no engine will fetch it; see
    :mod:`kvferry.control.give_backs`.
    """

    id: int
    word: Proof
    """The word that the router gave to the source with the request."""


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the engine's :class:`StatusReport`."""

    id: int


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the engine's record of a request."""

    id: int
    request_id: Id
    """Request id at this engine, or at the source of the load. A part of the id between two hyphens
    is enough."""


class DescriptionRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the description that the engine would send in a handshake; changes nothing."""

    id: int


class HandshakeReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The two engines fit together. Contains the description of the answering engine."""

    id: int
    description: EngineDescription


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The two engines can never exchange KV."""

    id: int
    engine_id: str
    """Engine id of the answering engine."""
    mismatches: tuple[str, ...]
    """One sentence per difference, each with both values and the remedy."""


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a :class:`Renew`, lease by lease. A source sends it unasked with id 0."""

    id: int
    states: dict[str, LeaseAnswer]
    written: dict[str, int] = {}
    """Lease id → number of readable tokens so far, from token 0, for each lease that grows. All
    other leases are whole."""
    tables: dict[str, BlockTables] = {}
    """Lease id → block tables of the source so far, for each lease that was granted before the
    blocks were allocated. They replace the block tables of the ticket."""
    notes: dict[str, Note] = {}
    """Lease id → note of the source, for each whole lease that grew and has a note."""


class FinishReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers :class:`Finishes`, in the order of the items."""

    id: int
    answers: tuple[FinishAnswer, ...]


class Released(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The source has recorded the release, or what it takes back."""

    id: int
    is_known: bool = True
    """Whether the source knows a lease with the word of a :class:`TakeBack`. Without such a lease,
    the loan may be of another engine of the same server."""


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers an :class:`Ask`. With id 0, the source sends it to the asking target unasked."""

    id: int
    transfer_id: str
    state: AskState
    ticket: str = ""
    """The signed ticket; empty unless the state is ``LENT``. The secret in the ticket is veiled:
    only an engine with the secret of the transfer can read it
    (:func:`kvferry.control.proofs.veil`)."""
    reason: str = ""
    """Reason, for people, why nothing is lent; empty in every other state."""


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine refused the request; nothing changed."""

    id: int
    """Id of the request; 0 if the request could not be decoded."""
    name: str
    """Name of a class of :mod:`kvferry.errors`."""
    message: str


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of another engine, as seen by this engine."""

    engine_id: str
    incarnation: str
    state: str
    """``"ready"`` or ``"refused"``."""
    age_s: Seconds
    """Seconds since this incarnation of the peer was first seen."""
    last_seen_s: Seconds
    """Seconds since the peer's last message."""
    ranks: int
    last_error: str = ""
    loaded_bytes: int = 0
    """Number of KV bytes loaded from the peer by ranks of this engine."""
    transport: str = ""
    """Name of the transport that moved the last of these bytes; empty if none were moved."""


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An open lease on blocks of this engine."""

    lease_id: str
    request_id: str
    num_blocks: int
    age_s: Seconds
    remaining_s: Seconds
    """Seconds until the lease expires if it is not renewed."""
    target: str
    """Engine id of the holder; empty until a target takes the lease."""
    ranks_done: tuple[int, ...]
    """Ranks of the target that have reported."""
    held_s: Seconds = 0.0
    """Seconds since the target took the lease; 0 until then."""


class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A current load into this engine."""

    request_id: str
    lease_id: str
    peer: str
    """Engine id of the source."""
    bytes_done: int
    bytes_total: int
    age_s: Seconds
    progress_s: Seconds
    """Seconds since the last progress."""


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An error recorded by this engine."""

    time: Moment
    """Unix seconds of this machine's wall clock."""
    message: str


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``kvferry status``."""

    engine_id: str
    incarnation: str
    role: str
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    ready: bool
    """Whether the engine answers handshakes."""
    uptime_s: Seconds
    peers: tuple[PeerStatus, ...]
    leases: tuple[LeaseStatus, ...]
    transfers: tuple[TransferStatus, ...]
    counters: dict[str, int]
    """Number of messages, errors and lease outcomes since the start, by name."""
    errors: tuple[ErrorEvent, ...]
    """The last errors, oldest first."""
    release: str = ""
    """The engine's release of kvferry; empty if the engine does not say."""
    serving_engine: str = ""
    """The serving engine and its release; empty while the engine starts, and if the engine does not
    tell."""
    open_requests: int | None = None
    """Number of requests that load or lend KV, from their arrival to their end; ``None`` if the
    engine does not tell."""


class StatusReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a :class:`StatusRequest`."""

    id: int
    report: StatusReport


class TracePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a request's life on one engine, between two times."""

    name: str
    """Name of the work or the wait: ``handshake``, ``read`` and others."""
    started: Moment
    """Unix seconds of this engine's wall clock."""
    seconds: Seconds
    is_open: bool = False
    """Whether the part has not ended yet."""
    rank: int | None = None
    """The rank that did the work; ``None`` for the scheduler half."""
    source_ranks: tuple[int, ...] = ()
    """Ranks of the source from which the rank read."""
    transport: str = ""
    nbytes: int = 0
    note: str = ""
    """Further remarks, for people."""
    error: str = ""
    """Reason of the failure; empty if the part did not fail."""
    moving: Seconds = 0.0
    """Number of the part's seconds during which bytes moved; 0 if this was not measured."""


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one engine for one request, without data that only a peer may know."""

    request_id: str
    peer: str = ""
    """Engine id of the other side; empty until it is known."""
    peer_request_id: str = ""
    """The request's id at the source of the load; empty if nothing was to be loaded."""
    traceparent: str = ""
    """W3C trace context of the request."""
    started: Moment
    """Unix seconds of this engine's wall clock at which the request arrived."""
    seconds: Seconds
    """Seconds from the arrival to the end of the request at this engine, or to now."""
    outcome: str
    """State or outcome of the request at this engine, in a few words."""
    error: str = ""
    """The first error of the request, even if the request went on."""
    parts: tuple[TracePart, ...]
    """Parts of the request's life, in the order in which they began."""


class TraceReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a :class:`TraceRequest`."""

    id: int
    engine_id: str
    now: Moment
    """Unix seconds of this engine's wall clock, so that clocks can be compared."""
    remembered: int
    """Number of remembered requests."""
    requests: tuple[RequestTrace, ...]
    """The requests with the given id, oldest first; empty if this engine knows no such request."""


class DescriptionReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a :class:`DescriptionRequest`."""

    id: int
    role: str
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    description: EngineDescription
    """The description without its endpoints: endpoints contain data that only a peer may know."""


Request: TypeAlias = (
    Handshake
    | Renew
    | Finishes
    | Release
    | Ask
    | TakeBack
    | StatusRequest
    | TraceRequest
    | DescriptionRequest
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
    """Encodes a struct of this module as MessagePack."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """Decodes a message of a client.

    Raises:
        DecodeError: the bytes are not a request of this schema; the message gives the reason.
    """
    return decode(_requests, payload, "request")


def decode_reply(payload: bytes) -> Reply:
    """Decodes a message of a server.

    Raises:
        DecodeError: the bytes are not a reply of this schema.
    """
    return decode(_replies, payload, "reply")
