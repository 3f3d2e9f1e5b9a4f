"""What the ``config.json`` of each family of models says that its layers keep.

A family is in :data:`FAMILIES` once its code was read. Readers follow
``vllm/model_executor/models`` of vLLM 0.32 and, for families that it does not serve, the models'
own code. What a file leaves out is as in the config classes of transformers 5.24.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from kvferry.cache.cache_shape import LayerCache, LayerHeads
from kvferry.explain.model_file import (
    CHUNK,
    FULL,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NOTHING,
    RECURRENT,
    REMEDY,
    WINDOW,
    WINDOW_SIZE,
    Kinds,
    ModelFile,
    all_windowed,
    kimi_kinds,
    periodic_kinds,
    rotated_kinds,
    searched_kinds,
    shared_kinds,
    shared_kinds_4,
    window_kinds,
)
from kvferry.topology.states import (
    StatePart,
    gated_delta_net_states,
    mamba2_states,
    state_part,
)

# ---- what a layer of a kind keeps --------------------------------------------------------------

Reader: TypeAlias = Callable[[ModelFile], LayerCache]
"""From a file to what the layer that is read keeps."""


def _heads(file: ModelFile, kv_heads: int | None = None) -> LayerHeads:
    """Keys and values; ``kv_heads`` where a family counts them by a rule of its own."""
    sizes = [file.get(*names) for names in (HEADS, KV_HEADS, HIDDEN)]
    given = file.get(*HEAD_SIZE) is not None
    size = file.count(*HEAD_SIZE) if given else file.count(*HIDDEN) // file.count(*HEADS)
    if not size:
        raise file.error("hidden_size", f"is {sizes[2]}, less than {sizes[0]} attention heads")
    if kv_heads is None:
        kv_heads = file.count(*(HEADS if sizes[1] is None else KV_HEADS))
    size_v = size if file.get("v_head_dim") is None else file.count("v_head_dim")
    return LayerHeads(kv_heads, size, None if size_v == size else size_v)


def _window(file: ModelFile) -> LayerHeads:
    return replace(_heads(file), sliding_window=file.count(*WINDOW_SIZE))


def _chunk(file: ModelFile) -> LayerHeads:
    return replace(_heads(file), attention_chunk_size=file.count("attention_chunk_size"))


def _latent(file: ModelFile) -> LayerHeads:
    for name in (*HEADS, *KV_HEADS, *HEAD_SIZE, "v_head_dim", "q_lora_rank"):
        file.get(name)
    for name in ("qk_nope_head_dim", "qk_head_dim"):
        file.get(name)
    size = file.count("kv_lora_rank") + file.count("qk_rope_head_dim")
    return LayerHeads(1, size, use_mla=True)


def _own(file: ModelFile) -> LayerHeads:
    return (_heads if file.get("kv_lora_rank") is None else _latent)(file)


def _multi_query(file: ModelFile) -> LayerHeads:
    """Falcon, GPT-BigCode: one KV head, unless the newer architecture counts them."""
    several = file.get("new_decoder_architecture") or not file.get("multi_query")
    return _heads(file, None if several else 1)


def _chatglm(file: ModelFile) -> LayerHeads:
    grouped = file.get("multi_query_attention")
    return _heads(file, None if grouped else file.count(*HEADS))


def _attn_config(file: ModelFile) -> LayerHeads:
    """DBRX, MPT."""
    part = file.part("attn_config")
    if part.get("attn_type") == "multiquery_attention":
        return _heads(file, 1)
    grouped = part.get("kv_n_heads") is not None
    return _heads(file, part.count("kv_n_heads") if grouped else file.count(*HEADS))


def _global_4(file: ModelFile) -> LayerHeads:
    """Gemma 4: full layers have heads of their own."""
    heads, kv_heads = _heads(file), file.get("num_global_key_value_heads")
    size = file.count("global_head_dim")
    if file.get("attention_k_eq_v") and kv_heads is not None:
        return LayerHeads(file.count("num_global_key_value_heads"), size)
    return replace(heads, head_size=size)


def _window_mimo(file: ModelFile) -> LayerHeads:
    file.get("swa_num_attention_heads")
    file.get("attention_chunk_size")  # not used by the model's code
    size, size_v = file.count("swa_head_dim"), file.count("swa_v_head_dim")
    return LayerHeads(
        file.count("swa_num_key_value_heads"),
        size,
        None if size_v == size else size_v,
        sliding_window=file.count(*WINDOW_SIZE),
    )


def _window_step(file: ModelFile) -> LayerHeads:
    """Step 3.5: windowed layers may have heads of their own."""
    if file.get("attention_other_setting") is None:
        return _window(file)
    part = file.part("attention_other_setting")
    if part.get("attention_type") != WINDOW:
        raise file.error("attention_other_setting", f"is not of {WINDOW}; {REMEDY}")
    heads = part.count("num_attention_groups"), part.count("head_dim")
    return LayerHeads(*heads, sliding_window=file.count(*WINDOW_SIZE))


def _window_cohere(file: ModelFile) -> LayerHeads:
    """Cohere 2: a token attends to a window of tokens before itself (vLLM, ``commandr.py``)."""
    return replace(_heads(file), sliding_window=file.count(*WINDOW_SIZE) + 1)


def _searched_heads(file: ModelFile) -> LayerHeads:
    group = file.get("block_configs")[file.layer]["attention"].get("n_heads_in_group")
    if not isinstance(group, int) or group < 1:
        raise file.error("block_configs", f"has n_heads_in_group {group!r} in layer {file.layer}")
    return _heads(file, file.count(*HEADS) // group)


States: TypeAlias = tuple[StatePart, ...]


def _mamba1(file: ModelFile) -> States:
    channels = file.count("mamba_expand") * file.count(*HIDDEN)
    x = {"x": (channels, 1)}
    return (
        state_part("conv", file.dtype, x, file.count("mamba_d_conv") - 1),
        state_part("ssm", file.dtype, x, file.count("mamba_d_state")),
    )


def _mamba2(file: ModelFile) -> States:
    """Bamba, Granite 4.0 H and Nemotron-H, which has names of its own."""
    heads = file.count("mamba_n_heads", "mamba_num_heads")
    file.get("mamba_chunk_size", "chunk_size")
    size = file.get("mamba_d_head", "mamba_head_dim")
    if size in (None, "auto"):
        size = file.count("mamba_expand", "expand") * file.count(*HIDDEN) // heads
    file.get("mamba_expand", "expand")
    return mamba2_states(
        num_heads=heads,
        head_size=size,
        state_size=file.count("mamba_d_state", "ssm_state_size"),
        num_groups=file.count("mamba_n_groups", "n_groups"),
        conv_kernel=file.count("mamba_d_conv", "conv_kernel"),
        dtype=file.dtype,
        ssm_dtype=file.get("mamba_ssm_cache_dtype"),
    )


def _gated_delta_net(file: ModelFile) -> States:
    key_size = file.count("linear_key_head_dim")
    return gated_delta_net_states(
        num_heads=file.count("linear_num_value_heads"),
        head_size=file.count("linear_value_head_dim"),
        key_head_size=key_size,
        key_size=key_size * file.count("linear_num_key_heads"),
        conv_kernel=file.count("linear_conv_kernel_dim"),
        dtype=file.dtype,
        delta_dtype=file.get("mamba_ssm_dtype"),
    )


def _kimi_delta(file: ModelFile) -> States:
    part = file.part("linear_attn_config")
    heads, size = part.count("num_heads"), part.count("head_dim")
    return gated_delta_net_states(
        num_heads=heads,
        head_size=size,
        key_head_size=size,
        key_size=heads * size,
        conv_kernel=part.count("short_conv_kernel_size"),
        dtype=file.dtype,
        delta_dtype="float32",
    )


def _lightning(file: ModelFile) -> States:
    heads = replace(_heads(file), num_kv_heads=file.count(*HEADS))
    return (state_part("kv", file.dtype, {"heads": (heads.num_kv_heads, 1)}, heads.head_size**2),)


def _short_conv(file: ModelFile) -> States:
    file.get("num_heads")  # as many as num_attention_heads
    file.get("conv_dim_out")
    channels = file.count("conv_dim" if file.get("conv_dim") else "hidden_size")
    return (state_part("conv", file.dtype, {"x": (channels, 1)}, file.count("conv_L_cache") - 1),)


# ---- families ----------------------------------------------------------------------------------

_ATTENTION: Mapping[str, Reader] = {
    FULL: _heads,
    WINDOW: _window,
    CHUNK: _chunk,
    NOTHING: lambda _: None,
}


@dataclass(frozen=True, slots=True)
class Family:
    """How files of one ``model_type`` are read."""

    kinds: Callable[[ModelFile], Kinds] = window_kinds
    """The kind of each layer."""
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """Kind → what a layer of it keeps, where it is not as in other families."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What counts where a file lacks a key."""

    def layers(self, file: ModelFile) -> tuple[LayerCache, ...]:
        """What each layer keeps.

        Raises:
            ModelError: a value is missing, wrong or not understood.
        """
        readers, kinds = {**_ATTENTION, **self.readers}, self.kinds(file)
        for layer, kind in enumerate(kinds):
            if kind not in readers:
                raise file.error(
                    "layer_types",
                    f"says that layer {layer} is {kind}; planned are {', '.join(readers)}",
                )
        caches: list[LayerCache] = []
        for file.layer, kind in enumerate(kinds):
            caches.append(readers[kind](file))
        if not any(isinstance(cache, LayerHeads) for cache in caches):
            raise file.error("layer_types", f"say that no layer attends; {REMEDY}")
        file.check_understood()
        return tuple(caches)


