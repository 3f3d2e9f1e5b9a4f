"""The block pool: order of reuse, references, the prefix cache; and lists of blocks."""

import pytest

from kvferry.cache import BlockPool, KVCacheBlocks
from kvferry.cache.block_pool import KVCacheBlock


def ids(blocks):
    return [block.block_id for block in blocks]


def take_cached(pool, names, group_id=0) -> list[KVCacheBlock]:
    """Takes one block per name, hashed under it."""
    blocks = pool.get_new_blocks(len(names))
    pool.cache_full_blocks(blocks, [name.encode() for name in names], 0, len(names), group_id)
    return blocks


def test_null_block_is_never_handed_out_nor_counted():
    pool = BlockPool(5)
    assert pool.null_block.is_null
    assert pool.get_num_free_blocks() == 4
    assert ids(pool.get_new_blocks(4)) == [1, 2, 3, 4]
    assert pool.usage == 1.0
    with pytest.raises(ValueError, match="1 wanted, 0 are free"):
        pool.get_new_blocks(1)


def test_null_block_is_passed_over_when_freed():
    pool = BlockPool(3)
    pool.free_blocks([pool.null_block, pool.null_block])
    assert pool.null_block.ref_cnt == 1
    assert pool.get_free_block_ids() == [1, 2]


def test_null_block_is_never_hashed_nor_counted_as_shared():
    pool = BlockPool(4)
    first, last = pool.get_new_blocks(2)
    table = [first, pool.null_block, last]
    pool.cache_full_blocks(table, [b"a", b"b", b"c"], 0, 3)
    assert dict(pool.cached_blocks()) == {b"a": first, b"c": last}
    assert pool.null_block.block_hash is None
    pool.touch(table)
    assert [block.ref_cnt for block in table] == [2, 1, 2]


@pytest.mark.parametrize("num_cached", [0, 1])
def test_larger_block_takes_the_last_hash_within_it(num_cached):
    pool = BlockPool(4)
    table = pool.get_new_blocks(2)
    hashes = [bytes([i]) for i in range(7)]
    pool.cache_full_blocks(table, hashes, num_cached, 2, hash_stride=3)
    assert [block.block_hash for block in table] == [None if num_cached else b"\x02", b"\x05"]


def test_unhashed_blocks_are_reused_first_and_the_last_freed_first():
    pool = BlockPool(6)
    hashed = take_cached(pool, "ab")
    plain = pool.get_new_blocks(2)
    pool.free_blocks(hashed)
    pool.free_blocks(reversed(plain))
    assert pool.get_free_block_ids() == [3, 4, 5, 1, 2]


def test_hashed_blocks_are_evicted_in_the_order_of_their_last_use():
    pool = BlockPool(4)
    a, b, c = take_cached(pool, "abc")
    pool.free_blocks([a])
    pool.free_blocks([c, b])
    pool.touch([a])
    pool.free_blocks([a])
    assert pool.get_free_block_ids() == [3, 2, 1]
    pool.get_new_blocks(2)
    assert pool.get_cached_block(b"a") is a
    assert pool.get_cached_block(b"b") is pool.get_cached_block(b"c") is None


def test_evicted_run_comes_back_with_ascending_ids():
    pool = BlockPool(7)
    pool.free_blocks(reversed(take_cached(pool, "abcdef")))
    assert ids(pool.get_new_blocks(4)) == [3, 4, 5, 6]


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_hit_leaves_the_free_list_from_any_place(name):
    pool = BlockPool(4)
    pool.free_blocks(take_cached(pool, "abc"))
    block = pool.get_cached_block(name.encode())
    assert block is not None
    pool.touch([block])
    assert pool.get_free_block_ids() == [i for i in (1, 2, 3) if i != block.block_id]
    assert pool.get_num_free_blocks() == 2
    assert block.ref_cnt == 1


def test_hits_without_end_neither_change_the_order_of_reuse_nor_make_the_pool_grow():
    pool = BlockPool(5)
    a, b, c, d = take_cached(pool, "abcd")
    pool.free_blocks([a, b, c, d])
    for _ in range(50):
        pool.touch([b])
        pool.free_blocks([b])
    assert pool.get_free_block_ids() == [1, 3, 4, 2]
    assert pool.get_num_free_blocks() == 4
    assert len(pool._hashed) < 10
    assert [pool.get_new_blocks(1) for _ in range(4)] == [[a], [c], [d], [b]]
    assert pool.get_num_free_blocks() == 0


def test_block_is_free_only_after_its_last_reference():
    pool = BlockPool(3)
    (block,) = take_cached(pool, "a")
    pool.touch([block])
    pool.free_blocks([block])
    assert pool.get_num_free_blocks() == 1
    pool.free_blocks([block])
    assert pool.get_num_free_blocks() == 2


def test_freeing_a_free_block_raises_and_harms_nothing():
    pool = BlockPool(4)
    a, b = take_cached(pool, "ab")
    pool.free_blocks([b])
    with pytest.raises(ValueError, match="block 2 is freed more often than it was taken"):
        pool.free_blocks([a, b])
    assert pool.get_free_block_ids() == [3, 2, 1]
    assert [block.ref_cnt for block in pool.blocks] == [1, 0, 0, 0]


def test_free_block_without_content_cannot_be_shared():
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="block 1 is free and holds nothing"):
        pool.touch([pool.blocks[1]])


def test_older_duplicate_is_the_hit_and_the_younger_takes_over():
    pool = BlockPool(5)
    (first,) = take_cached(pool, "a")
    (second,) = take_cached(pool, "a")
    (third,) = take_cached(pool, "a")
    assert pool.get_cached_block(b"a") is first
    pool.free_blocks([second])
    pool.get_new_blocks(2)  # the fresh one, then the second
    assert pool.get_cached_block(b"a") is first
    pool.free_blocks([first])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"a") is third
    pool.free_blocks([third])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"a") is None


