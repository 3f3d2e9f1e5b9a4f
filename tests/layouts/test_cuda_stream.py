"""The stream of a CUDA device, and how a thread waits for it: all that needs no device."""

import contextlib
import ctypes
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvferry.errors import TransferError
from kvferry.layouts import (
    copier_triton,
    cuda_stream,
    kv_postprocess_layout_on_receive,
    repack_triton,
)
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.cuda_driver import CudaDriver
from kvferry.layouts.cuda_stream import CudaCopyStream, CudaEvent, UploadSlots
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, blank_runs
from tests.layouts.fake_driver import FakeDriver

needs_host_memory = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels reach host memory under the interpreter alone"
)


class Event:
    """An event of torch that is done after a number of looks."""

    def __init__(self, looks):
        self.looks = looks
        self.library = FakeDriver()

    def wait(self):
        """Waits as a thread does that has no context of its own."""
        event: Any = self
        CudaEvent(event, CudaDriver(0, self.library)).wait()

    def query(self):
        assert self.library.depth
        self.looks -= 1
        return self.looks < 0


class Clock:
    """Time that passes in sleeps only."""

    def __init__(self):
        self.now = 1000.0
        self.slept = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(cuda_stream, "time", found)
    return found


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_an_event_that_is_done_soon_is_looked_at_every_10_us(clock, looks):
    event: Any = Event(looks)
    event.wait()
    assert event.looks == -1
    assert clock.slept == [cuda_stream.LOOK_S] * looks


def test_the_longer_an_event_takes_the_longer_are_the_pauses_between_looks(clock):
    event: Any = Event(600)
    event.wait()
    assert event.looks == -1
    assert clock.slept == sorted(clock.slept)
    assert clock.slept[0] == cuda_stream.LOOK_S
    assert clock.slept[-1] == cuda_stream.MOST_LOOK_S
    passed = np.cumsum(clock.slept)
    late = clock.slept[100:300] / passed[100:300]
    assert late.max() < 0.025


def test_a_thread_that_waits_wakes_soon_after_its_sleep_ends():
    slack: Any = []

    def sharpen():
        cuda_stream.sharpen_timer()
        slack.append(ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))  # PR_GET_TIMERSLACK, in ns

    thread = threading.Thread(target=sharpen)
    thread.start()
    thread.join()
    if slack == [-1]:
        pytest.skip("this kernel has no timer slack")
    assert slack == [1000]


def test_a_device_that_failed_is_an_error_of_ours():
    class Failed(Event):
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    event: Any = Failed(0)
    with pytest.raises(TransferError, match=r"illegal memory access was encountered$"):
        event.wait()


# ---- the stream, with host memory and the interpreter in the place of a device -------------------


class Stream:
    """A stream of torch. What is enqueued is carried out at once; events are done when told."""

    device = torch.device("cpu")

    def __init__(self, device):
        self.waited = []
        self.cuda_stream = 0

    def wait_event(self, event):
        assert Done.library.depth
        self.waited.append(event)

    def synchronize(self):
        assert Done.library.depth


class Done:
    """An event of torch that is done unless all are told not to be."""

    are_done = True
    library: Any = None

    def __init__(self):
        self.recorded = 0

    def record(self, stream):
        assert Done.library.depth
        self.recorded += 1

    def query(self):
        assert Done.library.depth
        return not self.recorded or Done.are_done


class MemoryDriver(FakeDriver):
    """Uploads and downloads go from host memory to host memory, at once."""

    def cuMemcpyHtoDAsync_v2(self, target, source, nbytes, stream):  # noqa: N802
        ctypes.memmove(target.value, source.value, nbytes.value)
        return super().cuMemcpyHtoDAsync_v2(target, source, nbytes, stream)

    def cuMemcpyDtoHAsync_v2(self, target, source, nbytes, stream):  # noqa: N802
        ctypes.memmove(target.value, source.value, nbytes.value)
        return super().cuMemcpyDtoHAsync_v2(target, source, nbytes, stream)


