"""The part of the model's weights that a rank holds, and the rank's KV cache.

Block ids are unique over all groups of layers, so layers of different groups may share a tensor: a
block belongs to a single group at a time, and holds the layers of this group. With groups of 3, 3
and 2 layers on a rank and a layout without L::

    tensor 0:  layer 0 of group 0 | layer 0 of group 1 | layer 0 of group 2
    tensor 1:  layer 1 of group 0 | layer 1 of group 1 | layer 1 of group 2
    tensor 2:  layer 2 of group 0 | layer 2 of group 1 |

A cross-layer layout has a single tensor of 3 layers, and group 2 uses the first 2 of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from kvferry.engine.model_config import DecoderConfig
from kvferry.engine.weights_folder import WEIGHTS_FILE
from kvferry.errors import ModelError
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.sharding import ranges_text


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of the model that a rank holds, in the model's own indices."""

    layers: range
    kv_heads: range
    query_heads: range
    """Query heads of the rank. A rank without query heads writes its replica of a KV head and
    computes no attention."""
    inner: range
    """Range of the MLP's inner dim."""
    vocab: range
    """Rows of ``lm_head``; used on the last stage."""
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, config: DecoderConfig, groups: Sequence[EngineGeometry], rank: int) -> "ModelShard":
        """The part of a rank.

        Args:
            config: config of the model.
            groups: geometries of the engine's KV cache groups.
            rank: number of the rank.

        Raises:
            ModelError: the geometries belong to another model.
        """
        for geometry in groups:
            _check_group(config, geometry, groups[0])
        first = groups[0]
        at, tp = first.rank_coordinates(rank), first.parallel.tp
        stages = _stages(config, groups)
        return cls(
            layers=range(stages.index(at.pp), stages.index(at.pp) + stages.count(at.pp)),
            kv_heads=first.heads(rank),
            query_heads=first.query_heads(rank, config.num_attention_heads),
            inner=split_range(config.intermediate_size, at.tp, tp),
            vocab=split_range(config.vocab_size, at.tp, tp),
            is_first=at.pp == 0,
            is_last=at.pp == first.parallel.pp - 1,
        )


def _check_group(config: DecoderConfig, geometry: EngineGeometry, first: EngineGeometry) -> None:
    heads, windows = config.cache_shape.heads, config.cache_shape.layer_windows
    for field, ours, models in (
        ("num_kv_heads", geometry.num_kv_heads, heads.num_kv_heads),
        ("head_size", geometry.head_size, heads.head_size),
        ("head_size_v", geometry.head_size_v, None),
        ("use_mla", geometry.use_mla, heads.use_mla),
        ("attention_chunk_size", geometry.attention_chunk_size, None),
        ("parallel", geometry.parallel, first.parallel),
    ):
        if ours != models:
            raise ModelError(f"{field}: the geometry has {ours}, the model {models}")
    for layer in geometry.model_layers:
        kept, needed = geometry.sliding_window, windows.get(layer)
        if kept is not None and (needed is None or needed > kept):
            raise ModelError(
                f"sliding_window: the geometry keeps {kept} tokens of layer {layer}, which attends "
                f"to {'all' if needed is None else needed}"
            )


def _stages(config: DecoderConfig, groups: Sequence[EngineGeometry]) -> list[int]:
    """The pipeline stage of each layer of the model."""
    stage_of = {layer: group.stage_of(layer) for group in groups for layer in group.model_layers}
    held = sorted(layer for group in groups for layer in group.model_layers)
    if held != list(range(config.num_hidden_layers)):
        raise ModelError(
            f"layers: the geometries have {ranges_text(held)}, the model "
            f"{ranges_text(range(config.num_hidden_layers))}"
        )
    stages = [stage_of[layer] for layer in held]
    steps = {after - before for before, after in pairwise([-1, *stages, groups[0].parallel.pp])}
    if not steps <= {0, 1}:
        raise ModelError(
            f"layers: stages {', '.join(map(str, stages))} of the layers in their order; each "
            "stage must hold one run of layers, in the order of the stages"
        )
    return stages


def split_range(total: int, index: int, parts: int) -> range:
    """A range from the division of ``range(total)`` into ``parts`` nearly equal ranges.

    Some ranges are empty if ``parts`` exceeds ``total``.

    >>> [split_range(8, index, 3) for index in range(3)]
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    return range(index * total // parts, (index + 1) * total // parts)


def scaled(units: range, size: int) -> range:
    """The rows of ``units``, with ``size`` rows per unit.

    >>> scaled(range(2, 4), 16)
    range(32, 64)
    """
    return range(units.start * size, units.stop * size)


class WeightReader:
    """Copies slices of tensors out of a converted folder's mapped weight file.

    The copies are aligned and dense, so ranks with the same slice compute the same bits.

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
        """Rows of several tensors, stacked."""
        return self._copy([self._slice(name)[rows.start : rows.stop] for name, rows in parts])

    def columns(self, name: str, columns: range) -> torch.Tensor:
        """Columns of a tensor."""
        return self._copy([self._slice(name)[:, columns.start : columns.stop]])

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._copy([self._slice(name)[:]])

    def mapped(self, name: str) -> torch.Tensor:
        """A whole tensor, mapped if the dtype fits, so that all ranks share its memory pages."""
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


