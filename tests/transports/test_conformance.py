"""The transports that ship pass the conformance class."""

from types import MappingProxyType

import pytest

from kvferry.testing.host_device import HostPackedTcpTransport
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.transports.shm import ShmTransport
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.vm import VmTransport


@pytest.mark.smoke
class TestShmTransport(TransportConformance):
    transport = ShmTransport


@pytest.mark.smoke
class TestTcpTransport(TransportConformance):
    transport = TcpTransport


class TestTcpTransportThatPacks(TransportConformance):
    transport = HostPackedTcpTransport


@pytest.mark.smoke
class TestVmTransport(TransportConformance):
    transport = VmTransport


@pytest.mark.slow
class TestTcpTransportWithOneThreadAndSmallChunks(TransportConformance):
    transport = TcpTransport
    threads = 1
    extra = MappingProxyType({"chunk_bytes": 65536})
