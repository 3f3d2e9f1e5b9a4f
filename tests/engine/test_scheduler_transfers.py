"""Loads from outside and blocks lent to the outside, with every way in which they can go wrong."""

import logging
from typing import Any

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.messages import SamplingParams
from kvferry.engine.request import SchedulerOptions
from kvferry.errors import ConfigError, EngineError, TicketError, WorkerDiedError
from tests.engine.scripted import ScriptedMetadata, ScriptedScheduler, ScriptedWorker
from tests.engine.simulated import (
    VOCAB,
    SimulatedExecutor,
    drain,
    open_simulated,
    prompt,
    toy_cache_config,
)
from tests.engine.toy_cache import reference_tokens


def opened(policy="fail", **kwargs):
    names = SchedulerOptions.__struct_fields__
    options = {key: kwargs.pop(key) for key in list(kwargs) if key in names}
    return open_simulated(
        SchedulerOptions(load_failure_policy=policy, **options), scripted=True, **kwargs
    )


def add(engine, name, ids, max_tokens=5, **script):
    engine.add_request(
        name, ids, SamplingParams(max_tokens=max_tokens), kv_transfer_params=script or None
    )


def assert_idle(engine, num_blocks=64):
    stats = engine.stats().scheduler
    assert (stats.running, stats.waiting, stats.loading, stats.lent) == (0, 0, 0, 0)
    assert stats.free_blocks == num_blocks - 1


def computed(executor, name):
    return sum(step.num_scheduled_tokens.get(name, 0) for step in executor.steps)


@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_loaded_tokens_are_not_computed_and_the_answer_is_the_same(load_async, world_size):
    engine, executor, _ = opened(world_size=world_size)
    add(engine, "r", prompt(18), external=18, load_async=load_async, load_steps=3)
    tokens, last = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(18), 5, VOCAB)
    # The 18th token is computed here, for its logits.
    assert last["r"].num_external_tokens == 17
    assert computed(executor, "r") == 1 + 4
    assert_idle(engine)


def test_what_lies_outside_may_end_before_the_prompt_does():
    engine, executor, _ = opened()
    add(engine, "r", prompt(18), external=7)
    tokens, last = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(18), 5, VOCAB)
    assert last["r"].num_external_tokens == 7
    assert computed(executor, "r") == 11 + 4


def test_only_what_the_local_prefix_lacks_is_loaded():
    engine, _executor, _ = opened()
    add(engine, "first", prompt(10))
    drain(engine)
    add(engine, "second", prompt(18), external=18)
    tokens, last = drain(engine)
    assert tokens["second"] == reference_tokens(prompt(18), 5, VOCAB)
    assert (last["second"].num_cached_tokens, last["second"].num_external_tokens) == (8, 9)


def test_loaded_blocks_become_prefix_hits_once_the_load_has_ended():
    engine, _, _ = opened()
    add(engine, "loads", prompt(18), external=18, load_steps=6)
    engine.step()
    add(engine, "early", prompt(18))  # finds nothing: the bytes are not there yet
    _, last = drain(engine)
    assert last["early"].num_cached_tokens == 0
    add(engine, "late", prompt(18))
    tokens, last = drain(engine)
    assert last["late"].num_cached_tokens == 16
    assert tokens["late"] == reference_tokens(prompt(18), 5, VOCAB)


def test_a_request_that_asks_later_does_not_hold_up_those_behind_it():
    engine, executor, _connector = opened()
    add(engine, "waits", prompt(9, 1), external=9, ask_later=20)
    add(engine, "passes", prompt(9, 2), external=9, load_steps=1)
    add(engine, "computes", prompt(9, 3))
    tokens, _ = drain(engine)
    first: dict[str, Any] = {}
    for number, step in enumerate(executor.steps):
        for part in step.requests:
            first.setdefault(part.request_id, number)
    assert first["computes"] == 0
    assert first["passes"] == 1
    assert first["waits"] > 20
    for salt, name in enumerate(("waits", "passes", "computes"), start=1):
        assert tokens[name] == reference_tokens(prompt(9, salt), 5, VOCAB)
    assert_idle(engine)


def test_the_connector_is_called_in_the_promised_order():
    engine, _, connector = opened()
    add(engine, "r", prompt(9), external=9, ask_later=1, load_steps=2)
    drain(engine)
    assert [method for method, _ in connector.calls] == [
        "on_new_request",
        "get_num_new_matched_tokens",  # later
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "request_finished",
    ]


