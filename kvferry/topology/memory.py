"""The memory of a rank, found from its real tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import ArrayView, MemorySpan, view_of
from kvferry.topology.group import GroupGeometry
from kvferry.topology.tensors import RankMemory, TensorMemory

Regions: TypeAlias = tuple[npt.NDArray[np.uint8], ...]
"""The bytes of each region of a rank, in the order of the region indices."""


def memory_of(
    geometry: GroupGeometry,
    rank: int,
    tensors: Mapping[str, Any],
    *,
    partial: bool = False,
) -> tuple[RankMemory, Regions]:
    """The places of a rank's tensors in host memory, and the regions that contain the tensors.

    >>> import numpy as np
    >>> from kvferry.topology import EngineGeometry, ParallelShape
    >>> geometry = EngineGeometry(num_layers=2, num_kv_heads=1, head_size=4, dtype="float32",
    ...                           block_size=2, layout="NHD", parallel=ParallelShape())
    >>> storage = np.zeros((2, *geometry.cache_shape(0, num_blocks=3)), dtype=np.float32)
    >>> memory, regions = memory_of(geometry, 0, dict(zip(geometry.tensor_names(0), storage)))
    >>> [(tensor.region, tensor.offset) for tensor in memory.tensors], regions[0].nbytes
    ([(0, 0), (0, 192)], 384)

    Tensors that lie in one allocation share a region. If allocations are not known, each tensor is
    a region. The caller must keep the tensors alive as long as it uses the regions. A rank without
    layers of the group has no tensors, no regions and 1 block.

    Args:
        geometry: geometry of the group.
        rank: the rank of the tensors.
        tensors: as for :func:`locate_memory`, in host memory.
        partial: whether some of the rank's tensors may be missing.

    Raises:
        ValueError: as for :func:`locate_memory`, or a tensor is not in host memory.
    """
    memory, spans = locate_memory(geometry, rank, tensors, partial=partial)
    return memory, tuple(span.as_array() for span in spans)


def locate_memory(
    geometry: GroupGeometry,
    rank: int,
    tensors: Mapping[str, Any],
    *,
    partial: bool = False,
) -> tuple[RankMemory, tuple[MemorySpan, ...]]:
    """The places of a rank's tensors and of their regions, on any device.

    Tensors that lie in one allocation share a region. If allocations are not known, each tensor is
    a region. A rank without layers of the group has no tensors, no regions and 1 block. No byte of
    the tensors is read or written.

    Args:
        geometry: geometry of the group.
        rank: the rank of the tensors.
        tensors: name → NumPy array or torch tensor, in host memory or on CUDA devices, with any
            strides and the shape ``geometry.cache_shape(rank, num_blocks)``. A cross-layer layout
            also takes views of single layers (without the L dim) under the names of the layers.
            Integers of the same size may represent a dtype that NumPy lacks.
        partial: whether some of the rank's tensors may be missing.

    Raises:
        ValueError: a name, shape, dtype or number of blocks is wrong; the message names the
            tensor and both values.
    """
    if geometry.layout.is_cross_layer and not set(tensors) & set(geometry.tensor_names(rank)):
        # These are views of single layers of a cross-layer tensor, so treat the layout as one
        # without L.
        geometry = dataclasses.replace(geometry, layout=geometry.layout.without_layers())
    expected = geometry.tensors(rank)
    _check_names(rank, tuple(expected), tensors, partial)
    views = {name: view_of(tensors[name]) for name in expected if name in tensors}
    if not expected:  # the stage has no layers of the group, so only a null block
        return RankMemory(num_blocks=1, region_bytes=(), tensors=()), ()
    if not views:
        raise ValueError(f"rank {rank}: no tensors given; expected {', '.join(expected)}")
    num_blocks = _num_blocks(geometry, rank, views)
    regions = _regions([view.storage for view in views.values()])
    devices = {}
    placed = []
    for name, view in views.items():
        region, kind = _region_of(view, regions), expected[name]
        devices[region] = view.device  # per allocation
        placed.append(
            TensorMemory(
                name=name,
                region=region,
                offset=view.address - regions[region][0],
                parts=kind.part_strides(geometry.box(rank, num_blocks, kind), view.strides),
            )
        )
    memory = RankMemory(
        num_blocks=num_blocks,
        region_bytes=tuple(nbytes for _, nbytes in regions),
        tensors=tuple(placed),
    )
    return memory, tuple(
        MemorySpan(address, nbytes, devices[index])
        for index, (address, nbytes) in enumerate(regions)
    )


def _check_names(
    rank: int, expected: tuple[str, ...], tensors: Mapping[str, Any], partial: bool
) -> None:
    unknown = sorted(set(tensors) - set(expected))
    missing = [name for name in expected if name not in tensors]
    if unknown or (missing and not partial):
        raise ValueError(
            f"rank {rank}: tensors missing: {', '.join(missing) or 'none'}; unknown: "
            f"{', '.join(unknown) or 'none'}; expected {', '.join(expected)}"
        )


def _num_blocks(geometry: GroupGeometry, rank: int, views: Mapping[str, ArrayView]) -> int:
    """The number of blocks, after a check of every tensor's shape and dtype."""
    num_blocks = 0
    for name, kind in geometry.tensors(rank).items():
        if name not in views:
            continue
        view, block_dim = views[name], kind.layout.dims(kind.part_sizes).index("B")
        found = view.shape[block_dim] if len(view.shape) > block_dim else 1
        shape = kind.layout.shape(geometry.box(rank, max(found, 1), kind))
        if view.shape != shape:
            raise ValueError(
                f"tensor {name!r}: shape {view.shape}, but rank {rank} with layout "
                f"{kind.layout} has {shape} for as many blocks"
            )
        dtype = kind.parts[0].dtype
        # NumPy has no bfloat16; integers of the same size may represent it.
        stands_in = view.itemsize == kind.itemsize and view.dtype.startswith(("int", "uint"))
        if view.dtype != dtype and not stands_in:
            raise ValueError(f"tensor {name!r}: dtype {view.dtype}, but the geometry says {dtype}")
        if num_blocks not in (0, found):
            raise ValueError(
                f"tensor {name!r}: {found} blocks, but the others have {num_blocks}; give all "
                "tensors of a group the same number"
            )
        num_blocks = found
    return num_blocks


def _regions(storages: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins storages that overlap; the result is in the order in which storages first appear."""
    united: list[tuple[int, int]] = []
    for address, nbytes in sorted(set(storages)):
        if united and address < united[-1][0] + united[-1][1]:
            first = united[-1][0]
            united[-1] = (first, max(united[-1][1], address + nbytes - first))
        else:
            united.append((address, nbytes))
    firsts = [
        next(at for at, (inside, _) in enumerate(storages) if address <= inside < address + nbytes)
        for address, nbytes in united
    ]
    return [region for _, region in sorted(zip(firsts, united, strict=True))]


def _region_of(view: ArrayView, regions: list[tuple[int, int]]) -> int:
    address = view.storage[0]
    return next(index for index, region in enumerate(regions) if region[0] <= address < sum(region))
