"""What must happen to blocks after a wire filled them, in place.

:func:`run_repack` is the general operation: these blocks hold source geometry, make them hold
target geometry, for all layers and for all requests that completed together. The
``kv_postprocess_...`` functions are views on it, with the names and results that the field knows.
:func:`zero_tail` is apart, because it changes what nobody sent.

========  ======  ====================================================================
method    memory  how
========  ======  ====================================================================
numba     host    the copier, through a buffer that stays in the core's cache
triton    GPU     one pass in place; where that cannot be, to a scratch buffer and back
torch     any     torch's own operations, to a scratch buffer and back
========  ======  ====================================================================
"""

import functools
import importlib.util
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import numpy as np

from kvferry.layouts.layout import CellStrides, Layout
from kvferry.layouts.repack import HeldSlice, Place, Repack, Unit, check_ids, make_repack

Method: TypeAlias = Literal["numba", "triton", "torch"]

Caches: TypeAlias = Any
"""A NumPy array or torch tensor viewed as ``[blocks, tokens, heads, elements]``, of any strides, or
a sequence of such views that are alike: those of all layers, which are then done together."""

_FINEST = 1 << 20
"""Largest denominator of a block size ratio: 1/3 is often written as a float."""


def run_repack(
    repack: Repack,
    regions: Sequence[Any],
    block_ids: Any,
    num_blocks: int,
    *,
    method: Method | None = None,
    threads: int = 1,
) -> None:
    """Makes blocks hold the target's geometry, in place, in every unit of the repack.

    On a device the work is enqueued on the current stream; under ``torch.cuda.stream(side)`` it is
    kept off the engine's own.

    Args:
        repack: what to do.
        regions: NumPy arrays or torch tensors that begin where the repack's regions begin, all in
            one memory.
        block_ids: the blocks that were filled, of all requests; those of a frame next to each
            other.
        num_blocks: blocks of the cache.
        method: how; by default numba in host memory, on a GPU triton if it is installed, and
            torch elsewhere.
        threads: how many share the work; of numba alone.

    Raises:
        ValueError: ids that are no whole frames, or a method that cannot reach the memory.
        BlockIdError: a block id lies outside the cache.
    """
    ids = check_ids(repack, block_ids, num_blocks)
    if not (len(ids) and repack.units):
        return
    device = "cpu" if isinstance(regions[0], np.ndarray) else regions[0].device.type
    method = method or default_method(device)
    from kvferry.layouts import repack_run

    if method == "numba":
        if device != "cpu":
            raise ValueError(
                f"method: numba moves host memory, got {device}; write triton or torch"
            )
        addresses = [_address(region) for region in regions]
        repack_run.repack_on_host(repack, addresses, ids, threads)
        return
    if any(isinstance(region, np.ndarray) for region in regions):
        raise ValueError(f"method: {method} moves torch tensors, got NumPy arrays; write numba")
    if method == "triton":
        from kvferry.layouts.repack_triton import repack_with_triton

        repack_with_triton(repack, regions, ids)
    else:
        from kvferry.layouts.copier_torch import copy_tiles_torch

        repack_run.repack_on_device(repack, regions, ids, copy_tiles_torch)


def default_method(device: str) -> Method:
    """How :func:`run_repack` works on a kind of device, for example ``cuda``."""
    if device == "cpu":
        return "numba"
    if device == "cuda" and importlib.util.find_spec("triton") is not None:
        return "triton"
    return "torch"


def warm() -> None:
    """Compiles the host's kernel, or loads it from disk, so that the first repack does not wait.

    A second at the very first call on a machine, milliseconds later.
    """
    cache = np.arange(4, dtype=np.uint8).reshape(1, 2, 2, 1)
    kv_postprocess_layout_on_receive(cache, [0], method="numba")
    assert cache.ravel().tolist() == [0, 2, 1, 3]


def kv_postprocess_layout_on_receive(
    cache: Caches, indices: Any, *, method: Method | None = None, threads: int = 1
) -> None:
    """Blocks filled as ``[heads, tokens, elements]`` become ``[tokens, heads, elements]``.

    >>> cache = np.array([[[0], [1]], [[2], [3]]]).reshape(1, 2, 2, 1)  # filled head by head
    >>> kv_postprocess_layout_on_receive(cache, [0])
    >>> cache[0, :, 1].ravel()  # both tokens of head 1
    array([2, 3])

    Args:
        cache: see :data:`Caches`; stored token by token, K and V apart or packed in the elements.
        indices: the blocks received.
        method: see :func:`run_repack`.
        threads: see :func:`run_repack`.

    Raises:
        ValueError, BlockIdError: see :func:`run_repack`; or caches that are not alike.
    """
    _postprocess(cache, indices, 1, "NHD", method, threads)


def kv_postprocess_blksize_on_receive(
    cache: Caches,
    indices: Any,
    block_size_ratio: float | Fraction,
    *,
    method: Method | None = None,
    threads: int = 1,
) -> None:
    """Blocks of another size were filled in; both sides store ``[heads, tokens, elements]``.

    With a ratio of at least one, each block was filled with ``ratio`` consecutive remote blocks,
    each ``[heads, tokens / ratio, elements]``. Below one the remote's are larger: ``1 / ratio``
    consecutive ``indices`` hold one. Any ratio is served that makes whole tokens.

    >>> local = np.array([0, 1, 10, 11, 2, 3, 12, 13]).reshape(1, 2, 4, 1)  # 2 blocks of 2 heads
    >>> kv_postprocess_blksize_on_receive(local.swapaxes(1, 2), [0], 2)
    >>> local[0, :, :, 0]
    array([[ 0,  1,  2,  3],
           [10, 11, 12, 13]])

    Args:
        cache: see :data:`Caches`; the view is by tokens, the memory by heads.
        indices: the blocks received, in the order of the request's tokens.
        block_size_ratio: tokens of a local block over tokens of a remote one.
        method: see :func:`run_repack`.
        threads: see :func:`run_repack`.

    Raises:
        ValueError, BlockIdError: see :func:`run_repack`; or a ratio that makes no whole tokens,
            a number of indices that makes no whole remote blocks, or caches that are not alike.
    """
    _postprocess(cache, indices, block_size_ratio, "HND", method, threads)


