"""A repack on a device, in one pass or through bounded scratch: as on the host."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.layouts import (
    CellStrides,
    Layout,
    kv_postprocess_layout_on_receive,
    repack_run,
    run_repack,
)
from kvferry.layouts.repack import FramePlace, HeldSlice, Unit, make_repack
from kvferry.layouts.repack_run import repack_on_host
from kvferry.topology import EngineGeometry, ParallelShape
from tests import kernel_reports
from tests.repacks import repack_of_pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NHD, HND = Layout.named("NHD"), Layout.named("HND")


@pytest.fixture(params=["torch", "triton"])
def method(request):
    """The device's copiers; Triton's interpreter takes the place of a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def repack_of(caches, held_tokens, slots=NHD):
    _, tokens, heads, elements = caches[0].shape
    itemsize = caches[0].element_size()
    strides = [stride * itemsize for stride in caches[0].stride()]
    cells = CellStrides(0, 0, *strides)
    return make_repack(
        [
            Unit((("cells", elements),), (FramePlace(region, cells),))
            for region in range(len(caches))
        ],
        itemsize=itemsize,
        heads=heads,
        block_size=tokens,
        slots=slots,
        held=[HeldSlice(HND, heads)],
        held_block_size=held_tokens,
    )


def caches_of(count, shape, dtype=torch.int16):
    rng = np.random.default_rng(4)
    return [
        torch.from_numpy(rng.integers(0, 127, shape)).to(dtype).to(DEVICE) for _ in range(count)
    ]


def by_numba(repack, caches, ids):
    copies = [cache.cpu().clone() for cache in caches]
    repack_on_host(repack, [copy.data_ptr() for copy in copies], np.array(ids))
    return copies


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("held_tokens", [8, 2, 16])
def test_all_layers_and_all_requests_go_together(method, held_tokens):
    caches = caches_of(6, (9, 8, 3, 16))
    repack = repack_of(caches, held_tokens)
    ids = [5, 2, 8, 1]  # of two requests
    wanted = by_numba(repack, caches, ids)
    run_repack(repack, caches, ids, 9, method=method)
    assert_same(caches, wanted)


@pytest.mark.parametrize("frames_of_scratch", [0.5, 1, 3])
def test_the_scratch_is_bounded_and_holds_at_least_one_frame(
    method, monkeypatch, frames_of_scratch
):
    if method == "triton":  # which needs none where a program can hold a frame
        monkeypatch.setattr("kvferry.layouts.repack_triton.MOST_UNITS", 8)
    caches = caches_of(2, (9, 8, 3, 16))
    repack = repack_of(caches, 8)
    ids = [1, 3, 4, 6, 7]
    wanted = by_numba(repack, caches, ids)
    frame = repack.units * repack.block_bytes
    monkeypatch.setattr(repack_run, "SCRATCH_BYTES", int(frames_of_scratch * frame))
    taken = []
    plain_empty = torch.empty

    def empty(*shape, **options):
        made = plain_empty(*shape, **options)
        taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    run_repack(repack, caches, ids, 9, method=method)
    assert max(taken) == max(1, int(frames_of_scratch)) * frame
    assert_same(caches, wanted)


@pytest.fixture
def triton_method(monkeypatch):
    """Triton's, where a test counts launches and scratch."""
    pytest.importorskip("triton")
    from kvferry.layouts import repack_triton
    from kvferry.layouts.copier_triton import copy_tiles_device

    seen = {"launches": 0, "copies": 0}
    kernel, copy = repack_triton.permute_frames, copy_tiles_device

    class Counted:
        def __getitem__(self, grid):
            seen["launches"] += 1
            return kernel[grid]

    def counted(*arguments, **options):
        seen["copies"] += 1
        return copy(*arguments, **options)

    monkeypatch.setattr(repack_triton, "permute_frames", Counted())
    monkeypatch.setattr(repack_triton, "copy_tiles_device", counted)
    return seen


