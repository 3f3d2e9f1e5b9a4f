"""Who holds which layers and heads, what the tensors look like, and what is refused."""

import dataclasses
import itertools
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.layouts import Layout
from kvferry.topology import EngineGeometry, ParallelShape, memory_of, split_of_group
from tests import geometries

geometry = partial(geometries.geometry, num_layers=9, num_kv_heads=3, head_size=64, block_size=16)


@pytest.mark.parametrize(
    ("heads", "tp", "held"),
    [
        (3, 1, [[0, 1, 2]]),
        (3, 2, [[0], [1, 2]]),
        (6, 4, [[0], [1, 2], [3], [4, 5]]),
        (2, 4, [[0], [0], [1], [1]]),
        (3, 4, [[0], [0], [1], [2]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_heads_are_divided_without_divisibility_and_replicated(heads, tp, held):
    one = geometry(num_kv_heads=heads, parallel=ParallelShape(tp=tp, pp=2))
    for stage in (0, 1):
        assert [list(one.heads(stage * tp + rank)) for rank in range(tp)] == held


@given(heads=st.integers(1, 12), tp=st.integers(1, 30), group=st.integers(1, 9))
def test_every_head_is_held_and_every_query_head_computed_once(heads, tp, group):
    one = geometry(num_kv_heads=heads, parallel=ParallelShape(tp=tp))
    held = [list(one.heads(rank)) for rank in range(tp)]
    for head in range(heads):
        assert list(one.head_replicas(head)) == [rank for rank in range(tp) if head in held[rank]]
    queries = [one.query_heads(rank, heads * group) for rank in range(tp)]
    assert sorted(q for range_ in queries for q in range_) == list(range(heads * group))
    for rank, range_ in enumerate(queries):
        assert {query // group for query in range_} <= set(held[rank])


def test_a_rank_without_query_heads_is_legal():
    one = geometry(num_kv_heads=1, parallel=ParallelShape(tp=4))
    assert [len(one.query_heads(rank, 3)) for rank in range(4)] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("layers", "pp", "split"),
    [(9, 2, (5, 4)), (10, 4, (2, 3, 3, 2)), (8, 4, (2, 2, 2, 2)), (5, 3, (2, 2, 1)), (2, 1, (2,))],
)
def test_layers_that_remain_go_to_the_stages_before_the_last(layers, pp, split):
    assert geometry(num_layers=layers, parallel=ParallelShape(pp=pp)).stage_layers == split


def test_a_given_split_is_taken():
    one = geometry(layer_split=[2, 7], parallel=ParallelShape(pp=2, tp=2))
    assert one.layers(1) == range(2)
    assert one.layers(2) == range(2, 9)
    assert one.tensor_names(3)[0] == "layer.2"


def test_ranks_stand_where_the_formula_says():
    one = geometry(parallel=ParallelShape(tp=4, pp=2))
    places = [one.rank_coordinates(rank) for rank in range(one.world_size)]
    assert [(place.pp, place.tp) for place in places] == [(p, t) for p in (0, 1) for t in range(4)]
    with pytest.raises(ValueError, match="rank: 8 is not one of 0 to 7"):
        one.layers(8)


def test_own_layer_names_locate_the_tensors():
    names = [f"model.layers.{layer}.attn" for layer in range(9)]
    one = geometry(layer_names=names, parallel=ParallelShape(pp=2))
    assert one.tensor_names(1) == tuple(names[5:])


def test_cross_layer_layouts_have_one_tensor_of_all_layers():
    one = geometry(layout="BLHNKD", parallel=ParallelShape(pp=2))
    assert one.tensor_names(1) == ("layers",)
    assert one.cache_shape(1, 10) == (10, 4, 3, 16, 2, 64)
    assert one.nbytes(1, 10) == 10 * 4 * 3 * 16 * 2 * 64 * 4


def windows(**changes):
    """The layers 1, 4, 5 and 10 of a model of 12 layers over three stages of four."""
    values = {
        "num_layers": 4,
        "layer_indices": [1, 4, 5, 10],
        "layer_split": split_of_group([1, 4, 5, 10], [4, 4, 4]),
        "sliding_window": 100,
        "parallel": ParallelShape(pp=3, tp=2),
    }
    return geometry(**values | changes)


def test_a_group_of_some_layers_names_them_as_the_model_does():
    one = windows()
    assert [list(one.layers(rank)) for rank in (0, 2, 5)] == [[1], [4, 5], [10]]
    assert [one.stage_of(layer) for layer in one.model_layers] == [0, 1, 1, 2]
    assert one.tensor_names(2) == ("layer.4", "layer.5")
    assert one.cache_shape(2, 7) == (2, 7, 16, 1, 64)
    named = windows(layer_names=["a", "b", "c", "d"])
    assert named.tensor_names(2) == ("b", "c")
    assert named.layer_name(10) == "d"
    for wrong in (0, 3, 11):
        with pytest.raises(
            ValueError, match=f"layer: {wrong} is not one of the group's 1, 4-5, 10"
        ):
            named.layer_name(wrong)


@pytest.mark.parametrize("layout", ["NHD", "BLHNKD"])
def test_a_stage_without_layers_of_a_group_has_no_tensors_of_it(layout):
    one = windows(
        layer_split=split_of_group([1, 4, 5, 10], [4, 2, 4, 2]),
        parallel=ParallelShape(pp=4),
        layout=layout,
    )
    assert one.stage_layers == (1, 2, 0, 1)
    assert list(one.layers(2)) == []
    assert one.stage_of(10) == 3
    assert one.tensor_names(2) == ()
    assert one.nbytes(2, 7) == 0
    for memory in (
        one.memory(2, 7),
        one.memory(2, 7, region_per_tensor=True),
        memory_of(one, 2, {})[0],
    ):
        assert (memory.region_bytes, memory.tensors) == ((), ())


@given(
    layers=st.sets(st.integers(0, 19), min_size=1).map(sorted),
    cuts=st.lists(st.integers(0, 20), max_size=4).map(sorted),
)
def test_a_group_is_split_as_its_model_is(layers, cuts):
    edges = [0, *cuts, 20]
    stage_layers = [b - a for a, b in itertools.pairwise(edges)]
    one = geometry(
        num_layers=len(layers),
        layer_indices=layers,
        layer_split=split_of_group(layers, stage_layers),
        parallel=ParallelShape(pp=len(stage_layers)),
    )
    for stage, (first, last) in enumerate(itertools.pairwise(edges)):
        held = [layer for layer in layers if first <= layer < last]
        assert list(one.layers(stage)) == held
        assert {one.stage_of(layer) for layer in held} <= {stage}


def test_a_group_knows_what_it_keeps():
    assert geometry().first_kept_token(50) == 0
    assert geometry(sliding_window=8).first_kept_token(50) == 43
    assert geometry(attention_chunk_size=8).first_kept_token(50) == 48


def test_groups_survive_the_wire_with_what_they_keep():
    for one in (windows(), windows(sliding_window=None, attention_chunk_size=64)):
        sent = msgspec.msgpack.encode(one)
        assert msgspec.msgpack.decode(sent, type=EngineGeometry) == one


def test_mla_has_one_latent_part_that_every_tp_rank_holds():
    one = geometry(
        num_kv_heads=1, use_mla=True, head_size=576, layout="BND", parallel=ParallelShape(tp=4)
    )
    assert [part.name for part in one.parts] == ["latent"]
    assert [list(one.heads(rank)) for rank in range(4)] == [[0]] * 4
    assert one.cache_shape(2, 10) == (10, 16, 576)


def test_heads_of_v_may_have_another_size():
    one = geometry(head_size_v=32)
    assert [part.head_size for part in one.parts] == [64, 32]
    assert one.cache_shape(0, 10) == (10, 16, 3, 96)
    assert geometry(head_size_v=64) == geometry()


@pytest.mark.parametrize(
    ("dtype", "name", "itemsize"),
    [
        (torch.bfloat16, "bfloat16", 2),
        ("torch.float64", "float64", 8),
        (np.float32, "float32", 4),
        (np.dtype("float16"), "float16", 2),
        (torch.float8_e4m3fn, "float8_e4m3fn", 1),
    ],
)
def test_dtypes_come_as_torch_or_numpy_dtypes_or_names(dtype, name, itemsize):
    one = geometry(dtype=dtype)
    assert (one.dtype, one.itemsize) == (name, itemsize)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers": 0}, "num_layers: 0 is less than 1"),
        ({"block_size": 2.5}, "block_size: 2.5 is not a whole number"),
        ({"head_size": True}, "head_size: True is not a whole number"),
        ({"num_kv_heads": 10**9}, "num_kv_heads: 1000000000 is more than"),
        ({"dtype": "float31"}, "dtype: 'float31' is unknown; known dtypes"),
        ({"layout": "KBNHX"}, "unknown dim 'X'"),
        ({"layout": "KBND"}, "no H"),
        ({"parallel": ParallelShape(pp=10)}, "pp=10 stages for 9 layers"),
        ({"layer_split": (4, 4)}, "layer_split"),
        ({"layer_split": (9,), "parallel": ParallelShape(pp=2)}, "layer_split"),
        ({"layer_split": (9, 0), "parallel": ParallelShape(pp=2)}, "at least 1 layer"),
        ({"layer_names": ["a"] * 9}, "9 names, 1 of them different"),
        ({"layer_names": ["a"]}, "1 names"),
        ({"use_mla": True}, "num_kv_heads=3"),
        ({"use_mla": True, "num_kv_heads": 1, "head_size_v": 3}, "head_size_v=3"),
        ({"layer_indices": range(8)}, "layer_indices: 8 indices for num_layers=9"),
        ({"layer_indices": [*range(8), 7]}, "layer_indices: 7 follows 7; name each layer once"),
        ({"layer_indices": [-1, *range(8)]}, "layer_indices: -1 is less than"),
        ({"layer_indices": [*range(8), 8.5]}, "layer_indices: 8.5 is not a whole number"),
        ({"layer_indices": [False, *range(1, 9)]}, "layer_indices: False is not a whole number"),
        (
            {"layer_indices": range(9), "parallel": ParallelShape(pp=2)},
            "layer_split: missing, with layer_indices and pp=2",
        ),
        (
            {"layer_indices": range(9), "layer_split": (10, -1), "parallel": ParallelShape(pp=2)},
            "layer_split: .* at least 0 layers",
        ),
        ({"sliding_window": 0}, "sliding_window: 0 is less than 1"),
        ({"attention_chunk_size": 1.5}, "attention_chunk_size: 1.5 is not a whole number"),
        ({"sliding_window": 1 << 41}, "sliding_window: .* is more than"),
        ({"sliding_window": 4, "attention_chunk_size": 4}, "give only that one"),
        ({"page_size_padded": 0}, "page_size_padded: 0 is less than 1"),
        ({"page_size_padded": 4}, "page_size_padded: 4 bytes; a page of .* needs"),
        ({"page_size_padded": (1 << 20) + 1}, "a whole number of elements of 4"),
        (
            {"num_kv_heads": 2, "parallel": ParallelShape(tp=2, dcp=2)},
            "dcp=2 does not divide the 1 TP ranks that hold each of the 2 KV heads with tp=2",
        ),
        (
            {"num_kv_heads": 2, "parallel": ParallelShape(tp=5, dcp=2)},
            "dcp=2 does not divide the 2 or 3 TP ranks",
        ),
        (
            {"num_kv_heads": 2, "parallel": ParallelShape(tp=8, dcp=3)},
            "dcp=3 does not divide the 4 TP ranks",
        ),
        (
            {"parallel": ParallelShape(pcp=2, interleave_size=3)},
            "interleave_size=3 does not divide block_size=",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(changes, says):
    with pytest.raises(ValueError, match=says):
        geometry(**changes)


def test_a_parallel_shape_has_whole_positive_axes():
    with pytest.raises(ValueError, match="tp: 0 is less than 1"):
        ParallelShape(tp=0)


def test_a_geometry_is_frozen_and_can_be_replaced():
    one = geometry()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.block_size = 8
    assert dataclasses.replace(one, block_size=8).block_size == 8
    assert hash(one) == hash(geometry())


def test_a_geometry_survives_the_wire(worlds):
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def law(data):
        one = worlds.geometry(data.draw, worlds.model(data.draw))
        sent = msgspec.msgpack.encode(one)
        assert msgspec.msgpack.decode(sent, type=EngineGeometry) == one

    law()


def felt(memory, box):
    """Strides of dims with one cell left out: no address depends on them."""
    extents = {"layer": box.layers, "block": box.blocks, "token": box.tokens, "head": box.heads}
    elements = dict(box.parts)
    return [
        (
            (tensor.name, tensor.region, tensor.offset, name, strides.offset),
            *(
                getattr(strides, dim)
                for dim, extent in (extents | {"element": elements[name]}).items()
                if extent > 1
            ),
        )
        for tensor in memory.tensors
        for name, strides in tensor.parts.items()
    ]


def test_dense_memory_is_what_dense_tensors_have(worlds):
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def law(data):
        one = worlds.geometry(data.draw, worlds.model(data.draw))
        rank = data.draw(st.integers(0, one.world_size - 1))
        one = dataclasses.replace(one, scale_dtype=None, separate_parts=False)
        names = one.tensor_names(rank)
        shape, dtype = one.cache_shape(rank, 3), f"u{one.itemsize}"
        whole = np.zeros(one.nbytes(rank, 3), dtype=np.uint8).reshape(len(names), -1)
        if one.page_size_padded is None:
            tensors = list(whole.view(dtype).reshape(len(names), *shape))
        else:
            tensors = [worlds.padded_view(one, each, shape, dtype) for each in whole]
        memory, regions = memory_of(one, rank, dict(zip(names, tensors, strict=True)))
        box = one.box(rank, 3)
        assert felt(memory, box) == felt(one.memory(rank, 3), box)
        assert [region.nbytes for region in regions] == [one.nbytes(rank, 3)]
        apart = one.memory(rank, 3, region_per_tensor=True)
        assert sum(apart.region_bytes) == one.nbytes(rank, 3)
        assert [tensor.region for tensor in apart.tensors] == list(range(len(names)))

    law()


@pytest.mark.parametrize(
    ("layout", "shape", "token", "head"),
    [
        ("NHD", (5, 16, 3, 1), 12, 4),
        ("HND", (5, 3, 16, 1), 4, 64),
        ("BNHC", (5, 16, 3, 1), 12, 4),
        ("BHK(k=DN,v=ND)", (5, 3, 1, 16), 4, 64),
    ],
)
def test_scales_have_tensors_of_their_own(layout, shape, token, head):
    one = geometry(
        num_layers=2, dtype="float8_e4m3fn", head_size=9, layout=layout, scale_dtype=torch.float32
    )
    assert one.tensor_names(0) == (
        "layer.0",
        "layer.1",
        *(f"layer.{layer}.{part}_scale" for part in "kv" for layer in (0, 1)),
    )
    assert [(p.name, p.head_size, p.itemsize) for p in one.parts] == [
        ("k", 9, 1),
        ("v", 9, 1),
        ("k_scale", 1, 4),
        ("v_scale", 1, 4),
    ]
    assert one.cache_shape(0, 5, "k_scale") == shape
    memory = one.memory(0, 5)
    assert memory.tensors[-1].name == "layer.1.v_scale"
    found = memory.tensors[2].parts["k_scale"]
    assert (found.block, found.token, found.head) == (192, token, head)
    assert all(tensor.offset % 4 == 0 for tensor in memory.tensors[2:])
    assert memory.region_bytes == (one.nbytes(0, 5),)


def test_a_cross_layer_cache_has_cross_layer_scales():
    quantised = {"dtype": "int8", "scale_dtype": "float16"}
    one = geometry(layout="BLKNHD", **quantised)
    assert one.tensor_names(0) == ("layers", "layers.k_scale", "layers.v_scale")
    assert one.cache_shape(0, 5, "v_scale") == (5, 9, 16, 3, 1)
    latent = geometry(num_kv_heads=1, layout="BND", use_mla=True, **quantised)
    assert latent.cache_shape(0, 5, "latent_scale") == (5, 16, 1)


@pytest.mark.parametrize("scale", ["k", "v_scale", ""])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(ValueError, match="is not one of the group's scales, none"):
        geometry().cache_shape(0, 5, scale)


def test_a_padded_page_holds_all_of_a_block_whatever_the_order_of_the_dims():
    one = geometry(
        num_kv_heads=3,
        head_size=4,
        head_size_v=2,
        block_size=2,
        dtype="float32",
        parallel=ParallelShape(),
        layout="KBNHD",
        page_size_padded=256,
    )
    strides = one.part_strides(0, num_blocks=5)
    assert (strides["k"].offset, strides["v"].offset) == (0, 16)
    assert {part.block for part in strides.values()} == {256}
    assert {part.token for part in strides.values()} == {3 * 6 * 4}
    assert one.nbytes(0, 5) == 9 * 5 * 256
    with_layers = dataclasses.replace(one, layout=Layout("LBNHD"), head_size_v=None)
    assert with_layers.part_strides(0, 5)["k"].layer == 5 * 256


def test_layout_objects_and_names_are_the_same():
    assert (
        geometry(layout=Layout.named("HND")) == geometry(layout="HND") == geometry(layout="KBHND")
    )


def test_k_and_v_may_have_tensors_of_their_own():
    one = geometry(num_layers=2, head_size=9, head_size_v=5, separate_parts=True)
    assert one.tensor_names(0) == ("layer.0.k", "layer.1.k", "layer.0.v", "layer.1.v")
    assert [(part.name, part.head_size) for part in one.parts] == [("k", 9), ("v", 5)]
    assert one.nbytes(0, 3) == 2 * 3 * 16 * 3 * (9 + 5) * 4
    assert one.cache_shape(0, 3, "k") == (3, 16, 3, 9)
    assert one.cache_shape(0, 3, "v") == (3, 16, 3, 5)


def test_separate_parts_have_scales_too():
    one = geometry(dtype="int8", scale_dtype="float32", separate_parts=True, num_layers=1)
    assert one.tensor_names(0) == ("layer.0.k", "layer.0.v", "layer.0.k_scale", "layer.0.v_scale")


@pytest.mark.parametrize(
    "joined",
    [
        {"use_mla": True, "num_kv_heads": 1},
        {"packing": "own"},
        {"layout": "BHK(k=DN,v=ND)"},
    ],
)
def test_parts_that_are_joined_are_not_separate(joined):
    with pytest.raises(ValueError, match="separate_parts: k and v have tensors of their own"):
        geometry(**joined, separate_parts=True)
