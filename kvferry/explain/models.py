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

from kvferry.cache.cache_shape import CacheShape
from kvferry.control.handshake import MAX_LAYERS
from kvferry.errors import ModelError
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
    return ModelInfo(name, source, CacheShape(layers, heads, head_size, False, layer_windows))


def _latent(name: str, source: str, layers: int, kv_lora_rank: int, rope: int) -> ModelInfo:
    return ModelInfo(name, source, CacheShape(layers, 1, kv_lora_rank + rope, use_mla=True))


def _granite_h(name: str, source: str, kv_heads: int, mamba_heads: int) -> ModelInfo:
    """Granite 4.0 H: of 40 layers four attend, the others are Mamba2 with one group of B and C."""
    states = mamba2_states(
        num_heads=mamba_heads, head_size=64, state_size=128, num_groups=1, conv_kernel=4,
        dtype="bfloat16",
    )  # fmt: skip
    recurrent = dict.fromkeys(set(range(40)) - {5, 15, 25, 35}, states)
    return ModelInfo(name, source, CacheShape(40, kv_heads, 128, layer_states=recurrent))


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

#: Keys of a ``config.json`` that stand for a cache which is no plain attention over tokens.
_BEYOND_ATTENTION = {
    **dict.fromkeys(
        (
            *("mamba_d_state", "mamba_expand", "ssm_cfg", "state_size", "linear_num_key_heads"),
            *("hybrid_override_pattern", "layers_block_type", "attn_layer_period"),
        ),
        "recurrent state",
    ),
    "attention_chunk_size": "attention in chunks",
    "index_topk": "an indexer with a cache of its own",
    "num_kv_shared_layers": "layers that share their KV",
}

#: Model types of which every layer has the config's window, and those with a full one every nth.
_ALL_WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2")
_EVERY_NTH_FULL = {"gemma2": 2, "gemma3_text": 6}


def parse_model(values: Mapping[str, Any], where: str) -> ModelInfo:
    """The shape that a ``config.json`` describes.

    Args:
        values: the decoded JSON, as any release of transformers writes it; of a model that also
            sees or hears, its ``text_config`` counts.
        where: how the user finds the file, for messages.

    Raises:
        ModelError: a value is missing or of a wrong type, or the cache is not of plain attention.
    """
    inner = values.get("text_config")
    text = {**values, **inner} if isinstance(inner, Mapping) else values
    for key, what in _BEYOND_ATTENTION.items():
        if text.get(key):
            raise ModelError(f"{where}: {key} says {what}, which cannot be planned by file yet")
    if text.get("is_encoder_decoder"):
        raise ModelError(f"{where}: is_encoder_decoder: only decoders can be planned")
    layers = _count(text, "num_hidden_layers", where)
    if layers > MAX_LAYERS:
        raise ModelError(
            f"{where}: num_hidden_layers is {layers}, at most {MAX_LAYERS} are planned"
        )
    if text.get("kv_lora_rank") and text.get("qk_rope_head_dim"):
        latent = _count(text, "kv_lora_rank", where) + _count(text, "qk_rope_head_dim", where)
        shape = CacheShape(layers, 1, latent, use_mla=True)
    else:
        head_size = _head_size(text, where)
        if text.get("v_head_dim") not in (None, head_size):
            raise ModelError(
                f"{where}: v_head_dim is {text['v_head_dim']!r} and head_dim {head_size}; values "
                "of another size than keys cannot be planned by file yet"
            )
        windows = _windows(text, layers, where)
        shape = CacheShape(layers, _kv_heads(text, where), head_size, layer_windows=windows)
    try:
        dtype = dtype_name(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error
    return ModelInfo(Path(where).parent.name or where, where, shape, dtype)


def _kv_heads(text: Mapping[str, Any], where: str) -> int:
    heads = _count(text, "num_attention_heads", where)
    if text.get("num_key_value_heads") is None:
        return heads
    return _count(text, "num_key_value_heads", where)


def _head_size(text: Mapping[str, Any], where: str) -> int:
    if text.get("head_dim") is not None:
        return _count(text, "head_dim", where)
    return _count(text, "hidden_size", where) // _count(text, "num_attention_heads", where)


def _windows(text: Mapping[str, Any], layers: int, where: str) -> dict[int, int]:
    """Layer → window; which layers have one is written in several ways."""
    kinds = text.get("layer_types")
    if kinds is not None:
        named = [str(kind) for kind in kinds] if isinstance(kinds, list | tuple) else [str(kinds)]
        if len(named) != layers or not set(named) <= {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"{where}: layer_types: {len(named)} for {layers} layers, of the kinds "
                f"{', '.join(sorted(set(named)))}; planned are full_attention and sliding_attention"
            )
        windowed = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        return dict.fromkeys(windowed, _count(text, "sliding_window", where)) if windowed else {}
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False:
        return {}
    window, kind = _count(text, "sliding_window", where), text.get("model_type")
    nth = text.get("sliding_window_pattern") or _EVERY_NTH_FULL.get(str(kind))
    if isinstance(nth, int):
        return every_nth_full(layers, nth, window)
    if text.get("use_sliding_window") and "max_window_layers" in text:
        return dict.fromkeys(range(_count(text, "max_window_layers", where, 0), layers), window)
    if kind in _ALL_WINDOWED:
        return dict.fromkeys(range(layers), window)
    raise ModelError(
        f"{where}: sliding_window is {window}, and nothing says which layers have it; add "
        "layer_types, one per layer"
    )


def _count(text: Mapping[str, Any], key: str, where: str, least: int = 1) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        have = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"{where}: {key} {have}; a whole number of {least} or more is needed")
    return value
