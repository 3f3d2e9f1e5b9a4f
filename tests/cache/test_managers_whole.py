"""Groups that keep everything: full attention, sinks, cross attention, layers of unlike pages."""

import pytest

from kvferry.cache import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    MLAAttentionSpec,
    Request,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


def grow(manager, request, num_new, **options):
    new_blocks = manager.allocate_slots(request, num_new, **options)
    if new_blocks is not None:
        request.num_computed_tokens += num_new
    return new_blocks


def manage(spec):
    return KVCacheManager(KVCacheConfig(41, [], [KVCacheGroupSpec(["a", "b"], spec)]), 128)


# -- Cross attention


def test_encoder_tokens_get_their_blocks_once(make_group_manager):
    manager = make_group_manager(("full",), ("cross", 0, 8))
    request = Request("r", range(5))
    new_blocks = grow(manager, request, 5, num_encoder_tokens=20)
    assert [len(ids) for ids in new_blocks.get_block_ids()] == [2, 3]
    request.append_output_token_ids([1] * 40)
    grow(manager, request, 40)
    assert [len(ids) for ids in manager.get_block_ids("r")] == [12, 3]
    assert manager.num_held_blocks("r") == 15
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 40


def test_every_rank_holds_all_encoder_tokens(make_group_manager):
    manager = make_group_manager(("full",), ("cross",), dcp_world_size=2)
    grow(manager, Request("r", range(16)), 16, num_encoder_tokens=16)
    assert [len(ids) for ids in manager.get_block_ids("r")] == [2, 4]


def test_encoder_tokens_count_before_anything_is_taken(make_group_manager):
    manager = make_group_manager(("full",), ("cross",), num_blocks=5)
    request = Request("r", range(4))
    assert grow(manager, request, 4, num_encoder_tokens=16) is None
    assert manager.block_pool.get_num_free_blocks() == 4
    assert grow(manager, request, 4, num_encoder_tokens=12) is not None


def test_whole_sequence_counts_the_encoder_tokens(make_group_manager):
    manager = make_group_manager(("full",), ("cross",), num_blocks=8)
    options = {"num_encoder_tokens": 16, "full_sequence_must_fit": True}
    assert grow(manager, Request("r", range(16)), 4, **options) is None
    assert grow(manager, Request("s", range(12)), 4, **options) is not None


def test_nothing_is_shared_beside_cross_attention(make_group_manager):
    manager = make_group_manager(("full",), ("cross",))
    assert not manager.enable_caching
    grow(manager, Request("r", range(9)), 9, num_encoder_tokens=8)
    assert manager.get_computed_blocks(Request("s", range(9)))[1] == 0
    assert not manager.block_pool.cached_blocks(0)


def test_hit_for_cross_attention_is_refused(make_group_manager):
    manager = make_group_manager(("full",), ("cross",))
    other = make_group_manager(("full",), ("full",))
    grow(other, Request("r", range(9)), 9)
    request = Request("s", range(9))
    blocks, num_hits = other.get_computed_blocks(request)
    with pytest.raises(ValueError, match="2 blocks for the cross attention of group 1"):
        manager.allocate_slots(request, 1, num_hits, blocks)


# -- Sinks


def test_sinks_lie_in_the_first_blocks_for_good(make_group_manager):
    manager = make_group_manager(("sink", 8), num_blocks=6)
    request = Request("r", range(9))
    assert grow(manager, request, 9).get_block_ids() == ([3, 4, 5],)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 3
    assert manager.get_computed_blocks(Request("s", range(9)))[1] == 8


def test_reset_leaves_every_group_its_sinks(make_group_manager):
    manager = make_group_manager(("sink", 8), ("sink", 4), num_blocks=12)

    def sinks():
        return [[block.block_id for block in m.sink_blocks] for m in manager._coordinator.managers]

    assert sinks() == [[1, 2], [3]]
    for _ in range(2):
        request = Request("r", range(9))
        grow(manager, request, 9)
        assert not manager.reset_prefix_cache()
        manager.free(request)
        assert manager.reset_prefix_cache()
        assert not manager.block_pool.cached_blocks(0)
    assert sinks() == [[1, 2], [3]]
    assert manager.block_pool.get_num_free_blocks() == 8


def test_sinks_larger_than_the_pool_are_refused(make_group_manager):
    with pytest.raises(ValueError, match="8 wanted, 5 are free"):
        make_group_manager(("sink", 32), num_blocks=6)


# -- Which manager serves a group


def test_mla_and_full_layers_with_a_window_keep_all_blocks():
    for spec in (
        MLAAttentionSpec(4, 1, 16, "float32"),
        FullAttentionSpec(4, 2, 8, "float32", sliding_window=4),
        FullAttentionSpec(4, 2, 8, "float32", attention_chunk_size=4),
    ):
        manager, request = manage(spec), Request("r", range(40))
        for _ in range(4):
            grow(manager, request, 10)
        assert 0 not in manager.get_block_ids("r")[0]


def test_layers_of_unlike_pages_are_managed_as_any_of_them():
    small = SlidingWindowSpec(4, 2, 8, "float32", sliding_window=4)
    large = SlidingWindowSpec(4, 4, 8, "float32", sliding_window=4)
    manager = manage(UniformTypeKVCacheSpecs.from_specs({"a": small, "b": large}))
    request = Request("r", range(40))
    grow(manager, request, 20)
    grow(manager, request, 1)
    assert manager.get_block_ids("r")[0][:4] == [0] * 4


def test_layers_that_keep_nothing_belong_to_no_group():
    with pytest.raises(ValueError, match="EncoderOnlyAttentionSpec, which no manager serves"):
        manage(EncoderOnlyAttentionSpec(4, 2, 8, "float32"))


# -- What all requests share


def test_common_prefix_counts_blocks_that_all_requests_hold(make_group_manager):
    manager = make_group_manager(("full",), ("window", 4))
    assert manager.get_num_common_prefix_blocks("a") == [0, 0]
    for name, tail in (("a", 50), ("b", 60)):
        request = Request(name, [*range(8), *range(tail, tail + 5)])
        blocks, num_hits = manager.get_computed_blocks(request)
        manager.allocate_slots(request, 13 - num_hits, num_hits, blocks)
    assert manager.get_num_common_prefix_blocks("a") == [2, 0]
    assert manager.get_num_common_prefix_blocks("b") == [2, 0]
    grow(manager, Request("c", range(90, 95)), 5)
    assert manager.get_num_common_prefix_blocks("a") == [0, 0]


def test_events_tell_what_every_group_stores_and_forgets(make_group_manager):
    manager = make_group_manager(("full",), ("window", 4), enable_kv_cache_events=True)
    request = Request("r", range(9))
    grow(manager, request, 9)
    stored = manager.take_events()
    assert [(type(event).__name__, event.group_idx) for event in stored] == [
        ("BlockStored", 0),
        ("BlockStored", 1),
    ]
    assert manager.take_events() == []
    manager.free(request)
    manager.reset_prefix_cache()
    assert [type(event).__name__ for event in manager.take_events()] == ["AllBlocksCleared"]
    assert make_group_manager(("full",)).take_events() == []
