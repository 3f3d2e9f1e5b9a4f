"""Messages and endpoints that somebody else encoded with msgpack."""

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
    described = decode(msgspec.msgpack.Decoder(kind), endpoint, f"{transport} endpoint")
    if (described.transport, described.version) != (transport, version):
        raise DecodeError(
            f"endpoint: is one of {described.transport!r} version {described.version}, "
            f"expected {transport!r} version {version}"
        )
    return described
