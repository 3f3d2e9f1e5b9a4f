"""The copier equals a copy in plain loops, in one call, in chunks, over threads, and expanded."""

import threading
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvferry.layouts import TILE_DTYPE, blank_runs, chunks, copier, kernels, num_bytes
from kvferry.layouts.chunks import chunk_slices, cut_chunks
from kvferry.layouts.copier import CopyJob, copy_tiles, count_segments, expand, warm

PROPERTY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(params=[False, True], ids=["cached", "streaming"])
def stream(request, monkeypatch):
    """Small copies use plain stores; here both kinds are tried on them."""
    monkeypatch.setattr(copier, "stream_bytes", lambda: 0 if request.param else 1 << 60)


@pytest.mark.parametrize(
    ("plain", "around", "wanted"),
    [
        pytest.param(2.0, 1.0, copier.STREAM_BYTES, id="stores around the cache are faster"),
        pytest.param(0.95, 1.0, copier.STREAM_BYTES, id="both are about as fast"),
        pytest.param(0.8, 1.0, 1 << 62, id="plain stores are faster"),
    ],
)
def test_stores_go_around_the_cache_unless_plain_ones_are_clearly_faster(
    plain, around, wanted, monkeypatch
):
    monkeypatch.setattr(copier, "measure_stores", lambda: (plain, around))
    assert copier.stream_bytes.__wrapped__() == wanted


def test_the_two_kinds_of_stores_are_measured():
    assert all(seconds > 0 for seconds in copier.measure_stores())


def expected(copy_cases, copies):
    targets = [target.copy() for target in copies.targets]
    copy_cases.copy(copies, targets)
    return targets


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def check_copies(copy_cases, addresses, **options):
    @settings(PROPERTY, **options)
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        wanted = expected(copy_cases, copies)
        copy_tiles(addresses(copies.sources), addresses(copies.targets), copies.tiles, copies.runs)
        assert_equal(copies.targets, wanted)

    law()


def test_copies_the_same_bytes_as_plain_loops_and_no_others(copy_cases, addresses, stream):
    check_copies(copy_cases, addresses)


def test_longer_rows_and_transposes_copy_the_same(copy_cases, addresses, stream):
    @settings(PROPERTY, max_examples=25)
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data, max_extent=70)
        if num_bytes(copies.tiles, copies.runs) > 1 << 17:
            return
        wanted = [target.copy() for target in copies.targets]
        for row in expand(copies.tiles, copies.runs):
            n, s, t = int(row["nbytes"]), int(row["source_offset"]), int(row["target_offset"])
            wanted[row["target_region"]][t : t + n] = copies.sources[row["source_region"]][
                s : s + n
            ]
        copy_tiles(addresses(copies.sources), addresses(copies.targets), copies.tiles, copies.runs)
        assert_equal(copies.targets, wanted)

    law()


@pytest.mark.parametrize("offsets", [(0, 0), (0, 5), (48, 3), (63, 64)])
@pytest.mark.parametrize(
    "nbytes", [16383, 16384, 16385, 16448, 16384 + 255, 32 << 10, 49_999, 65_536, 70_001, 200_003]
)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=["in order", "shuffled"])
def test_long_segments_are_copied_whole_and_nothing_beside_them(stream, order, nbytes, offsets):
    """The target begins anywhere in a line; segments stand apart, so that none are merged."""
    rng = np.random.default_rng(nbytes)
    step, (source_offset, target_offset) = nbytes + 100, offsets
    source = rng.integers(0, 256, 3 * step + 200, dtype=np.uint8)
    target = rng.integers(0, 256, 3 * step + 200, dtype=np.uint8)
    base = -target.ctypes.data & 63
    tiles, runs = np.zeros(1, TILE_DTYPE), blank_runs(3)
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, nbytes, 1
    tiles["source_offset"], tiles["target_offset"] = source_offset, base + target_offset
    for side in ("source", "target"):
        tiles[f"{side}_block_stride"], tiles[f"{side}_element_stride"] = step, 1
    runs["tokens"] = 1
    runs["source_block"], runs["target_block"] = order, order[::-1]
    wanted = target.copy()
    for from_, to in zip(runs["source_block"], runs["target_block"], strict=True):
        first, other = from_ * step + source_offset, to * step + base + target_offset
        wanted[other : other + nbytes] = source[first : first + nbytes]
    copy_tiles([source.ctypes.data], [target.ctypes.data], tiles, runs)
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("offset", [0, 8, 16, 48])
@pytest.mark.parametrize("nbytes", [48, 64, 80, 128, 160, 256, 4080, 4096])
@pytest.mark.parametrize("gap", [0, 16, 64], ids="{} bytes between".format)
@pytest.mark.parametrize("heads_first", ["source", "target"])
def test_short_segments_are_copied_whole_and_nothing_beside_them(
    stream, heads_first, gap, nbytes, offset
):
    """NHD to HND and back: the pieces of tokens and heads change places, in blocks filled in part.
    The target begins anywhere in a line.
    """
    heads, tokens, step = 3, 4, nbytes + gap
    block = heads * tokens * step
    rng = np.random.default_rng(nbytes)
    source = rng.integers(0, 256, 3 * block + 200, dtype=np.uint8)
    target = rng.integers(0, 256, 3 * block + 200, dtype=np.uint8)
    base = (-target.ctypes.data & 63) + offset
    tiles, runs = np.zeros(1, TILE_DTYPE), blank_runs(3)
    tiles["heads"], tiles["elements"], tiles["itemsize"] = heads, nbytes, 1
    tiles["target_offset"] = base
    strides = {}
    for side in ("source", "target"):
        by_head = (tokens * step, step) if side == heads_first else (step, heads * step)
        strides[side] = by_head
        tiles[f"{side}_head_stride"], tiles[f"{side}_token_stride"] = by_head
        tiles[f"{side}_block_stride"], tiles[f"{side}_element_stride"] = block, 1
    runs["tokens"], runs["source_token"], runs["target_token"] = [4, 1, 2], [0, 3, 1], [0, 2, 2]
    runs["source_block"], runs["target_block"] = [0, 1, 2], [2, 0, 1]
    wanted = target.copy()
    for run in runs:
        for token, head in product(range(run["tokens"]), range(heads)):
            first, other = (
                run[f"{side}_block"] * block
                + (run[f"{side}_token"] + token) * strides[side][1]
                + head * strides[side][0]
                for side in ("source", "target")
            )
            wanted[base + other : base + other + nbytes] = source[first : first + nbytes]
    copy_tiles([source.ctypes.data], [target.ctypes.data], tiles, runs)
    np.testing.assert_array_equal(target, wanted)


