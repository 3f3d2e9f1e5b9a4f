"""Blocks that a wire filled whole hold what the plan says after a repack: any two geometries."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvferry.layouts import Layout, repack, run_repack
from kvferry.layouts.layout import CellStrides
from kvferry.topology import (
    EngineGeometry,
    ParallelShape,
    memory_of,
    plan_transfer,
)
from tests.repacks import parts_lie_apart, repack_between
from tests.topology.defects import WRONG_BYTES, assert_bytes, must_be_caught

LAW = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

DIMS = ("block", "token", "head", "element")


def held_bytes(plan, logical, layer, parts, tokens):
    """What one held block brings: each source's heads, ascending, in the order of its layout."""
    pieces = sorted((p for p in plan.pieces if p.layer == layer), key=lambda p: p.heads.start)
    cut = {part: logical[part][layer, tokens] for part in parts}
    return b"".join(
        ordered(
            plan.source.layout,
            {part: cells[:, piece.heads.start : piece.heads.stop] for part, cells in cut.items()},
        ).tobytes()
        for piece in pieces
    )


def ordered(layout, cells):
    """Cells of each part, ``[token, head, element]``, in the order of a layout's dims, flat."""
    order = layout.order.replace("C", "D")
    outer = [dim for dim in order if dim in "NHD"]
    arrays = []
    for part, cell in cells.items():
        inner = layout.inner_orders.get(part, "")
        dims = [*outer, *inner]
        absent = [dim for dim in "NHD" if dim not in dims]
        array = cell.transpose(["NHD".index(dim) for dim in [*absent, *dims]])
        shape = [cell.shape["NHD".index(dim)] for dim in outer]
        arrays.append(array.reshape([*shape, -1] if inner else shape))
    if "K" in order and len({array.shape for array in arrays}) == 1:
        return np.stack(arrays, axis=[dim for dim in order if dim in "KNHD"].index("K")).ravel()
    packed = outer.index("D") if "D" in outer else -1
    return np.concatenate(arrays, axis=packed).ravel()


def fill(engine, rank, block, parts, layer, data):
    """Writes bytes into a block in the order of its own dims, cell by cell."""
    geometry = engine.geometry
    memory, regions = memory_of(geometry, rank, engine.tensors[rank])
    tensors = {t.name: t for t in memory.tensors}
    tensor = tensors.get(geometry.layer_name(layer)) or tensors["layers"]
    at_layer = 0 if geometry.layer_name(layer) in tensors else geometry.layers(rank).index(layer)
    heads, tokens, itemsize = len(geometry.heads(rank)), geometry.block_size, geometry.itemsize
    addresses = {}
    for name in parts:
        strides = tensor.parts[name]
        elements = dict(geometry.part_sizes)[name]
        n, h, e = np.ogrid[:tokens, :heads, :elements]
        first = tensor.offset + strides.offset + strides.layer * at_layer + strides.block * block
        addresses[name] = first + n * strides.token + h * strides.head + e * strides.element
    for place, address in enumerate(ordered(geometry.layout, addresses)):
        regions[tensor.region][address : address + itemsize] = data[
            place * itemsize : (place + 1) * itemsize
        ]


def part_groups(plan):
    """Parts that are filled one after the other, each in memory of its own."""
    names = [name for name, _ in plan.target.part_sizes]
    return [[name] for name in names] if parts_lie_apart(plan.source, plan.target) else [names]


