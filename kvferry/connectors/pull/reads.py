"""Reads: how the bytes of one load come over one route, from the first transfer to the last byte.

A read is settled once nothing of it can change the cache any more; then it has an error or all of
its cells are in place. Straight into the cache that takes terminal transfers. Through staging it
takes the end of its own unpacking, whatever its transfers still do: their slots are quarantined.

The loader's thread owns every read. Unpacking runs on threads of its own.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.connectors.pull.staging import Claim, Slot, StagingPool
from kvferry.errors import BlockTableError, KVFerryError, StalledError, TransferError
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.convert import convert
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.staging import StagedChunk
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import ByteArray, Peer, Transfer, TransferState, Transport
from kvferry.transports.movers import MoverPool

logger = logging.getLogger(__name__)


class TargetMemory:
    """This rank's cache as reads see it: its regions, staging, and threads that unpack."""

    def __init__(
        self,
        regions: Sequence[ByteArray],
        *,
        staging_bytes: int,
        stall_timeout_s: float,
        threads: int,
    ) -> None:
        """Takes neither memory nor threads before they are needed.

        Args:
            regions: the cache's regions, by region id.
            staging_bytes: size of the staging memory.
            stall_timeout_s: seconds without progress after which a read is given up.
            threads: how many unpack.
        """
        self.regions = tuple(regions)
        self.addresses = [int(region.ctypes.data) for region in regions]
        self.region_bytes = tuple(region.nbytes for region in regions)
        self.staging = StagingPool(staging_bytes, stall_timeout_s)
        self.stall_timeout_s = stall_timeout_s
        self._threads = threads
        self._movers: MoverPool | None = None

    def submit(self, what: str, task: Callable[[], object]) -> "Work":
        """Runs a task on a mover thread."""
        if self._movers is None:
            self._movers = MoverPool("unpack", self._threads)
        work = Work(what, task)
        self._movers.submit(work.run)
        return work

    def stop(self) -> None:
        """Waits for the tasks that were submitted, then ends the threads. Idempotent."""
        if self._movers is not None:
            self._movers.close()


@dataclass(slots=True, eq=False)
class Work:
    """A task on a mover thread."""

    what: str
    task: Callable[[], object]
    error: KVFerryError | None = None
    """Set before ``done``."""
    done: bool = False
    """Whether it writes nothing any more."""

    def run(self) -> None:
        """Runs the task; never raises."""
        try:
            self.task()
        except Exception as error:
            self.error = as_load_error(error, self.what)
        finally:
            self.done = True


class Read(ABC):
    """One load's bytes over one route."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """Bytes to move."""
        self.error: KVFerryError | None = None
        """The first thing that went wrong."""

    @property
    @abstractmethod
    def bytes_done(self) -> int:
        """Bytes already in place."""

    @property
    @abstractmethod
    def segments(self) -> int:
        """Contiguous copies after merging, where the mover counts them."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether nothing of it can change the cache any more."""

    @abstractmethod
    def advance(self, now: float) -> None:
        """Goes on as far as it can without waiting. Never raises.

        Args:
            now: ``time.monotonic()``.
        """

    @abstractmethod
    def give_up(self, error: KVFerryError) -> None:
        """Stops it; it settles soon, with ``error`` unless something else went wrong before."""


class PlainRead(Read):
    """One transfer, straight into the cache; its transport fences."""

    def __init__(self, transport: Transport, connection: Peer, tiles: Tiles, runs: Runs) -> None:
        """Starts it; raises what :meth:`Transport.read` raises."""
        assert transport.fences  # else it may land in blocks that are somebody else's by then
        self._transport = transport
        self._transfer = transport.read(connection, tiles, runs)
        self._settled = False
        super().__init__(self._transfer.nbytes)

    @property
    def bytes_done(self) -> int:
        """See :class:`Read`."""
        return self._transfer.bytes_done

    @property
    def segments(self) -> int:
        """See :class:`Read`."""
        return self._transfer.segments

    @property
    def is_settled(self) -> bool:
        """See :class:`Read`."""
        return self._settled

    def advance(self, now: float) -> None:
        """See :class:`Read`."""
        if self._transfer.is_terminal:
            self.error = self.error or self._transfer.error
            self._settled = True

    def give_up(self, error: KVFerryError) -> None:
        """See :class:`Read`."""
        self.error = self.error or error
        self._transport.cancel(self._transfer)


@dataclass(slots=True, eq=False)
class _Staged:
    """A chunk in a slot: under way, then being unpacked."""

    chunk: StagedChunk
    slot: Slot
    transfer: Transfer
    unpacking: Work | None = None


