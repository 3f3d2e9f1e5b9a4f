"""The KV cache of one engine: how many blocks, which tensors, which groups of layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cache.specs import KVCacheSpec


@dataclass(frozen=True)
class KVCacheTensor:
    """One allocation, and the layers whose blocks lie in it.

    Raises:
        ValueError: an empty size or no layers.
    """

    size: int
    """Bytes."""
    shared_by: Sequence[str]
    """Names of the layers; kept as a tuple."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_by", tuple(self.shared_by))
        if self.size < 1:
            raise ValueError(f"KVCacheTensor.size: {self.size} bytes hold nothing")
        if not self.shared_by:
            raise ValueError("KVCacheTensor.shared_by: is empty; name the layers that use it")


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table per request.

    Raises:
        ValueError: a layer is named twice.
    """

    layer_names: Sequence[str]
    """Kept as a tuple."""
    kv_cache_spec: KVCacheSpec
    """What each of the layers keeps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", tuple(self.layer_names))
        if len(set(self.layer_names)) != len(self.layer_names):
            raise ValueError(f"KVCacheGroupSpec.layer_names: {self.layer_names} repeats a name")


@dataclass(frozen=True)
class KVCacheConfig:
    """The KV cache of one engine. Without tensors it serves a scheduler that owns no memory.

    Raises:
        ValueError: fewer than two blocks, no group, a layer in two groups, or a tensor that is
            too small for the blocks or names an unknown layer.
    """

    num_blocks: int
    """Blocks of the pool that all groups share, the null block included."""
    kv_cache_tensors: Sequence[KVCacheTensor]
    """Kept as a tuple; may be empty."""
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    """Kept as a tuple."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_tensors", tuple(self.kv_cache_tensors))
        object.__setattr__(self, "kv_cache_groups", tuple(self.kv_cache_groups))
        if self.num_blocks < 2:
            raise ValueError(
                f"KVCacheConfig.num_blocks: {self.num_blocks} leaves nothing beside the null "
                "block; take 2 or more"
            )
        if not self.kv_cache_groups:
            raise ValueError("KVCacheConfig.kv_cache_groups: is empty; give one group or more")
        specs: dict[str, KVCacheSpec] = {}
        for group in self.kv_cache_groups:
            for name in group.layer_names:
                if name in specs:
                    raise ValueError(f"KVCacheConfig.kv_cache_groups: {name!r} is in two groups")
                specs[name] = group.kv_cache_spec
        for tensor in self.kv_cache_tensors:
            self._check_tensor(tensor, specs)

    def _check_tensor(self, tensor: KVCacheTensor, specs: dict[str, KVCacheSpec]) -> None:
        for name in tensor.shared_by:
            if name not in specs:
                raise ValueError(
                    f"KVCacheConfig.kv_cache_tensors: {name!r} is in no group; groups hold "
                    f"{', '.join(specs) or 'no layers'}"
                )
            needed = self.num_blocks * specs[name].page_size_bytes
            if tensor.size < needed:
                raise ValueError(
                    f"KVCacheConfig.kv_cache_tensors: {tensor.size} bytes for {name!r}, whose "
                    f"{self.num_blocks} blocks take {needed}"
                )
