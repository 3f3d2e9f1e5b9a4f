"""The connector class for vLLM.

vLLM loads this class early to read the class methods, and creates the scheduler half or the worker
half later. Numba must not be imported with this module: when a worker starts, vLLM's CPU platform
searches the names of all loaded modules and fails on the names of llvmlite.

Methods of vLLM's API that kvferry leaves to the base classes, with the reason:

| `role` | the base class returns the role |
| `supports_divergent_local_hybrid_hits` | a prefix hit counts as far as all groups have it |
| `requires_kv_delivery` | the base class answers by the role |
| `clear_connector_metadata` | the base class is enough |
| `has_connector_metadata` | the base class is enough |
| `get_mem_pool_context` | no transport needs memory from a special pool |
| `set_host_xfer_buffer_ops` | caches are read in place |
| `finish_forward` | nothing is saved during the forward pass |
| `reset_capture_state` | nothing happens inside a captured graph |
| `handle_preemptions` | the scheduler half revokes the leases of preempted prompts |
| `get_kv_connector_kv_cache_events` | the connector keeps no cache |
| `get_external_cache_hit_sources` | the attribute `_cache_hit_source` names the source: a peer |
| `register_finished_partial_tail` | only stores that keep partial blocks by hash need this method |
| `take_events` | the connector keeps no cache |
| `has_pending_block_frees` | a request without blocks should preempt, not wait for a lease |
| `get_required_kvcache_layout` | every layout is converted during the transfer |
| `requires_piecewise_for_cudagraph` | no layer waits for a load or a save |
| `get_finished_count` | every rank reports every request, which is vLLM's default |
| `set_xfer_handshake_metadata` | kvferry implements the form with pipeline stages |
| `reset_cache` | kvferry has no cache; lent blocks stay until the end of their leases |
"""

from typing import TYPE_CHECKING, Any

from kvferry.errors import ConfigError
from kvferry.integrations.start import one_line_at_start
from kvferry.integrations.vllm.compat import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    connectors_beside,
    release,
)
from kvferry.integrations.vllm.config import may_sleep
from kvferry.integrations.vllm.messages import RankHandshake, StepMetadata
from kvferry.integrations.vllm.stats import LoadMetrics, LoadStats