def test_ranks_hear_of_every_end_once():
    engine, executor, _ = opened(world_size=2)
    for name in "abc":
        add(engine, name, prompt(9, ord(name)))
    engine.step()
    engine.abort("b")
    drain(engine)
    for worker in executor.workers:
        assert sorted(worker.finished_req_ids) == ["a", "b", "c"]


def test_the_scheduler_half_gets_the_ranks_handshakes():
    _, _, connector = opened(world_size=2)
    assert connector.handshakes == (b"scripted rank 0", b"scripted rank 1")


def test_a_request_whose_params_cannot_be_used_is_refused():
    engine, _, _connector = opened()
    with pytest.raises(TicketError, match="'r' is not for us"):
        add(engine, "r", prompt(9), refuse=True)
    assert not engine.has_work()
    add(engine, "r", prompt(9))  # the id is free
    assert drain(engine)[0]["r"] == reference_tokens(prompt(9), 5, VOCAB)


# -- failures -------------------------------------------------------------------------------

FAILURES = [
    {"valid": 0, "report_blocks": True},
    {"valid": 9, "report_blocks": True},
    {"valid": 8, "report_blocks": True, "report_failed": True},
    {"valid": 9, "report_blocks": False},
]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_with_the_policy_fail_a_failed_load_ends_the_request_and_says_why(
    failure, load_async, world_size
):
    engine, _, _ = opened("fail", world_size=world_size)
    add(engine, "r", prompt(18), external=18, load_async=load_async, load_steps=2, **failure)
    tokens, last = drain(engine)
    assert tokens["r"] == []
    assert (last["r"].finish_reason, last["r"].error_type) == ("error", "TransferError")
    assert "from engine 'script': the script says so" in last["r"].error
    assert_idle(engine)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("local", [0, 5])
def test_with_the_policy_recompute_a_failed_load_costs_time_and_no_token(
    failure, load_async, world_size, local
):
    engine, _executor, connector = opened("recompute", world_size=world_size)
    if local:
        add(engine, "before", prompt(local))
        drain(engine)
    add(engine, "r", prompt(18), external=18, load_async=load_async, load_steps=2, **failure)
    tokens, last = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(18), 5, VOCAB)
    assert last["r"].finish_reason == "length"
    assert last["r"].num_external_tokens == 0
    # It did not ask again for what has just failed.
    assert connector.calls.count(("get_num_new_matched_tokens", "r")) == 1
    assert_idle(engine)


def test_recompute_keeps_what_came_before_the_first_block_that_failed():
    engine, executor, _ = opened("recompute")
    add(engine, "r", prompt(18), external=18, valid=9, report_blocks=True)
    tokens, _ = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(18), 5, VOCAB)
    assert computed(executor, "r") == 18 - 8 + 4  # two of the loaded blocks were whole


def test_recompute_keeps_nothing_of_a_group_that_the_load_was_to_leave_holes_in():
    engine, executor, connector = opened("recompute")
    connector.partial_groups = lambda request: frozenset({0})
    add(engine, "r", prompt(18), external=18, valid=9, report_blocks=True)
    tokens, _ = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(18), 5, VOCAB)
    assert computed(executor, "r") == 18 + 4


def test_when_all_that_is_known_is_failure_only_the_local_hit_is_kept():
    engine, executor, _ = opened("recompute")
    add(engine, "before", prompt(5))
    drain(engine)
    add(engine, "r", prompt(18), external=18, valid=12, report_blocks=False)
    tokens, _ = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(18), 5, VOCAB)
    assert computed(executor, "r") == 18 - 4 + 4


def test_a_failed_load_leaves_no_prefix_hits_behind():
    engine, _, _ = opened("fail")
    add(engine, "r", prompt(18), external=18, valid=0)
    drain(engine)
    add(engine, "next", prompt(18))
    tokens, last = drain(engine)
    assert last["next"].num_cached_tokens == 0
    assert tokens["next"] == reference_tokens(prompt(18), 5, VOCAB)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("script", [{"impossible": True}, {"valid": 0}])
def test_a_load_that_fails_is_counted_and_logged_with_its_cause(policy, script, caplog):
    engine, _, _ = opened(policy)
    add(engine, "r", prompt(18), external=18, **script)
    with caplog.at_level(logging.WARNING, logger="kvferry.engine"):
        drain(engine)
    assert engine.stats().scheduler.failed_loads == 1
    (line,) = [text for text in caplog.messages if "request r" in text]
    assert policy in line
    assert "TransferError" in line


