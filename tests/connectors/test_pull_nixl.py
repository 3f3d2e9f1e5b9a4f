"""The PullConnector over NIXL, placed and staged: right cells, and nothing late in the cache."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import KVTransferConfig
from kvferry.lifetimes import Closing
from kvferry.testing.connector_conformance import GEOMETRIES, open_pair, prompt
from kvferry.testing.fake_engine import FakeEngine, Groups, run
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S, until
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.transports.nixl import NixlTransport
from kvferry.transports.nixl_reader import NixlPeer, SharedAgent
from kvferry.transports.staging import StagingNumbers
from tests.load import stop

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="the package nixl is not installed (`make test-rest` installs it)",
    ),
    pytest.mark.processes,
]

STALL_S, ANSWER_S = 3.0, 1.0
NUM_TOKENS, NUM_BLOCKS = 2048, 256
MODEL: dict[str, Any] = {"num_layers": 4, "num_kv_heads": 3, "head_size": 64, "dtype": "float32"}
SOURCE: dict[str, Any] = {**MODEL, "block_size": 16, "layout": "HND", "parallel": {"tp": 2}}
TARGET = EngineGeometry(**MODEL, block_size=24, layout="NHD", parallel=ParallelShape(pp=2))
ENGINE_CONFIGS = {"any": "KEEPALIVE_INTERVAL=1s", "tcp": "TLS=tcp,KEEPALIVE_INTERVAL=1s"}
"""UCX's own settings. Its shared memory asks nothing of the source, so a stopped one shows over
TCP only."""


def config(role: str, ways: str, **extra: Any) -> dict[str, Any]:
    """What a user writes."""
    engine_config = {"engine_config": ENGINE_CONFIGS[ways]}
    return {
        "kv_connector": "PullConnector",
        "kv_role": role,
        "kv_port": 0,
        "kv_connector_extra_config": {
            "transport": "nixl",
            # Small READs, so that a load can be stopped on its way.
            "transport_config": {
                "nixl": {"backend_params": {"UCX": engine_config}, "chunk_bytes": 64 << 10}
            },
            "cluster_key": "k" * 32,
            "lease_duration_s": 3.0,
            "handshake_timeout_s": 30.0,
            **extra,
        },
    }


@pytest.fixture(params=["placed", "staged"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way of all cells, whatever the length of their segments."""
    least = 0 if request.param == "placed" else 1 << 30
    monkeypatch.setattr(NixlTransport, "least_segment_bytes", least)
    return str(request.param)


def staging_of(engine: FakeEngine) -> list[StagingNumbers]:
    """What each rank's staging memory is doing."""
    return [worker.cache.target.staging.numbers for worker in engine.workers]  # type: ignore[attr-defined]


def wait_until_staging_is_free(engine: FakeEngine) -> None:
    until(
        lambda: not any(n.used_bytes or n.quarantined_bytes for n in staging_of(engine)),
        what=lambda: f"free staging memory, {staging_of(engine)},",
    )


@pytest.mark.parametrize("ways", list(ENGINE_CONFIGS))
@pytest.mark.parametrize("geometries", list(GEOMETRIES.values()), ids=list(GEOMETRIES))
def test_engines_of_any_two_shapes_hold_equal_cells(
    geometries: tuple[Groups, Groups], ways: str
) -> None:
    roles = ("kv_producer", "kv_consumer")
    producer, consumer = (KVTransferConfig(**config(role, ways)) for role in roles)
    with open_pair((producer, consumer), geometries) as pair:
        lengths = {"a": 30, "b": 17, "c": 3, "d": 25}
        sources = {id: pair.prefill(id, length) for id, length in lengths.items()}
        requests = [
            pair.decode(source, local_blocks=1 if id == "d" else 0)
            for id, source in sources.items()
        ]
        pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "all to end")
        assert [(r.request_id, r.error) for r in requests if r.failed or r.error] == []
        assert all(request.external_tokens for request in requests)
        pair.settle()
        wait_until_staging_is_free(pair.consumer)


