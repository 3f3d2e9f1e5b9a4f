"""The lending half of the PullConnector's scheduler: leases out prompts until they are read.

A prompt is usually lent when its request has ended. If the engine's steps show their written tokens
and the request came with a transfer, the prompt is lent from its first step on, and the lease grows
with each step. A request with ``only_cached`` lends blocks from the prefix cache; such leases make
room for prompts computed to be lent.

If a prompt is lent during its computation, the lease is granted in the first step of this
computation. :meth:`Lender.grow` sees every computed part, until the prompt is whole, or was
preempted, or turns out to be lent only when whole::

    expect ─> granted ─> whole ──────────> swept: its blocks are freed
                 ├─ its lease ends ──────> swept: the request goes on, and nothing is lent
                 └─ preempted, revoked ──> swept: the request goes on; it is lent once it is whole
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvferry.connectors.base import (
    ConnectorContext,
    RequestView,
    ScheduledRequestView,
    SchedulerOutputView,
)
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.groups import Filled
from kvferry.connectors.pull.metadata import LentSpec, PullMetadata
from kvferry.connectors.pull.tickets import IssuedTickets
from kvferry.control.give_backs import word_in
from kvferry.control.leases import EndedLease, Lease, LeaseOutcome, LeaseRefusal, LeaseTable
from kvferry.control.messages import BlockTables
from kvferry.control.server import ControlServer
from kvferry.control.tickets import MAX_TICKET_BLOCKS, TransferId
from kvferry.observe.records import RequestRecords, TransferRecord

logger = logging.getLogger(__name__)

Answer: TypeAlias = tuple[bool, dict[str, Any] | None]
"""Result for an ended request: whether its blocks are kept, and the ``kv_transfer_params`` of its
answer."""

NOTHING_LENT: Mapping[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": False,
    "remote_num_tokens": 0,
}
"""``kv_transfer_params`` of the answer to ``only_cached`` if nothing is lent. An engine that gets
them with a request computes the prompt."""


def lends_only_cached(request: RequestView) -> bool:
    """Whether a request asks for a lease of cached blocks, and for nothing to be computed."""
    return bool((request.kv_transfer_params or {}).get("only_cached"))


class LentPrefixes:
    """The cached prefixes that are lent. Only the scheduler's thread uses the object."""

    def __init__(self, leases: LeaseTable, cap: int | None, counters: Counter[str]) -> None:
        """Args:
        leases: the leases of this engine; stays the caller's.
        cap: largest number of blocks of all lent prefixes together; ``None`` for half of the cap of
            all leases.
        counters: counters to increment.
        """
        self._leases = leases
        self._cap = cap
        self._counters = counters
        self._lent: dict[str, Lease] = {}
        """Request id → the lease of its prefix; the oldest first."""

    def __len__(self) -> int:
        """Number of lent prefixes."""
        return len(self._lent)

    def refusal(self, num_blocks: int) -> LeaseRefusal | None:
        """Reason why a prefix of ``num_blocks`` blocks cannot be lent beside the others; ``None``
        if there is room.
        """
        cap = self._leases.max_blocks // 2 if self._cap is None else self._cap
        pinned = sum(lease.num_blocks for lease in self._lent.values())
        if pinned + num_blocks <= cap:
            return None
        return LeaseRefusal(
            f"max_lent_prefix_blocks: the prefix has {num_blocks} blocks, and cached "
            f"prefixes that are lent hold {pinned} of {cap}; raise max_lent_prefix_blocks"
        )

    def lent(self, lease: Lease, num_tokens: int) -> None:
        """Notes the lease of a prefix of ``num_tokens`` tokens."""
        self._lent[lease.request_id] = lease
        self._counters["prefixes_lent"] += 1
        self._counters["prefix_tokens_lent"] += num_tokens

    def refused(self, request: RequestView, reason: str) -> None:
        """Notes the reason why a request gets no lease of a cached prefix."""
        self._counters["prefixes_refused"] += 1
        logger.info("request %s: no cached prefix is lent: %s", request.request_id, reason)

    def ended(self, request_id: str) -> None:
        """Notes the end of a request's lease; a request without a lent prefix is ignored."""
        self._lent.pop(request_id, None)

    def withdraw(self, request_id: str) -> bool:
        """See :meth:`SchedulerConnector.withdraw`."""
        lease = self._lent.get(request_id)
        is_withdrawn = lease is not None and self._leases.withdraw(lease.lease_id)
        self._counters["prefixes_withdrawn"] += is_withdrawn
        return is_withdrawn

    def withdraw_oldest(self) -> bool:
        """Withdraws the oldest lent prefix that no target has fetched; returns whether there was
        such a prefix.
        """
        return next(self.withdrawals(), None) is not None

    def withdrawals(self) -> Iterator[Lease]:
        """Withdraws prefixes that no target has fetched, the oldest first. Each prefix is withdrawn
        when the iterator is advanced to it.

        Yields:
            The lease of each prefix; its blocks are free once the leases are swept.
        """
        for request_id, lease in list(self._lent.items()):
            if self.withdraw(request_id):
                yield lease


