"""All that the adapter takes from vLLM. With a new release, this is the folder to look at.

The rest of the adapter imports vLLM's names from here, and asks here for whatever vLLM keeps in
places of its own. This file holds what is the same in all releases. What is not, ``release``
answers, an object of the module for the installed one:

===========  ===========================================================================
module       how that release differs from the next newer one
===========  ===========================================================================
``v0_32``    the newest: what ``release`` answers; newer releases are tried with it
``v0_31``    does not ask what a load fills, nor where loaded tokens come from
``v0_30``    KV cache specs do not say whether DCP shares the tokens: it always does
``v0_29``    a failed load is told by its blocks, of one KV cache group; no cache manager
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

from kvferry.integrations.vllm.release import module_of

if TYPE_CHECKING:
    from kvferry.integrations.vllm.compat.v0_32 import Release

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
"""What depends on the installed release."""

PLAIN_QUANT_MODES = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
"""Caches whose cells are elements of one dtype and nothing else."""

_FP8_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}

_ALL_BLOCKS = 1 << 40
"""More blocks than any request has."""


# ---- ranks -------------------------------------------------------------------------------------


def rank_of_this_worker(vllm_config: Any) -> int:
    """This process's rank in its engine, ``pp_rank * tp + tp_rank``."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp = vllm_config.parallel_config.tensor_parallel_size
    return int(get_pp_group().rank_in_group * tp + get_tp_group().rank_in_group)


def from_first_rank(value: T) -> T:
    """The value of the engine's rank 0, on every rank. All ranks call it together."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    shared = get_tp_group().broadcast_object(value, src=0)
    found: T = get_pp_group().broadcast_object(shared, src=0)
    return found


def of_all_stages(value: T) -> list[T]:
    """The values of all pipeline stages, first stage first. All ranks call it together."""
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return [value]
    values: list[T] = [value] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


# ---- requests ----------------------------------------------------------------------------------


def drop_last_prompt_token(request: Any) -> None:
    """Makes a new request one of all tokens but its last, and of one token to generate.

    Not where it has a single token, or asks for the prompt's log-probabilities.
    """
    if request.num_prompt_tokens > 1 and not request.get_skip_reading_prefix_cache():
        cut_prompt(request, request.num_prompt_tokens - 1)


def cut_prompt(request: Any, num_tokens: int) -> None:
    """Makes a request that has computed nothing one of its first tokens, at least one, and of one
    token to generate.
    """
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[num_tokens:]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:num_tokens]
    if request.prompt_is_token_ids is not None:
        del request.prompt_is_token_ids[num_tokens:]
    del request._all_token_ids[num_tokens:]  # noqa: SLF001 (there is no other way to its copy)
    request.num_prompt_tokens = num_tokens
    request.max_tokens = 1


def adapter_of(request: Any) -> tuple[str, str] | None:
    """Name and path of the LoRA adapter that a request runs with."""
    lora = request.lora_request
    return None if lora is None else (str(lora.lora_name), str(lora.lora_path))


def inputs_of(request: Any) -> list[tuple[str, int, int]]:
    """Identifier, first placeholder and number of placeholders of each multimodal input."""
    return [
        (str(feature.identifier), feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
    ]


def hashes_inputs(vllm_config: Any) -> bool:
    """Whether the identifiers of multimodal inputs are of their content.

    Where neither of its caches would use them, vLLM counts inputs instead of hashing them, and two
    servers count to the same numbers.
    """
    multimodal = vllm_config.model_config.multimodal_config
    return bool(
        multimodal is None
        or multimodal.mm_processor_cache_gb
        or vllm_config.cache_config.enable_prefix_caching
    )


def embeddings_of(request: Any, num_tokens: int) -> tuple[torch.Tensor, list[bool]] | None:
    """The embeddings of the first tokens, and which of these are tokens all the same.

    The list is empty where none is. ``None`` for a prompt of tokens.
    """
    if request.prompt_embeds is None:
        return None
    return request.prompt_embeds[:num_tokens], (request.prompt_is_token_ids or [])[:num_tokens]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor on the host, copied only where they do not lie in a row."""
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data


def adapter_folder(path: str) -> Path | None:
    """The folder with a LoRA adapter's files; ``None`` where they are nowhere on this machine."""
    folder = Path(path).expanduser()
    return folder if folder.exists() else _downloaded(path, None)


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

    A connector is given the caches of its rank and not the model. What writes them, only the
    model's modules know, so the worker is looked for among the callers.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001 (its only name)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(type(caller), "get_model") and hasattr(caller, "model_runner"):
            return caller
        frame = frame.f_back
    return None


def backend_of(layer: Any) -> str:
    """Name of the attention backend that computes a layer."""
    return str(layer.get_attn_backend().get_name())


