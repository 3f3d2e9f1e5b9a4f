"""Turns the connector's extra keys into the control channel's options."""

from kvferry.connectors.pull.config import PullConfig
from kvferry.control.options import ControlOptions


def control_options(extra: PullConfig, num_blocks: int) -> ControlOptions:
    """The options of an engine with ``num_blocks`` KV blocks per rank.

    Raises:
        ConfigError: ``curve_keys`` cannot be used.
    """
    return ControlOptions(
        lease_duration_s=extra.lease_duration_s,
        max_leased_blocks=max(1, int(num_blocks * extra.max_leased_fraction)),
        request_timeout_s=extra.request_timeout_s,
        curve=extra.curve(),
    )
