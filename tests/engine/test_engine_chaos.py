"""Two prefill and two decode engines while nearly everything goes wrong; no token may be wrong.

Leases run out under slow reads and parked requests, engines stop and are started again under their
id, connections break, sources forget their targets, tickets are replayed and given to two engines.
Time passes as the turns of the test do, so that no lease ends because a machine is slow.
The toy model reads its tokens back from the cache, so that one wrong cell is a wrong token.
"""

import random
import secrets
import time
from contextlib import suppress
from typing import Any

import pytest

from benchmarks.vllm_servers.ports import free_port
from kvferry.config import KVTransferConfig
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import FinishAnswer
from kvferry.engine.messages import SamplingParams
from kvferry.errors import TicketError
from kvferry.layouts import chunks, kernels
from kvferry.testing.waiting import until
from tests.clock import Clock
from tests.engine.simulated import VOCAB, open_connected
from tests.engine.toy_cache import reference_tokens

PROMPTS = 50
PREFILL, DECODE = ("p0", "p1"), ("d0", "d1")
LEASE_S = (20.0, 60.0, 120.0)
TURN_S = 1.0
"""Time that passes in each turn after the storm."""


class Member:
    """One engine, through all its starts."""

    def __init__(self, name, transport, policy, lease_s, rng):
        self.name, self.policy, self.rng = name, policy, rng
        self.num_blocks = rng.randint(24, 50)
        self.block_size = rng.choice((3, 4, 8) if name in PREFILL else (2, 4, 5))
        self.world_size = rng.randint(1, 3)
        self.port = free_port()
        self.paused_turns = 0
        self.extra = {
            "cluster_key": "k" * 32,
            "transport": transport,
            "lease_duration_s": lease_s,
            "handshake_timeout_s": LEASE_S[-1],
            "request_timeout_s": LEASE_S[-1],
            "progress_timeout_s": 100 * LEASE_S[-1],
        }
        self.start()

    def start(self):
        config = KVTransferConfig(
            kv_connector="PullConnector",
            kv_role="kv_producer" if self.name in PREFILL else "kv_consumer",
            engine_id=self.name,
            kv_port=self.port,
            kv_load_failure_policy=self.policy,
            kv_connector_extra_config=self.extra,
        )
        self.engine, self.executor = open_connected(
            config,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            world_size=self.world_size,
        )
        self.live = {}  # name -> (prompt, first tokens, length of the answer)
        self.tokens = {}

    def restart(self):
        self.engine.close()
        if self.rng.random() < 0.3:
            self.port = free_port()
        self.start()

    def add(self, name, prompt, first, length, params):
        limit = 1 if self.name in PREFILL else length - 1
        sampling = SamplingParams(max_tokens=limit, seed_offset=len(first))
        with suppress(TicketError, ValueError):  # replayed, or its id is in use
            self.engine.add_request(name, prompt + first, sampling, kv_transfer_params=params)
            self.live[name], self.tokens[name] = (prompt, first, length), []

    def step(self):
        """Steps unless it is paused; returns what ended, after a look at its tokens."""
        if self.paused_turns:
            self.paused_turns -= 1
            return []
        ended = []
        for output in self.engine.step():
            name = output.request_id
            self.tokens[name] += output.token_ids
            if output.finish_reason is None:
                continue
            (prompt, first, length), got = self.live.pop(name), self.tokens.pop(name)
            expected = reference_tokens(prompt, length, VOCAB)[len(first) :]
            assert got == expected[: len(got)], (self.name, output)
            if output.finish_reason == "length":
                assert len(got) == (1 if self.name in PREFILL else len(expected))
            ended.append((output, prompt, got, length))
        return ended

    def check_settled(self):
        stats = self.engine.stats().scheduler
        assert stats.free_blocks == stats.usable_blocks
        connector: Any = self.engine.connector
        assert not connector.borrower.loads
        assert not connector.sources.agenda.pursuits
        workers: Any = self.executor.workers
        for worker in workers:
            assert not worker.cache.loads._loads


