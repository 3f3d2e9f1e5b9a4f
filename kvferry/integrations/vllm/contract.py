"""The names of vLLM that the adapter needs, and the names that an installed vLLM lacks.

The adapter was tested with the known releases. For a newer release, the adapter checks before
serving that every name still exists and that every method still takes the same parameters. The
behaviour behind the names is not checked.
"""

from collections.abc import Mapping

from kvferry.integrations import contract

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"

NEEDED: Mapping[str, tuple[str, ...]] = {
    # Methods that vLLM calls on a connector. If a method is gone, some work silently stops.
    f"{_CONNECTOR}.base:KVConnectorBase_V1": (
        "__init__(vllm_config, role, kv_cache_config)",
        "_connector_metadata",
        "_kv_cache_config",
        "bind_connector_metadata(connector_metadata)",
        "bind_gpu_block_pool(gpu_block_pool)",
        "bind_kv_cache_manager(kv_cache_manager)",
        "build_connector_meta(scheduler_output)",
        "build_connector_worker_meta()",
        "build_kv_connector_stats(data)",
        "build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        "get_block_ids_with_load_errors()",
        "get_finished(finished_req_ids)",
        "get_handshake_metadata()",
        "get_kv_connector_stats()",
        "get_loaded_kv_cache_group_ids(request)",
        "get_num_new_matched_tokens(request, num_computed_tokens)",
        "get_transfer_results(finished_req_ids)",
        "has_pending_push_work()",
        "on_new_request(request)",
        "register_kv_caches(kv_caches)",
        "reset_cache()",
        "request_finished(request, block_ids)",
        "restore_kv_caches()",
        "save_kv_layer(layer_name, kv_layer, attn_metadata, kwargs)",
        "set_xfer_handshake_metadata_pp_aware(metadata)",
        "shutdown()",
        "start_load_kv(forward_context, kwargs)",
        "supports_sleep_mode(kv_transfer_config)",
        "unregister_kv_caches()",
        "update_connector_output(connector_output)",
        "update_state_after_alloc(request, blocks, num_external_tokens)",
        "wait_for_layer_load(layer_name)",
        "wait_for_save()",
    ),
    f"{_CONNECTOR}.base:SupportsHMA": ("request_finished_all_groups(request, block_ids)",),
    f"{_CONNECTOR}.base:KVConnectorHandshakeMetadata": (),
    f"{_CONNECTOR}.base:KVConnectorMetadata": (),
    f"{_CONNECTOR}.base:KVConnectorRole": ("WORKER",),
    f"{_CONNECTOR}.base:KVConnectorTransferResults": (
        "failed_recving",
        "finished_recving",
        "finished_sending",
    ),
    f"{_CONNECTOR}.base:KVConnectorWorkerMetadata": ("aggregate(other)",),
    f"{_CONNECTOR}.metrics:KVConnectorPromMetrics": (
        "_counter_cls",
        "_gauge_cls",
        "_histogram_cls",
        "observe(transfer_stats_data, engine_idx)",
    ),
    f"{_CONNECTOR}.metrics:KVConnectorStats": (
        "aggregate(other)",
        "data",
        "is_empty()",
        "reduce()",
        "reset()",
    ),
    # Connectors beside kvferry's.
    f"{_CONNECTOR}.multi_connector:MultiConnector": ("_connectors",),
    f"{_CONNECTOR}.offloading.scheduler:OffloadingConnectorScheduler": (
        "_current_batch_allocated_block_ids",
    ),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": (
        "_registry",
        "register_connector(name, module_path, class_name)",
    ),
    "vllm.v1.outputs:KVConnectorOutput": ("finished_recving", "kv_connector_worker_meta"),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": ("P2P",),
    "vllm.v1.metrics.utils:create_metric_per_engine": (),
    # Requests and blocks.
    "vllm.v1.request:Request": (
        "_all_token_ids",
        "abort_immediately",
        "arrival_time",
        "get_finished_reason()",
        "get_skip_reading_prefix_cache()",
        "kv_transfer_params",
        "lora_request",
        "max_tokens",
        "mm_features",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "output_token_ids",
        "prompt_embeds",
        "prompt_is_token_ids",
        "prompt_token_ids",
        "request_id",
        "status",
        "trace_headers",
    ),
    "vllm.v1.request:RequestStatus": (
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_STOPPED",
        "WAITING_FOR_REMOTE_KVS",
    ),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_path"),
    "vllm.multimodal.inputs:MultiModalFeatureSpec": ("identifier", "mm_position"),
    "vllm.multimodal.inputs:PlaceholderRange": ("length", "offset"),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("get_block_ids",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "block_pool",
        "coordinator",
        "evict_blocks(block_ids)",
        "free(request)",
        "new_step_starts()",
    ),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": ("single_type_managers",),
    "vllm.v1.core.block_pool:BlockPool": (
        "blocks",
        "get_num_free_blocks()",
        "hash_block_size",
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": (
        "block_size",
        "num_cached_block",
        "req_to_blocks",
    ),
    # Steps.
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "finished_req_ids",
        "num_scheduled_tokens",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("block_ids", "num_computed_tokens", "req_id"),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "new_block_ids",
        "num_computed_tokens",
        "req_ids",
    ),
    # KV caches.
    "vllm.v1.kv_cache_interface:KVCacheConfig": (
        "kv_cache_groups",
        "has_mixed_precision_kv_cache",
        "num_blocks",
    ),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": (
        "enable_kv_transfer",
        "kv_cache_spec",
        "layer_names",
    ),
    "vllm.v1.kv_cache_interface:AttentionSpec": (
        "block_size",
        "dcp_sharded",
        "dtype",
        "head_size",
        "head_size_v",
        "kv_quant_mode",
        "num_kv_heads",
        "state_content_bytes",
        "tokens_per_state",
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": ("cache_dtype_str",),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("sliding_window",),
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": ("attention_chunk_size",),
    "vllm.v1.kv_cache_interface:MambaSpec": (
        "block_size",
        "dtypes",
        "mamba_type",
        "num_speculative_blocks",
        "shapes",
    ),
    "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first": (),
    "vllm.model_executor.model_loader.utils:get_model_cls": (),
    "vllm.v1.kv_cache_interface:KVQuantMode": ("FP8_PER_TENSOR", "NONE"),
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": ("kv_cache_specs",),
    "vllm.v1.attention.backend:AttentionBackend": ("get_name",),
    # Weights.
    "vllm.model_executor.layers.attention:Attention": (
        "head_size",
        "head_size_v",
        "kv_sharing_target_layer_name",
        "num_kv_heads",
    ),
    "vllm.model_executor.layers.linear:QKVParallelLinear": (
        "head_size",
        "input_size",
        "num_heads",
        "num_kv_heads",
        "quant_method",
        "total_num_kv_heads",
        "v_head_size",
    ),
    "vllm.model_executor.layers.linear:ReplicatedLinear": ("input_size", "quant_method"),
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod": ("apply(layer, x, bias)",),
    "vllm.model_executor.offloader:PrefetchOffloader": (),
    "vllm.model_executor.offloader:get_offloader": (),
    # Configuration.
    "vllm.config:VllmConfig": (
        "cache_config",
        "compilation_config",
        "kv_transfer_config",
        "load_config",
        "model_config",
        "parallel_config",
        "speculative_config",
    ),
    "vllm.config:CacheConfig": ("cache_dtype", "enable_prefix_caching"),
    "vllm.config:CompilationConfig": ("static_forward_context",),
    "vllm.config:KVTransferConfig": (
        "engine_id",
        "kv_buffer_device",
        "kv_connector",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
        "kv_port",
        "kv_role",
    ),
    "vllm.config:LoadConfig": ("load_format",),
    "vllm.config:ModelConfig": (
        "architectures",
        "dtype",
        "enable_sleep_mode",
        "get_total_num_hidden_layers()",
        "hf_config",
        "hf_text_config",
        "model",
        "multimodal_config",
        "quantization",
        "revision",
        "seed",
    ),
    "vllm.config:MultiModalConfig": ("mm_processor_cache_gb",),
    "vllm.config:ParallelConfig": (
        "cp_kv_cache_interleave_size",
        "data_parallel_index",
        "decode_context_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "tensor_parallel_size",
    ),
    "vllm.config:SpeculativeConfig": ("draft_model_config", "method"),
    # Processes and kernels.
    "vllm.v1.executor.abstract:Executor": (
        "collective_rpc(method, timeout, args, kwargs, non_block)",
        "get_class(vllm_config)",
        "parallel_config",
        "sleeping_tags",
    ),
    "vllm.v1.worker.worker_base:WorkerBase": ("get_model()", "model_runner"),
    "vllm.distributed.parallel_state:get_pp_group": (),
    "vllm.distributed.parallel_state:get_tp_group": (),
    "vllm.platforms:current_platform": ("fp8_dtype", "is_cpu", "is_rocm"),
    "vllm._custom_ops:cpu_attn_reshape_and_cache": (),
}
"""Module and name → members; methods stand with their parameters."""


def num_needed() -> int:
    """Number of checked names and members."""
    return contract.num_needed(NEEDED)


def gone() -> list[str]:
    """Names that the installed vLLM lacks, see :func:`kvferry.integrations.contract.gone`; and
    methods that every connector must have now.
    """
    found = contract.gone(NEEDED)
    base = f"{_CONNECTOR}.base:KVConnectorBase_V1"
    if base in found:
        return found
    known = {member.partition("(")[0] for member in NEEDED[base]}
    new = sorted(contract.owner_of(base).__abstractmethods__ - known)
    return found + [
        f"KVConnectorBase_V1 without {method}, which every connector must have now"
        for method in new
    ]
