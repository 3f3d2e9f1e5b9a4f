"""What the halves of the adapter tell each other through vLLM."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvferry.connectors.base import TransferRecord
from kvferry.connectors.pull.metadata import PullMetadata
from kvferry.integrations.vllm.caches import CacheGroup
from kvferry.integrations.vllm.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvferry.topology.description import ModelFingerprint

Written: TypeAlias = dict[str, dict[int, int]]
"""Lease id → rank → leading tokens that it has written."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's news from the scheduler half to every rank."""

    news: PullMetadata | None = None
    """``None`` where there is none."""
    refused: dict[str, int] = field(default_factory=dict)
    """Parked requests whose load was refused → a block of vLLM's that it would have filled. Each
    rank reports both as failed."""


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """What one rank tells the scheduler half at start."""

    rank: int
    incarnation: str
    """Of the engine; decided by rank 0."""
    groups: tuple[CacheGroup, ...]
    """Of the whole engine, the same on every rank."""
    model: ModelFingerprint
    """As the rank sees it, without the weights. Some of vLLM's models write into their config when
    they are built, which the scheduler's process does with one rank only."""
    num_blocks: int
    """Blocks of vLLM's pool."""
    handshake: bytes
    """For other engines: what our worker half says of itself."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What ranks report of a step beside what vLLM has fields for."""

    records: list[TransferRecord] = field(default_factory=list)
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Request id → (bytes in place, bytes in all)."""
    failed: set[str] = field(default_factory=set)
    """Requests whose load failed on a rank; vLLM counts on when every rank is done with it."""
    written: Written = field(default_factory=dict)
    """See :attr:`kvferry.connectors.base.KVConnectorOutput.written`."""
    later: Callable[[], Written] | None = None
    """Says what else is written by the time when it is asked. A worker makes its report when it
    has handed a step to its device; vLLM lets go of it when the device has drawn the tokens of that
    step, by which time all that the step writes is there."""

    def settle(self) -> None:
        """Takes in what is written by now."""
        if self.later is not None:
            self.written |= self.later()
            self.later = None

    def __getstate__(self) -> dict[str, Any]:
        self.settle()  # it leaves its rank
        return dict(vars(self))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """This report and that of another rank."""
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
