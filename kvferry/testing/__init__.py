"""Conformance suites for authors of connectors and transports, with their tools.

    ConnectorConformance   the tests of every connector                 connector_conformance.py
    HybridConnectorConformance   these tests with KV cache groups       connector_conformance.py
    FakeEngine             drives a connector's halves, checks them     fake_engine.py
    KnownCache             a KV cache with known cells                  known_cache.py
    TransportConformance   the tests of every transport                 transport_conformance.py
    UnfencedTransportConformance   tests for transports without fence   unfenced_conformance.py
    faulty_transport, …    transports that lose, delay and stall reads  faults.py
    unfenced_transport, …  a transport whose bytes wait for the test    unfenced.py
    HostCopyStream, HostDevice   a thread in the place of a device      host_device.py
    TorchDevice            a GPU, for caches in its memory              torch_device.py
    Network                hosts made of namespaces, and their links    hosts/
    network                a Network as a pytest fixture                fixtures.py
    HostPair               two engines on two hosts                     host_engines.py
    MultiHostConnectorConformance   connectors between hosts            multi_host_conformance.py
    until                  waits for what must come                     waiting.py

Subclass a suite in your own test file and override one fixture. The suites need pytest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.testing.connector_conformance import (
        ConnectorConformance,
        HybridConnectorConformance,
    )
    from kvferry.testing.fake_engine import FakeEngine
    from kvferry.testing.faults import (
        Faults,
        faulty_transport,
        lossy_transport,
        slow_transport,
        stalling_transport,
    )
    from kvferry.testing.host_device import HostCopyStream, HostDevice
    from kvferry.testing.host_engines import HostEngine, HostPair
    from kvferry.testing.hosts import Host, HostProcess, Network
    from kvferry.testing.known_cache import KnownCache
    from kvferry.testing.multi_host_conformance import MultiHostConnectorConformance
    from kvferry.testing.torch_device import TorchDevice
    from kvferry.testing.transport_conformance import TransportConformance
    from kvferry.testing.unfenced import ReadGate, unfenced_transport
    from kvferry.testing.unfenced_conformance import UnfencedTransportConformance
    from kvferry.testing.waiting import NotInTimeError, until

__all__ = [
    "ConnectorConformance",
    "FakeEngine",
    "Faults",
    "Host",
    "HostCopyStream",
    "HostDevice",
    "HostEngine",
    "HostPair",
    "HostProcess",
    "HybridConnectorConformance",
    "KnownCache",
    "MultiHostConnectorConformance",
    "Network",
    "NotInTimeError",
    "ReadGate",
    "TorchDevice",
    "TransportConformance",
    "UnfencedTransportConformance",
    "faulty_transport",
    "lossy_transport",
    "slow_transport",
    "stalling_transport",
    "unfenced_transport",
    "until",
]

_MODULES = {
    "ConnectorConformance": "connector_conformance",
    "FakeEngine": "fake_engine",
    "Faults": "faults",
    "Host": "hosts",
    "HostCopyStream": "host_device",
    "HostDevice": "host_device",
    "HostEngine": "host_engines",
    "HostPair": "host_engines",
    "HostProcess": "hosts",
    "HybridConnectorConformance": "connector_conformance",
    "KnownCache": "known_cache",
    "MultiHostConnectorConformance": "multi_host_conformance",
    "Network": "hosts",
    "NotInTimeError": "waiting",
    "ReadGate": "unfenced",
    "TorchDevice": "torch_device",
    "TransportConformance": "transport_conformance",
    "UnfencedTransportConformance": "unfenced_conformance",
    "faulty_transport": "faults",
    "lossy_transport": "faults",
    "slow_transport": "faults",
    "stalling_transport": "faults",
    "unfenced_transport": "unfenced",
    "until": "waiting",
}


def __getattr__(name: str) -> Any:
    # Loaded on use: pytest must rewrite a suite's asserts before the import, and users of one part
    # need not install the requirements of the others.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
