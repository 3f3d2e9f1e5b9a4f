"""The reference model: one rank's share of a decoder, in plain torch.

Layers are shared by pipeline stage, heads as the geometry says (replicated KV heads and ranks
without a query head included), the MLP's inner dim and the vocabulary by ranges of any size. Two
sums per layer are all that TP ranks exchange.

Legend of the dims::

    T  tokens of the step    S  sampled tokens    V  vocabulary    M  hidden size of the model
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from kvferry.engine.attention_batch import StepBatch
from kvferry.engine.attention_cache import PagedKVCache
from kvferry.engine.communicator import Communicator
from kvferry.engine.model_attention import Attention, read_attention
from kvferry.engine.model_config import DecoderConfig
from kvferry.engine.model_functions import inverse_frequencies, rms_norm, rotation
from kvferry.engine.model_shard import ModelShard, WeightReader, split_range
from kvferry.topology.geometry import EngineGeometry


class LayerHook(Protocol):
    """Called around each layer's attention, with the model's layer index."""

    def before_attention(self, layer: int) -> None:
        """The layer's cache is about to be written and read."""

    def after_attention(self, layer: int) -> None:
        """The layer's keys and values of this step are written."""


class NoHook:
    """For a rank without a connector."""

    def before_attention(self, layer: int) -> None:
        """Nothing to wait for."""

    def after_attention(self, layer: int) -> None:
        """Nobody to tell."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's share on one rank; linear weights are ``[out, in]``."""

    input_norm: torch.Tensor
    attention: Attention
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def read(
        cls, config: DecoderConfig, reader: WeightReader, layer: int, shard: ModelShard
    ) -> "DecoderLayer":
        """Takes the slices of a shard."""
        prefix = f"model.layers.{layer}."
        mlp = prefix + "mlp."
        return cls(
            input_norm=reader.whole(prefix + "input_layernorm.weight"),
            attention=read_attention(config, reader, layer, shard),
            post_norm=reader.whole(prefix + "post_attention_layernorm.weight"),
            gate_up=reader.rows(
                (mlp + "gate_proj.weight", shard.inner), (mlp + "up_proj.weight", shard.inner)
            ),
            down=reader.columns(mlp + "down_proj.weight", shard.inner),
        )


class DecoderModel:
    """One rank's share of the model, ready to compute.

    Args:
        folder: a converted model folder.
        config: its config.
        groups: geometries of the engine's KV cache groups.
        communicator: the rank's end.
        dtype: of weights and activations, and of the KV cache.

    Raises:
        ModelError: the folder cannot be used, or the geometries are not of this model.
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
        reader = WeightReader(folder, dtype)
        self._layers = {
            layer: DecoderLayer.read(config, reader, layer, shard) for layer in shard.layers
        }
        embedding = "model.embed_tokens.weight"
        self._embedding = reader.mapped(embedding) if shard.is_first else None
        self._norm = self._head = None
        if shard.is_last:
            self._norm = reader.whole("model.norm.weight")
            head = embedding if config.tie_word_embeddings else "lm_head.weight"
            self._head = reader.rows((head, shard.vocab))
        self._inverse_frequencies = inverse_frequencies(config.rope_parameters, config.rope_size)

    def forward(
        self, batch: StepBatch, cache: PagedKVCache, hook: LayerHook
    ) -> torch.Tensor | None:
        """Computes one step and writes its KV.

        Returns:
            Logits ``[S, V]`` of the sampled tokens on the first rank of the last stage, else
            ``None``; also ``None`` when no token is sampled.

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
            hook.before_attention(layer)
            attended_TM = share.attention(normed_TM, rope, cache.layer(layer), batch.layers[layer])
            hook.after_attention(layer)
            self._communicator.all_reduce(attended_TM)
            hidden_TM = hidden_TM + attended_TM
            inner_TM = self._mlp(share, hidden_TM)
            self._communicator.all_reduce(inner_TM)
            hidden_TM = hidden_TM + inner_TM
        if not self.shard.is_last:
            self._communicator.send(hidden_TM)
            return None
        return self._logits(hidden_TM, batch)

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
