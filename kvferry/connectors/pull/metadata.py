"""What the PullConnector's scheduler half tells its worker halves."""

import time

import msgspec

from kvferry.connectors.base import KVConnectorMetadata, TransferRecord
from kvferry.control.tickets import Ticket
from kvferry.errors import KVFerryError
from kvferry.topology.description import EngineDescription


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One load: which tokens of which leased blocks go into which of our blocks."""

    request_id: str
    ticket: Ticket
    """The lease, its source, and the source's block tables."""
    target_block_ids: tuple[list[int], ...]
    """Whole block tables here, one list per group of ours."""
    first_token: int
    num_tokens: int
    """The load is of the tokens ``[first_token, num_tokens)``."""
    starts: tuple[int, ...]
    """For each pair of groups, the first of them that moves; ``num_tokens`` where that is not known
    before the lease is whole."""
    readable: int | None = None
    """The tokens before this one can be read so far; ``None`` where that is all."""
    replaces: str = ""
    """The lease under which the load was read before and that was revoked: nothing of that counts,
    and all is read again."""


class LentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks just lent out, or what a step writes of those that are lent already."""

    request_id: str
    lease_id: str
    block_ids: tuple[list[int], ...]
    """Whole block tables; empty where nothing is done with them."""
    num_tokens: int
    """The leading tokens that are there, or will be when the step is over."""
    first_token: int = 0
    """Those before it were mirrored before, of groups that keep all tokens."""

    def record(
        self,
        rank: int,
        started: float,
        *,
        nbytes: int = 0,
        error: KVFerryError | None = None,
        token_digests: tuple[int, ...] | None = None,
    ) -> TransferRecord:
        """What a rank has just done with them, begun at ``started`` (Unix seconds)."""
        return TransferRecord(
            request_id=self.request_id,
            lease_id=self.lease_id,
            rank=rank,
            direction="send",
            first_token=0,
            tokens=self.num_tokens,
            nbytes=nbytes,
            started=started,
            finished=time.time(),
            ok=error is None,
            error="" if error is None else f"{type(error).__name__}: {error}",
            token_digests=token_digests,
        )


class PullMetadata(KVConnectorMetadata, kw_only=True):
    """One step's news for the ranks."""

    peers: list[EngineDescription] = msgspec.field(default_factory=list)
    """Engines whose handshake just succeeded; replaces an older start of the same engine."""
    gone: dict[str, str] = msgspec.field(default_factory=dict)
    """Engine id → its start that nothing is kept of any more; some of ``peers`` may be the same."""
    loads: list[LoadSpec] = msgspec.field(default_factory=list)
    parts: list[LoadSpec] = msgspec.field(default_factory=list)
    """Loads under way of which more can be read now, as they stand now."""
    writes: list[LentSpec] = msgspec.field(default_factory=list)
    """What this step writes of prompts that are lent already; ranks report it once it is there."""
    cancels: dict[str, str] = msgspec.field(default_factory=dict)
    """Lease id → why to give its load up; empty where its request was aborted."""
    released: list[str] = msgspec.field(default_factory=list)
    """Requests whose lease ended; each rank echoes them once in ``finished_sending``."""
    lent: list[LentSpec] = msgspec.field(default_factory=list)
    """Filled only where ranks mirror what they lend, or with ``record_digests``."""
