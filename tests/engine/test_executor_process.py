"""Ranks as processes: the same tokens, and no rank that dies or hangs goes unnoticed."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.engine import executor as executors
from kvferry.engine.executor import Executor
from kvferry.engine.messages import SamplingParams, ScheduledRequest, SchedulerOutput
from kvferry.errors import ConfigError, ModelError, WorkerDiedError
from kvferry.testing.waiting import until
from tests.load import stop

pytestmark = pytest.mark.processes

LENGTHS = (3, 11, 26)


def step(tokens=2, **metadata):
    part = ScheduledRequest(
        request_id="r",
        token_ids=[3] * tokens,
        first_position=0,
        block_ids=([1, 2],),
        sample=SamplingParams(),
    )
    return SchedulerOutput(
        requests=[part] if tokens else [], connector_metadata=msgspec.msgpack.encode(metadata)
    )


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def pids_of(executor):
    return [rank.process.pid for rank in executor.ranks]


SILENCE_S = 3600.0
"""For which a silent rank is waited for where it must not come to that."""


def wait_until_gone(pids):
    until(lambda: not any(map(is_running, pids)), what="the end of the processes")


def assert_same_tokens(spec, alone, generate, prompts):
    with Executor(alone, in_process=True) as executor:
        expected = generate(executor, prompts(*LENGTHS), together=False)
    with Executor(spec) as executor:
        pids = pids_of(executor)
        assert executor.alive()
        found = generate(executor, prompts(*LENGTHS), chunk=9)
    assert [sequence.output for sequence in found] == [one.output for one in expected]
    for sequence, one in zip(found, expected, strict=True):
        assert sequence.gaps == pytest.approx(one.gaps, abs=1e-9)
    assert not any(map(is_running, pids))


def test_three_ranks_draw_the_tokens_of_one(tiny_folder, worker_spec, generate, prompts):
    """4 KV heads, 8 query heads, vocabulary 320 and inner dim 130 over 3 ranks."""
    folder = tiny_folder(num_heads=8, num_kv_heads=4)
    assert_same_tokens(worker_spec(folder, tp=3), worker_spec(folder), generate, prompts)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 3), (4, 1)])
def test_other_shapes_draw_the_tokens_of_one(tp, pp, tiny_folder, worker_spec, generate, prompts):
    folder = tiny_folder(num_layers=5)
    spec = worker_spec(folder, tp=tp, pp=pp, layout="BLHNC", block_size=3)
    assert_same_tokens(spec, worker_spec(folder), generate, prompts)


@pytest.mark.slow
def test_sixteen_bit_sums_travel_too(tiny_folder, worker_spec, generate, prompts):
    spec = worker_spec(tiny_folder(), tp=2, dtype="bfloat16")
    with Executor(spec) as executor:
        found = generate(executor, prompts(9), tokens=2)
    assert len(found[0].output) == 2


def test_a_rank_is_named_in_ps_and_reported_with_the_signal_that_killed_it(
    tiny_folder, worker_spec, recording_connector
):
    """Connectors live in the processes; one of them kills its own in the middle of a step."""
    spec = worker_spec(
        tiny_folder(), pp=2, connector=recording_connector(), step_timeout_s=SILENCE_S
    )
    with Executor(spec) as executor:
        told = [msgspec.json.decode(data) for data in executor.handshakes()]
        assert [rank for rank, _, _ in told] == [0, 1]
        lines = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in pids_of(executor)]
        assert [line[4:6] for line in lines] == [["tested", "rank0"], ["tested", "rank1"]]
        outputs: list[Any] = list(executor.execute(step(tell="x")))
        events = outputs[1].kv_connector_output.kv_cache_events
        assert events[:3] == ["allocate", "register_kv_caches", "start_load_kv x"]
        assert outputs[1].sampled
        outputs = list(executor.execute(step(tokens=0, kill_rank=1)))
        assert outputs[1] is None
        assert outputs[0] is not None
        failure = str(executor.failures[1])
        assert f"rank 1 of engine 'tested' (pid {pids_of(executor)[1]}) died" in failure
        assert "killed by SIGKILL" in failure
        # The living rank goes on with what needs no other rank, and with nothing else.
        assert executor.execute(step(tokens=0))[0] is not None
        with pytest.raises(WorkerDiedError, match="killed by SIGKILL"):
            executor.execute(step())
    assert not any(map(is_running, pids_of(executor)))


def test_a_dead_neighbour_ends_a_sum_at_once(tiny_folder, worker_spec):
    with Executor(worker_spec(tiny_folder(), tp=2, step_timeout_s=SILENCE_S)) as executor:
        os.kill(pids_of(executor)[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"rank 0 .* killed by SIGKILL"):
            executor.execute(step())
        assert not executor.alive()
        assert set(executor.failures) == {0, 1}


def test_a_rank_that_raises_says_what(tiny_folder, worker_spec, recording_connector, caplog):
    spec = worker_spec(tiny_folder(), connector=recording_connector())
    with Executor(spec) as executor:
        with pytest.raises(WorkerDiedError, match="RuntimeError: this connector is broken"):
            executor.execute(step(fail_rank=0))
        wait_until_gone(pids_of(executor))
    assert "[tested rank 0] RuntimeError: this connector is broken" in caplog.text


def test_a_rank_that_hangs_is_killed(tiny_folder, worker_spec, recording_connector):
    spec = worker_spec(tiny_folder(), connector=recording_connector(), step_timeout_s=1.0)
    with Executor(spec) as executor:
        with pytest.raises(WorkerDiedError, match=r"did not answer for 1(\.\d+)? s and was killed"):
            executor.execute(step(hang_rank=0))
        wait_until_gone(pids_of(executor))


@pytest.mark.timed("A healthy rank must notice within 4 s that its sum has ended.")
@pytest.mark.slow
def test_a_rank_that_hangs_is_blamed_and_not_the_neighbour_that_waits_for_it(
    tiny_folder, worker_spec, recording_connector, monkeypatch
):
    monkeypatch.setattr(executors, "GRACE_S", 4.0)
    spec = worker_spec(tiny_folder(), tp=2, connector=recording_connector(), step_timeout_s=1.0)
    with Executor(spec) as executor:
        with pytest.raises(WorkerDiedError, match=r"rank 0 of engine 'tested' did not answer for"):
            executor.execute(step(hang_rank=0))
        assert "cannot add up" in str(executor.failures[1])


@pytest.mark.timed("Healthy ranks must end a step within 5 s.")
@pytest.mark.slow
def test_a_stopped_rank_is_named_while_the_step_waits_and_blamed_at_its_end(
    tiny_folder, worker_spec, monkeypatch
):
    monkeypatch.setattr(executors, "GRACE_S", 2.0)
    with Executor(worker_spec(tiny_folder(), tp=2, step_timeout_s=5.0)) as executor:
        executor.execute(step())
        assert executor.waiting_for() == ()
        stop(pids_of(executor)[1])
        failures = []

        def execute():
            with pytest.raises(WorkerDiedError) as failure:
                executor.execute(step())
            failures.append(str(failure.value))

        thread = threading.Thread(target=execute)
        thread.start()
        # Rank 0 has not answered either, but only because of rank 1.
        while executor.waiting_for() != (1,):
            assert thread.is_alive()
            time.sleep(0.01)
        thread.join(60)
        assert "rank 1 of engine 'tested' did not answer for" in failures[0]
        assert executor.waiting_for() == ()
    assert not any(map(is_running, pids_of(executor)))


@pytest.mark.slow
def test_errors_of_the_start_keep_their_class_and_leave_no_process(
    tmp_path, tiny_folder, worker_spec, recording_connector
):
    spec = worker_spec(tiny_folder(), tp=2)
    with pytest.raises(ModelError, match=r"rank . of engine 'tested': ModelError: .* cannot be"):
        Executor(msgspec.structs.replace(spec, model_folder=str(tmp_path)))
    spec = worker_spec(tiny_folder(), connector=recording_connector(too_littel_memory=True))
    with pytest.raises(ConfigError, match="did you mean 'too_little_memory'"):
        Executor(spec)


def test_ranks_end_when_their_parent_is_killed(tiny_folder, worker_spec):
    spec = msgspec.msgpack.encode(worker_spec(tiny_folder()))
    program = """
        import msgspec, os, signal
        from kvferry.engine.executor import Executor
        from kvferry.engine.messages import WorkerSpec
        executor = Executor(msgspec.msgpack.decode(bytes.fromhex("SPEC"), type=WorkerSpec))
        print(*[rank.process.pid for rank in executor.ranks], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program).replace("SPEC", spec.hex())],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 1
    wait_until_gone(pids)