def cache_dtype(vllm_config: Any, spec: Any) -> str:
    """The dtype of a cache's elements; vLLM keeps fp8 as ``uint8`` and names it in its config."""
    name = str(spec.dtype).removeprefix("torch.")
    setting = vllm_config.cache_config.cache_dtype
    if name != "uint8" or setting == "fp8_e5m2":
        return _FP8_DTYPES[setting] if name == "uint8" else name
    return fp8_dtype() if setting in _FP8_DTYPES or setting == "fp8_per_token_head" else name


def fp8_dtype() -> str:
    """What the kernels of this platform take for fp8: some GPUs have a format of their own."""
    from vllm.platforms import current_platform

    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def shuffles_indexers() -> bool:
    """Whether an indexer's values lie in tiles: ROCm's kernels hold them so."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


def make_scales(layer: Any, kv_cache: torch.Tensor) -> None:
    """Has a layer with scales per token and head find them in its cache now.

    It does so when it first computes otherwise, and sets all of them to 1: also those that loads
    have written by then.
    """
    layer.impl._ensure_scale_caches(kv_cache)  # noqa: SLF001 (there is no public way)


# ---- recurrent layers --------------------------------------------------------------------------


def undivided_state_shapes(vllm_config: Any) -> list[tuple[int, ...]]:
    """Shapes of the states of a recurrent layer as they would be with one TP rank.

    One rank's own shapes do not say it all: a rank's one group of Mamba2 may be one of several, or
    a replica of the only one.
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
    """The kind of a recurrent layer as vLLM names it: ``MAMBA2``, ``GDN_ATTN``."""
    return str(spec.mamba_type.name)


def delta_order() -> str:
    """How a gated delta net's kernel holds a head's matrix: by values (v), or by keys (k) first.

    vLLM shapes it for its GPU kernels; those of CPUs see the same memory the other way round.
    """
    from vllm.platforms import current_platform

    return "kv" if current_platform.is_cpu() else "vk"


# ---- prefix cache ------------------------------------------------------------------------------


def may_leave_blocks_out(kv_cache_manager: Any) -> bool:
    """Whether :func:`leave_blocks_out` keeps every cell of those blocks from being a prefix hit.

    Not where hits may end inside a block: vLLM then makes a hit of a part of a block as well.
    """
    managers = kv_cache_manager.coordinator.single_type_managers
    unit = kv_cache_manager.block_pool.hash_block_size
    return all(manager.block_size == unit for manager in managers)


