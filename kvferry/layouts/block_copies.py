"""Whole blocks between a device's cache and a buffer in host memory."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvferry.errors import BlockIdError
from kvferry.layouts.arrays import HOST, ArrayView, Int64s, view_of, whole_ids
from kvferry.layouts.tiles import TILE_DTYPE, Runs, Tiles, blank_runs

if TYPE_CHECKING:
    from kvferry.layouts.device import HostLane


def copy_kv_blocks(
    src_kv_caches: Mapping[str, Any],
    dst_kv_caches: Mapping[str, Any],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: Literal["h2d", "d2h"],
    *,
    block_dim: int | None = None,
) -> None:
    """Copies blocks between caches of a device and of the host; complete at return.

    On a CUDA device, the copy uses a private stream, after all work enqueued so far on the current
    stream. Dense chunks go through pinned memory, so the device's work on a chunk overlaps with the
    host's work on another. Between two caches in host memory, there is a single strided copy.

    >>> host, device = np.zeros((3, 2)), np.arange(6.0).reshape(3, 2)
    >>> copy_kv_blocks({"layer.0": device}, {"layer.0": host}, [1, 2], [2, 0], "d2h")
    >>> host
    array([[4., 5.],
           [0., 0.],
           [2., 3.]])

    Args:
        src_kv_caches: layer name → tensor (or NumPy array in host memory).
        dst_kv_caches: the same layers; only the number of blocks may differ.
        src_block_ids: blocks to copy.
        dst_block_ids: target block of each source block; each id at most once.
        direction: ``h2d``, host to device, or ``d2h``.
        block_dim: index of the dim of blocks. By default 0; or 1 for a tensor of five dims with a
            first dim of 2, for K and V.

    Raises:
        ValueError: a direction that is unknown or does not fit the devices, tables of unequal
            length, missing layers, shapes or dtypes that do not fit, a dim that a tensor lacks, a
            read-only target, a target block named twice.
        BlockIdError: a block id is no whole number, or lies outside a tensor.
    """
    source_ids = whole_ids("src_block_ids", src_block_ids)
    target_ids = whole_ids("dst_block_ids", dst_block_ids)
    _check_call(src_kv_caches, dst_kv_caches, source_ids, target_ids, direction)
    if not (src_kv_caches and len(source_ids)):
        return
    views = _views(src_kv_caches, dst_kv_caches, source_ids, target_ids, block_dim)
    addresses = (
        [source.address for source, _, _ in views],
        [target.address for _, target, _ in views],
    )
    devices = {view.device for pair in views for view in pair[:2]} - {HOST}
    from kvferry.layouts.copier import copy_tiles  # compiles

    lane = _lane(devices.pop()) if devices else None
    for tiles, runs in _tables(views, source_ids, target_ids):
        if lane is None:
            copy_tiles(*addresses, tiles, runs)
        else:
            lane.copy(*addresses, tiles, runs, to_device=direction == "h2d")


def _check_call(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    source_ids: Int64s,
    target_ids: Int64s,
    direction: str,
) -> None:
    if direction not in ("h2d", "d2h"):
        raise ValueError(f"direction: {direction!r} is unknown; write 'h2d' or 'd2h'")
    if len(source_ids) != len(target_ids):
        raise ValueError(
            f"block ids: {len(source_ids)} of the source, {len(target_ids)} of the target; give "
            "each block one place"
        )
    if len(np.unique(target_ids)) != len(target_ids):
        raise ValueError("dst_block_ids: a block stands twice; its contents would depend on order")
    if missing := sorted(source.keys() - target.keys()):
        raise ValueError(f"dst_kv_caches: layers missing: {', '.join(missing)}")
    host, device = (target, source) if direction == "d2h" else (source, target)
    for name in source:
        if _device_of(host[name]) != HOST:
            raise ValueError(f"direction: {direction}, but the host's {name!r} is on a device")
        if not _device_of(device[name]).startswith((HOST, "cuda")):
            raise ValueError(
                f"layer {name!r}: on {_device_of(device[name])}; give one on a CUDA device or the "
                "host"
            )
    if len(found := {_device_of(device[name]) for name in source}) > 1:
        raise ValueError(f"layers on {', '.join(sorted(found))}; call once per device")


def _device_of(tensor: Any) -> str:
    return str(getattr(tensor, "device", HOST))


def _views(
    sources: Mapping[str, Any],
    targets: Mapping[str, Any],
    source_ids: Int64s,
    target_ids: Int64s,
    block_dim: int | None,
) -> list[tuple[ArrayView, ArrayView, int]]:
    """Source, target and index of the dim of blocks for each layer."""
    found = []
    for name in sources:
        source, target = view_of(sources[name]), view_of(targets[name])
        dim = block_dim
        if dim is None:
            dim = 1 if len(source.shape) == 5 and source.shape[0] == 2 else 0
        if not 0 <= dim < len(source.shape):
            raise ValueError(
                f"block_dim: {dim} is not one of the {len(source.shape)} dims of {name!r}, counted "
                "from 0"
            )
        shapes = [(*view.shape[:dim], *view.shape[dim + 1 :]) for view in (source, target)]
        if shapes[0] != shapes[1] or source.dtype != target.dtype:
            raise ValueError(
                f"layer {name!r}: {source.shape} {source.dtype} to {target.shape} "
                f"{target.dtype}; they may differ in the number of blocks (dim {dim}) alone"
            )
        for side, view, ids in (("source", source, source_ids), ("target", target, target_ids)):
            if not 0 <= ids.min() <= ids.max() < view.shape[dim]:
                raise BlockIdError(
                    f"{side} blocks {ids.min()} to {ids.max()}: {name!r} has {view.shape[dim]}"
                )
        if not target.writable:
            raise ValueError(f"dst_kv_caches: {name!r} is read-only; give a writable one")
        found.append((source, target, dim))
    return found


def _tables(
    views: Sequence[tuple[ArrayView, ArrayView, int]],
    source_ids: Sequence[int] | Int64s,
    target_ids: Sequence[int] | Int64s,
) -> Iterator[tuple[Tiles, Runs]]:
    """The copies as tiles × runs, with a pair of tables per extent of the dim used for tokens."""
    runs = blank_runs(len(source_ids))
    runs["source_block"], runs["target_block"] = source_ids, target_ids
    rows = [row for index, pair in enumerate(views) for row in _tiles(index, *pair)]
    for tokens in {row[0] for row in rows}:
        runs["tokens"] = tokens
        yield np.array([tile for extent, tile in rows if extent == tokens], dtype=TILE_DTYPE), runs


def _tiles(
    index: int, source: ArrayView, target: ArrayView, block_dim: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Boxes of at most three dims of one tensor's blocks: extent of the token dim, and tile."""
    dims = [dim for dim in range(len(source.shape)) if dim != block_dim]
    outer, inner = dims[:-3], dims[-3:]
    extents = [1] * (3 - len(inner)) + [source.shape[dim] for dim in inner]
    rows = []
    for at in product(*(range(source.shape[dim]) for dim in outer)):
        sides: list[int] = []
        for view in (source, target):
            offset = sum(i * view.strides[dim] for i, dim in zip(at, outer, strict=True))
            strides = [0] * (3 - len(inner)) + [view.strides[dim] for dim in inner]
            sides += [index, offset, view.strides[block_dim], *strides]
        rows.append((extents[0], (*sides, *extents[1:], source.itemsize)))
    return rows


@functools.cache
def _lane(device: str) -> "HostLane":
    from kvferry.layouts.cuda_stream import CudaCopyStream
    from kvferry.layouts.device import HostLane

    return HostLane(CudaCopyStream.open(int(device.partition(":")[2] or 0)))
