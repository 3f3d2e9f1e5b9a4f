"""Random requests, loads, failures, aborts and lendings in a small pool.

Whatever happens: every token is the model's, every block is accounted for, everything ends.
"""

import dataclasses
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.engine.messages import SamplingParams
from kvferry.engine.request import RequestStatus, SchedulerOptions
from kvferry.errors import OutOfBlocksError, TicketError
from tests.engine.simulated import VOCAB, open_simulated
from tests.engine.toy_cache import reference_tokens

BLOCK_SIZE = 4
EOS = 5

plain: st.SearchStrategy[dict[str, Any]] = st.just({})
loads = st.fixed_dictionaries(
    {"external": st.integers(4, 30), "load_steps": st.integers(1, 12)},
    optional={
        "ask_later": st.integers(0, 4),
        "load_async": st.booleans(),
        "repeat": st.integers(0, 2),
        "lend_steps": st.integers(1, 6),
    },
)
failures = st.fixed_dictionaries(
    {"external": st.integers(4, 30), "valid": st.integers(0, 20)},
    optional={
        "load_steps": st.integers(1, 8),
        "load_async": st.booleans(),
        "report_blocks": st.booleans(),
        "report_failed": st.booleans(),
    },
)
loans = st.fixed_dictionaries({"lend_steps": st.integers(1, 10)})
odd = st.sampled_from([{"refuse": True}, {"impossible": True}, {"external": 0, "ask_later": 7}])
scripts = st.one_of(plain, loads, loads, failures, loans, odd)