@pytest.fixture
def stream(monkeypatch):
    library = MemoryDriver()
    driver = CudaDriver(0, library)
    monkeypatch.setattr(Done, "are_done", True)
    monkeypatch.setattr(Done, "library", library)
    for name, value in {
        "Stream": Stream,
        "Event": Done,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": Stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_stream, "driver_of", lambda device: driver)
    stream: Any = CudaCopyStream(0)
    stream.pinned, stream.library = library.pinned, library
    yield stream
    stream.close()
    assert library.pinned == []
    assert library.depth == 0
    assert set(library.recorded) == {None}  # the events are given back as well


def case_of(blocks):
    """Tiles of a row of 32 bytes in blocks of one token, and runs that turn the blocks round."""
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    for side in ("source", "target"):
        tiles[f"{side}_block_stride"] = 32
        tiles[f"{side}_element_stride"] = 4
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, 8, 4
    runs = blank_runs(blocks)
    runs["source_block"], runs["target_block"] = np.arange(blocks), np.arange(blocks)[::-1]
    runs["tokens"] = 1
    source = np.random.default_rng(blocks).integers(0, 1 << 30, (blocks, 8), dtype=np.int32)
    return tiles, runs, source, np.zeros_like(source)


def recorded(slot):
    """Number of times that the event after a copy that read the slot was recorded."""
    return slot.used.recorded if isinstance(slot.used, Done) else 0


def slots_of(stream):
    """The pinned memory from which the stream sends tables to the device."""
    return stream._slots.free


@needs_host_memory
@pytest.mark.parametrize("most_tokens", [0, 1, 5])
def test_prepared_tiles_are_copied_with_runs_that_come_later(stream, most_tokens):
    tiles, runs, source, target = case_of(9)
    copy = stream.prepare([source.ctypes.data], [target.ctypes.data], tiles, most_tokens)
    tiles["elements"] = 1  # they may change by now
    assert not target.any()
    copy(runs[:4])
    np.testing.assert_array_equal(target[5:], source[:4][::-1])
    assert not target[:5].any()
    event = copy(runs[4:])
    np.testing.assert_array_equal(target, source[::-1])
    assert event.done()


@needs_host_memory
@pytest.mark.parametrize(("most_tokens", "launches"), [(0, 0), (1, 1)])
def test_tiles_for_many_copies_are_launched_once_beforehand_and_nothing_moves(
    stream, most_tokens, launches
):
    tiles, _, source, target = case_of(3)
    stream.prepare([source.ctypes.data], [target.ctypes.data], tiles, most_tokens)
    assert sum(map(recorded, slots_of(stream))) == launches
    assert not target.any()


@needs_host_memory
def test_slots_for_runs_are_taken_at_the_start_and_used_again(stream):
    tiles, runs, source, target = case_of(3)
    taken = list(stream.pinned)
    copy = stream.prepare([source.ctypes.data], [target.ctypes.data], tiles)
    for _ in range(3 * len(taken)):
        copy(runs)
    assert stream.pinned == taken
    assert len(taken) > 1


@needs_host_memory
def test_runs_that_a_copy_may_still_read_are_not_written_over_and_nobody_waits(stream):
    tiles, runs, source, target = case_of(3)
    copy = stream.prepare([source.ctypes.data], [target.ctypes.data], tiles)
    taken = len(stream.pinned)
    Done.are_done = False
    sent = {slot.words.ctypes.data for slot in slots_of(stream)}
    for number in range(1, taken + 4):
        copy(runs)
        used = [slot for slot in slots_of(stream) if recorded(slot)]
        assert len(used) == number
        assert all((slot.words[:21] == runs.view(np.int64)).all() for slot in used)
    assert len(stream.pinned) == len(slots_of(stream)) == taken + 3
    assert sent < {slot.words.ctypes.data for slot in slots_of(stream)}


@needs_host_memory
def test_slots_for_many_copies_in_progress_are_kept_up_to_a_number(stream, monkeypatch):
    tiles, runs, source, target = case_of(3)
    copy = stream.prepare([source.ctypes.data], [target.ctypes.data], tiles)
    most = len(stream.pinned) + 5
    monkeypatch.setattr(cuda_stream, "_KEPT_SLOTS", most)
    Done.are_done = False
    for _ in range(most):
        copy(runs)
    Done.are_done = True
    for _ in range(3 * most):
        copy(runs)
    assert len(stream.pinned) == most  # all are kept for the next time
    Done.are_done = False
    for _ in range(most):  # none of the slots is free
        copy(runs)
    assert len(stream.pinned) == 2 * most
    Done.are_done = True
    for _ in range(3 * most):
        copy(runs)
    assert len(stream.pinned) == most


@needs_host_memory
def test_runs_for_which_a_slot_has_no_room_get_a_larger_one(stream, monkeypatch):
    tiles, runs, source, target = case_of(cuda_stream.SLOT_BYTES // RUN_DTYPE.itemsize + 5)
    monkeypatch.setattr(copier_triton, "_PROGRAMS", 1)
    copy = stream.prepare([source.ctypes.data], [target.ctypes.data], tiles)
    taken = len(stream.pinned)
    copy(runs)
    np.testing.assert_array_equal(target, source[::-1])
    assert len(stream.pinned) == taken
    assert max(slot.memory.nbytes for slot in slots_of(stream)) >= runs.nbytes


@needs_host_memory
@pytest.mark.parametrize("size", [1, 7, 9])  # ids; a slot has room for 8
def test_a_postprocessor_sends_its_block_ids_through_slots_that_nothing_reads(
    stream, monkeypatch, size
):
    monkeypatch.setattr(cuda_stream, "SLOT_BYTES", 64)
    slots: Any = UploadSlots(stream.driver, torch.device("cpu"))
    monkeypatch.setattr(cuda_stream, "_KEPT_SLOTS", len(slots.free))
    monkeypatch.setattr(repack_triton, "slots_of", lambda _: slots)
    active = SimpleNamespace(get_current_stream=lambda _: 5)
    monkeypatch.setattr(repack_triton, "driver", SimpleNamespace(active=active))
    taken = len(slots.free)
    stream.library.are_done = False
    cache = torch.arange((taken + 3) * size * 4, dtype=torch.int32).reshape(-1, 2, 2, 1)
    wanted = cache.transpose(1, 2).clone()
    for number in range(taken + 3):
        ids = number * size + np.arange(size)
        kv_postprocess_layout_on_receive(cache, ids, method="triton")
        used = [slot for slot in slots.free if stream.library.recorded[slot.used.handle.value - 1]]
        assert len(used) == number + 1
        assert any((slot.words[:size] == ids).all() for slot in used)
    assert torch.equal(cache, wanted)
    assert len(stream.pinned) == len(slots_of(stream)) + taken + 3
    stream.library.are_done = True
    assert {upload[-1] for upload in stream.library.uploads} == {5}
    kv_postprocess_layout_on_receive(cache, [0], method="triton")
    assert len(slots.free) == taken + 2  # a slot that is not needed any more is given up
    slots.close()


def test_nothing_is_launched_for_no_runs_and_there_is_an_event_all_the_same(stream):
    tiles, runs, *_ = case_of(1)
    assert stream.prepare([0], [0], tiles)(runs[:0]).done()
    assert stream.prepare([0], [0], tiles[:0])(runs).done()
    assert not any(map(recorded, slots_of(stream)))


@needs_host_memory
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_tiles_that_are_copied_once_go_up_with_their_runs_in_one_slot(stream, rows):
    tiles, runs, source, target = case_of(9)
    tiles = np.repeat(tiles, rows)
    for side in ("source", "target"):
        tiles[f"{side}_offset"] = 12 * np.arange(rows) % 32
    tiles["elements"] = 2
    taken = list(stream.pinned)
    addresses = [source.ctypes.data], [target.ctypes.data]
    for _ in range(2 * len(taken)):
        target[:] = 0
        event = stream.copy(*addresses, tiles, runs)
        wanted = np.zeros_like(target)
        copy_tiles([source.ctypes.data], [wanted.ctypes.data], tiles, runs)
        np.testing.assert_array_equal(target, wanted)
        assert event.done()
    assert stream.pinned == taken
    assert list(map(recorded, slots_of(stream))) == [1] * len(taken)


@needs_host_memory
def test_tables_that_a_copy_may_still_read_are_not_written_over(stream):
    tiles, runs, source, target = case_of(3)
    taken = len(stream.pinned)
    Done.are_done = False
    for _ in range(taken + 3):
        stream.copy([source.ctypes.data], [target.ctypes.data], tiles, runs)
    assert len(stream.pinned) == taken + 3


def test_nothing_is_launched_for_no_tiles_and_there_is_an_event_all_the_same(stream):
    tiles, runs, *_ = case_of(1)
    assert stream.copy([0], [0], tiles, runs[:0]).done()
    assert stream.copy([0], [0], tiles[:0], runs).done()
    assert not any(map(recorded, slots_of(stream)))


def test_bytes_go_up_and_down_at_once_and_the_event_comes_after(stream):
    memory = np.zeros(100, dtype=np.uint8)
    given, taken = np.arange(1, 61, dtype=np.uint8), np.zeros(50, dtype=np.uint8)
    stream.upload(given, memory.ctypes.data)
    assert stream.download(memory.ctypes.data, taken).done()
    np.testing.assert_array_equal(taken, given[:50])
    assert memory.tolist() == [*given.tolist(), *[0] * 40]


def test_a_thread_without_a_context_calls_cuda_in_that_of_the_device_alone(stream):
    """Outside of it, CUDA would open a context on device 0 for the thread."""
    memory = np.zeros(4096, dtype=np.uint8)
    stream.pin(memory)
    assert stream.pinned[-1] == memory.ctypes.data
    stream.upload(memory[:9], memory.ctypes.data + 9)
    for event in (
        stream.record(),
        stream.engine_event(),
        stream.download(memory.ctypes.data, memory),
    ):
        stream.follow(event)
        event.wait()
    stream.unpin(memory)
    assert memory.ctypes.data not in stream.pinned
    assert set(stream.library.contexts) == {0xC0}
    assert stream.library.depth == 0


def test_a_stream_whose_device_failed_is_closed_without_another_error(monkeypatch, stream):
    monkeypatch.setattr("kvferry.layouts.cuda_driver._pins", Counter(stream.pinned))
    memory = np.zeros(4096, dtype=np.uint8)
    stream.pin(memory)
    stream.library.errors["cuCtxPushCurrent_v2"] = 700  # any function may tell of the failure
    with pytest.raises(TransferError, match="CUDA error 700"):
        stream.record()
    stream.unpin(memory)
    stream.close()
    stream.pinned.clear()  # as at the end of the process
    stream.library.recorded[:] = [None]


def test_the_stream_waits_for_an_event_of_the_engine_and_no_thread_does(stream):
    event: Any = Event(1 << 40)
    stream.follow(CudaEvent(event, stream.driver))
    assert stream._stream.waited == [event]
    assert event.looks == 1 << 40
