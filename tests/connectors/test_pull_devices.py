"""Caches on a device: read and written by it alone, through host memory where a wire needs it.

The device is a thread. What lies on it has addresses at which the host has nothing, so a path that
touches a cache from the host ends the test run.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull import memory
from kvferry.connectors.pull import worker as pull_worker
from kvferry.connectors.pull.metadata import LentSpec, PullMetadata
from kvferry.connectors.pull.worker import PullWorker
from kvferry.connectors.registry import connector_context
from kvferry.errors import ConfigError
from kvferry.layouts.arrays import ArrayView, MemorySpan, view_of
from kvferry.layouts.device import CopyStream, HostMirror, Placer
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.testing.connector_conformance import (
    GEOMETRIES,
    HYBRID_GEOMETRIES,
    WINDOW,
    WINDOWED,
    HybridConnectorConformance,
    Pair,
    open_pair,
    small_geometry,
)
from kvferry.testing.fake_engine import FakeEngine, Groups, fake_model
from kvferry.testing.fake_rank import FakeRank, FakeRequest, Stage
from kvferry.testing.host_device import HostCopyEvent, HostCopyStream, HostIpcMemory
from kvferry.testing.known_cache import KnownCache
from kvferry.topology import EngineGeometry, ParallelShape, StateGeometry, mamba2_states
from kvferry.topology import memory as rank_memory
from kvferry.transports.cuda_ipc import CudaIpcExtraConfig, CudaIpcTransport
from kvferry.transports.cuda_ipc_memory import IpcMemory
from tests.connectors.engines import pull_config
from tests.connectors.test_pull_early import SOURCE, TARGET, Scene, hear, open_scene, readable

DEVICE = "cuda:0"
AWAY = 1 << 48
"""Added to every address of the device: no address of the host is that large."""

Addresses = Sequence[int] | npt.NDArray[np.int64]


def away(span: MemorySpan) -> MemorySpan:
    return MemorySpan(span.address + AWAY, span.nbytes, DEVICE)


def real(addresses: Addresses) -> npt.NDArray[np.int64]:
    found = np.array(addresses, dtype=np.int64)
    return np.where(found >= AWAY, found - AWAY, found)


class DeviceStream(HostCopyStream):
    """The stream of such a device."""

    device = DEVICE

    def allocate(self, nbytes: int) -> MemorySpan:
        return away(super().allocate(nbytes))

    def upload(self, source: npt.NDArray[np.uint8], target: int) -> None:
        super().upload(source, target - AWAY)

    def download(self, source: int, target: npt.NDArray[np.uint8]) -> None:
        super().download(source - AWAY, target)

    def copy(self, sources: Addresses, targets: Addresses, tiles: Tiles, runs: Runs) -> None:
        super().copy(real(sources), real(targets), tiles, runs)


class DeviceIpcMemory(HostIpcMemory):
    """What its peers map."""

    def export(self, memory: MemorySpan) -> tuple[bytes, int]:
        return super().export(replace(memory, address=memory.address - AWAY))

    def open(self, handle: bytes) -> MemorySpan:
        return away(super().open(handle))

    def release(self, memory: MemorySpan) -> None:
        super().release(replace(memory, address=memory.address - AWAY))


class DeviceIpcTransport(CudaIpcTransport):
    """``cuda_ipc`` on such devices."""

    @classmethod
    def open_device(cls, extra: CudaIpcExtraConfig) -> tuple[CopyStream, IpcMemory]:
        stream = DeviceStream()
        return stream, DeviceIpcMemory(stream)

    def allocate_array(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that can be served, as the test writes to it."""
        assert isinstance(self._stream, DeviceStream)
        self._stream.allocate(nbytes)
        return self._stream.segments[-1].array


def view_on_device(array: Any) -> ArrayView:
    view = view_of(array)
    address, nbytes = view.storage
    storage = (address + AWAY, nbytes)
    return replace(view, address=view.address + AWAY, storage=storage, device=DEVICE)


def allocate_on_device(worker: PullWorker, nbytes: int) -> npt.NDArray[np.uint8]:
    for transport in worker._transports.values():
        if isinstance(transport, DeviceIpcTransport):
            return transport.allocate_array(nbytes)
    return np.zeros(nbytes, dtype=np.uint8)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeviceStream]]:
    """Puts every cache on a device; lists the streams that connectors open there."""
    opened: list[DeviceStream] = []

    def open_stream(device: str) -> DeviceStream:
        assert device == DEVICE
        opened.append(DeviceStream())
        return opened[-1]

    monkeypatch.setattr(pull_worker, "open_stream", open_stream)
    monkeypatch.setattr(PullWorker, "allocate", allocate_on_device)
    monkeypatch.setattr(rank_memory, "view_of", view_on_device)
    with temporary_plugin(TRANSPORTS, "cuda_ipc", DeviceIpcTransport):
        yield opened
    assert [stream.pinned for stream in opened] == [[]] * len(opened)


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
                "lease_duration_s": 5.0,
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
        for peer in worker._cache.loads._peers.values()  # type: ignore[attr-defined]
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
    assert all(not stream.pinned for stream in streams)  # there is neither mirror nor staging


