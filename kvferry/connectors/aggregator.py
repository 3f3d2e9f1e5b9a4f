"""Joins the reports of an engine's ranks for one step: one report per rank, by identity.

A request is finished when each expected rank has reported the request. A rank is its index in
``outputs``, so a rank that reports twice still counts once, and a dead rank keeps its place as
``None``.
"""

import copy
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from kvferry.connectors.base import KVConnectorOutput

logger = logging.getLogger(__name__)

REMEMBERED = 65_536
"""Number of finished ids remembered per direction; beyond this number the oldest ids are
forgotten."""


class HasConnectorOutput(Protocol):
    """Result of a rank for a step: any object with a connector's report."""

    kv_connector_output: KVConnectorOutput | None


@runtime_checkable
class CountsFinished(Protocol):
    """A connector in which only some ranks report each request. Optional for plugins."""

    def get_finished_count(self) -> int | None:
        """Number of ranks that report each request; ``None`` for all ranks."""


OutputT = TypeVar("OutputT", bound=HasConnectorOutput)


@dataclass(slots=True)
class _Ledger:
    """The reports of all ranks in one direction."""

    remembered: int
    pending: dict[str, tuple[int, set[int]]] = field(default_factory=dict)
    """Request id → number of expected reports, and the ranks with a report so far."""
    finished: dict[str, None] = field(default_factory=dict)
    """Finished ids, oldest first."""

    def report(self, rank: int, request_ids: Iterable[str], expected: int) -> set[str]:
        """Notes the reports of a rank; returns the requests completed by these reports."""
        completed = set()
        for request_id in request_ids:
            if request_id in self.finished:
                continue
            count, ranks = self.pending.setdefault(request_id, (expected, set()))
            ranks.add(rank)
            if len(ranks) >= count:
                del self.pending[request_id]
                self._remember(request_id)
                completed.add(request_id)
        return completed

    def forget(self, request_id: str) -> None:
        self.pending.pop(request_id, None)
        self.finished.pop(request_id, None)

    def _remember(self, request_id: str) -> None:
        self.finished[request_id] = None
        if len(self.finished) > self.remembered:
            del self.finished[next(iter(self.finished))]


