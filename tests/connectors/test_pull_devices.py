"""Caches on a device: read and written by it alone, through host memory where a wire needs it.

The device is a thread. What lies on it has addresses at which the host has nothing, so a path that
touches a cache from the host ends the test run.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull import worker as pull_worker
from kvferry.connectors.pull.worker import PullWorker
from kvferry.errors import ConfigError
from kvferry.layouts.arrays import ArrayView, MemorySpan, view_of
from kvferry.layouts.device import CopyStream, Placer
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.testing.connector_conformance import (
    GEOMETRIES,
    HYBRID_GEOMETRIES,
    HybridConnectorConformance,
    Pair,
    open_pair,
)
from kvferry.testing.fake_engine import Groups
from kvferry.testing.fake_rank import Stage
from kvferry.testing.host_device import HostCopyEvent, HostCopyStream, HostIpcMemory
from kvferry.testing.known_cache import KnownCache
from kvferry.topology import EngineGeometry, ParallelShape, StateGeometry, mamba2_states
from kvferry.topology import memory as rank_memory
from kvferry.transports.cuda_ipc import CudaIpcExtraConfig, CudaIpcTransport
from kvferry.transports.cuda_ipc_memory import IpcMemory

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


@pytest.mark.slow
@pytest.mark.usefixtures("streams")
class TestGroupsOnDevicesOverTcp(HybridConnectorConformance):
    @pytest.fixture
    def configs(
        self, producer_and_consumer: tuple[KVTransferConfig, KVTransferConfig]
    ) -> tuple[KVTransferConfig, KVTransferConfig]:
        one, two = producer_and_consumer
        return on_devices(one, "cpu", "tcp"), on_devices(two, "cpu", "tcp")


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
