"""The messages between the two sides of the transports tcp and ucx.

Each message is a tagged msgspec struct. The reader speaks first::

    reader → server    Hello      once; the token proves that the reader knows the endpoint
    reader → server    Read       tiles, runs, and their cuts into chunks; steps of the runs
                                  if tokens are interleaved
    reader → server    Cancel     the rest of a read is not wanted
    server → reader    Refused    a read (or the connection) was refused, and why

Over tcp, a :data:`HEADER` stands before each message (transfer -1) and each chunk. The server sends
the chunks of a read without a request for each; TCP itself holds back bytes that the reader does
not take::

    server → reader    (bytes)    a chunk; the header names its transfer and its row

Over ucx, a message travels in a stream, after its length
(:class:`~kvferry.transports.ucx_link.Link`), and the reader requests each chunk separately. The
request gives the tag under which the reader waits for the chunk, in a bounce buffer of the reader::

    reader → server    Want …     one chunk, under a tag; only after Read has left
    server → reader    (buffer)   the chunk and its tag; only the tag if there is no such read

Every Want is answered, so a bounce buffer is free again once the server goes on. The reader sends
Cancel after each read, whether the read was done or not.

Fields are only ever added at the end, with defaults.
"""

import struct
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry import errors
from kvferry.decoding import decode
from kvferry.errors import DecodeError, KVFerryError, ProtocolError, TransferError
from kvferry.layouts.tiles import TILE_DTYPE, Runs, Tiles, blank_runs

VERSION_MIN = 3
"""Oldest protocol version. Since version 3, tcp uses sockets of its own, without windows."""
VERSION_MAX = 3

HEADER = struct.Struct("<qqq")
"""Header before each message and chunk over tcp: number of the transfer, row of the chunk, number
of bytes that follow; for a message -1, 0 and its length."""
MESSAGE = -1
"""Transfer number in the header of a message."""

MAX_TRANSFER = (1 << 63) - 1
"""Largest number of a transfer: the largest number that a header can hold."""
MAX_REQUEST_BYTES = 32 << 20
"""Largest number of bytes in a message to a server; a longer message ends the connection."""
MAX_REPLY_BYTES = 64 << 10
"""Largest number of bytes in a message to a reader over tcp."""
MAX_CHUNK_BYTES = 256 << 20
"""Largest number of bytes in a chunk that a reader may request."""
MAX_REGION_BYTES = 1 << 60
"""Largest number of bytes in a region of an endpoint; with this limit addresses fit 64 bits."""

#: The source half of :data:`~kvferry.layouts.tiles.TILE_DTYPE`, little-endian.
SOURCE_TILE_DTYPE = np.dtype(
    [
        (name, "<i8")
        for name in (
            "source_region",
            "source_offset",
            "source_block_stride",
            "source_token_stride",
            "source_head_stride",
            "source_element_stride",
            "heads",
            "elements",
            "itemsize",
        )
    ]
)
#: The source half of :data:`~kvferry.layouts.tiles.RUN_DTYPE` without the step, little-endian.
SOURCE_RUN_DTYPE = np.dtype([(name, "<i8") for name in ("source_block", "source_token", "tokens")])
#: One chunk: ``tiles`` tiles, beginning at ``first_tile``, times ``runs`` runs, beginning at
#: ``first_run``. All runs of a chunk have the same number of tokens. The bytes of a chunk lie as
#: :mod:`kvferry.layouts.staging` says.
CHUNK_DTYPE = np.dtype([(name, "<i8") for name in ("first_tile", "tiles", "first_run", "runs")])

MAX_READS = 64
"""Largest number of reads in progress per reader; a reader keeps back further reads."""
MAX_TABLE_BYTES = 64 << 20
"""Largest number of bytes in the tables of one reader's reads; a single read may have more. A
reader keeps back further reads."""
TAG_BYTES = 8
"""Number of bytes of the tag after each chunk over ucx; a message cut short lacks the tag."""

Table: TypeAlias = npt.NDArray[np.void]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address and regions of a serving rank. Travels in the engine's description."""

    transport: str = "tcp"
    version_min: int = VERSION_MIN
    version_max: int = VERSION_MAX
    host: str
    port: int
    token: bytes
    """Random bytes per start, which tell this server from another server on the same port."""
    regions: tuple[int, ...]
    """Number of bytes of each region; 0 for a region that is not served."""
    certificate: bytes = b""
    """Certificate of a tcp server that encrypts (DER); empty for a server that does not encrypt."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens the connection of a reader."""

    token: bytes
    version_min: int
    version_max: int


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Requests tiles × runs. The bytes are arrays of the dtypes above."""

    transfer: int
    """Number of the read, chosen by the reader, unique on the connection; 0 to
    :data:`MAX_TRANSFER`."""
    tiles: bytes
    runs: bytes
    chunks: bytes
    steps: bytes = b""
    """Little-endian int64, one ``source_step`` per run; empty if all steps are 1."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancels the rest of a read."""

    transfer: int


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Requests one chunk; the reader is ready to receive the chunk."""

    transfer: int
    chunk: int
    """Row in the read's chunk table."""
    tag: int
    """Random 64 bits: no other peer can send to this tag."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Says that the server refuses a request; other reads go on."""

    transfer: int | None
    """Number of the refused read; ``None`` if the connection is refused."""
    error: str
    """Name of the error in :mod:`kvferry.errors`. After ``NotReadyError`` the reader requests the
    read again later, because the server has no room only now. A reader of an older release fails
    the read."""
    reason: str


