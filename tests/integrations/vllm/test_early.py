"""Prompts that are lent, and loaded in parts, while real vLLM engines compute them.

Both engines get a request at once, with a transfer that the test signs as a router does.
"""

import importlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.connectors.pull.pursuit import LoadState
from kvferry.control.leases import LeaseOutcome
from kvferry.control.tickets import TransferId
from kvferry.integrations.vllm.messages import StepReport
from kvferry.testing import waiting
from tests.integrations.vllm.test_drafts import can_draft, drafts_of

PLUGIN = Path(__file__).parents[2] / "vllm_servers" / "plugin"
KEY = "a key of the whole cluster"
CHUNK = 64
"""Tokens that prefill computes in a step."""


@pytest.fixture
def start_early(start_pair):
    """A pair of unequal blocks; ``mode`` is decode's ``early_load``."""

    def start(mode="now", **settings):
        values = {
            "extra": {"cluster_key": KEY, "lease_duration_s": 600.0, "early_load": mode},
            "p_block_size": 32,
            "d_block_size": 64,
            "p_max_num_batched_tokens": CHUNK,
            "p_max_num_seqs": 8,
        }
        return start_pair(**(values | settings))

    return start


def pull_of(engine):
    return engine.connector.connector_scheduler.pull


def transfer_of(prefill):
    return TransferId.begin(f"127.0.0.1:{pull_of(prefill).port}", KEY.encode()).text


def send(prefill, decode, prompt):
    """The request at both; their ids."""
    transfer = transfer_of(prefill)
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer": transfer}
    first = prefill.add(prompt, asked, max_tokens=1)
    return first, decode.add(prompt, {"do_remote_prefill": True, "transfer": transfer})


def load_of(decode):
    (load,) = pull_of(decode).borrower.loads.values()
    return load


def readable(decode):
    """The tokens that decode's ranks may read, of the only load that there is."""
    loads = pull_of(decode).borrower.loads.values()
    return [load.spec.readable for load in loads if load.spec is not None]


def until(condition, *engines):
    """Steps engines until it holds; returns the outputs that ended."""
    ended: dict[str, Any] = {}

    def holds():
        if condition():
            return True
        for engine in engines:
            ended.update({output.request_id: output for output in engine.step()})
        return False

    waiting.until(holds, every_s=0.001)
    return ended


def finish(prefill, decode, *request_ids):
    """Steps both until these requests have ended; their outputs."""
    ended: dict[str, Any] = {}

    def have_ended():
        for engine in (prefill, decode):
            ended.update({output.request_id: output for output in engine.step()})
        return ended.keys() >= set(request_ids)

    waiting.until(have_ended, every_s=0, what=f"the end of {request_ids}")
    return [ended[request_id] for request_id in request_ids]


def generated(output):
    return list(output.outputs[0].token_ids)


def written(prefill):
    """What prefill tells of each prompt that it computes: tokens that all its ranks have."""
    lender = pull_of(prefill).lender
    return list(lender.leases.readable(lender.growing.by_lease).values())


def assert_at_rest(*engines):
    for engine in engines:
        engine.drain()
        assert engine.used_blocks == 0


def test_what_is_written_is_read_while_the_rest_is_computed(start_early, reference, random_prompt):
    prefill, decode = start_early()
    prompt = random_prompt(400)
    first, second = send(prefill, decode, prompt)
    for step in range(1, 4):
        prefill.step()
        assert written(prefill) == [step * CHUNK]
        until(lambda parts=step: readable(decode) == [parts * CHUNK], decode)
    assert load_of(decode).state is LoadState.READING
    _, output = finish(prefill, decode, first, second)
    assert [generated(output)] == reference([prompt])
    assert decode.prompt_tokens_from("external_kv_transfer") == 399
    assert_at_rest(prefill, decode)


@pytest.mark.parametrize("mode", ["off", "late", "now"])
def test_tokens_are_those_of_a_single_engine(start_early, reference, random_prompt, mode):
    prefill, decode = start_early(mode)
    prompts = [random_prompt(length) for length in (5, 64, 65, 300, 700)]
    sent = [send(prefill, decode, prompt) for prompt in prompts]
    outputs = finish(prefill, decode, *(second for _, second in sent))
    assert [generated(output) for output in outputs] == reference(prompts)
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(map(len, prompts)) - 5
    assert_at_rest(prefill, decode)


