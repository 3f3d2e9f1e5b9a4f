"""Hits of several groups, against a search through all lengths."""

from math import gcd, lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import Request

KINDS = {
    "full": lambda n, size: 0,
    "window": lambda n, size: max(0, n - size + 1),
    "chunk": lambda n, size: n - n % size,
    "mamba": lambda n, size: max(0, n - 1),
}
"""First token that the tokens from ``n`` on attend to."""

GROUP = st.one_of(
    st.tuples(st.just("full"), st.just(0), st.sampled_from([2, 3, 4])),
    st.tuples(st.sampled_from(["window", "chunk"]), st.integers(1, 15), st.sampled_from([2, 3, 4])),
    st.tuples(st.just("mamba"), st.integers(0, 2), st.sampled_from([2, 4, 6])),
)
GROUPS = st.lists(GROUP, min_size=1, max_size=3)


def admit(manager, request, num_new=None, **options):
    blocks, num_hits = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hits if num_new is None else num_new
    new_blocks = manager.allocate_slots(request, num_new, num_hits, blocks, **options)
    assert new_blocks is not None
    request.num_computed_tokens = (
        num_hits + options.get("num_external_computed_tokens", 0) + num_new
    )
    return num_hits


def finish(manager, request):
    manager.free(request)
    request.num_computed_tokens = 0


