"""Manager and slow model side by side, and what must hold of them after every step."""

from dataclasses import dataclass, field

from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvferry.cache import KVCacheManager, PrefixCacheStats, Request
from kvferry.cache.events import AllBlocksCleared, BlockRemoved
from tests.cache.slow.configs import MAX_MODEL_LEN
from tests.cache.slow.model import SlowManager, needed


@dataclass
class Life:
    """A request, and where it stands."""

    request: Request
    num_encoder_tokens: int = 0
    state: str = "waiting"  # then "loading" or "running"
    was_admitted: bool = False
    load: range = field(default_factory=lambda: range(0))  # positions that are being loaded
    lost: dict[int, range] = field(default_factory=dict)  # group → positions no load could fill
    widest_step: int = 1  # tokens
    most_slots: int = 0  # tokens


class SideBySide(RuleBasedStateMachine):
    """A manager and its model; subclasses let requests live in both."""

    def start(self, setup):
        self.setup = setup
        self.manager = KVCacheManager(
            setup.config,
            MAX_MODEL_LEN,
            setup.enable_caching,
            setup.use_eagle,
            log_stats=True,
            enable_kv_cache_events=setup.with_events,
            dcp_world_size=setup.dcp,
            pcp_world_size=setup.pcp,
        )
        self.model = SlowManager(
            setup.groups,
            setup.num_blocks,
            MAX_MODEL_LEN,
            setup.enable_caching,
            setup.use_eagle,
        )
        # Groups whose cells the memory plays; an encoder's output is not made of these tokens.
        self.token_groups = [g for g, group in enumerate(setup.groups) if group.kind != "cross"]
        self.keeps_all = all(setup.groups[g].kind == "full" for g in self.token_groups)
        self.has_encoder = len(self.token_groups) < len(setup.groups)
        # Per group, hash → tokens, from events alone.
        self.told: list[dict[bytes | int, tuple]] = [{} for _ in setup.groups]
        self.lives = []
        self.count = 0
        self.stats = PrefixCacheStats()

    def in_state(self, *states):
        return [life for life in self.lives if life.state in states]

    def look_up(self, request):
        blocks, num_hits = self.manager.get_computed_blocks(request)
        length, rows = self.model.look_up(request)
        assert num_hits == length
        assert blocks.get_block_ids() == tuple(rows)
        if self.model.enable_caching and request.prompt_logprobs is None:
            self.stats.record(queries=request.num_tokens, hits=length)
        # Every cell of a hit, needed or not, is what the request itself would have computed.
        for g in self.token_groups:
            for token in range(num_hits):
                index, _ = self.model.groups[g].cell(token)
                is_state = self.model.groups[g].kind == "state"
                is_last = (token + 1) % self.model.groups[g].block_size == 0
                if rows[g][index] and (is_last or not is_state):
                    assert self.model.holds(request, g, token, rows[g])
        return blocks, rows, num_hits

    def allocate(
        self,
        life,
        num_new,
        hit=None,
        external=0,
        lookahead=0,
        reserved=0,
        must_fit=False,
        delay=False,
    ):
        """Allocates in manager and model; returns whether there was room."""
        request, model = life.request, self.model
        blocks, rows, num_hits = hit or (None, [[] for _ in model.groups], 0)
        num_encoder = life.num_encoder_tokens if hit else 0
        num_computed = request.num_computed_tokens + num_hits + external
        num_slots = min(num_computed + num_new + lookahead, MAX_MODEL_LEN)
        model.drop_dead_blocks(request, num_computed)
        planned = model.plan(request, rows, num_computed, num_slots, num_encoder)
        fits = model.cost(planned) <= len(model.free) - reserved
        least = most = 0
        if must_fit:
            # A request must not be refused for what its windows never hold, and not be admitted
            # without what they will: how close the manager gets to the least is its own affair.
            whole = model.plan(request, rows, num_computed, request.num_tokens, num_encoder)
            most = model.cost(whole)
            least = model.least_to_finish(whole, num_computed, request.num_tokens, num_new or 1)
        result = self.manager.allocate_slots(
            request,
            num_new,
            num_hits,
            blocks,
            lookahead,
            delay_cache_blocks=delay,
            num_encoder_tokens=num_encoder,
            num_external_computed_tokens=external,
            reserved_blocks=reserved,
            full_sequence_must_fit=must_fit,
        )
        if result is None:
            assert not fits or most > len(model.free)
            return False
        assert fits
        assert least <= len(model.free)
        model.adopt(request, planned, self.manager.get_block_ids(request.request_id), result)
        model.taint(request, num_computed - external, num_computed)
        if not delay:
            model.share(request, min(num_computed + num_new, request.num_tokens))
        life.most_slots = max(life.most_slots, num_slots)
        life.widest_step = max(life.widest_step, num_new + lookahead)
        return True

    # -- What must hold after every step

    @invariant()
    def free_list_is_exact(self):
        pool = self.manager.block_pool
        assert pool.get_free_block_ids() == self.model.free
        assert pool.get_num_free_blocks() == len(self.model.free)
        assert self.manager.usage == 1 - len(self.model.free) / (self.setup.num_blocks - 1)
        assert 0 not in self.model.free

    @invariant()
    def tables_are_exact(self):
        none: list[list[int]] = [[] for _ in self.model.groups]
        for life in self.lives:
            expected = self.model.tables.get(life.request.request_id, none)
            blocks = self.manager.get_blocks(life.request.request_id)
            assert blocks.get_block_ids() == tuple(expected)
            assert blocks.get_unhashed_block_ids_all_groups() == tuple(
                [block for block in row if block and block not in self.model.content]
                for row in expected
            )
            held = [block for row in expected for block in row if block]
            assert len(set(held)) == len(held)
            assert self.manager.num_held_blocks(life.request.request_id) == len(held)
            most = self.manager.peak_blocks(life.most_slots, life.widest_step)
            assert len(held) <= most + life.num_encoder_tokens  # encoder blocks are not of steps

    @invariant()
    def reference_counts_are_exact(self):
        counts = dict.fromkeys(range(self.setup.num_blocks), 0)
        for tables in self.model.tables.values():
            for block in (block for row in tables for block in row):
                counts[block] += 1
        actual = {b.block_id: b.ref_cnt for b in self.manager.block_pool.blocks}
        for block in range(1 + self.model.num_reserved):  # the null block, and the sinks
            counts[block] = 1
        assert actual == counts

    @invariant()
    def block_in_two_tables_is_shared_through_its_hash(self):
        blocks = self.manager.block_pool.blocks
        for block in blocks[1:]:
            assert (block.block_hash is not None) == (block.block_id in self.model.content)
            if block.ref_cnt > 1:
                assert block.block_hash is not None

    @invariant()
    def cache_holds_what_the_model_holds(self):
        for g in range(len(self.model.groups)):
            cached = self.manager.block_pool.cached_blocks(g)
            expected = sorted(h[0] for (of, _), h in self.model.holders.items() if h and of == g)
            assert sorted(block.block_id for block in cached.values()) == expected
            assert all(block.block_hash == block_hash for block_hash, block in cached.items())

    @invariant()
    def events_tell_what_the_cache_holds(self):
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self.told = [{} for _ in self.told]
                continue
            assert event.group_idx is not None
            told = self.told[event.group_idx]
            if isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del told[block_hash]
            else:
                size = event.block_size
                for i, block_hash in enumerate(event.block_hashes):
                    told[block_hash] = tuple(event.token_ids[i * size : (i + 1) * size])
        for g, told in enumerate(self.told if self.setup.with_events else ()):
            cached = self.manager.block_pool.cached_blocks(g)
            size = self.model.groups[g].block_size
            expected = {h: self.model.content[b.block_id][1][-1][-size:] for h, b in cached.items()}
            assert told == expected

    @invariant()
    def what_live_requests_look_at_is_intact(self):
        for life in self.in_state("running"):
            request = life.request
            for g in self.token_groups:
                table = self.model.tables[request.request_id][g]
                for token in needed(self.model.groups[g], request.num_computed_tokens):
                    if token not in life.lost.get(g, ()):
                        assert self.model.holds(request, g, token, table)

    @invariant()
    def common_prefix_agrees(self):
        tables = self.model.tables
        for request_id, rows in tables.items():
            expected = []
            for g, group in enumerate(self.model.groups):
                shared = [all(b in other[g] for other in tables.values()) for b in rows[g]]
                leading = shared.index(False) if False in shared else len(shared)
                expected.append(leading if group.kind == "full" else 0)
            assert self.manager.get_num_common_prefix_blocks(request_id) == expected

    @invariant()
    def lookup_of_every_waiting_request_agrees(self):
        for life in self.in_state("waiting"):
            self.look_up(life.request)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        assert self.manager.make_prefix_cache_stats() == self.stats
        for life in self.in_state("running", "loading"):
            self.manager.free(life.request)
        num_free = self.manager.block_pool.get_num_free_blocks()
        assert num_free == self.setup.num_blocks - 1 - self.model.num_reserved
        assert self.manager.reset_prefix_cache()
