"""An engine on its own thread: requests and questions from anywhere, and a clean end."""

import re
import threading
import time
from typing import Any

import pytest

from kvferry.engine import loop as loops
from kvferry.engine.loop import EngineLoop, StepState
from kvferry.engine.messages import EngineOutput, SamplingParams
from kvferry.engine.request import SchedulerOptions
from kvferry.errors import DrainingError, EngineError, StuckStepError, WorkerDiedError
from kvferry.testing.waiting import WAIT_S, until
from tests.engine.simulated import VOCAB, open_simulated
from tests.engine.toy_cache import reference_tokens


class Listener:
    """Collects the news of one request."""

    def __init__(self, name):
        self.completion = EngineOutput(request_id=name)
        self.request = None
        self.calls = 0
        self.ended = threading.Event()

    def __call__(self, output):
        self.calls += 1
        assert not self.ended.is_set()
        self.completion += output
        if output.finish_reason is not None:
            self.ended.set()

    def wait(self):
        assert self.ended.wait(WAIT_S)
        return self.completion


@pytest.fixture
def simulated():
    return open_simulated(SchedulerOptions(), scripted=True)


@pytest.fixture
def failures():
    return []


@pytest.fixture
def loop(simulated, failures):
    with EngineLoop.open(simulated[0], failures.append) as opened:
        yield opened


def submit(loop, name, prompt, max_tokens=5, **script):
    listener = Listener(name)
    listener.request = loop.submit(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens),
        listener,
        kv_transfer_params=script or None,
    )
    return listener


def test_requests_from_many_threads_all_get_their_answers(loop):
    listeners = {}

    def send(number):
        for i in range(5):
            name = f"{number}-{i}"
            listeners[name] = submit(loop, name, [number, i, 3], external=3 * (i % 2))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        for i in range(5):
            done = listeners[f"{number}-{i}"].wait()
            assert done.token_ids == reference_tokens([number, i, 3], 5, VOCAB)


def test_tokens_come_one_step_at_a_time(loop):
    listener = submit(loop, "r", [1, 2, 3], max_tokens=7)
    listener.wait()
    assert listener.calls == 7


def test_a_refused_request_gets_its_reason_and_harms_nobody(loop):
    other = submit(loop, "other", [1, 2], max_tokens=20)
    refused = submit(loop, "r", [1] * 5000).wait()
    assert (refused.finish_reason, refused.error_type) == ("error", "OutOfBlocksError")
    assert "max_model_len" in refused.error
    empty = submit(loop, "r", []).wait()
    assert empty.error_type == "ValueError"
    held = submit(loop, "held", [1, 2, 3], external=3, load_steps=10**6)
    twice = submit(loop, "held", [1, 2]).wait()
    assert "in use" in twice.error
    assert not held.ended.is_set()
    odd = submit(loop, "odd", [1, 2], no_such_key=3, external="many").wait()
    assert (odd.finish_reason, odd.error_type) == ("error", "ValidationError")
    assert other.wait().token_ids == reference_tokens([1, 2], 20, VOCAB)


def test_an_id_that_comes_again_before_its_abort_was_told_takes_nobodys_place(loop):
    began, held = threading.Event(), threading.Event()
    first = Listener("r")

    def hold(output):  # so that what follows meets in one pause
        first(output)
        began.set()
        assert held.wait(WAIT_S)

    loop.submit("r", [1, 2, 3], SamplingParams(max_tokens=200), hold)
    assert began.wait(WAIT_S)
    loop.abort("r")
    second = submit(loop, "r", [4, 5, 6])
    held.set()
    assert first.wait().finish_reason == "abort"
    assert "in use" in second.wait().error


def test_the_abort_of_a_refused_request_leaves_the_one_that_has_its_id(loop):
    first = submit(loop, "r", [1, 2, 3], external=3, load_steps=10**9)
    second = submit(loop, "r", [4, 5, 6])
    loop.abort(second.request)
    assert "in use" in second.wait().error
    loop.call(lambda _engine: None).result(WAIT_S)
    assert not first.ended.is_set()
    loop.abort(first.request)
    assert first.wait().finish_reason == "abort"


