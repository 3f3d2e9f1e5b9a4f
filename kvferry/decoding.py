"""Messages and endpoints that somebody else encoded with msgpack."""

import threading
from typing import Protocol, TypeVar

import msgspec

from kvferry.errors import DecodeError

_MAX_ERROR_CHARS = 1000
"""Characters of what is said about bytes that do not decode."""


class _Endpoint(Protocol):
    @property
    def transport(self) -> str: ...
    @property
    def version(self) -> int: ...


M = TypeVar("M")
EndpointT = TypeVar("EndpointT", bound=_Endpoint)

_describing = threading.Lock()


def decoder_for(kind: type[M]) -> msgspec.msgpack.Decoder[M]:
    """A decoder of ``kind``, for a type that is not known when its module is imported.

    msgspec 0.22 describes a struct to itself at its first use and keeps the description before it
    is complete: a second thread that uses it meanwhile crashes the process. Here one thread at a
    time does so; module-level decoders are made under Python's import lock.
    """
    with _describing:
        return msgspec.msgpack.Decoder(kind)


def decode(decoder: msgspec.msgpack.Decoder[M], data: bytes | memoryview, what: str) -> M:
    """One message; ``what`` names it in the error.

    Raises:
        DecodeError: it does not match the schema.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Parts of the text are the writer's and may be of any length.
        text = str(error)[:_MAX_ERROR_CHARS]
        raise DecodeError(f"{what} of {len(data)} bytes: {text}") from error


def decode_as(kind: type[EndpointT], endpoint: bytes, transport: str, version: int) -> EndpointT:
    """An endpoint. What its other fields say is not looked at.

    Raises:
        DecodeError: it does not match ``kind``, or is one of another transport or version.
    """
    described = decode(decoder_for(kind), endpoint, f"{transport} endpoint")
    if (described.transport, described.version) != (transport, version):
        raise DecodeError(
            f"endpoint: is one of {described.transport!r} version {described.version}, "
            f"expected {transport!r} version {version}"
        )
    return described