@dataclass(slots=True, eq=False)
class EarlyLease:
    """The lease of a prompt lent during its computation."""

    request: RequestView
    lease: Lease | None = None
    """The lease; ``None`` until the first step of the prompt's computation."""
    is_lent: bool = False
    """Whether the prompt is computed, and its blocks are kept for a target."""
    outcome: LeaseOutcome | None = None
    """How the lease ended while the prompt was computed; ``None`` if the lease did not end then."""

    @property
    def open_lease(self) -> Lease | None:
        """The lease, from its grant on; ``None`` if the lease ended while the prompt was
        computed.
        """
        return self.lease if self.outcome is None else None


class GrowingPrompts:
    """The prompts lent during their computation. Only the scheduler's thread uses the object."""

    def __init__(self, server: ControlServer, tickets: IssuedTickets) -> None:
        """Args:
        server: revokes leases; stays the caller's.
        tickets: the tickets of this engine; stays the caller's.
        """
        self._server = server
        self._tickets = tickets
        self.shown: dict[str, EarlyLease] = {}
        """Request id → its lease, for requests whose computed parts :meth:`Lender.grow` has to see
        in every step."""
        self.by_lease: dict[str, EarlyLease] = {}
        """Lease id → the lease, from the grant to the sweep."""

    def expect(self, request: RequestView) -> None:
        """Notes the arrival of a request whose prompt is to be lent from its first step on."""
        self.shown[request.request_id] = EarlyLease(request)

    def granted(self, early: EarlyLease, lease: Lease) -> None:
        """Notes the granted lease of a prompt, before any target gets its ticket."""
        early.lease = lease
        self.by_lease[lease.lease_id] = early

    def completed(self, early: EarlyLease) -> None:
        """Notes the end of a prompt's computation; its lease is open, and its blocks are kept from
        now on.
        """
        early.is_lent = True

    def forget(self, request_id: str) -> None:
        """Forgets a whole prompt, or a prompt to be lent only when whole; unknown ids are
        ignored.
        """
        self.shown.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """Handles the end of a request whose prompt will not be lent."""
        if (early := self.shown.pop(request_id, None)) is not None:
            self._revoke(early)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Revokes the leases of preempted prompts, as the written blocks will be overwritten; these
        prompts are lent once they are whole.
        """
        for request_id in request_ids & self.shown.keys():
            early = self.shown.pop(request_id)
            self._recall(early)
            self._revoke(early)

    def recall_all(self) -> None:
        """Recalls the tickets of all prompts still under computation, as their leases are about to
        be revoked.
        """
        for early in self.by_lease.values():
            if not early.is_lent:
                self._recall(early)

    def failed(self, lease_id: str) -> None:
        """Recalls the ticket of a lease that is about to be revoked, as a rank could not write its
        blocks. A lease of a whole prompt is left alone.
        """
        early = self.by_lease.get(lease_id)
        if early is not None:
            self._recall(early)

    def swept(self, lease: EndedLease) -> bool:
        """Whether an ended lease belongs to a prompt still under computation. If so, the blocks are
        not freed, as the request goes on.
        """
        early = self.by_lease.pop(lease.lease_id, None)
        if early is None or early.is_lent:
            return False
        early.outcome = lease.outcome
        if lease.outcome is not LeaseOutcome.REVOKED:  # a revoked prompt is lent later
            self._tickets.tell_not_lent(lease.request_id, f"lease {lease.lease_id} has ended")
        return True

    def _recall(self, early: EarlyLease) -> None:
        """Recalls a ticket: later requests for the ticket wait until the prompt is whole, or get a
        denial.
        """
        if early.open_lease is not None:
            self._tickets.recall(early.request.request_id)

    def _revoke(self, early: EarlyLease) -> None:
        """Revokes a lease whose written blocks will be overwritten or will not be lent."""
        if (lease := early.open_lease) is not None:
            self._server.revoke([lease.lease_id])


class Lender:
    """The lent prompts of one engine. Only the scheduler's thread uses the object."""

    def __init__(
        self,
        context: ConnectorContext,
        extra: PullConfig,
        server: ControlServer,
        tickets: IssuedTickets,
        records: RequestRecords,
        counters: Counter[str],
        *,
        news: Callable[[], PullMetadata],
        filled: Callable[[RequestView], Filled | None],
    ) -> None:
        """Args:
        context: context from which the connector was built.
        extra: the connector's keys.
        server: control server with the leases; stays the caller's.
        tickets: the tickets of the leases.
        records: the records of requests.
        counters: counters to increment.
        news: returns the message to the ranks in this step, to be filled.
        filled: returns the tokens filled by the load of a request; ``None`` for a request without a
            load.
        """
        self._context = context
        self._extra = extra
        self._server = server
        self.leases = server.leases
        self.tickets = tickets
        """The tickets of lent prompts."""
        self.prefixes = LentPrefixes(self.leases, extra.max_lent_prefix_blocks, counters)
        """The cached prefixes that are lent."""
        self.growing = GrowingPrompts(server, tickets)
        """The prompts lent during their computation."""
        self._records = records
        self._news = news
        self._filled = filled
        self.on_ended: Callable[[EndedLease], object] = lambda _: None
        """Called in a step with each ended lease of a prompt whose request has ended."""
        self._outdated: set[str] = set()
        """Ids of requests with KV of older weights."""
        self._lends = True
        """Whether the engine lends at all; ``False`` after a change of weights if the requests with
        older KV are unknown."""

    # ---- weights that change ------------------------------------------------------------------

    def outdate(self, request_ids: Iterable[str] | None) -> None:
        """Ends every lease, as the engine has other weights; KV of the older weights is not lent
        any more.

        Args:
            request_ids: requests with KV of the older weights; ``None`` if the ids will never be
                known again, and nothing more is lent.
        """
        self.growing.recall_all()
        self.leases.revoke_all()
        self._lends = self._lends and request_ids is not None
        self._outdated.update(request_ids or ())

    # ---- requests that arrive -----------------------------------------------------------------

    def expect(self, request: RequestView, transfer: TransferId | None) -> None:
        """Notes a new request; targets may ask for the ticket from now on, if the request has a
        transfer.
        """
        if transfer is not None:
            self.tickets.expect(request.request_id, transfer)
            if self._lends_early(request):
                self.growing.expect(request)

    def _lends_early(self, request: RequestView) -> bool:
        """Whether the prompt of a request with a transfer is lent from its first chunk on: only if
        each step shows the written tokens.
        """
        shows = self._context.shows_steps and self._context.config.is_producer
        return shows and not lends_only_cached(request)

    # ---- requests that end --------------------------------------------------------------------

    def request_finished(
        self,
        request: RequestView,
        block_ids: Sequence[Sequence[int]],
        filled: Filled | None,
        note: bytes = b"",
    ) -> Answer:
        """Leases out the prompt's blocks, if the request asks for a lease.

        Args:
            request: the request.
            block_ids: its block tables.
            filled: the tokens loaded for the request itself; ``None`` without a load.
            note: bytes of the engine for the engine of the target.
        """
        keep, params = self._finished(request, block_ids, filled, note)
        if params is None:
            self.drop(request)
            if lends_only_cached(request) and request.finished_cleanly:
                params = dict(NOTHING_LENT)
        else:
            self.growing.forget(request.request_id)
        return keep, params

    def drop(self, request: RequestView) -> None:
        """Notes the end of a request without a lease of its prompt."""
        self._outdated.discard(request.request_id)
        self.growing.drop(request.request_id)
        self.tickets.tell_not_lent(
            request.request_id,
            f"request {request.request_id} has ended ({request.finish_reason}) without a lease",
        )

    def _finished(
        self,
        request: RequestView,
        block_ids: Sequence[Sequence[int]],
        filled: Filled | None,
        note: bytes,
    ) -> Answer:
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
        return self._lend(request, block_ids, filled, note)

    def _lend(
        self,
        request: RequestView,
        block_ids: Sequence[Sequence[int]],
        filled: Filled | None,
        note: bytes,
    ) -> Answer:
        num_tokens = min(request.num_computed_tokens, len(request.prompt_token_ids))
        has_states = any(group.is_recurrent for group in self._context.groups)
        if has_states and num_tokens < request.num_computed_tokens:
            return self._not_lent(
                request,
                f"its recurrent layers have moved on to token {request.num_computed_tokens}, past "
                f"the prompt of {num_tokens}; ask for max_tokens=1",
            )
        tables = self._tables(block_ids, num_tokens)
        early = self.growing.shown.get(request.request_id)
        if early is not None and early.lease is not None:
            return self._lend_rest(early, tables, num_tokens, filled, note)
        num_blocks = sum(block != 0 for ids in tables for block in ids)
        if num_blocks == 0:
            return False, None
        lease = self._granted(request, num_blocks, num_tokens, ())
        if isinstance(lease, LeaseRefusal):
            return self._not_lent(request, lease.reason)
        if lends_only_cached(request):
            self.prefixes.lent(lease, num_tokens)
        self._note_lent(lease, tables, num_tokens)
        ticket = self.tickets.ticket(request, lease, tables, num_tokens, filled, note)
        self._note_word(request, lease)
        return True, self.tickets.tell_lent(ticket)

    def _note_word(self, request: RequestView, lease: Lease) -> None:
        """Ends a lease from now on if the router gives it back, or has given it back already. The
        ticket must have been made: it says whether the lease grows.
        """
        word = word_in(request.kv_transfer_params)
        if word is not None:
            self._server.give_backs.granted(word, lease.lease_id)

    def _tables(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> BlockTables:
        """The parts of the block tables for the first ``num_tokens`` tokens."""
        return tuple(
            tuple(ids[: -(-num_tokens // group.virtual_block_size)])
            for ids, group in zip(block_ids, self._context.groups, strict=True)
        )

    def _note_lent(self, lease: Lease, tables: BlockTables, num_tokens: int) -> None:
        """Has the ranks compute digests of the lent blocks, with ``record_digests``."""
        if self._extra.record_digests:
            self._news().lent.append(_spec(lease, tables, num_tokens))

    # ---- prompts that are lent while they are computed ----------------------------------------

    def grow(self, output: SchedulerOutputView) -> None:
        """Grants leases of the prompts begun in this step, and notes the tokens written by the
        step.
        """
        if not self.growing.shown:
            return
        self.growing.preempted(output.preempted_req_ids)
        counts = output.num_scheduled_tokens
        for part in output.requests:
            early = self.growing.shown.get(part.request_id)
            if early is None:
                continue
            end = part.first_position + counts[part.request_id]
            is_last = end >= len(early.request.prompt_token_ids)
            if early.lease is None and (is_last or not self._grant(early, part)):
                self.growing.forget(part.request_id)  # the prompt is lent when whole
            elif not is_last and (lease := early.open_lease) is not None:
                self.leases.allocated(lease.lease_id, self._tables(part.block_ids, end))
                self._news().writes.append(_spec(lease, (), end))

    def _grant(self, early: EarlyLease, part: ScheduledRequestView) -> bool:
        """Grants the lease of a prompt whose computation this step begins; returns whether the
        lease was granted.
        """
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
            return False  # the lease may be granted once the prompt is whole
        self.growing.granted(early, lease)
        tables = self._tables(part.block_ids, num_tokens)
        ticket = self.tickets.ticket(request, lease, tables, num_tokens, filled)
        self._note_word(request, lease)
        self.tickets.tell_lent(ticket)
        return True

    def _lend_rest(
        self,
        early: EarlyLease,
        tables: BlockTables,
        num_tokens: int,
        filled: Filled | None,
        note: bytes,
    ) -> Answer:
        """Lends the rest of a prompt after its computation: its lease becomes whole."""
        lease = early.open_lease
        if lease is None:
            return False, None  # the target of the lease needs nothing any more
        self.growing.completed(early)
        self._note_lent(lease, tables, num_tokens)
        self.leases.allocated(lease.lease_id, tables, note)
        for rank in range(self._context.world_size):
            self._server.written(lease.lease_id, rank, num_tokens)
        ticket = self.tickets.ticket(early.request, lease, tables, num_tokens, filled, note)
        return True, self.tickets.tell_lent(ticket)

    # ---- leases -------------------------------------------------------------------------------

    def _granted(
        self, request: RequestView, num_blocks: int, num_tokens: int, writers: Iterable[int]
    ) -> Lease | LeaseRefusal:
        """Grants a lease of a request's blocks, if its ticket can name all blocks and the caps
        allow the lease. Prompts computed to be lent take precedence over cached prefixes that no
        target has fetched.
        """
        named = sum(-(-num_tokens // group.virtual_block_size) for group in self._context.groups)
        if named > MAX_TICKET_BLOCKS:
            return LeaseRefusal(
                f"the block tables of its {num_tokens} tokens have {named} entries over "
                f"{len(self._context.groups)} KV cache groups, and a ticket holds "
                f"{MAX_TICKET_BLOCKS}; serve the model with larger blocks (vLLM: --block-size, "
                "SGLang: --page-size)"
            )
        if lends_only_cached(request):
            if (refusal := self.prefixes.refusal(num_blocks)) is not None:
                return refusal
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
        """Withdraws untaken prefixes until leases pin at most ``room`` blocks, as far as
        possible.
        """
        if room < 0:
            return
        withdrawals = self.prefixes.withdrawals()
        while self.leases.pinned_blocks > room and next(withdrawals, None) is not None:
            self.sweep()

    def _not_lent(self, request: RequestView, reason: str) -> tuple[bool, None]:
        """Logs why a prompt is not lent: the decode engine gets no ticket, and will not know
        why.
        """
        if lends_only_cached(request):
            self.prefixes.refused(request, reason)
            return False, None
        self.tickets.tell_not_lent(request.request_id, reason)
        self._server.note_error("lease", f"request {request.request_id}: {reason}")
        logger.warning(
            "request %s: its KV is not lent, and the decode engine has to compute it: %s",
            request.request_id,
            reason,
        )
        return False, None

    def sweep(self) -> None:
        """Has the blocks of ended leases freed."""
        for lease in self.leases.sweep():
            self._server.give_backs.ended(lease.lease_id)
            if self.growing.swept(lease):
                continue
            self.prefixes.ended(lease.request_id)
            self._outdated.discard(lease.request_id)
            self.tickets.tell_not_lent(lease.request_id, f"lease {lease.lease_id} has ended")
            self._news().released.append(lease.request_id)
            self._records.freed(lease)
            self.on_ended(lease)

    def recorded(self, record: TransferRecord) -> None:
        """Ends a lease whose blocks a rank could not write, or could not digest."""
        if not record.ok:
            self.growing.failed(record.lease_id)
            self._server.revoke([record.lease_id])


def _spec(lease: Lease, tables: BlockTables, num_tokens: int) -> LentSpec:
    return LentSpec(
        request_id=lease.request_id,
        lease_id=lease.lease_id,
        block_ids=tuple(list(ids) for ids in tables),
        num_tokens=num_tokens,
    )