def test_expanded_segments_are_the_copy(copy_cases, addresses):
    @PROPERTY
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        wanted = expected(copy_cases, copies)
        rows = expand(copies.tiles, copies.runs)
        for row in rows:
            n, s, t = int(row["nbytes"]), int(row["source_offset"]), int(row["target_offset"])
            copies.targets[row["target_region"]][t : t + n] = copies.sources[row["source_region"]][
                s : s + n
            ]
        assert_equal(copies.targets, wanted)
        assert rows["nbytes"].sum() == num_bytes(copies.tiles, copies.runs)
        counted = copy_tiles(
            addresses(copies.sources), addresses(copies.targets), copies.tiles, copies.runs
        )
        assert counted == len(rows) == count_segments(copies.tiles, copies.runs)

    law()


def test_a_job_in_chunks_is_the_same_copy(copy_cases, addresses):
    @PROPERTY
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        wanted = expected(copy_cases, copies)
        job = CopyJob(
            addresses(copies.sources),
            addresses(copies.targets),
            copies.tiles,
            copies.runs,
            chunk_bytes=data.draw(st.integers(1, 500)),
        )
        turn = data.draw(st.integers(1, 2000))
        while job.step(turn):
            assert not job.is_terminal
        assert job.is_terminal
        assert job.segments >= min(job.num_chunks, 1)
        assert job.bytes_done == job.nbytes == num_bytes(copies.tiles, copies.runs)
        assert_equal(copies.targets, wanted)

    law()


def test_chunks_cover_every_tile_and_run_once(copy_cases):
    @PROPERTY
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        size = data.draw(st.integers(1, 500))
        seen = np.zeros((len(copies.tiles), len(copies.runs)), dtype=int)
        for tile_range, run_range in chunk_slices(cut_chunks(copies.tiles, copies.runs, size)):
            seen[tile_range, run_range] += 1
            tiles, runs = copies.tiles[tile_range], copies.runs[run_range]
            assert num_bytes(tiles, runs) <= size or (len(tiles), len(runs)) == (1, 1)
        assert (seen == 1).all()
        total = cut_chunks(copies.tiles, copies.runs, size)["nbytes"].sum()
        assert total == num_bytes(copies.tiles, copies.runs)

    law()


def large_job(num_tiles=16, num_runs=64, row=4096):
    """Some MiB: tiles of their own slices, shuffled blocks of one token."""
    tiles = np.zeros(num_tiles, dtype=TILE_DTYPE)
    for side in ("source", "target"):
        tiles[f"{side}_offset"] = np.arange(num_tiles) * num_runs * row
        tiles[f"{side}_block_stride"] = row
        tiles[f"{side}_element_stride"] = 1
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, row, 1
    runs = blank_runs(num_runs)
    rng = np.random.default_rng(0)
    runs["source_block"], runs["target_block"] = (rng.permutation(num_runs) for _ in range(2))
    runs["tokens"] = 1
    source = rng.integers(0, 256, num_tiles * num_runs * row, dtype=np.uint8)
    return tiles, runs, source, np.zeros_like(source)


