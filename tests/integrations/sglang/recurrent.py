"""Pools of hybrid models of SGLang's classes, and the states of their recurrent layers.

Which channels of a convolution a rank has is asked of the function with which SGLang loads the
convolution's weights: a state has a channel per channel of the weights.
"""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool
from sglang.srt.runtime_context import get_parallel

DTYPES = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
IN_FLOAT32 = " in float32"
"""Ending of a kind whose convolutions are kept in float32."""
SLOTS, HEADS, SIZE, STATE, KERNEL = 9, 12, 4, 6, 4
"""Slots of a pool; heads, elements per head, elements of a state per channel, inputs."""
ATTENDING, RECURRENT = (1, 4), (0, 2, 3)
"""Layers of each sort."""
GROUPS = {"mamba2": 6, "mamba2, one group": 1}
"""Groups of B and C."""
KINDS = (*GROUPS, "gdn", "kda")
_KEYS = 6
"""Heads of queries and keys of a gated delta net."""


def cache_params(kind: str, tp: int, layers: tuple[int, ...] = RECURRENT) -> Any:
    """What a config of SGLang says of the states on one of ``tp`` ranks."""
    dtypes = DTYPES
    if kind.endswith(IN_FLOAT32):
        kind = kind.removesuffix(IN_FLOAT32)
        dtypes = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    common: dict[str, Any] = {"tp_world_size": tp, "num_heads": HEADS, "head_dim": SIZE}
    if kind == "kda":
        shape = KimiLinearStateShape.create(**common, conv_kernel_size=KERNEL)
        return KimiLinearCacheParams(shape=shape, layers=list(layers), dtype=dtypes)
    common |= {"intermediate_size": HEADS * SIZE, "state_size": STATE, "conv_kernel": KERNEL}
    if kind == "gdn":
        keys = _KEYS * STATE
        common |= {"n_groups": _KEYS, "conv_shard_groups": [keys, keys, HEADS * SIZE]}
    else:
        common |= {"n_groups": GROUPS[kind]}
    shape = Mamba2StateShape.create(**common)
    return Mamba2CacheParams(shape=shape, layers=list(layers), dtype=dtypes)


def model_of(kind: str, tp: int) -> Any:
    """The model of a rank, as far as it says how its states are divided: a mixer of Mamba2."""
    if kind not in GROUPS:
        return torch.nn.Module()
    with get_parallel().override(tp_size=tp, tp_rank=0, dp_size=1, attn_dp_size=1):
        mixer = mamba.MambaMixer2(
            cache_params(kind, tp), 16, use_conv_bias=True, use_bias=False, n_groups=GROUPS[kind]
        )
    return torch.nn.Sequential(mixer)


def pool_of(
    kind: str,
    tp: int = 1,
    *,
    page_size: int = 4,
    pages: int = 20,
    heads: int = 12,
    attending: tuple[int, ...] = ATTENDING,
    recurrent: tuple[int, ...] = RECURRENT,
    **more: Any,
) -> HybridLinearKVPool:
    """The pools of a rank."""
    states = MambaPool(
        size=SLOTS - 1,
        spec_state_size=SLOTS - 1,
        cache_params=cache_params(kind, tp, recurrent),
        mamba_layer_ids=list(recurrent),
        device="cpu",
        **more,
    )
    return HybridLinearKVPool(
        size=(pages - 1) * page_size,
        dtype=torch.float32,
        page_size=page_size,
        head_num=heads // tp,
        head_dim=8,
        full_attention_layer_ids=list(attending),
        device="cpu",
        mamba_pool=states,
    )


def sections(kind: str) -> list[tuple[int, bool]]:
    """Channels of each section of a convolution, and whether every rank has them all."""
    values = HEADS * SIZE
    if kind == "kda":
        return [(values, False)] * 3
    if kind == "gdn":
        return [(_KEYS * STATE, False)] * 2 + [(values, False)]
    return [(values, False)] + [(GROUPS[kind] * STATE, GROUPS[kind] == 1)] * 2


def whole_states(kind: str, layers: int = len(RECURRENT)) -> tuple[Any, Any]:
    """Random states of a request over all ranks: a convolution's and a matrix per layer."""
    channels = sum(number for number, _ in sections(kind))
    columns = SIZE if kind == "kda" else STATE
    return (
        torch.rand(layers, channels, KERNEL - 1).to(DTYPES.conv),
        torch.rand(layers, HEADS, SIZE, columns, dtype=DTYPES.temporal),
    )


def shard_of(kind: str, whole: tuple[Any, Any], tp: int, rank: int) -> tuple[Any, Any]:
    """A rank's part of the states, as SGLang divides weights."""
    conv, temporal = whole
    specs = [
        (number * tp, number * (tp - 1), True) if is_whole else (number, 0, False)
        for number, is_whole in sections(kind)
    ]
    loader = mamba.mamba_v2_sharded_weight_loader(specs, tp, rank)
    own = sum(full // tp for full, _, _ in specs)
    found = torch.empty(conv.shape[0], own, conv.shape[2], dtype=conv.dtype)
    for layer, loaded in zip(found, conv, strict=True):
        loader(SimpleNamespace(data=layer), loaded)
    heads = HEADS // tp
    return (
        found.transpose(1, 2) if kind == "kda" else found,
        temporal[:, rank * heads : (rank + 1) * heads],
    )


def write(pool: Any, slot: int, states: tuple[Any, Any]) -> None:
    """Writes the states of a request into a slot of a pool of states."""
    pool.mamba_cache.conv[0][:, slot], pool.mamba_cache.temporal[:, slot] = states


def read(pool: Any, slot: int | list[int]) -> tuple[Any, Any]:
    """The states in a slot of a pool of states, or in several."""
    return pool.mamba_cache.conv[0][:, slot], pool.mamba_cache.temporal[:, slot]


def equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether two states are the same bytes."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