def leave_blocks_out(kv_cache_manager: Any, table: int, request_id: str, num_tokens: int) -> None:
    """Keeps the blocks that begin before a token from becoming prefix hits.

    To be called while a load's blocks are allocated and before vLLM hashes them: it hashes those
    that it has not counted yet, which are counted here.

    Args:
        kv_cache_manager: the scheduler's.
        table: index of the KV cache group.
        request_id: whose blocks they are.
        num_tokens: of the request, from its first one.
    """
    manager = kv_cache_manager.coordinator.single_type_managers[table]
    counted = manager.num_cached_block
    counted[request_id] = max(counted.get(request_id, 0), -(-num_tokens // manager.block_size))


def before_each_step(kv_cache_manager: Any, look: Callable[[], None]) -> None:
    """Has ``look`` called when a step begins to be scheduled, before any prefix is looked up."""
    begin = kv_cache_manager.new_step_starts

    def new_step_starts() -> None:
        look()
        begin()

    kv_cache_manager.new_step_starts = new_step_starts


def free_blocks(kv_cache_manager: Any) -> tuple[int, int]:
    """How many blocks nobody holds, and how many there are."""
    pool = kv_cache_manager.block_pool
    return int(pool.get_num_free_blocks()), len(pool.blocks)


def begin_anew(kv_cache_manager: Any, request: Any) -> None:
    """Has a request computed from its first token, if it waits with blocks that were loaded.

    Whoever calls it knows that nothing is written to them any more. One that has gone on is left
    alone.
    """
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        kv_cache_manager.free(request)
        request.num_computed_tokens = 0


def forget_prefixes(kv_cache_manager: Any) -> set[str]:
    """Empties the prefix cache, also of blocks in use; returns the requests that have blocks.

    What these compute from now on does not become a prefix hit either: it goes on from KV that
    they have.
    """
    pool = kv_cache_manager.block_pool
    kv_cache_manager.evict_blocks(set(range(len(pool.blocks))))
    found: set[str] = set()
    for manager in kv_cache_manager.coordinator.single_type_managers:
        for request_id, blocks in manager.req_to_blocks.items():
            if blocks:
                found.add(request_id)
                manager.num_cached_block[request_id] = _ALL_BLOCKS
    return found


# ---- connectors beside ours --------------------------------------------------------------------


def register_connector(name: str, module: str) -> None:
    """Has vLLM know a connector by its name alone.

    By that, MultiConnector looks for the class that reads a connector's figures, also of a
    connector that was loaded from outside.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:  # noqa: SLF001 (there is no other way to ask)
        KVConnectorFactory.register_connector(name, module, name)


def connectors_beside(connector: Any) -> tuple[list[Any], str] | None:
    """The other connectors of the MultiConnector that calls one of its connectors right now, and
    its policy for loads that fail; ``None`` where there is no MultiConnector.

    It tells its connectors neither of itself nor of each other, so it is looked for among the
    callers.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001 (its only name)
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
    """Has vLLM's OffloadingConnector finish its copies from these blocks before the step runs.

    It does so for blocks of requests that run in the step, and for those that it loads itself. It
    does not know of blocks that another connector loads.
    """
    scheduler = getattr(connector, "connector_scheduler", None)
    allocated = getattr(scheduler, "_current_batch_allocated_block_ids", None)
    if allocated is not None:
        allocated.update(block for block in block_ids if block)


# ---- CPU ---------------------------------------------------------------------------------------


def ask_for_amx() -> None:
    """Asks the kernel for AMX tiles, where the CPU has them.

    vLLM does so only in kernels of prompts; an engine whose prompts all come from outside would
    die of SIGILL at its first decode step with bfloat16.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():  # noqa: SLF001 (as vLLM asks)
        torch.cpu._init_amx()  # noqa: SLF001 (there is no public name)


def write_cpu_block(
    isa: str, key_ND: torch.Tensor, value_ND: torch.Tensor, cache_dtype_name: str
) -> torch.Tensor:
    """One block of one head as CPU attention stores it, written by vLLM's own operation.

    Args:
        isa: the instruction set that it is written for.
        key_ND: [tokens of a block, head size], of the model's dtype.
        value_ND: likewise.
        cache_dtype_name: of the engine's cache config.

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
    """Has ``called`` told of every call of an engine's scheduler process to its workers.

    All go through ``collective_rpc`` of the executor, an object that connectors are not given: so
    the method of its class is replaced, once per process. ``called`` gets the executor and what is
    called, a method's name or a function, before it is called; it may run on any thread.
    """
    from vllm.v1.executor.abstract import Executor

    kind: Any = Executor.get_class(vllm_config)
    parallel = vllm_config.parallel_config  # the executor's own, also where others were copied
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
    """The opposite of :func:`watch_calls`. Idempotent."""
    _watchers.pop(id(vllm_config.parallel_config), None)


_watchers: dict[int, tuple[Any, Callable[[Any, object], None]]] = {}
"""Id of a parallel config → the config, which keeps its id, and who is told."""
_watched: set[type] = set()
"""Classes of executors."""

LETS_MEMORY_GO = frozenset({"sleep", "discard"})
"""Methods of a worker after which KV cache and weights may be nowhere."""

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
"""Methods of a worker that leave the weights alone. Of any other, and of a function, who knows."""


def weights_sleep(executor: Any) -> bool:
    """Whether the memory of an engine's weights is let go at present."""
    return "weights" in executor.sleeping_tags


def models_of(worker: Any) -> dict[str, torch.nn.Module]:
    """Prefix for names → the models of a worker: the one that it serves, and a draft's."""
    models = {"": worker.get_model()}
    # Runners of another kind than the usual one may not know of drafts.
    find = getattr(worker.model_runner, "get_draft_model", None)
    draft = None if find is None else find()
    if isinstance(draft, torch.nn.Module):
        models["draft."] = draft
    return models


def hidden_weights(model: torch.nn.Module) -> dict[str, object]:
    """Name of a parameter that vLLM has emptied → the operation that holds what was in it.

    On CPUs linear layers have their weights in memory of their kernels.
    """
    return {
        f"{name}.weight": module.cpu_linear
        for name, module in model.named_modules()
        if hasattr(module, "cpu_linear") and hasattr(module, "weight") and not len(module.weight)
    }


# ---- model -------------------------------------------------------------------------------------


def weights_folder(model_config: Any) -> Path | None:
    """The folder with the model's files; ``None`` where they are nowhere on this machine."""
    path = Path(model_config.model)
    return path if path.exists() else _downloaded(model_config.model, model_config.revision)


def _downloaded(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # whatever it raises, it means that the files are not here
        return None


def layer_order(names: Sequence[str]) -> dict[str, int]:
    """Layer name → the model's index of it.

    That is the number in its name. Where names have several numbers or two layers share one (an
    indexer beside its attention), it is the layer's place in the natural order of all names.

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
