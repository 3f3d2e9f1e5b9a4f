"""The PullConnector between hosts, over IPv6, with keys."""

import pytest

from kvferry.config import KVTransferConfig
from kvferry.testing.multi_host_conformance import Hosts, MultiHostConnectorConformance

pytestmark = [pytest.mark.slow, pytest.mark.processes]


class TestPullBetweenHosts(MultiHostConnectorConformance):
    family = "ipv6"

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls, hosts: Hosts) -> tuple[KVTransferConfig, ...]:
        def config(role, host):
            return KVTransferConfig(
                kv_connector="PullConnector",
                kv_role=role,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "host": cls.address(host),
                    "transport": ["shm", "tcp"],
                    "cluster_key": "k" * 32,
                    "record_digests": True,
                    # Longer than the faults of the suite. Where a busy machine lets one end, the
                    # prompt is computed, which costs no answer.
                    "lease_duration_s": 3,
                    "handshake_timeout_s": 4,
                    # A host that is gone is known as such after three of these.
                    "control_config": {"heartbeat_s": 2},
                },
            )

        return config("kv_producer", hosts.prefill), config("kv_consumer", hosts.decode)

    def test_there_are_digests_to_compare(self, pair, expected):
        before = pair.check_digests()
        self.check_kv_moves(pair, expected)
        assert pair.check_digests() > before
        pair.settle()
