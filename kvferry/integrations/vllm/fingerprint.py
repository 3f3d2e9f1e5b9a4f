"""The facts that two vLLM engines must agree on before they can exchange KV."""

from typing import Any

from kvferry.integrations.checkpoint import (
    WeightsCheck,
    checkpoint_digests,
    config_digest,
    dtype_text,
    rope_text,
)
from kvferry.integrations.vllm.caches import CacheGroup
from kvferry.topology import EngineGeometry
from kvferry.topology.description import ModelFingerprint


def fingerprint(vllm_config: Any, groups: tuple[CacheGroup, ...]) -> ModelFingerprint:
    """The fingerprint of an engine's model, without the weights.

    Args:
        vllm_config: the engine's config, from a process with the built model.
        groups: the engine's KV cache.
    """
    model = vllm_config.model_config
    attention = [each.geometry for each in groups if isinstance(each.geometry, EngineGeometry)]
    return ModelFingerprint(
        name=str(model.model),
        architecture=", ".join(model.architectures),
        num_layers=int(model.get_total_num_hidden_layers()),
        num_kv_heads=attention[0].num_kv_heads if attention else 0,
        head_size=attention[0].head_size if attention else 0,
        dtype=dtype_text(each.dtype for each in attention),
        rope=rope_text(model.hf_text_config),
        config_digest=config_digest(model, _drafting(vllm_config.speculative_config)),
        weights_digest="",
    )


def _drafting(speculative: Any) -> dict[str, Any] | None:
    """The method that drafts tokens, and its model; ``None`` if no tokens are drafted."""
    if not speculative:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    return {"method": speculative.method, "model": draft and str(draft.model)}


def are_dummy(load_format: object) -> bool:
    """Whether vLLM draws weights instead of loading them."""
    return str(getattr(load_format, "value", load_format)) == "dummy"


def named_weights(model_config: Any, load_format: object, check: WeightsCheck) -> dict[str, str]:
    """Name in the checkpoint → digest of each tensor, or a substitute if there are no files.

    Raises:
        ConfigError: see :func:`~kvferry.integrations.checkpoint.checkpoint_digests`.
    """
    if are_dummy(load_format):
        return {"dummy weights of seed": str(model_config.seed)}
    return checkpoint_digests(str(model_config.model), model_config.revision, check)
