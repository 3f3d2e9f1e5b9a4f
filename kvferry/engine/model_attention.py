"""One layer's attention on one rank: grouped-query, or over a latent.

Either computes the rank's summand of the output and writes the rank's part of the cache. What goes
into the cache is computed apart from the queries, whose rows differ between ranks that hold the
same KV head: a product of another shape may round differently, and replicas must agree bit by bit.

Legend of the dims::

    T  tokens of the step    H  heads of this rank    M  hidden size of the model
    D  element of a head     C  element of the latent, R  of the rotated key behind it
"""

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812

from kvferry.engine.attention import attend, write_kv
from kvferry.engine.attention_batch import LayerBatch
from kvferry.engine.model_config import DecoderConfig, LlamaConfig
from kvferry.engine.model_config_mla import DeepseekConfig
from kvferry.engine.model_functions import rms_norm, rotate_halves, rotate_neighbours
from kvferry.engine.model_shard import ModelShard, WeightReader, scaled

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the step's positions."""


class Attention(ABC):
    """One layer's attention on one rank."""

    @abstractmethod
    def __call__(
        self,
        normed_TM: torch.Tensor,
        rope: Rotation,
        cache: tuple[torch.Tensor, ...],
        batch: LayerBatch,
    ) -> torch.Tensor:
        """Writes the step's cells and attends.

        Args:
            normed_TM: what all heads see.
            rope: of the step's positions.
            cache: the layer's parts, see :meth:`PagedKVCache.layer`.
            batch: the layer's part of the step.

        Returns:
            This rank's summand of the output, ``[T, M]``.
        """


def read_attention(
    config: DecoderConfig, reader: WeightReader, layer: int, shard: ModelShard
) -> Attention:
    """A layer's attention, with the weights of a shard.

    Raises:
        ModelError: a tensor is missing.
    """
    prefix = f"model.layers.{layer}.self_attn."
    if isinstance(config, DeepseekConfig):
        return LatentAttention(config, reader, prefix, shard)
    assert isinstance(config, LlamaConfig)
    return GroupedQueryAttention(config, reader, prefix, shard)


class GroupedQueryAttention(Attention):
    """Llama's: several query heads per KV head."""

    def __init__(
        self, config: LlamaConfig, reader: WeightReader, prefix: str, shard: ModelShard
    ) -> None:
        self._size = config.head_dim
        self._num_queries = len(shard.query_heads)
        queries = scaled(shard.query_heads, config.head_dim)
        keys = scaled(shard.kv_heads, config.head_dim)
        self._q = reader.rows((prefix + "q_proj.weight", queries))
        self._kv = reader.rows((prefix + "k_proj.weight", keys), (prefix + "v_proj.weight", keys))
        self._o = reader.columns(prefix + "o_proj.weight", queries)

    def __call__(
        self,
        normed_TM: torch.Tensor,
        rope: Rotation,
        cache: tuple[torch.Tensor, ...],
        batch: LayerBatch,
    ) -> torch.Tensor:
        """See :class:`Attention`."""
        count = len(normed_TM)
        k_THD, v_THD = F.linear(normed_TM, self._kv).view(count, 2, -1, self._size).unbind(1)
        write_kv(cache, batch, rotate_halves(k_THD, *rope), v_THD)
        if not self._num_queries:
            return torch.zeros_like(normed_TM)
        q_THD = rotate_halves(F.linear(normed_TM, self._q).view(count, -1, self._size), *rope)
        k_BNHD, v_BNHD = cache
        return F.linear(attend(q_THD, (k_BNHD, v_BNHD), batch).view(count, -1), self._o)


#: transformers and vLLM take RMSNorm's default here, whatever the config says of the other norms.
_LATENT_EPS = 1e-6


class LatentAttention(Attention):
    """DeepSeek-V2's: keys and values of all heads follow from one latent per token.

    Neither is ever spelt out. The score of a head is ``q . (K c) = (K^T q) . c`` with its matrix
    ``K`` and the latent ``c``, and its output is ``sum of p (V c) = V (sum of p c)``. So every
    query attends over the latents themselves, which are keys and, without the rotated key behind
    them, values of one KV head ("absorbed", DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
    """

    def __init__(
        self, config: DeepseekConfig, reader: WeightReader, prefix: str, shard: ModelShard
    ) -> None:
        self._config = config
        self._num_queries = len(shard.query_heads)
        queries = scaled(shard.query_heads, config.qk_head_dim)
        self._kv_a = reader.whole(prefix + "kv_a_proj_with_mqa.weight")
        self._kv_norm = reader.whole(prefix + "kv_a_layernorm.weight")
        self._q_a = self._q_norm = None
        if config.q_lora_rank is None:
            self._q = reader.rows((prefix + "q_proj.weight", queries))
        else:
            self._q_a = reader.whole(prefix + "q_a_proj.weight")
            self._q_norm = reader.whole(prefix + "q_a_layernorm.weight")
            self._q = reader.rows((prefix + "q_b_proj.weight", queries))
        size = config.qk_nope_head_dim + config.v_head_dim
        kv_b = reader.rows((prefix + "kv_b_proj.weight", scaled(shard.query_heads, size)))
        kv_b_HDC = kv_b.view(self._num_queries, size, config.kv_lora_rank)
        self._k_HDC = kv_b_HDC[:, : config.qk_nope_head_dim]
        self._v_HDC = kv_b_HDC[:, config.qk_nope_head_dim :]
        self._o = reader.columns(
            prefix + "o_proj.weight", scaled(shard.query_heads, config.v_head_dim)
        )

    def __call__(
        self,
        normed_TM: torch.Tensor,
        rope: Rotation,
        cache: tuple[torch.Tensor, ...],
        batch: LayerBatch,
    ) -> torch.Tensor:
        """See :class:`Attention`."""
        config, count = self._config, len(normed_TM)
        made = F.linear(normed_TM, self._kv_a)[:, None]
        latent_THC = rms_norm(made[..., : config.kv_lora_rank], self._kv_norm, _LATENT_EPS)
        key_THR = rotate_neighbours(made[..., config.kv_lora_rank :], *rope)
        write_kv(cache, batch, torch.cat((latent_THC, key_THR), dim=-1))
        if not self._num_queries:
            return torch.zeros_like(normed_TM)
        q_THD = self._queries(normed_TM).view(count, self._num_queries, config.qk_head_dim)
        absorbed_THC = torch.einsum(
            "thd,hdc->thc", q_THD[..., : config.qk_nope_head_dim], self._k_HDC
        )
        rotated_THR = rotate_neighbours(q_THD[..., config.qk_nope_head_dim :], *rope)
        q_THC = torch.cat((absorbed_THC, rotated_THR), dim=-1)
        (latent_BNHC,) = cache
        parts = (latent_BNHC, latent_BNHC[..., : config.kv_lora_rank])
        found_THC = attend(q_THC, parts, batch, scale=config.qk_head_dim**-0.5)
        out_THD = torch.einsum("thc,hdc->thd", found_THC, self._v_HDC)
        return F.linear(out_THD.reshape(count, -1), self._o)

    def _queries(self, normed_TM: torch.Tensor) -> torch.Tensor:
        if self._q_a is None or self._q_norm is None:
            return F.linear(normed_TM, self._q)
        return F.linear(
            rms_norm(F.linear(normed_TM, self._q_a), self._q_norm, _LATENT_EPS), self._q
        )
