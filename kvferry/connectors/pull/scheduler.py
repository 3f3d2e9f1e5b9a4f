"""The deciding half of the PullConnector: obtains leases for loads, and has prompts lent."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from kvferry.config import KVTransferConfig
from kvferry.connectors.base import (
    BlocksView,
    ConnectorContext,
    KVConnectorOutput,
    RequestView,
    SchedulerConnector,
    SchedulerOutputView,
    TransferRecord,
)
from kvferry.connectors.pull.asks import PendingTicket
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.groups import Filled
from kvferry.connectors.pull.lender import Lender, lends_only_cached
from kvferry.connectors.pull.metadata import LoadSpec, PullMetadata
from kvferry.connectors.pull.record import RequestRecord, RequestRecords
from kvferry.connectors.pull.sources import Load, LoadState, Sources
from kvferry.connectors.pull.tickets import AcceptedTickets
from kvferry.control.client import ControlClient
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import TransferStatus
from kvferry.control.proofs import lease_of
from kvferry.control.server import ControlServer
from kvferry.control.tickets import Ticket
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
from kvferry.topology.heads import LATENT, HeadDigests, alike_heads
from kvferry.topology.sharding import ranges_text
from kvferry.zeromq import is_everywhere, is_loopback, join_address, split_address

logger = logging.getLogger(__name__)

_ranks = msgspec.msgpack.Decoder(RankDescription)


class PullScheduler(SchedulerConnector):
    """Scheduler half; see :class:`~kvferry.connectors.pull.PullConnector`."""

    takes_transfers = True

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
        self._server = server
        self._client = client
        self._sources = sources
        self._clock = clock
        self._tickets = AcceptedTickets(key, extra)
        self._loads: dict[str, Load] = {}
        """Request id → its load, until the request ends or, if that is later, the load does."""
        self._asks: dict[str, PendingTicket] = {}
        """Request id → the ticket that was asked for, until the ranks read or none is needed."""
        self._spans = spans
        self._records = RequestRecords(clock, spans)
        self._description: EngineDescription | None = None
        """Of this engine, once its ranks are known."""
        self._told_of_plain = False
        """Whether the log has a request that came past the prefill engines."""
        self._growing: dict[str, Load] = {}
        """Lease id → the load, where the ranks read a prompt that was not whole when they began."""
        self._reading: set[str] = set()
        """Requests whose ranks read."""
        self._step: PullMetadata | None = None
        """What the ranks are to be told; made when there is something."""
        self._has_looked = False
        """Whether this step has looked for answers of sources."""
        self._reported: dict[str, tuple[int, int]] = {}
        self._counters: Counter[str] = Counter()
        self._lender = Lender(
            context,
            extra,
            key,
            leases,
            server,
            self._records,
            self._counters,
            news=lambda: self._news,
            filled=self._filled,
        )

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
        _check_reach(extra, config)
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

    @property
    def address(self) -> str:
        """``host:port`` at which peers reach the control channel."""
        return join_address(*self._extra.told(self._server.port))

    def set_worker_handshakes(self, handshakes: Sequence[bytes]) -> None:
        """Completes this engine's description: from now on it answers and makes handshakes."""
        config = self._context.config
        ranks = tuple(_ranks.decode(handshake) for handshake in handshakes)
        self._lender.mirrored_ranks = frozenset(rank.rank for rank in ranks if rank.mirrored)
        description = EngineDescription(
            engine_id=config.engine_id,
            incarnation=self._context.incarnation,
            model=self._context.model,
            groups=tagged_groups(self._context.groups),
            ranks=ranks,
            convert_dtype=self._extra.convert_dtype,
        )
        _log_heads(description)
        self._describe(description)
        self._server.set_transfers(self._transfer_statuses)
        self._server.set_traces(self._records.find)

    def _describe(self, description: EngineDescription) -> None:
        self._description = description
        self._server.set_description(description)
        self._sources.describe(description)

    # ---- weights that change ------------------------------------------------------------------

    def set_weights(
        self,
        digest: str,
        outdated: Iterable[str] | None,
        heads: Sequence[HeadDigests | None] | None = None,
    ) -> None:
        """The engine has other weights now: KV of the older ones is neither lent nor loaded.

        Leases end, and loads under way fail. To be called between two steps.

        Args:
            digest: of the weights.
            outdated: ids of the requests with KV of the older ones; ``None`` where that will never
                be known again, so that nothing more is lent.
            heads: what each rank tells of its KV heads with these weights; ``None`` where that is
                not known.
        """
        assert self._description is not None  # requests come after the ranks
        model = self._description.model
        error = TicketExpiredError(
            f"weights: the KV was computed with {model.weights_digest}, this engine has {digest} "
            "now; compute the prompt again"
        )
        self._lender.outdate(outdated)
        for load in self._loads.values():
            if load.state is LoadState.LOADING:
                self._cancel(load, f"{type(error).__name__}: {error}")
            elif load.state not in (LoadState.LOADED, LoadState.FAILED):
                self._sources.refuse(load, error)
        for request_id, pending in self._asks.items():
            if request_id not in self._loads:
                self._refuse_ask(pending, error)
        self._description = replace(self._description, model=replace(model, weights_digest=digest))
        self.set_head_digests(heads)

    def set_head_digests(self, heads: Sequence[HeadDigests | None] | None) -> None:
        """Replaces what the ranks tell of their KV heads.

        Args:
            heads: of each rank; ``None`` where nothing is known any more.
        """
        assert self._description is not None  # ranks come first
        ranks = self._description.ranks
        told = [None] * len(ranks) if heads is None else heads
        ranks = tuple(replace(rank, heads=each) for rank, each in zip(ranks, told, strict=True))
        description = replace(self._description, ranks=ranks)
        _log_heads(description)
        self._describe(description)

    def is_loading(self, request_id: str) -> bool:
        """Whether the ranks read for a request."""
        load = self._loads.get(request_id)
        return load is not None and load.state is LoadState.LOADING

    def revoke_leases(self) -> None:
        """Takes every lease back: its blocks will not hold any longer what was lent."""
        self._lender.leases.revoke_all()

    # ---- target side --------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """Checks the ticket of a request that was prefilled elsewhere and goes for its lease.

        Raises:
            TicketError: the ticket is refused, see :meth:`AcceptedTickets.accept`; nobody was
                contacted.
            ConfigError: this engine is a producer only.
            RequestError: its parameters contradict each other.
        """
        self._sources.stepped()
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
            transfer = self._lender.transfer_of(params)
        except KVFerryError as error:
            self._refused(record, error)
            raise
        if not loads:
            self._lender.expect(request, transfer)
            return
        try:
            if "ticket" not in params and "transfer" in params and transfer is None:
                self._begin_ask(record, params["transfer"])
                return
            ticket = self._accepted(params.get("ticket"), request)
        except KVFerryError as error:
            self._refused(record, error)
            raise
        self._lender.expect(request, transfer)
        waits = not ticket.whole or bool(params.get("passed_on"))
        self._begin_load(record, ticket, waits=waits)

    def _begin_load(self, record: RequestRecord, ticket: Ticket, *, waits: bool) -> None:
        """Goes for the lease of an accepted ticket, see :meth:`Sources.add`."""
        if ticket.incarnation == self._context.incarnation:
            # It leads back here: what it lends is in our own prefix cache.
            self._tickets.retire(ticket)
            self._lender.withdraw_own(ticket)
            record.loads = False
            return
        self._note_load(self._sources.add(record, ticket, waits=waits))

    def _note_load(self, load: Load) -> None:
        record, ticket = load.record, load.ticket
        record.peer, record.peer_request_id = ticket.engine_id, ticket.request_id
        self._loads[record.request_id] = load

    def _begin_ask(self, record: RequestRecord, text: object) -> None:
        """Asks for the ticket of a request that its source was sent as well.

        Raises:
            TicketError, ConfigError: see :meth:`on_new_request`.
        """
        self._check_role()
        try:
            transfer = self._tickets.accept_transfer(text)
            self._asks[record.request_id] = self._sources.ask(record, transfer, self._tickets)
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
        if (load := self._loads.get(request.request_id)) is not None:
            if not load.may_ask_again:
                return True
            self._lost(load)
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
        elif (load := self._sources.load_of(pending)) is not None:  # the lease is gone for, or had
            self._accept_asked(request, pending, load)
        return pending.is_settled

    def _accept_asked(self, request: RequestView, pending: PendingTicket, load: Load) -> None:
        """Makes what was taken with a ticket that was asked for the request's load.

        Raises:
            TicketError: it does not fit the request.
        """
        ticket = load.ticket
        if ticket.incarnation == self._context.incarnation:  # as in _begin_load
            self._drop_ask(request.request_id)
            pending.record.loads = False
            return
        try:
            self._tickets.check(ticket, request)
        except TicketError as error:
            self._refuse_ask(pending, error, "ticket")
            raise
        self._note_load(load)

    def _lost(self, load: Load) -> None:
        """A source has revoked the lease of a ticket that was asked for, and nobody has read."""
        logger.info(
            "request %s: engine %s has revoked its lease, and is asked for another",
            load.request_id,
            load.source.name,
        )
        self._give_back(load.request_id)

    def _drop_ask(self, request_id: str) -> None:
        """No ticket is needed for a request any more, but that of its load, if it has one."""
        pending = self._asks.pop(request_id, None)
        if pending is not None:
            self._unwant(pending, self._loads.get(request_id))

    def _unwant(self, pending: PendingTicket, own: Load | None = None) -> None:
        """A ticket is given back as soon as it has come, unless it is that of ``own``."""
        load = self._sources.drop_ask(pending)
        if load is not None and load is not own:
            self._tickets.retire(load.ticket)
            self._sources.release(load)

    def _refuse_ask(self, pending: PendingTicket, error: KVFerryError, kind: str = "load") -> None:
        """What was asked for does not serve its request, whether or not it has come; others that
        have its ticket may use it.
        """
        load = self._sources.refuse_ask(pending, error, kind)
        if load is not None:
            self._tickets.retire(load.ticket)
            self._sources.release(load, keep=True)

    def _refused(self, record: RequestRecord, error: KVFerryError) -> None:
        record.fail(self._clock(), f"{type(error).__name__}: {error}")
        self._records.end(record, "refused")

    def lends_only_cached(self, request: RequestView) -> bool:
        """See :meth:`SchedulerConnector.lends_only_cached`."""
        return lends_only_cached(request)

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
        """Gives back the lease of a request that the engine's front refused, also one that has to
        be asked for: of what it brought only ``kv_transfer_params`` are known, and no other method
        will hear of it.

        A ticket that is refused is left alone: its lease is another request's, or will expire.
        """
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        text, asked = params.get("ticket"), None
        try:
            if text is None and "transfer" in params:
                asked = self._tickets.accept_transfer(params["transfer"])
            else:
                ticket = self._tickets.accept_rejected(text, request.request_id)
        except TicketError:
            return
        self._sources.stepped()
        record = self._records.begin(request, loads=True)
        if asked is None:
            self._note_load(self._sources.add(record, ticket))
            self._give_back(request.request_id)
        else:
            with contextlib.suppress(TicketExpiredError):  # another request has brought it
                self._unwant(self._sources.ask(record, asked, self._tickets))
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
            if load.may_ask_again:
                self._lost(load)
                return None, False
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
        if load.readable is None:
            return False  # its source does not say that it computes
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
        self._reading.add(load.request_id)
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
                self._begin_anew(load, load.error)
            elif readable is None:
                self._read_rest(load, spec)
            else:
                unit = load.groups.part_tokens
                end = min(readable, spec.num_tokens) // unit * unit
                if end > (spec.readable or 0):
                    load.spec = replace(spec, ticket=load.ticket, readable=end, replaces="")
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
        load.spec = replace(spec, ticket=ticket, starts=starts, readable=None, replaces="")
        self._news.parts.append(load.spec)

    def _begin_anew(self, load: Load, error: KVFerryError) -> None:
        """A source has revoked a lease under which the ranks read, or cannot be reached.

        If it goes on with the prompt, as after a preemption, it will lend it again: it is asked for
        that lease, which is read from the first token on into the same blocks. What was read before
        counts for nothing.
        """
        pending = self._asks.get(load.request_id)
        if pending is None:
            if load.may_begin_anew:
                self._ask_for_another(load)
            else:
                self._cancel(load, f"{type(error).__name__}: {error}")
            return
        again = self._sources.load_of(pending)
        why = self._why_not_again(load, pending, again)
        if why:
            self._cancel(load, f"{type(error).__name__}: {error}; {why}")
        elif again is not None and self._state(again) is LoadState.READY:
            self._go_over(load, again)

    def _ask_for_another(self, load: Load) -> None:
        assert load.pending is not None  # see may_begin_anew
        logger.info(
            "request %s: engine %s has revoked the lease that was read, and is asked for another",
            load.request_id,
            load.source.name,
        )
        load.progressed = self._clock()
        transfer, lost = load.pending.transfer, lease_of(load.lease_id)
        try:
            pending = self._sources.ask(load.record, transfer, self._tickets, lost)
        except TicketError as error:  # another request has brought the transfer
            self._cancel(load, f"{type(error).__name__}: {error}")
        else:
            self._asks[load.request_id] = pending

    def _why_not_again(self, load: Load, pending: PendingTicket, again: Load | None) -> str:
        """Why the lease that was asked for does not take the place of a load's; empty if it may."""
        if pending.error is not None:
            return f"the one that was asked for: {pending.error}"
        if pending.reason:
            return f"there will be no other: {pending.reason}"
        if self._clock() - load.progressed >= self._extra.progress_timeout_s:
            return (
                f"no other was granted within {self._extra.progress_timeout_s:g} s "
                "(progress_timeout_s)"
            )
        if again is None:
            return ""
        if again.state is LoadState.FAILED and not again.may_ask_again:
            return f"the one that was asked for: {again.error}"
        ours, new = load.ticket, again.ticket
        is_same = (ours.num_tokens, ours.prompt_digest, ours.content) == (
            new.num_tokens,
            new.prompt_digest,
            new.content,
        )
        return "" if is_same else "the one that was asked for is of another prompt"

    def _go_over(self, load: Load, again: Load) -> None:
        """The ranks give up what they have read of a load, and begin anew under another lease."""
        spec = load.spec
        assert spec is not None  # the ranks read
        assert again.groups is not None  # its lease was had
        del self._growing[load.lease_id]
        self._note_load(again)
        self._drop_ask(load.request_id)
        self._tickets.retire(load.ticket)
        self._sources.drop(load)
        again.is_early, again.times_anew = True, load.times_anew + 1
        self._growing[again.lease_id] = again
        self._sources.start(again)
        again.spec = replace(
            spec,
            ticket=again.ticket,
            starts=again.groups.early_starts(spec.first_token, spec.num_tokens),
            readable=spec.first_token,
            replaces=load.lease_id,
        )
        self._news.parts.append(again.spec)

    def _cancel(self, load: Load, error: str) -> None:
        """Has the ranks give a load up."""
        self._drop_ask(load.request_id)
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
        elif ok:
            self._sources.moved(load)
        self._drop_ask(load.request_id)
        self._growing.pop(load.lease_id, None)
        self._reading.discard(load.request_id)
        self._tickets.retire(load.ticket)
        if load.times_anew and not ok:
            self._sources.release(load)  # a rank may have failed under the lease before
        self._sources.drop(load)
        if load.cancelled or not ok:
            del self._loads[load.request_id]

    # ---- source side --------------------------------------------------------------------------

    def request_finished(
        self, request: RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Cancels or gives back a load, or leases the prompt's blocks out."""
        filled = self._filled(request)
        keep, params = True, None
        self._drop_ask(request.request_id)
        if self._ends_load(request.request_id):
            keep, params = self._lender.request_finished(request, block_ids, filled)
        else:
            self._lender.drop(request)
        self._records.finished(request, keep, params)
        return keep, params

    def _ends_load(self, request_id: str) -> bool:
        """Whether nothing is read for a request that has ended; else the ranks are told."""
        load = self._loads.get(request_id)
        if load is None:
            return True
        if load.state is LoadState.LOADING:
            if not load.cancelled:
                load.cancelled = True
                self._growing.pop(load.lease_id, None)
                self._news.cancels[load.lease_id] = ""
            return False
        if load.state is LoadState.LOADED:
            del self._loads[request_id]
        else:
            self._give_back(request_id)
        return True

    def withdraw(self, request_id: str) -> bool:
        """See :meth:`SchedulerConnector.withdraw`."""
        return self._lender.withdraw(request_id)

    @property
    def lends_prefixes(self) -> bool:
        """Whether any cached prefix is lent."""
        return self._lender.lends_prefixes

    def withdraw_oldest(self) -> bool:
        """See :meth:`Lender.withdraw_oldest`."""
        return self._lender.withdraw_oldest()

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """See :meth:`SchedulerConnector.take_back`."""
        self._lender.take_back(kv_transfer_params)

    def counters(self) -> Mapping[str, float]:
        """See :meth:`SchedulerConnector.counters`."""
        return self._counters

    # ---- every step ---------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutputView) -> PullMetadata:
        """See :meth:`SchedulerConnector.build_connector_meta`."""
        self._has_looked = False
        self._sweep()
        self._read_on()
        self._lender.grow(scheduler_output)
        step, self._step = self._news, None
        step.peers, step.gone = self._sources.take_news()
        return step

    def has_news(self) -> bool:
        """Whether :meth:`build_connector_meta` has anything to say; else it need not be called."""
        self._has_looked = False  # every request of this step has been asked for
        self._sweep()
        if self._growing:
            self._read_on()
        return self._step is not None or self._sources.has_news or bool(self._lender.prompts)

    @property
    def shown_prompts(self) -> Collection[str]:
        """Requests of which :meth:`build_connector_meta` must be shown every part, as they are lent
        while they are computed. It may be shown no others.
        """
        return self._lender.prompts

    @property
    def _news(self) -> PullMetadata:
        """Where to write what the ranks are to be told in this step."""
        if self._step is None:
            self._step = PullMetadata()
        return self._step

    def _sweep(self) -> None:
        self._sources.stepped()
        self._records.look()
        self._lender.sweep()

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
        if record.direction == "send":
            self._lender.recorded(record)
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
        return bool(self._reading) or self._lender.is_mirroring or self._step is not None

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


def _check_reach(extra: PullConfig, config: KVTransferConfig) -> None:
    """Checks who can reach this engine, and whether those that should can.

    Raises:
        ConfigError: strangers can, and there is no key; or it lends, and its tickets would name
            no address, or a port that leads nowhere.
    """
    told, port = extra.told(config.kv_port)
    local = is_loopback(extra.host) and is_loopback(told)
    if config.is_producer and is_everywhere(told):
        raise ConfigError(
            f"host: {extra.host} is every address of this machine, and other engines must be told "
            "one; set host or advertise_host to the address at which they reach this machine"
        )
    if port and not config.kv_port:
        raise ConfigError(
            f"advertise_port: {port} leads to kv_port, which is 0 and takes a free port at each "
            "start; give kv_port a number"
        )
    has_key = extra.cluster_key or extra.cluster_key_file or extra.curve_keys
    if not (local or has_key or extra.insecure):
        raise ConfigError(
            f"{'advertise_host' if extra.advertise_host else 'host'}: {told} is reached from other "
            "machines, and there is no key that tells friend from stranger; make keys with "
            "`kvferry keys` and set cluster_key_file and curve_keys, or say insecure: true on a "
            "network that you trust"
        )
    away = [peer for peer in extra.peers if not is_loopback(split_address(peer)[0])]
    if local and away:
        logger.warning(
            "host: %s is this machine's own address, and peers names %s: engines on other machines "
            "do not reach this one; set host to an address at which they do",
            extra.host,
            ", ".join(away),
        )


def _log_heads(description: EngineDescription) -> None:
    """Says which KV heads the digests of their weights do not prove, and why."""
    untold: dict[str, set[int]] = {}
    for rank in description.ranks:
        for reason, layers in (rank.heads.untold if rank.heads else {}).items():
            untold.setdefault(reason, set()).update(layers)
    for reason, found in untold.items():
        log = logger.info if reason == LATENT else logger.warning
        log("KV heads of layers %s are not proved: %s", ranges_text(sorted(found)), reason)
    alike = alike_heads(description.geometries, [rank.heads for rank in description.ranks])
    if alike:
        logger.warning(
            "KV heads of layers %s: two heads have equal weights, so that digests do not tell them "
            "apart",
            ranges_text(alike),
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
