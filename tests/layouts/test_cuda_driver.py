"""The calls of CUDA's driver, over a driver that is a handful of Python functions."""

import pytest

from kvferry.errors import HostError, TransferError
from kvferry.layouts.cuda_driver import CudaDriver
from tests.layouts.fake_driver import FakeDriver


def test_the_context_of_the_device_is_current_in_a_block_and_given_back_after_it():
    library = FakeDriver()
    driver = CudaDriver(1, library)
    assert library.contexts == []
    with driver:
        assert (library.contexts, library.depth) == ([0xC1], 1)
    assert library.depth == 0


def test_copies_have_all_64_bits_of_their_addresses():
    library = FakeDriver()
    driver = CudaDriver(0, library)
    numbers = 0x7F00_0000_0010, 0x7E00_0000_0020, 5 << 32, 0x7D00_0000_0030
    with driver:
        driver.upload(*numbers)
        driver.download(*numbers)
    assert library.uploads == library.downloads == [numbers]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("cuInit", HostError, r"cuda:1: opening CUDA's driver: cuInit: CUDA error 100"),
        ("cuDeviceGet", HostError, r"cuda:1: opening CUDA's driver: cuDeviceGet"),
        ("cuCtxPushCurrent_v2", TransferError, r"cuda:1: cuCtxPushCurrent_v2: CUDA error 100"),
        ("cuMemcpyHtoDAsync_v2", TransferError, r"cuda:1: an upload: CUDA error 100"),
        ("cuMemcpyDtoHAsync_v2", TransferError, r"cuda:1: a download: CUDA error 100"),
        ("cuEventCreate", TransferError, r"cuda:1: making an event: CUDA error 100"),
        ("cuEventRecord", TransferError, r"cuda:1: an event: CUDA error 100"),
        ("cuEventQuery", TransferError, r"cuda:1: an event: CUDA error 100"),
    ],
)
def test_each_refusal_of_the_driver_is_an_error_of_ours(name, error, says):
    library = FakeDriver(**{name: 100})
    with pytest.raises(error, match=says):  # noqa: PT012 - any of these calls may be refused
        driver = CudaDriver(1, library)
        with driver:
            driver.upload(1, 2, 3, 4)
            driver.download(1, 2, 3, 4)
            event = driver.event()
            event.record(5)
            event.query()
    assert library.depth == 0


def test_an_event_is_done_until_it_is_recorded_and_again_once_its_work_is():
    library = FakeDriver()
    driver = CudaDriver(0, library)
    with driver:
        event, other = driver.event(), driver.event()
        library.are_done = False
        assert event.query()
        event.record(5 << 32)
        assert (event.query(), other.query()) == (False, True)
        library.are_done = True
        assert event.query()
        event.close()
    assert library.recorded == [None, 0]


def test_memory_that_several_users_pin_is_pinned_until_the_last_of_them_lets_it_go():
    library = FakeDriver()
    one, other = CudaDriver(0, library), CudaDriver(1, library)
    address = 0x7F00_0000_1000
    with one:
        one.pin(address, 4096)
    with other:
        other.pin(address, 4096)
        other.unpin(address)
        assert library.pinned == [address]
        one.unpin(address)
        assert library.pinned == []
        one.pin(address, 8192)
        one.unpin(address)


def test_memory_that_cannot_be_pinned_is_not_taken_for_pinned_memory_later():
    library = FakeDriver(cuMemHostRegister_v2=2)
    driver = CudaDriver(0, library)
    with driver:
        for _ in range(2):
            with pytest.raises(HostError, match=r"pinning 4096 bytes.*`ulimit -l`.*error 2"):
                driver.pin(0x7F00_0000_1000, 4096)
        library.errors.clear()
        driver.pin(0x7F00_0000_1000, 4096)
        assert library.pinned == [0x7F00_0000_1000]
        driver.unpin(0x7F00_0000_1000)


def test_a_machine_without_a_driver_is_told_so(monkeypatch):
    monkeypatch.setattr("kvferry.layouts.cuda_driver._LIBRARY", "libnone.so.1")
    with pytest.raises(HostError, match=r"libnone\.so\.1.*install NVIDIA's driver"):
        CudaDriver(0)
