"""The transport of GPUs: all but the GPU itself, which host memory takes the place of here."""

import subprocess
import sys
import threading
import time
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from kvferry.errors import (
    BoundsError,
    ConfigError,
    DecodeError,
    HostError,
    PeerLostError,
    SharedMemoryError,
    TransferError,
)
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.tiles import num_bytes
from kvferry.testing.host_device import HostCopyStream, HostIpcMemory, HostIpcTransport
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.testing.transport_peer import PeerProcess, contents, fill, pattern
from kvferry.testing.waiting import until
from kvferry.transports import TransferState, TransportOptions, cuda_ipc
from kvferry.transports.cuda_ipc import (
    CudaIpcEndpoint,
    CudaIpcExtraConfig,
    CudaIpcTransport,
    IpcRegion,
)
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES
from kvferry.transports.shm_segment import SHM_DIR, OwnedSegment

CASE = large_case(1 << 20)


@pytest.mark.slow
class TestCudaIpcTransportWithoutAGpu(TransportConformance):
    transport = HostIpcTransport
    extra = MappingProxyType({"chunk_bytes": 1 << 20})


def opened(**extra):
    return HostIpcTransport.open(TransportOptions(extra=extra))


def test_a_transport_that_cannot_be_opened_leaves_no_stream_open(monkeypatch):
    def full(_):
        raise SharedMemoryError("/dev/shm is full")

    def streams():
        return [each for each in threading.enumerate() if each.name == "kvferry-host-stream"]

    before = streams()
    monkeypatch.setattr(OwnedSegment, "create", full)
    with pytest.raises(SharedMemoryError, match="is full"):
        opened()
    assert streams() == before


@pytest.fixture
def source():
    with opened() as transport:
        yield transport


@pytest.fixture
def stream():
    """The device of the target, which closes it."""
    return HostCopyStream()


@pytest.fixture
def mapped(stream):
    """What the target has mapped of the memory of its peers."""
    return HostIpcMemory(stream)


@pytest.fixture
def target(stream, mapped):
    with HostIpcTransport(CudaIpcExtraConfig(chunk_bytes=4096), stream, mapped) as transport:
        yield transport


@pytest.fixture
def pair(source, target):
    return met(source, target)


def met(source, target):
    """The target, the connection, and the target's memory; both sides have that of a case."""
    _, held = source.allocate_device(CASE.source_region_bytes[0])
    fill(held, pattern(held.nbytes, 3))
    _, memory = target.allocate_device(CASE.target_region_bytes[0])
    return target, target.connect(source.endpoint()), memory


def described(transport):
    return msgspec.msgpack.decode(transport.endpoint(), type=CudaIpcEndpoint)


def ended(transport, transfer):
    until(lambda: transfer.is_terminal, every_s=0.001, what=transfer)
    assert transport.poll() == [transfer]
    return transfer


def test_without_a_gpu_the_real_one_says_so_and_names_what_works():
    import torch

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    with pytest.raises(HostError, match=r"0 CUDA devices.*\(shm, tcp\)"):
        CudaIpcTransport.open(TransportOptions())


def test_parts_of_one_allocation_travel_as_one_handle(source, target, mapped):
    _, whole = source.allocate_device(10_000)
    part = MemorySpan(whole.address + 4096, 1000, whole.device)
    source.register_device(part)
    first, second = described(source).regions
    assert first.handle == second.handle
    assert (second.offset, second.nbytes) == (4096, 1000)
    peer = target.connect(source.endpoint())
    assert peer.addresses[1] - peer.addresses[0] == 4096
    assert mapped.num_mapped == 1


@pytest.fixture
def launches(stream, monkeypatch):
    """The runs of each launch of the target, and how often tiles were put on its device."""
    made, prepare = Launches(), stream.prepare

    def counted(sources, targets, tiles, most_tokens=0):
        made.prepared += 1
        copy = prepare(sources, targets, tiles, most_tokens)

        def told(runs):
            event = copy(runs)
            made.append(runs.copy())
            made.one.set()
            return event

        return told

    monkeypatch.setattr(stream, "prepare", counted)
    return made


