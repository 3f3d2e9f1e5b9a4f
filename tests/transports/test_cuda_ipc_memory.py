"""The handles of CUDA IPC, over a driver that is a handful of Python functions."""

import ctypes

import pytest

from kvferry.errors import HostError, PeerLostError, TransferError
from kvferry.layouts.arrays import MemorySpan
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES, CudaIpcMemory

BASE, SIZE, MAPPED = 0x7F00_0000_0000, 1 << 20, 0x7E00_0000_0000


class Driver:
    """What the driver would do; ``errors`` maps the name of a function to the code it returns."""

    def __init__(self, **errors):
        self.errors = errors
        self.lead = 0
        self.opened, self.closed = [], []
        self.contexts = []

    def cuInit(self, flags):  # noqa: N802
        return self.errors.get("cuInit", 0)

    def cuDeviceGet(self, number, ordinal):  # noqa: N802
        number._obj.value = ordinal
        return self.errors.get("cuDeviceGet", 0)

    def cuDevicePrimaryCtxRetain(self, context, number):  # noqa: N802
        context._obj.value = 0xC0 + number.value
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.contexts.append(context.value)
        return 0

    def cuMemGetAddressRange_v2(self, base, nbytes, address):  # noqa: N802
        base._obj.value = BASE if address.value >= BASE else MAPPED
        nbytes._obj.value = SIZE
        return self.errors.get("cuMemGetAddressRange_v2", 0)

    def cuIpcGetMemHandle(self, handle, address):  # noqa: N802
        assert address.value == BASE
        ctypes.memset(handle._obj.reserved, 7, HANDLE_BYTES)
        return self.errors.get("cuIpcGetMemHandle", 0)

    def cuIpcOpenMemHandle_v2(self, pointer, handle, flags):  # noqa: N802
        self.opened.append((bytes(handle.reserved), flags.value))
        pointer._obj.value = MAPPED + self.lead
        return self.errors.get("cuIpcOpenMemHandle_v2", 0)

    def cuIpcCloseMemHandle(self, pointer):  # noqa: N802
        self.closed.append(pointer.value)
        return 0

    def cuGetErrorString(self, result, text):  # noqa: N802
        text._obj.value = b"peer access is not supported"
        return 0


def memory(device=1, **errors):
    return CudaIpcMemory(device, Driver(**errors))


def test_memory_travels_as_the_handle_of_its_allocation_and_an_offset():
    one = memory()
    handle, offset = one.export(MemorySpan(BASE + 512, 100, "cuda:1"))
    assert (handle, offset) == (b"\7" * HANDLE_BYTES, 512)
    assert one._cuda.contexts == [0xC1]


def test_a_handle_of_this_process_is_the_memory_itself():
    one, other = memory(), memory(device=0)
    handle, _ = one.export(MemorySpan(BASE + 512, 100, "cuda:1"))
    assert other.open(handle) == MemorySpan(BASE, SIZE, "cuda:1")
    other.release(MemorySpan(BASE, SIZE, "cuda:1"))
    assert other._cuda.opened == other._cuda.closed == []


def test_a_handle_of_another_process_is_mapped_as_a_whole_and_let_go():
    one = memory()
    assert one.open(b"\1" * HANDLE_BYTES) == MemorySpan(MAPPED, SIZE, "cuda:1")
    assert one._cuda.opened == [(b"\1" * HANDLE_BYTES, 1)]
    assert one._cuda.contexts == [0xC1]  # CUDA keeps a context per thread
    one.release(MemorySpan(MAPPED, SIZE, "cuda:1"))
    assert one._cuda.closed == [MAPPED]


def test_an_allocation_that_cuda_cut_out_of_a_larger_one_begins_where_it_begins():
    one = memory()
    one._cuda.lead = 512
    span = one.open(b"\1" * HANDLE_BYTES)
    assert span == MemorySpan(MAPPED + 512, SIZE - 512, "cuda:1")
    one.release(span)
    assert one._cuda.closed == [MAPPED + 512]


def test_a_mapping_whose_size_cannot_be_told_is_let_go():
    one = memory(cuMemGetAddressRange_v2=1)
    with pytest.raises(PeerLostError, match="cuMemGetAddressRange"):
        one.open(b"\1" * HANDLE_BYTES)
    assert one._cuda.closed == [MAPPED]


@pytest.mark.parametrize(
    ("errors", "call", "error", "says"),
    [
        ({"cuInit": 100}, lambda m: m, HostError, "cuInit: CUDA error 100"),
        ({"cuDeviceGet": 101}, lambda m: m, HostError, "cuda:1: opening"),
        (
            {"cuIpcOpenMemHandle_v2": 217},
            lambda m: m.open(b"\2" * HANDLE_BYTES),
            PeerLostError,
            r"use another transport.*CUDA error 217 \(peer access is not supported\)",
        ),
        (
            {"cuIpcGetMemHandle": 1},
            lambda m: m.export(MemorySpan(BASE, 10, "cuda:1")),
            TransferError,
            "expandable_segments",
        ),
        (
            {"cuMemGetAddressRange_v2": 500},
            lambda m: m.export(MemorySpan(BASE, 10, "cuda:1")),
            TransferError,
            "sharing 10 bytes of cuda:1",
        ),
    ],
)
def test_each_refusal_of_the_driver_is_an_error_of_ours(errors, call, error, says):
    with pytest.raises(error, match=says):
        call(memory(**errors))


def test_memory_over_several_allocations_cannot_be_shared():
    with pytest.raises(TransferError, match=r"first of 1048576 bytes.*expandable_segments"):
        memory().export(MemorySpan(BASE + 1, SIZE, "cuda:1"))


def test_memory_of_another_device_is_refused_with_both():
    with pytest.raises(TransferError, match=r"on cuda:0, and this transport serves cuda:1"):
        memory().export(MemorySpan(BASE, 10, "cuda:0"))


def test_a_machine_without_a_driver_is_told_so(monkeypatch):
    monkeypatch.setattr("kvferry.transports.cuda_ipc_memory._LIBRARY", "libnone.so.1")
    with pytest.raises(HostError, match=r"libnone\.so\.1.*install NVIDIA's driver"):
        CudaIpcMemory(0)
