"""Digests of the weights behind each KV head of a vLLM rank.

The rows that make K and V lie in the projection of the layer's attention module
(``compat/projections.py``); ``topology/heads.py`` explains the proof that the digests give.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.integrations.checkpoint import WeightsCheck
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.caches import INDEXER_LAYOUT, CacheGroup
from kvferry.integrations.vllm.compat.projections import kv_weights
from kvferry.integrations.vllm.fingerprint import are_dummy
from kvferry.topology import EngineGeometry
from kvferry.topology.heads import LATENT, HeadDigests, digest_heads

logger = logging.getLogger(__name__)


def head_digests(
    vllm_config: Any,
    projections: Mapping[str, Any],
    groups: Sequence[CacheGroup],
    rank: int,
    exempt: str,
) -> HeadDigests:
    """Digests of the loaded weights of a rank, for each attention layer.

    Args:
        vllm_config: the config of the rank's worker.
        projections: the projections of the rank's layers, see
            :func:`~kvferry.integrations.vllm.compat.projections.qkv_projections`.
        groups: the engine's groups.
        rank: the rank.
        exempt: the reason why no weights are digested at all, see :func:`why_exempt`.
    """
    told: dict[int, tuple[str, bytes]] = {}
    for group in groups:
        geometry = group.geometry
        if not isinstance(geometry, EngineGeometry):
            continue
        for layer in geometry.layers(rank):
            if geometry.use_mla or str(geometry.layout) == INDEXER_LAYOUT:
                told[layer] = LATENT, b""
            elif exempt:
                told[layer] = exempt, b""
            else:
                name = geometry.layer_name(layer)
                attention = compat.attention_layer(vllm_config, name)
                told[layer] = _digest(projections.get(name), attention, len(geometry.heads(rank)))
    return HeadDigests.of(told)


def why_exempt(vllm_config: Any, check: WeightsCheck) -> str:
    """Reason why the weights at an engine's start are not digested; empty if they are digested.

    vLLM draws dummy weights on each rank separately. With ``config``, kvferry does not watch
    whether the weights change, and digests of older weights would refuse a right pair.
    """
    if are_dummy(vllm_config.load_config.load_format):
        return "weights are dummies, and each rank drew its own"
    return "weights_check is config" if check == "config" else ""


def _digest(projection: Any, attention: Any, num_heads: int) -> tuple[str, bytes]:
    """Form and digests of one layer's heads; or the reason why there are no digests."""
    if projection is None:
        return "no QKV projection of the layer was found", b""
    try:
        found = kv_weights(projection, attention)
        if isinstance(found, str):
            return found, b""
        k_HDC, v_HDC = found
        if len(k_HDC) != num_heads:
            return f"the QKV projection makes {len(k_HDC)} heads, the cache has {num_heads}", b""
        return digest_heads(k_HDC.numpy(), v_HDC.numpy(), projection.weight.dtype)
    except Exception as error:
        # This code calls kernels of any platform. A missing proof is no reason to end the engine.
        logger.exception("the weights behind KV heads could not be digested")
        return f"weights could not be digested ({type(error).__name__})", b""
