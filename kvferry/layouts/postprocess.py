"""Operations in place on blocks that a wire has filled.

:func:`run_repack` is the general operation: the given blocks hold the source's geometry, and the
operation makes them hold the target's geometry, for all layers and all requests that completed
together. The ``kv_postprocess_...`` functions are special cases, with the names and results that
are known in the field. :func:`zero_tail` is separate, because it changes bytes that no source has
sent.

========  ======  =======================================================================
method    memory  how
========  ======  =======================================================================
numba     host    the copier, through a buffer that stays in the core's cache
triton    GPU     one pass in place; if that is impossible, to a scratch buffer and back
torch     any     torch's own operations, to a scratch buffer and back
========  ======  =======================================================================
"""

import functools
import importlib.util
import math
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from kvferry.errors import BlockIdError
from kvferry.layouts.arrays import whole_ids
from kvferry.layouts.layout import CellStrides, Layout
from kvferry.layouts.repack import FramePlace, HeldSlice, Repack, Unit, check_ids, make_repack

Method: TypeAlias = Literal["numba", "triton", "torch"]

Caches: TypeAlias = Any
"""A NumPy array or torch tensor viewed as ``[blocks, tokens, heads, elements]``, of any strides. Or
a list or tuple of such views with equal shapes and strides, for all layers, which are then
processed together. A call with tensors of an earlier call only checks that their addresses are the
same. So give a new view instead of changing the shape or strides of a tensor in place."""

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

    On a device, the work is enqueued on the current stream. To keep the work off the engine's own
    stream, call the function under ``torch.cuda.stream(side)``.

    Args:
        repack: the permutation to carry out.
        regions: NumPy arrays or torch tensors that begin where the repack's regions begin, all in
            the same memory.
        block_ids: filled blocks of all requests; the blocks of a frame are adjacent.
        num_blocks: number of blocks of the cache.
        method: method of the table above; by default numba in host memory, triton on a GPU if
            installed, and torch elsewhere.
        threads: number of threads that share the work; for numba only.

    Raises:
        ValueError: ids that are no whole frames, or a method that cannot reach the memory.
        BlockIdError: a block id lies outside the cache.
        HostError: no memory can be pinned for the ids that go to a GPU.
        TransferError: the GPU failed.
    """
    _run(repack, regions, None, block_ids, num_blocks, method, threads)


def _run(
    repack: Repack,
    regions: Sequence[Any],
    memory: "_Memory | None",
    block_ids: Any,
    num_blocks: int,
    method: Method | None,
    threads: int,
) -> None:
    ids = check_ids(repack, block_ids, num_blocks)
    if len(ids) and repack.units:
        memory = memory or _memory_of(regions)
        move = _move_of(method, memory.device, memory.has_arrays)
        move(repack, regions, memory.addresses, ids, threads)


@functools.cache
def _move_of(method: Method | None, device: str, has_arrays: bool) -> Callable[..., None]:
    """Function of a method: (repack, regions, addresses, ids, threads) → None.

    Kept, because to look for Triton and to import takes as long as to check the block ids.
    """
    method = method or default_method(device)
    if method == "numba":
        if device != "cpu":
            raise ValueError(
                f"method: numba moves host memory, got {device}; write triton or torch"
            )
        from kvferry.layouts.repack_run import repack_on_host

        return lambda repack, _, *rest: repack_on_host(repack, *rest)
    if has_arrays:
        raise ValueError(f"method: {method} moves torch tensors, got NumPy arrays; write numba")
    if method == "triton":
        from kvferry.layouts.repack_triton import repack_with_triton

        return lambda *arguments: repack_with_triton(*arguments[:-1])
    from kvferry.layouts.copier_torch import copy_tiles_torch
    from kvferry.layouts.repack_run import repack_on_device

    return lambda repack, regions, _, ids, *__: repack_on_device(
        repack, regions, ids, copy_tiles_torch
    )


def default_method(device: str) -> Method:
    """Method of :func:`run_repack` for a kind of device, for example ``cuda``."""
    if device == "cpu":
        return "numba"
    if device == "cuda" and importlib.util.find_spec("triton") is not None:
        return "triton"
    return "torch"


def warm() -> None:
    """Compiles the host's kernel, or loads it from disk, so that the first repack does not wait.

    The very first call on a machine takes a second; later calls take milliseconds.
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
        cache: see :data:`Caches`; stored token by token; K and V are separate or packed in the
            elements.
        indices: ids of the received blocks.
        method: see :func:`run_repack`.
        threads: see :func:`run_repack`.

    Raises:
        ValueError, BlockIdError: see :func:`run_repack`; or caches of different kinds.
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
    """Converts blocks filled in another block size; both sides store ``[heads, tokens, elements]``.

    With a ratio of at least 1, each block was filled with ``ratio`` consecutive remote blocks, each
    ``[heads, tokens / ratio, elements]``. Below 1, remote blocks are larger: ``1 / ratio``
    consecutive ``indices`` hold a remote block. Any ratio with whole tokens is possible.

    >>> local = np.array([0, 1, 10, 11, 2, 3, 12, 13]).reshape(1, 2, 4, 1)  # 2 blocks of 2 heads
    >>> kv_postprocess_blksize_on_receive(local.swapaxes(1, 2), [0], 2)
    >>> local[0, :, :, 0]
    array([[ 0,  1,  2,  3],
           [10, 11, 12, 13]])

    Args:
        cache: see :data:`Caches`; the view is token by token, the memory head by head.
        indices: ids of the received blocks, in the order of the request's tokens.
        block_size_ratio: tokens of a local block divided by tokens of a remote block.
        method: see :func:`run_repack`.
        threads: see :func:`run_repack`.

    Raises:
        ValueError, BlockIdError: see :func:`run_repack`; or a ratio without whole tokens, a number
            of indices without whole remote blocks, or caches of different kinds.
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
    """As :func:`kv_postprocess_blksize_on_receive`, for a local cache stored token by token.

    Blocks are ``[heads, tokens, elements]`` at the source and become ``[tokens, heads, elements]``.

    Args:
        cache: see :data:`Caches`; stored token by token.
        indices: ids of the received blocks, in the order of the request's tokens.
        block_size_ratio: tokens of a local block divided by tokens of a remote block.
        method: see :func:`run_repack`.
        threads: see :func:`run_repack`.

    Raises:
        ValueError, BlockIdError: see :func:`kv_postprocess_blksize_on_receive`.
    """
    _postprocess(cache, indices, block_size_ratio, "NHD", method, threads)


def zero_tail(cache: Caches, block_ids: Sequence[int], num_tokens: int) -> None:
    """Zeroes the slots in a request's blocks after the request's last token.

    The operation is separate, because a wire that moves whole blocks leaves arbitrary bytes in
    these slots, and a kernel that multiplies masked values must not meet a NaN.

    >>> cache = np.ones((3, 2, 1, 1))
    >>> zero_tail(cache, [2, 1], num_tokens=3)
    >>> cache[:, :, 0, 0]
    array([[1., 1.],
           [1., 0.],
           [1., 1.]])

    Args:
        cache: see :data:`Caches`.
        block_ids: the request's block table, token 0 first; the null block (0) stays unchanged.
        num_tokens: number of tokens of the request.

    Raises:
        ValueError: a negative number of tokens, or views of another form.
        BlockIdError: an id is no whole number, or lies outside the cache.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens: {num_tokens} is negative")
    views = _views(cache)
    _check_views(views)
    num_blocks, block_size = views[0].shape[:2]
    ids = whole_ids("block_ids", block_ids).tolist()
    for block in ids:
        if not 0 <= block < num_blocks:
            raise BlockIdError(f"block {block} does not exist; there are {num_blocks} blocks")
    whole, used = divmod(num_tokens, block_size)
    for place, block in enumerate(ids[whole:]):
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
    alike = _known(views)
    num_blocks, block_size, heads, elements = alike.shape
    held = _held_block_size(block_size, block_size_ratio)
    repack = repack_of(
        len(views), block_size, heads, elements, alike.itemsize, alike.strides, slots, held
    )
    _run(repack, views, alike.memory, indices, num_blocks, method, threads)


