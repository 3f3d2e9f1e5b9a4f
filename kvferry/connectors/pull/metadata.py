"""The messages of the PullConnector's scheduler half to its worker halves."""

import time
from array import array
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from kvferry.connectors.base import KVConnectorMetadata
from kvferry.control.tickets import Ticket
from kvferry.errors import KVFerryError
from kvferry.observe.records import TransferRecord
from kvferry.topology.description import EngineDescription
from kvferry.topology.sharding import Int64s


def packed(tables: Iterable[Sequence[int]]) -> tuple[bytes, ...]:
    """Block tables in the form that ranks get: bytes of 64-bit numbers, as no code on the way reads
    single ids.
    """
    return tuple(array("q", table).tobytes() for table in tables)


def ids_of(table: bytes) -> Int64s:
    """The ids of a table that :func:`packed` made."""
    return np.frombuffer(table, dtype=np.int64)


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a load: the tokens, their source blocks under a lease, and our target
    blocks.
    """

    request_id: str
    ticket: Ticket
    """Ticket of the lease; names the source. The ticket's own block tables are left out."""
    source_tables: tuple[bytes, ...]
    """The source's whole block tables, one per group of the source; see :func:`ids_of`."""
    target_tables: tuple[bytes, ...]
    """Our whole block tables, one per group of ours."""
    first_token: int
    num_tokens: int
    """End of the load, which covers the tokens ``[first_token, num_tokens)``."""
    starts: tuple[int, ...]
    """First token that moves, for each pair of groups; ``num_tokens`` if the token is not known
    before the lease is whole."""
    readable: int | None = None
    """End of the tokens that can be read so far; ``None`` if all can be read."""
    replaces: str = ""
    """Id of the revoked lease under which the load was read before. The cells that were read under
    that lease count for nothing, and all tokens are read again. Empty if the lease is the first."""


class LentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of blocks that were just lent, or of a step's writes to blocks that are lent
    already.
    """

    request_id: str
    lease_id: str
    block_ids: tuple[list[int], ...]
    """Whole block tables; empty if no digest of the blocks is made."""
    num_tokens: int
    """Number of leading tokens that are written, or will be when the step is over."""

    def record(
        self,
        rank: int,
        started: float,
        *,
        error: KVFerryError | None = None,
        token_digests: tuple[int, ...] | None = None,
    ) -> TransferRecord:
        """The record of a rank's work on these blocks, begun at ``started`` (Unix seconds)."""
        return TransferRecord(
            request_id=self.request_id,
            lease_id=self.lease_id,
            rank=rank,
            direction="send",
            first_token=0,
            tokens=self.num_tokens,
            nbytes=0,
            started=started,
            finished=time.time(),
            ok=error is None,
            error="" if error is None else f"{type(error).__name__}: {error}",
            token_digests=token_digests,
        )


class PullMetadata(KVConnectorMetadata, kw_only=True):
    """Message to the ranks in one step."""

    peers: list[EngineDescription] = msgspec.field(default_factory=list)
    """Engines whose handshake just succeeded; each replaces an older incarnation of the same
    engine."""
    gone: dict[str, str] = msgspec.field(default_factory=dict)
    """Engine id → the incarnation that ranks forget; the same engine may also be in ``peers``."""
    loads: list[LoadSpec] = msgspec.field(default_factory=list)
    parts: list[LoadSpec] = msgspec.field(default_factory=list)
    """Present state of loads under way for which more tokens can be read now."""
    writes: list[LentSpec] = msgspec.field(default_factory=list)
    """Writes of this step to prompts that are lent already; ranks report each once it is
    complete."""
    cancels: dict[str, str] = msgspec.field(default_factory=dict)
    """Lease id → reason to give up its load; empty if the request was aborted."""
    released: list[str] = msgspec.field(default_factory=list)
    """Requests whose lease ended; each rank echoes them once in ``finished_sending``."""
    lent: list[LentSpec] = msgspec.field(default_factory=list)
    """Blocks that were just lent; empty without ``record_digests``."""


NO_NEWS = PullMetadata()
"""Message of a step without news for the ranks; must not be changed."""