@pytest.mark.parametrize("ask_later", [0, 3])
def test_an_impossible_load_ends_the_request_or_is_computed_here(ask_later):
    engine, _, _ = opened("fail")
    add(engine, "r", prompt(18), external=18, impossible=True, ask_later=ask_later)
    _, last = drain(engine)
    assert (last["r"].finish_reason, last["r"].error_type) == ("error", "TransferError")
    assert "nobody holds the KV of 'r'" in last["r"].error
    assert_idle(engine)
    engine, _, _ = opened("recompute")
    add(engine, "r", prompt(18), external=18, impossible=True, ask_later=ask_later)
    tokens, last = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(18), 5, VOCAB)
    assert_idle(engine)


def test_a_connector_that_offers_less_than_nothing_is_told_so():
    engine, _, connector = opened("fail")
    connector.get_num_new_matched_tokens = lambda request, computed: (-3, False)
    add(engine, "r", prompt(5))
    _, last = drain(engine)
    assert last["r"].error_type == "PluginError"
    assert "offers -3 tokens" in last["r"].error


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("partial_groups", frozenset({1})),
        ("first_filled_tokens", (0, 0)),
        ("first_filled_tokens", (-9,)),
    ],
)
def test_a_load_that_speaks_of_other_groups_is_no_good(method, answer):
    engine, _, connector = opened("fail")
    setattr(connector, method, lambda request: answer)
    add(engine, "r", prompt(9), external=9)
    _, last = drain(engine)
    assert "there are 1 KV cache groups" in last["r"].error
    add(engine, "next", prompt(9))
    assert drain(engine)[1]["next"].num_cached_tokens == 0
    assert_idle(engine)


def test_a_connector_that_offers_too_much_is_cut_short():
    engine, executor, connector = opened()
    offered = connector.get_num_new_matched_tokens
    connector.get_num_new_matched_tokens = lambda request, computed: (
        offered(request, computed)[0] + 5,
        True,
    )
    add(engine, "r", prompt(9), external=9)
    tokens, _ = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(9), 5, VOCAB)
    assert computed(executor, "r") == 1 + 4


# -- aborts ---------------------------------------------------------------------------------


def test_blocks_of_a_load_that_was_aborted_stay_until_its_last_byte_has_landed():
    engine, executor, _ = opened(num_blocks=8)
    add(engine, "gone", prompt(18), max_tokens=1, external=18, load_steps=10)
    engine.step()
    assert engine.abort("gone")
    (output,) = engine.step()
    assert output.finish_reason == "abort"
    stats = engine.stats().scheduler
    assert (stats.loading, stats.lent, stats.lent_blocks) == (0, 1, 5)
    # Two blocks are left; a request that needs more must wait, not take the others.
    add(engine, "next", prompt(12, 3), max_tokens=4)
    tokens, _ = drain(engine)
    assert tokens["next"] == reference_tokens(prompt(12, 3), 4, VOCAB)
    waited = next(i for i, step in enumerate(executor.steps) if step.requests)
    assert waited >= 10
    assert_idle(engine, 8)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_request_can_be_aborted_before_during_and_after_its_load(after, world_size):
    engine, _, connector = opened(world_size=world_size)
    add(engine, "r", prompt(18), external=18, ask_later=2, load_steps=3, max_tokens=20)
    outputs: list[Any] = []
    for _ in range(after):
        outputs += engine.step()
    assert engine.abort("r")
    _, last = drain(engine)
    assert last["r"].finish_reason == "abort"
    assert connector.calls.count(("request_finished", "r")) == 1
    assert_idle(engine)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_request_whose_tables_hold_null_blocks_alone_can_be_aborted_too(after):
    # Behind a window of one token, a load of whole blocks needs none.
    engine, _, _ = opened(windows=(1,), enable_prefix_caching=False)
    for _ in range(2):
        add(engine, "r", prompt(9), external=8, load_steps=3)
        for _ in range(after):
            engine.step()
        assert engine.abort("r")
        drain(engine)
        assert_idle(engine)
    assert engine.reset_prefix_cache()


def test_an_id_stays_taken_while_its_blocks_are_lent():
    engine, _, _ = opened()
    add(engine, "r", prompt(9), external=9, load_steps=5)
    engine.step()
    engine.abort("r")
    with pytest.raises(ValueError, match="'r' is in use"):
        add(engine, "r", prompt(9))
    drain(engine)
    add(engine, "r", prompt(9), external=9)
    assert drain(engine)[0]["r"] == reference_tokens(prompt(9), 5, VOCAB)


# -- lending --------------------------------------------------------------------------------


