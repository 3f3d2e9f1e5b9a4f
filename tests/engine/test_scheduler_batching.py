"""What is computed when: budget, chunks, seats, prefix hits, preemption, stops."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.messages import SamplingParams
from kvferry.engine.request import SchedulerOptions
from kvferry.errors import OutOfBlocksError, RequestError
from tests.engine.simulated import VOCAB, drain, open_simulated, prompt
from tests.engine.toy_cache import reference_tokens


def free_blocks(engine):
    return engine.stats().scheduler.free_blocks


def test_a_batch_of_prompts_gives_the_tokens_of_the_model():
    engine, _, _ = open_simulated(SchedulerOptions())
    prompts = [prompt(n, n) for n in (1, 3, 4, 5, 17, 40)]
    done = engine.generate(prompts, SamplingParams(max_tokens=9))
    assert [c.token_ids for c in done] == [reference_tokens(p, 9, VOCAB) for p in prompts]
    assert {c.finish_reason for c in done} == {"length"}
    assert free_blocks(engine) == 63


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    budget=st.integers(1, 50),
    seats=st.integers(1, 8),
    num_blocks=st.integers(16, 40),
    caching=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_tokens_do_not_depend_on_budget_seats_pool_or_prefix_cache(
    lengths, budget, seats, num_blocks, caching
):
    options = SchedulerOptions(
        max_num_batched_tokens=budget, max_num_seqs=seats, enable_prefix_caching=caching
    )
    engine, executor, _ = open_simulated(options, num_blocks=num_blocks)
    prompts = [prompt(n) for n in lengths]  # each a prefix of the longer ones
    done = engine.generate(prompts, SamplingParams(max_tokens=12))
    assert [c.token_ids for c in done] == [reference_tokens(p, 12, VOCAB) for p in prompts]
    for step in executor.steps:
        assert len(step.requests) <= seats
        assert sum(step.num_scheduled_tokens.values()) <= budget
    assert free_blocks(engine) == num_blocks - 1


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests():
    engine, executor, _ = open_simulated(SchedulerOptions(max_num_batched_tokens=8))
    engine.add_request("first", prompt(4), SamplingParams(max_tokens=30))
    engine.step()
    engine.add_request("long", prompt(30, 1), SamplingParams(max_tokens=2))
    drain(engine)
    chunks = [step.num_scheduled_tokens.get("long") for step in executor.steps[1:6]]
    assert chunks == [7, 7, 7, 7, 2]
    assert all("first" in step.num_scheduled_tokens for step in executor.steps[:30])
    assert [part.sample is not None for part in _parts(executor, "long")] == [False] * 4 + [
        True
    ] * 2


def _parts(executor, name):
    return [part for step in executor.steps for part in step.requests if part.request_id == name]


def test_a_prefill_at_the_head_leaves_a_token_to_every_decoding_request_behind_it():
    engine, executor, _ = open_simulated(SchedulerOptions(max_num_batched_tokens=6))
    engine.add_request("long", prompt(60, 1), SamplingParams(max_tokens=1))
    engine.add_request("short", prompt(2, 2), SamplingParams(max_tokens=20))
    drain(engine)
    shares = [step.num_scheduled_tokens for step in executor.steps]
    assert shares[0] == {"long": 6}
    # Once both are in, neither starves: the short one decodes from then on in every step.
    first = next(i for i, share in enumerate(shares) if "short" in share)
    assert all("short" in share for share in shares[first : first + 20])


def test_requests_are_admitted_in_the_order_of_arrival():
    engine, executor, _ = open_simulated(SchedulerOptions(max_num_seqs=2))
    for name in "abcd":
        engine.add_request(name, prompt(5, ord(name)), SamplingParams(max_tokens=3))
    drain(engine)
    first_step: dict[str, int] = {}
    for number, step in enumerate(executor.steps):
        for part in step.requests:
            first_step.setdefault(part.request_id, number)
    assert list(first_step) == list("abcd")
    assert [first_step[name] for name in "abcd"] == [0, 0, 3, 3]


def test_a_prefix_hit_is_not_computed_again_and_is_reported():
    engine, executor, _ = open_simulated(SchedulerOptions())
    engine.add_request("first", prompt(18))
    drain(engine)
    engine.add_request("second", [*prompt(18), 9, 9], SamplingParams(max_tokens=3))
    tokens, last = drain(engine)
    assert tokens["second"] == reference_tokens([*prompt(18), 9, 9], 3, VOCAB)
    assert last["second"].num_cached_tokens == 16
    assert _parts(executor, "second")[0].first_position == 16


def test_a_salt_keeps_prefixes_apart():
    engine, _, _ = open_simulated(SchedulerOptions())
    engine.add_request("first", prompt(18), cache_salt="tenant 1")
    drain(engine)
    engine.add_request("second", prompt(18), cache_salt="tenant 2")
    _, last = drain(engine)
    assert last["second"].num_cached_tokens == 0


def test_when_blocks_run_out_the_youngest_is_preempted_and_all_tokens_stay_right():
    # 10 usable blocks of 4 tokens: three requests of up to 24 tokens need 18.
    engine, executor, _ = open_simulated(SchedulerOptions(), num_blocks=11)
    prompts = {name: prompt(8, ord(name)) for name in "abc"}
    for name, ids in prompts.items():
        engine.add_request(name, ids, SamplingParams(max_tokens=16))
    tokens, _ = drain(engine)
    assert tokens == {name: reference_tokens(ids, 16, VOCAB) for name, ids in prompts.items()}
    preempted = set().union(*(step.preempted_req_ids for step in executor.steps))
    assert preempted
    assert "a" not in preempted
    assert engine.stats().scheduler.preemptions >= 1
    assert free_blocks(engine) == 10


def test_steps_say_which_blocks_are_new_and_who_was_preempted():
    engine, executor, _ = open_simulated(SchedulerOptions(), num_blocks=11)
    for name in "abc":
        engine.add_request(name, prompt(8, ord(name)), SamplingParams(max_tokens=16))
    drain(engine)
    known: dict[str, Any] = {}
    resumed = 0
    for step in executor.steps:
        for name in step.preempted_req_ids:
            known[name] = None  # lost its blocks
        for part in step.requests:
            (table,), (new,) = part.block_ids, part.num_new_blocks
            before = known.get(part.request_id, [])
            assert part.resumed == (before is None)
            resumed += part.resumed
            assert table[: len(table) - new] == (before or [])
            known[part.request_id] = table
    assert resumed == engine.stats().scheduler.preemptions


@pytest.mark.parametrize(
    ("max_tokens", "ignore_eos", "stop_at", "reason", "count"),
    [
        (5, False, None, "length", 5),
        (50, False, None, "stop", 7),
        (50, True, 8, "stop", 9),
        (50, False, 8, "stop", 7),
        (6, True, None, "length", 6),
        (7, False, None, "stop", 7),
    ],
)
def test_an_answer_ends_at_eos_at_a_stop_token_or_at_its_length(
    max_tokens, ignore_eos, stop_at, reason, count
):
    answers = (reference_tokens(prompt(10, salt), 50, VOCAB) for salt in range(VOCAB))
    salt, answer = next((i, a) for i, a in enumerate(answers) if len(set(a[:9])) == 9)
    engine, _, _ = open_simulated(SchedulerOptions(eos_token_ids=(answer[6],)))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=() if stop_at is None else (answer[stop_at],),
    )
    (done,) = engine.generate([prompt(10, salt)], sampling)
    assert (done.finish_reason, done.token_ids) == (reason, answer[:count])


def test_an_answer_ends_where_the_model_has_no_more_room():
    engine, _, _ = open_simulated(SchedulerOptions(max_model_len=20))
    (done,) = engine.generate([prompt(12)], SamplingParams(max_tokens=1000))
    assert (done.finish_reason, len(done.token_ids)) == ("length", 8)


def test_output_indices_count_what_was_drawn_elsewhere():
    engine, executor, _ = open_simulated(SchedulerOptions())
    engine.generate([prompt(5)], SamplingParams(max_tokens=3, seed=1, seed_offset=1))
    assert [p.output_index for step in executor.steps for p in step.requests] == [1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "sampling", "error", "words"),
    [
        (prompt(64), SamplingParams(), OutOfBlocksError, ("64 tokens", "max_model_len is 64")),
        (prompt(30), SamplingParams(max_tokens=30), OutOfBlocksError, ("59", "15", "has 9")),
        ([1, 64], SamplingParams(), RequestError, ("token id 64", "0 to 63")),
        ([1, -1], SamplingParams(), RequestError, ("token id -1",)),
        ([1, "x"], SamplingParams(), RequestError, ("'x'",)),
        ([1], SamplingParams(max_tokens=0), RequestError, ("max_tokens is 0",)),
        ([1], SamplingParams(temperature=-1.0), RequestError, ("temperature is -1.0",)),
        ([1], SamplingParams(temperature=float("nan")), RequestError, ("temperature is nan",)),
        ([1], SamplingParams(top_p=0.0), RequestError, ("top_p is 0.0",)),
        ([1], SamplingParams(top_k=-2), RequestError, ("top_k is -2",)),
        ([1], SamplingParams(seed_offset=-1), RequestError, ("seed_offset is -1",)),
    ],
)
def test_what_can_never_end_well_is_refused_with_both_numbers(ids, sampling, error, words):
    options = SchedulerOptions(max_model_len=64, vocab_size=64)
    engine, _, _ = open_simulated(options, num_blocks=10)
    with pytest.raises(error) as raised:
        engine.add_request("r", ids, sampling)
    for word in words:
        assert word in str(raised.value)
    assert not engine.has_work()
    (done,) = engine.generate([prompt(4)], SamplingParams(max_tokens=2))
    assert done.token_ids == reference_tokens(prompt(4), 2, VOCAB)


@pytest.mark.parametrize(
    ("request_id", "salt", "message"),
    [
        ("r\ud800", None, r"request_id: 'r\\ud800' is no text in UTF-8"),
        (b"r", None, "request_id: b'r' is no text"),
        ("r", "s\udcff", r"cache_salt: 's\\udcff' is no text in UTF-8"),
    ],
)
def test_an_id_or_a_salt_that_is_no_text_in_utf_8_is_refused(request_id, salt, message):
    engine, _, _ = open_simulated(SchedulerOptions())
    with pytest.raises(RequestError, match=message):
        engine.add_request(request_id, prompt(4), cache_salt=salt)
    assert not engine.has_work()
    (done,) = engine.generate([prompt(4)], SamplingParams(max_tokens=2))
    assert done.token_ids == reference_tokens(prompt(4), 2, VOCAB)


def test_the_largest_request_that_fits_the_pool_runs_alone_in_it():
    engine, _, _ = open_simulated(SchedulerOptions(), num_blocks=10)
    # 9 blocks hold 36 tokens; the 37th is drawn and never computed.
    (done,) = engine.generate([prompt(30)], SamplingParams(max_tokens=7))
    assert done.token_ids == reference_tokens(prompt(30), 7, VOCAB)
    with pytest.raises(OutOfBlocksError):
        engine.add_request("r", prompt(30), SamplingParams(max_tokens=8))


def test_an_id_in_use_is_the_callers_error():
    engine, _, _ = open_simulated(SchedulerOptions())
    engine.add_request("r", prompt(4))
    with pytest.raises(ValueError, match="'r' is in use"):
        engine.add_request("r", prompt(5))
    drain(engine)
    engine.add_request("r", prompt(5))
    tokens, _ = drain(engine)
    assert tokens["r"] == reference_tokens(prompt(5), 16, VOCAB)


def test_an_empty_prompt_is_the_callers_error():
    engine, _, _ = open_simulated(SchedulerOptions())
    with pytest.raises(ValueError, match="empty"):
        engine.add_request("r", [])


@pytest.mark.parametrize("field", ["max_model_len", "max_num_batched_tokens", "max_num_seqs"])
def test_limits_below_one_are_refused(field):
    with pytest.raises(ValueError, match=field):
        SchedulerOptions(**dict[str, Any]({field: 0}))


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_the_blocks_and_reports_it(steps):
    engine, _, _ = open_simulated(SchedulerOptions(max_num_batched_tokens=8))
    engine.add_request("r", prompt(20))
    for _ in range(steps):
        engine.step()
    assert engine.abort("r")
    assert not engine.abort("r")
    (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == ("r", "abort")
    assert not engine.has_work()
    assert free_blocks(engine) == 63


def test_aborting_an_unknown_request_changes_nothing():
    engine, _, _ = open_simulated(SchedulerOptions())
    assert not engine.abort("nobody")
    assert not engine.has_work()


def test_a_preempted_request_can_be_aborted():
    engine, executor, _ = open_simulated(SchedulerOptions(), num_blocks=11)
    for name in "abc":
        engine.add_request(name, prompt(8, ord(name)), SamplingParams(max_tokens=16))
    while not executor.steps or not executor.steps[-1].preempted_req_ids:
        engine.step()
    (victim,) = executor.steps[-1].preempted_req_ids
    assert engine.abort(victim)
    _tokens, last = drain(engine)
    assert last[victim].finish_reason == "abort"
    assert free_blocks(engine) == 10


def test_timings_are_in_order():
    engine, _, _ = open_simulated(SchedulerOptions(max_num_batched_tokens=8))
    (done,) = engine.generate([prompt(30)], SamplingParams(max_tokens=4))
    t: Any = done.timings
    stamps = [t.arrival, t.scheduled, t.prefill_started, t.prefill_finished, t.first_token]
    stamps.append(t.finished)
    assert stamps == sorted(stamps)
    assert t.load_started is None


def test_the_prefix_cache_is_reset_only_when_nothing_runs():
    engine, _, _ = open_simulated(SchedulerOptions())
    engine.add_request("r", prompt(20))
    engine.step()
    assert not engine.reset_prefix_cache()
    drain(engine)
    assert engine.reset_prefix_cache()
    engine.add_request("again", prompt(20))
    assert drain(engine)[1]["again"].num_cached_tokens == 0
