"""Conversion of vLLM's ``kv_transfer_config`` into kvferry's, with checked extra keys."""

import logging
from typing import Any

import msgspec

from kvferry.config import KVTransferConfig, parse_struct
from kvferry.connectors.pull.config import PullConfig
from kvferry.errors import ConfigError
from kvferry.integrations.checkpoint import WeightsCheck

logger = logging.getLogger(__name__)


class VllmConnectorConfig(PullConfig, frozen=True, kw_only=True):
    """``kv_connector_extra_config`` of the adapter: the PullConnector's keys and the keys below."""

    weights_check: WeightsCheck = "sample"
    """How two checkpoints are told apart: by three slices of every tensor, by every byte (reads all
    weights once more at start), or by the model's config alone. LoRA adapters with equal names are
    told apart in the same way."""


def transfer_config(vllm_config: Any) -> tuple[KVTransferConfig, VllmConnectorConfig]:
    """The kvferry config of a vLLM engine.

    Every data-parallel engine listens on ``kv_port`` plus the engine's index and tells peers
    ``advertise_port`` plus the index. A port in ``transport_config`` grows by the index times the
    number of ranks per engine.

    Raises:
        ConfigError: an unknown or wrong key in ``kv_connector_extra_config``, or a setting of the
            engine that the adapter does not serve.
    """
    theirs = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    extra = _extra_of(theirs)
    if parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            f"prefill_context_parallel_size: {parallel.prefill_context_parallel_size}; this "
            "adapter serves 1: vLLM names the ranks of one stage to a connector by their TP rank "
            "alone"
        )
    index = parallel.data_parallel_index
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    extra = msgspec.structs.replace(
        extra,
        advertise_port=extra.advertise_port and extra.advertise_port + index,
        transport_config={
            name: {
                key: value + index * ranks if value and key in ("port", "advertise_port") else value
                for key, value in keys.items()
            }
            for name, keys in extra.transport_config.items()
        },
    )
    config = KVTransferConfig(
        kv_connector="PullConnector",
        kv_role=theirs.kv_role,
        engine_id=theirs.engine_id,
        kv_port=theirs.kv_port and theirs.kv_port + index,
        kv_buffer_device=theirs.kv_buffer_device,
        kv_connector_extra_config=theirs.kv_connector_extra_config,
        kv_load_failure_policy=theirs.kv_load_failure_policy,
    )
    return config, extra


def may_sleep(kv_transfer_config: Any) -> bool:
    """Whether the transports that an engine names serve caches whose memory is let go in sleep
    mode; logs the reason if not.

    Raises:
        ConfigError: an unknown or wrong key in ``kv_connector_extra_config``.
    """
    extra = _extra_of(kv_transfer_config)
    try:
        extra.check_sleep()
    except ConfigError as error:
        logger.error("sleep mode: %s", error)
        return False
    return True


def _extra_of(kv_transfer_config: Any) -> VllmConnectorConfig:
    return parse_struct(
        VllmConnectorConfig,
        kv_transfer_config.kv_connector_extra_config,
        f"kv_connector_extra_config of {kv_transfer_config.kv_connector}",
    )
