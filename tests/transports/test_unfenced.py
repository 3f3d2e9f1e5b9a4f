"""The unfenced test transport passes its conformance class; one that lies about an end does not."""

import contextlib

import numpy as np
import pytest

from kvferry.errors import CancelledError
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_peer import PeerProcess
from kvferry.testing.unfenced import ReadGate, UnfencedTransport, unfenced_transport
from kvferry.testing.unfenced_conformance import UnfencedTransportConformance
from kvferry.testing.waiting import until
from kvferry.transports.base import TransferState, TransportOptions
from kvferry.transports.shm import ShmTransport
from kvferry.transports.tcp import TcpTransport


@pytest.mark.slow
class TestUnfencedShm(UnfencedTransportConformance):
    transport = unfenced_transport(ShmTransport, ReadGate())
    serving = ShmTransport
    doubt_s = 0.5


@pytest.mark.slow
class TestUnfencedTcp(UnfencedTransportConformance):
    """A stopped peer goes on to send what was asked of it before."""

    transport = unfenced_transport(TcpTransport, ReadGate())
    serving = TcpTransport
    doubt_s = 0.5


class _Liar(UnfencedTransport):
    """Takes the wish for the deed: a cancelled read is terminal at once."""

    def cancel(self, transfer):
        self._lost.finish(transfer, TransferState.CANCELLED, CancelledError("so it says"))


@pytest.fixture
def read_gate():
    read_gate = ReadGate()
    yield read_gate
    read_gate.release()


def test_a_terminal_state_that_proves_nothing_is_caught(read_gate):
    class Suite(UnfencedTransportConformance):
        transport = _Liar.around(ShmTransport, "Lying", fences=False, read_gate=read_gate)
        serving = ShmTransport
        doubt_s = 0.5

        def assert_nothing_lands(self, scene):
            """The bytes come once the memory is somebody else's."""
            scene.refill()
            read_gate.release()
            until(scene.assert_untouched, every_s=0, what="a late byte")

    suite = Suite()
    read_gate.hold()
    with (
        PeerProcess(ShmTransport, suite.options()) as peer,
        contextlib.closing(suite.transport.open(suite.options())) as local,
        pytest.raises(AssertionError, match=r"was changed|differs"),
    ):
        suite.test_a_read_cancelled_while_it_runs_lands_nothing_afterwards(local, peer)


def test_what_was_held_lands_when_the_gate_opens_however_it_was_cancelled(read_gate):
    transport = unfenced_transport(ShmTransport, read_gate)
    case = large_case(1 << 18)
    with (
        contextlib.closing(transport.open(TransportOptions())) as source,
        contextlib.closing(transport.open(TransportOptions())) as target,
    ):
        _, held = source.allocate(case.source_region_bytes[0])
        held[:] = 7
        memory = np.zeros(case.target_region_bytes[0], dtype=np.uint8)
        target.register(memory, serve=False)
        peer = target.connect(source.endpoint())
        read_gate.hold()
        transfer = target.read(peer, case.tiles, case.runs)
        target.cancel(transfer)
        peer.close()
        assert target.poll() == []
        assert not memory.any()
        read_gate.release()
        while not transfer.is_terminal:
            target.poll()
        assert transfer.state is TransferState.DONE
        assert (memory == 7).all()
