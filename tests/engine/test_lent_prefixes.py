"""Any engine lends what its prefix cache has, and nobody of its own suffers for it.

Engines over the toy model, whose tokens follow from the KV that it reads, with the connector that
ships: a prefix that arrives wrong shows as a wrong token.
"""

import random
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.control.leases import LeaseTable
from kvferry.engine.engine import Engine
from kvferry.engine.messages import EngineOutput, SamplingParams
from kvferry.errors import RequestError
from kvferry.testing.waiting import until
from tests.engine.simulated import VOCAB, open_connected, prompt
from tests.engine.toy_cache import reference_tokens

NOTHING = {"do_remote_prefill": False, "do_remote_decode": False, "remote_num_tokens": 0}
UNCAPPED = {"max_leased_blocks": 20, "max_lent_prefix_blocks": 20}
ONLY_CACHED = {"do_remote_decode": True, "only_cached": True}


@pytest.fixture
def opened() -> Any:
    """Opens engines; they are closed at the end of the test."""
    engines: list[Engine] = []

    def open_one(
        num_blocks: int = 64,
        block_size: int = 4,
        world_size: int = 1,
        windows: Any = (None,),
        role: str = "kv_both",
        policy: Any = "fail",
        **extra: Any,
    ) -> Engine:
        config = KVTransferConfig(
            kv_connector="PullConnector",
            kv_role=role,  # type: ignore[arg-type]
            engine_id=f"e-{secrets.token_hex(4)}",
            kv_port=0,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"cluster_key": "k" * 32, "lease_duration_s": 600.0, **extra},
        )
        engine, _ = open_connected(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            world_size=world_size,
            windows=windows,
        )
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        engine.close()


def asked(
    engine: Engine, ids: list[int], *others: Engine, max_tokens: int = 1, **params: Any
) -> EngineOutput:
    """The whole answer of an engine, while the others step too."""
    name = secrets.token_hex(8)
    engine.add_request(
        name, ids, SamplingParams(max_tokens=max_tokens), kv_transfer_params=params or None
    )
    return answered(engine, name, *others)


def answered(engine: Engine, name: str, *others: Engine) -> EngineOutput:
    """The whole answer to a request that was added."""
    answer = EngineOutput(request_id=name)

    def is_over() -> bool:
        nonlocal answer
        for output in engine.step():
            if output.request_id == name:
                answer += output
        for other in others:
            if other is not engine:
                other.step()
        return answer.finish_reason is not None

    until(is_over, every_s=0.0005, what="an answer")
    return answer


def lent(engine: Engine, ids: list[int]) -> dict[str, Any]:
    """What an engine answers to a request for what is cached, of which it computes nothing."""
    answer = asked(engine, ids, **ONLY_CACHED)
    assert (answer.finish_reason, answer.token_ids) == ("length", [])
    assert answer.timings is not None
    assert answer.timings.prefill_started is None
    assert answer.kv_transfer_params is not None
    return answer.kv_transfer_params


def leases_of(engine: Engine) -> LeaseTable:
    """The leases of what an engine lends."""
    assert isinstance(engine.connector, PullScheduler)
    return engine.connector.lender.leases


def settled(*engines: Engine) -> None:
    """Every block of every engine comes back."""

    def is_idle() -> bool:
        for engine in engines:
            engine.step()
        return not any(engine.has_work() for engine in engines)

    until(is_idle, every_s=0.0005, what="every block")
    for engine in engines:
        stats = engine.stats().scheduler
        assert stats.free_blocks == stats.usable_blocks


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)], ids=["all", "window", "hybrid"])
def test_an_engine_lends_what_it_has_cached_and_the_borrower_computes_the_rest(
    opened: Callable[..., Engine], windows: Any
) -> None:
    lender = opened(windows=windows, world_size=2)
    borrower = opened(block_size=3, windows=windows)
    history = prompt(30)
    history += asked(lender, history, max_tokens=11).token_ids
    question = history + prompt(9, 5)
    computed = lender.stats().computed_tokens
    params = lent(lender, question)
    assert lender.stats().computed_tokens == computed
    # Its own last token was drawn and never computed; of the rest, whole blocks.
    assert params["remote_num_tokens"] == 40
    assert lender.stats().connector["prefix_tokens_lent"] == 40
    answer = asked(borrower, question, lender, max_tokens=8, **params)
    assert answer.token_ids == reference_tokens(question, 8, VOCAB)
    assert answer.num_external_tokens == 40
    assert borrower.stats().computed_tokens == len(question) - 40 + 7
    settled(lender, borrower)


