"""The KV cache of an engine: the number of blocks, the tensors, and the groups of layers."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from kvferry.cache.specs import AttentionSpec, CacheLimits, KVCacheSpec


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """The specs of layers that share a block table although their pages differ in size.

    Layers are of the same type if a request holds the same blocks in each layer: the same kind of
    attention, and for windows, chunks and states the same window, chunk or number of states. A
    block of the group consists of a page of every layer.

    Raises:
        ValueError: there are no layers, or the layers are not of the same type.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec]
    """Spec of each layer, by the layer's name; stored as a read-only copy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kv_cache_specs", MappingProxyType(dict(self.kv_cache_specs)))
        if not self.kv_cache_specs:
            raise ValueError("UniformTypeKVCacheSpecs.kv_cache_specs: is empty; name the layers")
        sizes = {spec.block_size for spec in self.kv_cache_specs.values()}
        if sizes != {self.block_size} or not self.is_uniform_type(self.kv_cache_specs):
            raise ValueError(
                f"UniformTypeKVCacheSpecs.kv_cache_specs: {', '.join(self.kv_cache_specs)} do not "
                f"hold the same slots in blocks of {self.block_size} tokens; give layers of one "
                "kind, window and block size, or make groups with group_layers"
            )

    def __hash__(self) -> int:
        # A read-only mapping has no hash before Python 3.12.
        return hash((self.block_size, frozenset(self.kv_cache_specs.items())))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A read-only mapping cannot be pickled.
        return type(self), (self.block_size, dict(self.kv_cache_specs))

    @classmethod
    def is_uniform_type(cls, specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether a request holds the same blocks in every layer."""
        return len({(spec.block_size, spec.slot_rule) for spec in specs.values()}) == 1

    @classmethod
    def from_specs(cls, specs: Mapping[str, KVCacheSpec]) -> Self | None:
        """The spec of a group of all these layers; ``None`` if they are not of the same type."""
        if not cls.is_uniform_type(specs):
            return None
        return cls(next(iter(specs.values())).block_size, specs)

    @property
    def first_spec(self) -> KVCacheSpec:
        """The spec of the first layer, which represents all layers if page sizes do not matter."""
        return next(iter(self.kv_cache_specs.values()))

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`~kvferry.cache.KVCacheSpec.slot_rule`: the rule of the layers."""
        return self.first_spec.slot_rule

    @property
    def num_reserved_blocks(self) -> int:
        """See :attr:`~kvferry.cache.KVCacheSpec.num_reserved_blocks`: the number of the layers."""
        return self.first_spec.num_reserved_blocks

    @property
    def page_size_bytes(self) -> int:
        """Number of bytes of a block of all the layers on a rank."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Number of bytes of all the layers on a rank that the longest request may hold at once."""
        spec = self.first_spec
        num_blocks = spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
        return num_blocks * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same layers in blocks of ``block_size`` tokens."""
        return type(self)(
            block_size,
            {
                name: spec.copy_with_new_block_size(block_size)
                for name, spec in self.kv_cache_specs.items()
            },
        )


@dataclass(frozen=True)
class KVCacheTensor:
    """Memory of a page per block, and the layers whose pages lie in this memory.

    A block belongs to a single group at a time, so layers of different groups may share the bytes.
    Block ``b`` of each layer begins ``offset + b * block_stride`` bytes into an allocation of
    ``size`` bytes. Tensors with a ``block_stride`` lie in a common allocation, side by side in
    every block. Any other tensor has its own allocation.

    Raises:
        ValueError: the size is below 1, there are no layers, or an offset or stride is out of
            range.
    """

    size: int
    """Number of bytes of the allocation."""
    shared_by: Sequence[str]
    """Names of the layers, at most one layer of each group; stored as a tuple."""
    offset: int = 0
    """Number of bytes from the start of the allocation to block 0."""
    block_stride: int | None = None
    """Number of bytes from a block to the next block; ``None`` for the page size (dense blocks)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_by", tuple(self.shared_by))
        if self.size < 1:
            raise ValueError(f"KVCacheTensor.size: {self.size} bytes hold nothing")
        if not self.shared_by:
            raise ValueError("KVCacheTensor.shared_by: is empty; name the layers that use it")
        if not 0 <= self.offset < self.size:
            raise ValueError(
                f"KVCacheTensor.offset: {self.offset} lies outside the {self.size} bytes"
            )
        if self.block_stride is not None and self.block_stride < 1:
            raise ValueError(
                f"KVCacheTensor.block_stride: {self.block_stride} is less than 1; leave it out "
                "for dense blocks"
            )


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers with a common block table per request.

    Raises:
        ValueError: a layer is named twice, the layers of a uniform spec are not the named layers,
            or blocks cannot be split for the kernels.
    """

    layer_names: Sequence[str]
    """Names of the layers; stored as a tuple."""
    kv_cache_spec: KVCacheSpec
    """Spec of each of the layers."""
    kernel_block_size: int | None = None
    """Number of tokens per block from the view of the attention kernels. It divides the block size
    of the spec; see :meth:`kvferry.cache.BlockTable.split`. ``None`` means the block size of the
    spec."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", tuple(self.layer_names))
        if len(set(self.layer_names)) != len(self.layer_names):
            raise ValueError(f"KVCacheGroupSpec.layer_names: {self.layer_names} repeats a name")
        spec = self.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs) and set(spec.kv_cache_specs) != set(
            self.layer_names
        ):
            raise ValueError(
                f"KVCacheGroupSpec.layer_names: {self.layer_names} are not the layers of the "
                f"spec, {tuple(spec.kv_cache_specs)}"
            )
        if self.kernel_block_size is not None:
            self._check_kernel_block_size(self.kernel_block_size)

    def _check_kernel_block_size(self, kernel_block_size: int) -> None:
        block_size = self.kv_cache_spec.block_size
        if kernel_block_size < 1 or block_size % kernel_block_size:
            raise ValueError(
                f"KVCacheGroupSpec.kernel_block_size: {kernel_block_size} does not divide the "
                f"block_size, {block_size}; change one of them"
            )
        for name in self.layer_names if kernel_block_size != block_size else ():
            spec = self.layer_spec(name)
            # A kernel block is found by its number alone, so pages must contain only tokens.
            if (
                not isinstance(spec, AttentionSpec)
                or spec.page_size_bytes != spec.real_page_size_bytes
            ):
                raise ValueError(
                    f"KVCacheGroupSpec.kernel_block_size: pages of {name!r} are padded or hold "
                    f"a state and cannot be split into blocks of {kernel_block_size} tokens; "
                    "leave it out"
                )

    def layer_spec(self, layer_name: str) -> KVCacheSpec:
        """The spec of a layer of the group.

        Raises:
            ValueError: the layer is not in the group.
        """
        if layer_name not in self.layer_names:
            raise ValueError(
                f"layer_name: {layer_name!r} is not in the group of {', '.join(self.layer_names)}"
            )
        if isinstance(self.kv_cache_spec, UniformTypeKVCacheSpecs):
            return self.kv_cache_spec.kv_cache_specs[layer_name]
        return self.kv_cache_spec