def check(worlds, data, method="numba"):
    draw = data.draw
    model = worlds.model(draw)
    source, target = (
        dataclasses.replace(worlds.geometry(draw, model), separate_parts=False) for _ in range(2)
    )
    # With tokens interleaved over ranks no whole block of one side is one of the other.
    assume(all(side.parallel.dcp * side.parallel.pcp == 1 for side in (source, target)))
    assume(all(part.name in ("k", "v", "latent") for part in source.parts))
    rank = draw(st.integers(0, target.world_size - 1), label="target_rank")
    plan = plan_transfer(source=source, target=target, target_rank=rank)
    frame = math.lcm(source.block_size, target.block_size)
    frames = draw(st.integers(1, 2), label="frames")
    count = frames * frame // target.block_size
    rng = np.random.default_rng(draw(st.integers(0, 99), label="seed"))
    engine = worlds.engine(draw, rng, target, count + 2)
    blocks = (rng.permutation(count + 1)[:count] + 1).tolist()
    logical = worlds.logical(rng, source, frames * frame // source.block_size)
    # What the target must hold at the end: put there by the worlds' own slow code.
    worlds.fill(engine, blocks, logical)
    wanted = [storage.copy() for storage in engine.storages[rank]]
    per_frame = frame // target.block_size
    for layer in target.layers(rank):
        for parts in part_groups(plan):
            for number in range(frames):
                start = number * frame
                filled = b"".join(
                    held_bytes(plan, logical, layer, parts, slice(at, at + source.block_size))
                    for at in range(start, start + frame, source.block_size)
                )
                each = len(filled) // per_frame
                for place in range(per_frame):
                    share = np.frombuffer(filled, np.uint8)[place * each : (place + 1) * each]
                    block = blocks[number * per_frame + place]
                    fill(engine, rank, block, parts, layer, share)
    memory, regions = memory_of(target, rank, engine.tensors[rank])
    made = repack_between(plan, memory)
    assert made.frame_tokens == frame
    memories: Any = regions
    if method != "numba":  # torch knows no negative strides
        assume(not any((made.gather[f"source_{d}_stride"] < 0).any() for d in DIMS))
        memories = [torch.from_numpy(region) for region in regions]
    run_repack(made, memories, blocks, count + 2, method=method)
    for storage, truth in zip(engine.storages[rank], wanted, strict=True):
        assert_bytes(storage, truth)


def check_law(worlds, method="numba", **options):
    @settings(LAW, **options)
    @given(st.data())
    def law(data):
        check(worlds, data, method)

    law()


def test_filled_blocks_become_the_targets_and_nothing_else_is_touched(worlds):
    check_law(worlds)


def test_torch_permutes_them_as_well(worlds):
    check_law(worlds, "torch", max_examples=30)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["numba", "torch"])
def test_the_law_holds_for_many_more_pairs(worlds, method):
    check_law(worlds, method, max_examples=250, database=None)


def lost_head_slice(monkeypatch):
    right = repack.make_repack

    def first_slice_again(units, **options):
        made = right(units, **options)
        each = made.tiles_per_unit[1]
        return dataclasses.replace(made, scatter=np.repeat(made.scatter[::each], each))

    monkeypatch.setattr(repack, "make_repack", first_slice_again)


def sizes_taken_for_each_other(monkeypatch):
    right = repack.make_repack

    def swapped(units, *, block_size, held_block_size, **others):
        made = right(units, block_size=block_size, held_block_size=held_block_size, **others)
        return dataclasses.replace(made, held_block_size=block_size)

    monkeypatch.setattr(repack, "make_repack", swapped)


@pytest.mark.parametrize("defect", [lost_head_slice, sizes_taken_for_each_other])
def test_a_defect_is_caught(worlds, monkeypatch, defect):
    # Often a block of the target holds two whole ones of the source, and several ranks fill it.
    monkeypatch.setattr(worlds, "block_size", lambda draw, _: draw(st.sampled_from([2, 4])))
    monkeypatch.setattr(
        worlds,
        "parallel",
        lambda draw, kv_heads, most_tp, pp: ParallelShape(tp=draw(st.integers(1, 3)), pp=pp),
    )
    defect(monkeypatch)
    must_be_caught(functools.partial(check, worlds), WRONG_BYTES, max_examples=200)


def test_layers_that_lie_dense_and_layers_that_do_not_are_repacked_together():
    """Once the second layer was read in pieces that the first one has not."""
    nhd, inner = Layout.named("NHD"), Layout.parse("B(k=NHD,v=NHD)")
    parts = (("k", 1), ("v", 1))
    cache = np.arange(16, dtype=np.uint8)
    dense = [repack.FramePlace(0, CellStrides(at, 0, 2, 1, 1, 1)) for at in (0, 1)]
    spread = [repack.FramePlace(0, CellStrides(at, 0, 4, 2, 2, 1)) for at in (8, 10)]
    made = repack.make_repack(
        [repack.Unit(parts, tuple(places)) for places in (dense, spread)],
        itemsize=1, heads=1, block_size=1, slots=inner,
        held=[repack.HeldSlice(nhd, 1)], held_block_size=2,
    )  # fmt: skip
    run_repack(made, [cache], [0, 1], 2)
    # k0 k1 v0 v1 were filled; k0 v0 lie in the first block, k1 v1 in the second.
    assert cache.tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 9, 12, 11, 10, 13, 14, 15]


def test_equal_geometries_need_no_repack():
    geometry = EngineGeometry(
        num_layers=3, num_kv_heads=2, head_size=4, dtype="uint8", block_size=2, layout="NHD",
        parallel=ParallelShape(),
    )  # fmt: skip
    plan = plan_transfer(source=geometry, target=geometry)
    assert repack_between(plan, geometry.memory(0, 4)).units == 0
