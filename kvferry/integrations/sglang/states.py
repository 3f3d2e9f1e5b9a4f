"""The states of an SGLang rank's recurrent layers: their geometry, and their tensors.

SGLang's pool of states has one slot per request. The slot holds the states after the last token
that was computed, so SGLang tells a backend of the slot with the last chunk of a prompt. SGLang
never gives slot 0 to a request, and writes padding there, so slot 0 is kvferry's null block::

    conv[0]     [layers, slots, channels of the rank, inputs]; KDA: [..., inputs, channels]
    temporal    [layers, slots, heads of the rank, rows, columns]

The model says how TP divides a convolution: the pool tells the sections of gated delta nets and of
KDA, and the mixers of a Mamba2 model have them::

    Mamba2                 conv | x: by heads | B: by groups | C: by groups |   ssm   | by heads |
    gated delta net, KDA   conv | q | k | v: by heads |                         delta | by heads |

The copies of states that SGLang keeps for its prefix cache lie in slots of their own and never
move.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from kvferry.errors import ConfigError
from kvferry.layouts import Layout
from kvferry.topology import (
    ParallelShape,
    StateGeometry,
    gated_delta_net_states,
    mamba2_states,
)
from kvferry.topology.states import StatePart

_SERVED = "gated delta nets, KDA and Mamba2"


def state_geometry(
    pool: Any, model: Any, stages: Sequence[Sequence[int]], parallel: ParallelShape, longest: int
) -> StateGeometry:
    """The group of the recurrent layers.

    Args:
        pool: SGLang's pool of states.
        model: the rank's model.
        stages: index of each recurrent layer of each stage, ascending.
        parallel: the parallel shape of the engine.
        longest: number of tokens of the longest request, for which a slot is one block.

    Raises:
        ConfigError: the pool keeps states of another kind, or more than states.
    """
    _check_served(pool)
    states = _states(pool, model, parallel.tp)
    order = "DH" if pool.conv_slice_axis else "HD"
    geometry = StateGeometry(
        num_layers=sum(map(len, stages)),
        layer_split=tuple(map(len, stages)),
        layer_indices=tuple(layer for stage in stages for layer in stage),
        states=states,
        block_size=longest,
        layout=Layout.parse(f"B({states[0].name}={order},{states[1].name}=HD)"),
        parallel=parallel,
    )
    shapes = [each.shape[2:] for each in (pool.mamba_cache.conv[0], pool.mamba_cache.temporal)]
    for state, theirs, ours in geometry.shape_mismatches(shapes):
        raise ConfigError(
            f"states of recurrent layers: {state} has the shape {theirs} on each of {parallel.tp} "
            f"ranks, where this backend expects {ours}; take another --tp-size"
        )
    return geometry


def state_tensors(
    geometry: StateGeometry, pool: Any, here: Sequence[int]
) -> Iterator[tuple[str, Any]]:
    """Name → states of a layer, in the shape of the geometry, for each tensor of the pool.

    Args:
        geometry: the group of the recurrent layers.
        pool: SGLang's pool of states.
        here: index of each recurrent layer of this rank, ascending.
    """
    cache = pool.mamba_cache
    for part, layers in zip(geometry.states, (cache.conv[0], cache.temporal), strict=True):
        for layer, tensor in zip(here, layers, strict=True):
            yield f"{geometry.layer_name(layer)}.{part.name}", tensor.view(*tensor.shape[:2], -1)


def _check_served(pool: Any) -> None:
    for what, remedy in _unserved(pool):
        raise ConfigError(f"states of recurrent layers: this pool has {what}; {remedy}")


def _unserved(pool: Any) -> Iterator[tuple[str, str]]:
    """What a pool has that is not served, and the remedy."""
    if type(pool).__name__ != "MambaPool":
        yield f"the class {type(pool).__name__}", "leave --enable-unified-memory out"
    cache = pool.mamba_cache
    if type(cache).__name__ != "State":
        yield "states of drafts beside them", "leave --speculative-algorithm out"
    if pool.enable_linear_replayssm:
        yield "rings of inputs beside them", "leave --enable-linear-replayssm out"
    if pool._slot_siblings:  # noqa: SLF001 (there is no public way)
        yield "states of other kinds beside them", "take a backend of SGLang for this model"
    shapes = [tuple(each.shape[2:]) for each in (*cache.conv, cache.temporal)]
    if len(shapes) != 2 or not all(map(math.prod, shapes)):
        remedy = f"this backend serves {_SERVED}, with a convolution and a matrix per head"
        yield f"states of the shapes {shapes}", remedy


def _states(pool: Any, model: Any, tp: int) -> tuple[StatePart, ...]:
    """The states of a layer, over all ranks.

    Raises:
        ConfigError: nothing says how TP divides a convolution.
    """
    conv, temporal = pool.mamba_cache.conv[0], pool.mamba_cache.temporal
    _, _, heads, rows, columns = temporal.shape
    # Beside its channels, a convolution has its inputs.
    kernel = 1 + int(conv.shape[2 if pool.conv_slice_axis else 3])
    sections = pool.conv_shard_groups
    if sections is not None and [*sections] == [sections[0], sections[0], heads * tp * rows]:
        return gated_delta_net_states(
            num_heads=heads * tp,
            head_size=rows,
            key_head_size=columns,
            key_size=sections[0],
            conv_kernel=kernel,
            dtype=conv.dtype,
            delta_dtype=temporal.dtype,
            # SGLang shapes the matrix for GPUs; its kernels for CPUs read the other order.
            order="kv" if temporal.device.type == "cpu" else "vk",
        )
    mixers = [each for each in model.modules() if type(each).__name__ == "MambaMixer2"]
    if sections is None and mixers:
        return mamba2_states(
            num_heads=mixers[0].num_heads,
            head_size=mixers[0].head_dim,
            state_size=mixers[0].ssm_state_size,
            # The mixer's own number counts a group once per rank that holds it.
            num_groups=mixers[0].norm.n_groups,
            conv_kernel=kernel,
            dtype=conv.dtype,
            ssm_dtype=temporal.dtype,
        )
    raise ConfigError(
        f"states of recurrent layers: neither SGLang's pool nor the {type(model).__name__} says "
        f"how TP divides the {tuple(conv.shape[2:])} of a convolution; this backend serves "
        f"{_SERVED}"
    )