if TYPE_CHECKING:
    from kvferry.integrations.vllm.scheduler import SchedulerHalf
    from kvferry.integrations.vllm.worker import WorkerHalf


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """kvferry's PullConnector inside vLLM: decode engines read leased blocks of prefill engines.

    vLLM makes one instance in the scheduler's process and one in every worker.
    """

    _cache_hit_source = release.cache_hit_source

    # vLLM calls the methods of a role on the connector of this role only, so only one half exists.
    # The halves have the names that vLLM's own connectors give to theirs.
    connector_scheduler: "SchedulerHalf"
    """The half in the scheduler's process."""
    connector_worker: "WorkerHalf"
    """The half in a worker process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Creates the half for the role; see vLLM for the arguments.

        Raises:
            ConfigError: an extra key is unknown or wrong, or the engine cannot be served.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._is_worker = role == KVConnectorRole.WORKER
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        with one_line_at_start(self._engine_id):
            if not self._is_worker:
                from kvferry.integrations.vllm import scheduler

                self.connector_scheduler = scheduler.SchedulerHalf(vllm_config)
            else:
                from kvferry.integrations.vllm import worker

                self.connector_worker = worker.WorkerHalf(vllm_config, kv_cache_config)

    # ---- scheduler ----------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Starts the scheduler half with the descriptions of all ranks; peers may connect now. From
        0.33 on, vLLM calls this method again after each wake-up.

        Raises:
            ConfigError, HostError: see :meth:`SchedulerHalf.open`.
        """
        handshakes = list(metadata.values())
        # All handshakes are kvferry's: connectors beside kvferry send none, see Beside.
        assert all(isinstance(handshake, RankHandshake) for handshake in handshakes)
        with one_line_at_start(self._engine_id):
            self.connector_scheduler.open(handshakes)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes the scheduler's cache manager, which learns later which blocks are unfilled."""
        super().bind_kv_cache_manager(kv_cache_manager)
        with one_line_at_start(self._engine_id):
            self.connector_scheduler.bind_kv_cache_manager(
                kv_cache_manager, connectors_beside(self)
            )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Takes the scheduler's block pool, which is not enough without the cache manager.

        Raises:
            ConfigError: a MultiConnector hands over the block pool without the cache manager.
        """
        super().bind_gpu_block_pool(gpu_block_pool)
        if release.gives_cache_manager or connectors_beside(self) is None:
            return
        with one_line_at_start(self._engine_id):
            raise ConfigError(
                "MultiConnector: before 0.30 vLLM does not hand over what kvferry needs to get on "
                "with another connector; take KVFerryConnector alone, or vLLM 0.30 or later"
            )

    def on_new_request(self, request: Any) -> None:
        """Checks the ticket of a new request and requests the lease."""
        self.connector_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Number of tokens that can come from the prefill engine."""
        return self.connector_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """The groups whose blocks vLLM need not zero before a load.

        vLLM calls this method to skip the zeroing of blocks that a load overwrites. A load may
        leave the end of the last block unwritten. If groups share memory, this end may hold cells
        of another kind (a recurrent layer's state, another precision), which attention may read as
        NaN. vLLM zeroes blocks before the loads of a step begin. A single group finds only older
        cells of the same group.
        """
        assert self._kv_cache_config is not None  # vLLM gives it to every connector
        return (0,) if len(self._kv_cache_config.kv_cache_groups) == 1 else ()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Starts the load of a request in this step, now that the request has blocks."""
        self.connector_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The scheduler half's news of this step for the workers."""
        return self.connector_scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes the workers' reports."""
        self.connector_scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`request_finished_all_groups`; this form is for engines with one group."""
        return self.connector_scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lends the blocks of a finished request, or cancels the request's load."""
        return self.connector_scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping although no request is scheduled."""
        return self.connector_scheduler.has_pending_work()

    # ---- worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describes this rank's caches and opens its transports.

        Raises:
            ConfigError, HostError: see :meth:`WorkerHalf.register_kv_caches`.
        """
        with one_line_at_start(self._engine_id):
            self.connector_worker.register_kv_caches(kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether the named transports serve caches whose memory vLLM lets go in sleep mode. The
        log names the others.
        """
        return may_sleep(kv_transfer_config)

    def unregister_kv_caches(self) -> None:
        """Lets the caches go; see :meth:`WorkerHalf.unregister_kv_caches`."""
        self.connector_worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Takes the caches again; see :meth:`WorkerHalf.restore_kv_caches`."""
        self.connector_worker.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's description, for the scheduler's process."""
        return self.connector_worker.handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Starts this step's loads into host memory.

        From 0.32 on, vLLM calls :meth:`start_load_kv` behind the forward pass. On a device, the
        forward pass runs meanwhile; on the host, the pass has ended by then, and the loads would
        lose a step.
        """
        super().bind_connector_metadata(connector_metadata)
        if self.connector_worker.pull.is_on_host:
            self._start()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts this step's loads into the memory of a device."""
        if not self.connector_worker.pull.is_on_host:
            self._start()

    def _start(self) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, StepMetadata)  # kvferry's scheduler half made the metadata
        if metadata.news is not None or metadata.refused:
            self.connector_worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads are asynchronous, and a loading request is not in the batch."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: nothing is saved, as decode engines read the blocks in place."""

    def wait_for_save(self) -> None:
        """Does nothing: nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The transfers that ended on this rank since the last step."""
        return release.transfer_results(
            self.connector_worker.get_transfer_results(finished_req_ids)
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The transfers that ended on this rank since the last step, without the failures.

        Before 0.30 vLLM learns of failures by block ids only.
        """
        results = self.connector_worker.get_transfer_results(finished_req_ids)
        if results is None:
            return None, None
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of vLLM's blocks whose load failed since the last step."""
        return self.connector_worker.take_invalid_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Records and progress of this rank's loads."""
        return self.connector_worker.take_report()

    # ---- both ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Statistics since the last step."""
        if self._is_worker:
            return self.connector_worker.take_stats()
        return self.connector_scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Builds statistics from their serialised data."""
        return LoadStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LoadMetrics:
        """Builds the metrics for Prometheus."""
        return LoadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Ends threads, connections and sockets. Idempotent."""
        if self._is_worker:
            self.connector_worker.close()
        else:
            self.connector_scheduler.close()