def test_off_reads_nothing_before_the_prompt_is_whole(start_early, reference, random_prompt):
    prefill, decode = start_early("off")
    prompt = random_prompt(300)
    first, second = send(prefill, decode, prompt)
    prefill.step()
    until(lambda: pull_of(decode).borrower.loads, decode)
    for _ in range(20):
        decode.step()
    assert load_of(decode).state is LoadState.WAITING
    assert decode.used_blocks == 0
    _, output = finish(prefill, decode, first, second)
    assert [generated(output)] == reference([prompt])
    assert_at_rest(prefill, decode)


def run(engine, scheduled):
    """What the ranks report of a step that was scheduled, as vLLM's loop has them run it."""
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    with engine.at_work():
        return executor.execute_model(scheduled) or executor.sample_tokens(None)


def test_steps_that_are_scheduled_ahead_publish_when_they_are_over(start_early, random_prompt):
    """As with asynchronous scheduling, and with pipeline stages."""
    prefill, decode = start_early()
    first, _ = send(prefill, decode, random_prompt(300))
    steps = [prefill.scheduler.schedule() for _ in range(3)]
    assert written(prefill) == [0]
    for number, step in enumerate(steps, 1):
        report = run(prefill, step)
        assert written(prefill) == [(number - 1) * CHUNK]
        prefill.scheduler.update_from_output(step, report)
        assert written(prefill) == [number * CHUNK]
    prefill.abort(first)
    until(
        lambda: not pull_of(decode).borrower.loads,
        prefill,
        decode,
    )
    assert_at_rest(prefill, decode)


def test_a_prefix_that_prefill_has_is_read_with_the_first_chunk(
    start_early, reference, random_prompt
):
    prefill, decode = start_early()
    shared = random_prompt(192)
    prefill.generate([shared], max_tokens=1)
    prompt = shared + random_prompt(200)
    first, second = send(prefill, decode, prompt)
    prefill.step()
    assert written(prefill) == [192 + CHUNK]
    _, output = finish(prefill, decode, first, second)
    assert [generated(output)] == reference([prompt])
    assert_at_rest(prefill, decode)


def preempt(prefill):
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)


def push_out(prefill):
    """Others, which began before, need the blocks."""
    pool = prefill.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    prefill.step()
    assert not prefill.scheduler.running
    pool.free_blocks(taken)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prompt_that_is_not_computed_to_its_end_fails_the_load(
    start_early, reference, random_prompt, policy
):
    prefill, decode = start_early(policy=policy)
    prompt = random_prompt(400)
    first, second = send(prefill, decode, prompt)
    prefill.step()
    until(lambda: readable(decode) == [CHUNK], decode)
    prefill.abort(first)
    assert revoked(prefill) == 1, "before its blocks hold anything else"
    (output,) = finish(prefill, decode, second)
    if policy == "fail":
        assert output.outputs[0].finish_reason == "error"
    else:
        assert [generated(output)] == reference([prompt])
    assert_at_rest(prefill, decode)


def revoked(prefill):
    return pull_of(prefill).lender.leases.counters()[LeaseOutcome.REVOKED]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("how", [preempt, push_out])
def test_a_prompt_that_is_preempted_is_read_anew_when_it_is_computed_anew(
    start_early, reference, random_prompt, how, policy
):
    prefill, decode = start_early(policy=policy)
    prompt = random_prompt(400)
    first, second = send(prefill, decode, prompt)
    prefill.step()
    until(lambda: readable(decode) == [CHUNK], decode)
    how(prefill)
    prefill.step()
    assert revoked(prefill) == 1, "before its blocks hold anything else"
    until(lambda: load_of(decode).state is LoadState.RESTARTING, decode)
    _, output = finish(prefill, decode, first, second)
    assert [generated(output)] == reference([prompt])
    assert decode.prompt_tokens_from("external_kv_transfer") == 399
    assert_at_rest(prefill, decode)


def test_a_load_that_is_aborted_leaves_the_prompt_alone(start_early, random_prompt):
    prefill, decode = start_early()
    first, second = send(prefill, decode, random_prompt(400))
    prefill.step()
    until(lambda: readable(decode) == [CHUNK], decode)
    decode.abort(second)
    assert_at_rest(decode)
    (output,) = finish(prefill, decode, first)
    assert output.outputs[0].finish_reason == "length"
    assert_at_rest(prefill)


