"""NumPy arrays and torch tensors as numbers: address, strides, storage."""

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockIdError

ByteArray = npt.NDArray[np.uint8]
"""An array of bytes in host memory."""
Int64s: TypeAlias = npt.NDArray[np.int64]
"""An array of 64-bit whole numbers: ids, addresses or positions."""

HOST = "cpu"
"""Name of the device of host memory."""


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Contiguous bytes in the memory of one device. The owner of the bytes keeps them alive.

    Libraries that know the CUDA array interface take a span on a CUDA device as an array:
    ``torch.as_tensor(span)`` is the same memory.
    """

    address: int
    """Address of the first byte in this process."""
    nbytes: int
    device: str
    """Name of the device: ``cpu`` for host memory, or for example ``cuda:0``."""

    @property
    def is_host(self) -> bool:
        """Whether the bytes are in host memory."""
        return self.device == HOST

    def as_array(self) -> ByteArray:
        """An array over the bytes.

        Raises:
            ValueError: the bytes are not in host memory.
        """
        if not self.is_host:
            raise ValueError(f"expected host memory, got {self.nbytes} bytes on {self.device}")
        return bytes_at(self.address, self.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.is_host:
            raise AttributeError("host memory has no CUDA array interface; take as_array()")
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


@dataclass(frozen=True, slots=True)
class ArrayView:
    """Where an array lies. Addresses are addresses of this process; sizes are bytes."""

    address: int
    """Address of the element with index 0 in each dim."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Number of bytes between neighbours along each dim; may be negative."""
    dtype: str
    """Bare name of the dtype, for example ``bfloat16``."""
    itemsize: int
    storage: tuple[int, int]
    """First address and number of bytes of the array's allocation, as far as known."""
    writable: bool
    device: str = HOST
    """Name of the device: ``cpu`` for host memory, or for example ``cuda:0``."""


def view_of(array: Any) -> ArrayView:
    """Where a NumPy array or a torch tensor lies. Imports torch only for other types than arrays.

    Memory of a device is not touched. An :class:`ArrayView` is returned as given; so a view can
    stand for an array of another library.

    Raises:
        TypeError: ``array`` is none of these.
        ValueError: a torch tensor that is neither in host memory nor on a CUDA device.
    """
    if isinstance(array, ArrayView):
        return array
    if isinstance(array, np.ndarray):
        return _view_of_array(array)
    import torch

    if not isinstance(array, torch.Tensor):
        raise TypeError(f"expected a NumPy array or a torch tensor, got {type(array).__name__}")
    if array.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"expected a tensor in host memory or on a CUDA device, got one on {array.device}"
        )
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
        device=str(array.device),
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


def whole_ids(name: str, ids: Any) -> Int64s:
    """Block ids as a new array in host memory, int64[n].

    Args:
        name: name of the ids in messages.
        ids: a sequence, an array, or a torch tensor (the call waits for a tensor on a device).

    Raises:
        BlockIdError: an id is not a 64-bit whole number; a mask of booleans contains no ids.
    """
    to_host = getattr(ids, "cpu", None)
    found = np.array(ids if to_host is None else to_host().numpy()).reshape(-1)
    if len(found) and found.dtype.kind not in "iu":
        raise BlockIdError(f"{name}: ids are {found.dtype}, not 64-bit whole numbers")
    return found.astype(np.int64, copy=False)


def bytes_at(address: int, nbytes: int) -> ByteArray:
    """Host memory as an array of bytes. The owner of the memory keeps the memory alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def whole_pages(nbytes: int) -> ByteArray:
    """New host memory that can be pinned: page-aligned, and sharing no page with other memory."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
