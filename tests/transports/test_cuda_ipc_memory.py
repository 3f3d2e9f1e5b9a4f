"""The handles of CUDA IPC, over a driver that is a handful of Python functions."""

import threading
import weakref
from typing import Any

import pytest

from kvferry.errors import PeerLostError, TransferError
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.cuda_driver import CudaDriver
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES, CudaIpcMemory
from tests.layouts.fake_driver import BASE, MAPPED, SIZE, FakeDriver


def memory_over(driver, device=1):
    return CudaIpcMemory(CudaDriver(device, driver))


def memory(**errors):
    return memory_over(FakeDriver(**errors))


def test_memory_travels_as_the_handle_of_its_allocation_and_an_offset():
    driver = FakeDriver()
    one = memory_over(driver)
    handle, offset = one.export(MemorySpan(BASE + 512, 100, "cuda:1"))
    assert (handle, offset) == (b"\7" * HANDLE_BYTES, 512)
    assert driver.contexts == [0xC1]


def test_a_handle_of_this_process_is_the_memory_itself():
    driver = FakeDriver()
    one, other = memory(), memory_over(driver, 0)
    handle, _ = one.export(MemorySpan(BASE + 512, 100, "cuda:1"))
    assert other.open(handle) == MemorySpan(BASE, SIZE, "cuda:1")
    other.release(MemorySpan(BASE, SIZE, "cuda:1"))
    assert driver.opened == driver.closed == []
    assert one.open(handle) == other.open(handle)
    # Otherwise a kernel of device 0 that reads the memory of device 1 ends its context.
    assert (driver.contexts, driver.reached) == ([0xC0, 0xC0], [0xC1])


def test_memory_of_this_process_that_a_device_cannot_reach_is_refused():
    one, other = memory(), memory_over(FakeDriver(cuCtxEnablePeerAccess=217), 0)
    handle, _ = one.export(MemorySpan(BASE, 100, "cuda:1"))
    with pytest.raises(PeerLostError, match=r"cuda:0: access to.*cuda:1.*217.*another transport"):
        other.open(handle)


def test_a_transport_that_is_opened_meanwhile_does_not_disturb_the_search_for_a_handle(monkeypatch):
    made: list[Any] = []

    class Slow(weakref.WeakSet):
        """The memories of this process, and another comes while somebody looks at them."""

        def __iter__(self):
            for one in super().__iter__():
                if not made:
                    made.append(threading.Thread(target=lambda: made.append(memory())))
                    made[0].start()
                    made[0].join(0.1)
                yield one

    one = memory()
    monkeypatch.setattr("kvferry.transports.cuda_ipc_memory._exporters", Slow([one]))
    one.open(b"\1" * HANDLE_BYTES)
    made[0].join()
    assert made[1].exported(b"\1" * HANDLE_BYTES) is None


def test_a_handle_of_another_process_is_mapped_as_a_whole_and_let_go():
    driver = FakeDriver()
    one = memory_over(driver)
    assert one.open(b"\1" * HANDLE_BYTES) == MemorySpan(MAPPED, SIZE, "cuda:1")
    assert driver.opened == [(b"\1" * HANDLE_BYTES, 1)]
    assert driver.contexts == [0xC1]  # CUDA keeps a context per thread
    one.release(MemorySpan(MAPPED, SIZE, "cuda:1"))
    assert driver.closed == [MAPPED]


def test_an_allocation_that_cuda_cut_out_of_a_larger_one_begins_where_it_begins():
    driver = FakeDriver()
    driver.lead = 512
    one = memory_over(driver)
    span = one.open(b"\1" * HANDLE_BYTES)
    assert span == MemorySpan(MAPPED + 512, SIZE - 512, "cuda:1")
    one.release(span)
    assert driver.closed == [MAPPED + 512]


def test_a_mapping_whose_size_cannot_be_told_is_let_go():
    driver = FakeDriver(cuMemGetAddressRange_v2=1)
    one = memory_over(driver)
    with pytest.raises(PeerLostError, match="cuMemGetAddressRange"):
        one.open(b"\1" * HANDLE_BYTES)
    assert driver.closed == [MAPPED]


@pytest.mark.parametrize(
    ("errors", "call", "error", "says"),
    [
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
