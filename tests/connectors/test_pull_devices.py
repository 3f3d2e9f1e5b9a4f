"""Caches on a device: read and written by it alone, through host memory where a wire needs it.

The device is a thread. What lies on it has addresses at which the host has nothing, so a path that
touches a cache from the host ends the test run.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull import memory
from kvferry.connectors.pull.metadata import LentSpec, PullMetadata
from kvferry.connectors.pull.worker import PullWorker
from kvferry.connectors.registry import connector_context
from kvferry.errors import ConfigError, TransferError
from kvferry.layouts import Layout
from kvferry.layouts.device import CopyStream, Placer, PreparedCopy
from kvferry.testing.connector_conformance import (
    GEOMETRIES,
    HYBRID_GEOMETRIES,
    WINDOW,
    WINDOWED,
    Pair,
    open_pair,
    small_geometry,
)
from kvferry.testing.fake_engine import FakeEngine, Groups, fake_model
from kvferry.testing.fake_rank import FakeRank, FakeRequest, Stage
from kvferry.testing.host_device import HostCopyEvent, HostDevice
from kvferry.testing.host_device import HostDeviceStream as DeviceStream
from kvferry.testing.known_cache import KnownCache
from kvferry.topology import EngineGeometry, ParallelShape, StateGeometry, mamba2_states
from kvferry.transports.packing import PackedPiece, Packer
from tests.connectors.engines import on_devices, pull_config
from tests.connectors.test_pull_early import SOURCE, TARGET, Scene, hear, open_scene, readable


@pytest.fixture
def streams(host_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> list[DeviceStream]:
    """Puts every cache on a device; lists the streams that connectors open there."""
    open_rank = FakeRank.open

    def on_device(*arguments: Any) -> FakeRank:
        plugin, context, rank, _ = arguments
        return open_rank(plugin, context, rank, host_device)

    monkeypatch.setattr(FakeRank, "open", on_device)
    return host_device.streams


OpenPair = Callable[..., Pair]


@pytest.fixture
def open_one() -> Iterator[OpenPair]:
    """Opens a pair of engines with these keys; it is closed at the end."""
    with ExitStack() as stack:

        def opened(
            geometries: tuple[Groups, Groups] = GEOMETRIES["tp2-pp2"],
            device: str = "cpu",
            transport: Any = "tcp",
            **keys: Any,
        ) -> Pair:
            extra = {
                "cluster_key": "k" * 32,
                "lease_duration_s": 600.0,
                "handshake_timeout_s": 30.0,
                "transport": transport,
                **keys,
            }
            configs = [
                KVTransferConfig(
                    kv_connector="PullConnector",
                    kv_role=role,
                    kv_port=0,
                    kv_buffer_device=device,
                    kv_connector_extra_config=extra,
                )
                for role in ("kv_producer", "kv_consumer")
            ]
            return stack.enter_context(open_pair((configs[0], configs[1]), geometries))

        yield opened


def serve_several(pair: Pair) -> None:
    """Five loads at once, one beside a local hit; the fake engines compare every cell."""
    lengths = {"a": 30, "b": 17, "c": 3, "d": 25, "e": 24}
    sources = {id: pair.prefill(id, length) for id, length in lengths.items()}
    requests = [
        pair.decode(source, local_blocks=1 if id == "d" else 0) for id, source in sources.items()
    ]
    pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "all to end")
    assert [(r.request_id, r.error) for r in requests if r.failed or r.error] == []
    assert sum(request.external_tokens for request in requests) > 80
    pair.settle()


def ways_of(pair: Pair) -> set[tuple[str, str]]:
    return {
        (peer.transport.name, str(one.way))
        for worker in pair.consumer.workers
        for peer in worker.cache.loads.peers.connected.values()  # type: ignore[attr-defined]
        for one in peer.plans
    }


# ---- equal cells ---------------------------------------------------------------------------------


@pytest.mark.parametrize("geometries", list(GEOMETRIES.values()), ids=list(GEOMETRIES))
def test_a_wire_moves_caches_of_devices_through_host_memory(
    streams: list[DeviceStream], open_one: OpenPair, geometries: tuple[Groups, Groups]
) -> None:
    pair = open_one(geometries)
    serve_several(pair)
    assert ways_of(pair) == {("tcp", "staged")}


@pytest.mark.parametrize("geometries", list(GEOMETRIES.values()), ids=list(GEOMETRIES))
def test_cuda_ipc_moves_them_in_one_pass(
    streams: list[DeviceStream], open_one: OpenPair, geometries: tuple[Groups, Groups]
) -> None:
    pair = open_one(geometries, device="cuda", transport="cuda_ipc")
    serve_several(pair)
    assert ways_of(pair) == {("cuda_ipc", "placed")}
    assert all(not stream.pinned for stream in streams)  # nothing is packed or staged


def test_what_reads_share_is_put_on_the_device_when_engines_meet_and_loads_bring_runs_alone(
    streams: list[DeviceStream], open_one: OpenPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[tuple[int, list[int]]] = []
    prepare = DeviceStream.prepare

    def counted(stream: DeviceStream, *tiles: Any) -> PreparedCopy:
        copy, copied = prepare(stream, *tiles), list[int]()
        prepared.append((tiles[-1], copied))
        return lambda runs: copied.append(len(runs)) or copy(runs)

    monkeypatch.setattr(DeviceStream, "prepare", counted)
    pair = open_one(device="cuda", transport="cuda_ipc")
    serve_several(pair)
    plans = [
        (peer, plan)
        for worker in pair.consumer.workers
        for peer in worker.cache.loads.peers.connected.values()  # type: ignore[attr-defined]
        for plan in peer.plans
    ]
    assert len(prepared) == sum(len(plan.tiles) for _, plan in plans)
    for most_tokens, copied in prepared:
        assert most_tokens == min(geometry.block_size for geometry in GEOMETRIES["tp2-pp2"])
        assert len(copied) == 5  # one launch for each load


RECURRENT = StateGeometry(
    num_layers=2,
    layer_indices=(0, 2),
    states=mamba2_states(
        num_heads=6, head_size=2, state_size=3, num_groups=1, conv_kernel=4, dtype="bfloat16"
    ),
    block_size=64,
    layout=Layout.parse("BHD"),
    parallel=ParallelShape(),
)
ATTENTION = EngineGeometry(
    num_layers=1,
    layer_indices=(1,),
    num_kv_heads=3,
    head_size=2,
    dtype="float32",
    block_size=4,
    layout="NHD",
    parallel=ParallelShape(),
)


@pytest.mark.parametrize(("device", "transport"), [("cpu", "tcp"), ("cuda", "cuda_ipc")])
@pytest.mark.parametrize(
    "geometries",
    [HYBRID_GEOMETRIES["tp2-pp2"], ((ATTENTION, RECURRENT), (RECURRENT, ATTENTION))],
    ids=["windows", "states"],
)
def test_several_groups_move_as_far_as_their_tables_reach(
    streams: list[DeviceStream],
    open_one: OpenPair,
    geometries: tuple[Groups, Groups],
    device: str,
    transport: str,
) -> None:
    pair = open_one(geometries, device, transport)
    for id, num_tokens in (("r", 30), ("s", 5)):
        request = pair.decode(pair.prefill(id, num_tokens))
        pair.finish(request)
        assert (request.failed, request.error) == (False, None)
        assert request.external_tokens == num_tokens
    pair.settle()


def test_with_both_the_first_that_reaches_is_taken_and_both_are_served(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    pair = open_one(device="cuda", transport=["tcp", "cuda_ipc"])
    serve_several(pair)
    assert ways_of(pair) == {("tcp", "staged")}
    pair = open_one(device="cuda", transport=["cuda_ipc", "tcp"])
    serve_several(pair)
    assert ways_of(pair) == {("cuda_ipc", "placed")}


@pytest.fixture
def _cells_are_small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known cells hold whole numbers below 128, which bfloat16 has too."""
    bits_of: Any = KnownCache._expected

    def numbers(cache: KnownCache, *where: Any) -> Any:
        assert isinstance(cache.geometry, EngineGeometry)
        bits = (bits_of(cache, *where) & 0x7F).astype(np.float32).view(np.uint32)
        return bits if cache.geometry.dtype == "float32" else (bits >> 16).astype(np.uint16)

    monkeypatch.setattr(KnownCache, "_expected", numbers)


