"""Real tensors: where they lie, copies between them, digests over them, and what is refused."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.errors import BlockIdError, BlockTableError, BoundsError, NullBlockError
from kvferry.topology import (
    ParallelShape,
    memory_of,
    plan_transfer,
    run_copies,
    token_digests,
)
from kvferry.topology.run import addresses_of
from tests.geometries import geometry

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def zeros(one, num_blocks=5, dtype=np.float32):
    return {n: np.zeros(one.cache_shape(0, num_blocks), dtype) for n in one.tensor_names(0)}


# ---- memory_of ---------------------------------------------------------------------------------


def test_torch_views_of_one_storage_share_a_region():
    one = geometry(dtype="bfloat16")
    whole = torch.zeros((2, *one.cache_shape(0, 5)), dtype=torch.bfloat16)
    memory, regions = memory_of(one, 0, {"layer.0": whole[1], "layer.1": whole[0]})
    assert [tensor.offset for tensor in memory.tensors] == [whole[0].nbytes, 0]
    assert memory.region_bytes == (whole.nbytes,)
    assert regions[0].ctypes.data == whole.data_ptr()
    assert memory.num_blocks == 5


def test_arrays_of_their_own_are_regions_in_the_order_of_their_names():
    one = geometry()
    tensors = zeros(one)
    memory, regions = memory_of(one, 0, dict(reversed(tensors.items())))
    assert [(tensor.name, tensor.region) for tensor in memory.tensors] == [
        ("layer.0", 0),
        ("layer.1", 1),
    ]
    assert addresses_of(regions) == [array.ctypes.data for array in tensors.values()]


def test_views_of_single_layers_of_a_cross_layer_tensor_are_accepted():
    one = geometry(layout="BLHNC")
    whole = np.arange(5 * 2 * 2 * 4 * 8, dtype=np.float32).reshape(one.cache_shape(0, 5))
    views = {"layer.0": whole[:, 0], "layer.1": whole[:, 1]}
    found = np.zeros_like(whole)
    copies = plan_transfer(source=one, target=one).bind([1, 2, 3, 4], [1, 2, 3, 4], 16)
    run_copies(copies, {0: views}, {"layers": found})
    np.testing.assert_array_equal(found[1:], whole[1:])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("layer.1"), "missing: layer.1"),
        (lambda t: t.update(extra=t["layer.0"]), "unknown: extra"),
        (lambda t: t.update({"layer.1": t["layer.1"][:, :4]}), "'layer.1': 4 blocks.*have 5"),
        (
            lambda t: t.update({"layer.1": t["layer.1"][..., :3]}),
            r"'layer.1': shape \(2, 5, 4, 2, 3\).*\(2, 5, 4, 2, 4\)",
        ),
        (lambda t: t.update({"layer.1": t["layer.1"][0]}), "'layer.1': shape"),
        (
            lambda t: t.update({"layer.1": t["layer.1"].astype(np.float64)}),
            "dtype float64.*float32",
        ),
    ],
)
def test_wrong_tensors_are_named_with_both_values(change, says):
    tensors = zeros(geometry())
    change(tensors)
    with pytest.raises(ValueError, match=says):
        memory_of(geometry(), 0, tensors)


def test_something_else_than_a_tensor_is_refused():
    with pytest.raises(TypeError, match="got list"):
        memory_of(geometry(), 0, {"layer.0": [1], "layer.1": [2]})


def test_a_tensor_outside_host_memory_is_refused():
    shape = geometry().cache_shape(0, 2)
    tensors = {f"layer.{i}": torch.zeros(shape, device="meta") for i in range(2)}
    with pytest.raises(ValueError, match="CUDA device, got one on meta"):
        memory_of(geometry(), 0, tensors)


def test_tensors_of_groups_may_lie_on_top_of_each_other():
    """Block ids are unique in a pool, so that blocks of one group are never those of another."""
    hybrid = [geometry(layer_indices=(0, 2), sliding_window=4), geometry(layer_indices=(1, 3))]
    rng = np.random.default_rng(0)
    shared = {
        side: [np.zeros(hybrid[0].cache_shape(0, 9), np.float32) for _ in range(2)]
        for side in ("source", "target")
    }
    for tensor in shared["source"]:
        tensor[:] = rng.random(tensor.shape)
    tables = [([0, 3], [0, 5]), ([8, 1], [2, 7])]  # (source's, target's) per group
    for one, table in zip(hybrid, tables, strict=True):
        views = {
            side: dict(zip(one.tensor_names(0), tensors, strict=True))
            for side, tensors in shared.items()
        }
        assert memory_of(one, 0, views["source"])[0].num_blocks == 9
        copies = plan_transfer(source=one, target=one).bind(*table, 8, one.first_kept_token(8))
        run_copies(copies, {0: views["source"]}, views["target"])
    for given_, found in zip(shared["source"], shared["target"], strict=True):
        np.testing.assert_array_equal(found[:, [2, 7]], given_[:, [8, 1]])
        np.testing.assert_array_equal(found[:, 5, 1:], given_[:, 3, 1:])
        assert not found[:, 5, 0].any()
        assert not found[:, [0, 1, 3, 4, 6, 8]].any()


# ---- run_copies --------------------------------------------------------------------------------


def test_torch_tensors_of_any_strides_are_copied():
    source, target = geometry(dtype="bfloat16"), geometry(dtype="bfloat16", layout="HND")
    rng = torch.Generator().manual_seed(0)
    tensors = {
        n: torch.randn(source.cache_shape(0, 5), generator=rng).bfloat16()
        for n in source.tensor_names(0)
    }
    # The target lies in memory in yet another order.
    found = {
        n: torch.zeros(4, 4, 2, 5, 2, dtype=torch.bfloat16).permute(4, 3, 2, 0, 1)
        for n in target.tensor_names(0)
    }
    assert found["layer.0"].shape == target.cache_shape(0, 5)
    copies = plan_transfer(source=source, target=target).bind([4, 2], [1, 3], 8)
    run_copies(copies, {0: tensors}, found)
    for name, tensor in tensors.items():
        wanted = torch.zeros(target.cache_shape(0, 5), dtype=torch.bfloat16)
        wanted[:, [1, 3]] = tensor[:, [4, 2]].transpose(2, 3)
        assert torch.equal(found[name], wanted)


def test_only_the_layers_of_the_plan_need_tensors():
    one = geometry()
    source, target = zeros(one), zeros(one)
    source["layer.1"][:] = 7
    copies = plan_transfer(source=one, target=one).for_layers([1]).bind([1], [2], 4)
    run_copies(copies, {0: {"layer.1": source["layer.1"]}}, {"layer.1": target["layer.1"]})
    assert (target["layer.1"][:, 2] == 7).all()
    assert target["layer.1"].sum() == 7 * 2 * 4 * 2 * 4


def test_scales_inside_the_pages_of_their_cells_go_to_tensors_of_their_own():
    """vLLM keeps the scale of a head after its elements, so that both are views of one tensor."""
    quantised = {"dtype": "float8_e4m3fn", "scale_dtype": "float32", "head_size": 8}
    source = geometry(num_layers=1, layout="BKNHD", **quantised)
    target = geometry(num_layers=1, layout="HND", block_size=3, **quantised)
    pages = np.random.default_rng(0).integers(0, 256, (4, 2, 4, 2, 8 + 4), dtype=np.uint8)
    scales = pages[..., 8:].view(np.float32)
    given_: dict[str, Any] = {
        "layer.0": pages[..., :8],
        "layer.0.k_scale": scales[:, 0].view(np.uint32),
        "layer.0.v_scale": scales[:, 1].view(np.uint32),
    }
    memory, regions = memory_of(source, 0, given_)
    assert len(regions) == 1  # one allocation
    assert [tensor.offset for tensor in memory.tensors] == [0, 8, 8 + 4 * 2 * 12]
    found: dict[str, Any] = {
        "layer.0": np.zeros(target.cache_shape(0, 5), dtype=np.uint8),
        **{
            f"layer.0.{part}": np.zeros(target.cache_shape(0, 5, part), dtype=np.uint32)
            for part in ("k_scale", "v_scale")
        },
    }
    copies = plan_transfer(source=source, target=target).bind([3, 1], [1, 4, 2], 8)
    assert copies.nbytes == 8 * 2 * 2 * (8 + 4)
    run_copies(copies, {0: given_}, found)
    for token in range(8):
        block, slot = [3, 1][token // 4], token % 4
        there, place = [1, 4, 2][token // 3], token % 3
        for index, part in enumerate(("k_scale", "v_scale")):
            np.testing.assert_array_equal(
                found["layer.0"][index, there, :, place], pages[block, index, slot, :, :8]
            )
            np.testing.assert_array_equal(
                found[f"layer.0.{part}"][there, :, place], given_[f"layer.0.{part}"][block, slot]
            )


def test_ids_outside_the_tensors_are_refused_before_anything_moves():
    one = geometry()
    source, target = zeros(one), zeros(one)
    source["layer.0"][:] = 1
    made = plan_transfer(source=one, target=one)
    for tables in (([1, 5], [1, 2]), ([1, 2], [1, 5])):
        with pytest.raises(BlockIdError, match="block 5 does not exist; there are 5 blocks"):
            run_copies(made.bind(*tables, 8), {0: source}, target)
    assert not target["layer.0"].any()


def test_missing_ranks_and_read_only_targets_are_refused():
    one = geometry()
    copies = plan_transfer(source=geometry(parallel=ParallelShape(tp=2)), target=one).bind(
        [1], [1], 4
    )
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] are missing"):
        run_copies(copies, {}, zeros(one))
    frozen = zeros(one)
    frozen["layer.1"].flags.writeable = False
    copies = plan_transfer(source=one, target=one).bind([1], [1], 4)
    with pytest.raises(ValueError, match=r"'layer.1' is read-only"):
        run_copies(copies, {0: zeros(one)}, frozen)


# ---- digest ------------------------------------------------------------------------------------


def digest(*place):
    return int(token_digests(*place).sum())


def engine_digest(engine, blocks, num_tokens, first_token):
    total = 0
    for rank, tensors in engine.tensors.items():
        memory, regions = memory_of(engine.geometry, rank, tensors)
        total += digest(
            engine.geometry, rank, memory, addresses_of(regions), blocks, num_tokens, first_token
        )
    return total % 2**64


def moved_case(worlds, data):
    """A random pair of engines after every target rank has loaded the span."""
    case = worlds.case(data)
    if 0 in case.target_blocks or 0 in case.source_blocks:
        return None
    for rank, tensors in case.target.tensors.items():
        made = plan_transfer(
            source=case.source.geometry,
            target=case.target.geometry,
            target_rank=rank,
            target_engine_id=case.engine_id,
        )
        run_copies(
            made.bind(case.source_blocks, case.target_blocks, case.num_tokens, case.first_token),
            case.source.tensors,
            tensors,
        )
    return case


def test_the_digest_does_not_depend_on_layout_sharding_or_block_size(worlds):
    @PROPERTY
    @given(st.data())
    def law(data):
        case = moved_case(worlds, data)
        if case is None:
            return
        span = case.num_tokens, case.first_token
        given_, got = (
            engine_digest(case.source, case.source_blocks, *span),
            engine_digest(case.target, case.target_blocks, *span),
        )
        assert given_ == got
        assert (got != 0) == (case.num_tokens > case.first_token)

    law()


def test_any_flipped_bit_of_the_span_changes_the_digest(worlds):
    @PROPERTY
    @given(st.data())
    def law(data):
        case = moved_case(worlds, data)
        if case is None or case.num_tokens == case.first_token:
            return
        span = case.num_tokens, case.first_token
        engine, blocks = case.target, case.target_blocks
        before = engine_digest(engine, blocks, *span)
        one = engine.geometry
        layer = data.draw(st.integers(0, one.num_layers - 1))
        head = data.draw(st.integers(0, one.num_kv_heads - 1))
        token = data.draw(st.integers(case.first_token, case.num_tokens - 1))
        part = data.draw(st.sampled_from(one.parts))
        bit = data.draw(st.integers(0, part.head_size * part.itemsize * 8 - 1))
        holder, place = next(
            (rank, place)
            for rank in range(one.world_size)
            if layer in one.layers(rank) and head in one.heads(rank)
            if (place := worlds.place(one, rank, token))
        )
        cell = blocks[place[0]], place[1], head - one.heads(holder).start
        boxes = worlds.read_box(engine, holder, layer, part.name)
        row = np.ascontiguousarray(boxes[cell]).view(np.uint8)
        row[bit // 8] ^= 1 << bit % 8
        boxes[cell] = row.view(boxes.dtype)
        worlds.write_box(engine, holder, layer, part.name, boxes)
        assert engine_digest(engine, blocks, *span) != before

    law()


@pytest.mark.parametrize("dim", ["layer", "part", "token", "head", "element"])
def test_exchanged_cells_change_the_digest(dim):
    one = geometry(dtype="int32")
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 2**31, (2, *one.cache_shape(0, 3)), dtype=np.int32)

    def of(array):
        memory, regions = memory_of(one, 0, {"layer.0": array[0], "layer.1": array[1]})
        return digest(one, 0, memory, addresses_of(regions), [1, 2], 8)

    flipped = np.ascontiguousarray(
        np.flip(whole, {"layer": 0, "part": 1, "token": 3, "head": 4, "element": 5}[dim])
    )
    assert of(flipped) != of(whole)


def test_digests_per_token_locate_a_defect_and_add_up_over_spans():
    one = geometry(dtype="int32", block_size=3)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.integers(0, 2**31, one.cache_shape(0, 5), dtype=np.int32)
        for name in one.tensor_names(0)
    }
    memory, regions = memory_of(one, 0, tensors)
    place = (one, 0, memory, addresses_of(regions), [4, 1, 2])
    before = token_digests(*place, 8)
    assert int(before[5:].sum()) == digest(*place, 8, 5)
    np.testing.assert_array_equal(token_digests(*place, 8, 5), before[5:])
    tensors["layer.1"][1, 1, 1, 0, 2] ^= 1  # v of token 4: block 1 of the table, token 1 of it
    changed = token_digests(*place, 8) != before
    assert changed.tolist() == [token == 4 for token in range(8)]


def test_replicas_are_counted_once():
    one = geometry(num_kv_heads=1, parallel=ParallelShape(tp=3))
    values = []
    for rank in range(3):
        memory, regions = memory_of(one, rank, zeros(one))
        values.append(digest(one, rank, memory, addresses_of(regions), [1], 4))
    assert values[0] != 0
    assert values[1:] == [0, 0]


@pytest.mark.parametrize(
    ("blocks", "error"),
    [([0], NullBlockError), ([5], BoundsError), ([-1], BlockIdError), ([], BlockTableError)],
)
def test_a_digest_of_blocks_that_hold_no_cells_is_refused(blocks, error):
    one = geometry()
    memory, regions = memory_of(one, 0, zeros(one))
    with pytest.raises(error):
        digest(one, 0, memory, addresses_of(regions), blocks, 4)


# ---- imports -----------------------------------------------------------------------------------


def test_geometry_layouts_and_plans_load_without_torch_zmq_and_numba():
    code = (
        "import sys, kvferry, kvferry.layouts, kvferry.topology;"
        "print(sorted({'torch', 'zmq', 'numba'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
