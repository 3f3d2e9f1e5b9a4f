"""vLLM's KV caches as kvferry groups: which cells each rank holds, and where the cells lie.

A worker sees only the layers of its own stage, so the stages exchange descriptions of their layers.
Then every rank builds the same geometries. A vLLM group has one block table. If the layers of a
group differ (head size, window), the group becomes several kvferry groups with the same table.
Attention kernels may divide a block of a table into several smaller blocks. kvferry groups consist
of these small blocks, and :class:`CacheGroup` translates. This module describes attention layers;
``states.py`` describes recurrent layers.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from kvferry.errors import ConfigError
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.compat.projections import owner_of_cache, total_kv_heads
from kvferry.integrations.vllm.packing import Packing, probe_packing
from kvferry.integrations.vllm.states import (
    StateCache,
    state_cache,
    state_geometry,
    state_tensors,
)
from kvferry.topology import EngineGeometry, GroupGeometry, ParallelShape, StateGeometry

_SERVED = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
)
"""Kinds of vLLM's KV cache specs with one cell per token, head and element."""

_INDEXER_BLOCK = 128
"""Number of elements of an indexer's key that share a scale, a float32 of :data:`_SCALE_BYTES`."""
_SCALE_BYTES = 4
INDEXER_LAYOUT = "BH(k=ND,v=ND)"
"""Layout of an indexer's block: the values of all tokens, named k, then the scales, named v."""
_LATENT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Number of bytes in a latent packed with the scales into one row, by cache dtype."""


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one layer, as the layer's own rank sees the cache."""

    name: str
    table: int
    """Index of vLLM's KV cache group, and so of the block table."""
    split: int
    """Number of blocks of the tensor per entry of the table."""
    num_kv_heads: int
    """Number of KV heads of the model, over all ranks."""
    head_size: int
    head_size_v: int
    dtype: str
    block_size: int
    """Number of tokens in a block of the tensor."""
    layout: str = "BHNC"
    packing: str = ""
    """Name of the packing of opaque blocks; see :class:`EngineGeometry`."""
    dcp_sharded: bool = True
    """Whether DCP ranks share the tokens; otherwise each rank holds all tokens."""
    use_mla: bool = False
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A KV cache group of kvferry, and the translation of vLLM's block tables."""

    table: int
    """Index of vLLM's KV cache group."""
    split: int
    """Number of kvferry blocks per entry of vLLM's table."""
    geometry: GroupGeometry
    """Geometry of the group: the cells that each rank holds."""

    def block_ids(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """The group's block table, from all tables of vLLM. Null blocks stay null blocks."""
        ids = tables[self.table]
        if self.split == 1:
            return list(ids)
        parts = range(self.split)
        return [block and block * self.split + part for block in ids for part in parts]


def cache_views(
    kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """This rank's caches, logically ``[B, H, N, C]`` in every release.

    Raises:
        ConfigError: a cache cannot be viewed in this shape.
    """
    return {
        name: compat.release.cache_view(name, compat.spec_of_layer(group, name), kv_caches[name])
        for group in kv_cache_config.kv_cache_groups
        if compat.release.is_transferred(group)
        for name in group.layer_names
        if name in kv_caches
    }


def layer_caches(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    projections: Mapping[str, Any],
) -> list[LayerCache | StateCache]:
    """The caches of this rank's layers, in the order of vLLM's groups.

    A layer that reads the cache of another layer has no cache, and is left out.

    Args:
        vllm_config: the engine's config.
        kv_cache_config: this rank's ``KVCacheConfig``.
        kv_caches: layer name → tensor, logically ``[B, H, N, C]``.
        projections: see :func:`~kvferry.integrations.vllm.compat.projections.qkv_projections`.

    Raises:
        ConfigError: the adapter does not serve a kind of cache.
    """
    if kv_cache_config.has_mixed_precision_kv_cache and not compat.release.serves_packed:
        raise ConfigError(
            "KV cache: this model's caches of tokens have several precisions, which this adapter "
            "serves with vLLM 0.32 or later"
        )
    packings: dict[tuple[Any, ...], Packing] = {}
    found: list[LayerCache | StateCache] = []
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        if not compat.release.is_transferred(group):
            continue
        if getattr(group, "host_resident", False):  # vLLM before 0.32 has no such groups
            raise ConfigError(
                f"KV cache of {group.layer_names[0]}: its blocks are those of a pool in host "
                "memory; this adapter moves blocks of the device's pool, so leave HiSparse out"
            )
        for name in group.layer_names:
            spec = compat.spec_of_layer(group, name)
            if type(spec).__name__ == "MambaSpec":
                found.append(state_cache(vllm_config, name, table, spec))
                continue
            if owner_of_cache(compat.attention_layer(vllm_config, name)) is not None:
                continue
            parts = spec, kv_caches[name], projections.get(name)
            found.append(_layer_cache(vllm_config, name, table, *parts, packings))
    if not found:
        raise ConfigError("KV cache: no layer of this model has a cache that can be transferred")
    return found


def _layer_cache(
    vllm_config: Any,
    name: str,
    table: int,
    spec: Any,
    tensor: torch.Tensor,
    projection: Any,
    packings: dict[tuple[Any, ...], Packing],
) -> LayerCache:
    kind = type(spec).__name__
    tokens_per_state = compat.release.tokens_per_state(spec)
    if kind not in _SERVED or tokens_per_state != 1:
        raise ConfigError(
            f"KV cache of {name}: {kind} with tokens_per_state={tokens_per_state}; this "
            f"adapter serves {', '.join(_SERVED)} with one state per token"
        )
    block_size, is_latent = int(tensor.shape[2]), kind == "MLAAttentionSpec"
    content = _packed_content(vllm_config, name, spec, tensor)
    if content is None:
        packing = _packing(vllm_config, name, spec, block_size, packings)
        content = {
            "use_mla": is_latent,
            "head_size": spec.head_size,
            "head_size_v": spec.head_size_v,
            "dtype": compat.cache_dtype(vllm_config, spec),
            "layout": packing.layout,
            "packing": packing.name,
        }
    windowed = kind in ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")
    return LayerCache(
        name=name,
        table=table,
        split=spec.block_size // block_size,
        num_kv_heads=(
            1 if is_latent else _num_kv_heads(vllm_config, name, spec.num_kv_heads, projection)
        ),
        block_size=block_size,
        dcp_sharded=compat.release.is_dcp_sharded(spec),
        sliding_window=getattr(spec, "sliding_window", None) if windowed else None,
        attention_chunk_size=getattr(spec, "attention_chunk_size", None) if windowed else None,
        **content,
    )


def _packed_content(
    vllm_config: Any, name: str, spec: Any, tensor: torch.Tensor
) -> dict[str, Any] | None:
    """Content of a cache's blocks with scales beside the values; ``None`` for all other caches.

    A row of bytes holds the values and scales of one token and head. The transfer does not depend
    on the meaning of the bytes, so scales are elements of the row. A block of an indexer holds two
    tables of rows::

        fp8_ds_mla              | latent | 4 scales | rotated key |       one row per token
        int8_per_token_head     | k | scale | v | scale |                 one per token and head
        indexer, a block        | values of its tokens | scales of its tokens |

    Raises:
        ConfigError: the adapter does not know the way of packing.
    """
    mode, size = spec.kv_quant_mode, spec.state_content_bytes
    is_bytes = mode.name == "NONE" and spec.dtype == torch.uint8  # raw bytes: no dtype, no fp8
    if size is None and mode in compat.PLAIN_QUANT_MODES and not is_bytes:
        return None
    layer = compat.attention_layer(vllm_config, name)
    backend = compat.backend_of(layer)
    if compat.release.serves_packed:
        is_indexer = backend == "DEEPSEEK_V32_INDEXER" and is_bytes and size is None
        if is_indexer and not compat.shuffles_indexers():
            scales, rest = divmod(spec.head_size, _INDEXER_BLOCK + _SCALE_BYTES)
            if not rest:
                return {
                    "head_size": scales * _INDEXER_BLOCK,
                    "head_size_v": scales * _SCALE_BYTES,
                    "dtype": compat.fp8_dtype(),
                    "layout": INDEXER_LAYOUT,
                }
        if size is not None and size == _LATENT_BYTES.get(getattr(spec, "cache_dtype_str", "")):
            dtype = compat.fp8_dtype()
            return {"use_mla": True, "head_size": size, "head_size_v": 0, "dtype": dtype}
        if size is not None and mode.is_per_token_head and backend == "TRITON_ATTN":
            compat.make_scales(layer, tensor)
            dtype = compat.cache_dtype(vllm_config, spec)
            return {"head_size": size // 2, "head_size_v": size - size // 2, "dtype": dtype}
    raise ConfigError(
        f"KV cache of {name}: {backend} with kv_quant_mode={mode.name}, state_content_bytes={size} "
        f"and head_size={spec.head_size} packs its values in a way that this adapter does not "
        "know; it serves auto and fp8, and with vLLM 0.32 or later fp8_ds_mla, nvfp4_ds_mla, the "
        "indexers of DeepSeek-V3.2 and TRITON_ATTN's scales per token and head"
    )


def _num_kv_heads(vllm_config: Any, name: str, on_this_rank: int, projection: Any) -> int:
    """Number of KV heads of a layer over all ranks.

    If a rank has one head, the head may be one of as many heads as ranks, or a replica of a
    neighbour's head. The model's config has a single number for layers that may differ. The
    projection that makes the layer's K and V therefore gives the number.

    Args:
        vllm_config: the engine's config.
        name: the layer's name.
        on_this_rank: number of the layer's KV heads on this rank.
        projection: the projection that makes the layer's K and V, if known; see
            :func:`~kvferry.integrations.vllm.compat.projections.qkv_projections`.

    Raises:
        ConfigError: neither the number on this rank nor a projection decides the total; or each
            rank holds all of several heads.
    """
    tp = int(vllm_config.parallel_config.tensor_parallel_size)
    total = None if projection is None else total_kv_heads(projection, on_this_rank)
    if total is None and (tp == 1 or on_this_rank > 1):
        total = on_this_rank * tp
    if total is None:
        raise ConfigError(
            f"KV cache of {name}: 1 KV head on this rank of {tp}, and no QKV projection of this "
            "layer alone was found that says how many heads all ranks have together; take "
            "tensor_parallel_size 1, and report the model"
        )
    if max(1, total // tp) != on_this_rank:
        raise ConfigError(
            f"KV cache of {name}: {on_this_rank} KV heads on this rank, but its QKV projection has "
            f"{total} over {tp} ranks; this adapter serves layers whose ranks share their heads"
        )
    return total


def _packing(
    vllm_config: Any,
    name: str,
    spec: Any,
    block_size: int,
    packings: dict[tuple[Any, ...], Packing],
) -> Packing:
    """Order of the cells in a layer's blocks; CPU attention is probed once per kind of layer."""
    layer = compat.attention_layer(vllm_config, name)
    if compat.backend_of(layer) != "CPU_ATTN":
        return Packing("BHNC")
    isa = compat.release.isa_of(layer)
    kind = (isa, spec.dtype, block_size, spec.head_size)
    if kind not in packings:
        cache_dtype = vllm_config.cache_config.cache_dtype
        packings[kind] = probe_packing(
            lambda k, v: compat.write_cpu_block(isa, k, v, cache_dtype),
            vllm_config.model_config.dtype,
            block_size,
            spec.head_size,
            name=f"CPU_ATTN {isa}",
        )
    return packings[kind]


def cache_groups(
    stages: Sequence[Sequence[LayerCache | StateCache]], vllm_config: Any
) -> tuple[CacheGroup, ...]:
    """The kvferry groups, from the caches of all stages' layers; equal on every rank.

    Raises:
        ConfigError: the parallel shape does not fit the heads.
    """
    parallel = vllm_config.parallel_config
    shape = ParallelShape(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        interleave_size=parallel.cp_kv_cache_interleave_size,
    )
    order = compat.layer_order([layer.name for stage in stages for layer in stage])
    groups: dict[LayerCache | StateCache, list[list[str]]]
    groups = defaultdict(lambda: [[] for _ in stages])
    for stage, layers in enumerate(stages):
        for layer in layers:
            groups[msgspec.structs.replace(layer, name="")][stage].append(layer.name)
    try:
        return tuple(
            _cache_group(kind, names, order, shape)
            for kind, names in sorted(groups.items(), key=lambda item: order[_first(item[1])])
        )
    except ValueError as error:
        raise ConfigError(f"KV cache: {error}") from error


def _first(names: Sequence[Sequence[str]]) -> str:
    return next(name for stage in names for name in stage)


def _cache_group(
    kind: LayerCache | StateCache,
    stages: Sequence[Sequence[str]],
    order: Mapping[str, int],
    shape: ParallelShape,
) -> CacheGroup:
    whole = dataclasses.replace(shape, dcp=1, interleave_size=1)
    names = [name for stage in stages for name in sorted(stage, key=order.__getitem__)]
    split, indices = [len(stage) for stage in stages], [order[name] for name in names]
    if isinstance(kind, StateCache):
        states = state_geometry(kind, tuple(names), whole, layer_split=split, layer_indices=indices)
        return CacheGroup(table=kind.table, split=1, geometry=states)
    geometry = EngineGeometry(
        num_layers=len(names),
        num_kv_heads=kind.num_kv_heads,
        head_size=kind.head_size,
        head_size_v=None if kind.use_mla else kind.head_size_v,
        dtype=kind.dtype,
        block_size=kind.block_size,
        layout=kind.layout,
        packing=kind.packing,
        parallel=shape if kind.dcp_sharded else whole,
        use_mla=kind.use_mla,
        layer_split=split,
        layer_names=names,
        layer_indices=indices,
        sliding_window=kind.sliding_window,
        attention_chunk_size=kind.attention_chunk_size,
    )
    return CacheGroup(table=kind.table, split=kind.split, geometry=geometry)


def num_blocks_of(groups: Sequence[CacheGroup], num_blocks: int) -> int:
    """Number of kvferry blocks in a vLLM pool, for the group with the smallest split.

    A recurrent layer's block is never split, and a request has few such blocks.
    """
    splits = [group.split for group in groups if not group.geometry.is_recurrent]
    return num_blocks * min(splits, default=1)


def tensors_of(
    groups: Sequence[CacheGroup], kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """This rank's tensors, in the shapes of kvferry's layouts.

    Raises:
        ConfigError: the tokens and elements of a tensor cannot be viewed as one dim.
    """
    found: dict[str, torch.Tensor] = {}
    for group in groups:
        if isinstance(group.geometry, StateGeometry):
            found |= state_tensors(group.geometry, kv_caches)
            continue
        flat = bool(group.geometry.layout.inner_orders)
        for name in group.geometry.layer_names or ():
            if name in kv_caches:
                found[name] = _flattened(name, kv_caches[name]) if flat else kv_caches[name]
    return found


def _flattened(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Views [B, H, N, C] as [B, H, N * C]."""
    try:
        return tensor.view(*tensor.shape[:2], -1)
    except RuntimeError as error:
        raise ConfigError(
            f"KV cache of {name}: shape {tuple(tensor.shape)} with strides {tensor.stride()}; CPU "
            "attention keeps the tokens of a head together"
        ) from error
