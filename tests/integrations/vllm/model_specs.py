"""Prints what each layer of some models keeps inside vLLM, a line of JSON per folder that is given.

Models are built on torch's meta device: they have no weights. Each is built in a process of its
own, as vLLM keeps the state of one model per process.
"""

import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any


def spec_text(spec: Any) -> str:
    """A spec, as tests/explain/model_configs.json writes it."""
    if hasattr(spec, "shapes"):
        sizes = zip(spec.shapes, spec.dtypes, strict=True)
        parts = [f"{math.prod(shape)} {str(dtype)[6:]}" for shape, dtype in sizes]
        return f"state of {' and '.join(parts)}"
    if type(spec).__name__.startswith("MLA"):
        return f"latent of {spec.head_size}"
    text = f"{spec.num_kv_heads}x{spec.head_size}"
    if spec.head_size_v != spec.head_size:
        text += f"/{spec.head_size_v}"
    if getattr(spec, "sliding_window", None) is not None:
        text += f" window {spec.sliding_window}"
    if getattr(spec, "attention_chunk_size", None) is not None:
        text += f" chunk {spec.attention_chunk_size}"
    return text


def specs_of(folder: str) -> dict[int, str]:
    """Layer → what it keeps, of those that have a cache of their own."""
    # Here, as pytest imports this module where vLLM is not installed.
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # On some CPUs vLLM keeps the states of all recurrent layers in float32.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    args = EngineArgs(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, load_format="dummy",
        max_model_len=1024, enforce_eager=True, enable_prefix_caching=True,
    )  # fmt: skip
    config = args.create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as scratch:
        init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        own = {
            name: layer.get_kv_cache_spec(config)
            for name, layer in layers.items()
            if getattr(layer, "kv_sharing_target_layer_name", None) is None
        }
    return {int(re.findall(r"\d+", name)[0]): spec_text(spec) for name, spec in own.items()}


if __name__ == "__main__":
    for each in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            found = specs_of(each)
            print(json.dumps({"folder": Path(each).name, "specs": found}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
