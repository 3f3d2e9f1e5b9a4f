"""The half of the adapter in each of vLLM's workers."""

import logging
import secrets
from collections.abc import Mapping
from typing import Any

import torch

from kvferry.connectors.base import ConnectorContext, TransferRecord
from kvferry.connectors.pull.worker import PullWorker
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.caches import (
    cache_groups,
    layer_caches,
    num_blocks_of,
    tensors_of,
)
from kvferry.integrations.vllm.config import transfer_config
from kvferry.integrations.vllm.messages import RankHandshake, StepMetadata, StepReport
from kvferry.integrations.vllm.scheduler import layer_windows
from kvferry.integrations.vllm.stats import LoadStats
from kvferry.topology.description import ModelFingerprint

logger = logging.getLogger(__name__)

#: Ranks never compare models; the scheduler half does.
_NO_MODEL = ModelFingerprint(
    name="",
    architecture="",
    num_layers=0,
    num_kv_heads=0,
    head_size=0,
    dtype="",
    rope="",
    config_digest="",
    weights_digest="",
)


class WorkerHalf:
    """Translates vLLM's worker calls for a :class:`PullWorker`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """Checks the config; :meth:`register_kv_caches` does the rest. All ranks call it together.

        Raises:
            ConfigError: see :func:`~kvferry.integrations.vllm.config.transfer_config`.
        """
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config, self._extra = transfer_config(vllm_config)
        self._rank = compat.rank_of_this_worker(vllm_config)
        self._incarnation = compat.from_first_rank(secrets.token_hex(8))
        self._pull: PullWorker | None = None
        self._handshake: RankHandshake | None = None
        self._num_loading = 0
        """Loads that were started and have not been reported."""
        self._mirrors = False
        """Whether this rank copies what it lends, and so has records at any time."""
        self._has_news = False
        """Whether the scheduler half said something in this step."""
        self._refused: set[str] = set()
        self._records: list[TransferRecord] = []
        self._progress: dict[str, tuple[int, int]] = {}
        self._invalid_block_ids: set[int] = set()
        compat.ask_for_amx()

    @property
    def pull(self) -> PullWorker:
        """Our half."""
        assert self._pull is not None  # vLLM registers its caches before the first step
        return self._pull

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describes the caches and opens the transports. All ranks call it together.

        Raises:
            ConfigError: caches of a kind that is not served, or transports that cannot be opened.
            PortInUseError: a configured data port is taken.
        """
        caches = layer_caches(self._vllm_config, self._kv_cache_config, kv_caches)
        groups = cache_groups(compat.of_all_stages(caches), self._vllm_config)
        self._splits = {group.table: group.split for group in groups}
        num_blocks = self._kv_cache_config.num_blocks
        context = ConnectorContext(
            config=self._config,
            extra=self._extra,
            incarnation=self._incarnation,
            groups=tuple(group.geometry for group in groups),
            model=_NO_MODEL,
            num_blocks=num_blocks_of(groups, num_blocks),
            world_size=groups[0].geometry.world_size,
            layer_windows=layer_windows(groups),
        )
        self._pull = PullWorker.open(context, self._rank)
        self._pull.register_kv_caches(tensors_of(groups, kv_caches))
        self._handshake = RankHandshake(
            rank=self._rank,
            incarnation=self._incarnation,
            groups=groups,
            num_blocks=num_blocks,
            handshake=self._pull.handshake_metadata(),
        )

    @property
    def handshake(self) -> RankHandshake | None:
        """What the scheduler half must know of this rank."""
        return self._handshake

    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Hands this step's news on; never blocks."""
        if metadata.news is not None:
            self.pull.start_load_kv(metadata.news)
            self._num_loading += len(metadata.news.loads)
            self._mirrors = self._mirrors or bool(metadata.news.lent)
        self._refused.update(metadata.refused)
        self._has_news = True

    def get_transfer_results(self, finished_req_ids: set[str]) -> compat.KVConnectorTransferResults:
        """What ended on this rank since the last step, each once."""
        if not (self._has_news or self._mirrors or self._num_loading):
            return compat.KVConnectorTransferResults()
        self._has_news = False
        output = self.pull.get_transfer_results(finished_req_ids)
        self._num_loading -= len(output.finished_recving)
        self._records, self._progress = output.transfer_records, output.transfer_progress
        self._invalid_block_ids |= output.invalid_block_ids
        refused, self._refused = self._refused, set()
        return compat.KVConnectorTransferResults(
            finished_sending=output.finished_sending,
            finished_recving=output.finished_recving | refused,
            failed_recving=output.failed_recving | refused,
        )

    def take_invalid_block_ids(self) -> set[int]:
        """Blocks of vLLM's whose load failed since the last call; for one KV cache group only."""
        if not self._invalid_block_ids:
            return set()
        if len(self._kv_cache_config.kv_cache_groups) > 1:
            self._invalid_block_ids.clear()
            return set()
        found, self._invalid_block_ids = self._invalid_block_ids, set()
        return {block // self._splits[0] for block in found}

    def take_stats(self) -> LoadStats | None:
        """Figures of the loads that ended in this step."""
        loads = [record for record in self._records if record.direction == "recv"]
        if not loads:
            return None
        stats = LoadStats()
        for record in loads:
            stats.note_load(record)
        return stats

    def take_report(self) -> StepReport | None:
        """What else the scheduler half wants to know of this step."""
        if not self._records and not self._progress:
            return None
        report = StepReport(self._records, self._progress)
        self._records, self._progress = [], {}
        return report

    def close(self) -> None:
        """Ends loads, connections and threads. Idempotent."""
        if self._pull is not None:
            self._pull.close()
