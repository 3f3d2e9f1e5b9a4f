"""What the ucx transport's two sides say to each other: the tcp transport's messages, but pulled.

The reader asks for each chunk by itself and says under which tag it waits for it, in a bounce
buffer of its own::

    reader → server    Hello      once; the token proves that it knows the endpoint
    reader → server    Read       tiles, runs, and how they are cut into chunks
    reader → server    Want …     one chunk, under a tag; only after Read has left
    server → reader    (buffer)   the chunk and its tag; only the tag if there is no such read
    reader → server    Cancel     the read is over, whether it was done or not
    server → reader    Refused    a read (or the connection) was refused, and why

Every Want is answered, so a bounce buffer is free again once the server goes on. All but the chunks
goes through a stream, each message behind its length (:class:`~kvferry.transports.ucx_link.Link`).
"""

from typing import TypeAlias

import msgspec

from kvferry.transports.decoding import decode
from kvferry.transports.tcp_wire import Cancel, Hello, Read, Refused

TAG_BYTES = 8
"""Behind each chunk; a message that was too short lacks it."""


class Want(msgspec.Struct, frozen=True, tag="want"):
    """The reader is ready for one chunk."""

    transfer: int
    chunk: int
    """Row in the read's chunk table."""
    tag: int
    """Random, 64 bits: nobody else can send to it."""


ToServer: TypeAlias = Hello | Read | Want | Cancel

_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_to_reader: msgspec.msgpack.Decoder[Refused] = msgspec.msgpack.Decoder(Refused)


def decode_request(frame: bytes) -> ToServer:
    """What a reader sent.

    Raises:
        DecodeError: it does not match the schema.
    """
    return decode(_to_server, frame, "request")


def decode_refusal(frame: bytes) -> Refused:
    """What a server sent.

    Raises:
        DecodeError: it does not match the schema.
    """
    return decode(_to_reader, frame, "reply")
