"""What the PullConnector's scheduler half tells its worker halves."""

import msgspec

from kvferry.connectors.base import KVConnectorMetadata
from kvferry.control.tickets import Ticket
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
    """For each pair of groups, the first of them that moves."""


class LentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks just lent out."""

    request_id: str
    lease_id: str
    block_ids: tuple[list[int], ...]
    num_tokens: int


class PullMetadata(KVConnectorMetadata, kw_only=True):
    """One step's news for the ranks."""

    peers: list[EngineDescription] = msgspec.field(default_factory=list)
    """Engines whose handshake just succeeded; replaces an older start of the same engine."""
    loads: list[LoadSpec] = msgspec.field(default_factory=list)
    cancels: list[str] = msgspec.field(default_factory=list)
    """Lease ids of loads to give up."""
    released: list[str] = msgspec.field(default_factory=list)
    """Requests whose lease ended; each rank echoes them once in ``finished_sending``."""
    lent: list[LentSpec] = msgspec.field(default_factory=list)
    """Filled only where ranks mirror what they lend, or with ``record_digests``."""
