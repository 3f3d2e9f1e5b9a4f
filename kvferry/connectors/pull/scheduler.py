"""The deciding half of the PullConnector: leases out blocks, obtains leases for loads."""

import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from kvferry.connectors.base import (
    BlocksView,
    ConnectorContext,
    KVConnectorOutput,
    RequestView,
    ScheduledRequestView,
    SchedulerConnector,
    SchedulerOutputView,
    TransferRecord,
)
from kvferry.connectors.pull.asks import PendingTicket
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.groups import Filled
from kvferry.connectors.pull.metadata import LentSpec, LoadSpec, PullMetadata
from kvferry.connectors.pull.record import RequestRecord, RequestRecords
from kvferry.connectors.pull.sources import Load, LoadState, Sources
from kvferry.connectors.pull.tickets import AcceptedTickets
from kvferry.control.client import ControlClient
from kvferry.control.leases import Lease, LeaseOutcome, LeaseRefusal, LeaseTable
from kvferry.control.messages import BlockTables, TransferStatus
from kvferry.control.server import ControlServer
from kvferry.control.tickets import Ticket, Transfer, prompt_digest, read_transfer, sign, verify
from kvferry.control.tracing import Spans
from kvferry.errors import (
    CancelledError,
    ConfigError,
    KVFerryError,
    RequestError,
    TicketError,
    TicketExpiredError,
)
from kvferry.topology.description import EngineDescription, RankDescription, tagged_groups
from kvferry.zeromq import is_everywhere, is_loopback, split_address

logger = logging.getLogger(__name__)

_ranks = msgspec.msgpack.Decoder(RankDescription)

NOTHING_LENT: Mapping[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": False,
    "remote_num_tokens": 0,
}
"""``kv_transfer_params`` of the answer to ``only_cached`` where nothing is lent. Who forwards them
has the prompt computed."""


@dataclass(slots=True, eq=False)
class EarlyLease:
    """The lease of a prompt that is lent while it is computed."""

    request: RequestView
    lease: Lease | None = None
    """``None`` until the first step that computes the prompt."""
    is_lent: bool = False
    """Whether the prompt is computed, and its blocks are kept for whoever takes the lease."""
    outcome: LeaseOutcome | None = None
    """How it ended while the prompt was computed."""


