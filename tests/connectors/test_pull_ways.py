"""Placed or staged: the same cells, and nothing lands in blocks of others."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors.records import digest_mismatch
from kvferry.errors import IncompatibleError
from kvferry.layouts import Layout
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.testing.connector_conformance import GEOMETRIES, Pair, open_pair, small_geometry
from kvferry.testing.fake_engine import FakeEngine, Groups, run
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.faults import lossy_transport
from kvferry.testing.known_cache import KnownCache
from kvferry.testing.unfenced import ReadGate, unfenced_transport
from kvferry.testing.waiting import WAIT_S, until
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.transports import base, local
from kvferry.transports import staged as staged_reads
from kvferry.transports.registry import transport_class
from kvferry.transports.shm import ShmTransport
from kvferry.transports.staged import Staging
from kvferry.transports.staging import StagingNumbers, StagingPool
from tests.clock import Clock
from tests.connectors.engines import pull_config, pull_scheduler

SOURCE, TARGET = small_geometry("HND", 4, tp=2), small_geometry("NHD", 6, pp=2)
LARGE = EngineGeometry(
    num_layers=3,
    num_kv_heads=3,
    head_size=16,
    dtype="float32",
    block_size=4,
    layout="HND",
    parallel=ParallelShape(),
)
"""Of which 21 tokens are several times the smallest staging memory."""

OpenPair = Callable[..., Pair]


@pytest.fixture
def stall_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of stalls and quarantine of what is opened from now on."""
    clock = Clock.install(monkeypatch)
    clock.move(monkeypatch, base, local, staged_reads)
    monkeypatch.setattr(staged_reads, "StagingPool", partial(StagingPool, clock=clock))
    return clock


def is_finished(request: FakeRequest) -> bool:
    return request.stage is Stage.FINISHED


def with_slow(values: dict[str, Any], *quick: str) -> dict[str, Any]:
    """Arguments of ``parametrize``: all the values, of which few are not slow."""
    marks = {name: () if name in quick else (pytest.mark.slow,) for name in values}
    return {
        "argvalues": [pytest.param(value, marks=marks[name]) for name, value in values.items()],
        "ids": list(values),
    }


@pytest.fixture
def read_gate() -> Iterator[ReadGate]:
    """Makes ``shm`` a transport that cannot fence; what is still held at the end lands."""
    read_gate = ReadGate()
    with temporary_plugin(TRANSPORTS, "shm", unfenced_transport(ShmTransport, read_gate)):
        yield read_gate
        read_gate.release()


def without_proof(name: str) -> AbstractContextManager[None]:
    """Makes a transport one that says that it cannot prove the end of a read: all is staged."""
    kind = transport_class(name)
    return temporary_plugin(TRANSPORTS, name, type(kind.__name__, (kind,), {"fences": False}))


def of_long_segments(name: str) -> AbstractContextManager[None]:
    """Makes a transport one that places segments only where they are longer than any here."""
    kind = transport_class(name)
    reluctant = type(kind.__name__, (kind,), {"least_segment_bytes": 1 << 30})
    return temporary_plugin(TRANSPORTS, name, reluctant)


@pytest.fixture
def staged() -> Iterator[None]:
    """All loads over ``shm`` go through staging."""
    with of_long_segments("shm"):
        yield


@pytest.fixture
def open_one() -> Iterator[OpenPair]:
    """Opens a pair with extra keys of the consumer; it is closed at the end."""
    with ExitStack() as stack:

        def open_pair_of(geometries: tuple[Groups, Groups] = (SOURCE, TARGET), **keys: Any) -> Pair:
            common = {
                "lease_duration_s": 600.0,
                "record_digests": True,
                "transport": keys.pop("transport", "shm"),
            }
            producer = pull_config("kv_producer", "p", **common)
            consumer = pull_config("kv_consumer", "d", **{**common, **keys})
            return stack.enter_context(open_pair((producer, consumer), geometries))

        yield open_pair_of


def staging_of(engine: FakeEngine) -> list[StagingNumbers]:
    """What each rank's staging memory is doing."""
    return [worker.cache.target.staging.numbers for worker in engine.workers]  # type: ignore[attr-defined]


