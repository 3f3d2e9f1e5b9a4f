"""Opens the halves of an SGLang rank: checks SGLang's options, and finds its pools and weights."""

import secrets
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import sglang
from msgspec.structs import replace
from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

from kvferry.connectors.base import ConnectorContext
from kvferry.connectors.pull.worker import PullWorker
from kvferry.errors import ConfigError
from kvferry.integrations.following import FollowingRooms
from kvferry.integrations.load_metrics import PrometheusLoads
from kvferry.integrations.ranks import FollowingWorker
from kvferry.integrations.rooms import Rooms
from kvferry.integrations.sglang.caches import PoolGroup, cache_groups
from kvferry.integrations.sglang.config import ANY_NUMBER
from kvferry.integrations.sglang.model import fingerprint, head_digests, weights_digest
from kvferry.topology import ParallelShape


@dataclass(slots=True)
class EngineNames:
    """What the first rank of an engine tells the others at the start."""

    engine_id: str
    incarnation: str
    weights: str
    """Digest of the weights."""
    address: str = ""
    """``host:port`` of the engine's control channel."""
    meeting: str = ""
    """Address at which the first rank listens for others; empty if there are none."""


def open_rank(
    queue: Any, state_types: Sequence[str], dp_rank: int, config: Any, extra: Any
) -> tuple[EngineNames, tuple[PoolGroup, ...], Rooms | FollowingRooms]:
    """Opens both halves on the first rank of an engine, and the worker half on every other rank.

    Args:
        queue: SGLang's queue that makes the manager of this rank.
        state_types: names of SGLang's kinds of state that travel beside the KV cache.
        dp_rank: index of the data-parallel engine.
        config: the kvferry config of the engine.
        extra: the keys of kvferry.

    Returns:
        The names of the engine, its KV cache groups, and its rooms on this rank.

    Raises:
        ConfigError, HostError: the engine cannot be served.
    """
    scheduler, parallel, shape = queue.scheduler, get_parallel(), served_shape(get_parallel())
    model_config, runner = scheduler.model_config, scheduler.tp_worker.model_runner
    rank, heads = rank_of(parallel), int(model_config.get_total_num_kv_heads())
    if extra.max_leased_blocks is None:
        extra = replace(extra, max_leased_blocks=ANY_NUMBER)
    _check_heads(heads, int(runner.model_config.get_total_num_kv_heads()), shape.tp)
    groups = cache_groups(
        queue.token_to_kv_pool,
        state_types,
        shape,
        heads,
        window=int(getattr(scheduler, "sliding_window_size", None) or 0),
        model=runner.model,
        longest=int(model_config.context_len),
        gather=parallel.pp_group.all_gather_object if shape.pp > 1 else lambda layers: [layers],
    )
    geometries = tuple(group.geometry for group in groups)

    def context(names: EngineNames) -> ConnectorContext:
        return ConnectorContext(
            config=replace(config, engine_id=names.engine_id),
            extra=extra,
            incarnation=names.incarnation,
            groups=geometries,
            model=fingerprint(model_config, geometries, names.weights),
            num_blocks=max(group.num_blocks for group in groups),
            world_size=shape.world_size,
            layer_windows={
                layer: each.sliding_window
                for each in geometries
                if not each.is_recurrent and each.sliding_window is not None
                for layer in each.model_layers
            },
            # Without a prefix cache nobody reads cells of a page that a load has left out.
            asks_what_was_filled=not get_disagg().disaggregation_decode_enable_radix_cache,
            serving_engine=f"SGLang {sglang.__version__}",
        )

    if rank > 0:
        names = EngineNames(*parallel.world_group.broadcast_object())
        worker = FollowingWorker(
            _open_worker(context(names), rank, groups, runner.model), rank, names.meeting
        )
        return names, groups, FollowingRooms(worker, leads_stage=rank % shape.tp == 0)
    weights = weights_digest(model_config, runner.server_args.load_format, extra.weights_check)
    names = EngineNames(config.engine_id, secrets.token_hex(8), weights)
    here = context(names)
    rooms = Rooms.open(here, _open_worker(here, rank, groups, runner.model))
    names.address = rooms.scheduler.address
    if get_observability().enable_metrics:
        labels = {"model_name": get_serving().served_model_name, "dp_rank": str(dp_rank)}
        rooms.metrics = PrometheusLoads("sglang:", labels)
    if rooms.others is not None:
        names.meeting = rooms.others.address
        parallel.world_group.broadcast_object(astuple(names))
    return names, groups, rooms


def _open_worker(
    context: ConnectorContext, rank: int, groups: Sequence[PoolGroup], model: Any
) -> PullWorker:
    """The worker half of a rank, with its caches and the digests of its heads."""
    worker = PullWorker.open(context, rank)
    try:
        tensors = {name: each for group in groups for name, each in group.tensors.items()}
        worker.register_kv_caches(tensors)
        worker.set_head_digests(head_digests(model, groups, rank))
    except BaseException:
        worker.close()
        raise
    return worker


def _check_heads(heads: int, padded: int, tp: int) -> None:
    if padded != heads:
        raise ConfigError(
            f"--tp-size: {tp} does not divide the {heads} KV heads of the model, and on CPUs "
            f"SGLang pads them to {padded}; take a --tp-size that divides {heads}"
        )


def rank_of(parallel: Any) -> int:
    """The rank of this process among all ranks of its engine, in the form of kvferry."""
    return int(parallel.pp_rank * parallel.attn_tp_size + parallel.attn_tp_rank)


def served_shape(parallel: Any) -> ParallelShape:
    """The parallel shape of an engine, in the form of kvferry.

    Args:
        parallel: SGLang's context of parallel groups.

    Raises:
        ConfigError: a shape is not served.
    """
    shape = ParallelShape(tp=parallel.attn_tp_size, pp=parallel.pp_size)
    has_ranks = shape.world_size > 1
    among = "with attn_tp_size or pp_size above 1"
    for name, value in (
        ("attn_cp_size", parallel.attn_cp_size),
        ("attn_dcp_size", parallel.attn_dcp_size),
        (f"attn_dp_size, {among}", parallel.attn_dp_size if has_ranks else 1),
        (f"nnodes, {among}", parallel.nnodes if has_ranks else 1),
    ):
        if value > 1:
            raise ConfigError(f"{name}: {value}; this backend serves 1 so far")
    return shape


def check_options(args: Any) -> None:
    """Refuses settings of SGLang that the backend does not serve.

    Raises:
        ConfigError: names the option, its value and the remedy.
    """
    disagg = get_disagg()
    policy = disagg.disaggregation_decode_allocation_policy
    if policy != "early":
        raise ConfigError(
            f"--disaggregation-decode-allocation-policy: {policy}; this backend serves early"
        )
    if args.num_draft_entries:
        raise ConfigError(
            "speculative decoding: the draft model has a KV cache of its own, which this backend "
            "does not serve; leave --speculative-algorithm out"
        )
    if get_parallel().enable_kv_cache_sharding:
        raise ConfigError(
            "--enable-kv-cache-sharding: this backend does not serve it; leave it out"
        )
