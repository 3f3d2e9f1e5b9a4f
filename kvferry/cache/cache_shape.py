"""The layers of a model as its KV cache sees them: from shapes to groups to geometries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.cache.kv_cache_config import KVCacheGroupSpec
from kvferry.cache.specs import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
)
from kvferry.cache.specs_local import MambaSpec, SlidingWindowSpec
from kvferry.layouts.layout import Layout
from kvferry.topology import EngineGeometry, GroupGeometry, ParallelShape
from kvferry.topology.sharding import default_split, split_of_group
from kvferry.topology.states import StateGeometry, StatePart

STATE_BLOCK_SIZE = 1 << 20
"""Tokens of the one block that holds a state: more than any request has."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the KV cache of a model depends on: its attention layers, nothing of its weights.

    >>> from kvferry.cache import group_layers
    >>> shape = CacheShape(num_layers=4, num_kv_heads=2, head_size=8, layer_windows={0: 16, 2: 16})
    >>> groups = group_layers(shape.kv_cache_specs(16, "bfloat16"))
    >>> [(g.layer_indices, g.sliding_window) for g in
    ...  shape.geometries(groups, layout="NHD", parallel=ParallelShape(tp=2))]
    [((0, 2), 16), ((1, 3), None)]
    """

    num_layers: int
    num_kv_heads: int
    """Heads that the cache keeps per token; 1 with MLA."""
    head_size: int
    """Elements of a head of k, or of the latent."""
    use_mla: bool = False
    """Whether the cache keeps one latent per token in place of keys and values."""
    layer_windows: Mapping[int, int] = field(default_factory=dict)
    """Layer → tokens that one of its tokens attends to, itself included; no layer that attends to
    all."""
    layer_states: Mapping[int, tuple[StatePart, ...]] = field(default_factory=dict)
    """Layer → what it keeps; no layer of attention."""

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """What each layer needs to keep, by the layer's name, first layer first.

        The number of heads is that of the whole model: how many of them a rank holds differs
        between ranks, and a pool of blocks does not depend on it.

        Args:
            block_size: tokens per block.
            dtype: of the cache.

        Raises:
            ValueError: ``block_size`` or ``dtype`` is none.
        """
        return {
            layer_name(layer): self._layer_spec(layer, block_size, dtype)
            for layer in range(self.num_layers)
        }

    def _layer_spec(self, layer: int, block_size: int, dtype: str) -> KVCacheSpec:
        if layer in self.layer_states:
            states = self.layer_states[layer]
            return MambaSpec(
                STATE_BLOCK_SIZE,
                shapes=[(state.num_channels, state.channel_size) for state in states],
                dtypes=[state.dtype for state in states],
            )
        heads, size = self.num_kv_heads, self.head_size
        if self.use_mla:
            return MLAAttentionSpec(block_size, heads, size, dtype)
        window = self.layer_windows.get(layer)
        if window is None:
            return FullAttentionSpec(block_size, heads, size, dtype)
        return SlidingWindowSpec(block_size, heads, size, dtype, sliding_window=window)

    def geometries(
        self,
        groups: Sequence[KVCacheGroupSpec],
        *,
        layout: Layout | str,
        parallel: ParallelShape,
    ) -> tuple[GroupGeometry, ...]:
        """The KV cache of an engine, one geometry per group.

        Args:
            groups: what :func:`~kvferry.cache.config_builder.group_layers` makes of
                :meth:`kv_cache_specs`.
            layout: of every group of attention.
            parallel: of the engine. Its stages divide the model's layers, whatever groups they
                are in, so that a stage may have no layer of a group. States are not padded, as
                their pages are smaller on a rank than in the whole model.

        Raises:
            ValueError: a group is not of this model's layers, or the layout or the shape does not
                fit, see :class:`EngineGeometry`.
        """
        return tuple(self._geometry(group, layout, parallel) for group in groups)

    def _geometry(
        self, group: KVCacheGroupSpec, layout: Layout | str, parallel: ParallelShape
    ) -> GroupGeometry:
        spec, layers = group.kv_cache_spec, self._layers_of(group)
        layer_split = layer_indices = None
        if len(layers) < self.num_layers:
            layer_split = split_of_group(layers, default_split(self.num_layers, parallel.pp))
            layer_indices = layers
        if isinstance(spec, MambaSpec):
            return StateGeometry(
                num_layers=len(layers),
                states=self.layer_states[layers[0]],
                block_size=spec.block_size,
                parallel=parallel,
                layer_split=layer_split,
                layer_indices=None if layer_indices is None else tuple(layer_indices),
            )
        assert isinstance(spec, AttentionSpec)  # _layers_of
        return EngineGeometry(
            num_layers=len(layers),
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=spec.dtype,
            block_size=spec.block_size,
            layout=layout,
            parallel=parallel,
            use_mla=self.use_mla,
            page_size_padded=spec.page_size_padded,
            layer_split=layer_split,
            layer_indices=layer_indices,
            sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        )

    def _layers_of(self, group: KVCacheGroupSpec) -> list[int]:
        """The layers of a group, ascending.

        Raises:
            ValueError: they are not this model's, or not of the group's kind.
        """
        spec = group.kv_cache_spec
        numbers = {layer_name(layer): layer for layer in range(self.num_layers)}
        recurrent = isinstance(spec, MambaSpec)
        wrong = [
            name
            for name in group.layer_names
            if name not in numbers or (numbers[name] in self.layer_states) != recurrent
        ]
        if wrong or not isinstance(spec, AttentionSpec | MambaSpec):
            states = ", ".join(layer_name(layer) for layer in sorted(self.layer_states))
            raise ValueError(
                f"groups: {type(spec).__name__} for {', '.join(wrong or group.layer_names)}; "
                f"this model has layer.0 to layer.{self.num_layers - 1}, recurrent of them: "
                f"{states or 'none'}"
            )
        return sorted(numbers[name] for name in group.layer_names)


def layer_name(layer: int) -> str:
    """The name of a layer among specs and tensors, which is also a geometry's default."""
    return f"layer.{layer}"
