"""How a thread waits for the device: it looks at first, and sleeps later."""

import pytest

pytest.importorskip("triton")

from kvferry.errors import TransferError
from kvferry.layouts import cuda_stream
from kvferry.layouts.cuda_stream import CudaEvent


class Event:
    """An event of torch that is done after some looks, or once somebody sleeps for it."""

    def __init__(self, looks):
        self.looks = looks
        self.slept = 0

    def query(self):
        self.looks -= 1
        return self.looks < 0

    def synchronize(self):
        self.slept += 1


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_an_event_that_is_done_soon_is_not_slept_for(monkeypatch, looks):
    monkeypatch.setattr(cuda_stream, "LOOK_S", 60.0)
    event = Event(looks)
    CudaEvent(event).wait()
    assert (event.looks, event.slept) == (-1, 0)


def test_an_event_that_takes_longer_is_slept_for(monkeypatch):
    monkeypatch.setattr(cuda_stream, "LOOK_S", 0.0)
    event = Event(1 << 40)
    CudaEvent(event).wait()
    assert event.slept == 1


def test_a_device_that_failed_is_an_error_of_ours():
    class Failed(Event):
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    with pytest.raises(TransferError, match=r"illegal memory access was encountered$"):
        CudaEvent(Failed(0)).wait()