def _filled(
    kv_heads: int | None = None,
    head_size: int | None = None,
    *,
    window: int | None = None,
    nth: int | None = None,
) -> dict[str, Any]:
    """Values that a config class fills in.

    Args:
        kv_heads: of each layer.
        head_size: elements of a head.
        window: tokens of a windowed layer.
        nth: every how many layers one attends to all tokens.
    """
    values = {
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "sliding_window": window,
        "sliding_window_pattern": nth,
    }
    return {key: value for key, value in values.items() if value is not None}


_GDN: Mapping[str, Reader] = {RECURRENT: _gated_delta_net}
_MAMBA2: Mapping[str, Reader] = {RECURRENT: _mamba2}
_GEMMA = {"num_attention_heads": 8}

FAMILIES: Mapping[str | None, Family] = {
    # A file of the user's own, without model_type.
    None: Family(readers={FULL: _own}),
    # All layers attend to all tokens; as many KV heads as the file says, else as query heads.
    **dict.fromkeys(
        (
            *("llama", "phi", "phi-msft", "gpt2", "gptj", "gpt_neox", "bloom", "opt", "codegen"),
            *("cohere", "olmo", "olmo2", "olmoe", "flex_olmo", "granite", "granitemoe"),
            *("granitemoeshared", "nemotron", "apertus", "arcee", "hunyuan_v1_dense", "deepseek"),
            *("hunyuan_v1_moe", "persimmon", "baichuan", "internlm", "internlm2", "orion", "qwen"),
            *("minicpm", "mimo", "openelm"),
        ),
        Family(),
    ),
    # The same, whose classes fill in KV heads, or KV heads and their size.
    **{
        name: Family(defaults=_filled(*sizes))
        for name, *sizes in (
            *(("qwen2", 32), ("qwen2_moe", 16), ("qwen3", 32, 128), ("qwen3_moe", 4)),
            *(("qwen2_vl", 8), ("qwen2_5_vl", 8), ("qwen2_vl_text", 8), ("qwen2_5_vl_text", 8)),
            *(("qwen3_vl_text", 32, 128), ("qwen3_vl_moe_text", 16, 128), ("stablelm", 32)),
            *(("qwen2_5_omni_text", 4), ("qwen3_omni_moe_text", 4), ("bitnet", 5)),
            *(("gemma", 16, 256), ("glm", 2, 128), ("glm4", 2, 128), ("glm4_moe", 8)),
            *(("glm4v_text", 2), ("glm4v_moe_text", 8), ("seed_oss", 8, 128), ("smollm3", 4)),
            *(("ernie4_5", 2, 128), ("ernie4_5_moe", 4), ("dots1", 32), ("helium", 20, 128)),
            *(("exaone", 8), ("internlm3", 2, 128), ("solar_open", 8, 128)),
            *(("minimax_m2", 8, 128), ("ministral3", 8, 128)),
        )
    },
    # Every layer has the window, if there is one.
    **{
        name: Family(all_windowed, defaults=defaults)
        for name, defaults in (
            *(("mistral", _filled(8, window=4096)), ("mixtral", _filled(8)), ("phi3", {})),
            *(("phi3_v", {}), ("phimoe", _filled(8)), ("starcoder2", _filled(2))),
            ("ministral", _filled(8, window=4096)),
        )
    },
    # Every nth layer attends to all tokens, the others to a window.
    "gemma2": Family(defaults=_filled(4, 256, window=4096, nth=2)),
    "gemma3_text": Family(defaults=_GEMMA | _filled(4, 256, window=4096, nth=6)),
    "gpt_oss": Family(defaults=_filled(8, 64, window=128, nth=2)),
    "olmo3": Family(defaults=_filled(window=4096, nth=4)),
    "exaone4": Family(defaults=_filled(32, window=4096, nth=4)),
    "cohere2": Family(readers={WINDOW: _window_cohere}, defaults=_filled(window=4096, nth=4)),
    "gemma3n_text": Family(
        shared_kinds,
        defaults=_GEMMA | _filled(2, 256, window=512, nth=5) | {"num_kv_shared_layers": 15},
    ),
    # Layers with heads of their own, layers without attention, rules for KV heads.
    "gemma4_text": Family(
        shared_kinds_4,
        {FULL: _global_4},
        _GEMMA | _filled(4, 256, window=512, nth=6) | {"global_head_dim": 512},
    ),
    "mimo_v2_flash": Family(readers={WINDOW: _window_mimo}),
    "mimo_v2": Family(readers={WINDOW: _window_mimo}),
    "step3p5": Family(readers={WINDOW: _window_step}),
    "step3p7": Family(readers={WINDOW: _window_step}),
    "nemotron-nas": Family(searched_kinds, {FULL: _searched_heads}),
    "falcon": Family(readers={FULL: _multi_query}, defaults={"multi_query": True}),
    "RefinedWebModel": Family(readers={FULL: _multi_query}, defaults={"multi_query": True}),
    "RefinedWeb": Family(readers={FULL: _multi_query}, defaults={"new_decoder_architecture": True}),
    "gpt_bigcode": Family(readers={FULL: _multi_query}, defaults={"multi_query": True}),
    "chatglm": Family(readers={FULL: _chatglm}),
    "dbrx": Family(readers={FULL: _attn_config}),
    "mpt": Family(readers={FULL: _attn_config}),
    # Latents, and attention in chunks.
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"),
        Family(readers={FULL: _latent}),
    ),
    "llama4_text": Family(
        rotated_kinds,
        defaults=_filled(8, 128) | {"attention_chunk_size": 8192},
    ),
    # Recurrent layers.
    "kimi_linear": Family(kimi_kinds, {FULL: _latent, RECURRENT: _kimi_delta}),
    "minimax_text_01": Family(readers={RECURRENT: _lightning}),
    "minimax": Family(readers={RECURRENT: _lightning}, defaults=_filled(8)),
    "qwen3_next": Family(readers=_GDN, defaults=_filled(2, 256) | {"full_attention_interval": 4}),
    "qwen3_5_text": Family(readers=_GDN, defaults=_filled(4, 256) | {"full_attention_interval": 4}),
    "qwen3_5_moe_text": Family(
        readers=_GDN, defaults=_filled(2, 256) | {"full_attention_interval": 4}
    ),
    "jamba": Family(periodic_kinds, {RECURRENT: _mamba1}, _filled(8)),
    "bamba": Family(readers=_MAMBA2, defaults=_filled(8)),
    "granitemoehybrid": Family(readers=_MAMBA2),
    "nemotron_h": Family(
        readers=_MAMBA2, defaults=_filled(8, 128) | {"mamba_ssm_cache_dtype": "float32"}
    ),
    "lfm2": Family(readers={RECURRENT: _short_conv}, defaults=_filled(8)),
    "lfm2_moe": Family(readers={RECURRENT: _short_conv}, defaults=_filled(8)),
}
"""``model_type`` → how its files are read."""
