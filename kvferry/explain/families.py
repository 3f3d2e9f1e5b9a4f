"""Derives the KV cache of each layer from a ``config.json``, with rules per family of models.

A family is in :data:`FAMILIES` only if its code was read. The rules follow
``vllm/model_executor/models`` of vLLM 0.32; for families that vLLM does not serve, they follow the
models' own code. ``models.json`` has the values of keys that a file may omit, from the config
classes of transformers 5.24. It has three sections: families whose layers all attend in the same
way (``plain``), families whose layers all have the file's window, if any (``windowed``), and all
other families (``others``).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from kvferry.cache.cache_shape import LayerCache, LayerHeads
from kvferry.explain import model_file as keys
from kvferry.explain.model_file import FULL, NOTHING, RECURRENT, REMEDY, WINDOW, Kinds, ModelFile
from kvferry.topology.states import gated_delta_net_states, mamba2_states, state_part

# ---- the kind of each layer --------------------------------------------------------------------


def _windowed(file: ModelFile) -> Kinds:
    """Families whose layers all have the window, if there is a window."""
    if file.written.get("layer_types") or not file.get("sliding_window"):
        return keys.spelled_kinds(file)
    return [WINDOW] * keys.num_layers(file)


def _shared(file: ModelFile) -> Kinds:
    """Gemma 3n: the last layers read the cache of an earlier layer of their kind."""
    kinds = keys.window_kinds(file)
    own = len(kinds) - file.count("num_kv_shared_layers", least=0, default=0)
    if own < 1:
        raise file.error("num_kv_shared_layers", f"leaves none of {len(kinds)} layers a cache")
    return [*kinds[:own], *[NOTHING] * (len(kinds) - own)]


def _shared_4(file: ModelFile) -> Kinds:
    """Gemma 4: as Gemma 3n, but the last layer attends to all tokens in spite of the file."""
    if file.get("use_bidirectional_attention") == "all":
        raise file.error("use_bidirectional_attention", "is 'all'; only decoders can be planned")
    kinds = _shared(file)
    return kinds if kinds[-1] == NOTHING else [*kinds[:-1], FULL]


def _rotated(file: ModelFile) -> Kinds:
    """Llama 4: layers that rotate keys attend in chunks."""
    count, nth = keys.num_layers(file), file.count("no_rope_layer_interval", default=4)
    rotated = file.get("no_rope_layers") or [(layer + 1) % nth for layer in range(count)]
    if not isinstance(rotated, list) or len(rotated) != count:
        raise file.error("no_rope_layers", f"is {rotated!r}; a list of {count} is needed")
    chunked = file.get("attention_chunk_size") is not None
    kinds = [keys.CHUNK if flag and chunked else FULL for flag in rotated]
    return keys.spelled_kinds(file) if file.written.get("layer_types") else kinds


def _periodic(file: ModelFile) -> Kinds:
    """Jamba: a single layer of each period attends."""
    period, offset = file.count("attn_layer_period"), file.count("attn_layer_offset", least=0)
    count = keys.num_layers(file)
    return keys.chosen_kinds(count, range(offset, count, period))


def _kimi(file: ModelFile) -> Kinds:
    """Kimi-Linear: the file counts layers from 1."""
    part, count = file.part("linear_attn_config"), keys.num_layers(file)
    full, linear = part.get("full_attn_layers"), part.get("kda_layers")
    both = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    if len(both) != count or any(layer not in both for layer in range(1, count + 1)):
        raise file.error("linear_attn_config", f"does not name each of {count} layers once")
    return keys.chosen_kinds(count, [layer - 1 for layer in full])


def _searched(file: ModelFile) -> Kinds:
    """Nemotron-NAS: an architecture search removed attention from some layers."""
    count, blocks = keys.num_layers(file), file.get("block_configs")
    listed = blocks if isinstance(blocks, list) else []
    parts = [block.get("attention") for block in listed if isinstance(block, dict)]
    found = [part for part in parts if isinstance(part, dict)]
    if len(found) != count:
        raise file.error("block_configs", f"does not say what attention each of {count} layers has")
    for key in ("window_length", "sparsify", "num_sink_tokens"):
        if any(part.get(key) for part in found):
            raise file.error("block_configs", f"has {key}, which cannot be planned; {REMEDY}")
    without = ("no_op", "replace_with_linear")
    return [NOTHING if any(part.get(key) for key in without) else FULL for part in found]


# ---- the cache of a layer of a kind ------------------------------------------------------------

Reader: TypeAlias = Callable[[ModelFile], LayerCache]
"""Returns the cache of the file's current layer."""


