"""Which layers of a model share a block table, and how each group's cells lie on an engine's ranks.

The one place where a model's layers, an engine's shape and the cache core's grouping meet.
"""

from dataclasses import dataclass

from kvferry.cache import KVCacheConfig
from kvferry.cache.grouping import group_layers
from kvferry.config import EngineConfig
from kvferry.engine.model_config import DecoderConfig
from kvferry.errors import ConfigError
from kvferry.topology.geometry import EngineGeometry, ParallelShape


@dataclass(frozen=True, slots=True)
class EngineCache:
    """The KV cache of an engine, for its scheduler and for its ranks."""

    config: KVCacheConfig
    """The scheduler's view: no tensors, as it owns no memory."""
    geometries: tuple[EngineGeometry, ...]
    """One per group, in the same order."""


def engine_cache(engine: EngineConfig, model: DecoderConfig, dtype: str) -> EngineCache:
    """The KV cache of an engine that runs a model.

    Args:
        engine: shape, block size, layout and number of blocks.
        model: whose layers.
        dtype: of the KV cache.

    Raises:
        ConfigError: the shape does not fit the model, or its layers cannot be grouped.
    """
    try:
        groups = group_layers(
            model.kv_cache_specs(engine.block_size, dtype), hybrid=engine.hybrid_kv_cache
        )
        return EngineCache(
            config=KVCacheConfig(engine.num_blocks, (), groups),
            geometries=model.geometries(
                groups,
                layout=engine.layout,
                parallel=ParallelShape(tp=engine.tp, pp=engine.pp),
            ),
        )
    except ValueError as error:
        raise ConfigError(f"engine {engine.name!r}: {error}") from error
