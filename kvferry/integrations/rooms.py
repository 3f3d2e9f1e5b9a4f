"""Rooms: kvferry's scheduler half and worker half, for serving engines that poll every request.

Such an engine has no call per step for a transfer backend. Its scheduler polls every request in
each turn of its loop instead, and each request between two servers has a room: a number that its
router has drawn. A poll of a room that was polled since the last step begins the next step, so a
turn makes one step, however many rooms there are. No step waits.

A :class:`RoomLoan` is the room of a prompt on the prefill side, a :class:`RoomLoad` on the decode
side::

    Loan   EXPECTED ─ a target asks ─> ASKED ─ first chunk ─> WRITING ─ last chunk ─> COMPUTED
              └───── aborted: the lease is revoked at once ─────> FAILED ◀──┐            │
                                     every target rank has read ─> DONE ◀── LENT ◀───────┘
                                                           every rank has computed it

    Load   WAITING ─ the lease is ours ─> READING ─ every rank has confirmed ─────> DONE
              └─ refused, denied, aborted ─> FAILED ◀─ failed, or ended ─ ENDING ◀─┘
                                                          READING ─ aborted ─┘

A load in ENDING is given up, and some read may still change its blocks: the engine frees blocks as
soon as a room has failed, so a load fails only when every rank has reported.

The rooms of this module are those of an engine's first rank, which decides. The other ranks follow,
see :mod:`kvferry.integrations.following`.

**A chunk is written on every TP rank of a stage as soon as it is written on the stage's first
rank.** Every rank writes the keys and values of its heads before the layer's last sum over the TP
ranks, on one thread or one stream of its device. The first rank's tokens, and the event that stands
for its writes on a device, come after its part of this sum, and no part of a sum can end before
every rank has begun it. Pipeline stages compute a chunk one after the other, so the first rank of
each stage tells of it, and a target reads it once all have told.

**No rank frees blocks under an open lease.** Every rank frees blocks by itself: after a poll, of
which the first rank's answer is a part, or after an abort. In the second case another rank first
has :meth:`Rooms.let_go` called on the first rank, where a thread of its own ends the lease.

**All ranks keep a prompt in the same blocks**, for a lease has one block table per group. Every
rank takes and frees blocks in the same order, as all decide from the same requests and the same
answers. A prompt of which this is not true is not lent. A load needs no such thing: every rank
reads into its own blocks.
"""

import enum
import logging
import secrets
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.base import (
    ConnectorContext,
    KVConnectorOutput,
    ScheduledPrompt,
    SchedulerOutputView,
    StepView,
)
from kvferry.connectors.pull.pursuit import Load as Borrowed
from kvferry.connectors.pull.pursuit import PursuitState
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.connectors.pull.worker import PullWorker
from kvferry.control.leases import EndedLease, LeaseOutcome
from kvferry.errors import KVFerryError
from kvferry.integrations.load_metrics import PrometheusLoads
from kvferry.integrations.ranks import OtherRanks, RankReport, RankReports, Whole, blocks_digest
from kvferry.lifetimes import Closing
from kvferry.topology import ParallelShape

logger = logging.getLogger(__name__)

NOTHING = StepView(
    requests=[], finished_req_ids=set(), preempted_req_ids=set(), num_scheduled_tokens={}
)
"""The view of a step that computes no prompt to be lent."""


class RoomState(enum.Enum):
    """State of a room; see the picture at the top of this module."""

    EXPECTED = enum.auto()
    ASKED = enum.auto()
    WRITING = enum.auto()
    COMPUTED = enum.auto()
    LENT = enum.auto()
    WAITING = enum.auto()
    READING = enum.auto()
    ENDING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


OVER = (RoomState.DONE, RoomState.FAILED)
"""States in which a room has ended."""