class Launches(list):
    def __init__(self):
        super().__init__()
        self.prepared = 0
        self.one = threading.Event()


@pytest.mark.parametrize(
    ("chunk_bytes", "runs"),
    [(4096, [1] * 8), (3 << 17, [3, 3, 2]), ((1 << 20) - 1, [7, 1]), (1 << 20, [8])],
)
def test_a_launch_takes_all_tiles_and_as_many_runs_as_chunk_bytes_allow(
    source, stream, mapped, launches, chunk_bytes, runs
):
    assert num_bytes(CASE.tiles, CASE.runs[:1]) == 1 << 17
    extra = CudaIpcExtraConfig(chunk_bytes=chunk_bytes)
    with HostIpcTransport(extra, stream, mapped) as transport:
        pair = met(source, transport)
        transfer = ended(transport, transport.read(pair[1], CASE.tiles, CASE.runs))
        assert transfer.bytes_done == transfer.nbytes == pair[2].nbytes
    assert [len(each) for each in launches] == runs
    assert np.array_equal(np.concatenate(launches), CASE.runs)


def test_a_read_of_less_is_one_launch_by_the_thread_that_asks(pair, launches, stream):
    target, peer, _ = pair
    stream.pause()
    transfer = target.read(peer, CASE.tiles, CASE.runs[:1])
    assert len(launches) == 1
    stream.resume()
    assert ended(target, transfer).state is TransferState.DONE


def test_the_thread_that_starts_a_short_read_sees_its_end(pair, monkeypatch):
    target, peer, _ = pair
    monkeypatch.setattr(cuda_ipc, "SHORT_LOOK_S", 60.0)
    transfer = target.read(peer, CASE.tiles, CASE.runs[: cuda_ipc.LAUNCHES])
    assert transfer.is_terminal
    assert ended(target, transfer).state is TransferState.DONE


@pytest.mark.parametrize(
    "waits", ["for the engine", "for more bytes than a short read has", "for a launch to be made"]
)
def test_the_thread_that_starts_another_read_looks_for_nothing(pair, stream, monkeypatch, waits):
    target, peer, _ = pair
    monkeypatch.setattr(cuda_ipc, "SHORT_LOOK_S", 1e9)
    after, runs = None, CASE.runs[: cuda_ipc.LAUNCHES]
    if waits == "for the engine":
        stream.engine.reached.clear()
        after = stream.engine_event()
    elif waits == "for a launch to be made":
        runs = CASE.runs[: cuda_ipc.LAUNCHES + 1]
        stream.pause()
    else:
        monkeypatch.setattr(cuda_ipc, "SHORT_BYTES", 1000)
        stream.pause()
    transfer = target.read(peer, CASE.tiles, runs, after=after)
    assert not transfer.is_terminal
    stream.engine.reached.set()
    stream.resume()
    assert ended(target, transfer).state is TransferState.DONE


def test_only_so_many_launches_of_a_read_are_under_way_and_the_others_follow(
    pair, launches, stream
):
    target, peer, _ = pair
    stream.pause()
    transfer = target.read(peer, CASE.tiles, CASE.runs)
    assert len(launches) == cuda_ipc.LAUNCHES
    stream.resume()
    assert ended(target, transfer).bytes_done == transfer.nbytes


def test_tiles_that_were_prepared_are_put_on_the_device_once_for_all_reads(pair, launches):
    target, peer, memory = pair
    target.prepare(peer, CASE.tiles, 4)
    assert launches.prepared == 1
    for _ in range(3):
        fill(memory, np.zeros(memory.nbytes, dtype=np.uint8))
        ended(target, target.read(peer, CASE.tiles, CASE.runs))
        assert contents(memory).any()
    assert launches.prepared == 1
    ended(target, target.read(peer, CASE.tiles.copy(), CASE.runs))  # others, that say the same
    assert launches.prepared == 2


