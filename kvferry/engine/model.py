"""The reference model: a rank's part of a decoder, in plain torch.

Layers are divided by pipeline stage. Heads are divided by the geometry, which includes replicated
KV heads and ranks without query heads. The MLP's inner dim and the vocabulary are divided into
ranges of any size. TP ranks only exchange two sums per layer.

The attention of a layer is grouped-query or latent. Both kinds compute the rank's summand of the
output and write the rank's part of the cache. Keys and values are computed separately from the
queries. The rows of the queries differ between ranks with the same KV head, and a matrix product of
another shape may round differently, but replicas must agree bit by bit.

Legend of the dims::

    T  tokens of the step    S  sampled tokens        V  vocabulary
    H  heads of this rank    D  element of a head     M  hidden size of the model
    C  element of the latent, R  of the rotated key behind it
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812

from kvferry.connectors.base import WorkerConnector
from kvferry.engine.attention import LayerBatch, StepBatch, attend, write_kv
from kvferry.engine.communicator import Communicator
from kvferry.engine.model_config import DecoderConfig, DeepseekConfig, LlamaConfig, RopeParameters
from kvferry.engine.shard import ModelShard, PagedKVCache, WeightReader, scaled, split_range
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.heads import LATENT, HeadDigests, digest_heads, probed_columns


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides by the root mean square over the last dim; 16-bit inputs are summed in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def inverse_frequencies(rope: RopeParameters, size: int) -> torch.Tensor:
    """Angle per position for each pair of elements, float32 ``[size / 2]``.

    The angles are float32 for every dtype of the model, because the weights were trained with
    float32 angles: at position 2,000 the difference to float64 is 1e-4.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "default":
        return frequencies
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    # Llama 3.1's rule: waves that fit often enough into the original context stay. Waves longer
    # than this context are stretched by `factor`. Waves between are blended, by how often they fit.
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[T, 1, D / 2]`` of the tokens' angles."""
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_halves(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of Llama: element ``d`` is paired with element ``d + D / 2``."""
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_neighbours(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of DeepSeek: element ``2 d`` is paired with element ``2 d + 1``."""
    first, second = x_THD[..., 0::2], x_THD[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the step's positions."""


class GroupedQueryAttention:
    """Attention of Llama, with several query heads per KV head."""

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
        """Writes the step's cells into the cache and attends.

        Args:
            normed_TM: input of all heads.
            rope: cosines and sines of the step's positions.
            cache: the layer's parts, see :meth:`PagedKVCache.layer`.
            batch: the layer's index tensors for the step.

        Returns:
            This rank's summand of the output, ``[T, M]``.
        """
        count = len(normed_TM)
        k_THD, v_THD = F.linear(normed_TM, self._kv).view(count, 2, -1, self._size).unbind(1)
        write_kv(cache, batch, rotate_halves(k_THD, *rope), v_THD)
        if not self._num_queries:
            return torch.zeros_like(normed_TM)
        q_THD = rotate_halves(F.linear(normed_TM, self._q).view(count, -1, self._size), *rope)
        k_BNHD, v_BNHD = cache
        return F.linear(attend(q_THD, (k_BNHD, v_BNHD), batch).view(count, -1), self._o)

    def digest_heads(self) -> tuple[str, bytes]:
        """Form and digests of the weight rows that produce K and V of this rank's heads."""
        columns = self._kv[:, torch.from_numpy(probed_columns(self._kv.shape[1]))].float()
        k_HDC, v_HDC = columns.view(2, -1, self._size, columns.shape[1]).numpy()
        return digest_heads(k_HDC, v_HDC, self._kv.dtype)


#: Epsilon of the latent norms: transformers and vLLM use RMSNorm's default here, and the config's
#: epsilon only for other norms.
_LATENT_EPS = 1e-6


class LatentAttention:
    """Attention of DeepSeek-V2: keys and values of all heads follow from a latent per token.

    Keys and values are never computed explicitly. With the matrix ``K`` of a head and the latent
    ``c``, the score of the head is ``q . (K c) = (K^T q) . c``; the output of the head is
    ``sum of p (V c) = V (sum of p c)``. So every query attends over the latents themselves. The
    latents with the rotated key are the keys of a single KV head, and without the rotated key its
    values ("absorbed", DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
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
        """See :meth:`GroupedQueryAttention.__call__`."""
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

    def digest_heads(self) -> tuple[str, bytes]:
        """The form ``LATENT`` without digests: every rank holds the whole latent."""
        return LATENT, b""

    def _queries(self, normed_TM: torch.Tensor) -> torch.Tensor:
        if self._q_a is None or self._q_norm is None:
            return F.linear(normed_TM, self._q)
        return F.linear(
            rms_norm(F.linear(normed_TM, self._q_a), self._q_norm, _LATENT_EPS), self._q
        )


class DecoderLayer:
    """A rank's part of a layer; linear weights are ``[out, in]``.

    Raises:
        ModelError: a tensor is missing.
    """

    attention: GroupedQueryAttention | LatentAttention

    def __init__(
        self, config: DecoderConfig, reader: WeightReader, layer: int, shard: ModelShard
    ) -> None:
        prefix = f"model.layers.{layer}."
        mlp, attention = prefix + "mlp.", prefix + "self_attn."
        self.input_norm = reader.whole(prefix + "input_layernorm.weight")
        if isinstance(config, DeepseekConfig):
            self.attention = LatentAttention(config, reader, attention, shard)
        else:
            assert isinstance(config, LlamaConfig)
            self.attention = GroupedQueryAttention(config, reader, attention, shard)
        self.post_norm = reader.whole(prefix + "post_attention_layernorm.weight")
        self.gate_up = reader.rows(
            (mlp + "gate_proj.weight", shard.inner), (mlp + "up_proj.weight", shard.inner)
        )
        self.down = reader.columns(mlp + "down_proj.weight", shard.inner)


class DecoderModel:
    """A rank's part of the model, ready to compute.

    Args:
        folder: a converted model folder.
        config: the config of the model.
        groups: geometries of the engine's KV cache groups.
        communicator: the communicator of the rank.
        dtype: dtype of weights, activations and KV cache.

    Raises:
        ModelError: the folder cannot be used, or the geometries belong to another model.
    """

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        groups: Sequence[EngineGeometry],
        communicator: Communicator,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.shard = shard = ModelShard.of(config, groups, communicator.rank)
        self._communicator = communicator
        tp = groups[0].parallel.tp
        self._vocab_sizes = [len(split_range(config.vocab_size, index, tp)) for index in range(tp)]
        self._layer_names = {
            layer: group.layer_name(layer) for group in groups for layer in group.model_layers
        }
        reader = WeightReader(folder, dtype)
        self._layers = {layer: DecoderLayer(config, reader, layer, shard) for layer in shard.layers}
        embedding = "model.embed_tokens.weight"
        self._embedding = reader.mapped(embedding) if shard.is_first else None
        self._norm = self._head = None
        if shard.is_last:
            self._norm = reader.whole("model.norm.weight")
            head = embedding if config.tie_word_embeddings else "lm_head.weight"
            self._head = reader.rows((head, shard.vocab))
        self._inverse_frequencies = inverse_frequencies(config.rope_parameters, config.rope_size)

    def forward(
        self, batch: StepBatch, cache: PagedKVCache, connector: WorkerConnector | None = None
    ) -> torch.Tensor | None:
        """Computes a step and writes its KV.

        Args:
            batch: the step.
            cache: the KV cache of the rank.
            connector: called for each layer with the name of the layer's own tensor, even if a
                single tensor holds all layers, because connectors may move layer by layer.

        Returns:
            Logits ``[S, V]`` of the sampled tokens on the first rank of the last stage, else
            ``None``; also ``None`` if no token is sampled.

        Raises:
            WorkerDiedError: another rank is gone.
        """
        if self._embedding is not None:
            hidden_TM = F.embedding(batch.tokens, self._embedding)
        else:
            hidden_TM = torch.empty(len(batch.tokens), self.config.hidden_size, dtype=self.dtype)
            self._communicator.recv(hidden_TM)
        rope = rotation(batch.positions, self._inverse_frequencies, self.dtype)
        for layer, share in self._layers.items():
            normed_TM = rms_norm(hidden_TM, share.input_norm, self.config.rms_norm_eps)
            if connector is not None:
                connector.wait_for_layer_load(self._layer_names[layer])
            attended_TM = share.attention(normed_TM, rope, cache.layer(layer), batch.layers[layer])
            if connector is not None:
                connector.save_kv_layer(self._layer_names[layer])
            self._communicator.all_reduce(attended_TM)
            hidden_TM = hidden_TM + attended_TM
            inner_TM = self._mlp(share, hidden_TM)
            self._communicator.all_reduce(inner_TM)
            hidden_TM = hidden_TM + inner_TM
        if not self.shard.is_last:
            self._communicator.send(hidden_TM)
            return None
        return self._logits(hidden_TM, batch)

    def head_digests(self) -> HeadDigests:
        """Digests of the weights of this rank's KV heads, for the handshake."""
        return HeadDigests.of(
            {layer: share.attention.digest_heads() for layer, share in self._layers.items()}
        )

    def _mlp(self, share: DecoderLayer, hidden_TM: torch.Tensor) -> torch.Tensor:
        """This rank's summand of a layer's MLP, ``[T, M]``."""
        normed_TM = rms_norm(hidden_TM, share.post_norm, self.config.rms_norm_eps)
        gate, up = F.linear(normed_TM, share.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, share.down)

    def _logits(self, hidden_TM: torch.Tensor, batch: StepBatch) -> torch.Tensor | None:
        if not len(batch.sampled):
            return None
        assert self._norm is not None
        assert self._head is not None
        last_SM = rms_norm(hidden_TM[batch.sampled], self._norm, self.config.rms_norm_eps)
        return self._communicator.gather(F.linear(last_SM, self._head), self._vocab_sizes)