def test_a_prompt_that_prefill_does_not_lend_is_computed_by_decode(
    start_early, reference, random_prompt
):
    prefill, decode = start_early()
    prompt = random_prompt(200)
    first, second = send(prefill, decode, prompt)
    prefill.abort(first)
    (output,) = finish(prefill, decode, second)
    assert [generated(output)] == reference([prompt])
    assert decode.prompt_tokens_from("external_kv_transfer") == 0
    assert_at_rest(prefill, decode)


def test_layers_with_windows_move_at_the_end(
    start_early, tiny_hybrid, decodes_windows, start, random_prompt
):
    prefill, decode = start_early(model=tiny_hybrid, **decodes_windows)
    prompt = random_prompt(400)
    longer = prompt + random_prompt(40)
    lone = start(None, tiny_hybrid)
    expected = [generated(output) for output in lone.generate([prompt, longer, prompt[:330]])]
    first, second = send(prefill, decode, prompt)
    prefill.step()
    until(lambda: readable(decode) == [CHUNK], decode)
    _, output = finish(prefill, decode, first, second)
    # Of the block in which the window begins, prefill had let the first half go: it is no hit.
    others = decode.generate([longer, prompt[:330]])
    assert [generated(each) for each in (output, *others)] == expected
    assert decode.prompt_tokens_from("local_cache_hit") == 0
    assert_at_rest(prefill, decode)


def test_many_requests_at_once_keep_their_blocks_apart(start_early, reference, random_prompt):
    prefill, decode = start_early()
    prompts = [random_prompt(40 + 31 * number) for number in range(24)]
    sent = [send(prefill, decode, prompt)[1] for prompt in prompts]
    outputs = finish(prefill, decode, *sent)
    assert [generated(output) for output in outputs] == reference(prompts)
    assert_at_rest(prefill, decode)


@can_draft
def test_where_tokens_are_drafted_a_prompt_is_lent_when_it_is_whole(
    start_early, tiny_llama, reference, random_prompt, caplog
):
    with caplog.at_level("INFO", logger="kvferry"):
        drafts = drafts_of(tiny_llama)["speculative_config"]
        prefill, decode = start_early(speculative_config=drafts)
    assert "prompts are lent once they are whole: tokens are drafted" in caplog.text
    prompt = random_prompt(300)
    first, second = send(prefill, decode, prompt)
    prefill.step()
    assert not pull_of(prefill).lender.growing.by_lease
    _, output = finish(prefill, decode, first, second)
    assert [generated(output)] == reference([prompt])
    assert decode.prompt_tokens_from("external_kv_transfer") == 299
    assert_at_rest(prefill, decode)


# ---- steps that are scheduled ahead -------------------------------------------------------------


@pytest.fixture
def ahead(monkeypatch):
    """Engines that are started from now on schedule asynchronously, as vLLM does on GPUs."""
    monkeypatch.syspath_prepend(PLUGIN)
    module = importlib.import_module("scheduled_ahead")
    for where, name, value in module.stand_ins():
        monkeypatch.setattr(where, name, value)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("mode", ["off", "late", "now"])
def test_tokens_are_those_of_a_single_engine_with_asynchronous_scheduling(
    start_early, reference, random_prompt, mode
):
    prefill, decode = start_early(mode)
    assert type(prefill.scheduler).__name__ == "AsyncScheduler"
    prompts = [random_prompt(length) for length in (5, 64, 65, 300, 700)]
    sent = [send(prefill, decode, prompt) for prompt in prompts]
    outputs = finish(prefill, decode, *(second for _, second in sent))
    assert [generated(output) for output in outputs] == reference(prompts)
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(map(len, prompts)) - 5
    assert_at_rest(prefill, decode)


@pytest.mark.usefixtures("ahead")
def test_a_step_that_is_scheduled_ahead_is_published_when_it_is_over(
    start_early, reference, random_prompt
):
    prefill, decode = start_early()
    prompt = random_prompt(400)
    first, second = send(prefill, decode, prompt)
    prefill.step()
    assert written(prefill) == [0], "the first step was scheduled, and nobody has waited for it"
    for number in range(1, 4):
        prefill.step()  # schedules the next one, and waits for this one
        assert written(prefill) == [number * CHUNK]
        until(lambda parts=number: readable(decode) == [parts * CHUNK], decode)
    _, output = finish(prefill, decode, first, second)
    assert [generated(output)] == reference([prompt])
    assert_at_rest(prefill, decode)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("how", [preempt, push_out])