@dataclasses.dataclass
class Sent:
    prompt: list[int]
    max_tokens: int
    script: dict
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str | None = None
    aborted: bool = False

    def expected(self):
        return reference_tokens(self.prompt, self.max_tokens, VOCAB, stop=(EOS,))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(8, 16),
        budget=st.integers(1, 24),
        seats=st.integers(1, 4),
        policy=st.sampled_from(["fail", "recompute"]),
        caching=st.booleans(),
        world_size=st.integers(1, 2),
        windows=st.sampled_from([(None,), (None,), (None, 6), (3, None, 9), (5,)]),
    )
    def open(self, num_blocks, budget, seats, policy, caching, world_size, windows):
        options = SchedulerOptions(
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            load_failure_policy=policy,
            enable_prefix_caching=caching,
            eos_token_ids=(EOS,),
        )
        num_blocks *= len(windows)
        self.policy, self.num_blocks, self.seats, self.budget = policy, num_blocks, seats, budget
        self.windows = windows
        self.engine, self.executor, self.connector = open_simulated(
            options,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            world_size=world_size,
            windows=windows,
            scripted=True,
        )
        self.scheduler = self.engine.scheduler
        self.sent = {}

    @rule(
        length=st.integers(1, 24),
        salt=st.integers(0, 2),
        max_tokens=st.integers(1, 12),
        script=scripts,
    )
    def add(self, length, salt, max_tokens, script):
        prompt = [(7 * i + salt) % VOCAB for i in range(length)]
        name = f"r{len(self.sent)}"
        fits = self.most_held(length + max_tokens - 1) <= self.num_blocks - 1
        refused = None
        try:
            self.engine.add_request(
                name, prompt, SamplingParams(max_tokens=max_tokens), kv_transfer_params=script
            )
        except (OutOfBlocksError, TicketError) as error:
            refused = type(error)
        expected = OutOfBlocksError if not fits else TicketError if "refuse" in script else None
        assert refused is expected
        self.sent[name] = Sent(prompt, max_tokens, script)
        if refused:
            self.sent[name].reason = "refused"

    def most_held(self, num_tokens):
        """Blocks of all groups that a sequence holds at once, whatever the sizes of its steps."""
        most = 0
        for window in self.windows:
            whole = -(-num_tokens // BLOCK_SIZE)
            # A step's tokens and the window before them, beginning anywhere in a block.
            widest = num_tokens if window is None else window - 1 + self.budget
            most += min(whole, -(-(widest - 1) // BLOCK_SIZE) + 1)
        return most

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.step()

    def step(self):
        computing = {name for name, sent in self.sent.items() if sent.reason is None}
        for output in self.engine.step():
            sent = self.sent[output.request_id]
            assert sent.reason is None
            sent.tokens += output.token_ids
            sent.reason = output.finish_reason
            if sent.reason is not None:
                self.check_end(sent, output)
        step = self.executor.steps[-1]
        assert sum(step.num_scheduled_tokens.values()) <= self.budget
        assert len(step.requests) <= self.seats
        assert set(step.num_scheduled_tokens) <= computing

    def check_end(self, sent, output):
        expected = sent.expected()
        assert sent.tokens == expected[: len(sent.tokens)]
        if sent.reason == "abort":
            assert sent.aborted
        elif sent.reason == "error":
            assert self.policy == "fail"
            assert "impossible" in sent.script or "valid" in sent.script
        else:
            assert sent.tokens == expected
            assert sent.reason == ("stop" if expected[-1] == EOS else "length")

    @rule(salt=st.integers(0, 2), count=st.integers(2, 4))
    def press(self, salt, count):
        """Many plain requests at once: every block that is free too early finds a taker."""
        for _ in range(count):
            self.add(9, salt, 3, {})
        self.steps(2)

    @precondition(lambda self: self.scheduler.transfers.loading)
    @rule(data=st.data())
    def abort_a_load(self, data):
        name = data.draw(st.sampled_from([r.request_id for r in self.scheduler.transfers.loading]))
        assert self.engine.abort(name)
        self.sent[name].aborted = True

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from([*self.sent, "nobody"]))
        live = name in self.scheduler.requests
        assert self.engine.abort(name) == live
        if live:
            self.sent[name].aborted = True

    @invariant()
    def every_block_is_accounted_for(self):
        if not hasattr(self, "engine"):
            return
        transfers, manager = self.scheduler.transfers, self.scheduler.manager
        tables = {
            name: manager.get_block_ids(name)
            for name in [*self.scheduler.requests, *transfers.held]
        }
        used = {block for table in tables.values() for ids in table for block in ids} - {0}
        assert self.engine.stats().scheduler.free_blocks == self.num_blocks - 1 - len(used)
        for table in tables.values():
            for ids, window in zip(table, self.windows, strict=True):
                assert window is not None or 0 not in ids
        # No block is in two groups' tables, and what is being filled belongs to nobody else.
        owners = [
            {block for table in tables.values() for block in table[group]} - {0}
            for group in range(len(self.windows))
        ]
        assert sum(map(len, owners)) == len(used)
        for request in transfers.loading:
            name = request.request_id
            first = request.load.local_tokens // BLOCK_SIZE
            filled = {block for ids in tables[name] for block in ids[first:]} - {0}
            others = {
                block
                for other, table in tables.items()
                if other != name
                for ids in table
                for block in ids
            }
            assert not filled & others

    @invariant()
    def every_live_request_is_in_one_place(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.scheduler
        places = [
            *scheduler.waiting,
            *scheduler.ready,
            *scheduler.running,
            *scheduler.transfers.loading,
        ]
        assert sorted(r.request_id for r in places) == sorted(scheduler.requests)
        for queue in (scheduler.waiting, scheduler.ready, scheduler.running):
            assert [r.sequence for r in queue] == sorted(r.sequence for r in queue)
        assert all(r.status is RequestStatus.RUNNING for r in scheduler.running)
        assert not any(r.allocated_tokens for r in scheduler.waiting)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(4000):
            if not self.engine.has_work():
                break
            self.step()
            self.every_block_is_accounted_for()
        assert not self.engine.has_work()
        assert all(sent.reason is not None for sent in self.sent.values())
        assert self.engine.stats().scheduler.free_blocks == self.num_blocks - 1


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestScheduler = SchedulerMachine.TestCase
