"""The spec of a group whose layers hold the same slots in pages of different sizes."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from kvferry.cache.specs import CacheLimits, KVCacheSpec


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that share one block table although their pages differ in size.

    Layers are of one type if a request holds the same blocks in each: the same kind of attention,
    and for windows, chunks and states the same window, chunk or number of states. A block of the
    group is one page of every layer.

    Raises:
        ValueError: no layers, or layers that are not of one type.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec]
    """What each layer keeps, by its name; kept as a read-only copy."""

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
        """The spec of a group of all these layers, or ``None`` if they are not of one type."""
        if not cls.is_uniform_type(specs):
            return None
        return cls(next(iter(specs.values())).block_size, specs)

    @property
    def first_spec(self) -> KVCacheSpec:
        """What the first layer keeps; it stands for all where pages do not matter."""
        return next(iter(self.kv_cache_specs.values()))

    @property
    def slot_rule(self) -> Hashable:
        """See :attr:`~kvferry.cache.KVCacheSpec.slot_rule`: that of the layers."""
        return self.first_spec.slot_rule

    @property
    def num_reserved_blocks(self) -> int:
        """See :attr:`~kvferry.cache.KVCacheSpec.num_reserved_blocks`: that of the layers."""
        return self.first_spec.num_reserved_blocks

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of all the layers on one rank."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Bytes of all the layers on one rank that the longest request may hold at once."""
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
