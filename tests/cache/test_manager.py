"""The KV cache manager for one full-attention group."""

import gc
import weakref

import pytest

from kvferry.cache import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
)


def state(manager):
    """All that a call which fails must leave alone."""
    pool = manager.block_pool
    return (
        pool.get_free_block_ids(),
        [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        dict(pool.cached_blocks()),
    )


def admit(manager, request, num_new_tokens=None, **options):
    """Looks up, allocates, and moves the request's computed tokens on, as a scheduler does."""
    blocks, num_hits = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hits if num_new_tokens is None else num_new_tokens
    new_blocks = manager.allocate_slots(request, num_new, num_hits, blocks, **options)
    if new_blocks is not None:
        external = options.get("num_external_computed_tokens", 0)
        request.num_computed_tokens = num_hits + external + num_new
    return new_blocks


def finish(manager, request):
    manager.free(request)
    request.num_computed_tokens = 0


# -- Admission and growth


def test_request_gets_blocks_for_its_tokens_and_grows_only_when_they_are_full(
    make_manager, make_request
):
    manager, request = make_manager(), make_request(range(6))
    assert admit(manager, request).get_block_ids() == ([1, 2],)
    for token, new_ids in [(6, []), (7, []), (8, [3]), (9, [])]:
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1).get_block_ids() == (new_ids,)
        request.num_computed_tokens += 1
    assert manager.get_block_ids(request.request_id) == ([1, 2, 3],)
    assert manager.usage == pytest.approx(0.3)


def test_chunked_prefill_allocates_chunk_by_chunk(make_manager, make_request):
    manager, request = make_manager(), make_request(range(12))
    assert admit(manager, request, 5).get_block_ids() == ([1, 2],)
    assert manager.allocate_slots(request, 7).get_block_ids() == ([3],)


def test_too_few_blocks_change_nothing(make_manager, make_request):
    manager = make_manager(num_blocks=4)
    assert admit(manager, make_request(range(8))) is not None
    before = state(manager)
    waiting = make_request(range(50, 58))
    assert admit(manager, waiting) is None
    assert state(manager) == before
    assert manager.get_block_ids(waiting.request_id) == ([],)
    assert admit(manager, waiting, 4) is not None


def test_lookahead_makes_room_up_to_the_model_length(make_manager, make_request):
    manager = make_manager(max_model_len=10)
    request = make_request(range(7))
    assert admit(manager, request, num_lookahead_tokens=2).get_block_ids() == ([1, 2, 3],)
    assert manager.allocate_slots(request, 3, num_lookahead_tokens=50).get_block_ids() == ([],)


def test_reserved_blocks_are_left_for_others(make_manager, make_request):
    manager = make_manager(num_blocks=5)
    request = make_request(range(8))
    assert admit(manager, request, reserved_blocks=3) is None
    assert admit(manager, request, reserved_blocks=2) is not None
    assert manager.block_pool.get_num_free_blocks() == 2


def test_full_sequence_must_fit_refuses_what_only_the_first_chunk_would_fit(
    make_manager, make_request
):
    manager = make_manager(num_blocks=4)
    request = make_request(range(13))
    assert admit(manager, request, 4, full_sequence_must_fit=True) is None
    assert admit(manager, request, 4) is not None
    assert admit(manager, make_request(range(50, 58)), 4, full_sequence_must_fit=True) is not None


def test_full_sequence_counts_its_hits_once(make_manager, make_request):
    manager = make_manager(num_blocks=5)
    first = make_request(range(16))
    admit(manager, first)
    finish(manager, first)
    # 4 blocks in all: 3 hits, which are free, and 1 new one.
    assert admit(manager, make_request(range(16)), 4, full_sequence_must_fit=True) is not None


# -- The prefix cache


def test_shared_prefix_is_a_hit_while_held_and_after_it_was_freed(make_manager, make_request):
    manager = make_manager()
    first = make_request([1, 2, 3, 4, 5, 6, 7, 8, 9])
    admit(manager, first)
    second = make_request([1, 2, 3, 4, 5, 6, 7, 8, 10])
    blocks, num_hits = manager.get_computed_blocks(second)
    assert (blocks.get_block_ids(), num_hits) == (([1, 2],), 8)
    assert manager.allocate_slots(second, 1, num_hits, blocks).get_block_ids() == ([4],)
    assert [manager.block_pool.blocks[i].ref_cnt for i in (1, 2, 3, 4)] == [2, 2, 1, 1]
    manager.free(first)
    manager.free(second)
    assert manager.get_computed_blocks(make_request(range(1, 10)))[1] == 8


