"""Digests of the weights behind each KV head of a rank of vLLM's.

The rows that make K and V lie in the projection that the layer's attention module owns
(``compat/projections.py``); ``topology/heads.py`` says what the digests prove.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.caches import INDEXER_LAYOUT, CacheGroup
from kvferry.integrations.vllm.compat.projections import kv_weights
from kvferry.integrations.vllm.config import WeightsCheck
from kvferry.integrations.vllm.fingerprint import are_dummy
from kvferry.topology import EngineGeometry
from kvferry.topology.heads import LATENT, HeadDigests, digest_heads, form_of

logger = logging.getLogger(__name__)


def head_digests(
    vllm_config: Any,
    projections: Mapping[str, Any],
    groups: Sequence[CacheGroup],
    rank: int,
    exempt: str,
) -> HeadDigests:
    """Digests of the weights that a rank has loaded, of each of its attention layers.

    Args:
        vllm_config: of the rank's worker.
        projections: of the rank's layers, see
            :func:`~kvferry.integrations.vllm.compat.projections.qkv_projections`.
        groups: the engine's groups.
        rank: the rank.
        exempt: why no weights are digested at all, see :func:`why_exempt`.
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
    """Why the weights that an engine starts with are not digested; empty if they are.

    vLLM draws dummy weights on each rank for itself. With ``config`` nobody watches whether the
    weights change, and digests of older ones would refuse a right pair.
    """
    if are_dummy(vllm_config.load_config.load_format):
        return "weights are dummies, and each rank drew its own"
    return "weights_check is config" if check == "config" else ""


def _digest(projection: Any, attention: Any, num_heads: int) -> tuple[str, bytes]:
    """Form and digests of one layer's heads; or why there are none."""
    if projection is None:
        return "no QKV projection of the layer was found", b""
    try:
        found = kv_weights(projection, attention)
        if isinstance(found, str):
            return found, b""
        k_HDC, v_HDC = found
        if len(k_HDC) != num_heads:
            return f"the QKV projection makes {len(k_HDC)} heads, the cache has {num_heads}", b""
        form = form_of(str(projection.weight.dtype).removeprefix("torch."))
        return form, digest_heads(k_HDC.numpy(), v_HDC.numpy(), form)
    except Exception as error:
        # Kernels of any platform are asked here. A proof that cannot be made is no reason to end.
        logger.exception("the weights behind KV heads could not be digested")
        return f"weights could not be digested ({type(error).__name__})", b""