@pytest.mark.parametrize(
    ("tokens", "held", "slots"), [(8, 8, NHD), (8, 2, HND), (4, 6, NHD), (6, 4, HND), (2, 16, NHD)]
)
def test_all_frames_of_all_layers_go_in_one_launch_without_scratch(
    triton_method, tokens, held, slots
):
    caches = caches_of(3, (13, tokens, 5, 24))
    repack = repack_of(caches, held, slots)
    ids = [3, 12, 1, 7, 9, 2, 11, 5][: 8 // repack.frame_blocks * repack.frame_blocks]
    wanted = by_numba(repack, caches, ids)
    run_repack(repack, caches, ids, 13, method="triton")
    assert triton_method == {"launches": 1, "copies": 0}
    assert_same(caches, wanted)


def test_a_frame_that_no_program_holds_goes_through_scratch_in_two_launches(
    triton_method, monkeypatch
):
    monkeypatch.setattr("kvferry.layouts.repack_triton.MOST_UNITS", 8)
    caches = caches_of(3, (9, 8, 3, 16))
    repack = repack_of(caches, 8)
    wanted = by_numba(repack, caches, [5, 2, 8, 1])
    run_repack(repack, caches, [5, 2, 8, 1], 9, method="triton")
    assert triton_method == {"launches": 0, "copies": 2}
    assert_same(caches, wanted)


def test_a_program_takes_a_slice_of_each_cell_where_a_frame_is_large(triton_method, monkeypatch):
    monkeypatch.setattr("kvferry.layouts.repack_triton.MOST_UNITS", 8 * 3 * 2)
    caches = caches_of(2, (9, 8, 3, 64))  # cells of 8 units, of which a program takes 2
    repack = repack_of(caches, 8)
    wanted = by_numba(repack, caches, [5, 2])
    run_repack(repack, caches, [5, 2], 9, method="triton")
    assert triton_method == {"launches": 1, "copies": 0}
    assert_same(caches, wanted)


def test_the_numbers_of_a_launch_are_kept_for_each_of_many_layers(monkeypatch):
    """To compute them anew, the thread would wait for the device."""
    triton = pytest.importorskip("triton")
    computed: list[int] = []
    power = triton.next_power_of_2
    monkeypatch.setattr(triton, "next_power_of_2", lambda n: computed.append(n) or power(n))
    caches = caches_of(2 * 126, (3, 2, 2, 8))
    for _ in range(2):
        for cache in caches:
            kv_postprocess_layout_on_receive(cache, [1], method="triton")
    assert len(computed) == len(caches)


@pytest.mark.own_process
@pytest.mark.parametrize("defect", ["BY_TOKENS", "HELD_BY_TOKENS", "TOKEN_STRIDE", "SLICE"])
def test_a_defect_of_the_kernels_numbers_is_caught(monkeypatch, defect):
    pytest.importorskip("triton")
    from kvferry.layouts import repack_triton

    right = repack_triton._plan

    def wrong(*arguments):
        plan = right(*arguments)
        assert plan is not None
        value = plan.constants[defect]
        smaller = value - 1 if defect == "SLICE" else value // 2
        changed = not value if isinstance(value, bool) else smaller
        constants = plan.constants | {defect: changed}
        return dataclasses.replace(plan, constants=constants)

    monkeypatch.setattr(repack_triton, "_plan", wrong)
    caches = caches_of(2, (9, 8, 3, 16))
    repack = repack_of(caches, 8)
    wanted = by_numba(repack, caches, [5, 2])

    def repacks_right():
        run_repack(repack, caches, [5, 2], 9, method="triton")
        assert_same(caches, wanted)

    with pytest.raises((AssertionError, RuntimeError)):  # a GPU may refuse the address
        repacks_right()


@pytest.mark.parametrize("lead", [1, 2, 4, 8])
def test_caches_that_are_not_aligned_are_moved_in_shorter_words(method, lead):
    memory = torch.arange(3 * 4 * 2 * 16 + 8, dtype=torch.int32).to(torch.uint8).to(DEVICE)
    cache = memory[lead : lead + 3 * 4 * 2 * 16].view(3, 4, 2, 16)
    repack = repack_of([cache], 4)
    wanted = by_numba(repack, [cache], [2])
    before = memory.clone()
    run_repack(repack, [cache], [2], 3, method=method)
    assert_same([cache], wanted)
    assert torch.equal(memory[:lead], before[:lead])
    assert torch.equal(memory[lead + cache.numel() :], before[lead + cache.numel() :])


def test_host_memory_needs_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    cache = torch.zeros(4, 4, 2, 8, dtype=torch.int16)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        run_repack(repack_of([cache], 4), [cache], [1], 4, method="triton")


def test_a_repack_that_changes_nothing_has_no_units(method):
    caches = caches_of(1, (4, 1, 3, 8))
    repack = repack_of(caches, 1)
    assert repack.units == 0
    run_repack(repack, caches, [1], 4, method=method)
    more = caches_of(1, (4, 2, 3, 8))
    run_repack(repack_of(more, 2), more, [], 4, method=method)


@pytest.mark.parametrize(
    ("source_layout", "source_tp", "source_block", "target_layout", "target_block"),
    [
        ("HND", 1, 4, "NHD", 4),
        ("HND", 2, 6, "NHD", 4),  # slices of two sources, frames of three blocks
        ("BNHKD", 1, 4, "NHD", 4),  # K and V come packed and go apart: two chunks per unit
        ("NHD", 3, 2, "BHNKD", 8),
        ("BHK(k=DN,v=ND)", 1, 4, "NHD", 4),  # single elements
        ("HND", 1, 4, "BLKNHD", 4),  # layers in one tensor
    ],
)
def test_any_pair_of_geometries_is_done_as_on_the_host(
    method, source_layout, source_tp, source_block, target_layout, target_block
):
    model: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_size": 8,
        "dtype": "bfloat16",
    }
    source, target = (
        EngineGeometry(**model, layout=layout, block_size=block, parallel=ParallelShape(tp=tp))
        for layout, block, tp in (
            (source_layout, source_block, source_tp),
            (target_layout, target_block, 1),
        )
    )
    memory = target.memory(0, 8, region_per_tensor=True)
    caches = caches_of(len(memory.tensors), target.cache_shape(0, 8))
    repack = repack_of_pair(source, target, memory)
    ids = [5, 1, 7, 2, 3, 6]
    wanted = by_numba(repack, caches, ids)
    assert not torch.equal(wanted[0], caches[0].cpu())
    run_repack(repack, caches, ids, 8, method=method)
    assert_same(caches, wanted)


