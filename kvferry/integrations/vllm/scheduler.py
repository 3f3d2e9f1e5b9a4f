"""The half of the adapter in vLLM's scheduler process."""

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import vllm
from msgspec.structs import replace

from kvferry.config import shown
from kvferry.connectors.base import ConnectorContext, KVConnectorOutput
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.errors import ConfigError, KVFerryError
from kvferry.integrations.first_token import is_wanted
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.beside import Beside
from kvferry.integrations.vllm.caches import CacheGroup, num_blocks_of
from kvferry.integrations.vllm.config import transfer_config
from kvferry.integrations.vllm.content import ContentKeys
from kvferry.integrations.vllm.messages import RankHandshake, StepMetadata, StepReport
from kvferry.integrations.vllm.stats import LoadStats, PendingStats
from kvferry.integrations.vllm.views import Prompts, VllmBlocks, VllmRequest
from kvferry.integrations.vllm.weights import EngineWeights
from kvferry.topology import GroupGeometry

logger = logging.getLogger(__name__)

SPARE = 16
"""Divisor of the usable blocks: cached prefixes are withdrawn while fewer than 1/16 are free."""

_NOTHING = StepMetadata()
"""Metadata of the many steps without news; shared, so never modified."""


class SchedulerHalf:
    """Translates vLLM's scheduler calls for a :class:`PullScheduler`.

    No method may raise into vLLM's running loop, because an exception would end the engine. For a
    refused load, the engine's ``kv_load_failure_policy`` applies. With ``recompute``, no tokens are
    offered, and vLLM computes the prompt. With ``fail``, the request is parked like a loading
    request, and the ranks report in the same step that the load failed.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Checks the config; :meth:`open` does the rest when the ranks are known.

        Raises:
            ConfigError: see :func:`~kvferry.integrations.vllm.config.transfer_config`.
        """
        self._vllm_config = vllm_config
        self._config, self._extra = transfer_config(vllm_config)
        self._recompute = self._config.kv_load_failure_policy == "recompute"
        self.groups: tuple[CacheGroup, ...] = ()
        """The KV cache groups that kvferry describes to peers; empty until :meth:`open`."""
        self._prompts = Prompts(())
        self._pull: PullScheduler | None = None
        self._has_windows = self._has_states = False
        self._kv_cache_manager: Any = None
        self._beside = Beside()
        self._leaves_out = False
        """Whether blocks that a load fills in part can be kept out of vLLM's prefix cache."""
        self._refused: dict[str, KVFerryError] = {}
        self._refused_now: dict[str, int] = {}
        """Request id → the last block of the request's refused load."""
        self._failing: set[str] = set()
        """Requests whose load failed on a rank, until every rank has finished the load."""
        self._loaded: dict[str, Any] = {}
        """Request id → the request, for requests with blocks to load into."""
        self._num_cached: dict[str, int] = {}
        """Request id → number of cached tokens, for requests with ``only_cached``."""
        self._without_blocks: set[str] = set()
        """Requests that could have been admitted in the last step but received no blocks."""
        self._overtaken: set[str] = set()
        """Requests that were loading when the weights changed."""
        self._pending_stats = PendingStats()
        hashed = compat.hashes_inputs(vllm_config)
        if not hashed:
            logger.warning(
                "neither the prefix cache nor the cache of the multimodal processor is on, so vLLM "
                "does not hash images and the like; the KV of requests with them is not loaded"
            )
        check = self._extra.weights_check
        self._content = ContentKeys(check, inputs_are_hashed=hashed)
        self._weights = EngineWeights(vllm_config, check, self._revoke_leases)

    def bind_kv_cache_manager(
        self, kv_cache_manager: Any, beside: tuple[list[Any], str] | None
    ) -> None:
        """See vLLM, which calls this method before :meth:`open`.

        Args:
            kv_cache_manager: the scheduler's cache manager.
            beside: see :func:`~kvferry.integrations.vllm.compat.connectors_beside`.

        Raises:
            ConfigError: see :class:`~kvferry.integrations.vllm.beside.Beside`.
        """
        self._kv_cache_manager = kv_cache_manager
        if beside is not None:
            others, policy = beside
            self._beside = Beside(others)
            self._config = replace(self._config, kv_load_failure_policy=policy)
            self._recompute = policy == "recompute"
        self._leaves_out = compat.may_leave_blocks_out(kv_cache_manager) and not self._beside
        compat.before_each_step(kv_cache_manager, self._begin_step)

    def _begin_step(self) -> None:
        self._look_at_weights()
        self._beside.look(self._kv_cache_manager)
        self._make_room()

    def _make_room(self) -> None:
        """Withdraws the oldest lent prefix that no engine has fetched, if vLLM lacks blocks.

        The blocks return one or two steps later: vLLM frees blocks when the ranks report.
        """
        lacks, self._without_blocks = bool(self._without_blocks), set()
        if self._pull is None or not self._pull.lender.prefixes:
            return
        free, usable = compat.free_blocks(self._kv_cache_manager)
        if (lacks or free < usable // SPARE) and self._pull.lender.prefixes.withdraw_oldest():
            self._pending_stats.stats.note_withdrawal()

    def open(self, handshakes: Iterable[RankHandshake]) -> None:
        """Starts the control channel; other engines may connect from then. Later calls only tell
        other engines of caches that the ranks have registered again.

        Raises:
            ConfigError: the ranks' reports do not fit together, or a key cannot be read.
            PortInUseError: the engine's ``kv_port`` is taken.
        """
        ranks = sorted(handshakes, key=lambda handshake: handshake.rank)
        first = ranks[0]
        world_size = first.groups[0].geometry.world_size
        found = [each.rank for each in ranks]
        if found != list(range(world_size)):
            raise ConfigError(
                f"vLLM gave the reports of the ranks {found}; the engine has {world_size}"
            )
        for each in ranks:
            if (each.groups, each.incarnation) != (first.groups, first.incarnation):
                raise ConfigError(
                    f"rank {each.rank} describes another KV cache than rank 0; all ranks run the "
                    "same model"
                )
        if self._pull is not None:
            self._open_again(self._pull, ranks)
            return
        self.groups = first.groups
        self._prompts = Prompts(first.groups)
        weights = self._weights.open(first.groups)
        if self._extra.weights_check != "config":
            self._content.weights = weights
        has_prefixes = self._beside or self._vllm_config.cache_config.enable_prefix_caching
        context = ConnectorContext(
            shows_steps=self._shows_steps(),
            config=self._config,
            extra=self._extra,
            incarnation=first.incarnation,
            groups=tuple(group.geometry for group in first.groups),
            model=replace(first.model, weights_digest=weights),
            num_blocks=num_blocks_of(first.groups, first.num_blocks),
            world_size=world_size,
            layer_windows=layer_windows(first.groups),
            asks_what_was_filled=self._leaves_out or not has_prefixes,
            serving_engine=f"vLLM {vllm.__version__}",
        )
        self._has_windows = any(keeps_a_part(group.geometry) for group in first.groups)
        self._has_states = any(group.geometry.is_recurrent for group in first.groups)
        self._pull = PullScheduler.open(context)
        self._pull.set_worker_handshakes([each.handshake for each in ranks])
        if not self._weights.are_watched:  # digests of older weights would refuse a right pair
            self._pull.description.set_heads(None)
        logger.info(
            "engine %s listens on %s:%d, peers are told %s",
            self._config.engine_id,
            self._extra.host,
            self._pull.port,
            self._pull.address,
        )

    def _open_again(self, pull: PullScheduler, ranks: Sequence[RankHandshake]) -> None:
        """Describes the caches after a wake-up. vLLM also wakes engines that did not sleep, or kept
        their caches; then the incarnation is the same, and nothing has changed.
        """
        incarnation = ranks[0].incarnation
        if incarnation == pull.description.told.incarnation:
            return
        pull.begin_anew(incarnation, [each.handshake for each in ranks])
        logger.info("engine %s has registered its KV cache again", self._config.engine_id)

    def _shows_steps(self) -> bool:
        """Whether a step's report says which tokens are written, so that prompts can be lent while
        they are computed.
        """
        for reason, is_so in (
            # The drafter computes KV after the report.
            (
                "tokens are drafted (speculative_config)",
                self._vllm_config.speculative_config is not None,
            ),
            # Another connector may report after a step that KV for the step never arrived.
            ("there is another connector beside kvferry's", bool(self._beside)),
        ):
            if is_so:
                if self._config.is_producer:
                    logger.info("prompts are lent once they are whole: %s", reason)
                return False
        return True

    @property
    def pull(self) -> PullScheduler:
        """The kvferry scheduler, once the ranks have described themselves."""
        assert self._pull is not None  # vLLM hands over the ranks' reports before any request
        return self._pull

    # ---- weights that change ------------------------------------------------------------------

    def _look_at_weights(self) -> None:
        """After a call that may have changed the weights, drops the KV of the older weights."""
        if not self._weights.in_question or self._pull is None:
            return
        before, after = self._content.weights, self._weights.look()
        if after is None or after == before:
            return
        if self._kv_cache_manager is None:
            self._end_transfers(before, after)
            return
        outdated = compat.forget_prefixes(self._kv_cache_manager)
        logger.warning(
            "the weights have changed in memory, from %s to %s: leases are revoked and loads fail; "
            "the prefix cache is empty; KV of %d requests is not lent",
            before,
            after,
            len(outdated),
        )
        self._content.weights = after
        self.pull.set_weights(after, outdated, self._weights.heads)
        self._beside.forget(outdated)
        for request_id, request in self._loaded.items():
            if request_id in self.pull.borrower.active:
                self._overtaken.add(request_id)
            else:
                compat.begin_anew(self._kv_cache_manager, request)

    def _end_transfers(self, before: str, after: str) -> None:
        """Stops all lending and loading: the weights behind each block's KV are unknown now."""
        logger.warning(
            "the weights have changed in memory, from %s to %s: leases are revoked, and nothing is "
            "lent or loaded any more, as before 0.30 vLLM does not let kvferry empty its prefix "
            "cache; restart this engine with the new weights",
            before,
            after,
        )
        self._weights.close()
        # No other engine has an equal value.
        self._content.weights = f"{after} or older ones {secrets.token_hex(8)}"
        self.pull.set_weights(self._content.weights, None)

    def _revoke_leases(self) -> None:
        if self._pull is not None:
            self._pull.lender.leases.revoke_all()

    # ---- requests -----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """See :meth:`PullScheduler.on_new_request`.

        vLLM's API server may refuse a request (for too long a prompt, say), or a request may end
        with an error. vLLM then sends another request with the same parameters, a prompt of one
        zero and the order to abort, so that the prefill engine frees the blocks.
        """
        if request.abort_immediately:
            self.pull.on_rejected_request(self._view(request))
            return
        self._look_at_weights()
        params = request.kv_transfer_params or {}
        loads, lends = params.get("do_remote_prefill"), params.get("do_remote_decode")
        if not (loads or lends):
            self._pending_stats.stats.note_plain()
        if params.get("only_cached") and lends and not loads:  # contradictions are refused
            self._prepare_prefix(request)
        elif self._has_windows and lends and not _keeps_first_token(params):
            # The decode engine computes the last token of the same prompt. It therefore looks one
            # token further back than vLLM keeps of a window once that token is computed, and needs
            # recurrent states from before that token. (If the first token of the answer is kept,
            # the decode engine's prompt is longer by one token.)
            compat.drop_last_prompt_token(request)
        try:
            self.pull.on_new_request(self._view(request))
        except KVFerryError as error:
            self._refuse(request, error)
        if request.request_id in self.pull.lender.growing.shown:
            self._prompts.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See :meth:`PullScheduler.get_num_new_matched_tokens`.

        vLLM calls this method for each waiting request in every step, so most calls must be cheap.
        """
        request_id, pull = request.request_id, self._pull
        assert pull is not None  # see :attr:`pull`
        found: tuple[int | None, bool]
        if (
            request_id in self._refused
            or request_id in self._num_cached
            or request.get_skip_reading_prefix_cache()
        ):
            found = self._without_lease(request, num_computed_tokens)
        else:
            try:
                view = VllmRequest(request, self._content)
                found = pull.get_num_new_matched_tokens(view, num_computed_tokens)
            except KVFerryError as error:
                self._refuse(request, error)
                found = self._without_lease(request, num_computed_tokens)
        if found[0] is not None:
            self._without_blocks.add(request_id)
        return found

    def _without_lease(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens to load, whether asynchronously) for a request without a lease."""
        if request.get_skip_reading_prefix_cache():
            # The request wants the prompt's log-probabilities, which only the computation of the
            # prompt gives; before 0.31 vLLM would load the prompt all the same.
            return 0, False
        if request.request_id in self._num_cached:
            # vLLM computes one token more than the cache holds: a request cannot end without any.
            self._num_cached[request.request_id] = num_computed_tokens
            compat.cut_prompt(request, num_computed_tokens + 1)
            return 0, False
        tokens = request.num_tokens - 1 - num_computed_tokens
        return (0, False) if self._recompute or tokens <= 0 else (tokens, True)

    def _prepare_prefix(self, request: Any) -> None:
        """Notes a request that lends only the cached tokens of its prompt.

        Nothing is lent if the number of cached tokens is unclear: with recurrent layers, vLLM may
        hit and then copy a part of a block; if log-probabilities of the prompt are wanted, vLLM
        hits nothing. An image must not be cut, and another connector may bring more of the prompt
        than kvferry lends. In these two cases the whole prompt is computed and lent.
        """
        if request.mm_features or self._beside:
            if self._has_windows:
                compat.drop_last_prompt_token(request)
            return
        if self._has_states:
            logger.info(
                "request %s: no cached prefix is lent: vLLM keeps recurrent states of parts of "
                "blocks; have the prompt computed here, without only_cached",
                request.request_id,
            )
        self._num_cached[request.request_id] = 0
        if self._has_states or request.get_skip_reading_prefix_cache():
            compat.cut_prompt(request, 1)

    def _view(self, request: Any) -> VllmRequest:
        return VllmRequest(request, self._content, self._num_cached.get(request.request_id))

    def _refuse(self, request: Any, error: KVFerryError) -> None:
        logger.error(
            "request %s: its load from engine %s was refused and it will %s: %s: %s",
            request.request_id,
            shown((request.kv_transfer_params or {}).get("remote_engine_id")),
            "be recomputed" if self._recompute else "fail",
            type(error).__name__,
            error,
        )
        self._refused[request.request_id] = error
        self._pending_stats.stats.note_refusal(type(error).__name__)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See :meth:`PullScheduler.update_state_after_alloc`."""
        self._without_blocks.discard(request.request_id)
        refused = self._refused.pop(request.request_id, None)
        if refused is not None and num_external_tokens:
            self._refused_now[request.request_id] = self._last_loaded_block(request, blocks)
        view = self._view(request)
        self.pull.update_state_after_alloc(
            view,
            VllmBlocks(blocks, self.groups),
            0 if refused is not None else num_external_tokens,
        )
        if num_external_tokens and refused is None:
            self._loaded[request.request_id] = request
            self._beside.will_write(ids for table in blocks.get_block_ids() for ids in table)

    def _last_loaded_block(self, request: Any, blocks: Any) -> int:
        """The vLLM block that holds the last token of a load, in the first KV cache group."""
        group = self.groups[0]
        last_token = request.num_tokens - 2  # the prompt's last token is computed here
        index = last_token // (group.geometry.virtual_block_size * group.split)
        block: int = blocks.get_block_ids()[group.table][: index + 1][-1]
        return block

    def _leave_blocks_out(self, request: VllmRequest) -> None:
        """Keeps the blocks that a finished load did not fill out of vLLM's prefix cache.

        If a window begins inside a block, the source may have freed the tokens before the window.
        If only the source has a window, most tokens were never there.
        """
        starts = self.pull.first_filled_tokens(request)
        if starts is None:
            return
        for group, start in zip(self.groups, starts, strict=True):
            if start:
                compat.leave_blocks_out(
                    self._kv_cache_manager, group.table, request.request_id, start
                )

    def request_finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`PullScheduler.request_finished`."""
        self._look_at_weights()
        self._refused.pop(request.request_id, None)
        self._loaded.pop(request.request_id, None)
        self._without_blocks.discard(request.request_id)
        self._overtaken.discard(request.request_id)
        self._prompts.forget(request.request_id)
        tables = tuple(group.block_ids(block_ids) for group in self.groups)
        view = self._view(request)
        keep, params = self.pull.request_finished(view, tables, view.note)
        if self._num_cached.pop(request.request_id, None) is not None and keep:
            self._pending_stats.stats.note_prefix(view.num_computed_tokens)
        return keep, params

    # ---- every step ---------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The scheduler half's news of this step for the ranks."""
        self._look_at_weights()  # for engines without a cache manager that tells of each step
        pull = self._pull
        assert pull is not None  # see :attr:`pull`; reading the attribute costs less
        has_news = pull.has_news()
        if not has_news and not self._refused_now:
            return _NOTHING
        if shown := pull.lender.growing.shown:
            scheduler_output = self._prompts.show(scheduler_output, shown)
        news = pull.build_connector_meta(scheduler_output) if has_news else None
        refused, self._refused_now = self._refused_now, {}
        return StepMetadata(news, refused)

    def update_connector_output(self, output: Any) -> None:
        """Takes the ranks' reports, which vLLM has joined."""
        report = output.kv_connector_worker_meta
        finished = output.finished_recving or set()
        if report is None and not finished:
            return
        if not isinstance(report, StepReport):
            report = StepReport()
        report.settle()
        self._failing |= report.failed
        failed = self._failing & finished
        self._failing -= failed
        self.pull.update_connector_output(
            KVConnectorOutput(
                finished_recving=set(finished),
                failed_recving=failed,
                transfer_records=report.records,
                transfer_progress=report.progress,
                written=report.written,
            )
        )
        if self._leaves_out:
            for request_id in (finished - failed) & self._loaded.keys():
                self._leave_blocks_out(self._view(self._loaded[request_id]))
        overtaken = self._overtaken & finished
        self._overtaken -= overtaken
        for request_id in overtaken - failed:
            # The ranks were ready before the order to cancel the load reached them.
            compat.begin_anew(self._kv_cache_manager, self._loaded[request_id])

    def take_stats(self) -> LoadStats | None:
        """Statistics since the last call; ``None`` if there is none."""
        return self._pending_stats.take(self.pull.records.num_open(), self.pull.counters())

    def has_pending_work(self) -> bool:
        """See :meth:`PullScheduler.has_pending_work`."""
        return bool(self._refused_now) or self.pull.has_pending_work()

    def close(self) -> None:
        """Ends threads and sockets. Idempotent."""
        self._weights.close()
        if self._pull is not None:
            self._pull.close()


def _keeps_first_token(params: Mapping[str, Any]) -> bool:
    """Whether the decode engine gets the first token of the answer, and computes only later
    tokens.
    """
    return bool(params.get("keep_first_token")) or is_wanted(params)


def layer_windows(groups: Iterable[CacheGroup]) -> Mapping[int, int]:
    """Layer of the model → window in tokens, for the groups with a window."""
    geometries = [group.geometry for group in groups if not group.geometry.is_recurrent]
    return {
        layer: geometry.sliding_window
        for geometry in geometries
        if geometry.sliding_window is not None
        for layer in geometry.model_layers
    }


def keeps_a_part(geometry: GroupGeometry) -> bool:
    """Whether a group keeps less than all tokens: a window, a chunk, or one state."""
    return geometry.sliding_window is not None or geometry.attention_chunk_size is not None