@dataclass(frozen=True)
class KVCacheConfig:
    """The KV cache of an engine. Without tensors it serves a scheduler that owns no memory.

    Raises:
        ValueError: there are fewer than two blocks, or no groups, or a layer is in two groups; or a
            tensor is too small for the blocks, has overlapping blocks, names an unknown layer, or
            is shared by two layers of the same group.
    """

    num_blocks: int
    """Number of blocks of the common pool, including the null block."""
    kv_cache_tensors: Sequence[KVCacheTensor]
    """Tensors of the cache; stored as a tuple; may be empty."""
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    """Groups of the cache; stored as a tuple."""

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
        groups: dict[str, KVCacheGroupSpec] = {}
        for group in self.kv_cache_groups:
            for name in group.layer_names:
                if name in groups:
                    raise ValueError(f"KVCacheConfig.kv_cache_groups: {name!r} is in two groups")
                groups[name] = group
        for tensor in self.kv_cache_tensors:
            self._check_tensor(tensor, groups)

    def _check_tensor(self, tensor: KVCacheTensor, groups: dict[str, KVCacheGroupSpec]) -> None:
        owners: dict[int, str] = {}
        for name in tensor.shared_by:
            if name not in groups:
                raise ValueError(
                    f"KVCacheConfig.kv_cache_tensors: {name!r} is in no group; groups hold "
                    f"{', '.join(groups) or 'no layers'}"
                )
            other = owners.setdefault(id(groups[name]), name)
            if other != name:
                raise ValueError(
                    f"KVCacheConfig.kv_cache_tensors: {other!r} and {name!r} share a tensor and a "
                    "group, so they would write the same blocks; give each its own tensor"
                )
            page = groups[name].layer_spec(name).page_size_bytes
            stride = tensor.block_stride or page
            if stride < page:
                raise ValueError(
                    f"KVCacheConfig.kv_cache_tensors: block_stride {stride} is less than the "
                    f"{page} bytes of a page of {name!r}, so blocks overlap"
                )
            needed = tensor.offset + (self.num_blocks - 1) * stride + page
            if tensor.size < needed:
                raise ValueError(
                    f"KVCacheConfig.kv_cache_tensors: {tensor.size} bytes for {name!r}, whose "
                    f"{self.num_blocks} blocks take {needed}"
                )