def test_last_token_is_always_recomputed(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request(range(8)))
    assert manager.get_computed_blocks(make_request(range(8)))[1] == 4
    assert manager.get_computed_blocks(make_request(range(9)))[1] == 8
    assert manager.get_computed_blocks(make_request(range(4)))[1] == 0


@pytest.mark.parametrize("options", [{"cache_salt": "a"}, {"lora_name": "a"}])
def test_other_salts_and_adapters_share_nothing(make_manager, make_request, options):
    manager = make_manager()
    admit(manager, make_request(range(9), **options))
    assert manager.get_computed_blocks(make_request(range(9)))[1] == 0
    assert manager.get_computed_blocks(make_request(range(9), **options))[1] == 8


def test_prompt_logprobs_read_no_hit_but_leave_some(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request(range(9)))
    with_logprobs = make_request(range(9), prompt_logprobs=0)
    assert manager.get_computed_blocks(with_logprobs)[0].get_block_ids() == ([],)
    fresh = make_manager()
    admit(fresh, make_request(range(9), prompt_logprobs=1))
    assert fresh.get_computed_blocks(make_request(range(9)))[1] == 8


def test_output_tokens_become_hits_for_the_next_turn(make_manager, make_request):
    manager, request = make_manager(), make_request(range(6))
    admit(manager, request)
    for token in (6, 7):
        request.append_output_token_ids(token)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    manager.free(request)
    assert manager.get_computed_blocks(make_request(range(12)))[1] == 8


def test_drafts_are_never_cached(make_manager, make_request):
    manager, request = make_manager(), make_request(range(7))
    admit(manager, request, 12)  # 7 tokens and 5 drafts
    assert len(manager.block_pool.cached_blocks()) == 1


def test_tail_is_evicted_before_the_head(make_manager, make_request):
    manager = make_manager(num_blocks=5)
    first = make_request(range(16))
    admit(manager, first)
    manager.free(first)
    admit(manager, make_request(range(50, 58)))
    assert manager.get_computed_blocks(make_request(range(16)))[1] == 8


def test_free_hits_consume_capacity(make_manager, make_request):
    manager = make_manager(num_blocks=5)
    first = make_request(range(8))
    admit(manager, first)
    manager.free(first)
    # 4 free blocks, 2 of which are the hit: 2 remain for new ones, not 4.
    longer = make_request([*range(8), *range(50, 59)])
    before = state(manager)
    assert admit(manager, longer) is None
    assert state(manager) == before
    assert admit(manager, longer, 8) is not None
    assert manager.get_block_ids(longer.request_id)[0][:2] == [1, 2]


def test_hits_that_others_hold_consume_no_capacity(make_manager, make_request):
    manager = make_manager(num_blocks=5)
    admit(manager, make_request(range(9)))
    assert admit(manager, make_request([*range(8), 50])) is not None


def test_growing_never_evicts_the_hit_it_is_admitted_with(make_manager, make_request):
    manager = make_manager(num_blocks=4)
    first = make_request(range(8))
    admit(manager, first)
    manager.free(first)
    request = make_request([*range(4), *range(50, 58)])
    assert admit(manager, request) is not None
    table = manager.get_block_ids(request.request_id)[0]
    assert len(set(table)) == 3
    assert table[0] == 1


def test_stale_hit_is_refused_and_not_handed_to_the_wrong_request(make_manager, make_request):
    manager = make_manager(num_blocks=4)
    first = make_request(range(12))
    admit(manager, first)
    manager.free(first)
    late = make_request(range(12))
    blocks, num_hits = manager.get_computed_blocks(late)
    admit(manager, make_request(range(50, 62)))
    before = state(manager)
    with pytest.raises(ValueError, match="call get_computed_blocks again"):
        manager.allocate_slots(late, 4, num_hits, blocks)
    assert state(manager) == before


def test_hit_and_its_number_of_tokens_must_agree(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request(range(9)))
    second = make_request(range(9))
    blocks, _ = manager.get_computed_blocks(second)
    before = state(manager)
    for num_tokens in (0, 4, 7, 12):
        with pytest.raises(ValueError, match="do not make up num_new_computed_tokens"):
            manager.allocate_slots(second, 1, num_tokens, blocks)
    with pytest.raises(ValueError, match="0 blocks of 4 tokens"):
        manager.allocate_slots(second, 1, 8)
    assert state(manager) == before


