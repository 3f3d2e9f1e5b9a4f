"""The state machine sees mistakes: each of these, made on purpose, must be found."""

import re
import sys
import traceback
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvferry.cache import BlockPool, KVCacheManager
from kvferry.cache import request as request_module
from kvferry.cache import single_type_kinds as kinds_module
from kvferry.cache.coordinator import KVCacheCoordinator
from kvferry.cache.single_type import SingleTypeManager
from kvferry.cache.single_type_kinds import FullAttentionManager, MambaManager, WindowedManager
from tests.cache.slow.machine import machine_of
from tests.cache.test_manager_state_machine import FAMILIES, QUICK

SEARCH = settings(
    QUICK,
    max_examples=1000,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    print_blob=False,
    report_multiple_bugs=False,
)

SLOW = Path(__file__).parent / "slow"

MISTAKES: dict[str, tuple] = {}


def mistake(owner, attribute, *families, is_rare=False, refused=None):
    """Registers a replacement for ``owner.attribute``, made from the original.

    Args:
        owner: module or class.
        attribute: what is replaced.
        families: kinds of config that it shows in.
        is_rare: whether it takes many lives to show.
        refused: kind of config → the words of the manager's own ``ValueError``, where it finds the
            mistake before a wrong result can show.
    """

    def register(make):
        quick = () if is_rare else families[:1]
        MISTAKES[make.__name__] = (owner, attribute, make, quick, families, refused or {})
        return make

    return register


# -- The pool


@mistake(BlockPool, "touch", "full", "two groups")
def touch_without_voiding(original):
    def touch(pool, blocks):
        for block in blocks:
            block.ref_cnt += block is not pool.null_block

    return touch


@mistake(BlockPool, "_evict", "full", "window")
def evict_the_youngest(original):
    def evict(pool, num_blocks):
        pool._hashed.reverse()
        return original(pool, num_blocks)

    return evict


@mistake(BlockPool, "_evict", "two groups")
def evict_by_void_entries(original):
    def evict(pool, num_blocks):
        for block in pool._hashed:
            block.num_void = 0
        return original(pool, num_blocks)

    return evict


@mistake(BlockPool, "_forget", "full", "chunk")
def keep_the_hash_of_an_evicted_block(original):
    def forget(pool, block):
        block.block_hash = None

    return forget


@mistake(BlockPool, "free_blocks", "full", "window")
def free_head_first(original):
    return lambda pool, blocks: original(pool, reversed(list(blocks)))


@mistake(BlockPool, "cache_full_blocks", "two groups", "full and window")
def share_hits_between_groups(original):
    def cache(pool, blocks, hashes, first, last, group_id=0, **options):
        original(pool, blocks, hashes, first, last, 0, **options)

    return cache


@mistake(BlockPool, "reset_prefix_cache", "full", "mla, sinks")
def reset_without_forgetting(original):
    return lambda pool: pool.get_num_free_blocks() == len(pool.blocks) - 1


# -- Hashes


@mistake(request_module, "chain_root", "full", "window")
def hash_without_the_salt(original):
    return lambda cache_salt=None, lora_name=None: original(None, lora_name)


@mistake(request_module, "chain_root", "full", "window")
def hash_without_the_adapter(original):
    return lambda cache_salt=None, lora_name=None: original(cache_salt, None)


@mistake(request_module, "extend_chain", "window")
def hash_without_images(original):
    return lambda chain, root, tokens, size, mm_inputs=(): original(chain, root, tokens, size)


# -- Hits


@mistake(FullAttentionManager, "find_longest_hit", "full", "mla, sinks")
def hit_includes_the_last_token(original):
    return lambda manager, hashes, most, known: original(manager, hashes, most + 1, known + 1)


@mistake(WindowedManager, "find_longest_hit", "window")
def hit_lacks_the_oldest_block_of_its_window(original):
    def find(manager, *args):
        hits = original(manager, *args)
        real = [index for index, block in enumerate(hits) if not block.is_null]
        return [manager.pool.null_block if i in real[:1] else b for i, b in enumerate(hits)]

    return find


@mistake(KVCacheCoordinator, "find_longest_hit", "full and window", "two groups")
def groups_do_not_agree_on_the_hit(original):
    def find(coordinator, request, most):
        hashes = coordinator.hash_blocks(request)
        hits = [manager.find_longest_hit(hashes, most, most) for manager in coordinator.managers]
        return tuple(hits), len(hits[0]) * coordinator.managers[0].block_size

    return find


@mistake(SingleTypeManager, "_aligned", "two groups", "three groups")
def hit_ends_within_another_groups_block(original):
    return lambda manager, num_blocks: num_blocks


@mistake(SingleTypeManager, "__init__", "full", "full and window")
def drafter_gets_no_block_computed_again(original):
    def init(manager, *args):
        original(manager, *args)
        manager._num_beyond = 0

    return init


@mistake(FullAttentionManager, "find_longest_hit", "full and window", is_rare=True)
def proof_for_a_drafter_leaves_the_last_token_out(original):
    return lambda manager, hashes, most, known: original(manager, hashes, most, min(most, known))


