"""The lending half of the PullConnector's scheduler: leases prompts out, until they are read.

A prompt is lent when its request has ended; or, where the engine's steps show what they write and
the request came with a transfer, from its first step on, and its lease grows with each. What a
request with ``only_cached`` lends was here before, and makes room for prompts that were computed
to be lent.
"""

import hmac
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connectors.base import (
    ConnectorContext,
    RequestView,
    ScheduledRequestView,
    SchedulerOutputView,
    TransferRecord,
)
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.groups import Filled
from kvferry.connectors.pull.metadata import LentSpec, PullMetadata
from kvferry.connectors.pull.record import RequestRecords
from kvferry.control.leases import Lease, LeaseOutcome, LeaseRefusal, LeaseTable
from kvferry.control.messages import BlockTables
from kvferry.control.server import ControlServer
from kvferry.control.tickets import Ticket, Transfer, prompt_digest, read_transfer, sign, verify
from kvferry.errors import TicketError

logger = logging.getLogger(__name__)

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
    mirrored: int = 0
    """Leading tokens that the ranks were told to mirror, where they do."""
    outcome: LeaseOutcome | None = None
    """How it ended while the prompt was computed."""


def lends_only_cached(request: RequestView) -> bool:
    """Whether a request asks for a lease of what is cached, and for nothing to be computed."""
    return bool((request.kv_transfer_params or {}).get("only_cached"))


