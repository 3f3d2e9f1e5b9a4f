"""The config of a decoder with multi-head latent attention."""

from typing import Literal

from kvferry.engine.model_config import Count, DecoderConfig, Shapes


class DeepseekConfig(DecoderConfig, frozen=True, kw_only=True):
    """Multi-head latent attention as DeepSeek-V2 has it, with a dense MLP in every layer.

    A token's keys and values follow from one latent of ``kv_lora_rank`` elements and one rotated
    key of ``qk_rope_head_dim`` elements, which all heads share. These two are what is kept.
    """

    kv_lora_rank: Count
    q_lora_rank: Count | None
    """``None``: queries are computed in one step."""
    qk_nope_head_dim: Count
    """Elements of a query head that are not rotated."""
    qk_rope_head_dim: Count
    """Elements of a query head that are."""
    v_head_dim: Count
    first_k_dense_replace: Count
    """Layers without experts: all of them."""
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
    def architecture(self) -> str:
        """Transformers' name of the mathematics."""
        return self.architectures[0]

    @property
    def num_kv_heads(self) -> int:
        """The one latent."""
        return 1

    @property
    def kv_head_size(self) -> int:
        """Elements of the latent, then of the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rope_size(self) -> int:
        """Elements of a query head that are rotated."""
        return self.qk_rope_head_dim

    @property
    def use_mla(self) -> bool:
        """One latent per token."""
        return True

    @property
    def qk_head_dim(self) -> int:
        """Elements of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def attention_tensors(self) -> Shapes:
        """The tensors of a layer's attention, without ``self_attn.``; linear ones ``[out, in]``."""
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
            "kv_a_proj_with_mqa.weight": (self.kv_head_size, hidden),
            "kv_a_layernorm.weight": (self.kv_lora_rank,),
            "kv_b_proj.weight": (
                heads * (self.qk_nope_head_dim + self.v_head_dim),
                self.kv_lora_rank,
            ),
            "o_proj.weight": (hidden, heads * self.v_head_dim),
        }
