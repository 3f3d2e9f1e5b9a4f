"""What an engine tells another about itself: groups, shape, memory, model.

These are the structs that the handshake carries. They are plain data; the comparison of two of
them lives in :mod:`kvferry.control.handshake`, the arithmetic on them in this room.
"""

import msgspec

PROTOCOL_MIN = 1
"""Oldest protocol version that this release speaks."""
PROTOCOL_MAX = 1
"""Newest protocol version that this release speaks."""


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


class PartStrides(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where the cells of one part (``k``, ``v``) lie inside a tensor; all numbers are bytes.

    The address of a cell is ``tensor offset + offset + layer * layer + block * block
    + token * token + head * head + element * element``, with indices local to the rank.
    """

    offset: int
    layer: int
    block: int
    token: int
    head: int
    element: int


class TensorMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache tensor of a rank: its place in a region, and the strides of its parts."""

    name: str
    region: int
    """Index into the rank's regions."""
    offset: int
    """Bytes from the start of the region to the tensor's first element."""
    parts: dict[str, PartStrides]


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of one rank for one group."""

    num_blocks: int
    """Blocks that the strides may index, the null block included."""
    region_bytes: tuple[int, ...]
    """Size of each region in bytes."""
    tensors: tuple[TensorMemory, ...]


class StateSection(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring channels of a recurrent state that TP divides by one rule."""

    name: str
    num_units: int
    """What TP divides, as it divides KV heads: with replicas where ranks outnumber them, so that
    every rank holds a section of one unit."""
    unit_size: int = 1
    """Channels per unit."""


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the state that a recurrent layer keeps per request."""

    name: str
    """As in ``layer.0.conv``."""
    dtype: str
    sections: tuple[StateSection, ...]
    """In the order of their channels."""
    channel_size: int = 1
    """Elements per channel: all other dims of the state."""

    @property
    def num_channels(self) -> int:
        """Channels of the model, in all sections."""
        return sum(section.num_units * section.unit_size for section in self.sections)


class GroupDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: the keyword arguments of its ``EngineGeometry``, as plain data."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    head_size_v: int | None
    dtype: str
    block_size: int
    layout: str
    """``str(layout)``; ``Layout.parse`` gives it back."""
    tp: int
    pp: int
    dcp: int = 1
    pcp: int = 1
    use_mla: bool = False
    layer_split: tuple[int, ...] | None = None
    layer_names: tuple[str, ...] | None = None
    layer_indices: tuple[int, ...] | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    interleave_size: int = 1
    page_size_padded: int | None = None
    scale_dtype: str | None = None
    states: tuple[StatePart, ...] = ()
    packing: str = ""


class RankDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: where its data endpoint is and how its memory is laid out."""

    rank: int
    endpoints: dict[str, bytes]
    """Transport name → the transport's own endpoint bytes."""
    memory: tuple[RankMemory, ...]
    """One entry per group."""
    mirrored: bool = False
    """Whether some transport serves copies of lent blocks, which are made when they are lent."""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one engine sends another at the handshake."""

    engine_id: str
    incarnation: str
    """Random per start; state of an older one is dropped."""
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    model: ModelFingerprint
    groups: tuple[GroupDescription, ...]
    ranks: tuple[RankDescription, ...]
    convert_dtype: bool = False
    """Whether it reads KV of another dtype although precision is lost."""


def without_endpoints(description: EngineDescription) -> EngineDescription:
    """The same, with the names of its transports but none of what a peer connects with."""
    ranks = tuple(
        msgspec.structs.replace(rank, endpoints=dict.fromkeys(rank.endpoints, b""))
        for rank in description.ranks
    )
    return msgspec.structs.replace(description, ranks=ranks)
