"""Configs of decoder models: a checked struct per kind, read from any ``config.json``.

The struct is also written as the ``config.json`` of a converted model folder. Its fields have
transformers' names, so other tools can read such a folder as an ordinary model folder.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from kvferry.cache.cache_shape import CacheShape, LayerHeads
from kvferry.config import shown
from kvferry.decoding import decoder_for
from kvferry.errors import ModelError

#: Fields without influence on the KV: special tokens, and the maximum length.
_OUTSIDE_DIGEST = frozenset({"bos_token_id", "eos_token_id", "max_position_embeddings"})

T = TypeVar("T")

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Tensor name → shape of the tensor."""


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of rotary embeddings; only ``llama3`` uses the fields after ``rope_theta``."""

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


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all kinds: RMSNorm, rotary embeddings, SwiGLU, no biases. Not used directly."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    rms_norm_eps: float
    rope_parameters: RopeParameters
    max_position_embeddings: Count
    architectures: tuple[str]
    """Transformers' name of the architecture; each kind has its own names."""
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] | None = None
    """Ids of the tokens that end an answer."""
    hidden_act: Literal["silu"] = "silu"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer; empty if the model names none."""
        return self.eos_token_id or ()

    # ---- implemented by each kind ----------------------------------------------------------

    @property
    def cache_shape(self) -> CacheShape:
        """The properties of the model that determine its KV cache."""
        raise NotImplementedError

    @property
    def rope_size(self) -> int:
        """Number of rotated elements in a head."""
        raise NotImplementedError

    def attention_tensors(self) -> Shapes:
        """Shapes of a layer's attention tensors without ``self_attn.``; linear: ``[out, in]``."""
        raise NotImplementedError

    # ---- comparison ------------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        """Transformers' name of the architecture."""
        return self.architectures[0]

    def digest(self) -> str:
        """SHA-256 (hex) of all fields that influence the KV, in canonical JSON."""
        values = msgspec.to_builtins(self)
        kept = {key: value for key, value in values.items() if key not in _OUTSIDE_DIGEST}
        return hashlib.sha256(msgspec.json.encode(kept, order="sorted")).hexdigest()

    def rope_text(self) -> str:
        """Canonical text of the rope settings, for messages and comparison."""
        return msgspec.json.encode(self.rope_parameters, order="sorted").decode()


class LlamaConfig(DecoderConfig, frozen=True, kw_only=True):
    """Grouped-query attention over all tokens."""

    num_key_value_heads: Count
    head_dim: Count
    model_type: Literal["llama", "ministral"] = "llama"
    architectures: tuple[Literal["LlamaForCausalLM", "MinistralForCausalLM"]] = (
        "LlamaForCausalLM",
    )

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd; rotary embeddings need pairs")

    @property
    def cache_shape(self) -> CacheShape:
        """Cache of keys and values."""
        heads = LayerHeads(self.num_key_value_heads, self.head_dim)
        return CacheShape.uniform(self.num_hidden_layers, heads)

    @property
    def rope_size(self) -> int:
        """Number of rotated elements in a head: all elements."""
        return self.head_dim

    def attention_tensors(self) -> Shapes:
        """Shapes of a layer's attention tensors without ``self_attn.``; linear: ``[out, in]``."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        return {
            "q_proj.weight": (queries, self.hidden_size),
            "k_proj.weight": (keys, self.hidden_size),
            "v_proj.weight": (keys, self.hidden_size),
            "o_proj.weight": (self.hidden_size, queries),
        }


class MinistralConfig(LlamaConfig, frozen=True, kw_only=True):
    """Grouped-query attention; in some layers, only over a sliding window."""

    sliding_window: Count
    """Number of tokens that a token of such a layer attends to, including itself."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...]
    """Kind of attention of each layer."""
    model_type: Literal["ministral"] = "ministral"
    architectures: tuple[Literal["MinistralForCausalLM"]] = ("MinistralForCausalLM",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types: {len(self.layer_types)} for {self.num_hidden_layers} layers; "
                "name one per layer"
            )

    @property
    def cache_shape(self) -> CacheShape:
        """Cache of keys and values, with the windows of the sliding layers."""
        windows = {
            layer: self.sliding_window
            for layer, kind in enumerate(self.layer_types)
            if kind == "sliding_attention"
        }
        return CacheShape.uniform(self.num_hidden_layers, super().cache_shape.heads, windows)


