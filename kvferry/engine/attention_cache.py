"""One rank's KV cache: the tensors that a connector sees, and the views that attention computes on.

Block ids are unique over all groups of layers, so layers of different groups may share a tensor: a
block belongs to one group at a time, and holds that group's layers. With groups of 3, 3 and 2
layers on a rank and a layout without L::

    tensor 0:  layer 0 of group 0 | layer 0 of group 1 | layer 0 of group 2
    tensor 1:  layer 1 of group 0 | layer 1 of group 1 | layer 1 of group 2
    tensor 2:  layer 2 of group 0 | layer 2 of group 1 |

A cross-layer layout has one tensor of 3 layers, of which group 2 uses the first 2.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.topology.geometry import EngineGeometry


class PagedKVCache:
    """The KV cache of one rank.

    Args:
        groups: geometries of the engine's KV cache groups.
        rank: whose cache.
        num_blocks: blocks of the pool that all groups share, the null block included.
        memory: at least ``PagedKVCache.nbytes(groups, rank, num_blocks)`` bytes, aligned to the
            dtype.

    Raises:
        ValueError: a block of one group would overlap another block of another group.
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
        """What a connector registers. One group: ``geometry.tensor_names(rank)``. Several: each
        layer's own, under its own name, without an L dim."""
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
        """Bytes of a rank's cache: of the most layers that any group has there."""
        held = [geometry for geometry in groups if geometry.layers(rank)]
        return max(
            math.prod(_shape(groups, geometry, rank, num_blocks)) * geometry.itemsize
            for geometry in held
        )

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The parts of one of the model's layers, each ``[B, N, H, D]``; views, not copies.

        Keys and values, or the latent alone with MLA.
        """
        return self._parts[layer]

    def _add_layers(self, geometry: EngineGeometry, rank: int, tensor: torch.Tensor) -> None:
        """Cuts the layers of one group out of the rank's memory.

        Args:
            geometry: of the group.
            rank: whose cache.
            tensor: shaped as :func:`_shape` says.
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
    """The dims of the rank's memory, L included: tensors of single layers lie one after another."""
    dims = geometry.layout.dims(geometry.part_sizes)
    return dims if geometry.layout.is_cross_layer else "L" + dims


def _shape(
    groups: Sequence[EngineGeometry], geometry: EngineGeometry, rank: int, num_blocks: int
) -> tuple[int, ...]:
    """The rank's memory as ``geometry`` sees it, one extent per letter of :func:`_dims`."""
    most = max(len(group.layers(rank)) for group in groups)
    box = geometry.box(rank, num_blocks)
    if geometry.layout.is_cross_layer:
        return geometry.layout.shape(box._replace(layers=most))
    return (most, *geometry.layout.shape(box))


def _check_blocks_apart(groups: Sequence[EngineGeometry], rank: int, num_blocks: int) -> None:
    """Every group must cut the same bytes into the same blocks."""
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
    """Extents outside of the block dim, and bytes from one block to the next."""
    shape = _shape(groups, geometry, rank, num_blocks)
    block_dim = _dims(geometry).index("B")
    return shape[:block_dim], math.prod(shape[block_dim + 1 :]) * geometry.itemsize
