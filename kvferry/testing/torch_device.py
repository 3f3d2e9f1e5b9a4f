"""Known caches on a GPU."""

from typing import Any

import numpy as np
import torch

from kvferry.layouts.arrays import ArrayView, MemorySpan
from kvferry.testing.known_cache import CacheDevice

_WIDEST = 16
"""Number of bytes in the widest element of an array."""


class TorchDevice(CacheDevice):
    """A device whose memory torch allocates. Cells are written in the order of torch's current
    stream.
    """

    def __init__(self, device: str = "cuda:0") -> None:
        self._device = device
        self._allocated: list[torch.Tensor] = []

    def allocate(self, nbytes: int) -> MemorySpan:
        """See :meth:`CacheDevice.allocate`."""
        whole = (nbytes // _WIDEST + 1) * _WIDEST  # an array without elements also needs an address
        self._allocated.append(torch.zeros(whole, dtype=torch.uint8, device=self._device))
        return MemorySpan(self._allocated[-1].data_ptr(), nbytes, self._device)

    def cells(self, view: ArrayView) -> "_TorchCells":
        """See :meth:`CacheDevice.cells`. The cells are signed, because torch indexes only those."""
        return _TorchCells(self._array(view, f"int{8 * view.itemsize}"), view.itemsize)

    def tensor(self, view: ArrayView) -> torch.Tensor:
        """See :meth:`CacheDevice.tensor`."""
        return self._array(view, view.dtype)

    def _array(self, view: ArrayView, dtype: str) -> torch.Tensor:
        for memory in self._allocated:
            offset = view.address - memory.data_ptr()
            if 0 <= offset < memory.nbytes:
                strides = [stride // view.itemsize for stride in view.strides]
                typed = memory.view(getattr(torch, dtype))
                return typed.as_strided(view.shape, strides, offset // view.itemsize)
        raise ValueError(f"view: address {view.address} is in no memory of this device")


class _TorchCells:
    """An array of a :class:`TorchDevice`."""

    def __init__(self, tensor: torch.Tensor, itemsize: int) -> None:
        self._tensor = tensor
        self.dtype = np.dtype(f"u{itemsize}")

    def __getitem__(self, index: Any) -> Any:
        return self._tensor[index].cpu().numpy().view(self.dtype)

    def __setitem__(self, index: Any, values: Any) -> None:
        signed = np.ascontiguousarray(values).view(f"i{self.dtype.itemsize}")
        self._tensor[index] = torch.from_numpy(signed).to(self._tensor.device)
