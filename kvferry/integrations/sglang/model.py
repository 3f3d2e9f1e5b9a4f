"""The model that an SGLang rank serves: its fingerprint, and digests of its KV heads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvferry.integrations.checkpoint import (
    DIGEST_CHARS,
    WeightsCheck,
    checkpoint_digests,
    config_digest,
    digest_of,
    dtype_text,
    rope_text,
)
from kvferry.integrations.sglang.caches import PoolGroup
from kvferry.topology import EngineGeometry
from kvferry.topology.description import ModelFingerprint
from kvferry.topology.group import GroupGeometry
from kvferry.topology.heads import LATENT, HeadDigests, digest_heads, probed_columns


def fingerprint(
    model_config: Any, groups: Sequence[GroupGeometry], weights: str
) -> ModelFingerprint:
    """The fingerprint of an engine's model.

    Args:
        model_config: SGLang's config of the model.
        groups: the engine's groups.
        weights: digest of the weights, see :func:`weights_digest`.
    """
    attention = [group for group in groups if isinstance(group, EngineGeometry)]
    return ModelFingerprint(
        name=str(model_config.model_path),
        architecture=", ".join(model_config.hf_config.architectures),
        num_layers=int(model_config.num_hidden_layers),
        num_kv_heads=attention[0].num_kv_heads,
        head_size=attention[0].head_size,
        dtype=dtype_text(each.dtype for each in attention),
        rope=rope_text(model_config.hf_text_config),
        config_digest=config_digest(model_config),
        weights_digest=weights,
    )


def weights_digest(model_config: Any, load_format: str, check: WeightsCheck) -> str:
    """Digest of the checkpoint, by the names of its tensors.

    Raises:
        ConfigError: see :func:`~kvferry.integrations.checkpoint.checkpoint_digests`.
    """
    name = str(model_config.model_path)
    if str(load_format) == "dummy":
        named = {"dummy weights of": name}
    else:
        named = checkpoint_digests(name, model_config.revision, check)
    return digest_of(named)[:DIGEST_CHARS]


def head_digests(model: Any, groups: Sequence[PoolGroup], rank: int) -> HeadDigests:
    """Digests of the loaded weights behind each KV head of a rank.

    Args:
        model: the rank's model.
        groups: the engine's groups.
        rank: the rank.
    """
    projections = dict(_projections(model))
    told: dict[int, tuple[str, bytes]] = {}
    for group in groups:
        geometry = group.geometry
        if not isinstance(geometry, EngineGeometry):
            continue
        for layer, theirs in zip(geometry.layers(rank), group.layers, strict=True):
            if geometry.use_mla:
                told[layer] = LATENT, b""
            else:
                told[layer] = _digest(projections, theirs, len(geometry.heads(rank)))
    return HeadDigests.of(told)


def _projections(model: Any) -> Iterator[tuple[int, Any]]:
    """Layer of the model → the projection that makes its K and V: the only one beside the layer's
    attention.
    """
    from sglang.srt.layers.linear import QKVParallelLinear
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        # With LoRA, SGLang puts a layer around each projection.
        children = [getattr(each, "base_layer", each) for each in module.children()]
        found = [each for each in children if isinstance(each, QKVParallelLinear)]
        for child in children:
            if isinstance(child, RadixAttention) and len(found) == 1:
                yield child.layer_id, found[0]


def _digest(projections: Mapping[int, Any], layer: int, num_heads: int) -> tuple[str, bytes]:
    """Form and digests of the heads of a layer; or the reason why there are no digests.

    The rows of a projection::

        | Q: num_heads * head_size | K: num_kv_heads * head_size | V: num_kv_heads * v_head_size |
    """
    projection = projections.get(layer)
    if projection is None:
        return "no QKV projection of the layer was found", b""
    method = type(projection.quant_method).__name__
    if method != "UnquantizedLinearMethod":
        return f"weights are quantised ({method})", b""
    heads, size, size_v = projection.num_kv_heads, projection.head_size, projection.v_head_size
    first = projection.num_heads * size
    middle, end = first + heads * size, first + heads * (size + size_v)
    weight_RC = projection.weight
    if tuple(weight_RC.shape) != (end, projection.hidden_size):
        return "weights lie in a kernel's own memory", b""
    if heads != num_heads:
        return f"the QKV projection makes {heads} heads, the cache has {num_heads}", b""
    columns = probed_columns(projection.hidden_size)
    rows_RC = weight_RC.detach()[:, columns].float().cpu()
    k, v = rows_RC[first:middle], rows_RC[middle:end]
    k_HDC, v_HDC = k.view(heads, size, -1), v.view(heads, size_v, -1)
    return digest_heads(k_HDC.numpy(), v_HDC.numpy(), weight_RC.dtype)