def test_lent_blocks_stay_until_nobody_reads_them_and_the_engine_keeps_stepping():
    engine, executor, _ = opened()
    add(engine, "r", prompt(9), max_tokens=1, lend_steps=7)
    outputs: list[Any] = []
    while not outputs:
        outputs = engine.step()
    assert outputs[0].kv_transfer_params == {"lent_blocks": 3}
    stats = engine.stats().scheduler
    assert (stats.lent, stats.lent_blocks, stats.free_blocks) == (1, 3, 60)
    steps = len(executor.steps)
    drain(engine)
    assert len(executor.steps) == steps + 7
    assert_idle(engine)


def test_an_aborted_request_is_not_lent():
    engine, _, _ = opened()
    add(engine, "r", prompt(9), max_tokens=20, lend_steps=50)
    engine.step()
    engine.abort("r")
    assert engine.stats().scheduler.lent == 0
    drain(engine)
    assert_idle(engine)


def test_requests_wait_while_the_pool_is_lent_out_and_then_run():
    engine, _, _ = opened(num_blocks=8)
    add(engine, "lent", prompt(20), max_tokens=1, lend_steps=12)
    add(engine, "next", prompt(20, 1), max_tokens=4)
    tokens, _ = drain(engine)
    assert tokens["next"] == reference_tokens(prompt(20, 1), 4, VOCAB)
    assert_idle(engine, 8)


# -- reports that mean nothing --------------------------------------------------------------


def test_double_and_unknown_reports_change_nothing_and_are_logged_once(caplog):
    engine, executor, _ = opened()
    add(engine, "busy", prompt(9, 1), max_tokens=30)
    add(engine, "r", prompt(9), max_tokens=1, lend_steps=2)
    real = executor.execute

    def with_ghosts(output):
        ranks = real(output)
        report = ranks[0].kv_connector_output
        # Another process would decode it anew in each step; the aggregator remembers ids.
        report.finished_sending |= {"ghost", "r", "busy"}
        report.finished_recving |= {"phantom", "busy"}
        report.failed_recving |= {"phantom"}
        report.invalid_block_ids |= {1, 2, 3, 99}
        return ranks

    executor.execute = with_ghosts
    with caplog.at_level(logging.INFO, logger="kvferry.engine"):
        tokens, last = drain(engine)
    assert tokens["busy"] == reference_tokens(prompt(9, 1), 30, VOCAB)
    assert last["busy"].finish_reason == "length"
    for name in ("ghost", "phantom"):
        assert sum(name in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_load_within_a_step_that_fails_on_one_rank_is_never_taken_for_a_success(world_size):
    engine, executor, _ = opened("recompute", world_size=world_size)
    script = {"external": 18, "load_async": False, "valid": 0, "report_blocks": False}
    add(engine, "r", prompt(18), max_tokens=1, **script)
    execute = executor.execute

    def on_one_rank(step):
        first, *others = ranks = execute(step)
        first.kv_connector_output.finished_recving.clear()
        for each in others:
            each.kv_connector_output.finished_recving.clear()
            each.kv_connector_output.failed_recving.clear()
        return ranks

    executor.execute = on_one_rank
    tokens, _ = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(18), 1, VOCAB)
    assert_idle(engine)


@pytest.mark.parametrize("repeat", [1, 3])
def test_repeated_reports_of_the_ranks_change_nothing(repeat):
    engine, _, _ = opened(world_size=2)
    add(engine, "a", prompt(18, 1), max_tokens=20, external=18, load_steps=2, repeat=repeat)
    add(engine, "b", prompt(18, 2), max_tokens=1, lend_steps=3, repeat=repeat)
    add(engine, "c", prompt(18, 3), max_tokens=30)
    tokens, _ = drain(engine)
    assert tokens["a"] == reference_tokens(prompt(18, 1), 20, VOCAB)
    assert tokens["c"] == reference_tokens(prompt(18, 3), 30, VOCAB)
    assert_idle(engine)


# -- blocks run short -----------------------------------------------------------------------


def test_loads_that_fill_the_pool_do_not_lock_each_other_out():
    # Three loads of 12 tokens would fill all 9 blocks, and none had one for its 13th token.
    engine, _, _ = opened(num_blocks=10)
    prompts = {name: prompt(13, ord(name)) for name in "abcde"}
    for name, ids in prompts.items():
        add(engine, name, ids, max_tokens=12, external=13, load_steps=2)
    tokens, _ = drain(engine)
    assert tokens == {name: reference_tokens(ids, 12, VOCAB) for name, ids in prompts.items()}
    assert_idle(engine, 10)


def test_a_load_leaves_room_for_the_prefill_under_way():
    engine, _executor, _ = opened(num_blocks=12, max_num_batched_tokens=4)
    add(engine, "prefill", prompt(36, 1), max_tokens=1)
    engine.step()  # holds one block, and needs eight more
    add(engine, "load", prompt(12, 2), external=12, max_tokens=1)
    engine.step()
    assert engine.stats().scheduler.loading == 0
    tokens, _ = drain(engine)
    assert engine.stats().scheduler.preemptions == 0
    assert tokens["load"] == reference_tokens(prompt(12, 2), 1, VOCAB)


