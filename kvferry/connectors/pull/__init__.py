"""The connector that ships: decode workers pull leased blocks from prefill workers."""

from kvferry.connectors.base import (
    ConnectorContext,
    KVConnector,
    SchedulerConnector,
    WorkerConnector,
)
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.metadata import PullMetadata


class PullConnector(KVConnector):
    """Prefill engines lease the blocks of finished prompts; decode engines read them in place.

    One handshake per engine pair, between the scheduler halves; plans are computed once per pair
    on each rank; a load counts only after the source confirmed that the lease still held.
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
