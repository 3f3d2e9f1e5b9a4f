"""Random lives of random requests, against a slow and obvious model of the manager.

The model knows no hashes: its prefix cache is keyed by the tokens themselves. It also plays the
memory, in which every slot remembers the whole prefix that its KV was computed from, so that a hit
on the wrong content is seen even where manager and model agree.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.cache import (
    BlockPool,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
)
from kvferry.cache.single_type import FullAttentionManager, SingleTypeManager

MAX_MODEL_LEN = 20


class Model:
    """Blocks as plain lists: no linked list, no hashes, no counters."""

    def __init__(self, num_blocks, block_size, enable_caching):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.free = list(range(1, num_blocks))  # in the order of reuse
        self.content = {}  # block id → (salt, lora, all tokens up to its end) of hashed blocks
        self.holders = defaultdict(list)  # content → block ids, oldest first
        self.tables = {}  # request id → block ids
        self.num_cached = {}  # request id → leading blocks that are hashed
        self.memory = {}  # (block id, offset) → prefix that its KV was computed from

    def prefix(self, request, num_tokens):
        tokens = tuple(request.all_token_ids[:num_tokens])
        return (request.cache_salt, request.lora_name, tokens)

    def hits(self, request):
        if not self.enable_caching or request.prompt_logprobs is not None:
            return []
        found = []
        while (len(found) + 1) * self.block_size < request.num_tokens:
            holders = self.holders.get(self.prefix(request, (len(found) + 1) * self.block_size))
            if not holders:
                break
            found.append(holders[0])
        return found

    def missing(self, request, num_slots, hits):
        """Free blocks that room for ``num_slots`` tokens takes, those of the hit included."""
        needed = -(-num_slots // self.block_size)
        held = self.tables.get(request.request_id, hits)
        return max(0, needed - len(held)) + sum(block in self.free for block in hits)

    def allocate(self, request, hits, num_slots, new_ids):
        """Adopts the manager's order of the new blocks, after checking that they are the right."""
        table = self.tables.setdefault(request.request_id, [])
        for block in hits:
            if block in self.free:
                self.free.remove(block)
        table += hits
        self.num_cached.setdefault(request.request_id, len(hits))
        num_new = max(0, -(-num_slots // self.block_size) - len(table))
        assert sorted(new_ids) == sorted(self.free[:num_new])
        del self.free[:num_new]
        for block in new_ids:
            if block in self.content:
                holders = self.holders[self.content.pop(block)]
                holders.remove(block)
        table += new_ids

    def cache(self, request, num_tokens):
        if not self.enable_caching:
            return
        table = self.tables[request.request_id]
        first = self.num_cached[request.request_id]
        last = max(first, num_tokens // self.block_size)
        for index in range(first, last):
            content = self.prefix(request, (index + 1) * self.block_size)
            self.content[table[index]] = content
            self.holders[content].append(table[index])
        self.num_cached[request.request_id] = last

    def write(self, request, first, tokens):
        """The KV of ``tokens`` from position ``first`` on is computed, or loaded."""
        salt, lora, before = self.prefix(request, first)
        table = self.tables[request.request_id]
        for position, token in enumerate(tokens, start=first):
            before = (*before, token)
            block = table[position // self.block_size]
            assert block != 0
            self.memory[block, position % self.block_size] = (salt, lora, before)

    def release(self, request):
        table = self.tables.pop(request.request_id)
        del self.num_cached[request.request_id]
        for block in reversed(table):
            if any(block in other for other in self.tables.values()):
                continue
            if block in self.content:
                self.free.append(block)
            else:
                self.free.insert(0, block)


@dataclass
class Life:
    """A request, and where it stands."""

    request: Request
    state: str = "waiting"  # then "loading" or "running"
    was_admitted: bool = False
    load: range = field(default_factory=lambda: range(0))  # positions that are being loaded


def choose(data, values):
    return data.draw(st.sampled_from(values))


class Manager(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.integers(1, 4),
        enable_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks, block_size, enable_caching):
        spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype="float32")
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer.0"], spec)])
        self.manager = KVCacheManager(config, MAX_MODEL_LEN, enable_caching, log_stats=True)
        self.model = Model(num_blocks, block_size, enable_caching)
        self.lives = []
        self.count = 0
        self.lookups = 0

    def in_state(self, *states):
        return [life for life in self.lives if life.state in states]

    # -- What happens to requests

    @precondition(lambda self: len(self.lives) < 8)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 2),
        prefix=st.integers(0, MAX_MODEL_LEN),
        salt=st.sampled_from([None, None, None, "a"]),
        lora=st.sampled_from([None, None, None, "a"]),
        wants_logprobs=st.sampled_from([False, False, False, True]),
        then=st.sampled_from(["wait", "admit", "admit", "load"]),
        data=st.data(),
    )
    def submit(self, prompt, prefix, salt, lora, wants_logprobs, then, data):
        if self.lives:  # most prompts begin as another one does
            other = choose(data, self.lives).request
            prompt = [*other.all_token_ids[:prefix], *prompt][: MAX_MODEL_LEN - 2]
        request = Request(
            f"r{self.count}",
            prompt,
            cache_salt=salt,
            lora_name=lora,
            prompt_logprobs=1 if wants_logprobs else None,
        )
        self.count += 1
        life = Life(request)
        self.lives.append(life)
        if then == "admit":
            self.admit_to_compute(life, data)
        elif then == "load":
            self.admit_to_load(life, data)

    def look_up(self, request):
        blocks, num_hits = self.manager.get_computed_blocks(request)
        hits = self.model.hits(request)
        assert blocks.get_block_ids() == (hits,)
        assert num_hits == len(hits) * self.model.block_size
        self.lookups += self.model.enable_caching and request.prompt_logprobs is None
        # What a hit holds is what the request would compute.
        for position in range(num_hits):
            block, offset = divmod(position, self.model.block_size)
            assert self.model.memory[hits[block], offset] == self.model.prefix(
                request, position + 1
            )
        return blocks, hits, num_hits

    def allocate(self, life, num_new, hit=None, external=0, lookahead=0, **options):
        """Allocates in manager and model; returns whether there was room."""
        request, model = life.request, self.model
        blocks, hits, num_hits = hit or (None, [], 0)
        num_total = request.num_computed_tokens + num_hits + external + num_new
        num_slots = min(num_total + lookahead, MAX_MODEL_LEN)
        num_free = len(model.free)
        fits = model.missing(request, num_slots, hits) <= num_free - options["reserved_blocks"]
        if options.get("full_sequence_must_fit"):
            fits = fits and model.missing(request, request.num_tokens, hits) <= num_free
        result = self.manager.allocate_slots(
            request,
            num_new,
            num_hits,
            blocks,
            lookahead,
            num_external_computed_tokens=external,
            **options,
        )
        assert (result is not None) == fits
        if result is None:
            return False
        model.allocate(request, hits, num_slots, result.get_block_ids()[0])
        if not options.get("delay_cache_blocks"):
            model.cache(request, min(num_total, request.num_tokens))
        return True

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data(), must_fit=st.booleans(), reserved=st.sampled_from([0, 0, 0, 1, 3]))
    def admit(self, data, must_fit, reserved):
        self.admit_to_compute(choose(data, self.in_state("waiting")), data, must_fit, reserved)

    def admit_to_compute(self, life, data, must_fit=False, reserved=0):
        request = life.request
        hit = self.look_up(request)
        num_hits = hit[2]
        num_new = data.draw(st.integers(1, request.num_tokens - num_hits))
        if self.allocate(
            life, num_new, hit, reserved_blocks=reserved, full_sequence_must_fit=must_fit
        ):
            life.state, life.was_admitted = "running", True
            request.num_computed_tokens = num_hits
            self.compute(life, num_new)

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data(), reserved=st.sampled_from([0, 0, 0, 1, 3]))
    def admit_for_a_load(self, data, reserved):
        self.admit_to_load(choose(data, self.in_state("waiting")), data, reserved)

    def admit_to_load(self, life, data, reserved=0):
        request = life.request
        hit = self.look_up(request)
        num_hits = hit[2]
        external = data.draw(st.integers(1, request.num_tokens - num_hits))
        if self.allocate(life, 0, hit, external, reserved_blocks=reserved, delay_cache_blocks=True):
            life.state, life.was_admitted = "loading", True
            life.load = range(num_hits, num_hits + external)
            request.num_computed_tokens = num_hits + external

    def resume(self, life, num_loaded):
        """The first ``num_loaded`` tokens of the load arrived; the request runs from there on."""
        request = life.request
        num_computed = life.load.start + num_loaded
        self.model.write(
            request, life.load.start, request.all_token_ids[life.load.start : num_computed]
        )
        self.manager.cache_blocks(request, num_computed)
        self.model.cache(request, num_computed)
        # At least one token is computed here, for its logits.
        request.num_computed_tokens = min(num_computed, request.num_tokens - 1)
        life.state = "running"

    @precondition(lambda self: self.in_state("loading"))
    @rule(data=st.data())
    def load_succeeds(self, data):
        life = choose(data, self.in_state("loading"))
        self.resume(life, len(life.load))

    @precondition(lambda self: self.in_state("loading"))
    @rule(data=st.data())
    def load_fails_and_the_rest_is_recomputed(self, data):
        life = choose(data, self.in_state("loading"))
        self.resume(life, data.draw(st.integers(0, len(life.load) - 1)))

    @precondition(lambda self: self.in_state("loading"))
    @rule(data=st.data(), again=st.booleans())
    def load_fails_and_the_request_gives_its_blocks_up(self, data, again):
        self.give_up(choose(data, self.in_state("loading")), again)

    def compute(self, life, num_new):
        """The step has run: KV is written, and the last token of the sequence yields the next."""
        request = life.request
        first = request.num_computed_tokens
        self.model.write(request, first, request.all_token_ids[first : first + num_new])
        request.num_computed_tokens += num_new
        if request.num_computed_tokens == request.num_tokens < MAX_MODEL_LEN:
            request.append_output_token_ids(request.num_tokens % 2)

    @precondition(lambda self: self.in_state("running"))
    @rule(
        data=st.data(),
        times=st.integers(1, 6),
        lookahead=st.sampled_from([0, 0, 1, 5]),
        reserved=st.sampled_from([0, 0, 1]),
    )
    def grow(self, data, times, lookahead, reserved):
        life = choose(data, self.in_state("running"))
        for _ in range(times):
            remaining = life.request.num_tokens - life.request.num_computed_tokens
            if remaining == 0:  # it reached the model's length
                self.give_up(life, again=False)
                return
            num_new = data.draw(st.integers(1, remaining))
            if self.allocate(life, num_new, lookahead=lookahead, reserved_blocks=reserved):
                self.compute(life, num_new)

    @precondition(lambda self: self.in_state("running"))
    @rule(data=st.data(), drafts=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def verify_drafts(self, data, drafts):
        life = choose(data, self.in_state("running"))
        request = life.request
        drafts = drafts[: max(0, MAX_MODEL_LEN - 1 - request.num_tokens)]
        remaining = request.num_tokens - request.num_computed_tokens
        if remaining != 1 or not drafts:
            return
        if not self.allocate(life, 1 + len(drafts), reserved_blocks=0):
            return
        first = request.num_computed_tokens
        self.model.write(request, first, [*request.all_token_ids[first:], *drafts])
        accepted = drafts[: data.draw(st.integers(0, len(drafts)))]
        request.append_output_token_ids([*accepted, 0])
        request.num_computed_tokens = first + 1 + len(accepted)

    def give_up(self, life, again):
        """Frees a request that holds blocks; it waits ``again``, or is gone."""
        request = life.request
        self.manager.free(request)
        self.model.release(request)
        if 0 < request.num_computed_tokens < MAX_MODEL_LEN:  # as before: a scheduler's mistake
            with pytest.raises(ValueError, match="computed tokens and no blocks"):
                self.manager.allocate_slots(request, 1)
        request.num_computed_tokens = 0
        life.state = "waiting"
        if not again:
            self.lives.remove(life)

    @precondition(lambda self: self.in_state("running"))
    @rule(data=st.data())
    def preempt(self, data):
        self.give_up(choose(data, self.in_state("running")), again=True)

    @precondition(lambda self: len(self.lives) > 2)
    @rule(data=st.data())
    def abort(self, data):
        life = choose(data, self.lives)
        if life.state != "waiting":
            self.give_up(life, again=False)
        elif life.was_admitted:
            with pytest.raises(ValueError, match="freed twice"):
                self.manager.free(life.request)
            self.lives.remove(life)
        else:
            self.manager.free(life.request)
            self.lives.remove(life)

    @rule()
    def reset(self):
        done = self.manager.reset_prefix_cache()
        assert done == (not self.model.tables)
        if done:
            self.model.content.clear()
            self.model.holders.clear()

    # -- What must hold after every step

    @invariant()
    def free_list_is_exact(self):
        pool = self.manager.block_pool
        assert pool.get_free_block_ids() == self.model.free
        assert pool.get_num_free_blocks() == len(self.model.free)
        assert self.manager.usage == pytest.approx(
            1 - len(self.model.free) / (self.model.num_blocks - 1)
        )

    @invariant()
    def tables_are_exact(self):
        for life in self.lives:
            expected = self.model.tables.get(life.request.request_id, [])
            assert self.manager.get_block_ids(life.request.request_id) == (expected,)
            assert 0 not in expected
            assert len(set(expected)) == len(expected)

    @invariant()
    def reference_counts_are_exact(self):
        counts = dict.fromkeys(range(self.model.num_blocks), 0) | {0: 1}
        for table in self.model.tables.values():
            for block in table:
                counts[block] += 1
        assert {b.block_id: b.ref_cnt for b in self.manager.block_pool.blocks} == counts

    @invariant()
    def block_in_two_tables_is_shared_through_its_hash(self):
        blocks = self.manager.block_pool.blocks
        for block in blocks[1:]:
            assert (block.block_hash is not None) == (block.block_id in self.model.content)
            if block.ref_cnt > 1:
                assert block.block_hash is not None

    @invariant()
    def cache_holds_what_the_model_holds(self):
        cached = self.manager.block_pool.cached_blocks()
        expected = sorted(holders[0] for holders in self.model.holders.values() if holders)
        assert sorted(block.block_id for block in cached.values()) == expected
        assert all(block.block_hash == block_hash for block_hash, block in cached.items())

    @invariant()
    def computed_tokens_of_live_requests_are_intact(self):
        for life in self.in_state("running"):
            table = self.model.tables[life.request.request_id]
            for position in range(life.request.num_computed_tokens):
                block, offset = divmod(position, self.model.block_size)
                assert self.model.memory[table[block], offset] == self.model.prefix(
                    life.request, position + 1
                )

    @invariant()
    def lookup_of_every_waiting_request_agrees(self):
        for life in self.in_state("waiting"):
            self.look_up(life.request)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        stats = self.manager.make_prefix_cache_stats()
        assert stats.requests == self.lookups
        for life in self.in_state("running", "loading"):
            self.manager.free(life.request)
        assert self.manager.usage == 0.0
        assert self.manager.reset_prefix_cache()


QUICK = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_manager_agrees_with_the_model():
    run_state_machine_as_test(Manager, settings=QUICK)


@pytest.mark.slow
def test_manager_agrees_with_the_model_for_long():
    run_state_machine_as_test(
        Manager, settings=settings(QUICK, max_examples=2000, stateful_step_count=80)
    )


# -- The machine sees mistakes: each of these, made on purpose, must be found


def touch_without_unlinking(pool, blocks):
    for block in blocks:
        block.ref_cnt += 1


def free_head_first(manager, table):
    manager.pool.free_blocks(table.blocks)


def hit_includes_the_last_token(original):
    return lambda manager, hashes, max_tokens: original(manager, hashes, max_tokens + 1)


def hash_one_block_too_many(original):
    def cache_blocks(manager, table, request, num_tokens):
        original(manager, table, request, min(num_tokens + 1, request.num_tokens))

    return cache_blocks


def forget_that_free_hits_cost(manager, hits, num_tokens, block_hashes):
    return 0


def evict_the_youngest(original):
    def evict(pool, num_blocks):
        ring = pool._ring
        ring.prev, ring.next = ring.next, ring.prev
        block = ring.next
        while block is not ring:
            block.prev, block.next = block.next, block.prev
            block = block.next
        return original(pool, num_blocks)

    return evict


def keep_the_hash_of_an_evicted_block(pool, block):
    block.block_hash = None


MUTATIONS = {
    "touch_without_unlinking": (BlockPool, "touch", touch_without_unlinking),
    "free_head_first": (SingleTypeManager, "free", free_head_first),
    "hit_includes_the_last_token": (
        FullAttentionManager,
        "find_longest_hit",
        hit_includes_the_last_token(FullAttentionManager.find_longest_hit),
    ),
    "hash_one_block_too_many": (
        SingleTypeManager,
        "cache_blocks",
        hash_one_block_too_many(SingleTypeManager.cache_blocks),
    ),
    "forget_that_free_hits_cost": (
        SingleTypeManager,
        "count_free_hits",
        forget_that_free_hits_cost,
    ),
    "evict_the_youngest": (BlockPool, "_evict", evict_the_youngest(BlockPool._evict)),
    "keep_the_hash_of_an_evicted_block": (BlockPool, "_forget", keep_the_hash_of_an_evicted_block),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_machine_finds_a_mistake_made_on_purpose(name, monkeypatch):
    monkeypatch.setattr(*MUTATIONS[name])
    search = settings(
        QUICK, max_examples=2000, phases=[Phase.generate], database=None, print_blob=False
    )
    with pytest.raises((AssertionError, ValueError, AttributeError)):
        run_state_machine_as_test(Manager, settings=search)