def test_hits_come_with_admission_only(make_manager, make_request):
    manager = make_manager()
    request = make_request(range(9))
    admit(manager, request)
    blocks, num_hits = manager.get_computed_blocks(make_request(range(9)))
    with pytest.raises(ValueError, match="holds blocks already"):
        manager.allocate_slots(request, 1, num_hits, blocks)
    request.append_output_token_ids(9)
    empty = manager.create_empty_block_list()
    assert manager.allocate_slots(request, 1, 0, empty.new_empty()) is not None


def test_caching_can_be_off(make_manager, make_request):
    manager = make_manager(enable_caching=False)
    first = make_request(range(9), hash_block_size=3)  # a block size that nobody asks about
    admit(manager, first)
    manager.cache_blocks(first, 8)
    assert manager.get_computed_blocks(make_request(range(9)))[1] == 0
    manager.free(first)
    assert manager.get_computed_blocks(make_request(range(9)))[1] == 0
    assert not manager.block_pool.cached_blocks()


def test_reset_forgets_hits_once_nothing_is_held(make_manager, make_request):
    manager, request = make_manager(), make_request(range(9))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request(range(9)))[1] == 0


def test_stats_count_lookups_since_the_last_call(make_manager, make_request):
    manager = make_manager(log_stats=True)
    request = make_request(range(9))
    admit(manager, request)
    admit(manager, make_request(range(9)))
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (2, 18, 8, False)
    assert stats.hit_rate == pytest.approx(8 / 18)
    assert manager.make_prefix_cache_stats().hit_rate == 0.0
    empty = make_manager(log_stats=True)
    empty.reset_prefix_cache()
    assert empty.make_prefix_cache_stats().reset
    assert make_manager().make_prefix_cache_stats() is None


# -- Blocks that something outside fills


def test_external_blocks_are_hits_only_after_they_were_filled(make_manager, make_request):
    manager, request = make_manager(), make_request(range(13))
    new_blocks = admit(
        manager, request, 0, num_external_computed_tokens=12, delay_cache_blocks=True
    )
    assert new_blocks.get_block_ids() == ([1, 2, 3],)
    assert manager.get_blocks(request.request_id).get_unhashed_block_ids() == [1, 2, 3]
    assert manager.get_computed_blocks(make_request(range(13)))[1] == 0
    manager.cache_blocks(request, 12)
    assert manager.get_computed_blocks(make_request(range(13)))[1] == 12
    manager.cache_blocks(request, 12)  # again: nothing new
    assert manager.allocate_slots(request, 1).get_block_ids() == ([4],)


