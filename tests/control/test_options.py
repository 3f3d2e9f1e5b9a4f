"""Timeouts and limits."""

import pytest

from kvferry.config import parse_struct
from kvferry.control.options import ControlOptions
from kvferry.errors import ConfigError


def test_a_lease_is_renewed_every_sixth_of_its_duration():
    assert ControlOptions().renewals_per_lease == 6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lease_duration_s", 0),
        ("lease_duration_s", float("nan")),
        ("request_timeout_s", -1),
        ("heartbeat_s", float("inf")),
        ("renewals_per_lease", 0),
        ("max_message_bytes", 0),
        ("max_leased_blocks", -1),
        ("takeover_after_s", 31),
        ("takeover_after_s", 0),
    ],
)
def test_a_value_out_of_range_is_named(key, value):
    with pytest.raises(ConfigError, match=key):
        parse_struct(ControlOptions, {key: value}, "extra")


def test_leases_may_be_switched_off():
    assert ControlOptions(max_leased_blocks=0).leased_blocks_cap(100) == 0
