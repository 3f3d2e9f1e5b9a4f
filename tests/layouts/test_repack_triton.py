"""The Triton repack: one launch, staging, short words, and what its kernel compiles to."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvferry.layouts import Layout
from kvferry.layouts.frame_rows import frame_rows
from kvferry.layouts.repack import HeldSlice, make_repack, views_as_units
from kvferry.layouts.repack_host import repack_on_host
from kvferry.topology import EngineGeometry, ParallelShape, plan_repack, plan_transfer

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NHD, HND = Layout.named("NHD"), Layout.named("HND")


@pytest.fixture(scope="module")
def triton_repack():
    from kvferry.layouts import repack_triton

    return repack_triton


def repack_of(caches, held_tokens):
    _, tokens, heads, elements = caches[0].shape
    itemsize = caches[0].element_size()
    strides = [stride * itemsize for stride in caches[0].stride()]
    return make_repack(
        views_as_units(dict.fromkeys(range(len(caches)), (strides, elements))),
        itemsize=itemsize,
        heads=heads,
        block_size=tokens,
        slots=NHD,
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
def test_all_layers_and_all_requests_are_one_launch(triton_repack, held_tokens):
    caches = caches_of(6, (9, 8, 3, 16))
    repack = repack_of(caches, held_tokens)
    ids = [5, 2, 8, 1]  # of two requests
    wanted = by_numba(repack, caches, ids)
    assert triton_repack.repack_with_triton(repack, caches, np.array(ids)) == 1
    assert_same(caches, wanted)


def test_frames_that_do_not_fit_on_chip_go_through_bounded_staging(triton_repack, monkeypatch):
    caches = caches_of(2, (7, 8, 3, 16))
    repack = repack_of(caches, 8)
    ids = [1, 3, 4, 6]
    wanted = by_numba(repack, caches, ids)
    monkeypatch.setattr(triton_repack, "ON_CHIP_BYTES", 256)
    monkeypatch.setattr(triton_repack, "STAGING_BYTES", 3 * repack.block_bytes)
    # Eight frames, three at a time; the rows that stay where they are need no staging.
    assert triton_repack.repack_with_triton(repack, caches, np.array(ids)) == 2 * 3
    assert_same(caches, wanted)


def test_a_tiny_staging_buffer_still_holds_one_frame(triton_repack, monkeypatch):
    caches = caches_of(1, (4, 4, 2, 8))
    repack = repack_of(caches, 4)
    wanted = by_numba(repack, caches, [1, 3])
    monkeypatch.setattr(triton_repack, "ON_CHIP_BYTES", 1)
    monkeypatch.setattr(triton_repack, "STAGING_BYTES", 1)
    assert triton_repack.repack_with_triton(repack, caches, np.array([1, 3])) == 4
    assert_same(caches, wanted)


@pytest.mark.parametrize("lead", [1, 2, 4, 8])
def test_caches_that_are_not_aligned_are_moved_in_shorter_words(triton_repack, lead):
    memory = torch.arange(3 * 4 * 2 * 16 + 8, dtype=torch.int32).to(torch.uint8).to(DEVICE)
    cache = memory[lead : lead + 3 * 4 * 2 * 16].view(3, 4, 2, 16)
    repack = repack_of([cache], 4)
    wanted = by_numba(repack, [cache], [2])
    before = memory.clone()
    triton_repack.repack_with_triton(repack, [cache], np.array([2]))
    assert_same([cache], wanted)
    assert torch.equal(memory[:lead], before[:lead])
    assert torch.equal(memory[lead + cache.numel() :], before[lead + cache.numel() :])


def test_host_memory_needs_the_interpreter(triton_repack, monkeypatch):
    cache = torch.zeros(4, 4, 2, 8, dtype=torch.int16)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        triton_repack.repack_with_triton(repack_of([cache], 4), [cache], np.array([1]))


def test_nothing_to_do_launches_nothing(triton_repack):
    caches = caches_of(1, (4, 1, 3, 8))
    assert triton_repack.repack_with_triton(repack_of(caches, 1), caches, np.array([1])) == 0
    more = caches_of(1, (4, 2, 3, 8))
    nothing = np.array([], dtype=np.int64)
    assert triton_repack.repack_with_triton(repack_of(more, 2), more, nothing) == 0


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
    triton_repack, source_layout, source_tp, source_block, target_layout, target_block
):
    model = {"num_layers": 2, "num_kv_heads": 3, "head_size": 8, "dtype": "bfloat16"}
    source, target = (
        EngineGeometry(**model, layout=layout, block_size=block, parallel=ParallelShape(tp=tp))
        for layout, block, tp in (
            (source_layout, source_block, source_tp),
            (target_layout, target_block, 1),
        )
    )
    memory = target.memory(0, 8, region_per_tensor=True)
    caches = caches_of(len(memory.tensors), target.cache_shape(0, 8))
    repack = plan_repack(plan_transfer(source=source, target=target), memory)
    ids = [5, 1, 7, 2, 3, 6]
    wanted = by_numba(repack, caches, ids)
    assert not torch.equal(wanted[0], caches[0].cpu())
    assert triton_repack.repack_with_triton(repack, caches, np.array(ids)) == 1
    assert_same(caches, wanted)


def test_parts_of_two_sizes_are_one_unit_and_one_launch(triton_repack):
    model = {"num_layers": 3, "num_kv_heads": 2, "head_size": 8, "head_size_v": 4}
    source, target = (
        EngineGeometry(
            **model, dtype="float16", block_size=4, layout=layout, parallel=ParallelShape()
        )
        for layout in ("HND", "NHD")
    )
    memory = target.memory(0, 4, region_per_tensor=True)
    caches = caches_of(3, target.cache_shape(0, 4))
    repack = plan_repack(plan_transfer(source=source, target=target), memory)
    assert repack.units == 3
    wanted = by_numba(repack, caches, [2, 3])
    assert triton_repack.repack_with_triton(repack, caches, np.array([2, 3])) == 1
    assert_same(caches, wanted)


def test_rows_that_stay_where_they_are_are_not_moved():
    caches = caches_of(1, (4, 4, 2, 8))
    rows = frame_rows(repack_of(caches, 4), 0)
    assert rows.row_bytes == 16
    assert len(rows.source_slots) == 8 - 2  # the first and the last cell of a block stay


#: Run without the interpreter: compiles as for a GPU, which needs none, and prints what matters.
COMPILE = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvferry.layouts.triton_kernels import WORDS, repack_kernel

pointers = ("source_slots", "source_offsets", "target_slots", "target_offsets", "bases", "strides",
            "block_ids")
for rows, blocks, warps in ((128, 1, 8), (512, 2, 32)):
    constants = dict(WORD=WORDS[8], WORD_BYTES=8, ALIGN=16, ROWS=rows, COLS=32, BLOCKS=blocks,
                     CHUNKS=1, FROM_CACHE=True, TO_CACHE=True)
    signature = dict.fromkeys(pointers, "*i64") | {"staging": "*u8"}
    signature |= dict.fromkeys(("first", "frames", "num_rows"), "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(repack_kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32),
                          options={"num_warps": warps, "enable_fp_fusion": False})
    found = re.findall(r"(ld[.]global[.]v2|st[.]global[.]v2|bar[.]sync)", made.asm["ptx"])
    print(" ".join(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_a_program_loads_all_16_byte_words_before_its_threads_store_any(architecture, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, architecture],
        capture_output=True,
        text=True,
        timeout=170,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        assert re.fullmatch(r"(ld\.global\.v2 ){8}bar\.sync( st\.global\.v2){8}", line)
    assert len(result.stdout.splitlines()) == 2