def _heads(file: ModelFile, kv_heads: int | None = None) -> LayerHeads:
    """Keys and values; ``kv_heads`` is for families with their own rule for this number."""
    for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"):
        file.get(key)
    if file.get("head_dim") is None:
        size = file.count("hidden_size") // file.count("num_attention_heads")
    else:
        size = file.count("head_dim")
    if not size:
        raise file.error("hidden_size", "is less than the attention heads")
    if kv_heads is None:
        grouped = file.get("num_key_value_heads") is not None
        kv_heads = file.count("num_key_value_heads" if grouped else "num_attention_heads")
    return LayerHeads(kv_heads, size, _size_v(file, "v_head_dim", size))


def _size_v(file: ModelFile, key: str, size: int) -> int | None:
    size_v = file.count(key, default=size)
    return None if size_v == size else size_v


def _window(file: ModelFile) -> LayerHeads:
    return replace(_heads(file), sliding_window=file.count("sliding_window"))


def _chunk(file: ModelFile) -> LayerHeads:
    return replace(_heads(file), attention_chunk_size=file.count("attention_chunk_size"))


def _latent(file: ModelFile) -> LayerHeads:
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim",
                "q_lora_rank", "qk_nope_head_dim", "qk_head_dim"):  # fmt: skip
        file.get(key)
    return LayerHeads(1, file.count("kv_lora_rank") + file.count("qk_rope_head_dim"), use_mla=True)


def _own(file: ModelFile) -> LayerHeads:
    return (_heads if file.get("kv_lora_rank") is None else _latent)(file)


def _multi_query(file: ModelFile) -> LayerHeads:
    """Falcon, GPT-BigCode: a single KV head, unless the newer architecture counts KV heads."""
    several = file.get("new_decoder_architecture") or not file.get("multi_query")
    return _heads(file, None if several else 1)


def _chatglm(file: ModelFile) -> LayerHeads:
    grouped = file.get("multi_query_attention")
    return _heads(file, None if grouped else file.count("num_attention_heads"))


def _attn_config(file: ModelFile) -> LayerHeads:
    """DBRX, MPT: the number of KV heads is in a nested table."""
    part = file.part("attn_config")
    if part.get("attn_type") == "multiquery_attention":
        return _heads(file, 1)
    return _heads(file, part.count("kv_n_heads", default=file.count("num_attention_heads")))


def _global_4(file: ModelFile) -> LayerHeads:
    """Gemma 4: full layers have their own head size and may have their own KV heads."""
    if file.get("per_layer_config"):
        return _heads(file)
    heads = replace(_heads(file), head_size=file.count("global_head_dim"))
    kv_heads = file.count("num_global_key_value_heads", default=heads.num_kv_heads)
    return replace(heads, num_kv_heads=kv_heads) if file.get("attention_k_eq_v") else heads


def _window_mimo(file: ModelFile) -> LayerHeads:
    file.get("swa_num_attention_heads")
    file.get("attention_chunk_size")  # not used by the model's code
    heads, size = file.count("swa_num_key_value_heads"), file.count("swa_head_dim")
    size_v, window = _size_v(file, "swa_v_head_dim", size), file.count("sliding_window")
    return LayerHeads(heads, size, size_v, sliding_window=window)