RECURRENT = StateGeometry(
    num_layers=2,
    layer_indices=(0, 2),
    states=mamba2_states(
        num_heads=6, head_size=2, state_size=3, num_groups=1, conv_kernel=4, dtype="bfloat16"
    ),
    block_size=64,
    layout="BHD",
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
def test_several_groups_are_mirrored_as_far_as_their_tables_reach(
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


@pytest.mark.timed("A lease of 0.5 s ends while a healthy engine waits for the processor.")
@pytest.mark.slow
@pytest.mark.usefixtures("streams")
class TestGroupsOnDevicesOverTcp(HybridConnectorConformance):
    @pytest.fixture
    def configs(
        self, producer_and_consumer: tuple[KVTransferConfig, KVTransferConfig]
    ) -> tuple[KVTransferConfig, KVTransferConfig]:
        one, two = producer_and_consumer
        return on_devices(one, "cpu", "tcp"), on_devices(two, "cpu", "tcp")


@pytest.mark.timed("A lease of 0.5 s ends while a healthy engine waits for the processor.")
@pytest.mark.slow
@pytest.mark.usefixtures("streams")
class TestGroupsOnDevicesOverCudaIpc(HybridConnectorConformance):
    @pytest.fixture
    def configs(
        self, producer_and_consumer: tuple[KVTransferConfig, KVTransferConfig]
    ) -> tuple[KVTransferConfig, KVTransferConfig]:
        one, two = producer_and_consumer
        return on_devices(one, "cuda", "cuda_ipc"), on_devices(two, "cuda", "cuda_ipc")


def on_devices(config: KVTransferConfig, device: str, transport: str) -> KVTransferConfig:
    extra = {**config.kv_connector_extra_config, "record_digests": False, "transport": transport}
    return msgspec.structs.replace(config, kv_buffer_device=device, kv_connector_extra_config=extra)


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


def test_a_lease_is_had_only_when_every_rank_has_copied_its_blocks(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    pair = open_one()  # two ranks lend, two ranks read
    source = pair.prefill("r", 21)
    slow = streams[1]
    request = pair.decode(source)
    pair.run(lambda: request.stage is Stage.FINISHED, "the first, so that engines have met")
    pair.settle()
    slow.pause()
    try:
        request = pair.decode(pair.prefill("s", 21))
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pair.producer.step()
            pair.consumer.step()
            assert request.stage is Stage.WAITING
    finally:
        slow.resume()
    pair.finish(request)
    assert request.external_tokens == 21
    pair.settle()


def test_blocks_that_cannot_be_copied_are_lent_to_nobody(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    pair = open_one(lease_duration_s=60.0)
    source = pair.prefill("r", 21)
    streams[1].fail()
    pair.settle()  # the lease was taken back before it expired
    request = pair.decode(source)
    pair.finish(request)
    assert request.external_tokens == 0
    errors = [r.error for o in pair.producer.outputs for r in o.transfer_records if r.error]
    assert errors
    assert "the device failed" in errors[0]


@pytest.mark.parametrize(("device", "transport"), [("cpu", "tcp"), ("cuda", "cuda_ipc")])
def test_nothing_is_written_while_the_engine_may_use_the_blocks(
    streams: list[DeviceStream], open_one: OpenPair, device: str, transport: str
) -> None:
    pair = open_one(device=device, transport=transport)
    source = pair.prefill("r", 21)
    busy = [HostCopyEvent() for _ in pair.consumer.workers]
    for worker, event in zip(pair.consumer.workers, busy, strict=True):
        worker._cache.stream.engine = event  # type: ignore[attr-defined]
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


def test_the_stream_is_closed_after_the_last_chunk_was_unpacked(
    streams: list[DeviceStream], open_one: OpenPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = open_one()
    request = pair.decode(pair.prefill("r", 21))
    unpacking = threading.Event()
    place, close = Placer.place, DeviceStream.close
    closed: set[CopyStream] = set()
    placed_in_time: list[bool] = []

    def slow(placer: Placer, *chunk: Any) -> None:
        unpacking.set()
        time.sleep(0.3)
        placed_in_time.append(placer._stream not in closed)
        if placed_in_time[-1]:  # else the end of this copy would be waited for in vain
            place(placer, *chunk)

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
        event = self.ranks[index].worker._cache.stream.engine = HostCopyEvent()  # type: ignore[attr-defined]
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
    ids=["mirrored", "read in place", "both"],
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
    lender: Any = scene.source.scheduler._lender  # type: ignore[attr-defined]
    (tokens,) = lender.leases.readable(list(lender._early)).values()
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


def test_nothing_is_published_before_the_mirror_has_it(streams: list[DeviceStream]) -> None:
    with open_early("cpu", "tcp") as (scene, devices):
        scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        streams[1].pause()
        devices.carry_out_all()
        scene.source.step()
        devices.carry_out_all()
        assert published(scene) == 0
        streams[1].resume()
        scene.run(publishes(scene, 32), "both copies")
        scene.end(scene.source.requests["a"], load)
        assert not load.failed


def test_each_token_is_mirrored_once(
    streams: list[DeviceStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy_out = HostMirror.copy_out

    def counted(mirror: HostMirror, tiles: Tiles, runs: Runs) -> Any:
        copied.append(int(runs["tokens"].sum()))
        return copy_out(mirror, tiles, runs)

    monkeypatch.setattr(HostMirror, "copy_out", counted)
    with open_early("cpu", "tcp") as (scene, _):
        scene.begin("a", 50, chunk=16)
        load = scene.load("a")
        scene.end(scene.source.requests["a"], load)
        assert sorted(copied) == sorted([16, 16, 16, 2] * len(scene.source.ranks))


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


def test_a_part_that_cannot_be_mirrored_ends_its_lease(streams: list[DeviceStream]) -> None:
    with open_early("cpu", "tcp") as (scene, devices):
        request = scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        devices.carry_out(1)
        scene.run(publishes(scene, 16), "the first step to be reported")
        scene.run(lambda: readable(scene, "a") == 12, "the first part")
        streams[0].fail()
        scene.source.step()
        assert not scene.source.scheduler._lender.leases.num_open  # type: ignore[attr-defined]
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


def test_the_end_of_a_prompt_of_which_a_rank_holds_nothing_waits_for_what_was_before(
    streams: list[DeviceStream],
) -> None:
    with open_early("cpu", "tcp", INTERLEAVED, one_head()) as (scene, devices):
        devices.lags = False
        streams[1].pause()  # the copies of the second rank to host memory are slow
        try:
            request = scene.begin("a", 12, chunk=4)
            for _ in range(20):
                scene.source.step()
                time.sleep(0.005)
            assert published(scene) == 0
        finally:
            streams[1].resume()
        load = scene.load("a")
        scene.end(request, load)
        assert (load.external_tokens, load.failed) == (12, False)


def reports_what_is_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a step for carried out as soon as the device was asked for it."""
    monkeypatch.setattr(memory.Lending, "is_over", lambda self: True)


def copies_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrors a part while the step that writes it may not have begun."""
    monkeypatch.setattr(DeviceStream, "follow_engine", lambda self: None)


def waits_for_an_older_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at an event from before the step."""
    nothing = HostCopyEvent()
    nothing.reached.set()
    monkeypatch.setattr(DeviceStream, "engine_event", lambda self: nothing)


def mirrors_the_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the parts before the last one for mirrored."""
    monkeypatch.setattr(memory.RankMirror, "written", lambda self, lent: memory.Lending(lent))


def forgets_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a part of which a rank holds nothing for mirrored at once."""
    copied = memory.RankMirror._copied

    def forgetful(self: memory.RankMirror, lent: LentSpec, *, is_part: bool) -> memory.Lending:
        copy = copied(self, lent, is_part=is_part)
        if not copy.nbytes:
            copy.event = None
        return copy

    monkeypatch.setattr(memory.RankMirror, "_copied", forgetful)


@pytest.mark.parametrize(
    ("defect", "transport", "source", "target"),
    [
        (reports_what_is_enqueued, "tcp", SOURCE, TARGET),
        (reports_what_is_enqueued, "cuda_ipc", SOURCE, TARGET),
        (copies_beside_the_engine, "tcp", SOURCE, TARGET),
        (waits_for_an_older_step, "cuda_ipc", SOURCE, TARGET),
        (mirrors_the_end_only, "tcp", SOURCE, TARGET),
        (forgets_what_was_before, "tcp", INTERLEAVED, one_head()),
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
    with PullWorker.open(context, 0) as worker:
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
    assert message == ("kv_buffer_device: 'cuda', but the KV cache is in host memory; write 'cpu'")


def test_transports_for_devices_are_refused_for_a_buffer_in_host_memory(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    message = refusal(open_one, transport=["tcp", "cuda_ipc"])
    assert "the KV cache is on cuda:0, and transport names cuda_ipc" in message
    assert "write kv_buffer_device: 'cuda', or delete it there" in message


def test_digests_are_refused_for_a_cache_on_a_device(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    message = refusal(open_one, record_digests=True)
    assert "record_digests: true" in message
    assert "cuda:0; delete the key" in message


def test_a_wire_that_cannot_serve_a_mirror_says_so(
    streams: list[DeviceStream], open_one: OpenPair
) -> None:
    message = refusal(open_one, transport="shm")
    assert "transport: 'shm' cannot serve copies of a KV cache on cuda:0" in message
    assert "name tcp or vm in its place" in message