def test_threads_share_a_job_and_every_chunk_is_copied_once():
    tiles, runs, source, target = large_job()
    job = CopyJob([source.ctypes.data], [target.ctypes.data], tiles, runs, chunk_bytes=1 << 16)

    def work():
        while job.step(1 << 18):
            pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert job.is_terminal
    assert job.bytes_done == source.nbytes
    source = source.reshape(16, 64, 4096)
    wanted = np.empty_like(source)
    wanted[:, runs["target_block"]] = source[:, runs["source_block"]]
    np.testing.assert_array_equal(target, wanted.ravel())


def test_a_step_copies_about_as_much_as_it_is_told():
    tiles, runs, source, target = large_job()
    job = CopyJob([source.ctypes.data], [target.ctypes.data], tiles, runs, chunk_bytes=1 << 16)
    assert job.step(1)
    assert job.bytes_done == 1 << 16
    assert job.step(3 << 16)
    assert job.bytes_done == 4 << 16
    assert not job.step(source.nbytes)
    assert job.bytes_done == source.nbytes
    assert job.segments == len(tiles) * len(runs)


def test_a_cancelled_job_copies_nothing_more_and_says_so():
    tiles, runs, source, target = large_job()
    job = CopyJob([source.ctypes.data], [target.ctypes.data], tiles, runs, chunk_bytes=1 << 18)
    assert job.step(1)
    done = job.bytes_done
    assert 0 < done < job.nbytes
    assert not job.is_terminal
    before = target.copy()
    job.cancel()
    job.cancel()
    assert not job.step(job.nbytes)
    assert job.is_terminal
    assert job.bytes_done == done
    np.testing.assert_array_equal(target, before)


def test_a_step_under_way_stops_between_chunks_when_it_is_cancelled():
    tiles, runs, source, target = large_job(num_tiles=64, row=1 << 14)
    for _ in range(50):  # it may be over before the main thread has its turn
        target[:] = 0
        job = CopyJob([source.ctypes.data], [target.ctypes.data], tiles, runs, chunk_bytes=1 << 15)
        thread = threading.Thread(target=job.step, args=(job.nbytes,))
        thread.start()
        while not job.bytes_done:
            pass
        job.cancel()
        while not job.is_terminal:
            pass
        done, landed = job.bytes_done, target.copy()
        thread.join()
        assert job.bytes_done == done
        np.testing.assert_array_equal(target, landed)
        if done < job.nbytes:
            return
    raise AssertionError("no step was cancelled under way")


def test_cancelling_a_finished_job_changes_nothing():
    tiles, runs, source, target = large_job(num_tiles=1)
    job = CopyJob([source.ctypes.data], [target.ctypes.data], tiles, runs)
    assert not job.step(job.nbytes)
    job.cancel()
    assert job.is_terminal
    assert job.bytes_done == job.nbytes


def test_nothing_to_copy_is_legal():
    tiles, runs, source, target = large_job()
    for some_tiles, some_runs in ((tiles[:0], runs), (tiles, runs[:0])):
        job = CopyJob([source.ctypes.data], [target.ctypes.data], some_tiles, some_runs)
        assert job.is_terminal
        assert not job.step(1)
        assert len(expand(some_tiles, some_runs)) == 0
    assert not target.any()


def test_adjacent_blocks_merge_into_one_segment():
    tiles, runs, _, _ = large_job(num_tiles=2)
    runs["source_block"] = runs["target_block"] = np.arange(len(runs))
    assert expand(tiles, runs)["nbytes"].tolist() == [64 * 4096] * 2


def test_chunks_of_no_bytes_are_refused():
    tiles, runs, _, _ = large_job()
    with pytest.raises(ValueError, match="chunk_bytes: 0"):
        cut_chunks(tiles, runs, 0)


def test_rows_of_another_dtype_are_refused():
    _, runs, _, _ = large_job()
    with pytest.raises(ValueError, match="expected rows of"):
        copy_tiles([0], [0], runs, runs)


def test_tables_that_nobody_may_write_are_accepted():
    tiles, runs, source, target = large_job(num_tiles=1)
    tiles.flags.writeable = runs.flags.writeable = False
    copy_tiles([source.ctypes.data], [target.ctypes.data], tiles, runs)
    assert target.any()


def test_warm_compiles_every_kernel():
    warm()
    compiled: list[Any] = [
        kernels.copy_now,
        kernels.list_segments,
        chunks.list_chunks,
        chunks.copy_chunks,
    ]
    for kernel in compiled:
        assert len(kernel.signatures) == 1


def test_a_defect_of_the_copier_is_caught(copy_cases, addresses, monkeypatch):
    def shifted(sources, targets, tiles, *more):
        tiles = tiles.copy()
        tiles["source_offset"] += 1
        return right(sources, targets, tiles, *more)

    right = kernels.copy_now
    monkeypatch.setattr(kernels, "copy_now", shifted)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_copies(
            copy_cases, addresses, phases=[Phase.generate], database=None, derandomize=True
        )
