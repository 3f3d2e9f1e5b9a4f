"""NumPy arrays and torch tensors as numbers: address, strides, storage."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ArrayView:
    """Where an array in host memory lies. Addresses are of this process; sizes are bytes."""

    address: int
    """Of the element with index 0 everywhere."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes per dim; may be negative."""
    dtype: str
    """Bare name, for example ``bfloat16``."""
    itemsize: int
    storage: tuple[int, int]
    """First address and size of the allocation it is a view of, as far as that is known."""
    writable: bool


def view_of(array: Any) -> ArrayView:
    """Where a NumPy array or a torch tensor lies. torch is imported only if it is not an array.

    Raises:
        TypeError: neither of the two.
        ValueError: a torch tensor that is not in host memory.
    """
    if isinstance(array, np.ndarray):
        return _view_of_array(array)
    import torch

    if not isinstance(array, torch.Tensor):
        raise TypeError(f"expected a NumPy array or a torch tensor, got {type(array).__name__}")
    if array.device.type != "cpu":
        raise ValueError(f"expected a tensor in host memory, got one on {array.device}")
    itemsize = array.element_size()
    storage = array.untyped_storage()
    return ArrayView(
        address=array.data_ptr(),
        shape=tuple(array.shape),
        strides=tuple(stride * itemsize for stride in array.stride()),
        dtype=str(array.dtype).removeprefix("torch."),
        itemsize=itemsize,
        storage=(storage.data_ptr(), storage.nbytes()),
        writable=True,
    )


def _view_of_array(array: npt.NDArray[Any]) -> ArrayView:
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    reaches = [(n - 1) * s for n, s in zip(root.shape, root.strides, strict=True) if root.size]
    first = root.ctypes.data + sum(reach for reach in reaches if reach < 0)
    last = root.ctypes.data + sum(reach for reach in reaches if reach > 0)
    nbytes = last + root.itemsize - first if root.size else 0
    return ArrayView(
        address=array.ctypes.data,
        shape=array.shape,
        strides=array.strides,
        dtype=array.dtype.name,
        itemsize=array.itemsize,
        storage=(first, nbytes),
        writable=array.flags.writeable,
    )


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Host memory as bytes. Whoever owns the memory keeps it alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