def test_load_after_a_local_hit_leaves_the_hit_shared(make_manager, make_request):
    manager = make_manager()
    admit(manager, make_request(range(5)))
    request = make_request(range(13))
    new_blocks = admit(manager, request, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    table = manager.get_blocks(request.request_id)
    assert table.get_block_ids() == ([1, *new_blocks.get_block_ids()[0]],)
    assert table.get_unhashed_block_ids() == new_blocks.get_block_ids()[0]


def test_failed_load_leaves_no_trace_in_the_cache(make_manager, make_request):
    manager, request = make_manager(), make_request(range(13))
    admit(manager, request, 0, num_external_computed_tokens=12, delay_cache_blocks=True)
    finish(manager, request)
    assert not manager.block_pool.cached_blocks()
    assert manager.block_pool.get_num_free_blocks() == 10
    assert admit(manager, request) is not None


def test_valid_prefix_of_a_failed_load_is_kept_and_the_rest_computed(make_manager, make_request):
    manager, request = make_manager(), make_request(range(13))
    admit(manager, request, 0, num_external_computed_tokens=12, delay_cache_blocks=True)
    manager.cache_blocks(request, 4)
    request.num_computed_tokens = 4
    assert manager.get_computed_blocks(make_request(range(13)))[1] == 4
    assert manager.allocate_slots(request, 9).get_block_ids() == ([4],)
    assert manager.get_computed_blocks(make_request(range(13)))[1] == 12


def test_cache_blocks_refuses_tokens_that_are_not_there(make_manager, make_request):
    manager, request = make_manager(), make_request(range(13))
    with pytest.raises(ValueError, match="holds no blocks"):
        manager.cache_blocks(request, 4)
    admit(manager, request, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    for num_tokens in (-1, 9, 14):
        with pytest.raises(ValueError, match=f"num_computed_tokens: {num_tokens}, but it has 13"):
            manager.cache_blocks(request, num_tokens)
    assert not manager.block_pool.cached_blocks()


# -- Freeing


def test_freeing_what_was_never_admitted_does_nothing(make_manager, make_request):
    manager, request = make_manager(), make_request(range(9))
    manager.free(request)
    manager.free(request)
    assert admit(manager, request) is not None


def test_freeing_twice_raises_until_the_request_is_admitted_again(make_manager, make_request):
    manager, request = make_manager(), make_request(range(9))
    admit(manager, request)
    finish(manager, request)
    before = state(manager)
    with pytest.raises(ValueError, match="freed twice"):
        manager.free(request)
    assert state(manager) == before
    admit(manager, request)
    finish(manager, request)


def test_new_request_under_a_used_id_is_a_new_request(make_manager):
    manager = make_manager()
    first = Request("same", range(9))
    admit(manager, first)
    manager.free(first)
    manager.free(Request("same", range(9)))  # aborted before it was admitted


def test_freed_requests_are_not_kept_alive(make_manager, make_request):
    manager = make_manager()
    request = make_request(range(9))
    admit(manager, request)
    manager.free(request)
    watcher = weakref.ref(request)
    del request
    gc.collect()
    assert watcher() is None


def test_growing_a_freed_request_raises(make_manager, make_request):
    manager, request = make_manager(), make_request(range(9))
    admit(manager, request)
    manager.free(request)
    before = state(manager)
    with pytest.raises(ValueError, match="9 computed tokens and no blocks"):
        manager.allocate_slots(request, 1)
    assert state(manager) == before


def test_unknown_request_has_no_blocks(make_manager):
    manager = make_manager()
    assert manager.get_block_ids("nobody") == ([],)
    assert manager.get_blocks("nobody").get_block_ids(allow_none=True) is None


def test_blocks_that_were_read_do_not_change_with_the_request(make_manager, make_request):
    manager, request = make_manager(), make_request(range(4))
    admit(manager, request)
    before = manager.get_blocks(request.request_id)
    request.append_output_token_ids(4)
    manager.allocate_slots(request, 1)
    assert before.get_block_ids() == ([1],)


# -- Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_new_tokens": 0}, "nothing to allocate"),
        ({"num_new_tokens": -1}, "negative"),
        ({"num_new_tokens": 1, "num_lookahead_tokens": -1}, "negative"),
        ({"num_new_tokens": 1, "reserved_blocks": -1}, "negative"),
        ({"num_new_tokens": 1, "num_external_computed_tokens": -1}, "negative"),
        ({"num_new_tokens": 1, "num_new_computed_tokens": -4}, "negative"),
        ({"num_new_tokens": 65}, "65 tokens are more than max_model_len=64"),
        ({"num_new_tokens": 1, "num_external_computed_tokens": 64}, "65 tokens are more"),
        (
            {"num_new_tokens": 1, "num_encoder_tokens": 1},
            "num_encoder_tokens: 1, but no KV cache group is cross",
        ),
    ],
)
def test_bad_numbers_are_refused_and_change_nothing(make_manager, make_request, arguments, message):
    manager, request = make_manager(num_blocks=30), make_request(range(80))
    before = state(manager)
    with pytest.raises(ValueError, match=message):
        manager.allocate_slots(request, **arguments)
    assert state(manager) == before
    manager.free(request)  # holds nothing


@pytest.mark.parametrize("bad", [{"hash_block_size": 3}, {"tokens": [1, 2, 3, -1]}])
def test_request_that_cannot_be_hashed_gets_no_blocks(make_manager, make_request, bad):
    manager = make_manager()
    request = make_request(bad.pop("tokens", range(9)), **bad)
    before = state(manager)
    for call in (manager.get_computed_blocks, lambda request: manager.allocate_slots(request, 4)):
        with pytest.raises(ValueError, match=r"hashed per 3 tokens|a token id is an integer"):
            call(request)
    assert state(manager) == before


@pytest.mark.parametrize("option", ["max_model_len", "dcp_world_size", "pcp_world_size"])
def test_lengths_and_world_sizes_must_be_positive(make_manager, option):
    with pytest.raises(ValueError, match=f"{option}: 0 is less than 1"):
        make_manager(**{option: 0})


def test_config_that_no_manager_serves_is_refused():
    class OddSpec(AttentionSpec):
        def max_memory_usage_bytes(self, limits):
            return 0

    odd = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer.0"], OddSpec(4, 1, 8, "float32"))])
    with pytest.raises(ValueError, match="OddSpec, which no manager serves; supported: FullAtt"):
        KVCacheManager(odd, 64)
