"""vLLM's recurrent layers as kvferry states: the states of each layer, and their places in pages.

vLLM hands over a recurrent layer's cache as pages of bytes, one per block and perhaps padded: the
convolution's state, then the recurrent state. The channels on a rank follow from vLLM's shapes for
one rank::

    Mamba2             conv | x: by heads | B: by groups | C: by groups |   ssm   | by heads |
    gated delta net    conv | q | k | v: by heads |                         delta | by heads |

The block of a request's table that holds the state is the same in both of vLLM's cache modes: the
block of the last computed token. In the mode ``none``, a block is as long as the longest request.
In the mode ``align``, a block is as long as an attention block, and earlier blocks are null blocks
or states kept by the prefix cache.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from kvferry.errors import ConfigError
from kvferry.integrations.vllm import compat
from kvferry.layouts import Layout
from kvferry.topology import (
    ParallelShape,
    StateGeometry,
    gated_delta_net_states,
    mamba2_states,
)
from kvferry.topology.states import StatePart

_SERVED = ("MAMBA2", "GDN_ATTN")
"""Kinds of recurrent layers whose channels are divided as the module docstring shows."""


class StateCache(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one recurrent layer, equal on every rank."""

    name: str
    table: int
    """Index of vLLM's KV cache group, and so of the block table."""
    states: tuple[StatePart, ...]
    """States of the layer, in the order of their places in a page."""
    block_size: int
    """Number of tokens per block of the table; a block holds one state."""
    layout: str


def state_cache(vllm_config: Any, name: str, table: int, spec: Any) -> StateCache:
    """The cache of a recurrent layer.

    Args:
        vllm_config: the engine's config.
        name: the layer's name.
        table: index of the layer's KV cache group.
        spec: the layer's ``MambaSpec``.

    Raises:
        ConfigError: the adapter does not serve the kind of layer, or a setting.
    """
    kind = compat.kind_of_states(spec)
    if not compat.release.serves_states:
        raise ConfigError(
            f"KV cache of {name}: it holds states; before 0.32 vLLM does not zero the rest of the "
            "blocks that a load fills in part, so take vLLM 0.32 or later"
        )
    if kind not in _SERVED or len(spec.shapes) != 2:
        raise ConfigError(
            f"KV cache of {name}: a recurrent layer of the kind {kind} with {len(spec.shapes)} "
            f"states; this adapter serves {' and '.join(_SERVED)} with two, so leave use_replayssm "
            "out"
        )
    if vllm_config.speculative_config is not None or spec.num_speculative_blocks:
        raise ConfigError(
            f"KV cache of {name}: it keeps states of drafts; this adapter moves the states of "
            "recurrent layers without speculative decoding only"
        )
    undivided = compat.undivided_state_shapes(vllm_config)
    states = _states(name, kind, spec.dtypes, undivided)
    conv_order = "HD" if compat.convolutions_have_channels_first() else "DH"
    found = StateCache(
        name=name,
        table=table,
        states=states,
        block_size=spec.block_size,
        layout=f"B({states[0].name}={conv_order},{states[1].name}=HD)",
    )
    tp = vllm_config.parallel_config.tensor_parallel_size
    geometry = state_geometry(found, (name,), ParallelShape(tp=tp))
    for state, theirs, ours in geometry.shape_mismatches(spec.shapes):
        raise ConfigError(
            f"KV cache of {name}: the state {state} has the shape {theirs} on each of {tp} ranks, "
            f"where this adapter expects {ours}; take another tensor_parallel_size"
        )
    return found


def _states(
    name: str, kind: str, dtypes: tuple[torch.dtype, ...], shapes: list[tuple[int, ...]]
) -> tuple[StatePart, ...]:
    """The states of a layer, from the states' shapes with one rank."""
    conv_shape, (num_heads, head_size, last_size) = shapes
    if compat.convolutions_have_channels_first():
        num_channels, num_inputs = conv_shape
    else:
        num_inputs, num_channels = conv_shape
    beside = num_channels - num_heads * head_size
    both = 2 * last_size if kind == "MAMBA2" else 2
    if beside <= 0 or beside % both:
        raise ConfigError(
            f"KV cache of {name}: a convolution of {num_channels} channels beside {num_heads} "
            f"heads of {head_size}; this adapter expects those of {kind}"
        )
    if kind == "MAMBA2":
        return mamba2_states(
            num_heads=num_heads,
            head_size=head_size,
            state_size=last_size,
            num_groups=beside // both,
            conv_kernel=num_inputs + 1,
            dtype=dtypes[0],
            ssm_dtype=dtypes[1],
        )
    return gated_delta_net_states(
        num_heads=num_heads,
        head_size=head_size,
        key_head_size=last_size,
        key_size=beside // both,
        conv_kernel=num_inputs + 1,
        dtype=dtypes[0],
        delta_dtype=dtypes[1],
        order=compat.delta_order(),
    )


def state_geometry(
    cache: StateCache, names: tuple[str, ...], shape: ParallelShape, **layers: Any
) -> StateGeometry:
    """The group of the layers whose caches differ from this cache only in their names.

    Args:
        cache: the cache of any of these layers.
        names: the names of all these layers.
        shape: the parallel shape of the engine, without context ranks.
        **layers: the places of the layers: ``layer_split`` and ``layer_indices``.
    """
    return StateGeometry(
        num_layers=len(names),
        layer_names=names,
        states=cache.states,
        block_size=cache.block_size,
        layout=Layout.parse(cache.layout),
        parallel=shape,
        **layers,
    )


def state_tensors(
    geometry: StateGeometry, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The states of this rank's layers, in the shapes of kvferry's layouts, within vLLM's pages.

    Args:
        geometry: the geometry of the group.
        kv_caches: layer name → pages, int8[blocks, 1, 1, bytes]; a rank has only the layers of its
            stage.
    """
    found = {}
    for name in geometry.layer_names or ():
        if name not in kv_caches:
            continue
        pages = kv_caches[name].squeeze(dim=(1, 2))
        start = 0
        for state in geometry.states:
            # Every rank's shape equals rank 0's: vLLM divides nothing unevenly.
            shape = geometry.cache_shape(0, len(pages), state.name)
            dtype: torch.dtype = getattr(torch, state.dtype)
            stop = start + math.prod(shape[1:]) * dtype.itemsize
            found[f"{name}.{state.name}"] = pages[:, start:stop].view(dtype).view(shape)
            start = stop
    return found