@dataclass(eq=False, kw_only=True)
class RoomRequest:
    """A request with a room, as a :class:`kvferry.connectors.base.RequestView`."""

    request_id: str
    """The serving engine's id of the request and the room, as a client may choose an id twice."""
    prompt_token_ids: Sequence[int]
    """The prompt; images stand in it as hashes of them."""
    kv_transfer_params: dict[str, Any] | None
    weights: str
    """Digest of the engine's weights at the arrival of the request."""
    adapter: str = ""
    """Name and digest of the request's LoRA adapter; empty if the request has none."""
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    traceparent: str = ""
    received: float = 0.0
    tables: tuple[list[int], ...] = field(default_factory=tuple)
    """Block tables of the request, one per KV cache group."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens with the first token of the answer, which the source samples."""
        return len(self.prompt_token_ids) + 1

    @property
    def finished_cleanly(self) -> bool:
        """Whether the prompt was computed, and not aborted."""
        return self.finish_reason == "length"

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """The weights and the LoRA adapter. Requests with inputs that two servers cannot compare
        are refused where they arrive.
        """
        adapter = {"lora": self.adapter} if self.adapter else {}
        return {"weights": self.weights, **adapter}

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The whole block tables, as a :class:`kvferry.connectors.base.BlocksView`."""
        return self.tables


@dataclass(eq=False, kw_only=True)
class PolledRoom:
    """A request between two servers."""

    request: RoomRequest
    state: RoomState
    error: str = ""
    """The first error of the room."""

    @property
    def is_over(self) -> bool:
        """Whether the room has ended."""
        return self.state in OVER

    def fail(self, error: object) -> None:
        """Ends the room with an error, unless it has ended."""
        if not self.is_over:
            self.error = self.error or _text(error)
            self.state = RoomState.FAILED


@dataclass(eq=False, kw_only=True)
class RoomLoan(PolledRoom):
    """A prompt that this engine computes for another engine."""

    state: RoomState = RoomState.EXPECTED
    num_tokens: int = 0
    """Number of tokens written so far."""
    note: bytes = b""
    """What this engine writes beside the prompt; empty until the prompt is computed."""
    blocks: dict[int, bytes] = field(default_factory=dict)
    """Other rank that has computed the prompt → digest of its blocks."""
    is_let_go: bool = False
    """Whether another rank has freed blocks of the prompt, so nothing is lent any more."""


@dataclass(eq=False, kw_only=True)
class RoomLoad(PolledRoom):
    """A prompt that this engine loads from another engine."""

    state: RoomState = RoomState.WAITING
    first_token: int = 0
    """First token that this engine lacks."""
    tables: tuple[list[int], ...] = ()
    """This engine's block tables of the prompt, one per KV cache group."""
    note: bytes = b""
    """What the engine of the source wrote beside the prompt; empty until the load is done."""


class PolledRooms(Closing):
    """Rooms whose steps come from polls. Only the engine's scheduler thread uses them."""

    def __init__(self) -> None:
        """Starts without a room."""
        self._polled: set[str] = set()
        """Requests polled since the last step."""

    def poll(self, room: PolledRoom) -> None:
        """Makes a step if the room was polled since the last step."""
        name = room.request.request_id
        if name in self._polled:
            self.step()
        self._polled.add(name)

    @abstractmethod
    def step(self) -> None:
        """Begins what can begin, and takes in what has ended."""


