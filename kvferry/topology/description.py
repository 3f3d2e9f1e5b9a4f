"""The description that an engine sends to another engine: groups, memory and model.

The handshake carries these structs. A group travels as its geometry, whose fields are all plain
data. :mod:`kvferry.control.handshake` compares two descriptions.
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
"""Oldest protocol version of this release."""
PROTOCOL_MAX = 2
"""Newest protocol version of this release."""

# These limits are part of the schema: a decoder refuses a longer list before reading it.
MAX_RANKS = 1024
"""Largest number of ranks of an engine."""
MAX_GROUPS = 64
"""Largest number of KV cache groups of an engine."""


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a model that must agree before two engines can exchange KV."""

    name: str
    """Name of the model, for messages only; never compared."""
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    """Dtype of the KV cache."""
    rope: str
    """Canonical text of the rope settings and the context-scaling settings."""
    config_digest: str
    """SHA-256 (hex) of the canonical model config."""
    weights_digest: str
    """SHA-256 (hex) of the weights."""


class AttentionGroup(msgspec.Struct, frozen=True, tag="attention"):
    """A group of attention layers on the wire."""

    geometry: EngineGeometry


class StateGroup(msgspec.Struct, frozen=True, tag="states"):
    """A group of recurrent layers on the wire."""

    geometry: StateGeometry


TaggedGroup: TypeAlias = AttentionGroup | StateGroup
"""A group and its kind. Only tagged structs let the decoder tell the kinds apart."""


def tagged_groups(geometries: Iterable[GroupGeometry]) -> tuple[TaggedGroup, ...]:
    """The groups of an engine, in the form of a description.

    Raises:
        TypeError: a group of a kind that no peer knows.
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
    """Data endpoint and memory layout of a rank."""

    rank: int
    endpoints: dict[str, bytes]
    """Transport name → endpoint bytes of this transport."""
    memory: Annotated[tuple[RankMemory, ...], Meta(max_length=MAX_GROUPS)]
    """Memory of the rank, an entry per group."""
    host: str = ""
    """Name, equal for ranks on the same host, with common host memory; empty if not given."""
    heads: HeadDigests | None = None
    """Digests of the weights behind the rank's KV heads; ``None`` from an engine without weights to
    digest, and from earlier releases."""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an engine tells another engine in the handshake."""

    engine_id: str
    incarnation: str
    """Random per start; peers drop the state of an older incarnation."""
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    model: ModelFingerprint
    groups: Annotated[tuple[TaggedGroup, ...], Meta(max_length=MAX_GROUPS)]
    """Groups of the engine, made by :func:`tagged_groups` from the geometries."""
    ranks: Annotated[tuple[RankDescription, ...], Meta(max_length=MAX_RANKS)]
    convert_dtype: bool = False
    """Whether the engine reads KV of another dtype even if precision is lost."""
    serving_engine: str = ""
    """The serving engine and its release, for people; empty if the engine does not tell."""

    @property
    def geometries(self) -> tuple[GroupGeometry, ...]:
        """The geometry of each group."""
        return tuple(group.geometry for group in self.groups)


def without_endpoints(description: EngineDescription) -> EngineDescription:
    """A copy of the description that keeps the names of transports but no endpoint bytes."""
    ranks = tuple(
        msgspec.structs.replace(rank, endpoints=dict.fromkeys(rank.endpoints, b""))
        for rank in description.ranks
    )
    return msgspec.structs.replace(description, ranks=ranks)