def quarantined(engine: FakeEngine) -> int:
    return sum(numbers.quarantined_bytes for numbers in staging_of(engine))


def connections_of(engine: FakeEngine) -> list[Any]:
    """What the loaders read over."""
    return [
        connection
        for worker in engine.workers
        for peer in worker.cache.loads.peers.connected.values()  # type: ignore[attr-defined]
        for connection in peer.connections.values()
    ]


def settle_staging(engine: FakeEngine) -> None:
    """Waits until every slot is back."""
    until(
        lambda: all(not (n.used_bytes or n.quarantined_bytes) for n in staging_of(engine)),
        what=lambda: f"every slot, {staging_of(engine)},",
    )


def check_digests(pair: Pair, ids: list[str]) -> None:
    """Asserts that the cells of these requests arrived bit for bit."""
    for id in ids:
        sides = [
            [
                record
                for output in engine.outputs
                for record in output.transfer_records
                if record.direction == direction and record.request_id == id
            ]
            for engine, direction in ((pair.producer, "send"), (pair.consumer, "recv"))
        ]
        assert digest_mismatch(*sides) is None


def errors_of(pair: Pair, ids: Iterable[str]) -> list[str]:
    """Why loads of these requests failed, if any did."""
    records = [r for output in pair.consumer.outputs for r in output.transfer_records]
    return [record.error for record in records if record.error and record.request_id in ids]


def serve_several(pair: Pair) -> None:
    """Five loads at once, one beside a local hit; every cell and block is as it must be."""
    lengths = {"a": 30, "b": 17, "c": 3, "d": 25, "e": 24}
    sources = {id: pair.prefill(id, length) for id, length in lengths.items()}
    requests = [
        pair.decode(source, local_blocks=1 if id == "d" else 0) for id, source in sources.items()
    ]
    pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "all to end")
    assert errors_of(pair, sources) == []
    assert [(r.request_id, r.error) for r in requests if r.failed or r.error] == []
    check_digests(pair, list(lengths))
    pair.settle()
    settle_staging(pair.consumer)


def ways_of(pair: Pair) -> set[str]:
    return {
        str(one.way)
        for worker in pair.consumer.workers
        for peer in worker.cache.loads.peers.connected.values()  # type: ignore[attr-defined]
        for one in peer.plans
    }


