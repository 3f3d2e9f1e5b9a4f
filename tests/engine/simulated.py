"""An executor without a model: its KV cache can be read back, its tokens follow from what it reads.

A token is drawn from a hash of the whole sequence as the cache holds it, so that any mistake of a
scheduler, a block table or a connector shows as a wrong token. Steps take microseconds; nothing is
loaded. For tests of schedulers and of connectors, whose worker halves it drives like a real one.
"""

import secrets
from collections.abc import Sequence
from typing import TypeAlias, cast

import msgspec
import numpy as np

from kvferry.cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from kvferry.config import KVTransferConfig
from kvferry.connectors.base import KVConnectorMetadata, WorkerConnector
from kvferry.connectors.registry import connector_context
from kvferry.engine.engine import Engine
from kvferry.engine.executor import Executor
from kvferry.engine.messages import EngineOutput, RankOutput, ScheduledRequest, SchedulerOutput
from kvferry.engine.request import SchedulerOptions
from kvferry.errors import WorkerDiedError
from kvferry.topology.description import ModelFingerprint
from tests.engine.scripted import ScriptedMetadata, ScriptedScheduler, ScriptedWorker
from tests.engine.toy_cache import (
    ToyCache,
    append_tokens,
    read_groups,
    spoil_tokens,
    toy_groups,
)

VOCAB = 64
"""Tokens that the toy model knows."""

TOY_MODEL = ModelFingerprint(
    name="toy",
    architecture="toy",
    num_layers=1,
    num_kv_heads=1,
    head_size=1,
    dtype="int64",
    rope="",
    config_digest="0" * 64,
    weights_digest="0" * 64,
)

Windows: TypeAlias = Sequence[int | None]
"""For each layer of the toy model, and its KV cache group, the tokens that it sees and keeps;
``None`` for all. With windows of 1 alone it forgets what it has read, and draws other tokens."""


class SimulatedExecutor:
    """Ranks that each hold the toy model's one head; see :mod:`tests.engine.toy_cache`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = VOCAB,
        windows: Windows = (None,),
        workers: Sequence[WorkerConnector] = (),
        metadata: type[KVConnectorMetadata] = KVConnectorMetadata,
    ) -> None:
        """Builds the ranks and registers their caches with their connectors.

        Args:
            num_blocks: KV blocks per rank, the null block included.
            block_size: tokens per block.
            vocab_size: tokens are drawn from ``[0, vocab_size)``.
            windows: the layers, each a KV cache group of its own.
            workers: one connector half per rank; without any, there is one rank.
            metadata: the connector's ``Metadata``.
        """
        self.workers = tuple(workers)
        self.world_size = max(1, len(workers))
        self.vocab_size = vocab_size
        self.weights_digest = ""
        """Of weights, the toy model has none."""
        self.steps: list[SchedulerOutput] = []
        """Every step so far."""
        self.failures: dict[int, WorkerDiedError] = {}
        """Why each dead rank is dead; see :meth:`kill`."""
        self._decoder = msgspec.msgpack.Decoder(metadata)
        self.groups = toy_groups(block_size, self.world_size, windows)
        self.caches = [self._allocate(rank, num_blocks) for rank in range(self.world_size)]
        """The cells of each rank. All groups lie in the same memory, as those of a real engine do:
        a block that two groups used at once would show."""

    def _allocate(self, rank: int, num_blocks: int) -> ToyCache:
        shape = self.groups[0].cache_shape(rank, num_blocks)
        nbytes = self.groups[0].nbytes(rank, num_blocks)
        if not self.workers:
            return np.zeros(shape, dtype=np.int64)
        cache = self.workers[rank].allocate(nbytes).view(np.int64).reshape(shape)
        names = [name for group in self.groups for name in group.tensor_names(rank)]
        self.workers[rank].register_kv_caches(dict.fromkeys(names, cache))
        return cache

    def kill(self, rank: int) -> None:
        """Makes a rank answer no more."""
        self.failures[rank] = WorkerDiedError(f"simulated rank {rank} was killed")

    def alive(self) -> bool:
        """Whether no rank was killed."""
        return not self.failures

    def waiting_for(self) -> tuple[int, ...]:
        """None: the ranks answer within the call."""
        return ()

    def first_failure(self) -> WorkerDiedError:
        """Why the first rank that was killed is dead."""
        return next(iter(self.failures.values()))

    def handshakes(self) -> list[bytes]:
        """What each rank's connector wants the scheduler half to know."""
        return [worker.handshake_metadata() for worker in self.workers]

    def execute(self, output: SchedulerOutput) -> list[RankOutput | None]:
        """Runs one step on every rank; a dead rank's place holds ``None``."""
        self.steps.append(output)
        live = [rank for rank in range(self.world_size) if rank not in self.failures]
        outputs: list[RankOutput | None] = [None] * self.world_size
        states: dict[str, list[int | None]] = {}
        for rank in live:
            outputs[rank] = self._run_rank(rank, output, states)
        first = outputs[0]
        for part in output.requests:
            if part.sample is not None and first is not None:
                first.sampled[part.request_id] = self._draw(states[part.request_id])
                first.gaps[part.request_id] = 1.0
        return outputs

    def _run_rank(
        self, rank: int, output: SchedulerOutput, states: dict[str, list[int | None]]
    ) -> RankOutput:
        worker = self.workers[rank] if self.workers else None
        names = [name for group in self.groups for name in group.tensor_names(rank)]
        if worker is not None:
            assert output.connector_metadata is not None
            worker.start_load_kv(self._decoder.decode(output.connector_metadata))
            for name in names:
                worker.wait_for_layer_load(name)
        # All tokens of a step are written before any is read, part by part in the step's order:
        # a later request may share a block that an earlier one fills in this very step.
        for part in output.requests:
            state = self._write(self.caches[rank], part)
            states.setdefault(part.request_id, []).append(state)
        result = RankOutput()
        if worker is not None:
            for name in names:
                worker.save_kv_layer(name)
            worker.wait_for_save()
            result.kv_connector_output = worker.get_transfer_results(output.finished_req_ids)
        return result

    def _write(self, cache: ToyCache, part: ScheduledRequest) -> int | None:
        """Computes a part's cells.

        Returns:
            The hash of the sequence so far; ``None`` if a group's cells are wrong.
        """
        first = part.first_position
        kept = [group.first_kept_token(first) for group in self.groups]
        before = read_groups([cache] * len(self.groups), part.block_ids, kept, first)
        state = None
        for block_ids in part.block_ids:
            if before is None:
                spoil_tokens(cache, block_ids, first, first + len(part.token_ids))
            else:
                state = append_tokens(cache, block_ids, part.token_ids, first, before.state)
        return state

    def _draw(self, states: list[int | None]) -> int:
        """Draws a token from what all ranks read."""
        first = states[0]
        if first is None or any(other != first for other in states):
            return self.vocab_size  # outside the vocabulary: no reference agrees by chance
        return first % self.vocab_size

    def close(self) -> None:
        """Ends the connectors."""
        for worker in self.workers:
            worker.close()