def test_the_device_waits_for_an_event_of_its_own_and_no_thread_does(pair, launches, stream):
    target, peer, memory = pair
    fill(memory, np.zeros(memory.nbytes, dtype=np.uint8))
    stream.engine.reached.clear()
    threads = threading.active_count()
    transfer = target.read(peer, CASE.tiles, CASE.runs[:1], after=stream.engine_event())
    assert len(launches) == 1
    assert threading.active_count() <= threads + 1  # the mover, if this is the first read
    time.sleep(0.05)
    assert not transfer.is_terminal
    assert not contents(memory).any()
    stream.engine.reached.set()
    assert ended(target, transfer).state is TransferState.DONE
    assert contents(memory).any()


def test_closing_waits_for_the_launches_of_a_read_and_makes_no_more(pair, launches, stream):
    target, peer, _ = pair
    stream.pause()
    transfer = target.read(peer, CASE.tiles, CASE.runs)
    closing = threading.Thread(target=target.close)
    closing.start()
    time.sleep(0.05)
    assert not transfer.is_terminal
    stream.resume()
    closing.join(60)
    assert transfer.state is TransferState.FAILED
    assert len(launches) == cuda_ipc.LAUNCHES


def test_a_device_that_is_busy_holds_a_read_up_and_a_cancelled_one_ends_when_it_is_quiet(
    pair, launches, stream
):
    target, peer, memory = pair
    stream.pause()
    transfer = target.read(peer, CASE.tiles, CASE.runs)
    assert launches.one.wait(60)
    target.cancel(transfer)
    time.sleep(0.05)
    assert not transfer.is_terminal  # what was launched may still land
    stream.resume()
    assert ended(target, transfer).state is TransferState.CANCELLED
    held = contents(memory)
    time.sleep(0.05)
    assert np.array_equal(contents(memory), held)


def test_the_mapping_outlives_a_launch_that_still_reads_it(pair, launches, stream, mapped):
    target, peer, _ = pair
    stream.pause()
    transfer = target.read(peer, CASE.tiles, CASE.runs)
    assert launches.one.wait(60)
    peer.close()
    assert mapped.num_mapped == 1
    stream.resume()
    assert isinstance(ended(target, transfer).error, PeerLostError)
    assert mapped.num_mapped == 0


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_device_that_fails_fails_its_reads(pair, launches, when, stream):
    target, peer, _ = pair
    if when == "before":
        stream.fail()
        transfer = target.read(peer, CASE.tiles, CASE.runs)
    else:
        stream.pause()
        transfer = target.read(peer, CASE.tiles, CASE.runs)
        assert launches.one.wait(60)
        stream.fail()
        stream.resume()
    assert ended(target, transfer).state is TransferState.FAILED
    assert "the device failed" in str(transfer.error)


def test_host_memory_is_pinned_to_be_read_into_and_unpinned_at_the_end(target, stream):
    memory = np.zeros(5000, dtype=np.uint8)
    assert target.register(memory, serve=False) == 0
    assert stream.pinned == [memory.ctypes.data]
    target.close()
    target.close()
    assert stream.pinned == []


def test_host_memory_cannot_be_served(source):
    with pytest.raises(TransferError, match="allocate_device"):
        source.allocate(100)
    with pytest.raises(TransferError, match="register_device"):
        source.register(np.zeros(100, dtype=np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        source.register(np.zeros((2, 50), dtype=np.uint8), serve=False)


def test_memory_of_another_device_is_refused_with_both(source):
    with pytest.raises(TransferError, match=r"on cuda:3.*copies on cpu"):
        source.register_device(MemorySpan(4096, 100, "cuda:3"))


def test_device_memory_that_is_not_served_cannot_be_read(source, target):
    _, whole = source.allocate_device(CASE.source_region_bytes[0])
    region = source.register_device(whole, serve=False)
    target.allocate_device(CASE.target_region_bytes[0])
    tiles = CASE.tiles.copy()
    tiles["source_region"] = region
    with pytest.raises(BoundsError):
        target.read(target.connect(source.endpoint()), tiles, CASE.runs)


@pytest.mark.parametrize(("offset", "nbytes"), [(1, 10_000), (-1, 10), (0, -1), (0, 10_001)])
def test_an_endpoint_cannot_claim_more_than_its_allocation_has(
    source, target, offset, nbytes, mapped
):
    source.allocate_device(10_000)
    known = described(source)
    wrong = IpcRegion(known.regions[0].handle, offset, nbytes)
    with pytest.raises(BoundsError, match="an allocation that has 10000"):
        target.connect(msgspec.msgpack.encode(msgspec.structs.replace(known, regions=(wrong,))))
    assert mapped.num_mapped == 0


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"host": "another"}, PeerLostError, "use tcp"),
        ({"transport": "shm"}, DecodeError, "'shm'"),
        ({"version": 9}, DecodeError, "version 9"),
        ({"owner": "../../etc/passwd"}, BoundsError, "not a kvferry segment"),
        ({"owner": f"kvferry.1.{'0' * 16}"}, PeerLostError, "no such segment"),
        ({"regions": (IpcRegion(b"short", 0, 1),)}, DecodeError, "5 bytes, expected 64"),
        ({"regions": (IpcRegion(b"x" * HANDLE_BYTES, 0, 1),)}, PeerLostError, "cannot be mapped"),
    ],
)
def test_an_endpoint_that_leads_nowhere_is_refused(source, target, change, error, says):
    endpoint = msgspec.structs.replace(described(source), **change)
    with pytest.raises(error, match=says):
        target.connect(msgspec.msgpack.encode(endpoint))


