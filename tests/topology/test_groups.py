"""Which groups of two engines meet, and which engines can never meet."""

import dataclasses

import pytest

from kvferry.topology import (
    EngineGeometry,
    GroupPair,
    ParallelShape,
    group_mismatches,
    pair_groups,
)


def group(layers, **changes):
    values = {
        "num_layers": len(layers),
        "num_kv_heads": 2,
        "head_size": 4,
        "dtype": "float32",
        "block_size": 4,
        "layout": "NHD",
        "parallel": ParallelShape(),
        "layer_indices": layers,
    }
    return EngineGeometry(**values | changes)


def test_groups_meet_by_their_layers_whatever_their_order():
    sources = [group((1, 3)), group((0, 2), sliding_window=8)]
    targets = [group((0, 2), sliding_window=8), group((1, 3), block_size=8)]
    assert pair_groups(sources, targets) == (
        GroupPair(1, 0, (0, 2), sliding_window=8),
        GroupPair(0, 1, (1, 3)),
    )


def test_groups_that_are_cut_differently_meet_piece_by_piece():
    sources = [group((0, 1, 2)), group((3, 4, 5))]
    targets = [group((0, 5)), group((1, 2, 3, 4))]
    pairs = pair_groups(sources, targets)
    assert [(pair.target_group, pair.source_group, pair.layers) for pair in pairs] == [
        (0, 0, (0,)),
        (0, 1, (5,)),
        (1, 0, (1, 2)),
        (1, 1, (3, 4)),
    ]


@pytest.mark.parametrize("kept", [{"sliding_window": 8}, {"attention_chunk_size": 8}])
def test_only_a_target_that_keeps_more_than_its_source_is_partial(kept):
    whole, less = [group((0, 1))], [group((0, 1), **kept)]
    for sources, targets, partial in (
        (whole, whole, False),
        (whole, less, False),
        (less, less, False),
        (less, whole, True),
    ):
        (pair,) = pair_groups(sources, targets)
        assert pair.is_partial == partial
        wanted = max(side[0].first_kept_token(50) for side in (sources, targets))
        assert pair.first_kept_token(50) == wanted


def test_layers_of_different_cells_may_lie_in_one_model():
    """Windows with more, smaller heads than the layers that see everything."""
    wide = group((0, 1), sliding_window=8)
    tall = group((2,), num_kv_heads=1, head_size=8)
    assert [pair.layers for pair in pair_groups([wide, tall], [tall, wide])] == [(2,), (0, 1)]


def test_every_mismatch_is_listed_once_with_its_layers_and_both_values():
    sources = [group((0, 2), sliding_window=8), group((1,)), group((7,))]
    targets = [
        group((0, 2), sliding_window=9, num_kv_heads=1),
        group((1, 8), num_kv_heads=1, head_size_v=2),
    ]
    layers = "source has 0-2, 7, target has 0-2, 8"
    kept = "source has sliding_window 8, target has sliding_window 9"
    assert group_mismatches(sources, targets) == [
        f"layers: {layers}; let the groups of both cover the same layers",
        "num_kv_heads of layers 0-2: source has 2, target has 1; serve the same model on both",
        f"kept tokens of layers 0, 2: {kept}; serve the same model on both",
        "head_size_v of layers 1: source has 4, target has 2; serve the same model on both",
    ]
    says = r"cannot exchange KV: layers: .*; head_size_v of layers 1: "
    with pytest.raises(ValueError, match=says):
        pair_groups(sources, targets)


def test_a_layer_in_two_groups_is_a_mismatch_on_either_side():
    once, twice = [group((0, 1, 2))], [group((0, 1)), group((1, 2))]
    says = "has 1 in several groups; put each layer into one"
    assert group_mismatches(once, twice) == [f"layers: target {says}"]
    assert group_mismatches(twice, once) == [f"layers: source {says}"]
    assert group_mismatches(twice, once, names=("P", "D")) == [f"layers: P {says}"]


def test_a_mismatch_of_very_many_layers_stays_short():
    sources, targets = [group(range(0, 4096, 2))], [group(range(1, 4096, 2))]
    (mismatch,) = group_mismatches(sources, targets)
    assert len(mismatch) < 500
    assert "0, 2, 4" in mismatch
    assert "and 2032 more ranges" in mismatch


def test_shapes_stages_layouts_and_block_sizes_are_no_mismatch():
    source = group((0, 1, 2))
    target = dataclasses.replace(
        source,
        parallel=ParallelShape(tp=3, pp=2),
        layer_split=(3, 0),
        block_size=7,
        layout="BHLNC",
        layer_names=("a", "b", "c"),
    )
    assert group_mismatches([source], [target]) == []


def test_caches_with_other_scales_can_never_meet():
    one = group((0, 1), dtype="int8", scale_dtype="float32")
    for other, has in (
        (group((0, 1), dtype="int8"), "None"),
        (dataclasses.replace(one, scale_dtype="float16"), "float16"),
    ):
        (mismatch,) = group_mismatches([one], [other])
        assert mismatch == (
            f"scale_dtype of layers 0-1: source has float32, target has {has}; give both the same "
            "quantisation of the KV cache, with scales of one dtype"
        )
