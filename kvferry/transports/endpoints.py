"""How the endpoints of transports are told apart: each says whose it is, and of which version."""

from typing import Protocol, TypeVar

import msgspec

from kvferry.errors import DecodeError


class _Endpoint(Protocol):
    @property
    def transport(self) -> str: ...
    @property
    def version(self) -> int: ...


EndpointT = TypeVar("EndpointT", bound=_Endpoint)


def decode_as(kind: type[EndpointT], endpoint: bytes, transport: str, version: int) -> EndpointT:
    """An endpoint that was encoded with msgpack. What its fields say is not looked at.

    Raises:
        DecodeError: it does not match ``kind``, or is one of another transport or version.
    """
    try:
        described = msgspec.msgpack.decode(endpoint, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"{transport} endpoint of {len(endpoint)} bytes: {error}") from error
    if (described.transport, described.version) != (transport, version):
        raise DecodeError(
            f"endpoint: is one of {described.transport!r} version {described.version}, "
            f"expected {transport!r} version {version}"
        )
    return described