@pytest.mark.usefixtures("_cells_are_small_numbers")
@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc"])
def test_dtypes_are_converted_on_the_host_on_their_way_to_a_device(
    streams: list[DeviceStream], open_one: OpenPair, transport: str
) -> None:
    def geometry(dtype: str) -> EngineGeometry:
        return EngineGeometry(
            num_layers=2,
            num_kv_heads=2,
            head_size=4,
            dtype=dtype,
            block_size=4,
            layout="NHD",
            parallel=ParallelShape(),
        )

    device = "cuda" if transport == "cuda_ipc" else "cpu"
    pair = open_one((geometry("bfloat16"), geometry("float32")), device, transport)
    serve_several(pair)
    assert ways_of(pair) == {(transport, "staged")}


# ---- when ----------------------------------------------------------------------------------------


def packing_streams(pair: Pair) -> list[DeviceStream]:
    """The streams that pack on the producer's ranks."""
    workers: Any = pair.producer.workers
    return [stream for worker in workers for stream in worker.cache.streams[:2]]


def test_a_lease_waits_for_no_copy_and_each_byte_is_packed_once(
    streams: list[DeviceStream], open_one: OpenPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []
    pack = Packer.pack

    def counted(packer: Packer, piece: PackedPiece, *rest: Any) -> None:
        packed.append(piece.nbytes)
        pack(packer, piece, *rest)

    monkeypatch.setattr(Packer, "pack", counted)
    pair = open_one()
    packing = packing_streams(pair)
    source = pair.prefill("r", 21)
    assert packed == []
    for stream in packing:
        stream.pause()
    request = pair.decode(source)
    try:
        pair.run(lambda: bool(packed), "its admission, and the first piece to be asked for")
        assert request.stage is Stage.LOADING
    finally:
        for stream in packing:
            stream.resume()
    pair.finish(request)
    assert request.external_tokens == 21
    geometry: Any = pair.producer.ranks[0].caches[0].geometry
    per_token = geometry.num_layers * 2 * geometry.num_kv_heads * geometry.head_size * 4
    assert sum(packed) == 21 * per_token
    pair.settle()


def test_a_device_that_fails_while_it_packs_fails_the_load(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    pair = open_one()
    source = pair.prefill("r", 21)
    for stream in packing_streams(pair):
        stream.fail()
    request = pair.decode(source)
    pair.finish(request)
    assert request.failed
    pair.settle()


def test_a_source_that_closes_ends_its_packs_before_its_memory_goes(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    pair = open_one()
    request = pair.decode(pair.prefill("r", 21))
    packing = packing_streams(pair)
    for stream in packing:
        stream.pause()
    pair.run(lambda: request.stage is Stage.LOADING, "its admission")
    closing = threading.Thread(target=pair.producer.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    assert any(stream.pinned for stream in packing), "a ring that is still written to"
    for stream in packing:
        stream.resume()
    closing.join(60)
    assert not any(stream.pinned for stream in packing)
    pair.finish(request)
    assert request.failed


@pytest.mark.parametrize(("device", "transport"), [("cpu", "tcp"), ("cuda", "cuda_ipc")])
def test_nothing_is_written_while_the_engine_may_use_the_blocks(
    streams: list[DeviceStream], open_one: OpenPair, device: str, transport: str
) -> None:
    pair = open_one(device=device, transport=transport)
    source = pair.prefill("r", 21)
    busy = [HostCopyEvent() for _ in pair.consumer.workers]
    for worker, event in zip(pair.consumer.workers, busy, strict=True):
        worker.cache.streams[0].engine = event  # type: ignore[attr-defined]
    request = pair.decode(source)
    try:
        pair.run(lambda: request.stage is Stage.LOADING, "its admission")
        blocks = [block for table in request.tables for block in table if block]
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pair.producer.step()
            pair.consumer.step()
            assert all(not c.touched(blocks) for r in pair.consumer.ranks for c in r.caches)
    finally:
        for event in busy:
            event.reached.set()
    pair.finish(request)
    assert request.external_tokens == 21
    pair.settle()


def test_a_device_that_fails_at_the_end_leaves_nothing_else_open(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    pair = open_one()
    (worker, *_) = pair.producer.workers
    broken, *others = worker.cache.streams  # type: ignore[attr-defined]
    close = broken.close

    def fails() -> None:
        close()
        raise TransferError("the device failed")

    broken.close = fails
    with pytest.raises(TransferError, match="the device failed"):
        worker.close()
    broken.close = close
    for stream in (broken, *others):
        assert not stream._thread.is_alive()
        assert not stream.pinned


def test_the_stream_is_closed_after_the_last_chunk_was_unpacked(
    streams: list[DeviceStream], open_one: OpenPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = open_one()
    request = pair.decode(pair.prefill("r", 21))
    unpacking = threading.Event()
    place, close = Placer.place, DeviceStream.close
    closed: set[CopyStream] = set()
    placed_in_time: list[bool] = []

    def slow(placer: Placer, *chunk: Any) -> Any:
        unpacking.set()
        time.sleep(0.3)
        placed_in_time.append(closed.isdisjoint(placer._streams))
        return place(placer, *chunk)

    def tell(stream: DeviceStream) -> None:
        closed.add(stream)
        close(stream)

    monkeypatch.setattr(Placer, "place", slow)
    monkeypatch.setattr(DeviceStream, "close", tell)
    pair.run(unpacking.is_set, "a chunk to be unpacked")
    pair.consumer.close()
    assert request.stage is Stage.LOADING
    assert placed_in_time
    assert all(placed_in_time)


# ---- prompts that are lent while they are computed -----------------------------------------------


@dataclass
class Behind:
    """The devices of an engine, which carry out its steps when they are told to.

    An engine waits for the token at the end of a prompt: then all is carried out.
    """

    ranks: Sequence[FakeRank]
    lags: bool = True
    """Whether they wait to be told, or carry a step out when their ranks have reported it."""
    asked: list[list[tuple[HostCopyEvent, list[Callable[[], None]]]]] = field(init=False)
    """For each rank, the steps that are not carried out: what each does, and when it has."""

    def __post_init__(self) -> None:
        self.asked = [[] for _ in self.ranks]
        for index, rank in enumerate(self.ranks):
            rank.run = partial(self._run, index, rank.run)  # type: ignore[method-assign]
            rank._compute = partial(self._compute, index)  # type: ignore[method-assign]

    def _run(self, index: int, run: Callable[..., Any], *step: Any) -> Any:
        event = self.ranks[index].worker.cache.streams[0].engine = HostCopyEvent()  # type: ignore[attr-defined]
        self.asked[index].append((event, []))
        report = run(*step)
        if not self.lags:
            self.carry_out(len(self.asked[index]), index)
        return report

    def _compute(self, index: int, request: FakeRequest, end: int) -> None:
        first, tokens = request.num_computed_tokens, request.prompt_token_ids
        for cache, table in zip(self.ranks[index].caches, request.get_block_ids(), strict=True):
            self.asked[index][-1][1].append(partial(cache.write, table, tokens, first, end))
        if end == request.num_tokens:
            self.carry_out(len(self.asked[index]), index)

    def carry_out(self, num_steps: int, *indices: int) -> None:
        """Carries out steps of some ranks, or of all."""
        for index in indices or range(len(self.ranks)):
            steps, self.asked[index] = self.asked[index][:num_steps], self.asked[index][num_steps:]
            for event, work in steps:
                for write in work:
                    write()
                event.reached.set()

    def carry_out_all(self) -> None:
        """Leaves nothing to do."""
        self.carry_out(max(map(len, self.asked)))


EARLY = pytest.mark.parametrize(
    ("device", "transport"),
    [("cpu", "tcp"), ("cuda", "cuda_ipc"), ("cuda", ["cuda_ipc", "tcp"])],
    ids=["packed", "read in place", "both"],
)
"""What a target reads of a prompt that a device computes."""


@contextmanager
def open_early(
    device: str, transport: Any, source: Groups = SOURCE, target: Groups = TARGET, **keys: Any
) -> Iterator[tuple[Scene, Behind]]:
    def configured(config: KVTransferConfig) -> KVTransferConfig:
        return on_devices(config, device, transport)

    with open_scene(source, target, configured=configured, **keys) as scene:
        devices = Behind(scene.source.ranks)
        try:
            yield scene, devices
        finally:
            devices.carry_out_all()


def published(scene: Scene) -> int:
    """What the source says to be written of the only prompt that it computes."""
    lender: Any = scene.source.scheduler.lender  # type: ignore[attr-defined]
    (tokens,) = lender.leases.readable(lender.growing.by_lease).values()
    return int(tokens)


def publishes(scene: Scene, tokens: int) -> Callable[[], bool]:
    """Whether so many are, after a step of the source that computes nothing."""

    def looked() -> bool:
        report_again(scene.source)
        return published(scene) == tokens

    return looked


def report_again(engine: FakeEngine) -> None:
    """The ranks report once more, as in a step in which nothing is to do."""
    reports = [rank.worker.get_transfer_results(set()) for rank in engine.ranks]
    engine.scheduler.update_connector_output(engine._aggregator.join(reports))


@EARLY
def test_what_a_device_has_written_is_read_while_it_computes_the_rest(
    streams: list[DeviceStream], device: str, transport: Any
) -> None:
    with open_early(device, transport) as (scene, devices):
        scene.begin("a", 60, chunk=16)
        scene.source.step()
        load = scene.load("a")
        assert published(scene) == 0, "the device has carried out neither of two steps"
        devices.carry_out(1)
        scene.run(publishes(scene, 16), "the first step to be reported")
        scene.run(lambda: readable(scene, "a") == 12, "the first part")
        devices.carry_out(1, 0)
        report_again(scene.source)
        assert published(scene) == 16, "one of two ranks lags"
        devices.carry_out(1, 1)
        scene.run(publishes(scene, 32), "the second step to be reported")
        scene.run(lambda: readable(scene, "a") == 24, "the second part")
        scene.end(scene.source.requests["a"], load)
        assert (load.external_tokens, load.failed) == (60, False)


@EARLY
def test_windows_of_devices_move_when_the_prompt_is_whole(
    streams: list[DeviceStream], device: str, transport: Any
) -> None:
    source, target = HYBRID_GEOMETRIES["tp2-pp2"]
    windows = dict.fromkeys(WINDOWED, WINDOW)
    with open_early(device, transport, source, target, layer_windows=windows) as (scene, devices):
        devices.lags = False  # what is behind the window is free as soon as a step is over
        scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        scene.run(publishes(scene, 16), "the first step to be reported")
        scene.run(lambda: bool(readable(scene, "a")), "the first part")
        scene.end(scene.source.requests["a"], load)
        assert (load.external_tokens, load.failed) == (60, False)


@EARLY
def test_a_prompt_on_a_device_that_is_preempted_fails_its_load(
    streams: list[DeviceStream], device: str, transport: Any
) -> None:
    with open_early(device, transport) as (scene, devices):
        request = scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        devices.carry_out(1)
        scene.run(publishes(scene, 16), "the first step to be reported")
        scene.run(lambda: readable(scene, "a") == 12, "the first part")
        scene.source.step()
        devices.carry_out_all()
        scene.source.preempt("a")
        scene.end(request, load)
        assert load.failed


def test_a_part_that_the_device_could_not_write_ends_its_lease(
    streams: list[DeviceStream],
) -> None:
    with open_early("cpu", "tcp") as (scene, devices):
        request = scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        devices.carry_out(1)
        scene.run(publishes(scene, 16), "the first step to be reported")
        scene.run(lambda: readable(scene, "a") == 12, "the first part")
        scene.source.step()
        for event, _ in devices.asked[0]:
            event.error = TransferError("the device failed")
        report_again(scene.source)
        assert not scene.source.scheduler.lender.leases.num_open  # type: ignore[attr-defined]
        scene.end(request, load)
        assert load.failed
        assert request.finished_cleanly
        assert request.response_params is None


def one_head(**parallel: int) -> EngineGeometry:
    """A cache whose tokens, if anything, are divided over ranks."""
    return EngineGeometry(
        num_layers=3,
        num_kv_heads=1,
        head_size=2,
        dtype="float32",
        block_size=4,
        layout="NHD",
        parallel=ParallelShape(**parallel),
    )


INTERLEAVED = one_head(tp=2, dcp=2, interleave_size=4)
"""Of many a step one of the ranks holds nothing."""


def play_behind(
    seed: int, transport: str, source: Groups = SOURCE, target: Groups = TARGET
) -> None:
    """A prompt whose devices run behind by numbers of steps that change all the time.

    Raises:
        AssertionError: a cell is not what it must be.
    """
    draw = random.Random(seed)
    device = "cuda" if transport == "cuda_ipc" else "cpu"
    with open_early(device, transport, source, target) as (scene, devices):
        request = scene.begin("a", 90, chunk=draw.choice((4, 7, 16)))
        load = scene.load("a")
        ranks = range(len(devices.ranks))
        for _ in range(12 * len(ranks)):
            draw.choice((scene.source.step, lambda: devices.carry_out(1, draw.choice(ranks))))()
            if request.stage is not Stage.FINISHED:
                hear(scene, load)
        scene.end(request, load)
        assert (load.external_tokens, load.failed) == (90, False)


@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc"])
@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_arrives_whole_from_a_device_that_runs_behind(
    streams: list[DeviceStream], transport: str, seed: int
) -> None:
    play_behind(seed, transport)


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_arrives_whole_from_ranks_that_hold_none_of_some_steps(
    streams: list[DeviceStream], seed: int
) -> None:
    play_behind(seed, "tcp", INTERLEAVED, one_head())


def reports_what_is_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a step for carried out as soon as the device was asked for it."""
    monkeypatch.setattr(memory.Writing, "is_over", lambda self: True)


def waits_for_an_older_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at an event from before the step."""
    nothing = HostCopyEvent()
    nothing.reached.set()
    monkeypatch.setattr(DeviceStream, "engine_event", lambda self: nothing)


@pytest.mark.parametrize(
    ("defect", "transport", "source", "target"),
    [
        (reports_what_is_enqueued, "tcp", SOURCE, TARGET),
        (reports_what_is_enqueued, "cuda_ipc", SOURCE, TARGET),
        (waits_for_an_older_step, "tcp", SOURCE, TARGET),
        (waits_for_an_older_step, "cuda_ipc", SOURCE, TARGET),
    ],
    ids=lambda each: getattr(each, "__name__", each if isinstance(each, str) else ""),
)
def test_a_prompt_from_a_device_finds_defects(
    streams: list[DeviceStream],
    defect: Callable[[pytest.MonkeyPatch], None],
    transport: str,
    source: Groups,
    target: Groups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defect(monkeypatch)
    for seed in range(20):
        try:
            play_behind(seed, transport, source, target)
        except AssertionError:
            return
    pytest.fail("no prompt has found it")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here")
@pytest.mark.parametrize(("device", "transport"), [("cpu", "tcp"), ("cuda", "cuda_ipc")])
def test_a_gpu_reports_a_step_once_it_has_carried_it_out(device: str, transport: str) -> None:
    geometry = small_geometry("HND", 4)
    config = on_devices(pull_config("kv_producer", "p"), device, transport)
    _, context = connector_context(
        config,
        incarnation="p",
        groups=(geometry,),
        model=fake_model((geometry,)),
        num_blocks=9,
        world_size=1,
    )
    names = geometry.tensor_names(0)
    caches = torch.zeros((len(names), *geometry.cache_shape(0, 9)), device="cuda")
    with closing(PullWorker.open(context, 0)) as worker:
        worker.register_kv_caches(dict(zip(names, caches, strict=True)))
        torch.cuda._sleep(2_000_000_000)
        lent = LentSpec(request_id="r", lease_id="l", block_ids=([1, 2],), num_tokens=8)
        worker.start_load_kv(PullMetadata(writes=[lent]))
        assert worker.get_transfer_results(set()).written == {}
        assert worker.awaits_device
        torch.cuda.synchronize()
        assert worker.written() == {"l": {0: 8}}
        assert worker.get_transfer_results(set()).written == {"l": {0: 8}}
        assert not worker.awaits_device


# ---- what is refused -----------------------------------------------------------------------------


def refusal(open_one: OpenPair, **keys: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        open_one(**keys)
    return str(raised.value)


def test_an_unknown_buffer_device_is_refused(open_one: OpenPair) -> None:
    message = refusal(open_one, device="tpu")
    assert "kv_buffer_device: 'tpu' is not one of cpu, cuda" in message


def test_a_buffer_on_a_device_is_refused_for_a_cache_in_host_memory(open_one: OpenPair) -> None:
    message = refusal(open_one, device="cuda")
    assert message == "kv_buffer_device: 'cuda', but the KV cache is in host memory; delete the key"


def test_transports_for_devices_are_refused_for_a_buffer_in_host_memory(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    message = refusal(open_one, transport=["tcp", "cuda_ipc"])
    assert "the KV cache is on cuda:0, and transport names cuda_ipc" in message
    assert "delete kv_buffer_device, or delete it there" in message


@pytest.mark.parametrize("transport", ["shm", "vm"])
def test_a_transport_that_cannot_serve_a_device_is_refused_by_name(
    streams: list[DeviceStream], open_one: OpenPair, transport: str
) -> None:
    message = refusal(open_one, transport=transport)
    assert message == (
        f"transport: '{transport}' serves host memory, and the KV cache is on cuda:0; name "
        "cuda_ipc, tcp or ucx in its place"
    )


def test_a_ring_of_no_size_is_refused(open_one: OpenPair) -> None:
    assert "packing_bytes: 100 is less than" in refusal(open_one, packing_bytes=100)