class KVOutputAggregator:
    """Joins the ranks' :class:`~kvferry.connectors.base.KVConnectorOutput` of each step.

    State lives across steps: the ranks with a report for each request, and the finished requests.
    Duplicates and late reports of a finished request change nothing, until :meth:`forget` frees the
    id or :data:`REMEMBERED` more requests have finished. Not thread-safe.
    """

    def __init__(self, world_size: int, expected: int | None = None) -> None:
        """Builds an aggregator.

        Args:
            world_size: number of ranks of the engine.
            expected: number of reports that complete a request; all ranks by default.

        Raises:
            ValueError: ``world_size`` is less than 1, or ``expected`` is not in 1 to
                ``world_size``: such a request would never finish.
        """
        if world_size < 1:
            raise ValueError(f"world_size: {world_size} is less than 1")
        if expected is not None and not 1 <= expected <= world_size:
            raise ValueError(f"expected: {expected} is not in 1 to {world_size}, the world size")
        self._world_size = world_size
        self._expected = world_size if expected is None else expected
        self._sending = _Ledger(REMEMBERED)
        self._recving = _Ledger(REMEMBERED)
        self._failed: set[str] = set()
        self._held: KVConnectorOutput | None = None

    @classmethod
    def from_connector(cls, connector: object | None, world_size: int) -> "KVOutputAggregator":
        """Builds an aggregator for an engine of ``world_size`` ranks.

        Args:
            connector: a connector, its plugin class, or ``None``. If it is a
                :class:`CountsFinished` (for example a class with a ``get_finished_count`` class
                method), its count is the number of ranks that report each request; otherwise all
                ranks report.
            world_size: number of ranks of the engine.

        Raises:
            ValueError: see the constructor.
        """
        expected = connector.get_finished_count() if isinstance(connector, CountsFinished) else None
        return cls(world_size, expected)

    def aggregate(self, outputs: Sequence[OutputT | None], output_rank: int = 0) -> OutputT | None:
        """Joins the outputs of all ranks for one step.

        Args:
            outputs: the result of each rank, by rank; ``None`` for a dead rank.
            output_rank: the rank whose output is returned.

        Returns:
            A shallow copy of ``outputs[output_rank]`` with the joined report; the inputs are not
            changed. ``None`` if this rank is dead: the joined report is then part of the next
            returned output.

        Raises:
            ValueError: more outputs than the engine has ranks.
        """
        joined = self.join(
            [None if output is None else output.kv_connector_output for output in outputs]
        )
        if self._held is not None:
            joined = _merged(self._held, joined)
        chosen = outputs[output_rank]
        if chosen is None:
            self._held = joined
            return None
        self._held = None
        result = copy.copy(chosen)
        result.kv_connector_output = joined
        return result

    def join(
        self, reports: Sequence[KVConnectorOutput | None], ends: Collection[str] = ()
    ) -> KVConnectorOutput:
        """Joins the reports of one step, by rank; ``None`` stands for a rank without a report.

        - ``finished_sending`` and ``finished_recving`` hold the requests completed by this step.
        - ``failed_recving`` holds the requests of ``finished_recving`` that failed on any rank, and
          those of ``ends``.
        - ``invalid_block_ids`` are united at once: never later than their request is finished.
        - Stats, gauges and progress are added; events and records are concatenated by rank, and the
          ``written`` maps of the ranks are united.
        - ``expected_finished_count`` is set if the number changed. Reports are read by rank; a
          change holds for requests first reported by the same report or a later report.

        Args:
            reports: the report of each rank, by rank.
            ends: requests whose load ends with this step, whatever the ranks have reported.

        Raises:
            ValueError: more reports than the engine has ranks.
        """
        if len(reports) > self._world_size:
            raise ValueError(f"reports of {len(reports)} ranks, but there are {self._world_size}")
        joined = KVConnectorOutput()
        before = self._expected
        for rank, report in enumerate(reports):
            if report is None:
                continue
            self._expect(report.expected_finished_count)
            joined.finished_sending |= self._sending.report(
                rank, report.finished_sending or (), self._expected
            )
            joined.finished_recving |= self._recving.report(
                rank, report.finished_recving or (), self._expected
            )
            self._failed.update(report.failed_recving or ())
            _add(joined, report)
        joined.failed_recving = self._failed & joined.finished_recving.union(ends)
        # A failure reported after the end of the request is a late report.
        self._failed = {
            failed
            for failed in self._failed - joined.failed_recving
            if failed not in self._recving.finished
        }
        if self._expected != before:
            joined.expected_finished_count = self._expected
        return joined

    def forget(self, request_id: str) -> None:
        """Frees an id: the next report of this id belongs to a new request or load.

        Call the method before a new request takes a used id, and before a request loads a second
        time (after a preemption, for example).
        """
        self._sending.forget(request_id)
        self._recving.forget(request_id)
        self._failed.discard(request_id)

    def waiting_for(self, request_id: str) -> frozenset[int]:
        """Ranks without a report of a request that other ranks have reported."""
        reported: set[int] = set()
        for ledger in (self._sending, self._recving):
            reported |= ledger.pending.get(request_id, (0, set()))[1]
        return frozenset(range(self._world_size)) - reported if reported else frozenset()

    def _expect(self, count: int) -> None:
        if count > self._world_size:
            logger.warning(
                "a rank expects %d ranks to report each request, but there are %d; expecting all",
                count,
                self._world_size,
            )
        if count > 0:
            self._expected = min(count, self._world_size)


def _add(joined: KVConnectorOutput, report: KVConnectorOutput) -> None:
    """Adds the fields that need no ledger; ``report`` is not changed."""
    joined.invalid_block_ids |= report.invalid_block_ids or set()
    for name, value in (report.kv_connector_stats or {}).items():
        joined.kv_connector_stats[name] = joined.kv_connector_stats.get(name, 0) + value
    for name, value in (report.kv_connector_gauges or {}).items():
        joined.kv_connector_gauges[name] = joined.kv_connector_gauges.get(name, 0) + value
    joined.kv_cache_events.extend(report.kv_cache_events or ())
    joined.transfer_records.extend(report.transfer_records or ())
    for lease_id, written in (report.written or {}).items():
        joined.written.setdefault(lease_id, {}).update(written)
    for request_id, (done, total) in (report.transfer_progress or {}).items():
        others_done, others_total = joined.transfer_progress.get(request_id, (0, 0))
        joined.transfer_progress[request_id] = (others_done + done, others_total + total)


def _merged(earlier: KVConnectorOutput, later: KVConnectorOutput) -> KVConnectorOutput:
    """Two steps in one report; progress and gauges come from the later step."""
    merged = KVConnectorOutput(
        finished_sending=earlier.finished_sending | later.finished_sending,
        finished_recving=earlier.finished_recving | later.finished_recving,
        failed_recving=earlier.failed_recving | later.failed_recving,
        expected_finished_count=later.expected_finished_count or earlier.expected_finished_count,
    )
    _add(merged, earlier)
    merged.transfer_progress.clear()
    merged.kv_connector_gauges.clear()
    _add(merged, later)
    return merged
