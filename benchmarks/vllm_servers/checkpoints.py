"""Small random models whose layers differ, as the checkpoints that vLLM reads.

Transformers draws them. Their weights are larger than usual, so that wrong KV or a wrong state
gives other tokens.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 1024
_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_SEED = 3


def write_qwen3_next(folder: Path, dtype: str = "bfloat16") -> Path:
    """Three layers with gated delta nets and one with attention; all have experts.

    By default in bfloat16, the only dtype in which vLLM computes gated delta nets on a CPU.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(_SEED)
    config = Qwen3NextConfig(
        **_COMMON,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        full_attention_interval=4,  # the same for SGLang
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    model = Qwen3NextForCausalLM(config).to(getattr(torch, dtype))
    return _write(model, folder, "Qwen3NextForCausalLM")


def write_falcon_h1(folder: Path) -> Path:
    """Three layers with Mamba2 and attention side by side; B and C are one group."""
    import torch
    from transformers import FalconH1Config, FalconH1ForCausalLM

    torch.manual_seed(_SEED)
    config = FalconH1Config(
        **_COMMON,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=64,
        mamba_chunk_size=64,
    )
    return _write(FalconH1ForCausalLM(config), folder, "FalconH1ForCausalLM")


def write_gemma4(folder: Path, *, full_heads: int = 2, shared: int = 0, seed: int = _SEED) -> Path:
    """Six layers in turns: a window over 4 KV heads of 32 elements, and all tokens over fewer heads
    of 64, whose keys are their values.

    Args:
        folder: where the checkpoint is written.
        full_heads: KV heads of the layers that attend to all tokens.
        shared: how many of the last layers read the caches of layers before them.
        seed: of the weights.
    """
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(seed)
    config = Gemma4TextConfig(
        **_COMMON | {"tie_word_embeddings": True, "pad_token_id": 0},
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=100,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_global_key_value_heads=full_heads,
        global_head_dim=64,
        attention_k_eq_v=True,
        num_kv_shared_layers=shared,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
    )
    # Published checkpoints have norms that layers without a cache do not use; vLLM 0.28 wants them.
    unused = {
        f"model.layers.{layer}.self_attn.k_norm.weight": torch.ones(64 if layer % 2 else 32)
        for layer in range(6 - shared, 6)
    }
    return _write(Gemma4ForCausalLM(config), folder, "Gemma4ForCausalLM", unused)


def _write(
    model: Any, folder: Path, architecture: str, more: Mapping[str, Any] | None = None
) -> Path:
    """Writes a checkpoint with its experts one by one, as such models are published.

    ``more`` are tensors beside those of the model.
    """
    from safetensors.torch import save_file

    tensors = dict(more or {})
    for name, tensor in model.state_dict().items():
        stem, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    tensors[f"{stem}.experts.{expert}.{part}.weight"] = half.contiguous()
        elif last == "down_proj":
            for expert, down in enumerate(tensor):
                tensors[f"{stem}.experts.{expert}.down_proj.weight"] = down.contiguous()
        else:
            tensors[name] = tensor.contiguous()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads(model.config.to_json_string())
    (folder / "config.json").write_text(json.dumps(values | {"architectures": [architecture]}))
    return folder
