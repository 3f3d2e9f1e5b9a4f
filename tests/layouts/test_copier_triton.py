"""The copier on a device: equal to the copier on the host, in one launch, whatever the strides."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.layouts import TILE_DTYPE, blank_runs, num_bytes
from kvferry.layouts.copier import copy_tiles
from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROPERTY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def copier():
    from kvferry.layouts import copier_triton

    return copier_triton


class OnDevice:
    """Regions of bytes where the kernel can reach them; NumPy arrays under the interpreter."""

    def __init__(self, regions):
        # Not aligned by chance alone: each begins where the host's begins, modulo 64.
        self._leads = [region.ctypes.data % 64 for region in regions]
        self.tensors = []
        for region, lead in zip(regions, self._leads, strict=True):
            room = torch.zeros(region.nbytes + 128, dtype=torch.uint8, device=DEVICE)
            first = (lead - room.data_ptr()) % 64
            self.tensors.append(room[first : first + region.nbytes])
            self.tensors[-1].copy_(torch.from_numpy(region))

    @property
    def addresses(self):
        return [tensor.data_ptr() for tensor in self.tensors]

    def assert_equal(self, wanted):
        for tensor, want in zip(self.tensors, wanted, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), want)


def check(copier, tiles, runs, sources, targets):
    """Copies on the device and on the host, and compares every byte."""
    there = OnDevice(sources), OnDevice(targets)
    launches = copier.copy_tiles_device(
        there[0].addresses, there[1].addresses, tiles, runs, device=DEVICE
    )
    assert launches == (1 if num_bytes(tiles, runs) else 0)
    copy_tiles(
        [source.ctypes.data for source in sources],
        [target.ctypes.data for target in targets],
        tiles,
        runs,
    )
    there[1].assert_equal(targets)


def test_it_copies_the_bytes_that_the_host_copies_and_no_others(copier, copy_cases):
    @PROPERTY
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        check(copier, copies.tiles, copies.runs, copies.sources, copies.targets)

    law()


@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"),
    [
        (1, 576, "bfloat16"),
        (1, 80, "float8_e4m3fn"),
        (3, 64, "float64"),
        (3, 128, "float16"),
        (9, 80, "float32"),
        (9, 64, "float8_e4m3fn"),
    ],
)
def test_layouts_heads_and_block_sizes_of_models_are_copied_right(copier, heads, head_size, dtype):
    rng = np.random.default_rng(heads * head_size)
    for (source_layout, source_block), (target_layout, target_block) in (
        (("HND", 3), ("NHD", 2)),
        (("NHD", 4), ("NHD", 4)),
        (("BNHKD", 2), ("HND", 5)),
    ):
        source, target = (
            EngineGeometry(
                num_layers=1,
                num_kv_heads=heads,
                head_size=head_size,
                dtype=dtype,
                block_size=block_size,
                layout=layout,
                parallel=ParallelShape(),
            )
            for layout, block_size in (
                (source_layout, source_block),
                (target_layout, target_block),
            )
        )
        tables = [list(range(1, 1 + -(-4 // side.block_size))) for side in (source, target)]
        memories = [
            side.memory(0, 1 + len(table))
            for side, table in zip((source, target), tables, strict=True)
        ]
        plan = plan_transfer(source=source, target=target)
        runs = plan.bind(tables[0][::-1], tables[1], num_tokens=4).runs_of(0)
        tiles = plan.lower({0: memories[0]}, memories[1])[0]
        regions = [
            [rng.integers(0, 256, nbytes, dtype=np.uint8) for nbytes in memory.region_bytes]
            for memory in memories
        ]
        check(copier, tiles, runs, *regions)


def one_box(tokens, heads, elements, itemsize, source_strides, target_strides, lead=0):
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    for side, strides in (("source", source_strides), ("target", target_strides)):
        for dim, stride in zip(("token", "head", "element"), strides, strict=True):
            tiles[f"{side}_{dim}_stride"] = stride
        tiles[f"{side}_offset"] = lead
    tiles["heads"], tiles["elements"], tiles["itemsize"] = heads, elements, itemsize
    runs = blank_runs(1)
    runs["tokens"] = tokens
    return tiles, runs


def test_a_box_larger_than_one_step_of_a_program_is_copied_whole(copier):
    row = 40 * 16
    tiles, runs = one_box(9, 5, 40, 16, (5 * row, row, 16), (row, 9 * row, 16))
    assert len(runs) * 9 * 5 * 40 > 3 * copier.UNITS
    source = np.random.default_rng(0).integers(0, 256, 9 * 5 * row, dtype=np.uint8)
    check(copier, tiles, runs, [source], [np.zeros_like(source)])


@pytest.mark.parametrize("programs", [1, 1 << 14])
def test_one_program_or_many_share_a_box(copier, programs, monkeypatch):
    monkeypatch.setattr(copier, "_PROGRAMS", programs)
    tiles, runs = one_box(3, 1, 4096, 1, (4096, 0, 1), (4096, 0, 1))
    source = np.random.default_rng(1).integers(0, 256, 3 * 4096, dtype=np.uint8)
    check(copier, tiles, runs, [source], [np.zeros_like(source)])


def test_interleaved_tokens_are_copied_from_step_to_step(copier):
    tiles, runs = one_box(4, 2, 3, 4, (24, 12, 4), (12, 240, 4))
    runs = np.concatenate([runs, runs])
    runs["source_step"], runs["target_step"] = [2, 3], [3, 1]
    runs["source_token"], runs["target_token"] = [1, 0], [0, 14]
    source = np.random.default_rng(5).integers(0, 256, 600, dtype=np.uint8)
    check(copier, tiles, runs, [source], [np.zeros_like(source)])


@pytest.mark.parametrize(
    ("box", "unit", "segment", "extents"),
    [
        # NHD to NHD: heads and elements are one segment.
        ((4, 2, 64, 2, (256, 128, 2), (256, 128, 2)), 16, 256, [0, 1, 1]),
        # HND to NHD: a head's elements are; heads lie inside tokens on the target.
        ((4, 2, 64, 2, (128, 512, 2), (256, 128, 2)), 16, 128, [2, 0, 1]),
        # Heads inside elements: both merge, in the other order.
        ((4, 2, 64, 2, (256, 2, 4), (256, 2, 4)), 16, 256, [0, 1, 1]),
        # K as [elements, tokens]: single elements.
        ((8, 1, 64, 4, (4, 0, 32), (256, 0, 4)), 4, 4, [64, 0, 1]),
        ((4, 3, 1, 4, (12, 4, 4), (12, 4, 4)), 4, 12, [0, 1, 1]),
        ((4, 1, 3, 3, (9, 9, 3), (9, 9, 3)), 1, 9, [0, 1, 1]),
    ],
)
def test_a_unit_is_as_wide_as_the_tile_is_aligned(copier, box, unit, segment, extents):
    tiles, _ = one_box(*box)
    (row,) = copier.device_boxes([1 << 20], [1 << 21], tiles)
    assert row["unit_bytes"] == unit
    assert row["segment_units"] * unit == segment
    assert row["dims"]["extent"].tolist() == extents


@pytest.mark.parametrize("lead", [1, 2, 4, 8, 16])
def test_addresses_that_are_not_aligned_are_moved_in_shorter_units(copier, lead):
    tiles, _ = one_box(4, 2, 64, 2, (256, 128, 2), (256, 128, 2), lead=lead)
    assert copier.device_boxes([0], [0], tiles)["unit_bytes"][0] == lead
    assert copier.device_boxes([lead], [0], tiles)["unit_bytes"][0] == lead


def test_tiles_of_several_widths_are_one_launch(copier):
    wide, runs = one_box(4, 2, 64, 2, (256, 128, 2), (128, 512, 2))
    narrow, _ = one_box(4, 2, 1, 4, (8, 4, 4), (4, 16, 4))
    narrow["source_offset"] = narrow["target_offset"] = 1024
    tiles = np.concatenate([wide, narrow])
    source = np.random.default_rng(2).integers(0, 256, 1100, dtype=np.uint8)
    assert set(copier.device_boxes([0], [0], tiles)["unit_bytes"]) == {16, 4}
    check(copier, tiles, runs, [source], [np.zeros_like(source)])


def test_boxes_too_large_to_count_are_refused(copier):
    tiles, runs = one_box(1 << 31, 1, 1, 1, (1, 1, 1), (1, 1, 1), lead=1)
    with pytest.raises(ValueError, match="2147483648 units in one tile"):
        copier.copy_tiles_device([0], [0], tiles, runs, device=DEVICE)


def test_host_memory_needs_the_interpreter(copier, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tiles, runs = one_box(1, 1, 1, 1, (1, 1, 1), (1, 1, 1))
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        copier.copy_tiles_device([0], [0], tiles, runs, device="cpu")


def test_a_defect_of_the_table_is_caught(copier, monkeypatch):
    right = copier.device_boxes

    def wrong(*arguments):
        boxes = right(*arguments)
        boxes["dims"]["target_stride"][:, 0] += 1
        return boxes

    monkeypatch.setattr(copier, "device_boxes", wrong)
    tiles, runs = one_box(4, 2, 64, 2, (256, 128, 2), (128, 512, 2))
    source = np.random.default_rng(3).integers(0, 256, 1200, dtype=np.uint8)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check(copier, tiles, runs, [source], [np.zeros_like(source)])


#: Run without the interpreter: compiles as for a GPU, which needs none, and prints what matters.
COMPILE = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvferry.layouts.copier_triton import BOX_WORDS, RUN_WORDS, UNITS, copy_kernel

constants = dict(BOX_WORDS=BOX_WORDS, RUN_WORDS=RUN_WORDS, UNITS=UNITS)
signature = {"tables": "*i64", "num_tiles": "i32", "num_runs": "i32"}
signature |= dict.fromkeys(constants, "constexpr")
source = ASTSource(copy_kernel, signature=signature, constexprs=constants)
made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32),
                      options={"num_warps": 4, "enable_fp_fusion": False})
print(" ".join(re.findall(r"(?:ld|st)[.]global[.]v2[.]b64", made.asm["ptx"])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_compiled_for_a_gpu_a_thread_moves_16_bytes_at_a_time(architecture, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, architecture],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    loads_then_stores = r"(ld\.global\.v2\.b64 ){4}(st\.global\.v2\.b64\s){4}"
    assert re.fullmatch(loads_then_stores, result.stdout)
