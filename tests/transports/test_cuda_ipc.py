"""The transport of GPUs: all but the GPU itself, which host memory takes the place of here."""

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
    TransferError,
)
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.tiles import num_bytes
from kvferry.testing.host_device import HostIpcTransport
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.testing.transport_peer import PeerProcess, contents, fill, pattern
from kvferry.transports import TransferState, TransportOptions
from kvferry.transports.cuda_ipc import CudaIpcEndpoint, CudaIpcTransport, IpcRegion
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES
from kvferry.transports.shm_segment import SHM_DIR

CASE = large_case(1 << 20)


@pytest.mark.slow
class TestCudaIpcTransportWithoutAGpu(TransportConformance):
    transport = HostIpcTransport
    extra = MappingProxyType({"chunk_bytes": 1 << 20})


def opened(**extra):
    return HostIpcTransport.open(TransportOptions(extra=extra))


@pytest.fixture
def source():
    with opened() as transport:
        yield transport


@pytest.fixture
def target():
    with opened(chunk_bytes=4096) as transport:
        yield transport


@pytest.fixture
def pair(source, target):
    """Both, with a case's memory; the connection; and the target's memory."""
    _, held = source.allocate_device(CASE.source_region_bytes[0])
    fill(held, pattern(held.nbytes, 3))
    _, memory = target.allocate_device(CASE.target_region_bytes[0])
    return target, target.connect(source.endpoint()), memory


def described(transport):
    return msgspec.msgpack.decode(transport.endpoint(), type=CudaIpcEndpoint)


def ended(transport, transfer):
    deadline = time.monotonic() + 60
    while not transfer.is_terminal:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert transport.poll() == [transfer]
    return transfer


def test_without_a_gpu_the_real_one_says_so_and_names_what_works():
    import torch

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    with pytest.raises(HostError, match=r"0 CUDA devices.*\(shm, tcp\)"):
        CudaIpcTransport.open(TransportOptions())


def test_parts_of_one_allocation_travel_as_one_handle(source, target):
    _, whole = source.allocate_device(10_000)
    part = MemorySpan(whole.address + 4096, 1000, whole.device)
    source.register_device(part)
    first, second = described(source).regions
    assert first.handle == second.handle
    assert (second.offset, second.nbytes) == (4096, 1000)
    peer = target.connect(source.endpoint())
    assert peer.addresses[1] - peer.addresses[0] == 4096
    assert target._memory.num_mapped == 1


def test_a_read_goes_in_launches_of_chunk_bytes(pair, monkeypatch):
    target, peer, memory = pair
    launched = []
    copy = target._stream.copy

    def counted(sources, targets, tiles, runs):
        launched.append(num_bytes(tiles, runs))
        copy(sources, targets, tiles, runs)

    monkeypatch.setattr(target._stream, "copy", counted)
    ended(target, target.read(peer, CASE.tiles, CASE.runs))
    assert len(launched) > 10
    assert sum(launched) == memory.nbytes


@pytest.fixture
def launched(pair, monkeypatch):
    """Is set when something of a read has been launched."""
    stream, launched = pair[0]._stream, threading.Event()
    copy = stream.copy

    def told(*arguments):
        copy(*arguments)
        launched.set()

    monkeypatch.setattr(stream, "copy", told)
    return launched


def test_a_device_that_is_busy_holds_a_read_up_and_a_cancelled_one_ends_when_it_is_quiet(
    pair, launched
):
    target, peer, memory = pair
    target._stream.pause()
    transfer = target.read(peer, CASE.tiles, CASE.runs)
    assert launched.wait(60)
    target.cancel(transfer)
    time.sleep(0.05)
    assert not transfer.is_terminal  # what was launched may still land
    target._stream.resume()
    assert ended(target, transfer).state is TransferState.CANCELLED
    held = contents(memory)
    time.sleep(0.05)
    assert np.array_equal(contents(memory), held)


def test_the_mapping_outlives_a_launch_that_still_reads_it(pair, launched):
    target, peer, _ = pair
    target._stream.pause()
    transfer = target.read(peer, CASE.tiles, CASE.runs)
    assert launched.wait(60)
    peer.close()
    assert target._memory.num_mapped == 1
    target._stream.resume()
    assert isinstance(ended(target, transfer).error, PeerLostError)
    assert target._memory.num_mapped == 0


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_device_that_fails_fails_its_reads(pair, launched, when):
    target, peer, _ = pair
    if when == "before":
        target._stream.fail()
        transfer = target.read(peer, CASE.tiles, CASE.runs)
    else:
        target._stream.pause()
        transfer = target.read(peer, CASE.tiles, CASE.runs)
        assert launched.wait(60)
        target._stream.fail()
        target._stream.resume()
    assert ended(target, transfer).state is TransferState.FAILED
    assert "the device failed" in str(transfer.error)


def test_host_memory_is_pinned_to_be_read_into_and_unpinned_at_the_end():
    transport = opened()
    memory = np.zeros(5000, dtype=np.uint8)
    assert transport.register(memory, serve=False) == 0
    assert transport._stream.pinned == [memory.ctypes.data]
    transport.close()
    transport.close()
    assert transport._stream.pinned == []


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
def test_an_endpoint_cannot_claim_more_than_its_allocation_has(source, target, offset, nbytes):
    source.allocate_device(10_000)
    known = described(source)
    wrong = IpcRegion(known.regions[0].handle, offset, nbytes)
    with pytest.raises(BoundsError, match="an allocation that has 10000"):
        target.connect(msgspec.msgpack.encode(msgspec.structs.replace(known, regions=(wrong,))))
    assert target._memory.num_mapped == 0


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


def test_the_memory_of_a_killed_peer_is_given_back_although_nobody_reads(target):
    with PeerProcess(HostIpcTransport, TransportOptions()) as other:
        other.allocate(1 << 16, 0)
        target.connect(other.endpoint())
        assert target._memory.num_mapped == 1
        other.kill()
        deadline = time.monotonic() + 60
        while target._memory.num_mapped:
            assert time.monotonic() < deadline, "the mapping of a dead peer is kept"
            target.poll()
            time.sleep(0.05)


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