def test_a_preempted_request_is_offered_its_load_again():
    engine, _executor, connector = opened(num_blocks=12)
    prompts = {name: prompt(12, ord(name)) for name in "abc"}
    for name, ids in prompts.items():
        add(engine, name, ids, max_tokens=16, external=12)
    tokens, last = drain(engine)
    assert tokens == {name: reference_tokens(ids, 16, VOCAB) for name, ids in prompts.items()}
    assert engine.stats().scheduler.preemptions > 0
    asked = [name for method, name in connector.calls if method == "get_num_new_matched_tokens"]
    assert len(asked) > 3
    assert last["a"].num_external_tokens == 11
    assert_idle(engine, 12)


# -- the engine around it -------------------------------------------------------------------


def test_records_are_given_once():
    engine, _, _ = opened(world_size=2)
    add(engine, "r", prompt(9), external=9)
    drain(engine)
    records = engine.records()
    assert [(record.request_id, record.rank, record.tokens) for record in records] == [
        ("r", 0, 8),
        ("r", 1, 8),
    ]
    assert engine.records() == []


def test_load_times_lie_between_scheduling_and_the_first_token():
    engine, _, _ = opened()
    add(engine, "r", prompt(9), external=9, load_steps=3)
    t: Any = drain(engine)[1]["r"].timings
    stamps = [t.arrival, t.scheduled, t.load_started, t.load_finished, t.prefill_started]
    assert stamps == sorted(stamps)
    assert t.prefill_started <= t.first_token <= t.finished


def test_connector_counters_are_added_up():
    engine, executor, _ = opened(world_size=2)
    real = executor.execute

    def counting(output):
        ranks = real(output)
        for rank in ranks:
            rank.kv_connector_output.kv_connector_stats = {"bytes": 10.0}
        return ranks

    executor.execute = counting
    add(engine, "r", prompt(9), max_tokens=3)
    drain(engine)
    assert engine.stats().connector["bytes"] == 20.0 * len(executor.steps)
    assert engine.stats().computed_tokens == 11
    assert engine.stats().output_tokens == 3


def test_a_dead_rank_is_reported_and_not_waited_for():
    engine, executor, _ = opened(world_size=2)
    add(engine, "r", prompt(9), max_tokens=9)
    engine.step()
    executor.kill(1)
    with pytest.raises(WorkerDiedError, match="rank 1 was killed"):
        engine.check()
    with pytest.raises(WorkerDiedError, match="rank 1 was killed"):
        engine.step()


def test_a_rank_that_dies_within_a_step_ends_it():
    engine, executor, _ = opened(world_size=2)
    add(engine, "r", prompt(9), max_tokens=9)
    executor.kill(1)
    with pytest.raises(WorkerDiedError, match="rank 1 was killed"):
        engine.step()


def test_a_closed_engine_takes_no_more_steps_and_has_closed_its_parts():
    engine, _, connector = opened()
    add(engine, "r", prompt(9))
    engine.close()
    engine.close()
    assert connector.closed
    with pytest.raises(Exception, match="closed"):
        engine.step()


def test_a_token_that_no_rank_drew_is_named_and_ends_the_engine():
    engine, executor, _ = opened()
    real = executor.execute

    def forgetful(output):
        ranks = real(output)
        ranks[0].sampled.clear()
        return ranks

    executor.execute = forgetful
    add(engine, "r", prompt(9))
    for _ in range(2):
        with pytest.raises(EngineError, match="drew a token for request 'r'"):
            engine.step()


def test_a_step_that_was_broken_off_is_not_followed_by_another():
    engine, executor, _ = opened()

    def interrupted(output):
        raise KeyboardInterrupt

    executor.execute = interrupted
    add(engine, "r", prompt(9))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineError, match="KeyboardInterrupt"):  # its ranks missed that step
        engine.step()


def test_parts_that_cannot_be_joined_are_closed():
    class Refusing(ScriptedScheduler):
        def set_worker_handshakes(self, handshakes):
            raise ConfigError("these ranks are not mine")

    connector = Refusing()
    executor: Any = SimulatedExecutor(8, 4, workers=[ScriptedWorker()], metadata=ScriptedMetadata)
    with pytest.raises(ConfigError, match="not mine"):
        Engine(SchedulerOptions(), toy_cache_config(8, 4), executor, connector)
    assert connector.closed
