"""vLLM's ``kv_transfer_config`` as ours, its extra keys checked."""

from typing import Any, Literal

import msgspec

from kvferry.config import KVTransferConfig, parse_struct
from kvferry.connectors.pull.config import PullConfig
from kvferry.errors import ConfigError

WeightsCheck = Literal["sample", "full", "config"]


class VllmConnectorConfig(PullConfig, frozen=True, kw_only=True):
    """``kv_connector_extra_config`` of the adapter: the PullConnector's keys and those below."""

    transport: str | tuple[str, ...] = ("vm", "tcp")
    """Transports that move memory which vLLM owns, best first."""
    weights_check: WeightsCheck = "sample"
    """How two checkpoints are told apart: by three slices of every tensor, by every byte (reads
    all weights once more at start), or by the model's config alone. So are two LoRA adapters of
    one name."""


def transfer_config(vllm_config: Any) -> tuple[KVTransferConfig, VllmConnectorConfig]:
    """Our config of a vLLM engine.

    Every data-parallel engine listens on a port of its own, ``kv_port`` plus its index, and tells
    ``advertise_port`` plus its index. Ports that are given for transports count its ranks on.

    Raises:
        ConfigError: an unknown or wrong key in ``kv_connector_extra_config``, or a setting of the
            engine that the adapter does not serve.
    """
    theirs = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    extra = parse_struct(
        VllmConnectorConfig,
        theirs.kv_connector_extra_config,
        f"kv_connector_extra_config of {theirs.kv_connector}",
    )
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
