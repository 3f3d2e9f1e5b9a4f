"""From what each layer of a model keeps to the geometries of an engine."""

import pytest

from kvferry.cache import MambaSpec, group_layers
from kvferry.cache.cache_shape import CacheShape, LayerHeads
from kvferry.topology import ParallelShape
from kvferry.topology.states import state_part

FULL, WINDOW = LayerHeads(4, 512), LayerHeads(16, 256, sliding_window=1024)
STATES = (state_part("conv", "bfloat16", {"x": (8, 16), "B": (1, 32)}, 3),)


def geometries(layers, *, tp=1, pp=1, hybrid=True, **more):
    shape = CacheShape(tuple(layers))
    groups = group_layers(shape.kv_cache_specs(16, "bfloat16", tp), hybrid=hybrid)
    parallel = ParallelShape(tp=tp, pp=pp)
    return shape.geometries(groups, layout="NHD", parallel=parallel, **more)


@pytest.mark.parametrize(
    ("tp", "blocks"), [(1, (16, 32)), (4, (16, 32)), (8, (16, 16)), (16, (32, 16))]
)
def test_blocks_are_as_long_as_the_pages_of_a_rank_make_them(tp, blocks):
    window, full = geometries([WINDOW, FULL], tp=tp)

    # Per token 16 x 256 against 4 x 512 elements, and no rank has less than one head.
    assert (window.block_size, full.block_size) == blocks
    assert (window.num_kv_heads, full.num_kv_heads) == (16, 4)


def test_layers_of_one_block_table_with_unlike_heads_have_geometries_of_their_own():
    many, few = geometries([LayerHeads(8, 64), LayerHeads(2, 64), LayerHeads(8, 64)], tp=2)

    assert (many.layer_indices, many.num_kv_heads) == ((0, 2), 8)
    assert (few.layer_indices, few.num_kv_heads) == ((1,), 2)
    assert many.block_size == few.block_size == 16


def test_a_layer_without_a_cache_is_in_no_group_and_counts_in_its_stage():
    (group,) = geometries([FULL, None, FULL, None, None, FULL], pp=2)

    assert group.layer_indices == (0, 2, 5)
    assert group.stage_layers == (2, 1)


def test_windows_that_keep_all_tokens_share_the_group_of_full_layers():
    (group,) = geometries([WINDOW, WINDOW.whole, WINDOW], hybrid=False)

    assert (group.num_layers, group.sliding_window) == (3, None)


def test_a_rank_of_several_has_some_channels_of_a_state_and_all_of_what_is_replicated():
    shape = CacheShape((STATES, FULL))
    for tp, channels in ((1, 8 * 16 + 32), (4, 2 * 16 + 32)):
        spec = shape.kv_cache_specs(16, "bfloat16", tp)["layer.0"]
        assert isinstance(spec, MambaSpec)
        assert spec.shapes == ((channels, 3),)


def test_stages_that_do_not_add_up_are_refused_with_both_numbers():
    for stages in ((4, 4), (2, 2, 2)):
        with pytest.raises(
            ValueError, match=r"^layers: \d\+\d.* the model has 6 and the engine pp=2"
        ):
            geometries([FULL] * 6, pp=2, stage_layers=stages)


@pytest.mark.parametrize("number", [0, 10**30])
def test_a_number_of_heads_that_no_model_has_is_refused_by_name(number):
    shape = CacheShape.uniform(2, LayerHeads(number, 8))
    with pytest.raises(ValueError, match=f"num_kv_heads: {number} is "):
        shape.kv_cache_specs(16, "bfloat16", tp=2)