@pytest.fixture
def taken_back(simulated, loop):
    """Returns what was taken back so far."""

    def ask():
        loop.call(lambda _engine: None).result(WAIT_S)
        return [call for call in simulated[2].calls if call[0] == "take_back"]

    return ask


def test_the_abort_of_a_refused_request_takes_back_nothing_that_another_lends(taken_back, loop):
    first = submit(loop, "r", [1, 2, 3], lend_steps=10**9)
    first.wait()
    second = submit(loop, "r", [4, 5, 6])
    loop.abort(second.request)
    second.wait()
    assert not taken_back()
    loop.abort(first.request)
    assert taken_back()


def test_the_abort_of_a_request_that_has_ended_takes_back_nothing_that_another_lends(
    taken_back, loop
):
    first = submit(loop, "r", [1, 2, 3])
    first.wait()
    second = submit(loop, "r", [4, 5, 6], lend_steps=10**9)
    second.wait()
    loop.abort(first.request)
    assert not taken_back()
    loop.abort(second.request)
    assert taken_back()


def test_an_abort_reaches_the_listener(loop):
    listener = submit(loop, "r", [1, 2, 3], external=3, load_steps=10**9)
    loop.abort("r")
    loop.abort("nobody")
    assert listener.wait().finish_reason == "abort"


def test_questions_are_answered_between_steps(loop):
    listener = submit(loop, "r", [1, 2, 3], external=3, load_steps=10**9)
    until(lambda: loop.call(lambda e: e.stats()).result(WAIT_S).scheduler.loading == 1)
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda engine: 1 / 0).result(WAIT_S)
    loop.abort("r")
    listener.wait()


def test_an_idle_engine_does_not_step(simulated, loop):
    _, executor, _ = simulated
    submit(loop, "r", [1, 2, 3]).wait()
    until(lambda: not loop.call(lambda engine: engine.has_work()).result(WAIT_S))
    steps = len(executor.steps)
    time.sleep(0.05)
    assert len(executor.steps) == steps


def test_waiting_for_a_load_steps_with_pauses(simulated, loop):
    _, executor, _ = simulated
    started = time.monotonic()
    submit(loop, "r", [1, 2, 3], external=3, load_steps=40).wait()
    assert time.monotonic() - started >= 0.030
    assert len(executor.steps) < 60


def test_lent_blocks_come_back_without_any_request(simulated, loop):
    submit(loop, "r", [1, 2, 3], max_tokens=1, lend_steps=20).wait()
    until(lambda: loop.call(lambda e: e.stats()).result(WAIT_S).scheduler.lent == 0)


def test_a_listener_that_fails_ends_nothing(loop, caplog):
    def broken(output):
        raise RuntimeError("the client has gone")

    loop.submit("broken", [1, 2], SamplingParams(max_tokens=3), broken)
    assert submit(loop, "r", [1, 2]).wait().token_ids == reference_tokens([1, 2], 5, VOCAB)
    assert "the client has gone" in caplog.text


def test_a_dead_rank_ends_every_request_with_an_error_and_tells_the_owner(
    simulated, loop, failures
):
    _, executor, connector = simulated
    listeners = [submit(loop, name, [1, 2, 3], external=3, load_steps=10**9) for name in "ab"]
    until(lambda: len(executor.steps) > 2)
    executor.kill(0)
    for listener in listeners:
        done = listener.wait()
        assert (done.finish_reason, done.error_type) == ("error", "WorkerDiedError")
        assert "rank 0 was killed" in done.error
    until(lambda: failures)
    assert isinstance(failures[0], WorkerDiedError)
    assert loop.failure is failures[0]
    assert connector.closed
    with pytest.raises(WorkerDiedError):
        submit(loop, "late", [1])
    loop.abort("a")


def test_a_rank_that_dies_while_idle_is_noticed(simulated, loop, failures):
    simulated[1].kill(0)
    until(lambda: failures)
    assert isinstance(loop.failure, WorkerDiedError)