def test_groups_share_blocks_and_never_hits():
    pool = BlockPool(4, num_groups=2)
    (block,) = take_cached(pool, "a", group_id=1)
    assert pool.get_cached_block(b"a", 0) is None
    assert pool.get_cached_block(b"a", 1) is block
    pool.free_blocks([block])
    pool.get_new_blocks(3)
    assert not pool.cached_blocks(1)


def test_reset_forgets_everything_but_only_when_no_block_is_held():
    pool = BlockPool(5)
    held, *others = take_cached(pool, "abc")
    take_cached(pool, "a")
    pool.free_blocks([*others, pool.blocks[4]])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(b"a") is held
    pool.free_blocks([held])
    order = pool.get_free_block_ids()
    assert pool.reset_prefix_cache()
    assert pool.get_free_block_ids() == order
    assert not pool.cached_blocks()
    assert all(block.block_hash is None for block in pool.blocks)
    assert ids(take_cached(pool, "abca")) == order
    pool.free_blocks(pool.blocks[1:])
    pool.get_new_blocks(4)
    assert not pool.cached_blocks()


def test_evicted_block_is_no_hit_and_stays_with_who_holds_it():
    pool = BlockPool(6)
    held, free, other = take_cached(pool, "abc")
    pool.free_blocks([other, free])
    pool.evict_blocks([held.block_id, free.block_id, 0, 5])
    assert set(pool.cached_blocks()) == {b"c"}
    assert held.ref_cnt == 1
    # The free one is worth nothing now, so it goes before the hashed one, and before fresh ones.
    assert pool.get_free_block_ids() == [2, 4, 5, 3]
    assert pool.get_num_free_blocks() == 4
    pool.free_blocks([held])
    assert pool.get_free_block_ids() == [1, 2, 4, 5, 3]
    assert ids(pool.get_new_blocks(5)) == [1, 2, 4, 5, 3]


def test_evicted_hit_is_replaced_by_its_duplicate():
    pool = BlockPool(4)
    (first,), (second,) = take_cached(pool, "a"), take_cached(pool, "a")
    pool.evict_blocks([first.block_id])
    assert pool.get_cached_block(b"a") is second


@pytest.mark.parametrize("block_id", [-1, 4])
def test_eviction_of_an_unknown_block_is_refused_and_harms_nothing(block_id):
    pool = BlockPool(4)
    take_cached(pool, "a")
    with pytest.raises(ValueError, match=f"block_ids: {block_id} is not one of 4"):
        pool.evict_blocks([1, block_id])
    assert set(pool.cached_blocks()) == {b"a"}


def test_block_cannot_be_hashed_twice():
    pool = BlockPool(3)
    blocks = take_cached(pool, "a")
    with pytest.raises(ValueError, match="block 1 is hashed already"):
        pool.cache_full_blocks(blocks, [b"b"], 0, 1)


@pytest.mark.parametrize(("num_blocks", "num_hashes"), [(1, 2), (2, 1)])
def test_more_full_blocks_than_blocks_or_hashes_are_refused(num_blocks, num_hashes):
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="num_full_blocks: 2"):
        pool.cache_full_blocks(pool.get_new_blocks(num_blocks), [b"a", b"b"][:num_hashes], 0, 2)
    with pytest.raises(ValueError, match="2 hashes, 2 per block"):
        pool.cache_full_blocks(pool.get_new_blocks(1), [b"a", b"b"], 0, 2, hash_stride=2)
    assert not pool.cached_blocks()


@pytest.mark.parametrize("num_blocks", [0, 1, -3])
def test_pool_needs_a_block_beside_the_null_block(num_blocks):
    with pytest.raises(ValueError, match="take 2 or more"):
        BlockPool(num_blocks)


def test_negative_number_of_blocks_is_refused():
    with pytest.raises(ValueError, match="-1 wanted"):
        BlockPool(4).get_new_blocks(-1)


def test_no_blocks_are_no_blocks():
    pool = BlockPool(4)
    assert pool.get_new_blocks(0) == []
    assert pool.get_num_free_blocks() == 3


def test_block_lists_add_group_by_group():
    pool = BlockPool(5)
    a, b, c, d = pool.get_new_blocks(4)
    total = KVCacheBlocks(([a], (b,))) + KVCacheBlocks(((c, d), ()))
    assert total.get_block_ids() == ([1, 3, 4], [2])
    with pytest.raises(ValueError, match="1 and of 2"):
        KVCacheBlocks(((),)) + total


def test_block_ids_may_be_none_only_when_asked():
    pool = BlockPool(3)
    empty = KVCacheBlocks((pool.get_new_blocks(1), ())).new_empty()
    assert empty.get_block_ids() == ([], [])
    assert empty.get_block_ids(allow_none=True) is None
    some = KVCacheBlocks(((), pool.get_new_blocks(1)))
    assert some.get_block_ids(allow_none=True) == ([], [2])


def test_unhashed_block_ids_are_those_still_to_be_filled():
    pool = BlockPool(5)
    table = [*take_cached(pool, "ab"), *pool.get_new_blocks(2)]
    assert KVCacheBlocks((table,)).get_unhashed_block_ids() == [3, 4]
    both = KVCacheBlocks((table, [pool.null_block]))
    assert both.get_unhashed_block_ids_all_groups() == ([3, 4], [])
    with pytest.raises(ValueError, match="not on 2; call get_unhashed_block_ids_all_groups"):
        both.get_unhashed_block_ids()
