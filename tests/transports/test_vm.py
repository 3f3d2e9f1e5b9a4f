"""The transport vm: whom it reads, what the system may forbid, and peers that go and come back."""

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry.errors import (
    ConfigError,
    DecodeError,
    HostError,
    PeerLostError,
    SharedMemoryError,
    TransferError,
)
from kvferry.layouts import TILE_DTYPE, blank_runs
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_peer import PeerProcess, pattern
from kvferry.transports import TransferState, TransportOptions, regions, vm_process
from kvferry.transports.vm import VmEndpoint, VmTransport


@pytest.fixture
def transport():
    with contextlib.closing(VmTransport.open(TransportOptions())) as opened:
        yield opened


@pytest.fixture
def source():
    with contextlib.closing(VmTransport.open(TransportOptions())) as opened:
        yield opened


def described(transport):
    return msgspec.msgpack.decode(transport.endpoint(), type=VmEndpoint)


def changed(transport, **fields):
    """Its endpoint, with other fields of the process."""
    endpoint = described(transport)
    process = msgspec.structs.replace(endpoint.process, **fields)
    return msgspec.msgpack.encode(msgspec.structs.replace(endpoint, process=process))


def plain(nbytes):
    """Tiles and runs of one copy of ``nbytes`` from region 0 to region 0."""
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, nbytes, 1
    tiles["source_element_stride"] = tiles["target_element_stride"] = 1
    runs = blank_runs(1)
    runs["tokens"] = 1
    return tiles, runs


def finish(transport, transfer):
    while not transfer.is_terminal:
        pass
    assert transport.poll() == [transfer]
    return transfer


def test_any_memory_of_the_process_can_be_served_aligned_or_not(source, transport):
    held = pattern(5 * mmap.PAGESIZE, 3)
    source.register(held[17:-33])
    target = np.zeros(held.nbytes - 50, dtype=np.uint8)
    transport.register(target, serve=False)
    peer = transport.connect(source.endpoint())
    transfer = finish(transport, transport.read(peer, *plain(target.nbytes)))
    assert transfer.state is TransferState.DONE, transfer.error
    assert np.array_equal(target, held[17:-33])


def test_what_is_only_read_into_has_no_address_for_others(transport):
    transport.register(np.zeros(10, dtype=np.uint8), serve=False)
    transport.register(np.zeros(20, dtype=np.uint8))
    endpoint = described(transport)
    assert endpoint.nbytes == (0, 20)
    assert endpoint.addresses[0] == 0
    assert endpoint.addresses[1] > 0


def test_reads_fail_as_lost_once_the_owner_has_closed(source, transport):
    case = large_case(1 << 18)
    source.allocate(case.source_region_bytes[0])
    transport.allocate(case.target_region_bytes[0])
    peer = transport.connect(source.endpoint())
    source.close()
    transfer = transport.read(peer, case.tiles, case.runs)
    assert isinstance(transfer.error, PeerLostError)
    with pytest.raises(PeerLostError, match="closed the transport"):
        transport.connect(source.endpoint())


def test_a_peer_that_closes_during_a_read_fails_it(source, transport, monkeypatch):
    """What was read last may have been somebody else's by then."""
    case = large_case(8 << 20)
    source.allocate(case.source_region_bytes[0])
    transport.allocate(case.target_region_bytes[0])
    peer = transport.connect(source.endpoint())

    class Closes:
        def wait(self):
            source.close()

    transfer = finish(transport, transport.read(peer, case.tiles, case.runs, after=Closes()))
    assert transfer.state is TransferState.FAILED
    assert isinstance(transfer.error, PeerLostError)


def test_a_restarted_peer_is_not_taken_for_the_one_before(transport):
    """Even if the number of its process came back: here its endpoint is made to say so."""
    options = TransportOptions()
    with PeerProcess(VmTransport, options) as first:
        first.allocate(4096, 1)
        old = msgspec.msgpack.decode(first.endpoint(), type=VmEndpoint)
    with pytest.raises(PeerLostError, match="has ended"):
        transport.connect(msgspec.msgpack.encode(old))
    with PeerProcess(VmTransport, options) as second:
        second.allocate(4096, 2)
        reused = msgspec.structs.replace(old.process, pid=second.pid)
        with pytest.raises(PeerLostError):
            transport.connect(msgspec.msgpack.encode(msgspec.structs.replace(old, process=reused)))
        target = np.zeros(4096, dtype=np.uint8)
        transport.register(target, serve=False)
        peer = transport.connect(second.endpoint())
        transfer = finish(transport, transport.read(peer, *plain(4096)))
        assert transfer.state is TransferState.DONE
        assert np.array_equal(target, pattern(4096, 2))


def test_another_start_time_is_another_process(transport):
    with pytest.raises(PeerLostError, match="started again"):
        transport.connect(changed(transport, started=described(transport).process.started - 1))


def test_a_killed_peer_is_noticed_before_it_is_reaped(transport):
    """A zombie holds its number, but no memory."""
    child = subprocess.Popen(["sleep", "60"])
    pidfd = os.pidfd_open(child.pid)
    child.kill()
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    os.close(pidfd)
    with pytest.raises(PeerLostError, match="has ended"):
        transport.connect(changed(transport, pid=child.pid))
    child.wait()


def test_a_token_that_differs_is_a_lost_peer(transport):
    with pytest.raises(PeerLostError, match="closed the transport, or started again"):
        transport.connect(changed(transport, token=bytes(16)))


