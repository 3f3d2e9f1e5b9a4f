"""Turns the connector's extra keys into the control channel's options."""

import msgspec

from kvferry.config import parse_struct
from kvferry.connectors.pull.config import PullConfig
from kvferry.control.options import ControlOptions
from kvferry.errors import ConfigError


def control_options(extra: PullConfig) -> ControlOptions:
    """The options of every control client and server of an engine.

    Raises:
        ConfigError: ``curve_keys`` or ``control_config`` cannot be used.
    """
    own = {
        "lease_duration_s": extra.lease_duration_s,
        "max_leased_blocks": extra.max_leased_blocks,
        "request_timeout_s": extra.request_timeout_s,
        "curve": extra.curve(),
    }
    for key in extra.control_config:
        if key in own:
            where = "curve_keys" if key == "curve" else key
            raise ConfigError(
                f"control_config: {key!r} does not belong here; write {where} beside control_config"
            )
    options = parse_struct(ControlOptions, extra.control_config, "control_config")
    try:
        return msgspec.structs.replace(options, **own)
    except ValueError as error:
        raise ConfigError(f"control_config: {error}") from error