def _window_step(file: ModelFile) -> LayerHeads:
    """Step 3.5: windowed layers may have their own heads."""
    if file.get("attention_other_setting") is None:
        return _window(file)
    part = file.part("attention_other_setting")
    if part.get("attention_type") != WINDOW:
        raise file.error("attention_other_setting", f"is not of {WINDOW}; {REMEDY}")
    heads, size = part.count("num_attention_groups"), part.count("head_dim")
    return LayerHeads(heads, size, sliding_window=file.count("sliding_window"))


def _window_cohere(file: ModelFile) -> LayerHeads:
    """Cohere 2: a token attends to a window of tokens before itself (vLLM, ``commandr.py``)."""
    return replace(_heads(file), sliding_window=file.count("sliding_window") + 1)


def _searched_heads(file: ModelFile) -> LayerHeads:
    group = file.get("block_configs")[file.layer]["attention"].get("n_heads_in_group")
    if not isinstance(group, int) or not 0 < group <= file.count("num_attention_heads"):
        raise file.error("block_configs", f"has n_heads_in_group {group!r} in layer {file.layer}")
    return _heads(file, file.count("num_attention_heads") // group)


def _mamba1(file: ModelFile) -> LayerCache:
    x = {"x": (file.count("mamba_expand") * file.count("hidden_size"), 1)}
    conv = state_part("conv", file.dtype, x, file.count("mamba_d_conv") - 1)
    return conv, state_part("ssm", file.dtype, x, file.count("mamba_d_state"))


def _mamba2(file: ModelFile) -> LayerCache:
    heads = file.count("mamba_n_heads")
    for key in ("mamba_expand", "mamba_chunk_size", "chunk_size"):
        file.get(key)
    if file.get("mamba_d_head") in (None, "auto"):
        size = file.count("mamba_expand") * file.count("hidden_size") // heads
    else:
        size = file.count("mamba_d_head")
    return mamba2_states(
        num_heads=heads, head_size=size, state_size=file.count("mamba_d_state"),
        num_groups=file.count("mamba_n_groups"), conv_kernel=file.count("mamba_d_conv"),
        dtype=file.dtype, ssm_dtype=file.get("mamba_ssm_cache_dtype"),
    )  # fmt: skip


def _gated_delta_net(file: ModelFile) -> LayerCache:
    heads, size = file.count("linear_num_value_heads"), file.count("linear_value_head_dim")
    keys_of, key_size = file.count("linear_num_key_heads"), file.count("linear_key_head_dim")
    return gated_delta_net_states(
        num_heads=heads, head_size=size, key_head_size=key_size, key_size=keys_of * key_size,
        conv_kernel=file.count("linear_conv_kernel_dim"), dtype=file.dtype,
        delta_dtype=file.get("mamba_ssm_dtype"),
    )  # fmt: skip


def _kimi_delta(file: ModelFile) -> LayerCache:
    part = file.part("linear_attn_config")
    heads, size = part.count("num_heads"), part.count("head_dim")
    return gated_delta_net_states(
        num_heads=heads, head_size=size, key_head_size=size, key_size=heads * size,
        conv_kernel=part.count("short_conv_kernel_size"), dtype=file.dtype, delta_dtype="float32",
    )  # fmt: skip


def _lightning(file: ModelFile) -> LayerCache:
    heads = {"heads": (file.count("num_attention_heads"), 1)}
    return (state_part("kv", file.dtype, heads, _heads(file).head_size ** 2),)


def _short_conv(file: ModelFile) -> LayerCache:
    for key in ("num_heads", "conv_dim_out"):
        file.get(key)
    channels = file.count("conv_dim", default=file.count("hidden_size"))
    return (state_part("conv", file.dtype, {"x": (channels, 1)}, file.count("conv_L_cache") - 1),)


# ---- families ----------------------------------------------------------------------------------

_ATTENTION: Mapping[str, Reader] = {
    FULL: _heads,
    WINDOW: _window,
    keys.CHUNK: _chunk,
    NOTHING: lambda _: None,
}


@dataclass(frozen=True, slots=True)
class Family:
    """The rules for files of a ``model_type``."""

    kinds: Callable[[ModelFile], Kinds] = keys.window_kinds
    """Function that returns the kind of each layer."""
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """Kind → function for the cache of a layer, only for kinds that differ from other families."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values for keys that a file omits."""

    def layers(self, file: ModelFile) -> tuple[LayerCache, ...]:
        """The cache of each layer.

        Raises:
            ModelError: a value is missing, wrong or not understood.
        """
        readers, caches = {**_ATTENTION, **self.readers}, []
        for layer, kind in enumerate(self.kinds(file)):
            file.layer = layer
            if kind not in readers:
                known = ", ".join(readers)
                raise file.error(
                    "layer_types",
                    f"says that layer {layer} is {kind}; planned are {known}; {REMEDY}",
                )
            caches.append(readers[kind](file))
        if not any(isinstance(cache, LayerHeads) for cache in caches):
            raise file.error("layer_types", f"says that no layer attends; {REMEDY}")
        file.check_understood()
        return tuple(caches)


MODELS: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("models.json").read_text(encoding="utf-8")
)
"""Facts of public models: shapes of known models, and defaults of config classes."""

