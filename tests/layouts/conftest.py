"""Random tiles and runs inside random regions, and a copy in plain Python loops."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from kvferry.layouts import TILE_DTYPE, blank_runs

# Triton reads it when kernels are defined, so it is set before anything imports them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


OWN_PROCESS = "KVFERRY_TEST_OWN_PROCESS"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test that is marked ``own_process`` in one, where a GPU is: a kernel that reaches for
    a wrong address ends the CUDA context, and with it every test that follows."""
    marked = pyfuncitem.get_closest_marker("own_process") is not None
    if not (marked and torch.cuda.is_available()) or OWN_PROCESS in os.environ:
        return None
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, OWN_PROCESS: "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "1 passed" in result.stdout, result.stdout + result.stderr
    return True


@pytest.fixture(params=["numba", "torch", "triton"])
def method(request):
    """Each implementation of a repack; Triton's interpreter takes the place of a GPU."""
    if request.param == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return request.param


@pytest.fixture
def device(method):
    """Where the caches of that implementation lie."""
    return "cuda" if method != "numba" and torch.cuda.is_available() else "cpu"


@dataclass
class Copies:
    tiles: np.ndarray
    runs: np.ndarray
    sources: list
    targets: list


class CopyCases:
    """Draws copies whose target bytes do not overlap; knows the slow truth."""

    def draw(self, data, max_extent=5) -> Copies:
        draw = data.draw
        tokens, heads, elements = (draw(st.integers(1, max_extent)) for _ in range(3))
        itemsize = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
        blocks = draw(st.integers(1, 4))
        num_tiles = draw(st.integers(1, 3))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        sides = {
            side: self._side(draw, num_tiles, blocks, tokens, heads, elements, itemsize)
            for side in ("source", "target")
        }
        tiles = np.zeros(num_tiles, dtype=TILE_DTYPE)
        for side, (rows, _) in sides.items():
            for tile, row in zip(tiles, rows, strict=True):
                for name, value in row.items():
                    tile[f"{side}_{name}"] = value
        tiles["heads"], tiles["elements"], tiles["itemsize"] = heads, elements, itemsize
        runs = self._runs(draw, rng, blocks, tokens)
        make = lambda n: rng.integers(0, 256, n, dtype=np.uint8)  # noqa: E731
        return Copies(
            tiles,
            runs,
            [make(n) for n in sides["source"][1]],
            [make(n) for n in sides["target"][1]],
        )

    def _side(self, draw, num_tiles, blocks, tokens, heads, elements, itemsize):
        """Disjoint boxes: dims dense in any order (with optional gaps), one region per tile."""
        extents = {"block": blocks, "token": tokens, "head": heads, "element": elements}
        order = draw(st.permutations(list(extents)))
        gap = draw(st.integers(0, 2))
        backwards = draw(st.booleans())
        stride, strides, first = itemsize, {}, 0
        for dim in order:
            strides[f"{dim}_stride"] = stride
            stride = stride * extents[dim] + gap * itemsize
        if backwards:
            strides["token_stride"] *= -1
            first = -strides["token_stride"] * (tokens - 1)
        lead = draw(st.sampled_from([0, 1, 16, 64]))
        rows = [{"region": t, "offset": lead + first, **strides} for t in range(num_tiles)]
        return rows, [lead + stride + 64] * num_tiles

    def _runs(self, draw, rng, blocks, tokens):
        """Every target block at most once; parts of blocks, or whole ones."""
        count = draw(st.integers(0, blocks))
        runs = blank_runs(count)
        runs["target_block"] = (
            rng.permutation(blocks)[:count] if draw(st.booleans()) else np.arange(count)
        )
        runs["source_block"] = (
            rng.integers(0, blocks, count) if draw(st.booleans()) else np.arange(count)
        )
        runs["tokens"] = tokens if draw(st.booleans()) else rng.integers(1, tokens + 1, count)
        stepped = draw(st.booleans())
        for side in ("source", "target"):
            most = (tokens - 1) // np.maximum(runs["tokens"] - 1, 1)
            runs[f"{side}_step"] = rng.integers(1, np.maximum(most, 1) + 1) if stepped else 1
            reach = (runs["tokens"] - 1) * runs[f"{side}_step"]
            runs[f"{side}_token"] = rng.integers(0, tokens - reach)
        return runs

    def copy(self, copies: Copies, targets) -> None:
        """Byte by byte."""
        for tile in copies.tiles:
            for run in copies.runs:
                for i in range(run["tokens"]):
                    for h in range(tile["heads"]):
                        for e in range(tile["elements"]):
                            at = {
                                side: int(
                                    tile[f"{side}_offset"]
                                    + run[f"{side}_block"] * tile[f"{side}_block_stride"]
                                    + (run[f"{side}_token"] + i * run[f"{side}_step"])
                                    * tile[f"{side}_token_stride"]
                                    + h * tile[f"{side}_head_stride"]
                                    + e * tile[f"{side}_element_stride"]
                                )
                                for side in ("source", "target")
                            }
                            n = int(tile["itemsize"])
                            assert min(at.values()) >= 0
                            targets[tile["target_region"]][at["target"] : at["target"] + n] = (
                                copies.sources[tile["source_region"]][
                                    at["source"] : at["source"] + n
                                ]
                            )


@pytest.fixture(scope="session")
def copy_cases() -> CopyCases:
    return CopyCases()


@pytest.fixture(scope="session")
def addresses():
    return lambda regions: [region.ctypes.data for region in regions]
