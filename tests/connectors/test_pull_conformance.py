"""The PullConnector passes the suite that plugin authors use, over each transport that ships."""

import pytest

from kvferry.config import KVTransferConfig
from kvferry.testing.connector_conformance import ConnectorConformance
from kvferry.testing.hybrid_conformance import HybridConnectorConformance


def configs(transport: str) -> tuple[KVTransferConfig, KVTransferConfig]:
    """Producer and consumer; a lease that nobody takes ends within the suite's patience."""
    extra = {
        "transport": transport,
        "cluster_key": "k" * 32,
        "lease_duration_s": 3.0,
        "handshake_timeout_s": 2.0,
    }
    producer, consumer = (
        KVTransferConfig(
            kv_connector="PullConnector",
            kv_role=role,
            kv_port=0,
            kv_connector_extra_config=extra,
        )
        for role in ("kv_producer", "kv_consumer")
    )
    return producer, consumer


class TestOverShm(ConnectorConformance):
    @pytest.fixture
    def configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        return configs("shm")


class TestGroupsOverShm(HybridConnectorConformance):
    @pytest.fixture
    def configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        return configs("shm")


class TestOverTcp(ConnectorConformance):
    @pytest.fixture
    def configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        return configs("tcp")
