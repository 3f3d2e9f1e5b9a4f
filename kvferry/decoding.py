"""Decodes messages and endpoints that another process encoded with msgpack."""

import threading
from typing import Protocol, TypeVar

import msgspec

from kvferry.errors import DecodeError

UNDECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no message of the wanted kind."""
_MAX_ERROR_CHARS = 1000
"""Largest number of characters in an error about bytes that do not decode."""


class _Endpoint(Protocol):
    @property
    def transport(self) -> str: ...
    @property
    def version(self) -> int: ...


M = TypeVar("M")
EndpointT = TypeVar("EndpointT", bound=_Endpoint)

_describing = threading.Lock()


def decoder_for(kind: type[M]) -> msgspec.msgpack.Decoder[M]:
    """A decoder of ``kind``, for a type that is unknown when its module is imported.

    msgspec 0.22 builds a description of a struct at the first use, and stores the description
    before it is complete. If a second thread uses the struct at that time, the process crashes.
    Here only a single thread does so at a time; Python's import lock protects module-level
    decoders.
    """
    with _describing:
        return msgspec.msgpack.Decoder(kind)


def decode(decoder: msgspec.msgpack.Decoder[M], data: bytes | memoryview, what: str) -> M:
    """Decodes a message; ``what`` is its name in an error.

    Raises:
        DecodeError: the message does not match the schema.
    """
    try:
        return decoder.decode(data)
    except UNDECODED as error:
        # The writer of the bytes chose parts of the text, which may have any length.
        text = str(error)[:_MAX_ERROR_CHARS]
        raise DecodeError(f"{what} of {len(data)} bytes: {text}") from error


def decode_as(kind: type[EndpointT], endpoint: bytes, transport: str, version: int) -> EndpointT:
    """Decodes an endpoint. The values of its other fields are not checked.

    Raises:
        DecodeError: the endpoint does not match ``kind``, or has another transport or version.
    """
    described = decode(decoder_for(kind), endpoint, f"{transport} endpoint")
    if (described.transport, described.version) != (transport, version):
        raise DecodeError(
            f"endpoint: is one of {described.transport!r} version {described.version}, "
            f"expected {transport!r} version {version}"
        )
    return described
