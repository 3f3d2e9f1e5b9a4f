"""One load on one rank: what it reads, and what became of it."""

from dataclasses import dataclass, field

from kvferry.connectors.base import TransferRecord
from kvferry.connectors.pull.metadata import LoadSpec
from kvferry.connectors.pull.peer import SourcePeer
from kvferry.connectors.pull.reads import Read
from kvferry.connectors.pull.routes import Route
from kvferry.errors import KVFerryError
from kvferry.topology import BoundCopies
from kvferry.transports.base import Peer, Waitable


@dataclass(slots=True, eq=False)
class LoadPart:
    """What comes over one route."""

    route: Route
    copies: BoundCopies
    connections: dict[int, Peer]
    """Source rank → the connection over which it is read."""
    read: Read
    repeated: bool = False
    """Whether it runs for the second time, as a connection was lost."""


@dataclass(slots=True, eq=False)
class RankLoad:
    """One load on this rank, from its start to its result."""

    spec: LoadSpec
    started: float
    """Unix seconds."""
    after: Waitable | None = None
    """When the cache may be written."""
    parts: list[LoadPart] = field(default_factory=list)
    peer: SourcePeer | None = None
    """Whom it reads from; set before the first part."""
    error: KVFerryError | None = None
    """The first thing that went wrong."""
    token_digests: tuple[int, ...] | None = None
    finished: float = 0.0
    """Unix seconds at which its last read was settled."""
    confirming: bool = False
    """Whether the source was told and its answer is awaited."""
    confirms: int = 0
    """How often the source was asked for the confirm."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing of it can change the cache any more."""
        return all(part.read.is_settled for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes that its reads move."""
        return sum(part.read.nbytes for part in self.parts)

    @property
    def bytes_done(self) -> int:
        """Bytes already in place."""
        return sum(part.read.bytes_done for part in self.parts)

    def record(self, rank: int) -> TransferRecord:
        """What it did."""
        return TransferRecord(
            request_id=self.spec.request_id,
            lease_id=self.spec.lease_id,
            rank=rank,
            peer=self.spec.engine_id,
            direction="recv",
            first_token=self.spec.first_token,
            tokens=self.spec.num_tokens - self.spec.first_token,
            nbytes=self.nbytes,
            copies=sum(part.read.segments for part in self.parts),
            started=self.started,
            finished=self.finished,
            ok=self.error is None,
            error="" if self.error is None else f"{type(self.error).__name__}: {self.error}",
            token_digests=self.token_digests,
        )
