"""The half of the adapter in each of vLLM's workers."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvferry.connectors.base import ConnectorContext, KVConnectorOutput
from kvferry.connectors.pull.metadata import LoadSpec, ids_of
from kvferry.connectors.pull.worker import PullWorker
from kvferry.errors import ConfigError
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.caches import (
    CacheGroup,
    cache_groups,
    cache_views,
    layer_caches,
    num_blocks_of,
    tensors_of,
)
from kvferry.integrations.vllm.compat.projections import qkv_projections
from kvferry.integrations.vllm.config import transfer_config
from kvferry.integrations.vllm.fingerprint import fingerprint
from kvferry.integrations.vllm.heads import head_digests, why_exempt
from kvferry.integrations.vllm.messages import RankHandshake, StepMetadata, StepReport, Written
from kvferry.integrations.vllm.scheduler import keeps_a_part, layer_windows
from kvferry.integrations.vllm.stats import LoadStats
from kvferry.observe.records import TransferRecord

logger = logging.getLogger(__name__)


class WorkerHalf:
    """Translates vLLM's worker calls for a :class:`PullWorker`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """Checks the config; :meth:`register_kv_caches` does the rest.

        Raises:
            ConfigError: see :func:`~kvferry.integrations.vllm.config.transfer_config`.
        """
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config, self._extra = transfer_config(vllm_config)
        self._rank = compat.rank_of_this_worker(vllm_config)
        self._pull: PullWorker | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}
        """The registered tensors by name."""
        self._is_asleep = False
        """Whether the memory of the tensors may be gone."""
        self._handshake: RankHandshake | None = None
        self._num_loading = 0
        """Number of loads that were started and have not been reported."""
        self._has_news = False
        """Whether the scheduler half sent news in this step."""
        self._refused: set[str] = set()
        self._failed: set[str] = set()
        self._records: list[TransferRecord] = []
        self._progress: dict[str, tuple[int, int]] = {}
        self._written: Written = {}
        self._tells_blocks = len(kv_cache_config.kv_cache_groups) == 1
        """Whether vLLM finds a request by a block id: vLLM looks in a single KV cache group
        only."""
        self._first_blocks: dict[str, int] = {}
        """Request id → id of a vLLM block; no block from there to the end is loaded yet."""
        self._invalid_block_ids: set[int] = set()
        compat.ask_for_amx()

    @property
    def pull(self) -> PullWorker:
        """The kvferry worker, once the caches are registered."""
        assert self._pull is not None  # vLLM registers its caches before the first step
        return self._pull

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describes the caches and opens the transports. All ranks must call it together.

        Raises:
            ConfigError: a kind of cache is not served, or a transport cannot be opened.
            PortInUseError: a configured data port is taken.
        """
        worker = compat.calling_worker()
        models = {} if worker is None else compat.models_of(worker)
        names = [
            name for group in self._kv_cache_config.kv_cache_groups for name in group.layer_names
        ]
        projections = qkv_projections(self._vllm_config, models.values(), names)
        kv_caches = cache_views(self._kv_cache_config, kv_caches)
        caches = layer_caches(self._vllm_config, self._kv_cache_config, kv_caches, projections)
        groups = cache_groups(compat.of_all_stages(caches), self._vllm_config)
        self._check_failures_can_be_told(groups)
        self._groups = groups
        num_blocks = self._kv_cache_config.num_blocks
        model = fingerprint(self._vllm_config, groups)
        incarnation = compat.from_first_rank(secrets.token_hex(8))
        context = ConnectorContext(
            config=self._config,
            extra=self._extra,
            incarnation=incarnation,
            groups=tuple(group.geometry for group in groups),
            model=model,
            num_blocks=num_blocks_of(groups, num_blocks),
            world_size=groups[0].geometry.world_size,
            layer_windows=layer_windows(groups),
            may_sleep=bool(self._vllm_config.model_config.enable_sleep_mode),
        )
        self._tensors = tensors_of(groups, kv_caches)
        self._pull = PullWorker.open(context, self._rank)
        self._pull.register_kv_caches(self._tensors)
        exempt = why_exempt(self._vllm_config, self._extra.weights_check)
        heads = head_digests(self._vllm_config, projections, groups, self._rank, exempt)
        self._pull.set_head_digests(heads)
        self._handshake = RankHandshake(
            rank=self._rank,
            incarnation=incarnation,
            groups=groups,
            model=model,
            num_blocks=num_blocks,
            handshake=self._pull.handshake_metadata(),
        )

    def unregister_kv_caches(self) -> None:
        """Ends loads and connections and waits for every thread and device that reads or writes the
        caches, so that vLLM may let the memory go. Idempotent.

        vLLM has drained the engine, unless a trainer calls the workers without the engine. A load
        that was not reported yet has failed.
        """
        if self._pull is not None and not self._is_asleep:
            self._pull.close()
            self._is_asleep = True

    def restore_kv_caches(self) -> None:
        """Registers the tensors again, under another incarnation of the engine: peers must not take
        the memory for the former memory. All ranks must call it together. Idempotent.

        Raises:
            PortInUseError: a configured data port is taken.
        """
        if not self._is_asleep:
            return
        incarnation = compat.from_first_rank(secrets.token_hex(8))
        self._pull = self.pull.successor(incarnation)
        self._pull.register_kv_caches(self._tensors)
        self._is_asleep = False
        assert self._handshake is not None  # the caches were registered before
        self._handshake = replace(
            self._handshake, incarnation=incarnation, handshake=self._pull.handshake_metadata()
        )

    def _check_failures_can_be_told(self, groups: Sequence[CacheGroup]) -> None:
        """Refuses engines of releases before 0.30 that cannot learn of every failed load.

        Before 0.30, vLLM learns of a failed load by block ids, without the request.

        Raises:
            ConfigError: vLLM would not find the blocks, or would go on behind empty ones.
        """
        if compat.release.takes_failed_requests or not self._config.is_consumer:
            return
        if not self._tells_blocks:
            raise ConfigError(
                f"KV cache: {len(self._kv_cache_config.kv_cache_groups)} KV cache groups; before "
                "0.30 vLLM cannot be told that a load into several failed: where KV is loaded, "
                "take --disable-hybrid-kv-cache-manager, or vLLM 0.30 or later"
            )
        windowed = any(keeps_a_part(group.geometry) for group in groups)
        if windowed and self._config.kv_load_failure_policy == "recompute":
            raise ConfigError(
                "kv_load_failure_policy: recompute; before 0.30 vLLM does not compute a prompt "
                "anew of which it keeps a window only: where KV is loaded, take fail, or vLLM 0.30 "
                "or later"
            )

    @property
    def handshake(self) -> RankHandshake | None:
        """Description of this rank for the scheduler half."""
        return self._handshake

    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Hands this step's news to the PullWorker; never blocks."""
        if metadata.news is not None:
            self.pull.start_load_kv(metadata.news)
            self._num_loading += len(metadata.news.loads)
            if self._tells_blocks:
                self._first_blocks |= {
                    load.request_id: self._first_block(load) for load in metadata.news.loads
                }
        self._refused.update(metadata.refused)
        if self._tells_blocks:
            self._first_blocks |= metadata.refused
        self._has_news = True

    def _first_block(self, load: LoadSpec) -> int:
        """Id of the first vLLM block that a load fills."""
        group = self._groups[0]
        table = ids_of(load.target_tables[0])
        filled = table[load.first_token // group.geometry.virtual_block_size :]
        return int(filled[filled != 0][0]) // group.split

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput | None:
        """Transfers that ended on this rank since the last step, each once; ``None`` if none can
        have.

        Failures are told again in two other ways: by block ids to vLLM (the only way before 0.30),
        and in the report to the scheduler half.
        """
        if not (self._has_news or self._num_loading or self.pull.awaits_device):
            return None
        self._has_news = False
        output = self.pull.get_transfer_results(finished_req_ids)
        self._num_loading -= len(output.finished_recving)
        self._records, self._progress = output.transfer_records, output.transfer_progress
        self._written = output.written
        refused, self._refused = self._refused, set()
        output.finished_recving |= refused
        output.failed_recving |= refused
        self._failed |= output.failed_recving
        for request_id in output.finished_recving & self._first_blocks.keys():
            block = self._first_blocks.pop(request_id)
            if request_id in output.failed_recving:
                self._invalid_block_ids.add(block)
        return output

    def take_invalid_block_ids(self) -> set[int]:
        """First block of each load that failed since the last call, if there is one KV cache group.

        vLLM counts no token from such a block on as computed.
        """
        if not self._invalid_block_ids:
            return set()
        found, self._invalid_block_ids = self._invalid_block_ids, set()
        return found

    def take_stats(self) -> LoadStats | None:
        """Statistics of the loads that ended in this step."""
        if not self._records:
            return None
        loads = [record for record in self._records if record.direction == "recv"]
        if not loads:
            return None
        stats = LoadStats()
        for record in loads:
            stats.note_load(record)
        return stats

    def take_report(self) -> StepReport | None:
        """The other reports of this step for the scheduler half; ``None`` if there is no news."""
        later = self.pull.written if self.pull.awaits_device else None
        if not (self._records or self._progress or self._failed or self._written or later):
            return None
        report = StepReport(self._records, self._progress, self._failed, self._written, later)
        self._records, self._progress, self._failed, self._written = [], {}, set(), {}
        return report

    def close(self) -> None:
        """Ends loads, connections and threads. Idempotent."""
        if self._pull is not None:
            self._pull.close()
