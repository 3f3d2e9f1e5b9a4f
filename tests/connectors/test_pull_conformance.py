"""The PullConnector passes the suite that plugin authors use, over each transport that ships."""

from collections.abc import Callable

import pytest

from kvferry.config import KVTransferConfig
from kvferry.testing.connector_conformance import ConnectorConformance, HybridConnectorConformance
from tests.connectors.engines import SHORT_LEASE

Configs = tuple[KVTransferConfig, KVTransferConfig]


@pytest.mark.smoke
class TestOverShm(ConnectorConformance):
    short_lease = SHORT_LEASE

    @pytest.fixture
    def configs(self, pull_configs: Callable[..., Configs]) -> Configs:
        return pull_configs(transport="shm")


class TestGroupsOverShm(HybridConnectorConformance):
    short_lease = SHORT_LEASE

    @pytest.fixture
    def configs(self, pull_configs: Callable[..., Configs]) -> Configs:
        return pull_configs(transport="shm")


class TestOverTcp(ConnectorConformance):
    short_lease = SHORT_LEASE

    @pytest.fixture
    def configs(self, pull_configs: Callable[..., Configs]) -> Configs:
        return pull_configs(transport="tcp")