@mistake(FullAttentionManager, "find_longest_hit", "full", "mla, sinks", is_rare=True)
def proof_for_a_drafter_takes_the_last_token_in(original):
    def find(manager, hashes, most, known):
        return original(manager, hashes, most, len(hashes) * manager._rules.hash_block_size)

    return find


@mistake(MambaManager, "_look_up", "state")
def state_is_read_in_the_step_that_writes_it(original):
    return WindowedManager._look_up


# -- What becomes a hit


@mistake(SingleTypeManager, "cache_blocks", "full", "state")
def hash_one_block_too_many(original):
    def cache_blocks(manager, table, request, num_tokens):
        original(manager, table, request, min(num_tokens + 1, request.num_tokens))

    return cache_blocks


@mistake(SingleTypeManager, "first_whole_block", "window", "chunk", "two groups")
def share_the_block_that_a_load_filled_in_part(original):
    return lambda manager, first_token: first_token // manager.block_size


@mistake(KVCacheCoordinator, "note_load", "full and window", "context parallel")
def share_what_the_source_did_not_have(original):
    def note_load(coordinator, tables, skip_groups, first_filled):
        kept = [group for group in skip_groups if group != 0]
        original(coordinator, tables, kept, first_filled)

    return note_load


@mistake(KVCacheCoordinator, "note_load", "window", is_rare=True)
def a_refused_call_changes_something(original):
    def note_load(coordinator, tables, skip_groups, first_filled):
        original(coordinator, tables, (), first_filled)
        original(coordinator, tables, skip_groups, first_filled)

    return note_load


@mistake(SingleTypeManager, "note_filled", "window", "chunk", is_rare=True)
def share_a_block_of_which_a_little_more_came(original):
    return lambda manager, table, first: original(manager, table, first - manager.block_size + 1)


@mistake(KVCacheManager, "allocate_slots", "full", "window")
def share_a_load_before_it_has_come(original):
    def allocate(manager, *args, delay_cache_blocks=False, **options):
        return original(manager, *args, **options)

    return allocate


# -- Blocks


@mistake(SingleTypeManager, "count_free_hits", "full", refused={"full": r"num_blocks: \d+ wanted"})
def forget_that_free_hits_cost(original):
    return lambda manager, hits, room: 0


@mistake(KVCacheCoordinator, "add_hits", "two groups", "full and window")
def a_group_allocates_before_all_have_their_hits(original):
    def add_hits(coordinator, tables, hits, room):
        for manager, table, group_hits in zip(
            coordinator.managers, tables.groups, hits, strict=True
        ):
            manager.add_hits(table, group_hits, room)
            manager.grow(table, room)

    return add_hits


@mistake(
    kinds_module,
    "first_kept_token",
    "window",
    "chunk",
    refused={"chunk": "its windows hold what follows"},
)
def window_ends_a_token_early(original):
    return lambda num_computed, **sizes: min(num_computed, original(num_computed, **sizes) + 1)


@mistake(SingleTypeManager, "drop_passed", "window", "chunk", "state")
def passed_blocks_are_kept(original):
    return lambda manager, table, num_computed: False


@mistake(SingleTypeManager, "drop_passed", "window", "state")
def passed_blocks_stay_in_the_table(original):
    def drop(manager, table, num_computed):
        blocks = table.blocks.copy()
        dropped = original(manager, table, num_computed)
        table.blocks[:] = blocks
        return dropped

    return drop


@mistake(SingleTypeManager, "peak_blocks", "full")
def peak_is_a_block_too_low(original):
    return lambda manager, num_tokens, step: original(manager, num_tokens, step) - 1


@mistake(KVCacheCoordinator, "settle", "window", "state", "full")
def quiet_for_a_token_too_long(original):
    def settle(coordinator, tables):
        original(coordinator, tables)
        for name in ("num_slots", "quiet_until", "next_hashed"):
            setattr(tables, name, min(getattr(tables, name) + 1, sys.maxsize))

    return settle


@mistake(KVCacheCoordinator, "count_missing_for_all", "full", "window")
def full_sequence_always_fits(original):
    return lambda coordinator, *args: 0


# One kind of config for each by default: looking for all in all takes minutes.
CASES = [
    pytest.param(
        name, family, marks=() if family in quick else pytest.mark.slow, id=f"{name}: {family}"
    )
    for name, (_, _, _, quick, families, _) in MISTAKES.items()
    for family in families
]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_machine_finds_a_mistake_made_on_purpose(name, family, monkeypatch):
    owner, attribute, make, _, _, refused = MISTAKES[name]
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    with pytest.raises((AssertionError, ValueError)) as found:
        run_state_machine_as_test(machine_of(FAMILIES[family]), settings=SEARCH)
    # What went wrong first: after it the machine's end often finds something too.
    first: BaseException = found.value
    while first.__context__ is not None:
        first = first.__context__
    if family in refused:
        assert isinstance(first, ValueError)
        assert re.search(refused[family], str(first))
    else:
        # A wrong result, seen by the machine: an error that the mistake happens to run into is not.
        assert isinstance(first, AssertionError), repr(first)
        *_, (frame, _) = traceback.walk_tb(first.__traceback__)
        assert Path(frame.f_code.co_filename).is_relative_to(SLOW)