class DeepseekConfig(DecoderConfig, frozen=True, kw_only=True):
    """Multi-head latent attention of DeepSeek-V2, with a dense MLP in every layer.

    Keys and values of a token follow from a latent of ``kv_lora_rank`` elements and a rotated key
    of ``qk_rope_head_dim`` elements, which all heads share. The KV cache holds these two.
    """

    kv_lora_rank: Count
    q_lora_rank: Count | None
    """Rank of the queries' low-rank product; ``None`` for a single matrix."""
    qk_nope_head_dim: Count
    """Number of elements in a query head that are not rotated."""
    qk_rope_head_dim: Count
    """Number of elements in a query head that are rotated."""
    v_head_dim: Count
    first_k_dense_replace: Count
    """Number of layers without experts; must cover all layers."""
    model_type: Literal["deepseek_v2"] = "deepseek_v2"
    architectures: tuple[Literal["DeepseekV2ForCausalLM"]] = ("DeepseekV2ForCausalLM",)

    def __post_init__(self) -> None:
        if self.first_k_dense_replace < self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace: {self.first_k_dense_replace} of {self.num_hidden_layers} "
                "layers have no experts; this engine computes models without experts only"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim: {self.qk_rope_head_dim} is odd; rotary embeddings need pairs"
            )
        if self.rope_parameters.rope_type != "default":
            raise ValueError(
                f"rope_parameters: rope_type {self.rope_parameters.rope_type!r} would also scale "
                "the scores; this engine computes 'default' with latent attention"
            )

    @property
    def cache_shape(self) -> CacheShape:
        """Cache of the latent, followed by the rotated key."""
        latent = LayerHeads(1, self.kv_lora_rank + self.qk_rope_head_dim, use_mla=True)
        return CacheShape.uniform(self.num_hidden_layers, latent)

    @property
    def rope_size(self) -> int:
        """Number of rotated elements in a query head."""
        return self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Number of elements in a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def attention_tensors(self) -> Shapes:
        """Shapes of a layer's attention tensors without ``self_attn.``; linear: ``[out, in]``."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        queries = heads * self.qk_head_dim
        shapes: Shapes = {"q_proj.weight": (queries, hidden)}
        if self.q_lora_rank is not None:
            shapes = {
                "q_a_proj.weight": (self.q_lora_rank, hidden),
                "q_a_layernorm.weight": (self.q_lora_rank,),
                "q_b_proj.weight": (queries, self.q_lora_rank),
            }
        return shapes | {
            "kv_a_proj_with_mqa.weight": (self.cache_shape.heads.head_size, hidden),
            "kv_a_layernorm.weight": (self.kv_lora_rank,),
            "kv_b_proj.weight": (
                heads * (self.qk_nope_head_dim + self.v_head_dim),
                self.kv_lora_rank,
            ),
            "o_proj.weight": (hidden, heads * self.v_head_dim),
        }


#: Entries of ``architectures`` that this engine can compute → their ``model_type``.
SUPPORTED_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "DeepseekV2ForCausalLM": "deepseek_v2",
}


class _Given(msgspec.Struct, frozen=True):
    """The fields of a ``config.json`` from which the fields of a config are derived."""

    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    layer_types: tuple[str, ...] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None


def parse_config(values: Mapping[str, Any], where: str) -> DecoderConfig:
    """Builds the config from the contents of a transformers ``config.json``.

    Args:
        values: the decoded JSON, in the form of any transformers release (``rope_parameters``, or
            ``rope_theta`` and ``rope_scaling``).
        where: place of the file, for error messages.

    Raises:
        ModelError: another architecture, a setting that this engine does not support, or a field
            with a wrong value.
    """
    raw = _convert(values, _Given, where)
    model_type = _model_type(raw, where)
    _check_settings(values, model_type, where)
    fields = dict(values) | {"rope_parameters": _rope(raw, where)}
    if isinstance(values.get("eos_token_id"), int):
        fields["eos_token_id"] = (values["eos_token_id"],)
    kind: type[DecoderConfig] = DeepseekConfig
    if model_type != "deepseek_v2":
        kind = _fill_llama(fields, raw.layer_types, model_type)
    # ``null`` means the default, and each class sets its own architecture.
    given = {
        name: fields[name]
        for name in kind.__struct_fields__
        if name in fields and name not in ("model_type", "architectures")
        if fields[name] is not None or name == "q_lora_rank"
    }
    return _convert(given, kind, where)


def _convert(values: Mapping[str, Any], kind: type[T], where: str) -> T:
    decoder_for(kind)  # from here on, the threads of several ranks may convert at once
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        text = str(error)
        if field := re.search(r"`\$\.(\w+)", text):
            text = f"{field[1]} is {shown(values[field[1]])}: {text}; correct this field"
        raise ModelError(f"{where}: {text}") from error


def _model_type(raw: _Given, where: str) -> str:
    named = raw.architectures or ()
    for architecture, model_type in SUPPORTED_ARCHITECTURES.items():
        if architecture in named:
            return model_type
    if named:
        raise ModelError(
            f"{where}: architecture {', '.join(named)} is not supported; "
            f"this engine computes {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    model_type = raw.model_type or ""
    if model_type not in SUPPORTED_ARCHITECTURES.values():
        raise ModelError(
            f"{where}: names no architecture, and model_type {model_type!r} is none of "
            f"{', '.join(SUPPORTED_ARCHITECTURES.values())}"
        )
    return model_type


def _check_settings(values: Mapping[str, Any], model_type: str, where: str) -> None:
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    if model_type not in ("mistral", "ministral"):
        # For these kinds, transformers computes no windows even if the config names a window.
        wanted["sliding_window"] = None
    for key, value in wanted.items():
        if values.get(key, value) != value:
            raise ModelError(
                f"{where}: {key} is {values[key]!r}; this engine computes {key} {value!r} only"
            )


def _fill_llama(
    fields: dict[str, Any], types: tuple[str, ...] | None, model_type: str
) -> type[DecoderConfig]:
    """Adds the values that transformers derives, in place; returns the matching class."""
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = heads
    if fields.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int):
        fields["head_dim"] = hidden // max(heads, 1)
    layers = fields.get("num_hidden_layers")
    # Only Ministral has layers of several kinds; in Mistral, all layers are equal.
    if (types is None or model_type == "mistral") and isinstance(layers, int):
        types = ("sliding_attention",) * layers
    if fields.get("sliding_window") is None or not types or set(types) == {"full_attention"}:
        return LlamaConfig
    fields["layer_types"] = types
    return MinistralConfig


def _rope(raw: _Given, where: str) -> dict[str, Any]:
    """The rope settings under their current names; older releases spread them over two keys."""
    given = raw.rope_parameters or raw.rope_scaling or {}
    rope = {key: value for key, value in given.items() if value is not None}
    legacy_type = rope.pop("type", "default")
    rope.setdefault("rope_type", legacy_type)
    rope.setdefault("rope_theta", raw.rope_theta or 10000.0)
    if rope["rope_type"] not in ("default", "llama3"):
        raise ModelError(
            f"{where}: rope_type {rope['rope_type']!r} is not supported; "
            "this engine computes 'default' and 'llama3'"
        )
    known = RopeParameters.__struct_fields__
    unknown = sorted(set(rope) - set(known))
    if unknown:
        raise ModelError(f"{where}: rope settings {', '.join(unknown)} are not supported")
    length = rope.get("original_max_position_embeddings")
    if isinstance(length, float) and length.is_integer():
        rope["original_max_position_embeddings"] = int(length)
    return rope