class Lender:
    """What one engine lends. Belongs to the scheduler's thread."""

    def __init__(
        self,
        context: ConnectorContext,
        extra: PullConfig,
        key: bytes | None,
        leases: LeaseTable,
        server: ControlServer,
        records: RequestRecords,
        counters: Counter[str],
        news: Callable[[], PullMetadata],
        filled: Callable[[RequestView], Filled | None],
    ) -> None:
        """``news`` is where to write what the ranks are to be told in this step, ``filled`` says
        what a request has loaded itself.
        """
        self._context = context
        self._extra = extra
        self._key = key
        self.leases = leases
        self._server = server
        self._records = records
        self._counters = counters
        self._news = news
        self._filled = filled
        self.mirrored_ranks: frozenset[int] = frozenset()
        """Ranks that copy what is lent to where it is read; set once they are known."""
        self._mirroring: dict[str, set[int]] = {}
        """Lease id → ranks that have not copied its blocks yet."""
        self._outdated: set[str] = set()
        """Requests with KV of weights that the engine no longer has."""
        self._lends = True
        """Until its weights change where nobody knows which KV is of which."""
        self._transfers: dict[str, Transfer] = {}
        """Request id → the transfer that others may ask for, of requests that have come with one:
        until nothing is lent, or no longer."""
        self._lent_as: dict[Transfer, str] = {}
        """The leases of those that are lent."""
        self._prompts: dict[str, EarlyLease] = {}
        """Request id → its lease, for those that are to be lent while they are computed."""
        self._early: dict[str, EarlyLease] = {}
        """Those that were granted and not swept, by the lease's id."""
        self._prefixes: dict[str, Lease] = {}
        """Request id → its lease, for those that lend what was cached; the oldest first."""

    @property
    def lends_prefixes(self) -> bool:
        """Whether any cached prefix is lent."""
        return bool(self._prefixes)

    @property
    def prompts(self) -> Collection[str]:
        """Requests of which :meth:`grow` must be shown every part."""
        return self._prompts.keys()

    @property
    def is_mirroring(self) -> bool:
        """Whether ranks still copy what is lent to where it is read."""
        return bool(self._mirroring)

    # ---- weights that change ------------------------------------------------------------------

    def outdate(self, request_ids: Iterable[str] | None) -> None:
        """The engine has other weights: every lease ends, and KV of the older ones is not lent.

        Args:
            request_ids: requests with KV of the older ones; ``None`` where that will never be
                known again, so that nothing more is lent.
        """
        for early in self._early.values():
            if not early.is_lent:
                self._recall(early)
        self.leases.revoke_all()
        self._lends = self._lends and request_ids is not None
        self._outdated.update(request_ids or ())

    # ---- requests that end --------------------------------------------------------------------

    def request_finished(
        self,
        request: RequestView,
        block_ids: Sequence[Sequence[int]],
        filled: Filled | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Leases the prompt's blocks out, if that was asked for; ``filled`` is what it has loaded.

        Returns:
            Whether its blocks are kept, and the ``kv_transfer_params`` of its answer.
        """
        keep, params = self._finished(request, block_ids, filled)
        if params is None:
            self.drop(request)
            if lends_only_cached(request) and request.finished_cleanly:
                params = dict(NOTHING_LENT)
        else:
            self._prompts.pop(request.request_id, None)
        return keep, params

    def drop(self, request: RequestView) -> None:
        """A request has ended, and nothing of it is lent."""
        self._outdated.discard(request.request_id)
        early = self._prompts.pop(request.request_id, None)
        if early is not None:
            self._revoke(early)
        self.tell_not_lent(
            request.request_id,
            f"request {request.request_id} has ended ({request.finish_reason}) without a lease",
        )

    def _finished(
        self,
        request: RequestView,
        block_ids: Sequence[Sequence[int]],
        filled: Filled | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        is_outdated = request.request_id in self._outdated
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
        block_ids: Sequence[Sequence[int]],
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
        mirrored = self.mirrored_ranks
        lease = self._granted(request, num_blocks, num_tokens, mirrored)
        if isinstance(lease, LeaseRefusal):
            return self._not_lent(request, lease.reason)
        if lends_only_cached(request):
            self._prefixes[request.request_id] = lease
            self._counters["prefixes_lent"] += 1
            self._counters["prefix_tokens_lent"] += num_tokens
        self._note_lent(lease, tables, num_tokens)
        ticket = self._ticket(request, lease, tables, num_tokens, first_tokens)
        return True, self.tell_lent(ticket)

    def _tables(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> BlockTables:
        """The parts of block tables that hold the first ``num_tokens`` tokens."""
        return tuple(
            tuple(ids[: -(-num_tokens // group.virtual_block_size)])
            for ids, group in zip(block_ids, self._context.groups, strict=True)
        )

    def _note_lent(
        self, lease: Lease, tables: BlockTables, num_tokens: int, mirrored: int = 0
    ) -> None:
        """Has the ranks mirror, or digest, what is lent; its first ``mirrored`` tokens they have
        been told before to mirror.
        """
        if self.mirrored_ranks:
            self._mirroring[lease.lease_id] = set(self.mirrored_ranks)
        if self.mirrored_ranks or self._extra.record_digests:
            self._news().lent.append(_spec(lease, tables, num_tokens, mirrored))

    def _ticket(
        self,
        request: RequestView,
        lease: Lease,
        tables: BlockTables,
        num_tokens: int,
        first_tokens: tuple[int, ...],
    ) -> Ticket:
        parallel = self._context.groups[0].parallel
        host, port = self._extra.told(self._server.port)
        return Ticket(
            lease_id=lease.lease_id,
            engine_id=self._context.config.engine_id,
            incarnation=self._context.incarnation,
            secret=self._server.secret(lease.lease_id),
            host=host,
            port=port,
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
            whole=not self.leases.readable([lease.lease_id]),
        )

    # ---- prompts that are lent while they are computed ----------------------------------------

    def _lends_early(self, request: RequestView) -> bool:
        """Whether the prompt of a request with a transfer is lent from its first chunk on: where
        each step shows what it writes.
        """
        shows = self._context.shows_steps and self._context.config.is_producer
        return shows and not lends_only_cached(request)

    def grow(self, output: SchedulerOutputView) -> None:
        """Grants leases of the prompts that begin in this step, and notes what the step writes."""
        if not self._prompts:
            return
        for request_id in output.preempted_req_ids & self._prompts.keys():
            preempted = self._prompts.pop(request_id)
            self._recall(preempted)
            self._revoke(preempted)
        counts = output.num_scheduled_tokens
        for part in output.requests:
            early = self._prompts.get(part.request_id)
            if early is None:
                continue
            end = part.first_position + counts[part.request_id]
            is_last = end >= len(early.request.prompt_token_ids)
            if early.lease is None and (is_last or not self._grant(early, part)):
                del self._prompts[part.request_id]  # it is lent once it is whole
            elif not is_last and early.lease is not None and early.outcome is None:
                tables = self._tables(part.block_ids, end)
                self.leases.allocated(early.lease.lease_id, tables)
                mirrored, early.mirrored = early.mirrored, end
                shown = tables if self.mirrored_ranks else ()
                self._news().writes.append(_spec(early.lease, shown, end, mirrored))

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
        self._note_lent(lease, tables, num_tokens, early.mirrored)
        self.leases.allocated(lease.lease_id, tables)
        for rank in set(range(self._context.world_size)) - self.mirrored_ranks:
            self._server.written(lease.lease_id, rank, num_tokens)
        ticket = self._ticket(early.request, lease, tables, num_tokens, first_tokens)
        return True, self.tell_lent(ticket)

    def _recall(self, early: EarlyLease) -> None:
        """Who asks from now on is to wait until the prompt is whole, or nothing of it is lent."""
        transfer = self._transfers.get(early.request.request_id)
        if transfer is not None and early.lease is not None and early.outcome is None:
            self._lent_as.pop(transfer, None)
            self._server.recall(transfer)

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
        if lends_only_cached(request):
            cap = self._extra.max_lent_prefix_blocks
            if cap is None:
                cap = self.leases.max_blocks // 2
            pinned = sum(lease.num_blocks for lease in self._prefixes.values())
            if pinned + num_blocks > cap:
                return LeaseRefusal(
                    f"max_lent_prefix_blocks: the prefix has {num_blocks} blocks, and cached "
                    f"prefixes that are lent hold {pinned} of {cap}; raise max_lent_prefix_blocks"
                )
        else:
            self._make_room(self.leases.max_blocks - num_blocks)
        return self.leases.grant(
            request.request_id,
            num_blocks,
            shared=bool((request.kv_transfer_params or {}).get("shared")),
            num_tokens=num_tokens,
            writers=writers,
        )

    def _make_room(self, room: int) -> None:
        """Withdraws untaken prefixes until leases pin so many blocks at most, if that can be."""
        if self.leases.pinned_blocks <= room:
            return  # without a look at all of them
        for name in list(self._prefixes):
            if room < 0 or self.leases.pinned_blocks <= room:
                return
            if self.withdraw(name):
                self.sweep()

    def withdraw(self, request_id: str) -> bool:
        """See :meth:`SchedulerConnector.withdraw`."""
        lease = self._prefixes.get(request_id)
        is_withdrawn = lease is not None and self.leases.withdraw(lease.lease_id)
        self._counters["prefixes_withdrawn"] += is_withdrawn
        return is_withdrawn

    def withdraw_oldest(self) -> bool:
        """Withdraws the cached prefix that has been lent for longest and that nobody has fetched,
        and says whether there is one.
        """
        return any(self.withdraw(request_id) for request_id in list(self._prefixes))

    def _not_lent(self, request: RequestView, reason: str) -> tuple[bool, None]:
        """The decode engine will not know why it gets no ticket, so it is said here."""
        if lends_only_cached(request):
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

    def transfer_of(self, params: Mapping[str, Any]) -> Transfer | None:
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

    def expect(self, request: RequestView, transfer: Transfer | None) -> None:
        """A request has come; from now on others may ask for its transfer, if it has one."""
        if transfer is not None:
            self._transfers[request.request_id] = transfer
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
        transfer = self._transfers.get(ticket.request_id)
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
        transfer = self._transfers.pop(request_id, None)
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
        self.withdraw_own(ticket)

    def withdraw_own(self, ticket: Ticket) -> None:
        """Ends the lease of a ticket of ours that no target has used."""
        # Without a cluster key anybody could write a ticket, but not its secret.
        if hmac.compare_digest(ticket.secret, self._server.secret(ticket.lease_id)):
            self.leases.withdraw(ticket.lease_id)

    def _take_back_transfer(self, text: object) -> None:
        """Ends the lease of a transfer that no target has used."""
        try:
            transfer = read_transfer(text, self._key)
        except TicketError as error:
            self._server.note_error("ticket", f"to be taken back: {error}")
            return
        lease_id = self._lent_as.get(transfer)
        if lease_id is not None:
            self.leases.withdraw(lease_id)

    def sweep(self) -> None:
        """Has the blocks of leases that have ended freed."""
        for lease in self.leases.sweep():
            early = self._early.pop(lease.lease_id, None)
            if early is not None and not early.is_lent:
                early.outcome = lease.outcome  # its request goes on
                if lease.outcome is not LeaseOutcome.REVOKED:  # else the prompt is lent later
                    self.tell_not_lent(lease.request_id, f"lease {lease.lease_id} has ended")
                continue
            self._mirroring.pop(lease.lease_id, None)
            self._prefixes.pop(lease.request_id, None)
            self._outdated.discard(lease.request_id)
            self.tell_not_lent(lease.request_id, f"lease {lease.lease_id} has ended")
            self._news().released.append(lease.request_id)
            self._records.freed(lease)

    def recorded(self, record: TransferRecord) -> None:
        """A rank has copied the blocks of a lease to where they are read, or could not."""
        missing = self._mirroring.get(record.lease_id)
        if not record.ok:
            if (early := self._early.get(record.lease_id)) is not None:
                self._recall(early)
            self._server.revoke([record.lease_id])
            return
        if missing is None:
            return  # it is no such record
        self._server.written(record.lease_id, record.rank, record.tokens)
        missing.discard(record.rank)
        if not missing:
            del self._mirroring[record.lease_id]


def _spec(lease: Lease, tables: BlockTables, num_tokens: int, first_token: int) -> LentSpec:
    return LentSpec(
        request_id=lease.request_id,
        lease_id=lease.lease_id,
        block_ids=tuple(list(ids) for ids in tables),
        num_tokens=num_tokens,
        first_token=first_token,
    )
