"""Groups of recurrent layers: a block is a state."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import Request


def grow(manager, request, num_new, **options):
    new_blocks = manager.allocate_slots(request, num_new, **options)
    if new_blocks is not None:
        request.num_computed_tokens += num_new
    return new_blocks


def table(manager, request_id):
    return manager.get_block_ids(request_id)[-1]


def hashed(manager, request_id):
    return [block.block_hash is not None for block in manager.get_blocks(request_id).blocks[-1]]


def test_request_keeps_the_last_state_and_those_of_the_step(make_group_manager):
    manager = make_group_manager(("mamba",))
    request = Request("r", range(40))
    grow(manager, request, 10)
    assert table(manager, "r") == [1, 2, 3]
    grow(manager, request, 2)
    assert table(manager, "r") == [0, 0, 3]
    grow(manager, request, 1)
    assert [block_id == 0 for block_id in table(manager, "r")] == [True, True, False, False]
    assert manager.num_held_blocks("r") == 2


def test_last_state_alone_is_a_hit(make_group_manager):
    manager = make_group_manager(("mamba",))
    grow(manager, Request("first", range(20)), 20)
    ids = table(manager, "first")
    manager.block_pool.evict_blocks([*ids[:2], ids[4]])
    blocks, num_hits = manager.get_computed_blocks(Request("second", range(21)))
    assert (blocks.get_block_ids(), num_hits) == (([0, 0, 0, ids[3]],), 16)


def test_drafter_drops_no_state(make_group_manager):
    manager = make_group_manager(("full",), ("mamba",), use_eagle=True)
    grow(manager, Request("first", range(17)), 17)
    assert manager.get_computed_blocks(Request("second", range(17)))[1] == 12  # full has 16
    alone = make_group_manager(("mamba",), use_eagle=True)
    grow(alone, Request("first", range(17)), 17)
    assert alone.get_computed_blocks(Request("second", range(17)))[1] == 16


def test_drafts_have_states_of_their_own(make_group_manager):
    manager = make_group_manager(("mamba", 2))
    request = Request("r", range(6))
    grow(manager, request, 6)
    assert table(manager, "r") == [1, 2, 3, 4]
    assert grow(manager, request, 2).get_block_ids() == ([],)
    assert grow(manager, request, 1).get_block_ids() == ([5],)
    assert table(manager, "r") == [0, 2, 3, 4, 5]  # the first state was given back
    assert manager.peak_blocks(64, 8) == 5


def test_states_of_drafts_are_no_room_for_tokens(make_group_manager):
    manager = make_group_manager(("mamba", 2), enable_caching=False)
    request = Request("r", range(6))
    grow(manager, request, 4)
    assert grow(manager, request, 1).get_block_ids() == ([4],)


def test_loaded_state_is_whole_and_becomes_a_hit_where_a_block_ends(make_group_manager):
    manager = make_group_manager(("full",), ("mamba",))
    request = Request("r", range(30))
    manager.allocate_slots(request, 0, num_external_computed_tokens=12, delay_cache_blocks=True)
    assert [block_id == 0 for block_id in table(manager, "r")] == [True, True, False]
    manager.cache_blocks(request, 12)
    assert hashed(manager, "r") == [False, False, True]
    assert manager.get_computed_blocks(Request("s", range(13)))[1] == 12

    other = Request("o", range(500, 530))
    manager.allocate_slots(other, 0, num_external_computed_tokens=14, delay_cache_blocks=True)
    manager.cache_blocks(other, 14)
    assert not any(hashed(manager, "o"))
    other.num_computed_tokens = 14
    assert not manager.can_resume(other, 13)
    grow(manager, other, 2)
    assert hashed(manager, "o") == [False, False, False, True]


def test_state_is_no_hit_in_the_step_that_writes_it(make_group_manager):
    manager = make_group_manager(("full",), ("mamba",))
    manager.new_step_starts()
    grow(manager, Request("first", range(9)), 9)
    assert manager.get_computed_blocks(Request("second", range(9)))[1] == 0
    manager.new_step_starts()
    grow(manager, Request("other", range(50, 59)), 9)
    assert manager.get_computed_blocks(Request("second", range(9)))[1] == 8


def test_ranks_that_split_tokens_hold_whole_states(make_group_manager):
    manager = make_group_manager(("full", 0, 2), ("mamba", 0, 4), dcp_world_size=2)
    request = Request("r", range(16))
    grow(manager, request, 16)
    assert [len(ids) for ids in manager.get_block_ids("r")] == [4, 4]


def test_state_of_the_whole_length_takes_one_block(make_group_manager):
    manager = make_group_manager(("mamba", 0, 128))
    request = Request("r", range(100))
    for step in (50, 50):
        grow(manager, request, step)
    assert table(manager, "r") == [1]
    assert manager.peak_blocks(128, 50) == 1


@given(st.integers(0, 2), st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_peak_is_never_exceeded(make_group_manager, num_speculative, max_step, steps):
    manager = make_group_manager(("mamba", num_speculative))
    request = Request("r", range(128))
    for step in steps:
        grow(manager, request, min(step, max_step))
        assert manager.num_held_blocks("r") <= manager.peak_blocks(128, max_step)


def test_nothing_is_hashed_where_one_state_serves_a_whole_request(make_group_manager):
    manager = make_group_manager(("full",), ("mamba", 0, 130), max_model_len=130)
    assert not manager.enable_caching
    grow(manager, Request("r", range(9), hash_block_size=4), 9)  # not 2, which divides both
    assert not manager.block_pool.cached_blocks(0)
