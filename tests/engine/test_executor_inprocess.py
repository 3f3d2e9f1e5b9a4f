"""What an executor promises, on threads: the connector's calls, failures, and the end."""

import threading
from typing import Any

import msgspec
import pytest

from kvferry.engine import executor as executors
from kvferry.engine.executor import Executor
from kvferry.engine.messages import SamplingParams, ScheduledRequest, SchedulerOutput
from kvferry.errors import ConfigError, EngineError, ModelError, WorkerDiedError
from kvferry.testing.waiting import until


def request(tokens=3, sample=True):
    return ScheduledRequest(
        request_id="r",
        token_ids=[7] * tokens,
        first_position=0,
        block_ids=([5, 2],),
        sample=SamplingParams() if sample else None,
    )


def step(*requests, finished=(), **metadata):
    return SchedulerOutput(
        requests=list(requests),
        finished_req_ids=set(finished),
        connector_metadata=msgspec.msgpack.encode(metadata),
    )


@pytest.fixture
def recorded(tiny_folder, worker_spec, recording_connector):
    """An executor whose connectors note their calls."""
    opened = []

    def make(**shape):
        spec = worker_spec(tiny_folder(), connector=recording_connector(), **shape)
        opened.append(Executor(spec, in_process=True))
        return opened[-1]

    yield make
    for executor in opened:
        executor.close()


def calls(output):
    return output.kv_connector_output.kv_cache_events


def test_connector_calls_come_in_the_documented_order(recorded):
    executor = recorded(pp=2)
    first, last = executor.execute(step(request(), finished=["b", "a"], tell="x"))
    start = ["allocate", "register_kv_caches", "start_load_kv x"]
    end = ["wait_for_save", "get_transfer_results a,b"]
    for output, layers in ((first, (0, 1)), (last, (2, 3))):
        each = [
            f"{call} layer.{layer}"
            for layer in layers
            for call in ("wait_for_layer_load", "save_kv_layer")
        ]
        assert calls(output) == [*start, *each, *end]
        assert output.kv_connector_output.finished_sending == {"a", "b"}


def test_a_step_without_requests_still_reaches_the_connector(recorded):
    executor = recorded(tp=2)
    executor.execute(step(request()))
    for output in executor.execute(step(finished=["r"])):
        assert calls(output) == ["start_load_kv", "wait_for_save", "get_transfer_results r"]
        assert output.sampled == {}


def test_layers_keep_their_names_in_a_cross_layer_tensor(recorded):
    executor = recorded(layout="BLKNHD")
    (output,) = executor.execute(step(request()))
    assert [call for call in calls(output) if "save_kv_layer" in call] == [
        f"save_kv_layer layer.{layer}" for layer in range(4)
    ]


def test_handshakes_come_by_rank(recorded):
    told = [msgspec.json.decode(data) for data in recorded(tp=2, pp=2).handshakes()]
    early, late = ["layer.0", "layer.1"], ["layer.2", "layer.3"]
    assert told == [[rank, "first", early if rank < 2 else late] for rank in range(4)]


def test_only_the_first_rank_of_the_last_stage_samples(recorded):
    outputs = recorded(tp=2, pp=2).execute(step(request()))
    assert [bool(output.sampled) for output in outputs] == [False, False, True, False]
    assert outputs[2].gaps["r"] >= 0


def test_an_incomplete_prompt_is_not_sampled(recorded):
    (output,) = recorded().execute(step(request(sample=False)))
    assert output.sampled == output.gaps == {}


@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (1, 3)])
def test_a_failing_rank_is_reported_and_blocks_nobody(recorded, tp, pp):
    executor = recorded(tp=tp, pp=pp)
    assert executor.alive()
    broken = step(request(), fail_rank=1)
    if pp > 1:  # the stage before the broken one ends its step, and that is what comes back
        outputs = executor.execute(broken)
        assert outputs[0] is not None
        assert outputs[1] is None
    message = "rank 1 of engine 'tested': RuntimeError: this connector is broken"
    with pytest.raises(WorkerDiedError, match=message):
        executor.execute(broken)
    assert not executor.alive()
    assert 1 in executor.failures


@pytest.mark.timed("A healthy rank must end a step within 0.5 s.")
def test_a_silent_rank_is_named_and_blamed(tiny_folder, worker_spec, monkeypatch):
    monkeypatch.setattr(executors, "GRACE_S", 3.0)
    silence, seen = threading.Event(), []
    with Executor(
        worker_spec(tiny_folder(), tp=2, step_timeout_s=0.5), in_process=True
    ) as executor:

        def hang(_step):
            seen.append(until(executor.waiting_for))
            silence.wait(60)

        rank: Any = executor.ranks[1]
        monkeypatch.setattr(rank.worker, "execute", hang)
        try:
            with pytest.raises(WorkerDiedError, match=r"rank 1 of engine .* did not answer for"):
                executor.execute(SchedulerOutput(requests=[request()]))
        finally:
            silence.set()
        assert seen == [(0, 1)]
        assert executor.waiting_for() == ()
        assert set(executor.failures) == {0, 1}


def test_the_living_ranks_still_take_steps_without_requests(recorded):
    executor = recorded(tp=2)
    outputs = executor.execute(step(fail_rank=0))
    assert outputs[0] is None
    assert calls(outputs[1])[-1] == "get_transfer_results"
    outputs = executor.execute(step(finished=["r"]))
    assert outputs[0] is None
    assert outputs[1].kv_connector_output.finished_sending == {"r"}
    with pytest.raises(WorkerDiedError, match="rank 0 of engine 'tested'"):
        executor.execute(step(request()))


def test_a_step_without_metadata_is_not_taken_for_an_empty_one(recorded):
    executor = recorded()
    with pytest.raises(WorkerDiedError, match="without connector metadata"):
        executor.execute(SchedulerOutput())


def test_too_little_memory_from_a_connector_is_refused(
    tiny_folder, worker_spec, recording_connector
):
    spec = worker_spec(tiny_folder(), connector=recording_connector(too_little_memory=True), tp=2)
    with pytest.raises(EngineError, match=r"allocated \d+ bytes, \d+ were asked for"):
        Executor(spec, in_process=True)


def test_a_rank_that_cannot_start_leaves_no_thread(tmp_path, tiny_folder, worker_spec):
    spec = worker_spec(tiny_folder(), tp=3)
    before = set(threading.enumerate())
    with pytest.raises(ModelError, match="cannot be read"):
        Executor(msgspec.structs.replace(spec, model_folder=str(tmp_path)), in_process=True)
    assert set(threading.enumerate()) <= before


def test_wrong_extra_keys_are_named(tiny_folder, worker_spec, recording_connector):
    spec = worker_spec(tiny_folder(), connector=recording_connector(too_littel_memory=True))
    with pytest.raises(ConfigError, match="did you mean 'too_little_memory'"):
        Executor(spec, in_process=True)


def test_close_ends_every_thread_and_may_be_repeated(recorded):
    before = set(threading.enumerate())
    executor = recorded(tp=2, pp=2)
    assert len(set(threading.enumerate()) - before) == 4
    executor.close()
    executor.close()
    assert set(threading.enumerate()) <= before
