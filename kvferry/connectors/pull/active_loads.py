"""The loads under way on the ranks: the messages to the ranks, and the reports of the ranks."""

import logging
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from kvferry.connectors.base import ConnectorContext
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.metadata import LoadSpec, PullMetadata, packed
from kvferry.connectors.pull.pursuit import (
    TIMES_ANEW,
    Load,
    LoadState,
    Pursuit,
    PursuitState,
    Standing,
)
from kvferry.connectors.pull.pursuits import Pursuits
from kvferry.control.tickets import Ticket
from kvferry.errors import CancelledError, KVFerryError
from kvferry.observe.records import RequestRecords, TransferRecord

logger = logging.getLogger(__name__)


class ActiveLoads:
    """The loads under way on the ranks of one engine. Only the scheduler's thread uses the
    object.
    """

    def __init__(
        self,
        context: ConnectorContext,
        extra: PullConfig,
        pursuits: Pursuits,
        records: RequestRecords,
        *,
        clock: Callable[[], float],
        news: Callable[[], PullMetadata],
        look: Callable[[], object],
    ) -> None:
        """Args:
        context: context from which the connector was built.
        extra: the connector's keys.
        pursuits: the pursuits of the leases of loads; stays the caller's.
        records: the records of requests.
        clock: monotonic clock of ``pursuits``, in seconds.
        news: returns the message to the ranks in this step, to be filled.
        look: takes the received answers of sources, at most once per step.
        """
        self._context = context
        self._extra = extra
        self._pursuits = pursuits
        self._records = records
        self._clock = clock
        self._news = news
        self._look = look
        self._loads: dict[str, Load] = {}
        """Request id → its load under way."""
        self._reported: dict[str, tuple[int, int]] = {}
        """Progress of the loads in the last report of the ranks."""

    def __bool__(self) -> bool:
        """Whether ranks read for any request."""
        return bool(self._loads)

    def __contains__(self, request_id: str) -> bool:
        """Whether the ranks read for a request."""
        return request_id in self._loads

    # ---- before the ranks read ----------------------------------------------------------------

    def is_due_early(self, pursuit: Pursuit, standing: Standing) -> bool:
        """Whether a load begins now although its source still computes the prompt."""
        mode, groups = self._extra.early_load, pursuit.groups
        if mode == "off" or standing.state is not PursuitState.GROWING or groups is None:
            return False
        if not any(map(groups.moves_early, groups.pairs)):
            return False
        return self._pursuits.is_due_early(pursuit, waits=mode == "late")

    def check(self, pursuit: Pursuit, ticket: Ticket, first_token: int, num_tokens: int) -> None:
        """Checks that the source has the tokens for a load of ``[first_token, num_tokens)``.

        Raises:
            TicketError, BlockTableError, NullBlockError, IncompatibleError: see
                :meth:`SourceGroups.check_kept` and :meth:`SourceGroups.check_filled`.
        """
        assert pursuit.groups is not None  # set before a load is ready
        pursuit.groups.check_kept(ticket, first_token, num_tokens)
        if not self._context.asks_what_was_filled:
            pursuit.groups.check_filled(ticket, first_token, num_tokens)

    # ---- messages to the ranks ----------------------------------------------------------------

    def start(
        self, load: Load, first_token: int, num_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Has the ranks read the tokens ``[first_token, num_tokens)`` of a ready load.

        Args:
            load: a load whose lease was obtained.
            first_token: the first token to read.
            num_tokens: end of the tokens to read.
            block_ids: the request's block tables, one per KV cache group.
        """
        lent, groups = load.ticket, load.pursuit.groups
        assert groups is not None  # tokens were offered, so the lease was obtained
        if load.is_early:
            starts = groups.early_starts(first_token, num_tokens)
        else:
            starts = groups.starts(lent, first_token, num_tokens)
            load.filled = groups.filled(starts, first_token, num_tokens)
        self._pursuits.start(load.pursuit)
        load.state = LoadState.READING
        self._loads[load.request_id] = load
        ticket, source_tables = _without_tables(lent)
        load.spec = LoadSpec(
            request_id=load.request_id,
            ticket=ticket,
            source_tables=source_tables,
            target_tables=packed(block_ids),
            first_token=first_token,
            num_tokens=num_tokens,
            starts=starts,
            readable=first_token if load.is_early else None,
        )
        self._news().loads.append(load.spec)

    def read_on(self) -> None:
        """Tells the ranks how many more tokens of early loads they can read."""
        for load in [each for each in self._loads.values() if each.is_growing]:
            spec, standing, groups = load.spec, load.pursuit.standing, load.pursuit.groups
            assert spec is not None  # the ranks read
            assert groups is not None
            assert standing.ticket is not None
            if standing.error is not None:
                self._begin_anew(load, standing.error)
            elif standing.written is None:
                self._read_rest(load, spec, standing.ticket)
            else:
                unit = groups.part_tokens
                end = min(standing.written, spec.num_tokens) // unit * unit
                if end > (spec.readable or 0):
                    part = replace(spec, readable=end, replaces="")
                    self._tell_part(load, part, standing.ticket)

    def _read_rest(self, load: Load, spec: LoadSpec, ticket: Ticket) -> None:
        """Has the ranks read the rest of a load whose source has computed the prompt: only now the
        moving tokens are known for all groups.
        """
        groups, span = load.pursuit.groups, (spec.first_token, spec.num_tokens)
        assert groups is not None
        try:
            self.check(load.pursuit, ticket, *span)
        except KVFerryError as error:
            self.cancel(load, f"{type(error).__name__}: {error}")
            return
        starts = groups.starts(ticket, *span)
        load.filled = groups.filled(starts, *span)
        rest = replace(spec, starts=starts, readable=None, replaces="")
        self._tell_part(load, rest, ticket)

    def _tell_part(self, load: Load, spec: LoadSpec, ticket: Ticket) -> None:
        """Tells the ranks which tokens they read from now on, under the lease of a ticket."""
        told, source_tables = _without_tables(ticket)
        load.spec = replace(spec, ticket=told, source_tables=source_tables)
        self._news().parts.append(load.spec)

    def _begin_anew(self, load: Load, error: KVFerryError) -> None:
        """Restarts or cancels a load whose source has revoked the present lease, or cannot be
        reached.

        If the source goes on with the prompt, after a preemption for example, the source will lend
        the prompt again. The source is asked for the new lease, and the ranks read under this lease
        from the first token on, into the same blocks. The cells read before count for nothing.
        """
        if load.state is LoadState.READING:
            has_successor = load.pursuit.successor is not None
            if not has_successor or load.times_anew >= TIMES_ANEW:
                if has_successor:  # otherwise the failure was noted already
                    self._pursuits.note_failure(load.pursuit, error)
                self.cancel(load, f"{type(error).__name__}: {error}")
                return
            load.state, load.pursuit.progressed = LoadState.RESTARTING, self._clock()
        self._look()
        again = load.next_pursuit
        assert again is not None  # a restarting load has a successor
        standing = again.standing
        why = self._why_not_again(load, standing)
        if why:
            self.cancel(load, f"{type(error).__name__}: {error}; {why}")
        elif standing.is_whole or self.is_due_early(again, standing):
            self._go_over(load, again)

    def _why_not_again(self, load: Load, standing: Standing) -> str:
        """Reason why the new lease cannot take the place of the load's lost lease; empty if it
        may.
        """
        if standing.error is not None:
            return f"the one that was asked for: {standing.error}"
        if standing.state is PursuitState.DENIED:
            return f"there will be no other: {standing.reason}"
        if self._clock() - load.pursuit.progressed >= self._extra.progress_timeout_s:
            return (
                f"no other was granted within {self._extra.progress_timeout_s:g} s "
                "(progress_timeout_s)"
            )
        ours, new = load.ticket, standing.ticket
        if new is None:
            return ""
        is_same = (ours.num_tokens, ours.prompt_digest, ours.content) == (
            new.num_tokens,
            new.prompt_digest,
            new.content,
        )
        return "" if is_same else "the one that was asked for is of another prompt"

    def _go_over(self, load: Load, again: Pursuit) -> None:
        """Moves a load to another lease: the ranks give up the cells read so far, and begin
        again.
        """
        spec, before = load.spec, load.pursuit
        assert spec is not None  # the ranks read
        assert again.groups is not None  # its lease was obtained
        load.pursuit, load.state = again, LoadState.READING
        load.times_anew += 1
        load.progress, load.moved_s = (0, 0), 0.0
        load.accept(again.ticket)
        self._pursuits.drop(before)
        self._pursuits.start(again)
        starts = again.groups.early_starts(spec.first_token, spec.num_tokens)
        anew = replace(spec, starts=starts, readable=spec.first_token, replaces=before.lease_id)
        self._tell_part(load, anew, again.ticket)

    def cancel(self, load: Load, error: str) -> None:
        """Has the ranks give a load up."""
        self._pursuits.forgo(load.pursuit)
        load.state = LoadState.CANCELLING
        load.rank_error = load.rank_error or error
        self._news().cancels[load.lease_id] = load.rank_error

    def abort(self, load: Load) -> None:
        """Has the ranks give up a load whose request has ended."""
        if load.state is not LoadState.ABORTING:
            self._pursuits.forgo(load.pursuit)
            load.state = LoadState.ABORTING
            self._news().cancels[load.lease_id] = ""

    # ---- reports of the ranks -----------------------------------------------------------------

    def note_progress(self, reported: dict[str, tuple[int, int]]) -> None:
        """Notes the progress of each load, and when the progress last changed."""
        if reported == self._reported:
            return
        self._reported = reported
        for request_id, progress in reported.items():
            load = self._loads.get(request_id)
            if load is not None and load.progress != progress:
                load.progress, load.pursuit.progressed = progress, self._clock()

    def recorded(self, record: TransferRecord) -> None:
        """Takes in one rank's record of a load."""
        load = self._loads.get(record.request_id)
        if load is None:
            return
        load.moved_s = max(load.moved_s, record.moving)
        if record.error and not load.rank_error:
            load.rank_error = f"rank {record.rank}: {record.error}"
        if record.error and load.is_growing:
            self.cancel(load, load.rank_error)  # the other ranks need not wait for more

    def ended(self, finished: Iterable[str], failed: Iterable[str]) -> list[Load]:
        """Every rank has reported the loads of ``finished``; the loads of ``failed`` have failed.

        Returns:
            The loads ended without success: they failed, or their request was aborted.
        """
        ended = [load for each in finished if (load := self._loads.get(each)) is not None]
        for load in ended:
            has_failed = load.request_id in failed
            if has_failed and not _was_given_up(load):
                self._log_failure(load)
            self._loaded(load, ok=not has_failed)
        return [load for load in ended if load.state is LoadState.FAILED]

    def _loaded(self, load: Load, *, ok: bool) -> None:
        """Ends a load after the reports of all ranks."""
        is_aborted = load.state is LoadState.ABORTING
        self._records.loaded(load.record, None if ok else load.rank_error or "no rank told why")
        if is_aborted:
            self._records.end(load.record, "aborted")
        elif ok and load.filled is not None and load.moved_s:
            num_tokens = load.ticket.num_tokens - load.filled.first_token
            self._pursuits.moved(load.pursuit.source, num_tokens, load.moved_s)
        self._pursuits.forgo(load.pursuit)
        del self._loads[load.request_id]
        if load.times_anew and not ok:
            self._pursuits.release(load.pursuit)  # a rank may have failed under the previous lease
        self._pursuits.drop(load.pursuit)
        load.state = LoadState.LOADED if ok and not is_aborted else LoadState.FAILED

    def _log_failure(self, load: Load) -> None:
        """Logs one line per failed load: an engine may give its client no cause, as vLLM does
        not.
        """
        policy = self._context.config.kv_load_failure_policy
        logger.error(
            "request %s: its load from engine %s failed, and it will %s: %s",
            load.request_id,
            load.pursuit.source.name,
            "be recomputed" if policy == "recompute" else "fail",
            load.rank_error or "no rank told why",
        )


def _was_given_up(load: Load) -> bool:
    """Whether a load failed because its request had been aborted.

    vLLM ends a request whose load has failed before vLLM hands us the report with the reason.
    """
    return load.state is LoadState.ABORTING and CancelledError.__name__ in (
        load.rank_error or CancelledError.__name__
    )


def _without_tables(ticket: Ticket) -> tuple[Ticket, tuple[bytes, ...]]:
    """The ticket for the ranks, without block tables and note, and its packed block tables."""
    return replace(ticket, block_ids=(), note=b""), packed(ticket.block_ids)