def test_a_prompt_of_which_nothing_is_cached_is_answered_at_once(
    opened: Callable[..., Engine],
) -> None:
    lender, borrower = opened(), opened()
    asked(lender, prompt(20, 1))
    params = lent(lender, prompt(20, 2))
    assert params == NOTHING
    assert lender.stats().scheduler.lent == 0
    answer = asked(borrower, prompt(20, 2), max_tokens=4, **params)
    assert answer.token_ids == reference_tokens(prompt(20, 2), 4, VOCAB)
    settled(lender, borrower)


def test_less_is_lent_where_less_is_cached(opened: Callable[..., Engine]) -> None:
    lender = opened()
    asked(lender, prompt(10))
    assert lent(lender, prompt(20))["remote_num_tokens"] == 8
    # One token at least is left to the borrower, for its logits.
    assert lent(lender, prompt(8))["remote_num_tokens"] == 4


def test_blocks_that_are_still_being_computed_are_not_lent(opened: Callable[..., Engine]) -> None:
    lender = opened()
    ids = prompt(60)  # of which a step computes 32
    lender.add_request("computes", ids, SamplingParams(max_tokens=1))
    lender.add_request("asks", ids, kv_transfer_params=ONLY_CACHED)
    assert answered(lender, "asks").kv_transfer_params == NOTHING
    assert lent(lender, ids)["remote_num_tokens"] == 32


def test_only_cached_goes_with_lending_alone(opened: Callable[..., Engine]) -> None:
    engine = opened()
    for params in (
        {"only_cached": True},
        {"only_cached": True, "do_remote_decode": True, "do_remote_prefill": True},
    ):
        with pytest.raises(RequestError, match="only_cached asks for what is cached here"):
            asked(engine, prompt(9), **params)


def test_an_engine_that_only_consumes_lends_nothing(opened: Callable[..., Engine]) -> None:
    engine = opened(role="kv_consumer")
    asked(engine, prompt(20))
    assert lent(engine, prompt(20)) == NOTHING
    settled(engine)


# ---- the lender comes first ---------------------------------------------------------------------


def test_untaken_prefixes_are_withdrawn_before_a_request_waits_for_long(
    opened: Callable[..., Engine],
) -> None:
    lender = opened(num_blocks=21, **UNCAPPED)
    asked(lender, prompt(40))
    assert lent(lender, prompt(41))["remote_num_tokens"] == 40
    own = prompt(60, 3)  # 15 of 20 blocks, of which 10 are lent
    answer = asked(lender, own)
    assert answer.token_ids == reference_tokens(own, 1, VOCAB)
    assert lender.stats().connector["prefixes_withdrawn"] == 1
    settled(lender)


def test_untaken_prefixes_are_withdrawn_before_a_request_is_preempted(
    opened: Callable[..., Engine],
) -> None:
    lender = opened(num_blocks=21, **UNCAPPED)
    asked(lender, prompt(32))
    for _ in range(2):
        assert lent(lender, prompt(33))["remote_num_tokens"] == 32
    own = prompt(24, 3)
    answer = asked(lender, own, max_tokens=40)  # 16 blocks in the end
    assert answer.token_ids == reference_tokens(own, 40, VOCAB)
    stats = lender.stats()
    assert stats.scheduler.preemptions == 0
    assert stats.connector["prefixes_withdrawn"] == 2, "both held the blocks"
    settled(lender)


def test_a_prefix_that_is_being_fetched_is_not_withdrawn(opened: Callable[..., Engine]) -> None:
    lender, borrower = opened(num_blocks=21, **UNCAPPED), opened()
    asked(lender, prompt(40))
    params = lent(lender, prompt(41))
    borrower.add_request("b", prompt(41), SamplingParams(max_tokens=3), kv_transfer_params=params)
    until(lambda: any(lease.target for lease in leases_of(lender).snapshot()))
    lender.add_request("own", prompt(60, 3), SamplingParams(max_tokens=1))
    for _ in range(5):
        lender.step()
    assert lender.stats().scheduler.waiting == 1
    assert lender.stats().connector["prefixes_withdrawn"] == 0
    answer = answered(borrower, "b", lender)
    assert answer.token_ids == reference_tokens(prompt(41), 3, VOCAB)
    assert answer.num_external_tokens == 40
    settled(lender, borrower)


def test_nothing_is_lent_of_blocks_that_admitted_requests_are_to_have(
    opened: Callable[..., Engine],
) -> None:
    lender = opened(num_blocks=21, **UNCAPPED)
    asked(lender, prompt(40))
    lender.add_request("own", prompt(60, 3), SamplingParams(max_tokens=1))
    lender.step()  # admitted, with 32 tokens: 8 blocks, and 7 to come
    assert lent(lender, prompt(41)) == NOTHING
    settled(lender)
    assert lender.stats().scheduler.preemptions == 0


