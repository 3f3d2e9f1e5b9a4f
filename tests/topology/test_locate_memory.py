"""Where tensors lie, on any device, without a look at what they hold."""

from functools import partial

import numpy as np
import pytest
import torch

from kvferry.layouts.arrays import MemorySpan, view_of
from kvferry.topology import locate_memory, memory_of
from tests import geometries

geometry = partial(geometries.geometry, head_size=8, dtype="bfloat16")


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and whose contents nobody may ask for.

    Address, size, strides and storage are those of a real tensor.
    """

    lies_on = "cuda:0"

    @property
    def device(self):  # type: ignore[override]  # torch says it may be set
        return torch.device(self.lies_on)

    def numpy(self, *, force=False):
        raise AssertionError("the host touched the device's memory")

    def cpu(self, *_, **__):
        raise AssertionError("the host touched the device's memory")


class OnOtherDevice(OnDevice):
    lies_on = "cuda:1"


def on_device(tensor, kind=OnDevice):
    return tensor.as_subclass(kind)


def test_tensors_of_a_device_lie_where_their_storage_lies():
    one = geometry()
    whole = torch.zeros((2, *one.cache_shape(0, 5)), dtype=torch.bfloat16)
    tensors = {"layer.0": on_device(whole[1]), "layer.1": on_device(whole[0])}
    memory, spans = locate_memory(one, 0, tensors)
    assert spans == (MemorySpan(whole.data_ptr(), whole.nbytes, "cuda:0"),)
    assert memory == memory_of(one, 0, {"layer.0": whole[1], "layer.1": whole[0]})[0]


def test_each_region_says_on_which_device_it_is():
    one = geometry(dtype="float32")
    shape = one.cache_shape(0, 3)
    first, second = torch.zeros(shape), torch.zeros(shape)
    tensors = {"layer.0": on_device(first), "layer.1": on_device(second, OnOtherDevice)}
    _, spans = locate_memory(one, 0, tensors)
    assert [(span.address, span.device) for span in spans] == [
        (first.data_ptr(), "cuda:0"),
        (second.data_ptr(), "cuda:1"),
    ]


def test_host_memory_is_a_span_of_the_host():
    one = geometry(dtype="float32")
    arrays = {name: np.zeros(one.cache_shape(0, 3), np.float32) for name in one.tensor_names(0)}
    memory, spans = locate_memory(one, 0, arrays)
    assert [span.address for span in spans] == [array.ctypes.data for array in arrays.values()]
    assert all(span.is_host for span in spans)
    spans[1].as_array()[:4] = 1
    assert arrays["layer.1"].ravel()[0] != 0
    assert memory.region_bytes == tuple(array.nbytes for array in arrays.values())


def test_bytes_of_a_device_are_never_an_array_of_the_host():
    one = geometry(dtype="float32")
    tensors = {n: on_device(torch.zeros(one.cache_shape(0, 3))) for n in one.tensor_names(0)}
    with pytest.raises(ValueError, match=r"expected host memory, got \d+ bytes on cuda:0"):
        memory_of(one, 0, tensors)


def test_devices_that_no_mover_knows_are_refused():
    with pytest.raises(ValueError, match="CUDA device, got one on meta"):
        view_of(torch.zeros(2, device="meta"))


def test_a_span_of_a_device_is_an_array_to_those_who_know_its_interface():
    interface = MemorySpan(4096, 12, "cuda:0").__cuda_array_interface__
    assert interface == {"shape": (12,), "typestr": "|u1", "data": (4096, False), "version": 3}
    assert not hasattr(MemorySpan(4096, 12, "cpu"), "__cuda_array_interface__")
