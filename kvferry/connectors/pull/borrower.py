"""The borrowing half of the PullConnector's scheduler: obtains leases of other engines' prompts.

A request prefilled on another engine brings a ticket, or a transfer with which this engine requests
the ticket from the source. The borrower obtains the lease, has the ranks read under the lease, and
gives the lease back. Handshakes, renewals and other timed work are in
:mod:`~kvferry.connectors.pull.sources`; the pursuit of leases is in
:mod:`~kvferry.connectors.pull.pursuits`.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from kvferry.connectors.base import (
    BlocksView,
    ConnectorContext,
    RequestView,
)
from kvferry.connectors.pull.active_loads import ActiveLoads
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.groups import Filled
from kvferry.connectors.pull.metadata import PullMetadata
from kvferry.connectors.pull.pursuit import (
    Load,
    LoadState,
    Pursuit,
    PursuitState,
    Standing,
)
from kvferry.connectors.pull.pursuits import Pursuits
from kvferry.control.client import ControlClient
from kvferry.control.messages import TransferStatus
from kvferry.control.tickets import Ticket, TransferId
from kvferry.errors import (
    ConfigError,
    KVFerryError,
    TicketError,
    TicketExpiredError,
)
from kvferry.observe.records import RequestRecord, RequestRecords

logger = logging.getLogger(__name__)


class Borrower:
    """The loads of one engine. Only the scheduler's thread uses the object."""

    def __init__(
        self,
        context: ConnectorContext,
        extra: PullConfig,
        client: ControlClient,
        pursuits: Pursuits,
        records: RequestRecords,
        counters: Counter[str],
        *,
        clock: Callable[[], float],
        news: Callable[[], PullMetadata],
        note_error: Callable[[str, str], None],
        withdraw_own: Callable[[Ticket], object],
    ) -> None:
        """Args:
        context: context from which the connector was built.
        extra: the connector's keys.
        client: control client of this engine; stays the caller's.
        pursuits: the pursuits of the leases of loads; stays the caller's.
        records: the records of requests.
        counters: counters to increment.
        clock: monotonic clock of ``pursuits``, in seconds.
        news: returns the message to the ranks in this step, to be filled.
        note_error: takes the kind and text of an error, for ``kvferry status``.
        withdraw_own: ends a lease of this engine, for a ticket that leads back to this engine.
        """
        self._context = context
        self._client = client
        self._pursuits = pursuits
        self._records = records
        self._counters = counters
        self._clock = clock
        self._note_error = note_error
        self._withdraw_own = withdraw_own
        self._tickets = pursuits.tickets
        self.loads: dict[str, Load] = {}
        """Request id → its load, until both the request and the load have ended."""
        self.active = ActiveLoads(
            context, extra, pursuits, records, clock=clock, news=news, look=self._look
        )
        """The loads under way on the ranks."""
        self._has_looked = False
        """Whether this step has looked for answers of sources."""

    def steps(self) -> None:
        """Notes that the engine has asked for all requests of a step; the next step looks for
        answers of sources again.
        """
        self._has_looked = False

    # ---- requests that begin ------------------------------------------------------------------

    def begin(
        self, request: RequestView, record: RequestRecord, transfer: TransferId | None
    ) -> bool:
        """Begins to obtain the lease of a request prefilled on another engine.

        Args:
            request: a request with ``do_remote_prefill``.
            record: the record of the request.
            transfer: the transfer under which this engine lends the prompt on; ``None`` if the
                engine does not.

        Returns:
            Whether this engine may lend the prompt on; a request whose ticket has to be requested
            is not lent on.

        Raises:
            TicketError: the ticket is refused, see :meth:`AcceptedTickets.accept`; no engine was
                contacted.
            ConfigError: this engine is a producer only.
        """
        params = request.kv_transfer_params or {}
        if "ticket" not in params and "transfer" in params and transfer is None:
            self._begin_ask(record, params["transfer"])
            return False
        ticket = self._accepted(params.get("ticket"), request)
        waits = not ticket.whole or bool(params.get("passed_on"))
        self._begin_load(record, ticket, waits=waits)
        return True

    def refuse_all(self, error: KVFerryError) -> None:
        """Ends all loads with this error; the reading ranks are told to give up."""
        for load in self.loads.values():
            if load.state in (LoadState.READING, LoadState.RESTARTING):
                self.active.cancel(load, f"{type(error).__name__}: {error}")
            elif (
                load.state in (LoadState.WAITING, LoadState.READY)
                and self._standing(load).error is None
            ):
                self._pursuits.refuse(load.pursuit, error)

    def begin_anew(self) -> None:
        """Gives back the leases of all loads under way, which the ranks have given up, before this
        engine gets another incarnation. Waiting loads obtain their leases again, see
        :meth:`Sources.describe`.
        """
        for load in self.loads.values():
            if load.is_read:
                if load.state in (LoadState.READING, LoadState.RESTARTING):
                    self.active.cancel(load, "the engine has let its caches go")
                self._pursuits.release(load.pursuit)
            elif load.state is LoadState.READY:
                load.state, load.is_early = LoadState.WAITING, False

    def _begin_load(self, record: RequestRecord, ticket: Ticket, *, waits: bool) -> None:
        """Begins to obtain the lease of an accepted ticket, see :meth:`Pursuits.add`."""
        if ticket.incarnation == self._client.incarnation:
            # The ticket leads back to this engine: the lent blocks are in our own prefix cache.
            self._tickets.retire(ticket)
            self._withdraw_own(ticket)
            record.loads = False
            return
        self._note_load(self._pursuits.add(record, ticket, waits=waits)).accept(ticket)

    def _note_load(self, pursuit: Pursuit) -> Load:
        load = self.loads[pursuit.request_id] = Load(pursuit, started=self._clock())
        return load

    def _begin_ask(self, record: RequestRecord, text: object) -> None:
        """Requests the ticket of a request sent to both engines by the router.

        Raises:
            TicketError, ConfigError: see :meth:`begin`.
        """
        self._check_role()
        try:
            transfer = self._tickets.accept_transfer(text)
            self._note_load(self._pursuits.ask(record, transfer))
        except TicketError as error:
            self._note_ticket(record.request_id, error)
            raise

    def _denied(self, load: Load, reason: str) -> None:
        """Drops a load whose source lends nothing and has given the reason."""
        del self.loads[load.request_id]
        load.record.loads = False
        self._counters["asks_denied"] += 1
        logger.warning(
            "request %s: the engine at %s lends nothing, and its prompt is computed here: %s",
            load.request_id,
            load.pursuit.source.address,
            reason,
        )

    def _accept_asked(self, request: RequestView, load: Load, ticket: Ticket) -> bool:
        """Whether a request loads with a requested ticket, after the ticket has come.

        Raises:
            TicketError: the ticket does not fit the request.
        """
        if ticket.incarnation == self._client.incarnation:  # as in _begin_load
            self._pursuits.release(self.loads.pop(load.request_id).pursuit)
            load.record.loads = False
            return False
        try:
            self._tickets.check(ticket, request)
        except TicketError as error:
            self._pursuits.refuse(load.pursuit, error, "ticket")
            self._pursuits.release(load.pursuit, keep=True)  # other holders may use the ticket
            raise
        load.accept(ticket)
        return True

    def _accepted(self, signed: object, request: RequestView) -> Ticket:
        """The accepted ticket of a request, if this engine may load.

        Raises:
            TicketError, ConfigError: see :meth:`begin`.
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
        self._note_error("ticket", f"request {request_id}: {type(error).__name__}: {error}")

    def reject(self, request: RequestView) -> None:
        """Gives back the lease of a request refused by the engine's front end, also a lease whose
        ticket has to be requested. Only the ``kv_transfer_params`` of the request are known, and no
        other method will get the request.

        A refused ticket is left alone: its lease belongs to another request, or will expire.
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
        record = self._records.begin(request, loads=True)
        if asked is None:
            self._pursuits.release(self._pursuits.add(record, ticket))
        else:
            with contextlib.suppress(TicketExpiredError):  # another request has brought it
                self._pursuits.release(self._pursuits.ask(record, asked))
        self._records.end(record, "refused by the engine's front")

    def matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See :meth:`SchedulerConnector.get_num_new_matched_tokens`.

        Raises:
            KVFerryError: the handshake was refused, the lease could not be obtained, or the source
                no longer keeps a needed block.
        """
        load = self.loads.get(request.request_id)
        if load is None or load.is_begun:
            return 0, False
        standing = self._standing(load)
        ticket = standing.ticket
        num_tokens = _num_loadable(ticket, request)
        available = num_tokens - num_computed_tokens
        if available <= 0:
            return 0, False
        if standing.error is not None:
            load.state = LoadState.FAILED
            raise standing.error
        if standing.state is PursuitState.DENIED:
            self._denied(load, standing.reason)
            return 0, False
        if ticket is None:
            return None, False
        if ticket.lease_id != load.accepted and not self._accept_asked(request, load, ticket):
            return 0, False
        if load.state is LoadState.WAITING and not self._begins(load, standing):
            return None, False
        try:
            if not load.is_early:  # an early load is checked when whole
                self.active.check(load.pursuit, ticket, num_computed_tokens, num_tokens)
        except KVFerryError as error:
            self._pursuits.refuse(load.pursuit, error)
            raise
        return available, True

    def _standing(self, load: Load) -> Standing:
        """The standing of a load before its read; after a loss, the standing of the next lease.

        The standing is read once: another thread may replace the standing between two looks.
        """
        standing = load.pursuit.standing
        if not standing.is_whole and self._look():
            standing = load.pursuit.standing
        while standing.error is not None and load.pursuit.successor is not None:
            load.pursuit, load.state = load.pursuit.successor, LoadState.WAITING
            standing = load.pursuit.standing
        return standing

    def _begins(self, load: Load, standing: Standing) -> bool:
        """Whether a waiting load is ready now."""
        load.is_early = not standing.is_whole and self.active.is_due_early(load.pursuit, standing)
        if standing.is_whole or load.is_early:
            load.state = LoadState.READY
        return load.state is LoadState.READY

    def _look(self) -> bool:
        """Takes the received answers, and returns whether there were any; no other thread then
        needs to run for them. An engine asks for every waiting request in every step, and one look
        per step is enough.
        """
        if self._has_looked:
            return False
        self._has_looked = True
        return self._client.pump()

    def allocated(self, request: RequestView, blocks: BlocksView, num_external_tokens: int) -> None:
        """See :meth:`SchedulerConnector.update_state_after_alloc`."""
        load = self.loads.get(request.request_id)
        if load is not None and load.is_begun:
            return
        self._records.admitted(request, num_external_tokens)
        if load is None:
            return
        if num_external_tokens == 0:
            self._pursuits.release(self.loads.pop(request.request_id).pursuit)
            return
        num_tokens = _num_loadable(load.ticket, request)
        first_token = num_tokens - num_external_tokens
        self.active.start(load, first_token, num_tokens, blocks.get_block_ids())

    def filled(self, request: RequestView) -> Filled | None:
        """The tokens of our groups filled by the request's load; ``None`` without a load, or after
        a failure.
        """
        load = self.loads.get(request.request_id)
        return None if load is None else load.filled

    def end(self, request_id: str) -> bool:
        """Handles the end of a request. Returns whether no rank reads for the request; if ranks
        read, they are told to give up.
        """
        load = self.loads.get(request_id)
        if load is None:
            return True
        if load.is_read:
            self.active.abort(load)
            return False
        if load.state is LoadState.LOADED:
            del self.loads[request_id]
        else:
            self._pursuits.release(self.loads.pop(request_id).pursuit)
        return True

    def statuses(self) -> list[TransferStatus]:
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
                progress_s=now - load.pursuit.progressed,
            )
            for load in list(self.loads.values())
            if load.state is not LoadState.LOADED and load.pursuit.standing.ticket is not None
        ]

    def ended(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Every rank has reported the loads of ``finished``; the loads of ``failed`` have
        failed.
        """
        for load in self.active.ended(finished, failed):
            del self.loads[load.request_id]


def _num_loadable(ticket: Ticket | None, request: RequestView) -> int:
    """End of the tokens loadable from the source: the last token is computed here, for its
    logits.
    """
    most = request.num_tokens - 1
    return most if ticket is None else min(ticket.num_tokens, most)