class PullScheduler(SchedulerConnector):
    """Scheduler half; see :class:`~kvferry.connectors.pull.PullConnector`."""

    def __init__(
        self,
        context: ConnectorContext,
        extra: PullConfig,
        key: bytes | None,
        leases: LeaseTable,
        server: ControlServer,
        client: ControlClient,
        sources: Sources,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        """Takes ownership of server, client, sources and spans; use :meth:`open`.

        ``clock`` is theirs: seconds that never run backwards.
        """
        self._context = context
        self._extra = extra
        self._key = key
        self._leases = leases
        self._server = server
        self._client = client
        self._sources = sources
        self._clock = clock
        self._tickets = AcceptedTickets(key, extra)
        self._loads: dict[str, Load] = {}
        """Request id → its load, until the request ends or, if that is later, the load does."""
        self._asks: dict[str, PendingTicket] = {}
        """Request id → the ticket that it waits for, until there is a load of it or none will be
        needed."""
        self._spans = spans
        self._records = RequestRecords(clock, spans)
        self._description: EngineDescription | None = None
        """Of this engine, once its ranks are known."""
        self._told_of_plain = False
        """Whether the log has a request that came past the prefill engines."""
        self._outdated: set[str] = set()
        """Requests with KV of weights that the engine no longer has."""
        self._lends = True
        """Until its weights change where nobody knows which KV is of which."""
        self._lending: dict[str, Transfer] = {}
        """Request id → the transfer that others may ask for, of requests that have come with one:
        until nothing is lent, or no longer."""
        self._lent_as: dict[Transfer, str] = {}
        """The leases of those that are lent."""
        self._prompts: dict[str, EarlyLease] = {}
        """Request id → its lease, for those that are to be lent while they are computed."""
        self._early: dict[str, EarlyLease] = {}
        """Those that were granted and not swept, by the lease's id."""
        self._growing: dict[str, Load] = {}
        """Lease id → the load, where the ranks read a prompt that was not whole when they began."""
        self._prefixes: dict[str, Lease] = {}
        """Request id → its lease, for those that lend what was cached; the oldest first."""
        self._counters: Counter[str] = Counter()
        self._step: PullMetadata | None = None
        """What the ranks are to be told; made when there is something."""
        self._has_looked = False
        """Whether this step has looked for answers of sources."""
        self._reported: dict[str, tuple[int, int]] = {}
        self._mirrored_ranks: frozenset[int] = frozenset()
        self._mirroring: dict[str, set[int]] = {}

    @classmethod
    def open(cls, context: ConnectorContext) -> "PullScheduler":
        """Starts the control server and the client.

        Raises:
            ConfigError: a key cannot be read, or a peer's address is malformed.
            PortInUseError: ``kv_port`` is taken.
        """
        extra = context.extra
        assert isinstance(extra, PullConfig)  # the registry checked it
        config = context.config
        peers = extra.peer_addresses()
        key = extra.key()
        _check_reach(extra, is_producer=config.is_producer)
        if config.is_consumer and key is None and not peers:
            logger.warning(
                "engine %s has neither cluster_key nor peers: it will contact whatever engine a "
                "request names; set cluster_key_file in kv_connector_extra_config",
                config.engine_id,
            )
        options = extra.control_options()
        leases = LeaseTable.from_options(options, context.num_blocks)
        server = ControlServer(
            engine_id=config.engine_id,
            incarnation=context.incarnation,
            host=extra.host,
            port=config.kv_port,
            role=config.kv_role,
            leases=leases,
            options=options,
            key=key,
        )
        client = ControlClient(
            engine_id=config.engine_id,
            incarnation=context.incarnation,
            options=options,
            peers=server.peers,
        )
        sources = Sources(
            client,
            groups=context.groups,
            addresses=peers,
            renew_interval=lambda ticket: ticket.lease_duration_s / options.renewals_per_lease,
            handshake_timeout_s=extra.handshake_timeout_s,
            progress_timeout_s=extra.progress_timeout_s,
            note_error=server.note_error,
        )
        spans = Spans.from_environment("kvferry-engine", config.engine_id)
        return cls(context, extra, key, leases, server, client, sources, spans=spans)

    @property
    def port(self) -> int:
        """TCP port of the control channel."""
        return self._server.port

    def set_worker_handshakes(self, handshakes: Sequence[bytes]) -> None:
        """Completes this engine's description: from now on it answers and makes handshakes."""
        config = self._context.config
        ranks = tuple(_ranks.decode(handshake) for handshake in handshakes)
        self._mirrored_ranks = frozenset(rank.rank for rank in ranks if rank.mirrored)
        self._describe(
            EngineDescription(
                engine_id=config.engine_id,
                incarnation=self._context.incarnation,
                model=self._context.model,
                groups=tagged_groups(self._context.groups),
                ranks=ranks,
                convert_dtype=self._extra.convert_dtype,
            )
        )
        self._server.set_transfers(self._transfer_statuses)
        self._server.set_traces(self._records.find)

    def _describe(self, description: EngineDescription) -> None:
        self._description = description
        self._server.set_description(description)
        self._sources.describe(description)

    # ---- weights that change ------------------------------------------------------------------

    def set_weights(self, digest: str, outdated: Iterable[str] | None) -> None:
        """The engine has other weights now: KV of the older ones is neither lent nor loaded.

        Leases end, and loads under way fail. To be called between two steps.

        Args:
            digest: of the weights.
            outdated: ids of the requests with KV of the older ones; ``None`` where that will never
                be known again, so that nothing more is lent.
        """
        assert self._description is not None  # requests come after the ranks
        model = self._description.model
        error = TicketExpiredError(
            f"weights: the KV was computed with {model.weights_digest}, this engine has {digest} "
            "now; compute the prompt again"
        )
        self.revoke_leases()
        self._lends = self._lends and outdated is not None
        self._outdated.update(outdated or ())
        for load in self._loads.values():
            if load.state is LoadState.LOADING:
                self._cancel(load, f"{type(error).__name__}: {error}")
            elif load.state not in (LoadState.LOADED, LoadState.FAILED):
                self._sources.refuse(load, error)
        for pending in self._asks.values():
            self._sources.refuse_ask(pending, error)
        model = replace(model, weights_digest=digest)
        self._describe(replace(self._description, model=model))

    def is_loading(self, request_id: str) -> bool:
        """Whether the ranks read for a request."""
        load = self._loads.get(request_id)
        return load is not None and load.state is LoadState.LOADING

    def revoke_leases(self) -> None:
        """Takes every lease back: its blocks will not hold any longer what was lent."""
        self._leases.revoke_all()

    # ---- target side --------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """Checks the ticket of a request that was prefilled elsewhere and goes for its lease.

        Raises:
            TicketError: the ticket is refused, see :meth:`AcceptedTickets.accept`; nobody was
                contacted.
            ConfigError: this engine is a producer only.
            RequestError: its parameters contradict each other.
        """
        params = request.kv_transfer_params or {}
        loads = bool(params.get("do_remote_prefill"))
        if params.get("only_cached") and (loads or not params.get("do_remote_decode")):
            raise RequestError(
                "kv_transfer_params: only_cached asks for what is cached here, so it goes with "
                "do_remote_decode and not with do_remote_prefill"
            )
        if not loads and not params.get("do_remote_decode"):
            self._note_plain(request)
            return
        record = self._records.begin(request, loads=loads)
        try:
            transfer = self._transfer_to_lend(params)
        except KVFerryError as error:
            self._refused(record, error)
            raise
        if not loads:
            self._expect(request, transfer)
            return
        try:
            if "ticket" not in params and "transfer" in params and transfer is None:
                self._begin_ask(record, params["transfer"])
                return
            ticket = self._accepted(params.get("ticket"), request)
        except KVFerryError as error:
            self._refused(record, error)
            raise
        self._expect(request, transfer)
        self._begin_load(record, ticket)

    def _begin_load(self, record: RequestRecord, ticket: Ticket) -> None:
        """Goes for the lease of an accepted ticket."""
        if ticket.incarnation == self._context.incarnation:
            # It leads back here: what it lends is in our own prefix cache.
            self._tickets.retire(ticket)
            self._withdraw_own(ticket)
            record.loads = False
            return
        record.peer, record.peer_request_id = ticket.engine_id, ticket.request_id
        self._loads[record.request_id] = self._sources.add(record, ticket)

    def _begin_ask(self, record: RequestRecord, text: object) -> None:
        """Asks for the ticket of a request that its source was sent as well.

        Raises:
            TicketError, ConfigError: see :meth:`on_new_request`.
        """
        self._check_role()
        try:
            transfer = self._tickets.accept_transfer(text)
            self._asks[record.request_id] = self._sources.ask(record, transfer)
        except TicketError as error:
            self._note_ticket(record.request_id, error)
            raise

    def _may_go_on(self, request: RequestView, num_computed_tokens: int) -> bool:
        """Whether a request waits for no ticket any more.

        Raises:
            KVFerryError: the ticket is refused, or could not be had.
        """
        pending = self._asks.get(request.request_id)
        if pending is None or request.num_tokens - 1 <= num_computed_tokens:
            return True  # all of it is here
        if not pending.is_settled and not (self._look() and pending.is_settled):
            return False
        if pending.error is not None:
            raise pending.error
        if pending.reason:
            del self._asks[request.request_id]
            pending.record.loads = False
            self._counters["asks_denied"] += 1
            logger.warning(
                "request %s: the engine at %s lends nothing, and its prompt is computed here: %s",
                request.request_id,
                pending.transfer.address,
                pending.reason,
            )
        elif pending.ticket:
            try:
                ticket = self._tickets.accept(pending.ticket, request, pending.transfer)
            except TicketError as error:
                self._note_ticket(request.request_id, error)
                pending.record.fail(self._clock(), f"{type(error).__name__}: {error}")
                pending.error = error
                raise
            del self._asks[request.request_id]
            self._begin_load(pending.record, ticket)
        return pending.is_settled

    def _drop_ask(self, request_id: str) -> None:
        """No ticket is needed for a request any more: one that comes is given back."""
        pending = self._asks.pop(request_id, None)
        if pending is None:
            return

        def give_back(text: str) -> None:
            try:
                ticket = self._tickets.read_asked(text, pending.transfer)
            except TicketError as error:
                self._note_ticket(request_id, error)
                return
            leases = {ticket.lease_id: ticket.secret}
            self._client.release(ticket.address, ticket.incarnation, leases)

        self._sources.drop_ask(pending, give_back)

    def _refused(self, record: RequestRecord, error: KVFerryError) -> None:
        record.fail(self._clock(), f"{type(error).__name__}: {error}")
        self._records.end(record, "refused")

    def lends_only_cached(self, request: RequestView) -> bool:
        """See :meth:`SchedulerConnector.lends_only_cached`."""
        return bool((request.kv_transfer_params or {}).get("only_cached"))

    def _note_plain(self, request: RequestView) -> None:
        """Says once that a request came past every prefill engine; nothing else would show it."""
        role = self._context.config.kv_role
        if role != "kv_consumer" or self._told_of_plain:
            return
        self._told_of_plain = True
        logger.warning(
            "request %s came without kv_transfer_params, and this engine (kv_role: %s) computes "
            "its prompt; of further ones nothing is said. If a prefill engine has computed it, "
            "have the proxy forward the kv_transfer_params of that one's answer unchanged",
            request.request_id,
            role,
        )

    def _accepted(self, signed: object, request: RequestView) -> Ticket:
        """The ticket of a request that this engine may load for.

        Raises:
            TicketError, ConfigError: see :meth:`on_new_request`.
        """
        self._check_role()
        try:
            return self._tickets.accept(signed, request)
        except TicketError as error:
            self._note_ticket(request.request_id, error)
            raise

    def _check_role(self) -> None:
        if not self._context.config.is_consumer:
            raise ConfigError(
                "kv_role: this engine is kv_producer and was sent a request to load "
                "(do_remote_prefill); send it to a kv_consumer, or make this one kv_both"
            )

    def _note_ticket(self, request_id: str, error: TicketError) -> None:
        self._server.note_error("ticket", f"request {request_id}: {type(error).__name__}: {error}")

    def on_rejected_request(self, request: RequestView) -> None:
        """Gives back the lease of a request that the engine's front refused: of what it brought
        only ``kv_transfer_params`` are known, and no other method will hear of it.

        A ticket that is refused is left alone: its lease is another request's, or will expire.
        """
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        try:
            ticket = self._tickets.accept_rejected(params.get("ticket"), request.request_id)
        except TicketError:
            return
        record = self._records.begin(request, loads=True)
        record.peer, record.peer_request_id = ticket.engine_id, ticket.request_id
        self._loads[request.request_id] = self._sources.add(record, ticket)
        self._give_back(request.request_id)
        self._records.end(record, "refused by the engine's front")

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See :meth:`SchedulerConnector.get_num_new_matched_tokens`.

        Raises:
            KVFerryError: the handshake was refused, the lease could not be had, or the source
                no longer keeps a block that is needed.
        """
        if not self._may_go_on(request, num_computed_tokens):
            return None, False
        load = self._loads.get(request.request_id)
        if load is None:
            return 0, False
        state = self._state(load)
        num_tokens = _num_loadable(load, request)
        available = num_tokens - num_computed_tokens
        if state in (LoadState.LOADING, LoadState.LOADED) or available <= 0:
            return 0, False
        if state is LoadState.FAILED:
            assert load.error is not None  # set before the state
            raise load.error
        if state is LoadState.WAITING:
            return None, False
        try:
            if not load.is_early:  # else once it is whole
                self._check(load, num_computed_tokens, num_tokens)
        except KVFerryError as error:
            self._sources.refuse(load, error)
            raise
        return available, True

    def _state(self, load: Load) -> LoadState:
        """Where a load stands, read once: another thread may change it between two looks."""
        state = load.state
        if state is LoadState.WAITING and self._look():
            state = load.state
        if state is LoadState.WAITING and self._is_admitted_early(load):
            state = load.state
        return state

    def _look(self) -> bool:
        """Takes the answers that have come, so that no other thread need run for it; whether there
        were some. An engine asks for every waiting request in every step, and one look is enough.
        """
        if self._has_looked:
            return False
        self._has_looked = True
        return self._client.pump()

    def _is_admitted_early(self, load: Load) -> bool:
        """Whether a load begins although its source still computes the prompt."""
        mode, groups = self._extra.early_load, load.groups
        if mode == "off" or groups is None or not any(map(groups.moves_early, groups.pairs)):
            return False
        return self._sources.admit_early(load, waits=mode == "late")

    def _check(self, load: Load, first_token: int, num_tokens: int) -> None:
        """Checks that the source has what a load of ``[first_token, num_tokens)`` moves."""
        assert load.groups is not None  # set before it is ready
        load.groups.check_kept(load.ticket, first_token, num_tokens)
        if not self._context.asks_what_was_filled:
            load.groups.check_filled(load.ticket, first_token, num_tokens)

    def update_state_after_alloc(
        self, request: RequestView, blocks: BlocksView, num_external_tokens: int
    ) -> None:
        """See :meth:`SchedulerConnector.update_state_after_alloc`."""
        load = self._loads.get(request.request_id)
        if load is not None and load.state in (LoadState.LOADING, LoadState.LOADED):
            return
        self._records.admitted(request, num_external_tokens)
        self._drop_ask(request.request_id)
        if load is None:
            return
        if num_external_tokens == 0:
            self._give_back(request.request_id)
            return
        num_tokens = _num_loadable(load, request)
        first_token = num_tokens - num_external_tokens
        assert load.groups is not None  # tokens were offered, so the lease was had
        if load.is_early:
            starts = load.groups.early_starts(first_token, num_tokens)
            self._growing[load.lease_id] = load
        else:
            starts = load.groups.starts(load.ticket, first_token, num_tokens)
            load.filled = load.groups.filled(starts, first_token, num_tokens)
        self._sources.start(load)
        load.spec = LoadSpec(
            request_id=request.request_id,
            ticket=load.ticket,
            target_block_ids=tuple(list(ids) for ids in blocks.get_block_ids()),
            first_token=first_token,
            num_tokens=num_tokens,
            starts=starts,
            readable=first_token if load.is_early else None,
        )
        self._news.loads.append(load.spec)

    def _read_on(self) -> None:
        """Tells the ranks what more they can read of the loads that began early."""
        for load in list(self._growing.values()):
            spec, readable = load.spec, load.readable  # this before the ticket, see Sources._held
            assert spec is not None  # the ranks read
            assert load.groups is not None
            if load.error is not None:
                self._cancel(load, f"{type(load.error).__name__}: {load.error}")
            elif readable is None:
                self._read_rest(load, spec)
            else:
                unit = load.groups.part_tokens
                end = min(readable, spec.num_tokens) // unit * unit
                if end > (spec.readable or 0):
                    load.spec = replace(spec, ticket=load.ticket, readable=end)
                    self._news.parts.append(load.spec)

    def _read_rest(self, load: Load, spec: LoadSpec) -> None:
        """The source has computed the prompt: now all is known of what moves."""
        groups, ticket, span = load.groups, load.ticket, (spec.first_token, spec.num_tokens)
        assert groups is not None
        del self._growing[load.lease_id]
        try:
            self._check(load, *span)
        except KVFerryError as error:
            self._cancel(load, f"{type(error).__name__}: {error}")
            return
        starts = groups.starts(ticket, *span)
        load.filled = groups.filled(starts, *span)
        load.spec = replace(spec, ticket=ticket, starts=starts, readable=None)
        self._news.parts.append(load.spec)

    def _cancel(self, load: Load, error: str) -> None:
        """Has the ranks give a load up."""
        self._growing.pop(load.lease_id, None)
        load.rank_error = load.rank_error or error
        self._news.cancels[load.lease_id] = load.rank_error

    def partial_groups(self, request: RequestView) -> frozenset[int]:
        """See :meth:`SchedulerConnector.partial_groups`."""
        filled = self._filled(request)
        return frozenset() if filled is None else filled.partial

    def first_filled_tokens(self, request: RequestView) -> tuple[int, ...] | None:
        """See :meth:`SchedulerConnector.first_filled_tokens`."""
        filled = self._filled(request)
        return None if filled is None else filled.starts

    def _filled(self, request: RequestView) -> Filled | None:
        """What the request's load fills; ``None`` where there is none, or it has failed."""
        load = self._loads.get(request.request_id)
        return None if load is None else load.filled

    def _give_back(self, request_id: str) -> None:
        """Nothing will be read under this request's lease."""
        load = self._loads.pop(request_id)
        self._tickets.retire(load.ticket)
        self._sources.release(load)

    def _loaded(self, load: Load, *, ok: bool) -> None:
        """Every rank has reported this load."""
        self._records.loaded(load.record, None if ok else load.rank_error or "no rank told why")
        if load.cancelled:
            self._records.end(load.record, "aborted")
            self._outdated.discard(load.request_id)
        elif ok:
            self._sources.moved(load)
        self._growing.pop(load.lease_id, None)
        self._tickets.retire(load.ticket)
        self._sources.drop(load)
        if load.cancelled or not ok:
            del self._loads[load.request_id]

    # ---- source side --------------------------------------------------------------------------

    def request_finished(
        self, request: RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Cancels or gives back a load, or leases the prompt's blocks out."""
        keep, params = self._finished(request, block_ids)
        early = self._prompts.pop(request.request_id, None)
        if early is not None and not early.is_lent:
            self._revoke(early)
        if params is None:
            self.tell_not_lent(
                request.request_id,
                f"request {request.request_id} has ended ({request.finish_reason}) without a lease",
            )
        if params is None and self.lends_only_cached(request) and request.finished_cleanly:
            params = dict(NOTHING_LENT)
        self._records.finished(request, keep, params)
        return keep, params

    def _finished(
        self, request: RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_outdated = request.request_id in self._outdated
        self._outdated.discard(request.request_id)
        self._drop_ask(request.request_id)
        filled = self._filled(request)
        load = self._loads.get(request.request_id)
        if load is not None and load.state is LoadState.LOADING:
            if not load.cancelled:
                load.cancelled = True
                self._growing.pop(load.lease_id, None)
                self._news.cancels[load.lease_id] = ""
            return True, None
        if load is not None and load.state is LoadState.LOADED:
            del self._loads[request.request_id]
        elif load is not None:
            self._give_back(request.request_id)
        params = request.kv_transfer_params
        if is_outdated or not params or not params.get("do_remote_decode"):
            return False, None
        if filled is not None and filled.partial:
            return self._not_lent(
                request,
                f"KV cache groups {sorted(filled.partial)} keep all tokens, and were loaded from "
                "an engine that keeps a window of them, so the others were never there; borrow "
                "from an engine that keeps all tokens, or keep windows here too",
            )
        ends_here = request.finish_reason == "stop" and bool(params.get("keep_first_token"))
        if ends_here or not request.finished_cleanly or not self._lends:
            return False, None
        if not self._context.config.is_producer:
            return self._not_lent(
                request,
                f"kv_role: this engine is {self._context.config.kv_role} and was asked to lend "
                "(do_remote_decode); send such requests to a kv_producer, or make this one kv_both",
            )
        first_tokens = () if filled is None else filled.first_tokens
        return self._lend(request, block_ids, first_tokens)

    def _lend(
        self,
        request: RequestView,
        block_ids: tuple[list[int], ...],
        first_tokens: tuple[int, ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        num_tokens = min(request.num_computed_tokens, len(request.prompt_token_ids))
        has_states = any(group.is_recurrent for group in self._context.groups)
        if has_states and num_tokens < request.num_computed_tokens:
            return self._not_lent(
                request,
                f"its recurrent layers have moved on to token {request.num_computed_tokens}, past "
                f"the prompt of {num_tokens}; ask for max_tokens=1",
            )
        tables = self._tables(block_ids, num_tokens)
        early = self._prompts.get(request.request_id)
        if early is not None and early.lease is not None:
            return self._lend_rest(early, early.lease, tables, num_tokens, first_tokens)
        num_blocks = sum(block != 0 for ids in tables for block in ids)
        if num_blocks == 0:
            return False, None
        mirrored = self._mirrored_ranks
        lease = self._granted(request, num_blocks, num_tokens, mirrored)
        if isinstance(lease, LeaseRefusal):
            return self._not_lent(request, lease.reason)
        if self.lends_only_cached(request):
            self._prefixes[request.request_id] = lease
            self._counters["prefixes_lent"] += 1
            self._counters["prefix_tokens_lent"] += num_tokens
        if mirrored:
            self._mirroring[lease.lease_id] = set(mirrored)
        self._note_lent(lease, tables, num_tokens)
        ticket = self._ticket(request, lease, tables, num_tokens, first_tokens)
        return True, self.tell_lent(ticket)

    def _tables(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> BlockTables:
        """The parts of block tables that hold the first ``num_tokens`` tokens."""
        return tuple(
            tuple(ids[: -(-num_tokens // group.virtual_block_size)])
            for ids, group in zip(block_ids, self._context.groups, strict=True)
        )

    def _note_lent(self, lease: Lease, tables: BlockTables, num_tokens: int) -> None:
        """Has the ranks mirror, or digest, what is lent."""
        if self._mirrored_ranks or self._extra.record_digests:
            self._news.lent.append(
                LentSpec(
                    request_id=lease.request_id,
                    lease_id=lease.lease_id,
                    block_ids=tuple(list(ids) for ids in tables),
                    num_tokens=num_tokens,
                )
            )

    def _ticket(
        self,
        request: RequestView,
        lease: Lease,
        tables: BlockTables,
        num_tokens: int,
        first_tokens: tuple[int, ...],
    ) -> Ticket:
        parallel = self._context.groups[0].parallel
        return Ticket(
            lease_id=lease.lease_id,
            engine_id=self._context.config.engine_id,
            incarnation=self._context.incarnation,
            secret=self._server.secret(lease.lease_id),
            host=self._extra.host,
            port=self._server.port,
            request_id=request.request_id,
            num_tokens=num_tokens,
            block_ids=tables,
            prompt_digest=prompt_digest(request.prompt_token_ids[:num_tokens]),
            lease_duration_s=lease.duration_s,
            tp=parallel.tp,
            pp=parallel.pp,
            first_tokens=first_tokens if any(first_tokens) else (),
            content=dict(request.content_keys(num_tokens)),
            shared=lease.shared,
        )

    # ---- prompts that are lent while they are computed ----------------------------------------

    def _lends_early(self, request: RequestView) -> bool:
        """Whether the prompt of a request with a transfer is lent from its first chunk on: where
        each step shows what it writes, to memory that is read as it is.
        """
        shows = self._context.shows_steps and not self._mirrored_ranks
        return shows and self._context.config.is_producer and not self.lends_only_cached(request)

    def _grow(self, output: SchedulerOutputView) -> None:
        """Grants leases of the prompts that begin in this step, and notes what the step writes."""
        for request_id in output.preempted_req_ids & self._prompts.keys():
            self._revoke(self._prompts.pop(request_id))
        counts = output.num_scheduled_tokens
        for part in output.requests:
            early = self._prompts.get(part.request_id)
            if early is None:
                continue
            end = part.first_position + counts[part.request_id]
            is_last = end >= len(early.request.prompt_token_ids)
            if early.lease is None and (is_last or not self._grant(early, part)):
                del self._prompts[part.request_id]  # it is lent once it is whole
            elif not is_last and early.lease is not None:
                self._leases.allocated(early.lease.lease_id, self._tables(part.block_ids, end))
                self._news.writes[early.lease.lease_id] = end

    def _grant(self, early: EarlyLease, part: ScheduledRequestView) -> bool:
        """Grants the lease of a prompt of which this step computes a part, if it can be had."""
        request, filled = early.request, self._filled(early.request)
        is_outdated = request.request_id in self._outdated or not self._lends
        if is_outdated or (filled is not None and filled.partial):
            return False
        num_tokens = len(request.prompt_token_ids)
        num_blocks = sum(
            -(-num_tokens // group.virtual_block_size)
            - group.first_kept_token(num_tokens) // group.virtual_block_size
            for group in self._context.groups
        )
        writers = range(self._context.world_size)
        lease = self._granted(request, num_blocks, num_tokens, writers)
        if isinstance(lease, LeaseRefusal):
            return False  # maybe it is granted once the prompt is whole
        early.lease = lease
        self._early[lease.lease_id] = early
        tables = self._tables(part.block_ids, num_tokens)
        first_tokens = () if filled is None else filled.first_tokens
        self.tell_lent(self._ticket(request, lease, tables, num_tokens, first_tokens))
        return True

    def _lend_rest(
        self,
        early: EarlyLease,
        lease: Lease,
        tables: BlockTables,
        num_tokens: int,
        first_tokens: tuple[int, ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """The prompt is computed: its lease is whole."""
        if early.outcome is not None:
            return False, None  # who held it needs nothing any more
        early.is_lent = True
        self._note_lent(lease, tables, num_tokens)
        self._leases.allocated(lease.lease_id, tables)
        for rank in range(self._context.world_size):
            self._server.written(lease.lease_id, rank, num_tokens)
        ticket = self._ticket(early.request, lease, tables, num_tokens, first_tokens)
        return True, self.tell_lent(ticket)

    def _revoke(self, early: EarlyLease) -> None:
        """What was written of a prompt will not stay as it is, or will not be lent."""
        if early.lease is not None and early.outcome is None:
            self._server.revoke([early.lease.lease_id])

    def _granted(
        self, request: RequestView, num_blocks: int, num_tokens: int, writers: Iterable[int]
    ) -> Lease | LeaseRefusal:
        """A lease of a request's blocks, if the caps allow it. Prompts that were computed to be
        lent go before cached prefixes that nobody has fetched yet.
        """
        if self.lends_only_cached(request):
            cap = self._extra.max_lent_prefix_blocks
            if cap is None:
                cap = self._leases.max_blocks // 2
            pinned = sum(lease.num_blocks for lease in self._prefixes.values())
            if pinned + num_blocks > cap:
                return LeaseRefusal(
                    f"max_lent_prefix_blocks: the prefix has {num_blocks} blocks, and cached "
                    f"prefixes that are lent hold {pinned} of {cap}; raise max_lent_prefix_blocks"
                )
        else:
            self._make_room(self._leases.max_blocks - num_blocks)
        return self._leases.grant(
            request.request_id,
            num_blocks,
            shared=bool((request.kv_transfer_params or {}).get("shared")),
            num_tokens=num_tokens,
            writers=writers,
        )

    def _make_room(self, room: int) -> None:
        """Withdraws untaken prefixes until leases pin so many blocks at most, if that can be."""
        for name in list(self._prefixes):
            if room < 0 or self._leases.pinned_blocks <= room:
                return
            if self.withdraw(name):
                self._sweep()

    def withdraw(self, request_id: str) -> bool:
        """See :meth:`SchedulerConnector.withdraw`."""
        lease = self._prefixes.get(request_id)
        is_withdrawn = lease is not None and self._leases.withdraw(lease.lease_id)
        self._counters["prefixes_withdrawn"] += is_withdrawn
        return is_withdrawn

    @property
    def lends_prefixes(self) -> bool:
        """Whether any cached prefix is lent."""
        return bool(self._prefixes)

    def withdraw_oldest(self) -> bool:
        """Withdraws the cached prefix that has been lent for longest and that nobody has fetched,
        and says whether there is one.
        """
        return any(self.withdraw(request_id) for request_id in list(self._prefixes))

    def counters(self) -> Mapping[str, float]:
        """See :meth:`SchedulerConnector.counters`."""
        return self._counters

    def _not_lent(self, request: RequestView, reason: str) -> tuple[bool, None]:
        """The decode engine will not know why it gets no ticket, so it is said here."""
        if self.lends_only_cached(request):
            self._counters["prefixes_refused"] += 1
            logger.info("request %s: no cached prefix is lent: %s", request.request_id, reason)
            return False, None
        self.tell_not_lent(request.request_id, reason)
        self._server.note_error("lease", f"request {request.request_id}: {reason}")
        logger.warning(
            "request %s: its KV is not lent, and the decode engine has to compute it: %s",
            request.request_id,
            reason,
        )
        return False, None

    # ---- transfers: who asks is told what is lent ---------------------------------------------

    def _transfer_to_lend(self, params: Mapping[str, Any]) -> Transfer | None:
        """What the router has given to this engine and to the one that will load, if it has.

        Raises:
            TicketError: it is not the router's.
        """
        if not params.get("do_remote_decode") or "transfer" not in params:
            return None
        try:
            return read_transfer(params["transfer"], self._key)
        except TicketError as error:
            self._server.note_error("ticket", str(error))
            raise

    def _expect(self, request: RequestView, transfer: Transfer | None) -> None:
        if transfer is not None:
            self._lending[request.request_id] = transfer
            self._server.expect(transfer)
            if self._lends_early(request):
                self._prompts[request.request_id] = EarlyLease(request)

    def tell_lent(self, ticket: Ticket) -> dict[str, Any]:
        """The lease of a request was granted: to be called as soon as that is so.

        Whoever has asked for the request's transfer is given the ticket.

        Returns:
            The ``kv_transfer_params`` of the request's answer, without the ticket where it is asked
            for.
        """
        transfer = self._lending.get(ticket.request_id)
        if transfer is None:
            return self._params(ticket)
        self._lent_as[transfer] = ticket.lease_id
        self._server.lend(transfer, ticket)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_num_tokens": ticket.num_tokens,
            "transfer": transfer.text,
        }

    def tell_not_lent(self, request_id: str, reason: str) -> None:
        """It is certain that nothing of a request will be lent, or is any more."""
        transfer = self._lending.pop(request_id, None)
        if transfer is not None:
            self._lent_as.pop(transfer, None)
            self._server.deny(transfer, reason)

    def _params(self, ticket: Ticket) -> dict[str, Any]:
        """The fields that vLLM's proxies look at, and the ticket, which alone counts."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": ticket.engine_id,
            "remote_request_id": ticket.request_id,
            "remote_block_ids": ticket.block_ids,
            "remote_host": ticket.host,
            "remote_port": ticket.port,
            "remote_num_tokens": ticket.num_tokens,
            "tp_size": ticket.tp,
            "pp_size": ticket.pp,
            "ticket": sign(ticket, self._key),
        }

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Ends the lease of a ticket of ours that no target has used; anything else is ignored."""
        if "transfer" in kv_transfer_params:
            self._take_back_transfer(kv_transfer_params["transfer"])
            return
        if "ticket" not in kv_transfer_params:
            return  # nothing was lent
        try:
            ticket = verify(kv_transfer_params.get("ticket"), self._key)
        except TicketError as error:
            self._server.note_error("ticket", f"to be taken back: {error}")
            return
        self._withdraw_own(ticket)

    def _withdraw_own(self, ticket: Ticket) -> None:
        # Without a cluster key anybody could write a ticket, but not its secret.
        if hmac.compare_digest(ticket.secret, self._server.secret(ticket.lease_id)):
            self._leases.withdraw(ticket.lease_id)

    def _take_back_transfer(self, text: object) -> None:
        """Ends the lease of a transfer that no target has used."""
        try:
            transfer = read_transfer(text, self._key)
        except TicketError as error:
            self._server.note_error("ticket", f"to be taken back: {error}")
            return
        lease_id = self._lent_as.get(transfer)
        if lease_id is not None:
            self._leases.withdraw(lease_id)

    # ---- every step ---------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutputView) -> PullMetadata:
        """See :meth:`SchedulerConnector.build_connector_meta`."""
        self._has_looked = False
        self._sweep()
        self._read_on()
        if self._prompts:
            self._grow(scheduler_output)
        step, self._step = self._news, None
        step.peers = self._sources.take_news()
        return step

    def has_news(self) -> bool:
        """Whether :meth:`build_connector_meta` has anything to say; else it need not be called."""
        self._has_looked = False  # every request of this step has been asked for
        self._sweep()
        if self._growing:
            self._read_on()
        return self._step is not None or self._sources.has_news

    @property
    def _news(self) -> PullMetadata:
        """Where to write what the ranks are to be told in this step."""
        if self._step is None:
            self._step = PullMetadata()
        return self._step

    def _sweep(self) -> None:
        self._records.look()
        for lease in self._leases.sweep():
            early = self._early.pop(lease.lease_id, None)
            if early is not None and not early.is_lent:
                early.outcome = lease.outcome  # its request goes on, with its blocks
                self.tell_not_lent(lease.request_id, f"lease {lease.lease_id} has ended")
                continue
            self._mirroring.pop(lease.lease_id, None)
            self._prefixes.pop(lease.request_id, None)
            self._outdated.discard(lease.request_id)
            self.tell_not_lent(lease.request_id, f"lease {lease.lease_id} has ended")
            self._news.released.append(lease.request_id)
            self._records.freed(lease)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See :meth:`SchedulerConnector.update_connector_output`."""
        if output.transfer_progress != self._reported:
            self._note_progress(output.transfer_progress)
        for lease_id, written in output.written.items():
            for rank, num_tokens in written.items():
                self._server.written(lease_id, rank, num_tokens)
        for record in output.transfer_records:
            self._recorded(record)
        for request_id in output.finished_recving:
            load = self._loads.get(request_id)
            if load is not None and load.state is LoadState.LOADING:
                failed = request_id in output.failed_recving
                if failed and not _was_given_up(load):
                    self._log_failure(load)
                self._loaded(load, ok=not failed)

    def _recorded(self, record: TransferRecord) -> None:
        """A rank tells what it did."""
        self._records.add(record)
        if record.ok and record.transport:
            self._server.peers.loaded(record.peer, record.nbytes, record.transport)
        if record.lease_id in self._mirroring:
            self._mirrored(record)
        if record.error:
            self._server.note_error(
                "load", f"request {record.request_id}, rank {record.rank}: {record.error}"
            )
        load = self._loads.get(record.request_id)
        if load is None or record.direction != "recv":
            return
        load.moved_s = max(load.moved_s, record.moving)
        if record.error and not load.rank_error:
            load.rank_error = f"rank {record.rank}: {record.error}"
        if record.error and load.lease_id in self._growing:
            self._cancel(load, load.rank_error)  # the other ranks need not wait for more

    def _log_failure(self, load: Load) -> None:
        """One line per failed load: an engine may tell its client no cause, as vLLM does not."""
        policy = self._context.config.kv_load_failure_policy
        logger.error(
            "request %s: its load from engine %s failed, and it will %s: %s",
            load.request_id,
            load.source.name,
            "be recomputed" if policy == "recompute" else "fail",
            load.rank_error or "no rank told why",
        )

    def _mirrored(self, record: TransferRecord) -> None:
        """A rank has copied the blocks of a lease to where they are read, or could not."""
        if not record.ok:
            self._server.revoke([record.lease_id])
            return
        self._server.written(record.lease_id, record.rank, record.tokens)
        missing = self._mirroring[record.lease_id]
        missing.discard(record.rank)
        if not missing:
            del self._mirroring[record.lease_id]

    def _note_progress(self, reported: dict[str, tuple[int, int]]) -> None:
        """Notes since when each load has stood where it stands."""
        self._reported = reported
        for request_id, progress in reported.items():
            load = self._loads.get(request_id)
            if load is not None and load.progress != progress:
                load.progress, load.progressed = progress, self._clock()

    def silent_peers(self) -> tuple[str, ...]:
        """See :meth:`SchedulerConnector.silent_peers`."""
        return self._sources.silent_peers()

    def has_pending_work(self) -> bool:
        """Whether ranks have loads under way, or news waits for them."""
        self._sweep()
        loading = any(load.state is LoadState.LOADING for load in self._loads.values())
        return loading or bool(self._mirroring) or self._step is not None

    def _transfer_statuses(self) -> list[TransferStatus]:
        """The loads under way, for ``kvferry status``; called on the server's thread."""
        now = self._clock()
        return [
            TransferStatus(
                request_id=load.request_id,
                lease_id=load.lease_id,
                peer=load.ticket.engine_id,
                bytes_done=load.progress[0],
                bytes_total=load.progress[1],
                age_s=now - load.started,
                progress_s=now - load.progressed,
            )
            for load in list(self._loads.values())
            if load.state is not LoadState.LOADED
        ]

    def close(self) -> None:
        """Ends threads and sockets. Idempotent."""
        self._sources.close()
        self._client.close()
        self._server.close()
        if self._spans is not None:
            self._spans.close()


def _check_reach(extra: PullConfig, *, is_producer: bool) -> None:
    """Checks who can reach this engine, and whether those that should can.

    Raises:
        ConfigError: strangers can, and there is no key; or it lends, and its tickets would name
            no address.
    """
    local = is_loopback(extra.host)
    if is_producer and is_everywhere(extra.host):
        raise ConfigError(
            f"host: {extra.host} is every address of this machine, and other engines must be told "
            "one; set host to the address at which they reach this machine"
        )
    has_key = extra.cluster_key or extra.cluster_key_file or extra.curve_keys
    if not (local or has_key or extra.insecure):
        raise ConfigError(
            f"host: {extra.host} is reached from other machines, and there is no key that tells "
            "friend from stranger; make keys with `kvferry keys` and set cluster_key_file and "
            "curve_keys, or say insecure: true on a network that you trust"
        )
    away = [peer for peer in extra.peers if not is_loopback(split_address(peer)[0])]
    if local and away:
        logger.warning(
            "host: %s is this machine's own address, and peers names %s: engines on other machines "
            "do not reach this one; set host to an address at which they do",
            extra.host,
            ", ".join(away),
        )


def _num_loadable(load: Load, request: RequestView) -> int:
    """End of the tokens that may come from the source: one is computed here, for its logits."""
    return min(load.ticket.num_tokens, request.num_tokens - 1)


def _was_given_up(load: Load) -> bool:
    """Whether a load failed because its request had been aborted.

    vLLM ends a request whose load has failed before it hands us the report that says why.
    """
    return load.cancelled and CancelledError.__name__ in (
        load.rank_error or CancelledError.__name__
    )
