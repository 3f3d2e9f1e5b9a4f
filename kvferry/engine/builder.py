"""Builds an engine from the user's configuration.

Only this module combines the model's layers, the engine's shape and the cache core's groups.
"""

import logging
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from kvferry.cache import KVCacheConfig
from kvferry.cache.config_builder import group_layers
from kvferry.config import EngineConfig
from kvferry.control.cache_events import CacheEventPublisher
from kvferry.engine.engine import Engine
from kvferry.engine.executor import Executor
from kvferry.engine.messages import RanksElsewhere, WorkerSpec
from kvferry.engine.model_config import DecoderConfig
from kvferry.engine.request import SchedulerOptions
from kvferry.engine.weights import load_model_config
from kvferry.errors import ConfigError
from kvferry.topology import EngineGeometry, ParallelShape

logger = logging.getLogger(__name__)

ExecutorKind = Literal["process", "inprocess"]


def engine_cache(
    engine: EngineConfig, model: DecoderConfig, dtype: str
) -> tuple[KVCacheConfig, tuple[EngineGeometry, ...]]:
    """The KV cache of an engine with a model.

    Args:
        engine: shape, block size, layout and number of blocks.
        model: the model whose layers the cache serves.
        dtype: dtype of the KV cache.

    Returns:
        The scheduler's cache config, without tensors because the scheduler owns no memory; and
        the geometry of each KV cache group.

    Raises:
        ConfigError: the shape does not fit the model, or its layers cannot be grouped.
    """
    shape = model.cache_shape
    try:
        groups = group_layers(
            shape.kv_cache_specs(engine.block_size, dtype), hybrid=engine.hybrid_kv_cache
        )
        geometries = shape.geometries(
            groups, layout=engine.layout, parallel=ParallelShape(tp=engine.tp, pp=engine.pp)
        )
        config = KVCacheConfig(engine.num_blocks, (), groups)
    except ValueError as error:
        raise ConfigError(f"engine {engine.name!r}: {error}") from error
    # A decoder has no recurrent layers, so there is no group with recurrent states.
    return config, tuple(group for group in geometries if isinstance(group, EngineGeometry))


def build_engine(
    config: EngineConfig,
    model_folder: str | Path,
    *,
    dtype: str,
    executor: ExecutorKind = "process",
    connect: bool = True,
    eos_token_ids: Sequence[int] | None = None,
    enable_prefix_caching: bool = True,
    elsewhere: RanksElsewhere | None = None,
) -> Engine:
    """Starts the ranks and the connector of an engine, and returns it ready for requests.

    Args:
        config: configuration of the engine.
        model_folder: a converted folder, see :func:`kvferry.engine.weights.prepare_model`.
        dtype: dtype of weights, activations and KV cache.
        executor: kind of the ranks: processes, or threads of this process.
        connect: whether the engine exchanges KV; if not, ``kv_transfer_config`` is not read.
        eos_token_ids: tokens that end an answer; by default, the model's tokens.
        enable_prefix_caching: whether requests share the blocks of equal prefixes.
        elsewhere: ranks that are processes on other hosts, if any.

    Raises:
        ConfigError: the shape or the connector's keys cannot be used.
        ModelError: the folder cannot be used.
        HostError: a port is taken, or memory is short.
        WorkerDiedError: a rank did not start.
    """
    model = load_model_config(model_folder)
    cache_config, geometries = engine_cache(config, model, dtype)
    transfer = config.transfer_config() if connect else None
    incarnation = secrets.token_hex(8)
    options = SchedulerOptions(
        max_model_len=_model_len(config, model),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=model.eos_token_ids if eos_token_ids is None else tuple(eos_token_ids),
        vocab_size=model.vocab_size,
        enable_prefix_caching=enable_prefix_caching,
        load_failure_policy="fail" if transfer is None else transfer.kv_load_failure_policy,
    )
    spec = WorkerSpec(
        engine=config.name,
        model_folder=str(model_folder),
        geometries=geometries,
        num_blocks=config.num_blocks,
        layer_windows=model.cache_shape.layer_windows,
        incarnation=incarnation,
        kv_transfer_config=transfer,
        threads=config.threads,
    )
    with ExitStack() as opened:
        # Open sockets first: a taken port fails at once, while weights take long to load.
        events = _open_events(config)
        if events is not None:
            opened.callback(events.close)
        connector = None
        if transfer is not None:
            plugin, context = spec.connector(transfer)
            connector = plugin.scheduler(context)
            opened.callback(connector.close)
        ranks = Executor(spec, in_process=executor == "inprocess", elsewhere=elsewhere)
        opened.pop_all()  # from here on, the engine owns and closes these parts
    return Engine(options, cache_config, ranks, connector, events)


def _open_events(config: EngineConfig) -> CacheEventPublisher | None:
    events = config.kv_events
    if events is None or not events.enable_kv_cache_events:
        return None
    publisher = CacheEventPublisher(events)
    logger.info(
        "engine %r publishes KV cache events on %s, replays on %s",
        config.name,
        publisher.endpoint,
        publisher.replay_endpoint,
    )
    return publisher


def _model_len(config: EngineConfig, model: DecoderConfig) -> int:
    if config.max_model_len > model.max_position_embeddings:
        logger.info(
            "engine %r: max_model_len is %d, the model's positions end at %d; using that",
            config.name,
            config.max_model_len,
            model.max_position_embeddings,
        )
    return min(config.max_model_len, model.max_position_embeddings)
