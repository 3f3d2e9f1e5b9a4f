"""Connectors that are broken in one way each fail the suite between hosts, where they should."""

from pathlib import Path

import pytest

from kvferry.testing.waiting import WAIT_S

pytestmark = pytest.mark.processes

SUITE = """
import pytest
from kvferry.config import KVTransferConfig
from kvferry.testing import MultiHostConnectorConformance

class TestBroken(MultiHostConnectorConformance):
    timeout_s = {timeout_s!r}

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls, hosts):
        return tuple(
            KVTransferConfig(
                kv_connector={connector!r},
                kv_connector_module_path="tests.multi_host.broken",
                kv_role=role,
                kv_connector_extra_config=dict(
                    host=cls.address(host), transport="tcp", cluster_key="k" * 32,
                    lease_duration_s=600, record_digests=True,
                ),
            )
            for role, host in (("kv_producer", hosts.prefill), ("kv_consumer", hosts.decode))
        )
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connector", "test", "assertion"),
    [
        ("SwapsTwoBlocks", "prefix", ">*[[]answer.token_ids for answer in answers[]] == expected"),
        ("SwapsTwoBlocks", "lent", "E*AssertionError: lease * arrived wrong*"),
        pytest.param(
            "ForgetsToConfirm",
            "undivided",
            "E*NotInTimeError: every block ({'prefill': * are in use) did not come within 20 s",
            marks=pytest.mark.timed("Whatever the run within this one waits for has 20 s."),
        ),
    ],
    ids=["swaps-tokens", "swaps-digests", "forgets"],
)
def test_a_broken_connector_fails(pytester, monkeypatch, network, connector, test, assertion):
    # `network` is asked for so that this is skipped where there can be no hosts.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    timeout_s = 20.0 if connector == "ForgetsToConfirm" else WAIT_S
    pytester.makepyfile(SUITE.format(connector=connector, timeout_s=timeout_s))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", test)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([assertion])
