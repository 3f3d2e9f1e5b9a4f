"""Ranks that are processes of other hosts, here of this one: as good as the engine's own."""

import queue
import socket
import threading
import time
from typing import Any

import pytest

from kvferry.config import KVTransferConfig
from kvferry.engine import remote
from kvferry.engine.executor import Executor
from kvferry.engine.messages import RanksElsewhere, Start
from kvferry.engine.ranks import RankElsewhere
from kvferry.errors import ModelError, WorkerDiedError
from kvferry.serving.messages import Bound, RankSettings
from kvferry.serving.process import ChildProcess
from kvferry.testing.waiting import WAIT_S, until
from kvferry.zeromq import join_address
from tests.engine.test_executor_process import LENGTHS, step

pytestmark = pytest.mark.processes

KEY = "a key of one start"


@pytest.fixture
def start_rank(tmp_path):
    """Starts a rank that waits for its engine; returns its process and its address."""
    started: list[Any] = []

    def start(folder, key=KEY):
        news: queue.Queue[Any] = queue.Queue()
        settings = RankSettings(host="127.0.0.1", key=key, model_folder=str(folder))
        log = tmp_path / f"rank-{len(started)}.log"
        process = ChildProcess.start("rank", "rank", settings, log, news)
        started.append(process)
        bound = news.get(timeout=60).event
        assert isinstance(bound, Bound), process.error()
        return process, f"127.0.0.1:{bound.port}"

    yield start
    for process in started:
        process.terminate()
        process.reap(60)


def elsewhere(*addresses, key=KEY):
    return RanksElsewhere(host="127.0.0.1", addresses=addresses, key=key)


def test_ranks_here_and_elsewhere_draw_the_tokens_of_one(
    start_rank, tiny_folder, worker_spec, generate, prompts
):
    folder = tiny_folder()
    with Executor(worker_spec(folder), in_process=True) as executor:
        expected = generate(executor, prompts(*LENGTHS), together=False)
    ranks = [start_rank(folder) for _ in range(2)]
    away = elsewhere(*(address for _, address in ranks))
    with Executor(worker_spec(folder, pp=3), elsewhere=away) as executor:
        assert executor.alive()
        found = generate(executor, prompts(*LENGTHS), chunk=9)
    assert [one.output for one in found] == [one.output for one in expected]
    for process, _ in ranks:
        process.reap(60)
        assert process.exit_code == 0, process.error()


def test_a_rank_elsewhere_that_dies_is_noticed_and_named(start_rank, tiny_folder, worker_spec):
    folder = tiny_folder()
    process, address = start_rank(folder)
    with Executor(worker_spec(folder, pp=2), elsewhere=elsewhere(address)) as executor:
        executor.execute(step())
        process.reap(0)  # killed
        while executor.alive():
            time.sleep(0.05)
        with pytest.raises(
            WorkerDiedError, match=f"rank 1 of engine 'tested' at {address} is gone"
        ):
            executor.execute(step())


@pytest.mark.slow
def test_a_rank_elsewhere_that_cannot_start_says_why(
    start_rank, tiny_folder, worker_spec, tmp_path
):
    _, address = start_rank(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"rank 1 .*nothing"):
        Executor(worker_spec(tiny_folder(), pp=2), elsewhere=elsewhere(address))


def test_a_rank_serves_no_engine_that_has_another_key(start_rank, tiny_folder, worker_spec):
    folder = tiny_folder()
    process, address = start_rank(folder)
    spec = worker_spec(folder, pp=2)
    with pytest.raises(WorkerDiedError, match=r"rank 1 .* cannot be reached"):
        Executor(spec, elsewhere=elsewhere(address, key="another"))
    assert process.is_running
    with Executor(spec, elsewhere=elsewhere(address)) as executor:  # it still waits for its own
        executor.execute(step())


@pytest.mark.parametrize("said", [b"", b"\0\0"], ids=["nothing", "part of a message"])
def test_a_connection_that_falls_silent_keeps_no_engine_from_its_rank(
    start_rank, tiny_folder, worker_spec, said
):
    folder = tiny_folder()
    _, address = start_rank(folder)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as stray:  # the rank accepts it first
        stray.sendall(said)
        with Executor(worker_spec(folder, pp=2), elsewhere=elsewhere(address)) as executor:
            executor.execute(step())


def test_a_silent_connection_does_not_hold_up_the_end_of_a_rank():
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = join_address(*listener.getsockname())
        with socket.create_connection(listener.getsockname()):
            thread = threading.Thread(
                target=lambda: accepted.append(remote.accept(listener, KEY)), daemon=True
            )
            thread.start()
            until(lambda: greeters() and timers(), what="the stranger's time limit")
            assert all(each.daemon for each in greeters() + timers())
            with remote.connect(address, KEY, WAIT_S) as ours:
                thread.join(WAIT_S)
                with accepted[0] as theirs:
                    ours.send_bytes(b"served")
                    assert theirs.recv_bytes() == b"served"
    until(lambda: not greeters(), what="the end of the stranger's thread")


def greeters():
    return [each for each in threading.enumerate() if each.name == "kvferry-greet"]


def timers():
    return [each for each in threading.enumerate() if isinstance(each, threading.Timer)]


@pytest.mark.parametrize(
    ("said", "limit_s", "reason"),
    [
        (b"", 0.5, "TimeoutError"),
        (b"\0\0", 0.5, "TimeoutError"),
        (b"\0\0\0\5hello", WAIT_S, "AuthenticationError.*hello"),
    ],
    ids=["nothing", "part of a message", "another protocol"],
)
def test_an_engine_gives_up_what_does_not_prove_to_be_its_rank(
    tiny_folder, worker_spec, said, limit_s, reason
):
    spec = worker_spec(tiny_folder(), pp=2, start_timeout_s=limit_s)
    given_up = threading.Event()

    def answer(server):
        with server.accept()[0] as connection:
            connection.sendall(said)
            given_up.wait(WAIT_S)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        address = join_address(*server.getsockname())
        try:
            with pytest.raises(WorkerDiedError, match=f"rank 1 .* cannot be reached: {reason}"):
                RankElsewhere(spec, 1, address, KEY)
        finally:
            given_up.set()
            thread.join()


def test_a_rank_on_another_host_gives_out_that_hosts_address(tiny_folder, worker_spec):
    transfer = KVTransferConfig(
        kv_connector="PullConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "host": "10.0.0.1",
            "advertise_host": "203.0.113.7",
            "transport": "tcp",
        },
    )
    spec = worker_spec(tiny_folder(), connector=transfer)
    start = Start(spec=spec, rank=1, meeting="", log_level=0).on("10.0.0.2", "/there")
    assert start.host == "10.0.0.2"
    assert start.spec.model_folder == "/there"
    assert start.spec.kv_transfer_config is not None
    assert start.spec.kv_transfer_config.kv_connector_extra_config == {
        "host": "10.0.0.2",
        "transport": "tcp",
    }
