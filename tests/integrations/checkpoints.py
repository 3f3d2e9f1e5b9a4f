"""Folders of models, and the facts that the adapter of every serving engine tells of them.

The test suite of each adapter checks the same expected values, as no environment has two serving
engines.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.description import ModelFingerprint

GROUP = EngineGeometry(
    num_layers=2,
    num_kv_heads=2,
    head_size=16,
    dtype="float32",
    block_size=16,
    layout="NHD",
    parallel=ParallelShape(),
)
"""The KV cache of each of the models."""
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 16},
    # The older form of a scaled rope, from which engines make two names of the type.
    "scaled": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    # The class of this config knows no size of a head.
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
}
WEIGHTS_DIGEST = "ce76547414b58d326789f6ddccbb4894"
"""Digest of the weights of each of the models."""
_PLAIN_ROPE = '{"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}'
EXPECTED = {
    "llama": ("c59da46a41f6684a61f3cceae9eae19f6aecf6dc02b238334b363443a034c7f4", _PLAIN_ROPE),
    "scaled": (
        "3a15ddffa74747062c3155e2e779758e0a864941ea5414041d75bc30420b213d",
        '{"rope_parameters": {"factor": 2.0, "rope_theta": 10000.0, "rope_type": "linear"}}',
    ),
    "qwen2": ("801745031773e30fe191684fc974866a31a229f300e0156afd513456680cc6a3", _PLAIN_ROPE),
}
"""Model → digest of its config, and text of its rope, as transformers 5.19 reads the config."""


def write_checkpoint(folder: Path, name: str, **changed: Any) -> Path:
    """Writes the folder of a model; ``changed`` are keys of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | CONFIGS[name] | changed))
    tensor = np.arange(64, dtype=np.float32)
    save_file({"model.norm.weight": tensor}, folder / "model.safetensors")
    return folder


def facts(told: ModelFingerprint) -> tuple[object, ...]:
    """The fields of a fingerprint that two engines compare, but for the digests and the rope."""
    return told.architecture, told.num_layers, told.num_kv_heads, told.head_size, told.dtype


def expected_facts(name: str) -> tuple[object, ...]:
    """The same of a model."""
    return CONFIGS[name]["architectures"][0], 2, 2, 16, "float32"


def write_tiny_hybrid(
    folder: Path, *, window: int = 100, seed: int = 5, full: str = "full_attention"
) -> Path:
    """A random Gemma 3 of four layers, of which two or all look at a window of tokens only. Its
    vocabulary has 1,024 tokens.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        vocab_size=1024,
        max_position_embeddings=4096,
        # Larger weights than usual, so that wrong KV gives other tokens.
        initializer_range=0.1,
        sliding_window=window,
        layer_types=["sliding_attention", full] * 2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Gemma3ForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads(config.to_json_string())
    values["architectures"] = ["Gemma3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(values))
    return folder
