"""Reads: how the bytes of one load come over one route, from the first transfer to the last byte.

A read is settled once nothing of it can change the cache any more; then it has an error or all of
its cells are in place. Straight into the cache that takes terminal transfers. Through staging it
takes the end of its own unpacking, whatever its transfers still do: their slots are quarantined.

The loader's thread owns every read. Unpacking runs on threads of its own.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvferry.connectors.pull.staging import StagingPool
from kvferry.errors import BlockTableError, HostError, KVFerryError, PeerLostError, TransferError
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.host_staging import Placer
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import ByteArray, Peer, Transport, Waitable
from kvferry.transports.movers import MoverPool

logger = logging.getLogger(__name__)


class TargetMemory:
    """This rank's cache as reads see it: its regions, staging, and threads that unpack."""

    def __init__(
        self,
        regions: Sequence[MemorySpan],
        placer: Placer,
        *,
        staging_bytes: int,
        stall_timeout_s: float,
        threads: int,
    ) -> None:
        """Takes neither memory nor threads before they are needed.

        Args:
            regions: the cache's regions, by region id.
            placer: unpacks into them; stays the caller's.
            staging_bytes: size of the staging memory.
            stall_timeout_s: seconds without progress after which a read is given up.
            threads: how many unpack.
        """
        self.regions = tuple(regions)
        self.region_bytes = tuple(region.nbytes for region in regions)
        self.placer = placer
        self.staging = StagingPool(staging_bytes, stall_timeout_s)
        self.stall_timeout_s = stall_timeout_s
        self._adopted = False
        self._threads = threads
        self._movers: MoverPool | None = None

    @property
    def is_host(self) -> bool:
        """Whether the host may touch the cache."""
        return all(region.is_host for region in self.regions)

    def arrays(self) -> tuple[ByteArray, ...]:
        """The cache's bytes, by region id. Only where :attr:`is_host`."""
        return tuple(region.as_array() for region in self.regions)

    def staging_region(self, transport: Transport) -> int:
        """The id under which a transport knows the staging memory."""
        region = self.staging.region(transport)
        if not self._adopted:
            self._adopted = True
            try:
                self.placer.adopt(self.staging.memory)
            except HostError as error:  # it is slower, and right
                logger.warning("staging memory: %s", error)
        return region

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
    def lost(self) -> tuple[Peer, ...]:
        """The connections that broke under it."""

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

    def __init__(
        self,
        transport: Transport,
        connection: Peer,
        tiles: Tiles,
        runs: Runs,
        after: Waitable | None,
    ) -> None:
        """Starts it; raises what :meth:`Transport.read` raises."""
        assert transport.fences  # else it may land in blocks that are somebody else's by then
        self._transport = transport
        self._connection = connection
        self._transfer = transport.read(connection, tiles, runs, after=after)
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
    def lost(self) -> tuple[Peer, ...]:
        """See :class:`Read`."""
        return (self._connection,) if isinstance(self.error, PeerLostError) else ()

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


class InPlaceRead(Read):
    """Whole blocks from all source ranks, straight into the cache; then they are permuted there."""

    def __init__(
        self,
        transport: Transport,
        landing: Iterable[tuple[Peer, Tiles, Runs]],
        after: Waitable | None,
        memory: TargetMemory,
        permute: Callable[[], object],
    ) -> None:
        """Starts it.

        Args:
            transport: moves the blocks; it fences.
            landing: what to read over each connection.
            after: when the cache may be written.
            memory: where to.
            permute: makes the blocks hold the target's geometry once all are there.
        """
        super().__init__(0)
        self._memory = memory
        self._permute = permute
        self._permuting: Work | None = None
        self._permuted = False
        self._blocks: list[PlainRead] = []
        try:
            for connection, tiles, runs in landing:
                self._blocks.append(PlainRead(transport, connection, tiles, runs, after))
        except Exception as error:  # others may be under way by now
            self.give_up(as_load_error(error, "whole blocks could not be read"))
        self.nbytes = sum(read.nbytes for read in self._blocks)

    @property
    def bytes_done(self) -> int:
        """See :class:`Read`."""
        return sum(read.bytes_done for read in self._blocks)

    @property
    def segments(self) -> int:
        """See :class:`Read`."""
        return sum(read.segments for read in self._blocks)

    @property
    def lost(self) -> tuple[Peer, ...]:
        """See :class:`Read`."""
        return tuple(connection for read in self._blocks for connection in read.lost)

    @property
    def is_settled(self) -> bool:
        """See :class:`Read`."""
        if self._permuting is not None:
            return self._permuted
        return self.error is not None and all(read.is_settled for read in self._blocks)

    def advance(self, now: float) -> None:
        """See :class:`Read`."""
        for read in self._blocks:
            read.advance(now)
            self.error = self.error or read.error
        if self._permuting is not None:
            if self._permuting.done:
                self.error = self.error or self._permuting.error
                self._permuted = True
        elif self.error is None and all(read.is_settled for read in self._blocks):
            what = "blocks could not be permuted"
            try:
                self._permuting = self._memory.submit(what, self._permute)
            except Exception as error:  # no thread, perhaps
                self.error = as_load_error(error, what)

    def give_up(self, error: KVFerryError) -> None:
        """See :class:`Read`. A permutation under way goes on to its end."""
        self.error = self.error or error
        for read in self._blocks:
            read.give_up(error)


class JointRead(Read):
    """Several reads as one."""

    def __init__(self, reads: Sequence[Read]) -> None:
        super().__init__(sum(read.nbytes for read in reads))
        self._reads = reads

    @property
    def bytes_done(self) -> int:
        """See :class:`Read`."""
        return sum(read.bytes_done for read in self._reads)

    @property
    def segments(self) -> int:
        """See :class:`Read`."""
        return sum(read.segments for read in self._reads)

    @property
    def lost(self) -> tuple[Peer, ...]:
        """See :class:`Read`."""
        return tuple(connection for read in self._reads for connection in read.lost)

    @property
    def is_settled(self) -> bool:
        """See :class:`Read`."""
        return all(read.is_settled for read in self._reads)

    def advance(self, now: float) -> None:
        """See :class:`Read`."""
        for read in self._reads:
            read.advance(now)
            self.error = self.error or read.error

    def give_up(self, error: KVFerryError) -> None:
        """See :class:`Read`."""
        self.error = self.error or error
        for read in self._reads:
            read.give_up(error)


def as_load_error(error: Exception, what: str) -> KVFerryError:
    """The error of a load; for a defect of ours, which is logged, one that says so."""
    if isinstance(error, KVFerryError):
        return error
    if isinstance(error, ValueError):
        return BlockTableError(str(error))  # a table, from a ticket, that does not fit the plan
    logger.error("%s", what, exc_info=error)
    return TransferError(f"{what}: {error!r}")