def test_parts_of_two_sizes_are_one_unit(method):
    model: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_size": 8, "head_size_v": 4}
    source, target = (
        EngineGeometry(
            **model, dtype="float16", block_size=4, layout=layout, parallel=ParallelShape()
        )
        for layout in ("HND", "NHD")
    )
    memory = target.memory(0, 4, region_per_tensor=True)
    caches = caches_of(3, target.cache_shape(0, 4))
    repack = repack_of_pair(source, target, memory)
    assert repack.units == 3
    wanted = by_numba(repack, caches, [2, 3])
    run_repack(repack, caches, [2, 3], 4, method=method)
    assert_same(caches, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_for_a_gpu_it_spills_nothing_and_moves_16_bytes_at_a_time(capability, tmp_path):
    pytest.importorskip("triton")
    signature = {"bases": "*i64", "block_ids": "*i64", "block_stride": "i64"}
    cases = []
    for heads, frame, block, held, size in (
        (8, 16, 16, 16, 256), (8, 64, 64, 16, 256), (16, 96, 48, 32, 384),
    ):  # fmt: skip
        cell = size // 16
        part = next(each for each in (cell, 8, 4) if frame * heads * each <= 8192)
        units = 1 << (frame * heads * part - 1).bit_length()
        constants = {
            "HEADS": heads, "FRAME": frame, "BLOCK": block, "HELD": held,
            "TOKEN_STRIDE": heads * size, "HEAD_STRIDE": size, "UNIT_BYTES": 16, "SLICE": part,
            "SLICES": cell // part, "UNITS": units, "BY_TOKENS": True, "HELD_BY_TOKENS": False,
        }  # fmt: skip
        cases.append((signature, constants, 8 if units >= 4096 else 4))
    module = "kvferry.layouts.repack_triton"
    reports = kernel_reports.reports_of(module, "permute_frames", cases, capability, tmp_path)
    for report, (_, constants, warps) in zip(reports, cases, strict=True):
        wide = constants["UNITS"] // (32 * warps)
        stores = [each for each in report["accesses"] if each[:2] == "st"]
        assert stores == ["st v2.b64"] * wide
        assert report["accesses"].count("ld v2.b64") == wide
        assert (report["spilled"], report["barriers"]) == (0, 1)
