"""A model's ``config.json``: its keys, which of them were understood, and the kind of each layer.

The code here guesses nothing. A key whose name suggests an influence on the cache is refused,
unless a rule has read the key or the key is known to be harmless (:data:`_HARMLESS`). Two
spellings of the same fact must agree.
"""

import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, NamedTuple, TypeAlias

from kvferry.control.handshake import MAX_LAYERS
from kvferry.errors import ModelError

# ---- keys --------------------------------------------------------------------------------------

_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "num_transformer_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_query_heads"),
    "num_key_value_heads": (
        *("num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups"),
    ),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "model_dim"),
    "sliding_window": ("sliding_window_size",),
    "mamba_n_heads": ("mamba_num_heads",),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_n_groups": ("n_groups",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_expand": ("expand",),
}
"""Key → other names of the key in some families."""

REMEDY = (
    "write a file of your own without model_type, of num_hidden_layers, num_attention_heads, "
    "num_key_value_heads and head_dim (numbers, or lists with one per layer), v_head_dim, and "
    "layer_types (full_attention, sliding_attention, chunked_attention, or none) with "
    "sliding_window or attention_chunk_size"
)
"""Advice for a model whose own file cannot be planned."""

_HEADS = {"num_attention_heads", "num_key_value_heads", "head_dim"}
_SHAPING = re.compile(
    r"kv_|_kv|key_value|head|attn|attention|window|layer_?type|layers_(block_)?type|block_config|"
    r"pattern|shar(e|ing)|cross|chunk|sparse|index_|indexer|mamba|ssm|state_size|state_dim|d_state|"
    r"conv|linear_|recurrent|lru|lora_rank|compress|memory|interval|period|(^|_)cla(_|$)|hybrid|"
    r"swa|nsa|moba|multi_query|loop|engram|landmark|retention"
)
_HARMLESS = re.compile(
    r".*(dropout|pdrop|_bias|bias_|norm|expert|softcap|rope|rotary|embedding|_coef|_loss|init|"
    r"vision|activation|hidden_act|intermediate_size|_factor|dt_rank|moe).*|"
    r"(image|video|audio|visual|mm|mtp|mlp|ffn|router|lm_head|flash|projector)_.*|"
    r"(output|return|cache|query_pre_attn|scale_att.*|reorder_and_upcast|add_swa_attention_sink)_.*|"
    r".*(_token_index|_implementation)|use_(flash|logn|qk)_.*|(parallel|interleaved?)_attn|"
    r"attention_(multiplier|scale|value_scale|softmax_in_fp32|probs.*|output_gate)|"
    r"attn_(output_gate|scale|temperature_tuning)|chunk_size_feed_forward|num_reward_heads|"
    r"decoder_sparse_step|interleave_moe_layer_step|share_(q_dim|input_output_layers)|full_attn_mod|use_mamba_kernels|"
    r"cross_attention_hidden_size|use_head_wise_attn_gate|qkv_multipliers"
)

_BEYOND = {
    "index_topk": "an indexer with a cache of its own",
    "compress_ratios": "compressed caches",
    "sparse_attention_config": "sparse attention, which may have a cache of its own",
    "num_kv_shared_layers": "layers that share their KV",
    "attention_chunk_size": "attention in chunks",
    "mamba_d_state": "recurrent state",
    "cross_attention_layers": "a cache of an encoder's tokens",
}
"""Key → its meaning in words, for error messages."""


