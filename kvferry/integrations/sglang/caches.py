"""The KV caches of an SGLang rank: their geometries, and their tensors in the form of kvferry.

A pool of SGLang keeps slots of single tokens; page ``p`` of ``page_size`` slots begins at slot
``p * page_size``. SGLang never gives page 0 to a request, and writes padding there, so page 0 is
kvferry's null block. K and V of a layer lie in two allocations::

    k_buffer[layer]   [slots, heads of the rank, head size]
    v_buffer[layer]   [slots, heads of the rank, head size of v]

A latent (MLA) has one allocation per layer, ``kv_buffer[layer]``: ``[slots, 1, latent size]``. The
states of recurrent layers lie in a pool of their own:
:mod:`kvferry.integrations.sglang.states`.

Pools are looked at by the name of their class: a subclass may keep its cells in another order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from kvferry.errors import ConfigError
from kvferry.integrations.sglang.states import state_geometry, state_tensors
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.group import GroupGeometry

SERVED: Mapping[str, tuple[str, ...]] = {
    "MHATokenToKVPool": (),
    "MLATokenToKVPool": (),
    "SWAKVPool": ("swa",),
    "HybridLinearKVPool": ("mamba",),
}
"""Class of pools whose cells kvferry can describe → the kinds of states beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGroup:
    """A KV cache group, and where the pages of a request in this group come from."""

    geometry: GroupGeometry
    state: int | None = None
    """Index of SGLang's kind of state whose page indices are those of this group; ``None`` for the
    pages of the KV cache."""
    layers: tuple[int, ...]
    """SGLang's index of each layer of this rank, in the order of the geometry."""
    tensors: Mapping[str, Any]
    """Name → tensor of this rank, in the shape of the geometry."""

    @property
    def num_blocks(self) -> int:
        """Number of pages of the group, the null page included; 0 without a layer of the group on
        this rank.
        """
        return max((int(each.shape[0]) for each in self.tensors.values()), default=0)

    def table(self, pages: Sequence[int], num_tokens: int, first_token: int = 0) -> list[int]:
        """The block table of a request, from SGLang's page indices.

        Args:
            pages: pages of the request from ``first_token`` on, or, for a state with a window, the
                last pages of the request.
            num_tokens: number of tokens of the request.
            first_token: first token of the first page in ``pages``; a multiple of the page size.
        """
        size = self.geometry.block_size
        missing = first_token // size
        if self.state is not None:
            missing = -(-num_tokens // size) - len(pages)
        return [0] * missing + [int(page) for page in pages]


Layers: TypeAlias = list[int]
"""Indices in the model of some layers, ascending."""


def cache_groups(
    pool: Any,
    state_types: Sequence[str],
    parallel: ParallelShape,
    total_heads: int,
    *,
    window: int,
    model: Any,
    longest: int,
    gather: Callable[[Layers], Sequence[Layers]],
) -> tuple[PoolGroup, ...]:
    """The KV cache groups of this rank.

    Args:
        pool: SGLang's pool of KV slots.
        state_types: names of SGLang's kinds of state that travel beside the KV cache.
        parallel: the parallel shape of the engine.
        total_heads: number of KV heads of the model.
        window: number of tokens to which a layer of a windowed pool attends, itself excluded.
        model: the rank's model, which is asked about its recurrent layers.
        longest: number of tokens of the longest request.
        gather: returns the layers of all pipeline stages, first stage first, from the layers of
            this stage. Every stage makes the same calls.

    Raises:
        ConfigError: a kind of pool or state is not served.
    """
    kind = type(pool).__name__
    unknown = [name for name in state_types if name not in SERVED.get(kind, ())]
    if kind not in SERVED or unknown:
        served = ", ".join(" with ".join((name, *kinds)) for name, kinds in SERVED.items())
        raise ConfigError(
            f"KV cache: {kind} with states {', '.join(unknown) or 'none'}; this backend serves "
            f"{served}; take a backend of SGLang for this model"
        )
    if kind == "HybridLinearKVPool":
        return _hybrid_groups(
            pool, state_types.index("mamba"), parallel, total_heads, model, longest, gather
        )
    if kind != "SWAKVPool":
        here = list(range(pool.start_layer, pool.start_layer + pool.layer_num))
        return (_group(pool, here, gather(here), parallel, total_heads),)
    layers: dict[bool, Layers] = {False: [], True: []}
    for layer, (_, is_windowed) in sorted(pool.layers_mapping.items()):
        layers[bool(is_windowed)].append(layer)
    stages = {is_windowed: gather(here) for is_windowed, here in layers.items()}
    if not any(stages[False]):
        raise ConfigError(
            "KV cache: every layer has a sliding window; this backend serves models in which some "
            "layer keeps all tokens"
        )
    groups = []
    for is_windowed, part in ((False, pool.full_kv_pool), (True, pool.swa_kv_pool)):
        if any(stages[is_windowed]):
            groups.append(
                _group(
                    part,
                    layers[is_windowed],
                    stages[is_windowed],
                    parallel,
                    total_heads,
                    state=state_types.index("swa") if is_windowed else None,
                    window=window + 1 if is_windowed else None,
                )
            )
    return tuple(groups)


def _hybrid_groups(
    pool: Any,
    state: int,
    parallel: ParallelShape,
    total_heads: int,
    model: Any,
    longest: int,
    gather: Callable[[Layers], Sequence[Layers]],
) -> tuple[PoolGroup, ...]:
    """The group of the layers that attend, and the group of the recurrent layers.

    A layer of kvferry does one of both. If a layer of the model does both (Falcon-H1), each layer
    counts as two, first the recurrent part; kvferry's adapter of vLLM counts in this way too.
    """
    attending = list(pool.full_attention_layer_id_mapping)
    recurrent = list(pool.mamba_pool.mamba_layer_ids)
    attending_stages, recurrent_stages = gather(attending), gather(recurrent)
    if not any(attending_stages):
        raise ConfigError(
            "KV cache: every layer is recurrent; this backend serves models in which some layer "
            "attends to all tokens"
        )
    do_both = set(chain(*attending_stages)) & set(chain(*recurrent_stages))
    count = 2 if do_both else 1
    stages = [[count * layer for layer in stage] for stage in recurrent_stages]
    here = [count * layer for layer in recurrent]
    states = state_geometry(pool.mamba_pool, model, stages, parallel, longest)
    return (
        _group(pool.full_kv_pool, attending, attending_stages, parallel, total_heads, count=count),
        PoolGroup(
            geometry=states,
            state=state,
            layers=tuple(recurrent),
            tensors=dict(state_tensors(states, pool.mamba_pool, here)),
        ),
    )


def _group(
    pool: Any,
    here: Layers,
    stages: Sequence[Layers],
    parallel: ParallelShape,
    total_heads: int,
    *,
    state: int | None = None,
    window: int | None = None,
    count: int = 1,
) -> PoolGroup:
    """The group of some layers that attend. A layer of SGLang counts as ``count`` layers, of which
    the last one attends.
    """
    kind = type(pool).__name__
    is_latent = kind == "MLATokenToKVPool"
    if kind not in ("MHATokenToKVPool", "MLATokenToKVPool"):
        raise ConfigError(
            f"KV cache: a part of it is a {kind}; this backend serves MHATokenToKVPool and "
            "MLATokenToKVPool"
        )
    if not is_latent and pool.kv_cache_layout != "nhd":
        raise ConfigError(
            f"KV cache: its slots are kept as {pool.kv_cache_layout}; this backend serves nhd, so "
            "leave SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT out"
        )
    scales = [name for name in ("k_scale_buffer", "kv_scale_buffer") if getattr(pool, name, None)]
    if scales or pool.store_dtype != pool.dtype:
        raise ConfigError(
            f"KV cache: it is kept as {pool.store_dtype} for {pool.dtype}, with scales of its own; "
            "take --kv-cache-dtype auto"
        )
    sizes: dict[str, Any]
    if is_latent:
        sizes = {"num_kv_heads": 1, "head_size": pool.kv_cache_dim, "use_mla": True}
    else:
        _check_heads(pool.head_num, total_heads, parallel.tp)
        sizes = {
            "num_kv_heads": total_heads,
            "head_size": pool.head_dim,
            "head_size_v": pool.v_head_dim,
            "separate_parts": True,
        }
    last = count - 1
    layers = [count * layer + last for stage in stages for layer in stage]
    geometry = EngineGeometry(
        num_layers=len(layers),
        dtype=pool.dtype,
        block_size=pool.page_size,
        layout="BNHD",
        parallel=parallel,
        layer_split=[len(stage) for stage in stages],
        layer_indices=layers,
        sliding_window=window,
        **sizes,
    )
    numbers = [count * layer + last for layer in here]
    tensors = dict(_tensors(geometry, pool, numbers, is_latent))
    return PoolGroup(geometry=geometry, state=state, layers=tuple(here), tensors=tensors)


def _check_heads(on_this_rank: int, total: int, tp: int) -> None:
    if max(1, total // tp) != on_this_rank:
        raise ConfigError(
            f"KV cache: {on_this_rank} KV heads on this rank of {tp}, but the model has {total}; "
            "this backend serves pools whose ranks share the heads"
        )


def _tensors(
    geometry: EngineGeometry, pool: Any, here: Layers, is_latent: bool
) -> Iterator[tuple[str, Any]]:
    """Name → pages of a layer, ``[pages, tokens, heads, elements]``, for each tensor of a pool."""
    size = geometry.block_size
    buffers = {"": pool.kv_buffer} if is_latent else {".k": pool.k_buffer, ".v": pool.v_buffer}
    for suffix, layers in buffers.items():
        for layer, buffer in zip(here, layers, strict=True):
            pages = len(buffer) // size
            shape = (pages, size, *buffer.shape[1:])
            yield geometry.layer_name(layer) + suffix, buffer[: pages * size].view(shape)
