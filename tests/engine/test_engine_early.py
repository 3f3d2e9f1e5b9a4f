"""Random lives of two engines, where prompts are loaded while they are computed.

As in ``test_engine_pull``, but the decode engine is given a ticket as soon as the prefill engine
has granted its lease, and the prefill engine computes in chunks and preempts.
"""

import itertools
import random
from typing import Any

import pytest

from kvferry.control.tickets import TransferId
from kvferry.engine.messages import SamplingParams
from kvferry.testing.waiting import until
from tests.engine.simulated import VOCAB
from tests.engine.test_engine_pull import HYBRID, Pair, open_engine
from tests.engine.toy_cache import reference_tokens

KEY = b"k" * 32


class EarlyPair(Pair):
    """A pair in which both engines have a request at once."""

    def __init__(self, prefill, decode, rng):
        super().__init__(prefill, decode, rng)
        self.failed = 0
        self.early = 0
        """Loads that began before their prompt was whole."""
        self.told = prefill.connector.lender.tickets.tell_lent
        prefill.connector.lender.tickets.tell_lent = self.tell_lent

    def send(self, name, prompt, max_tokens):
        self.live[name] = (prompt, max_tokens)
        transfer = TransferId.begin("127.0.0.1:1", KEY)
        self.prefill.add_request(
            name,
            prompt,
            SamplingParams(max_tokens=1),
            kv_transfer_params={"do_remote_decode": True, "transfer": transfer.text},
        )

    def tell_lent(self, ticket):
        """As a decode engine that has asked is told; a lease is told of twice."""
        name = ticket.request_id
        if name in self.live and name not in self.tokens:
            prompt, max_tokens = self.live[name]
            first = reference_tokens(prompt, 1, VOCAB)
            self.tokens[name] = list(first)
            self.decode.add_request(
                name,
                [*prompt, *first],
                SamplingParams(max_tokens=max_tokens - 1, seed_offset=1),
                kv_transfer_params=self.prefill.connector.lender.tickets.params(ticket),
            )
        return self.told(ticket)

    def hand_over(self, output):
        if output.request_id not in self.tokens:  # no lease was granted, nor will be
            super().hand_over(output)

    def step(self):
        super().step()
        loads = self.decode.connector.borrower.loads.values()
        self.early += any(load.is_early for load in loads)

    def check_end(self, output):
        if output.finish_reason == "error":
            # Its prompt was preempted or aborted, and the policy is not to compute it here.
            assert "has ended" in output.error
            self.live.pop(output.request_id)
            self.failed += 1
            return
        super().check_end(output)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("early_load", ["now", "late"])
@pytest.mark.parametrize("windows", [((None,), (None,)), ((None, None), HYBRID)], ids=str)
def test_random_lives_end_with_the_right_tokens_and_every_block_free(seed, early_load, windows):
    rng = random.Random(seed)
    policy = rng.choice(["fail", "recompute"])
    shapes: list[dict[str, Any]] = [
        {
            "num_blocks": rng.randint(30, 60) * max(map(len, windows)),
            "block_size": rng.choice(sizes),
            "world_size": rng.randint(1, 3),
        }
        for sizes in ((3, 4, 8), (2, 4, 5))
    ]

    def drawn(i: int) -> tuple[str, list[int], int]:
        prompt = [(7 * j + i % 3) % VOCAB for j in range(rng.randint(1, 60))]
        return f"q{i}", prompt, rng.randint(2, 8)

    numbers = itertools.count()
    waiting = [drawn(next(numbers)) for _ in range(20)]
    shapes[0]["max_num_batched_tokens"] = 8
    shapes[1]["extra"] = {"early_load": early_load}
    with (
        open_engine("kv_producer", "shm", policy, windows[0], **shapes[0]) as p,
        open_engine("kv_consumer", "shm", policy, windows[1], **shapes[1]) as d,
    ):
        pair = EarlyPair(p, d, rng)

        def is_over() -> bool:
            if not waiting and not pair.is_busy:
                # On a busy machine, every ask may come after its prompt was computed.
                waiting.append(drawn(next(numbers)))
            if waiting and rng.random() < 0.3:
                pair.send(*waiting.pop())
            pair.step()
            if pair.is_computing and pair.live and rng.random() < 0.02:
                pair.abort_one()
            is_idle = not (waiting or pair.is_busy)
            return is_idle and bool(pair.early or early_load == "late")

        until(is_over, every_s=0, what=lambda: (p.stats(), d.stats(), pair.live, pair.early))
        for engine in (p, d):
            stats = engine.stats().scheduler
            assert stats.free_blocks == stats.usable_blocks
        assert pair.reasons.count("length") >= 8
        assert pair.loaded_tokens > 0
