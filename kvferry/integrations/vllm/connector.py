"""The class that vLLM loads.

vLLM loads it early, to read its class methods. The halves come later, with their role: vLLM's CPU
platform looks through the names of all loaded modules when a worker starts and stumbles over
llvmlite's, so Numba must not be there yet.

Methods of vLLM's API that are left to its base classes, and why:

| `role` | the base class's own answers |
| `supports_divergent_local_hybrid_hits` | a prefix hit counts as far as all groups have it |
| `requires_kv_delivery` | the base class answers by the role |
| `clear_connector_metadata` | the base class's own does |
| `has_connector_metadata` | the base class's own does |
| `get_mem_pool_context` | no transport needs memory of its own making |
| `set_host_xfer_buffer_ops` | caches are read where they are |
| `finish_forward` | nothing is saved during the forward pass |
| `reset_capture_state` | nothing happens inside a captured graph |
| `handle_preemptions` | the scheduler half revokes what preempted prompts lend |
| `get_kv_connector_kv_cache_events` | the connector keeps no cache |
| `get_external_cache_hit_sources` | the class attribute `_cache_hit_source` says it: a peer |
| `register_finished_partial_tail` | it is for stores that keep partial blocks by hash |
| `take_events` | the connector keeps no cache |
| `has_pending_block_frees` | a request that lacks blocks should preempt, not wait for a lease |
| `get_required_kvcache_layout` | every layout is converted on the way |
| `requires_piecewise_for_cudagraph` | no layer waits for a load or saves |
| `get_finished_count` | every rank reports every request, which is vLLM's default |
| `set_xfer_handshake_metadata` | the form that knows pipeline stages is implemented |
| `reset_cache` | there is none; lent blocks stay until their leases end |
"""

from typing import TYPE_CHECKING, Any

from kvferry.errors import ConfigError
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
from kvferry.integrations.vllm.logs import one_line_at_start
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

    # vLLM calls each role's methods on that role only, so one of them is never there.
    _scheduler: "SchedulerHalf"
    _worker: "WorkerHalf"

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """See vLLM.

        Raises:
            ConfigError: an extra key is unknown or wrong, or the engine cannot be served.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._is_worker = role == KVConnectorRole.WORKER
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        with one_line_at_start(self._engine_id):
            if not self._is_worker:
                from kvferry.integrations.vllm import scheduler

                self._scheduler = scheduler.SchedulerHalf(vllm_config)
            else:
                from kvferry.integrations.vllm import worker

                self._worker = worker.WorkerHalf(vllm_config, kv_cache_config)

    # ---- scheduler ----------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Every rank has described itself: the engine can be reached from now on.

        Raises:
            ConfigError, HostError: see :meth:`SchedulerHalf.open`.
        """
        handshakes = list(metadata.values())
        # Our own: nobody beside us has any, see Beside.
        assert all(isinstance(handshake, RankHandshake) for handshake in handshakes)
        with one_line_at_start(self._engine_id):
            self._scheduler.open(handshakes)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The scheduler's cache manager, which is told what no load has filled."""
        super().bind_kv_cache_manager(kv_cache_manager)
        with one_line_at_start(self._engine_id):
            self._scheduler.bind_kv_cache_manager(kv_cache_manager, connectors_beside(self))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The scheduler's block pool, which is part of its cache manager and alone of no use.

        Raises:
            ConfigError: it comes without the cache manager, by way of a MultiConnector.
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
        """A request arrived; its ticket is judged, and its lease asked for."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can come from the prefill engine."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """The groups whose blocks vLLM may leave as they are.

        vLLM asks this to spare itself the zeroing of blocks that a load overwrites. A load may
        leave the end of the last block. Where groups share memory, cells of another kind may have
        lain there (a recurrent layer's state, another precision): bytes that are no numbers to
        attention. vLLM zeroes before it lets a step's loads begin. A single group finds cells of
        its own only.
        """
        assert self._kv_cache_config is not None  # vLLM gives it to every connector
        return (0,) if len(self._kv_cache_config.kv_cache_groups) == 1 else ()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request's blocks are allocated: the load begins with this step."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's news for the workers."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers reported."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`request_finished_all_groups`; for engines with one group."""
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: its blocks are lent out, or its load is given up."""
        return self._scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping although no request is scheduled."""
        return self._scheduler.has_pending_work()

    # ---- worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describes this rank's caches and opens its transports.

        Raises:
            ConfigError, HostError: see :meth:`WorkerHalf.register_kv_caches`.
        """
        with one_line_at_start(self._engine_id):
            self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's description, for the scheduler's process."""
        return self._worker.handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Starts this step's loads into host memory.

        From 0.32 on vLLM calls :meth:`start_load_kv` behind the forward pass. A device runs that
        meanwhile, the host has run it by then: the loads would lose a step.
        """
        super().bind_connector_metadata(connector_metadata)
        if self._worker.pull.is_on_host:
            self._start()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts this step's loads into the memory of a device."""
        if not self._worker.pull.is_on_host:
            self._start()

    def _start(self) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, StepMetadata)  # our scheduler half made it
        if metadata.news is not None or metadata.refused:
            self._worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request whose load runs is not in the batch."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved: decode engines read the blocks where they are."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What ended on this rank since the last step."""
        return release.transfer_results(self._worker.get_transfer_results(finished_req_ids))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same without the failures: before 0.30 vLLM knows them by their blocks alone."""
        results = self._worker.get_transfer_results(finished_req_ids)
        if results is None:
            return None, None
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed since the last step."""
        return self._worker.take_invalid_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Records and progress of this rank's loads."""
        return self._worker.take_report()

    # ---- both ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Figures since the last step."""
        if self._is_worker:
            return self._worker.take_stats()
        return self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Figures from their data."""
        return LoadStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LoadMetrics:
        """The figures for Prometheus."""
        return LoadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Ends threads, connections and sockets. Idempotent."""
        if self._is_worker:
            self._worker.close()
        else:
            self._scheduler.close()