def test_an_unforeseen_exception_ends_the_engine_like_a_dead_rank(simulated, loop, failures):
    simulated[1].execute = lambda output: dict[str, Any]()["no such key"]
    done = submit(loop, "r", [1, 2, 3]).wait()
    assert (done.finish_reason, done.error_type) == ("error", "EngineError")
    assert "KeyError: 'no such key'" in done.error
    until(lambda: failures)


def test_an_engine_that_fails_and_cannot_be_closed_is_told_to_its_owner(
    simulated, loop, failures, monkeypatch
):
    def stumble():
        raise RuntimeError("a plugin that does not close")

    monkeypatch.setattr(simulated[0], "close", stumble)
    simulated[1].kill(0)
    until(lambda: failures)
    assert isinstance(failures[0], WorkerDiedError)


def test_closing_answers_live_requests_and_closes_the_engine(simulated, failures):
    loop = EngineLoop.open(simulated[0], failures.append)
    listener = submit(loop, "r", [1, 2, 3], external=3, load_steps=10**9)
    loop.close()
    loop.close()
    done = listener.wait()
    assert (done.finish_reason, done.error) == ("error", "the engine was closed")
    assert simulated[2].closed
    assert failures == []
    assert loop.failure is None
    with pytest.raises(EngineError, match="closed"):
        submit(loop, "late", [1])
    with pytest.raises(EngineError, match="closed"):
        loop.call(lambda engine: engine.stats())


@pytest.fixture
def frozen(simulated, monkeypatch):
    """From now on steps last until the event is set; rank 0 is the one that does not answer."""
    thaw = threading.Event()
    executor = simulated[1]
    execute = executor.execute
    monkeypatch.setattr(executor, "waiting_for", lambda: (0,))
    monkeypatch.setattr(executor, "execute", lambda step: thaw.wait() and execute(step))
    yield thaw
    thaw.set()


def test_the_age_of_the_step_under_way_is_told_and_its_end(loop, frozen):
    assert loop.step_state() == StepState(None)
    listener = submit(loop, "a", [1, 2])
    until(lambda: (loop.step_state().age_s or 0) > 0.05)
    younger, older = loop.step_state(), loop.step_state()
    assert younger.age_s < older.age_s
    assert older.waiting_for == (0,)
    frozen.set()
    listener.wait()
    until(lambda: loop.step_state() == StepState(None))


def test_a_stuck_step_is_one_warning_that_names_the_rank(simulated, frozen, monkeypatch, caplog):
    monkeypatch.setattr(loops, "STUCK_STEP_S", 0.1)
    monkeypatch.setattr(loops, "_CHECK_INTERVAL_S", 0.02)
    with EngineLoop.open(simulated[0]) as loop:
        listener = submit(loop, "a", [1, 2])
        until(lambda: (loop.step_state().age_s or 0) > 0.4)
        assert loop.step_state().is_stuck
        frozen.set()
        listener.wait()
        until(lambda: not loop.step_state().is_stuck)
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 1
    assert re.search(r"the step has run for \d+ s and waits for rank 0", warnings[0])


def test_requests_that_wait_for_a_stuck_step_are_told_who_hangs(simulated, frozen, monkeypatch):
    monkeypatch.setattr(loops, "_CHECK_INTERVAL_S", 0.02)
    with EngineLoop.open(simulated[0]) as loop:
        listeners = [submit(loop, "in the step", [1, 2])]
        until(lambda: loop.step_state().age_s)
        listeners.append(submit(loop, "before it", [1, 2]))
        monkeypatch.setattr(loops, "STUCK_STEP_S", 0.1)
        for listener in listeners:
            answer = listener.wait()
            assert answer.error_type == "StuckStepError"
            assert re.fullmatch(
                r"the step has run for \d+ s and waits for rank 0; the request is given up",
                answer.error,
            )
        with pytest.raises(StuckStepError, match="waits for rank 0; no new requests until it ends"):
            submit(loop, "new", [1, 2])
        monkeypatch.setattr(loops, "STUCK_STEP_S", 600)
        frozen.set()
        until(lambda: not loop.step_state().age_s)
        assert submit(loop, "in the step", [1, 2]).wait().finish_reason == "length"
        assert [listener.calls for listener in listeners] == [1, 1]
        stats = loop.call(lambda engine: engine.stats()).result(WAIT_S).scheduler
        assert stats.free_blocks == stats.usable_blocks