@functools.lru_cache(maxsize=256)
def _held_block_size(block_size: int, ratio: float | Fraction) -> int:
    exact = Fraction(ratio).limit_denominator(_FINEST) if math.isfinite(ratio) else Fraction(0)
    held = block_size / exact if exact > 0 else Fraction(1, 2)
    if held.denominator != 1:
        raise ValueError(
            f"block_size_ratio: {ratio} of local blocks of {block_size} tokens makes no whole "
            "number of tokens in a remote block; write local over remote tokens per block"
        )
    return int(held)


@functools.lru_cache(maxsize=256)
def repack_of(
    count: int,
    block_size: int,
    heads: int,
    elements: int,
    itemsize: int,
    strides: tuple[int, ...],
    slots: str,
    held_block_size: int,
) -> Repack:
    """The repack of ``count`` equal tensors of cells; equal calls share the result."""
    cells = CellStrides(0, 0, *strides)
    return make_repack(
        [Unit((("cells", elements),), (FramePlace(region, cells),)) for region in range(count)],
        itemsize=itemsize,
        heads=heads,
        block_size=block_size,
        slots=Layout.named(slots),
        held=[HeldSlice(Layout.named("HND"), heads)],
        held_block_size=held_block_size,
    )


def _views(cache: Caches) -> Sequence[Any]:
    return cache if isinstance(cache, (list, tuple)) else [cache]


