"""Finds the shape of a model: by its name, or from a ``config.json`` of any attention model.

The engine computes few architectures; a plan needs only the shape of the cache, so this reads the
configs of many more.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.cache.cache_shape import CacheShape
from kvferry.cli.known_models import KNOWN_MODELS, ModelInfo, every_nth_full
from kvferry.control.handshake import MAX_LAYERS
from kvferry.engine.weights_folder import CONFIG_FILE, read_json
from kvferry.errors import ConfigError, ModelError
from kvferry.topology.parts import dtype_name

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


def find_model(name: str) -> ModelInfo:
    """The model of a name or of a path to a ``config.json`` or to its folder.

    >>> find_model("Llama-3-70B").shape.num_layers
    80
    >>> find_model("deepseek-ai/DeepSeek-V3").shape.head_size
    576

    Raises:
        ConfigError: neither; the message names the nearest known one.
        ModelError: the file cannot be used.
    """
    wanted = name.lower().replace("_", "-")
    for model in KNOWN_MODELS.values():
        if wanted in (model.name, model.source.lower(), model.source.lower().split("/")[1]):
            return model
    path = Path(name)
    if path.is_dir():
        path /= CONFIG_FILE
    if path.suffix == ".json" or path.is_file():
        return parse_model(read_json(path), str(path))
    near = difflib.get_close_matches(wanted, KNOWN_MODELS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"--model: {name!r} is unknown; {hint}known models: {', '.join(KNOWN_MODELS)}; or give "
        f"the path of a {CONFIG_FILE}"
    )


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