def test_the_memory_of_a_killed_peer_is_given_back_although_nobody_reads(target, mapped):
    with PeerProcess(HostIpcTransport, TransportOptions()) as other:
        other.allocate(1 << 16, 0)
        target.connect(other.endpoint())
        assert mapped.num_mapped == 1
        other.kill()

        def is_gone():
            target.poll()
            return not mapped.num_mapped

        until(is_gone, what="the end of a dead peer's mapping")


def test_closing_gives_the_owners_segment_back(source):
    name = described(source).owner
    assert (SHM_DIR / name).exists()
    source.close()
    assert not (SHM_DIR / name).exists()


def test_an_event_that_happens_on_another_thread_starts_the_read(pair):
    target, peer, memory = pair
    event = threading.Event()
    transfer = target.read(peer, CASE.tiles, CASE.runs, after=event)
    event.set()
    assert ended(target, transfer).state is TransferState.DONE
    assert contents(memory).any()


def test_a_wrong_extra_key_is_named():
    with pytest.raises(ConfigError, match="did you mean 'chunk_bytes'"):
        opened(chunk_byte=1)
    with pytest.raises(ConfigError, match="less than 4096"):
        opened(chunk_bytes=1)


#: A process that reads twice; prints what each read compiled, or loaded from disk, or imported.
READS = """
import sys, threading, time
from kvferry.layouts import compiled

found = []
load = compiled._Cache._load_overload

def counted(cache, *signature):
    if threading.current_thread().name != "kvferry-host-stream":  # which is the device
        found.append(cache._py_func.__qualname__)
    return load(cache, *signature)

compiled._Cache._load_overload = counted
from kvferry.testing import host_device
from kvferry.testing.transport_cases import large_case
from kvferry.transports import TransportOptions

host_device.warm = lambda: None  # the stream of a real device has no use for what this compiles
case = large_case(1 << 20)
streams = []

class Transport(host_device.HostIpcTransport):
    @classmethod
    def open_device(cls, extra):
        stream, memory = super().open_device(extra)
        streams.append(stream)
        return stream, memory

ends = [Transport.open(TransportOptions()) for _ in "st"]
for end, nbytes in zip(ends, (case.source_region_bytes, case.target_region_bytes)):
    end.allocate_device(nbytes[0])
peer = ends[1].connect(ends[0].endpoint())
ends[1].prepare(peer, case.tiles, 16)
for _ in range(2):
    modules = set(sys.modules)
    found.clear()
    read = ends[1].read(peer, case.tiles, case.runs, after=streams[1].engine_event())
    while not read.is_terminal:
        time.sleep(0.001)
    print(read.state.value, found, sorted(set(sys.modules) - modules))
for end in reversed(ends):
    end.close()
"""


def test_the_first_read_compiles_loads_and_imports_nothing_that_the_second_does_not():
    result = subprocess.run(
        [sys.executable, "-c", READS], capture_output=True, text=True, timeout=240
    )
    assert result.stdout == "done [] []\n" * 2, result.stderr
