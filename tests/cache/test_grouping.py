"""Grouping: which layers share a block table, and what cannot."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_layers,
)

BASE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
PAGE = 16 * 8 * 256 * 2
FULL = FullAttentionSpec(**BASE)
WINDOW = SlidingWindowSpec(**BASE, sliding_window=1024)
CHUNK = ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=8192)
STATE = MambaSpec(16, [(64, 64)], ["float32"])  # 16384 bytes


def named(*specs):
    return {f"layer.{index}": spec for index, spec in enumerate(specs)}


def layers(groups):
    """Layer indices of each group."""
    return [[int(name.split(".")[1]) for name in group.layer_names] for group in groups]


def full(spec):
    assert isinstance(spec, FullAttentionSpec)
    return spec


def test_layers_that_are_all_alike_make_one_group():
    for spec in (FULL, WINDOW, STATE, MLAAttentionSpec(**BASE)):
        (group,) = group_layers(named(spec, spec, spec))
        assert group.layer_names == ("layer.0", "layer.1", "layer.2")
        assert group.kv_cache_spec == spec


def test_window_that_is_only_computed_makes_no_group_of_its_own():
    windowed = dataclasses.replace(FULL, sliding_window=64)
    (group,) = group_layers(named(FULL, windowed, FULL))
    assert group.kv_cache_spec == windowed


def test_layers_of_one_type_with_pages_of_different_size_make_one_group():
    wide = dataclasses.replace(FULL, num_kv_heads=12)
    specs = named(FULL, wide, FULL)
    (group,) = group_layers(specs)
    assert group.kv_cache_spec == UniformTypeKVCacheSpecs(16, specs)
    windows = [dataclasses.replace(FULL, sliding_window=size) for size in (8, 64)]
    (group,) = group_layers(named(*windows))
    assert [group.layer_spec(name) for name in group.layer_names] == windows


def test_hybrid_layers_are_dealt_out_so_that_each_stage_has_some_of_every_group():
    specs = named(*[WINDOW, WINDOW, FULL] * 2)
    groups = group_layers(specs)
    assert layers(groups) == [[0, 3], [1, 4], [2, 5]]
    assert [group.kv_cache_spec for group in groups] == [WINDOW, WINDOW, FULL]


@pytest.mark.parametrize(
    ("num_windows", "num_full", "sizes"),
    [
        (4, 2, [2, 2, 2]),
        (13, 12, [13, 12]),  # a surplus below one half: one unused page, no third group
        (17, 12, [17, 12]),
        (18, 12, [9, 9, 12]),  # one half: a group more
        (12, 18, [12, 9, 9]),
        (5, 2, [2, 2, 1, 2]),
        (52, 10, [9, 9, 9, 9, 8, 8, 10]),  # Gemma-3 27B
        (3, 1, [1, 1, 1, 1]),
        (1, 1, [1, 1]),
    ],
)
def test_groups_are_as_large_as_the_rarest_kind_unless_few_pages_are_lost(
    num_windows, num_full, sizes
):
    groups = group_layers(named(*[WINDOW] * num_windows, *[FULL] * num_full))
    assert [len(group.layer_names) for group in groups] == sizes


def test_encoder_layers_are_in_no_group():
    encoder = EncoderOnlyAttentionSpec(**BASE)
    assert group_layers(named(encoder, encoder)) == ()
    assert layers(group_layers(named(encoder, FULL))) == [[1]]
    assert group_layers({}) == ()


def test_decoder_with_cross_attention_has_a_group_for_each():
    cross = CrossAttentionSpec(**BASE)
    groups = group_layers(named(FULL, cross, FULL, cross))
    assert layers(groups) == [[0, 2], [1, 3]]


def test_small_pages_get_larger_blocks():
    small = dataclasses.replace(WINDOW, num_kv_heads=2)
    groups = group_layers(named(small, FULL))
    assert [group.kv_cache_spec.block_size for group in groups] == [64, 16]
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {PAGE}


def test_small_states_are_padded_to_a_page():
    groups = group_layers(named(STATE, FULL))
    assert [group.kv_cache_spec.page_size_bytes for group in groups] == [PAGE, PAGE]
    assert [group.kv_cache_spec.block_size for group in groups] == [16, 16]


def test_blocks_of_attention_grow_to_the_size_of_a_large_state():
    large = MambaSpec(16, [(PAGE * 2 + 1,)], ["int8"])
    groups = group_layers(named(large, FULL, WINDOW))
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {3 * PAGE}
    assert [group.kv_cache_spec.block_size for group in groups] == [16, 48, 48]


def test_states_of_different_shape_are_padded_to_the_largest():
    specs = [
        MambaSpec(16, [(size,)], ["int8"], num_speculative_blocks=number)
        for number, size in enumerate([10, 7])
    ]
    groups = group_layers(named(*specs))
    assert [group.kv_cache_spec.page_size_bytes for group in groups] == [10, 10]
    padded = dataclasses.replace(specs[1], page_size_padded=10)
    assert [group.kv_cache_spec for group in groups] == [specs[0], padded]


def test_pages_that_are_no_multiples_are_refused_with_what_to_change():
    odd = dataclasses.replace(WINDOW, num_kv_heads=3)
    specs = named(odd, FULL)
    with pytest.raises(
        ValueError, match=r"layer\.1.*65536 bytes.*no multiple.*24576 of layer"
    ) as e:
        group_layers(specs)
    assert "page_size_padded=65536 for 'layer.0'" in str(e.value)
    assert "hybrid=False" in str(e.value)
    # What it says works.
    padded = named(dataclasses.replace(odd, page_size_padded=65536), FULL)
    assert len(group_layers(padded)) == 2
    assert len(group_layers(specs, hybrid=False)) == 1


def test_a_remedy_that_would_not_help_is_not_offered():
    odd = dataclasses.replace(CrossAttentionSpec(**BASE), num_kv_heads=3)
    with pytest.raises(ValueError, match="no multiple") as e:
        group_layers(named(odd, FULL))
    assert "hybrid=False" not in str(e.value)


@pytest.mark.parametrize(
    ("spec", "field", "size"),
    [(WINDOW, "sliding_window", 1024), (CHUNK, "attention_chunk_size", 8192)],
)
def test_without_hybrid_groups_windows_keep_all_tokens(spec, field, size):
    (group,) = group_layers(named(spec, FULL, spec), hybrid=False)
    assert group.kv_cache_spec == dataclasses.replace(FULL, **{field: size})


def test_without_hybrid_groups_layers_that_agree_keep_their_window():
    (group,) = group_layers(named(WINDOW, WINDOW), hybrid=False)
    assert group.kv_cache_spec == WINDOW


def test_without_hybrid_groups_different_windows_share_blocks():
    other = dataclasses.replace(WINDOW, sliding_window=64)
    (group,) = group_layers(named(WINDOW, FULL, other, CHUNK), hybrid=False)
    specs = [full(group.layer_spec(name)) for name in group.layer_names]
    assert [spec.sliding_window for spec in specs] == [1024, None, 64, None]
    assert [spec.attention_chunk_size for spec in specs] == [None, None, None, 8192]


def test_without_hybrid_groups_everything_else_of_a_window_layer_stays():
    window = SlidingWindowSpec(
        16, 8, 192, "bfloat16", page_size_padded=90000, head_size_v=128, sliding_window=64
    )
    full = FullAttentionSpec(16, 8, 192, "bfloat16", page_size_padded=90000, head_size_v=128)
    (group,) = group_layers(named(window, full), hybrid=False)
    assert group.kv_cache_spec == dataclasses.replace(full, sliding_window=64)
    latent = SlidingWindowSpec(16, 1, 576, "bfloat16", use_mla=True, sliding_window=64)
    mla = MLAAttentionSpec(16, 1, 576, "bfloat16")
    (group,) = group_layers(named(latent, mla), hybrid=False)
    assert group.kv_cache_spec == dataclasses.replace(mla, sliding_window=64)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((FULL, STATE), "'layer.1' is a MambaSpec, layer 'layer.0' a FullAttentionSpec"),
        ((FULL, WINDOW, CrossAttentionSpec(**BASE)), "'layer.2' is a CrossAttentionSpec"),
        (
            (FULL, dataclasses.replace(WINDOW, block_size=32)),
            "block_size: layer 'layer.1' has 32, layer 'layer.0' has 16",
        ),
    ],
)
def test_without_hybrid_groups_layers_that_cannot_share_are_named(specs, message):
    with pytest.raises(ValueError, match=message) as e:
        group_layers(named(*specs), hybrid=False)
    assert "hybrid=True" in str(e.value)
    assert len(group_layers(named(*specs))) > 1


KINDS = [
    FULL,
    dataclasses.replace(FULL, sliding_window=64),
    WINDOW,
    dataclasses.replace(WINDOW, num_kv_heads=4, sliding_window=64),
    CHUNK,
    STATE,
    MambaSpec(16, [(PAGE + 5,)], ["int8"]),
    CrossAttentionSpec(**BASE),
]


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=24))
def test_every_layer_is_in_one_group_of_its_kind_and_all_pages_are_equal(specs):
    specs = named(*specs)
    groups = group_layers(specs)
    assert Counter(name for group in groups for name in group.layer_names) == Counter(list(specs))
    if isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs):
        assert len(groups) == 1
        return
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    for group in groups:
        kept = group.kv_cache_spec
        assert isinstance(kept, AttentionSpec | MambaSpec)
        for name in group.layer_names:
            spec = specs[name]
            assert spec.slot_rule == kept.slot_rule
            # Nothing but the size of a block or the padding of a page was changed.
            same = {"page_size_padded": kept.page_size_padded, "block_size": kept.block_size}
            if isinstance(kept, FullAttentionSpec):
                same["sliding_window"] = kept.sliding_window
            assert dataclasses.replace(spec, **same) == kept
        assert list(group.layer_names) == sorted(group.layer_names, key=list(specs).index)
    for kept in {group.kv_cache_spec for group in groups}:
        sizes = {len(group.layer_names) for group in groups if group.kv_cache_spec == kept}
        assert max(sizes) - min(sizes) <= 1


@given(st.permutations(range(6)))
def test_groups_follow_the_order_of_the_model(order):
    kinds = [WINDOW, WINDOW, WINDOW, FULL, FULL, FULL]
    specs = {f"layer.{index}": kinds[kind] for index, kind in enumerate(order)}
    first, second = group_layers(specs)
    assert first.layer_names[0] == "layer.0"
    assert list(first.layer_names) == sorted(first.layer_names)
    assert list(second.layer_names) == sorted(second.layer_names)


def test_what_is_no_spec_is_named():
    with pytest.raises(ValueError, match="specs: 'a' has 3, which is no KVCacheSpec"):
        group_layers({"a": 3})  # type: ignore[dict-item]
