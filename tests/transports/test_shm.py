"""Shared memory: who owns a segment, who is alive, and what is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry.errors import (
    BoundsError,
    ConfigError,
    DecodeError,
    PeerLostError,
    SharedMemoryError,
    TransferError,
)
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_peer import PeerProcess
from kvferry.testing.waiting import until
from kvferry.transports import TransferState, TransportOptions
from kvferry.transports.shm import SharedRegion, ShmEndpoint, ShmPeer, ShmTransport
from kvferry.transports.shm_segment import (
    SHM_DIR,
    OwnedSegment,
    PeerSegment,
    sweep_dead_segments,
)


@pytest.fixture
def transport():
    with contextlib.closing(ShmTransport.open(TransportOptions())) as opened:
        yield opened


@pytest.fixture
def segment():
    created = OwnedSegment.create(10_000)
    yield created
    created.close()


def run_python(code, *arguments):
    """Runs code in another process; returns the finished process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def segments_of(pid):
    """Names of the segments that a process has made."""
    return {path.name for path in SHM_DIR.glob(f"kvferry.{pid}.*")}


def described(transport):
    return msgspec.msgpack.decode(transport.endpoint(), type=ShmEndpoint)


def test_a_full_dev_shm_is_an_error_that_names_sizes_and_remedy(transport):
    before = segments_of(os.getpid())
    with pytest.raises(
        SharedMemoryError, match=r"1125899906842624 bytes needed, \d+ free.*num_blocks"
    ):
        transport.allocate(1 << 50)
    assert segments_of(os.getpid()) == before
    region, memory = transport.allocate(100)
    assert (region, memory.nbytes) == (0, 100)


def test_the_pages_are_reserved_when_they_are_allocated(segment):
    status = (SHM_DIR / segment.name).stat()
    assert status.st_blocks * 512 >= 10_000
    assert status.st_mode & 0o777 == 0o600


