"""The reference model: one rank's share of a Llama-architecture decoder, in plain torch.

Layers are shared by pipeline stage, heads as the geometry says (replicated KV heads and ranks
without a query head included), the MLP's inner dim and the vocabulary by ranges of any size. Two
sums per layer are all that TP ranks exchange.

Legend of the dims::

    T  tokens of the step    S  sampled tokens    V  vocabulary
    H  heads of this rank    D  element of a head    M  hidden size of the model
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError, safe_open

from kvferry.engine.attention import attend, write_kv
from kvferry.engine.attention_batch import LayerBatch, StepBatch
from kvferry.engine.attention_cache import PagedKVCache
from kvferry.engine.communicator import Communicator
from kvferry.engine.model_config import LlamaConfig, RopeParameters
from kvferry.engine.weights_folder import WEIGHTS_FILE
from kvferry.errors import ModelError
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
class ModelShard:
    """Which part of the model one rank holds, in the model's own indices."""

    layers: Sequence[int]
    kv_heads: range
    query_heads: range
    """May be empty: such a rank writes its replica of a KV head and computes no attention."""
    inner: range
    """Of the MLP."""
    vocab: range
    """Rows of ``lm_head``; on the last stage."""
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, config: LlamaConfig, geometry: EngineGeometry, rank: int) -> "ModelShard":
        """The share of a rank.

        Raises:
            ModelError: the geometry is not of this model.
        """
        for field, ours, models in (
            ("num_layers", geometry.num_layers, config.num_hidden_layers),
            ("num_kv_heads", geometry.num_kv_heads, config.num_key_value_heads),
            ("head_size", geometry.head_size, config.head_dim),
        ):
            if ours != models:
                raise ModelError(f"{field}: the geometry has {ours}, the model {models}")
        at = geometry.rank_coordinates(rank)
        return cls(
            layers=geometry.layers(rank),
            kv_heads=geometry.heads(rank),
            query_heads=geometry.query_heads(rank, config.num_attention_heads),
            inner=split_range(config.intermediate_size, at.tp, geometry.parallel.tp),
            vocab=split_range(config.vocab_size, at.tp, geometry.parallel.tp),
            is_first=at.pp == 0,
            is_last=at.pp == geometry.parallel.pp - 1,
        )