class PagedKVCache:
    """The KV cache of a rank.

    Args:
        groups: geometries of the engine's KV cache groups.
        rank: number of the rank.
        num_blocks: blocks of the pool that all groups share, including the null block.
        memory: at least ``PagedKVCache.nbytes(groups, rank, num_blocks)`` bytes, aligned to the
            dtype.

    Raises:
        ValueError: a block of a group would overlap another block of another group.
    """

    def __init__(
        self,
        groups: Sequence[EngineGeometry],
        rank: int,
        num_blocks: int,
        memory: npt.NDArray[np.uint8],
    ) -> None:
        _check_blocks_apart(groups, rank, num_blocks)
        self.tensors: dict[str, torch.Tensor] = {}
        """Tensors for the connector to register. With a single group, the names are
        ``geometry.tensor_names(rank)``. With several groups, each layer has its own tensor under
        its own name, without an L dim."""
        self._parts: dict[int, tuple[torch.Tensor, ...]] = {}
        flat = torch.from_numpy(memory[: self.nbytes(groups, rank, num_blocks)])
        for geometry in groups:
            if not geometry.layers(rank):
                continue
            shape = _shape(groups, geometry, rank, num_blocks)
            tensor = flat.view(getattr(torch, geometry.dtype)).view(shape)
            self._add_layers(geometry, rank, tensor)
            if len(groups) == 1 and geometry.layout.is_cross_layer:
                self.tensors = dict.fromkeys(geometry.tensor_names(rank), tensor)

    @staticmethod
    def nbytes(groups: Sequence[EngineGeometry], rank: int, num_blocks: int) -> int:
        """Bytes of a rank's cache; the group with most layers on the rank determines the size."""
        held = [geometry for geometry in groups if geometry.layers(rank)]
        return max(
            math.prod(_shape(groups, geometry, rank, num_blocks)) * geometry.itemsize
            for geometry in held
        )

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The parts of a model layer, each ``[B, N, H, D]``; views, not copies.

        The parts are keys and values; with MLA, the latent alone.
        """
        return self._parts[layer]

    def _add_layers(self, geometry: EngineGeometry, rank: int, tensor: torch.Tensor) -> None:
        """Cuts the layers of a group out of the rank's memory.

        Args:
            geometry: geometry of the group.
            rank: number of the rank.
            tensor: the rank's memory in the shape of :func:`_shape`.
        """
        num_blocks = tensor.shape[_dims(geometry).index("B")]
        layer_dim = _dims(geometry).index("L")
        layout = geometry.layout.without_layers()
        box = geometry.box(rank, num_blocks)._replace(layers=1)
        for index, layer in enumerate(geometry.layers(rank)):
            own = tensor.select(layer_dim, index)
            self.tensors[geometry.layer_name(layer)] = own
            places = layout.strides(box, own.stride())
            self._parts[layer] = tuple(
                own.as_strided(
                    (num_blocks, geometry.block_size, box.heads, elements),
                    (place.block, place.token, place.head, place.element),
                    own.storage_offset() + place.offset,
                )
                for (_, elements), place in zip(box.parts, places.values(), strict=True)
            )


def _dims(geometry: EngineGeometry) -> str:
    """The dims of the rank's memory, including L: tensors of single layers follow each other."""
    dims = geometry.layout.dims(geometry.part_sizes)
    return dims if geometry.layout.is_cross_layer else "L" + dims


def _shape(
    groups: Sequence[EngineGeometry], geometry: EngineGeometry, rank: int, num_blocks: int
) -> tuple[int, ...]:
    """The shape of the rank's memory for ``geometry``: an extent per letter of :func:`_dims`."""
    most = max(len(group.layers(rank)) for group in groups)
    box = geometry.box(rank, num_blocks)
    if geometry.layout.is_cross_layer:
        return geometry.layout.shape(box._replace(layers=most))
    return (most, *geometry.layout.shape(box))


def _check_blocks_apart(groups: Sequence[EngineGeometry], rank: int, num_blocks: int) -> None:
    """Checks that all groups divide the same bytes into the same blocks."""
    first, *others = (
        (geometry, _block_places(groups, geometry, rank, num_blocks))
        for geometry in groups
        if geometry.layers(rank)
    )
    for geometry, places in others:
        if places != first[1]:
            raise ValueError(
                f"groups: layout {geometry.layout} puts a block of {geometry.block_size} tokens "
                f"elsewhere than layout {first[0].layout} a block of {first[0].block_size} in the "
                "tensor that both share; give all groups the same bytes per block, and a layout "
                "with blocks outside of tokens, heads and elements"
            )


def _block_places(
    groups: Sequence[EngineGeometry], geometry: EngineGeometry, rank: int, num_blocks: int
) -> tuple[tuple[int, ...], int]:
    """Extents of the dims before the block dim, and bytes from a block to the next."""
    shape = _shape(groups, geometry, rank, num_blocks)
    block_dim = _dims(geometry).index("B")
    return shape[:block_dim], math.prod(shape[block_dim + 1 :]) * geometry.itemsize
