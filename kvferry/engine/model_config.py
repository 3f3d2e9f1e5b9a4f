"""What a Llama-architecture model is made of, as one checked struct.

The struct is written as the ``config.json`` of a converted model folder. Its fields carry
transformers' names, so that such a folder is an ordinary model folder to other tools too.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvferry.config import EngineConfig
from kvferry.errors import ConfigError, ModelError
from kvferry.layouts.layout import Layout
from kvferry.topology.geometry import EngineGeometry, ParallelShape

#: ``architectures`` entries whose mathematics this engine computes.
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

#: Fields that change which tokens are asked for or when an answer ends, but not the KV.
_OUTSIDE_DIGEST = frozenset({"bos_token_id", "eos_token_id", "max_position_embeddings"})


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rotary embedding settings; the fields after ``rope_theta`` belong to ``llama3`` alone."""

    rope_type: Literal["default", "llama3"]
    rope_theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.rope_type != "llama3":
            return
        for field in self.__struct_fields__:
            if getattr(self, field) is None:
                raise ValueError(f"rope_parameters: {field} is missing, which llama3 needs")


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A dense Llama-architecture decoder: RMSNorm, rotary embeddings, GQA, SwiGLU, no biases."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: RopeParameters
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] | None = None
    """Tokens that end an answer."""
    model_type: Literal["llama"] = "llama"
    architectures: tuple[Literal["LlamaForCausalLM"]] = ("LlamaForCausalLM",)
    hidden_act: Literal["silu"] = "silu"

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd; rotary embeddings need pairs")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer; empty when the model names none."""
        return self.eos_token_id or ()

    def geometry(
        self, *, dtype: str, block_size: int, layout: Layout | str, parallel: ParallelShape
    ) -> EngineGeometry:
        """The KV cache of an engine that runs this model.

        Raises:
            ValueError: the layout or the shape does not fit, see :class:`EngineGeometry`.
        """
        return EngineGeometry(
            num_layers=self.num_hidden_layers,
            num_kv_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            dtype=dtype,
            block_size=block_size,
            layout=layout,
            parallel=parallel,
        )

    def digest(self) -> str:
        """SHA-256 (hex) of everything here that shapes the KV, in canonical JSON."""
        values = msgspec.to_builtins(self)
        kept = {key: value for key, value in values.items() if key not in _OUTSIDE_DIGEST}
        return hashlib.sha256(msgspec.json.encode(kept, order="sorted")).hexdigest()

    def rope_text(self) -> str:
        """Canonical text of the rope settings, for messages and comparison."""
        return msgspec.json.encode(self.rope_parameters, order="sorted").decode()


def engine_geometry(engine: EngineConfig, model: LlamaConfig, dtype: str) -> EngineGeometry:
    """The KV cache of an engine.

    Raises:
        ConfigError: the shape does not fit the model.
    """
    try:
        return model.geometry(
            dtype=dtype,
            block_size=engine.block_size,
            layout=engine.layout,
            parallel=ParallelShape(tp=engine.tp, pp=engine.pp),
        )
    except ValueError as error:
        raise ConfigError(f"engine {engine.name!r}: {error}") from error


def parse_config(values: Mapping[str, Any], where: str) -> LlamaConfig:
    """Builds the config from the contents of a transformers ``config.json``.

    Args:
        values: the decoded JSON, in the form of any transformers release (``rope_parameters``, or
            ``rope_theta`` and ``rope_scaling``).
        where: how the user finds the file, for messages.

    Raises:
        ModelError: another architecture, or a setting that this engine does not compute.
    """
    _check_architecture(values, where)
    fields: dict[str, Any] = {
        name: values[name]
        for name in LlamaConfig.__struct_fields__
        if values.get(name) is not None and name not in ("model_type", "architectures")
    }
    heads = values.get("num_attention_heads")
    fields.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and isinstance(values.get("hidden_size"), int) and heads > 0:
        fields.setdefault("head_dim", values["hidden_size"] // heads)
    fields["rope_parameters"] = _rope(values, where)
    if isinstance(values.get("eos_token_id"), int):
        fields["eos_token_id"] = (values["eos_token_id"],)
    try:
        return msgspec.convert(fields, LlamaConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from error


def _check_architecture(values: Mapping[str, Any], where: str) -> None:
    named = values.get("architectures") or []
    known = set(SUPPORTED_ARCHITECTURES)
    if named and not known.intersection(named):
        raise ModelError(
            f"{where}: architecture {', '.join(named)} is not supported; "
            f"this engine computes {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if not named and values.get("model_type") not in ("llama", "mistral"):
        raise ModelError(
            f"{where}: names no architecture, and model_type {values.get('model_type')!r} is "
            "neither 'llama' nor 'mistral'"
        )
    for key, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("sliding_window", None),
    ):
        if values.get(key, wanted) != wanted:
            raise ModelError(
                f"{where}: {key} is {values[key]!r}; this engine computes {key} {wanted!r} only"
            )


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
