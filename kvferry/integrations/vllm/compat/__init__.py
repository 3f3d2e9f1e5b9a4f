"""All code of the adapter that touches vLLM. A new release of vLLM needs changes only here.

The rest of the adapter imports vLLM's names from this folder, and asks this folder for everything
that vLLM keeps in private places. This file holds the code that is equal for all releases. The
object ``release``, from the module of the installed release, holds the rest:

===========  ===========================================================================
module       difference between the release and the next newer release
===========  ===========================================================================
``v0_33``    the newest: all answers of ``release``; newer releases are tried with it
``v0_32``    tells no connector when the memory of KV caches goes and comes back
``v0_31``    does not ask which blocks a load fills, nor where loaded tokens come from
``v0_30``    KV cache specs do not say whether DCP shares the tokens: it always does
``v0_29``    a failed load is reported by block, in one cache group; no cache manager
``v0_28``    latents have one dim less; specs name a compression by its ratio
===========  ===========================================================================
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.kv_cache_interface import KVQuantMode, UniformTypeKVCacheSpecs
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

from kvferry.integrations.checkpoint import downloaded
from kvferry.integrations.vllm.release import module_of

if TYPE_CHECKING:
    from kvferry.integrations.vllm.compat.v0_33 import Release

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "RequestStatus",
    "SupportsHMA",
    "create_metric_per_engine",
    "release",
]

T = TypeVar("T")

release: "Release" = import_module(f"{__name__}.{module_of(vllm.__version__)}").Release()
"""Answers of the installed release."""

PLAIN_QUANT_MODES = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
"""Modes of caches whose cells are elements of one dtype and nothing else."""

_FP8_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}

_ALL_BLOCKS = 1 << 40
"""Number of blocks that no request can reach."""


# ---- ranks -------------------------------------------------------------------------------------


def rank_of_this_worker(vllm_config: Any) -> int:
    """This process's rank in the engine, ``pp_rank * tp + tp_rank``."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp = vllm_config.parallel_config.tensor_parallel_size
    return int(get_pp_group().rank_in_group * tp + get_tp_group().rank_in_group)


def from_first_rank(value: T) -> T:
    """The value of the engine's rank 0, on every rank. All ranks must call it together."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    shared = get_tp_group().broadcast_object(value, src=0)
    found: T = get_pp_group().broadcast_object(shared, src=0)
    return found


def of_all_stages(value: T) -> list[T]:
    """The values of all pipeline stages, first stage first. All ranks must call it together."""
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return [value]
    values: list[T] = [value] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


# ---- requests ----------------------------------------------------------------------------------


def drop_last_prompt_token(request: Any) -> None:
    """Drops the last prompt token of a new request and limits the answer to one token.

    A request with a single prompt token, or with prompt log-probabilities, stays as it is.
    """
    if request.num_prompt_tokens > 1 and not request.get_skip_reading_prefix_cache():
        cut_prompt(request, request.num_prompt_tokens - 1)


def cut_prompt(request: Any, num_tokens: int) -> None:
    """Cuts the prompt of a request to the first tokens and limits the answer to one token.

    The request must have computed nothing; at least one token must remain.
    """
    # An engine in the client's process shares these objects with the client.
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:num_tokens]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:num_tokens]
    if request.prompt_is_token_ids is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:num_tokens]
    del request._all_token_ids[num_tokens:]  # noqa: SLF001 (the copy has no public name)
    request.num_prompt_tokens = num_tokens
    request.max_tokens = 1
    params = request.sampling_params
    if params is not None and params.min_tokens > 1:  # vLLM 0.28 looks at it before `max_tokens`
        request.sampling_params = copy.copy(params)  # the other one may belong to other requests
        request.sampling_params.min_tokens = 1


def adapter_of(request: Any) -> tuple[str, str] | None:
    """Name and path of a request's LoRA adapter; ``None`` without an adapter."""
    lora = request.lora_request
    return None if lora is None else (str(lora.lora_name), str(lora.lora_path))