class ModelFile:
    """The keys of a ``config.json`` for the decoder; notes which keys have been read.

    Args:
        values: the decoded JSON.
        where: place of the file, for error messages.
        dtype: dtype of the checkpoint.
        defaults: values for keys that the file omits.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, dtype: str, defaults: Mapping[str, Any]
    ) -> None:
        self.written, self.where, self.dtype = values, where, dtype
        self.layer = 0
        """Index of the current layer; selects the value from lists with a value per layer."""
        self._layers = self._per_layer()
        self._values = {**defaults, **values}
        self._read: set[str] = set()

    def error(self, key: str, text: str) -> ModelError:
        """The error for a key, with the place of the file."""
        return ModelError(f"{self.where}: {key} {text}")

    def get(self, key: str) -> Any:
        """The value of a key under any of its names; ``None`` if the file has none of them.

        Raises:
            ModelError: two names have different values.
        """
        names = (key, *_NAMES.get(key, ()))
        self._read.update(names)
        values = {**self._values, **self._layers.get(self.layer, {})}
        found = {name: values[name] for name in names if values.get(name) is not None}
        for name, value in found.items():
            if value != (first := next(iter(found.values()))):
                raise self.error(next(iter(found)), f"is {first!r}, but {name} is {value!r}")
        return next(iter(found.values()), None)

    def _per_layer(self) -> dict[int, Mapping[str, Any]]:
        """The differences of single layers, as transformers writes them: layer → keys and values.

        Raises:
            ModelError: the table has another form, or layers differ in more than heads.
        """
        given = self.written.get("per_layer_config") or {}
        found: dict[int, Mapping[str, Any]] = {}
        for layer, values in given.items() if isinstance(given, dict) else [("all", None)]:
            if not str(layer).isdecimal() or not isinstance(values, dict):
                raise self.error("per_layer_config", f"has {values!r} for layer {layer}")
            for key in {*suspicious_keys(values), *({"skip"} & set(values))} - _HEADS:
                raise self.error("per_layer_config", f"has {key} for layer {layer}; {REMEDY}")
            found[int(layer)] = values
        return found

    def count(self, key: str, *, least: int = 1, default: int | None = None) -> int:
        """The whole number of a key; ``default``, if given, for an omitted key.

        Raises:
            ModelError: the number is missing or out of range.
        """
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, list) and self.layer < len(value):
            value = value[self.layer]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            have = "is missing" if value is None else f"is {value!r}"
            raise self.error(key, f"{have}; a whole number of {least} or more is needed")
        return value

    def part(self, name: str) -> "ModelFile":
        """The keys of a nested table.

        Raises:
            ModelError: the key has no table.
        """
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.error(name, f"is {value!r}; keys and values are needed")
        return ModelFile(value, f"{self.where}: {name}", self.dtype, {})

    def check_understood(self) -> None:
        """Checks that all keys that may influence the cache have been read.

        Raises:
            ModelError: such a key has not been read.
        """
        unread = [key for key in suspicious_keys(self.written) if key not in self._read]
        for key in sorted(unread, key=lambda key: key not in _BEYOND):
            text = str(self.written[key])
            text = text if len(text) <= 40 else f"{text[:36]} ..."
            stands = f" ({_BEYOND[key]})" if key in _BEYOND else ""
            raise self.error(
                key,
                f"is {text}{stands}, which may change what layers keep, and cannot be planned; "
                f"take it out of a copy of the file if it does not, or {REMEDY}",
            )


def suspicious_keys(values: Mapping[str, Any]) -> list[str]:
    """Keys that have a value and a name that suggests an influence on the cache."""
    return sorted(
        key
        for key, value in values.items()
        if value and _SHAPING.search(key) and not _HARMLESS.fullmatch(key)
    )


# ---- the kind of each layer --------------------------------------------------------------------

FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT, NOTHING = "linear_attention", "none"
_KINDS = {
    **dict.fromkeys(("attention", "*"), FULL),
    **dict.fromkeys(("mamba", "conv", "M"), RECURRENT),
    **dict.fromkeys(("mlp", "moe", "-", "E"), NOTHING),
}
"""Other names of the kinds; single letters are from Nemotron-H."""

Kinds: TypeAlias = list[str]


def _named(_: int, names: Any) -> Kinds:
    return [_KINDS.get(str(name), str(name)) for name in names]


def _every_nth(count: int, nth: Any, other: str) -> Kinds:
    if isinstance(nth, str):  # for example "LLLG" in EXAONE 4
        return [other if nth[layer % len(nth)] == "L" else FULL for layer in range(count)]
    return [other if (layer + 1) % nth else FULL for layer in range(count)]


def chosen_kinds(count: int, layers: Any) -> Kinds:
    """Kinds of a model in which the given layers attend and all other layers are recurrent."""
    return [FULL if layer in layers else RECURRENT for layer in range(count)]


class _Spelling(NamedTuple):
    """A key that gives the kind of each layer."""

    takes: type[Any] | UnionType
    kinds: Callable[[int, Any], Kinds]
    """Function from the number of layers and the key's value to the kinds of the layers."""


