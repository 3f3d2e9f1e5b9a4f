"""The keys of kvferry inside SGLang. SGLang's options have no place for them."""

import json
import os
import uuid
from pathlib import Path
from typing import Any, Literal

from kvferry.config import KVTransferConfig, parse_struct
from kvferry.connectors.pull.config import PullConfig
from kvferry.errors import ConfigError
from kvferry.integrations.checkpoint import WeightsCheck

VARIABLE = "KVFERRY_SGLANG_CONFIG"
"""Environment variable with the keys: JSON, or the path of a file with JSON."""
ANY_NUMBER = 1 << 40
"""Number of blocks that leases may pin: SGLang decides how many prompts it holds, and two prompts
that share a prefix count its blocks twice."""


class SGLangConfig(PullConfig, frozen=True, kw_only=True):
    """Keys of the backend: the PullConnector's keys and the keys below. All have defaults."""

    engine_id: str = ""
    """Unique name of this engine; by default random."""
    kv_port: int = 0
    """TCP port of the control channel; data-parallel engine n listens on ``kv_port`` + n. 0 takes
    a free port: decode servers learn the port from the bootstrap server."""
    weights_check: WeightsCheck = "sample"
    """How two checkpoints are told apart: by three slices of every tensor, by every byte (reads all
    weights once more at start), or by the model's config alone."""
    early_load: Literal["off", "late", "now"] = "now"
    """Time at which this engine begins to load a prompt that the source still computes, see
    :attr:`PullConfig.early_load`. SGLang gives a request its pages before the prompt is computed,
    so an early load costs no memory."""


def transfer_config(
    role: Literal["kv_producer", "kv_consumer"], dp_rank: int
) -> tuple[KVTransferConfig, SGLangConfig]:
    """The kvferry config of an SGLang engine, from :data:`VARIABLE`.

    Args:
        role: the ``kv_role`` of the engine.
        dp_rank: index of the data-parallel engine.

    Raises:
        ConfigError: the variable holds no JSON object, or an unknown or wrong key.
    """
    extra = parse_struct(SGLangConfig, _given(), VARIABLE)
    config = KVTransferConfig(
        kv_connector="PullConnector",
        kv_role=role,
        engine_id=f"{extra.engine_id}-{dp_rank}" if extra.engine_id else uuid.uuid4().hex,
        kv_port=extra.kv_port and extra.kv_port + dp_rank,
    )
    return config, extra


def _given() -> dict[str, Any]:
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return {}
    try:
        if not text.startswith("{"):
            text = Path(text).read_text()
        values = json.loads(text)
    except OSError as error:
        raise ConfigError(
            f"{VARIABLE}: {text} cannot be read: {error.strerror}; write JSON or a path"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: it is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{VARIABLE}: expected a JSON object, got {type(values).__name__}")
    return values
