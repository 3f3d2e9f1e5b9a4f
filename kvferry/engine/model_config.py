"""What a decoder is made of, as one checked struct per kind.

The struct is written as the ``config.json`` of a converted model folder. Its fields carry
transformers' names, so that such a folder is an ordinary model folder to other tools too.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec

from kvferry.cache import KVCacheGroupSpec, KVCacheSpec
from kvferry.cache.cache_shape import CacheShape
from kvferry.layouts.layout import Layout
from kvferry.topology.geometry import EngineGeometry, ParallelShape

#: Fields that change which tokens are asked for or when an answer ends, but not the KV.
_OUTSIDE_DIGEST = frozenset({"bos_token_id", "eos_token_id", "max_position_embeddings"})

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Shape of each tensor, by name."""


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


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What all kinds have: RMSNorm, rotary embeddings, SwiGLU, no biases; not used by itself."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    rms_norm_eps: float
    rope_parameters: RopeParameters
    max_position_embeddings: Count
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] | None = None
    """Tokens that end an answer."""
    hidden_act: Literal["silu"] = "silu"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer; empty when the model names none."""
        return self.eos_token_id or ()

    # ---- what each kind says of itself -----------------------------------------------------

    @property
    def architecture(self) -> str:
        """Transformers' name of the mathematics."""
        raise NotImplementedError

    @property
    def num_kv_heads(self) -> int:
        """Heads that the cache keeps per token; 1 with MLA."""
        raise NotImplementedError

    @property
    def kv_head_size(self) -> int:
        """Elements of a head of k in the cache, or of the latent."""
        raise NotImplementedError

    @property
    def rope_size(self) -> int:
        """Elements of a head that are rotated."""
        raise NotImplementedError

    @property
    def use_mla(self) -> bool:
        """Whether the cache keeps one latent per token in place of keys and values."""
        return False

    @property
    def layer_windows(self) -> dict[int, int]:
        """Layer → tokens that one of its tokens attends to, itself included; no layer that
        attends to all.
        """
        return {}

    def attention_tensors(self) -> Shapes:
        """The tensors of a layer's attention, without ``self_attn.``; linear ones ``[out, in]``."""
        raise NotImplementedError

    # ---- its KV cache ----------------------------------------------------------------------

    @property
    def cache_shape(self) -> CacheShape:
        """What the KV cache depends on."""
        return CacheShape(
            num_layers=self.num_hidden_layers,
            num_kv_heads=self.num_kv_heads,
            head_size=self.kv_head_size,
            use_mla=self.use_mla,
            layer_windows=self.layer_windows,
        )

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """See :meth:`~kvferry.cache.cache_shape.CacheShape.kv_cache_specs`."""
        return self.cache_shape.kv_cache_specs(block_size, dtype)

    def geometries(
        self,
        groups: Sequence[KVCacheGroupSpec],
        *,
        layout: Layout | str,
        parallel: ParallelShape,
    ) -> tuple[EngineGeometry, ...]:
        """See :meth:`~kvferry.cache.cache_shape.CacheShape.geometries`."""
        return self.cache_shape.geometries(groups, layout=layout, parallel=parallel)

    # ---- comparison ------------------------------------------------------------------------

    def digest(self) -> str:
        """SHA-256 (hex) of everything here that shapes the KV, in canonical JSON."""
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
    def architecture(self) -> str:
        """Transformers' name of the mathematics."""
        return self.architectures[0]

    @property
    def num_kv_heads(self) -> int:
        """Heads that the cache keeps per token."""
        return self.num_key_value_heads

    @property
    def kv_head_size(self) -> int:
        """Elements of a head, of k and of v."""
        return self.head_dim

    @property
    def rope_size(self) -> int:
        """Elements of a head that are rotated: all."""
        return self.head_dim

    def attention_tensors(self) -> Shapes:
        """The tensors of a layer's attention, without ``self_attn.``; linear ones ``[out, in]``."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        return {
            "q_proj.weight": (queries, self.hidden_size),
            "k_proj.weight": (keys, self.hidden_size),
            "v_proj.weight": (keys, self.hidden_size),
            "o_proj.weight": (self.hidden_size, queries),
        }


class MinistralConfig(LlamaConfig, frozen=True, kw_only=True):
    """Grouped-query attention, in some layers over a window of the last tokens only."""

    sliding_window: Count
    """Tokens that a token of such a layer attends to, itself included."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...]
    """One per layer."""
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
    def layer_windows(self) -> dict[int, int]:
        """Layer → its window, for the layers that have one."""
        return {
            layer: self.sliding_window
            for layer, kind in enumerate(self.layer_types)
            if kind == "sliding_attention"
        }