def split_range(total: int, index: int, parts: int) -> range:
    """One of ``parts`` nearly equal ranges of ``range(total)``; empty where there are too few.

    >>> [split_range(8, index, 3) for index in range(3)]
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    return range(index * total // parts, (index + 1) * total // parts)


class WeightReader:
    """Slices of a converted folder's tensors, mapped and copied out one by one.

    Copies lie aligned and dense, so that ranks that hold the same slice compute the same bits.

    Raises:
        ModelError: the file is missing or damaged.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._path = folder / WEIGHTS_FILE
        self._dtype = dtype
        try:
            self._file: Any = safe_open(self._path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self._path}: cannot be mapped: {error}") from error

    def rows(self, *parts: tuple[str, range]) -> torch.Tensor:
        """Rows of one or more tensors, stacked."""
        return self._copy([self._slice(name)[rows.start : rows.stop] for name, rows in parts])

    def columns(self, name: str, columns: range) -> torch.Tensor:
        """Columns of a tensor."""
        return self._copy([self._slice(name)[:, columns.start : columns.stop]])

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._copy([self._slice(name)[:]])

    def mapped(self, name: str) -> torch.Tensor:
        """A whole tensor, not copied where the dtype allows: all ranks share its pages."""
        tensor: torch.Tensor = self._slice(name)[:]
        return tensor.to(self._dtype)

    def _slice(self, name: str) -> Any:
        try:
            return self._file.get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{self._path}: {name}: {error}") from error

    def _copy(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
        return torch.cat(pieces, out=torch.empty(shape, dtype=self._dtype))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's share on one rank; linear weights are ``[out, in]``."""

    input_norm: torch.Tensor
    q: torch.Tensor
    kv: torch.Tensor
    """Rows of k, then of v. Apart from q, whose rows differ between ranks that hold the same KV
    head: a product of another shape may round differently, and replicas must agree bit by bit."""
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def read(
        cls, reader: WeightReader, layer: int, shard: ModelShard, head_size: int
    ) -> "LayerWeights":
        """Takes the slices of a shard."""
        prefix = f"model.layers.{layer}."
        queries = _scaled(shard.query_heads, head_size)
        keys = _scaled(shard.kv_heads, head_size)
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return cls(
            input_norm=reader.whole(prefix + "input_layernorm.weight"),
            q=reader.rows((attention + "q_proj.weight", queries)),
            kv=reader.rows(
                (attention + "k_proj.weight", keys), (attention + "v_proj.weight", keys)
            ),
            o=reader.columns(attention + "o_proj.weight", queries),
            post_norm=reader.whole(prefix + "post_attention_layernorm.weight"),
            gate_up=reader.rows(
                (mlp + "gate_proj.weight", shard.inner), (mlp + "up_proj.weight", shard.inner)
            ),
            down=reader.columns(mlp + "down_proj.weight", shard.inner),
        )


def _scaled(units: range, size: int) -> range:
    return range(units.start * size, units.stop * size)


class LlamaModel:
    """One rank's share of the model, ready to compute.

    Args:
        folder: a converted model folder.
        config: its config.
        geometry: of the engine.
        communicator: the rank's end.
        dtype: of weights and activations, and of the KV cache.

    Raises:
        ModelError: the folder cannot be used, or the geometry is not of this model.
    """

    def __init__(
        self,
        folder: Path,
        config: LlamaConfig,
        geometry: EngineGeometry,
        communicator: Communicator,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.shard = shard = ModelShard.of(config, geometry, communicator.rank)
        self._communicator = communicator
        self._vocab_sizes = [
            len(split_range(config.vocab_size, index, geometry.parallel.tp))
            for index in range(geometry.parallel.tp)
        ]
        reader = WeightReader(folder, dtype)
        self._layers = {
            layer: LayerWeights.read(reader, layer, shard, config.head_dim)
            for layer in shard.layers
        }
        embedding = "model.embed_tokens.weight"
        self._embedding = reader.mapped(embedding) if shard.is_first else None
        self._norm = self._head = None
        if shard.is_last:
            self._norm = reader.whole("model.norm.weight")
            head = embedding if config.tie_word_embeddings else "lm_head.weight"
            self._head = reader.rows((head, shard.vocab))
        self._inverse_frequencies = inverse_frequencies(config.rope_parameters, config.head_dim)

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
        for layer, weights in self._layers.items():
            hook.before_attention(layer)
            attended_TM = self._attention(
                weights, hidden_TM, rope, cache.layer(layer), batch.layers[layer]
            )
            hook.after_attention(layer)
            self._communicator.all_reduce(attended_TM)
            hidden_TM = hidden_TM + attended_TM
            inner_TM = self._mlp(weights, hidden_TM)
            self._communicator.all_reduce(inner_TM)
            hidden_TM = hidden_TM + inner_TM
        if not self.shard.is_last:
            self._communicator.send(hidden_TM)
            return None
        return self._logits(hidden_TM, batch)

    def _attention(
        self,
        weights: LayerWeights,
        hidden_TM: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, ...],
        batch: LayerBatch,
    ) -> torch.Tensor:
        """This rank's summand of a layer's attention, ``[T, M]``."""
        count, size = len(hidden_TM), self.config.head_dim
        normed_TM = rms_norm(hidden_TM, weights.input_norm, self.config.rms_norm_eps)
        kv = F.linear(normed_TM, weights.kv).view(count, 2, len(self.shard.kv_heads), size)
        write_kv(cache, batch, rotate(kv[:, 0], *rope), kv[:, 1])
        if not self.shard.query_heads:
            return torch.zeros_like(hidden_TM)
        q_THD = rotate(F.linear(normed_TM, weights.q).view(count, -1, size), *rope)
        k_BNHD, v_BNHD = cache
        return F.linear(attend(q_THD, (k_BNHD, v_BNHD), batch).view(count, -1), weights.o)

    def _mlp(self, weights: LayerWeights, hidden_TM: torch.Tensor) -> torch.Tensor:
        """This rank's summand of a layer's MLP, ``[T, M]``."""
        normed_TM = rms_norm(hidden_TM, weights.post_norm, self.config.rms_norm_eps)
        gate, up = F.linear(normed_TM, weights.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weights.down)

    def _logits(self, hidden_TM: torch.Tensor, batch: StepBatch) -> torch.Tensor | None:
        if not len(batch.sampled):
            return None
        assert self._norm is not None
        assert self._head is not None
        last_SM = rms_norm(hidden_TM[batch.sampled], self._norm, self.config.rms_norm_eps)
        return self._communicator.gather(F.linear(last_SM, self._head), self._vocab_sizes)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides by the root mean square over the last dim; 16-bit inputs are summed in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def inverse_frequencies(rope: RopeParameters, head_size: int) -> torch.Tensor:
    """Angle per position of each pair of elements, float32 ``[D / 2]``.

    float32 whatever the model's dtype, because the weights were trained with it: at position
    2,000 the difference to float64 is 1e-4.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "default":
        return frequencies
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    # Llama 3.1's rule: waves that fit the original context often enough stay, waves longer than
    # it are stretched by `factor`, and those between are blended by how often they fit.
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


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: element ``d`` is paired with element ``d + D / 2``."""
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
