"""The copier on a device: equal to the copier on the host, in one launch, whatever the strides."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.layouts import TILE_DTYPE, blank_runs, num_bytes
from kvferry.layouts.copier import copy_tiles
from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer
from tests import kernel_reports

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
    """Copies on the device and on the host, and compares every byte.

    Both as tiles of which nothing is known, and as those whose boxes may be short.
    """
    there = OnDevice(sources)
    copied = [OnDevice(targets) for _ in range(3)]
    launches = copier.copy_tiles_device(
        there.addresses, copied[0].addresses, tiles, runs, device=DEVICE
    )
    assert launches == (1 if num_bytes(tiles, runs) else 0)
    longest = int(runs["tokens"].max(initial=0))
    table = torch.from_numpy(runs.view(np.int64).copy()).to(DEVICE)
    for each, most_tokens in zip(copied[1:], (longest, longest + 3), strict=True):
        if launches:
            tiles_on_device(copier, tiles, most_tokens, there.addresses, each.addresses).copy(
                table, len(runs), longest
            )
    copy_tiles(
        [source.ctypes.data for source in sources],
        [target.ctypes.data for target in targets],
        tiles,
        runs,
    )
    for each in copied:
        each.assert_equal(targets)


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
    row = 80 * 16
    tiles, runs = one_box(9, 5, 80, 16, (5 * row, row, 16), (row, 9 * row, 16))
    assert len(runs) * 9 * 5 * 80 > 3 * copier.UNITS
    source = np.random.default_rng(0).integers(0, 256, 9 * 5 * row, dtype=np.uint8)
    check(copier, tiles, runs, [source], [np.zeros_like(source)])


@pytest.mark.parametrize(("programs", "steps"), [(1, 100), (1, 1), (1 << 14, 1)])
def test_one_program_or_many_share_a_box(copier, programs, steps, monkeypatch):
    monkeypatch.setattr(copier, "_PROGRAMS", programs)
    monkeypatch.setattr(copier, "STEPS", steps)
    tiles, runs = one_box(9, 1, 4096, 1, (4096, 0, 1), (4096, 0, 1))
    source = np.random.default_rng(1).integers(0, 256, 9 * 4096, dtype=np.uint8)
    check(copier, tiles, runs, [source], [np.zeros_like(source)])


def tiles_on_device(copier, tiles, most_tokens, sources=(1 << 20,), targets=(1 << 21,)):
    return copier.DeviceTiles.of(sources, targets, tiles, torch.device(DEVICE), most_tokens)


@pytest.mark.parametrize(
    ("heads", "most_tokens", "short"),
    [(1, 16, True), (1, 0, False), (1, 17, False), (2, 8, True), (2, 16, False)],
)
def test_a_box_is_short_if_two_fill_a_program_and_its_longest_run_is_known(
    copier, heads, most_tokens, short
):
    row = 128 * 2
    strides = (heads * row, row, 2)
    tiles, _ = one_box(16, heads, 128, 2, strides, strides)
    assert bool(tiles_on_device(copier, tiles, most_tokens).short_shape) == short
    other, _ = one_box(16, heads, 64, 2, strides, strides)
    both = tiles_on_device(copier, np.concatenate([tiles, other]), most_tokens)
    assert both.short_shape == ()  # of two shapes


@pytest.mark.parametrize("heads", [1, 3])
def test_short_boxes_of_many_tiles_and_runs_are_copied_right_and_nothing_behind_a_run(
    copier, heads, monkeypatch
):
    used: list[Any] = []
    kernel = copier.copy_short_boxes
    monkeypatch.setattr(copier, "copy_short_boxes", Counted(kernel, used))
    tokens, row = 5, 48
    tiles, _ = one_box(tokens, heads, 24, 2, (heads * row, row, 2), (row, tokens * row, 2))
    tiles = np.repeat(tiles, 7)
    block = tokens * heads * row
    for side in ("source", "target"):
        tiles[f"{side}_block_stride"] = block
        tiles[f"{side}_offset"] = np.arange(7) * 12 * block
    runs = blank_runs(12)
    rng = np.random.default_rng(6)
    runs["source_block"], runs["target_block"] = rng.permutation(12), rng.permutation(12)
    runs["tokens"] = [5, 1, 5, 5, 4, 3, 5, 2, 1, 5, 5, 5]
    runs["source_token"] = 5 - runs["tokens"]
    source = rng.integers(0, 256, 7 * 12 * block, dtype=np.uint8)
    check(copier, tiles, runs, [source], [np.zeros_like(source)])
    assert len(used) == 2


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel, launches):
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid):
        self._launches.append(grid)
        return self._kernel[grid]


def test_interleaved_tokens_are_copied_from_step_to_step(copier):
    tiles, runs = one_box(4, 2, 3, 4, (24, 12, 4), (12, 240, 4))
    runs = np.concatenate([runs, runs])
    runs["source_step"], runs["target_step"] = [2, 3], [3, 1]
    runs["source_token"], runs["target_token"] = [1, 0], [0, 14]
    source = np.random.default_rng(5).integers(0, 256, 600, dtype=np.uint8)
    check(copier, tiles, runs, [source], [np.zeros_like(source)])


def boxes_of(copier, source, target, tiles):
    """The rows that the kernels read, and what is said of the largest is checked."""
    boxes = np.empty(len(tiles), dtype=copier.BOX_DTYPE)
    units = copier.write_boxes([source], [target], tiles, boxes.view(np.int64))
    extents = np.maximum(boxes["dims"]["extent"], 1)
    assert units == (boxes["segment_units"] * extents.prod(axis=1)).max()
    return boxes


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
    (row,) = boxes_of(copier, 1 << 20, 1 << 21, tiles)
    assert row["unit_bytes"] == unit
    assert row["segment_units"] * unit == segment
    assert row["dims"]["extent"].tolist() == extents


@pytest.mark.parametrize("lead", [1, 2, 4, 8, 16])
def test_addresses_that_are_not_aligned_are_moved_in_shorter_units(copier, lead):
    tiles, _ = one_box(4, 2, 64, 2, (256, 128, 2), (256, 128, 2), lead=lead)
    assert boxes_of(copier, 0, 0, tiles)["unit_bytes"][0] == lead
    assert boxes_of(copier, lead, 0, tiles)["unit_bytes"][0] == lead


def test_tiles_of_several_widths_are_one_launch(copier):
    wide, runs = one_box(4, 2, 64, 2, (256, 128, 2), (128, 512, 2))
    narrow, _ = one_box(4, 2, 1, 4, (8, 4, 4), (4, 16, 4))
    narrow["source_offset"] = narrow["target_offset"] = 1024
    tiles = np.concatenate([wide, narrow])
    source = np.random.default_rng(2).integers(0, 256, 1100, dtype=np.uint8)
    assert set(boxes_of(copier, 0, 0, tiles)["unit_bytes"]) == {16, 4}
    check(copier, tiles, runs, [source], [np.zeros_like(source)])


def test_boxes_too_large_to_count_are_refused(copier):
    tiles, runs = one_box(1 << 30, 1, 1, 1, (1, 1, 1), (1, 1, 1), lead=1)
    with pytest.raises(ValueError, match="1073741824 units in one tile"):
        copier.copy_tiles_device([0], [0], tiles, runs, device=DEVICE)


@pytest.mark.parametrize("units", [1, 1 << 20, 300 << 20, (1 << 30) - 1])
def test_a_box_of_any_size_is_a_launch_that_cuda_takes_and_numbers_of_32_bits(copier, units):
    grids: list[Any] = []
    compiled = {False: Counted({}, grids)}
    tiles = copier.DeviceTiles(torch.zeros(1), 1, units, compiled=compiled)
    with contextlib.suppress(KeyError):  # nothing is launched
        tiles.copy(torch.zeros(1), 1, 1)
    ((works, splits, one),) = grids
    assert (works, one) == (1, 1)
    assert 1 <= splits <= 65535
    # Each program counts from its number on, in steps of all programs, to the first number that is
    # not below the units.
    assert units - 1 + splits * copier.UNITS < 1 << 31


def test_host_memory_needs_the_interpreter(copier, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tiles, runs = one_box(1, 1, 1, 1, (1, 1, 1), (1, 1, 1))
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        copier.copy_tiles_device([0], [0], tiles, runs, device="cpu")


@pytest.mark.own_process
def test_a_defect_of_the_table_is_caught(copier, monkeypatch):
    right = copier.write_boxes

    def wrong(*arguments):
        units = right(*arguments)
        arguments[-1].view(copier.BOX_DTYPE)["dims"]["target_stride"][:, 0] += 1
        return units

    monkeypatch.setattr(copier, "write_boxes", wrong)
    tiles, runs = one_box(4, 2, 64, 2, (256, 128, 2), (128, 512, 2))
    source = np.random.default_rng(3).integers(0, 256, 1200, dtype=np.uint8)
    with pytest.raises((AssertionError, RuntimeError), match=r"not equal|CUDA"):
        check(copier, tiles, runs, [source], [np.zeros_like(source)])


WIDE_LOADS_THEN_STORES = ["ld v2.b64"] * 4 + ["st v2.b64"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_for_a_gpu_a_thread_moves_16_bytes_at_a_time_and_spills_nothing(
    copier, capability, tmp_path
):
    sizes = {"BOX_WORDS": copier.BOX_WORDS, "RUN_WORDS": copier.RUN_WORDS, "UNITS": copier.UNITS}
    signature = {"boxes": "*i64", "runs": "*i64", "num_runs": "i32"}
    (report,) = kernel_reports.reports_of(
        copier.__name__, "copy_kernel", [(signature, sizes, 8)], capability, tmp_path
    )
    assert [each for each in report["accesses"] if "v2.b64" in each] == WIDE_LOADS_THEN_STORES
    assert (report["spilled"], report["shared"], report["barriers"]) == (0, 0, 0)
    signature = {"boxes": "*i64", "runs": "*i64", "num_works": "i32", "num_runs": "i32"}
    names = "UNIT_BYTES", "SEGMENT", "EXTENT_0", "EXTENT_1", "EXTENT_2", "TOKENS"
    sizes |= {"UNITS": copier.SHORT_PROGRAM_UNITS}
    cases = [
        (signature, sizes | dict(zip(names, shape, strict=True)), 4)
        for shape in ((16, 16, 0, 1, 1, 16), (16, 10, 2, 0, 1, 12), (16, 1, 4, 2, 0, 16))
    ]
    reports = kernel_reports.reports_of(
        copier.__name__, "copy_short_boxes", cases, capability, tmp_path
    )
    for report in reports:
        assert [each for each in report["accesses"] if each[:2] == "st"] == ["st v2.b64"] * 4
        assert report["accesses"][-8:] == WIDE_LOADS_THEN_STORES
        assert (report["spilled"], report["shared"], report["barriers"]) == (0, 0, 0)
        assert report["registers"] <= 64  # so that eight programs run side by side
