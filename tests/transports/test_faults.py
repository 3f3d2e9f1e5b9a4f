"""The fault-injecting wrappers: what they break, they break as a real transport would."""

import contextlib
import time
from typing import Any

import numpy as np
import pytest

from kvferry.errors import PeerLostError, StalledError
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.testing.faults import (
    Faults,
    faulty_transport,
    lossy_transport,
    slow_transport,
    stalling_transport,
)
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.testing.transport_peer import pattern
from kvferry.testing.waiting import until
from kvferry.transports import TransferState, TransportOptions, open_transport
from kvferry.transports.shm import ShmTransport


@pytest.mark.slow
class TestASlowTransportIsStillATransport(TransportConformance):
    transport = slow_transport(ShmTransport, delay_s=(0.0, 0.02))
    serving = ShmTransport


@pytest.fixture
def source():
    with contextlib.closing(ShmTransport.open(TransportOptions())) as transport:
        yield transport


def laid_out(source, kind, stall_timeout_s=120.0):
    """A case of 1 MiB between ``source`` and a transport of class ``kind``."""
    case = large_case(1 << 20)
    _, held = source.allocate(case.source_region_bytes[0])
    held[:] = pattern(held.nbytes, 1)
    local = kind.open(TransportOptions(stall_timeout_s=stall_timeout_s))
    _, memory = local.allocate(case.target_region_bytes[0])
    return case, local, local.connect(source.endpoint()), memory


def polled(local, *transfers):
    """Polls until all are reported, and returns what was."""
    reported: list[Any] = []

    def are_reported() -> bool:
        reported.extend(local.poll())
        return len(reported) >= len(transfers)

    until(are_reported, every_s=0.001, what="the end of all reads")
    return reported


def test_a_lost_read_fails_with_half_of_its_bytes_landed(source):
    case, local, peer, memory = laid_out(source, lossy_transport(ShmTransport, loss=1.0))
    transfer = local.read(peer, case.tiles, case.runs)
    assert polled(local, transfer) == [transfer]
    assert transfer.state is TransferState.FAILED
    assert isinstance(transfer.error, PeerLostError)
    assert 0 < transfer.bytes_done < transfer.nbytes
    assert 0 < np.count_nonzero(memory) < memory.nbytes * 0.6
    landed = memory.copy()
    time.sleep(0.1)
    assert np.array_equal(memory, landed)
    assert local.poll() == []
    local.close()


def test_a_stalled_read_fails_after_the_stall_timeout(source):
    kind = stalling_transport(ShmTransport, stall=1.0)
    case, local, peer, _ = laid_out(source, kind, stall_timeout_s=0.3)
    transfer = local.read(peer, case.tiles, case.runs)
    assert polled(local, transfer) == [transfer]
    assert isinstance(transfer.error, StalledError)
    assert transfer.finished - transfer.started >= 0.3
    local.close()


def test_a_stalled_read_can_be_cancelled(source):
    case, local, peer, _ = laid_out(source, stalling_transport(ShmTransport, stall=1.0))
    transfer = local.read(peer, case.tiles, case.runs)
    time.sleep(0.05)
    assert local.poll() == []
    local.cancel(transfer)
    assert polled(local, transfer) == [transfer]
    assert transfer.state is TransferState.CANCELLED
    local.close()


def test_closing_ends_what_a_fault_keeps_running(source):
    case, local, peer, _ = laid_out(source, stalling_transport(ShmTransport, stall=1.0))
    transfer = local.read(peer, case.tiles, case.runs)
    local.close()
    assert transfer.state is TransferState.FAILED
    assert local.poll() == [transfer]


def test_a_slow_read_starts_late_and_is_whole(source):
    kind = slow_transport(ShmTransport, delay_s=(1.0, 1.0))
    case, local, peer, memory = laid_out(source, kind)
    transfer = local.read(peer, case.tiles, case.runs)
    assert not memory.any()
    assert polled(local, transfer) == [transfer]
    assert transfer.state is TransferState.DONE
    assert transfer.finished - transfer.started >= 1.0
    local.close()


def test_the_schedule_depends_on_the_seed_alone(source):
    faults = Faults(loss=0.3, stall=0.2, seed=5)
    drawn = [faults.draw(number)[0] for number in range(1000)]
    assert drawn == [faults.draw(number)[0] for number in range(1000)]
    assert drawn != [Faults(loss=0.3, stall=0.2, seed=6).draw(n)[0] for n in range(1000)]
    assert 230 < drawn.count(PeerLostError) < 370
    assert 140 < drawn.count(StalledError) < 260
    case, local, peer, _ = laid_out(
        source, faulty_transport(ShmTransport, Faults(loss=0.3, seed=5))
    )
    expected = [Faults(loss=0.3, seed=5).draw(number)[0] is PeerLostError for number in range(20)]
    transfers = [local.read(peer, case.tiles, case.runs) for _ in range(20)]
    assert len(polled(local, *transfers)) == 20
    assert [transfer.state is TransferState.FAILED for transfer in transfers] == expected
    local.close()


def test_a_connector_gets_the_wrapper_by_the_transport_s_name(source):
    kind = lossy_transport(ShmTransport, loss=1.0)
    with (
        temporary_plugin(TRANSPORTS, "shm", kind),
        contextlib.closing(open_transport("shm")) as transport,
    ):
        assert isinstance(transport, kind)
    with contextlib.closing(open_transport("shm")) as transport:
        assert isinstance(transport, ShmTransport)
