"""What a rank tells its peers about its NIXL agent and its memory.

NIXL parses an agent's metadata with code of its own, which malformed bytes can crash. A digest
keeps bytes that were garbled or cut short away from it; against a peer that lies on purpose only
the control channel's keys protect.
"""

import hashlib

import msgspec

from kvferry.errors import DecodeError
from kvferry.transports.decoding import decode_as

VERSION = 1
MAX_METADATA_BYTES = 16 << 20
"""Largest agent metadata that is handed to NIXL."""
_MEMORIES = ("DRAM", "VRAM")


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One region, where it lies in the serving process."""

    address: int
    nbytes: int
    """0 for a region that is not served."""
    memory: str = "DRAM"
    """NIXL's name of the kind: ``DRAM`` is host memory, ``VRAM`` a GPU's."""
    device: int = 0
    """Number of the GPU."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves, and what. Travels in the engine's description."""

    transport: str = "nixl"
    version: int = VERSION
    agent: str
    """The agent's name."""
    metadata: bytes
    """What NIXL needs to reach it: opaque to us."""
    digest: bytes
    """SHA-256 of the metadata."""
    regions: tuple[Region, ...]


def encode_endpoint(agent: str, metadata: bytes, regions: tuple[Region, ...]) -> bytes:
    """The endpoint as bytes."""
    digest = hashlib.sha256(metadata).digest()
    return msgspec.msgpack.encode(
        Endpoint(agent=agent, metadata=metadata, digest=digest, regions=regions)
    )


def decode_endpoint(data: bytes) -> Endpoint:
    """Who serves, and what.

    Raises:
        DecodeError: it does not match the schema, or speaks of impossible memory.
    """
    endpoint = decode_as(Endpoint, data, "nixl", VERSION)
    if not endpoint.agent or not 0 < len(endpoint.metadata) <= MAX_METADATA_BYTES:
        raise DecodeError(
            f"endpoint: agent {endpoint.agent[:80]!r} with {len(endpoint.metadata)} bytes of "
            f"metadata, expected a name and 1 to {MAX_METADATA_BYTES} bytes"
        )
    if hashlib.sha256(endpoint.metadata).digest() != endpoint.digest:
        raise DecodeError(f"endpoint: the metadata of agent {endpoint.agent!r} was garbled")
    for number, region in enumerate(endpoint.regions):
        fits = region.address >= 0 and 0 <= region.nbytes < 1 << 60
        fits = fits and region.address + region.nbytes < 1 << 63
        if not fits or region.memory not in _MEMORIES or not 0 <= region.device < 1 << 16:
            raise DecodeError(f"endpoint: region {number} is impossible memory: {region}")
    return endpoint
