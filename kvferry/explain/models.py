"""Shapes of models, for plans before anything is downloaded.

Of each model only what its KV cache depends on. That of well-known models is from the
``config.json`` of their repositories on Hugging Face, which ``source`` names; the shape of others
is read from theirs. The engine computes few architectures; a plan needs only the shape of the
cache, so configs of many more can be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvferry.cache.cache_shape import CacheShape, LayerHeads
from kvferry.errors import ModelError
from kvferry.explain.families import FAMILIES
from kvferry.explain.model_file import REMEDY, ModelFile, suspicious_keys
from kvferry.topology.states import mamba2_states
from kvferry.topology.tensors import dtype_name


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as far as a plan needs it."""

    name: str
    source: str
    """Where the shape is from: a repository on Hugging Face, or a file."""
    shape: CacheShape
    dtype: str = "bfloat16"
    """Dtype of the KV cache unless an engine says otherwise: that of the checkpoint."""


def every_nth_full(num_layers: int, nth: int, window: int) -> dict[int, int]:
    """Layer → window, where every ``nth`` layer attends to all tokens and the rest to a window.

    >>> every_nth_full(6, nth=3, window=1024)
    {0: 1024, 1: 1024, 3: 1024, 4: 1024}
    """
    return {layer: window for layer in range(num_layers) if (layer + 1) % nth}


def _heads(
    name: str,
    source: str,
    layers: int,
    heads: int,
    head_size: int,
    layer_windows: Mapping[int, int] = MappingProxyType({}),
) -> ModelInfo:
    shape = CacheShape.uniform(layers, LayerHeads(heads, head_size), layer_windows)
    return ModelInfo(name, source, shape)


def _latent(name: str, source: str, layers: int, kv_lora_rank: int, rope: int) -> ModelInfo:
    latent = LayerHeads(1, kv_lora_rank + rope, use_mla=True)
    return ModelInfo(name, source, CacheShape.uniform(layers, latent))


def _granite_h(name: str, source: str, kv_heads: int, mamba_heads: int) -> ModelInfo:
    """Granite 4.0 H: of 40 layers four attend, the others are Mamba2 with one group of B and C."""
    states = mamba2_states(
        num_heads=mamba_heads, head_size=64, state_size=128, num_groups=1, conv_kernel=4,
        dtype="bfloat16",
    )  # fmt: skip
    heads = LayerHeads(kv_heads, 128)
    layers = tuple(heads if layer in (5, 15, 25, 35) else states for layer in range(40))
    return ModelInfo(name, source, CacheShape(layers))


#: By name, in the order in which they are listed to people.
KNOWN_MODELS: Mapping[str, ModelInfo] = {
    model.name: model
    for model in (
        _heads("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 32, 8, 128),
        _heads("llama-3-70b", "meta-llama/Meta-Llama-3-70B", 80, 8, 128),
        _heads("llama-3-405b", "meta-llama/Llama-3.1-405B", 126, 8, 128),
        _heads("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 16, 8, 64),
        _heads("llama-3.2-3b", "meta-llama/Llama-3.2-3B", 28, 8, 128),
        _heads("mistral-7b", "mistralai/Mistral-7B-v0.3", 32, 8, 128),
        _heads("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 32, 8, 128),
        _heads("qwen2.5-7b", "Qwen/Qwen2.5-7B", 28, 4, 128),
        _heads("qwen2.5-72b", "Qwen/Qwen2.5-72B", 80, 8, 128),
        _heads("qwen3-8b", "Qwen/Qwen3-8B", 36, 8, 128),
        _heads("qwen3-32b", "Qwen/Qwen3-32B", 64, 8, 128),
        _heads("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 48, 4, 128),
        _heads("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 94, 4, 128),
        _heads(
            "gemma-3-27b", "google/gemma-3-27b-pt", 62, 16, 128,
            layer_windows=every_nth_full(62, nth=6, window=1024),
        ),
        _heads(
            "gpt-oss-20b", "openai/gpt-oss-20b", 24, 8, 64,
            layer_windows=every_nth_full(24, nth=2, window=128),
        ),
        _heads(
            "gpt-oss-120b", "openai/gpt-oss-120b", 36, 8, 64,
            layer_windows=every_nth_full(36, nth=2, window=128),
        ),
        _granite_h("granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-tiny", 4, mamba_heads=48),
        _latent("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 27, 512, 64),
        _latent("deepseek-v3", "deepseek-ai/DeepSeek-V3", 61, 512, 64),
        _latent("deepseek-r1", "deepseek-ai/DeepSeek-R1", 61, 512, 64),
        _heads("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", 30, 3, 64),
    )
}  # fmt: skip

_DECODERS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which models that also see or hear describe their decoder."""


def parse_model(values: Mapping[str, Any], where: str) -> ModelInfo:
    """The shape that a ``config.json`` describes.

    Args:
        values: the decoded JSON, as any release of transformers writes it; of a model that also
            sees or hears, its ``text_config`` counts.
        where: how the user finds the file, for messages.

    Raises:
        ModelError: a value is missing or of a wrong type, or what the layers keep is not known.
    """
    text: Mapping[str, Any] = values
    outer: dict[str, Any] = {}
    while inner := next((part for key in _DECODERS if isinstance(part := text.get(key), dict)), {}):
        outer |= {key: value for key, value in text.items() if not isinstance(value, dict)}
        text = {"quantization_config": text.get("quantization_config"), **inner}
    if text.get("is_encoder_decoder") or outer.get("is_encoder_decoder"):
        raise ModelError(f"{where}: is_encoder_decoder: only decoders can be planned")
    kind = text.get("model_type") or outer.get("model_type")
    if (family := FAMILIES.get(kind)) is None:
        keys = suspicious_keys(text)
        raise ModelError(
            f"{where}: model_type {kind!r} is not known, so nothing says how to read "
            f"{', '.join(keys) or 'it'}; {REMEDY}"
        )
    dtype = _served_dtype({**outer, **{key: value for key, value in text.items() if value}}, where)
    ModelFile(outer, where, dtype, {}).check_understood()
    try:
        shape = CacheShape(family.layers(ModelFile(text, where, dtype, family.defaults)))
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error
    name = Path(where).parent.name or where
    return ModelInfo(name, where, shape, _cache_dtype(text, where) or dtype)


def _served_dtype(values: Mapping[str, Any], where: str) -> str:
    """The dtype in which vLLM serves a checkpoint: its own, or bfloat16 for one in float32."""
    try:
        dtype = dtype_name(values.get("dtype") or values.get("torch_dtype") or "bfloat16")
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error
    return "bfloat16" if dtype == "float32" else dtype


def _cache_dtype(values: Mapping[str, Any], where: str) -> str | None:
    """The dtype of the cache where a quantised checkpoint brings the scales for one of its own."""
    quantization = values.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise ModelError(f"{where}: quantization_config is {quantization!r}; keys are needed")
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        scheme = quantization.get(key)
        if scheme is None:
            continue
        if isinstance(scheme, dict):
            is_fp8 = (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        else:
            is_fp8 = str(scheme).lower() == "fp8"
        if not is_fp8:
            raise ModelError(
                f"{where}: quantization_config: {key} is {scheme!r}; only 8-bit floats can be "
                "planned; take it out of a copy of the file and write dtype= in the specs"
            )
        return "float8_e4m3fn"
    return None