def abort_in_the_middle_of(
    pair: Pair, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborts a load while a function works on its blocks: they stay its own."""
    gate = ReadGate()
    gate.hold()
    real = getattr(owner, name)
    begun: list[int] = []

    def slow(*args: Any) -> None:
        begun.append(1)
        gate.gate().wait()
        real(*args)

    monkeypatch.setattr(owner, name, slow)
    try:
        request = pair.decode(pair.prefill("r", 21))
        pair.run(lambda: request.stage is Stage.LOADING, "its admission")
        until(lambda: bool(begun), what=f"the call of {name}")
        pair.consumer.abort("r")
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pair.consumer.step()
            pair.producer.step()
            assert pair.consumer.held, "its blocks are free while they are being written to"
    finally:
        gate.release()
    pair.settle()
    settle_staging(pair.consumer)


# ---- the same cells either way -------------------------------------------------------------------


@pytest.mark.parametrize("geometries", **with_slow(GEOMETRIES, "tp2-pp2"))
@pytest.mark.parametrize(
    ("transport", "way"), [("tcp", "placed"), ("shm", "staged"), ("tcp", "staged")]
)
def test_either_way_moves_the_same_cells(
    open_one: OpenPair, geometries: tuple[Groups, Groups], transport: str, way: str
) -> None:
    with ExitStack() as stack:
        if way == "staged":
            stack.enter_context(without_proof(transport))
        pair = open_one(geometries, transport=transport)
        serve_several(pair)
        assert ways_of(pair) == {way}


def test_the_way_and_its_reason_are_told_once_per_peer(
    open_one: OpenPair, staged: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvferry.connectors.pull.peer")
    serve_several(open_one((small_geometry("HND", 16), small_geometry("NHD", 16))))
    assert caplog.text.count("staged (segments have") == 1


@pytest.mark.parametrize("least_segment_bytes", [0, 1 << 30], ids=["placed", "staged"])
def test_a_connection_lost_in_the_middle_is_made_again_and_the_cells_are_right(
    open_one: OpenPair, least_segment_bytes: int
) -> None:
    lossy = lossy_transport(ShmTransport, loss=0.1, seed=3)
    lossy.least_segment_bytes = least_segment_bytes
    with temporary_plugin(TRANSPORTS, "shm", lossy):
        pair = open_one()
        requests = [pair.decode(pair.prefill(f"r{n}", 20 + n)) for n in range(8)]
        pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "all to end")
        assert not all(request.failed for request in requests)
        pair.settle()
        settle_staging(pair.consumer)


def test_only_the_connection_that_was_lost_is_made_again(open_one: OpenPair) -> None:
    pair = open_one()
    pair.finish(pair.decode(pair.prefill("r", 24)))
    before = connections_of(pair.consumer)
    before[0].close()
    request = pair.decode(pair.prefill("s", 24))
    pair.finish(request)
    assert not request.failed
    same = [one is two for one, two in zip(before, connections_of(pair.consumer), strict=True)]
    assert len(same) > 1
    assert not same[0]
    assert all(same[1:])


@pytest.mark.parametrize("geometries", **with_slow(GEOMETRIES, "tp1-tp4"))
def test_a_transport_that_cannot_fence_reads_through_staging(
    open_one: OpenPair, read_gate: ReadGate, geometries: tuple[Groups, Groups]
) -> None:
    pair = open_one(geometries)
    serve_several(pair)
    assert ways_of(pair) == {"staged"}


@pytest.mark.parametrize("unfenced", [False, True])
def test_loads_larger_than_the_staging_memory_pass_through_it(
    open_one: OpenPair, request: pytest.FixtureRequest, unfenced: bool
) -> None:
    request.getfixturevalue("read_gate" if unfenced else "staged")
    pair = open_one((LARGE, replace(LARGE, layout=Layout.named("NHD"))), staging_bytes=4096)
    serve_several(pair)
    assert ways_of(pair) == {"staged"}
    records = [r for output in pair.consumer.outputs for r in output.transfer_records]
    assert max(record.nbytes for record in records) > 4 * 4096


def test_staging_memory_that_cannot_hold_one_block_fails_loads_with_the_key_to_change(
    open_one: OpenPair, staged: None
) -> None:
    large = EngineGeometry(
        num_layers=1,
        num_kv_heads=8,
        head_size=64,
        dtype="float32",
        block_size=8,
        layout="NHD",
        parallel=ParallelShape(),
    )
    # Of another layout: where staging would bring no longer segments, nothing is staged.
    pair = open_one((large, replace(large, layout=Layout.named("HND"))), staging_bytes=4096)
    request = pair.decode(pair.prefill("r", 21))
    pair.finish(request)
    assert request.failed
    errors = [r.error for output in pair.consumer.outputs for r in output.transfer_records]
    assert any("staging_bytes" in error for error in errors)
    pair.settle()


# ---- nothing lands in the cache after a load was reported ---------------------------------------


def start_held_load(pair: Pair, read_gate: ReadGate) -> Any:
    """A load of which every read is under way and nothing has landed."""
    request = pair.decode(pair.prefill("r", 21))
    read_gate.hold()
    pair.run(lambda: request.stage is Stage.LOADING, "its admission")
    until(lambda: read_gate.held > 0, what="a read")
    return request


def release_and_settle(pair: Pair, read_gate: ReadGate) -> None:
    """What was held lands now; nobody's blocks change and every slot comes back."""
    read_gate.release()
    settle_staging(pair.consumer)
    for engine in (pair.producer, pair.consumer):
        engine.check_memory()
    serve_several(pair)


def test_an_aborted_load_is_reported_while_its_reads_go_on_and_they_land_in_quarantine(
    stall_clock: Clock, open_one: OpenPair, read_gate: ReadGate
) -> None:
    pair = open_one()
    start_held_load(pair, read_gate)
    pair.consumer.abort("r")
    pair.settle()
    assert quarantined(pair.consumer) > 0

    def is_closed() -> bool:
        return any(connection.closed for connection in connections_of(pair.consumer))

    until(
        stall_clock.passing(is_closed),
        what="the end of the connection to a peer that stands still",
    )
    release_and_settle(pair, read_gate)


def test_a_read_without_progress_fails_its_load_as_stalled_and_its_slots_stay_in_quarantine(
    stall_clock: Clock, open_one: OpenPair, read_gate: ReadGate
) -> None:
    pair = open_one()
    request = start_held_load(pair, read_gate)
    pair.run(stall_clock.passing(partial(is_finished, request)), "its end")
    assert request.failed
    errors = [r.error for output in pair.consumer.outputs for r in output.transfer_records]
    assert any("StalledError" in error and "stall_timeout_s" in error for error in errors)
    assert any(connection.closed for connection in connections_of(pair.consumer))
    pair.settle()
    assert quarantined(pair.consumer) > 0
    release_and_settle(pair, read_gate)


def test_a_load_aborted_while_it_is_unpacked_is_reported_when_that_has_ended(
    open_one: OpenPair, read_gate: ReadGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort_in_the_middle_of(open_one(), Staging, "unpack", monkeypatch)


def test_loads_are_refused_while_quarantine_holds_the_staging_memory_and_served_afterwards(
    stall_clock: Clock, open_one: OpenPair, read_gate: ReadGate
) -> None:
    pair = open_one((LARGE, LARGE), staging_bytes=4096)
    request = start_held_load(pair, read_gate)
    pair.run(stall_clock.passing(partial(is_finished, request)), "its end")
    until(lambda: quarantined(pair.consumer) > 0, what="the end of the read")
    assert quarantined(pair.consumer) <= 2048, "a source fills half of it at most"
    # Those that come after it get a slot at a time, which they lose as well.
    errors: list[str] = []
    while not any("StagingFullError" in error for error in errors):
        assert len(errors) < 10, errors
        refused = pair.decode(pair.prefill(f"s{len(errors)}", 22))
        is_over = stall_clock.passing(partial(is_finished, refused))
        pair.run(is_over, "the refusal")
        assert refused.failed
        errors += errors_of(pair, [refused.request_id])
    release_and_settle(pair, read_gate)


def test_a_source_that_stands_still_does_not_keep_another_ones_loads_from_the_staging_memory(
    read_gate: ReadGate,
) -> None:
    def opened(role: Any, engine_id: str, **keys: Any) -> FakeEngine:
        extra = {"cluster_key": "k" * 32, "transport": "shm", **keys}
        config = KVTransferConfig(
            kv_connector="PullConnector",
            kv_role=role,
            engine_id=engine_id,
            kv_port=0,
            kv_connector_extra_config=extra,
        )
        engine = FakeEngine.open(config, LARGE)
        stack.callback(engine.close)
        return engine

    with ExitStack() as stack:
        consumer = opened("kv_consumer", "d", staging_bytes=4096, mover_threads=16)
        stopped = Pair(opened("kv_producer", "stopped"), consumer, WAIT_S)
        well = Pair(opened("kv_producer", "well"), consumer, WAIT_S)
        stands = start_held_load(stopped, read_gate)
        until(lambda: staging_of(consumer)[0].waiting > 0, what="a read that waits")
        read_gate.let_new_pass()
        for id in ("a", "b"):
            request = well.decode(well.prefill(id, 21))
            well.finish(request)
            assert not request.failed
        assert stands.stage is Stage.LOADING
        assert read_gate.held > 0
        read_gate.release()
        stopped.finish(stands)
        assert not stands.failed
        for pair in (stopped, well):
            pair.settle()


def test_what_is_held_when_its_source_is_lost_lands_in_quarantine(
    open_one: OpenPair, read_gate: ReadGate
) -> None:
    pair = open_one(stall_timeout_s=1.5)
    request = start_held_load(pair, read_gate)
    pair.producer.close()
    run([pair.consumer], lambda: request.stage is Stage.FINISHED, timeout_s=WAIT_S, what="its end")
    run([pair.consumer], lambda: pair.consumer.is_idle, timeout_s=WAIT_S, what="idleness")
    pair.consumer.check_memory()
    read_gate.release()
    settle_staging(pair.consumer)
    pair.consumer.check_memory()


def test_an_engine_closes_while_its_reads_are_held(open_one: OpenPair, read_gate: ReadGate) -> None:
    pair = open_one()
    start_held_load(pair, read_gate)
    pair.consumer.close()
    assert read_gate.held > 0  # it has not waited for them


# ---- another dtype on either side ---------------------------------------------------------------


@pytest.fixture
def _cells_are_small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known cells hold whole numbers below 128, which every dtype of these tests has."""
    bits_of: Any = KnownCache._expected

    def numbers(cache: KnownCache, *where: Any) -> Any:
        assert isinstance(cache.geometry, EngineGeometry)
        values = (bits_of(cache, *where) & 0x7F).astype(np.float32)
        bits = values.view(np.uint32)
        return bits if cache.geometry.dtype == "float32" else (bits >> 16).astype(np.uint16)

    monkeypatch.setattr(KnownCache, "_expected", numbers)


def as_dtype(geometry: EngineGeometry, dtype: str) -> EngineGeometry:
    return replace(geometry, dtype=dtype)


@pytest.mark.usefixtures("_cells_are_small_numbers")
@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("source", "target", "keys"),
    [("bfloat16", "float32", {}), ("float32", "bfloat16", {"convert_dtype": True})],
)
def test_cells_of_another_dtype_arrive_with_equal_values(
    open_one: OpenPair, transport: str, source: str, target: str, keys: dict[str, Any]
) -> None:
    geometries = as_dtype(SOURCE, source), as_dtype(TARGET, target)
    pair = open_one(geometries, transport=transport, **keys)
    requests = [pair.decode(pair.prefill(id, length)) for id, length in (("r", 30), ("s", 7))]
    pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "both to end")
    assert not any(request.failed for request in requests)
    assert ways_of(pair) == {"staged"}
    records = [r for output in pair.consumer.outputs for r in output.transfer_records]
    assert {record.token_digests for record in records} == {None}
    pair.settle()
    settle_staging(pair.consumer)


def test_a_dtype_that_the_target_would_round_is_refused_with_the_key_that_allows_it(
    open_one: OpenPair,
) -> None:
    pair = open_one((SOURCE, as_dtype(TARGET, "bfloat16")))
    request = pair.decode(pair.prefill("r", 21))
    pair.finish(request)
    assert isinstance(request.error, IncompatibleError)
    assert "convert_dtype" in str(request.error)


# ---- the end of a source -------------------------------------------------------------------------


def test_a_source_that_is_read_slowly_is_ended_by_the_command_and_every_load_is_whole(
    open_one: OpenPair, read_gate: ReadGate, tmp_path: Path
) -> None:
    pair, said = open_one(), tmp_path / "said"
    read_gate.hold()
    requests = [pair.decode(pair.prefill(f"r{number}", 21)) for number in range(3)]
    address = pull_scheduler(pair.producer).address
    command = [sys.executable, "-m", "kvferry.cli", "drain", address, "--wait"]
    with said.open("w") as output, subprocess.Popen(command, stdout=output) as drain:
        pair.run(lambda: "has 3 open requests" in said.read_text(), "what the command says")
        pair.run(lambda: read_gate.held > 0, "a read")
        assert drain.poll() is None
        read_gate.release()
        pair.run(lambda: drain.poll() is not None, "the end of the command")
    assert drain.returncode == 0
    assert said.read_text().endswith("may be stopped: it loads and lends nothing\n")
    pair.producer.close()
    run([pair.consumer], lambda: all(map(is_finished, requests)), timeout_s=WAIT_S, what="the end")
    assert not any(request.error for request in requests)
    assert all(request.external_tokens for request in requests)