def test_a_process_that_did_not_run_gives_nothing_up(simulated, frozen, monkeypatch):
    """As after a pause of the whole machine: the step is old, and nobody has looked at it."""
    monkeypatch.setattr(loops, "_CHECK_INTERVAL_S", 0.02)
    with EngineLoop.open(simulated[0]) as loop:
        listener = submit(loop, "a", [1, 2])
        until(lambda: loop.step_state().age_s)
        aged: Any = loop
        aged._step_started -= 200
        assert loop.step_state().is_stuck
        time.sleep(0.3)
        assert not listener.calls
        frozen.set()
        assert listener.wait().finish_reason == "length"


def test_the_state_of_a_step_reads_as_a_sentence():
    assert str(StepState(63.2, (0,))) == "the step has run for 63 s and waits for rank 0"
    assert str(StepState(61, (0, 3))) == "the step has run for 61 s and waits for ranks 0 and 3"
    assert str(StepState(61)) == "the step has run for 61 s"
    assert str(StepState(None)) == "no step is under way"
    assert StepState(120.1).is_stuck
    assert not StepState(119.9).is_stuck  # a rank may have stood still for a minute
    assert not StepState(None).is_stuck


def test_an_engine_that_drained_takes_requests_again(loop):
    assert loop.drain().result(WAIT_S).is_over
    with pytest.raises(DrainingError):
        submit(loop, "refused", [1, 2])
    loop.resume().result(WAIT_S)
    assert loop.admission.drain_state is None
    assert submit(loop, "taken", [1, 2]).wait().finish_reason == "length"
    assert loop.admission.drain_state is None
    loop.resume().result(WAIT_S)  # once more is no harm


def test_a_paused_engine_ends_what_it_has_and_holds_the_rest_back(loop):
    begun = submit(loop, "begun", [1, 2])
    paused = loop.pause()
    late = submit(loop, "late", [1, 2])
    assert paused.result(WAIT_S).is_over
    assert begun.wait().finish_reason == "length"
    assert loop.admission.is_paused
    assert not late.calls
    assert loop.pause().result(WAIT_S).is_over, "an engine without work is paused at once"
    loop.resume().result(WAIT_S)
    assert late.wait().finish_reason == "length"
    assert not loop.admission.is_paused


def test_of_requests_of_one_id_that_wait_for_the_end_of_a_pause_one_can_be_aborted(loop):
    loop.pause().result(WAIT_S)
    first, second = submit(loop, "r", [1, 2, 3]), submit(loop, "r", [4, 5, 6])
    loop.abort(second.request)
    assert second.wait().finish_reason == "abort"
    assert first.calls == 0
    loop.resume()
    assert first.wait().token_ids == reference_tokens([1, 2, 3], 5, VOCAB)


def test_a_request_that_waits_for_the_end_of_a_pause_can_be_aborted(loop):
    loop.pause().result(WAIT_S)
    gone, kept = submit(loop, "gone", [1, 2]), submit(loop, "kept", [1, 2])
    loop.abort("gone")
    assert gone.wait().finish_reason == "abort"
    assert not kept.calls
    loop.resume().result(WAIT_S)
    assert kept.wait().finish_reason == "length"


def test_the_end_of_a_paused_engine_answers_those_that_wait(simulated):
    with EngineLoop.open(simulated[0]) as loop:
        loop.pause().result(WAIT_S)
        held = submit(loop, "held", [1, 2])
    assert held.wait().finish_reason == "error"
    with pytest.raises(EngineError, match="closed"):
        loop.pause()
