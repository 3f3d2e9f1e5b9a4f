"""Chunks through host memory into a cache; a thread is the device."""

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.errors import TransferError
from kvferry.layouts import TILE_DTYPE, blank_runs
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.device import Bounces, Placer
from kvferry.layouts.staging import stage
from kvferry.testing.host_device import HostCopyStream

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
    return lambda addresses: Placer(addresses, [stream, stream])


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
                event = placer.place(landed, chunk.unpack_tiles, chunk.unpack_runs)
                if event is not None:
                    event.wait()
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


def wait_for(event):
    """A chunk that a device puts in place comes with an event."""
    assert event is not None
    event.wait()


def test_a_chunk_is_in_place_when_its_event_is_done_and_not_before(stream):
    tiles, runs, landed, cache = one_chunk(1000)
    placer = Placer([cache.ctypes.data], [stream])
    stream.pause()
    event = placer.place(landed, tiles, runs)
    assert event is not None
    assert not event.done()
    assert not cache.any()
    stream.resume()
    event.wait()
    np.testing.assert_array_equal(cache, landed)


def test_threads_share_the_bounce_buffers_and_each_chunk_stays_whole(stream):
    cache = np.zeros((8, 5000), dtype=np.uint8)
    with HostCopyStream() as other:
        placer = Placer([cache.ctypes.data], [stream, other])

        def place(row):
            tiles, runs, landed, _ = one_chunk(5000)
            landed[:] = row + 1
            tiles["target_offset"] = row * 5000
            wait_for(placer.place(landed, tiles, runs))

        threads = [threading.Thread(target=place, args=(row,)) for row in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert (cache == np.arange(1, 9)[:, None]).all()


def test_one_stream_uploads_while_the_other_unpacks(stream):
    tiles, runs, landed, cache = one_chunk(1000)
    with HostCopyStream() as other:
        placer = Placer([cache.ctypes.data], [stream, other])
        stream.pause()
        first = placer.place(landed, tiles, runs)
        wait_for(placer.place(landed, tiles, runs))
        assert first is not None
        assert not first.done()
        stream.resume()
        first.wait()


def test_one_stream_downloads_while_the_other_packs(stream):
    tiles, runs, cache, packed = one_chunk(1000)
    with HostCopyStream() as other:
        bounces = Bounces([stream, other])
        stream.pause()
        first = bounces.down([cache.ctypes.data], packed[:600], 0, *cut(tiles, runs, 0, 600))
        second = bounces.down([cache.ctypes.data], packed[600:], 600, *cut(tiles, runs, 600, 1000))
        second.wait()
        np.testing.assert_array_equal(packed[600:], cache[600:])
        assert not first.done()
        assert not packed[:600].any()
        stream.resume()
        first.wait()
        np.testing.assert_array_equal(packed, cache)


def cut(tiles, runs, first, end):
    """The tables of some bytes of the chunk."""
    tiles = tiles.copy()
    tiles["source_offset"], tiles["target_offset"] = first, first
    tiles["elements"] = end - first
    return tiles, runs


def test_chunks_that_go_down_on_one_stream_stay_whole(stream):
    tiles, runs, cache, packed = one_chunk(1000)
    bounces = Bounces([stream])
    bounces.reserve(100)
    events = [
        bounces.down(
            [cache.ctypes.data], packed[at : at + 100], at, *cut(tiles, runs, at, at + 100)
        )
        for at in range(0, 1000, 100)
    ]
    for event in events:
        event.wait()
    np.testing.assert_array_equal(packed, cache)


def test_the_bounce_buffer_grows_with_the_chunks_and_seldom(stream, monkeypatch):
    taken = []
    allocate = stream.allocate
    monkeypatch.setattr(stream, "allocate", lambda n: taken.append(n) or allocate(n))
    cache = np.zeros(1000, dtype=np.uint8)
    placer = Placer([cache.ctypes.data], [stream])
    for nbytes in (100, 60, 150, 200, 1000):
        tiles, runs, landed, _ = one_chunk(nbytes)
        wait_for(placer.place(landed, tiles, runs))
        np.testing.assert_array_equal(cache[:nbytes], landed)
    assert taken == [100, 200, 1000]


def test_staging_is_pinned_while_it_is_used(stream):
    placer = Placer([0], [stream])
    staging = np.zeros(100, dtype=np.uint8)
    placer.adopt(staging)
    assert stream.pinned == [staging.ctypes.data]
    placer.close()
    placer.close()
    assert stream.pinned == []


def test_a_device_that_fails_fails_what_is_placed(stream):
    tiles, runs, landed, cache = one_chunk(10)
    placer = Placer([cache.ctypes.data], [stream])
    stream.fail()
    with pytest.raises(TransferError, match="the device failed"):
        placer.place(landed, tiles, runs)
