"""Reading tiles × runs out of a process (this one) equals the oracle, whichever way is taken."""

import ctypes
import errno
import mmap
import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.layouts import RUN_DTYPE, TILE_DTYPE, blank_runs, num_bytes
from kvferry.layouts.tiles import as_rows
from kvferry.testing.transport_cases import copy_slowly, random_case
from kvferry.testing.transport_peer import pattern
from kvferry.transports.iovec import MAX_ROWS
from kvferry.transports.vm import ProcessCopy
from kvferry.transports.vm_bounce import SPAN_BYTES, new_bounce
from kvferry.transports.vm_kernels import read_table

PROPERTY = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def regions(sizes, seed):
    return [pattern(size, seed + number) for number, size in enumerate(sizes)]


def addresses(arrays):
    return np.array([array.ctypes.data for array in arrays], dtype=np.int64)


def read(sources, targets, tiles, runs, bounce=None, *, stream=False):
    """(errno, pieces, bytes read) of one call of the kernel on this process."""
    bounce = (bounce or new_bounce())._replace(
        sources=addresses(sources), targets=addresses(targets)
    )
    tables = as_rows(tiles, TILE_DTYPE), as_rows(runs, RUN_DTYPE)
    return read_table(os.getpid(), *tables, bounce, stream)


def check(case, bounce=None, *, stream=False):
    """Reads a case and compares every byte; returns what the kernel said."""
    sources, targets = regions(case.source_region_bytes, 1), regions(case.target_region_bytes, 77)
    wanted = [target.copy() for target in targets]
    copy_slowly(case.tiles, case.runs, sources, wanted)
    said = read(sources, targets, case.tiles, case.runs, bounce, stream=stream)
    for found, expected in zip(targets, wanted, strict=True):
        np.testing.assert_array_equal(found, expected)
    return said


def turned(case, rng):
    """The same boxes, walked backwards along some dims of the source."""
    tiles = case.tiles.copy()
    for dim, extent in (("head", tiles["heads"]), ("element", tiles["elements"])):
        if rng.integers(2):
            stride = tiles[f"source_{dim}_stride"].copy()
            tiles["source_offset"] += stride * (extent - 1)
            tiles[f"source_{dim}_stride"] = -stride
    case.tiles[:] = tiles
    return case


@PROPERTY
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([SPAN_BYTES + 24, SPAN_BYTES + 300, SPAN_BYTES + 4096, 1 << 19]),
    st.booleans(),
)
def test_reads_equal_the_oracle_whatever_the_strides_and_the_size_of_the_buffer(seed, room, stream):
    """A small buffer has boxes cut into parts, and single tokens that do not fit at all."""
    case = turned(random_case(seed), np.random.default_rng(seed))
    failed, pieces, nbytes = check(case, new_bounce(room), stream=stream)
    assert failed == 0
    assert pieces > 0
    assert nbytes > 0


def grid(num_blocks, tokens, heads, *, piece, source, target, seed=None):
    """One tile of ``tokens × heads`` pieces per block; ``source`` and ``target`` give the strides
    of (block, token, head) in pieces.
    """
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    tiles["heads"], tiles["elements"], tiles["itemsize"] = heads, 1, piece
    for side, strides in (("source", source), ("target", target)):
        for dim, stride in zip(("block", "token", "head"), strides, strict=True):
            tiles[f"{side}_{dim}_stride"] = stride * piece
        tiles[f"{side}_element_stride"] = piece
    runs = blank_runs(num_blocks)
    order = np.arange(num_blocks)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(num_blocks)
    runs["source_block"], runs["target_block"] = order, np.arange(num_blocks)
    runs["tokens"] = tokens
    return tiles, runs


def check_grid(num_blocks, tokens, heads, **strides):
    tiles, runs = grid(num_blocks, tokens, heads, **strides)
    piece = strides["piece"]
    size = {side: num_blocks * strides[side][0] * piece for side in ("source", "target")}
    sources, targets = [pattern(size["source"], 1)], [pattern(size["target"], 2)]
    wanted = [targets[0].copy()]
    copy_slowly(tiles, runs, sources, wanted)
    said = read(sources, targets, tiles, runs)
    np.testing.assert_array_equal(targets[0], wanted[0])
    assert said[0] == 0
    return said


def test_long_equal_pieces_go_straight_to_their_place():
    """Nothing is read but what is asked for, in as many pieces as there are blocks."""
    _, pieces, nbytes = check_grid(
        40, 16, 2, piece=256, source=(40, 2, 1), target=(32, 2, 1), seed=3
    )
    assert (pieces, nbytes) == (40, 40 * 32 * 256)


def test_more_pieces_than_one_call_takes_are_all_read():
    _, pieces, nbytes = check_grid(
        MAX_ROWS + 7, 1, 1, piece=4096, source=(2, 1, 1), target=(1, 1, 1), seed=4
    )
    assert (pieces, nbytes) == (MAX_ROWS + 7, (MAX_ROWS + 7) * 4096)


def turned_round(tiles, runs):
    """The same with source and target exchanged: adjacent at the source, shuffled at the target."""
    runs["source_block"], runs["target_block"] = (
        runs["target_block"].copy(),
        runs["source_block"].copy(),
    )
    return tiles, runs