class StagedRead(Read):
    """Chunks through staging: landed, then unpacked (and converted) into the cache.

    Slots are leased one by one and in turn with other reads, so a read that is larger than the
    staging memory passes through it.
    """

    def __init__(
        self,
        transport: Transport,
        connection: Peer,
        memory: TargetMemory,
        chunks: Iterable[StagedChunk],
        nbytes: int,
        conversion: tuple[str, str] | None = None,
    ) -> None:
        """Starts with the first :meth:`advance`.

        Args:
            transport: moves the chunks; it need not fence.
            connection: to the source rank.
            memory: where to.
            chunks: what to move, in this order.
            nbytes: bytes of all chunks together.
            conversion: dtype in the chunks and dtype in the cache, where they differ.
        """
        super().__init__(nbytes)
        self._transport = transport
        self._connection = connection
        self._memory = memory
        self._conversion = conversion
        self._waiting = deque(chunks)
        self._claim: Claim | None = None
        self._staged: list[_Staged] = []
        self._progressed = time.monotonic()
        self._bytes_done = 0
        self._segments = 0

    @property
    def bytes_done(self) -> int:
        """See :class:`Read`."""
        return self._bytes_done

    @property
    def segments(self) -> int:
        """See :class:`Read`."""
        return self._segments

    @property
    def is_settled(self) -> bool:
        """See :class:`Read`."""
        return not (self._staged or self._waiting)

    def advance(self, now: float) -> None:
        """See :class:`Read`."""
        try:
            for staged in list(self._staged):
                if self.error is None or staged.unpacking is not None:
                    self._follow(staged)
            if self.error is None:
                self._check_progress(now)
                self._start_more()
        except Exception as error:
            self.give_up(as_load_error(error, "a chunk could not be read"))

    def give_up(self, error: KVFerryError) -> None:
        """See :class:`Read`. Slots whose transfers go on are quarantined."""
        self.error = self.error or error
        self._waiting.clear()
        if self._claim is not None:
            self._memory.staging.withdraw(self._claim)
            self._claim = None
        for staged in list(self._staged):
            if staged.unpacking is not None:
                continue  # until that has ended the cache may change
            self._staged.remove(staged)
            if staged.transfer.is_terminal:
                self._memory.staging.release(staged.slot)
            else:
                self._transport.cancel(staged.transfer)
                self._memory.staging.quarantine(staged.slot)

    def _follow(self, staged: _Staged) -> None:
        """Unpacks a chunk that has landed; gives back the slot of one that is unpacked."""
        transfer, work = staged.transfer, staged.unpacking
        self._progressed = max(self._progressed, transfer.progressed)
        if work is not None and work.done:
            self._staged.remove(staged)
            self._memory.staging.release(staged.slot)
            self._bytes_done += staged.chunk.nbytes
            if work.error is not None:
                self.give_up(work.error)
        elif work is None and transfer.state is TransferState.DONE:
            self._segments += transfer.segments
            staged.unpacking = self._memory.submit(
                "a chunk could not be unpacked",
                lambda: unpack(staged.chunk, staged.slot, self._memory, self._conversion),
            )
        elif work is None and transfer.is_terminal:
            assert transfer.error is not None  # set before the state
            self.give_up(transfer.error)

    def _check_progress(self, now: float) -> None:
        """The stall clock of transports that cannot end a read themselves, as they do not fence."""
        if self._transport.fences or not any(staged.unpacking is None for staged in self._staged):
            return
        stall_timeout_s = self._memory.stall_timeout_s
        if now - self._progressed > stall_timeout_s:
            self.give_up(
                StalledError(
                    f"{self._transport.name}: no progress for {stall_timeout_s:g} s "
                    f"(stall_timeout_s), {self._bytes_done} of {self.nbytes} bytes are in place"
                )
            )

    def _start_more(self) -> None:
        """Leases slots for the next chunks as long as it is this read's turn."""
        while self._waiting:
            if self._claim is None:
                self._claim = self._memory.staging.claim(self._waiting[0].nbytes)
            if self._claim.error is not None:
                error, self._claim = self._claim.error, None
                self.give_up(error)
                return
            if self._claim.slot is None:
                return
            self._start(self._waiting[0], self._claim.slot)
            self._claim = None
            self._waiting.popleft()

    def _start(self, chunk: StagedChunk, slot: Slot) -> None:
        staging = self._memory.staging
        check_bounds(
            chunk.unpack_tiles, chunk.unpack_runs, (chunk.unpack_nbytes,), self._memory.region_bytes
        )
        tiles = chunk.pack_tiles.copy()
        tiles["target_region"] = staging.region(self._transport)
        tiles["target_offset"] += slot.offset
        slot.transfer = self._transport.read(self._connection, tiles, chunk.pack_runs)
        self._staged.append(_Staged(chunk, slot, slot.transfer))
        self._progressed = time.monotonic()


def unpack(
    chunk: StagedChunk, slot: Slot, memory: TargetMemory, conversion: tuple[str, str] | None
) -> None:
    """Puts what a slot holds into the cache, converted if it has another dtype."""
    address = memory.staging.address(slot)
    if conversion is not None:
        source, target = conversion
        landed = memory.staging.memory[slot.offset : slot.offset + chunk.nbytes]
        converted = np.empty(chunk.unpack_nbytes, dtype=np.uint8)
        convert(landed, source, converted, target)
        address = int(converted.ctypes.data)
    copy_tiles([address], memory.addresses, chunk.unpack_tiles, chunk.unpack_runs)


def as_load_error(error: Exception, what: str) -> KVFerryError:
    """The error of a load; for a defect of ours, which is logged, one that says so."""
    if isinstance(error, KVFerryError):
        return error
    if isinstance(error, ValueError):
        return BlockTableError(str(error))  # a table, from a ticket, that does not fit the plan
    logger.error("%s", what, exc_info=error)
    return TransferError(f"{what}: {error!r}")