def test_prefixes_have_a_cap_of_their_own(opened: Callable[..., Engine]) -> None:
    lender = opened(max_lent_prefix_blocks=12)
    asked(lender, prompt(40))
    assert lent(lender, prompt(41))["remote_num_tokens"] == 40
    assert lent(lender, prompt(41)) == NOTHING
    assert lender.stats().connector["prefixes_refused"] == 1
    assert lent(lender, prompt(9))["remote_num_tokens"] == 8


def test_prompts_computed_to_be_lent_go_before_untaken_prefixes(
    opened: Callable[..., Engine],
) -> None:
    lender = opened(max_leased_blocks=20)
    asked(lender, prompt(40))
    assert lent(lender, prompt(41))["remote_num_tokens"] == 40
    params = asked(lender, prompt(60, 3), do_remote_decode=True).kv_transfer_params
    assert params is not None
    assert params["remote_num_tokens"] == 60
    assert lender.stats().connector["prefixes_withdrawn"] == 1


def test_a_shared_prefix_is_fetched_by_many_and_withdrawn_when_the_lender_needs_it(
    opened: Callable[..., Engine],
) -> None:
    lender = opened(num_blocks=21, **UNCAPPED)
    borrowers = [opened(), opened(block_size=3)]
    ids = prompt(41)
    asked(lender, ids[:40])
    params = asked(lender, ids, shared=True, **ONLY_CACHED).kv_transfer_params
    assert params is not None
    for number, borrower in enumerate((*borrowers, borrowers[0])):
        tail = prompt(5 * number, number)
        answer = asked(borrower, ids + tail, lender, max_tokens=4, **params)
        assert answer.token_ids == reference_tokens(ids + tail, 4, VOCAB)
    assert lender.stats().scheduler.lent == 1
    until(lambda: leases_of(lender).num_open == 1)  # unused claims are given back
    assert asked(lender, prompt(60, 7), max_tokens=8).finish_reason == "length"
    assert lender.stats().connector["prefixes_withdrawn"] == 1
    settled(lender, *borrowers)


def test_what_nobody_wants_can_be_taken_back(opened: Callable[..., Engine]) -> None:
    lender = opened()
    asked(lender, prompt(40))
    lender.take_back(lent(lender, prompt(41)))
    lender.take_back(NOTHING)
    settled(lender)


def test_what_an_engine_lends_itself_it_has(opened: Callable[..., Engine]) -> None:
    engine = opened()
    asked(engine, prompt(40))
    answer = asked(engine, prompt(44), max_tokens=4, **lent(engine, prompt(44)))
    assert answer.token_ids == reference_tokens(prompt(44), 4, VOCAB)
    assert (answer.num_cached_tokens, answer.num_external_tokens) == (40, 0)
    assert engine.stats().scheduler.failed_loads == 0
    settled(engine)


# ---- conversations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "windows"),
    [
        ("plain", ((None,), (None,), (None,))),
        ("hybrid", ((None, 6), (None, 6), (None, 6))),
        ("window", ((7,), (7,), (7,))),
    ],
    ids=["plain", "hybrid", "window"],
)
@pytest.mark.parametrize("seed", range(3))
def test_conversations_go_from_engine_to_engine(
    opened: Callable[..., Engine], seed: int, shapes: str, windows: Any
) -> None:
    """Each turn borrows the history from an engine that may have some of it, is computed on another
    one, and answered on a third: D to P to D. Pools are small, so that prefixes are evicted.
    """
    rng = random.Random(seed)
    engines = [
        opened(
            num_blocks=rng.randint(40, 70) * len(kept),
            block_size=rng.choice((2, 3, 4, 8)),
            world_size=rng.randint(1, 3),
            windows=kept,
            policy="recompute",
        )
        for kept in windows
    ]
    histories = [prompt(rng.randint(5, 30), salt) for salt in range(4)]
    borrowed = 0
    for turn in range(24):
        history = histories[turn % len(histories)]
        history += prompt(rng.randint(1, 9), turn)
        lender, first, second = rng.choices(engines, k=3)
        params = asked(lender, history, *engines, **ONLY_CACHED).kv_transfer_params
        assert params is not None
        if rng.random() < 0.1:
            params = {}  # nobody comes for it
        lends: dict[str, Any] = params | {"do_remote_decode": True}
        computed = asked(first, history, *engines, **lends)
        borrowed += computed.num_external_tokens
        assert computed.token_ids == reference_tokens(history, 1, VOCAB)
        history += computed.token_ids
        rest = rng.randint(1, 6)
        answer = asked(
            second, history, *engines, max_tokens=rest, **(computed.kv_transfer_params or {})
        )
        assert answer.token_ids == reference_tokens(history, rest, VOCAB)
        history += answer.token_ids
        if len(history) > 80:
            del history[20:]
    assert borrowed > 0
    for engine in engines:
        leases_of(engine).revoke_all()
    settled(*engines)