def longest_hit(manager, groups, request, shards, use_eagle):
    """Tokens of the longest hit, by trying all lengths."""
    sizes = [size if kind == "mamba" else size * shards for kind, _, size in groups]
    hash_size = gcd(*sizes)
    hashes = request.hash_blocks(hash_size)
    for num_tokens in range(request.num_tokens - 1, 0, -1):
        if num_tokens % lcm(*sizes):
            continue
        for group_id, ((kind, limit, _), size) in enumerate(zip(groups, sizes, strict=True)):
            end = num_tokens // size
            if use_eagle and kind != "mamba":
                end += 1
                last = request.num_tokens - (len(groups) == 1)
                if end * size > last // hash_size * hash_size:
                    break
            cached = manager.block_pool.cached_blocks(group_id)
            first = KINDS[kind](num_tokens, limit) // size
            if any(
                hashes[(i + 1) * size // hash_size - 1] not in cached for i in range(first, end)
            ):
                break
        else:
            return num_tokens
    return 0


@given(
    GROUPS,
    st.integers(1, 2),
    st.booleans(),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(0, 60),
    st.sets(st.integers(1, 150)),
)
def test_hit_is_the_longest_that_all_groups_have(
    make_group_manager, groups, shards, use_eagle, len_a, len_b, shared, evicted
):
    manager = make_group_manager(
        *groups, num_blocks=400, dcp_world_size=shards, use_eagle=use_eagle
    )
    tokens_b = [*range(min(shared, len_b)), *range(1000, 1000 + len_b - min(shared, len_b))]
    for tokens in (range(len_a), tokens_b):
        request = Request(f"filler-{tokens[-1]}", tokens)
        admit(manager, request)
        finish(manager, request)
    manager.block_pool.evict_blocks(evicted)
    request = Request("looked-up", range(60))
    blocks, num_hits = manager.get_computed_blocks(request)
    assert num_hits == longest_hit(manager, groups, request, shards, use_eagle)

    hashes = request.block_hashes
    sizes = [size if kind == "mamba" else size * shards for kind, _, size in groups]
    for (kind, limit, _), size, found in zip(groups, sizes, blocks.blocks, strict=True):
        stride = size // gcd(*sizes)
        first = KINDS[kind](num_hits, limit) // size
        assert [block.is_null for block in found] == [i < first for i in range(num_hits // size)]
        for index, block in enumerate(found[first:], first):
            assert block.block_hash == hashes[(index + 1) * stride - 1]


@given(GROUPS, st.booleans(), st.integers(1, 60), st.lists(st.integers(1, 20), max_size=8))
def test_all_that_a_hit_can_need_is_left_behind_whatever_the_steps(
    make_group_manager, groups, use_eagle, num_tokens, steps
):
    manager = make_group_manager(*groups, num_blocks=400, use_eagle=use_eagle)
    first = Request("first", range(num_tokens))
    for step in [*steps, num_tokens]:
        num_new = min(step, num_tokens - first.num_computed_tokens)
        if num_new:
            assert manager.allocate_slots(first, num_new) is not None
            first.num_computed_tokens += num_new
    hit = (
        num_tokens // lcm(*(size for _, _, size in groups)) * lcm(*(size for _, _, size in groups))
    )
    matched = [size for kind, _, size in groups if use_eagle and kind != "mamba"]
    while hit and any(hit + size > num_tokens for size in matched):
        hit -= lcm(*(size for _, _, size in groups))
    assert manager.get_computed_blocks(Request("longer", range(num_tokens + 1)))[1] == hit


def test_hit_ends_where_the_weakest_group_ends(make_group_manager):
    manager = make_group_manager(("full",), ("window", 5))
    first = Request("first", range(16))
    admit(manager, first)
    finish(manager, first)
    full, window = manager.get_computed_blocks(Request("second", range(17)))[0].blocks
    assert [block.is_null for block in window] == [True, True, True, False]
    manager.block_pool.evict_blocks([window[3].block_id])
    blocks, num_hits = manager.get_computed_blocks(Request("third", range(17)))
    assert num_hits == 12
    assert blocks.blocks[0] == full[:3]
    manager.block_pool.evict_blocks([full[1].block_id])
    assert manager.get_computed_blocks(Request("fourth", range(17)))[1] == 4


def test_groups_of_unlike_block_sizes_meet_at_their_common_multiple(make_group_manager):
    manager = make_group_manager(("full", 0, 4), ("window", 3, 6))
    admit(manager, Request("first", range(23)))
    second = Request("second", range(24))
    blocks, num_hits = manager.get_computed_blocks(second)
    assert num_hits == 12
    assert [len(group) for group in blocks.blocks] == [3, 2]
    assert len(second.block_hashes) == 12  # per two tokens, the greatest common divisor


def test_blocks_that_no_hit_can_need_are_not_hashed(make_group_manager):
    manager = make_group_manager(("full", 0, 8), ("window", 3, 2))
    request = Request("first", range(14))
    admit(manager, request)
    full, window = manager.get_blocks("first").blocks
    # Hits are multiples of 8 tokens, and need the window's last block before that.
    assert [block.block_hash is not None for block in window] == [i == 3 for i in range(7)]
    assert [block.block_hash is not None for block in full] == [True, False]


def test_block_after_a_hit_is_hashed_for_a_drafter(make_group_manager):
    manager = make_group_manager(("full", 0, 8), ("window", 3, 2), use_eagle=True)
    admit(manager, Request("first", range(17)))
    window = manager.get_blocks("first").blocks[1]
    assert [i for i, block in enumerate(window) if block.block_hash is not None] == [3, 4, 7]
    assert manager.get_computed_blocks(Request("second", range(17)))[1] == 8


@pytest.mark.parametrize("kind", ["full", "window"])
def test_drafter_has_the_last_matched_block_computed_again(make_group_manager, kind):
    manager = make_group_manager((kind, 5), use_eagle=True)
    admit(manager, Request("first", range(16)))
    assert manager.get_computed_blocks(Request("same", range(16)))[1] == 8
    assert manager.get_computed_blocks(Request("longer", range(17)))[1] == 12
    assert manager.get_computed_blocks(Request("other", [*range(12), *range(90, 99)]))[1] == 8


def test_drafter_drops_the_last_block_of_a_prompt_once_where_groups_are_several(
    make_group_manager,
):
    manager = make_group_manager(("full",), ("window", 5), use_eagle=True)
    admit(manager, Request("first", range(16)))
    assert manager.get_computed_blocks(Request("same", range(16)))[1] == 12


@pytest.mark.parametrize("shards", [{"dcp_world_size": 3}, {"pcp_world_size": 3}])
def test_ranks_that_split_tokens_make_blocks_longer(make_group_manager, shards):
    manager = make_group_manager(("full",), ("window", 5), **shards)
    request = Request("first", range(25))
    admit(manager, request)
    assert [len(ids) for ids in manager.get_block_ids("first")] == [3, 3]
    assert manager.get_computed_blocks(Request("second", range(25)))[1] == 24
    request.append_output_token_ids(25)
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids("first")[1][0] == 0  # 21 is the first token kept


def test_hits_of_all_groups_are_taken_before_any_group_allocates(make_group_manager):
    manager = make_group_manager(("full",), ("full",), num_blocks=9)
    first = Request("first", range(8))
    admit(manager, first)
    finish(manager, first)
    # 8 free blocks, 4 of them hits of the two groups: a group that grew first would evict them.
    second = Request("second", range(13))
    assert admit(manager, second, 5) == 8
    tables = manager.get_block_ids("second")
    assert [len(ids) for ids in tables] == [4, 4]
    assert len({*tables[0], *tables[1]}) == 8
    assert manager.get_computed_blocks(Request("third", range(13)))[1] == 12


def test_hits_of_another_number_of_groups_are_refused(make_group_manager):
    one, two = make_group_manager(("full",)), make_group_manager(("full",), ("window", 5))
    admit(one, Request("first", range(9)))
    request = Request("second", range(9))
    blocks, num_hits = one.get_computed_blocks(request)
    with pytest.raises(ValueError, match="blocks of 1 KV cache groups, but there are 2"):
        two.allocate_slots(request, 1, num_hits, blocks)
    assert two.allocate_slots(request, 1, 0, one.create_empty_block_list()) is not None


def test_hit_trimmed_by_the_caller_is_refused_where_a_window_needs_more(make_group_manager):
    manager = make_group_manager(("full",), ("window", 5))
    admit(manager, Request("first", range(16)))
    request = Request("second", range(17))
    blocks, _ = manager.get_computed_blocks(request)
    trimmed = type(blocks)(tuple(group[:2] for group in blocks.blocks))
    with pytest.raises(ValueError, match="block 0 does not hold the request's tokens"):
        manager.allocate_slots(request, 9, 8, trimmed)
