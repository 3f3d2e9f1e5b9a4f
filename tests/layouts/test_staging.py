"""Staging: packing and unpacking through dense buffers is the direct copy."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.layouts import TILE_DTYPE, blank_runs, check_bounds, num_bytes
from kvferry.layouts.copier import copy_tiles, expand
from kvferry.layouts.staging import stage

PROPERTY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_packing_then_unpacking_is_the_direct_copy(copy_cases, addresses):
    @PROPERTY
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        wanted = [target.copy() for target in copies.targets]
        copy_cases.copy(copies, wanted)
        size = data.draw(st.integers(1, 500))
        total = 0
        for chunk in stage(copies.tiles, copies.runs, size):
            buffer = np.zeros(chunk.nbytes, dtype=np.uint8)
            check_bounds(
                chunk.pack_tiles,
                chunk.pack_runs,
                [source.nbytes for source in copies.sources],
                [buffer.nbytes],
            )
            check_bounds(
                chunk.unpack_tiles,
                chunk.unpack_runs,
                [buffer.nbytes],
                [target.nbytes for target in copies.targets],
            )
            copy_tiles(
                addresses(copies.sources), addresses([buffer]), chunk.pack_tiles, chunk.pack_runs
            )
            copy_tiles(
                addresses([buffer]),
                addresses(copies.targets),
                chunk.unpack_tiles,
                chunk.unpack_runs,
            )
            total += chunk.nbytes
            assert chunk.nbytes <= size or len(chunk.pack_runs) == len(chunk.pack_tiles) == 1
        for found, want in zip(copies.targets, wanted, strict=True):
            np.testing.assert_array_equal(found, want)
        assert total == num_bytes(copies.tiles, copies.runs)

    law()


def test_packing_writes_every_byte_of_its_buffer_once(copy_cases):
    @PROPERTY
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        for chunk in stage(copies.tiles, copies.runs, data.draw(st.integers(1, 500))):
            seen = np.zeros(chunk.nbytes, dtype=int)
            for row in expand(chunk.pack_tiles, chunk.pack_runs):
                first = row["target_offset"]
                seen[first : first + row["nbytes"]] += 1
            assert (seen == 1).all()

    law()


def hnd_to_nhd(blocks=8, tokens=16, heads=4, elements=64):
    """One layer of HND blocks that go into NHD blocks, with one shorter run at the end."""
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    nbytes = tokens * heads * elements * 2
    strides = {
        "source": (elements * 2, tokens * elements * 2),
        "target": (heads * elements * 2, elements * 2),
    }
    for side, (token, head) in strides.items():
        tiles[f"{side}_block_stride"] = nbytes
        tiles[f"{side}_token_stride"], tiles[f"{side}_head_stride"] = token, head
        tiles[f"{side}_element_stride"] = 2
    tiles["heads"], tiles["elements"], tiles["itemsize"] = heads, elements, 2
    runs = blank_runs(blocks)
    runs["source_block"], runs["target_block"] = np.arange(blocks)[::-1], np.arange(blocks)
    runs["tokens"] = tokens
    runs["tokens"][-1] = 3
    return tiles, runs


def test_whole_blocks_of_the_source_stay_one_piece_when_packed():
    tiles, runs = hnd_to_nhd()
    whole, rest = stage(tiles, runs)
    packed = expand(whole.pack_tiles, whole.pack_runs)
    assert packed["nbytes"].tolist() == [16 * 4 * 64 * 2] * 7
    assert len(expand(rest.pack_tiles, rest.pack_runs)) == 4  # one per head


def test_both_sides_of_a_wire_compute_the_same_chunks():
    tiles, runs = hnd_to_nhd()
    one, two = (stage(tiles, runs, chunk_bytes=20_000) for _ in range(2))
    assert len(one) == len(two) > 2
    for a, b in zip(one, two, strict=True):
        assert a.nbytes == b.nbytes
        np.testing.assert_array_equal(a.pack_tiles, b.pack_tiles)
        np.testing.assert_array_equal(a.unpack_runs, b.unpack_runs)


def test_chunks_of_no_bytes_are_refused():
    tiles, runs = hnd_to_nhd()
    with pytest.raises(ValueError, match="chunk_bytes: 0"):
        stage(tiles, runs, chunk_bytes=0)
