"""The copier runs at memory speed; the benchmarks say by how much, this says that it does."""

import ctypes
import time

import numpy as np
import pytest

from kvferry.layouts import TILE_DTYPE, Box, Layout, blank_runs
from kvferry.layouts.copier import copy_tiles, warm

pytestmark = pytest.mark.slow

LAYERS, BLOCKS = 32, 128
BOX = Box(1, BLOCKS, 16, 8, (("k", 128), ("v", 128)))
ITEMSIZE = 2
PER_LAYER = 2 * BLOCKS * 16 * 8 * 128 * ITEMSIZE


def tiles_between(source: str, target: str):
    rows = []
    for layer in range(LAYERS):
        sides = [Layout.named(name) for name in (source, target)]
        cells = [side.strides(BOX, dense(side.shape(BOX))) for side in sides]
        for part in ("k", "v"):
            row = ()
            for found in cells:
                strides = found[part]
                row += (0, layer * PER_LAYER + strides.offset, *strides[2:])
            rows.append((*row, 8, 128, ITEMSIZE))
    return np.array(rows, dtype=TILE_DTYPE)


def dense(shape):
    return [ITEMSIZE * int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]


@pytest.fixture(scope="module")
def memories():
    warm()
    return [np.ones(LAYERS * PER_LAYER, dtype=np.uint8) for _ in range(2)]


@pytest.mark.parametrize("order", ["ordered", "shuffled"])
@pytest.mark.parametrize(
    ("source", "target"), [("NHD", "NHD"), ("HND", "HND"), ("NHD", "HND"), ("HND", "NHD")]
)
def test_a_copy_takes_little_longer_than_one_memcpy(memories, source, target, order):
    tiles, runs = tiles_between(source, target), blank_runs(BLOCKS)
    rng = np.random.default_rng(0)
    for side in ("source", "target"):
        ids = np.arange(BLOCKS)
        runs[f"{side}_block"] = ids if order == "ordered" else rng.permutation(ids)
    runs["tokens"] = 16
    addresses = [memory.ctypes.data for memory in memories]
    ours, memcpy = [], []
    for _ in range(5):
        start = time.perf_counter()
        ctypes.memmove(addresses[1], addresses[0], LAYERS * PER_LAYER)
        middle = time.perf_counter()
        copy_tiles(addresses[:1], addresses[1:], tiles, runs)
        memcpy.append(middle - start)
        ours.append(time.perf_counter() - middle)
    assert min(memcpy) / min(ours) > 0.6
