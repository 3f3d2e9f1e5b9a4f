"""The names of SGLang that the backend needs."""

from collections.abc import Mapping

from kvferry.integrations import releases

_CONN = "sglang.srt.disaggregation.common.conn"
_DECODE = "sglang.srt.disaggregation.decode"
_UTILS = "sglang.srt.disaggregation.utils"

_SEND = "send(kv_indices, state_indices, num_kv_tokens, indices_event)"
_METADATA = (
    "send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, destination, "
    "device_kv_indices)"
)

NEEDED: Mapping[str, tuple[str, ...]] = {
    # The door.
    "sglang.srt.plugins.hook_registry:HookRegistry": ("register(target, hook, hook_type, source)",),
    "sglang.srt.plugins.hook_registry:HookType": ("AFTER", "AROUND", "REPLACE"),
    "sglang.srt.arg_groups.choices:add_disagg_transfer_backend_choices": (),
    f"{_UTILS}:TransferBackend": ("FAKE",),
    f"{_UTILS}:KVClassType": ("BOOTSTRAP_SERVER", "KVARGS", "MANAGER", "RECEIVER", "SENDER"),
    f"{_UTILS}:get_kv_class": (),
    f"{_UTILS}:DisaggregationMode": ("DECODE", "PREFILL"),
    # The classes that SGLang calls.
    f"{_CONN}:CommonKVManager": (
        "__init__(args, disaggregation_mode, server_args, is_mla_backend)",
        "clear_deferred_abort_state(bootstrap_room)",
        "failure_lock",
        "failure_records",
        "is_abort_release_safe(bootstrap_room, required_acks)",
        "prefill_info_table",
        "record_failure(bootstrap_room, failure_reason)",
        "register_to_bootstrap()",
        "request_status",
        "try_ensure_parallel_info(bootstrap_addr)",
        "update_status(bootstrap_room, status)",
    ),
    f"{_CONN}:CommonKVSender": (
        "__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)",
        "abort()",
        "clear()",
        "conclude_state",
        "failure_exception()",
        "init(num_kv_indices, aux_index)",
        "poll()",
        "poll_pp_consensus()",
        _SEND,
    ),
    f"{_CONN}:CommonKVReceiver": (
        "__init__(mgr, bootstrap_addr, bootstrap_room)",
        "abort()",
        "abort_notified",
        "clear()",
        "conclude_state",
        "ensure_abort_notified(force_arm)",
        "failure_exception()",
        "init(prefill_dp_rank)",
        "init_time",
        "poll()",
        _METADATA,
    ),
    f"{_CONN}:CommonKVBootstrapServer": ("__init__(host, port)", "_setup_routes()", "app"),
    f"{_CONN}:KVTransferError": (),
    f"{_CONN}:PrefillServerInfo": ("dp_size", "follow_bootstrap_room"),
    "sglang.srt.disaggregation.base.conn:KVArgs": (
        "aux_data_ptrs",
        "aux_item_lens",
        "num_draft_entries",
        "page_size",
        "state_types",
        "system_dp_rank",
    ),
    "sglang.srt.disaggregation.base.conn:KVPoll": (
        "Bootstrapping",
        "Failed",
        "Success",
        "Transferring",
        "WaitingForInput",
    ),
    "sglang.srt.disaggregation.base.conn:KVTransferDestination": ("DEVICE",),
    f"{_UTILS}:MetadataBuffers": ("bootstrap_room", "cached_tokens", "output_ids"),
    "sglang.srt.distributed.parallel_state:GroupCoordinator": (
        "all_gather_object(obj)",
        "broadcast_object(obj, src)",
    ),
    # The places that know a request, and the pools.
    "sglang.srt.disaggregation.prefill:PrefillBootstrapQueue": (
        "_init_kv_manager()",
        "create_sender(req, num_kv_heads)",
    ),
    f"{_DECODE}:DecodeTransferQueue": (
        "deferred_kv_release_timeout",
        "enable_deferred_kv_release",
    ),
    f"{_DECODE}:DecodePreallocQueue": (
        "_create_receiver_and_enqueue(req, is_rebootstrap)",
        "_init_kv_manager()",
        "transfer_backend",
        "transfer_queue",
    ),
    "sglang.srt.managers.scheduler_pp_mixin:SchedulerPPMixin": (
        "process_decode_transfer_queue(release_rids)",
    ),
    "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager": (
        "record_weight_version_after_update(weight_version)",
    ),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool": (
        "head_dim",
        "head_num",
        "k_buffer",
        "kv_cache_layout",
        "v_buffer",
        "v_head_dim",
    ),
    "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool": ("kv_buffer", "kv_cache_dim"),
    "sglang.srt.mem_cache.memory_pool:KVCache": (
        "dtype",
        "layer_num",
        "page_size",
        "start_layer",
        "store_dtype",
    ),
    "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool": (
        "full_kv_pool",
        "layers_mapping",
        "swa_kv_pool",
    ),
    "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool": (
        "full_attention_layer_id_mapping",
        "full_kv_pool",
        "mamba_pool",
    ),
    "sglang.srt.mem_cache.memory_pool:MambaPool": (
        "State",
        "_slot_siblings",
        "conv_shard_groups",
        "conv_slice_axis",
        "enable_linear_replayssm",
        "mamba_cache",
        "mamba_layer_ids",
    ),
    "sglang.srt.layers.attention.mamba.mamba:MambaMixer2": (
        "head_dim",
        "norm",
        "num_heads",
        "ssm_state_size",
    ),
    "sglang.srt.layers.attention.mamba.mixer2_rms_norm_gated:Mixer2RMSNormGated": ("n_groups",),
    "sglang.srt.lora.lora_registry:LoRARef": ("lora_name",),
    "sglang.srt.lora.lora:LoRAAdapter": (
        "added_tokens_embeddings",
        "config",
        "embedding_layers",
        "layers",
    ),
    "sglang.srt.layers.linear:QKVParallelLinear": (
        "head_size",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "quant_method",
        "v_head_size",
    ),
    "sglang.srt.layers.radix_attention:RadixAttention": ("layer_id",),
    "sglang.srt.runtime_context:get_disagg": (),
    "sglang.srt.runtime_context:get_observability": (),
    "sglang.srt.runtime_context:get_parallel": (),
    "sglang.srt.runtime_context:get_serving": (),
}
"""Module and name → members; methods stand with their parameters."""


def check_release(version: str) -> None:
    """Refuses a release of SGLang that does not fit, or that lacks a needed name.

    Raises:
        ImportError: see :func:`kvferry.integrations.releases.check_release`.
    """
    releases.check_release("SGLang", version, NEEDED, also_known=True)
