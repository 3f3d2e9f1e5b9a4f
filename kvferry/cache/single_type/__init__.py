"""What differs between kinds of layers: one manager per KV cache group.

::

    base.py        block tables, and what a kind of layer has to say     SingleTypeManager
    full.py        full attention, MLA, sinks: all tokens are kept
    windowed.py    sliding windows and chunks: passed blocks are freed
    mamba.py       recurrent layers: the last state is kept
    cross.py       cross attention: the encoder's output is kept
"""

from kvferry.cache.single_type.base import (
    NEVER,
    GroupTable,
    HitRules,
    Limits,
    Room,
    SingleTypeManager,
    table_block_size,
)
from kvferry.cache.single_type.cross import CrossAttentionManager
from kvferry.cache.single_type.full import FullAttentionManager, SinkFullAttentionManager
from kvferry.cache.single_type.mamba import MambaManager
from kvferry.cache.single_type.windowed import ChunkedLocalAttentionManager, SlidingWindowManager
from kvferry.cache.specs import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
)
from kvferry.cache.specs_local import ChunkedLocalAttentionSpec, SlidingWindowSpec
from kvferry.cache.specs_mamba import MambaSpec
from kvferry.cache.specs_uniform import UniformTypeKVCacheSpecs

__all__ = [
    "NEVER",
    "FullAttentionManager",
    "GroupTable",
    "HitRules",
    "Limits",
    "MambaManager",
    "Room",
    "SingleTypeManager",
    "SinkFullAttentionManager",
    "layer_spec",
    "manager_kind",
    "table_block_size",
]

MANAGERS: dict[type[KVCacheSpec], type[SingleTypeManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SinkFullAttentionSpec: SinkFullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
}
"""Which manager serves which spec, and the specs that inherit from it."""


def layer_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec that says which blocks a group's requests hold: of any layer, as all agree."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def manager_kind(spec: KVCacheSpec, group_id: int) -> type[SingleTypeManager]:
    """The manager for a group of such layers.

    Raises:
        ValueError: there is none for this kind of spec.
    """
    for base in type(spec).__mro__:
        kind = MANAGERS.get(base)
        if kind is not None:
            return kind
    raise ValueError(
        f"kv_cache_groups: group {group_id} has a {type(spec).__name__}, which no manager "
        f"serves; supported: {', '.join(known.__name__ for known in MANAGERS)}. Layers that keep "
        "nothing, as encoder-only attention, belong to no group"
    )
