"""Copies of lent blocks in host memory, for wires that cannot read the device they lie on."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.connectors.base import TransferRecord
from kvferry.connectors.pull.metadata import LentSpec
from kvferry.connectors.pull.reads import as_load_error
from kvferry.errors import KVFerryError
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.device import CopyEvent, CopyStream
from kvferry.layouts.host_staging import HostMirror
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.lifetimes import Closing
from kvferry.topology import GroupGeometry
from kvferry.topology.binding import bind_own
from kvferry.topology.lowering import own_tiles
from kvferry.topology.tensors import RankMemory
from kvferry.topology.windows import num_leading_nulls


@dataclass(slots=True, eq=False)
class _Copy:
    """The blocks of one lease on their way to the host."""

    lent: LentSpec
    started: float
    """Unix seconds."""
    nbytes: int = 0
    event: CopyEvent | None = None
    """After the last of its copies; ``None`` where there was nothing to copy."""
    error: KVFerryError | None = None

    def is_over(self) -> bool:
        """Whether the blocks are there, or never will be."""
        if self.error is not None or self.event is None:
            return True
        try:
            return self.event.done()
        except KVFerryError as error:
            self.error = error
            return True


class RankMirror(Closing):
    """One rank's copies of what it lends. Called from the step thread only.

    A record for each lease says when its copies are there; the lease is taken by nobody before
    every rank has said so.
    """

    def __init__(
        self,
        stream: CopyStream,
        spans: Sequence[MemorySpan],
        rank: int,
        groups: Sequence[GroupGeometry],
    ) -> None:
        """Takes as much host memory as the cache has.

        Args:
            stream: copies on the cache's device; stays the caller's.
            spans: the cache's regions, by region id.
            rank: which rank this is.
            groups: its KV cache groups.

        Raises:
            HostError: that much host memory cannot be pinned.
        """
        self._mirror = HostMirror(stream, spans)
        self.arrays = self._mirror.arrays
        """What wires serve, by region id."""
        self._rank = rank
        self._groups = groups
        self._tiles: tuple[Tiles, ...] = ()
        self._under_way: list[_Copy] = []

    def describe(self, memory: Sequence[RankMemory]) -> None:
        """Sets where the cells of each group lie; before the first :meth:`lend`."""
        self._tiles = tuple(
            own_tiles(group, self._rank, described)
            for group, described in zip(self._groups, memory, strict=True)
        )

    def lend(self, lent: LentSpec) -> None:
        """Begins to copy blocks that were just lent. Never raises; returns at once."""
        copy = _Copy(lent, time.time())
        self._under_way.append(copy)
        try:
            for tiles, runs in self._bound(lent):
                copy.event = self._mirror.copy_out(tiles, runs)
                copy.nbytes += num_bytes(tiles, runs)
        except Exception as error:
            copy.error = as_load_error(error, "lent blocks could not be copied to host memory")

    def take_records(self) -> list[TransferRecord]:
        """One record for each lease whose blocks are there by now, or could not be copied."""
        over = [copy for copy in self._under_way if copy.is_over()]
        self._under_way = [copy for copy in self._under_way if copy not in over]
        return [self._record(copy) for copy in over]

    def close(self) -> None:
        """Unpins the memory. The stream was closed before. Idempotent."""
        self._mirror.close()

    def _bound(self, lent: LentSpec) -> Iterator[tuple[Tiles, Runs]]:
        """What the rank holds of a lease: every block of its tables."""
        for group, tiles, ids in zip(self._groups, self._tiles, lent.block_ids, strict=True):
            first = num_leading_nulls(ids) * group.virtual_block_size
            if first < lent.num_tokens and len(tiles):
                runs, _ = bind_own(group, self._rank, ids, lent.num_tokens, first)
                if len(runs):
                    yield tiles, runs

    def _record(self, copy: _Copy) -> TransferRecord:
        error = copy.error
        return TransferRecord(
            request_id=copy.lent.request_id,
            lease_id=copy.lent.lease_id,
            rank=self._rank,
            peer="",
            direction="send",
            first_token=0,
            tokens=copy.lent.num_tokens,
            nbytes=copy.nbytes,
            copies=0,
            started=copy.started,
            finished=time.time(),
            ok=error is None,
            error="" if error is None else f"{type(error).__name__}: {error}",
        )
