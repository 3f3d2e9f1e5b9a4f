"""The PullConnector between hosts, over IPv6, with keys."""

import pytest

from kvferry.config import KVTransferConfig
from kvferry.testing.multi_host_conformance import Hosts, MultiHostConnectorConformance, prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timed(
        "A lease of 3 s or a handshake of 4 s ends while a healthy host waits for the processor."
    ),
]


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
                    # Shorter than the patience of the suite, longer than its faults.
                    "lease_duration_s": 3,
                    "handshake_timeout_s": 4,
                    # A host that is gone is known as such after three of these.
                    "control_config": {"heartbeat_s": 2},
                },
            )

        return config("kv_producer", hosts.prefill), config("kv_consumer", hosts.decode)

    def test_there_are_digests_to_compare(self, pair):
        asked = prompts(seed=9, number=2)
        before = pair.check_digests()
        for one in asked:
            assert not pair.serve(one).error
        assert pair.check_digests() == before + len(asked)
        pair.settle()
