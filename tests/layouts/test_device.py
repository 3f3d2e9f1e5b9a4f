"""Chunks through host memory into a cache, and lent blocks out of one; a thread is the device."""

import threading
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.errors import HostError, TransferError
from kvferry.layouts import TILE_DTYPE, blank_runs
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.device import HostMirror, Placer
from kvferry.layouts.staging import stage
from kvferry.testing.host_device import HostCopyStream
from kvferry.topology import ParallelShape
from kvferry.topology.binding import bind_own
from kvferry.topology.lowering import own_tiles
from tests import geometries

PROPERTY = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def stream():
    with HostCopyStream() as opened:
        yield opened


@pytest.fixture(params=["host", "device"])
def placer_of(request, stream):
    """Makes a placer for a cache whose regions have the given addresses."""
    if request.param == "host":
        return Placer
    return lambda addresses: Placer(addresses, stream)


def test_chunks_through_staging_are_the_direct_copy(copy_cases, addresses, placer_of):
    @PROPERTY
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        wanted = [target.copy() for target in copies.targets]
        copy_cases.copy(copies, wanted)
        staging = np.zeros(4096, dtype=np.uint8)
        with placer_of(addresses(copies.targets)) as placer:
            placer.adopt(staging)
            for chunk in stage(copies.tiles, copies.runs, data.draw(st.integers(1, 500))):
                landed = staging[: chunk.nbytes]
                copy_tiles(
                    addresses(copies.sources),
                    addresses([landed]),
                    chunk.pack_tiles,
                    chunk.pack_runs,
                )
                placer.place(landed, chunk.unpack_tiles, chunk.unpack_runs)
                staging[:] = 0xEE  # the slot is somebody else's now
        for found, want in zip(copies.targets, wanted, strict=True):
            np.testing.assert_array_equal(found, want)

    law()


def one_chunk(nbytes):
    """A chunk of one piece, and the cache it goes to."""
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, nbytes, 1
    tiles["source_element_stride"] = tiles["target_element_stride"] = 1
    runs = blank_runs(1)
    runs["tokens"] = 1
    return tiles, runs, np.arange(nbytes).astype(np.uint8), np.zeros(nbytes, dtype=np.uint8)


def test_placing_returns_when_the_bytes_are_in_place_and_not_before(stream):
    tiles, runs, landed, cache = one_chunk(1000)
    placer = Placer([cache.ctypes.data], stream)
    stream.pause()
    placing = threading.Thread(target=placer.place, args=(landed, tiles, runs))
    placing.start()
    time.sleep(0.05)
    assert placing.is_alive()
    assert not cache.any()
    stream.resume()
    placing.join(timeout=60)
    np.testing.assert_array_equal(cache, landed)


def test_threads_share_one_bounce_buffer_and_each_chunk_stays_whole(stream):
    cache = np.zeros((8, 5000), dtype=np.uint8)
    placer = Placer([cache.ctypes.data], stream)

    def place(row):
        tiles, runs, landed, _ = one_chunk(5000)
        landed[:] = row + 1
        tiles["target_offset"] = row * 5000
        placer.place(landed, tiles, runs)

    threads = [threading.Thread(target=place, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (cache == np.arange(1, 9)[:, None]).all()


def test_the_bounce_buffer_grows_with_the_chunks_and_seldom(stream, monkeypatch):
    taken = []
    allocate = stream.allocate
    monkeypatch.setattr(stream, "allocate", lambda n: taken.append(n) or allocate(n))
    cache = np.zeros(1000, dtype=np.uint8)
    placer = Placer([cache.ctypes.data], stream)
    for nbytes in (100, 60, 150, 200, 1000):
        tiles, runs, landed, _ = one_chunk(nbytes)
        placer.place(landed, tiles, runs)
        np.testing.assert_array_equal(cache[:nbytes], landed)
    assert taken == [100, 200, 1000]


def test_staging_is_pinned_while_it_is_used(stream):
    placer = Placer([0], stream)
    staging = np.zeros(100, dtype=np.uint8)
    placer.adopt(staging)
    assert stream.pinned == [staging.ctypes.data]
    placer.close()
    placer.close()
    assert stream.pinned == []


def test_a_device_that_fails_fails_what_is_placed(stream):
    tiles, runs, landed, cache = one_chunk(10)
    placer = Placer([cache.ctypes.data], stream)
    stream.fail()
    with pytest.raises(TransferError, match="the device failed"):
        placer.place(landed, tiles, runs)


geometry = partial(
    geometries.geometry, num_kv_heads=3, dtype="float16", parallel=ParallelShape(tp=2)
)


@pytest.mark.parametrize("layout", ["NHD", "HND", "BLKNHD", "BNHKD"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_mirror_holds_the_blocks_that_were_lent_where_the_device_holds_them(stream, layout, rank):
    one = geometry(layout=layout)
    memory = one.memory(rank, 6, region_per_tensor=layout != "BLKNHD")
    rng = np.random.default_rng(rank)
    cache = [rng.integers(1, 256, nbytes, dtype=np.uint8) for nbytes in memory.region_bytes]
    spans = [MemorySpan(array.ctypes.data, array.nbytes, "cpu") for array in cache]
    tiles = own_tiles(one, rank, memory)
    with HostMirror(stream, spans) as mirror:
        runs, _ = bind_own(one, rank, [4, 2], num_tokens=7)
        mirror.copy_out(tiles, runs).wait()
        again = [array.copy() for array in mirror.arrays]
        held = sum(int(np.count_nonzero(array)) for array in mirror.arrays)
        assert held == 7 * sum(array.nbytes for array in cache) // (6 * 4)
        for array, own in zip(mirror.arrays, cache, strict=True):
            lent = array != 0
            np.testing.assert_array_equal(array[lent], own[lent])
        for array in cache:
            array[:] = 0  # the blocks are written by another request
        for array, before in zip(mirror.arrays, again, strict=True):
            np.testing.assert_array_equal(array, before)
    assert stream.pinned == []


def test_what_is_lent_is_there_when_its_event_is_done_and_not_before(stream):
    one = geometry(parallel=ParallelShape())
    memory = one.memory(0, 3)
    cache = np.full(memory.region_bytes[0], 9, dtype=np.uint8)
    with HostMirror(stream, [MemorySpan(cache.ctypes.data, cache.nbytes, "cpu")]) as mirror:
        stream.pause()
        event = mirror.copy_out(own_tiles(one, 0, memory), bind_own(one, 0, [1], 4)[0])
        assert not event.done()
        assert not mirror.arrays[0].any()
        stream.resume()
        event.wait()
        assert event.done()
        assert mirror.arrays[0].any()


def test_a_mirror_that_cannot_be_pinned_leaves_nothing_pinned(stream, monkeypatch):
    pin = stream.pin

    def second_fails(memory):
        if stream.pinned:
            raise HostError("the limit of locked memory is too low")
        pin(memory)

    monkeypatch.setattr(stream, "pin", second_fails)
    with pytest.raises(HostError, match="locked memory"):
        HostMirror(stream, [MemorySpan(0, 10, "cpu"), MemorySpan(0, 10, "cpu")])
    assert stream.pinned == []
