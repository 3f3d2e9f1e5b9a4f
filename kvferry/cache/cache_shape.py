"""The layers of a model from the view of the KV cache: from shapes to groups to geometries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from kvferry.cache.kv_cache_config import KVCacheGroupSpec
from kvferry.cache.specs import AttentionSpec, FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from kvferry.cache.specs_local import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from kvferry.layouts.layout import Layout
from kvferry.topology import EngineGeometry, GroupGeometry, ParallelShape
from kvferry.topology.sharding import check_count, default_split, heads_of, split_of_group
from kvferry.topology.states import StateGeometry, StatePart

STATE_BLOCK_SIZE = 1 << 20
"""Number of tokens of the single block that holds a state; more than any request has."""


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The cells that an attention layer keeps per token."""

    num_kv_heads: int
    """Number of KV heads of the layer in the model; 1 with MLA."""
    head_size: int
    """Number of elements of a head of k, or of the latent."""
    head_size_v: int | None = None
    """Number of elements of a head of v, if it differs from k."""
    use_mla: bool = False
    """Whether the layer keeps a latent per token instead of keys and values."""
    sliding_window: int | None = None
    """Number of tokens to which a token attends, including itself; ``None`` for all tokens."""
    attention_chunk_size: int | None = None
    """Number of tokens of the chunk within which a token attends; ``None`` for no chunks."""

    @property
    def whole(self) -> "LayerHeads":
        """The same heads for a layer that keeps all tokens."""
        return replace(self, sliding_window=None, attention_chunk_size=None)

    def spec(self, block_size: int, dtype: str, tp: int) -> AttentionSpec:
        """The spec of the last of ``tp`` ranks; no other rank has more heads.

        Raises:
            ValueError: ``block_size``, ``dtype`` or the number of heads is invalid.
        """
        check_count("num_kv_heads", self.num_kv_heads)
        heads = len(heads_of(tp - 1, tp, self.num_kv_heads))
        cells = (block_size, heads, self.head_size, dtype)
        if self.use_mla:
            return MLAAttentionSpec(*cells)
        size_v, window, chunk = self.head_size_v, self.sliding_window, self.attention_chunk_size
        if window is not None:
            return SlidingWindowSpec(*cells, head_size_v=size_v, sliding_window=window)
        if chunk is not None:
            return ChunkedLocalAttentionSpec(*cells, head_size_v=size_v, attention_chunk_size=chunk)
        return FullAttentionSpec(*cells, head_size_v=size_v)