class Rooms(PolledRooms):
    """All rooms of one engine, on its first rank."""

    def __init__(self, scheduler: PullScheduler, worker: PullWorker, shape: ParallelShape) -> None:
        """Takes ownership of both halves; use :meth:`open`."""
        super().__init__()
        self.scheduler = scheduler
        self.metrics: PrometheusLoads | None = None
        self._worker = worker
        self._loans: dict[str, RoomLoan] = {}
        self._loads: dict[str, RoomLoad] = {}
        self._leaving: set[str] = set()
        """Loads that the engine polls no more, and that have not ended."""
        self._has_news = False
        """Whether the worker may have something to report."""
        self._lending = threading.RLock()
        """Lock that is held while a lease is granted or let go."""
        self._num_others = shape.world_size - 1
        self._reports = RankReports(shape)
        self.others: OtherRanks | None = None
        """The other ranks; ``None`` if there are none."""
        scheduler.lender.on_ended = self._lease_ended
        own = worker.handshake_metadata()
        if self._num_others == 0:
            scheduler.set_worker_handshakes([own])
        else:
            self.others = OtherRanks(
                self._num_others,
                on_met=lambda found: scheduler.set_worker_handshakes([own, *found]),
                on_let_go=self.let_go,
            )

    @classmethod
    def open(cls, context: ConnectorContext, worker: PullWorker) -> "Rooms":
        """Opens the scheduler half; peers may connect as soon as all ranks have said hello.

        Args:
            context: the engine.
            worker: the worker half of the first rank; its caches are registered. It is closed with
                the rooms, also if they cannot be opened.

        Raises:
            ConfigError, HostError: see :meth:`PullScheduler.open`.
        """
        with ExitStack() as opened:
            opened.callback(worker.close)
            scheduler = PullScheduler.open(context)
            opened.callback(scheduler.close)
            rooms = cls(scheduler, worker, context.groups[0].parallel)
            opened.pop_all()
        return rooms

    # ---- every turn of the engine's loop ------------------------------------------------------

    def step(self, view: SchedulerOutputView = NOTHING) -> None:
        """Begins what can begin, and takes in what has ended."""
        self._polled.clear()
        for load in [each for each in self._loads.values() if each.state is RoomState.WAITING]:
            self._begin(load)
        if self.scheduler.has_news() or view is not NOTHING:
            metadata = self.scheduler.build_connector_meta(view)
            if self.others is not None:
                self.others.tell(metadata)
            self._worker.start_load_kv(metadata)
            self._has_news = True
        if self._has_news or self._loads:
            self._has_news = False
            self._take(0, self._worker.get_transfer_results(set()))
        if self.others is not None:
            self._listen(self.others)

    def _listen(self, others: OtherRanks) -> None:
        """Takes in what the other ranks have told."""
        for rank, message in others.received():
            if isinstance(message, RankReport):
                message.output.written = self._by_lease(message.output.written)
                self._take(rank, message.output)
            elif (loan := self._loans.get(message.request_id)) is None:
                continue
            elif isinstance(message, Whole):
                loan.blocks[rank] = message.blocks
                self._lend_computed(loan)
            else:
                self.give_up_loan(loan, f"rank {rank} has given the prompt up")

    def _by_lease(self, written: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
        """The written tokens of another rank, by lease instead of by request."""
        leases = self.scheduler.lender.leases.snapshot() if written else ()
        return {
            each.lease_id: written[each.request_id] for each in leases if each.request_id in written
        }

    def _take(self, rank: int, output: KVConnectorOutput) -> None:
        """Takes in a report of a rank's worker half."""
        output.finished_sending.clear()  # polls end a loan, not reports
        joined = self._reports.join(rank, output)
        borrowed = self.scheduler.borrower.loads
        # A failed load of the scheduler half is gone after the update, with the cause.
        ended = [
            (self._loads[name], borrowed.get(name))
            for name in joined.finished_recving
            if name in self._loads
        ]
        self.scheduler.update_connector_output(joined)
        if self.metrics is not None:
            self.metrics.loaded(joined.transfer_records)
        for load, lease in ended:
            name = load.request.request_id
            self._ended(load, lease, failed=name in joined.failed_recving)
            if name in self._leaving:
                self._leaving.discard(name)
                del self._loads[name]

    # ---- prompts that are lent ----------------------------------------------------------------

    def lend(self, request: RoomRequest) -> RoomLoan:
        """A prompt that is to be computed and lent; from now on a target may ask for it.

        Raises:
            KVFerryError: the transfer of the request cannot be used.
        """
        loan = RoomLoan(request=request)
        if self.others is not None:
            self.others.meet()
        self.scheduler.on_new_request(request)
        self._loans[request.request_id] = loan
        return loan

    def look(self, loan: RoomLoan) -> None:
        """Notes whether a target has asked for a prompt."""
        tickets = self.scheduler.lender.tickets
        if loan.state is RoomState.EXPECTED and tickets.is_asked(loan.request.request_id):
            loan.state = RoomState.ASKED

    def wrote(self, loan: RoomLoan, num_tokens: int) -> None:
        """Notes that the first ``num_tokens`` tokens of a prompt are written, but not all. Their
        blocks are in the block tables of the request.
        """
        request, before = loan.request, loan.num_tokens
        loan.state, loan.num_tokens = RoomState.WRITING, num_tokens
        request.num_computed_tokens = num_tokens
        part = ScheduledPrompt(
            request_id=request.request_id,
            first_position=before,
            block_ids=request.tables,
            num_new_blocks=tuple(len(table) for table in request.tables),
            resumed=False,
        )
        view = StepView(
            requests=[part],
            finished_req_ids=set(),
            preempted_req_ids=set(),
            num_scheduled_tokens={request.request_id: num_tokens - before},
        )
        with self._lending:
            if loan.is_let_go:
                return
            self.step(view)

    def lend_whole(self, loan: RoomLoan, note: bytes) -> None:
        """Lends a prompt whose last token is written, once it is on all ranks; the target gets the
        note with it.
        """
        loan.num_tokens = loan.request.num_computed_tokens = len(loan.request.prompt_token_ids)
        loan.state, loan.note = RoomState.COMPUTED, note
        self._lend_computed(loan)
        self.step()

    def _lend_computed(self, loan: RoomLoan) -> None:
        """Lends a prompt that every rank has computed, into the same blocks."""
        if loan.state is not RoomState.COMPUTED or len(loan.blocks) < self._num_others:
            return
        request, ours = loan.request, blocks_digest(loan.request.tables)
        unlike = [rank for rank, theirs in loan.blocks.items() if theirs != ours]
        if unlike:
            self.give_up_loan(loan, f"ranks {unlike} keep the prompt in other blocks than rank 0")
            return
        with self._lending:
            if loan.is_let_go:
                return
            request.finish_reason, loan.state = "length", RoomState.LENT
            keep, _ = self.scheduler.request_finished(request, request.tables, loan.note)
        if not keep:
            loan.fail("nothing is lent: the decode server needs nothing any more, or see the log")

    def let_go(self, request_id: str) -> None:
        """Ends the lease of a prompt whose blocks a rank is about to free: no read counts any more,
        and no lease is granted any more. For any thread.
        """
        with self._lending:
            loan = self._loans.get(request_id)
            if loan is None or loan.is_over:
                return  # its lease has ended
            loan.is_let_go = True
            leases = self.scheduler.lender.leases.snapshot()
            ids = [each.lease_id for each in leases if each.request_id == request_id]
            self.scheduler.server.revoke(ids)

    def give_up_loan(self, loan: RoomLoan, reason: str) -> None:
        """Ends a loan whose request was aborted.

        The engine frees the blocks of a prompt that is not whole without another poll. The lease is
        revoked before this method returns, so no read counts that ends later. A whole prompt stays
        lent until its readers are done; if no target has taken it, it is lent no more.
        """
        if loan.is_over:
            return
        if loan.state is RoomState.LENT:
            self.scheduler.take_back(loan.request.kv_transfer_params or {})
            loan.error = loan.error or reason
            return
        loan.request.finish_reason = "abort"
        self.scheduler.request_finished(loan.request, loan.request.tables)
        loan.fail(reason)

    def fail_loan(self, loan: RoomLoan, reason: str) -> None:
        """Ends a loan whose blocks the engine is about to free. No read counts that ends later."""
        if not loan.is_over:
            self.let_go(loan.request.request_id)
            self.give_up_loan(loan, reason)
            self.step()  # tells the target; an idle server makes no step

    def _lease_ended(self, lease: EndedLease) -> None:
        """Ends the loan of a lease; called in a step."""
        loan = self._loans.get(lease.request_id)
        if loan is None or loan.is_over:
            return
        if loan.error:
            loan.fail(loan.error)  # the request was aborted meanwhile
        elif lease.outcome in (LeaseOutcome.DONE, LeaseOutcome.RELEASED):
            loan.state = RoomState.DONE  # a target that needs nothing any more tells its client why
        else:
            who = "the decode server" if lease.target is None else f"engine {lease.target[0]!r}"
            loan.fail(
                f"lease {lease.lease_id} is {lease.outcome}, and {who} has not read the prompt"
            )

    # ---- prompts that are loaded --------------------------------------------------------------

    def load(self, request: RoomRequest, first_token: int) -> RoomLoad:
        """Begins to load a prompt into the blocks of the request; tokens before ``first_token`` are
        there.

        Raises:
            KVFerryError: the transfer of the request cannot be used.
        """
        if self.others is not None:
            self.others.begin_load()
        load = RoomLoad(request=request, tables=request.tables, first_token=first_token)
        self._reports.begin(request.request_id)
        try:
            self.scheduler.on_new_request(request)
        except KVFerryError as error:
            self._fail(load, error)
            raise
        self._loads[request.request_id] = load
        self.step()
        return load

    def _begin(self, load: RoomLoad) -> None:
        """Has the worker read a load whose lease is ours, or as much as is written of it."""
        request = load.request
        lease = self.scheduler.borrower.loads.get(request.request_id)
        if lease is None:
            self._refuse(load, "the source lends its prompt to nobody; see its log")
            return
        try:
            found, _ = self.scheduler.get_num_new_matched_tokens(request, load.first_token)
        except KVFerryError as error:
            self._refuse(load, error)
            return
        standing = lease.pursuit.standing
        if standing.state is PursuitState.DENIED:
            self._refuse(load, f"the prefill server lends nothing: {standing.reason}")
        elif found:
            self.scheduler.update_state_after_alloc(request, request, found)
            load.state = RoomState.READING
        elif found == 0 and standing.ticket is not None and standing.is_whole:
            # Every token of the prompt is there: only the note is needed.
            self._done(load, standing.ticket.note)
            self.scheduler.update_state_after_alloc(request, request, 0)
            self.scheduler.request_finished(request, load.tables)

    def _refuse(self, load: RoomLoad, error: object) -> None:
        """Ends a load before any rank reads."""
        if self.metrics is not None:
            self.metrics.refused()
        load.request.finish_reason = "error"
        self.scheduler.request_finished(load.request, load.tables)
        self._fail(load, error)

    def give_up_load(self, load: RoomLoad, reason: str) -> None:
        """Gives up a load; it fails once no read can change its blocks any more."""
        if load.is_over or load.state is RoomState.ENDING:
            return
        load.error, load.request.finish_reason = reason, "abort"
        keep, _ = self.scheduler.request_finished(load.request, load.tables)
        if keep:
            load.state = RoomState.ENDING
        else:
            self._fail(load, reason)
        self.step()

    def _ended(self, load: RoomLoad, lease: Borrowed | None, *, failed: bool) -> None:
        """Ends a load that every rank has reported."""
        request = load.request
        if load.state is RoomState.READING and not failed and lease is not None:
            self._done(load, lease.ticket.note)
        else:
            request.finish_reason = request.finish_reason or "error"
            self._fail(load, lease.rank_error if lease is not None else "no rank told why")
        self.scheduler.request_finished(request, load.tables)

    def _done(self, load: RoomLoad, note: bytes) -> None:
        """Ends a load that counts on every rank."""
        load.note, load.state = note, RoomState.DONE
        load.request.finish_reason = "stop"
        if self.others is not None:
            self.others.confirm(load.request.request_id, note)

    def _fail(self, load: RoomLoad, error: object) -> None:
        """Ends a load that counts for nothing, and of which no rank reads on."""
        load.fail(error)
        if self.others is not None:
            self.others.fail(load.request.request_id)

    # ---- the end ------------------------------------------------------------------------------

    def forget(self, room: PolledRoom) -> None:
        """Forgets a room that the engine polls no more. A room that has not ended is given up."""
        name = room.request.request_id
        self._polled.discard(name)
        if isinstance(room, RoomLoan):
            self.fail_loan(room, "the request has ended")
            self._loans.pop(name, None)
        elif isinstance(room, RoomLoad):
            self.give_up_load(room, "the request has ended")
            if room.is_over:
                self._loads.pop(name, None)
            else:
                self._leaving.add(name)

    def weights_changed(self) -> None:
        """Stops all lending and loading: nobody knows which KV was computed with which weights."""
        self.scheduler.set_weights(f"changed in memory {secrets.token_hex(8)}", None)

    def close(self) -> None:
        """Ends threads, connections and sockets. Idempotent."""
        if self.others is not None:
            self.others.close()
        self.scheduler.close()
        self._worker.close()


def _text(error: object) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