class _Memory(NamedTuple):
    """Where regions lie."""

    addresses: tuple[int, ...]
    device: str
    """Kind of the device of the first region, for example ``cuda``."""
    has_arrays: bool
    """Whether some regions are NumPy arrays."""


class _Alike(NamedTuple):
    """Views that were given together, checked to be alike."""

    shape: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...]
    """Number of bytes from an index to the next, for each dim."""
    memory: _Memory
    references: tuple[Any, ...] = ()
    """Weak references to the views; the first view that goes has all of them forgotten."""


_seen: dict[tuple[int, ...], _Alike] = {}
"""Identities of tensors that were given together → numbers of the tensors. All these tensors live,
so no other object has one of the identities."""


def _known(views: Sequence[Any]) -> _Alike:
    """Numbers of views; of tensors that were given together before, only addresses are checked."""
    identities = tuple(map(id, views))
    alike = _seen.get(identities)
    if alike is not None and alike.memory.addresses == _addresses_of_tensors(views):
        return alike
    _check_views(views)
    memory = _memory_of(views)
    alike = _Alike(tuple(views[0].shape), *_itemsize_and_strides(views[0]), memory)
    if not memory.has_arrays:

        def forget(_: object) -> None:
            _seen.pop(identities, None)

        references = tuple([weakref.ref(view, forget) for view in views])
        _seen[identities] = alike._replace(references=references)
    return alike


def _check_views(views: Sequence[Any]) -> None:
    if not len(views):
        raise ValueError("cache: no caches given; give one view or those of all layers")
    first = views[0]
    usual = len(first.shape) == 4 and 0 not in first.shape
    if usual and not _has_arrays(views) and _are_tensors_alike(views):
        return
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


def _are_tensors_alike(tensors: Sequence[Any]) -> bool:
    """Whether tensors have one shape, strides, itemsize and device; quick for many tensors."""
    import torch

    of_tensor: tuple[Callable[[Any], object], ...] = (
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.element_size,
        attrgetter("device"),
    )
    columns = (list(map(number, tensors)) for number in of_tensor)
    return all(column.count(column[0]) == len(column) for column in columns)


def _kind(view: Any) -> tuple[object, ...]:
    return (tuple(view.shape), _itemsize_and_strides(view), str(getattr(view, "device", "cpu")))


def _itemsize_and_strides(view: Any) -> tuple[int, tuple[int, ...]]:
    if isinstance(view, np.ndarray):
        return view.itemsize, view.strides
    itemsize: int = view.element_size()
    return itemsize, tuple(stride * itemsize for stride in view.stride())


def _has_arrays(views: Sequence[Any]) -> bool:
    return any(issubclass(kind, np.ndarray) for kind in set(map(type, views)))


def _memory_of(regions: Sequence[Any]) -> _Memory:
    first = regions[0]
    device = "cpu" if isinstance(first, np.ndarray) else str(first.device.type)
    if not _has_arrays(regions):
        return _Memory(_addresses_of_tensors(regions), device, False)
    return _Memory(tuple([_address(region) for region in regions]), device, True)


def _address(region: Any) -> int:
    return int(region.ctypes.data if isinstance(region, np.ndarray) else region.data_ptr())


def _addresses_of_tensors(tensors: Sequence[Any]) -> tuple[int, ...]:
    import torch

    return tuple(map(torch.Tensor.data_ptr, tensors))