class Chaos:
    """All four, the requests between them, and what goes wrong."""

    misfortune = 0.08
    """Chance of a misfortune in each turn of the storm."""

    def __init__(self, transport, rng, clock):
        self.rng, self.clock = rng, clock
        self.lease_s = rng.choice(LEASE_S)
        policy = rng.choice(["fail", "recompute", "recompute"])
        self.members = {
            name: Member(name, transport, policy, self.lease_s, rng) for name in PREFILL + DECODE
        }
        self.tickets = []
        self.sent = 0
        self.loaded_tokens = 0  # of requests that came to a good end

    def run(self):
        members = list(self.members.values())

        def is_over():
            is_quiet = not any(m.live or m.engine.has_work() for m in members)
            if self.sent < PROMPTS:
                if self.rng.random() < 0.4:
                    self.send()
                if self.rng.random() < self.misfortune:
                    self.rng.choice(self.misfortunes)()
            elif is_quiet and self.loaded_tokens:
                return True
            elif is_quiet:
                # Every lease of the storm may have run out. It is over now, so a load must succeed.
                self.send()
            else:
                self.clock.advance(TURN_S)
            for member in members:
                for ended in member.step():
                    self.hand_over(member, *ended)
            return False

        until(is_over, every_s=0.0003, what=lambda: {m.name: m.engine.stats() for m in members})
        for member in members:
            member.check_settled()

    def any_of(self, names):
        return self.members[self.rng.choice(names)]

    def send(self):
        self.sent += 1
        length = self.rng.randint(1, 40)
        prompt = [(7 * j + self.sent % 3) % VOCAB for j in range(length)]
        if self.rng.random() < 0.7:  # the others share prefixes
            prompt = [self.rng.randrange(VOCAB) for _ in range(length)]
        name = self.rng.choice([f"again{self.sent % 7}", f"once{self.sent}"])
        self.any_of(PREFILL).add(
            name, prompt, [], self.rng.randint(2, 8), {"do_remote_decode": True}
        )

    def hand_over(self, member, output, prompt, tokens, length):
        if member.name in DECODE:
            if output.finish_reason == "length":
                self.loaded_tokens += output.num_external_tokens
            return
        if output.finish_reason != "length":
            return
        self.tickets.append((prompt, tokens, length, output.kv_transfer_params))
        targets = DECODE if self.rng.random() < 0.2 else (self.rng.choice(DECODE),)
        for target in targets:
            self.members[target].add(output.request_id, *self.tickets[-1])

    # ---- what goes wrong ----------------------------------------------------------------------

    @property
    def misfortunes(self):
        return (
            *[self.abort] * 6,
            *[self.pause] * 2,
            self.wait,
            self.restart,
            self.replay,
            *[self.expire] * 4,
            self.disconnect,
            self.forget,
        )

    def abort(self):
        member = self.any_of(PREFILL + DECODE)
        if member.live:
            member.engine.abort(self.rng.choice(list(member.live)))

    def pause(self):
        self.any_of(PREFILL + DECODE).paused_turns = self.rng.randint(1, 100)

    def wait(self):
        self.clock.advance(2 * self.lease_s * self.rng.random())

    def restart(self):
        if self.rng.random() < 0.3:
            self.any_of(PREFILL + DECODE).restart()

    def replay(self):
        if self.tickets:
            name = f"replay{secrets.token_hex(4)}"
            self.any_of(DECODE).add(name, *self.rng.choice(self.tickets))

    def expire(self):
        leases = self.any_of(PREFILL).engine.connector.lender.leases
        clock, jump = leases._clock, 1.1 * self.lease_s
        leases._clock = lambda: clock() + jump

    def disconnect(self):
        worker = self.rng.choice(self.any_of(DECODE).executor.workers)
        for peer in list(worker.cache.loads.peers.connected.values()):
            for connection in list(peer.connections.values()):
                connection.close()

    def forget(self):
        server = self.any_of(PREFILL).engine.connector.server
        server.peers.forget(self.rng.choice(DECODE))

    def close(self):
        for member in self.members.values():
            member.engine.close()


@pytest.fixture
def slow_copies(monkeypatch):
    """Makes every other copy take its time."""

    copies = [
        (module, name, getattr(module, name))
        for module, name in ((chunks, "copy_chunks"), (kernels, "copy_now"))
    ]

    def slow_down(longest_s, rng):
        for module, name, copy in copies:
            monkeypatch.setattr(module, name, slowed(copy, longest_s, rng))

    def slowed(copy, longest_s, rng):
        def copy_slowly(*args):
            if longest_s and rng.random() < 0.5:
                time.sleep(longest_s * rng.random())
            return copy(*args)

        return copy_slowly

    return slow_down


def live_through(seed, transport, slow_copies, *, longest_s=None):
    rng = random.Random(seed)
    drawn_s = rng.choice([0, 0.02, 0.2])
    slow_copies(drawn_s if longest_s is None else longest_s, random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        chaos = Chaos(transport, rng, Clock.install(patch))
        try:
            chaos.run()
        finally:
            chaos.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n > 3)) for n in range(20)]
)
def test_whatever_goes_wrong_no_token_is_wrong_and_every_block_comes_back(
    seed, transport, slow_copies
):
    live_through(seed, transport, slow_copies)


@pytest.mark.slow
def test_a_source_that_confirms_whatever_was_read_is_found_out(slow_copies, monkeypatch):
    finish = LeaseTable.finish

    def credulous(*args, **kwargs):
        finish(*args, **kwargs)
        return FinishAnswer.HELD

    monkeypatch.setattr(LeaseTable, "finish", credulous)
    # Leases run out under slow reads, and nothing else happens.
    monkeypatch.setattr(Chaos, "misfortunes", property(lambda chaos: (chaos.expire,)))
    monkeypatch.setattr(Chaos, "misfortune", 0.4)

    def a_hundred_lives():
        for seed in range(100):
            live_through(seed, "shm", slow_copies, longest_s=0.2)

    with pytest.raises(AssertionError, match=r"\('d[01]', EngineOutput"):
        a_hundred_lives()
