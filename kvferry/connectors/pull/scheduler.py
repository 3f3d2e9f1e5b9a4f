"""The scheduler half of the PullConnector: obtains leases for loads, and lends finished prompts."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
)
from kvferry.connectors.pull.borrower import Borrower
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.lender import Lender, lends_only_cached
from kvferry.connectors.pull.metadata import NO_NEWS, PullMetadata
from kvferry.connectors.pull.sources import Sources
from kvferry.connectors.pull.tickets import AcceptedTickets, IssuedTickets
from kvferry.control.client import ControlClient
from kvferry.control.leases import LeaseTable
from kvferry.control.server import ControlServer
from kvferry.errors import ConfigError, KVFerryError, RequestError, TicketExpiredError
from kvferry.mailbox import Mailbox
from kvferry.observe.records import RequestRecords
from kvferry.observe.spans import Spans
from kvferry.topology.description import EngineDescription, RankDescription, tagged_groups
from kvferry.topology.heads import LATENT, HeadDigests, alike_heads
from kvferry.topology.sharding import ranges_text
from kvferry.zeromq import is_everywhere, is_loopback, split_address

logger = logging.getLogger(__name__)

_ranks = msgspec.msgpack.Decoder(RankDescription)


class OwnDescription:
    """The description of this engine for other engines; complete as soon as the ranks are known."""

    def __init__(
        self, context: ConnectorContext, extra: PullConfig, server: ControlServer, sources: Sources
    ) -> None:
        """Builds the description; server and sources get each change, and stay the caller's."""
        self._context = context
        self._extra = extra
        self._server = server
        self._sources = sources
        self._told: EngineDescription | None = None

    @property
    def told(self) -> EngineDescription:
        """The description for other engines."""
        assert self._told is not None  # requests come after the ranks
        return self._told

    def begin(self, handshakes: Sequence[bytes]) -> None:
        """Builds the description from ``handshakes``, the encoded descriptions of all ranks."""
        description = EngineDescription(
            engine_id=self._context.config.engine_id,
            incarnation=self._server.incarnation,
            model=self._context.model,
            groups=tagged_groups(self._context.groups),
            ranks=tuple(_ranks.decode(handshake) for handshake in handshakes),
            convert_dtype=self._extra.convert_dtype,
            serving_engine=self._context.serving_engine,
        )
        self.tell(description)

    def begin_anew(self, handshakes: Sequence[bytes]) -> None:
        """Describes caches that all ranks have registered again, under the incarnation of now.

        Args:
            handshakes: the encoded descriptions of all ranks. Their digests of KV heads are of
                the engine's start, so the digests of before stay.
        """
        ranks = tuple(
            replace(_ranks.decode(handshake), heads=before.heads)
            for handshake, before in zip(handshakes, self.told.ranks, strict=True)
        )
        self.tell(replace(self.told, incarnation=self._server.incarnation, ranks=ranks))

    def set_weights(self, digest: str, heads: Sequence[HeadDigests | None] | None) -> None:
        """Notes a change of weights; see :meth:`set_heads`."""
        told = self.told
        self._told = replace(told, model=replace(told.model, weights_digest=digest))
        self.set_heads(heads)

    def set_heads(self, heads: Sequence[HeadDigests | None] | None) -> None:
        """Replaces the digests of the ranks' KV heads.

        Args:
            heads: digests of each rank; ``None`` if nothing is known any more.
        """
        ranks = self.told.ranks
        told = [None] * len(ranks) if heads is None else heads
        ranks = tuple(replace(rank, heads=each) for rank, each in zip(ranks, told, strict=True))
        self.tell(replace(self.told, ranks=ranks))

    def tell(self, description: EngineDescription) -> None:
        """Gives this description to other engines from now on."""
        _log_heads(description)
        self._told = description
        self._server.set_description(description)
        self._sources.describe(description)


