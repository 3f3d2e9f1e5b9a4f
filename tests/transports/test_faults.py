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
from kvferry.testing.unfenced import ReadGate, UnfencedTransport, unfenced_transport
from kvferry.testing.waiting import until
from kvferry.transports import TransferState, TransportOptions, open_transport
from kvferry.transports.base import Transport
from kvferry.transports.packing import PackingTransport
from kvferry.transports.shm import ShmTransport
from kvferry.transports.ways import choose_way


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


class Odd(ShmTransport):
    """Declares what no default says; with a key, it packs and does not fence."""

    least_segment_bytes = 1 << 20

    @classmethod
    def with_keys(cls, extra):
        return OddPacking if extra else cls

    @classmethod
    def open(cls, options):
        transport = super(Odd, cls.with_keys(options.extra)).open(TransportOptions())
        transport.fences = not options.extra
        return transport


class OddPacking(Odd, PackingTransport):
    def register_packed(self, memory, packer):
        return 7


@pytest.fixture(params=[lossy_transport, unfenced_transport], ids=["lossy", "unfenced"])
def wrapped(request):
    """A class around :class:`Odd`."""
    if request.param is lossy_transport:
        return lossy_transport(Odd, loss=0.1)
    return unfenced_transport(Odd, ReadGate())


def test_a_wrapper_declares_what_its_transport_declares(wrapped):
    declared = set(Transport.__annotations__)
    differ = {name for name in declared if getattr(wrapped, name) != getattr(Odd, name)}
    assert differ == ({"fences"} if issubclass(wrapped, UnfencedTransport) else set())
    way = choose_way(wrapped, device="cpu", conversion=None, segment_bytes=512, source_bytes=8192)
    assert str(way) == "staged"


def test_a_wrapper_keeps_the_contracts_that_its_transport_keeps_with_its_keys(wrapped):
    extra = {"packs": True}
    assert not issubclass(wrapped, PackingTransport)
    assert issubclass(wrapped.with_keys(extra), PackingTransport)
    with contextlib.closing(wrapped.open(TransportOptions(extra=extra))) as transport:
        assert isinstance(transport, wrapped)
        assert transport.register_packed(None, None) == 7


def test_a_wrapper_does_not_fence_if_its_transport_does_not(wrapped):
    with contextlib.closing(wrapped.open(TransportOptions(extra={"packs": True}))) as transport:
        assert not transport.fences