TcpRequest: TypeAlias = Hello | Read | Cancel
UcxRequest: TypeAlias = Hello | Read | Cancel | Want
Reply: TypeAlias = Refused

_encoder = msgspec.msgpack.Encoder()
TCP_REQUESTS: msgspec.msgpack.Decoder[TcpRequest] = msgspec.msgpack.Decoder(TcpRequest)
UCX_REQUESTS: msgspec.msgpack.Decoder[UcxRequest] = msgspec.msgpack.Decoder(UcxRequest)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
"""Decoders for :func:`~kvferry.decoding.decode`, by transport and direction."""
_endpoint = msgspec.msgpack.Decoder(Endpoint)


def encode(message: msgspec.Struct) -> bytes:
    """The message's bytes."""
    return _encoder.encode(message)


def decode_endpoint(data: bytes, transport: str = "tcp") -> Endpoint:
    """Decodes the endpoint of a serving rank.

    Raises:
        DecodeError: the data does not match the schema, belongs to another transport or protocol
            version, or names no possible address or region.
    """
    endpoint = decode(_endpoint, data, f"{transport} endpoint")
    if endpoint.transport != transport:
        raise DecodeError(
            f"endpoint: is one of transport {endpoint.transport!r}, not of {transport!r}"
        )
    if endpoint.version_min > VERSION_MAX or endpoint.version_max < VERSION_MIN:
        raise DecodeError(
            f"endpoint: the peer speaks versions {endpoint.version_min} to "
            f"{endpoint.version_max} of the {transport} protocol, we {VERSION_MIN} to "
            f"{VERSION_MAX}; upgrade the older side"
        )
    if not 0 < endpoint.port < 65536 or not endpoint.host or not endpoint.host.isprintable():
        raise DecodeError(f"endpoint: {endpoint.host[:80]!r}:{endpoint.port} is no address")
    if not all(0 <= size <= MAX_REGION_BYTES for size in endpoint.regions):
        raise DecodeError(
            f"endpoint: regions of {endpoint.regions[:20]} bytes, allowed are 0 to "
            f"{MAX_REGION_BYTES}"
        )
    return endpoint


def encode_table(table: Table, dtype: np.dtype[np.void]) -> bytes:
    """The columns of ``dtype`` of a structured array, by name, as bytes."""
    out = np.empty(table.shape, dtype)
    for name in dtype.names or ():
        out[name] = table[name]
    return out.tobytes()


def decode_table(data: bytes, dtype: np.dtype[np.void], what: str) -> Table:
    """A read-only structured array over ``data``.

    Raises:
        DecodeError: ``data`` is empty, or not a whole number of rows.
    """
    if not data or len(data) % dtype.itemsize:
        raise DecodeError(f"{what}: {len(data)} bytes are not rows of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype)


def decode_read(message: Read) -> tuple[Tiles, Runs, Table]:
    """The tables of a read: tiles, runs (both with blank target columns) and chunks, unchecked.

    Raises:
        DecodeError: see :func:`decode_table`.
    """
    source_tiles = decode_table(message.tiles, SOURCE_TILE_DTYPE, "tiles")
    source_runs = decode_table(message.runs, SOURCE_RUN_DTYPE, "runs")
    tiles = np.zeros(source_tiles.shape, TILE_DTYPE)
    for name in SOURCE_TILE_DTYPE.names or ():
        tiles[name] = source_tiles[name]
    runs = blank_runs(len(source_runs))
    for name in SOURCE_RUN_DTYPE.names or ():
        runs[name] = source_runs[name]
    if message.steps:
        if len(message.steps) != 8 * len(runs):
            raise DecodeError(f"steps: {len(message.steps)} bytes for {len(runs)} runs, 8 for each")
        runs["source_step"] = np.frombuffer(message.steps, "<i8")
    return tiles, runs, decode_table(message.chunks, CHUNK_DTYPE, "chunks")


def encode_steps(runs: Runs) -> bytes:
    """The ``steps`` of a :class:`Read`."""
    steps = runs["source_step"]
    return b"" if (steps == 1).all() else steps.astype("<i8").tobytes()


def refused_error(refused: Refused, address: str) -> KVFerryError:
    """The error that a server reported: a :class:`ProtocolError` or a :class:`TransferError`."""
    kind = getattr(errors, refused.error, None)
    fits = isinstance(kind, type) and issubclass(kind, ProtocolError | TransferError)
    text = f"refused by {address}: {refused.reason[:2000]}"
    return kind(text) if fits else TransferError(text)  # type: ignore[misc]
