"""Reads a model's config from the ``config.json`` of any transformers release."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.engine.model_config import (
    DecoderConfig,
    LlamaConfig,
    MinistralConfig,
    RopeParameters,
)
from kvferry.engine.model_config_mla import DeepseekConfig
from kvferry.errors import ModelError

#: ``architectures`` entries whose mathematics this engine computes, and their ``model_type``.
SUPPORTED_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "DeepseekV2ForCausalLM": "deepseek_v2",
}


def parse_config(values: Mapping[str, Any], where: str) -> DecoderConfig:
    """Builds the config from the contents of a transformers ``config.json``.

    Args:
        values: the decoded JSON, in the form of any transformers release (``rope_parameters``, or
            ``rope_theta`` and ``rope_scaling``).
        where: how the user finds the file, for messages.

    Raises:
        ModelError: another architecture, or a setting that this engine does not compute.
    """
    model_type = _model_type(values, where)
    _check_settings(values, model_type, where)
    fields = dict(values) | {"rope_parameters": _rope(values, where)}
    if isinstance(values.get("eos_token_id"), int):
        fields["eos_token_id"] = (values["eos_token_id"],)
    kind: type[DecoderConfig] = DeepseekConfig
    if model_type != "deepseek_v2":
        kind = _fill_llama(fields, model_type)
    # ``null`` stands for the default, and a class has one architecture of its own.
    given = {
        name: fields[name]
        for name in kind.__struct_fields__
        if name in fields and name not in ("model_type", "architectures")
        if fields[name] is not None or name == "q_lora_rank"
    }
    try:
        return msgspec.convert(given, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from error


def _model_type(values: Mapping[str, Any], where: str) -> str:
    named = values.get("architectures") or []
    for architecture, model_type in SUPPORTED_ARCHITECTURES.items():
        if architecture in named:
            return model_type
    if named:
        raise ModelError(
            f"{where}: architecture {', '.join(named)} is not supported; "
            f"this engine computes {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    model_type = str(values.get("model_type"))
    if model_type not in SUPPORTED_ARCHITECTURES.values():
        raise ModelError(
            f"{where}: names no architecture, and model_type {model_type!r} is none of "
            f"{', '.join(SUPPORTED_ARCHITECTURES.values())}"
        )
    return model_type


def _check_settings(values: Mapping[str, Any], model_type: str, where: str) -> None:
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    if model_type not in ("mistral", "ministral"):
        # transformers computes no windows for these either, whatever their config says.
        wanted["sliding_window"] = None
    for key, value in wanted.items():
        if values.get(key, value) != value:
            raise ModelError(
                f"{where}: {key} is {values[key]!r}; this engine computes {key} {value!r} only"
            )


def _fill_llama(fields: dict[str, Any], model_type: str) -> type[DecoderConfig]:
    """Adds what transformers derives, in place; returns whether there are windows, as a class."""
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = heads
    if fields.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int):
        fields["head_dim"] = hidden // max(heads, 1)
    layers, types = fields.get("num_hidden_layers"), fields.get("layer_types")
    # Only Ministral's layers differ in kind; Mistral's are all alike, whatever is listed.
    if (types is None or model_type == "mistral") and isinstance(layers, int):
        types = ["sliding_attention"] * layers
    if fields.get("sliding_window") is None or not types or set(types) == {"full_attention"}:
        return LlamaConfig
    fields["layer_types"] = types
    return MinistralConfig


def _rope(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rope settings under their present names; older releases spread them over two keys."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope = {key: value for key, value in given.items() if value is not None}
    legacy_type = rope.pop("type", "default")
    rope.setdefault("rope_type", legacy_type)
    rope.setdefault("rope_theta", values.get("rope_theta") or 10000.0)
    if rope["rope_type"] not in ("default", "llama3"):
        raise ModelError(
            f"{where}: rope_type {rope['rope_type']!r} is not supported; "
            "this engine computes 'default' and 'llama3'"
        )
    known = RopeParameters.__struct_fields__
    unknown = sorted(set(rope) - set(known))
    if unknown:
        raise ModelError(f"{where}: rope settings {', '.join(unknown)} are not supported")
    floats = {key: float(rope[key]) for key in rope if key not in ("rope_type",)}
    if "original_max_position_embeddings" in floats:
        floats["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    return {**floats, "rope_type": rope["rope_type"]}
