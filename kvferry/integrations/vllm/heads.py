"""Digests of the weights behind each KV head of a rank of vLLM's.

The rows that make K and V lie in the projection that the layer's attention module owns; see
:func:`~kvferry.integrations.vllm.compat.qkv_projections`, and ``topology/heads.py`` for what the
digests prove.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.caches import INDEXER_LAYOUT, CacheGroup
from kvferry.topology import EngineGeometry
from kvferry.topology.heads import LATENT, HeadDigests, digest_heads, form_of


def head_digests(
    vllm_config: Any,
    models: Mapping[str, torch.nn.Module],
    groups: Sequence[CacheGroup],
    rank: int,
    *,
    are_dummy: bool,
) -> HeadDigests:
    """Digests of the weights that a rank has loaded, of each of its attention layers.

    Args:
        vllm_config: of the rank's worker.
        models: the rank's models, see :func:`~kvferry.integrations.vllm.compat.models_of`.
        groups: the engine's groups.
        rank: the rank.
        are_dummy: whether vLLM drew the weights: it draws each rank's own.
    """
    projections = compat.qkv_projections(vllm_config, models.values())
    told: dict[int, tuple[str, bytes]] = {}
    for group in groups:
        geometry = group.geometry
        if not isinstance(geometry, EngineGeometry):
            continue
        for layer in geometry.layers(rank):
            if geometry.use_mla or str(geometry.layout) == INDEXER_LAYOUT:
                told[layer] = LATENT, b""
            elif are_dummy:
                told[layer] = "weights are dummies, and each rank drew its own", b""
            else:
                name = geometry.layer_name(layer)
                attention = compat.attention_layer(vllm_config, name)
                told[layer] = _digest(projections.get(name), attention, len(geometry.heads(rank)))
    return HeadDigests.of(told)


def _digest(projection: Any, attention: Any, num_heads: int) -> tuple[str, bytes]:
    """Form and digests of one layer's heads; or why there are none."""
    if projection is None:
        return "no QKV projection of the layer alone was found", b""
    found = compat.kv_weights(projection, attention)
    if isinstance(found, str):
        return found, b""
    k_HDC, v_HDC = found
    if len(k_HDC) != num_heads:
        return f"the QKV projection makes {len(k_HDC)} heads, the cache has {num_heads}", b""
    try:
        form = form_of(str(projection.weight.dtype).removeprefix("torch."))
    except ValueError as error:
        return str(error), b""
    return form, digest_heads(k_HDC.numpy(), v_HDC.numpy(), form)