def test_a_reader_s_end_leaves_the_segment_to_its_owner(segment):
    segment.array[:] = 9
    ended = run_python(
        """
        import sys
        from kvferry.transports.shm_segment import PeerSegment
        segment = PeerSegment.attach(sys.argv[1], 10_000)
        assert segment.owner_is_alive()
        print(segment.array.sum())
        """,
        segment.name,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "90000"
    assert (SHM_DIR / segment.name).exists()
    assert segment.array.sum() == 90_000


def test_a_segment_of_another_user_is_out_of_reach_so_the_next_transport_is_taken(monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PeerLostError, match=r"Permission denied; its owner .* another user .* tcp"):
        PeerSegment.attach(f"kvferry.1.{'0' * 16}", 10_000)


def test_a_reader_cannot_write_the_owner_s_memory(segment):
    with contextlib.closing(PeerSegment.attach(segment.name, 10_000)) as peer:
        assert not peer.array.flags.writeable


def test_segments_of_a_killed_process_are_swept_and_those_of_a_live_one_are_not(segment):
    killed = run_python(
        """
        import os, signal
        from kvferry.transports.shm_segment import OwnedSegment
        print(OwnedSegment.create(5000).name, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert killed.returncode == -signal.SIGKILL
    left = killed.stdout.strip()
    assert (SHM_DIR / left).exists()
    with PeerProcess(ShmTransport, TransportOptions()) as other:
        other.allocate(1000, 0)
        (alive,) = segments_of(other.pid)
        assert left in sweep_dead_segments() or not (SHM_DIR / left).exists()
        assert not (SHM_DIR / left).exists()
        assert (SHM_DIR / alive).exists()
        assert (SHM_DIR / segment.name).exists()
        run_python("from kvferry.transports.shm_segment import *; sweep_dead_segments()")
        assert (SHM_DIR / alive).exists()
        assert (SHM_DIR / segment.name).exists()
    assert not (SHM_DIR / alive).exists()


def test_opening_a_transport_sweeps():
    path = SHM_DIR / f"kvferry.{os.getpid()}.{'0' * 15}1"
    path.write_bytes(b"remains of a process that had this process id before")
    ShmTransport.open(TransportOptions()).close()
    assert not path.exists()


def test_a_segment_that_is_just_being_made_is_left_alone():
    path = SHM_DIR / f"kvferry.{os.getpid()}.{'0' * 15}2"
    path.touch()
    try:
        sweep_dead_segments()
        assert path.exists()
        long_ago = time.time() - 3600
        os.utime(path, (long_ago, long_ago))
        sweep_dead_segments()
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_files_of_others_are_not_swept():
    path = SHM_DIR / "kvferry.notours"
    path.write_bytes(b"something")
    try:
        sweep_dead_segments()
        assert path.exists()
    finally:
        path.unlink()


def test_a_forked_child_does_not_take_the_memory_along():
    ended = run_python(
        """
        import os, subprocess, sys
        from kvferry.transports.shm_segment import SHM_DIR, OwnedSegment
        segment = OwnedSegment.create(10_000)
        child = os.fork()
        if child == 0:
            segment.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (SHM_DIR / segment.name).exists()
        assert segment.is_open
        reader = "import sys; from kvferry.transports.shm_segment import *; "
        reader += "PeerSegment.attach(sys.argv[1], 9)"
        subprocess.run([sys.executable, "-c", reader, segment.name], check=True)
        segment.close()
        """
    )
    assert ended.returncode == 0, ended.stderr


def test_close_takes_the_names_away_and_leaves_arrays_usable(transport):
    _, memory = transport.allocate(5000)
    name = described(transport).regions[0].segment
    transport.close()
    transport.close()
    assert not (SHM_DIR / name).exists()
    memory[:] = 3
    assert memory.sum() == 15_000


def test_memory_that_exists_cannot_be_served(transport):
    with pytest.raises(TransferError, match=r"allocate\(\)"):
        transport.register(np.zeros(10, dtype=np.uint8))
    assert transport.register(np.zeros(10, dtype=np.uint8), serve=False) == 0


@pytest.mark.parametrize(
    "memory",
    [np.zeros(10), np.zeros((2, 5), dtype=np.uint8), np.zeros(10, dtype=np.uint8)[::2]],
    ids=["float", "2-d", "strided"],
)
def test_memory_of_another_form_is_refused(transport, memory):
    with pytest.raises(ValueError, match="contiguous"):
        transport.register(memory, serve=False)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes_cannot_be_allocated(transport, nbytes):
    with pytest.raises(ValueError, match="nbytes"):
        transport.allocate(nbytes)


def test_reads_fail_as_lost_once_the_owner_has_closed(transport):
    case = large_case(1 << 18)
    source = ShmTransport.open(TransportOptions())
    source.allocate(case.source_region_bytes[0])
    transport.allocate(case.target_region_bytes[0])
    peer = transport.connect(source.endpoint())
    source.close()
    transfer = transport.read(peer, case.tiles, case.runs)
    assert transfer.state is TransferState.FAILED
    assert isinstance(transfer.error, PeerLostError)
    assert transport.poll() == [transfer]


@pytest.mark.parametrize("name", ["../../etc/passwd", "kvferry.1.zz", "other", "kvferry.1.0\0"])
def test_an_endpoint_cannot_name_other_files(transport, name):
    endpoint = described(transport)
    endpoint = msgspec.structs.replace(endpoint, regions=(SharedRegion(name, 10),))
    with pytest.raises(BoundsError, match="not a kvferry segment"):
        transport.connect(msgspec.msgpack.encode(endpoint))


def test_an_endpoint_cannot_claim_more_bytes_than_there_are(transport, segment):
    endpoint = msgspec.structs.replace(
        described(transport), regions=(SharedRegion(segment.name, 10_001),)
    )
    with pytest.raises(BoundsError, match="10001 bytes, has 10000"):
        transport.connect(msgspec.msgpack.encode(endpoint))


def test_an_endpoint_of_another_host_is_told_to_use_tcp(transport):
    endpoint = msgspec.structs.replace(described(transport), host="another")
    with pytest.raises(PeerLostError, match="use tcp"):
        transport.connect(msgspec.msgpack.encode(endpoint))


def test_an_endpoint_of_another_transport_is_refused(transport):
    endpoint = msgspec.structs.replace(described(transport), transport="tcp")
    with pytest.raises(DecodeError, match="'tcp'"):
        transport.connect(msgspec.msgpack.encode(endpoint))


def test_a_wrong_extra_key_is_named():
    with pytest.raises(ConfigError, match="did you mean 'chunk_bytes'"):
        ShmTransport.open(TransportOptions(extra={"chunk_byte": 1}))
    with pytest.raises(ConfigError, match="less than 4096"):
        ShmTransport.open(TransportOptions(extra={"chunk_bytes": 1}))


def test_the_memory_of_a_killed_peer_is_given_back_although_nobody_reads(transport):
    with PeerProcess(ShmTransport, TransportOptions()) as other:
        other.allocate(1 << 20, 0)
        (name,) = segments_of(other.pid)
        transport.connect(other.endpoint())
        assert name in Path("/proc/self/maps").read_text()
        other.kill()

        def is_gone():
            transport.poll()
            return name not in Path("/proc/self/maps").read_text()

        until(is_gone, what="the end of a dead peer's mapping")


def test_what_a_look_at_the_owner_needs_outlives_it(segment, monkeypatch):
    """A read that begins after an event looks for its owner while the connection is closed."""
    attached = PeerSegment.attach(segment.name, 10_000)
    peer = ShmPeer({0: attached}, (10_000,))
    looking, go_on = threading.Event(), threading.Event()
    closed_before = []

    def look():
        looking.set()
        go_on.wait(60)
        closed_before.append(attached.array.nbytes == 0)
        return True

    monkeypatch.setattr(attached, "owner_is_alive", look)
    threads = [threading.Thread(target=peer.error), threading.Thread(target=peer.close)]
    threads[0].start()
    assert looking.wait(60)
    threads[1].start()
    threads[1].join(0.2)  # it waits for the look
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert closed_before == [False]
    assert attached.array.nbytes == 0
    assert isinstance(peer.error(), PeerLostError)