class PullScheduler(SchedulerConnector):
    """Scheduler half; see :class:`~kvferry.connectors.pull.PullConnector`."""

    takes_transfers = True
    takes_weights = True

    def __init__(
        self,
        context: ConnectorContext,
        extra: PullConfig,
        key: bytes | None,
        server: ControlServer,
        client: ControlClient,
        sources: Sources,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        """Takes ownership of server, client, sources and spans; use :meth:`open`.

        ``clock`` is the monotonic clock of these objects, in seconds.
        """
        self._context = context
        self.server = server
        self.client = client
        self.sources = sources
        self._spans = spans
        self.records = RequestRecords(clock, spans, server.leases.snapshot)
        self._told_of_plain = False
        """Whether a request that no prefill engine has handled was logged."""
        self._step = PullMetadata()
        """Message to the ranks in this step."""
        self._counters: Counter[str] = Counter()
        self.description = OwnDescription(context, extra, server, sources)
        """The description of this engine for other engines."""
        tickets = IssuedTickets(context, extra, key, server)
        self.borrower = Borrower(
            context,
            extra,
            client,
            sources.pursuits,
            self.records,
            self._counters,
            clock=clock,
            news=lambda: self._step,
            note_error=server.note_error,
            withdraw_own=tickets.withdraw,
        )
        """The loads of this engine."""
        self.lender = Lender(
            context,
            extra,
            server,
            tickets,
            self.records,
            self._counters,
            news=lambda: self._step,
            filled=self.borrower.filled,
        )
        """The lent prompts of this engine."""

    @classmethod
    def open(
        cls, context: ConnectorContext, clock: Callable[[], float] = time.monotonic
    ) -> "PullScheduler":
        """Starts the control server and the client.

        Args:
            context: the context of the engine.
            clock: monotonic clock of all time limits of this half, in seconds.

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
        server = ControlServer(
            engine_id=config.engine_id,
            incarnation=context.incarnation,
            host=extra.host,
            port=config.kv_port,
            role=config.kv_role,
            leases=LeaseTable.from_options(options, context.num_blocks, clock),
            options=options,
            key=key,
            clock=clock,
        )
        client = ControlClient(
            engine_id=config.engine_id,
            incarnation=context.incarnation,
            options=options,
            peers=server.peers,
            clock=clock,
        )
        sources = Sources(
            client,
            AcceptedTickets(key, extra),
            groups=context.groups,
            addresses=peers,
            renew_interval=lambda ticket: ticket.lease_duration_s / options.renewals_per_lease,
            handshake_timeout_s=extra.handshake_timeout_s,
            progress_timeout_s=extra.progress_timeout_s,
            note_error=server.note_error,
            clock=clock,
            mailbox=partial(Mailbox, clock=clock),
        )
        spans = Spans.from_environment("kvferry-engine", config.engine_id)
        return cls(context, extra, key, server, client, sources, clock, spans)

    @property
    def port(self) -> int:
        """TCP port of the control channel."""
        return self.server.port

    @property
    def address(self) -> str:
        """``host:port`` at which peers reach the control channel."""
        return self.lender.tickets.address

    def set_worker_handshakes(self, handshakes: Sequence[bytes]) -> None:
        """Completes this engine's description: from now on the engine answers and makes
        handshakes.
        """
        self.description.begin(handshakes)
        self.server.set_transfers(self.borrower.statuses)
        self.server.set_traces(self.records.find)
        self.server.set_open(self.records.num_open)

    # ---- caches that were let go --------------------------------------------------------------

    def begin_anew(self, incarnation: str, handshakes: Sequence[bytes]) -> None:
        """The ranks have let their caches go and registered caches again: for other engines, this
        engine was started again.

        Nothing of the former caches is lent any more. Loads that wait for a lease go on waiting,
        and obtain the lease again. Call the method between two steps.

        Args:
            incarnation: the new incarnation, the same on all ranks.
            handshakes: the ``handshake_metadata`` of each rank, by rank.
        """
        self.lender.outdate(())
        self.borrower.begin_anew()
        self.client.incarnation = incarnation
        self.server.begin_anew(incarnation)
        self.description.begin_anew(handshakes)

    # ---- weights that change ------------------------------------------------------------------

    def set_weights(
        self,
        digest: str,
        outdated: Iterable[str] | None,
        heads: Sequence[HeadDigests | None] | None = None,
    ) -> None:
        """See :meth:`SchedulerConnector.set_weights`."""
        before = self.description.told.model.weights_digest
        error = TicketExpiredError(
            f"weights: the KV was computed with {before}, this engine has {digest} now; compute "
            "the prompt again"
        )
        self.lender.outdate(outdated)
        self.borrower.refuse_all(error)
        self.description.set_weights(digest, heads)

    # ---- target side --------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """Checks the ticket of a request prefilled on another engine, and begins to obtain its
        lease.

        Raises:
            TicketError: the ticket is refused, see :meth:`AcceptedTickets.accept`; no engine was
                contacted.
            ConfigError: this engine is a producer only.
            RequestError: the parameters of the request contradict each other.
        """
        self.sources.pursuits.stepped()
        params = request.kv_transfer_params or {}
        loads = bool(params.get("do_remote_prefill"))
        if params.get("only_cached") and (loads or not params.get("do_remote_decode")):
            raise RequestError(
                "kv_transfer_params: only_cached asks for what is cached here, so it goes with "
                "do_remote_decode and not with do_remote_prefill"
            )
        if not loads and not params.get("do_remote_decode"):
            if not self._told_of_plain and self._context.config.kv_role == "kv_consumer":
                self._told_of_plain = True
                _warn_of_plain(request)
            return
        record = self.records.begin(request, loads=loads)
        try:
            transfer = self.lender.tickets.transfer_of(params)
            lends = not loads or self.borrower.begin(request, record, transfer)
        except KVFerryError as error:
            self.records.refused(record, error)
            raise
        if lends:
            self.lender.expect(request, transfer)

    def on_rejected_request(self, request: RequestView) -> None:
        """See :meth:`Borrower.reject`."""
        self.sources.pursuits.stepped()
        self.borrower.reject(request)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See :meth:`Borrower.matched_tokens`."""
        return self.borrower.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: RequestView, blocks: BlocksView, num_external_tokens: int
    ) -> None:
        """See :meth:`Borrower.allocated`."""
        self.borrower.allocated(request, blocks, num_external_tokens)

    def lends_only_cached(self, request: RequestView) -> bool:
        """See :meth:`SchedulerConnector.lends_only_cached`."""
        return lends_only_cached(request)

    def partial_groups(self, request: RequestView) -> frozenset[int]:
        """See :meth:`SchedulerConnector.partial_groups`."""
        filled = self.borrower.filled(request)
        return frozenset() if filled is None else filled.partial

    def first_filled_tokens(self, request: RequestView) -> tuple[int, ...] | None:
        """See :meth:`SchedulerConnector.first_filled_tokens`."""
        filled = self.borrower.filled(request)
        return None if filled is None else filled.starts

    # ---- source side --------------------------------------------------------------------------

    def request_finished(
        self, request: RequestView, block_ids: tuple[list[int], ...], note: bytes = b""
    ) -> tuple[bool, dict[str, Any] | None]:
        """Cancels or gives back a load, or leases out the prompt's blocks.

        ``note`` is written by the engine for the engine of the target, which finds the bytes in
        :attr:`Ticket.note` once the prompt is whole.
        """
        filled = self.borrower.filled(request)
        keep, params = True, None
        if self.borrower.end(request.request_id):
            keep, params = self.lender.request_finished(request, block_ids, filled, note)
        else:
            self.lender.drop(request)
        self.records.finished(request, keep, params)
        return keep, params

    def withdraw(self, request_id: str) -> bool:
        """See :meth:`SchedulerConnector.withdraw`."""
        return self.lender.prefixes.withdraw(request_id)

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """See :meth:`SchedulerConnector.take_back`."""
        self.lender.tickets.take_back(kv_transfer_params)

    def counters(self) -> Mapping[str, float]:
        """See :meth:`SchedulerConnector.counters`."""
        ended = self.lender.leases.counters()
        return {**self._counters, **{f"leases_{how}": count for how, count in ended.items()}}

    # ---- every step ---------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutputView) -> PullMetadata:
        """See :meth:`SchedulerConnector.build_connector_meta`."""
        self.borrower.steps()
        self._sweep()
        self.borrower.active.read_on()
        self.lender.grow(scheduler_output)
        step, self._step = self._step, PullMetadata()
        step.peers, step.gone = self.sources.take_news()
        return step

    def has_news(self) -> bool:
        """Whether :meth:`build_connector_meta` has news for the ranks; if not, the call may be left
        out.
        """
        self.borrower.steps()
        self._sweep()
        self.borrower.active.read_on()
        has_news = self._step != NO_NEWS or self.sources.has_news
        return has_news or bool(self.lender.growing.shown)

    def _sweep(self) -> None:
        self.sources.pursuits.stepped()
        self.records.look()
        self.lender.sweep()

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See :meth:`SchedulerConnector.update_connector_output`."""
        self.borrower.active.note_progress(output.transfer_progress)
        for lease_id, written in output.written.items():
            for rank, num_tokens in written.items():
                self.server.written(lease_id, rank, num_tokens)
        for record in output.transfer_records:
            self.records.add(record)
            if record.ok and record.transport:
                self.server.peers.loaded(record.peer, record.nbytes, record.transport)
            if record.direction == "send":
                self.lender.recorded(record)
            if record.error:
                self.server.note_error(
                    "load", f"request {record.request_id}, rank {record.rank}: {record.error}"
                )
            if record.direction == "recv":
                self.borrower.active.recorded(record)
        self.borrower.ended(output.finished_recving, output.failed_recving)

    def silent_peers(self) -> tuple[str, ...]:
        """See :meth:`SchedulerConnector.silent_peers`."""
        return self.sources.silent_peers()

    def has_pending_work(self) -> bool:
        """Whether ranks have loads under way, or news waits for the ranks."""
        self._sweep()
        return bool(self.borrower.active) or self._step != NO_NEWS

    def close(self) -> None:
        """Ends threads and sockets. Idempotent."""
        self.sources.close()
        self.client.close()
        self.server.close()
        if self._spans is not None:
            self._spans.close()


def _check_reach(extra: PullConfig, config: KVTransferConfig) -> None:
    """Checks whether peers can reach this engine and strangers cannot.

    Raises:
        ConfigError: strangers can reach the engine, and there is no key; or the engine lends, and
            its tickets would name no address, or a port that leads nowhere.
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
    """Logs the KV heads that the digests of their weights do not prove, and the reasons."""
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


def _warn_of_plain(request: RequestView) -> None:
    """Logs a request that no prefill engine has handled; nothing else would show the mistake."""
    logger.warning(
        "request %s came without kv_transfer_params, and this engine (kv_role: kv_consumer) "
        "computes its prompt; of further ones nothing is said. If a prefill engine has "
        "computed it, have the proxy forward the kv_transfer_params of that one's answer "
        "unchanged",
        request.request_id,
    )