class SourceProcess(Closing):
    """A prefill engine in a child process. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("source_engine.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask(geometry=SOURCE, config=config("kv_producer", "tcp"), num_blocks=NUM_BLOCKS)

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the source ended with status {self._process.wait(timeout=WAIT_S)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def suspend(self) -> None:
        stop(self._process.pid)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def source() -> Iterator[SourceProcess]:
    with SourceProcess() as source:
        yield source


@pytest.fixture
def consumer() -> Iterator[FakeEngine]:
    """Its staging memory holds a small part of a prompt, so a load takes many READs."""
    keys = {
        "stall_timeout_s": STALL_S,
        "request_timeout_s": ANSWER_S,
        "staging_bytes": 128 << 10,
    }
    written = KVTransferConfig(**config("kv_consumer", "tcp", **keys))
    engine = FakeEngine.open(written, TARGET, num_blocks=NUM_BLOCKS)
    yield engine
    engine.close()


def load(source: SourceProcess, consumer: FakeEngine, request_id: str) -> FakeRequest:
    """Gives the consumer a prompt that the source has computed."""
    done = source.ask(prefill=request_id, num_tokens=NUM_TOKENS)
    tokens = (*prompt(NUM_TOKENS, request_id), *done["tokens"])
    return consumer.add(request_id, tokens, done["params"])


class PostGate:
    """While it is shut, a connection posts its first READs and no more."""

    READS = 2

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_shut = False
        posted: Counter[NixlPeer] = Counter()
        post, post_one = SharedAgent._post, SharedAgent._post_one

        def held_post(agent: SharedAgent, peer: NixlPeer, *, may_register: bool) -> None:
            if not (self.is_shut and posted[peer] >= self.READS):
                post(agent, peer, may_register=may_register)

        def counted_post(agent: SharedAgent, peer: NixlPeer, read: Any, request: Any) -> None:
            posted[peer] += self.is_shut
            post_one(agent, peer, read, request)

        monkeypatch.setattr(SharedAgent, "_post", held_post)
        monkeypatch.setattr(SharedAgent, "_post_one", counted_post)


@pytest.fixture
def post_gate(monkeypatch: pytest.MonkeyPatch) -> PostGate:
    return PostGate(monkeypatch)


def disturb_half_way(
    consumer: FakeEngine, request: FakeRequest, post_gate: PostGate, disturb: Callable[[], None]
) -> None:
    """Disturbs a load of which every rank has some in place, and none all."""
    post_gate.is_shut = True
    wait_until_half_way(consumer, request)
    disturb()
    post_gate.is_shut = False


def wait_until_half_way(consumer: FakeEngine, request: FakeRequest) -> None:
    run(
        [consumer],
        lambda: request.stage is not Stage.WAITING,
        timeout_s=WAIT_S,
        what="its admission",
    )
    assert request.stage is Stage.LOADING, request.error
    loaders = [worker.cache.loads for worker in consumer.workers]  # type: ignore[attr-defined]
    consumer.step()  # now the ranks have heard of it

    def is_half_way() -> bool:
        bytes_of = [loader.progress().get(request.request_id, (0, 0)) for loader in loaders]
        if not all(done > 0 for done, _ in bytes_of):
            return False
        assert all(done < of for done, of in bytes_of), "the gate does not hold it"
        return True

    until(is_half_way, every_s=0.001, what="a load on its way")


def finish(consumer: FakeEngine, request: FakeRequest) -> None:
    """Steps the consumer until the request has ended."""
    run([consumer], lambda: request.stage is Stage.FINISHED, timeout_s=WAIT_S, what="its end")


def assert_nothing_is_held(consumer: FakeEngine) -> None:
    """Every block is free again, and nobody has written to it since."""
    run([consumer], lambda: consumer.is_idle, timeout_s=WAIT_S, what="idleness")
    assert consumer.num_free_blocks == consumer.num_blocks - 1
    consumer.check_memory()


def errors_of(consumer: FakeEngine) -> list[str]:
    records = [record for output in consumer.outputs for record in output.transfer_records]
    return [record.error for record in records if record.error]


def stop_during_a_load(source: SourceProcess, consumer: FakeEngine, post_gate: PostGate) -> None:
    """The load fails as stalled, and its blocks and its staging are free; the source stands."""
    request = load(source, consumer, "r")
    disturb_half_way(consumer, request, post_gate, source.suspend)
    finish(consumer, request)
    assert request.failed
    assert any("StalledError" in error for error in errors_of(consumer))
    assert_nothing_is_held(consumer)
    wait_until_staging_is_free(consumer)  # the end of the connection proves that nothing lands


@pytest.mark.timed("UCX keeps peers alive for 1 s, and the middle of a read must be seen.")
def test_a_source_that_stops_during_a_load_fails_it_as_stalled_and_harms_nobody_later(
    source: SourceProcess, consumer: FakeEngine, post_gate: PostGate
) -> None:
    stop_during_a_load(source, consumer, post_gate)
    stagings = [worker.cache.target.staging.memory for worker in consumer.workers]  # type: ignore[attr-defined]
    for staging in stagings:
        staging[:] = 0xA5
    source.resume()
    time.sleep(1.0)
    consumer.check_memory()
    assert all((staging == 0xA5).all() for staging in stagings), "bytes landed in free staging"


@pytest.mark.timed("UCX keeps peers alive for 1 s, and the middle of a read must be seen.")
@pytest.mark.xfail(
    strict=False,
    reason="where the source itself sends the data, UCX 1.22 may abort a process that resumes "
    "while it owes data to a reader that has gone (ucp_request.inl: Fatal: unexpected error: "
    "Endpoint timeout)",
)
def test_a_source_that_resumes_gives_its_blocks_back_and_serves_again(
    source: SourceProcess, consumer: FakeEngine, post_gate: PostGate
) -> None:
    stop_during_a_load(source, consumer, post_gate)
    source.resume()
    assert source.ask(settle=True) == {"held": 0}
    again = load(source, consumer, "again")
    finish(consumer, again)
    assert not again.failed
    assert_nothing_is_held(consumer)
    assert source.ask(settle=True) == {"held": 0}


@pytest.mark.timed("UCX keeps peers alive for 1 s, and the middle of a read must be seen.")
def test_a_source_killed_during_a_load_fails_it_and_every_slot_comes_back(
    source: SourceProcess, consumer: FakeEngine, post_gate: PostGate
) -> None:
    request = load(source, consumer, "r")
    disturb_half_way(consumer, request, post_gate, source.kill)
    finish(consumer, request)
    assert request.failed
    assert_nothing_is_held(consumer)
    wait_until_staging_is_free(consumer)
    consumer.check_memory()

    with SourceProcess() as another:
        served = load(another, consumer, "s")
        finish(consumer, served)
        assert not served.failed
        assert_nothing_is_held(consumer)
        assert another.ask(settle=True) == {"held": 0}