def test_memory_that_the_owner_has_unmapped_is_named(source, transport):
    size = 4 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size)
    array = np.frombuffer(memory, dtype=np.uint8)
    source.register(array)
    transport.register(np.zeros(size, dtype=np.uint8), serve=False)
    peer = transport.connect(source.endpoint())
    ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(array.ctypes.data + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0
    )
    transfer = finish(transport, transport.read(peer, *plain(size)))
    assert transfer.state is TransferState.FAILED
    assert not isinstance(transfer.error, PeerLostError)
    assert "has unmapped" in str(transfer.error)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_what_the_system_forbids_shows_in_connect_with_the_remedy(transport, monkeypatch, number):
    """So that the PullConnector takes its next transport."""
    monkeypatch.setattr(vm_process, "read_memory", lambda *_: number)
    with pytest.raises(PeerLostError, match=r"ptrace_scope.*shm or tcp"):
        transport.connect(transport.endpoint())


def test_a_system_without_the_call_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(HostError, match="process_vm_readv"):
        VmTransport.open(TransportOptions())


@pytest.mark.parametrize(
    ("field", "match"),
    [("host", "another host; use tcp"), ("namespace", "PID namespace other")],
)
def test_another_host_or_namespace_is_out_of_reach(transport, field, match):
    with pytest.raises(PeerLostError, match=match):
        transport.connect(changed(transport, **{field: "other"}))


@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is not installed")
def test_a_peer_in_another_pid_namespace_says_so(transport):
    """Its process id is 1 there; here that is somebody else."""
    code = (
        "import sys; from kvferry.transports.vm import *; "
        "t = VmTransport.open(TransportOptions()); "
        "sys.stdout.buffer.write(t.endpoint()); sys.stdout.flush(); sys.stdin.read()"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        endpoint = os.read(child.stdout.fileno(), 65536)
        if not endpoint:
            pytest.skip(f"unshare: {child.stderr.read().decode().strip()}")
        assert msgspec.msgpack.decode(endpoint, type=VmEndpoint).process.pid == 1
        with pytest.raises(PeerLostError, match="PID namespace"):
            transport.connect(endpoint)
        child.stdin.close()


@pytest.mark.parametrize(
    "fields",
    [{"pid": 0}, {"pid": 1 << 40}, {"token": b"short"}, {"token_address": -1}],
)
def test_numbers_that_make_no_sense_are_refused(transport, fields):
    with pytest.raises(DecodeError, match="no sense"):
        transport.connect(changed(transport, **fields))


def test_an_endpoint_of_another_transport_is_refused(transport):
    endpoint = msgspec.structs.replace(described(transport), transport="shm")
    with pytest.raises(DecodeError, match="'shm'"):
        transport.connect(msgspec.msgpack.encode(endpoint))


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"chunk_byte": 1}, "did you mean 'chunk_bytes'"),
        ({"chunk_bytes": 1}, "less than 4096"),
        ({"ptracer": "all"}, "ptracer"),
    ],
)
def test_wrong_extra_keys_are_named(extra, match):
    with pytest.raises(ConfigError, match=match):
        VmTransport.open(TransportOptions(extra=extra))


@pytest.mark.parametrize(("extra", "opened"), [({}, 1), ({"ptracer": "none"}, 0)])
def test_the_process_is_opened_to_others_only_if_it_serves_and_may(monkeypatch, extra, opened):
    calls = []
    monkeypatch.setattr("kvferry.transports.vm.let_anybody_trace", lambda: calls.append(1))
    with contextlib.closing(VmTransport.open(TransportOptions(extra=extra))) as transport:
        transport.register(np.zeros(10, dtype=np.uint8), serve=False)
        assert not calls
        transport.register(np.zeros(10, dtype=np.uint8))
        assert len(calls) == opened


def open_processes():
    """Number of descriptors of this process that stand for processes."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            links.append(os.readlink(link))  # noqa: PTH115
    return links.count("anon_inode:[pidfd]")


def test_descriptors_are_given_back_with_the_connections(source, transport):
    before = open_processes()
    peers = [transport.connect(source.endpoint()) for _ in range(5)]
    assert open_processes() == before + 5
    for peer in peers:
        peer.close()
        peer.close()
    assert open_processes() == before


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes_cannot_be_allocated(transport, nbytes):
    with pytest.raises(ValueError, match="nbytes"):
        transport.allocate(nbytes)


def test_more_memory_than_there_is_is_an_error_that_names_the_size(transport):
    with pytest.raises(SharedMemoryError, match=f"{1 << 50} bytes.*num_blocks"):
        transport.allocate(1 << 50)


def test_huge_pages_change_no_byte_and_are_left_out_on_request(monkeypatch):
    memory = pattern(6 << 20, 1)
    before = memory.copy()
    regions.make_huge(memory)
    assert np.array_equal(memory, before)
    calls = []
    monkeypatch.setattr(regions, "_advise", lambda _, advice: calls.append(advice))
    regions.private_memory(4096, huge_pages=False)
    with contextlib.closing(
        VmTransport.open(TransportOptions(extra={"huge_pages": False}))
    ) as transport:
        transport.register(memory)
    assert calls == [23]


def test_a_copy_that_raises_a_named_error_fails_its_read_with_it(source, transport, monkeypatch):
    source.allocate(4096)
    transport.allocate(4096)
    peer = transport.connect(source.endpoint())
    wrong = TransferError("as said")
    monkeypatch.setattr("kvferry.transports.vm.read_chunks", lambda *_: (errno.EFAULT, False))
    monkeypatch.setattr(peer.process, "reading_error", lambda _: wrong)
    assert finish(transport, transport.read(peer, *plain(4096))).error is wrong
