"""Conformance suites for authors of connectors and transports, and what the suites stand on.

    ConnectorConformance   what every connector must do                 connector_conformance.py
    HybridConnectorConformance   the same with KV cache groups          connector_conformance.py
    FakeEngine             drives a connector's halves, checks them     fake_engine.py
    KnownCache             a KV cache whose every cell is known         known_cache.py
    TransportConformance   what every transport must do                 transport_conformance.py
    UnfencedTransportConformance   the same for those that cannot fence   unfenced_conformance.py
    faulty_transport, …    transports that lose, delay and stall reads  faults.py
    unfenced_transport, …  one whose bytes land when the test lets them unfenced.py
    HostCopyStream         a thread in the place of a device            host_device.py
    Network                hosts made of namespaces, and their links    hosts/
    network                the same as a fixture of pytest              fixtures.py
    HostPair               two engines on two hosts                     host_engines.py
    MultiHostConnectorConformance   connectors between hosts            multi_host_conformance.py
    until                  waits for what must come                     waiting.py

Subclass a suite in a test file of yours and give it one fixture. The suites need pytest.
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
    from kvferry.testing.host_device import HostCopyStream
    from kvferry.testing.host_engines import HostEngine, HostPair
    from kvferry.testing.hosts import Host, HostProcess, Network
    from kvferry.testing.known_cache import KnownCache
    from kvferry.testing.multi_host_conformance import MultiHostConnectorConformance
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
    "HostEngine",
    "HostPair",
    "HostProcess",
    "HybridConnectorConformance",
    "KnownCache",
    "MultiHostConnectorConformance",
    "Network",
    "NotInTimeError",
    "ReadGate",
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
    "HostEngine": "host_engines",
    "HostPair": "host_engines",
    "HostProcess": "hosts",
    "HybridConnectorConformance": "connector_conformance",
    "KnownCache": "known_cache",
    "MultiHostConnectorConformance": "multi_host_conformance",
    "Network": "hosts",
    "NotInTimeError": "waiting",
    "ReadGate": "unfenced",
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
    # Loaded when asked for: pytest must rewrite a suite's asserts before it is imported, and who
    # uses one part need not have what the others stand on.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