def toy_cache_config(num_blocks: int, block_size: int, windows: Windows = (None,)) -> KVCacheConfig:
    """The KV cache of the toy model; the null block is one of ``num_blocks``."""
    groups = [
        KVCacheGroupSpec((f"layer.{layer}",), _toy_spec(block_size, window))
        for layer, window in enumerate(windows)
    ]
    return KVCacheConfig(num_blocks, (), groups)


def _toy_spec(block_size: int, window: int | None) -> KVCacheSpec:
    if window is None:
        return FullAttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype="int64")
    return SlidingWindowSpec(
        block_size, num_kv_heads=1, head_size=1, dtype="int64", sliding_window=window
    )


def open_simulated(
    options: SchedulerOptions,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    world_size: int = 1,
    windows: Windows = (None,),
    scripted: bool = False,
) -> tuple[Engine, SimulatedExecutor, ScriptedScheduler | None]:
    """An engine over the toy model, its executor, and its connector if it is ``scripted``.

    See :class:`~tests.engine.scripted.ScriptedParams` for what the connector can be told.
    """
    workers = [ScriptedWorker(rank, windows) for rank in range(world_size)] if scripted else []
    executor = SimulatedExecutor(
        num_blocks, block_size, windows=windows, workers=workers, metadata=ScriptedMetadata
    )
    connector = ScriptedScheduler() if scripted else None
    config = toy_cache_config(num_blocks, block_size, windows)
    return Engine(options, config, cast(Executor, executor), connector), executor, connector


def open_connected(
    config: KVTransferConfig,
    *,
    num_blocks: int,
    block_size: int,
    world_size: int,
    windows: Windows = (None,),
    vocab_size: int = VOCAB,
    max_model_len: int = 4096,
    max_num_batched_tokens: int = 32,
) -> tuple[Engine, SimulatedExecutor]:
    """An engine over the toy model with the connector that ``config`` names, and its executor.

    Its batches are small, so that prompts are computed in parts.
    """
    plugin, context = connector_context(
        config,
        incarnation=secrets.token_hex(8),
        groups=toy_groups(block_size, world_size, windows),
        model=TOY_MODEL,
        num_blocks=num_blocks,
        world_size=world_size,
    )
    half = plugin.scheduler(context)
    workers = [plugin.worker(context, rank) for rank in range(world_size)]
    executor = SimulatedExecutor(
        num_blocks,
        block_size,
        vocab_size=vocab_size,
        windows=windows,
        workers=workers,
        metadata=plugin.Metadata,
    )
    options = SchedulerOptions(
        load_failure_policy=config.kv_load_failure_policy,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=8,
        vocab_size=vocab_size,
    )
    cache = toy_cache_config(num_blocks, block_size, windows)
    return Engine(options, cache, cast(Executor, executor), half), executor


def prompt(length: int, salt: int = 0) -> list[int]:
    """Tokens of the toy model's vocabulary; those of different salts differ from the first on."""
    return [(7 * i + salt) % VOCAB for i in range(length)]


def drain(
    engine: Engine, limit: int = 3000
) -> tuple[dict[str, list[int]], dict[str, EngineOutput]]:
    """Steps until nothing is left to do; returns request id → tokens, and → last output."""
    tokens: dict[str, list[int]] = {}
    last: dict[str, EngineOutput] = {}
    for _ in range(limit):
        if not engine.has_work():
            return tokens, last
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            last[output.request_id] = output
    raise AssertionError("the engine never runs out of work")
