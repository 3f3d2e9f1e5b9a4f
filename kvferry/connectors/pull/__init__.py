"""The built-in connector: the ranks of decode engines read leased blocks of prefill engines."""

from kvferry.connectors.base import (
    ConnectorContext,
    KVConnector,
    SchedulerConnector,
    WorkerConnector,
)
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.metadata import PullMetadata


class PullConnector(KVConnector):
    """Prefill engines lease the blocks of finished prompts; decode engines read the blocks in
    place.

    Each pair of engines makes one handshake, between the scheduler halves. Each rank computes its
    plans once per pair of engines. A load counts only after the source has confirmed the lease.
    """

    ExtraConfig = PullConfig
    Metadata = PullMetadata
    supports_groups = True

    @classmethod
    def scheduler(cls, context: ConnectorContext) -> SchedulerConnector:
        """See :meth:`KVConnector.scheduler`."""
        from kvferry.connectors.pull.scheduler import PullScheduler

        return PullScheduler.open(context)

    @classmethod
    def worker(cls, context: ConnectorContext, rank: int) -> WorkerConnector:
        """See :meth:`KVConnector.worker`."""
        from kvferry.connectors.pull.worker import PullWorker

        return PullWorker.open(context, rank)