def inputs_of(request: Any) -> list[tuple[str, int, int]]:
    """Identifier, first placeholder and number of placeholders of each multimodal input."""
    return [
        (str(feature.identifier), feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
    ]


def hashes_inputs(vllm_config: Any) -> bool:
    """Whether the identifiers of multimodal inputs are hashes of the content.

    If neither of its two caches would use hashes, vLLM numbers the inputs instead, and two servers
    use the same numbers.
    """
    multimodal = vllm_config.model_config.multimodal_config
    return bool(
        multimodal is None
        or multimodal.mm_processor_cache_gb
        or vllm_config.cache_config.enable_prefix_caching
    )


def embeddings_of(request: Any, num_tokens: int) -> tuple[torch.Tensor, list[bool]] | None:
    """The embeddings of the first tokens, and for each of these whether a token id stands there.

    The list is empty if no position holds a token id. ``None`` for a prompt of token ids.
    """
    if request.prompt_embeds is None:
        return None
    return request.prompt_embeds[:num_tokens], (request.prompt_is_token_ids or [])[:num_tokens]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor on the host, copied only if the tensor is not contiguous."""
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data


def adapter_folder(path: str) -> Path | None:
    """The folder with a LoRA adapter's files; ``None`` if the files are not on this machine."""
    folder = Path(path).expanduser()
    return folder if folder.exists() else downloaded(path, None)


# ---- KV cache ----------------------------------------------------------------------------------


def spec_of_layer(group: Any, layer_name: str) -> Any:
    """The KV cache spec of one layer of a KV cache group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer_name]
    return spec


def attention_layer(vllm_config: Any, layer_name: str) -> Any:
    """The attention module of a layer."""
    return vllm_config.compilation_config.static_forward_context[layer_name]


def calling_worker() -> Any:
    """The worker that registers its caches right now; ``None`` outside of vLLM's own call.

    vLLM gives a connector the caches of the rank but not the model. Only the model's modules know
    which weights write the caches, so this function searches the callers for the worker.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001 (no other name exists)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(type(caller), "get_model") and hasattr(caller, "model_runner"):
            return caller
        frame = frame.f_back
    return None


def backend_of(layer: Any) -> str:
    """Name of the attention backend of a layer."""
    return str(layer.get_attn_backend().get_name())


def cache_dtype(vllm_config: Any, spec: Any) -> str:
    """The dtype of a cache's elements. vLLM stores fp8 as ``uint8`` and names fp8 in the config."""
    name = str(spec.dtype).removeprefix("torch.")
    setting = vllm_config.cache_config.cache_dtype
    if name != "uint8" or setting == "fp8_e5m2":
        return _FP8_DTYPES[setting] if name == "uint8" else name
    return fp8_dtype() if setting in _FP8_DTYPES or setting == "fp8_per_token_head" else name


def fp8_dtype() -> str:
    """The fp8 dtype of this platform's kernels: some GPUs have another format."""
    from vllm.platforms import current_platform

    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def shuffles_indexers() -> bool:
    """Whether an indexer's values lie in tiles, as ROCm's kernels hold them."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


def make_scales(layer: Any, kv_cache: torch.Tensor) -> None:
    """Makes a layer with scales per token and head find the scales in the cache now.

    Otherwise the layer does so at the first computation and sets all scales to 1, including scales
    that loads have written by then.
    """
    layer.impl._ensure_scale_caches(kv_cache)  # noqa: SLF001 (there is no public way)


# ---- recurrent layers --------------------------------------------------------------------------


def undivided_state_shapes(vllm_config: Any) -> list[tuple[int, ...]]:
    """Shapes of a recurrent layer's states as they would be with one TP rank.

    The shapes on one rank are not enough: a rank's single group of Mamba2 may be one of several
    groups, or a replica of the only group.
    """
    from vllm.model_executor.model_loader.utils import get_model_cls

    alone = copy.copy(vllm_config)
    alone.parallel_config = copy.copy(vllm_config.parallel_config)
    alone.parallel_config.tensor_parallel_size = 1
    model: Any = get_model_cls(vllm_config.model_config)
    return [tuple(shape) for shape in model.get_mamba_state_shape_from_config(alone)]


def convolutions_have_channels_first() -> bool:
    """Whether a convolution's state lies channel by channel, and not input by input."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def kind_of_states(spec: Any) -> str:
    """The kind of a recurrent layer as vLLM names the kind: ``MAMBA2``, ``GDN_ATTN``."""
    return str(spec.mamba_type.name)


def delta_order() -> str:
    """Order of a head's matrix in a gated delta net's kernel: values (v) first, or keys (k) first.

    vLLM shapes the matrix for the GPU kernels; CPU kernels read the same memory in the other order.
    """
    from vllm.platforms import current_platform

    return "kv" if current_platform.is_cpu() else "vk"


# ---- prefix cache ------------------------------------------------------------------------------


def may_leave_blocks_out(kv_cache_manager: Any) -> bool:
    """Whether :func:`leave_blocks_out` keeps every cell of the blocks out of the prefix cache.

    The answer is no if hits may end inside a block: vLLM then also makes a hit of a part of a
    block.
    """
    managers = kv_cache_manager.coordinator.single_type_managers
    unit = kv_cache_manager.block_pool.hash_block_size
    return all(manager.block_size == unit for manager in managers)


def leave_blocks_out(kv_cache_manager: Any, table: int, request_id: str, num_tokens: int) -> None:
    """Keeps the blocks that begin before a token from becoming prefix hits.

    The caller must call this function after the allocation of a load's blocks and before vLLM
    hashes them. vLLM hashes blocks that it has not counted yet, so this function counts the blocks.

    Args:
        kv_cache_manager: the scheduler's cache manager.
        table: index of the KV cache group.
        request_id: owner of the blocks.
        num_tokens: number of tokens, from the request's first token.
    """
    manager = kv_cache_manager.coordinator.single_type_managers[table]
    counted = manager.num_cached_block
    counted[request_id] = max(counted.get(request_id, 0), -(-num_tokens // manager.block_size))


def before_each_step(kv_cache_manager: Any, look: Callable[[], None]) -> None:
    """Makes vLLM call ``look`` at the start of each scheduling step, before any prefix lookup.

    This function patches vLLM: the scheduler calls no method of connectors at this point. A method
    of ``KVConnectorBase_V1``, called at the top of ``Scheduler.schedule``, could replace the patch.
    """
    begin = kv_cache_manager.new_step_starts

    def new_step_starts() -> None:
        look()
        begin()

    kv_cache_manager.new_step_starts = new_step_starts


def free_blocks(kv_cache_manager: Any) -> tuple[int, int]:
    """Number of free blocks, and number of all blocks."""
    pool = kv_cache_manager.block_pool
    return int(pool.get_num_free_blocks()), len(pool.blocks)


def begin_anew(kv_cache_manager: Any, request: Any) -> None:
    """Restarts a waiting request with loaded blocks from the first token.

    The caller must know that nothing writes to these blocks any more. A request in another
    state is left alone.
    """
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        kv_cache_manager.free(request)
        request.num_computed_tokens = 0


def forget_prefixes(kv_cache_manager: Any) -> set[str]:
    """Empties the prefix cache, including blocks in use; returns the requests with blocks.

    Later blocks of these requests do not become prefix hits either, because they depend
    on the old KV.
    """
    pool = kv_cache_manager.block_pool
    kv_cache_manager.evict_blocks(set(range(len(pool.blocks))))
    coordinator = kv_cache_manager.coordinator
    if "cache_blocks" not in vars(coordinator):  # not replaced yet
        coordinator.cache_blocks = functools.partial(
            _cache_blocks, coordinator.single_type_managers, coordinator.cache_blocks
        )
    for manager in coordinator.single_type_managers:
        for request_id, blocks in manager.req_to_blocks.items():
            if blocks:
                manager.num_cached_block[request_id] = _ALL_BLOCKS
    return requests_with_blocks(kv_cache_manager)


def _cache_blocks(
    managers: Sequence[Any], original: Callable[..., None], request: Any, *args: Any, **kwargs: Any
) -> None:
    """Makes prefix hits of a request's blocks, unless :func:`forget_prefixes` has marked the
    request: if hits may end inside a block, vLLM hashes a part of a block without counting it.
    """
    counted = [manager.num_cached_block.get(request.request_id) for manager in managers]
    if _ALL_BLOCKS not in counted:
        original(request, *args, **kwargs)


def requests_with_blocks(kv_cache_manager: Any) -> set[str]:
    """The requests with blocks, including ended requests whose blocks are lent or loaded."""
    managers = kv_cache_manager.coordinator.single_type_managers
    return {name for each in managers for name, blocks in each.req_to_blocks.items() if blocks}


# ---- connectors beside ours --------------------------------------------------------------------


def register_connector(name: str, module: str) -> None:
    """Registers a connector with vLLM under a name.

    MultiConnector uses the name to find the class that reads a connector's statistics, also for a
    connector loaded from outside.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:  # noqa: SLF001 (there is no other way to ask)
        KVConnectorFactory.register_connector(name, module, name)


def connectors_beside(connector: Any) -> tuple[list[Any], str] | None:
    """The other connectors of the MultiConnector that calls the given connector right now, and the
    MultiConnector's policy for failed loads; ``None`` without a MultiConnector.

    A MultiConnector does not introduce itself or the other connectors to a connector, so this
    function searches the callers for the MultiConnector.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001 (no other name exists)
    while frame is not None:
        caller = frame.f_locals.get("self")
        connectors = getattr(caller, "_connectors", ())
        if isinstance(connectors, list) and any(each is connector for each in connectors):
            others = [each for each in connectors if each is not connector]
            transfer = caller._vllm_config.kv_transfer_config  # noqa: SLF001 (its connectors' has no name)
            return others, str(transfer.kv_load_failure_policy)
        frame = frame.f_back
    return None


def has_handshake(connector: Any) -> bool:
    """Whether a connector describes its ranks to other engines."""
    own = type(connector).get_handshake_metadata
    return own is not KVConnectorBase_V1.get_handshake_metadata


def finish_copies_from(connector: Any, block_ids: Iterable[int]) -> None:
    """Makes vLLM's OffloadingConnector finish its copies from these blocks before the step runs.

    OffloadingConnector does so for blocks of requests in the step, and for its own loads. It
    does not know about loads of other connectors.
    """
    scheduler = getattr(connector, "connector_scheduler", None)
    allocated = getattr(scheduler, "_current_batch_allocated_block_ids", None)
    if allocated is not None:
        allocated.update(block for block in block_ids if block)


# ---- CPU ---------------------------------------------------------------------------------------


def ask_for_amx() -> None:
    """Asks the kernel for AMX tiles, if the CPU has them.

    vLLM asks for AMX only in prompt kernels. An engine that loads the KV of every prompt would
    die of SIGILL at the first decode step with bfloat16.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():  # noqa: SLF001 (as vLLM asks)
        torch.cpu._init_amx()  # noqa: SLF001 (there is no public name)


def write_cpu_block(
    isa: str, key_ND: torch.Tensor, value_ND: torch.Tensor, cache_dtype_name: str
) -> torch.Tensor:
    """One block of one head as CPU attention stores the block, written by vLLM's own operation.

    Args:
        isa: the instruction set of the block's format.
        key_ND: [tokens of a block, head size], of the model's dtype.
        value_ND: [tokens of a block, head size], of the model's dtype.
        cache_dtype_name: the cache dtype in the engine's cache config.

    Returns:
        [2 * tokens * head size], of the cache's dtype: the K part, then the V part.
    """
    from vllm import _custom_ops as ops

    tokens, head_size = key_ND.shape
    quantized = cache_dtype_name in _FP8_DTYPES
    stored = torch.uint8 if quantized else key_ND.dtype
    block = torch.zeros(1, 1, 2 * tokens, head_size, dtype=stored)
    key_cache, value_cache = block.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key_ND.unsqueeze(1),
        value_ND.unsqueeze(1),
        key_cache,
        value_cache,
        torch.arange(tokens, dtype=torch.int64),
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype=cache_dtype_name,
    )
    return block.flatten()


# ---- weights -----------------------------------------------------------------------------------


def watch_calls(vllm_config: Any, called: Callable[[Any, object], None]) -> None:
    """Calls ``called`` before every call of an engine's scheduler process to the workers.

    All such calls go through the executor's ``collective_rpc``, and connectors do not receive the
    executor. This function therefore replaces the method of the executor's class, once per process.
    ``called`` gets the executor and the target of the call: a method's name or a function.
    ``called`` may run on any thread. A method of connectors that vLLM calls before weights or KV
    cache change could replace the patch.
    """
    from vllm.v1.executor.abstract import Executor

    kind: Any = Executor.get_class(vllm_config)
    parallel = vllm_config.parallel_config  # the executor's object, also if configs were copied
    _watchers[id(parallel)] = parallel, called
    if kind in _watched:
        return
    _watched.add(kind)
    original = kind.collective_rpc

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = _watchers.get(id(self.parallel_config))
        if watcher is not None:
            watcher[1](self, method)
        return original(self, method, *args, **kwargs)

    kind.collective_rpc = collective_rpc


def unwatch_calls(vllm_config: Any) -> None:
    """Undoes :func:`watch_calls`. Idempotent."""
    _watchers.pop(id(vllm_config.parallel_config), None)


_watchers: dict[int, tuple[Any, Callable[[Any, object], None]]] = {}
"""Id of a parallel config → the config, which keeps the id valid, and the function to call."""
_watched: set[type] = set()
"""Executor classes whose ``collective_rpc`` is replaced."""

LETS_MEMORY_GO = frozenset({"sleep", "discard"})
"""Methods of a worker that may free the memory of KV cache and weights."""

KEEPS_WEIGHTS = frozenset(
    {
        *("add_lora", "check_health", "compile_or_warm_up_model", "compute_weight_checksums"),
        *("determine_available_memory", "execute_dummy_batch", "execute_model"),
        *("get_encoder_timing_stats", "get_kv_cache_spec", "get_kv_connector_handshake_metadata"),
        *("get_model_inspection", "get_supported_kv_cache_layouts", "get_supported_tasks"),
        *("initialize_from_config", "list_loras", "pin_lora", "profile", "remove_lora"),
        *("reset_encoder_cache", "reset_mm_cache", "sample_tokens", "save_sharded_state"),
        *("set_kv_cache_layout", "shutdown", "shutdown_weight_transfer_engine"),
        *("supports_draft_weight_updates", "synchronize_device", "take_draft_token_ids"),
        "update_max_model_len",
    }
)
"""Methods of a worker that leave the weights alone. Any other method, or a function, may change
them."""


def weights_sleep(executor: Any) -> bool:
    """Whether the memory of an engine's weights is released at present."""
    return "weights" in executor.sleeping_tags


def models_of(worker: Any) -> dict[str, torch.nn.Module]:
    """Prefix for names → a worker's model: the served model, and the draft model if there is
    any.
    """
    models = {"": worker.get_model()}
    # Some kinds of model runners do not know draft models.
    find = getattr(worker.model_runner, "get_draft_model", None)
    draft = None if find is None else find()
    if isinstance(draft, torch.nn.Module):
        models["draft."] = draft
    return models


def hidden_weights(model: torch.nn.Module) -> dict[str, object]:
    """Name of a parameter that vLLM has emptied → the operation that holds the former content.

    On CPUs, the kernels of linear layers keep the weights in their own memory.
    """
    return {
        f"{name}.weight": module.cpu_linear
        for name, module in model.named_modules()
        if hasattr(module, "cpu_linear") and hasattr(module, "weight") and not len(module.weight)
    }


# ---- model -------------------------------------------------------------------------------------


def layer_order(names: Sequence[str]) -> dict[str, int]:
    """Layer name → index of the layer in the model.

    The index is the number in the name. If names have several numbers or two layers share a number
    (an indexer beside the attention layer), the index is the place in the natural order of all
    names.

    >>> layer_order(["model.layers.0.self_attn.attn", "model.layers.10.self_attn.attn"])
    {'model.layers.0.self_attn.attn': 0, 'model.layers.10.self_attn.attn': 10}
    >>> layer_order(["layers.1.attn", "layers.0.indexer", "layers.0.attn"])
    {'layers.0.attn': 0, 'layers.0.indexer': 1, 'layers.1.attn': 2}
    """
    numbers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in names}
    firsts = [found[0] for found in numbers.values() if len(found) == 1]
    if len(set(firsts)) == len(names):
        return {name: found[0] for name, found in numbers.items()}
    ordered = sorted(names, key=lambda name: (numbers[name], name))
    return {name: index for index, name in enumerate(ordered)}