LayerCache: TypeAlias = LayerHeads | tuple[StatePart, ...] | None
"""Cells that a layer keeps: per token, per request, or none of its own."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The properties of a model on which its KV cache depends, without weights.

    >>> from kvferry.cache import group_layers
    >>> shape = CacheShape.uniform(4, LayerHeads(num_kv_heads=2, head_size=8), {0: 16, 2: 16})
    >>> groups = group_layers(shape.kv_cache_specs(16, "bfloat16"))
    >>> [(g.layer_indices, g.sliding_window) for g in
    ...  shape.geometries(groups, layout="NHD", parallel=ParallelShape(tp=2))]
    [((0, 2), 16), ((1, 3), None)]
    """

    layers: tuple[LayerCache, ...]
    """Cells that each layer of the model keeps, first layer first. A layer without attention, and a
    layer that reads the cache of another layer, keep nothing."""

    @classmethod
    def uniform(
        cls, num_layers: int, heads: LayerHeads, windows: Mapping[int, int] = MappingProxyType({})
    ) -> "CacheShape":
        """A model whose layers all have the same heads.

        Args:
            num_layers: number of layers of the model.
            heads: heads of each layer; all tokens are kept.
            windows: layer → window, for layers with a sliding window.
        """
        return cls(
            tuple(
                replace(heads, sliding_window=windows[layer]) if layer in windows else heads
                for layer in range(num_layers)
            )
        )

    @property
    def heads(self) -> LayerHeads:
        """The heads of the first attention layer; in most models, the heads of all layers.

        Raises:
            ValueError: the model has no attention layer.
        """
        for heads in self.layers_by_heads():
            return heads
        raise ValueError("layers: none of them attends")

    def layers_by_heads(self) -> dict[LayerHeads, list[int]]:
        """Heads → attention layers with these heads, in the order of the first layers."""
        found: dict[LayerHeads, list[int]] = {}
        for layer, cache in enumerate(self.layers):
            if isinstance(cache, LayerHeads):
                found.setdefault(cache.whole, []).append(layer)
        return found

    @property
    def layer_windows(self) -> dict[int, int]:
        """Layer → window, for layers with a window."""
        return {
            layer: cache.sliding_window
            for layer, cache in enumerate(self.layers)
            if isinstance(cache, LayerHeads) and cache.sliding_window is not None
        }

    def kv_cache_specs(self, block_size: int, dtype: str, tp: int = 1) -> dict[str, KVCacheSpec]:
        """The spec of each layer, by the layer's name, first layer first.

        Args:
            block_size: number of tokens per block.
            dtype: dtype of the cache.
            tp: number of TP ranks. The specs are for the last rank; with 1 they
                are for the whole model. If the pages of layers differ, the specs decide the number
                of tokens per block of each group.

        Raises:
            ValueError: ``block_size`` or ``dtype`` is invalid.
        """
        specs: dict[str, KVCacheSpec] = {}
        for layer, cache in enumerate(self.layers):
            if isinstance(cache, LayerHeads):
                specs[layer_name(layer)] = cache.spec(block_size, dtype, tp)
            elif cache is not None:
                specs[layer_name(layer)] = _state_spec(cache, tp)
        return specs

    def geometries(
        self,
        groups: Sequence[KVCacheGroupSpec],
        *,
        layout: Layout | str,
        parallel: ParallelShape,
        stage_layers: Sequence[int] | None = None,
    ) -> tuple[GroupGeometry, ...]:
        """The KV cache of an engine: a geometry for each group and each kind of cells in the group.

        Args:
            groups: the groups that :func:`~kvferry.cache.config_builder.group_layers` makes from
                :meth:`kv_cache_specs`.
            layout: layout of every attention group.
            parallel: parallel shape of the engine. Its stages divide the model's layers regardless
                of groups, so a stage may have no layer of a group. States are not padded, because
                their pages are smaller on a rank than in the whole model.
            stage_layers: number of the model's layers on each stage; divided evenly by default.

        Raises:
            ValueError: a group has layers of another model, or the layout or the shape does not
                fit, see :class:`EngineGeometry`.
        """
        stages = stage_layers or default_split(len(self.layers), parallel.pp)
        if (len(stages), sum(stages)) != (parallel.pp, len(self.layers)):
            raise ValueError(
                f"layers: {'+'.join(map(str, stages))} are {sum(stages)} layers on {len(stages)} "
                f"stages; the model has {len(self.layers)} and the engine pp={parallel.pp}"
            )
        made: list[GroupGeometry] = []
        for group in groups:
            kinds: dict[LayerCache, list[int]] = {}
            for layer in self._layers_of(group):
                cache = self.layers[layer]
                kind = cache.whole if isinstance(cache, LayerHeads) else cache
                kinds.setdefault(kind, []).append(layer)
            for kind, layers in kinds.items():
                where: dict[str, Any] = {"num_layers": len(layers), "parallel": parallel}
                if len(layers) < len(self.layers):
                    where["layer_indices"] = layers
                if len(layers) < len(self.layers) or stage_layers:
                    where["layer_split"] = split_of_group(layers, stages)
                made.append(_geometry(group.layer_spec(layer_name(layers[0])), kind, layout, where))
        return tuple(made)

    def _layers_of(self, group: KVCacheGroupSpec) -> list[int]:
        """The layers of a group, ascending.

        Raises:
            ValueError: a layer does not belong to this model, or is not of the group's kind.
        """
        numbers = {layer_name(layer): layer for layer in range(len(self.layers))}
        wrong = [
            name
            for name in group.layer_names
            if name not in numbers
            or not _is_of_kind(group.layer_spec(name), self.layers[numbers[name]])
        ]
        if wrong:
            states = [
                layer_name(layer)
                for layer, cache in enumerate(self.layers)
                if isinstance(cache, tuple)
            ]
            raise ValueError(
                f"groups: {type(group.kv_cache_spec).__name__} for {', '.join(wrong)}; "
                f"this model has layer.0 to layer.{len(self.layers) - 1}, recurrent of them: "
                f"{', '.join(states) or 'none'}"
            )
        return sorted(numbers[name] for name in group.layer_names)


def _is_of_kind(spec: KVCacheSpec, cache: LayerCache) -> bool:
    kind = AttentionSpec if isinstance(cache, LayerHeads) else MambaSpec
    return cache is not None and isinstance(spec, kind)


def _state_spec(states: tuple[StatePart, ...], tp: int) -> MambaSpec:
    def channels(state: StatePart) -> int:
        units = ((one, heads_of(tp - 1, tp, one.num_units)) for one in state.sections)
        return sum(len(section.channels_of(some)) for section, some in units)

    shapes = [(channels(state), state.channel_size) for state in states]
    return MambaSpec(STATE_BLOCK_SIZE, shapes=shapes, dtypes=[state.dtype for state in states])


def _geometry(
    spec: KVCacheSpec, kind: LayerCache, layout: Layout | str, where: Mapping[str, Any]
) -> GroupGeometry:
    """The geometry of layers of the same kind; ``where`` contains their indices and ranks."""
    if not isinstance(kind, LayerHeads):
        assert kind is not None  # see _layers_of
        return StateGeometry(states=kind, block_size=spec.block_size, **where)
    assert isinstance(spec, AttentionSpec)  # see _layers_of
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    chunk = spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None
    return EngineGeometry(
        num_kv_heads=kind.num_kv_heads,
        head_size=kind.head_size,
        head_size_v=kind.head_size_v,
        dtype=spec.dtype,
        block_size=spec.block_size,
        layout=layout,
        use_mla=kind.use_mla,
        page_size_padded=spec.page_size_padded,
        sliding_window=window,
        attention_chunk_size=chunk,
        **where,
    )


def layer_name(layer: int) -> str:
    """The name of a layer among specs and tensors; also the default name in a geometry."""
    return f"layer.{layer}"
