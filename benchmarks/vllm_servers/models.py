"""Small models in the form that vLLM reads; kvferry's converted folders have it."""

import dataclasses
import functools
from pathlib import Path

import msgspec

from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig

# The smallest head size that vLLM's CPU attention knows is 32.
_TINY = TinyConfig(
    num_heads=8,
    num_kv_heads=4,
    head_size=32,
    hidden_size=256,
    intermediate_size=384,
    vocab_size=1024,
)
_WINDOW = 96
"""Tokens; not a multiple of a block, and shorter than most prompts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model folder, and how vLLM is told to read it."""

    name: str
    folder: Path
    vocab_size: int
    arguments: tuple[str, ...] = ()
    """Of the server."""


@functools.cache
def tiny_model() -> Model:
    """A random Llama of 4 layers and 4 KV heads of size 32."""
    return Model("tiny", prepare_model("tiny", tiny=_TINY), _TINY.vocab_size)


@functools.cache
def hybrid_model() -> Model:
    """A random Llama whose layers attend to a window but for every third one.

    vLLM's hybrid cache manager makes groups of two layers: two with the window and one without.
    """
    tiny = msgspec.structs.replace(
        _TINY, num_layers=6, sliding_window=_WINDOW, full_attention_every=3
    )
    # vLLM has no class of this name, and its Llama knows `layer_types`.
    override = '{"architectures": ["LlamaForCausalLM"]}'
    return Model(
        "hybrid",
        prepare_model("tiny-hybrid", tiny=tiny),
        tiny.vocab_size,
        ("--hf-overrides", override),
    )


@functools.cache
def demo_model() -> Model:
    """SmolLM2-135M-Instruct, the model of `kvferry demo`; with a cache for eight requests."""
    cache = ("--kv-cache-memory-bytes", str(512 << 20))
    return Model("smollm2", prepare_model("smollm2"), 49_152, cache)
