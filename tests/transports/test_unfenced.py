"""The unfenced test transport passes its conformance class; one that lies about an end does not."""

import contextlib
import time

import numpy as np
import pytest

from kvferry.errors import CancelledError
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_peer import PeerProcess
from kvferry.testing.unfenced import Tide, UnfencedTransport, unfenced_transport
from kvferry.testing.unfenced_conformance import UnfencedTransportConformance
from kvferry.transports.base import TransferState, TransportOptions
from kvferry.transports.shm import ShmTransport
from kvferry.transports.tcp import TcpTransport


@pytest.mark.slow
class TestUnfencedShm(UnfencedTransportConformance):
    transport = unfenced_transport(ShmTransport, Tide())
    serving = ShmTransport
    doubt_s = 0.5


@pytest.mark.slow
class TestUnfencedTcp(UnfencedTransportConformance):
    """A stopped peer goes on to send what was asked of it before."""

    transport = unfenced_transport(TcpTransport, Tide())
    serving = TcpTransport
    doubt_s = 0.5


class _Liar(UnfencedTransport):
    """Takes the wish for the deed: a cancelled read is terminal at once."""

    def cancel(self, transfer):
        self._lost.finish(transfer, TransferState.CANCELLED, CancelledError("so it says"))


@pytest.fixture
def tide():
    tide = Tide()
    yield tide
    tide.release()


def test_a_terminal_state_that_proves_nothing_is_caught(tide):
    class Suite(UnfencedTransportConformance):
        transport = _Liar.around(ShmTransport, "Lying", fences=False, tide=tide)
        serving = ShmTransport
        doubt_s = 0.5
        settle_s = 1.0

        def assert_nothing_lands(self, scene):
            """The bytes come once the memory is somebody else's."""
            scene.refill()
            tide.release()
            time.sleep(self.settle_s)
            scene.assert_untouched()

    suite = Suite()
    tide.hold()
    with (
        PeerProcess(ShmTransport, suite.options()) as peer,
        contextlib.closing(suite.transport.open(suite.options())) as local,
        pytest.raises(AssertionError, match=r"was changed|differs"),
    ):
        suite.test_a_read_cancelled_while_it_runs_lands_nothing_afterwards(local, peer)


def test_what_was_held_lands_when_the_tide_lets_it_however_it_was_cancelled(tide):
    transport = unfenced_transport(ShmTransport, tide)
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
        tide.hold()
        transfer = target.read(peer, case.tiles, case.runs)
        target.cancel(transfer)
        peer.close()
        assert target.poll() == []
        assert not memory.any()
        tide.release()
        while not transfer.is_terminal:
            target.poll()
        assert transfer.state is TransferState.DONE
        assert (memory == 7).all()
