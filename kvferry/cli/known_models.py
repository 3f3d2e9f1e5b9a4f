"""Shapes of well-known models, for plans before anything is downloaded.

Of each model only what its KV cache depends on, from the ``config.json`` of its repository on
Hugging Face, which ``source`` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvferry.cache.cache_shape import CacheShape
from kvferry.topology.recurrent import mamba2_states


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