_LATENT: Mapping[str, Reader] = {FULL: _latent}
_MULTI_QUERY: Mapping[str, Reader] = {FULL: _multi_query}
_MAMBA2: Mapping[str, Reader] = {RECURRENT: _mamba2}
_DELTA_NET: Mapping[str, Reader] = {RECURRENT: _gated_delta_net}

_OTHERS: Mapping[str, tuple[Callable[[ModelFile], Kinds], Mapping[str, Reader]]] = {
    "cohere2": (keys.window_kinds, {WINDOW: _window_cohere}),
    "gemma3n_text": (_shared, {}),
    "gemma4_text": (_shared_4, {FULL: _global_4}),
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), (keys.window_kinds, {WINDOW: _window_mimo})),
    **dict.fromkeys(("step3p5", "step3p7"), (keys.window_kinds, {WINDOW: _window_step})),
    "nemotron-nas": (_searched, {FULL: _searched_heads}),
    **dict.fromkeys(
        ("falcon", "RefinedWebModel", "RefinedWeb", "gpt_bigcode"),
        (keys.spelled_kinds, _MULTI_QUERY),
    ),
    "chatglm": (keys.spelled_kinds, {FULL: _chatglm}),
    **dict.fromkeys(("dbrx", "mpt"), (keys.spelled_kinds, {FULL: _attn_config})),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"),
        (keys.spelled_kinds, _LATENT),
    ),
    "llama4_text": (_rotated, {}),
    "kimi_linear": (_kimi, {FULL: _latent, RECURRENT: _kimi_delta}),
    **dict.fromkeys(("minimax_text_01", "minimax"), (keys.window_kinds, {RECURRENT: _lightning})),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), (keys.window_kinds, _DELTA_NET)
    ),
    "jamba": (_periodic, {RECURRENT: _mamba1}),
    **dict.fromkeys(("bamba", "granitemoehybrid", "nemotron_h"), (keys.window_kinds, _MAMBA2)),
    **dict.fromkeys(("lfm2", "lfm2_moe"), (keys.window_kinds, {RECURRENT: _short_conv})),
}

FAMILIES: Mapping[str | None, Family] = {
    None: Family(readers={FULL: _own}),  # a file that the user wrote
    **{kind: Family(defaults=defaults) for kind, defaults in MODELS["plain"].items()},
    **{kind: Family(_windowed, {}, defaults) for kind, defaults in MODELS["windowed"].items()},
    **{kind: Family(*how, MODELS["others"].get(kind, {})) for kind, how in _OTHERS.items()},
}
"""``model_type`` → the rules for files of this type."""