def kv_postprocess_blksize_and_layout_on_receive(
    cache: Caches,
    indices: Any,
    block_size_ratio: float | Fraction,
    *,
    method: Method | None = None,
    threads: int = 1,
) -> None:
    """As :func:`kv_postprocess_blksize_on_receive`, but ours is stored token by token.

    The remote's blocks are ``[heads, tokens, elements]``, ours become
    ``[tokens, heads, elements]``.

    Args:
        cache: see :data:`Caches`; stored token by token.
        indices: the blocks received, in the order of the request's tokens.
        block_size_ratio: tokens of a local block over tokens of a remote one.
        method: see :func:`run_repack`.
        threads: see :func:`run_repack`.

    Raises:
        ValueError, BlockIdError: see :func:`kv_postprocess_blksize_on_receive`.
    """
    _postprocess(cache, indices, block_size_ratio, "NHD", method, threads)


def zero_tail(cache: Caches, block_ids: Sequence[int], num_tokens: int) -> None:
    """Zeroes what no token of a request covers in its blocks: the rest of the last, and more.

    An operation of its own, because a wire that moves whole blocks leaves anything there, and a
    kernel that multiplies masked values must not meet a NaN.

    >>> cache = np.ones((3, 2, 1, 1))
    >>> zero_tail(cache, [2, 1], num_tokens=3)
    >>> cache[:, :, 0, 0]
    array([[1., 1.],
           [1., 0.],
           [1., 1.]])

    Args:
        cache: see :data:`Caches`.
        block_ids: the request's block table, token 0 first; the null block (0) is left alone.
        num_tokens: tokens that the request holds.

    Raises:
        ValueError: a negative number of tokens, or views that are no such view.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens: {num_tokens} is negative")
    views = _views(cache)
    block_size = views[0].shape[1]
    whole, used = divmod(num_tokens, block_size)
    for place, block in enumerate(block_ids[whole:]):
        if block != 0:
            for view in views:
                view[block, used if place == 0 else 0 :] = 0


def _postprocess(
    cache: Caches,
    indices: Any,
    block_size_ratio: float | Fraction,
    slots: str,
    method: Method | None,
    threads: int,
) -> None:
    views = _views(cache)
    num_blocks, block_size, heads, elements = views[0].shape
    held = _held_block_size(block_size, block_size_ratio)
    itemsize, strides = _itemsize_and_strides(views[0])
    repack = _repack_of(len(views), block_size, heads, elements, itemsize, strides, slots, held)
    run_repack(repack, views, indices, num_blocks, method=method, threads=threads)


def _held_block_size(block_size: int, ratio: float | Fraction) -> int:
    exact = Fraction(ratio).limit_denominator(_FINEST)
    held = block_size / exact if exact > 0 else Fraction(1, 2)
    if held.denominator != 1:
        raise ValueError(
            f"block_size_ratio: {ratio} of local blocks of {block_size} tokens makes no whole "
            "number of tokens in a remote block; write local over remote tokens per block"
        )
    return int(held)


@functools.lru_cache(maxsize=256)
def _repack_of(
    count: int,
    block_size: int,
    heads: int,
    elements: int,
    itemsize: int,
    strides: tuple[int, ...],
    slots: str,
    held_block_size: int,
) -> Repack:
    cells = CellStrides(0, 0, *strides)
    return make_repack(
        [Unit((("cells", elements),), (Place(region, cells),)) for region in range(count)],
        itemsize=itemsize,
        heads=heads,
        block_size=block_size,
        slots=Layout.named(slots),
        held=[HeldSlice(Layout.named("HND"), heads)],
        held_block_size=held_block_size,
    )


def _views(cache: Caches) -> list[Any]:
    views = list(cache) if isinstance(cache, (list, tuple)) else [cache]
    if not views:
        raise ValueError("cache: no caches given; give one view or those of all layers")
    first = views[0]
    for view in views:
        if len(view.shape) != 4 or 0 in view.shape:
            raise ValueError(
                f"cache: shape {tuple(view.shape)}; view it as [blocks, tokens, heads, elements]"
            )
        if _kind(view) != _kind(first):
            raise ValueError(
                f"cache: views of {_kind(first)} and of {_kind(view)} (shape, itemsize and byte "
                "strides, device); call once per kind"
            )
        if isinstance(view, np.ndarray) and not view.flags.writeable:
            raise ValueError("cache: read-only array; give a writable one")
    return views


def _kind(view: Any) -> tuple[object, ...]:
    return (tuple(view.shape), _itemsize_and_strides(view), str(getattr(view, "device", "cpu")))


def _itemsize_and_strides(view: Any) -> tuple[int, tuple[int, ...]]:
    if isinstance(view, np.ndarray):
        return view.itemsize, view.strides
    itemsize: int = view.element_size()
    return itemsize, tuple(stride * itemsize for stride in view.stride())


def _address(region: Any) -> int:
    return int(region.ctypes.data if isinstance(region, np.ndarray) else region.data_ptr())
