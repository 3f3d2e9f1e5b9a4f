"""The messages between the two halves of the adapter, sent through vLLM."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvferry.connectors.pull.metadata import PullMetadata
from kvferry.integrations.vllm.caches import CacheGroup
from kvferry.integrations.vllm.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvferry.observe.records import TransferRecord
from kvferry.topology.description import ModelFingerprint

Written: TypeAlias = dict[str, dict[int, int]]
"""Lease id → rank → number of leading tokens written by the rank."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's news from the scheduler half to every rank."""

    news: PullMetadata | None = None
    """News for kvferry's worker; ``None`` if there is no news."""
    refused: dict[str, int] = field(default_factory=dict)
    """Id of a parked request whose load was refused → a vLLM block that the load would have filled.
    Each rank reports the request and the block as failed."""


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """Description of a rank, sent to the scheduler half at start."""

    rank: int
    incarnation: str
    """Incarnation of the engine, decided by rank 0."""
    groups: tuple[CacheGroup, ...]
    """Cache groups of the whole engine, equal on every rank."""
    model: ModelFingerprint
    """Fingerprint of the model as the rank sees it, without the weights. Some of vLLM's models
    write into their config when they are built, which happens in the scheduler's process for a
    single rank only."""
    num_blocks: int
    """Number of blocks in vLLM's pool."""
    handshake: bytes
    """Description of kvferry's worker for other engines."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """The ranks' reports of a step, for which vLLM has no fields."""

    records: list[TransferRecord] = field(default_factory=list)
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Request id → (bytes in place, bytes in all)."""
    failed: set[str] = field(default_factory=set)
    """Requests whose load failed on a rank; vLLM waits until every rank has finished the load."""
    written: Written = field(default_factory=dict)
    """See :attr:`kvferry.connectors.base.KVConnectorOutput.written`."""
    later: Callable[[], Written] | None = None
    """Function that returns the tokens written by the time of the call; ``None`` if none will
    follow. A worker makes the report after handing a step to the device. vLLM releases the report
    when the device has sampled the tokens of this step; all writes of the step are in place by
    then."""

    def settle(self) -> None:
        """Adds the tokens written by now."""
        if self.later is not None:
            self.written |= self.later()
            self.later = None

    def __getstate__(self) -> dict[str, Any]:
        self.settle()  # the report leaves its rank
        return dict(vars(self))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Joins this report and the report of another rank."""
        assert isinstance(other, StepReport)  # all ranks run this connector
        self.settle()
        other.settle()
        progress = dict(self.progress)
        for request_id, (done, total) in other.progress.items():
            before = progress.get(request_id, (0, 0))
            progress[request_id] = (before[0] + done, before[1] + total)
        written = {lease_id: dict(ranks) for lease_id, ranks in self.written.items()}
        for lease_id, ranks in other.written.items():
            written.setdefault(lease_id, {}).update(ranks)
        return StepReport(
            self.records + other.records, progress, self.failed | other.failed, written
        )
