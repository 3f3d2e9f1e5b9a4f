"""KV cache events: whoever applies them all holds what the pool would hit."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import BlockPool, MultiModalInput, Request
from kvferry.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    with_short_hashes,
)

HASH_SIZE = 2
STRIDES = (1, 2)  # hashes per block of the two groups
NUM_BLOCKS = 9

ADMIT = st.tuples(
    st.just("admit"),
    st.sampled_from(range(len(STRIDES))),
    st.lists(st.integers(0, 1), min_size=4, max_size=16),
    st.sets(st.integers(0, 5)),
    st.integers(0, 6),
)
FREE = st.tuples(st.just("free"), st.integers(0, 9))
EVICT = st.tuples(st.just("evict"), st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=3))
RESET = st.tuples(st.just("reset"))
TAKE = st.tuples(st.just("take"))


class Outside:
    """A consumer that applies events to a set of hashes per group."""

    def __init__(self):
        self.hits: list[set[bytes]] = [set() for _ in STRIDES]
        self.blocks = {}  # (group, hash) → (hash before, tokens), as the requests have them

    def learn(self, request, group_id):
        stride = STRIDES[group_id]
        before = None
        for i, block_hash in enumerate(request.block_hashes[stride - 1 :: stride]):
            tokens = request.all_token_ids[i * stride * HASH_SIZE : (i + 1) * stride * HASH_SIZE]
            self.blocks[group_id, block_hash] = (before, tokens)
            before = block_hash

    def apply(self, event):
        if isinstance(event, AllBlocksCleared):
            self.hits = [set() for _ in STRIDES]
            return
        group_id, hits = event.group_idx, self.hits[event.group_idx]
        before = None if isinstance(event, BlockRemoved) else event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            if isinstance(event, BlockRemoved):
                hits.remove(block_hash)  # never one that it was not told of
                continue
            assert block_hash not in hits
            hits.add(block_hash)
            size = event.block_size
            tokens = event.token_ids[i * size : (i + 1) * size]
            assert size == STRIDES[group_id] * HASH_SIZE
            assert self.blocks[group_id, block_hash] == (before, tokens)
            before = block_hash


def admit(pool, outside, group_id, tokens, nulls, cut):
    """A table with null blocks at some places, cached in two parts; ``None`` if it has no room."""
    request = Request("r", tokens, hash_block_size=HASH_SIZE)
    num_full = len(tokens) // (STRIDES[group_id] * HASH_SIZE)
    if num_full > pool.get_num_free_blocks():
        return None
    outside.learn(request, group_id)
    table = pool.get_new_blocks(num_full)
    unused = [table[i] for i in nulls if i < num_full]
    pool.free_blocks(unused)
    table = [pool.null_block if block in unused else block for block in table]
    parts = [(0, min(cut, num_full)), (min(cut, num_full), num_full)]
    for first, last in parts:
        pool.cache_full_blocks(
            table,
            request.block_hashes,
            first,
            last,
            group_id,
            hash_stride=STRIDES[group_id],
            request=request,
        )
    return table


@given(st.lists(ADMIT | FREE | EVICT | RESET | TAKE, max_size=30))
def test_events_add_up_to_what_the_pool_would_hit(commands):
    pool = BlockPool(NUM_BLOCKS, len(STRIDES), enable_events=True)
    outside = Outside()
    tables = []
    for name, *arguments in [*commands, ("take",)]:
        if name == "admit":
            tables.append(admit(pool, outside, *arguments) or [])
        elif name == "free" and tables:
            pool.free_blocks(reversed(tables.pop(arguments[0] % len(tables))))
        elif name == "evict":
            pool.evict_blocks(*arguments)
        elif name == "reset":
            pool.reset_prefix_cache()
        elif name == "take":
            for event in pool.take_events():
                outside.apply(event)
            hits = [set(pool.cached_blocks(group_id)) for group_id in range(len(STRIDES))]
            assert outside.hits == hits
            assert pool.take_events() == []


def cache(pool, request, num_cached=0, num_full=None):
    num_full = len(request.block_hashes) if num_full is None else num_full
    table = pool.get_new_blocks(num_full)
    pool.cache_full_blocks(table, request.block_hashes, num_cached, num_full, request=request)
    return table


def test_neighbours_are_stored_in_one_event_and_removed_in_one():
    pool = BlockPool(5, enable_events=True)
    request = Request("r", range(8), hash_block_size=2)
    table = cache(pool, request)
    (stored,) = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == request.block_hashes
    assert stored.parent_block_hash is None
    pool.free_blocks(reversed(table))
    pool.get_new_blocks(3)
    (removed,) = pool.take_events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == request.block_hashes[:0:-1]


def test_stored_blocks_say_what_their_hashes_were_made_of():
    pool = BlockPool(5, enable_events=True)
    images = [MultiModalInput("cat", 3, 2)]
    request = Request(
        "r", range(8), cache_salt="s", lora_name="l", mm_inputs=images, hash_block_size=2
    )
    cache(pool, request, num_cached=1)
    (stored,) = pool.take_events()
    assert stored == BlockStored(
        block_hashes=list(request.block_hashes[1:]),
        parent_block_hash=request.block_hashes[0],
        token_ids=list(range(2, 8)),
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name="l",
        extra_keys=[("l", ("cat", 1)), ("l", ("cat", -1)), ("l",)],
        group_idx=0,
    )


def test_pool_has_nothing_to_tell_unless_asked():
    pool = BlockPool(5)
    cache(pool, Request("r", range(8), hash_block_size=2))
    pool.reset_prefix_cache()
    assert pool.take_events() == []


def test_events_need_the_request():
    pool = BlockPool(5, enable_events=True)
    with pytest.raises(ValueError, match="request: None, but the pool has events on"):
        pool.cache_full_blocks(pool.get_new_blocks(1), [b"a"], 0, 1)
    assert not pool.cached_blocks()


def test_failed_caching_tells_of_the_blocks_before_the_failure():
    pool = BlockPool(5, enable_events=True)
    request = Request("r", range(8), hash_block_size=2)
    table = [*cache(pool, request, num_cached=2, num_full=3), *pool.get_new_blocks(1)]
    pool.take_events()
    with pytest.raises(ValueError, match="hashed already"):
        pool.cache_full_blocks(table, request.block_hashes, 0, 4, request=request)
    (stored,) = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == request.block_hashes[:2]
    assert len(pool.cached_blocks()) == 3


def test_blocks_of_two_groups_are_removed_in_two_events():
    pool = BlockPool(3, num_groups=2, enable_events=True)
    request = Request("r", range(2), hash_block_size=2)
    for group_id in range(2):
        table = pool.get_new_blocks(1)
        pool.cache_full_blocks(table, request.block_hashes, 0, 1, group_id, request=request)
        pool.free_blocks(table)
    pool.take_events()
    pool.get_new_blocks(2)
    events = pool.take_events()
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert removed == events
    assert [event.group_idx for event in removed] == [0, 1]


def test_wire_form_is_the_one_that_consumers_of_vllms_events_parse():
    stored = BlockStored(
        block_hashes=[bytes(30) + b"\x01\x02"],
        parent_block_hash=b"\xff" * 32,
        token_ids=[7, 8],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
    )
    removed = BlockRemoved(block_hashes=[b"\x80" + bytes(31)], medium="GPU", group_idx=1)
    events = [with_short_hashes(event) for event in (stored, removed, AllBlocksCleared())]
    batch = KVEventBatch(ts=1.5, events=events, data_parallel_rank=0)
    data = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(data) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [0x0102],
                "parent_block_hash": (1 << 64) - 1,
                "token_ids": [7, 8],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
            },
            {"type": "BlockRemoved", "block_hashes": [0], "medium": "GPU", "group_idx": 1},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
    assert msgspec.msgpack.decode(data, type=KVEventBatch) == batch
    whole = KVEventBatch(ts=1.5, events=[stored, removed])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=KVEventBatch) == whole
