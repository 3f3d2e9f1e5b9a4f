"""Groups that look back a bounded way: blocks that are passed are given back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import Request
from kvferry.topology.windows import first_kept_token

WINDOW = st.tuples(
    st.sampled_from(["window", "chunk"]), st.integers(1, 15), st.sampled_from([2, 3, 4])
)


def kept(group, num_computed):
    """First block of the group that is still needed."""
    kind, size, block_size = group
    name = "sliding_window" if kind == "window" else "attention_chunk_size"
    return first_kept_token(num_computed, **{name: size}) // block_size


def nulls(manager, request, group_id=0):
    return [block_id == 0 for block_id in manager.get_block_ids(request.request_id)[group_id]]


def grow(manager, request, num_new, **options):
    new_blocks = manager.allocate_slots(request, num_new, **options)
    if new_blocks is not None:
        request.num_computed_tokens += num_new
    return new_blocks


# -- Moving on


@given(
    st.lists(WINDOW, min_size=1, max_size=2), st.lists(st.integers(1, 12), min_size=1, max_size=15)
)
def test_exactly_the_blocks_that_are_passed_are_null_and_free(make_group_manager, groups, steps):
    manager = make_group_manager(("full",), *groups, num_blocks=400, max_model_len=256)
    request = Request("r", range(200))
    for step in steps:
        before = request.num_computed_tokens
        grow(manager, request, step)
        end = before + step
        tables = manager.get_block_ids("r")
        assert len(tables[0]) == -(-end // 4)
        for ids, group in zip(tables[1:], groups, strict=True):
            assert len(ids) == -(-end // group[2])
            assert [block_id == 0 for block_id in ids] == [
                index < kept(group, before) for index in range(len(ids))
            ]
        held = [block_id for ids in tables for block_id in ids if block_id]
        assert len(set(held)) == len(held) == manager.num_held_blocks("r")
        assert manager.block_pool.get_num_free_blocks() == 399 - len(held)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 399


@given(
    st.lists(WINDOW, min_size=1, max_size=2),
    st.integers(1, 8),
    st.lists(st.integers(1, 8), min_size=1, max_size=25),
)
def test_peak_is_never_exceeded(make_group_manager, groups, max_step, steps):
    manager = make_group_manager(("full",), *groups, num_blocks=400, max_model_len=256)
    request = Request("r", range(256))
    peak = manager.peak_blocks(sum(min(step, max_step) for step in steps), max_step)
    for step in steps:
        grow(manager, request, min(step, max_step))
        assert manager.num_held_blocks("r") <= peak


@given(WINDOW, st.integers(1, 8))
def test_peak_of_a_window_is_reached(make_group_manager, group, max_step):
    manager = make_group_manager(group, num_blocks=400, max_model_len=256)
    most = 0
    for start in range(1, 80):  # a step of the greatest size, after each number of tokens
        request = Request(f"r{start}", range(1000 * start, 1000 * start + 200))
        grow(manager, request, start)
        grow(manager, request, max_step)
        most = max(most, manager.num_held_blocks(request.request_id))
        manager.free(request)
    assert most == manager.peak_blocks(200, max_step)


def test_window_gives_blocks_back_even_if_the_call_then_fails(make_group_manager):
    manager = make_group_manager(("window", 4), num_blocks=6)
    request = Request("r", range(40))
    grow(manager, request, 20)
    assert manager.block_pool.get_num_free_blocks() == 0
    assert grow(manager, request, 20) is None  # 5 blocks wanted, 4 of 5 are given back
    assert manager.block_pool.get_num_free_blocks() == 4
    assert nulls(manager, request) == [True, True, True, True, False]
    assert grow(manager, request, 16) is not None


def test_passed_blocks_stay_hits_until_they_are_reused(make_group_manager):
    manager = make_group_manager(("window", 4))
    request = Request("r", range(20))
    grow(manager, request, 8)
    grow(manager, request, 12)
    assert nulls(manager, request) == [True, False, False, False, False]
    assert manager.get_computed_blocks(Request("s", [*range(4), 90]))[1] == 4


def test_passed_blocks_are_reused_tail_first(make_group_manager):
    manager = make_group_manager(("window", 1), num_blocks=4)
    request = Request("r", range(13))
    grow(manager, request, 12)
    first, second, third = manager.get_block_ids("r")[0]
    grow(manager, request, 1)
    assert manager.get_block_ids("r")[0] == [0, 0, 0, third]
    assert manager.block_pool.get_free_block_ids() == [second, first]


def test_request_longer_than_the_pool_fits_where_its_window_does(make_group_manager):
    manager = make_group_manager(("window", 8), num_blocks=6, max_model_len=128)
    request = Request("r", range(100))
    for _ in range(10):
        assert grow(manager, request, 10, full_sequence_must_fit=True) is not None


def test_whole_sequence_counts_what_a_window_holds_at_most(make_group_manager):
    manager = make_group_manager(("full",), ("window", 8), num_blocks=30)
    first = Request("r", range(96))
    # Of 29 blocks 24 or 25 for the full group, and 5 at most for the window and a step of 8.
    assert manager.allocate_slots(Request("q", range(97)), 8, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(first, 8, full_sequence_must_fit=True) is not None


def test_whole_sequence_counts_the_lookahead_of_its_steps(make_group_manager):
    manager = make_group_manager(("window", 8), num_blocks=5)
    options = {"num_lookahead_tokens": 4, "full_sequence_must_fit": True}
    assert manager.allocate_slots(Request("r", range(64)), 4, **options) is None
    assert manager.allocate_slots(Request("r", range(64)), 4, full_sequence_must_fit=True)


def test_nothing_is_reset_under_a_request_that_holds_null_blocks_alone(make_group_manager):
    manager = make_group_manager(("chunk", 8))
    request = Request("r", range(20))
    manager.allocate_slots(request, 0, num_external_computed_tokens=8)
    assert manager.get_block_ids("r") == ([0, 0],)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()


# -- Hits


def test_window_needs_its_last_blocks_only(make_group_manager):
    manager = make_group_manager(("window", 6))
    first = Request("first", range(20))
    grow(manager, first, 20)
    ids = manager.get_block_ids("first")[0]
    manager.block_pool.evict_blocks(ids[:2])
    second = Request("second", range(20))
    blocks, num_hits = manager.get_computed_blocks(second)
    assert (blocks.get_block_ids(), num_hits) == (([0, 0, *ids[2:4]],), 16)
    assert manager.allocate_slots(second, 4, num_hits, blocks).get_block_ids() == ([6],)
    assert [manager.block_pool.blocks[i].ref_cnt for i in ids] == [1, 1, 2, 2, 1]
    assert manager.block_pool.null_block.ref_cnt == 1


def test_window_finds_a_shorter_hit_left_of_a_hole(make_group_manager):
    manager = make_group_manager(("window", 6))
    grow(manager, Request("first", range(40)), 40)
    ids = manager.get_block_ids("first")[0]
    manager.block_pool.evict_blocks([ids[7], ids[5], ids[3]])
    blocks, num_hits = manager.get_computed_blocks(Request("second", range(37)))
    assert (blocks.get_block_ids(), num_hits) == (([0, *ids[1:3]],), 12)


def test_start_of_a_sequence_is_a_hit_although_shorter_than_the_window(make_group_manager):
    manager = make_group_manager(("window", 100))
    grow(manager, Request("first", range(12)), 12)
    assert manager.get_computed_blocks(Request("second", [*range(12), 90]))[1] == 12
    manager.block_pool.evict_blocks([1])
    assert manager.get_computed_blocks(Request("third", [*range(12), 90]))[1] == 0


def test_chunk_is_a_hit_up_to_its_first_miss_and_needs_nothing_before_it(make_group_manager):
    manager = make_group_manager(("chunk", 8))
    grow(manager, Request("first", range(24)), 24)
    ids = manager.get_block_ids("first")[0]
    assert manager.get_computed_blocks(Request("s", range(24)))[0].get_block_ids() == (
        [0, 0, 0, 0, ids[4]],
    )
    manager.block_pool.evict_blocks([ids[4]])
    blocks, num_hits = manager.get_computed_blocks(Request("t", range(24)))
    assert (blocks.get_block_ids(), num_hits) == (([0, 0, 0, 0],), 16)
    assert manager.get_computed_blocks(Request("other", range(500, 524)))[1] == 16


def test_chunk_that_begins_within_a_block_needs_that_block(make_group_manager):
    manager = make_group_manager(("chunk", 6))
    grow(manager, Request("first", range(12)), 12)
    ids = manager.get_block_ids("first")[0]
    # At 8 tokens, those from 6 on are needed: the block 4..7.
    assert manager.get_computed_blocks(Request("s", range(12)))[0].get_block_ids() == ([0, ids[1]],)
    manager.block_pool.evict_blocks([ids[1]])
    assert manager.get_computed_blocks(Request("t", range(12)))[1] == 4


# -- Loads from outside


def load(manager, request, num_external, **options):
    blocks, num_hits = manager.get_computed_blocks(request)
    new_blocks = manager.allocate_slots(
        request,
        0,
        num_hits,
        blocks,
        num_external_computed_tokens=num_external,
        delay_cache_blocks=True,
        **options,
    )
    if new_blocks is not None:
        request.num_computed_tokens = num_hits + num_external
    return new_blocks


def test_load_allocates_only_what_the_window_keeps(make_group_manager):
    manager = make_group_manager(("full",), ("window", 6))
    request = Request("r", range(21))
    assert load(manager, request, 20).get_block_ids() == ([1, 2, 3, 4, 5], [6, 7])
    assert nulls(manager, request, 1) == [True, True, True, False, False]
    assert manager.num_held_blocks("r") == 7


def test_load_needs_no_blocks_for_what_the_window_passes(make_group_manager):
    manager = make_group_manager(("window", 6), num_blocks=3)
    request = Request("r", range(21))
    assert load(manager, request, 20, reserved_blocks=1) is None
    assert load(manager, request, 20, full_sequence_must_fit=True) is None  # and one token more
    assert load(manager, request, 20) is not None


def test_whole_sequence_that_runs_counts_what_its_window_still_holds(make_group_manager):
    manager = make_group_manager(("window", 6), num_blocks=5)
    request = Request("r", range(64))
    for _ in range(8):
        assert grow(manager, request, 8, full_sequence_must_fit=True) is not None


def test_whole_sequence_after_a_hit_needs_what_the_window_will_hold(make_group_manager):
    manager = make_group_manager(("window", 8), num_blocks=5)
    first = Request("first", range(16))
    grow(manager, first, 16)
    manager.free(first)
    request = Request("r", range(64))
    blocks, num_hits = manager.get_computed_blocks(request)
    assert blocks.get_block_ids() == ([0, 0, 3, 4],)
    # Steps of 8 tokens hold 5 blocks at most, and there are 4; this one takes 2 beside the hit.
    options = {"num_new_computed_tokens": num_hits, "new_computed_blocks": blocks}
    assert manager.allocate_slots(request, 8, full_sequence_must_fit=True, **options) is None
    assert manager.allocate_slots(request, 8, **options) is not None


def test_block_that_a_load_fills_in_part_never_becomes_a_hit(make_group_manager):
    manager = make_group_manager(("window", 4))
    request = Request("r", range(30))
    load(manager, request, 20)  # tokens 17 to 19, of the block 16..19
    manager.cache_blocks(request, 20)
    assert not manager.block_pool.cached_blocks()
    assert manager.get_computed_blocks(Request("s", range(21)))[1] == 0
    grow(manager, request, 10)
    manager.cache_blocks(request, 30)
    hashes = Request("t", range(30), hash_block_size=4).block_hashes
    assert set(manager.block_pool.cached_blocks()) == set(hashes[5:7])


def test_block_that_a_load_fills_wholly_becomes_a_hit(make_group_manager):
    manager = make_group_manager(("window", 6))
    request = Request("r", range(21))
    load(manager, request, 20)  # tokens 15 to 19
    manager.cache_blocks(request, 20)
    hashes = Request("t", range(20), hash_block_size=4).block_hashes
    assert set(manager.block_pool.cached_blocks()) == {hashes[4]}


@given(WINDOW, st.integers(0, 30), st.integers(1, 40), st.integers(1, 20))
def test_hashed_blocks_hold_computed_or_loaded_tokens_only(
    make_group_manager, group, num_local, num_external, num_new
):
    manager = make_group_manager(("full", 0, group[2]), group, num_blocks=200)
    filler = Request("filler", range(num_local + 1))
    grow(manager, filler, num_local + 1)
    manager.free(filler)
    request = Request("r", [*range(num_local), *range(500, 570)])
    local = manager.get_computed_blocks(request)[1]
    load(manager, request, num_external)
    num_ready = local + num_external
    manager.cache_blocks(request, num_ready)
    grow(manager, request, num_new)
    kind, size, block_size = group
    name = "sliding_window" if kind == "window" else "attention_chunk_size"
    first_loaded = max(local, first_kept_token(num_ready, **{name: size}))
    filled = {*range(first_loaded, num_ready + num_new)}
    first_held = kept(group, num_ready)
    for index, block in enumerate(manager.get_blocks("r").blocks[1]):
        tokens = range(index * block_size, (index + 1) * block_size)
        assert block.is_null == (index < first_held)
        if not block.is_null:
            is_hit = tokens.stop <= local
            assert (block.block_hash is not None) == (is_hit or filled.issuperset(tokens))


def test_local_hits_that_the_load_passes_are_not_taken(make_group_manager):
    manager = make_group_manager(("full",), ("window", 4))
    first = Request("first", range(8))
    grow(manager, first, 8)
    manager.free(first)
    free = manager.block_pool.get_num_free_blocks()
    request = Request("r", range(21))
    load(manager, request, 8)  # 8 tokens hit, 8 loaded, of which the window keeps 13 to 15
    assert nulls(manager, request, 1) == [True, True, True, False]
    assert manager.block_pool.get_num_free_blocks() == free - 4 - 1


def test_free_hits_that_the_load_passes_use_no_capacity(make_group_manager):
    manager = make_group_manager(("window", 4), num_blocks=3)
    first = Request("first", range(8))
    grow(manager, first, 8)
    manager.free(first)
    grow(manager, Request("other", range(50, 54)), 4)
    request = Request("r", range(17))
    assert manager.get_computed_blocks(request)[1] == 4  # in the only free block
    assert load(manager, request, 12) is not None
    assert nulls(manager, request) == [True, True, True, False]


def test_failed_load_of_a_window_cannot_go_on_from_a_part_of_it(make_group_manager):
    manager = make_group_manager(("full",), ("window", 6))
    request = Request("r", range(30))
    load(manager, request, 20)
    manager.cache_blocks(request, 16)
    assert not manager.can_resume(request, 16)
    assert manager.can_resume(request, 20)
    request.num_computed_tokens = 16
    free = manager.block_pool.get_num_free_blocks()
    with pytest.raises(
        ValueError, match="16 computed tokens, but its windows hold what follows 20"
    ):
        manager.allocate_slots(request, 1)
    assert manager.block_pool.get_num_free_blocks() == free
    manager.free(request)
    request.num_computed_tokens = 0
    assert not manager.can_resume(request, 0)
    assert grow(manager, request, 30) is not None


def test_group_that_is_skipped_is_never_hashed_while_the_request_lives(make_group_manager):
    manager = make_group_manager(("full",), ("window", 6))
    request = Request("r", range(30))
    load(manager, request, 20)
    manager.cache_blocks(request, 20, skip_groups={0})
    grow(manager, request, 9)
    assert not manager.block_pool.cached_blocks(0)
    assert len(manager.block_pool.cached_blocks(1)) == 3
    manager.free(request)
    request.num_computed_tokens = 0
    grow(manager, request, 30)
    assert len(manager.block_pool.cached_blocks(0)) == 7


def test_unknown_group_to_skip_is_refused(make_group_manager):
    manager = make_group_manager(("full",), ("window", 6))
    request = Request("r", range(30))
    load(manager, request, 20)
    with pytest.raises(ValueError, match=r"skip_groups: \[2\] are no KV cache groups; there are 2"):
        manager.cache_blocks(request, 20, skip_groups=[1, 2])
    manager.cache_blocks(request, 20)
    assert manager.block_pool.cached_blocks(1)


def test_external_tokens_come_with_admission_only(make_group_manager):
    manager = make_group_manager(("full",), ("window", 6))
    request = Request("r", range(30))
    grow(manager, request, 8)
    with pytest.raises(ValueError, match="holds blocks already; give the hit and external tokens"):
        manager.allocate_slots(request, 1, num_external_computed_tokens=8)


@pytest.mark.parametrize(
    ("first_filled", "num_hit"), [(None, 0), ((0, 0), 20), ((0, 8), 20), ((0, 9), 0)]
)
def test_a_block_that_a_load_filled_from_its_beginning_is_a_hit_and_no_other(
    make_group_manager, first_filled, num_hit
):
    manager = make_group_manager(("full",), ("window", 10))
    request = Request("r", range(21))
    load(manager, request, 20)
    manager.cache_blocks(request, 20, first_filled=first_filled)
    # A hit of 20 tokens needs those from 11 on, which lie in the blocks from token 8 on.
    assert manager.get_computed_blocks(Request("s", range(21)))[1] == num_hit


def test_a_last_block_that_a_load_filled_from_its_beginning_is_a_hit_at_once(make_group_manager):
    manager = make_group_manager(("window", 4))
    request = Request("r", range(21))
    load(manager, request, 20)  # the window has tokens 17 to 19, the load brought the whole block
    manager.cache_blocks(request, 20, first_filled=(16,))
    assert manager.get_computed_blocks(Request("s", range(21)))[1] == 20


def test_a_block_of_the_local_hit_that_was_evicted_meanwhile_is_no_part_of_the_load(
    make_group_manager,
):
    manager = make_group_manager(("full",), ("window", 6))
    before = Request("before", range(9))
    manager.allocate_slots(before, 9)
    manager.free(before)
    request = Request("r", range(21))
    hits, num_local = manager.get_computed_blocks(request)
    manager.allocate_slots(
        request,
        0,
        num_local,
        hits,
        num_external_computed_tokens=20 - num_local,
        delay_cache_blocks=True,
    )
    request.num_computed_tokens = 20
    evicted = manager.get_block_ids("r")[0][0]
    manager.block_pool.evict_blocks([evicted])
    manager.cache_blocks(request, 20, first_filled=(0, 0))
    assert manager.block_pool.blocks[evicted].block_hash is None
    assert manager.get_blocks("r").blocks[0][-1].block_hash is not None


def test_a_load_that_speaks_of_other_groups_is_refused(make_group_manager):
    manager = make_group_manager(("full",), ("window", 10))
    request = Request("r", range(21))
    load(manager, request, 20)
    for wrong in ((0,), (0, 0, 0), (0, -9)):
        with pytest.raises(ValueError, match=r"first_filled: .* for 2 KV cache groups"):
            manager.cache_blocks(request, 20, first_filled=wrong)
