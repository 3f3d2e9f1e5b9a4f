"""What an engine tells another about itself: groups, memory, model.

These are the structs that the handshake carries: a group goes over the wire as its geometry, of
which every field is plain data. The comparison of two descriptions lives in
:mod:`kvferry.control.handshake`.
"""

from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.group import GroupGeometry
from kvferry.topology.heads import HeadDigests
from kvferry.topology.states import StateGeometry
from kvferry.topology.tensors import RankMemory

PROTOCOL_MIN = 2
"""Oldest protocol version that this release speaks."""
PROTOCOL_MAX = 2
"""Newest protocol version that this release speaks."""

# Part of the schema, so that a longer list is refused before any of it is decoded.
MAX_RANKS = 1024
"""Ranks of the largest engine that is accepted."""
MAX_GROUPS = 64
"""KV cache groups of the largest engine that is accepted."""


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must agree before KV computed by one engine means anything to the other."""

    name: str
    """For messages only; never compared."""
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    """Dtype of the KV cache."""
    rope: str
    """Canonical text of the rope and context-scaling settings."""
    config_digest: str
    """SHA-256 (hex) of the canonical model config."""
    weights_digest: str
    """SHA-256 (hex) over the weights."""


class AttentionGroup(msgspec.Struct, frozen=True, tag="attention"):
    """A group of attention layers on the wire."""

    geometry: EngineGeometry


class StateGroup(msgspec.Struct, frozen=True, tag="states"):
    """A group of recurrent layers on the wire."""

    geometry: StateGeometry


TaggedGroup: TypeAlias = AttentionGroup | StateGroup
"""A group, and which kind it is: only tagged structs can be told apart by who decodes them."""


def tagged_groups(geometries: Iterable[GroupGeometry]) -> tuple[TaggedGroup, ...]:
    """The groups of an engine as its description carries them.

    Raises:
        TypeError: a kind of group that no peer would know.
    """
    return tuple(_tagged(geometry) for geometry in geometries)


def _tagged(geometry: GroupGeometry) -> TaggedGroup:
    match geometry:
        case EngineGeometry():
            return AttentionGroup(geometry)
        case StateGeometry():
            return StateGroup(geometry)
    raise TypeError(f"{type(geometry).__name__} is neither an EngineGeometry nor a StateGeometry")


class RankDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: where its data endpoint is and how its memory is laid out."""

    rank: int
    endpoints: dict[str, bytes]
    """Transport name → the transport's own endpoint bytes."""
    memory: Annotated[tuple[RankMemory, ...], Meta(max_length=MAX_GROUPS)]
    """One entry per group."""
    mirrored: bool = False
    """Whether some transport serves copies of lent blocks, which are made when they are lent."""
    host: str = ""
    """Equal for ranks on one host, whose shared memory they have in common; empty if not told."""
    heads: HeadDigests | None = None
    """Digests of the weights behind the rank's KV heads; ``None`` from an engine that has no
    weights to digest, and from releases before."""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one engine sends another at the handshake."""

    engine_id: str
    incarnation: str
    """Random per start; state of an older one is dropped."""
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    model: ModelFingerprint
    groups: Annotated[tuple[TaggedGroup, ...], Meta(max_length=MAX_GROUPS)]
    """What :func:`tagged_groups` makes of the geometries."""
    ranks: Annotated[tuple[RankDescription, ...], Meta(max_length=MAX_RANKS)]
    convert_dtype: bool = False
    """Whether it reads KV of another dtype although precision is lost."""

    @property
    def geometries(self) -> tuple[GroupGeometry, ...]:
        """Which cells of each group each rank holds."""
        return tuple(group.geometry for group in self.groups)


def without_endpoints(description: EngineDescription) -> EngineDescription:
    """The same, with the names of its transports but none of what a peer connects with."""
    ranks = tuple(
        msgspec.structs.replace(rank, endpoints=dict.fromkeys(rank.endpoints, b""))
        for rank in description.ranks
    )
    return msgspec.structs.replace(description, ranks=ranks)
