"""What a manager answered: one record per operation."""

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.peers.peer import Allocation, CachePeer, Hit


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One operation and what it left behind."""

    op: str
    request: str
    hit: int | None = None
    """Tokens of the hit."""
    hit_tables: tuple[str, ...] = ()
    """One letter a block, by group: ``0`` a null block, ``b`` another."""
    asked: Allocation | None = None
    new: tuple[int, ...] | None = None
    """New blocks that the manager returned, by group; ``None`` if it did not allocate."""
    tables: tuple[str, ...] = ()
    """The request's tables afterwards, as ``hit_tables``."""
    free: int = 0
    """Free blocks afterwards."""


class Recorder:
    """Keeps the records of one manager."""

    def __init__(self, peer: CachePeer) -> None:
        self.records: list[Record] = []
        """Oldest first."""
        self._peer = peer

    def add(
        self,
        op: str,
        request: Any = None,
        *,
        hit: Hit | None = None,
        asked: Allocation | None = None,
        new: tuple[int, ...] | None = None,
    ) -> None:
        """Looks at what is there now, and keeps it with what the operation returned."""
        self.records.append(
            Record(
                op=op,
                request="" if request is None else request.request_id,
                hit=None if hit is None else hit.num_tokens,
                hit_tables=() if hit is None else _letters(hit.blocks.get_block_ids()),
                asked=asked,
                new=new,
                tables=() if request is None else _letters(self._peer.tables(request)),
                free=self._peer.num_free_blocks(),
            )
        )


def _letters(tables: Sequence[Sequence[int]]) -> tuple[str, ...]:
    return tuple("".join("b" if block_id else "0" for block_id in table) for table in tables)