_SPELLINGS: Mapping[str, _Spelling] = {
    "layer_types": _Spelling(list, _named),
    "layers_block_type": _Spelling(list, _named),
    "hybrid_override_pattern": _Spelling(str, _named),
    "hybrid_layer_pattern": _Spelling(
        list, lambda _, flags: [(FULL, WINDOW)[bool(f)] for f in flags]
    ),
    "attn_type_list": _Spelling(list, lambda _, flags: [(RECURRENT, FULL)[bool(f)] for f in flags]),
    "full_attn_idxs": _Spelling(list, chosen_kinds),
    "attn_layer_indices": _Spelling(list, chosen_kinds),
    "full_attention_interval": _Spelling(int, lambda n, nth: _every_nth(n, nth, RECURRENT)),
    "sliding_window_pattern": _Spelling(int | str, lambda n, nth: _every_nth(n, nth, WINDOW)),
    "_sliding_window_pattern": _Spelling(int, lambda n, nth: _every_nth(n, nth, WINDOW)),
}


def num_layers(file: ModelFile) -> int:
    """Number of layers of the model.

    Raises:
        ModelError: the file does not give the number, or the number exceeds ``MAX_LAYERS``.
    """
    listed = file.get("layers_block_type")
    if file.get("num_hidden_layers") is None and isinstance(listed, list):
        return len(listed)  # Nemotron-H
    count = file.count("num_hidden_layers")
    if count > MAX_LAYERS:
        raise file.error("num_hidden_layers", f"is {count}, at most {MAX_LAYERS} are planned")
    return count


def spelled_kinds(file: ModelFile) -> Kinds:
    """The kind of each layer from any spelling; full attention if the file has no spelling.

    Raises:
        ModelError: two spellings disagree, or the number of kinds and of layers differ.
    """
    count = num_layers(file)
    drafts = file.count("num_nextn_predict_layers", least=0, default=0)
    values = {key: value for key in _SPELLINGS if (value := file.get(key))}
    keys = [key for key in values if file.written.get(key)] or list(values)
    found: dict[str, Kinds] = {}
    for key in keys:
        if not isinstance(values[key], _SPELLINGS[key].takes):
            raise file.error(key, f"is {values[key]!r}, which names no kinds of layers")
        kinds = _SPELLINGS[key].kinds(count, values[key])
        if len(kinds) not in (count, count + drafts):  # some files name draft layers too
            raise file.error(key, f"names {len(kinds)} for {count} layers")
        found[key] = kinds[:count]
        if found[key] != found[keys[0]]:
            raise file.error(keys[0], f"and {key} name different kinds; keep one of them")
    return found[keys[0]] if keys else [FULL] * count


def window_kinds(file: ModelFile) -> Kinds:
    """As :func:`spelled_kinds`, for files that may disable windows or start them at a layer."""
    kinds, window = spelled_kinds(file), file.get("sliding_window")
    is_on, starts = file.get("use_sliding_window"), file.get("max_window_layers") is not None
    if file.written.get("layer_types") or (WINDOW not in kinds and not window):
        return kinds
    if not window or is_on is False:
        return [FULL if kind == WINDOW else kind for kind in kinds]
    if WINDOW not in kinds and is_on and starts:
        first = file.count("max_window_layers", least=0)
        return [WINDOW if layer >= first else FULL for layer in range(len(kinds))]
    if WINDOW not in kinds:
        raise file.error(
            "sliding_window",
            f"is {window}, and nothing says which layers have it; add layer_types, one per layer",
        )
    return kinds
