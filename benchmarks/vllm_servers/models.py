"""Small models in the form that vLLM reads; kvferry's converted folders have it."""

import atexit
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.vllm_servers.checkpoints import (
    VOCABULARY,
    write_falcon_h1,
    write_gemma4,
    write_qwen3_next,
)
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig, TinyLatent

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
    prefix_hits: bool = True
    """Whether vLLM's CPU backend finds prefixes of this model."""


@functools.cache
def tiny_model(seed: int = 0) -> Model:
    """A random Llama of 4 layers and 4 KV heads of size 32; each seed has weights of its own."""
    tiny = msgspec.structs.replace(_TINY, seed=seed)
    name = f"tiny-{seed}" if seed else "tiny"
    return Model(name, prepare_model("tiny", tiny=tiny), tiny.vocab_size)


@functools.cache
def one_head_model() -> Model:
    """The tiny model with one KV head, which every rank of an engine keeps."""
    tiny = msgspec.structs.replace(_TINY, num_kv_heads=1)
    return Model("one-head", prepare_model("tiny", tiny=tiny), tiny.vocab_size)


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
def latent_model() -> Model:
    """A random DeepSeek-V2 without experts.

    vLLM's CPU kernel knows latents of 512 elements and keys of 64, in blocks of 16. Its rotary
    operation takes the keys of tokens to be neighbours, and so writes over these models' latents.
    """
    latent = TinyLatent(kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32)
    tiny = msgspec.structs.replace(_TINY, latent=latent)
    return Model(
        "mla",
        prepare_model("tiny-mla", tiny=tiny),
        tiny.vocab_size,
        (
            *("--attention-backend", "CPU_MLA"),
            *("--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}'),
        ),
        prefix_hits=False,
    )


@functools.cache
def delta_net_model(dtype: str = "bfloat16") -> Model:
    """A random Qwen3-Next: gated delta nets in three of four layers.

    In bfloat16 its tokens may differ where requests are batched otherwise, as those of any model.
    """
    write = functools.partial(write_qwen3_next, dtype=dtype)
    return _drawn_model(f"gdn-{dtype}", write, ("--dtype", dtype))


@functools.cache
def mamba2_model() -> Model:
    """A random Falcon-H1: Mamba2 and attention in every layer.

    With a prefix cache vLLM 0.32 asks for states in the midst of a prompt, which its Mamba2 of
    CPUs does not give: the engine ends.
    """
    return _drawn_model("mamba2", write_falcon_h1, ("--no-enable-prefix-caching",))


@functools.cache
def gemma4_model(full_heads: int = 2) -> Model:
    """A random Gemma 4: 4 KV heads of size 32 in layers with a window, fewer of 64 in others."""
    write = functools.partial(write_gemma4, full_heads=full_heads)
    return _drawn_model(f"gemma4-{full_heads}", write, ())


def _drawn_model(name: str, write: Callable[[Path], Path], arguments: tuple[str, ...]) -> Model:
    """A model in a folder that lives as long as this process, with the tokenizer of the tiny one.

    To one with recurrent layers vLLM gives blocks of so many tokens that a page of attention has
    room for a state.
    """
    folder = write(Path(tempfile.mkdtemp(prefix=f"{name}-")) / name)
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    for file in tiny_model().folder.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return Model(name, folder, VOCABULARY, arguments)


@functools.cache
def demo_model() -> Model:
    """SmolLM2-135M-Instruct, the model of `kvferry demo`; with a cache for eight requests."""
    cache = ("--kv-cache-memory-bytes", str(512 << 20))
    return Model("smollm2", prepare_model("smollm2"), 49_152, cache)