def test_a_prompt_may_be_preempted_while_a_step_of_it_is_under_way(
    start_early, reference, random_prompt, how
):
    prefill, decode = start_early()
    prompt = random_prompt(400)
    first, second = send(prefill, decode, prompt)
    prefill.step()
    prefill.step()
    until(lambda: readable(decode) == [CHUNK], decode)
    how(prefill)
    prefill.step()
    assert revoked(prefill) == 1, "before its blocks hold anything else"
    _, output = finish(prefill, decode, first, second)
    assert [generated(output)] == reference([prompt])
    assert decode.prompt_tokens_from("external_kv_transfer") == 399
    assert_at_rest(prefill, decode)


@pytest.mark.usefixtures("ahead")
def test_a_prompt_may_be_aborted_while_a_step_of_it_is_under_way(
    start_early, reference, random_prompt
):
    prefill, decode = start_early(policy="recompute")
    prompt = random_prompt(400)
    first, second = send(prefill, decode, prompt)
    prefill.step()
    prefill.step()
    until(lambda: readable(decode) == [CHUNK], decode)
    prefill.abort(first)
    assert revoked(prefill) == 1, "before its blocks hold anything else"
    (output,) = finish(prefill, decode, second)
    assert [generated(output)] == reference([prompt])
    assert_at_rest(prefill, decode)


# ---- devices that compute behind their workers ---------------------------------------------------


@pytest.fixture
def behind(monkeypatch):
    """``behind(prefill)``: its cache counts as one on a device, whose stream it returns."""
    streams = []

    def put_behind(prefill):
        pull = prefill.worker.connector_worker.pull
        streams.append(Stream())
        monkeypatch.setattr(pull, "_registered", replace(pull._registered, streams=streams[-1:]))
        return streams[-1]

    yield put_behind
    for stream in streams:
        stream.carry_out()


class Event:
    """A point of what the device was asked for."""

    def __init__(self):
        self.is_reached = False

    def done(self):
        return self.is_reached


class Stream:
    """Carries a step out when it is told to; its device copies nothing."""

    def __init__(self):
        self.steps = []

    def engine_event(self):
        self.steps.append(Event())
        return self.steps[-1]

    def close(self):
        pass

    def carry_out(self, num_steps=None):
        """The next steps, or all."""
        for event in self.steps[:num_steps]:
            event.is_reached = True
        self.steps = [] if num_steps is None else self.steps[num_steps:]


def test_a_step_is_published_once_the_device_has_carried_it_out(
    start_early, reference, random_prompt, behind
):
    prefill, decode = start_early()
    device = behind(prefill)
    prompt = random_prompt(400)
    first, second = send(prefill, decode, prompt)
    prefill.step()
    prefill.step()
    assert written(prefill) == [0], "of two steps none is carried out"
    device.carry_out(1)
    prefill.step()
    assert written(prefill) == [CHUNK]
    until(lambda: readable(decode) == [CHUNK], decode)
    device.carry_out()
    prefill.step()
    assert written(prefill) == [3 * CHUNK]
    _, output = finish(prefill, decode, first, second)
    assert [generated(output)] == reference([prompt])
    assert_at_rest(prefill, decode)


@pytest.mark.parametrize("copied", [pickle.loads, None], ids=["another process", "this process"])
def test_a_report_tells_what_was_carried_out_before_it_left_its_rank(
    start_early, random_prompt, behind, copied
):
    prefill, decode = start_early()
    device = behind(prefill)
    first, _ = send(prefill, decode, random_prompt(400))
    step = prefill.scheduler.schedule()
    report = run(prefill, step)
    device.carry_out()  # for the tokens of a step vLLM waits in another thread
    if copied is not None:
        told = copied(pickle.dumps(report.kv_connector_output.kv_connector_worker_meta))
        assert list(told.written.values()) == [{0: CHUNK}]
        report.kv_connector_output.kv_connector_worker_meta = told
    prefill.scheduler.update_from_output(step, report)
    assert written(prefill) == [CHUNK]
    prefill.abort(first)
    until(
        lambda: not pull_of(decode).borrower.loads,
        prefill,
        decode,
    )
    assert_at_rest(prefill, decode)


def test_reports_of_ranks_are_joined_by_rank():
    reports = [
        StepReport(written={"a": {0: 64}}),
        StepReport(written={"a": {1: 64}, "b": {1: 32}}),
        StepReport(),
    ]
    joined = reports[0].aggregate(reports[1]).aggregate(reports[2])
    assert joined.written == {"a": {0: 64, 1: 64}, "b": {1: 32}}
    assert reports[0].written == {"a": {0: 64}}
