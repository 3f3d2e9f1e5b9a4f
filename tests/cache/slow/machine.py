"""Random lives of random requests, through the manager and the slow model side by side."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvferry.cache import MultiModalInput, Request
from tests.cache.slow.checks import Life, SideBySide
from tests.cache.slow.configs import MAX_MODEL_LEN
from tests.cache.slow.model import needed, prefix

POSITIONS = st.integers(0, MAX_MODEL_LEN)
TOKENS = st.sampled_from([0, 0, 0, 1])  # so that prompts often begin alike
IMAGE_LENGTHS = {"x": 2, "y": 5}


def choose(data, values):
    return data.draw(st.sampled_from(values))


class ManagerMachine(SideBySide):
    """What happens to requests. Subclasses say over which configs: see :func:`machine_of`."""

    @precondition(lambda self: len(self.lives) < 8)
    @rule(
        prompt=st.just([]) | st.lists(TOKENS, max_size=MAX_MODEL_LEN - 2),
        prefix_length=st.just(MAX_MODEL_LEN) | POSITIONS,
        salt=st.sampled_from([None] * 9 + ["a"]),
        lora=st.sampled_from([None] * 9 + ["a"]),
        image=st.none() | st.none() | st.tuples(st.sampled_from("xy"), POSITIONS),
        wants_logprobs=st.sampled_from([False] * 9 + [True]),
        then=st.sampled_from(["wait", "admit", "admit", "load"]),
        data=st.data(),
    )
    def submit(self, prompt, prefix_length, salt, lora, image, wants_logprobs, then, data):
        shown = []
        if self.lives:  # most prompts begin as another one does
            other = choose(data, self.lives).request
            prompt = [*other.all_token_ids[:prefix_length], *prompt][: MAX_MODEL_LEN - 2]
            shown = [image for image in other.mm_inputs if image.offset < prefix_length]
        if image and not shown:
            identifier, offset = image
            shown = [MultiModalInput(identifier, offset, IMAGE_LENGTHS[identifier])]
        request = Request(
            f"r{self.count}",
            prompt or [0],
            cache_salt=salt,
            lora_name=lora,
            mm_inputs=[i for i in shown if i.offset + i.length <= len(prompt)],
            prompt_logprobs=1 if wants_logprobs else None,
        )
        self.count += 1
        life = Life(request, data.draw(st.integers(1, 6)) if self.has_encoder else 0)
        self.lives.append(life)
        if then == "admit":
            self.admit_to_compute(life, data)
        elif then == "load":
            self.admit_to_load(life, data)

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data(), must_fit=st.booleans(), reserved=st.sampled_from([0, 0, 0, 1, 3]))
    def admit(self, data, must_fit, reserved):
        self.admit_to_compute(choose(data, self.in_state("waiting")), data, must_fit, reserved)

    def admit_to_compute(self, life, data, must_fit=False, reserved=0, hit=None):
        request = life.request
        hit = hit or self.look_up(request)
        num_new = data.draw(st.integers(1, request.num_tokens - hit[2]))
        if self.allocate(life, num_new, hit, must_fit=must_fit, reserved=reserved):
            life.state, life.was_admitted = "running", True
            request.num_computed_tokens = hit[2]
            self.compute(life, num_new)

    @precondition(lambda self: len(self.in_state("waiting")) > 1)
    @rule(data=st.data())
    def admit_with_a_hit_looked_up_earlier(self, data):
        """What was found may be somebody else's by now."""
        life, other = data.draw(st.permutations(self.in_state("waiting")))[:2]
        blocks, rows, num_hits = hit = self.look_up(life.request)
        self.admit_to_compute(other, data)
        if self.model.is_still_there(life.request, rows):
            self.admit_to_compute(life, data, hit=hit)
        else:
            with pytest.raises(ValueError, match="call get_computed_blocks again"):
                self.manager.allocate_slots(life.request, 1, num_hits, blocks)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def bad_calls_change_nothing(self, data):
        request = choose(data, self.in_state("loading") or self.lives).request
        allocate, cache_blocks = self.manager.allocate_slots, self.manager.cache_blocks
        for bad_call in (
            lambda: allocate(request, 0),
            lambda: allocate(request, -1),
            lambda: allocate(request, MAX_MODEL_LEN + 1),
            lambda: allocate(request, 1, reserved_blocks=-1),
            lambda: allocate(request, 1, self.model.unit * 99),
            lambda: cache_blocks(request, request.num_tokens + 1),
            lambda: cache_blocks(request, 0, skip_groups=[len(self.model.groups)]),
            lambda: cache_blocks(request, 0, first_filled=[0] * (len(self.model.groups) + 1)),
            lambda: cache_blocks(request, 0, [99], first_filled=[0] * len(self.model.groups)),
        ):
            with pytest.raises(ValueError, match=f"{request.request_id}|groups"):
                bad_call()

    def draw_load(self, request, num_hits, data):
        """Tokens after the hit that come from outside, if any can."""
        # Where only windows are kept, the token that gives the logits is not loaded: what it
        # looks at would be gone.
        most = request.num_tokens - num_hits - (not self.keeps_all)
        return data.draw(st.integers(1, most)) if most > 0 else 0

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data(), must_fit=st.booleans(), reserved=st.sampled_from([0, 0, 0, 1, 3]))
    def admit_for_a_load(self, data, must_fit, reserved):
        self.admit_to_load(choose(data, self.in_state("waiting")), data, must_fit, reserved)

    def admit_to_load(self, life, data, must_fit=False, reserved=0):
        request = life.request
        hit = self.look_up(request)
        external = self.draw_load(request, hit[2], data)
        options = {"must_fit": must_fit, "reserved": reserved, "delay": True}
        if external and self.allocate(life, 0, hit, external, **options):
            life.state, life.was_admitted = "loading", True
            life.load = range(hit[2], hit[2] + external)
            request.num_computed_tokens = life.load.stop

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data())
    def admit_with_a_load_within_the_step(self, data):
        life = choose(data, self.in_state("waiting"))
        request = life.request
        hit = self.look_up(request)
        external = self.draw_load(request, hit[2], data)
        remaining = request.num_tokens - hit[2] - external
        if not external or not remaining:
            return
        num_new = data.draw(st.integers(1, remaining))
        if self.allocate(life, num_new, hit, external):
            life.state, life.was_admitted = "running", True
            request.num_computed_tokens = hit[2] + external
            self.fill(life, range(hit[2], hit[2] + external), hit[2] + external)
            self.compute(life, num_new)

    def fill(self, life, load, num_arrived):
        """A load writes what the token after it needs, as far as it gets."""
        for g in self.token_groups:
            for token in range(load.start, num_arrived):
                is_needed = token in needed(self.model.groups[g], load.stop)
                if is_needed and token not in life.lost.get(g, ()):
                    self.model.write(life.request, g, token, prefix(life.request, token + 1))

    def can_run(self, life, num_computed):
        """Whether the load left nothing out that the tokens after these look at, or write."""
        for g in self.token_groups:
            group, table = self.model.groups[g], self.model.tables[life.request.request_id][g]
            for token in range(life.load.stop):
                is_hit = token < life.load.start and table[group.cell(token)[0]]
                is_passed = token < num_computed and token not in needed(group, num_computed)
                if not (is_hit or is_passed or token in needed(group, life.load.stop)):
                    return False
        return True

    def fill_more(self, life, data):
        """Fills more of the block in which a window begins; returns where each group's load did."""
        first_filled = []
        for g, group in enumerate(self.model.groups):
            tokens = [t for t in needed(group, life.load.stop) if t in life.load]
            first = least = min(tokens, default=life.load.stop)
            if group.kind in {"window", "chunk"}:
                block_start = first // group.block_size * group.block_size
                least = data.draw(st.integers(max(block_start, life.load.start), first))
            for token in range(least, first):
                self.model.write(life.request, g, token, prefix(life.request, token + 1))
            self.model.clean(life.request, g, least)
            first_filled.append(least)
        return first_filled

    def resume(self, life, num_computed, **options):
        """The load got so far; the request runs from there on."""
        request = life.request
        self.fill(life, life.load, num_computed)
        life.widest_step = max(life.widest_step, life.load.stop - num_computed)
        self.manager.cache_blocks(request, num_computed, **options)
        self.model.share(request, num_computed)
        # At least one token is computed here, for its logits.
        request.num_computed_tokens = min(num_computed, request.num_tokens - 1)
        life.state = "running"

    @precondition(lambda self: self.in_state("loading"))
    @rule(data=st.data())
    def load_succeeds(self, data):
        life = choose(data, self.in_state("loading"))
        self.resume(life, life.load.stop)

    @precondition(lambda self: self.in_state("loading"))
    @rule(data=st.data())
    def load_succeeds_and_fills_more_than_the_windows(self, data):
        life = choose(data, self.in_state("loading"))
        self.resume(life, life.load.stop, first_filled=self.fill_more(life, data))

    @precondition(lambda self: self.in_state("loading") and len(self.setup.groups) > 1)
    @rule(data=st.data())
    def load_succeeds_in_part_of_the_groups(self, data):
        """The source keeps windows where this engine keeps all: their heads cannot come."""
        keep_all = [g for g in self.token_groups if self.model.groups[g].kind == "full"]
        life = choose(data, self.in_state("loading"))
        skipped = {g for g in keep_all if data.draw(st.booleans())}
        for g in skipped:
            first = data.draw(st.integers(life.load.start, life.load.stop))
            life.lost[g] = range(life.load.start, first)
        self.model.unshared[life.request.request_id] |= skipped
        self.resume(life, life.load.stop, skip_groups=skipped)

    @precondition(lambda self: self.in_state("loading"))
    @rule(data=st.data())
    def load_fails_and_the_rest_is_recomputed(self, data):
        life = choose(data, self.in_state("loading"))
        num_computed = data.draw(st.integers(life.load.start, life.load.stop - 1))
        assert self.manager.can_resume(life.request, num_computed) == self.can_run(
            life, num_computed
        )
        if self.can_run(life, num_computed):
            self.resume(life, num_computed)
            return
        life.request.num_computed_tokens = num_computed
        with pytest.raises(ValueError, match="free it and admit it again"):
            self.manager.allocate_slots(life.request, 1)
        self.give_up(life, again=True)

    @precondition(lambda self: self.in_state("loading"))
    @rule(data=st.data(), again=st.booleans())
    def load_fails_and_the_request_gives_its_blocks_up(self, data, again):
        self.give_up(choose(data, self.in_state("loading")), again)

    def compute(self, life, num_new):
        """The step has run: KV is written, and the last token of the sequence yields the next."""
        request = life.request
        for token in range(request.num_computed_tokens, request.num_computed_tokens + num_new):
            for g in self.token_groups:
                self.model.write(request, g, token, prefix(request, token + 1))
        request.num_computed_tokens += num_new
        if request.num_computed_tokens == request.num_tokens < MAX_MODEL_LEN:
            request.append_output_token_ids(request.num_tokens % 2)

    @precondition(lambda self: self.in_state("running"))
    @rule(
        data=st.data(),
        times=st.integers(1, 6),
        lookahead=st.sampled_from([0, 0, 1, 5]),
        reserved=st.sampled_from([0, 0, 1]),
        must_fit=st.sampled_from([False, False, True]),
    )
    def grow(self, data, times, lookahead, reserved, must_fit):
        life = choose(data, self.in_state("running"))
        for _ in range(times):
            remaining = life.request.num_tokens - life.request.num_computed_tokens
            if remaining == 0:  # it reached the model's length
                self.give_up(life, again=False)
                return
            num_new = data.draw(st.integers(1, remaining))
            options = {"lookahead": lookahead, "reserved": reserved, "must_fit": must_fit}
            if self.allocate(life, num_new, **options):
                self.compute(life, num_new)

    @precondition(lambda self: self.in_state("running"))
    @rule(data=st.data(), drafts=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def verify_drafts(self, data, drafts):
        life = choose(data, self.in_state("running"))
        request, model = life.request, self.model
        drafts = drafts[: max(0, MAX_MODEL_LEN - 1 - request.num_tokens)]
        first = request.num_computed_tokens
        if request.num_tokens - first != 1 or not drafts:
            return
        if not self.allocate(life, 1 + len(drafts)):
            return
        for offset in range(1 + len(drafts)):
            content = (*prefix(request, first + 1), *drafts[:offset])
            for g in self.token_groups:
                if model.groups[g].kind != "state":  # a state's drafts lie beside it
                    model.write(request, g, first + offset, content)
        accepted = drafts[: data.draw(st.integers(0, len(drafts)))]
        request.append_output_token_ids([*accepted, 0])
        request.num_computed_tokens = first + 1 + len(accepted)
        for token in range(first, request.num_computed_tokens):
            for g in self.token_groups:
                model.write(request, g, token, prefix(request, token + 1))

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
        life.lost.clear()
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

    @precondition(lambda self: "state" in {group.kind for group in self.model.groups})
    @rule()
    def new_step_starts(self):
        self.manager.new_step_starts()
        self.model.new_step_starts()

    @rule()
    def reset(self):
        done = self.manager.reset_prefix_cache()
        assert done == self.model.reset()
        self.stats.reset |= done


def machine_of(setups):
    """The machine over the configs that a strategy draws."""

    class Machine(ManagerMachine):
        @initialize(setup=setups)
        def begin(self, setup):
            self.start(setup)

    return Machine