def test_one_span_of_the_source_goes_to_more_pieces_than_one_call_takes():
    count, piece = 2 * MAX_ROWS + 7, 8192
    tiles, runs = turned_round(
        *grid(count, 1, 1, piece=piece, source=(1, 1, 1), target=(1, 1, 1), seed=6)
    )
    source, target = pattern(count * piece, 1), np.zeros(count * piece, dtype=np.uint8)
    failed, pieces, nbytes = read([source], [target], tiles, runs)
    assert (failed, nbytes) == (0, count * piece)
    adjacent = np.count_nonzero(np.diff(runs["target_block"]) == 1)
    assert count - adjacent <= pieces <= count
    np.testing.assert_array_equal(
        target.reshape(count, piece)[runs["target_block"]], source.reshape(count, piece)
    )


def test_a_change_of_layout_reads_each_block_in_one_span():
    _, pieces, nbytes = check_grid(9, 16, 4, piece=64, source=(64, 4, 1), target=(64, 1, 16))
    assert nbytes == 9 * 64 * 64
    assert pieces == 9 * 64


def test_small_gaps_are_read_along_and_large_ones_are_not():
    """Half of the heads of each token; then one token of every 4,096."""
    _, _, nbytes = check_grid(1, 64, 2, piece=128, source=(256, 4, 1), target=(128, 2, 1))
    assert nbytes == (63 * 4 + 2) * 128
    _, _, nbytes = check_grid(1, 64, 1, piece=128, source=(64 * 40, 40, 1), target=(64 * 2, 2, 1))
    assert nbytes == 64 * 128


def test_a_box_of_more_spans_than_one_call_takes_is_read_whole():
    """Short pieces far apart, in boxes of 1,200 spans that a box of one span follows."""
    wide = SPAN_BYTES // 16 + 20
    _, _, nbytes = check_grid(
        2, 1200, 1, piece=16, source=(1200 * wide, wide, 1), target=(1200, 1, 1)
    )
    assert nbytes == 2 * 1200 * 16


def test_spans_of_two_regions_are_never_joined():
    """The bytes between two regions may belong to nobody."""
    page = mmap.PAGESIZE
    hole = mmap.mmap(-1, 3 * page)
    whole = np.frombuffer(hole, dtype=np.uint8)
    sources = [whole[:page], whole[page + 64 : 2 * page]]
    sources[0][:], sources[1][:] = 5, 6
    tiles = np.zeros(2, dtype=TILE_DTYPE)
    tiles["source_region"] = [0, 1]
    tiles["source_offset"] = [page - 512, 0]
    tiles["target_offset"] = [0, 512]
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 8, 8, 8
    for side, strides in (("source", (64, 8)), ("target", (8, 64))):
        tiles[f"{side}_head_stride"], tiles[f"{side}_element_stride"] = strides
    runs = blank_runs(1)
    runs["tokens"] = 1
    target = np.zeros(1024, dtype=np.uint8)
    failed, _, nbytes = read(sources, [target], tiles, runs)
    assert (failed, nbytes) == (0, 1024)
    assert (target[:512] == 5).all()
    assert (target[512:] == 6).all()


def test_memory_that_is_not_there_is_an_error_and_what_lies_before_it_is_read():
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    source = np.frombuffer(memory, dtype=np.uint8)
    source[:] = 7
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(source.ctypes.data + page), ctypes.c_size_t(page), 0)
    tiles, runs = grid(2, 1, 1, piece=page, source=(1, 1, 1), target=(1, 1, 1))
    target = np.zeros(2 * page, dtype=np.uint8)
    failed, _, nbytes = read([source], [target], tiles, runs)
    assert failed == errno.EFAULT
    assert nbytes == page
    assert (target[:page] == 7).all()
    assert not target[page:].any()


def test_of_one_span_that_ends_too_early_the_pieces_before_are_filled():
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 8 * page)
    source = np.frombuffer(memory, dtype=np.uint8)
    source[:] = 7
    gone = ctypes.c_void_p(source.ctypes.data + 5 * page)
    ctypes.CDLL(None).mprotect(gone, ctypes.c_size_t(page), 0)
    tiles, runs = grid(4, 1, 1, piece=2 * page, source=(1, 1, 1), target=(1, 1, 1))
    runs["target_block"] = [3, 1, 2, 0]
    target = np.zeros(8 * page, dtype=np.uint8)
    failed, _, nbytes = read([source], [target], tiles, runs)
    assert (failed, nbytes) == (errno.EFAULT, 5 * page)
    filled = target.reshape(4, 2, page).all(axis=2)
    assert filled.tolist() == [[False] * 2, [True] * 2, [True, False], [True] * 2]


class _Here:
    """This process, as a copy wants it."""

    pid = os.getpid()

    def reading_error(self, number):
        return OSError(number, "x")


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_cover_everything_once_whoever_takes_them(threads):
    tiles, runs = grid(300, 16, 4, piece=64, source=(64, 4, 1), target=(64, 1, 16), seed=5)
    source, target = pattern(300 * 4096, 1), np.zeros(300 * 4096, dtype=np.uint8)
    here: Any = _Here()
    copy = ProcessCopy(
        here,
        addresses([source]),
        addresses([target]),
        tiles,
        runs,
        chunk_bytes=1 << 20,
        threads=threads,
    )
    assert copy.num_chunks == (2 if threads == 1 else 3)

    def work():
        while copy.step(1):
            pass

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    wanted = np.zeros_like(target)
    copy_slowly(tiles, runs, [source], [wanted])
    np.testing.assert_array_equal(target, wanted)
    assert copy.bytes_done == num_bytes(tiles, runs)
    assert copy.segments == 300 * 64
    assert not copy.step(1)
