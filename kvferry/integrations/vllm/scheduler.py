"""The half of the adapter in vLLM's scheduler process."""

import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from kvferry.config import shown
from kvferry.connectors.base import ConnectorContext, KVConnectorOutput
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.errors import ConfigError, KVFerryError
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.beside import Beside
from kvferry.integrations.vllm.caches import CacheGroup, num_blocks_of
from kvferry.integrations.vllm.config import transfer_config
from kvferry.integrations.vllm.content import ContentKeys
from kvferry.integrations.vllm.messages import RankHandshake, StepMetadata, StepReport
from kvferry.integrations.vllm.stats import LoadStats
from kvferry.integrations.vllm.views import BlocksView, Prompts, RequestView
from kvferry.integrations.vllm.weights import EngineWeights
from kvferry.topology import GroupGeometry

logger = logging.getLogger(__name__)

SPARE = 16
"""Cached prefixes are withdrawn while less than one of so many blocks is free."""

_NOTHING = StepMetadata()
"""For the many steps without news; nobody changes it."""


class SchedulerHalf:
    """Translates vLLM's scheduler calls for a :class:`PullScheduler`.

    Nothing may be raised into vLLM's loop once it runs, as it would end the engine. A load that our
    half refuses ends as the engine's ``kv_load_failure_policy`` says: with ``recompute`` no tokens
    are offered, and vLLM computes the prompt; with ``fail`` the request is parked as if it loaded,
    and the ranks report in the same step that the load failed.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Checks the config; :meth:`open` does the rest, once the ranks are known.

        Raises:
            ConfigError: see :func:`~kvferry.integrations.vllm.config.transfer_config`.
        """
        self._vllm_config = vllm_config
        self._config, self._extra = transfer_config(vllm_config)
        self._recompute = self._config.kv_load_failure_policy == "recompute"
        self._groups: tuple[CacheGroup, ...] = ()
        self._prompts = Prompts(())
        self._pull: PullScheduler | None = None
        self._has_windows = False
        self._has_states = False
        self._kv_cache_manager: Any = None
        self._beside = Beside()
        self._leaves_out = False
        """Whether blocks that a load fills in part can be kept from vLLM's prefix cache."""
        self._refused: dict[str, KVFerryError] = {}
        self._refused_now: dict[str, int] = {}
        """Request id → the last block that its load would have filled."""
        self._failing: set[str] = set()
        """Requests whose load failed on a rank, until every rank is done with it."""
        self._loaded: dict[str, Any] = {}
        """Request id → the request, for those that were given blocks to load into."""
        self._num_cached: dict[str, int] = {}
        """Request id → tokens that the prefix cache had of it, for those of which only these are
        lent."""
        self._without_blocks: set[str] = set()
        """Requests that could have been admitted in the last step, and were not."""
        self._overtaken: set[str] = set()
        """Requests that were loading when the weights changed."""
        self._stats: LoadStats | None = None
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
        """See vLLM; it comes before :meth:`open`.

        Args:
            kv_cache_manager: the scheduler's.
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
        self._beside.look()
        self._make_room()

    def _make_room(self) -> None:
        """Withdraws a cached prefix that is lent and nobody has fetched, where vLLM lacks blocks.

        Its blocks come back in the next step or the one after it: vLLM frees what its ranks report.
        """
        lacks, self._without_blocks = bool(self._without_blocks), set()
        if self._pull is None or not self._pull.lends_prefixes:
            return
        free, usable = compat.free_blocks(self._kv_cache_manager)
        if (lacks or free < usable // SPARE) and self._pull.withdraw_oldest():
            self._news_for_stats().note_withdrawal()

    def open(self, handshakes: Iterable[RankHandshake]) -> None:
        """Starts the control channel; from now on other engines may connect.

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
        self._groups = first.groups
        self._prompts = Prompts(first.groups)
        weights = self._weights.open(first.groups)
        if self._extra.weights_check != "config":
            self._content.weights = weights
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
            asks_what_was_filled=(
                self._leaves_out
                or not (self._beside or self._vllm_config.cache_config.enable_prefix_caching)
            ),
        )
        self._has_windows = any(keeps_a_part(group.geometry) for group in first.groups)
        self._has_states = any(group.geometry.is_recurrent for group in first.groups)
        self._pull = PullScheduler.open(context)
        self._pull.set_worker_handshakes([each.handshake for each in ranks])
        if not self._weights.are_watched:  # digests of older weights would refuse a right pair
            self._pull.set_head_digests(None)
        logger.info(
            "engine %s listens on %s:%d, peers are told %s",
            self._config.engine_id,
            self._extra.host,
            self._pull.port,
            self._pull.address,
        )

    def _shows_steps(self) -> bool:
        """Whether the reports of steps say which tokens are written, so that prompts can be lent
        while they are computed.
        """
        for reason, is_so in (
            # What drafts them computes its own KV after the report.
            (
                "tokens are drafted (speculative_config)",
                self._vllm_config.speculative_config is not None,
            ),
            # It may say after a step that what it brought for the step was never there.
            ("there is another connector beside kvferry's", bool(self._beside)),
        ):
            if is_so:
                if self._config.is_producer:
                    logger.info("prompts are lent once they are whole: %s", reason)
                return False
        return True

    @property
    def pull(self) -> PullScheduler:
        """Our half."""
        assert self._pull is not None  # vLLM hands over the ranks' reports before any request
        return self._pull

    # ---- weights that change ------------------------------------------------------------------

    def _look_at_weights(self) -> None:
        """After a call that may have changed the weights: lets go of what was computed before."""
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
            if self.pull.is_loading(request_id):
                self._overtaken.add(request_id)
            else:
                compat.begin_anew(self._kv_cache_manager, request)

    def _end_transfers(self, before: str, after: str) -> None:
        """Has nothing more lent or loaded: nobody knows which KV here is of which weights."""
        logger.warning(
            "the weights have changed in memory, from %s to %s: leases are revoked, and nothing is "
            "lent or loaded any more, as before 0.30 vLLM does not let kvferry empty its prefix "
            "cache; restart this engine with the new weights",
            before,
            after,
        )
        self._weights.close()
        # Equal to those of no other engine.
        self._content.weights = f"{after} or older ones {secrets.token_hex(8)}"
        self.pull.set_weights(self._content.weights, None)

    def _revoke_leases(self) -> None:
        if self._pull is not None:
            self._pull.revoke_leases()

    # ---- requests -----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """See :meth:`PullScheduler.on_new_request`.

        For a request that its API server refuses (too long a prompt, say) or that ended with an
        error, vLLM sends another one with the same parameters, a prompt of one zero and the order
        to abort it, so that the prefill engine's blocks are freed.
        """
        if request.abort_immediately:
            self.pull.on_rejected_request(self._view(request))
            return
        self._look_at_weights()
        params = request.kv_transfer_params or {}
        loads, lends = params.get("do_remote_prefill"), params.get("do_remote_decode")
        if not (loads or lends):
            self._news_for_stats().note_plain()
        if params.get("only_cached") and lends and not loads:  # what contradicts it is refused
            self._prepare_prefix(request)
        elif self._has_windows and lends and not params.get("keep_first_token"):
            # Decode computes the last token of the same prompt: it looks one token further back
            # than vLLM keeps of a window once that token is computed, and needs recurrent states
            # from before it. (Where the first token of the answer is kept, decode's prompt is
            # longer by one.)
            compat.drop_last_prompt_token(request)
        try:
            self.pull.on_new_request(self._view(request))
        except KVFerryError as error:
            self._refuse(request, error)
        if request.request_id in self.pull.shown_prompts:
            self._prompts.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See :meth:`PullScheduler.get_num_new_matched_tokens`.

        vLLM asks for each waiting request in every step, so this does little for most of them.
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
                view = RequestView(request, self._content)
                found = pull.get_num_new_matched_tokens(view, num_computed_tokens)
            except KVFerryError as error:
                self._refuse(request, error)
                found = self._without_lease(request, num_computed_tokens)
        if found[0] is not None:
            self._without_blocks.add(request_id)
        return found

    def _without_lease(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The same for a request that loads nothing."""
        if request.get_skip_reading_prefix_cache():
            # The prompt's log-probabilities are wanted, which come with computing it; before 0.31
            # vLLM would load it all the same.
            return 0, False
        if request.request_id in self._num_cached:
            # So vLLM computes one token more than it has: it cannot end a request without any.
            self._num_cached[request.request_id] = num_computed_tokens
            compat.cut_prompt(request, num_computed_tokens + 1)
            return 0, False
        tokens = request.num_tokens - 1 - num_computed_tokens
        return (0, False) if self._recompute or tokens <= 0 else (tokens, True)

    def _prepare_prefix(self, request: Any) -> None:
        """Notes a request of which only what is cached is to be lent.

        Where that cannot be told, nothing is: of its recurrent layers vLLM may hit a part of a
        block, which it then copies; where log-probabilities of the prompt are wanted it hits none.
        An image must not be cut, and another connector may bring more of the prompt than we lend,
        so there all of it is computed, and lent.
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

    def _view(self, request: Any) -> RequestView:
        return RequestView(request, self._content, self._num_cached.get(request.request_id))

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
        self._news_for_stats().note_refusal(type(error).__name__)

    def _news_for_stats(self) -> LoadStats:
        if self._stats is None:
            self._stats = LoadStats()
        return self._stats

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See :meth:`PullScheduler.update_state_after_alloc`."""
        self._without_blocks.discard(request.request_id)
        refused = self._refused.pop(request.request_id, None)
        if refused is not None and num_external_tokens:
            self._refused_now[request.request_id] = self._last_loaded_block(request, blocks)
        view = self._view(request)
        self.pull.update_state_after_alloc(
            view,
            BlocksView(blocks, self._groups),
            0 if refused is not None else num_external_tokens,
        )
        if num_external_tokens and refused is None:
            self._loaded[request.request_id] = request
            self._beside.will_write(ids for table in blocks.get_block_ids() for ids in table)

    def _last_loaded_block(self, request: Any, blocks: Any) -> int:
        """Which of vLLM's blocks holds the last token of a load, in the first KV cache group."""
        group = self._groups[0]
        last_token = request.num_tokens - 2  # the prompt's last one is computed here
        index = last_token // (group.geometry.virtual_block_size * group.split)
        block: int = blocks.get_block_ids()[group.table][: index + 1][-1]
        return block

    def _leave_blocks_out(self, request: RequestView) -> None:
        """Keeps what a load that has ended did not fill from vLLM's prefix cache.

        Where a window begins inside a block of ours, the source may have freed the tokens before
        it; and where the source has a window and we keep all tokens, most were never there.
        """
        starts = self.pull.first_filled_tokens(request)
        if starts is None:
            return
        for group, start in zip(self._groups, starts, strict=True):
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
        self._beside.request_finished(request.request_id)
        tables = tuple(group.block_ids(block_ids) for group in self._groups)
        view = self._view(request)
        keep, params = self.pull.request_finished(view, tables)
        if self._num_cached.pop(request.request_id, None) is not None and keep:
            self._news_for_stats().note_prefix(view.num_computed_tokens)
        return keep, params

    # ---- every step ---------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the ranks are told in this step."""
        self._look_at_weights()  # where no cache manager says that a step begins
        pull = self._pull
        assert pull is not None  # see :attr:`pull`; as an attribute, it costs less
        has_news = pull.has_news()
        if not has_news and not self._refused_now:
            return _NOTHING
        if shown := pull.shown_prompts:
            scheduler_output = self._prompts.show(scheduler_output, shown)
        news = pull.build_connector_meta(scheduler_output) if has_news else None
        refused, self._refused_now = self._refused_now, {}
        return StepMetadata(news, refused)

    def update_connector_output(self, output: Any) -> None:
        """What the ranks reported, joined by vLLM."""
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
            # Its ranks were ready before they were told to give the load up.
            compat.begin_anew(self._kv_cache_manager, self._loaded[request_id])

    def take_stats(self) -> LoadStats | None:
        """What was refused, or came without parameters, since the last call."""
        stats, self._stats = self._stats, None
        return stats

    def has_pending_work(self) -> bool:
        """See :meth:`PullScheduler.has_pending_work`."""
        return bool(self._refused_now) or self.pull.has_pending_work()

    def close(self) -> None:
        """Ends threads and sockets. Idempotent."""
        self._weights.close()
        if self._pull is not None:
            self._pull.close()


def layer_windows(groups: Iterable[CacheGroup]) -> Mapping[int, int]:
    """Layer of the model → its window, for the groups that keep no more than that."""
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
