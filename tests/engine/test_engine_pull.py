"""Random lives of two engines around the connector that ships, over the toy model.

Real control channel, leases and transports; no torch. Pools are small, so that requests are
preempted on the decode side after their load, and prompts are lent out until the pool is full.
"""

import random
import secrets
import time

import pytest

from kvferry.config import KVTransferConfig
from kvferry.engine.messages import SamplingParams
from kvferry.testing.waiting import until
from tests.engine.simulated import VOCAB, open_connected
from tests.engine.toy_cache import reference_tokens


def open_engine(role, transport, policy, windows, extra=None, **shape):
    config = KVTransferConfig(
        kv_connector="PullConnector",
        kv_role=role,
        engine_id=f"{role}-{secrets.token_hex(4)}",
        kv_port=0,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"cluster_key": "k" * 32, "transport": transport} | (extra or {}),
    )
    return open_connected(config, windows=windows, **shape)[0]


class Pair:
    """A prefill and a decode engine, and the requests on their way through them."""

    def __init__(self, prefill, decode, rng):
        self.prefill, self.decode, self.rng = prefill, decode, rng
        self.live = {}
        self.tokens = {}
        self.aborted = set()
        self.reasons = []
        self.loaded_tokens = 0

    def send(self, name, prompt, max_tokens):
        self.live[name] = (prompt, max_tokens)
        self.prefill.add_request(
            name,
            prompt,
            SamplingParams(max_tokens=1),
            kv_transfer_params={"do_remote_decode": True},
        )

    def abort_one(self):
        name = self.rng.choice(list(self.live))
        if self.prefill.abort(name) or self.decode.abort(name):
            self.aborted.add(name)

    def step(self):
        for output in self.prefill.step():
            self.hand_over(output)
        for output in self.decode.step():
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.check_end(output)
        if not self.is_computing:
            time.sleep(0.0005)

    def hand_over(self, output):
        name = output.request_id
        if output.finish_reason == "abort":
            del self.live[name]
            return
        assert output.finish_reason == "length", output
        prompt, max_tokens = self.live[name]
        self.tokens[name] = output.token_ids
        self.decode.add_request(
            name,
            prompt + output.token_ids,
            SamplingParams(max_tokens=max_tokens - 1, seed_offset=1),
            kv_transfer_params=output.kv_transfer_params,
        )

    def check_end(self, output):
        prompt, max_tokens = self.live.pop(output.request_id)
        expected = reference_tokens(prompt, max_tokens, VOCAB)
        tokens = self.tokens[output.request_id]
        assert tokens == expected[: len(tokens)]
        if output.finish_reason == "abort":
            assert output.request_id in self.aborted
        else:
            assert (output.finish_reason, tokens) == ("length", expected), output.error
        self.reasons.append(output.finish_reason)
        self.loaded_tokens += output.num_external_tokens

    @property
    def is_computing(self):
        return self.prefill.is_computing or self.decode.is_computing

    @property
    def is_busy(self):
        return self.live or self.prefill.has_work() or self.decode.has_work()


ALL, HYBRID, WINDOW = (None,), (None, 6), (7,)
"""For each KV cache group, the tokens that it keeps."""


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("transport", "windows"),
    [
        ("shm", (ALL, ALL)),
        ("tcp", (ALL, ALL)),
        ("shm", (HYBRID, HYBRID)),
        ("shm", ((None, None), HYBRID)),
        ("shm", (WINDOW, WINDOW)),
    ],
    ids=["shm", "tcp", "hybrid", "whole-to-hybrid", "window"],
)
def test_random_lives_end_with_the_right_tokens_and_every_block_free(seed, transport, windows):
    rng = random.Random(seed)
    policy = rng.choice(["fail", "recompute"])
    shapes = [
        {
            "num_blocks": rng.randint(24, 50) * max(map(len, windows)),
            "block_size": rng.choice(sizes),
            "world_size": rng.randint(1, 3),
        }
        for sizes in ((3, 4, 8), (2, 4, 5))
    ]
    waiting = [
        (f"q{i}", [(7 * j + i % 3) % VOCAB for j in range(rng.randint(1, 40))], rng.randint(2, 8))
        for i in range(30)
    ]
    with (
        open_engine("kv_producer", transport, policy, windows[0], **shapes[0]) as prefill,
        open_engine("kv_consumer", transport, policy, windows[1], **shapes[1]) as decode,
    ):
        pair = Pair(prefill, decode, rng)

        def all_have_ended():
            if waiting and rng.random() < 0.5:
                pair.send(*waiting.pop())
            pair.step()
            # No chance per turn: while loads wait for the processor, a loop has any number.
            if pair.is_computing and pair.live and rng.random() < 0.03:
                pair.abort_one()
            return not (waiting or pair.is_busy)

        until(all_have_ended, every_s=0, what=lambda: (prefill.stats(), decode.stats(), pair.live))
        for engine in (prefill, decode):
            stats = engine.stats().scheduler
            assert stats.free_blocks == stats.usable_blocks
        assert pair.reasons.count("length") >= 15
        assert pair.loaded_tokens > 0
        assert all(record.ok or pair.aborted for record in decode.records())
